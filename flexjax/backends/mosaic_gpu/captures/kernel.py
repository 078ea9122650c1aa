"""The kernel that sums the gradient of one captured array over lists of tiles (lists.py): what both families share.

hopper.py has the kernel for Hopper, mma.py that for mma.sync. One CTA works through one list. For each tile of the
list, matrix products give the scores and dP, and from them

    g = dsp * d mod / d load,    dsp = p * (dP - delta)

"mod" is score_mod, "load" its read of the array. `Sink` says what happens to g. Each visited tile costs two matrix
products: Q K^T and dO V^T. A tile is 64 or 128 queries by as many keys. The keys come in *parts*: of 64 keys on Hopper,
of `keys_of_part` for mma.sync. Each computing warpgroup has a *group* of 64 queries and goes through all parts.

P are the probabilities, lse2 and delta the row statistics of the queries; the formulas are at the top of
backward/common.py. b and h are batch entry and query head, q0 and kv0 the first query and key of a tile. The *staged
array* is a captured array, such as a pair bias, whose tiles come through shared memory (backward/pair_bias.py); only
the kernel for Hopper stages one.
"""

import dataclasses
import enum
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.backward import common
from flexjax.backends.mosaic_gpu.backward.common import Captures, Tokens
from flexjax.backends.mosaic_gpu.backward.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.backward.tile_math import TileMath
from flexjax.backends.mosaic_gpu.captures import fixed_point, private_sums
from flexjax.backends.mosaic_gpu.captures.lists import ListShape, TileLists
from flexjax.backends.mosaic_gpu.captures.tiles import ROWS
from flexjax.backends.mosaic_gpu.machine import kernel_parts, registers, thread_tiles
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part, PlainArray
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.programs.tile_origin import Place, TileOrigin
from flexjax.backends.mosaic_gpu.programs.tile_programs import TileProgram
from flexjax.ir import program as ir
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import KernelPlan


class Sink(enum.Enum):
    """What the kernel does with g.

    SUMS        adds tile by tile in registers, and writes one tile of sums, or a number a query, for each list
                (`CaptureKernel.sums_over_keys`)
    MAGNITUDES  the same for |g|
    MATRIX      as SUMS, but each list's tile goes to its position in a [b, h, T, S] matrix
    SCATTER     adds, in fixed point (fixed_point.py), to the elements of the array that the load's index names. Under
                a shift-invariant index (shift_invariance.py) the tiles of a list are summed in registers first
    PRIVATE     adds, in shared memory (private_sums.py), to sums of the elements that the list's head reads
    """

    SUMS = "sums"
    MAGNITUDES = "magnitudes"
    MATRIX = "matrix"
    SCATTER = "scatter"
    PRIVATE = "private"


class ListVisit(typing.NamedTuple):
    """One tile of one head, int32 scalars: the head's number b * N + h, and the code of the tile (`TileLists.tile`)."""

    head: Scalar
    code: Scalar


class Cotangent(typing.NamedTuple):
    """g of one part of a tile: `tile`, [ROWS, part_keys], each row times its number of `scale`, [ROWS]; None: 1."""

    tile: jax.Array
    scale: jax.Array | None

    @property
    def whole(self) -> jax.Array:
        return self.tile if self.scale is None else self.tile * lax.broadcast_in_dim(self.scale, self.tile.shape, (0,))


class CaptureInputs(typing.NamedTuple, typing.Generic[Part]):
    """Operands of the kernel.

    tokens, lists, captures   arrays over tokens, lists of tiles, captured arrays
    order                     [lists] int32, the lists, those with most visits first: CTA n takes order[n]
    factor                    [1] for SCATTER: multiplies g before it is rounded (`fixed_point.scale`)
    words                     [size, 2] uint32 for SCATTER on the device: the sums, which the kernel adds to
    """

    tokens: Tokens[Part]
    lists: TileLists[Part]
    order: Part
    captures: Captures[Part]
    factor: Part | None = None
    words: Part | None = None


class CaptureOutputs(typing.NamedTuple, typing.Generic[Part]):
    """What the kernel writes: for SUMS and MAGNITUDES `sums` is [lists, tile, tile], or [lists, tile] where the sums
    are over keys (`CaptureKernel.sums_over_keys`); for MATRIX [b, h, rows * tile, columns * tile], for PRIVATE [lists,
    groups, elements of a head or more], for SCATTER [lists, groups, size] in the simulator, where every warpgroup adds
    to an array of its own; None on the device.
    """

    sums: Part | None


class CaptureFamily(typing.NamedTuple):
    """What differs between the kernels of hopper.py and mma.py."""

    launch: Callable[["CaptureKernel", CaptureInputs[jax.Array]], CaptureOutputs[jax.Array]]
    part_keys: Callable[[KernelPlan], int]  # keys of a part of a tile
    private_sums: Callable[[KernelPlan, int], PlainArray | None]  # `tiles.most_copies`


@dataclasses.dataclass(frozen=True)
class CaptureKernel:
    """The kernel that sums g = p * (dP - delta) * d mod / d load of one load over lists of tiles.

    load_number   of the load among those with a gradient
    dtype         of `CaptureOutputs.sums`; float32 for SCATTER and PRIVATE
    private       for PRIVATE: the sums of a CTA, [groups, rows, copies]
    """

    plan: KernelPlan
    derivative: ir.Program
    load_number: int
    shape: ListShape
    bias: DenseBiasPlan
    sink: Sink
    family: "CaptureFamily"
    dtype: jax.typing.DTypeLike = jnp.float32
    private: PlainArray | None = None

    @property
    def groups(self) -> int:
        """One for each computing warpgroup."""
        return self.shape.tile // ROWS

    @property
    def part_keys(self) -> int:
        return self.family.part_keys(self.plan)

    @property
    def parts(self) -> int:
        return self.shape.tile // self.part_keys

    @property
    def load(self) -> ir.Load:
        return typing.cast(ir.Load, self.derivative.steps[self.derivative.gradients[self.load_number]])

    @property
    def size(self) -> int:
        return int(np.prod(self.derivative.captures[self.load.capture].shape))

    @property
    def scatters_each_tile(self) -> bool:
        """Without sums in registers: it adds g of every tile to the elements of the array, or of the head, at once."""
        return self.sink is Sink.PRIVATE or (self.sink is Sink.SCATTER and self.shape.kind != ir.DIAGONAL)

    @property
    def sums_over_keys(self) -> bool:
        """Whether it keeps one number for each query of a tile."""
        return self.shape.kind in (ir.SCALAR, ir.ROW)

    @property
    def math(self) -> TileMath:
        """Of parts of a tile, with queries as rows."""
        tile, part = self.shape.tile, (ROWS, self.part_keys)
        return TileMath(self.plan, self.derivative, part, "q", (tile, tile), loads_only=(self.load_number,))

    # ------------------------------------------------------------- tile coordinates

    def steps(self, lists: TileLists[Ref], list_number: Scalar) -> Scalar:
        """How many visits a list has, its repeats included."""
        batch, heads = self.shape.repeats
        return lists.count[list_number] * (batch * heads)

    def visit(self, lists: TileLists[Ref], list_number: Scalar, steps: Scalar, i: Scalar) -> ListVisit:
        """The i-th visit of a list, which has `steps`; past its end the last one, and in an empty list tile 0 of its
        first head. A list that repeats its run makes all visits of one head before those of the next.
        """
        i = jnp.maximum(jnp.minimum(i, steps - 1), 0)
        head, (batch, heads) = lists.head[list_number], self.shape.repeats
        if batch * heads > 1:
            count = jnp.maximum(lists.count[list_number], 1)
            repeat, i = lax.div(i, count), lax.rem(i, count)
            head = head + (repeat if heads > 1 else repeat * self.plan.q_heads)  # either all heads are joined or none
        at = lists.begin[list_number] + i
        # `begin` of an empty list may lie past the last visit
        at = jnp.minimum(at, jnp.int32(lists.tile.shape[0] - 1))
        if lists.head_offset is not None:
            head = head + jnp.where(steps > 0, lists.head_offset[at], 0)
        return ListVisit(head, jnp.where(steps > 0, lists.tile[at], 0))

    def corner(self, visit: ListVisit) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        """(batch entry, query head, first query, first key)."""
        number, code = visit
        b, h = self.head(number)
        tile = lax.shift_right_logical(code, jnp.int32(1))
        row, column = _quotient_and_remainder(tile, self.shape.columns)
        return b, h, row * self.shape.tile, column * self.shape.tile

    def head(self, number: Scalar) -> tuple[Scalar, Scalar]:
        """(b, h) of the head with number b * N + h."""
        return _quotient_and_remainder(number, self.plan.q_heads)

    def first_on_diagonal(self, list_number: Scalar) -> tuple[Scalar, Scalar]:
        """(first query, first key) of the first tile on the diagonal of a list, which the list need not visit. With a
        period it is the first tile whose row has that remainder, which may lie past the ends.
        """
        shape = self.shape
        diagonal, phase = _quotient_and_remainder(lax.rem(list_number, jnp.int32(shape.keys)), shape.period)
        difference = diagonal - (shape.columns - 1)
        row = jnp.maximum(difference, 0)
        row = row + lax.rem(phase + shape.period - lax.rem(row, jnp.int32(shape.period)), jnp.int32(shape.period))
        return row * shape.tile, (row - difference) * shape.tile

    def flat_indices(self, captures: Captures[Ref], b: Scalar, h: Scalar, row0: Scalar, column0: Scalar) -> jax.Array:
        """[ROWS, part_keys] int32: for each query and key of a part, the flat index of the array element that the load
        reads, in row-major order; for PRIVATE that among the elements that the head reads.

        row0, column0   first query and first key of the part

        Where tiles reach past the ends of the attention matrix, indices by q and kv are clamped to the array.
        """
        math, plan, index = self.math, self.plan, self.load.index
        program = TileProgram(
            with_results(self.derivative, index),
            captures.score,
            math.shape,
            Place(b, h, TileOrigin.of(plan, captures.origin)),
            overhangs=math.overhangs,
            results=tuple(n for n, a in enumerate(index) if ir.axes_of(a) - ir.UNIFORM),
        )
        found = iter(program.at_rows(row0).tile_at_columns(column0))
        lengths = self.derivative.captures[self.load.capture].shape
        total, scalar = None, jnp.int32(0)
        private, dims = self.sink is Sink.PRIVATE, private_sums.moving(self.load)
        if private:
            lengths = tuple(length if n in dims else 1 for n, length in enumerate(lengths))
        strides = [int(np.prod(lengths[n + 1 :])) for n in range(len(lengths))]
        for atom, length, stride in zip(index, lengths, strides, strict=True):
            if not ir.axes_of(atom) - ir.UNIFORM:
                if private:
                    continue
                (value,) = program.scalar_values((atom,))
                scalar = scalar + jnp.asarray(value, jnp.int32) * np.int32(stride)
                continue
            value = next(found).astype(jnp.int32)
            if math.overhangs:
                value = jnp.minimum(jnp.maximum(value, np.int32(0)), np.int32(length - 1))
            value = value if stride == 1 else value * np.int32(stride)
            total = value if total is None else total + value
        assert total is not None
        return total + scalar

    # ------------------------------------------------------------- launch

    def run(
        self,
        tokens: Tokens[jax.Array],
        lists: TileLists[jax.Array],
        captures: Captures[jax.Array],
        total: jax.Array | None = None,
    ) -> jax.Array:
        """Runs the kernel: the sums over the lists, as in `CaptureOutputs`; for SCATTER the array, flat, in float32.

        total   for SCATTER: a bound from above of the sum of all |g|
        """
        order = jnp.argsort(-lists.count, stable=True).astype(jnp.int32)
        inputs = CaptureInputs(tokens, lists, order, captures)
        if self.sink is Sink.SCATTER:
            assert total is not None
            return self._scattered(inputs._replace(factor=fixed_point.scale(total).reshape(1)), total)
        (sums,) = self.family.launch(self, inputs)
        assert sums is not None
        return sums

    @device_op
    def _scattered(self, inputs: CaptureInputs[jax.Array], total: jax.Array) -> jax.Array:
        words = jax.new_ref(jnp.zeros((self.size, 2), jnp.uint32))
        self.family.launch(self, inputs._replace(words=typing.cast(jax.Array, words)))
        return fixed_point.decoded(jax.freeze(words), total)

    def output(self, inputs: CaptureInputs[jax.Array]) -> CaptureOutputs:
        """What the kernel writes, for `kernel_parts.launch`."""
        shape = self._output_shape(inputs.lists.count.shape[0])
        return CaptureOutputs(None if shape is None else kernel_parts.output(shape, self.dtype, inputs.tokens.query))

    def _output_shape(self, lists: int) -> tuple[int, ...] | None:
        shape = self.shape
        if self.private is not None:
            return (lists, *self.private.shape[:2])
        if self.sink is Sink.MATRIX:
            return (shape.batch, shape.heads, shape.rows * shape.tile, shape.columns * shape.tile)
        if self.sink is Sink.SCATTER:
            return self._scatter_shape(lists)
        return (lists, shape.tile) if self.sums_over_keys else (lists, shape.tile, shape.tile)

    @device_op
    def _scatter_shape(self, lists: int) -> tuple[int, ...] | None:
        """None: the kernel adds to `CaptureInputs.words`."""
        return None

    # ------------------------------------------------------------- sums of a computing warpgroup

    def zero_sums(self) -> tuple[jax.Array, ...]:
        """[ROWS] if the sums are over keys, else [ROWS, part_keys] for each part; none where tiles are scattered."""
        if self.scatters_each_tile:
            return ()
        if self.sums_over_keys:
            return (registers.splat(np.float32(0), "row", (ROWS,)),)
        return (registers.zero_tile((ROWS, self.part_keys)),) * self.parts

    def add(self, sums: tuple[jax.Array, ...], part: int, g: Cotangent) -> tuple[jax.Array, ...]:
        """The sums after g of a part was added. Over keys each thread adds its own (`ListCta.write`)."""
        tile = jnp.abs(g.tile) if self.sink is Sink.MAGNITUDES else g.tile
        if self.sums_over_keys:
            total = thread_tiles.partial_row_sums(tile, fuse=True)
            return (sums[0] + (total if g.scale is None else total * g.scale),)
        tile = Cotangent(tile, g.scale).whole
        return (*sums[:part], sums[part] + tile, *sums[part + 1 :])


@dataclasses.dataclass(frozen=True)
class ListCta:
    """One CTA inside the kernel of either family: it works through the list `list_number`, which has `steps` visits."""

    kernel: CaptureKernel
    inputs: CaptureInputs[Ref]
    outputs: CaptureOutputs[Ref]
    list_number: Scalar
    steps: Scalar
    private: Ref | None = None

    def visit(self, i: Scalar | int) -> ListVisit:
        """As `CaptureKernel.visit`."""
        return self.kernel.visit(self.inputs.lists, self.list_number, self.steps, jnp.asarray(i, jnp.int32))

    def clear(self, group: Scalar | int) -> None:
        """For PRIVATE, and for SCATTER in the simulator: zeroes the sums of a computing warpgroup."""
        if self.private is not None:
            private_sums.clear(self.private.at[group])
        if self.kernel.sink is Sink.SCATTER and self.outputs.sums is not None:
            self.outputs.sums.at[self.list_number, group][...] = jnp.zeros((self.kernel.size,), jnp.float32)

    def statistics(self, visit: ListVisit, group: Scalar | int) -> tuple[jax.Array, jax.Array]:
        """(lse2, delta) of the warpgroup's queries, [ROWS] float32 each."""
        b, h, q0, _ = self.kernel.corner(visit)
        return common.statistics_of(self.inputs.tokens, b, h, q0 + group * ROWS, ROWS, common.ALONG_ROWS)

    def scatter(
        self, b: Scalar, h: Scalar, row0: Scalar, column0: Scalar, value: jax.Array, group: Scalar | int
    ) -> None:
        """Adds g of one part of a tile, [ROWS, part_keys], to the elements that the load reads: in float32 to the
        warpgroup's own sums (PRIVATE), or in fixed point to `CaptureInputs.words`, in the simulator in float32 to the
        warpgroup's own array.

        row0, column0   first query of the warpgroup and first key of the part
        """
        if self.private is not None:
            indices = self.kernel.flat_indices(self.inputs.captures, b, h, row0, column0)
            private_sums.add_private(self.private.at[group], indices, value)
            return
        if self.inputs.words is not None:
            sums = self.inputs.words
        else:
            assert self.outputs.sums is not None
            sums = self.outputs.sums.at[self.list_number, group]
        assert self.inputs.factor is not None
        indices = self.kernel.flat_indices(self.inputs.captures, b, h, row0, column0)
        fixed_point.add(sums, indices, value, self.inputs.factor[0])

    def write(self, sums: tuple[jax.Array, ...], group: Scalar | int) -> None:
        """Writes the sums of the list, once, after the last visit; SCATTER has added those of each tile, or adds those
        of a diagonal to the array.
        """
        kernel, shape = self.kernel, self.kernel.shape
        if self.private is not None:
            assert self.outputs.sums is not None
            private_sums.write(self.private.at[group], self.outputs.sums.at[self.list_number, group])
        if kernel.scatters_each_tile:
            return
        if kernel.sums_over_keys:
            assert self.outputs.sums is not None
            out = self.outputs.sums.at[self.list_number, pl.ds(group * ROWS, ROWS)]
            out[...] = thread_tiles.sum_lanes(sums[0]).astype(kernel.dtype)
            return
        for part, total in enumerate(sums):
            keys = pl.ds(part * kernel.part_keys, kernel.part_keys)
            if kernel.sink is Sink.SCATTER:

                @when(self.steps > 0)
                def scatter_part(part: int = part, total: jax.Array = total) -> None:
                    if shape.whole is None:
                        q0, kv0 = kernel.first_on_diagonal(self.list_number)
                    else:
                        _, _, q0, kv0 = kernel.corner(self.visit(0))
                    b, h = kernel.head(self.inputs.lists.head[self.list_number])
                    self.scatter(b, h, q0 + group * ROWS, kv0 + part * kernel.part_keys, total, group)

                continue
            assert self.outputs.sums is not None
            out = self.outputs.sums.at[self.list_number, pl.ds(group * ROWS, ROWS), keys]
            if kernel.sink is Sink.MATRIX:
                head, at = _quotient_and_remainder(self.list_number, shape.rows * shape.columns)
                b, h = _quotient_and_remainder(head, shape.heads)
                row, column = _quotient_and_remainder(at, shape.columns)
                rows = pl.ds(row * shape.tile + group * ROWS, ROWS)
                keys = pl.ds(column * shape.tile + part * kernel.part_keys, kernel.part_keys)
                out = self.outputs.sums.at[b, h, rows, keys]
            out[...] = total.astype(kernel.dtype)


class Carry(typing.NamedTuple):
    """What a computing warpgroup carries from visit to visit; `statistics`: (lse2, delta), [ROWS] float32 each."""

    sums: tuple[jax.Array, ...]
    now: ListVisit
    upcoming: ListVisit
    statistics: tuple[jax.Array, jax.Array]


def _quotient_and_remainder(number: Scalar, by: int) -> tuple[Scalar, Scalar]:
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))
