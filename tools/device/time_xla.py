"""The xla backend beside dense attention of jax.nn, on a GPU: `PYTHONPATH=. python3 tools/device/time_xla.py`.

Not collected by pytest. Both passes together, milliseconds, medians of rounds that alternate between the two; the ratio is
jax.nn's time over ours (variants are held against its time beside the default). This is what a GPU without kernels of its own gets.

    --variants TEXT   tiles to try beside the default, by semicolons: queries,keys,log2 of a tile's scores,log2 of one step's scores,steps of a row
    --only TEXT       problems whose names contain one of these, by semicolons
"""

import argparse
import statistics
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import masks
from flexjax.backends.xla import larger_blocks, tile_sizes

ROUNDS = 5
LEAST = 0.02  # seconds of a measurement


class Case(typing.NamedTuple):
    """One problem: as many keys as queries, and the mask by name."""

    mask: str
    dtype: str
    batch: int
    tokens: int
    heads: int
    dim: int

    def __str__(self) -> str:
        """The case as text, by which --only chooses."""
        return f"{self.mask} {self.dtype} B{self.batch} T{self.tokens} H{self.heads} d{self.dim}"


CASES = (
    Case("causal", "bfloat16", 16, 512, 16, 128),
    Case("causal", "bfloat16", 1, 4096, 16, 128),
    Case("full", "bfloat16", 1, 4096, 16, 128),
    Case("full", "float32", 1, 4096, 16, 64),
    Case("causal", "bfloat16", 1, 16384, 16, 128),
    Case("causal", "float32", 1, 2048, 16, 64),
    Case("causal", "float32", 1, 4096, 16, 128),
    Case("causal", "float32", 1, 16384, 16, 64),
    Case("window", "bfloat16", 1, 16384, 16, 128),
    Case("window", "float32", 1, 16384, 16, 64),
    Case("documents", "bfloat16", 1, 16384, 16, 128),
    Case("documents", "float32", 1, 4096, 16, 64),
    Case("short documents", "bfloat16", 1, 16384, 16, 128),
    Case("causal", "bfloat16", 4, 4096, 16, 64),
)


def documents(tokens: int, count: int = 12) -> np.ndarray:
    """Document ids, int32 [tokens]: `count` documents of unequal lengths."""
    ends = np.sort(np.random.default_rng(0).integers(1, tokens, count - 1))
    return np.searchsorted(ends, np.arange(tokens), side="right").astype(np.int32)


def functions(case: Case) -> tuple[typing.Any, typing.Any]:
    """flexjax's attention of the case on xla, and dense attention of jax.nn: (q, k, v) -> out."""
    ids = jnp.asarray(documents(case.tokens, 64 if case.mask == "short documents" else 12))
    mask_mod = {
        "full": None,
        "causal": masks.causal,
        "window": masks.sliding_window(512),
        "documents": flexjax.and_masks(masks.causal, masks.document(ids)),
        "short documents": flexjax.and_masks(masks.causal, masks.document(ids)),
    }[case.mask]
    dense: dict[str, typing.Any] = {"is_causal": case.mask != "full", "implementation": "xla"}
    if case.mask == "window":
        dense["local_window_size"] = (511, 0)
    elif "documents" in case.mask:
        dense["mask"] = (ids[:, None] == ids[None, :])[None, None]
    ours = lambda q, k, v: flexjax.flex_attention(q, k, v, mask_mod=mask_mod, implementation="xla")
    return ours, lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **dense)


def both_passes(attend: typing.Any, arrays: tuple[jax.Array, ...]) -> typing.Any:
    """The compiled forward and backward pass: (q, k, v, d_out) -> out and gradients."""

    def step(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> typing.Any:
        """(out, gradients of q, k and v)."""
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(d_out)

    return jax.jit(step).lower(*arrays).compile()


def seconds(step: typing.Any, arrays: tuple[jax.Array, ...]) -> float:
    """Wall-clock seconds of one call: the mean of as many as take LEAST seconds, each waited for."""
    count, begin = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - begin < LEAST:
        jax.block_until_ready(step(*arrays))  # one at a time: dense attention of 16384 tokens takes 40 GB
        count += 1
    return (time.perf_counter() - begin) / count


def use(variant: str) -> None:
    """Sets the sizes of tiles of the xla backend for the rest of the process, and clears jax's caches.

    variant   one item of --variants; "" keeps the sizes
    """
    if not variant:
        return
    queries, keys, tile, one, steps = map(int, variant.split(","))
    larger_blocks.LARGE = larger_blocks.MEDIUM = queries, keys
    tile_sizes.ACCELERATOR_TILE = 1 << tile
    tile_sizes.ONE_STEP = larger_blocks.ONE_STEP = 1 << one
    tile_sizes.ROW_STEPS = steps
    jax.clear_caches()


def main() -> None:
    """Times every chosen case with each variant and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    cases = [case for case in CASES if any(part in str(case) for part in args.only.split(";"))]
    known: dict[Case, float] = {}
    for variant in ["", *filter(None, args.variants.split(";"))]:
        use(variant)
        for case in cases:
            shape = (case.batch, case.tokens, case.heads, case.dim)
            draws = jax.random.split(jax.random.key(0), 4)
            arrays = tuple(jax.random.normal(key, shape, jnp.dtype(case.dtype)) for key in draws)
            attends = functions(case)[: 1 if case in known else 2]
            steps = [both_passes(attend, arrays) for attend in attends]
            samples = [[np.asarray(x[:, ::97], np.float32) for x in jax.tree.leaves(step(*arrays))] for step in steps]
            times = [[seconds(step, arrays) for step in steps] for _ in range(ROUNDS)]
            ours, *dense = (1e3 * statistics.median(t) for t in zip(*times, strict=True))
            known[case] = dense[0] if dense else known[case]
            text = ", MiB " + " and ".join(f"{step.memory_analysis().temp_size_in_bytes / 2**20:.0f}" for step in steps)
            if dense:
                worst = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(*samples, strict=True))
                text = f", differs {worst:.1e}{text}"
            print(
                f"{variant or 'default'}: {case}: {ours:.3f} ms, jax.nn {known[case]:.3f} ms, ratio {known[case] / ours:.2f}{text}",
                flush=True,
            )


if __name__ == "__main__":
    main()
