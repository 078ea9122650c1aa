"""The dk/dv kernel: dk, dv, the gradients of column reads, and dq too where its sums fit VMEM.

    grid step = one visited tile; all query tiles (and query heads of the group) of a key tile follow one another

Keys are the rows of a tile (sublanes) and queries its columns (lanes): p and ds come out transposed, as the products
with dO and q need them, and lse and delta of the queries are lines along the lanes, which broadcast to the tile without
moving data.

With `with_query` this kernel is the whole backward pass: ds is there anyway, so dq costs one more product instead of a
second kernel that computes scores, exponentials and dO . V again. The sums of dq, float32 for all queries of the group,
stay in VMEM for a whole key head; vmem.dq_sums_fit says whether they fit.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends.mosaic_tpu import layouts
from flexjax.backends.mosaic_tpu.backward_tile import BackwardArrays, BackwardCall, StripProducts, strip_gradients
from flexjax.backends.mosaic_tpu.block_sparse_order import make_order
from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.backends.mosaic_tpu.hoisted_operands import ZERO
from flexjax.backends.mosaic_tpu.launch import KernelCall, KernelRefs, KernelStep, Output, each_strip, launch
from flexjax.backends.mosaic_tpu.tile_scores import TileScores
from flexjax.backends.mosaic_tpu.vector_ops import F32, NN, NT, TN, dot, fill, zero_rows_past_end

T = typing.TypeVar("T")


class DkvBuffers(typing.NamedTuple, typing.Generic[T]):
    """The outputs of the kernel, and with the same names its float32 sums in VMEM; None for what is not wanted."""

    dk: T | None  # of a key tile, [keys, D]
    dv: T | None  # of a key tile, [keys, E]
    dq: T | None  # of the query heads of a key head, [group, queries, D]; as output also [queries, group * D]
    columns: tuple[T, ...]  # for each column read its cotangents summed over the queries, [group, 1, keys]


Refs = KernelRefs[BackwardArrays[jax.Ref], DkvBuffers[jax.Ref], DkvBuffers[jax.Ref]]


class DkvGradients(typing.NamedTuple):
    """Gradients of the folded query, key and value (layouts.fold) in their shapes and dtypes, None if not asked for."""

    dq: jax.Array | None
    dk: jax.Array | None
    dv: jax.Array | None
    # {number in derivative.gradients: cotangents summed over the queries}, float32 [B, N, S]
    columns: dict[int, jax.Array]


@dataclasses.dataclass(frozen=True)
class DkvKernel:
    """The body of the dk/dv kernel, with what is static about it."""

    call: BackwardCall
    scores: TileScores
    shapes: layouts.FoldedShapes
    columns: tuple[int, ...]  # the column reads whose gradients are wanted, as numbers in derivative.gradients

    def __call__(self, refs: Refs) -> None:
        """One grid step: zeroes sums that begin here, adds the tile, writes sums that end here.

        Sums of dk, dv and column reads span the visits of a key tile; those of dq span all key tiles of a key head. An
        idle visit, the only one of a key tile that no query sees, adds nothing, so that zeros are written.
        """
        order, tiles, sums = self.scores.order, self.call.tiles, refs.scratch
        visit = order.visit(refs.tables)

        @pl.when(visit.first)
        def zero_sums_of_key_tile() -> None:
            for ref in jax.tree.leaves(sums._replace(dq=None)):
                fill(ref, 0.0)

        dq_sums = sums.dq
        if dq_sums is not None:

            @pl.when(visit.first & (visit.kv_tile == 0))
            def zero_dq_sums() -> None:
                fill(dq_sums, 0.0)

        each_strip(refs, visit, order.kinds, (tiles.kv, tiles.q, tiles.strip), self.add_strip)

        @pl.when(visit.last)
        def write_sums_of_key_tile() -> None:
            self.write_key_tile(refs)

        if dq_sums is not None:

            @pl.when(visit.last & (visit.kv_tile == np.int32(order.geometry.kv_tiles - 1)))
            def write_dq_of_key_head() -> None:
                self.write_dq(refs)

    def add_strip(self, step: KernelStep) -> None:
        """Adds a range of queries of the visited tile to the sums of dk, dv, dq and the column reads."""
        refs: Refs = step.refs
        tiles, strip, visit = self.call.tiles, step.strip, step.visit
        inputs, sums, lanes = refs.inputs, refs.scratch, strip.columns
        queries, d_out = inputs.query[lanes, :], inputs.d_out[lanes, :]
        # Rows that do not exist may hold anything.
        if step.checked and self.scores.queries_end:
            start = visit.q_tile * np.int32(tiles.q) + np.int32(strip.col0)
            end = self.scores.end_of_queries(step)
            queries, d_out = (zero_rows_past_end(x, start, end) for x in (queries, d_out))
        qk = dot(inputs.key[...], queries, NT)
        dp = dot(inputs.value[...], d_out, NT)
        products = StripProducts(qk, dp, inputs.lse[:, lanes], inputs.shift[:, lanes])
        grads = strip_gradients(self.scores, step, products, self.columns)
        if sums.dk is not None and sums.dv is not None:
            sums.dv[...] += dot(grads.p.astype(d_out.dtype), d_out, NN)
            sums.dk[...] += dot(grads.ds.astype(queries.dtype), queries, NN)
        if sums.dq is not None:
            keys = inputs.key[...]
            if step.checked and self.scores.keys_end:
                start = visit.kv_tile * np.int32(tiles.kv)
                keys = zero_rows_past_end(keys, start, self.scores.end_of_keys(step))
            rows: slice | pl.Slice = strip.columns
            if self.scores.order.geometry.q_tiles > 1:
                start = visit.q_tile * np.int32(tiles.q) + np.int32(strip.col0)
                rows = pl.ds(pl.multiple_of(start, math.gcd(tiles.q, strip.col0)), strip.cols)
            sums.dq[visit.group_member, rows, :] += dot(grads.ds.astype(keys.dtype), keys, TN)
        for n, ref in zip(self.columns, sums.columns, strict=True):
            column = jnp.sum(grads.loads[n], axis=1, keepdims=True).reshape(1, tiles.kv)
            ref[visit.group_member] += column

    def write_key_tile(self, refs: Refs) -> None:
        """Writes dk (scaled here), dv and the sums of column reads, at the last visit of a key tile."""
        sums, out = refs.scratch, refs.outputs
        if sums.dk is not None and sums.dv is not None:
            assert out.dk is not None
            assert out.dv is not None
            out.dk[...] = (sums.dk[...] * np.float32(self.call.plan.scale)).astype(out.dk.dtype)
            out.dv[...] = sums.dv[...].astype(out.dv.dtype)
        for ref, column in zip(out.columns, sums.columns, strict=True):
            ref[...] = column[...]

    def write_dq(self, refs: Refs) -> None:
        """Writes dq (scaled here) of all query heads of a key head, at its last visit."""
        sums, out, dim = refs.scratch.dq, refs.outputs.dq, self.shapes.dim
        assert sums is not None
        assert out is not None
        for member in range(self.shapes.group):
            dq = sums[member, : self.call.plan.q_len, :] * np.float32(self.call.plan.scale)
            if self.shapes.query.heads_in_lanes:
                out[:, member * dim : (member + 1) * dim] = dq.astype(out.dtype)
            else:
                out[member] = dq.astype(out.dtype)


def dkv_kernel(call: BackwardCall, columns: tuple[int, ...], want_kv: bool, with_query: bool) -> DkvGradients:
    """Runs the dk/dv kernel; what is not computed is None in the result.

    with_query   whether to compute dq too: its sums fit VMEM, and no launch splits a head

    Heads are those of the folded arrays: dk and dv are not summed over heads that `fold` repeated.
    """
    plan, tiles = call.plan, call.tiles
    shapes = layouts.FoldedShapes.of(plan)
    geometry = TileGeometry.of(plan, tiles, q_axis=1)
    order = make_order(plan, geometry, shapes.group, True, call.operands)
    scores = TileScores(plan, order, call.operands, call.derivative, check_q_end=True, wants_load_slopes=bool(columns))
    maps = layouts.IndexMaps(order, shapes.group)
    dk = Output(shapes.key.shape, plan.dtype, shapes.key.spec(tiles.kv, maps.key))
    dv = Output(shapes.value.shape, plan.dtype, shapes.value.spec(tiles.kv, maps.key))
    column_shape = (plan.batch, shapes.kv_heads, shapes.group, 1, plan.kv_len)
    column = Output(column_shape, "float32", pl.BlockSpec((None, None, shapes.group, 1, tiles.kv), maps.key_column))
    column_sums = pltpu.VMEM((shapes.group, 1, tiles.kv), F32)
    dq_sums = pltpu.VMEM((shapes.group, geometry.q_tiles * tiles.q, shapes.dim), F32)
    found = launch(
        KernelCall(
            "flexjax_dkv",
            order,
            scores.hoisted,
            inputs=call.inputs(shapes, maps),
            outputs=DkvBuffers(
                dk if want_kv else None,
                dv if want_kv else None,
                _dq_output(plan.dtype, shapes, maps) if with_query else None,
                (column,) * len(columns),
            ),
            scratch=DkvBuffers(
                pltpu.VMEM((tiles.kv, shapes.dim), F32) if want_kv else None,
                pltpu.VMEM((tiles.kv, shapes.value_dim), F32) if want_kv else None,
                dq_sums if with_query else None,
                (column_sums,) * len(columns),
            ),
            vmem_limit=call.chip.vmem_limit,
            interpret=plan.options.interpret,
            prefetched=scores.lengths,
        ),
        DkvKernel(call, scores, shapes, columns),
    )
    made = typing.cast(DkvBuffers[jax.Array], found)
    by_head = (x.reshape(plan.batch, plan.q_heads, plan.kv_len) for x in made.columns)
    return DkvGradients(made.dq, made.dk, made.dv, dict(zip(columns, by_head, strict=True)))


def _dq_output(dtype: str, shapes: layouts.FoldedShapes, maps: layouts.IndexMaps) -> Output:
    """The output dq, whose block has all queries of the query heads of one key head."""
    in_lanes, group, dim = shapes.query.heads_in_lanes, shapes.group, shapes.dim
    block = (None, shapes.q_len, group * dim) if in_lanes else (None, group, shapes.q_len, dim)

    def at_group(*grid: jax.Array) -> tuple:
        b, m, _ = maps.key(*grid)
        return (b, ZERO, m) if in_lanes else (b, m, ZERO, ZERO)

    return Output(shapes.query.shape, dtype, pl.BlockSpec(block, at_group))
