"""The backward kernel on tcgen05 (compute capability 10.x): gradients of the tokens that a CTA owns, of queries, or of keys and values.

    dQ        S = Q K^T       dP = dO V^T        dQ += dS K
    dK/dV     S^T = K Q^T     dP^T = V dO^T      dK += dS^T Q     dV += P^T dO

A CTA owns 128 tokens and visits tiles of 128 tokens of the other axis. One warpgroup copies and issues the products, whose sums lie in
tensor memory (backward_sm100_issue.py); two more compute P and dS, each of one half of a visited tile, and write them to tensor memory,
from where they are multiplied. The query heads that share a key head are visited one after another into the same sums.

No CTA waits for another one but the other of its pair, and the products are issued in one order, so results are the same bits each time.
The formulas are at the top of backward_common.py, P and dS of a tile in backward_tile_math.py and backward_probabilities.py, which
all families share.
backward_sm80.py runs the kernel twice; row statistics and gradients of captured arrays come from the kernels that it has on every card.
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

from flexjax.backends.mosaic_gpu import backward_common as common
from flexjax.backends.mosaic_gpu import kernel_parts, registers, tile_visits
from flexjax.backends.mosaic_gpu.backward_common import BackwardCall, Inputs
from flexjax.backends.mosaic_gpu.backward_sm80_visits import VisitNow, VisitSequence
from flexjax.backends.mosaic_gpu.backward_sm100_issue import IssuingWarps, own_start
from flexjax.backends.mosaic_gpu.backward_sm100_tiles import HALVES, TILE, Scratch, Tcgen05Tiles, scratch
from flexjax.backends.mosaic_gpu.backward_tile_math import RowMath, TileMath
from flexjax.backends.mosaic_gpu.branch import cond, when
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32, launch, overlaid, rows_of
from flexjax.backends.mosaic_gpu.pair_bias import DirectGradient
from flexjax.backends.mosaic_gpu.pair_bias_tiles import skipped_blocks
from flexjax.backends.mosaic_gpu.shared_memory import Part
from flexjax.backends.mosaic_gpu.sm80_results import write_rows
from flexjax.backends.mosaic_gpu.sm100_tiles import load_tile, store_tile, stored
from flexjax.backends.mosaic_gpu.tile_visits import VisitLists, owned_key_tile
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan

COLUMNS_AT_ONCE = 32
"""Columns of a gradient that a thread has in registers while they are written."""


class Outputs(typing.NamedTuple, typing.Generic[Part]):
    """Gradients in the shapes of the padded arrays.

    first              dQ or dK
    second             dV; None in the dQ kernel
    direct_gradients   each as `DirectGradient.whole_tiles` says, in the dtype of its array; () in the dK/dV kernel
    """

    first: Part
    second: Part | None = None
    direct_gradients: tuple[Part, ...] = ()


def backward_dq(
    call: BackwardCall,
    lists: VisitLists[jax.Array],
    tiles: Tcgen05Tiles,
    gradients: tuple[DirectGradient, ...],
) -> Outputs[jax.Array]:
    """Runs the dQ kernel on tcgen05, one CTA for each tile of 128 queries of each query head: Outputs(dQ times scale, None, the direct
    gradients). What lies past the ends is undefined.

    call        plan, programs and padded arrays of the call
    lists       the block lists of each query block; of a head, CTAs with the most visits start first
    tiles       sizes of the kernel; `pairs` is not read, because this kernel has no pairs of CTAs
    gradients   the direct gradients (pair_bias.py), which may be none
    """
    tiles = dataclasses.replace(tiles, pairs=False)
    plan, derivative, tokens, captures = call.plan, call.derivative, call.tokens, call.captures
    q_tiles, heads = cdiv(plan.q_len, TILE), plan.batch * plan.q_heads
    visits = tile_visits.visits_for(plan, TILE, TILE, transposed=False)
    order = tile_visits.longest_first(visits, lists, q_tiles)
    loads = tuple(one.load_number for one in gradients)
    math = TileMath(plan, derivative, (TILE, tiles.half), "q", (TILE, TILE), loads_too=loads)

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: Scratch[Ref]) -> None:
        """The dQ kernel on the Refs `inputs`, `outputs` and `scratch`: finds what this CTA owns and visits, and runs the calling one of
        its three warpgroups (`_run`).
        """
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
    outputs = Outputs(output(tokens.query, tokens.query.shape, tokens.query.dtype), None, made)
    skipped = skipped_blocks(plan, lists) if gradients else VisitLists()
    inputs = Inputs(tokens, lists, order, captures, skipped)
    return _launch(plan, kernel, inputs, outputs, tiles, "flexjax_backward_dq_tcgen05", q_tiles * heads)


def backward_dkv(
    call: BackwardCall,
    lists: VisitLists[jax.Array],
    tiles: Tcgen05Tiles,
) -> Outputs[jax.Array]:
    """Runs the dK/dV kernel on tcgen05, one CTA for each tile of 128 keys of each key head, or a pair of CTAs for each two neighbouring
    tiles (`tiles.pairs`): Outputs(dK times scale, dV). What lies past the ends is undefined.

    call    plan, programs and padded arrays of the call
    lists   the block lists of each key block; of a head, CTAs with the most visits start first
    tiles   sizes of the kernel
    """
    plan, derivative, tokens, captures = call.plan, call.derivative, call.tokens, call.captures
    owned = TILE * tiles.ctas
    kv_tiles = cdiv(plan.kv_len, owned)
    visits = tile_visits.visits_for(plan, owned, TILE, transposed=True)
    order = tile_visits.longest_first(visits, lists, kv_tiles)
    math = TileMath(plan, derivative, (TILE, tiles.half), "kv", (TILE, TILE))

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: Scratch[Ref]) -> None:
        """The dK/dV kernel on the Refs `inputs`, `outputs` and `scratch`: finds what this CTA owns and visits, and runs the calling one of
        its three warpgroups (`_run`).
        """
        own = owned_key_tile(plan, visits, inputs.lists, inputs.order, kv_tiles, plan.group == 1, TILE)
        may_be_masked, first_head = plan.mask is not None or plan.blocks is not None, own.key_head * plan.group
        sequence = VisitSequence(visits, inputs.lists, own.b, first_head, plan.group, own.tile, TILE, may_be_masked)
        at, visited = inputs.tokens, (inputs.tokens.query, inputs.tokens.d_out)
        keys = at.key, at.value
        issuing = IssuingWarps(plan, tiles, scratch, keys, visited, own.key_head, sequence, _total(sequence))
        _run(issuing, _Half(math, tiles, (), sequence, inputs, scratch, outputs, own.key_head))

    like = lambda x: kernel_parts.output(x.shape, x.dtype, tokens.key)
    inputs, outputs = Inputs(tokens, lists, order, captures), Outputs(like(tokens.key), like(tokens.value))
    programs = kv_tiles * plan.batch * plan.kv_heads
    return _launch(plan, kernel, inputs, outputs, tiles, "flexjax_backward_dkv_tcgen05", programs)


def _launch(
    plan: KernelPlan,
    kernel: Callable[..., None],
    inputs: Inputs[jax.Array],
    outputs: Outputs[jax.ShapeDtypeStruct],
    tiles: Tcgen05Tiles,
    name: str,
    programs: int,
) -> Outputs[jax.Array]:
    """Launches the kernel and returns what it wrote.

    plan       with extra features joined to the head dim
    kernel     function of the Refs (inputs, outputs, scratch)
    inputs     arrays
    outputs    shapes and dtypes of the results; if it has `second`, tensor memory has the sums of two gradients, else of one
    tiles      sizes of the kernel
    name       of the kernel in profiles
    programs   number of CTAs or, with `tiles.pairs`, of pairs of them
    """
    memory = scratch(plan, tiles, both=outputs.second is not None)
    interpret = plan.options.interpret
    return launch(
        kernel,
        inputs,
        outputs,
        memory,
        name=name,
        programs=programs,
        warpgroups=HALVES + 1,
        interpret=interpret,
        ctas=tiles.ctas,
    )


def _total(sequence: VisitSequence) -> Scalar:
    """How many visits `sequence` has over all heads of the CTA, an int32 scalar, read from the block lists in the kernel."""
    count = lambda head: sum(sequence.counts(head))
    if sequence.heads == 1:
        return i32(count(i32(0)))
    return lax.fori_loop(i32(0), i32(sequence.heads), lambda head, total: total + count(head), i32(0))


def _run(issuing: IssuingWarps, half: "_Half") -> None:
    """Runs the calling warpgroup of a CTA: warpgroups 0 and 1 compute (`half.compute`), 2 copies and issues (`issuing.run`)."""
    role = lax.axis_index("wg")
    when(role < HALVES)(lambda: half.compute(issuing.total))
    when(role == HALVES)(issuing.run)


@dataclasses.dataclass(frozen=True)
class _Half:
    """The warpgroup that computes P and dS of one half of each visited tile.

    math                       how a tile's P and dS are computed
    tiles                      sizes of the kernel
    gradients                  the direct gradients
    sequence                   which tiles are visited
    inputs, scratch, outputs   Refs to operands, memory of the CTA and results
    head                       of the own tokens
    """

    math: TileMath
    tiles: Tcgen05Tiles
    gradients: tuple[DirectGradient, ...]
    sequence: VisitSequence
    inputs: Inputs[Ref]
    scratch: Scratch[Ref]
    outputs: Outputs[Ref]
    head: Scalar

    @property
    def group(self) -> Scalar:
        """Number of this warpgroup and of its half."""
        return lax.axis_index("wg")

    @property
    def start(self) -> Scalar:
        """Number of the first token that this CTA owns."""
        return own_start(self.sequence, self.tiles)

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs in the simulator."""
        return self.math.plan.options.interpret

    def compute(self, total: Scalar) -> None:
        """What a computing warpgroup does: it raises its register limit, computes its half of every visit (`_visit`), writes zeros to
        skipped tiles of direct gradients, waits until all products have completed, and writes its share of the columns of the own
        tokens' gradients: of dQ times scale, or of dK times scale and of dV, in the plan's dtype.

        total   visits of the CTA over all heads; if it is 0, nothing is waited for, and the gradients are zeros

        In a pair of CTAs warpgroup 0 of each first tells the first CTA that the own tokens have arrived (`_announce`).
        """
        plgpu.set_max_registers(self.tiles.computing_registers, action="increase")
        sequence, by_query = self.sequence, self.math.row_axis == "q"
        own_ready = self.scratch.own_ready
        if own_ready is not None:
            when((self.group == 0) & (total > 0))(lambda: self._announce(own_ready))
        place = self.inputs.tokens, sequence.b, self.head, self.start
        statistics = common.statistics_of(*place, TILE, common.ALONG_ROWS) if by_query else None

        def begin(head: Scalar) -> RowMath:
            """The RowMath of the own tokens for one query head, as `VisitSequence.each` calls it; `head` is its number among the heads
            of the CTA.
            """
            return self.math.at_rows(sequence.b, sequence.first_head + head, self.start, self.inputs.captures)

        def step(rows: RowMath, visit: VisitNow, carry: Scalar) -> Scalar:
            """Makes one visit (`_visit`), as `VisitSequence.each` calls it: `rows` is what `begin` returned; returns `carry`, which means
            nothing here, as it is.
            """
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
        """In a pair: waits until the own tokens of this CTA have arrived, and arrives at the barrier `own_ready` of the first CTA, whose
        warp issues the products of both. Called once, by warpgroup 0 of each CTA that has visits.
        """
        plgpu.barrier_wait(self.scratch.own_full.at[0])
        plgpu.barrier_arrive(own_ready.at[0])

    def _visit(self, rows: RowMath, visit: VisitNow, statistics: tuple[jax.Array, jax.Array] | None) -> None:
        """Computes P and dS of this half of a visited tile and writes them to tensor memory in the plan's dtype, for the products of the
        issuing warp; writes the half's tile of each direct gradient to global memory.

        rows         the RowMath of the own tokens, for the head of the visit
        visit        the visit
        statistics   lse2 and delta of the own queries; None in the dK/dV kernel, which reads those of the visited queries here

        It waits at `scores_full` for S and at `cotangents_full` for dP, and arrives at `differences_full` when dS is written. P times
        the dropout multiplier is written in the dK/dV kernel alone, which then arrives at `weights_full`. In a pair both arrive at the
        barriers of the first CTA.
        """
        scratch, group, half, dtype = self.scratch, self.group, self.tiles.half, self.math.plan.dtype
        column = visit.start + group * half
        tile = rows.at_columns(column, visit.masked)
        if statistics is None:
            head = self.sequence.first_head + visit.head
            place = self.inputs.tokens, self.sequence.b, head, column
            statistics = common.statistics_of(*place, half, common.ALONG_COLUMNS)
        lse2, delta = statistics
        scores, weights = overlaid(scratch.scores)
        cotangents, differences = overlaid(scratch.cotangents)
        plgpu.barrier_wait(scratch.scores_full.at[group])
        found = tile.probabilities(load_tile(scores.at[group], self.interpret), lse2)
        if scratch.weights_full is not None:
            p = found.weights().astype(dtype)
            store_tile(weights.at[group, :, pl.ds(0, half)], p, self.interpret)
            stored(self.interpret)
            plgpu.barrier_arrive(scratch.weights_full.at[group])
        factor = found.factor()
        wide_delta = self.math.broadcast(delta, "q")
        plgpu.barrier_wait(scratch.cotangents_full.at[group])
        dp = load_tile(cotangents.at[group], self.interpret)
        ds, gradients = found.cotangents(factor, *found.scaled(dp, wide_delta))
        store_tile(differences.at[group, :, pl.ds(0, half)], ds.astype(dtype), self.interpret)
        stored(self.interpret)
        plgpu.barrier_arrive(scratch.differences_full.at[group])
        for one, output, g in zip(self.gradients, self.outputs.direct_gradients, gradients, strict=True):
            self._gradient_tile(one, output, column)[...] = g.astype(one.dtype)

    # ----------------------------------------------------------------- results

    def _gradient_tile(self, one: DirectGradient, output: Ref, kv0: Scalar) -> Ref:
        """A Ref to this warpgroup's part of a tile of a direct gradient in global memory, [own queries, keys of a half]; nothing is read
        or written.

        one      the direct gradient
        output   its whole array
        kv0      first key of the part
        """
        return one.tile(output, self.sequence.b, self.head, self.start, kv0, self.math.shape)

    def _write_zeros(self) -> None:
        """Writes zeros to this warpgroup's half of those tiles of all direct gradients whose keys the block mask skips for the own
        queries. Nothing without direct gradients or without a block mask.
        """
        skipped = self.inputs.skipped
        if not self.gradients or skipped.full_num is None:
            return
        count = self.sequence.visits.counts(skipped, self.sequence.b, self.head, self.sequence.tile).unmasked

        @pl.loop(0, count)
        def one_tile(i: Scalar) -> None:
            """Writes zeros to this warpgroup's half of the i-th skipped tile of each direct gradient."""
            tile = self.sequence.visits.tile(skipped, self.sequence.b, self.head, self.sequence.tile, i, False)
            kv0 = tile * TILE + self.group * self.tiles.half
            for one, output in zip(self.gradients, self.outputs.direct_gradients, strict=True):
                zeros = registers.zero_tile(self.math.shape)
                self._gradient_tile(one, output, kv0)[...] = zeros.astype(one.dtype)

    def _write(self, output: Ref, sums: Ref, scale: float, total: Scalar) -> None:
        """Writes this warpgroup's share of a gradient of the own tokens to global memory, in the plan's dtype: every second group of
        COLUMNS_AT_ONCE columns, of which warpgroup 0 has the first. Tokens past the end are not written.

        output   the whole array of the gradient
        sums     [1, 128, D or E] in tensor memory, complete
        scale    multiplies them
        total    visits of the CTA; if it is 0, zeros are written, because `sums` holds nothing
        """
        plan, dim = self.math.plan, sums.shape[-1]
        target = rows_of(output, plan.layout, self.sequence.b, self.head, self.start, TILE)

        def write(first: int) -> None:
            """Writes the columns from `first` on, at most COLUMNS_AT_ONCE of them."""
            count = min(COLUMNS_AT_ONCE, dim - first)
            columns = pl.ds(first, count)
            part = lambda: load_tile(sums.at[0, :, columns], self.interpret) * jnp.float32(scale)
            gradient = cond(total > 0, part, lambda: registers.zero_tile((TILE, count)))
            length = plan.q_len if self.math.row_axis == "q" else plan.kv_len
            exist = length - self.start
            write_rows(gradient.astype(plan.dtype), target.at[:, columns], exist, self.interpret)

        for n, first in enumerate(range(0, dim, COLUMNS_AT_ONCE)):
            when(self.group == n % HALVES)(functools.partial(write, first))
