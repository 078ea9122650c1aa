"""A warpgroup of the forward kernel on mma.sync: copies its share of every tile, and computes attention for its rows.

    S = Q K^T           mma.sync, both operands from shared memory (machine/mma_products.py)
    score, mask, P      as in the kernel for Hopper (rows.py)
    out += P V          mma.sync, P from registers

A step is one key tile. All warpgroups copy and compute. In every half of a step they meet, and then begin the copy into
the slot that all have read for the last time:

    keys n arrived, all meet       copy values n + stages - 1     S of step n
    values n arrived, all meet     copy keys n + stages           softmax, out += P V of step n

So with `stages` slots in either ring, 2 stages - 1 tiles are in flight or in use at any time, and with one stage keys
travel during softmax and P V, values during Q K^T. Groups of cp.async are counted: at either meeting 2 stages - 1
groups are not yet waited for, and the oldest is needed. After the last tile empty groups keep the count.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.forward.mma_tiles import MmaForwardScratch, MmaForwardTile
from flexjax.backends.mosaic_gpu.forward.online_softmax import State
from flexjax.backends.mosaic_gpu.forward.pages import PagedTile
from flexjax.backends.mosaic_gpu.forward.rows import Phase, Position, QueryRows, programs_at_rows
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, ForwardOutputs, ForwardSetup
from flexjax.backends.mosaic_gpu.machine import registers
from flexjax.backends.mosaic_gpu.machine.branch import cond, when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32, rows_of, slot_of, slot_parts
from flexjax.backends.mosaic_gpu.machine.mma_copies import Copies
from flexjax.backends.mosaic_gpu.machine.mma_products import add_product, product_transposed
from flexjax.backends.mosaic_gpu.machine.mma_results import write_rows
from flexjax.backends.mosaic_gpu.machine.thread_tiles import rounded_tile

Starts = tuple[Scalar, ...]  # numbers of the first keys of the tiles of this step and the next ones


@dataclasses.dataclass(frozen=True)
class MmaRows(QueryRows[MmaForwardTile]):
    """The rows of one work item that one warpgroup computes; in the methods `n` is the number of a step in the item."""

    scratch: MmaForwardScratch[Ref]
    copies: Copies
    q_start: Scalar  # number of the first row

    @classmethod
    def of(
        cls,
        setup: ForwardSetup[MmaForwardTile],
        inputs: ForwardInputs[Ref],
        outputs: ForwardOutputs[Ref],
        scratch: MmaForwardScratch[Ref],
    ) -> "MmaRows":
        """The rows of the calling warpgroup in the work item of its CTA, with the programs' row vectors computed."""
        tile = setup.tile
        copies = Copies(tile.copying, tile.groups, scratch.meeting)
        item = setup.scheduler.item(inputs.mask_rows, lax.axis_index("program"))
        q_start = item.q_tile * tile.block_q + copies.group * tile.rows
        programs = programs_at_rows(setup, inputs, item, q_start)
        return cls(setup, inputs, outputs, item, programs, scratch, copies, q_start)

    def compute(self) -> None:
        """Runs all steps of the work item, which may have none, and writes its results."""
        setup, tile = self.setup, self.setup.tile
        out = plgpu.layout_cast(jnp.zeros((tile.rows, tile.value_dim), jnp.float32), registers.TILE)
        if setup.plan.blocks is None:
            out, state = self._steps(out)
        else:
            out, state = cond(self.item.total > 0, lambda: self._steps(out), lambda: (out, setup.softmax.start))
        position = Position(self.item.b, self.item.h, self.item.q_tile)
        divisor = self.write_statistics(self.row_term, state, position, self.q_start)
        out = out * registers.broadcast_vector(divisor, "row", out.shape)
        self._write(out, position)

    # ----------------------------------------------------------------- the steps

    def _steps(self, out: jax.Array) -> tuple[jax.Array, State]:
        """Runs every step of an item that has some; returns (sum of P V before the division, softmax state)."""
        carry = (self.first_copies(), out, self.setup.softmax.start)
        unmasked, total = self.item.unmasked, self.item.total
        carry = lax.fori_loop(i32(0), unmasked, functools.partial(self._step, phase=Phase.UNMASKED), carry)
        if self.setup.has_masked_steps:
            carry = lax.fori_loop(unmasked, total, functools.partial(self._step, phase=Phase.MASKED), carry)
        return carry[1:]

    def first_copies(self) -> Starts:
        """Begins the copies that come before step 0, and waits for the queries; the first keys of the first steps."""
        stages, scratch = self.setup.tile.stages, self.scratch
        starts = tuple(self._key_start(i32(n)) for n in range(stages))
        self._copy_queries()
        self._copy(i32(0), starts[0], "key")
        for n in range(1, stages):
            self._copy(i32(n - 1), starts[n - 1], "value")
            self._copy(i32(n), starts[n], "key")
        if scratch.query_full is not None:
            plgpu.barrier_wait(scratch.query_full.at[0])
        return starts

    def _step(self, n: Scalar, carry: tuple[Starts, jax.Array, State], phase: Phase) -> tuple[Starts, jax.Array, State]:
        """S, softmax and P V of step n; carry: (first keys of the next `stages` steps, out, softmax state)."""
        setup, scratch = self.setup, self.scratch
        starts, out, state = carry
        slot = slot_of(n, setup.tile.stages)
        start = self._key_start(n + setup.tile.stages)
        step_tile = self.step_tile(starts[0], phase)
        self._meet(scratch.key_full, slot)
        self._copy(n + setup.tile.stages - 1, starts[-1], "value")
        s = product_transposed(self._queries, scratch.key.at[slot])
        self._meet(scratch.value_full, slot)
        self._copy(n + setup.tile.stages, start, "key")
        p, rescale, state = self.softmax(s, n, step_tile, phase, state)
        out = setup.softmax.rescale(out, rescale)
        out = add_product(out, p.astype(setup.plan.dtype), scratch.value.at[slot])
        return (*starts[1:], start), out, state

    @property
    def _queries(self) -> Ref:
        return self.queries_of(0)

    def queries_of(self, part: int) -> Ref:
        """Those of this warpgroup, [rows, D]."""
        tile = self.setup.tile
        if tile.groups == tile.query_parts == 1:
            return self.scratch.query
        first = self.copies.group * tile.rows
        return self.scratch.query.at[pl.ds(first + part * tile.block_q if part else first, tile.rows)]

    def _meet(self, full: Ref | None, slot: Scalar) -> None:
        """Waits until a tile has arrived and all threads have read what they used last of the other ring."""
        self.copies.wait(None if full is None else full.at[slot], 2 * self.setup.tile.stages - 2)

    # ----------------------------------------------------------------- copies

    def _key_start(self, n: Scalar) -> Scalar:
        """Number of the first key of the tile of step n, or of the item's last step if there is no step n."""
        return self.setup.scheduler.kv_start(self.inputs.mask_rows, self.item, lax.min(n, self.item.total - 1))

    def _copy_queries(self) -> None:
        """Starts the copy of the CTA's queries; the keys of step 0 follow in the same group."""
        plan, tile, item = self.setup.plan, self.setup.tile, self.item
        first = item.q_tile * tile.block_q
        arrived = None if self.scratch.query_full is None else self.scratch.query_full.at[0]
        for part in range(tile.query_parts):
            b = item.b + part * plan.batch if part else item.b
            source = rows_of(self.inputs.query, plan.layout, b, item.h, first, tile.block_q)
            whole = tile.query_parts == 1
            target = self.scratch.query if whole else self.scratch.query.at[pl.ds(part * tile.block_q, tile.block_q)]
            self.copies.start(source, target, arrived, self._existing_queries(first))

    def _copy(self, n: Scalar, start: Scalar, ring: str) -> None:
        """Begins to copy the keys or values of step n from `start` on, as a group; empty without a step n."""
        plan, tile, item = self.setup.plan, self.setup.tile, self.item
        source, target, full, parts = {
            "key": (self.inputs.key, self.scratch.key, self.scratch.key_full, tile.key_parts),
            "value": (self.inputs.value, self.scratch.value, self.scratch.value_full, tile.value_parts),
        }[ring]

        def begin() -> None:
            slot = slot_of(n, tile.stages)
            head = lax.div(item.h, i32(plan.group)) if plan.group > 1 else item.h
            if self.inputs.pages is not None:
                last_page = self.inputs.pages.values if ring == "value" else None
                paged = PagedTile(plan, tile.page_rows, item.b, head, start)
                self._copy_pages(paged, source, last_page, target.at[slot], None if full is None else full.at[slot])
                return
            for part, place in enumerate(slot_parts(target, slot, parts)):
                b = item.b + part * plan.batch if part else item.b
                rows = rows_of(source, plan.layout, b, head, start, tile.block_kv)
                exist = plan.kv_len - start if self.setup.keys_may_overhang else None
                self.copies.start(rows, place, None if full is None else full.at[slot], exist)

        when(n < item.total)(begin)
        self.copies.commit()

    def _copy_pages(
        self, paged: PagedTile, source: Ref, last_page: Ref | None, target: Ref, arrived: Ref | None
    ) -> None:
        """Begins to copy this warpgroup's share of a tile of keys in pages to its slot; does not end a group.

        last_page   `KeyPages.values` for values that TMA copies; otherwise None
        """
        tile, pages = self.setup.tile, self.inputs.pages
        assert pages is not None
        if tile.groups > 1:
            share = tile.block_kv // tile.groups
            first = self.copies.group * share
            paged, target = paged._replace(start=paged.start + first), target.at[pl.ds(first, share)]
        if arrived is None:
            paged.copy_by_threads(pages, source, target, dataclasses.replace(self.copies, groups=1))
        else:
            paged.copy(pages, source, last_page, target, arrived)

    # ----------------------------------------------------------------- results

    def _existing_queries(self, first: Scalar) -> Scalar | None:
        """How many queries of the head there are from number `first` on; None where every query tile is whole."""
        plan, tile = self.setup.plan, self.setup.tile
        return None if plan.q_len % plan.covered(tile.block_q, 1)[0] == 0 else plan.q_len - first

    def _write(self, out: jax.Array, position: Position) -> None:
        """Writes the existing rows (the simulator all), [rows, value dim] float32, and what rounding takes."""
        plan, tile = self.setup.plan, self.setup.tile
        exist = self._existing_queries(self.q_start)
        for n, target in enumerate((self.outputs.out, self.outputs.rounding)):
            if target is None:
                continue
            part = out - rounded_tile(out, plan.dtype) if n else out
            rows = rows_of(target, plan.layout, position.b, position.h, self.q_start, tile.rows)
            write_rows(part.astype(plan.dtype), rows, exist)
