"""Times dilated windows and neighbourhoods on a canvas on a GPU: `PYTHONPATH=. python3 tools/device/time_reordered.py`.

Not collected by pytest. Each case runs as the library chooses and, where that is split by residues (rewrites/residues.py), with a mask that
says the same in words that are not recognised, so that the call stays whole. A line has the milliseconds of the kernels of the forward
pass and of both passes, copies included (CUPTI), TFLOP/s over visible entries (4 D a forward pass, 3.5 times that both), the largest
error of sampled rows of out against float64 over the largest value, and the largest difference of the gradients from those of the whole
call. About 15 s a case on an H200, of which most is compilation.

    --cases TEXT      those whose names contain one of these, by commas
    --seconds S       no case begins after so many (240)
    --any-order       KernelOptions(deterministic=False)
"""

import argparse
import dataclasses
import sys
import typing
from collections.abc import Callable

import numpy as np

MaskFunction = Callable[[typing.Any, typing.Any, typing.Any, typing.Any], typing.Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call. kind is "dilated", with (keys, dilation), or "natten", with (side of the canvas, side of the neighbourhood)."""

    name: str
    kind: str
    of: tuple[int, int]
    length: int
    batch: int = 2
    heads: int = 16
    kv_heads: int = 16
    dim: int = 128
    layout: str = "BTNH"

    def mask(self, whole: bool) -> MaskFunction:
        """The mask; `whole`: in words for which no call is split."""
        from flexjax import masks

        if self.kind == "natten":
            side, near = self.of
            return masks.natten_2d((side, side), (near, near))
        keys, dilation = self.of
        if not whole:
            return masks.dilated_window(keys, dilation)
        within = lambda d: (d >= 0) & (d < keys * dilation)
        return lambda b, h, q, k: within(q - k) & ((q - k + dilation) % dilation == 0)

    def visible(self) -> int:
        """Visible entries of a head."""
        if self.kind == "natten":
            return self.length * self.of[1] ** 2
        keys, dilation = self.of
        return int(np.minimum(np.arange(self.length) // dilation + 1, keys).sum())


CASES = (
    Case("dilated 4 of 2048 d128", "dilated", (512, 4), 16384),
    Case("natten 13 of 64 d128", "natten", (64, 13), 4096, batch=8),
    Case("dilated 4 of 2048 d64", "dilated", (512, 4), 16384, heads=32, kv_heads=32, dim=64),
    Case("dilated 4 of 2048 grouped d128", "dilated", (512, 4), 16384, heads=32, kv_heads=8),
    Case("dilated 4 of 2048 BNTH d128", "dilated", (512, 4), 16384, layout="BNTH"),
    Case("dilated 4 of 2048 of 16383 d128", "dilated", (512, 4), 16383),
    Case("dilated 2 of 2048 d128", "dilated", (1024, 2), 16384),
    Case("dilated 64 of all of 8192 d128", "dilated", (128, 64), 8192),
    Case("natten 13 of 64 d64", "natten", (64, 13), 4096, batch=8, heads=32, kv_heads=32, dim=64),
)


def main() -> int:
    """Prints the lines; returns the exit status, 1 where a result is wrong or a case raised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--any-order", action="store_true")
    args = parser.parse_args()

    import jax
    import jax.numpy as jnp

    import flexjax
    from bench.kernel_times import device_time
    from tools.device.timed_cases import lines_of

    def rows_error(case: Case, arrays: dict[str, typing.Any], out: typing.Any) -> float:
        """The largest error of out at sampled rows of the first batch entry and the last head, over the largest value, by numpy."""
        rows = np.unique(np.linspace(0, case.length - 1, 24).astype(int))
        take = lambda x, h: np.asarray(x[0, :, h] if case.layout == "BTNH" else x[0, h], np.float64)
        q, k, v, got = (take(x, -1) for x in (arrays["q"], arrays["k"], arrays["v"], out))
        at = np.asarray(case.mask(False)(0, 0, jnp.asarray(rows)[:, None], jnp.arange(case.length)[None]))
        s = np.where(at, q[rows] @ k.T / np.sqrt(case.dim), -np.inf)
        p = np.exp(s - s.max(1, keepdims=True))
        want = p / p.sum(1, keepdims=True) @ v
        return float(np.abs(got[rows] - want).max() / np.abs(want).max())

    def measure(case: Case) -> list[str]:
        """The lines of a case."""
        keys = jax.random.split(jax.random.key(0), 4)
        shape = lambda n: (
            (case.batch, case.length, n, case.dim) if case.layout == "BTNH" else (case.batch, n, case.length, case.dim)
        )
        heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads, "d": case.heads}
        arrays: dict[str, typing.Any] = {
            name: jax.random.normal(key, shape(n), jnp.bfloat16)
            for key, (name, n) in zip(keys, heads.items(), strict=True)
        }
        options = flexjax.KernelOptions(deterministic=not args.any_order)
        flops = 4.0 * case.batch * case.heads * case.dim * case.visible()
        lines, grads = [], []
        for whole in (False, True):
            how: dict[str, typing.Any] = dict(mask_mod=case.mask(whole), layout=case.layout, kernel_options=options)
            text = flexjax.explain(*(arrays[n] for n in "qkv"), **how)
            split = "split by residues" in text
            if whole and case.kind == "natten":
                break
            attend = lambda q, k, v, how=how: flexjax.flex_attention(q, k, v, implementation="mosaic_gpu", **how)

            def both(x: dict[str, typing.Any], attend: typing.Any = attend) -> typing.Any:
                """out and the gradients."""
                out, pull = jax.vjp(attend, x["q"], x["k"], x["v"])
                return out, pull(x["d"])

            forward = jax.jit(lambda x, attend=attend: attend(x["q"], x["k"], x["v"]))
            step = jax.jit(both)
            first, second = device_time(forward, arrays)[0], device_time(step, arrays)[0]
            out, gradients = step(arrays)
            error = rows_error(case, arrays, out)
            grads.append([np.asarray(g, np.float32) for g in gradients])
            apart = max(
                (float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(*grads, strict=True)), default=0.0
            ) if whole else 0.0  # fmt: skip
            words = "split" if split else "whole"
            lines.append(
                f"{case.name:<34} {words}  forward {1e3 * first:8.3f} ms {1e-12 * flops / first:6.0f}   both {1e3 * second:8.3f} ms "
                f"{3.5e-12 * flops / second:6.0f} TFLOP/s   error {error:.1e}  gradients apart {apart:.1e}"
            )
            if error > 2e-2 or apart > 2e-2:
                raise ValueError("wrong results: " + lines[-1])
        print("\n".join(lines[:-1]), flush=True)
        return lines

    chosen = [c for c in CASES if any(part in c.name for part in args.cases.split(","))]
    lines, failed = lines_of(chosen, measure, args.seconds)
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
