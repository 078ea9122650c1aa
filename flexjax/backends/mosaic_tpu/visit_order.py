"""The order in which a kernel visits the tiles of the attention matrix: one tile a grid step.

`DenseOrder` visits every tile, in plain grid dimensions. `BlockSparseOrder` (block_sparse_order.py) visits the tiles that
block lists name. All tiles of an output tile are visited one after another, so that its sums stay in VMEM: a *run*.
In a query-major order a run is a row of tiles (one query tile of one query head); in a key-major order it is a column of
tiles (one key tile, with all query heads that share its key head).

A group is the query heads of one key head. An entry is "on" if the mask shows it.
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
"""Kinds of visits. IDLE: a run without tiles, which only writes its zeros; FULL: every entry is on; PARTIAL: apply the mask
and check the ends of the sequences; EDGE: every entry inside the matrix is on, check the ends alone."""


@dataclasses.dataclass
class TileVisit:
    """One grid step, as the kernel sees it (traced scalars).

    b, h, q_tile, kv_tile   the tile: batch entry, query head, query tile, key tile
    first, last             whether the visit opens or closes its run
    kind                    IDLE, FULL, PARTIAL or EDGE
    bit_words               the words of the tile's bit sets (BlockSparseOrder), empty without them
    group_member            number of the query head among those of its key head; 0 in a query-major order
    number                  of the visit in its launch; 0 in a dense order
    """

    b: jax.Array
    h: jax.Array
    q_tile: jax.Array
    kv_tile: jax.Array
    first: jax.Array
    last: jax.Array
    kind: jax.Array | int
    bit_words: tuple[jax.Array, ...] = ()
    group_member: jax.Array | int = 0
    number: jax.Array | int = 0

    @property
    def position(self) -> KernelPosition:
        """Which tile is visited."""
        return KernelPosition(self.b, self.h, self.q_tile, self.kv_tile)


def when_on(visit: TileVisit, kinds: frozenset[int], body: Callable[[bool], None]) -> None:
    """In a kernel: runs body(checked) unless the visit is idle. `checked` is False for a FULL visit, else True.

    kinds   the kinds of visits that can occur in the kernel's order; without FULL, no code for FULL visits is emitted.
            Where the kind is a Python int, the same for all visits, the body is emitted once without a branch
    """
    if not isinstance(visit.kind, jax.Array):
        body(visit.kind != FULL)
        return
    if FULL in kinds:
        pl.when(visit.kind == FULL)(lambda: body(False))
    pl.when((visit.kind != FULL) & (visit.kind != IDLE))(lambda: body(True))


class VisitOrder:
    """The order in which a kernel visits tiles: what its two classes have in common.

    geometry     sizes of the matrix and of the tiles
    group        query heads of one key head
    key_major    whether runs are columns of tiles
    kinds        the kinds of visits that can occur
    overhang     whether some tile may reach past an end of the matrix or past a length
    chunks       number of kernel launches
    prefetched   number of scalar-prefetch arrays
    arrays       the arrays from which those are made
    """

    geometry: TileGeometry
    group: int
    key_major: bool
    kinds: frozenset[int]
    overhang: bool

    chunks = 1
    prefetched = 0
    arrays: tuple[jax.Array, ...] = ()

    def prefetch_arrays(self, chunk: jax.Array | int) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """(the scalar-prefetch arrays of a launch, its number of visits); the number is None if the grid is static.

        chunk   number of the launch, 0 .. chunks - 1
        """
        raise NotImplementedError

    def grid(self, visits: jax.Array | None) -> tuple:
        """The grid sizes of a launch.

        visits   number of visits of the launch, int32 [], known at run time (`prefetch_arrays`); None if the grid is static
        """
        raise NotImplementedError

    def semantics(self) -> tuple[str, ...]:
        """For each grid dimension "parallel", or "arbitrary" (in order, on one core)."""
        raise NotImplementedError

    def tile_at(self, *grid_and_tables: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """In an index map: (batch entry, query head, query tile, key tile) of a grid step.

        grid_and_tables   the indices of the grid step, then the scalar-prefetch references
        """
        raise NotImplementedError

    def visit(self, tables: Sequence[jax.Ref]) -> TileVisit:
        """In a kernel: the visit of this grid step.

        tables   references of the scalar-prefetch arrays of the order
        """
        raise NotImplementedError


class DenseOrder(VisitOrder):
    """Every tile, in plain grid dimensions: (b, h, q tile, kv tile), or (b, key head, kv tile, q tile, group member).

    With a mask every visit is PARTIAL. Without one a visit is FULL, or EDGE if its tile reaches past an end of the matrix.
    """

    def __init__(self, plan: KernelPlan, geometry: TileGeometry, group: int, key_major: bool):
        """The order for a plan without block lists.

        geometry    sizes of the matrix and of the tiles
        group       query heads of one key head
        key_major   whether runs are columns of tiles
        """
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
        """The static grid sizes, in the order that the class docstring gives. `visits` is not used and is None."""
        g = self.geometry
        if self.key_major:
            return (g.batch, g.heads // self.group, g.kv_tiles, g.q_tiles, self.group)
        return (g.batch, g.heads, g.q_tiles, g.kv_tiles)

    def semantics(self) -> tuple[str, ...]:
        """For each grid dimension "parallel" (batch entries and heads), or "arbitrary" for those that run in order on one core
        (all others).
        """
        return ("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary")[: 5 if self.key_major else 4]

    def tile_at(self, *grid: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(batch entry, query head, query tile, key tile) of the grid step with these indices."""
        if self.key_major:
            b, m, j, i, member = grid[:5]
            return b, m * np.int32(self.group) + member, i, j
        b, h, i, j = grid[:4]
        return b, h, i, j

    def prefetch_arrays(self, chunk: jax.Array | int) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """No arrays, and None: the grid is static. There is one launch, and `chunk` is not read."""
        return (), None

    def _kind(self, q_tile: jax.Array, kv_tile: jax.Array) -> jax.Array | int:
        """The kind of the visit of the tile with these numbers: an int where all visits have the same kind, else a traced
        scalar: EDGE for the last query tile or key tile if it reaches past the end, else FULL.
        """
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
        """In a kernel: the visit of this grid step, whose tile follows from the grid indices; `tables` is empty. A run opens at its first
        tile and closes at its last (key-major: of the first and of the last member of the group).
        """
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
