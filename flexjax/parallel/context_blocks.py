"""Which blocks of the attention matrix a mask visits, as one matrix of bools on the host: what layouts are computed from.

The blocks are classified by interval analysis (block_mask/classify.py). A large matrix is classified in squares of SIDE x SIDE
blocks first, and only squares that are neither full nor empty are classified block by block. The result is a dense matrix of
one byte a block (67 MB for a million tokens in blocks of 128), because a layout asks for unions of rows.

A block counts as visited unless the analysis shows that it is empty.
"""

import typing
from collections.abc import Callable

import numpy as np
from jax.core import Tracer

from flexjax.block_mask.classify import SIDE, BlockedMask, can_be_tiled, codes_of_rows, codes_of_squares
from flexjax.block_mask.parts import BROADCAST
from flexjax.block_mask.transpose import EMPTY, FULL
from flexjax.trace.lift_numpy import eager_without_mesh
from flexjax.trace.trace_mod import TracedMod, trace_mask_mod

COARSE_FROM = 1 << 16
"""Number of blocks above which a matrix is classified in squares first."""

Lengths = tuple[int, int]
Sizes = tuple[int, int, int, int]


class Visited(typing.NamedTuple):
    """The visited blocks of a mask over all batch entries and heads.

    needed   bool [query blocks, key blocks]: whether any batch entry and head visits the block
    work     float64 [query blocks]: visited blocks of each row of blocks, the mean over batch entries and heads
    """

    needed: np.ndarray
    work: np.ndarray


def trace_mask(mask_mod: Callable, lengths: Lengths, batch: int | None, heads: int | None) -> TracedMod:
    """Traces mask_mod(b, h, q_idx, kv_idx) for a sequence of these lengths (queries, keys). Raises ModError, a ValueError, if it cannot
    be traced.

    batch, heads   numbers of batch entries and of query heads; None: not known. Raises ValueError if the mask reads `b` (`h`) and that
                   number is None
    """
    traced = trace_mask_mod(mask_mod, (batch or BROADCAST, heads or BROADCAST, *lengths))
    for name, axis, count, what in (
        ("batch", "b", batch, "number of batch entries"),
        ("heads", "h", heads, "number of query heads"),
    ):
        if count is None and traced.program.reads(axis):
            raise ValueError(
                f"`{name}` is None but `mask_mod` depends on `{axis}`; expected the {what}. The layout counts the blocks of each."
            )
    return traced


def is_traced(traced: TracedMod) -> bool:
    """Whether the mask captures an array that a jax transformation traces, so that its numbers are not known."""
    return any(isinstance(x, Tracer) for x in traced.arrays)


def visited_blocks(traced: TracedMod, heads: tuple[int, int], sizes: Sizes) -> Visited:
    """The visited blocks of a mask whose captured arrays are known.

    heads   (batch entries, query heads) that are classified: their numbers in the call if the mask reads b (h), else 1
    sizes   q_len, kv_len, block_q, block_kv
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
    """bool [rows * SIDE, columns * SIDE]: which blocks of one batch entry and head are visited.

    full     bool [rows, columns]: the squares whose blocks are all visited; the others are not visited unless they are in `places`
    places   int [n, 4], (b, h, row, column) of the squares that were classified block by block; b and h are not looked at
    fine     bool [n, SIDE, SIDE]: which blocks of these squares are visited
    """
    rows, columns = full.shape
    on = np.empty((rows, SIDE, columns, SIDE), bool)
    on[:] = full[:, None, :, None]
    on[places[:, 2], :, places[:, 3], :] = fine
    return on.reshape(rows * SIDE, columns * SIDE)
