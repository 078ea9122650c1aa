"""What the backward kernels share: the formulas and their operands; on Hopper also WGMMA, and the rings of Q and dO.

For a tile of scores s = scale * q . k, with lse the logarithm of the softmax denominator of each query row,

    p   = exp(mod(s) - lse)            0 where the mask is off
    dP  = (dO V^T) * r                 r is the dropout multiplier, 1 without dropout
    dsp = p * (dP - delta)             delta = rowsum(dO * O) - d_lse
    ds  = dsp * mod'(s)
    dV += (p * r)^T dO     dK += scale * ds^T Q     dQ += scale * ds K

Of a weighted plan mod(s) is the weight w of the value, and d_total the cotangent of the sum of weights:

    p = w                  delta = -d_total               dsp = dP - delta

Kernels compute in base 2: p = exp2(s * scale * log2(e) - lse2). Where scores may be large (tile_math.py), lse takes the
place of lse2. A row past the end, or with neither a visible key nor a sink, has lse2 = +inf, which makes p exactly 0. A
mod may return NaN where the mask is off; factors are selected on p > 0 *after* the multiplication, which keeps that NaN
out of every gradient.

A CTA has computing warpgroups and one copying warpgroup, which fills rings of slots in shared memory by TMA. Each slot
has a barrier `*_full` (its copy has arrived) and a barrier `*_free` (every reader is done). The *running number* of a
visit counts the tiles that the CTA visited before; it gives the slots.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward import hopper_dkv_tiles, hopper_fused_tiles
from flexjax.backends.mosaic_gpu.backward.hopper_tiles import padded_dim
from flexjax.backends.mosaic_gpu.backward.tile_visits import VisitLists
from flexjax.backends.mosaic_gpu.machine import kernel_parts
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.columns import columns_of, ctas_of
from flexjax.backends.mosaic_gpu.machine.float_parts import pairs_of, parts_of, split
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, accumulator, copy_parts, slot_parts
from flexjax.backends.mosaic_gpu.machine.kernel_parts import not_hoisted as not_hoisted
from flexjax.backends.mosaic_gpu.machine.kernel_parts import slot_of as slot_of
from flexjax.backends.mosaic_gpu.machine.memory import kernel_operand
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.machine.thread_tiles import tile_parts
from flexjax.integers import round_up
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan, Operands

WGMMA = plgpu.Layout.WGMMA
ALONG_ROWS = WGMMA.reduce(1)  # register layout of a vector with a number for each row of a tile
ALONG_COLUMNS = WGMMA.reduce(0)  # register layout of a vector with a number for each column of a tile
Result = typing.TypeVar("Result")
Operand = Ref | jax.Array | tuple[Ref, ...] | tuple[jax.Array, ...]
"""The left operand of a product: a tile, or its parts (machine/float_parts.py)."""


# ------------------------------------------------------------------- operands


def whole_len(plan: KernelPlan, axis: str) -> int:
    """The length of axis "q" or "kv" in whole blocks of the mask, rounded up to 256; no visited tile goes past it."""
    length = plan.q_len if axis == "q" else plan.kv_len
    if plan.blocks is not None:
        length = round_up(length, plan.blocks.block_q if axis == "q" else plan.blocks.block_kv)
    return round_up(length, 256)


@device_op
def padded_len(plan: KernelPlan, axis: str, unit: int) -> int:
    """Padded length of axis "q" or "kv"; `unit` is 1 for kernels that call `clip_rows`, else `PIECE_ROWS`."""
    return round_up(plan.q_len if axis == "q" else plan.kv_len, unit)


def pad(x: jax.Array, plan: KernelPlan, axis: str, unit: int, ctas: int = 1) -> jax.Array:
    """x with zeros appended to T (axis "q" or "kv") and to D, the columns of `ctas` CTAs."""
    dim = padded_dim(columns_of(x.shape[3], ctas)) * ctas
    return kernel_parts.pad(x, plan.layout, padded_len(plan, axis, unit), dim)


class Tokens(typing.NamedTuple, typing.Generic[Part]):
    """Padded arrays over tokens: [parts * B, T', N or M, D'] or [parts * B, N or M, T', D']."""

    query: Part
    key: Part
    value: Part
    d_out: Part  # the cotangent dO of the result
    stats: Part  # lse2 and delta (row_statistics.py), [B, N, 2, `whole_len`] float32


def padded_tokens(
    plan: KernelPlan, operands: Operands, d_out: jax.Array, stats: jax.Array, unit: int
) -> Tokens[jax.Array]:
    """`operands`, extra features joined to the head dim, and `d_out` as the kernels take them: padded and in parts."""
    padded = lambda x, axis: split(pad(x, plan, axis, unit, ctas_of(plan)), parts_of(plan))
    keys = padded(operands.key, "kv"), padded(operands.value, "kv")
    return Tokens(padded(operands.query, "q"), *keys, padded(d_out, "q"), stats)


class Captures(typing.NamedTuple, typing.Generic[Part]):
    """The captured arrays of the mods, in the order of `Program.captures`, and the tables of an origin."""

    score: tuple[Part, ...]
    mask: tuple[Part, ...]
    dropout: tuple[Part, ...]
    origin: tuple[Part, ...] = ()


def statistics_of(
    tokens: Tokens[Ref], b: Scalar, head: Scalar, first: Scalar, count: int, layout: object
) -> tuple[jax.Array, jax.Array]:
    """(lse2, delta) of `count` queries from `first` on, from global memory, [count] float32 in `layout`."""
    queries = pl.ds(first, count)
    one = lambda which: kernel_parts.load(tokens.stats.at[b, head, which, queries], layout, optimized=False)
    return one(0), one(1)


def captures_of(operands: Operands) -> Captures[jax.Array]:
    """The captured arrays of `operands` as kernels take them, and the two tables of its origin."""
    groups = (operands.score_captures, operands.mask_captures, operands.dropout_captures)
    origin = () if operands.origin is None else tuple(operands.origin)
    score, mask, dropout = (tuple(kernel_operand(a) for a in group) for group in groups)
    return Captures(score, mask, dropout, origin)


class BackwardCall(typing.NamedTuple):
    """What every backward kernel is given of a call."""

    plan: KernelPlan  # with extra features joined to the head dim
    derivative: ir.Program | None  # score_mod with its derivatives; None for the identity
    tokens: Tokens[jax.Array]
    captures: Captures[jax.Array]


class BackwardOperands(typing.NamedTuple, typing.Generic[Part]):
    """Operands of the dQ kernels and of all dK/dV kernels but the fused one."""

    tokens: Tokens[Part]
    lists: VisitLists[Part]  # block lists of the axis whose tiles the CTAs own: of query blocks for dQ
    order: Part | None  # which owned tile each CTA takes; None: tiles in ascending order
    captures: Captures[Part]
    skipped: VisitLists[Part] = VisitLists()  # for direct gradients: the key blocks that a query block skips


class DqOutputs(typing.NamedTuple, typing.Generic[Part]):
    """What a dQ kernel writes: dQ in the shape of `Tokens.query`, and the direct gradients (pair_bias.py)."""

    d_query: Part
    direct_gradients: tuple[Part, ...]  # Hopper: `DirectGradient.output_shape`, mma.sync: `.whole_tiles`


# ------------------------------------------------------------------- registers


def raise_register_limit(groups: int) -> None:
    """In a computing warpgroup: raises its register limit if the CTA has two of them."""
    # with a copying warpgroup of 24, 2 * 240 + 24 registers a thread fill the register file
    if groups == 2:
        plgpu.set_max_registers(240, action="increase")


def lower_register_limit(groups: int) -> None:
    """In the copying warpgroup: frees the registers that computing warpgroups wait for in `raise_register_limit`."""
    if groups == 2:
        plgpu.set_max_registers(24, action="decrease")


# ------------------------------------------------------------------- products


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of tiles, acc += a @ b, asynchronously by WGMMA.

    A product is *in flight* between its start and the wait for it. One of operands in parts is several WGMMAs.
    """

    parts: int = 1  # of each operand (machine/float_parts.py)

    def split(self, tile: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, ...]:
        """The parts of a tile, [rows, columns] float32, each of the tile's shape in `dtype`."""
        return tile_parts(tile, dtype, self.parts)

    def accumulators(self, body: Callable[..., Result], *shapes: tuple[int, int]) -> Result:
        """Returns body(*accumulators), zeroed float32 of these shapes; `body` reads them before it ends."""
        return pl.run_scoped(body, *(accumulator(shape) for shape in shapes))

    @device_op
    def start(self, acc: Ref, value: jax.Array) -> None:
        """Sets acc = value, [rows, columns] float32, before the first product into the accumulator."""
        acc[...] = value

    def add(self, acc: Ref, a: Operand, b: Ref | tuple[Ref, ...], *, a_t: bool = False, b_t: bool = False) -> None:
        """Starts acc += a @ b; only an `a` in shared memory can be transposed."""
        left, right = a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,)
        for m, n in pairs_of(self.parts):
            self._add_pair(acc, left[m], right[n], a_t, b_t)

    @device_op
    def _add_pair(self, acc: Ref, a: Ref | jax.Array, b: Ref, a_t: bool, b_t: bool) -> None:
        """Starts acc += a @ b for one part of each operand."""
        plgpu.wgmma(acc, a.T if a_t else a, b.T if b_t else b)  # pyright: ignore[reportArgumentType]  # Refs, see `Ref`

    @device_op
    def read(self, acc: Ref, in_flight: int = 0) -> jax.Array:
        """The accumulator's value, float32 in registers; `in_flight` products were started after its last one."""
        return plgpu.wgmma_accumulator_load(acc, wait_n=self._wgmmas(in_flight))

    @device_op
    def wait(self, in_flight: int) -> None:
        """Waits until at most `in_flight` products of this warpgroup, the newest, are unfinished."""
        plgpu.wgmma_wait(self._wgmmas(in_flight))

    def _wgmmas(self, products: int) -> int:
        return products * len(pairs_of(self.parts))


def wait_until_read(total: Scalar, *rings: tuple[Ref, int]) -> None:
    """In the copying warpgroup: waits until all `total` tiles of the rings (free barriers, slots) were read."""
    # only the last tiles, at most one for each slot, have nobody else who waits for them
    for free, slots in rings:
        for slot in range(slots):
            when(total > slot)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))


# ------------------------------------------------------------------- the rings of Q and dO


@dataclasses.dataclass(frozen=True)
class QueryRings:
    """The rings through which a kernel that owns keys gets Q with its row statistics, and dO."""

    plan: KernelPlan
    tokens: Tokens[Ref]
    scratch: (
        hopper_dkv_tiles.DkvScratch[Ref] | hopper_dkv_tiles.SplitScratch[Ref] | hopper_fused_tiles.FusedScratch[Ref]
    )
    queries: int  # of a slot
    query_slots: int
    out_slots: int

    def slots(self, number: Scalar) -> tuple[Scalar, Scalar]:
        """(slot of Q, slot of dO) for the visit with this running number."""
        return slot_of(number, self.query_slots), slot_of(number, self.out_slots)

    def fill(
        self, b: Scalar, h: Scalar, q0: Scalar, number: Scalar, copy_more: Callable[[Scalar], None] | None = None
    ) -> None:
        """In the copying warpgroup: copies Q, row statistics and dO of visit `number`, once their slots are free.

        `copy_more(slot of Q)` starts one more copy, which arrives at the barrier of this slot.
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
        """The parts of Q and of dO in these slots, Refs to [queries, D or E]; nothing is waited for."""
        parts = parts_of(self.plan)
        return slot_parts(self.scratch.query, q_slot, parts), slot_parts(self.scratch.d_out, out_slot, parts)

    def statistic(self, which: int, q_slot: Scalar) -> jax.Array:
        """lse2 (`which` 0) or delta (1), [queries] float32, along the columns of a transposed tile."""
        return kernel_parts.load(self.scratch.stats.at[q_slot, which], ALONG_COLUMNS)

    def drain(self, total: Scalar) -> None:
        """In the copying warpgroup at the end: waits until all slots of the `total` visits were read."""
        free = self.scratch.query_free, self.scratch.out_free
        wait_until_read(total, (free[0], self.query_slots), (free[1], self.out_slots))
