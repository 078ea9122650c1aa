"""What `tolerance=` skips and saves: visited shares of the causal area by head, and times of both passes on this machine.

python -m lab.tolerance_table [LENGTH ...]        default 2048 4096; prints a table, a line a case and length
"""

import sys
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import masks, mods
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.types import ScoreMod

HEADS, DIM, TOLERANCE = 8, 64, 2.0**-24


def cases(length: int) -> dict[str, ScoreMod]:
    """ALiBi, forget gates that lose 0.05 to 2 nats a token by head, a table that falls by 0.05 a token, documents."""
    rates = np.geomspace(0.05, 2.0, HEADS)[:, None]
    gates = jnp.asarray(-np.cumsum(np.random.default_rng(0).exponential(rates, (HEADS, length)), 1), jnp.float32)
    table = jnp.asarray(-0.05 * np.abs(np.arange(2 * length) - length), jnp.float32)
    same = jnp.arange(length) // 512
    return {
        "alibi": mods.alibi(HEADS),
        "forget gates": lambda s, b, h, q, k: s + gates[h, q] - gates[h, k],
        "table": lambda s, b, h, q, k: s + table[q - k + length],
        "where(same, s, -1e9)": lambda s, b, h, q, k: jnp.where(same[q] == same[k], s, -1e9),
    }


def seconds(mod: ScoreMod, arrays: typing.Sequence[jax.Array], tolerance: float | None) -> float:
    """The least time of three of both passes, compiled."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flexjax.flex_attention(q, k, v, score_mod=mod, mask_mod=masks.causal, tolerance=tolerance).sum()

    step, times = jax.jit(jax.grad(loss, (0, 1, 2))), []
    jax.block_until_ready(step(*arrays))
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(step(*arrays))
        times.append(time.perf_counter() - start)
    return min(times)


def main(lengths: typing.Sequence[int]) -> None:
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {HEADS} heads of {DIM}, float32, {TOLERANCE:.2g}")
    print("| case | tokens | visited | without, ms | with, ms | ratio |\n|---|---|---|---|---|---|")
    for length in lengths:
        arrays = tuple(jax.random.normal(jax.random.key(0), (3, 1, length, HEADS, DIM)))
        whole = flexjax.create_block_mask(masks.causal, None, None, length, length).to_dense().sum() * HEADS
        for name, mod in cases(length).items():
            call = prepare(Arguments(*arrays, score_mod=mod, mask_mod=masks.causal, tolerance=TOLERANCE))
            made = None if call.skipped is None else call.skipped.mask
            share = 1.0 if made is None else float(made.to_dense().sum() / whole)
            plain, skipping = (1e3 * seconds(mod, arrays, t) for t in (None, TOLERANCE))
            print(f"| {name} | {length} | {share:.3f} | {plain:.0f} | {skipping:.0f} | {plain / skipping:.2f} |")


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or [2048, 4096])
