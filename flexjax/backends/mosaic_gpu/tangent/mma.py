"""The tangent kernel on mma.sync, by the copies and the steps of the forward kernel (forward/mma_rows.py).

The tangents of keys and values arrive in the groups of copies of what they belong to.
"""

import dataclasses
import functools

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.backward.tile_math import RowMath
from flexjax.backends.mosaic_gpu.forward.launch import launch_forward
from flexjax.backends.mosaic_gpu.forward.mma_rows import MmaRows, Starts
from flexjax.backends.mosaic_gpu.forward.mma_tiles import MmaForwardScratch, MmaForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.forward.rows import Phase, Position, Programs
from flexjax.backends.mosaic_gpu.forward.setup import ForwardOutputs, ForwardSetup
from flexjax.backends.mosaic_gpu.machine import registers
from flexjax.backends.mosaic_gpu.machine.branch import cond
from flexjax.backends.mosaic_gpu.machine.clipped_copies import PIECE_ROWS, clip_rows
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32, not_hoisted, rows_of, slot_of, slot_parts
from flexjax.backends.mosaic_gpu.machine.mma_copies import Copies
from flexjax.backends.mosaic_gpu.machine.mma_products import add_product, product_transposed
from flexjax.backends.mosaic_gpu.tangent.call import (
    TangentCall,
    TangentMath,
    TangentOperands,
    finished,
    masked,
    row_vectors,
)
from flexjax.backends.mosaic_gpu.tangent.tiles import MmaTangentTile
from flexjax.plan.kernel_plan import TangentInputs

Sums = tuple[jax.Array, jax.Array]  # of tout, [rows, E], and of p ts', [rows], over the tiles so far


def tangent(call: TangentCall, given: TangentInputs, tile: MmaTangentTile) -> tuple[jax.Array, jax.Array]:
    """(tangent of out, tangent of lse or total) of a call, in the plan's layout."""
    setup = ForwardSetup[MmaForwardTile](call.plan, tile)
    math = TangentMath(call, (tile.rows, tile.block_kv), (tile.block_q, tile.block_kv))
    unit = PIECE_ROWS if tile.copying == "tma" else 1
    inputs = call.inputs(setup, given, unit, tile.copying)

    def kernel(inputs: TangentOperands[Ref], outputs: ForwardOutputs[Ref], scratch: MmaForwardScratch[Ref]) -> None:
        clip_rows()
        MmaTangentRows.of_call(setup, math, inputs, outputs, scratch).compute()

    scratch = forward_scratch(tile, call.plan.dtype)
    found = launch_forward(setup, inputs, kernel, scratch, name="flexjax_tangent_mma", warpgroups=tile.groups)
    return found.float32_out if call.plan.partial else found.out, found.lse


@dataclasses.dataclass(frozen=True)
class MmaTangentRows(MmaRows):
    """The rows of one work item that one warpgroup computes; in the methods `n` is the number of a step in the item."""

    given: TangentOperands[Ref]
    math: TangentMath
    rows: RowMath
    vectors: tuple[jax.Array, jax.Array]

    @classmethod
    def of_call(
        cls,
        setup: ForwardSetup[MmaForwardTile],
        math: TangentMath,
        inputs: TangentOperands[Ref],
        outputs: ForwardOutputs[Ref],
        scratch: MmaForwardScratch[Ref],
    ) -> "MmaTangentRows":
        """The rows of the calling warpgroup in the work item of its CTA."""
        tile = setup.tile
        copies = Copies(tile.copying, tile.groups, scratch.meeting)
        item = setup.scheduler.item(inputs.forward.mask_rows, lax.axis_index("program"))
        start = item.q_tile * tile.block_q + copies.group * tile.rows
        rows, vectors = math.at_rows(inputs.forward, item, start), row_vectors(inputs, item, start, tile.rows)
        place = (scratch, copies, start)
        return cls(setup, inputs.forward, outputs, item, Programs(), *place, inputs, math, rows, vectors)

    def queries_of(self, part: int) -> Ref:
        tile = self.setup.tile
        first = not_hoisted(i32(self.copies.group)) * tile.rows  # otherwise the addresses of all slices take registers
        return self.scratch.query.at[pl.ds(first + part * tile.block_q, tile.rows)]

    def compute(self) -> None:
        tile, plan = self.setup.tile, self.setup.plan
        sums = registers.zero_tile((tile.rows, tile.value_dim)), registers.splat(np.float32(0), "row", (tile.rows,))
        if plan.blocks is None:
            sums = self._all_steps(sums)
        else:
            sums = cond(self.item.total > 0, lambda: self._all_steps(sums), lambda: sums)
        position = Position(self.item.b, self.item.h, self.item.q_tile)
        out = self.given.out
        own = None if out is None else rows_of(out, plan.layout, *position[:2], self.q_start, tile.rows)
        moved, lse = finished(own, *sums, self.vectors[1])
        self.outputs.lse[self.item.b, self.item.h, pl.ds(self.q_start, tile.rows)] = lse
        self._write(moved, position)

    def _all_steps(self, sums: Sums) -> Sums:
        unmasked, total = self.item.unmasked, self.item.total
        carry = (self.first_copies(), *sums)
        carry = lax.fori_loop(i32(0), unmasked, functools.partial(self._tangent_step, phase=Phase.UNMASKED), carry)
        if self.setup.has_masked_steps:
            carry = lax.fori_loop(unmasked, total, functools.partial(self._tangent_step, phase=Phase.MASKED), carry)
        return carry[1:]

    def _tangent_step(
        self, n: Scalar, carry: tuple[Starts, jax.Array, jax.Array], phase: Phase
    ) -> tuple[Starts, jax.Array, jax.Array]:
        """Adds step n; carry: (first keys of the next `stages` steps, `Sums`)."""
        (starts, out, sums), scratch, tile = carry, self.scratch, self.setup.tile
        moving, stages = self.math.call.moving, tile.stages
        slot, start = slot_of(n, stages), self._key_start(n + stages)
        columns = self.rows.at_columns(starts[0], masked(self.setup, self.item, n, phase))
        self._meet(scratch.key_full, slot)
        self._copy(n + stages - 1, starts[-1], "value")
        keys = slot_parts(scratch.key, slot, tile.key_parts)
        found = columns.probabilities(product_transposed(self.queries_of(0), keys[0]), self.vectors[0])
        pairs = [(1, 0)] * moving.query + [(0, 1)] * moving.key
        raw = [product_transposed(self.queries_of(a), keys[b]) for a, b in pairs]
        self._meet(scratch.value_full, slot)
        self._copy(n + stages, start, "key")
        terms = self.math.terms(found, sum(raw[1:], start=raw[0]) if raw else None)
        values = slot_parts(scratch.value, slot, tile.value_parts)
        for weights, operand in zip((terms.scores, terms.values), values, strict=False):
            if weights is not None:
                out = add_product(out, weights.astype(self.setup.plan.dtype), operand)
        return (*starts[1:], start), out, sums if terms.sums is None else sums + terms.sums
