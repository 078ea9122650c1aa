"""The steps of fragments.py as functions of arrays, for a consumer of the decode kernel whose key tiles are bytes.

    query_fragments   the right operands of Q K^T, once for each work item
    byte_scores       S^T = K Q^T
    byte_softmax      weights, and the state of each warp's softmax
    add_byte_values   O^T = O^T * factor + V^T P^T
    write_partials    what each warp has summed, to shared memory
    write_merged      one softmax of the sums of all warps, to global memory

An array is held as a WGMMA accumulator is (`registers.TILE`): S^T [block_kv, columns] by keys and packed queries;
references, factors and sums of weights [64, columns], of which the 16 rows of a warp belong to its softmax; O^T [4 *
value dim, columns], value_dim rows of each of the four warps in the order of `to_rows`.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from flexjax.backends.mosaic_gpu.decode import fragments as decode_fragments
from flexjax.backends.mosaic_gpu.machine.allocation import swizzled
from flexjax.backends.mosaic_gpu.machine.exponential import exp2_by_instruction
from flexjax.backends.mosaic_gpu.machine.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.machine.registers import TILE, assemble, element, lowered, positions_of
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP, WARPS
from flexjax.backends.tile_math import LOG2E

SWIZZLED_BYTES = swizzled(128, 1)
Elements = dict[tuple[int, int], typing.Any]  # (row, column) of an element as the first thread has it -> its value


class MlirOps:
    """`fragments.Ops` that emits instructions for one thread, inside `inline_mgpu`."""

    def __init__(self) -> None:
        # before compute capability 9.0 the device has no sum and no product of two bfloat16 but FMAs
        self.fused = mgpu_utils.get_arch().major < 9  # pyright: ignore[reportAttributeAccessIssue]  # from jax 0.11 on
        self.i32 = ir.IntegerType.get_signless(32)
        self.f32 = ir.F32Type.get()
        self.thread = arith.remui(mgpu_utils.thread_idx(), self.const(WARPGROUP))

    def const(self, value: int) -> ir.Value:
        """An i32 constant with the bits of `value`, from -2^31 to 2^32 - 1."""
        return mgpu.c(value - (1 << 32) if value >= 1 << 31 else value, self.i32)

    def _word(self, x: ir.Value | int) -> ir.Value:
        return self.const(x) if isinstance(x, int) else x

    def _ptx(self, text: str, *operands: ir.Value, result: ir.Type | None = None) -> ir.Value:
        """The result of one PTX instruction without side effects: its result is $0, its operands are $1, $2, ..."""
        return mgpu_utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
            text, *operands, result_types=result or self.i32
        )

    def add(self, x: ir.Value, y: ir.Value | int) -> ir.Value:
        return arith.addi(x, self._word(y))

    def times(self, x: ir.Value, factor: int) -> ir.Value:
        return arith.muli(x, self.const(factor))

    def shift_right(self, x: ir.Value, bits: int) -> ir.Value:
        return arith.shrui(x, self.const(bits))

    def bits_and(self, x: ir.Value, mask: int) -> ir.Value:
        return arith.andi(x, self.const(mask))

    def bits_or(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return arith.ori(x, y)

    def bits_xor(self, x: ir.Value, y: ir.Value | int) -> ir.Value:
        return arith.xori(x, self._word(y))

    def permuted(self, x: ir.Value, y: ir.Value | int, selector: int) -> ir.Value:
        return self._ptx(f"prmt.b32 $0, $1, $2, {selector:#x};", x, self._word(y))

    def subtracted(self, x: ir.Value, y: ir.Value | int, dtype: str) -> ir.Value:
        if self.fused and dtype == "bfloat16":
            # y * -1 + x rounds the same
            return self._ptx("fma.rn.bf16x2 $0, $1, $2, $3;", self._word(y), self.const(0xBF80BF80), x)
        return self._ptx(f"sub.rn.{_pair(dtype)} $0, $1, $2;", x, self._word(y))

    def multiplied(self, x: ir.Value, y: int, dtype: str) -> ir.Value:
        if self.fused and dtype == "bfloat16":
            # x * y - 0 rounds the same
            return self._ptx("fma.rn.bf16x2 $0, $1, $2, $3;", x, self._word(y), self.const(0x80008000))
        return self._ptx(f"mul.rn.{_pair(dtype)} $0, $1, $2;", x, self._word(y))

    def packed(self, low: ir.Value, high: ir.Value, dtype: str) -> ir.Value:
        return self._ptx(f"cvt.rn.{_pair(dtype)}.f32 $0, $1, $2;", high, low)

    def load(self, memory: ir.Value, offset: ir.Value) -> list[ir.Value]:
        place = mgpu_utils.getelementptr(
            memory, [arith.extui(ir.IntegerType.get_signless(64), offset)], ir.IntegerType.get_signless(8)
        )
        words = llvm.load(ir.VectorType.get((4,), self.i32), place, alignment=16)
        return [llvm.extractelement(words, self.const(n)) for n in range(4)]

    def mma(self, sums: list[ir.Value], left: list[ir.Value], right: list[ir.Value], dtype: str) -> list[ir.Value]:
        kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        found = mgpu_utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            *left,
            *right,
            *sums,
            result_types=[self.f32] * 4,
        )
        return list(found)

    def transposed(self, x: ir.Value) -> ir.Value:
        return mgpu_utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x, result_types=self.i32, has_side_effects=True
        )

    def exchanged(self, x: ir.Value, distance: int) -> ir.Value:
        return mgpu_utils.shfl_bfly(x, distance)

    def sum(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return arith.addf(x, y)

    def product(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return arith.mulf(x, y)

    def difference(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return arith.subf(x, y)

    def larger(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return arith.maximumf(x, y)

    def zero_if_hidden(self, x: ir.Value) -> ir.Value:
        hidden = arith.cmpf(arith.CmpFPredicate.OEQ, x, mgpu.c(float("-inf"), self.f32))
        return arith.select(hidden, mgpu.c(0.0, self.f32), x)

    def power(self, x: ir.Value) -> ir.Value:
        return exp2_by_instruction(x)


def _pair(dtype: str) -> str:
    """The PTX type of a word of two numbers of the 16-bit dtype."""
    return {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]


def _elements(array: mgpu.FragmentedArray) -> Elements:
    """One thread's elements of an array in the layout TILE, by their place in the first thread."""
    found: Elements = {}
    for register, item, (row, column) in positions_of(lowered(TILE), array.shape).constants:
        found[row, column] = element(typing.cast(ir.Value, array.registers[register]), item)
    return found


def _array(elements: Elements, shape: tuple[int, int], signed: bool | None = None) -> mgpu.FragmentedArray:
    """The array of `shape` in the layout TILE of which one thread holds these elements."""
    layout = lowered(TILE)
    items = ((register, item, elements[at[0], at[1]]) for register, item, at in positions_of(layout, shape).constants)
    return assemble(layout, shape, items, signed)


def _struct(shape: tuple[int, int], dtype: typing.Any = jnp.float32) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=TILE)


# ------------------------------------------------------------------- the simulator's view


def to_rows(x: jax.Array) -> jax.Array:
    """For the simulator: O^T of all warps, [WARPS, value_dim, columns], as rows in the order of `add_byte_values`."""
    parts = x.reshape(WARPS, -1, 8, 8, 2, x.shape[2])  # warp, piece, g, step, half
    return parts.transpose(1, 3, 0, 4, 2, 5).reshape(-1, x.shape[2])


def from_rows(x: jax.Array) -> jax.Array:
    """The inverse of `to_rows`: [4 * value_dim, columns] as [WARPS, value_dim, columns], dims in order."""
    parts = x.reshape(-1, 8, WARPS, 2, 8, x.shape[1])  # piece, step, warp, half, g
    return parts.transpose(2, 0, 4, 1, 3, 5).reshape(WARPS, -1, x.shape[1])


def numbers_of_bytes(stored: jax.Array, dtype: str) -> jax.Array:
    """For the simulator: the numbers whose bytes a tile of int8 holds, float32, as `fragments.widened` gives them."""
    if dtype == "int8":
        return stored.astype(jnp.float32)
    found = lax.bitcast_convert_type(stored, jnp.dtype(dtype)).astype(jnp.float32)
    # the patterns that are no numbers give 480 and -480, so what a page holds past a length is finite
    return jnp.where(jnp.isnan(found), jnp.where(stored < 0, np.float32(-480), np.float32(480)), found)


def by_warp(x: jax.Array) -> jax.Array:
    """`x`, [keys, columns], as [keys / 64, WARPS, 16, columns]: of each 64 keys the 16 of each warp."""
    return x.reshape(-1, WARPS, 16, x.shape[1])


# ------------------------------------------------------------------- a step


@device_op
def query_fragments(queries: Ref) -> jax.Array:
    """The packed queries, [columns, head_dim], in registers: int32 [64, head_dim * columns / 32]."""
    columns, head_dim = queries.shape
    shape = (64, head_dim * columns // 32)

    @inline_mgpu(plgpu.RefType(), returns=_struct(shape, jnp.int32))
    def read(memory: ir.Value) -> mgpu.FragmentedArray:
        words = decode_fragments.query_words(MlirOps(), mgpu_utils.memref_ptr(memory), columns, head_dim)
        places = [(at[0], at[1]) for _, _, at in positions_of(lowered(TILE), shape).constants]
        return _array(dict(zip(places, words, strict=True)), shape, True)

    return read(queries)


@device_op
def byte_scores(keys: Ref, queries: jax.Array, columns: int, stored: str, dtype: str) -> jax.Array:
    """K Q^T without scale, [block_kv, columns] float32; the keys are [block_kv, head_dim] swizzled bytes."""
    block_kv, head_dim = keys.shape
    shape = (block_kv, columns)

    @inline_mgpu(plgpu.RefType(SWIZZLED_BYTES), TILE, returns=_struct(shape))
    def multiply(memory: ir.Value, words: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        ops = MlirOps()
        tile = decode_fragments.TileOfBytes(block_kv, columns, head_dim, stored, dtype)
        place, zero = mgpu_utils.memref_ptr(memory), mgpu.c(0.0, ops.f32)
        found = decode_fragments.scores(ops, place, list(_elements(words).values()), zero, tile)
        return _array(found, shape)

    return multiply(keys, queries)


class WarpSoftmax(typing.NamedTuple):
    """The softmax of each warp: [64, columns] float32, of which the 16 rows of a warp are its own."""

    top: jax.Array  # references, -inf where nothing was visible; the same in all rows of a warp
    total: jax.Array  # sums of weights: row r sums those of keys r, r + 64, ... of every tile


@device_op
def byte_softmax(scores: jax.Array, state: WarpSoftmax, large_scores: bool) -> tuple[jax.Array, jax.Array, WarpSoftmax]:
    """One step of the online softmax of each warp over its own keys: (weights, factor, state after the tile).

    Scores and weights are [block_kv, columns] float32; earlier sums are multiplied by the factor, [64, columns].
    """
    narrow = typing.cast(tuple[int, int], state.top.shape)
    shape = typing.cast(tuple[int, int], scores.shape)

    @inline_mgpu(TILE, TILE, TILE, returns=(_struct(shape), *[_struct(narrow)] * 3))
    def compute(*arrays: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, ...]:
        ops = MlirOps()
        found, top, total = map(_elements, arrays)
        found = decode_fragments.softmax(ops, found, top, total, _unit(ops, large_scores))
        return (_array(found[0], shape), *(_array(x, narrow) for x in found[1:]))

    weights, factor, top, total = compute(scores, *state)
    return weights, factor, WarpSoftmax(top, total)


@device_op
def add_byte_values(
    values: Ref, weights: jax.Array, factor: jax.Array, out: jax.Array, stored: str, dtype: str
) -> jax.Array:
    """out * factor + V^T P^T, [4 * value_dim, columns] float32; the values must have arrived.

    `values` is [block_kv, value_dim] swizzled bytes, `weights` [block_kv, columns] float32 times the scales of values.
    """
    block_kv, value_dim = values.shape
    shape = typing.cast(tuple[int, int], out.shape)
    columns = shape[1]

    @inline_mgpu(plgpu.RefType(SWIZZLED_BYTES), TILE, TILE, TILE, returns=_struct(shape))
    def multiply(memory: ir.Value, *arrays: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        weights, factor, out = map(_elements, arrays)
        place = mgpu_utils.memref_ptr(memory)
        tile = decode_fragments.TileOfBytes(block_kv, columns, value_dim, stored, dtype)
        found = decode_fragments.add_values(MlirOps(), place, weights, factor, out, tile)
        return _array(found, shape)

    return multiply(values, weights, factor, out)


# ------------------------------------------------------------------- the end of an item


@device_op
def write_partials(target: Ref, stats: Ref, out: jax.Array, state: WarpSoftmax, rows: int, group: Scalar) -> None:
    """Writes what each warp of warpgroup `group` has summed to shared memory: warp w writes entry group * WARPS + w.

    `target` is [warps, rows, value_dim] float32, `stats` [warps, 2, columns]: references, sums of weights. The caller
    meets the other warps before `write_merged`.
    """
    value_dim, columns = target.shape[2], out.shape[1]

    @inline_mgpu(plgpu.RefType(), plgpu.RefType(), TILE, TILE, TILE, SCALAR_LAYOUT)
    def write(memory: ir.Value, numbers: ir.Value, *given: mgpu.FragmentedArray) -> None:
        ops = MlirOps()
        sums, top, total = map(_elements, given[:3])
        warp, g, t = decode_fragments.lanes_of(ops)
        number = arith.addi(warp, arith.muli(scalar_of(given[3]), ops.const(WARPS)))
        totals = decode_fragments.column_sums(ops, total)
        first = arith.cmpi(arith.CmpIPredicate.eq, g, ops.const(0))
        for column, value in totals.items():
            at = arith.addi(ops.times(t, 2), ops.const(column))
            # lanes with g = 0
            with _only_if(first):
                place = arith.addi(arith.muli(number, ops.const(2 * columns)), at)
                _store(ops, numbers, place, [top[0, column]])
                _store(ops, numbers, arith.addi(place, ops.const(columns)), [value])
            start = arith.addi(
                arith.muli(arith.addi(ops.times(number, rows), at), ops.const(value_dim)), ops.times(g, 16)
            )
            with _only_if(arith.cmpi(arith.CmpIPredicate.slt, at, ops.const(rows))):
                for piece in range(value_dim // 128):
                    for m in range(0, 8, 2):
                        step = 64 * (8 * piece + m)
                        four = [sums[step + d, column] for d in (0, 8, 64, 72)]
                        _store(ops, memory, arith.addi(start, ops.const(128 * piece + 2 * m)), four)

    write(target, stats, out, *state, group)


@device_op
def write_merged(partial: Ref, stats: Ref, out: Ref, out_stats: Ref, large_scores: bool) -> None:
    """Writes one softmax of the sums of all warps, added in the order of their numbers, to global memory.

    `out` is [rows, value_dim] float32 relative to the merged references, `out_stats` [2, rows]: references, sums of
    weights. One warpgroup calls it, once all warps have written.
    """
    count, rows, value_dim = partial.shape
    columns = stats.shape[2]

    @inline_mgpu(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), plgpu.RefType())
    def merge(sums: ir.Value, numbers: ir.Value, result: ir.Value, result_stats: ir.Value) -> None:
        ops = MlirOps()
        unit = _unit(ops, large_scores)
        # a thread takes four neighbouring dims of a row at a time
        for first in range(0, rows * value_dim, 4 * WARPGROUP):
            place = arith.addi(ops.times(ops.thread, 4), ops.const(first))
            row = arith.divui(place, ops.const(value_dim))
            with _only_if(arith.cmpi(arith.CmpIPredicate.slt, row, ops.const(rows))):
                tops, totals = (
                    [
                        _load(ops, numbers, arith.addi(row, ops.const((2 * n + which) * columns)), 1)[0]
                        for n in range(count)
                    ]
                    for which in range(2)
                )
                top = tops[0]
                for value in tops[1:]:
                    top = ops.larger(top, value)
                base = ops.zero_if_hidden(top)
                below = [ops.difference(value, base) for value in tops]
                factors = [ops.power(x if unit is None else ops.product(x, unit)) for x in below]
                total = ops.product(totals[0], factors[0])
                found = [ops.product(x, factors[0]) for x in _load(ops, sums, place, 4)]
                for n in range(1, count):
                    total = ops.sum(total, ops.product(totals[n], factors[n]))
                    more = _load(ops, sums, arith.addi(place, ops.const(n * rows * value_dim)), 4)
                    found = [ops.sum(x, ops.product(y, factors[n])) for x, y in zip(found, more, strict=True)]
                _store(ops, result, place, found)
                begins = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(place, ops.const(value_dim)), ops.const(0))
                with _only_if(begins):
                    _store(ops, result_stats, row, [top])
                    _store(ops, result_stats, arith.addi(row, ops.const(rows)), [total])

    merge(partial, stats, out, out_stats)


def _unit(ops: MlirOps, large_scores: bool) -> ir.Value | None:
    """What differences of references are multiplied by to give powers of two; None: 1."""
    return mgpu.c(LOG2E, ops.f32) if large_scores else None


def _only_if(condition: ir.Value) -> typing.Any:
    return mgpu_utils.when(condition)


def _place(ops: MlirOps, memory: ir.Value, number: ir.Value) -> ir.Value:
    """The pointer to element `number`, in row-major order, of a float32 array."""
    return mgpu_utils.getelementptr(
        mgpu_utils.memref_ptr(memory), [arith.extui(ir.IntegerType.get_signless(64), number)], ops.f32
    )


def _store(ops: MlirOps, memory: ir.Value, number: ir.Value, values: list[ir.Value]) -> None:
    """Writes one float32, or four neighbouring ones, whose first `number` is a multiple of 4."""
    if len(values) == 1:
        llvm.store(values[0], _place(ops, memory, number))
        return
    made = llvm.mlir_undef(ir.VectorType.get((len(values),), ops.f32))
    for n, value in enumerate(values):
        made = llvm.insertelement(made, value, ops.const(n))
    llvm.store(made, _place(ops, memory, number), alignment=16)


def _load(ops: MlirOps, memory: ir.Value, number: ir.Value, count: int) -> list[ir.Value]:
    """Reads one float32, or four neighbouring ones, whose first `number` is a multiple of 4."""
    if count == 1:
        return [llvm.load(ops.f32, _place(ops, memory, number))]
    words = llvm.load(ir.VectorType.get((count,), ops.f32), _place(ops, memory, number), alignment=16)
    return [llvm.extractelement(words, ops.const(n)) for n in range(count)]
