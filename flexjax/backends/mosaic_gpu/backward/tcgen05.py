"""The backward kernel on tcgen05 (compute capability 10.x): gradients of the queries, or of the keys and values.

    dQ        S = Q K^T       dP = dO V^T        dQ += dS K
    dK/dV     S^T = K Q^T     dP^T = V dO^T      dK += dS^T Q     dV += P^T dO

A CTA owns 128 tokens and visits tiles of 128 tokens of the other axis. One warpgroup copies and issues the products,
whose sums lie in tensor memory (tcgen05_issue.py). Two more compute P and dS, each of one half of a visited tile, and
write them to tensor memory, from where they are multiplied. The query heads that share a key head are visited one after
another into the same sums.

No CTA waits for another one but the other of its pair, and the products are issued in one order, so results are the
same bits each time. The formulas are at the top of common.py. families/mma_backward.py runs the kernel twice.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward import common, tile_visits
from flexjax.backends.mosaic_gpu.backward.common import BackwardCall, BackwardOperands
from flexjax.backends.mosaic_gpu.backward.mma_visits import VisitNow, VisitSequence
from flexjax.backends.mosaic_gpu.backward.pair_bias import DirectGradient
from flexjax.backends.mosaic_gpu.backward.pair_bias_tiles import skipped_blocks
from flexjax.backends.mosaic_gpu.backward.tcgen05_issue import IssuingWarps, own_start
from flexjax.backends.mosaic_gpu.backward.tcgen05_tiles import HALVES, TILE, Tcgen05Scratch, Tcgen05Tiles, scratch
from flexjax.backends.mosaic_gpu.backward.tile_math import RowMath, TileMath
from flexjax.backends.mosaic_gpu.backward.tile_visits import VisitLists, owned_key_tile
from flexjax.backends.mosaic_gpu.machine import kernel_parts, registers
from flexjax.backends.mosaic_gpu.machine.branch import cond, when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32, launch, overlaid, rows_of
from flexjax.backends.mosaic_gpu.machine.mma_results import write_rows
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.backends.mosaic_gpu.machine.tcgen05_tiles import load_tile, store_tile, stored
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan

COLUMNS_AT_ONCE = 32  # columns of a gradient that a thread has in registers while they are written


class Tcgen05Outputs(typing.NamedTuple, typing.Generic[Part]):
    """Gradients in the shapes of the padded arrays."""

    first: Part  # dQ or dK
    second: Part | None = None  # dV; None in the dQ kernel
    direct_gradients: tuple[Part, ...] = ()  # of `DirectGradient.whole_tiles`; () in the dK/dV kernel


def backward_dq(
    call: BackwardCall, lists: VisitLists[jax.Array], tiles: Tcgen05Tiles, gradients: tuple[DirectGradient, ...]
) -> Tcgen05Outputs[jax.Array]:
    """Runs the dQ kernel: dQ times scale, and the direct gradients. What lies past the ends is undefined.

    The grid has one CTA for each tile of 128 queries of each query head; of a head, CTAs with the most visits start
    first.
    """
    # this kernel has no pairs of CTAs
    tiles = dataclasses.replace(tiles, pairs=False)
    plan, derivative, tokens, captures = call.plan, call.derivative, call.tokens, call.captures
    q_tiles, heads = cdiv(plan.q_len, TILE), plan.batch * plan.q_heads
    visits = tile_visits.visits_for(plan, TILE, TILE, transposed=False)
    order = tile_visits.longest_first(visits, lists, q_tiles)
    loads = tuple(one.load_number for one in gradients)
    math = TileMath(plan, derivative, (TILE, tiles.half), "q", (TILE, TILE), loads_too=loads)

    def kernel(inputs: BackwardOperands[Ref], outputs: Tcgen05Outputs[Ref], scratch: Tcgen05Scratch[Ref]) -> None:
        program, may_be_masked = lax.axis_index("program"), plan.mask is not None or plan.blocks is not None
        rank, head = tile_visits.tile_and_head(program, q_tiles, heads, plan.group == 1)
        b, h = lax.div(head, i32(plan.q_heads)), lax.rem(head, i32(plan.q_heads))
        tile = visits.in_order(inputs.order, b, h, rank)
        sequence = VisitSequence(visits, inputs.lists, b, h, 1, tile, TILE, may_be_masked, kv_group=plan.group)
        at, own = inputs.tokens, (inputs.tokens.query, inputs.tokens.d_out)
        issuing = IssuingWarps(plan, tiles, scratch, own, (at.key, at.value), h, sequence, _total(sequence))
        _run(issuing, _Half(math, tiles, gradients, sequence, inputs, scratch, outputs, h))

    output = lambda x, shape, dtype: kernel_parts.output(shape, dtype, x)
    made = tuple(output(tokens.query, one.whole_tiles(plan), one.dtype) for one in gradients)
    outputs = Tcgen05Outputs(output(tokens.query, tokens.query.shape, tokens.query.dtype), None, made)
    skipped = skipped_blocks(plan, lists) if gradients else VisitLists()
    inputs = BackwardOperands(tokens, lists, order, captures, skipped)
    return _launch(plan, kernel, inputs, outputs, tiles, "flexjax_backward_dq_tcgen05", q_tiles * heads)


def backward_dkv(call: BackwardCall, lists: VisitLists[jax.Array], tiles: Tcgen05Tiles) -> Tcgen05Outputs[jax.Array]:
    """Runs the dK/dV kernel: dK times scale, and dV. What lies past the ends is undefined.

    The grid has one CTA, or a pair of CTAs for two neighbouring tiles (`tiles.pairs`), for each tile of 128 keys of
    each key head; of a head, CTAs with the most visits start first.
    """
    plan, derivative, tokens, captures = call.plan, call.derivative, call.tokens, call.captures
    owned = TILE * tiles.ctas
    kv_tiles = cdiv(plan.kv_len, owned)
    visits = tile_visits.visits_for(plan, owned, TILE, transposed=True)
    order = tile_visits.longest_first(visits, lists, kv_tiles)
    math = TileMath(plan, derivative, (TILE, tiles.half), "kv", (TILE, TILE))

    def kernel(inputs: BackwardOperands[Ref], outputs: Tcgen05Outputs[Ref], scratch: Tcgen05Scratch[Ref]) -> None:
        own = owned_key_tile(plan, visits, inputs.lists, inputs.order, kv_tiles, plan.group == 1, TILE)
        may_be_masked, first_head = plan.mask is not None or plan.blocks is not None, own.key_head * plan.group
        sequence = VisitSequence(visits, inputs.lists, own.b, first_head, plan.group, own.tile, TILE, may_be_masked)
        at, visited = inputs.tokens, (inputs.tokens.query, inputs.tokens.d_out)
        keys = at.key, at.value
        issuing = IssuingWarps(plan, tiles, scratch, keys, visited, own.key_head, sequence, _total(sequence))
        _run(issuing, _Half(math, tiles, (), sequence, inputs, scratch, outputs, own.key_head))

    like = lambda x: kernel_parts.output(x.shape, x.dtype, tokens.key)
    inputs, outputs = (
        BackwardOperands(tokens, lists, order, captures),
        Tcgen05Outputs(like(tokens.key), like(tokens.value)),
    )
    programs = kv_tiles * plan.batch * plan.kv_heads
    return _launch(plan, kernel, inputs, outputs, tiles, "flexjax_backward_dkv_tcgen05", programs)


def _launch(
    plan: KernelPlan,
    kernel: Callable[..., None],
    inputs: BackwardOperands[jax.Array],
    outputs: Tcgen05Outputs[jax.ShapeDtypeStruct],
    tiles: Tcgen05Tiles,
    name: str,
    programs: int,
) -> Tcgen05Outputs[jax.Array]:
    """Launches the kernel of (inputs, outputs, scratch) with `programs` CTAs or pairs; returns what it wrote."""
    memory = scratch(plan, tiles, both=outputs.second is not None)
    return launch(kernel, inputs, outputs, memory, name=name, programs=programs, warpgroups=HALVES + 1, ctas=tiles.ctas)


def _total(sequence: VisitSequence) -> Scalar:
    """How many visits `sequence` has over all heads of the CTA."""
    count = lambda head: sum(sequence.counts(head))
    if sequence.heads == 1:
        return i32(count(i32(0)))
    return lax.fori_loop(i32(0), i32(sequence.heads), lambda head, total: total + count(head), i32(0))


def _run(issuing: IssuingWarps, half: "_Half") -> None:
    """Runs the calling warpgroup of a CTA."""
    role = lax.axis_index("wg")
    when(role < HALVES)(lambda: half.compute(issuing.total))
    when(role == HALVES)(issuing.run)


@dataclasses.dataclass(frozen=True)
class _Half:
    """The warpgroup that computes P and dS of one half of each visited tile."""

    math: TileMath
    tiles: Tcgen05Tiles
    gradients: tuple[DirectGradient, ...]
    sequence: VisitSequence
    inputs: BackwardOperands[Ref]
    scratch: Tcgen05Scratch[Ref]
    outputs: Tcgen05Outputs[Ref]
    head: Scalar  # of the own tokens

    @property
    def group(self) -> Scalar:
        return lax.axis_index("wg")

    @property
    def start(self) -> Scalar:
        return own_start(self.sequence, self.tiles)

    def compute(self, total: Scalar) -> None:
        """What a computing warpgroup does: its half of each visit, then its share of the own gradients' columns."""
        plgpu.set_max_registers(self.tiles.computing_registers, action="increase")
        sequence, by_query = self.sequence, self.math.row_axis == "q"
        own_ready = self.scratch.own_ready
        if own_ready is not None:
            when((self.group == 0) & (total > 0))(lambda: self._announce(own_ready))
        place = self.inputs.tokens, sequence.b, self.head, self.start
        statistics = common.statistics_of(*place, TILE, common.ALONG_ROWS) if by_query else None

        def begin(head: Scalar) -> RowMath:
            return self.math.at_rows(sequence.b, sequence.first_head + head, self.start, self.inputs.captures)

        def step(rows: RowMath, visit: VisitNow, carry: Scalar) -> Scalar:
            self._visit(rows, visit, statistics)
            return carry

        sequence.each(begin, step, i32(0))
        self._write_zeros()
        when(total > 0)(lambda: plgpu.barrier_wait(self.scratch.sums_full.at[0]))
        scale = self.math.plan.scale
        self._write(self.outputs.first, self.scratch.sum_first, scale, total)
        if self.outputs.second is not None and self.scratch.sum_second is not None:
            self._write(self.outputs.second, self.scratch.sum_second, 1.0, total)

    def _announce(self, own_ready: Ref) -> None:
        """In a pair: tells the first CTA, whose warp issues the products of both, that the own tokens have arrived."""
        plgpu.barrier_wait(self.scratch.own_full.at[0])
        plgpu.barrier_arrive(own_ready.at[0])

    def _visit(self, rows: RowMath, visit: VisitNow, statistics: tuple[jax.Array, jax.Array] | None) -> None:
        """Writes P and dS of this half of a visited tile to tensor memory, and its direct gradients."""
        scratch, group, half, dtype = self.scratch, self.group, self.tiles.half, self.math.plan.dtype
        column = visit.start + group * half
        tile = rows.at_columns(column, visit.masked)
        # `statistics` are those of the own queries, which the dK/dV kernel does not have
        if statistics is None:
            head = self.sequence.first_head + visit.head
            place = self.inputs.tokens, self.sequence.b, head, column
            statistics = common.statistics_of(*place, half, common.ALONG_COLUMNS)
        lse2, delta = statistics
        scores, weights = overlaid(scratch.scores)
        cotangents, differences = overlaid(scratch.cotangents)
        plgpu.barrier_wait(scratch.scores_full.at[group])
        found = tile.probabilities(load_tile(scores.at[group]), lse2)
        # in a pair this arrives at the barrier of the first CTA
        if scratch.weights_full is not None:
            p = found.weights().astype(dtype)
            store_tile(weights.at[group, :, pl.ds(0, half)], p)
            stored()
            plgpu.barrier_arrive(scratch.weights_full.at[group])
        factor = found.factor()
        wide_delta = self.math.broadcast(delta, "q")
        plgpu.barrier_wait(scratch.cotangents_full.at[group])
        dp = load_tile(cotangents.at[group])
        ds, gradients = found.cotangents(factor, *found.scaled(dp, wide_delta))
        store_tile(differences.at[group, :, pl.ds(0, half)], ds.astype(dtype))
        stored()
        plgpu.barrier_arrive(scratch.differences_full.at[group])
        for one, output, g in zip(self.gradients, self.outputs.direct_gradients, gradients, strict=True):
            self._gradient_tile(one, output, column)[...] = g.astype(one.dtype)

    # ----------------------------------------------------------------- results

    def _gradient_tile(self, one: DirectGradient, output: Ref, kv0: Scalar) -> Ref:
        """A Ref to this warpgroup's part of a tile of a direct gradient, [own queries, keys of a half]."""
        return one.tile(output, self.sequence.b, self.head, self.start, kv0, self.math.shape)

    def _write_zeros(self) -> None:
        """Writes zeros to this warpgroup's half of the direct gradients' tiles that the block mask skips."""
        skipped = self.inputs.skipped
        if not self.gradients or skipped.full_num is None:
            return
        count = self.sequence.visits.counts(skipped, self.sequence.b, self.head, self.sequence.tile).unmasked

        @pl.loop(0, count)
        def one_tile(i: Scalar) -> None:
            tile = self.sequence.visits.tile(skipped, self.sequence.b, self.head, self.sequence.tile, i, False)
            kv0 = tile * TILE + self.group * self.tiles.half
            for one, output in zip(self.gradients, self.outputs.direct_gradients, strict=True):
                zeros = registers.zero_tile(self.math.shape)
                self._gradient_tile(one, output, kv0)[...] = zeros.astype(one.dtype)

    def _write(self, output: Ref, sums: Ref, scale: float, total: Scalar) -> None:
        """Writes this warpgroup's share of a gradient, `sums` [1, 128, D or E] in tensor memory times scale."""
        plan, dim = self.math.plan, sums.shape[-1]
        target = rows_of(output, plan.layout, self.sequence.b, self.head, self.start, TILE)

        def write(first: int) -> None:
            count = min(COLUMNS_AT_ONCE, dim - first)
            columns = pl.ds(first, count)
            part = lambda: load_tile(sums.at[0, :, columns]) * jnp.float32(scale)
            # without visits `sums` hold nothing
            gradient = cond(total > 0, part, lambda: registers.zero_tile((TILE, count)))
            length = plan.q_len if self.math.row_axis == "q" else plan.kv_len
            exist = length - self.start
            write_rows(gradient.astype(plan.dtype), target.at[:, columns], exist)

        for n, first in enumerate(range(0, dim, COLUMNS_AT_ONCE)):
            when(self.group == n % HALVES)(functools.partial(write, first))
