"""Times and checks float32 attention on a GPU beside dense attention of XLA: `PYTHONPATH=. python3 tools/device/time_float32.py`.

Not collected by pytest. Both run at the default precision, alternately in one process: flex_attention on the kernels, and
jax.nn.dot_product_attention(implementation="xla"), with the bias as an array where the call has a score_mod (dense attention in plain
jnp for sinks, which jax.nn lacks). Errors are relative in norm, against dense attention at precision "highest": out alone after the
forward pass; after both passes the largest over out and all gradients, those of slopes, tables and sinks included. About 90 s on an
H200, of which most is compilation; the table comes last.

    --cases TEXT      those whose names contain one of these, by semicolons
    --seconds N       begin no case after so many seconds (85)
    --tokens N        in place of 4096
    --interpret       in the simulator on a CPU, without times
"""

import argparse
import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import masks
from tools.device import timed_cases

Array = jax.Array
HEADS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: causal attention over `tokens` with HEADS heads.

    window   keys that a query sees before its own; None: all
    kind     "plain", "slopes" (a learned slope for each head), "table" (a learned bias for each head and distance) or "sinks"
    """

    name: str
    dim: int
    tokens: int
    window: int | None = None
    kind: str = "plain"

    def learned(self) -> tuple[Array, ...]:
        """The arrays that the call learns beside q, k and v."""
        if self.kind == "slopes":
            return (2.0 ** -jnp.linspace(1.0, 8.0, HEADS),)
        shapes = {"table": (HEADS, self.tokens), "sinks": (HEADS,)}
        if self.kind not in shapes:
            return ()
        return (jax.random.normal(jax.random.key(9), shapes[self.kind]),)

    def ours(self, interpret: bool) -> Callable[..., Array]:
        """The call of flex_attention, as a function of q, k, v and the learned arrays."""
        mask = masks.causal if self.window is None else masks.sliding_window(self.window + 1)
        options = flexjax.KernelOptions(interpret=interpret)

        def attend(q: Array, k: Array, v: Array, *learned: Array) -> Array:
            """The result of flex_attention with the mod or the sinks of the case."""
            more: dict[str, typing.Any] = {}
            if self.kind == "slopes":
                more["score_mod"] = lambda s, b, h, i, j: s + learned[0][h] * (j - i)
            elif self.kind == "table":
                more["score_mod"] = lambda s, b, h, i, j: s + learned[0][h, jnp.maximum(i - j, 0)]
            elif self.kind == "sinks":
                more["sinks"] = learned[0]
            return flexjax.flex_attention(
                q, k, v, mask_mod=mask, implementation="mosaic_gpu", kernel_options=options, **more
            )

        return attend

    def bias(self, learned: tuple[Array, ...]) -> Array | None:
        """The bias of the scores as an array, [1, N, T, T]; None without one."""
        at = jnp.arange(self.tokens)
        distance = at[:, None] - at[None, :]
        if self.kind == "slopes":
            return (learned[0][:, None, None] * -distance)[None]
        if self.kind == "table":
            return learned[0][:, jnp.maximum(distance, 0)][None]
        return None

    def by_jax_nn(self, q: Array, k: Array, v: Array, *learned: Array) -> Array:
        """The result of the same call by jax.nn, or by `dense` for sinks."""
        if self.kind == "sinks":
            return self.dense(None, q, k, v, *learned)
        window = None if self.window is None else (self.window, 0)
        return jax.nn.dot_product_attention(
            q, k, v, self.bias(learned), is_causal=True, local_window_size=window, implementation="xla"
        )

    def dense(self, precision: str | None, q: Array, k: Array, v: Array, *learned: Array) -> Array:
        """The result of the same call as dense attention in plain jnp.

        precision   of the products; None: jax's default
        """
        s = jnp.einsum("btnd,bsnd->bnts", q, k, precision=precision) / self.dim**0.5
        bias = self.bias(learned)
        s = s if bias is None else s + bias
        at = jnp.arange(self.tokens)
        distance = at[:, None] - at[None, :]
        on = (distance >= 0) & (distance <= (self.tokens if self.window is None else self.window))
        s = jnp.where(on, s, -jnp.inf)
        if self.kind == "sinks":
            column = jnp.broadcast_to(learned[0][None, :, None, None], (*s.shape[:3], 1))
            s = jnp.concatenate([s, column], axis=-1)
        p = jax.nn.softmax(s, axis=-1)[..., : self.tokens]
        return jnp.einsum("bnts,bsnd->btnd", p, v, precision=precision)


def cases(tokens: int) -> list[Case]:
    """Every call, those of the goal first."""
    return [
        Case("causal d64", 64, tokens),
        Case("causal d128", 128, tokens),
        Case("ALiBi d128", 128, tokens, kind="slopes"),
        Case("sinks d64", 64, tokens, kind="sinks"),
        Case("odd length d128", 128, tokens - 95),
        Case("window d128", 128, tokens, window=min(512, tokens // 4)),
        Case("learned table d64", 64, tokens, kind="table"),
    ]


def error(got: typing.Any, want: typing.Any) -> float:
    """The largest relative error, in norm, of these arrays; inf where one is not finite."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        worst = max(worst, float(np.linalg.norm(x - y) / np.linalg.norm(y)) if np.isfinite(x).all() else np.inf)
    return worst


def measure(case: Case, interpret: bool) -> list[str]:
    """A line for each pass: milliseconds of both, the ratio, and the errors of both."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, case.tokens, HEADS, case.dim)
    arrays = (*(jax.random.normal(key, shape) for key in keys[:3]), *case.learned())
    cotangent = jax.random.normal(keys[3], shape)

    def both(attend: Callable[..., Array]) -> Callable[..., typing.Any]:
        """The function of a cotangent of out and the arrays that computes out and the gradients of all arrays."""

        def run(cotangent: Array, *arrays: Array) -> typing.Any:
            """(out, gradients of the arrays)."""
            out, pull = jax.vjp(attend, *arrays)
            return out, pull(cotangent)

        return run

    exact = jax.jit(both(lambda *arrays: case.dense("highest", *arrays)))(cotangent, *arrays)
    exact = jax.tree.map(np.asarray, exact)
    ours, theirs = case.ours(interpret), case.by_jax_nn
    lines = []
    for name, pair, given, want in (
        ("forward", (ours, theirs), arrays, exact[0]),
        ("both", (both(ours), both(theirs)), (cotangent, *arrays), exact),
    ):
        calls = pair if interpret else [jax.jit(f) for f in pair]  # the simulator takes eager calls alone
        errors = [error(call(*given), want) for call in calls]
        run = lambda call, given: lambda: call(*given)
        times = [0.0, 0.0] if interpret else timed_cases.median_seconds([run(call, given) for call in calls])
        lines.append(
            f"{case.name:<18} {name:<8} {times[0] * 1e3:8.3f} ms  dense {times[1] * 1e3:8.3f} ms  "
            f"{times[1] / max(times[0], 1e-9):5.2f} times  error {errors[0]:.1e}  dense {errors[1]:.1e}"
        )
    return lines


def main() -> None:
    """Runs the cases that are asked for and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="")
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--interpret", action="store_true")
    given = parser.parse_args()
    named = lambda case: not given.cases or any(part in case.name for part in given.cases.split(";"))
    chosen = [case for case in cases(given.tokens) if named(case)]
    lines, _ = timed_cases.lines_of(chosen, lambda case: measure(case, given.interpret), given.seconds)
    device = jax.devices()[0].device_kind
    print(f"\nfloat32 at the default precision, {HEADS} heads, {given.tokens} tokens, {device}, jax {jax.__version__}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
