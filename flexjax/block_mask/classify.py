"""The class of every block of a mask: empty, partial or full.

Interval analysis (analysis/intervals.py) decides most blocks with one evaluation a block. A block that it cannot decide
is uncertain. If the caller wants exactness, uncertain blocks are evaluated entry by entry, in bounded chunks; otherwise
they count as partial.

`captures` are the arrays that the mask's program reads, followed by the two tables of its origin if it has one.
`places` are coordinates of blocks, int32 [n, 4]: batch entry, head, query block, key block. A square is SIDE x SIDE
neighbouring blocks; its coordinates count query and key blocks in squares. A code is a class or UNSURE.
"""

import functools
import math
import typing
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.analysis.block_grid import BlockGrid, block_grid, block_tiles
from flexjax.analysis.interval_loads import whole_dims
from flexjax.analysis.interval_values import Truth
from flexjax.analysis.intervals import decide, depends_on_device
from flexjax.block_mask.transpose import EMPTY, FULL, PARTIAL, bits_of
from flexjax.integers import cdiv
from flexjax.ir.evaluate_scalars import call_program
from flexjax.ir.origin import NOWHERE, OriginLayout, Placed, Starts, key_positions, query_positions
from flexjax.ir.program import Load, Program, axes_of, classify_load, loop_indices, loop_size, loops_of

Array = jax.Array

CHUNK_BLOCKS = 1 << 22  # blocks classified at once: bounds the memory of the analysis
CHUNK_ENTRIES = 1 << 21  # mask entries evaluated at once by the exact check
SIDE = 16  # blocks along a side of the squares in which a large matrix is classified first
COARSE_FROM = 1 << 18  # number of blocks above which a matrix is large
TILES_AT_ONCE = 1 << 12  # squares of blocks classified at once
UNSURE = 3  # code of an uncertain block, beside the classes EMPTY, PARTIAL and FULL
EXACT_BUDGET = 1 << 27
"""Mask entries, times the rounds of loops, that `exact=None` may evaluate: about a second on a CPU core."""

Sizes = tuple[int, int, int, int]  # q_len, kv_len, block_q, block_kv


class BlockedMask(typing.NamedTuple):
    """A mask that is cut into blocks, without its arrays: what is static when its blocks are classified."""

    program: Program
    heads: tuple[int, int]  # (batch, heads) of the block mask; 1 if all share their blocks
    sizes: Sizes
    origin: OriginLayout | None = None

    @property
    def counts(self) -> tuple[int, int]:
        q_len, kv_len, block_q, block_kv = self.sizes
        return cdiv(q_len, block_q), cdiv(kv_len, block_kv)

    def of_squares(self) -> "BlockedMask":
        """The same mask, cut into squares of SIDE x SIDE blocks: each square is one block."""
        q_len, kv_len, block_q, block_kv = self.sizes
        return self._replace(sizes=(q_len, kv_len, block_q * SIDE, block_kv * SIDE))

    def placed(self, captures: Sequence[Array]) -> tuple[Sequence[Array], Placed]:
        """(the captured arrays of the program, where queries and keys lie)."""
        if self.origin is None:
            return captures, NOWHERE
        return captures[:-2], (self.origin, Starts(*captures[-2:]))


def classes_of(truth: Truth, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """(class int8, certain bool) of blocks, of `shape`; the class of an uncertain block is PARTIAL."""
    full, empty = ~truth.can_false, ~truth.can_true
    found = jnp.where(empty, EMPTY, jnp.where(full, FULL, PARTIAL)).astype(jnp.int8)
    certain = empty | full | (truth.sure_true & truth.sure_false)
    return jnp.broadcast_to(found, shape), jnp.broadcast_to(certain, shape)


def classify_rows(mask: BlockedMask, captures: Sequence[Array], q_blocks: Array) -> tuple[Array, Array]:
    """(class int8, certain bool) of all blocks in these rows: each [batch, heads, len(q_blocks), kv blocks]."""
    columns = mask.counts[1]
    arrays, placed = mask.placed(captures)
    grid = block_grid(*mask.heads, q_blocks, jnp.arange(columns, dtype=jnp.int32), mask.sizes, placed)
    return classes_of(decide(mask.program, arrays, grid), (*mask.heads, q_blocks.shape[0], columns))


def codes_of(found: Array, certain: Array) -> Array:
    """The class of each block, int8, with UNSURE in place of the class of an uncertain one."""
    return jnp.where((found == PARTIAL) & ~certain, jnp.int8(UNSURE), found)


@functools.lru_cache(maxsize=256)
def _compiled_rows(mask: BlockedMask) -> Callable:
    """A compiled function from captures and query blocks to codes, int8 [batch, heads, len(q_blocks), kv blocks]."""

    def classify(captures: Sequence[Array], q_blocks: Array) -> Array:
        return codes_of(*classify_rows(mask, captures, q_blocks))

    return jax.jit(classify)


@functools.lru_cache(maxsize=256)
def _compiled_tiles(mask: BlockedMask) -> Callable:
    """A compiled function from captures and squares [n, 4] to codes of their blocks, int8 [n, SIDE, SIDE]."""

    def classify(captures: Sequence[Array], places: Array) -> Array:
        arrays, placed = mask.placed(captures)
        grid = block_tiles(places, SIDE, mask.sizes, placed)
        codes = codes_of(*classes_of(decide(mask.program, arrays, grid), (places.shape[0], 1, SIDE, SIDE)))
        within = jnp.arange(SIDE, dtype=jnp.int32)
        rows, columns = mask.counts
        row, column = places[:, 2, None] * SIDE + within < rows, places[:, 3, None] * SIDE + within < columns
        return jnp.where(row[:, :, None] & column[:, None, :], codes[:, 0], EMPTY)

    return jax.jit(classify)


def classify_on_host(mask: BlockedMask, captures: Sequence[Array], exact: bool | None) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates [n, 4] of the partial and of the full blocks, each ascending, for a mask whose arrays are not traced.

    `exact` as in create_block_mask; None evaluates uncertain blocks if EXACT_BUDGET suffices for all.
    """
    partial, full, unsure = _places(mask, captures)
    rounds = sum(loop_size(*axes_of(loop.inputs[1])) for loop in mask.program.loops) or 1
    affordable = len(unsure) * mask.sizes[2] * mask.sizes[3] * rounds <= EXACT_BUDGET
    if exact or (exact is None and affordable):
        found = check_exactly(mask, captures, unsure)
        partial = _in_order([partial, unsure[found == PARTIAL]])
        return partial, _in_order([full, unsure[found == FULL]])
    return _in_order([partial, unsure]), full


def _places(mask: BlockedMask, captures: Sequence[Array]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coordinates [n, 4] of the partial, full and uncertain blocks, each ascending, by interval analysis.

    A large matrix is classified in squares first; all blocks of a full (empty) square are full (empty), and only the
    blocks of the other squares are classified one by one.
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
    """int8 [n, SIDE, SIDE]: the codes of the blocks in squares; past the end they are EMPTY."""
    run = _compiled_tiles(mask)
    at_once = TILES_AT_ONCE if len(squares) > TILES_AT_ONCE // 16 else TILES_AT_ONCE // 16
    found = [np.zeros((0, SIDE, SIDE), np.int8)]
    for first in range(0, len(squares), at_once):
        part = squares[first : first + at_once]
        padded = np.concatenate([part, np.repeat(part[-1:], at_once - len(part), 0)])
        found.append(np.asarray(run(tuple(captures), padded))[: len(part)])
    return np.concatenate(found)


def can_be_tiled(program: Program) -> bool:
    """Whether a mask may be classified in squares: if at most one index of each load depends on q or kv."""
    # the analysis of other loads needs all rows and columns of a grid of blocks at once, not squares
    loops = frozenset(loop_indices(program).values())

    def varying(load: Load) -> int:
        """How many indices of a load vary within a block, without those that the analysis reduces first."""
        whole = whole_dims(load, program.captures[load.capture].shape, loops)
        dims = enumerate(zip(load.index, classify_load(load).dims, strict=True))
        return sum(n not in whole and (d != "uniform" or bool(loops_of(axes_of(a)))) for n, (a, d) in dims)

    return all(varying(load) <= 1 for load in program.loads)


def _blocks_of(squares: np.ndarray, counts: tuple[int, int]) -> np.ndarray:
    """Coordinates of all blocks in the squares [n, 4], without blocks past the end of the matrix."""
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
    """Several arrays of coordinates [n, 4] as one, sorted by batch entry, head, query block, key block."""
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
    """As `_places`, by interval analysis of every block."""
    found: dict[int, list[np.ndarray]] = {code: [np.zeros((0, 4), np.int32)] for code in (PARTIAL, FULL, UNSURE)}
    for first, codes in codes_of_rows(mask, captures):
        for code, places in found.items():
            b, h, q, kv = np.nonzero(codes == code)
            places.append(np.stack([b, h, q + first, kv], 1).astype(np.int32))
    return tuple(_in_order(found[code]) for code in (PARTIAL, FULL, UNSURE))  # type: ignore[return-value]


def codes_of_rows(mask: BlockedMask, captures: Sequence[Array]) -> Iterator[tuple[int, np.ndarray]]:
    """Classifies all blocks, a chunk of rows of blocks at a time.

    Yields (number of the first row, codes on the host: int8 [batch, heads, rows of the chunk, columns]).
    """
    rows, columns = mask.counts
    run = _compiled_rows(mask)
    at_once = max(1, min(rows, CHUNK_BLOCKS // max(1, math.prod(mask.heads) * columns)))
    for first in range(0, rows, at_once):
        numbers = np.minimum(np.arange(first, first + at_once), rows - 1).astype(np.int32)
        yield first, np.asarray(run(tuple(captures), numbers))[:, :, : rows - first]


def check_exactly(mask: BlockedMask, captures: Sequence[Array], places: np.ndarray) -> np.ndarray:
    """The class of each block at `places`, int8 [n] on the host, found by evaluating all its entries in chunks."""
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
    return jax.jit(lambda captures, places: classes_of_entries(mask, captures, places))


def classes_of_entries(mask: BlockedMask, captures: Sequence[Array], places: Array) -> Array:
    """The class of each block at `places`, int8 [n]; runs on the device, arguments may be traced.

    Entries past q_len or kv_len do not count. Where devices compute the mask differently (`depends_on_device`), a block
    is full (empty) only if all its entries are surely visible (hidden) on each of them.
    """
    q_len, kv_len, block_q, block_kv = mask.sizes
    arrays, placed = mask.placed(captures)

    def one_block(place: Array) -> Array:
        q = place[2] * block_q + jnp.arange(block_q, dtype=jnp.int32)
        kv = place[3] * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
        at_q, at_kv = query_positions(*placed, place[0], q), key_positions(*placed, place[0], kv)
        if depends_on_device(mask.program):
            rows, columns = at_q[None, None, :, None], at_kv[None, None, None, :]
            b, h = (jnp.reshape(x, (1, 1, 1, 1)) for x in place[:2])
            grid = BlockGrid(b, h, rows, rows, columns, columns, 1, 1)
            truth = decide(mask.program, arrays, grid, entries=True)
            can_be = (truth.can_true, ~truth.can_false)
            maybe, on = (jnp.broadcast_to(x, (1, 1, block_q, block_kv))[0, 0] for x in can_be)
        else:
            entry = lambda i, j: call_program(mask.program, arrays, (place[0], place[1], i, j))
            maybe = on = jax.vmap(lambda i: jax.vmap(lambda j: entry(i, j))(at_kv))(at_q)
        inside = (q < q_len)[:, None] & (kv < kv_len)[None, :]
        some, all_ = jnp.any(maybe & inside), jnp.all(on | ~inside)
        return jnp.where(all_, FULL, jnp.where(some, PARTIAL, EMPTY)).astype(jnp.int8)

    return jax.vmap(one_block)(places)


@functools.lru_cache(maxsize=256)
def compiled_traced(mask: BlockedMask, exact: bool) -> Callable:
    """`classify_traced` as a compiled function of the captures."""
    # compiled, because inside shard_map without jit each operation would be compiled and run alone
    return jax.jit(lambda captures: classify_traced(mask, captures, exact))


@functools.lru_cache(maxsize=256)
def compiled_bits(mask: BlockedMask, exact: bool) -> Callable:
    """A compiled function of the captures to the bits of the partial and of the full blocks (block_mask/transpose.py).

    Without `exact` it classifies chunks of rows of blocks, so that it takes little more memory than the bits.
    """
    rows, columns = mask.counts
    at_once = max(1, min(rows, CHUNK_BLOCKS // max(1, math.prod(mask.heads) * columns)))
    both = lambda classes: (bits_of(classes == PARTIAL), bits_of(classes == FULL))

    def classify(captures: Sequence[Array]) -> tuple[Array, Array]:
        if exact or at_once == rows:
            return both(classify_traced(mask, captures, exact))
        chunks = jnp.arange(cdiv(rows, at_once) * at_once, dtype=jnp.int32).reshape(-1, at_once)
        found = lax.map(lambda chunk: both(classify_rows(mask, captures, jnp.minimum(chunk, rows - 1))[0]), chunks)
        joined = (jnp.moveaxis(x, 0, 2).reshape(*mask.heads, chunks.size, x.shape[-1])[:, :, :rows] for x in found)
        return tuple(joined)  # type: ignore[return-value]

    return jax.jit(classify)


def classify_traced(mask: BlockedMask, captures: Sequence[Array], exact: bool) -> Array:
    """The class of every block, int8 [batch, heads, q_blocks, kv_blocks], on the device; captures may be traced."""
    found, certain = classify_rows(mask, captures, jnp.arange(mask.counts[0], dtype=jnp.int32))
    if not exact:
        return found
    flat, unsure = found.reshape(-1), ~certain.reshape(-1)
    at_once = max(1, min(flat.size, CHUNK_ENTRIES // (mask.sizes[2] * mask.sizes[3])))
    order = jnp.nonzero(unsure, size=flat.size, fill_value=flat.size)[0].astype(jnp.int32)
    order = jnp.concatenate([order, jnp.full(at_once, flat.size, jnp.int32)])

    def chunk(t: Array, classes: Array) -> Array:
        """`classes`, int8 in one dimension, with the t-th chunk of uncertain blocks evaluated entry by entry."""
        numbers = lax.dynamic_slice(order, (t * at_once,), (at_once,))
        places = jnp.stack(jnp.unravel_index(jnp.minimum(numbers, flat.size - 1), found.shape), -1).astype(jnp.int32)
        exact_classes = classes_of_entries(mask, captures, places)
        return classes.at[numbers].set(exact_classes, mode="drop")

    rounds = -(-jnp.sum(unsure, dtype=jnp.int32) // at_once)
    return lax.fori_loop(jnp.int32(0), rounds, chunk, flat).reshape(found.shape)
