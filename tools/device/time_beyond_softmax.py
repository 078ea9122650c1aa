"""Times what is beyond a softmax on a GPU, beside the plain call: `PYTHONPATH=. python3 tools/device/time_beyond_softmax.py`.

Not collected by pytest. Weights, expectations, chosen blocks, forward mode and tolerance=, bfloat16, heads of 128, programs of a group in
turns by the wall clock (timed_cases.py), after a check of small problems against the reference in float32. A line for each
program: milliseconds, TFLOP/s of the entries that the mask or the choice keeps, and the time over that of the group's first line.

    --groups NAMES   of GROUPS, by commas
    --seconds N      begin no other group after so long (400)
    --small          few tokens, to try it without a GPU
    --unchecked      without the check of small problems
"""

import argparse
import dataclasses
import functools
import math
import sys
import time
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import AuxRequest, BlockMask, masks, mods, paged, weights
from tools.device.timed_cases import median_seconds

Array = jax.Array
TOLERANCE = 2.0**-24
MOST_ERROR = 2e-2
"""The largest norm of a difference from the reference in float32, in norms of the latter."""
POOL = ThreadPoolExecutor(16)


@dataclasses.dataclass(frozen=True)
class Program:
    """A line of a table: `call` of the arrays, flops that count, and a note."""

    name: str
    call: Callable[..., typing.Any]
    arrays: tuple[Array, ...]
    flops: float = 0.0
    note: str = ""

    @functools.cached_property
    def compiled(self) -> Future[typing.Any]:
        """Compiles in the pool; lowering happens here."""
        return POOL.submit(jax.jit(self.call).lower(*self.arrays).compile)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens of ordinary calls, of choices, of long ones, and of a cache; requests."""

    tokens: int = 8192
    chosen: int = 65536
    lengths: tuple[int, ...] = (8192, 16384, 65536)
    cache: int = 32768
    requests: int = 64
    heads: int = 16
    chosen_heads: int = 64
    dim: int = 128


FULL, SMALL = Sizes(), Sizes(256, 1024, (1024,), 512, 2, 4, 8, 16)


def normal(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def inputs(batch: int, tokens: int, heads: int, dim: int) -> tuple[Array, ...]:
    """q, k, v and the cotangent of out."""
    return tuple(normal(i, batch, tokens, heads, dim) for i in range(4))


def both(attend: Callable[..., typing.Any]) -> Callable[..., typing.Any]:
    """(q, k, v, d_out, *arrays) -> results and all gradients of a call (q, k, v, *arrays) -> out or (out, [B, T, N] float32)."""

    def run(q: Array, k: Array, v: Array, d_out: Array, *arrays: Array) -> typing.Any:
        results, pull = jax.vjp(attend, q, k, v, *arrays)
        given = d_out if isinstance(results, Array) else (d_out, d_out[..., 0].astype(jnp.float32))
        return results, pull(given)

    return run


def passes(
    name: str, attend: Callable[..., typing.Any], arrays: tuple[Array, ...], flops: float, *more: Array, note: str = ""
) -> list[Program]:
    """The programs of the forward pass and of both."""
    forward = lambda q, k, v, d_out, *more: attend(q, k, v, *more)
    return [
        Program(name, forward, (*arrays, *more), flops, note),
        Program(name + ", both", both(attend), (*arrays, *more), 3.5 * flops, note),
    ]


def of_weights(sizes: Sizes) -> Iterator[list[Program]]:
    T, heads = sizes.tokens, sizes.heads
    arrays = inputs(2, T, heads, sizes.dim)
    decay = 1 - 2.0 ** (-5 - jnp.arange(heads) / 2)
    kinds = {
        "softmax": None,
        "sigmoid": weights.sigmoid(-math.log(T)),
        "squared ReLU": weights.relu_squared(T),
        "SiLU": weights.silu(T),
        "retention": weights.retention(decay),
    }
    for mask, share in ((None, 1.0), (masks.causal, 0.5)):
        flops = 4.0 * 2 * heads * sizes.dim * T * T * share
        where = "full" if mask is None else "causal"
        made = []
        for name, kind in kinds.items():
            attend = lambda q, k, v, kind=kind, mask=mask: flexjax.flex_attention(q, k, v, weights=kind, mask_mod=mask)
            made += passes(f"{where} {name}", attend, arrays, flops)
        yield made


def hstu(sizes: Sizes) -> Iterator[list[Program]]:
    """Causal with 64 contexts and 512 targets in groups of 8, and a learned bias by 128 buckets of the log of time."""
    T, heads, contexts, targets = sizes.tokens, sizes.heads, sizes.tokens // 128, sizes.tokens // 16
    arrays = inputs(2, T, heads, sizes.dim)
    stamps = jnp.cumsum(jax.random.exponential(jax.random.key(9), (2, T)) * 60, 1)
    table = 0.02 * jax.random.normal(jax.random.key(8), (heads, 128))

    def mask(b: Array, h: Array, i: Array, j: Array) -> Array:
        history = T - targets
        seen = (i >= j) | ((i < contexts) & (j < contexts))
        return seen & ((j < history) | ((i >= history) & ((i - history) // 8 == (j - history) // 8)))

    def attend(q: Array, k: Array, v: Array, stamps: Array, *table: Array) -> Array:
        def bias(s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
            ago = jnp.maximum(jnp.abs(stamps[b, i] - stamps[b, j]), 1.0)
            return s + table[0][h, jnp.clip((jnp.log(ago) / 0.301).astype(jnp.int32), 0, 127)]

        kind = weights.silu(T)
        return flexjax.flex_attention(q, k, v, score_mod=bias if table else None, weights=kind, mask_mod=mask)

    at = np.arange(T)
    kept = int(sum(np.count_nonzero(np.asarray(mask(0, 0, i[:, None], at[None]))) for i in at.reshape(-1, 64)))  # type: ignore[arg-type]
    flops = 4.0 * 2 * heads * sizes.dim * kept
    plain = lambda q, k, v, stamps: attend(q, k, v, stamps)
    learned = lambda q, k, v, table, stamps: attend(q, k, v, stamps, table)

    def both_learned(q: Array, k: Array, v: Array, d_out: Array, stamps: Array, table: Array) -> typing.Any:
        out, pull = jax.vjp(lambda q, k, v, t: learned(q, k, v, t, stamps), q, k, v, table)
        return out, pull(d_out)

    def both_plain(q: Array, k: Array, v: Array, d_out: Array, stamps: Array) -> typing.Any:
        out, pull = jax.vjp(lambda q, k, v: plain(q, k, v, stamps), q, k, v)
        return out, pull(d_out)

    yield [
        Program("HSTU, no bias", lambda q, k, v, d, s: plain(q, k, v, s), (*arrays, stamps), flops),
        Program("HSTU, no bias, both", both_plain, (*arrays, stamps), 3.5 * flops),
        Program("HSTU, time bias", lambda q, k, v, d, s, t: learned(q, k, v, t, s), (*arrays, stamps, table), flops),
        Program("HSTU, time bias, both", both_learned, (*arrays, stamps, table), 3.5 * flops),
    ]


def expectations(sizes: Sizes) -> Iterator[list[Program]]:
    T, heads = sizes.tokens, sizes.heads
    arrays = inputs(2, T, heads, sizes.dim)
    flops = 2.0 * 2 * heads * sizes.dim * T * T
    functions = {
        "score": lambda s, b, h, i, j: s,
        "distance": lambda s, b, h, i, j: i - j,
        "near": lambda s, b, h, i, j: i - j < 256,
        "square": lambda s, b, h, i, j: s * s,
    }
    made = []
    for name, count in (("plain", 0), ("entropy", 1), ("four expectations", 4)):

        def attend(q: Array, k: Array, v: Array, count: int = count) -> typing.Any:
            if not count:
                return flexjax.flex_attention(q, k, v, mask_mod=masks.causal)
            asked = AuxRequest(lse=True, expectations=dict(list(functions.items())[:count]))
            out, aux = flexjax.flex_attention(q, k, v, mask_mod=masks.causal, return_aux=asked)
            return out, aux.lse - sum(aux.expectations.values())

        made += passes(name, attend, arrays, flops)
    yield made


def choices(batch: int, heads: int, tokens: int, keep: int, block: int, pool: int) -> np.ndarray:
    """int32 [batch, heads, tokens, keep]: blocks of the past. The 128 queries of a tile draw from `pool` blocks of their past, their own
    among them, so that the union of a tile is at most that.
    """
    rng = np.random.default_rng(0)
    chosen = np.full((batch, heads, tokens, keep), -1, np.int32)
    for b, h, tile in np.ndindex(batch, heads, tokens // 128):
        own = (tile * 128 + np.arange(128)) // block
        past = rng.permutation(int(own[0]) + 1)[:pool]
        drawn = np.argsort(rng.random((128, len(past))), axis=1)[:, : keep - 1]
        chosen[b, h, tile * 128 : tile * 128 + 128, : drawn.shape[1]] = past[drawn]
        chosen[b, h, tile * 128 : tile * 128 + 128, -1] = own
    return chosen


def chosen_blocks(sizes: Sizes) -> Iterator[list[Program]]:
    """Top 16 of blocks of 64 for each key head; a tile of queries draws from 47 (union factor 2.94, as the trained model has)."""
    T, heads, groups = sizes.chosen, sizes.chosen_heads, 16 if sizes is FULL else 2
    kv_heads, block, keep = heads // groups, 64, 16
    q, d_out = (normal(i, 1, T, heads, sizes.dim) for i in (0, 3))
    k, v = (normal(i, 1, T, kv_heads, sizes.dim) for i in (1, 2))
    picked = choices(1, kv_heads, T, keep, block, 47)
    unique = sum(int(sum(np.unique(row[row >= 0]).size * 1 for row in picked[0, h, ::64])) for h in range(kv_heads))
    entries = unique * 64 * block * groups
    flops = 4.0 * sizes.dim * entries
    chosen = jnp.asarray(picked)

    def causal(q: Array, k: Array, v: Array) -> Array:
        return flexjax.flex_attention(q, k, v, mask_mod=masks.causal)

    def attend(q: Array, k: Array, v: Array, chosen: Array) -> Array:
        block_mask = BlockMask.from_chosen_blocks(chosen, block, heads=heads, mask_mod=masks.causal)
        return flexjax.flex_attention(q, k, v, block_mask=block_mask)

    def packed(q: Array, k: Array, v: Array, chosen: Array) -> Array:
        rows = q.reshape(1, T, kv_heads, groups, -1).swapaxes(2, 3).reshape(1, T * groups, kv_heads, -1)
        hidden = lambda b, h, i, j: i // groups >= j
        block_mask = BlockMask.from_chosen_blocks(chosen, block, q_len=T * groups, kv_len=T, mask_mod=hidden)
        out = flexjax.flex_attention(rows, k, v, block_mask=block_mask)
        return out.reshape(1, T, groups, kv_heads, -1).swapaxes(2, 3).reshape(q.shape)

    def lists(q: Array, k: Array, v: Array, d_out: Array, chosen: Array) -> typing.Any:
        return BlockMask.from_chosen_blocks(chosen, block, heads=heads, mask_mod=masks.causal)

    def with_choice(call: Callable[..., Array]) -> Callable[..., typing.Any]:
        def run(q: Array, k: Array, v: Array, d_out: Array, chosen: Array) -> typing.Any:
            out, pull = jax.vjp(lambda q, k, v: call(q, k, v, chosen), q, k, v)
            return out, pull(d_out)

        return run

    arrays = q, k, v, d_out
    dense = 4.0 * heads * sizes.dim * T * T / 2
    made = passes("causal", causal, arrays, dense)
    for name, call in (("chosen", attend), ("chosen, heads packed", packed)):
        made.append(Program(name, lambda q, k, v, d, c, call=call: call(q, k, v, c), (*arrays, chosen), flops))
        made.append(Program(name + ", both", with_choice(call), (*arrays, chosen), 3.5 * flops))
    yield [*made, Program("its block mask", lists, (*arrays, chosen))]


def forward_mode(sizes: Sizes) -> Iterator[list[Program]]:
    T, heads = sizes.tokens, sizes.heads
    q, k, v, _ = inputs(2, T, heads, sizes.dim)
    tangents = tuple(normal(5 + i, *x.shape) for i, x in enumerate((q, k, v)))
    for mask, share in ((masks.causal, 0.5), (None, 1.0)):
        flops = 4.0 * 2 * heads * sizes.dim * T * T * share

        def attend(q: Array, k: Array, v: Array, mask: typing.Any = mask, own: typing.Any = None) -> Array:
            return flexjax.flex_attention(q, k, v, mask_mod=mask, implementation=own)

        def moved(q: Array, k: Array, v: Array, *tangents: Array, attend: typing.Any = attend) -> typing.Any:
            return jax.jvp(attend, (q, k, v), tangents)

        def query(q: Array, k: Array, v: Array, t: Array, *_: Array, attend: typing.Any = attend) -> typing.Any:
            return jax.jvp(lambda q: attend(q, k, v), (q,), (t,))

        def meanflow(
            q: Array, k: Array, v: Array, *tangents: Array, attend: typing.Any = attend, own: typing.Any = None
        ) -> typing.Any:
            def loss(q: Array, k: Array, v: Array) -> Array:
                out, tangent = jax.jvp(functools.partial(attend, own=own), (q, k, v), tangents)
                aim = jax.lax.stop_gradient(tangents[0] - 0.5 * tangent)
                return jnp.mean(jnp.square((out - aim).astype(jnp.float32)))

            return jax.grad(loss, (0, 1, 2))(q, k, v)

        where = "causal" if share < 1 else "full"
        made = [
            Program(
                f"{where} forward", lambda q, k, v, *_, attend=attend: attend(q, k, v), (q, k, v, *tangents), flops
            ),
            Program(f"{where} jvp of q, k, v", moved, (q, k, v, *tangents), 3.5 * flops, "seven products for two"),
            Program(f"{where} jvp of q", query, (q, k, v, *tangents), 2.5 * flops),
            Program(f"{where} MeanFlow step", meanflow, (q, k, v, *tangents)),
        ]
        if share < 1:
            made.append(
                Program("causal MeanFlow step on xla", functools.partial(meanflow, own="xla"), (q, k, v, *tangents))
            )
        yield made


def tolerance(sizes: Sizes) -> Iterator[list[Program]]:
    """ALiBi by length, forget gates with gradient, a falling table, and calls where nothing is skipped."""
    heads = sizes.heads

    def two(name: str, mod: Callable[..., typing.Any], length: int, *learned: Array, batch: int = 1) -> list[Program]:
        made, arrays = [], inputs(batch, length, heads, sizes.dim)
        flops = 2.0 * batch * heads * sizes.dim * length * length
        for note, asked in (("", None), (", tolerance", TOLERANCE)):

            def attend(q: Array, k: Array, v: Array, *learned: Array, asked: typing.Any = asked) -> Array:
                return flexjax.flex_attention(q, k, v, score_mod=mod(*learned), mask_mod=masks.causal, tolerance=asked)

            made += passes(f"{name} {length}{note}", attend, arrays, flops, *learned)
        return [made[0], made[2], made[1], made[3]]

    for length in sizes.lengths:
        yield two("ALiBi", lambda: mods.alibi(heads), length, batch=2 if length <= 8192 else 1)
    T = sizes.lengths[min(1, len(sizes.lengths) - 1)]
    rates = np.geomspace(0.01, 2.0, heads)[:, None]
    gates = jnp.asarray(-np.cumsum(np.random.default_rng(0).exponential(rates, (heads, T)), 1), jnp.float32)
    yield two("forget gates", lambda g: lambda s, b, h, i, j: s + g[h, i] - g[h, j], T, gates)
    T = sizes.lengths[0]
    table = jnp.asarray(-0.05 * np.arange(T), jnp.float32)
    yield two("table", lambda: lambda s, b, h, i, j: s + table[jnp.maximum(i - j, 0)], T, batch=2)
    T = sizes.lengths[min(1, len(sizes.lengths) - 1)]
    yield two("no mod", lambda: None, T)
    yield two("ALiBi / 10000", lambda: lambda s, b, h, i, j: s - 1e-6 * (h + 1) * (i - j), T)


def pages(sizes: Sizes) -> Iterator[list[Program]]:
    """A decay by age in decode over pages of 64: 8 key heads, 32 query heads; the share is that of the pages of a call."""
    R, S, M, N, page = sizes.requests, sizes.cache, 8 if sizes is FULL else 2, 32 if sizes is FULL else 4, 64
    table, granted = paged.allocate(paged.table(R, S // page, R * S // page, page), np.full(R, S, np.int32))
    assert bool(np.all(np.asarray(granted)))
    table = dataclasses.replace(table, lengths=jnp.full((R,), S, jnp.int32))
    cache = paged.empty(R * S // page, page, M, sizes.dim, dtype="bfloat16", norms=True)
    key = normal(1, *cache.key.shape)  # type: ignore[union-attr]
    value = normal(2, *cache.value.shape)  # type: ignore[union-attr]
    norms = jnp.max(jnp.linalg.norm(key.astype(jnp.float32), axis=-1), 1) * 1.001
    cache = dataclasses.replace(cache, key=key, value=value, norms=norms)
    q = normal(0, R, 1, N, sizes.dim)
    rate = jnp.full((N,), 0.005 if sizes is FULL else 0.5)

    def attend(q: Array, cache: typing.Any, table: typing.Any, asked: typing.Any = None) -> Array:
        decay = lambda s, b, h, i, j: s - rate[h] * (i - j)
        return flexjax.paged_attention(q, cache, table, score_mod=decay, tolerance=asked)  # type: ignore[return-value]

    read = 2.0 * R * S * M * sizes.dim * 2
    yield [
        Program("pages, decay", attend, (q, cache, table), 0, f"{read / 1e9:.1f} GB"),
        Program("pages, decay, tolerance", functools.partial(attend, asked=TOLERANCE), (q, cache, table)),
    ]


GROUPS = dict(
    weights=of_weights, expectations=expectations, tangent=forward_mode, tolerance=tolerance, chosen=chosen_blocks,
    hstu=hstu, pages=pages,
)  # fmt: skip


def check(own: typing.Any) -> list[str]:
    """Small problems against the reference in float32, gradients and tangents too: the names of those that are further off than MOST_ERROR."""
    B, T, N, D = 2, 320, 4, 64
    q, k, v, d_out = inputs(B, T, N, D)
    tangents = tuple(normal(5 + i, *x.shape) for i, x in enumerate((q, k, v)))
    slopes = jnp.asarray([0.5, 0.25, 2.0, 1.0])
    far = jnp.asarray(-np.cumsum(np.random.default_rng(0).exponential(1.0, (N, T)), 1), jnp.float32)
    learned = lambda s, b, h, i, j: s + far[h, i] - far[h, j] + slopes[h] * jnp.tanh(s)
    chosen = jnp.asarray(choices(B, N, 384, 4, 16, 9)[:, :, :T])
    asked = AuxRequest(lse=True, expectations=dict(score=lambda s, b, h, i, j: s, far=lambda s, b, h, i, j: i - j))

    def calls(own: typing.Any, tolerance: float | None) -> dict[str, Callable[..., typing.Any]]:
        attend = functools.partial(flexjax.flex_attention, implementation=own)
        made = {name: functools.partial(attend, weights=kind, mask_mod=masks.causal) for name, kind in dict(
            sigmoid=weights.sigmoid(-4.0), relu=weights.relu_squared(9.0), silu=weights.silu(20.0),
            retention=weights.retention(jnp.asarray([0.9, 0.95, 0.99, 0.999])),
        ).items()}  # fmt: skip
        made["learned"] = functools.partial(attend, score_mod=learned, mask_mod=masks.causal)
        made["tolerance"] = functools.partial(attend, score_mod=learned, mask_mod=masks.causal, tolerance=tolerance)
        made["chosen"] = lambda q, k, v: attend(
            q, k, v, block_mask=BlockMask.from_chosen_blocks(chosen, 16, heads=N, kv_len=T, mask_mod=masks.causal)
        )

        def expected(q: Array, k: Array, v: Array) -> Array:
            out, aux = attend(q, k, v, mask_mod=masks.causal, return_aux=asked)
            return out + (aux.lse - aux.expectations["score"] + 0.01 * aux.expectations["far"])[..., None].astype(
                q.dtype
            )

        made["expectations"] = expected
        return made

    def everything(attend: Callable[..., Array]) -> Callable[..., typing.Any]:
        def run(q: Array, k: Array, v: Array, d_out: Array, *tangents: Array) -> typing.Any:
            out, pull = jax.vjp(attend, q, k, v)
            return out, pull(d_out), jax.jvp(attend, (q, k, v), tangents)[1]

        return run

    wrong = []
    given, exact = (q, k, v, d_out, *tangents), tuple(x.astype(jnp.float32) for x in (q, k, v, d_out, *tangents))
    found, wanted = calls(own, TOLERANCE), calls("reference", None)
    programs = {name: Program(name, everything(call), given) for name, call in found.items()}
    for program in programs.values():
        _ = program.compiled
    for name, program in programs.items():
        got = jax.tree.leaves(program.compiled.result()(*given))
        want = jax.tree.leaves(jax.jit(everything(wanted[name]))(*exact))
        off = [
            float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
            for a, b in zip(got, want, strict=True)
        ]
        print(f"{name:14} out, dq, dk, dv, tangent off by " + " ".join(f"{x:.1e}" for x in off), flush=True)
        wrong += [name] * (not all(x <= MOST_ERROR for x in off))
    return wrong


def report(programs: list[Program], lines: list[str]) -> None:
    for program in programs:
        _ = program.compiled
    runnable = [(p, functools.partial(p.compiled.result(), *p.arrays)) for p in programs]
    for _, call in runnable:
        jax.block_until_ready(call())
    times = median_seconds([call for _, call in runnable])
    for (program, _), seconds in zip(runnable, times, strict=True):
        rate = f"{program.flops / seconds / 1e12:5.0f}" if program.flops else "    -"
        lines.append(
            f"| {program.name:36} | {1e3 * seconds:8.3f} | {rate} | {seconds / times[0]:6.3f} | {program.note} |"
        )
        print(lines[-1], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--unchecked", action="store_true", help="no small problems against the reference")
    args = parser.parse_args()
    began, lines = time.perf_counter(), []
    sizes = SMALL if args.small else FULL
    wrong = [] if args.unchecked else check(None)
    for name in args.groups.split(","):
        try:
            for programs in GROUPS[name](sizes):
                if time.perf_counter() - began > args.seconds:
                    lines.append(f"| {name}: not begun | | | | |")
                    break
                report(programs, lines)
        except Exception as error:  # the other groups are still worth measuring
            wrong.append(name)
            lines.append(f"| {name}: FAILED {type(error).__name__}: {str(error)[:300]} | | | | |")
            print(lines[-1], flush=True)
        print(f"# {time.perf_counter() - began:.0f} s", flush=True)
    print(
        f"\n{jax.devices()[0].device_kind}, jax {jax.__version__}\n| program | ms | TFLOP/s | over the first | |\n|---|---|---|---|---|"
    )
    print("\n".join(lines))
    print("wrong:", wrong or "nothing")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
