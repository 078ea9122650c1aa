"""Which tiles a CTA of a backward kernel visits, read from the lists of the block mask inside the kernel.

A CTA owns a tile of one axis (queries for dQ, keys for dK/dV) and visits tiles of the other axis: first those that need
no mask (the full list), then those where the mask applies (the partial list). Without a block mask it visits all tiles.
Each list names blocks of the mask, which are one or more tiles long on either axis. The *step* of a visit is its number
within its list, counted in tiles. The forward pass and the fused backward kernel have schedules of their own.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.block_mask import transpose
from flexjax.block_mask.host_or_program import largest_first, module_of
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import BlockLists, KernelPlan

State = typing.TypeVar("State")


class VisitLists(typing.NamedTuple, typing.Generic[Part]):
    """The block lists of the owning axis, int32, Refs inside a kernel; None for a list that the mask lacks."""

    partial_num: Part | None = None  # [batch or 1, query heads or 1, owned blocks] how many blocks it names
    partial_index: Part | None = None  # [..., width] ascending; those past the number mean nothing
    full_num: Part | None = None
    full_index: Part | None = None


class VisitCounts(typing.NamedTuple):
    """How many tiles a CTA visits without and with the mask."""

    unmasked: Scalar
    masked: Scalar


@dataclasses.dataclass(frozen=True)
class TileVisits:
    """What is known of the visits at compile time.

    In its methods `refs` are the lists in the kernel, b and h batch entry and head, `own` the number of the owned tile.
    """

    own_per_block: int  # owned tiles in a block of the mask, which share one list
    per_block: int  # visited tiles in a block of the mask
    tiles: int  # visited tiles of the whole axis
    lists: bool  # False: all `tiles` are visited
    mask_all: bool  # whether the mask applies to every tile, where there are no lists
    batch: int = 1  # of the lists: 1, or that of the call
    heads: int = 1

    def counts(self, refs: VisitLists[Ref], b: Scalar, h: Scalar, own: Scalar) -> VisitCounts:
        """How many tiles the owned tile of head (b, h) visits without and with the mask."""
        if not self.lists:
            zero, all_ = jnp.int32(0), jnp.int32(self.tiles)
            return VisitCounts(zero if self.mask_all else all_, all_ if self.mask_all else zero)
        at = self._at(b, h, own)
        number = lambda ref: jnp.int32(0) if ref is None else ref[at] * self.per_block
        return VisitCounts(number(refs.full_num), number(refs.partial_num))

    def tile(self, refs: VisitLists[Ref], b: Scalar, h: Scalar, own: Scalar, step: Scalar, masked: bool) -> Scalar:
        """The tile that the owned tile visits at `step` of the partial list (`masked`) or of the full list."""
        if not self.lists:
            return step
        index = refs.partial_index if masked else refs.full_index
        if index is None:
            return step
        if self.per_block == 1:
            return index[(*self._at(b, h, own), step)]
        block = index[(*self._at(b, h, own), lax.div(step, jnp.int32(self.per_block)))]
        return block * self.per_block + lax.rem(step, jnp.int32(self.per_block))

    def in_order(self, order: Ref | None, b: Scalar, h: Scalar, rank: Scalar) -> Scalar:
        """The number of the owned tile at place `rank` of `order` (`longest_first`), in head (b, h)."""
        return rank if order is None else order[b if self.batch > 1 else 0, h if self.heads > 1 else 0, rank]

    def _at(self, b: Scalar, h: Scalar, own: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """The index of the owned tile's list in the arrays of `VisitLists`: (batch entry, head, block)."""
        own = own if self.own_per_block == 1 else lax.div(own, jnp.int32(self.own_per_block))
        zero = jnp.int32(0)
        return (b if self.batch > 1 else zero, h if self.heads > 1 else zero, own)


def visits_for(plan: KernelPlan, own_tile: int, visited_tile: int, transposed: bool) -> TileVisits:
    """What is known of the visits; the kernel owns keys if `transposed`. Tiles, in tokens, divide the mask's blocks."""
    length = plan.q_len if transposed else plan.kv_len
    tiles = cdiv(length, visited_tile)
    blocks = plan.blocks
    if blocks is None:
        return TileVisits(1, 1, tiles, lists=False, mask_all=plan.mask is not None)
    own, visited = (blocks.block_kv, blocks.block_q) if transposed else (blocks.block_q, blocks.block_kv)
    return TileVisits(
        own // own_tile,
        visited // visited_tile,
        tiles,
        lists=True,
        mask_all=False,
        batch=blocks.batch,
        heads=blocks.heads,
    )


def visit_lists(plan: KernelPlan, lists: BlockLists | None, transposed: bool) -> VisitLists[jax.Array]:
    """The block lists of each query block, or with `transposed` of each key block; of numpy if known."""
    if lists is None or plan.blocks is None:
        return VisitLists()
    if not transposed:
        return VisitLists(*lists)
    columns = cdiv(plan.kv_len, plan.blocks.block_kv)
    arrays: list[jax.Array | None] = []
    for num, index, width in ((*lists[:2], plan.blocks.partial_t), (*lists[2:], plan.blocks.full_t)):
        if num is None or index is None:
            arrays += (None, None)
        else:
            arrays += transpose.transposed(num, index, columns=columns, width=width)
    return VisitLists(*arrays)


# ------------------------------------------------------------------- which CTA owns which tile


def longest_first(visits: TileVisits, lists: VisitLists[jax.Array], own_tiles: int) -> jax.Array | None:
    """The owned tiles, those with most visits first, [batch or 1, heads or 1, own_tiles]; None: all equal."""
    nums = [n for n in (lists.partial_num, lists.full_num) if n is not None]
    if not visits.lists or not nums:
        return None
    work = sum(nums[1:], start=nums[0])
    return largest_first(module_of(work).repeat(work, visits.own_per_block, axis=-1)[..., :own_tiles])


def tile_and_head(program: Scalar, tiles: int, heads: int, head_major: bool) -> tuple[Scalar, Scalar]:
    """(rank of the owned tile in its head, number of the head over all batch entries) of CTA `program`."""
    # With `head_major`, what the CTAs of a head read stays in the L2 cache. Otherwise the first ranks of all heads come
    # first; with the longest tiles first, no long CTA then runs alone at the end.
    if head_major:
        return lax.rem(program, jnp.int32(tiles)), lax.div(program, jnp.int32(tiles))
    return lax.div(program, jnp.int32(heads)), lax.rem(program, jnp.int32(heads))


@dataclasses.dataclass(frozen=True)
class KeyTileVisits:
    """The visits of the key tile that one CTA owns."""

    plan: KernelPlan
    visits: TileVisits
    lists: VisitLists[Ref]
    b: Scalar
    key_head: Scalar
    tile: Scalar
    queries: int  # of a visited tile

    def each(
        self, begin: Callable[[Scalar], State], step: Callable[[State, Scalar, Scalar, Scalar, bool], None]
    ) -> Scalar:
        """Calls step(begin(head), head, first query, number, masked) for every visit; returns how many there were.

        The query heads that read the key head come one after the other, and for each the visits without the mask come
        first. `begin` is called once a head, also where the head has no visits.
        """
        plan, visits = self.plan, self.visits

        def one_head(g: Scalar, before: Scalar) -> Scalar:
            """Makes the visits of one query head; returns the number of visits up to its last."""
            h = self.key_head * plan.group + g
            counts = visits.counts(self.lists, self.b, h, self.tile)
            between = before + counts.unmasked
            state = begin(h)

            def one(i: Scalar, start: Scalar, masked: bool) -> None:
                """Calls `step` for visit i of a list; `start` is how many visits came before that list."""
                q_tile = visits.tile(self.lists, self.b, h, self.tile, i, masked)
                step(state, h, q_tile * self.queries, start + i, masked)

            pl.loop(0, counts.unmasked)(lambda i: one(i, before, False))
            if plan.mask is not None or plan.blocks is not None:
                pl.loop(0, counts.masked)(lambda i: one(i, between, True))
            return between + counts.masked

        if plan.group == 1:
            return one_head(jnp.int32(0), jnp.int32(0))
        return lax.fori_loop(0, plan.group, one_head, jnp.int32(0))


def owned_key_tile(
    plan: KernelPlan,
    visits: TileVisits,
    lists: VisitLists[Ref],
    order: Ref | None,
    kv_tiles: int,
    head_major: bool,
    queries: int,
) -> KeyTileVisits:
    """Inside a kernel: the key tile that this CTA owns, with its visits; CTAs of a cluster own one tile together."""
    program = lax.axis_index("program")
    rank, head = tile_and_head(program, kv_tiles, plan.batch * plan.kv_heads, head_major)
    b, key_head = lax.div(head, i32(plan.kv_heads)), lax.rem(head, i32(plan.kv_heads))
    # with an order for each head, that of the first query head of the key head counts
    tile = rank if order is None else visits.in_order(order, b, key_head * plan.group, rank)
    return KeyTileVisits(plan, visits, lists, b, key_head, tile, queries)
