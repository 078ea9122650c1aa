"""The kernel that sums the gradient of one captured array over lists of tiles (capture_lists.py): what both families share.

capture_sm90.py has the kernel for Hopper, capture_sm80.py that for mma.sync. One CTA works through one list. For each tile of the
list, matrix products give the scores and dP, and from them

    g = dsp * d mod / d load,    dsp = p * (dP - delta)

"mod" is score_mod, "load" its read of the array. `Sink` says what happens to g. Each visited tile costs two matrix products: Q K^T
and dO V^T. A tile is 64 or 128 queries by as many keys. The keys come in *parts*: of 64 keys on Hopper, of `keys_of_part` for
mma.sync. Each computing warpgroup has a *group* of 64 queries and goes through all parts.

P are the probabilities, lse2 and delta the row statistics of the queries; the formulas are at the top of
backward_common.py. b and h are batch entry and query head, q0 and kv0 the first query and key of a tile. The *staged array* is
a captured array, such as a pair bias, whose tiles come through shared memory (pair_bias.py); only the kernel for Hopper stages one.
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

from flexjax.backends.mosaic_gpu import backward_common as common
from flexjax.backends.mosaic_gpu import fixed_point, kernel_parts, registers, thread_tiles
from flexjax.backends.mosaic_gpu.backward_common import Captures, Tokens
from flexjax.backends.mosaic_gpu.backward_tile_math import TileMath
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.capture_lists import ListShape, TileLists
from flexjax.backends.mosaic_gpu.capture_tiles import ROWS, keys_of_part
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.shared_memory import Part
from flexjax.backends.mosaic_gpu.sm80_cards import Card
from flexjax.backends.mosaic_gpu.tile_origin import Place, TileOrigin
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.ir import program as ir
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import KernelPlan


class Sink(enum.Enum):
    """What the kernel does with g.

    SUMS        adds tile by tile in registers, and writes one tile of sums for each list, or one number for each query of a tile
                (`CaptureKernel.sums_over_keys`)
    MAGNITUDES  the same for |g|
    MATRIX      as SUMS, but each list's tile goes to its position in a [b, h, T, S] matrix
    SCATTER     adds, in fixed point (fixed_point.py), to the elements of the array that the load's index names. Under
                a shift-invariant index (shift_invariance.py) the tiles of a list are summed in registers first
    """

    SUMS = "sums"
    MAGNITUDES = "magnitudes"
    MATRIX = "matrix"
    SCATTER = "scatter"


class Visit(typing.NamedTuple):
    """One tile of one head, int32 scalars: the head's number b * N + h, and the code of the tile (`TileLists.tile`)."""

    head: Scalar
    code: Scalar


class Cotangent(typing.NamedTuple):
    """g of one part of a tile: `tile`, [ROWS, part_keys], each row times its number of `scale`, [ROWS]; None stands for 1."""

    tile: jax.Array
    scale: jax.Array | None

    @property
    def whole(self) -> jax.Array:
        """g as a tile."""
        return self.tile if self.scale is None else self.tile * lax.broadcast_in_dim(self.scale, self.tile.shape, (0,))


class Inputs(typing.NamedTuple, typing.Generic[Part]):
    """Operands of the kernel.

    tokens, lists, captures   arrays over tokens, lists of tiles, captured arrays
    order                     [lists] int32, the numbers of the lists, those with most visits first: CTA n takes order[n]
    factor                    [1] for SCATTER: what multiplies g before g is rounded to an integer
                              (`fixed_point.scale`)
    words                     [size, 2] uint32 for SCATTER on the device: the sums, which the kernel adds to
    """

    tokens: Tokens[Part]
    lists: TileLists[Part]
    order: Part
    captures: Captures[Part]
    factor: Part | None = None
    words: Part | None = None


class Outputs(typing.NamedTuple, typing.Generic[Part]):
    """What the kernel writes: for SUMS and MAGNITUDES `sums` is [lists, tile, tile], or [lists, tile] where the sums are over keys
    (`CaptureKernel.sums_over_keys`); for MATRIX [b, h, rows * tile, columns * tile], for SCATTER [lists, groups, size] in the
    simulator, where every warpgroup adds to an array of its own; None on the device.
    """

    sums: Part | None


@dataclasses.dataclass(frozen=True)
class CaptureKernel:
    """The kernel that sums g = p * (dP - delta) * d mod / d load of one load over lists of tiles. "mod" is score_mod,
    the "load" its read of a captured array; d mod / d load is `derivative.results[2 + load_number]`.

    plan          with extra features joined to the head dim
    derivative    score_mod with its derivatives
    load_number   of the load among those with a gradient
    shape         of the lists
    bias          which captured array is staged
    sink          what happens to g
    dtype         of `Outputs.sums`; float32 for SCATTER
    card          whose mma.sync kernel runs (capture_sm80.py); None: the kernel for Hopper does

    A tile has `shape.tile` queries and as many keys, in parts of `part_keys`; each computing warpgroup has ROWS of
    the queries and goes through all parts. A visit is one tile of one head.
    """

    plan: KernelPlan
    derivative: ir.Program
    load_number: int
    shape: ListShape
    bias: DenseBiasPlan
    sink: Sink
    dtype: jax.typing.DTypeLike = jnp.float32
    card: Card | None = None

    @property
    def groups(self) -> int:
        """Into how many groups of ROWS the queries of a tile are divided, one for each computing warpgroup: 1 or 2."""
        return self.shape.tile // ROWS

    @property
    def part_keys(self) -> int:
        """Keys of a part of a tile: ROWS, or in the kernel for mma.sync what `keys_of_part` gives."""
        return ROWS if self.card is None else keys_of_part(self.plan)

    @property
    def parts(self) -> int:
        """Number of parts of a tile."""
        return self.shape.tile // self.part_keys

    @property
    def load(self) -> ir.Load:
        """The load of score_mod whose array's gradient is summed."""
        return typing.cast(ir.Load, self.derivative.steps[self.derivative.gradients[self.load_number]])

    @property
    def size(self) -> int:
        """Elements of the captured array."""
        return int(np.prod(self.derivative.captures[self.load.capture].shape))

    @property
    def scatters_each_tile(self) -> bool:
        """Whether the kernel adds g of every tile to the elements of the array as soon as g is computed, and keeps no
        sums in registers: SCATTER, unless the lists are diagonals.
        """
        return self.sink is Sink.SCATTER and self.shape.kind != ir.DIAGONAL

    @property
    def sums_over_keys(self) -> bool:
        """Whether the kernel keeps one number for each query of a tile, the sum of g over the keys: for lists of a scalar or row
        load.
        """
        return self.shape.kind in (ir.SCALAR, ir.ROW)

    @property
    def math(self) -> TileMath:
        """The TileMath of this kernel: P and d mod / d load of [ROWS, part_keys] parts of a tile, with queries as rows."""
        tile, part = self.shape.tile, (ROWS, self.part_keys)
        return TileMath(self.plan, self.derivative, part, "q", (tile, tile), loads_only=(self.load_number,))

    # ------------------------------------------------------------- tile coordinates

    def steps(self, lists: TileLists[Ref], list_number: Scalar) -> Scalar:
        """How many visits the list with number `list_number` has, its repeats included, an int32 scalar, read from `lists`."""
        batch, heads = self.shape.repeats
        return lists.count[list_number] * (batch * heads)

    def visit(self, lists: TileLists[Ref], list_number: Scalar, steps: Scalar, i: Scalar) -> Visit:
        """The i-th visit of a list, read from the lists in the kernel. A list that repeats its run makes all visits of
        one head before those of the next.

        list_number   number of the list
        steps         how many visits it has, repeats included

        Past the end of the list: its last visit. In an empty list: the list's first head, and tile code 0.
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
        return Visit(head, jnp.where(steps > 0, lists.tile[at], 0))

    def corner(self, visit: Visit) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        """(batch entry, query head, first query, first key) of a visit, int32 scalars."""
        number, code = visit
        b, h = self.head(number)
        tile = lax.shift_right_logical(code, jnp.int32(1))
        row, column = _quotient_and_remainder(tile, self.shape.columns)
        return b, h, row * self.shape.tile, column * self.shape.tile

    def head(self, number: Scalar) -> tuple[Scalar, Scalar]:
        """(b, h) of the head with number b * N + h."""
        return _quotient_and_remainder(number, self.plan.q_heads)

    def first_on_diagonal(self, list_number: Scalar) -> tuple[Scalar, Scalar]:
        """(first query, first key) of the first tile on the diagonal of a list, even if the list does not visit that
        tile.

        list_number   number of the list, which determines the diagonal and, with a period, the row of tiles modulo
                      the period

        With a period it is the first tile whose row has that remainder, which may lie past the ends.
        """
        shape = self.shape
        diagonal, phase = _quotient_and_remainder(lax.rem(list_number, jnp.int32(shape.keys)), shape.period)
        difference = diagonal - (shape.columns - 1)
        row = jnp.maximum(difference, 0)
        row = row + lax.rem(phase + shape.period - lax.rem(row, jnp.int32(shape.period)), jnp.int32(shape.period))
        return row * shape.tile, (row - difference) * shape.tile

    def flat_indices(self, captures: Captures[Ref], b: Scalar, h: Scalar, row0: Scalar, column0: Scalar) -> jax.Array:
        """[ROWS, part_keys] int32: for each query and key of a part, the flat index of the array element that the load
        reads, in row-major order.

        captures        captured arrays, Refs
        b, h            batch entry and query head
        row0, column0   first query and first key of the part

        Where tiles reach past the ends of the attention matrix, the indices of dimensions that depend on the query or the
        key are clamped to the array; all others are as the program gives them. At least one must depend on either.
        """
        math, plan, index = self.math, self.plan, self.load.index
        program = TileProgram(
            with_results(self.derivative, index),
            captures.score,
            math.shape,
            Place(b, h, TileOrigin.of(plan, captures.origin)),
            overhangs=math.overhangs,
            results=tuple(n for n, a in enumerate(index) if ir.axes_of(a) - ir.UNIFORM),
            interpret=plan.options.interpret,
        )
        found = iter(program.at_rows(row0).tile_at_columns(column0))
        lengths = self.derivative.captures[self.load.capture].shape
        total, scalar = None, jnp.int32(0)
        strides = [int(np.prod(lengths[n + 1 :])) for n in range(len(lengths))]
        for atom, length, stride in zip(index, lengths, strides, strict=True):
            if not ir.axes_of(atom) - ir.UNIFORM:
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
        execute: Callable[[Inputs[jax.Array]], Outputs[jax.Array]],
        tokens: Tokens[jax.Array],
        lists: TileLists[jax.Array],
        captures: Captures[jax.Array],
        total: jax.Array | None = None,
    ) -> jax.Array:
        """Runs the kernel: the sums over the lists, in the shape that `Outputs` gives; for SCATTER the array, flat,
        in float32. For MATRIX every list writes its tile, so the matrix has zeros where lists are empty.

        execute                   launches the kernel: `launch_hopper` of capture_sm90.py or `launch_mma` of capture_sm80.py
        tokens, lists, captures   what the kernel reads
        total                     for SCATTER: a bound from above of the sum of all |g|; not read for the others
        """
        simulated, scatter = self.plan.options.interpret, self.sink is Sink.SCATTER
        order = jnp.argsort(-lists.count, stable=True).astype(jnp.int32)
        inputs = Inputs(tokens, lists, order, captures)
        if not scatter:
            (sums,) = execute(inputs)
            assert sums is not None
            return sums
        assert total is not None
        inputs = inputs._replace(factor=fixed_point.scale(total).reshape(1))
        if simulated:
            (sums,) = execute(inputs)
            assert sums is not None
            return sums.sum((0, 1))
        words = jax.new_ref(jnp.zeros((self.size, 2), jnp.uint32))
        execute(inputs._replace(words=typing.cast(jax.Array, words)))
        return fixed_point.decoded(jax.freeze(words), total)

    def output(self, inputs: Inputs[jax.Array]) -> Outputs:
        """Shape and dtype of what the kernel writes, for `kernel_parts.launch`: `Outputs.sums` in the kernel's dtype,
        None for SCATTER on the device.

        inputs   the operands, whose lists are counted
        """
        shape = self._output_shape(inputs.lists.count.shape[0])
        return Outputs(None if shape is None else kernel_parts.output(shape, self.dtype, inputs.tokens.query))

    def _output_shape(self, lists: int) -> tuple[int, ...] | None:
        """The shape of `Outputs.sums` for `lists` lists; None for SCATTER on the device, which adds to `Inputs.words`
        instead.
        """
        shape = self.shape
        if self.sink is Sink.MATRIX:
            return (shape.batch, shape.heads, shape.rows * shape.tile, shape.columns * shape.tile)
        if self.sink is Sink.SCATTER:
            return (lists, self.groups, self.size) if self.plan.options.interpret else None
        return (lists, shape.tile) if self.sums_over_keys else (lists, shape.tile, shape.tile)

    # ------------------------------------------------------------- sums of a computing warpgroup

    def zero_sums(self) -> tuple[jax.Array, ...]:
        """The sums of a computing warpgroup before the first visit: [ROWS] if they are over keys, else [ROWS, part_keys] for each
        part; none where each tile is scattered at once.
        """
        if self.scatters_each_tile:
            return ()
        if self.sums_over_keys:
            return (registers.splat(np.float32(0), "row", (ROWS,), self.plan.options.interpret),)
        return (registers.zero_tile((ROWS, self.part_keys)),) * self.parts

    def add(self, sums: tuple[jax.Array, ...], part: int, g: Cotangent) -> tuple[jax.Array, ...]:
        """The sums of a computing warpgroup after g of part number `part` of a visit was added, |g| for MAGNITUDES. In a sum over
        keys each thread adds the keys that it holds; `ListCta.write` adds the sums of several threads.
        """
        tile, interpret = jnp.abs(g.tile) if self.sink is Sink.MAGNITUDES else g.tile, self.plan.options.interpret
        if self.sums_over_keys:
            total = thread_tiles.partial_row_sums(tile, interpret, fuse=True)
            return (sums[0] + (total if g.scale is None else total * g.scale),)
        tile = Cotangent(tile, g.scale).whole
        return (*sums[:part], sums[part] + tile, *sums[part + 1 :])


@dataclasses.dataclass(frozen=True)
class ListCta:
    """One CTA inside the kernel of either family: it works through the list `list_number`, which has `steps` visits. g
    is what the kernel sums (`CaptureKernel`).

    kernel            what is known at compile time
    inputs, outputs   Refs to operands and results
    """

    kernel: CaptureKernel
    inputs: Inputs[Ref]
    outputs: Outputs[Ref]
    list_number: Scalar
    steps: Scalar

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs in the simulator."""
        return self.kernel.plan.options.interpret

    def visit(self, i: Scalar | int) -> Visit:
        """The i-th visit of the CTA's list, read from the lists; its last visit past the end of the list, and tile 0 of the
        list's first head if the list is empty.
        """
        return self.kernel.visit(self.inputs.lists, self.list_number, self.steps, jnp.asarray(i, jnp.int32))

    def clear(self, group: Scalar | int) -> None:
        """For SCATTER in the simulator: writes zeros to the array of computing warpgroup `group` of this list, to which `scatter`
        adds. Nothing otherwise.
        """
        if self.kernel.sink is Sink.SCATTER and self.outputs.sums is not None:
            self.outputs.sums.at[self.list_number, group][...] = jnp.zeros((self.kernel.size,), jnp.float32)

    def statistics(self, visit: Visit, group: Scalar | int) -> tuple[jax.Array, jax.Array]:
        """(lse2, delta) of the queries that warpgroup `group` has of a visit, [ROWS] float32 each, read from global
        memory.
        """
        b, h, q0, _ = self.kernel.corner(visit)
        return common.statistics_of(self.inputs.tokens, b, h, q0 + group * ROWS, ROWS, common.ALONG_ROWS)

    def scatter(
        self, b: Scalar, h: Scalar, row0: Scalar, column0: Scalar, value: jax.Array, group: Scalar | int
    ) -> None:
        """Adds g of one part of a tile to the elements that the load reads: in fixed point to `Inputs.words`, in the
        simulator in float32 to the warpgroup's own array in `Outputs.sums`.

        b, h      batch entry and query head
        row0      first query of the warpgroup
        column0   first key of the part
        value     [ROWS, part_keys] float32, g of the warpgroup's queries and the part's keys
        group     number of the warpgroup
        """
        if self.inputs.words is not None:
            sums = self.inputs.words
        else:
            assert self.outputs.sums is not None
            sums = self.outputs.sums.at[self.list_number, group]
        assert self.inputs.factor is not None
        indices = self.kernel.flat_indices(self.inputs.captures, b, h, row0, column0)
        fixed_point.add(sums, indices, value, self.inputs.factor[0], self.interpret)

    def write(self, sums: tuple[jax.Array, ...], group: Scalar | int) -> None:
        """Writes the sums of the list to their place in `Outputs.sums`, in the kernel's dtype; for SCATTER adds those of
        a diagonal to the array instead, or nothing if the list is empty. Called once, after the last visit, unless
        `scatters_each_tile`.

        sums    of the warpgroup, as `CaptureKernel.add` makes them
        group   number of the warpgroup, whose queries these are
        """
        kernel, shape = self.kernel, self.kernel.shape
        if kernel.sums_over_keys:
            assert self.outputs.sums is not None
            out = self.outputs.sums.at[self.list_number, pl.ds(group * ROWS, ROWS)]
            out[...] = thread_tiles.sum_lanes(sums[0], self.interpret).astype(kernel.dtype)
            return
        for part, total in enumerate(sums):
            keys = pl.ds(part * kernel.part_keys, kernel.part_keys)
            if kernel.sink is Sink.SCATTER:

                @when(self.steps > 0)
                def scatter_part(part: int = part, total: jax.Array = total) -> None:
                    """Adds the sums of part number `part` of the diagonal's tiles, `total`, to the elements that the
                    load reads; called in a branch where the list has visits.
                    """
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
    """What a computing warpgroup carries from visit to visit.

    sums            float32 sums of g (`CaptureKernel.zero_sums`)
    now, upcoming   this visit and the next
    statistics      (lse2, delta) of this visit's queries, [ROWS] float32 each
    """

    sums: tuple[jax.Array, ...]
    now: Visit
    upcoming: Visit
    statistics: tuple[jax.Array, jax.Array]


def _quotient_and_remainder(number: Scalar, by: int) -> tuple[Scalar, Scalar]:
    """(`number` // `by`, `number` % `by`), int32 scalars; `number` is not negative, `by` a positive Python int."""
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))
