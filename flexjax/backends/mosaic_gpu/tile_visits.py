"""Which tiles a CTA of a backward kernel visits, read from the lists of the block mask inside the kernel.

A CTA owns a tile of one axis (queries for dQ, keys for dK/dV) and visits tiles of the other axis: first those that
need no mask (the full list), then those where the mask applies (the partial list). Without a block mask it visits all
tiles. Each list names blocks of the mask, which are one or more tiles long on either axis. The *step* of a visit is
its number within its list, counted in tiles.

The forward pass and the fused backward kernel have schedules of their own.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32
from flexjax.backends.mosaic_gpu.shared_memory import Part
from flexjax.block_mask import transpose
from flexjax.block_mask.host_or_program import largest_first, module_of
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import BlockLists, KernelPlan

State = typing.TypeVar("State")


class VisitLists(typing.NamedTuple, typing.Generic[Part]):
    """The block lists of the owning axis, int32: arrays outside a kernel (of numpy if the lists are known), Refs inside; None for a list
    that the mask lacks. Heads are query heads, also where key blocks own.

    partial_num, full_num       [batch or 1, heads or 1, owned blocks] how many blocks each list names
    partial_index, full_index   [batch or 1, heads or 1, owned blocks, width] the numbers of the blocks, ascending; those past the
                                number mean nothing
    """

    partial_num: Part | None = None
    partial_index: Part | None = None
    full_num: Part | None = None
    full_index: Part | None = None


class VisitCounts(typing.NamedTuple):
    """How many tiles a CTA visits without and with the mask, int32 scalars."""

    unmasked: Scalar
    masked: Scalar


@dataclasses.dataclass(frozen=True)
class TileVisits:
    """What is known of the visits at compile time.

    own_per_block   owned tiles in a block of the mask, which share one list
    per_block       visited tiles in a block of the mask
    tiles           visited tiles of the whole axis
    lists           False: all `tiles` are visited, with the mask if `mask_all`
    mask_all        whether the mask applies to every tile, where there are no lists
    batch, heads    of the lists: 1, or those of the call

    In its methods `refs` are the lists in the kernel, b and h batch entry and head, `own` the number of the owned
    tile.
    """

    own_per_block: int
    per_block: int
    tiles: int
    lists: bool
    mask_all: bool
    batch: int = 1
    heads: int = 1

    def counts(self, refs: VisitLists[Ref], b: Scalar, h: Scalar, own: Scalar) -> VisitCounts:
        """How many tiles the owned tile of head (b, h) visits without and with the mask.

        With lists: those of the full list without the mask, those of the partial list with it; a list that is None has
        none. Without lists all tiles are visited, with the mask if `mask_all`, otherwise without it.
        """
        if not self.lists:
            zero, all_ = jnp.int32(0), jnp.int32(self.tiles)
            return VisitCounts(zero if self.mask_all else all_, all_ if self.mask_all else zero)
        at = self._at(b, h, own)
        number = lambda ref: jnp.int32(0) if ref is None else ref[at] * self.per_block
        return VisitCounts(number(refs.full_num), number(refs.partial_num))

    def tile(self, refs: VisitLists[Ref], b: Scalar, h: Scalar, own: Scalar, step: Scalar, masked: bool) -> Scalar:
        """The number of the tile that the owned tile visits at `step` of the partial list (`masked`) or of the full
        list; `step` itself without lists, or where that list is None.

        step   less than the list's number in `counts`; read from the lists in the kernel, past the number without
               meaning
        """
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
        """The number of the owned tile at place `rank` of `order`, in head (b, h); `rank` itself if `order` is None.

        order   what `longest_first` gives
        """
        return rank if order is None else order[b if self.batch > 1 else 0, h if self.heads > 1 else 0, rank]

    def _at(self, b: Scalar, h: Scalar, own: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """The index of the owned tile's list in the arrays of `VisitLists`: (batch entry, head, block), 0 on an axis where all share their
        lists.
        """
        own = own if self.own_per_block == 1 else lax.div(own, jnp.int32(self.own_per_block))
        zero = jnp.int32(0)
        return (b if self.batch > 1 else zero, h if self.heads > 1 else zero, own)


def visits_for(plan: KernelPlan, own_tile: int, visited_tile: int, transposed: bool) -> TileVisits:
    """What is known at compile time of the visits of a kernel on this plan.

    own_tile, visited_tile   tokens of an owned and of a visited tile; they divide the mask's blocks, if there are any
    transposed               True: the kernel owns keys and visits queries; False: the other way round
    """
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
    """The block lists of the owning axis, as arrays: those of each query block, or with `transposed` those of each key
    block; of numpy if the lists of the call are known.

    lists   those of each query block, as the call has them; None without a block mask

    All None without a block mask; a list that the mask lacks stays None.
    """
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
    """[batch or 1, heads or 1, own_tiles] int32, of numpy if the lists are known: the numbers of the owned tiles, those with most visits
    first, and ascending among equals; None without a block mask or where it has no lists, because all then visit equally many.

    visits      of the kernel
    lists       from `visit_lists`
    own_tiles   how many owned tiles a head has
    """
    nums = [n for n in (lists.partial_num, lists.full_num) if n is not None]
    if not visits.lists or not nums:
        return None
    work = sum(nums[1:], start=nums[0])
    return largest_first(module_of(work).repeat(work, visits.own_per_block, axis=-1)[..., :own_tiles])


def tile_and_head(program: Scalar, tiles: int, heads: int, head_major: bool) -> tuple[Scalar, Scalar]:
    """(rank of the owned tile in its head, number of the head over all batch entries) of the CTA with number
    `program`.

    tiles        owned tiles of a head
    heads        heads of all batch entries together
    head_major   the tiles of one head have adjacent CTAs, so that what they read stays in the L2 cache. Otherwise the
                 first ranks of all heads come first; with the longest tiles first, no long CTA then runs alone at the
                 end

    CTAs start roughly in the order of their number.
    """
    if head_major:
        return lax.rem(program, jnp.int32(tiles)), lax.div(program, jnp.int32(tiles))
    return lax.div(program, jnp.int32(heads)), lax.rem(program, jnp.int32(heads))


@dataclasses.dataclass(frozen=True)
class KeyTileVisits:
    """The visits of the key tile that one CTA owns.

    plan            of the call
    visits, lists   which query tiles the key tile visits
    b, key_head     batch entry and key head of the CTA
    tile            number of its key tile
    queries         of a visited tile
    """

    plan: KernelPlan
    visits: TileVisits
    lists: VisitLists[Ref]
    b: Scalar
    key_head: Scalar
    tile: Scalar
    queries: int

    def each(
        self,
        begin: Callable[[Scalar], State],
        step: Callable[[State, Scalar, Scalar, Scalar, bool], None],
    ) -> Scalar:
        """Calls step(begin(head), head, first query, number, masked) for every visit; returns how many visits there
        were.

        begin   begin(query head) returns the first argument of `step` for all visits of this head; called once a head,
                also where the head has no visits
        step    called once for each visit; returns nothing

        The query heads that read the key head come one after the other, and for each the visits without the mask come
        first. `number` counts the visits before this one, over all of those heads. `masked`, a bool, says whether the
        mask applies.
        """
        plan, visits = self.plan, self.visits

        def one_head(g: Scalar, before: Scalar) -> Scalar:
            """Makes the visits of one query head, those without the mask first; returns the number of visits up to
            its last. Without a mask_mod and a block mask there is no second loop.

            g        number of the query head among those that read the key head
            before   how many visits the query heads before it made
            """
            h = self.key_head * plan.group + g
            counts = visits.counts(self.lists, self.b, h, self.tile)
            between = before + counts.unmasked
            state = begin(h)

            def one(i: Scalar, start: Scalar, masked: bool) -> None:
                """Calls `step` for visit number i of the full or (`masked`) partial list; `start` is how many visits
                came before that list's first.
                """
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
    """Inside a kernel: the key tile that this CTA owns, with its visits, which `KeyTileVisits.each` reads from `lists` later.

    The kernel is launched (`kernel_parts.launch`) with programs = kv_tiles * batch * key heads, on the one grid axis "program". Heads
    count over all batch entries, those of entry 0 first. CTAs of a cluster have one number, so they own one tile together.

    plan           of the call
    visits         from `visits_for` with transposed=True, for the sizes of the kernel's key and query tiles
    lists, order   from `visit_lists` and `longest_first`, as Refs. With an order for each head, that of the first query
                   head of the key head counts; None: tiles in their own order
    kv_tiles       key tiles of a key head
    head_major     whether the key tiles of one head have adjacent numbers in the grid; otherwise the first tiles of all heads come first
    queries        of a visited tile
    """
    program = lax.axis_index("program")
    rank, head = tile_and_head(program, kv_tiles, plan.batch * plan.kv_heads, head_major)
    b, key_head = lax.div(head, i32(plan.kv_heads)), lax.rem(head, i32(plan.kv_heads))
    tile = rank if order is None else visits.in_order(order, b, key_head * plan.group, rank)
    return KeyTileVisits(plan, visits, lists, b, key_head, tile, queries)
