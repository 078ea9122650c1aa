"""The order in which a kernel visits the tiles of the attention matrix: one tile a grid step.

`DenseOrder` visits every tile, in plain grid dimensions. `BlockSparseOrder` (block_sparse_order.py) visits the tiles
that block lists name. All tiles of an output tile are visited one after another, so that its sums stay in VMEM: a
*run*. In a query-major order a run is a row of tiles (one query tile of one query head); in a key-major order it is a
column of tiles (one key tile, with all query heads of its key head: a group).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.backends.mosaic_tpu.hoisted_operands import KernelPosition
from flexjax.plan.kernel_plan import KernelPlan

IDLE, FULL, PARTIAL, EDGE = range(4)
"""Kinds of visits. IDLE: a run without tiles, which only writes its zeros; FULL: every entry is on; PARTIAL: apply the
mask and check the ends of the sequences; EDGE: every entry inside the matrix is on, check the ends alone.
"""


@dataclasses.dataclass
class TileVisit:
    """One grid step, as the kernel sees it (traced scalars)."""

    b: jax.Array
    h: jax.Array  # query head
    q_tile: jax.Array
    kv_tile: jax.Array
    first: jax.Array  # opens its run
    last: jax.Array  # closes its run
    kind: jax.Array | int  # IDLE, FULL, PARTIAL or EDGE
    bit_words: tuple[jax.Array, ...] = ()  # the words of the tile's bit sets (BlockSparseOrder)
    group_member: jax.Array | int = 0  # number of the query head in its group; 0 in a query-major order
    number: jax.Array | int = 0  # of the visit in its launch; 0 in a dense order

    @property
    def position(self) -> KernelPosition:
        return KernelPosition(self.b, self.h, self.q_tile, self.kv_tile)


def when_on(visit: TileVisit, kinds: frozenset[int], body: Callable[[bool], None]) -> None:
    """In a kernel: runs body(checked) unless the visit is idle; `checked` is False for a FULL visit."""
    # a Python int is the kind of all visits
    if not isinstance(visit.kind, jax.Array):
        body(visit.kind != FULL)
        return
    if FULL in kinds:
        pl.when(visit.kind == FULL)(lambda: body(False))
    pl.when((visit.kind != FULL) & (visit.kind != IDLE))(lambda: body(True))


class VisitOrder:
    """What both orders have in common."""

    geometry: TileGeometry
    group: int  # query heads of one key head
    key_major: bool  # whether runs are columns of tiles
    kinds: frozenset[int]  # of visits that can occur
    overhang: bool  # some tile may reach past an end of the matrix or past a length

    chunks = 1  # kernel launches
    prefetched = 0  # number of scalar-prefetch arrays
    arrays: tuple[jax.Array, ...] = ()  # from which those are made

    def prefetch_arrays(self, chunk: jax.Array | int) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """(the scalar-prefetch arrays of launch `chunk`, its number of visits); None if the grid is static."""
        raise NotImplementedError

    def grid(self, visits: jax.Array | None) -> tuple:
        """The grid sizes of a launch; `visits`, int32 [], is known at run time, None if the grid is static."""
        raise NotImplementedError

    def semantics(self) -> tuple[str, ...]:
        """For each grid dimension "parallel", or "arbitrary" (in order, on one core)."""
        raise NotImplementedError

    def tile_at(self, *grid_and_tables: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """In an index map: (batch entry, query head, query tile, key tile) of a grid step."""
        raise NotImplementedError

    def visit(self, tables: Sequence[jax.Ref]) -> TileVisit:
        """In a kernel: the visit of this grid step; `tables` are the prefetched references of the order."""
        raise NotImplementedError


class DenseOrder(VisitOrder):
    """Every tile, in plain grid dimensions: (b, h, q tile, kv tile), or (b, key head, kv tile, q tile, group member).

    With a mask every visit is PARTIAL. Without one a visit is FULL, or EDGE if its tile reaches past an end.
    """

    def __init__(self, plan: KernelPlan, geometry: TileGeometry, group: int, key_major: bool):
        self.geometry, self.group, self.key_major = geometry, group, key_major
        g = geometry
        self.overhang = bool(g.kv_len % g.block_kv or g.q_len % g.block_q)
        if plan.mask is not None:
            self.kinds = frozenset({PARTIAL})
        elif self.overhang:
            self.kinds = frozenset({FULL, EDGE})
        else:
            self.kinds = frozenset({FULL})

    def grid(self, visits: jax.Array | None) -> tuple:
        g = self.geometry
        if self.key_major:
            return (g.batch, g.heads // self.group, g.kv_tiles, g.q_tiles, self.group)
        return (g.batch, g.heads, g.q_tiles, g.kv_tiles)

    def semantics(self) -> tuple[str, ...]:
        return ("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary")[: 5 if self.key_major else 4]

    def tile_at(self, *grid: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        if self.key_major:
            b, m, j, i, member = grid[:5]
            return b, m * np.int32(self.group) + member, i, j
        b, h, i, j = grid[:4]
        return b, h, i, j

    def prefetch_arrays(self, chunk: jax.Array | int) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        return (), None

    def _kind(self, q_tile: jax.Array, kv_tile: jax.Array) -> jax.Array | int:
        """An int where all visits have the same kind, else a traced scalar."""
        if len(self.kinds) == 1:
            (only,) = self.kinds
            return only
        g = self.geometry
        over = []
        if g.q_len % g.block_q:
            over.append(q_tile == np.int32(g.q_tiles - 1))
        if g.kv_len % g.block_kv:
            over.append(kv_tile == np.int32(g.kv_tiles - 1))
        return jnp.where(functools.reduce(jnp.logical_or, over), np.int32(EDGE), np.int32(FULL))

    def visit(self, tables: Sequence[jax.Ref]) -> TileVisit:
        """In a key-major order a run opens at the first and closes at the last member of the group."""
        ids = [pl.program_id(n) for n in range(5 if self.key_major else 4)]
        b, h, i, j = self.tile_at(*ids)
        g = self.geometry
        if self.key_major:
            member = ids[4]
            first = (i == 0) & (member == 0)
            last = (i == np.int32(g.q_tiles - 1)) & (member == np.int32(self.group - 1))
        else:
            member, first, last = 0, j == 0, j == np.int32(g.kv_tiles - 1)
        return TileVisit(b, h, i, j, first, last, self._kind(i, j), (), member)
