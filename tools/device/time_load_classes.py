"""What each class of captured reads costs on a GPU: `PYTHONPATH=. python3 tools/device/time_load_classes.py`.

Not collected by pytest. Causal attention without a mod and with one mod for each load class (docs/writing_mods.md), forward, and forward
and backward pass together with the gradient of the captured array. In each round every program is timed once, as the mean of several
calls back to back. A cost is the median over the rounds of a program's time divided by that of plain attention in the same round. Prints
the table of docs/writing_mods.md, whole, after each head dim. About 80 s on an H200, of which most is compilation.

    --tokens N        sequence length (8192)
    --heads N         (16)
    --dims TEXT       head dims, by commas (128,64)
    --classes TEXT    those whose names contain one of these, by semicolons
    --rounds N        how often each program is timed (7)
    --threads N       programs that are compiled at a time (8)
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CALLS = 10
"""Calls back to back whose mean is one time of a program."""

PASSES = ("forward", "both")
DISTANCES = 64
"""Rows of the tables that are read by a bucket or by a difference of positions in two dimensions."""


@dataclasses.dataclass(frozen=True)
class Read:
    """A load class: how the page describes it, and a mod whose one floating read is of that class.

    table     tokens, heads -> shape of the captured array, bfloat16 if it has an entry for each query and key, otherwise float32
    buckets   tokens -> the integers that index it
    apply     score, b, h, q_idx, kv_idx, table, buckets -> score
    """

    read: str
    name: str
    kernel: str
    table: Callable[[int, int], tuple[int, ...]]
    apply: Callable[..., Any]
    buckets: Callable[[int], Any] | None = None


def _width(tokens: int) -> int:
    """Pixels in a row of an image of that many tokens, about a square."""
    return 1 << ((tokens.bit_length() - 1) // 2)


def _bucket(tokens: int) -> Any:
    """The bucket of each distance 0 .. tokens - 1, int32 below DISTANCES: buckets of larger distances have more of them."""
    import numpy as np

    return np.minimum(8 * np.log2(1 + np.arange(tokens)), DISTANCES - 1).astype(np.int32)


def _group(tokens: int) -> Any:
    """The group of each token, 0 .. DISTANCES - 1, by which tables are gathered: neighbours have different groups."""
    import numpy as np

    return (np.arange(tokens) * 7 % DISTANCES).astype(np.int32)


def _row_of_image(tokens: int) -> Any:
    """The row of each token in an image of `_width` pixels a row, modulo half of DISTANCES."""
    import numpy as np

    return (np.arange(tokens) // _width(tokens) % (DISTANCES // 2)).astype(np.int32)


CLASSES = (
    Read(
        "`x[b]`, `x[h]`, `x[b, h]`",
        "scalar",
        "reads one number for a tile",
        lambda t, n: (n,),
        lambda s, b, h, q, kv, x, y: s + x[h] * (kv - q),
    ),
    Read(
        "`x[b, q_idx]`",
        "row slice",
        "reads a vector of the tile's queries",
        lambda t, n: (1, t),
        lambda s, b, h, q, kv, x, y: s * x[b, q],
    ),
    Read(
        "`x[b, kv_idx]`",
        "column slice",
        "reads a vector of the tile's keys",
        lambda t, n: (1, t),
        lambda s, b, h, q, kv, x, y: s + x[b, kv],
    ),
    Read(
        "`x[h, q_idx - kv_idx + c]`",
        "diagonal slice",
        "reads a window of tile_q + tile_kv numbers",
        lambda t, n: (n, 2 * t),
        lambda s, b, h, q, kv, x, y: s + x[h, q - kv + x.shape[1] // 2],
    ),
    Read(
        "`x[h, q_idx, kv_idx]`",
        "tile slice",
        "copies a tile, in flight with the keys (TMA)",
        lambda t, n: (n, t, t),
        lambda s, b, h, q, kv, x, y: s + x[h, q, kv].astype(s.dtype),
    ),
    Read(
        "`x[h, y[q_idx]]`",
        "row gather",
        "gathers one number a query",
        lambda t, n: (n, DISTANCES),
        lambda s, b, h, q, kv, x, y: s * x[h, y[q]],
        _group,
    ),
    Read(
        "`x[h, y[kv_idx]]`",
        "column gather",
        "gathers one number a key",
        lambda t, n: (n, DISTANCES),
        lambda s, b, h, q, kv, x, y: s + x[h, y[kv]],
        _group,
    ),
    Read(
        "`x[h, bucket[q_idx - kv_idx]]`",
        "diagonal gather",
        "gathers a window of tile_q + tile_kv numbers",
        lambda t, n: (n, DISTANCES),
        lambda s, b, h, q, kv, x, y: s + x[h, y[abs(q - kv)]],
        _bucket,
    ),
    Read(
        "`x[h, y[q_idx] - y[kv_idx] + c]`, other functions of both",
        "tile gather",
        "gathers each element",
        lambda t, n: (n, DISTANCES),
        lambda s, b, h, q, kv, x, y: s + x[h, y[q] - y[kv] + DISTANCES // 2],
        _row_of_image,
    ),
)


@functools.cache
def tensors(tokens: int, heads: int, dim: int) -> tuple[Any, ...]:
    """query, key, value and the cotangent of the output, the same arrays for every program."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, (1, tokens, heads, dim), jnp.bfloat16) for key in keys)


def programs(kind: Read | None, tokens: int, heads: int, dim: int) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """({pass: jitted function}, operands of each pass, in the order of PASSES) of attention with a mod of that class
    (None: without one).
    """
    import jax
    import jax.numpy as jnp

    import flexjax
    from flexjax import masks

    q, k, v, d_out = tensors(tokens, heads, dim)
    table = None
    if kind is not None:
        shape = kind.table(tokens, heads)
        table = 0.01 * jax.random.normal(jax.random.key(1), shape, jnp.bfloat16 if len(shape) == 3 else jnp.float32)
    buckets = None if kind is None or kind.buckets is None else jnp.asarray(kind.buckets(tokens))

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array | None) -> jax.Array:
        """Causal attention with the mod of the class; `table` is not read without one."""
        if kind is None:
            return flexjax.flex_attention(q, k, v, mask_mod=masks.causal)
        score_mod = lambda s, b, h, q_idx, kv_idx: kind.apply(s, b, h, q_idx, kv_idx, table, buckets)
        return flexjax.flex_attention(q, k, v, score_mod=score_mod, mask_mod=masks.causal)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array | None, d_out: jax.Array) -> Any:
        """(out, gradients of q, k, v and the table) for the cotangent `d_out`."""
        out, pull = jax.vjp(forward, q, k, v, table)
        return out, pull(d_out)

    operands = (q, k, v, table)
    return {"forward": jax.jit(forward), "both": jax.jit(both)}, (operands, (*operands, d_out))


def compiled(kind: Read | None, tokens: int, heads: int, dim: int, which: str) -> Callable[[], Any] | str:
    """A function that launches the compiled pass `which`, or, as text, the error of its compilation or first run."""
    import jax

    jitted, operands = programs(kind, tokens, heads, dim)
    at = operands[PASSES.index(which)]
    try:
        program = jitted[which].lower(*at).compile()
        jax.block_until_ready(program(*at))
    except Exception as error:  # a class that leaves the kernels, or that does not compile, says so in its row
        return f"{type(error).__name__}: {str(error)[:300]}"
    return lambda: program(*at)


def seconds(call: Callable[[], Any]) -> float:
    """Mean wall-clock seconds of CALLS calls back to back, waiting for the last result alone."""
    import jax

    start = time.perf_counter()
    result = None
    for _ in range(CALLS):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / CALLS


def main() -> int:
    """Times every class and prints the table after each head dim; returns the exit status, 1 where a class did not run.
    Ends early where plain attention did not.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dims", default="128,64")
    parser.add_argument("--classes", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=8)
    args = parser.parse_args()
    began = time.perf_counter()
    import jax

    import flexjax

    warnings.simplefilter("error", flexjax.FallbackWarning)  # a time of plain JAX is no time of a kernel
    parts = [part for part in args.classes.split(";") if part]
    chosen = [c for c in CLASSES if not parts or any(part in c.name for part in parts)]
    dims = [int(dim) for dim in args.dims.split(",")]
    cells: dict[tuple[str, int, str], str] = {}
    plain: dict[tuple[int, str], float] = {}
    failed = 0
    for n, dim in enumerate(dims):
        keys = [(kind, which) for kind in (None, *chosen) for which in PASSES]
        with ThreadPoolExecutor(args.threads) as pool:
            made = [pool.submit(compiled, kind, args.tokens, args.heads, dim, which) for kind, which in keys]
            calls = {key: future.result() for key, future in zip(keys, made, strict=True)}
        print(f"d{dim}: compiled after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        running = {key: call for key, call in calls.items() if not isinstance(call, str)}
        times: dict[Any, list[float]] = {key: [] for key in running}
        for _ in range(args.rounds):
            for key, call in running.items():
                times[key].append(seconds(call))
        tensors.cache_clear()
        for which in PASSES:
            if (None, which) not in times:
                print(f"plain, d{dim}, {which}: {calls[None, which]}")
                return 1
            base = times[None, which]
            plain[dim, which] = statistics.median(base)
            for kind in chosen:
                if (kind, which) in times:
                    ratio = statistics.median(a / b for a, b in zip(times[kind, which], base, strict=True))
                    cells[kind.name, dim, which] = f"{ratio:.2f}"
                else:
                    failed += 1
                    cells[kind.name, dim, which] = "-"
                    print(f"{kind.name}, d{dim}, {which}: {calls[kind, which]}", flush=True)
        print(table(chosen, dims[: n + 1], cells))
        for done in dims[: n + 1]:
            both = ", ".join(f"{which} {1e3 * plain[done, which]:.3f} ms" for which in PASSES)
            print(f"plain, d{done}: {both}")
        print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.tokens} tokens, {args.heads} heads, bfloat16; "
              f"{time.perf_counter() - began:.0f} s\n", flush=True)  # fmt: skip
        del calls, running
        jax.clear_caches()
    return int(failed > 0)


def table(chosen: list[Read], dims: list[int], cells: dict[tuple[str, int, str], str]) -> str:
    """The Markdown table of docs/writing_mods.md: a row for each of `chosen`, two costs for each of `dims`.

    cells   (name of the class, head dim, pass) -> its cost as text
    """
    heads = [f"d{dim}: {name}" for dim in dims for name in ("forward", "both passes")]
    lines = [f"| read | class | what a kernel does | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for kind in chosen:
        costs = [cells[kind.name, dim, which] for dim in dims for which in PASSES]
        lines.append(f"| {kind.read} | {kind.name} | {kind.kernel} | {' | '.join(costs)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
