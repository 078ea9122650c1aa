"""Gradients of captured arrays on a GPU: `PYTHONPATH=. python3 tools/device/check_capture_gradients.py`. 90 seconds
on an H200.

Not collected by pytest. It prints three tables: what a learned table of 2-D relative positions costs beside a fixed
one, the gradient of each kind of load against the xla backend in float32 on inputs that are random each time, and
XLA's temporary memory.
"""

import secrets
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexjax import flex_attention, masks

WIDTHS = (16, 32, 45, 48, 63, 64)
MOST = 2.5  # times the cost of a fixed table
TOLERANCE = 1e-2  # of the norm of a gradient: dO is float32 on xla, bfloat16 here
REPEATS = 10


def relative_2d(width: int) -> Callable[[Any], Callable[..., Any]]:
    """A table [heads, 2 width - 1, 2 width - 1] -> the score_mod that adds its element at the difference of two
    positions of a grid.

    width   of the grid: token i is at row i // width, column i % width
    """
    w = width
    return lambda table: lambda s, b, h, i, j: s + table[h, i // w - j // w + w - 1, i % w - j % w + w - 1]


def gathered(table: Any) -> Callable[..., Any]:
    """A score_mod that adds an element of `table`, read through an array of indices by query and key, as Swin
    transformers have it.
    """
    tokens = np.arange(400)
    places = (tokens[:, None] // 20 - tokens // 20 + 19) * 39 + tokens[:, None] % 20 - tokens % 20 + 19
    index = jnp.asarray(places)
    return lambda s, b, h, i, j: s + table[index[i, j], h]


KINDS: dict[str, tuple[tuple[int, ...], int, Callable[[Any], Callable[..., Any]], Any]] = {
    # shape of the array, tokens, mod, mask
    "scalar": ((2,), 700, lambda c: lambda s, b, h, i, j: s + c[h] * (j - i) / 64, masks.causal),
    "scalar of all heads": ((), 700, lambda c: lambda s, b, h, i, j: s * c, None),
    "row": ((2, 700), 700, lambda c: lambda s, b, h, i, j: s * c[h, i], masks.causal),
    "column, shared": ((700,), 700, lambda c: lambda s, b, h, i, j: s + c[j], masks.sliding_window(200)),
    "diagonal": ((2, 1399), 700, lambda c: lambda s, b, h, i, j: s + c[h, i - j + 699], masks.causal),
    "diagonal, clipped": ((2, 41), 700, lambda c: lambda s, b, h, i, j: s + c[h, jnp.clip(i - j, -20, 20) + 20], None),
    "matrix of all heads": ((700, 700), 700, lambda c: lambda s, b, h, i, j: s + c[i, j], masks.causal),
    "2-D table, tiles repeat": ((2, 63, 63), 1024, relative_2d(32), None),
    "2-D table": ((2, 33, 33), 289, relative_2d(17), None),
    "2-D table of all heads": ((33, 33), 289, lambda c: lambda *a: relative_2d(17)(c[None])(*a[:2], 0, *a[3:]), None),
    "array of places": ((39 * 39, 2), 400, gathered, None),
    "gain by a gather": ((50,), 400, lambda c: lambda s, b, h, i, j: s * c[(i * 7 + j * 3) % 50], masks.causal),
}


def loss(mod: Any, mask: Any, backend: str | None, q: Any, k: Any, v: Any, d_out: Any, array: Any) -> jax.Array:
    """The sum of attention's result times `d_out`, a float32 scalar.

    mod       captured array -> score_mod
    mask      mask_mod or None
    backend   the implementation
    """
    out = flex_attention(q, k, v, score_mod=mod(array), mask_mod=mask, implementation=backend)
    return jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32))


def milliseconds(run: Callable[[], Any]) -> float:
    """The median of REPEATS calls of `run` in milliseconds of wall-clock time, after one that is not timed."""
    jax.block_until_ready(run())
    took = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        took.append(1e3 * (time.perf_counter() - start))
    return statistics.median(took)


def time_tables() -> bool:
    """Prints the first table: milliseconds of both passes with a fixed and with a learned table, and those of the capture kernel;
    returns whether learning costs less than MOST times at every width.
    """
    from jax.experimental.mosaic.gpu import profiler

    good = True
    print("tokens    fixed ms   learned ms   times   of which the capture kernel, ms", flush=True)
    for width in WIDTHS:
        shape, heads = (1, width * width, 16, 64), 16
        keys = jax.random.split(jax.random.key(0), 5)
        q, k, v, d_out = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:4])
        table = jax.random.normal(keys[4], (heads, 2 * width - 1, 2 * width - 1), jnp.float32)
        took = []
        for wanted in ((0, 1, 2), (0, 1, 2, 4)):
            step = lambda *a: loss(relative_2d(width), None, "mosaic_gpu", *a)  # noqa: B023
            run = jax.jit(jax.value_and_grad(step, argnums=wanted))
            took.append(milliseconds(lambda: run(q, k, v, d_out, table)))  # noqa: B023
        _, kernels = profiler.Cupti(finalize=False).measure(run, aggregate=False, iterations=3)(q, k, v, d_out, table)
        capture = statistics.median(sum(t for name, t in one if "capture" in name) for one in kernels)
        fixed, learned = took
        good = good and learned < MOST * fixed
        print(
            f"{width} x {width}   {fixed:8.3f}   {learned:8.3f}   {learned / fixed:5.2f}   {capture:8.3f}", flush=True
        )
    return good


def check_kinds(seed: int) -> bool:
    """Prints the second table: the gradient's error for each kind of load, relative to the norm that xla in float32 gives;
    returns whether all are below TOLERANCE and the same bits twice.

    seed   of the random inputs
    """
    rng, good = np.random.default_rng(seed), True
    print("kind                        error   same bits twice", flush=True)
    for name, (shape, tokens, mod, mask) in KINDS.items():
        draw = lambda: jnp.asarray(rng.standard_normal((2, tokens, 2, 64), np.float32), jnp.bfloat16)  # noqa: B023
        arrays = [draw() for _ in range(4)]
        array = jnp.asarray(1 + 0.3 * rng.standard_normal(shape), jnp.float32)
        found = []
        for backend, dtype in (("mosaic_gpu", jnp.bfloat16), ("xla", jnp.float32)):
            given = [a.astype(dtype) for a in arrays]
            run = jax.jit(jax.grad(lambda *a: loss(mod, mask, backend, *a), argnums=4))  # noqa: B023
            found += [np.asarray(run(*given, array), np.float64) for _ in range(2 if backend == "mosaic_gpu" else 1)]
        error = np.linalg.norm(found[0] - found[2]) / np.linalg.norm(found[2])
        same = np.array_equal(found[0], found[1])
        good = good and same and error < TOLERANCE
        print(f"{name:26s} {error:.1e}   {same}", flush=True)
    return good


def memory() -> None:
    """Prints the third table: XLA's temporary memory at 524288 tokens with fixed and with learned slopes."""
    print("temporary GiB at 524288 tokens, 16 heads, window of 1024: fixed slopes, learned slopes", flush=True)
    q = jax.ShapeDtypeStruct((1, 524288, 16, 64), jnp.bfloat16)
    slopes = jax.ShapeDtypeStruct((16,), jnp.float32)
    mod = lambda c: lambda s, b, h, i, j: s + c[h] * (j - i)
    found = []
    for wanted in ((0,), (0, 4)):
        step = lambda *a: loss(mod, masks.sliding_window(1024), "mosaic_gpu", *a)
        run = jax.jit(jax.grad(step, argnums=wanted))
        found.append(run.lower(q, q, q, q, slopes).compile().memory_analysis().temp_size_in_bytes / 2**30)
    print(f"{found[0]:.2f}   {found[1]:.2f}", flush=True)


def main() -> None:
    """Prints all tables and exits, with status 1 where something is wrong."""
    seed = secrets.randbits(32)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, seed {seed}", flush=True)
    good = [time_tables()]
    with jax.default_matmul_precision("highest"):
        good.append(check_kinds(seed))
    memory()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
