"""The dq kernel: dq, and the gradients of all captured reads but column reads, which the dk/dv kernel sums.

Grid and orientation are those of the forward kernel: all key tiles of a row of query tiles follow one another, and
queries are the rows of a tile. Besides dq the kernel sums d_load, the cotangent of what a read reads, for each captured
read of load class

    scalar, row   along the keys, [B, N, 1, T]; XLA then adds up a scalar's
    diagonal      along the diagonals, [B, N, 8, diagonals], kept in VMEM for a whole head (diagonals.toeplitz_sums)
    tile          nowhere: it writes d_load itself, [B, N, T, S], block by block
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends.mosaic_tpu import diagonals, layouts
from flexjax.backends.mosaic_tpu.backward_tile import BackwardArrays, BackwardCall, StripProducts, strip_gradients
from flexjax.backends.mosaic_tpu.block_sparse_order import make_order
from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.backends.mosaic_tpu.launch import KernelCall, KernelRefs, KernelStep, Output, each_strip, launch
from flexjax.backends.mosaic_tpu.tile_scores import TileScores
from flexjax.backends.mosaic_tpu.vector_ops import F32, LANES, NN, NT, dot, fill, lane_sums, zero_rows_past_end
from flexjax.backends.mosaic_tpu.visit_order import IDLE, DenseOrder
from flexjax.ir import program as ir

T = typing.TypeVar("T")


class DqOutputs(typing.NamedTuple, typing.Generic[T]):
    """The outputs of the kernel: dq in the shape of the folded query, and d_load of captured reads."""

    dq: T | None  # None if not wanted
    rows: tuple[T, ...]  # for each scalar or row read, its sums along the keys
    diagonals: tuple[T, ...]  # for each diagonal read, its sums along the diagonals
    tiles: tuple[T, ...]  # for each tile read, d_load of every entry


class DqScratch(typing.NamedTuple, typing.Generic[T]):
    """float32 sums of a row of tiles in VMEM."""

    dq: T | None  # before scaling, [queries, D]; None if not wanted
    rows: tuple[T, ...]  # for each scalar or row read [queries, 128] partial sums


Refs = KernelRefs[BackwardArrays[jax.Ref], DqOutputs[jax.Ref], DqScratch[jax.Ref]]


class LoadNumbers(typing.NamedTuple):
    """Wanted captured reads, as numbers in derivative.gradients, by how the kernel sums them."""

    rows: tuple[int, ...]  # scalar and row reads
    diagonals: tuple[int, ...]  # diagonal reads
    tiles: tuple[int, ...]  # tile reads, which are not summed

    @classmethod
    def of(cls, wanted: dict[int, str]) -> "LoadNumbers":
        of_kind = lambda *kinds: tuple(n for n, kind in wanted.items() if kind in kinds)
        return cls(of_kind(ir.SCALAR, ir.ROW), of_kind(ir.DIAGONAL), of_kind(ir.TILE))

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.rows, *self.diagonals, *self.tiles)


@dataclasses.dataclass(frozen=True)
class DqKernel:
    """The body of the dq kernel, with what is static about it."""

    call: BackwardCall
    scores: TileScores
    numbers: LoadNumbers  # the captured reads whose gradients it sums

    def __call__(self, refs: Refs) -> None:
        """One grid step: zeroes sums that begin here, adds the tile, writes sums that end here.

        Sums of a row span its visits; those along diagonals span a head and are kept in the output block. An idle
        visit, the only one of a row without tiles, adds nothing: zeros are written, to d_load of tile reads too.
        """
        order, tiles = self.scores.order, self.call.tiles
        visit = order.visit(refs.tables)

        @pl.when(visit.first)
        def zero_sums_of_row() -> None:
            for ref in jax.tree.leaves(refs.scratch):
                fill(ref, 0.0)

        if refs.outputs.diagonals:

            @pl.when(visit.first & (visit.q_tile == 0))
            def zero_diagonal_sums() -> None:
                for ref in refs.outputs.diagonals:
                    fill(ref, 0.0)

        if refs.outputs.tiles and IDLE in order.kinds:

            @pl.when(visit.kind == IDLE)
            def zero_tiles() -> None:
                for ref in refs.outputs.tiles:
                    fill(ref, 0.0)

        each_strip(refs, visit, order.kinds, (tiles.q, tiles.kv, tiles.strip), self.add_strip)

        @pl.when(visit.last)
        def write_sums_of_row() -> None:
            dq, out = refs.scratch.dq, refs.outputs.dq
            if dq is not None and out is not None:
                out[...] = (dq[...] * np.float32(self.call.plan.scale)).astype(out.dtype)
            for sums, ref in zip(refs.scratch.rows, refs.outputs.rows, strict=True):
                ref[...] = jnp.sum(sums[...], axis=1, keepdims=True).reshape(1, tiles.q)

    def add_strip(self, step: KernelStep) -> None:
        """Adds a range of keys of the visited tile to dq and the sums; writes d_load of tile reads."""
        refs: Refs = step.refs
        tiles, strip, geometry = self.call.tiles, step.strip, self.scores.order.geometry
        inputs = refs.inputs
        keys, values = inputs.key[strip.columns, :], inputs.value[strip.columns, :]
        qk = dot(inputs.query[...], keys, NT)
        dp = dot(inputs.d_out[...], values, NT)
        lse, shift = (ref[...].reshape(tiles.q, 1) for ref in (inputs.lse, inputs.shift))
        grads = strip_gradients(self.scores, step, StripProducts(qk, dp, lse, shift), self.numbers.all)
        if refs.scratch.dq is not None:
            # Keys that do not exist may hold anything.
            if step.checked and self.scores.keys_end:
                start = step.visit.kv_tile * np.int32(tiles.kv) + np.int32(strip.col0)
                keys = zero_rows_past_end(keys, start, self.scores.end_of_keys(step))
            refs.scratch.dq[...] += dot(grads.ds.astype(keys.dtype), keys, NN)
        for n, sums in zip(self.numbers.rows, refs.scratch.rows, strict=True):
            sums[...] += lane_sums(grads.loads[n])
        for n, ref in zip(self.numbers.diagonals, refs.outputs.diagonals, strict=True):
            window = diagonals.toeplitz_sums(grads.loads[n], geometry.window, tiles.q + strip.col0)
            start = pl.multiple_of(geometry.window_start(step.visit.q_tile, step.visit.kv_tile), LANES)
            ref[(slice(None), pl.ds(start, geometry.window))] += window
        for n, ref in zip(self.numbers.tiles, refs.outputs.tiles, strict=True):
            ref[:, strip.columns] = grads.loads[n]


def dq_kernel(
    call: BackwardCall, wanted: dict[int, str], want_query: bool
) -> tuple[jax.Array | None, dict[int, jax.Array]]:
    """Runs the dq kernel; `wanted` is {number in derivative.gradients: load class} without column reads.

    Returns dq in the shape and dtype of the folded query (None if not wanted), and {number: sums of d_load}, float32:
    of scalar and row reads [B, N, 1, T], of diagonal reads [B, N, S + T - 1] by ascending q - kv, of tile reads [B, N,
    T, S].
    """
    plan, tiles = call.plan, call.tiles
    shapes = layouts.FoldedShapes.of(plan)
    geometry = TileGeometry.of(plan, tiles, q_axis=0)
    order = make_order(plan, geometry, shapes.group, False, call.operands)
    numbers = LoadNumbers.of(wanted)
    scores = TileScores(
        plan,
        order,
        call.operands,
        call.derivative,
        check_q_end=bool(numbers.diagonals or numbers.tiles or plan.lengths[0]),
        wants_load_slopes=bool(numbers.all),
    )
    maps = layouts.IndexMaps(order, shapes.group)
    batch_and_heads = (plan.batch, plan.q_heads)
    dq = Output(shapes.query.shape, plan.dtype, shapes.query.spec(tiles.q, maps.query))
    row = Output((*batch_and_heads, 1, plan.q_len), "float32", maps.row_spec(tiles.q))
    window = (diagonals.SKEW, geometry.diagonals)
    diagonal = Output((*batch_and_heads, *window), "float32", pl.BlockSpec((None, None, *window), maps.head))
    tile_spec = pl.BlockSpec((None, None, tiles.q, tiles.kv), maps.tile)
    # d_load is 0 in tiles that are not visited
    tile = Output(
        (*batch_and_heads, plan.q_len, plan.kv_len), "float32", tile_spec, zeroed=not isinstance(order, DenseOrder)
    )
    found = launch(
        KernelCall(
            "flexjax_dq",
            order,
            scores.hoisted,
            inputs=call.inputs(shapes, maps),
            outputs=DqOutputs(
                dq if want_query else None,
                (row,) * len(numbers.rows),
                (diagonal,) * len(numbers.diagonals),
                (tile,) * len(numbers.tiles),
            ),
            scratch=DqScratch(
                pltpu.VMEM((tiles.q, shapes.dim), F32) if want_query else None,
                tuple(pltpu.VMEM((tiles.q, LANES), F32) for _ in numbers.rows),
            ),
            vmem_limit=call.chip.vmem_limit,
            interpret=plan.options.interpret,
            prefetched=scores.lengths,
        ),
        DqKernel(call, scores, numbers),
    )
    made = typing.cast(DqOutputs[jax.Array], found)
    along = tuple(geometry.unpad_diagonals(diagonals.unskewed_sums(x)) for x in made.diagonals)
    sums = dict(zip(numbers.all, (*made.rows, *along, *made.tiles), strict=True))
    return made.dq, sums
