"""The class of every block of a mask: empty, partial or full.

Interval analysis (analysis/intervals.py) decides most blocks with one evaluation a block. A block that it cannot decide is
uncertain. If the caller wants exactness, uncertain blocks are evaluated entry by entry, in bounded chunks; otherwise they
count as partial.

`mask` is a BlockedMask in every function, and `captures` are the arrays that its program reads, followed by the two tables of its
origin if it has one. Coordinates of blocks are int32 [n, 4]: batch entry, head, query block, key block. A square is SIDE x SIDE
neighbouring blocks; its coordinates count query and key blocks in squares. A code is a class or UNSURE.

A Truth is what the analysis knows of the mask in each block: whether it can be True or False, and surely is somewhere.
"""

import functools
import math
import typing
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.analysis.block_grid import block_grid, block_tiles
from flexjax.analysis.interval_values import Truth
from flexjax.analysis.intervals import decide
from flexjax.block_mask.transpose import EMPTY, FULL, PARTIAL
from flexjax.integers import cdiv
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


class BlockedMask(typing.NamedTuple):
    """A mask that is cut into blocks, without its arrays: what is static when its blocks are classified.

    program  the mask program
    heads    (batch, heads) of the block mask; 1 if all batch entries or heads share their blocks
    sizes    q_len, kv_len, block_q, block_kv
    origin   where queries and keys lie in the whole problem; None: from 0 on
    """

    program: Program
    heads: tuple[int, int]
    sizes: Sizes
    origin: OriginLayout | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of query blocks and of key blocks."""
        q_len, kv_len, block_q, block_kv = self.sizes
        return cdiv(q_len, block_q), cdiv(kv_len, block_kv)

    def of_squares(self) -> "BlockedMask":
        """The same mask, cut into squares of SIDE x SIDE blocks: each square is one block."""
        q_len, kv_len, block_q, block_kv = self.sizes
        return self._replace(sizes=(q_len, kv_len, block_q * SIDE, block_kv * SIDE))

    def placed(self, captures: Sequence[Array]) -> tuple[Sequence[Array], Placed]:
        """(the captured arrays of the program, where queries and keys lie). With an origin these are `captures` without the last two
        arrays, which are the tables of the origin, and (origin, the tables); without one `captures` and NOWHERE.
        """
        if self.origin is None:
            return captures, NOWHERE
        return captures[:-2], (self.origin, Starts(*captures[-2:]))


def classes_of(truth: Truth, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """(class int8, certain bool) of blocks, two arrays of `shape`, from what the analysis knows of the mask in each block.

    truth   has arrays that broadcast to `shape`

    The class of an uncertain block is PARTIAL. A partial block is certain if it surely has visible and hidden entries.
    """
    full, empty = ~truth.can_false, ~truth.can_true
    found = jnp.where(empty, EMPTY, jnp.where(full, FULL, PARTIAL)).astype(jnp.int8)
    certain = empty | full | (truth.sure_true & truth.sure_false)
    return jnp.broadcast_to(found, shape), jnp.broadcast_to(certain, shape)


def classify_rows(mask: BlockedMask, captures: Sequence[Array], q_blocks: Array) -> tuple[Array, Array]:
    """(class int8, certain bool) of all blocks in the given rows, by interval analysis: each [batch, heads, len(q_blocks), kv
    blocks].

    q_blocks   int32: the numbers of the query blocks; all key blocks of each are classified
    """
    columns = mask.counts[1]
    arrays, placed = mask.placed(captures)
    grid = block_grid(*mask.heads, q_blocks, jnp.arange(columns, dtype=jnp.int32), mask.sizes, placed)
    return classes_of(decide(mask.program, arrays, grid), (*mask.heads, q_blocks.shape[0], columns))


def codes_of(found: Array, certain: Array) -> Array:
    """The class of each block, int8, with UNSURE in place of the class of an uncertain one.

    found, certain   the two arrays that `classes_of` returns
    """
    return jnp.where((found == PARTIAL) & ~certain, jnp.int8(UNSURE), found)


@functools.lru_cache(maxsize=256)
def _compiled_rows(mask: BlockedMask) -> Callable:
    """A compiled function from captures and numbers of query blocks to codes, int8 [batch, heads, len(q_blocks), kv blocks]; cached by
    the mask.
    """

    def classify(captures: Sequence[Array], q_blocks: Array) -> Array:
        """The codes of the blocks in the rows `q_blocks` (int32 numbers of query blocks), int8 [batch, heads, len(q_blocks), kv blocks]."""
        return codes_of(*classify_rows(mask, captures, q_blocks))

    return jax.jit(classify)


@functools.lru_cache(maxsize=256)
def _compiled_tiles(mask: BlockedMask) -> Callable:
    """A compiled function from captures and coordinates [n, 4] of squares to codes of their blocks, int8 [n, SIDE, SIDE]; cached by the
    mask.
    """

    def classify(captures: Sequence[Array], places: Array) -> Array:
        """The codes of the blocks in the squares at `places` (int32 [n, 4]), int8 [n, SIDE, SIDE]; a block past the end of the matrix is
        EMPTY.
        """
        arrays, placed = mask.placed(captures)
        grid = block_tiles(places, SIDE, mask.sizes, placed)
        codes = codes_of(*classes_of(decide(mask.program, arrays, grid), (places.shape[0], 1, SIDE, SIDE)))
        within = jnp.arange(SIDE, dtype=jnp.int32)
        rows, columns = mask.counts
        row, column = places[:, 2, None] * SIDE + within < rows, places[:, 3, None] * SIDE + within < columns
        return jnp.where(row[:, :, None] & column[:, None, :], codes[:, 0], EMPTY)

    return jax.jit(classify)


def classify_on_host(mask: BlockedMask, captures: Sequence[Array], exact: bool | None) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates [n, 4] of the partial and of the full blocks, each in ascending order, for a mask whose arrays are not traced.

    exact   True: evaluate every uncertain block entry by entry. None: do so if EXACT_BUDGET suffices for all. False: never
    """
    partial, full, unsure = _places(mask, captures)
    affordable = len(unsure) * mask.sizes[2] * mask.sizes[3] <= EXACT_BUDGET
    if exact or (exact is None and affordable):
        found = check_exactly(mask, captures, unsure)
        partial = _in_order([partial, unsure[found == PARTIAL]])
        return partial, _in_order([full, unsure[found == FULL]])
    return _in_order([partial, unsure]), full


def _places(mask: BlockedMask, captures: Sequence[Array]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coordinates [n, 4] of the partial, full and uncertain blocks, in this order and each ascending, by interval analysis.

    A large matrix is classified in squares of SIDE x SIDE blocks first; all blocks of a full (empty) square are full (empty), and only
    the blocks of the other squares are classified one by one. Programs for which `can_be_tiled` is False, and masks whose origin has
    several runs, are classified block by block.
    """
    large = math.prod(mask.heads) * math.prod(mask.counts) > COARSE_FROM and max(mask.counts) > SIDE
    apart = mask.origin is not None and not mask.origin.single  # a square of blocks may straddle two runs
    if not large or apart or not can_be_tiled(mask.program):
        return _places_of_rows(mask, captures)
    partial, full, unsure = _places(mask.of_squares(), captures)
    open_squares = np.concatenate([partial, unsure])
    codes = codes_of_squares(mask, captures, open_squares)
    found: dict[int, list[np.ndarray]] = {PARTIAL: [], FULL: [_blocks_of(full, mask.counts)], UNSURE: []}
    for code, places in found.items():
        square, row, column = np.nonzero(codes == code)
        b, h, q, kv = open_squares[square].T
        places.append(np.stack([b, h, q * SIDE + row, kv * SIDE + column], 1).astype(np.int32))
    return tuple(_in_order(found[code]) for code in (PARTIAL, FULL, UNSURE))  # type: ignore[return-value]


def codes_of_squares(mask: BlockedMask, captures: Sequence[Array], squares: np.ndarray) -> np.ndarray:
    """int8 [n, SIDE, SIDE]: the codes of the blocks in squares of SIDE x SIDE blocks; past the end they are EMPTY.

    squares   int32 [n, 4]: (b, h, q, kv) of each, q and kv counted in squares
    """
    run = _compiled_tiles(mask)
    at_once = TILES_AT_ONCE if len(squares) > TILES_AT_ONCE // 16 else TILES_AT_ONCE // 16
    found = [np.zeros((0, SIDE, SIDE), np.int8)]
    for first in range(0, len(squares), at_once):
        part = squares[first : first + at_once]
        padded = np.concatenate([part, np.repeat(part[-1:], at_once - len(part), 0)])
        found.append(np.asarray(run(tuple(captures), padded))[: len(part)])
    return np.concatenate(found)


def can_be_tiled(program: Program) -> bool:
    """Whether a mask program may be classified in squares: if at most one index of each load depends on q or kv.

    The analysis of other loads needs all rows and columns of a grid of blocks at once, not squares.
    """
    return all(sum(d != "uniform" for d in classify_load(load).dims) <= 1 for load in program.loads)


def _blocks_of(squares: np.ndarray, counts: tuple[int, int]) -> np.ndarray:
    """Coordinates of all blocks in the squares at the coordinates `squares` [n, 4], without blocks past the end of the matrix.

    counts   how many query blocks and key blocks the matrix has
    """
    within = np.arange(
        SIDE, dtype=np.int32
    )  # of 32 bits, because a mask over a million tokens has 33 million full blocks
    row, column = (x.ravel() for x in np.meshgrid(within, within, indexing="ij"))
    repeated = lambda x: np.repeat(x, SIDE * SIDE)
    b, h, q, kv = squares.T
    rows, columns = repeated(q) * SIDE + np.tile(row, len(q)), repeated(kv) * SIDE + np.tile(column, len(q))
    inside = (rows < counts[0]) & (columns < counts[1])
    found = np.stack([repeated(b), repeated(h), rows, columns], 1)
    return found if inside.all() else found[inside]


def _in_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Several arrays of coordinates [n, 4] as one array, sorted by batch entry, head, query block, key block; at least one array must be
    given.
    """
    places = np.concatenate(parts)
    if not len(places):
        return places
    number = places[:, 0].astype(np.int64)  # of the block among all blocks: one key sorts faster than four
    for column in places.T[1:]:
        number = number * (int(column.max()) + 1) + column
    if (number[1:] >= number[:-1]).all():
        return places
    return places[np.argsort(number, kind="stable")]


def _places_of_rows(mask: BlockedMask, captures: Sequence[Array]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coordinates [n, 4] of the partial, full and uncertain blocks, in this order and each ascending, by interval analysis of every
    block.

    A chunk of rows (query blocks) is classified at a time, so that a chunk has at most CHUNK_BLOCKS blocks, or one row.
    """
    found: dict[int, list[np.ndarray]] = {code: [np.zeros((0, 4), np.int32)] for code in (PARTIAL, FULL, UNSURE)}
    for first, codes in codes_of_rows(mask, captures):
        for code, places in found.items():
            b, h, q, kv = np.nonzero(codes == code)
            places.append(np.stack([b, h, q + first, kv], 1).astype(np.int32))
    return tuple(_in_order(found[code]) for code in (PARTIAL, FULL, UNSURE))  # type: ignore[return-value]


def codes_of_rows(mask: BlockedMask, captures: Sequence[Array]) -> Iterator[tuple[int, np.ndarray]]:
    """Classifies all blocks, a chunk of rows of blocks at a time. Yields (number of the first row, the codes of the chunk on the host:
    int8 [batch, heads, rows of the chunk, columns]) in the order of the rows; nothing for a matrix without rows.
    """
    rows, columns = mask.counts
    run = _compiled_rows(mask)
    at_once = max(1, min(rows, CHUNK_BLOCKS // max(1, math.prod(mask.heads) * columns)))
    for first in range(0, rows, at_once):
        numbers = np.minimum(np.arange(first, first + at_once), rows - 1).astype(np.int32)
        yield first, np.asarray(run(tuple(captures), numbers))[:, :, : rows - first]


def check_exactly(mask: BlockedMask, captures: Sequence[Array], places: np.ndarray) -> np.ndarray:
    """The class of each block at the coordinates `places` [n, 4], int8 [n] on the host, found by evaluating all its entries.

    The blocks are evaluated in chunks of at most CHUNK_ENTRIES entries (at least one block), each by `classes_of_entries`. No places
    give int8 [0].
    """
    run = _compiled_entries(mask)
    at_once = max(1, CHUNK_ENTRIES // (mask.sizes[2] * mask.sizes[3]))
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
def _compiled_entries(mask: BlockedMask) -> Callable:
    """`classes_of_entries` as a compiled function (captures, places) -> int8 [n]; cached by the mask."""
    return jax.jit(lambda captures, places: classes_of_entries(mask, captures, places))


def classes_of_entries(mask: BlockedMask, captures: Sequence[Array], places: Array) -> Array:
    """The class of each block at the coordinates `places` (int32 [n, 4]: batch entry, head, query block, key block), int8 [n].

    The mask is evaluated at every entry of these blocks.
    Entries past q_len or kv_len do not count. Runs on the device; arguments may be traced.
    """
    q_len, kv_len, block_q, block_kv = mask.sizes
    arrays, placed = mask.placed(captures)

    def one_block(place: Array) -> Array:
        """The class, int8, of the block at the coordinates `place`, int32 [4]: batch entry, head, query block, key block."""
        q = place[2] * block_q + jnp.arange(block_q, dtype=jnp.int32)
        kv = place[3] * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
        entry = lambda i, j: call_program(mask.program, arrays, (place[0], place[1], i, j))
        at_q, at_kv = query_positions(*placed, place[0], q), key_positions(*placed, place[0], kv)
        on = jax.vmap(lambda i: jax.vmap(lambda j: entry(i, j))(at_kv))(at_q)
        inside = (q < q_len)[:, None] & (kv < kv_len)[None, :]
        some, all_ = jnp.any(on & inside), jnp.all(on | ~inside)
        return jnp.where(all_, FULL, jnp.where(some, PARTIAL, EMPTY)).astype(jnp.int8)

    return jax.vmap(one_block)(places)


@functools.lru_cache(maxsize=256)
def compiled_traced(mask: BlockedMask, exact: bool) -> Callable:
    """`classify_traced` as a compiled function of the captures, which returns int8 [batch, heads, q_blocks, kv_blocks]; cached by the mask
    and `exact`.

    It is compiled because inside shard_map without jit each operation would be compiled and run alone.
    """
    return jax.jit(lambda captures: classify_traced(mask, captures, exact))


def classify_traced(mask: BlockedMask, captures: Sequence[Array], exact: bool) -> Array:
    """The class of every block, int8 [batch, heads, q_blocks, kv_blocks], computed on the device; captures may be traced.

    exact   whether uncertain blocks are evaluated entry by entry; otherwise they are PARTIAL
    """
    found, certain = classify_rows(mask, captures, jnp.arange(mask.counts[0], dtype=jnp.int32))
    if not exact:
        return found
    flat, unsure = found.reshape(-1), ~certain.reshape(-1)
    at_once = max(1, min(flat.size, CHUNK_ENTRIES // (mask.sizes[2] * mask.sizes[3])))
    order = jnp.nonzero(unsure, size=flat.size, fill_value=flat.size)[0].astype(jnp.int32)
    order = jnp.concatenate([order, jnp.full(at_once, flat.size, jnp.int32)])

    def chunk(t: Array, classes: Array) -> Array:
        """`classes` of all blocks, int8 in one dimension, with those of the t-th chunk of uncertain blocks evaluated entry by entry."""
        numbers = lax.dynamic_slice(order, (t * at_once,), (at_once,))
        places = jnp.stack(jnp.unravel_index(jnp.minimum(numbers, flat.size - 1), found.shape), -1).astype(jnp.int32)
        exact_classes = classes_of_entries(mask, captures, places)
        return classes.at[numbers].set(exact_classes, mode="drop")

    rounds = -(-jnp.sum(unsure, dtype=jnp.int32) // at_once)
    return lax.fori_loop(jnp.int32(0), rounds, chunk, flat).reshape(found.shape)
