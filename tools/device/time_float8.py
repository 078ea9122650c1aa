"""Times the forward pass on float8 beside that on bfloat16 on a Hopper GPU: `PYTHONPATH=. python3 tools/device/time_float8.py`.

Not collected by pytest. A line for each case: milliseconds of the attention kernels in bfloat16 and in float8 (CUPTI, medians of rounds in
turns), their ratio; the same after sustained work, by the wall clock and with everything that XLA runs around the kernel (each program alone
for half a second, through the list and backwards); and how far out of float8 is from that of the same numbers in bfloat16, relative to its
norm. The exit status is 1 where that is above MOST_APART.

    --only TEXT      cases whose names contain one of these, by semicolons
    --tokens N       8192
    --each N         seconds for which a program runs on its own (0.5)
"""

import argparse
import random
import statistics
import sys
import time
import typing
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import masks

MOST_APART = 0.04
"""Weights are rounded by up to 2^-4."""
ROUNDS, QUEUED = 7, 20
TOKENS = 16384
"""Tokens of all batch entries together."""
CAUSAL = {"mask_mod": masks.causal}
Words = dict[str, typing.Any]


def cases(tokens: int) -> dict[str, tuple[int, int, int, Words, str]]:
    """Name -> (query heads, key heads, head dim, keywords of the call, whose scales: "", "head", or "block" for queries and keys)."""
    rng = np.random.default_rng(1)
    ids = jnp.asarray(np.sort(rng.integers(0, 6, tokens)), jnp.int32)
    table = jnp.asarray(rng.standard_normal((16, 2 * tokens)), jnp.float32)
    window = flexjax.and_masks(masks.causal, masks.sliding_window(1025))
    return {
        "full d128": (16, 16, 128, {}, ""),
        "causal d128": (16, 16, 128, CAUSAL, ""),
        "causal d128, 4 key heads": (16, 4, 128, CAUSAL, ""),
        "causal d128, scales by head": (16, 16, 128, CAUSAL, "head"),
        "causal d128, scales of q and k by block": (16, 16, 128, CAUSAL, "block"),
        "documents by ids d128": (16, 16, 128, {"mask_mod": flexjax.and_masks(masks.causal, masks.document(ids))}, ""),
        "window d128": (16, 16, 128, {"mask_mod": window}, ""),
        "soft cap d128": (16, 16, 128, {"score_mod": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30), **CAUSAL}, ""),
        "table d128": (
            16,
            16,
            128,
            {"score_mod": lambda s, b, h, q, k: s + table[h, q - k + tokens - 1], **CAUSAL},
            "",
        ),
        "full d256": (8, 8, 256, {}, ""),
        "causal d256": (8, 8, 256, CAUSAL, ""),
    }


class Program(typing.NamedTuple):
    """A compiled call and its arrays."""

    run: typing.Any
    arrays: tuple[jax.Array, ...]


def programs_of(case: tuple[int, int, int, Words, str], tokens: int, pool: ThreadPoolExecutor) -> dict[str, typing.Any]:
    """By dtype, futures of Program; the arrays in bfloat16 hold the numbers of those in float8, which no scale changes here."""
    heads, kv_heads, dim, words, by = case
    batch, rng = max(1, TOKENS // tokens), np.random.default_rng(0)
    draw = lambda n: jnp.asarray(rng.standard_normal((batch, tokens, n, dim)), jnp.float32).astype(jnp.float8_e4m3fn)
    narrow = draw(heads), draw(kv_heads), draw(kv_heads)
    shape = lambda n: (batch, tokens // 128, n) if by == "block" else (batch, n)
    shapes = shape(heads), shape(kv_heads), (batch, kv_heads)
    scaled = lambda x, of: flexjax.Quantized(x, jnp.ones(of)) if by else x
    made: dict[str, typing.Any] = {}
    for name, arrays, shapes_of in (
        ("bfloat16", tuple(x.astype(jnp.bfloat16) for x in narrow), None),
        ("float8", narrow, shapes),
    ):
        call = lambda *main, shapes_of=shapes_of: flexjax.flex_attention(
            *(main if shapes_of is None else map(scaled, main, shapes_of)), implementation="mosaic_gpu", **words
        )
        lowered = jax.jit(call).lower(*arrays)
        made[name] = pool.submit(lambda lowered=lowered, arrays=arrays: Program(lowered.compile(), arrays))
    return made


def kernel_times(programs: dict[str, Program]) -> dict[str, float]:
    """Milliseconds of the attention kernel of each program, the median of ROUNDS in an order drawn anew."""
    from jax.experimental.mosaic.gpu import profiler

    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name in random.sample(list(programs), len(programs)):
            _, kernels = profiler.measure(programs[name].run, aggregate=False)(*programs[name].arrays)
            found[name].append(sum(ms for kernel, ms in kernels or () if "flexjax" in kernel))
    return {name: statistics.median(times) for name, times in found.items()}


def sustained_times(programs: dict[str, Program], seconds: float) -> dict[str, float]:
    """Milliseconds of a call of each program by the wall clock, each alone for so long, twice."""
    found: dict[str, list[float]] = {name: [] for name in programs}
    for name in (*programs, *reversed(programs)):
        run, arrays = programs[name]
        start, calls, out = time.perf_counter(), 0, None
        while time.perf_counter() - start < seconds:
            for _ in range(QUEUED):
                out = run(*arrays)
            jax.block_until_ready(out)
            calls += QUEUED
        found[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: statistics.mean(times) for name, times in found.items()}


def main() -> int:
    """Prints a line for each case; returns the exit status, 1 where results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--each", type=float, default=0.5)
    args = parser.parse_args()
    wanted = {n: c for n, c in cases(args.tokens).items() if any(text in n for text in args.only.split(";"))}
    pool, wrong = ThreadPoolExecutor(12), False
    made = {name: programs_of(case, args.tokens, pool) for name, case in wanted.items()}
    print(
        f"{jax.devices()[0].device_kind}, {args.tokens} tokens, {TOKENS} in all; ms and ratios: kernel | sustained, whole call"
    )
    for name, futures in made.items():
        programs = {dtype: future.result() for dtype, future in futures.items()}
        wide, narrow = (np.asarray(programs[d].run(*programs[d].arrays), np.float32) for d in ("bfloat16", "float8"))
        apart = float(np.linalg.norm(narrow - wide) / np.linalg.norm(wide))
        wrong |= not apart <= MOST_APART
        kernel, whole = kernel_times(programs), sustained_times(programs, args.each)
        said = " | ".join(
            f"{t['bfloat16']:.3f}, {t['float8']:.3f}: {t['bfloat16'] / t['float8']:.2f}" for t in (kernel, whole)
        )
        print(f"{name:30s} {said}   apart {apart:.1e}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
