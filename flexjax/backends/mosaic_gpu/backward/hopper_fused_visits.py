"""Which query tiles each CTA of the fused backward kernel visits, and in which order.

A CTA owns a key tile of one key head, and visits query tiles of the query heads that read this key head (the *group*).
`query_visits` turns the block lists into one list of query tiles for each key tile. Tiles with and without the mask are
mixed in the order of their queries, because a fixed order of dQ additions (machine/dq_order.py) runs over both. A list
holds *codes*: the number of a query tile times 2, plus 1 where the mask applies. The other kernels: tile_visits.py.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.backward import tile_visits
from flexjax.backends.mosaic_gpu.backward.hopper_tiles import FUSED_KEYS
from flexjax.backends.mosaic_gpu.backward.tile_visits import VisitLists
from flexjax.backends.mosaic_gpu.machine import dq_order
from flexjax.backends.mosaic_gpu.machine.dq_order import DqOrder
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.block_mask.host_or_program import largest_first, module_of, not_folded
from flexjax.block_mask.transpose import flags_of_lists
from flexjax.plan.kernel_plan import KernelPlan

AFTER_ALL = 1 << 30  # the entry of a list past its end: larger than the code of any tile, so that sorting puts it last
State = typing.TypeVar("State")


class QueryVisits(typing.NamedTuple, typing.Generic[Part]):
    """The visits of each key tile, int32 [batch or 1, heads or 1, key tiles, ...]; Refs inside a kernel."""

    num: Part | None = None  # how many query tiles a key tile visits; None: all
    codes: Part | None = None  # [..., width] ascending; those past `num` mean nothing; None: all query tiles
    # [..., query tiles] machine/dq_order.py; None: additions are in any order, or every key tile visits all queries
    tickets: Part | None = None
    # [...] the key tiles, those with most visits first; None: CTAs of a head take its key tiles in ascending order
    launch_order: Part | None = None


def query_visits(
    plan: KernelPlan, lists: VisitLists[jax.Array], kv_tiles: int, q_tiles: int, queries: int, order: DqOrder | None
) -> QueryVisits[jax.Array]:
    """The visits of each key tile, computed before the kernel, on the host if the lists are known, else by XLA.

    Partial and full blocks are merged in the order of their queries. `queries`, those of a query tile, divide the
    mask's blocks; `order` is that of the additions to dQ, None for any order.
    """
    visits = tile_visits.visits_for(plan, FUSED_KEYS, queries, transposed=True)
    if not visits.lists:
        return QueryVisits()
    xp = module_of(*lists)
    lists = VisitLists(*not_folded(*typing.cast(tuple[jax.Array | None, ...], lists)))
    parts, nums = [], []
    for num, index, masked in ((lists.full_num, lists.full_index, 0), (lists.partial_num, lists.partial_index, 1)):
        if num is None or index is None:
            continue
        valid = xp.arange(index.shape[-1]) < num[..., None]
        parts.append(xp.where(valid, index * 2 + masked, np.int32(AFTER_ALL)))
        nums.append(num)
    # no key tile visits anything
    if not parts:
        shape = (visits.batch, visits.heads, kv_tiles)
        none = jnp.zeros((*shape, q_tiles), jnp.int32) if order is not None else None
        return QueryVisits(jnp.zeros(shape, jnp.int32), jnp.zeros((*shape, 1), jnp.int32), none, None)
    blocks = xp.sort(xp.concatenate(parts, axis=-1), axis=-1) if len(parts) > 1 else parts[0]
    num = sum(nums[1:], start=nums[0])
    inside = xp.arange(visits.per_block, dtype=np.int32)
    codes = (blocks[..., None] // 2 * visits.per_block + inside) * 2 + (blocks[..., None] & 1)
    codes = xp.where(blocks[..., None] == AFTER_ALL, np.int32(0), codes).reshape(*blocks.shape[:-1], -1)
    each_tile = lambda x: xp.repeat(x, visits.own_per_block, axis=2)[:, :, :kv_tiles]
    num, codes = each_tile(num * visits.per_block), each_tile(codes)
    if order is None:
        return QueryVisits(num, codes, None, largest_first(num))
    visited = flags_of_lists(num, codes // 2, q_tiles).astype(np.int32)
    return QueryVisits(num, codes, dq_order.tickets(visited, order), None)


class OwnKeys(typing.NamedTuple):
    """What a CTA owns."""

    b: Scalar  # batch entry
    key_head: Scalar
    mask_b: Scalar  # the batch entry of its lists: b, or 0 where all batch entries share lists
    tile: Scalar  # key tile of its head
    rank: Scalar  # in its head (machine/dq_order.py); 0 where additions are in any order


@dataclasses.dataclass(frozen=True)
class FusedVisits:
    """What is known of the visits at compile time."""

    plan: KernelPlan
    order: DqOrder | None  # of the additions to dQ, None for any order
    q_tiles: int  # of a head
    rows_shared: bool = False  # whether what `begin` of `each` returns serves all heads of a group

    @property
    def lists_by_head(self) -> bool:
        """Whether each query head has lists of its own."""
        return self.plan.blocks is not None and self.plan.blocks.heads > 1

    @property
    def lists_by_batch(self) -> bool:
        """Whether each batch entry has lists of its own."""
        return self.plan.blocks is not None and self.plan.blocks.batch > 1

    @property
    def heads_inside(self) -> bool:
        """Whether a CTA visits a query tile for all query heads of its group before it visits the next query tile."""
        # CTAs then stay one visit apart in a fixed order
        return self.order is not None and self.plan.group > 1 and not self.lists_by_head

    def each(
        self,
        visits: QueryVisits[Ref],
        own: OwnKeys,
        begin: Callable[[Scalar], State],
        step: Callable[[State, Scalar, Scalar, Scalar, bool | Scalar], None],
        by_runs: bool = False,
    ) -> Scalar:
        """Calls step(begin(head), head, query tile, number, masked) for every visit; returns how many there were.

        Query tiles come in the order of the list, or backwards with `DqOrder.downward`. With `by_runs`, `masked` is a
        bool, and runs of visits with and without the mask have loops of their own; else it is a scalar in one loop.
        `begin` is called once a head; where `heads_inside`, once for each visit and head, or, where `rows_shared`, once
        in all.
        """
        plan, zero = self.plan, jnp.int32(0)
        _, h_kv, mask_b, tile, _ = own
        downward = self.order is not None and self.order.downward

        def one_head(g: Scalar, before: Scalar) -> Scalar:
            """Makes the visits of query head `g` of the group; returns the number of visits up to its last."""
            h = h_kv * plan.group + g
            mask_h = h if self.lists_by_head else zero
            state = begin(h) if self.rows_shared or not self.heads_inside else None
            count = jnp.int32(self.q_tiles) if visits.num is None else visits.num[mask_b, mask_h, tile]
            # by runs, the code of the first visit is read also where there is none
            position = lambda i: (lax.max(count - 1 - i, zero) if by_runs else count - 1 - i) if downward else i

            def code(i: Scalar) -> Scalar:
                assert visits.codes is not None
                return visits.codes[mask_b, mask_h, tile, position(i)]

            is_masked = lambda code: (code & 1) == 1
            query_tile = lambda code: lax.shift_right_logical(code, jnp.int32(1))

            def visit(i: Scalar, q_tile: Scalar, masked: bool | Scalar) -> None:
                if not self.heads_inside:
                    step(typing.cast(State, state), h, q_tile, before + i, masked)
                    return

                @pl.loop(0, plan.group)
                def visit_head(g: Scalar) -> None:
                    head = h_kv * plan.group + g
                    own_state = typing.cast(State, state) if self.rows_shared else begin(head)
                    step(own_state, head, q_tile, i * plan.group + g, masked)

            def run(masked: bool, here: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
                """Visits a run of entries, all `masked` or all not, from `here` on, (position, code)."""

                def one(here: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
                    following = code(lax.min(here[0] + 1, count - 1))
                    visit(here[0], query_tile(here[1]), masked)
                    return here[0] + 1, following

                return lax.while_loop(lambda here: (here[0] < count) & (is_masked(here[1]) == masked), one, here)

            if visits.num is None:
                pl.loop(0, count)(lambda i: visit(i, position(i), plan.mask is not None))
            elif by_runs:
                both = lambda here: run(True, run(False, here))
                lax.while_loop(lambda here: here[0] < count, both, (zero, code(zero)))
            else:

                @pl.loop(0, count)
                def visit_entry(i: Scalar) -> None:
                    now = code(i)
                    visit(i, query_tile(now), is_masked(now))

            return before + count * (plan.group if self.heads_inside else 1)

        if plan.group == 1 or self.heads_inside:
            return one_head(zero, zero)
        return lax.fori_loop(0, plan.group, one_head, zero)
