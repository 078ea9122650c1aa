"""The class of every block of a mask: empty, partial or full.

Interval analysis (analysis/intervals.py) decides most blocks with one evaluation a block. A block that it cannot decide is
uncertain. If the caller wants exactness, uncertain blocks are evaluated entry by entry, in bounded chunks; otherwise they
count as partial.

`heads` is everywhere (batch, heads) of the block mask, `captures` the arrays that the mask program reads, `sizes` see Sizes.
Coordinates of blocks are int32 [n, 4]: batch entry, head, query block, key block. A square is SIDE x SIDE neighbouring blocks;
its coordinates count query and key blocks in squares. A code is a class or UNSURE.

A Truth is what the analysis knows of the mask in each block: whether it can be True or False, and surely is somewhere.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.analysis.block_grid import block_grid, block_tiles
from flexjax.analysis.interval_values import Truth
from flexjax.analysis.intervals import decide
from flexjax.block_mask.transpose import EMPTY, FULL, PARTIAL
from flexjax.ir.evaluate_scalars import call_program
from flexjax.ir.origin import NOWHERE, OriginLayout, Placed, Starts, key_positions, query_positions
from flexjax.ir.program import Program, classify_load

Array = jax.Array

CHUNK_BLOCKS = 1 << 22
"""Blocks classified at once: bounds the memory of the analysis."""
CHUNK_ENTRIES = 1 << 21
"""Mask entries evaluated at once by the exact check."""
SIDE = 16
"""Blocks along a side of the squares in which a large matrix is classified first."""
COARSE_FROM = 1 << 18
"""Number of blocks above which a matrix is large."""
TILES_AT_ONCE = 1 << 12
"""Squares of blocks classified at once."""
UNSURE = 3
"""Code of an uncertain block, beside the classes EMPTY, PARTIAL and FULL."""
EXACT_BUDGET = 1 << 27
"""Mask entries that the exact check may evaluate where `exact` is None: about a second on a CPU core."""

Sizes = tuple[int, int, int, int]
"""q_len, kv_len, block_q, block_kv."""


def blocks_along(length: int, block: int) -> int:
    """The number of blocks of size `block` that cover `length`, both in tokens; the last one may reach past the end."""
    return -(-length // block)


def classes_of(truth: Truth, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """(class int8, certain bool) of blocks, each of the given shape, from what the analysis knows of the mask in each block.

    The class of an uncertain block is PARTIAL. A partial block is certain if it surely has visible and hidden entries.
    """
    full, empty = ~truth.can_false, ~truth.can_true
    found = jnp.where(empty, EMPTY, jnp.where(full, FULL, PARTIAL)).astype(jnp.int8)
    certain = empty | full | (truth.sure_true & truth.sure_false)
    return jnp.broadcast_to(found, shape), jnp.broadcast_to(certain, shape)


def placed_captures(captures: Sequence[Array], origin: OriginLayout | None) -> tuple[Sequence[Array], Placed]:
    """The captured arrays, and where queries and keys lie, apart: with an origin its two tables follow the captured arrays."""
    if origin is None:
        return captures, NOWHERE
    return captures[:-2], (origin, Starts(*captures[-2:]))


def classify_rows(
    program: Program,
    captures: Sequence[Array],
    heads: tuple[int, int],
    sizes: Sizes,
    q_blocks: Array,
    origin: OriginLayout | None = None,
) -> tuple[Array, Array]:
    """(class int8, certain bool) of all blocks in the given rows, by interval analysis: each [batch, heads, len(q_blocks), kv
    blocks].

    q_blocks   int32: the numbers of the query blocks; all key blocks of each are classified
    captures, origin   as for `placed_captures`
    """
    columns = blocks_along(sizes[1], sizes[3])
    captures, placed = placed_captures(captures, origin)
    grid = block_grid(*heads, q_blocks, jnp.arange(columns, dtype=jnp.int32), sizes, placed)
    return classes_of(decide(program, captures, grid), (*heads, q_blocks.shape[0], columns))


def codes_of(found: Array, certain: Array) -> Array:
    """The class of each block, or UNSURE for an uncertain one, int8, from what `classes_of` returns."""
    return jnp.where((found == PARTIAL) & ~certain, jnp.int8(UNSURE), found)


@functools.lru_cache(maxsize=256)
def _compiled_rows(program: Program, heads: tuple[int, int], sizes: Sizes, origin: OriginLayout | None) -> Callable:
    """A compiled function from captures and numbers of query blocks to codes, int8 [batch, heads, len(q_blocks), kv blocks]."""

    def classify(captures: Sequence[Array], q_blocks: Array) -> Array:
        """The codes of the blocks in these rows."""
        return codes_of(*classify_rows(program, captures, heads, sizes, q_blocks, origin))

    return jax.jit(classify)


@functools.lru_cache(maxsize=256)
def _compiled_tiles(program: Program, sizes: Sizes, origin: OriginLayout | None) -> Callable:
    """A compiled function from captures and coordinates [n, 4] of squares to codes of their blocks, int8 [n, SIDE, SIDE]."""

    def classify(captures: Sequence[Array], places: Array) -> Array:
        """The codes of the blocks in the squares at `places`; a block past the end of the matrix is EMPTY."""
        arrays, placed = placed_captures(captures, origin)
        grid = block_tiles(places, SIDE, sizes, placed)
        codes = codes_of(*classes_of(decide(program, arrays, grid), (places.shape[0], 1, SIDE, SIDE)))
        within = jnp.arange(SIDE, dtype=jnp.int32)
        rows, columns = blocks_along(sizes[0], sizes[2]), blocks_along(sizes[1], sizes[3])
        row, column = places[:, 2, None] * SIDE + within < rows, places[:, 3, None] * SIDE + within < columns
        return jnp.where(row[:, :, None] & column[:, None, :], codes[:, 0], EMPTY)

    return jax.jit(classify)


def classify_on_host(
    program: Program,
    captures: Sequence[Array],
    heads: tuple[int, int],
    sizes: Sizes,
    exact: bool | None,
    origin: OriginLayout | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates [n, 4] of the partial and of the full blocks, each in ascending order, for a mask whose arrays are not traced.

    captures  as for `placed_captures`
    exact   True: evaluate every uncertain block entry by entry. None: do so if EXACT_BUDGET suffices for all. False: never
    """
    partial, full, unsure = _places(program, captures, heads, sizes, origin)
    affordable = len(unsure) * sizes[2] * sizes[3] <= EXACT_BUDGET
    if exact or (exact is None and affordable):
        found = check_exactly(program, captures, unsure, sizes, origin)
        partial = _in_order([partial, unsure[found == PARTIAL]])
        return partial, _in_order([full, unsure[found == FULL]])
    return _in_order([partial, unsure]), full


def _places(
    program: Program, captures: Sequence[Array], heads: tuple[int, int], sizes: Sizes, origin: OriginLayout | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coordinates [n, 4] of the partial, full and uncertain blocks, by interval analysis.

    A large matrix is classified in squares of SIDE x SIDE blocks first; all blocks of a full (empty) square are full (empty),
    and only the blocks of the other squares are classified one by one.
    """
    counts = (blocks_along(sizes[0], sizes[2]), blocks_along(sizes[1], sizes[3]))
    large = math.prod(heads) * math.prod(counts) > COARSE_FROM and max(counts) > SIDE
    apart = origin is not None and not origin.single  # a square of blocks may straddle two runs
    if not large or apart or not _can_be_tiled(program):
        return _places_of_rows(program, captures, heads, sizes, origin)
    coarse = (sizes[0], sizes[1], sizes[2] * SIDE, sizes[3] * SIDE)
    partial, full, unsure = _places(program, captures, heads, coarse, origin)
    open_squares = np.concatenate([partial, unsure])
    run = _compiled_tiles(program, sizes, origin)
    found: dict[int, list[np.ndarray]] = {PARTIAL: [], FULL: [_blocks_of(full, counts)], UNSURE: []}
    at_once = TILES_AT_ONCE if len(open_squares) > TILES_AT_ONCE // 16 else TILES_AT_ONCE // 16
    for first in range(0, len(open_squares), at_once):
        part = open_squares[first : first + at_once]
        padded = np.concatenate([part, np.repeat(part[-1:], at_once - len(part), 0)])
        codes = np.asarray(run(tuple(captures), padded))[: len(part)]
        for code, places in found.items():
            square, row, column = np.nonzero(codes == code)
            b, h, q, kv = part[square].T
            places.append(np.stack([b, h, q * SIDE + row, kv * SIDE + column], 1).astype(np.int32))
    return tuple(_in_order(found[code]) for code in (PARTIAL, FULL, UNSURE))  # type: ignore[return-value]


def _can_be_tiled(program: Program) -> bool:
    """Whether a mask program may be classified in squares: if at most one index of each load depends on q or kv.

    The analysis of other loads needs all rows and columns of a grid of blocks at once, not squares.
    """
    return all(sum(d != "uniform" for d in classify_load(load).dims) <= 1 for load in program.loads)


def _blocks_of(squares: np.ndarray, counts: tuple[int, int]) -> np.ndarray:
    """Coordinates of all blocks in the squares at the coordinates `squares` [n, 4], without blocks past the end of the matrix.

    counts   how many query blocks and key blocks the matrix has
    """
    row, column = (x.ravel() for x in np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij"))
    repeated = lambda x: np.repeat(x, SIDE * SIDE)
    b, h, q, kv = squares.T
    rows, columns = repeated(q) * SIDE + np.tile(row, len(q)), repeated(kv) * SIDE + np.tile(column, len(q))
    inside = (rows < counts[0]) & (columns < counts[1])
    return np.stack([repeated(b), repeated(h), rows, columns], 1)[inside].astype(np.int32)


def _in_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Several arrays of coordinates [n, 4] as one array, sorted by batch entry, head, query block, key block."""
    places = np.concatenate(parts)
    return places[np.lexsort(places.T[::-1])]


def _places_of_rows(
    program: Program, captures: Sequence[Array], heads: tuple[int, int], sizes: Sizes, origin: OriginLayout | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coordinates [n, 4] of the partial, full and uncertain blocks, by interval analysis of every block.

    A chunk of rows (query blocks) is classified at a time, so that a chunk has at most CHUNK_BLOCKS blocks.
    """
    rows, columns = blocks_along(sizes[0], sizes[2]), blocks_along(sizes[1], sizes[3])
    run = _compiled_rows(program, heads, sizes, origin)
    at_once = max(1, min(rows, CHUNK_BLOCKS // max(1, heads[0] * heads[1] * columns)))
    found: dict[int, list[np.ndarray]] = {code: [np.zeros((0, 4), np.int32)] for code in (PARTIAL, FULL, UNSURE)}
    for first in range(0, rows, at_once):
        numbers = np.minimum(np.arange(first, first + at_once), rows - 1).astype(np.int32)
        codes = np.asarray(run(tuple(captures), numbers))[:, :, : rows - first]
        for code, places in found.items():
            b, h, q, kv = np.nonzero(codes == code)
            places.append(np.stack([b, h, q + first, kv], 1).astype(np.int32))
    return tuple(_in_order(found[code]) for code in (PARTIAL, FULL, UNSURE))  # type: ignore[return-value]


def check_exactly(
    program: Program,
    captures: Sequence[Array],
    places: np.ndarray,
    sizes: Sizes,
    origin: OriginLayout | None = None,
) -> np.ndarray:
    """The class of each block at the coordinates `places` [n, 4], int8 [n] on the host, found by evaluating all its entries.

    The blocks are evaluated in chunks of at most CHUNK_ENTRIES entries (at least one block), each by `classes_of_entries`.
    """
    run = _compiled_entries(program, sizes, origin)
    at_once = max(1, CHUNK_ENTRIES // (sizes[2] * sizes[3]))
    if len(places) <= at_once // 8:  # chunks have one of two shapes, because each shape is compiled
        at_once //= 8
    out = []
    for first in range(0, len(places), at_once):
        part = places[first : first + at_once]
        short = at_once - len(part)
        padded = np.concatenate([part, np.repeat(part[-1:], short, 0)]).astype(np.int32)
        out.append(np.asarray(run(tuple(captures), padded))[: len(part)])
    return np.concatenate(out) if out else np.zeros(0, np.int8)


@functools.lru_cache(maxsize=256)
def _compiled_entries(program: Program, sizes: Sizes, origin: OriginLayout | None) -> Callable:
    """`classes_of_entries` as a compiled function of captures and places."""
    return jax.jit(lambda captures, places: classes_of_entries(program, captures, places, sizes, origin))


def classes_of_entries(
    program: Program, captures: Sequence[Array], places: Array, sizes: Sizes, origin: OriginLayout | None = None
) -> Array:
    """The class of each block at the coordinates `places` (int32 [n, 4]), int8 [n], found by evaluating the mask at every entry.

    Entries past q_len or kv_len do not count. Runs on the device; arguments may be traced.
    """
    q_len, kv_len, block_q, block_kv = sizes
    captures, placed = placed_captures(captures, origin)

    def one_block(place: Array) -> Array:
        """The class of the block at the coordinates `place` [4]."""
        q = place[2] * block_q + jnp.arange(block_q, dtype=jnp.int32)
        kv = place[3] * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
        entry = lambda i, j: call_program(program, captures, (place[0], place[1], i, j))
        at_q, at_kv = query_positions(*placed, place[0], q), key_positions(*placed, place[0], kv)
        on = jax.vmap(lambda i: jax.vmap(lambda j: entry(i, j))(at_kv))(at_q)
        inside = (q < q_len)[:, None] & (kv < kv_len)[None, :]
        some, all_ = jnp.any(on & inside), jnp.all(on | ~inside)
        return jnp.where(all_, FULL, jnp.where(some, PARTIAL, EMPTY)).astype(jnp.int8)

    return jax.vmap(one_block)(places)


@functools.lru_cache(maxsize=256)
def compiled_traced(
    program: Program, heads: tuple[int, int], sizes: Sizes, exact: bool, origin: OriginLayout | None
) -> Callable:
    """`classify_traced` as a compiled function of the captures.

    It is compiled because inside shard_map without jit each operation would be compiled and run alone.
    """
    return jax.jit(lambda captures: classify_traced(program, captures, heads, sizes, exact, origin))


def classify_traced(
    program: Program,
    captures: Sequence[Array],
    heads: tuple[int, int],
    sizes: Sizes,
    exact: bool,
    origin: OriginLayout | None = None,
) -> Array:
    """The class of every block, int8 [batch, heads, q_blocks, kv_blocks], computed on the device; captures may be traced.

    captures  as for `placed_captures`
    exact   whether uncertain blocks are evaluated entry by entry; otherwise they are PARTIAL
    """
    rows = blocks_along(sizes[0], sizes[2])
    found, certain = classify_rows(program, captures, heads, sizes, jnp.arange(rows, dtype=jnp.int32), origin)
    if not exact:
        return found
    flat, unsure = found.reshape(-1), ~certain.reshape(-1)
    at_once = max(1, min(flat.size, CHUNK_ENTRIES // (sizes[2] * sizes[3])))
    order = jnp.nonzero(unsure, size=flat.size, fill_value=flat.size)[0].astype(jnp.int32)
    order = jnp.concatenate([order, jnp.full(at_once, flat.size, jnp.int32)])

    def chunk(t: Array, classes: Array) -> Array:
        """`classes` of all blocks (flat) with those of the t-th chunk of uncertain blocks evaluated exactly."""
        numbers = lax.dynamic_slice(order, (t * at_once,), (at_once,))
        places = jnp.stack(jnp.unravel_index(jnp.minimum(numbers, flat.size - 1), found.shape), -1).astype(jnp.int32)
        exact_classes = classes_of_entries(program, captures, places, sizes, origin)
        return classes.at[numbers].set(exact_classes, mode="drop")

    rounds = -(-jnp.sum(unsure, dtype=jnp.int32) // at_once)
    return lax.fori_loop(jnp.int32(0), rounds, chunk, flat).reshape(found.shape)
