"""What the backward kernels share: the formulas and their operands; on Hopper also WGMMA, and the rings of Q and dO.

For a tile of scores s = scale * q . k, with lse the logarithm of the softmax denominator of each query row,

    p   = exp(mod(s) - lse)            0 where the mask is off
    dP  = (dO V^T) * r                 r is the dropout multiplier, 1 without dropout
    dsp = p * (dP - delta)             delta = rowsum(dO * O) - d_lse
    ds  = dsp * mod'(s)
    dV += (p * r)^T dO     dK += scale * ds^T Q     dQ += scale * ds K

Kernels compute in base 2, because `exp2` is one instruction: p = exp2(s * scale * log2(e) - lse2). The row statistics
lse2 and delta come from row_statistics.py. A row past the end, or with neither a visible key nor a sink, has lse2 = +inf, which
makes p exactly 0 there. Where scores may be large (backward_tile_math.py), lse takes the place of lse2. A mod may return NaN where
the mask is off; factors are selected on p > 0 *after* the multiplication, which keeps that NaN out of every gradient.

A CTA has computing warpgroups and one copying warpgroup, which fills rings of slots in shared memory by TMA; each
slot has a barrier `*_full` (its copy has arrived) and a barrier `*_free` (every reader is done). The *running number*
of a visit counts the tiles that the CTA visited before; it gives the slots.

Products of tiles go through `Products`: WGMMA on the device, plain dots in the simulator, which supports neither
operands in registers nor accumulators that start from a value.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import backward_dkv_tiles, backward_fused_tiles, kernel_parts
from flexjax.backends.mosaic_gpu.backward_tiles import padded_dim
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.columns import columns_of, ctas_of
from flexjax.backends.mosaic_gpu.float_parts import pairs_of, parts_of, split
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, accumulator, copy_parts, slot_parts
from flexjax.backends.mosaic_gpu.kernel_parts import not_hoisted as not_hoisted
from flexjax.backends.mosaic_gpu.kernel_parts import slot_of as slot_of
from flexjax.backends.mosaic_gpu.memory import kernel_operand
from flexjax.backends.mosaic_gpu.shared_memory import Part
from flexjax.backends.mosaic_gpu.thread_tiles import tile_parts
from flexjax.backends.mosaic_gpu.tile_visits import VisitLists
from flexjax.integers import round_up
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan, Operands

WGMMA = plgpu.Layout.WGMMA
ALONG_ROWS = WGMMA.reduce(1)
"""Register layout of a vector with a number for each row of a tile."""
ALONG_COLUMNS = WGMMA.reduce(0)
"""Register layout of a vector with a number for each column of a tile."""
Result = typing.TypeVar("Result")
Operand = Ref | jax.Array | tuple[Ref, ...] | tuple[jax.Array, ...]
"""The left operand of a product: a tile, or its parts (float_parts.py)."""


# ------------------------------------------------------------------- operands


def whole_len(plan: KernelPlan, axis: str) -> int:
    """The tokens of an axis of the plan, "q" or "kv", rounded up to whole blocks of the mask and then to a multiple of 256: every tile
    that a kernel visits lies within them.
    """
    length = plan.q_len if axis == "q" else plan.kv_len
    if plan.blocks is not None:
        length = round_up(length, plan.blocks.block_q if axis == "q" else plan.blocks.block_kv)
    return round_up(length, 256)


def padded_len(plan: KernelPlan, axis: str, unit: int) -> int:
    """The length that arrays over queries (`axis` "q") or keys ("kv") are padded to: their length rounded up to a multiple of `unit`
    tokens; `whole_len` in the simulator, which refuses copies that cross the end.

    unit   1 for kernels that call `clipped_copies.clip_rows`, `clipped_copies.PIECE_ROWS` for others
    """
    if plan.options.interpret:
        return whole_len(plan, axis)
    return round_up(plan.q_len if axis == "q" else plan.kv_len, unit)


def pad(x: jax.Array, plan: KernelPlan, axis: str, unit: int, ctas: int = 1) -> jax.Array:
    """x, [B, T, N, D] or [B, N, T, D] by the plan's layout, with zeros appended to T and D up to the sizes that the
    kernels take (`padded_len`, `padded_dim`).

    axis   "q" or "kv", what T counts
    unit   of `padded_len`
    ctas   CTAs that share the columns (columns.py): D becomes `ctas` times the padded columns of one of them. 1: a CTA has all
    """
    dim = padded_dim(columns_of(x.shape[3], ctas)) * ctas
    return kernel_parts.pad(x, plan.layout, padded_len(plan, axis, unit), dim)


class Tokens(typing.NamedTuple, typing.Generic[Part]):
    """The arrays over tokens that the kernels read, padded.

    query, key, value, d_out   [parts * B, T', N or M, D'] or [parts * B, N or M, T', D'] by the plan's layout, in parts
                               (float_parts.py), T' being `padded_len`; d_out is the cotangent dO of the result
    stats                      [B, N, 2, `whole_len` of the queries] float32, lse2 and delta (row_statistics.py)
    """

    query: Part
    key: Part
    value: Part
    d_out: Part
    stats: Part


def padded_tokens(
    plan: KernelPlan, operands: Operands, d_out: jax.Array, stats: jax.Array, unit: int
) -> Tokens[jax.Array]:
    """The arrays over tokens of a call as the kernels take them: query, key, value and `d_out` padded and in parts.

    operands   of the call, with extra features joined to the head dim
    d_out      the cotangent of the result, in its shape
    stats      from row_statistics.py, taken as they are
    unit       of `padded_len`
    """
    padded = lambda x, axis: split(pad(x, plan, axis, unit, ctas_of(plan)), parts_of(plan))
    keys = padded(operands.key, "kv"), padded(operands.value, "kv")
    return Tokens(padded(operands.query, "q"), *keys, padded(d_out, "q"), stats)


class Captures(typing.NamedTuple, typing.Generic[Part]):
    """The captured arrays of score_mod, mask_mod and dropout, in the order of `Program.captures`, and the tables of an origin."""

    score: tuple[Part, ...]
    mask: tuple[Part, ...]
    dropout: tuple[Part, ...]
    origin: tuple[Part, ...] = ()


def statistics_of(
    tokens: Tokens[Ref], b: Scalar, head: Scalar, first: Scalar, count: int, layout: object
) -> tuple[jax.Array, jax.Array]:
    """In a kernel: (lse2, delta), each [count] float32, of the queries from number `first` on of query head `head` of batch entry `b`,
    read from `tokens.stats` in global memory.

    layout   in registers: ALONG_ROWS or ALONG_COLUMNS
    """
    queries = pl.ds(first, count)
    one = lambda which: kernel_parts.load(tokens.stats.at[b, head, which, queries], layout, optimized=False)
    return one(0), one(1)


def captures_of(operands: Operands) -> Captures[jax.Array]:
    """The captured arrays of `operands` as kernels take them (`memory.kernel_operand`: booleans as int8, scalars as
    [1]), and the two tables of its origin, () without one.
    """
    groups = (operands.score_captures, operands.mask_captures, operands.dropout_captures)
    origin = () if operands.origin is None else tuple(operands.origin)
    score, mask, dropout = (tuple(kernel_operand(a) for a in group) for group in groups)
    return Captures(score, mask, dropout, origin)


class BackwardCall(typing.NamedTuple):
    """What every backward kernel is given of a call.

    plan         with extra features joined to the head dim
    derivative   score_mod with its derivatives; None for the identity
    tokens       the padded arrays over tokens
    captures     captured arrays as kernels take them
    """

    plan: KernelPlan
    derivative: ir.Program | None
    tokens: Tokens[jax.Array]
    captures: Captures[jax.Array]


class Inputs(typing.NamedTuple, typing.Generic[Part]):
    """Operands of the dQ kernels and of all dK/dV kernels but the fused one.

    tokens     the padded arrays over tokens
    lists      block lists of the axis whose tiles the CTAs own (`tile_visits.visit_lists`): of query blocks for dQ
    order      which owned tile each CTA takes (`tile_visits.longest_first`); None: tiles in ascending order
    captures   captured arrays
    skipped    for direct gradients of the dQ kernel: the key blocks that each query block does not visit
    """

    tokens: Tokens[Part]
    lists: VisitLists[Part]
    order: Part | None
    captures: Captures[Part]
    skipped: VisitLists[Part] = VisitLists()


class DqOutputs(typing.NamedTuple, typing.Generic[Part]):
    """What a dQ kernel writes: dQ in the shape of `Tokens.query`, and the direct gradients (pair_bias.py), for Hopper in the shapes of
    `DirectGradient.output_shape`, by mma.sync in those of `DirectGradient.whole_tiles`.
    """

    d_query: Part
    direct_gradients: tuple[Part, ...]


# ------------------------------------------------------------------- registers


def raise_register_limit(groups: int) -> None:
    """In a computing warpgroup: raises its limit to 240 registers a thread if the CTA has two (`groups`) of them.

    With a copying warpgroup of 24, 2 * 240 + 24 registers a thread fill the register file.
    """
    if groups == 2:
        plgpu.set_max_registers(240, action="increase")


def lower_register_limit(groups: int) -> None:
    """In the copying warpgroup: lowers its limit to 24 registers a thread if the CTA has two (`groups`) computing warpgroups; with another
    number the limit stays.

    The computing warpgroups call `raise_register_limit` with the same `groups`, and wait there for the registers that this call frees.
    """
    if groups == 2:
        plgpu.set_max_registers(24, action="decrease")


# ------------------------------------------------------------------- products


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of tiles, acc += a @ b, by WGMMA, asynchronously; in the simulator by dots on float32 scratch.

    simulated   whether the kernel runs in the simulator
    parts       of each operand (float_parts.py)

    A product is *in flight* between its start and the wait for it. A product of operands in parts is several WGMMAs,
    and counts as one.
    """

    simulated: bool
    parts: int = 1

    def split(self, tile: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, ...]:
        """The `parts` parts of a tile, [rows, columns] float32, each of the tile's shape in `dtype`, the dtype that
        WGMMA multiplies.
        """
        return tile_parts(tile, dtype, self.parts, self.simulated)

    def accumulators(self, body: Callable[..., Result], *shapes: tuple[int, int]) -> Result:
        """Calls body(*accumulators), with one zeroed float32 accumulator for each of the shapes, and returns the
        result of the call. The accumulators exist during the call alone, so `body` reads them (`read`).
        """
        return pl.run_scoped(body, *(accumulator(shape) for shape in shapes))

    def start(self, acc: Ref, value: jax.Array) -> None:
        """Sets acc = value, [rows, columns] float32, before the first product into the accumulator."""
        if self.simulated:
            _store(acc, value)
        else:
            acc[...] = value

    def add(self, acc: Ref, a: Operand, b: Ref | tuple[Ref, ...], *, a_t: bool = False, b_t: bool = False) -> None:
        """Starts acc += a @ b, and returns while the product is in flight; in the simulator it is done at the return,
        in float32.

        acc        accumulator, [rows, columns] float32
        a          left operand, a tile in registers or in shared memory, or its parts
        b          right operand, a tile in shared memory, or its parts
        a_t, b_t   transpose the operand; a_t only for one in shared memory
        """
        left, right = a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,)
        for m, n in pairs_of(self.parts):
            self._add_pair(acc, left[m], right[n], a_t, b_t)

    def _add_pair(self, acc: Ref, a: Ref | jax.Array, b: Ref, a_t: bool, b_t: bool) -> None:
        """Starts acc += a @ b for one part of each operand, as one WGMMA in flight; in the simulator computes it at once, in float32.

        acc        accumulator, [rows, columns] float32
        a          a part of the left operand, a tile in registers or in shared memory, in the dtype that WGMMA multiplies
        b          a part of the right operand, a tile in shared memory, in the same dtype
        a_t, b_t   whether to multiply by the transpose of a, of b
        """
        if not self.simulated:
            plgpu.wgmma(acc, a.T if a_t else a, b.T if b_t else b)  # pyright: ignore[reportArgumentType]  # Refs, see `Ref`
            return
        left = a if isinstance(a, jax.Array) else a[...]
        right = b[...]
        left, right = (left.T if a_t else left), (right.T if b_t else right)
        total = acc[...] + jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32))
        _store(acc, total)

    def read(self, acc: Ref, in_flight: int = 0) -> jax.Array:
        """The value of the accumulator `acc`, float32 in registers, once all products into it are finished. It waits until at most
        `in_flight` products of this warpgroup are unfinished, so the caller gives how many were started after the accumulator's
        last one.
        """
        return acc[...] if self.simulated else plgpu.wgmma_accumulator_load(acc, wait_n=self._wgmmas(in_flight))

    def wait(self, in_flight: int) -> None:
        """Waits until at most `in_flight` products of this warpgroup, the newest, are unfinished; in the simulator all
        are finished already.
        """
        if not self.simulated:
            plgpu.wgmma_wait(self._wgmmas(in_flight))

    def _wgmmas(self, products: int) -> int:
        """How many WGMMAs make up this number of products: one for each pair of parts that is multiplied."""
        return products * len(pairs_of(self.parts))

    def release(self, barrier: Ref) -> None:
        """Arrives at `barrier`, the free barrier of a slot that this warpgroup has read for the last time in a visit.
        It does not wait; products that read the slot must be finished.
        """
        if self.simulated:
            plgpu.commit_smem()  # the dot that stands in for WGMMA read the slot through the generic proxy
        plgpu.barrier_arrive(barrier)


def _store(acc: Ref, value: jax.Array) -> None:
    """Sets acc = value in the simulator. `acc[...] = value` would fail there, because Pallas turns it into a store to an
    accumulator, which the simulator lacks.
    """
    jax.ref.swap(acc, ..., value)  # pyright: ignore[reportArgumentType]  # a Ref, see `Ref`


def wait_until_read(total: Scalar, *rings: tuple[Ref, int]) -> None:
    """In the copying warpgroup at the end: waits until every tile that went through these rings was read.

    total   number of tiles that went through each ring; only its last tiles, at most one for each slot, are waited for
    rings   (free barriers, number of slots) of each ring
    """
    for free, slots in rings:
        for slot in range(slots):
            when(total > slot)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))


# ------------------------------------------------------------------- the rings of Q and dO


@dataclasses.dataclass(frozen=True)
class QueryRings:
    """The rings through which a kernel that owns keys gets Q with its row statistics, and dO.

    plan                     of the call
    tokens                   the arrays in global memory
    scratch                  with the slots and barriers of both rings
    queries                  of a slot
    query_slots, out_slots   ring depths of Q and dO
    """

    plan: KernelPlan
    tokens: Tokens[Ref]
    scratch: backward_dkv_tiles.Scratch[Ref] | backward_dkv_tiles.SplitScratch[Ref] | backward_fused_tiles.Scratch[Ref]
    queries: int
    query_slots: int
    out_slots: int

    def slots(self, number: Scalar) -> tuple[Scalar, Scalar]:
        """(slot of Q, slot of dO) for the visit with this running number."""
        return slot_of(number, self.query_slots), slot_of(number, self.out_slots)

    def fill(
        self, b: Scalar, h: Scalar, q0: Scalar, number: Scalar, copy_more: Callable[[Scalar], None] | None = None
    ) -> None:
        """In the copying warpgroup: starts the copies of a query tile's Q, row statistics and dO, once their slots
        are free.

        b, h        batch entry and query head
        q0          first query of the tile
        number      running number of the visit
        copy_more   copy_more(slot of Q) starts one more copy, which arrives at the barrier of this slot; None: there
                    is none
        """
        q_slot, out_slot = self.slots(number)
        tokens, scratch, size, parts = self.tokens, self.scratch, self.queries, parts_of(self.plan)
        when(number >= self.query_slots)(lambda: plgpu.barrier_wait(scratch.query_free.at[q_slot]))
        target = slot_parts(scratch.query, q_slot, parts)
        copy_parts(self.plan, tokens.query, b, h, q0, target, scratch.query_full.at[q_slot])
        stats = tokens.stats.at[b, h, :, pl.ds(q0, size)]
        plgpu.copy_gmem_to_smem(stats, scratch.stats.at[q_slot], scratch.query_full.at[q_slot])
        if copy_more is not None:
            copy_more(q_slot)
        when(number >= self.out_slots)(lambda: plgpu.barrier_wait(scratch.out_free.at[out_slot]))
        target = slot_parts(scratch.d_out, out_slot, parts)
        copy_parts(self.plan, tokens.d_out, b, h, q0, target, scratch.out_full.at[out_slot])

    def tiles(self, q_slot: Scalar, out_slot: Scalar) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
        """(the parts of Q in slot `q_slot`, the parts of dO in slot `out_slot`), Refs to [queries, D or E]; nothing is
        waited for.
        """
        parts = parts_of(self.plan)
        return slot_parts(self.scratch.query, q_slot, parts), slot_parts(self.scratch.d_out, out_slot, parts)

    def statistic(self, which: int, q_slot: Scalar) -> jax.Array:
        """lse2 (`which` 0) or delta (1) of the queries in slot `q_slot`, [queries] float32: a vector along the
        columns of a transposed tile.
        """
        return kernel_parts.load(self.scratch.stats.at[q_slot, which], ALONG_COLUMNS)

    def drain(self, total: Scalar) -> None:
        """In the copying warpgroup at the end: waits until all slots were read.

        total   how many visits were copied (`fill`)
        """
        free = self.scratch.query_free, self.scratch.out_free
        wait_until_read(total, (free[0], self.query_slots), (free[1], self.out_slots))
