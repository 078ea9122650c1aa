"""Random masks for hypothesis: shipped families, raw comparisons with random captured arrays, and what and/or/not make of them.

A draw is a function of a dict of arrays (so that they can be traced) and the arrays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from flexjax import and_masks, masks, not_mask, or_masks

Arrays = dict[str, np.ndarray]
Make = Callable[[dict], Callable]
Drawn = tuple[Make, Arrays]
Sizes = tuple[int, int, int, int]


def arrays_of(sizes: Sizes, rng: np.random.Generator) -> Arrays:
    """What masks of these sizes may capture."""
    b, h, t, s = sizes
    t, s, n = max(t, 1), max(s, 1), max(t, s, 1)
    floats = rng.integers(0, s + 1, (b, s)).astype(np.float32)
    floats[rng.random((b, s)) < 0.05] = np.nan
    floats[rng.random((b, s)) < 0.05] = np.inf
    rows = rng.standard_normal((t,)).astype(np.float32) * 3
    rows[rng.random(t) < 0.05] = -np.inf
    return {
        "length": rng.integers(0, s + 1, b).astype(np.int32),
        "offset": rng.integers(-s, s + 1, b).astype(np.int32),
        "window": rng.integers(1, s + 1, h).astype(np.int32),
        "documents": np.sort(rng.integers(0, 1 + n // 20, (b, n)), -1).astype(np.int32),
        "shuffled": rng.integers(0, 5, n).astype(np.int32),
        "order": rng.integers(0, n, n).astype(np.int32),
        "floats": floats,
        "rows": rows,
        "half": rng.integers(0, 300, n).astype(np.float32),
        "dense": rng.random((t, s)) < 0.9,
        "dense_by_head": rng.random((h, t, s)) < rng.random((h, 1, 1)) * 1.2,
        "bytes": rng.integers(-128, 128, n).astype(np.int8),
        "words": rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32),
        "flags": rng.random(n) < 0.9,
        "divisors": rng.choice([-(2**31), -3, -1, 0, 0, 1, 2, 7], n).astype(np.int32),
    }


# Each is exact by intervals alone, also from traced arrays.
EXACT: dict[str, Callable[[dict, int], Callable]] = {
    "causal": lambda a, p: masks.causal,
    "causal_offset": lambda a, p: masks.causal_offset(p - 20),
    "causal_offset_captured": lambda a, p: masks.causal_offset(a["offset"]),
    "sliding_window": lambda a, p: masks.sliding_window(p + 1),
    "window_captured": lambda a, p: masks.sliding_window(a["window"]),
    "two_sided_window": lambda a, p: masks.two_sided_window(p, p // 2),
    "prefix_lm": lambda a, p: masks.prefix_lm(p),
    "prefix_captured": lambda a, p: masks.prefix_lm(a["length"]),
    "document": lambda a, p: masks.document(a["documents"]),
    "padding": lambda a, p: masks.padding(a["length"]),
    "query_padding": lambda a, p: masks.query_padding(a["length"]),
    "left_padding": lambda a, p: masks.left_padding(a["length"]),
    "chunked": lambda a, p: masks.block_diagonal(p + 1),
    "block_causal": lambda a, p: masks.block_causal(p + 1),
    "full": lambda a, p: masks.full,
}

SOUND: dict[str, Callable[[dict, int], Callable]] = {
    "random": lambda a, p: lambda b, h, q, k: jax.random.bernoulli(jax.random.fold_in(a["words"][:2], q * p + k), 0.9),
    "searched": lambda a, p: (
        lambda b, h, q, k: (
            jnp.searchsorted(jnp.sort(a["half"][:9]), q - jnp.float32(p))
            == jnp.digitize(k - jnp.float32(p), jnp.sort(a["half"][:9]))
        )
    ),
    "total_order": lambda a, p: (
        lambda b, h, q, k: (
            jax.lax.lt_to_p.bind(a["floats"][b, k] * 0 + a["rows"][q], a["floats"][b, k])
            | jax.lax.eq_to_p.bind(a["rows"][q], -a["floats"][b, k])
        )
    ),
    "causal_chunks": lambda a, p: masks.chunked(p + 1),
    "dilated_window": lambda a, p: masks.dilated_window(5, p + 1),
    "dilated_two_sided": lambda a, p: masks.dilated_two_sided_window(3, 2, p + 1),
    "global_tokens": lambda a, p: masks.global_tokens(p),
    "global_flags": lambda a, p: masks.global_tokens(a["flags"]),
    "local_global": lambda a, p: masks.local_global(p, 3),
    "streaming": lambda a, p: masks.streaming(4, p + 1),
    "strided": lambda a, p: masks.strided(p + 1),
    "strided_fixed": lambda a, p: masks.strided_fixed(p + 2, 2),
    "block_diffusion": lambda a, p: masks.block_diffusion(200, p + 1),
    "natten": lambda a, p: masks.natten_2d((20, 20), (5, 3)),
    "natten_tiled": lambda a, p: masks.natten_2d_tiled((20, 20), (5, 3), (4, 5)),
    "sliding_tile": lambda a, p: masks.sliding_tile_2d((20, 20), (12, 8), (4, 4), 7),
    "shuffled_documents": lambda a, p: masks.document(a["shuffled"]),
    "modulus": lambda a, p: lambda b, h, q, k: (q - k) % (p + 1) < p // 2,
    "negative_modulus": lambda a, p: lambda b, h, q, k: (q - p) % -(p + 1) < k // -3 + 20,
    "product": lambda a, p: lambda b, h, q, k: q * k < 50 * p,
    "overflow": lambda a, p: lambda b, h, q, k: q * 9_000_000 * k > p,
    "overflow_sum": lambda a, p: lambda b, h, q, k: q + 2_147_483_500 + a["length"][b] > k,
    "hash": lambda a, p: lambda b, h, q, k: _hash(q, k) % jnp.uint32(p + 1) == 0,
    "unsigned": lambda a, p: lambda b, h, q, k: q.astype(jnp.uint32) - k.astype(jnp.uint32) < p,
    "float_threshold": lambda a, p: lambda b, h, q, k: q.astype(jnp.float32) * 0.5 <= a["floats"][b, k],
    "not_float_threshold": lambda a, p: lambda b, h, q, k: ~(a["rows"][q] + a["floats"][b, k] > p),
    "root": lambda a, p: lambda b, h, q, k: jnp.sqrt((q - k).astype(jnp.float32)) < p / 8,
    "tanh": lambda a, p: lambda b, h, q, k: jnp.tanh(a["rows"][q] - a["floats"][b, k]) < 1.5,
    "zero_times": lambda a, p: lambda b, h, q, k: a["rows"][q] * (k - p).astype(jnp.float32) <= 10,
    "ratio": lambda a, p: lambda b, h, q, k: (q - p).astype(jnp.float32) / a["rows"][q] < k,
    "dense": lambda a, p: lambda b, h, q, k: a["dense"][q, k],
    "dense_by_head": lambda a, p: lambda b, h, q, k: a["dense_by_head"][h, q, k],
    "nested": lambda a, p: lambda b, h, q, k: a["shuffled"][a["order"][q]] == a["shuffled"][k],
    "bytes": lambda a, p: lambda b, h, q, k: a["bytes"][q] + a["bytes"][k] > p - 100,
    "byte_product": lambda a, p: lambda b, h, q, k: a["bytes"][q] * jnp.int8(3) > a["bytes"][k],
    "words": lambda a, p: lambda b, h, q, k: a["words"][q] > a["words"][k],
    "word_as_bool": lambda a, p: lambda b, h, q, k: (a["words"][k] >> p).astype(bool),
    "bfloat16": lambda a, p: lambda b, h, q, k: a["half"].astype(jnp.bfloat16)[q] + jnp.bfloat16(1) <= 256,
    "shifted_head": lambda a, p: lambda b, h, q, k: k < a["window"][(h + 1) >> 1],
    "masked_head": lambda a, p: lambda b, h, q, k: k - q < a["window"][(h + b) & 1],
    "head_by_remainder": lambda a, p: lambda b, h, q, k: k < a["window"][jax.lax.rem(a["length"][b], jnp.int32(2))],
    "chosen": lambda a, p: lambda b, h, q, k: jnp.where(a["flags"][q], q - k, k - q) < p,
    "cancelled": lambda a, p: lambda b, h, q, k: ((q - k) + k) * 2 - q < p,
    "distance": lambda a, p: lambda b, h, q, k: jnp.abs(q - k) + jnp.abs(q + k - p) < 2 * p,
    "captured_chunks": lambda a, p: lambda b, h, q, k: q // a["window"][h] == k // a["window"][h],
    "square": lambda a, p: lambda b, h, q, k: (q - k) ** 2 < p * p,
    "circle": lambda a, p: lambda b, h, q, k: (q % 20 - k % 20) ** 2 + (q // 20 - k // 20) ** 2 <= p,
    "loop": lambda a, p: lambda b, h, q, k: jax.lax.while_loop(lambda x: x > 6, lambda x: x - 7, q) == k % 7,
    "constant": lambda a, p: lambda b, h, q, k: jnp.asarray(p > 30),
}


def _hash(q: jax.Array, k: jax.Array) -> jax.Array:
    x = (q.astype(jnp.uint32) * jnp.uint32(2654435761)) ^ (k.astype(jnp.uint32) << 9)
    return x ^ (x >> 13)


def trees(atoms: dict[str, Callable[[dict, int], Callable]]) -> st.SearchStrategy:
    """Descriptions ("and", left, right), ("or", ..), ("not", one) or (name, parameter)."""
    leaf = st.tuples(st.sampled_from(sorted(atoms)), st.integers(0, 60))
    pair = lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or"]), inner, inner), st.tuples(st.just("not"), inner)
    )
    return st.recursive(leaf, pair, max_leaves=4)


def build(tree: tuple, arrays: dict) -> Callable:
    """The mask_mod that a tree describes: ("and", tree, tree), ("or", ...), ("not", tree), ("compared", ...) or a named leaf.

    arrays   the captured arrays by name
    """
    head, *rest = tree
    if head in ("and", "or"):
        return (and_masks if head == "and" else or_masks)(*(build(r, arrays) for r in rest))
    if head == "not":
        return not_mask(build(rest[0], arrays))
    if head == "compared":
        return lambda *at: jnp.asarray(number(tree, arrays, at))
    return {**EXACT, **SOUND}[head](arrays, rest[0])


# ------------------------------------------------------------------- programs of integers

ARITHMETIC: dict[str, Callable] = {
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": jnp.multiply,
    "floor_divide": jnp.floor_divide,
    "remainder": jnp.remainder,
    "div": jax.lax.div,
    "rem": jax.lax.rem,
    "left_shift": jnp.left_shift,
    "right_shift": jnp.right_shift,
    "shift_right_logical": jax.lax.shift_right_logical,
    "minimum": jnp.minimum,
    "maximum": jnp.maximum,
}
COMPARED: dict[str, Callable] = {
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
}
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
NUMBERS = (-(2**31), -129, -3, -1, 0, 0, 1, 2, 5, 31, 127, 255, 2**31 - 1)


def _integer_programs() -> st.SearchStrategy:
    """("compared", how, type, left, right): operands are converted to the type and may divide by 0, wrap around and overflow."""
    types, position = st.sampled_from(INTEGERS), st.sampled_from("bhqk")
    leaf = st.one_of(
        st.tuples(st.just("position"), position),
        st.tuples(st.just("literal"), st.sampled_from(NUMBERS)),
        st.tuples(st.just("load"), st.sampled_from(["bytes", "words", "divisors", "order"]), st.sampled_from("qk")),
        st.tuples(st.just("load"), st.just("window"), st.just("h")),
    )
    compared = lambda inner: st.tuples(st.just("compared"), st.sampled_from(sorted(COMPARED)), types, inner, inner)
    branch = lambda inner: st.one_of(
        st.tuples(st.just("arithmetic"), st.sampled_from(sorted(ARITHMETIC)), types, inner, inner),
        st.tuples(st.just("where"), types, compared(inner), inner, inner),
    )
    return compared(st.recursive(leaf, branch, max_leaves=6))


INTEGER_PROGRAMS = _integer_programs()


def number(tree: tuple, arrays: dict, at: tuple) -> jax.Array:
    """The value of a program of integers at (b, h, q, kv); int64 is int32 where jax has no 64 bits."""
    kind, *rest = tree
    places = dict(zip("bhqk", at, strict=True))
    if kind == "position":
        return places[rest[0]]
    if kind == "literal":
        return jnp.int32(rest[0])
    if kind == "load":
        return jnp.asarray(arrays[rest[0]])[places[rest[1]]]
    *how, dtype, left, right = rest if kind != "where" else (rest[1], rest[0], *rest[2:])
    dtype = dtype if jax.config.jax_enable_x64 or dtype != "int64" else "int32"
    x, y = (number(side, arrays, at).astype(dtype) for side in (left, right))
    if kind == "where":
        return jnp.where(number(how[0], arrays, at), x, y)
    return (COMPARED if kind == "compared" else ARITHMETIC)[how[0]](x, y)


# ------------------------------------------------------------------- sizes, and what is so


SIZES = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(0, 400), st.integers(0, 400))
"""batch, heads, q_len, kv_len."""
SMALL_SIZES = st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 40), st.integers(0, 40))
SMALL_BLOCKS = st.tuples(st.sampled_from([5, 8, 16]), st.sampled_from([7, 8, 16]))
BLOCKS = st.tuples(st.sampled_from([16, 17, 32, 48, 100, 128, 256]), st.sampled_from([16, 19, 32, 64, 128, 256]))


def dense(mask: Callable, sizes: Sizes, compiled: bool = True) -> np.ndarray:
    """bool [batch, heads, q_len, kv_len], entry by entry. Not compiled: XLA crashes where it folds a division by a constant 0."""
    entries = mask
    for axis in (3, 2, 1, 0):
        entries = jax.vmap(entries, tuple(0 if i == axis else None for i in range(4)))
    if 0 in sizes:
        return np.zeros(sizes, bool)
    return np.asarray((jax.jit(entries) if compiled else entries)(*(np.arange(n, dtype=np.int32) for n in sizes)))


def classes(on: np.ndarray, blocks: tuple[int, int]) -> np.ndarray:
    """int [batch, heads, q blocks, kv blocks]: 0 empty, 1 partial, 2 full."""
    starts = [np.arange(0, n, block) for n, block in zip(on.shape[2:], blocks, strict=True)]
    if 0 in on.shape:
        return np.zeros((*on.shape[:2], *map(len, starts)), int)
    reduce = lambda f, x: f.reduceat(f.reduceat(x, starts[0], 2), starts[1], 3)
    some, all_ = reduce(np.logical_or, on), reduce(np.logical_and, on)
    return np.where(all_, 2, np.where(some, 1, 0))
