"""Which blocks of the attention matrix a mask visits, as one matrix of bools on the host, for layouts.

Interval analysis classifies the blocks (block_mask/classify.py). A large matrix is classified in squares of SIDE x SIDE
blocks first, and only squares that are neither full nor empty block by block. A block counts as visited unless the
analysis shows that it is empty. The matrix is dense, because a layout asks for unions of rows.
"""

import typing
from collections.abc import Callable

import numpy as np
from jax.core import Tracer

from flexjax.block_mask.classify import SIDE, BlockedMask, can_be_tiled, codes_of_rows, codes_of_squares
from flexjax.block_mask.parts import BROADCAST
from flexjax.block_mask.transpose import EMPTY, FULL
from flexjax.mod_tools.made_for import check_sizes, exactly
from flexjax.trace.lift_numpy import eager_without_mesh
from flexjax.trace.trace_mod import TracedMod, trace_mask_mod

COARSE_FROM = 1 << 16  # number of blocks above which a matrix is classified in squares first

Lengths = tuple[int, int]
Sizes = tuple[int, int, int, int]


class Visited(typing.NamedTuple):
    """The visited blocks of a mask over all batch entries and heads."""

    needed: np.ndarray  # bool [query blocks, key blocks]: visited by any batch entry and head
    work: np.ndarray  # float64 [query blocks]: visited blocks of each row, the mean over batch entries and heads


def trace_mask(mask_mod: Callable, lengths: Lengths, batch: int | None, heads: int | None) -> TracedMod:
    """Traces mask_mod(b, h, q_idx, kv_idx) for a sequence of these lengths (queries, keys).

    Batch or heads of None are not known; raises ValueError if the mask reads `b` (`h`) then, ModError if untraceable.
    """
    reach = exactly(batch, heads, *lengths)
    check_sizes("mask_mod", mask_mod, reach)
    traced = trace_mask_mod(mask_mod, (batch or BROADCAST, heads or BROADCAST, *lengths), reach)
    for name, axis, count, what in (
        ("batch", "b", batch, "number of batch entries"),
        ("heads", "h", heads, "number of query heads"),
    ):
        if count is None and traced.program.reads(axis):
            raise ValueError(
                f"`{name}` is None but `mask_mod` depends on `{axis}`; expected the {what}. The layout counts the "
                "blocks of each."
            )
    return traced


def is_traced(traced: TracedMod) -> bool:
    """Whether the mask captures an array that a jax transformation traces, so that its numbers are not known."""
    return any(isinstance(x, Tracer) for x in traced.arrays)


def visited_blocks(traced: TracedMod, heads: tuple[int, int], sizes: Sizes) -> Visited:
    """The visited blocks of a mask whose captured arrays are known.

    heads   (batch entries, query heads) that are classified: their numbers in the call if the mask reads b (h), else 1
    """
    mask = BlockedMask(traced.program, heads, sizes)
    captures: typing.Any = tuple(np.asarray(x) for x in traced.arrays)  # without a sharding
    rows, columns = mask.counts
    with eager_without_mesh():
        if heads[0] * heads[1] * rows * columns <= COARSE_FROM or not can_be_tiled(mask.program):
            codes = np.concatenate([c for _, c in codes_of_rows(mask, captures)], 2)
            on = codes != EMPTY
            return Visited(on.any((0, 1)), on.sum((0, 1, 3)) / (heads[0] * heads[1]))
        squares = np.concatenate([c for _, c in codes_of_rows(mask.of_squares(), captures)], 2)
        unclear = np.argwhere((squares != EMPTY) & (squares != FULL)).astype(np.int32)
        fine = codes_of_squares(mask, captures, unclear) != EMPTY
    needed, work = None, np.zeros(rows)
    for b, h in np.ndindex(heads):
        mine = (unclear[:, 0] == b) & (unclear[:, 1] == h)
        on = _spread(squares[b, h] == FULL, unclear[mine], fine[mine])[:rows, :columns]
        needed = on if needed is None else needed | on
        work += np.count_nonzero(on, 1)
    assert needed is not None
    return Visited(needed, work / (heads[0] * heads[1]))


def _spread(full: np.ndarray, places: np.ndarray, fine: np.ndarray) -> np.ndarray:
    """bool [rows * SIDE, columns * SIDE]: the visited blocks of one batch entry and head.

    full     bool [rows, columns]: the squares whose blocks are all visited
    places   int [n, 4], (b, h, row, column) of the squares that `fine`, bool [n, SIDE, SIDE], says block by block
    """
    rows, columns = full.shape
    on = np.empty((rows, SIDE, columns, SIDE), bool)
    on[:] = full[:, None, :, None]
    on[places[:, 2], :, places[:, 3], :] = fine
    return on.reshape(rows * SIDE, columns * SIDE)
