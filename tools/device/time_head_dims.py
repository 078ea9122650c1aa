"""Checks and times attention with head dims above 256 on a GPU beside dense attention of XLA: `PYTHONPATH=. python3 tools/device/time_head_dims.py`.

Not collected by pytest. First numerics on small calls (odd lengths, grouped heads, both layouts, head dims that are no powers of two)
against numpy in float64 on new inputs: out and all gradients, each time twice, because a race rarely shows in one run. Then times in
bfloat16, causal: flex_attention on the kernels and jax.nn.dot_product_attention(implementation="xla"), in turns in one process. TFLOP/s
count visited positions, 2.5 times as many operations backward. The table comes last; the exit status is 1 where a result is wrong.

    --passes TEXT     "forward" alone, or "both" (default)
    --seconds N       begin no case after so many seconds (100)
    --interpret       the checks in the simulator on a CPU, without times
"""

import argparse
import dataclasses
import functools
import sys
import time
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import masks
from tools.device import timed_cases

Array = jax.Array
WORST = 0.012
"""The largest relative error, in norm, of a bfloat16 result."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Causal attention of `heads` query heads over `kv_heads` key heads, in bfloat16, with head dims of keys and of values."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    layout: typing.Literal["BTNH", "BNTH"] = "BTNH"
    batch: int = 1

    @property
    def name(self) -> str:
        """How the tables call it."""
        return f"d{self.dim}/{self.value_dim} T={self.tokens} heads {self.heads}/{self.kv_heads} {self.layout}"

    def arrays(self, seed: int) -> list[Array]:
        """q, k, v and the cotangent of out."""
        shapes = [
            (self.heads, self.dim),
            (self.kv_heads, self.dim),
            (self.kv_heads, self.value_dim),
            (self.heads, self.value_dim),
        ]
        found = []
        for key, (heads, dim) in zip(jax.random.split(jax.random.key(seed), 4), shapes, strict=True):
            shape = (
                (self.batch, self.tokens, heads, dim)
                if self.layout == "BTNH"
                else (self.batch, heads, self.tokens, dim)
            )
            found.append(jax.random.normal(key, shape, jnp.bfloat16))
        return found

    def ours(self, interpret: bool) -> Callable[..., Array]:
        """flex_attention as a function of q, k and v."""
        options = flexjax.KernelOptions(interpret=interpret)
        return functools.partial(
            flexjax.flex_attention,
            mask_mod=masks.causal,
            implementation="mosaic_gpu",
            kernel_options=options,
            layout=self.layout,
        )

    def theirs(self, q: Array, k: Array, v: Array) -> Array:
        """jax.nn's dense attention, "BTNH" alone; it wants equal head dims, so values are padded."""
        more = self.dim - self.value_dim
        out = jax.nn.dot_product_attention(
            q, k, jnp.pad(v, [(0, 0)] * 3 + [(0, more)]) if more else v, is_causal=True, implementation="xla"
        )
        return out[..., : self.value_dim]

    def exact(self, arrays: list[Array]) -> list[np.ndarray]:
        """out and the gradients of q, k and v in float64."""
        q, k, v, d_out = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in arrays)
        swap = (lambda x: x.swapaxes(1, 2)) if self.layout == "BTNH" else (lambda x: x)
        group = self.heads // self.kv_heads
        q, k, v, d_out = (swap(x) for x in (q, k, v, d_out))
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        scale = self.dim**-0.5
        s = np.einsum("bntd,bnsd->bnts", q, k) * scale
        s = np.where(np.tril(np.ones((self.tokens, self.tokens), bool)), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        out = np.einsum("bnts,bnsd->bntd", p, v)
        dp = np.einsum("bntd,bnsd->bnts", d_out, v)
        ds = p * (dp - (out * d_out).sum(-1, keepdims=True)) * scale
        summed = lambda x: x.reshape(x.shape[0], self.kv_heads, group, *x.shape[2:]).sum(2)
        gradients = (
            np.einsum("bnts,bnsd->bntd", ds, k),
            summed(np.einsum("bnts,bntd->bnsd", ds, q)),
            summed(np.einsum("bnts,bntd->bnsd", p, d_out)),
        )
        return [swap(x) for x in (out, *gradients)]

    def operations(self) -> float:
        """Operations of the forward pass over visited positions."""
        return self.batch * self.heads * self.tokens * (self.tokens + 1) * (self.dim + self.value_dim)


CHECKS = (
    Call(515, 2, 1, 512, 512),
    Call(300, 2, 2, 576, 512, "BNTH"),
    Call(130, 4, 2, 320, 264),
    Call(200, 1, 1, 264, 64),
)
TIMED = (
    Call(4096, 16, 16, 512, 512),
    Call(8192, 8, 8, 512, 512),
    Call(4096, 16, 2, 512, 512),
    Call(4096, 16, 1, 576, 512),
)


def both(attend: Callable[..., Array]) -> Callable[..., typing.Any]:
    """The function of q, k, v and the cotangent of out that computes out and the gradients."""

    def run(q: Array, k: Array, v: Array, d_out: Array) -> typing.Any:
        out, pull = jax.vjp(attend, q, k, v)
        return (out, *pull(d_out))

    return run


def error(got: typing.Any, want: typing.Any) -> float:
    """The relative error in norm, inf where something is not finite."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want)) if np.isfinite(got).all() else np.inf


def check(call: Call, backward: bool, interpret: bool) -> str:
    """A line with the errors of one small call; raises where one is above WORST, or where two runs differ in a bit."""
    arrays = call.arrays(seed=int(time.time()) % 1000)
    given = arrays if backward else arrays[:3]
    function = both(call.ours(interpret)) if backward else call.ours(interpret)
    function = function if interpret else jax.jit(function)
    runs = [jax.tree.leaves(jax.tree.map(np.asarray, function(*given))) for _ in range(1 if interpret else 3)]
    errors = [error(x, y) for x, y in zip(runs[0], call.exact(arrays), strict=False)]
    line = f"{call.name:<36} errors of out, dq, dk, dv: " + " ".join(f"{e:.1e}" for e in errors)
    if max(errors) > WORST:
        raise AssertionError(line)
    if any(not np.array_equal(x, y) for other in runs[1:] for x, y in zip(runs[0], other, strict=True)):
        raise AssertionError(f"{call.name}: two runs differ")
    return line


def measure(call: Call, backward: bool) -> list[str]:
    """A line for each pass: milliseconds and TFLOP/s of both, and the ratio; raises where the results differ by more than WORST."""
    arrays = call.arrays(seed=1)
    lines, spent = [], [0.0, 0.0]
    for name in ("forward", "backward") if backward else ("forward",):
        pair = (call.ours(False), call.theirs)
        given = arrays[:3]
        if name == "backward":
            pair, given = (both(pair[0]), both(pair[1])), arrays
        calls = [jax.jit(f) for f in pair]
        found = [jax.tree.leaves(f(*given)) for f in calls]
        errors = [error(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(*found, strict=True)]
        if max(errors) > 2 * WORST:
            raise AssertionError(f"{call.name} {name}: differs from dense attention by {errors}")
        run = lambda function, given: lambda: function(*given)
        times = timed_cases.median_seconds([run(function, given) for function in calls])
        if name == "backward":  # both passes less the forward pass
            times = [total - before for total, before in zip(times, spent, strict=True)]
        spent = times
        rates = [call.operations() * (2.5 if name == "backward" else 1) / t / 1e12 for t in times]
        lines.append(
            f"{call.name:<36} {name:<8} {times[0] * 1e3:7.3f} ms {rates[0]:5.0f} TFLOP/s   dense {times[1] * 1e3:7.3f} ms "
            f"{rates[1]:5.0f} TFLOP/s   {times[1] / times[0]:5.2f} times"
        )
    return lines


def main() -> None:
    """Runs the checks and the timed calls, and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--passes", choices=("forward", "both"), default="both")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--interpret", action="store_true")
    given = parser.parse_args()
    backward = given.passes == "both"

    def run(call: Call) -> list[str]:
        """The lines of a check or of a timed call."""
        also = backward and call.dim <= 512  # wider heads have no backward kernels
        return [check(call, also, given.interpret)] if call in CHECKS else measure(call, also)

    lines, wrong = timed_cases.lines_of(
        (*CHECKS, *(() if given.interpret else TIMED)),
        run,
        given.seconds,
        needed=lambda call: call in CHECKS,
        watched=not given.interpret,
    )
    print(f"\nhead dims above 256, bfloat16, causal, {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("\n".join(lines))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
