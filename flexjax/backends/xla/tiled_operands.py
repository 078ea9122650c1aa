"""The operands of one pass laid out for tiles: padded to whole blocks, sliced by tile, multiplied by head groups.

Operands are [B, heads, tokens, D], tokens padded to whole blocks, so that every slice has one size. Entries past an end
are masked, by a mask that exists only where a block reaches past it. The forward pass of a call with few queries, as in
decoding, reads keys and values in place: they keep their length, layout and dtype, because copying a cache costs as
much as reading it.

In shapes, batch, heads, block_q, block_kv and chunk are the tile sizes, keys = chunk * block_kv.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.target import Target
from flexjax.backends.xla.block_loop import BlockVisit, TileRow
from flexjax.backends.xla.page_rows import PageRows, Pool
from flexjax.backends.xla.tile_sizes import choose_tile_sizes, is_short
from flexjax.backends.xla.tile_slices import slice_plan
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.plan.lengths import NONE, where_exists
from flexjax.plan.precision import for_dot_general
from flexjax.varying import varying_as

Array = jax.Array
Tree = TypeVar("Tree")


def heads_first(x: Array, plan: KernelPlan) -> Array:
    """From the plan's layout to [B, N, T, ...]; its own inverse."""
    return jnp.swapaxes(x, 1, 2) if plan.layout == "BTNH" else x


def int32s(numbers: Sequence[Array | int]) -> list[Array]:
    """dynamic_slice wants one dtype, and jax's default int may be int64."""
    return [jnp.asarray(n, jnp.int32) for n in numbers]


def pad_to(x: Array, axis: int, size: int) -> Array:
    short = size - x.shape[axis]
    if short == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, short)
    return jnp.pad(x, widths, constant_values=0.0)


def _is_narrow(x: Array) -> bool:
    """Whether x has floats of less than 32 bits."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


def pad_captures(program: Program | None, arrays: Sequence[Array], overhang: tuple[int, int]) -> tuple[Array, ...]:
    """The captured arrays, with zeros appended where a slice that a tile reads would reach past their end.

    overhang   how many queries and keys the last tiles reach past the end of the call
    """
    grown = list(arrays)
    if program is None:
        return tuple(grown)
    for load in program.loads:
        plan = slice_plan(load)
        if plan is not None:
            ends = map(sum, zip(program.sizes[2:], overhang, strict=True))
            more = plan.padding(program.captures[load.capture], *ends)
            # an array may have been padded before, for another program
            have = [g - s for g, s in zip(grown[load.capture].shape, program.captures[load.capture].shape, strict=True)]
            rest = [(0, max(0, high - h)) for (_, high), h in zip(more, have, strict=True)]
            if any(high for _, high in rest):
                grown[load.capture] = jnp.pad(grown[load.capture], rest)
    return tuple(grown)


class TiledOperands:
    """The operands of one pass, laid out and padded so that each tile is a slice, and the products of their tiles."""

    def __init__(
        self,
        plan: KernelPlan,
        operands: Operands,
        target: Target,
        derivative: Program | None = None,
        *,
        backward: bool = False,
    ):
        """`derivative` is for the backward and tangent passes; the backward pass has tile sizes of its own."""
        self.plan = plan
        self.sizes = choose_tile_sizes(plan, target, backward)
        self.compute = jnp.dtype(plan.score_dtype)  # the dtype of scores and sums
        # A CPU has no low-precision units: widening once beats widening in every product.
        narrow = target.platform != "cpu" and plan.dtype in ("bfloat16", "float16")
        self.operand_dtype = jnp.dtype(plan.dtype) if narrow and plan.cache_dtype is None else self.compute
        self.lengths = operands.lengths or NONE
        # both passes round the weights of values to the same numbers (tile_math.py)
        self.rounds_weights = narrow and plan.rounds_weights_alike
        # A CPU converts 16-bit and 8-bit floats to float32 before it slices them, which `pinned` confines to a visit.
        self.widens_slices = target.platform == "cpu"
        sizes = self.sizes
        # Keys and values keep their length, layout and dtype where each of them is read once, or the call is short.
        self.in_place = (sizes.rows == 1 or is_short(plan, target)) and not backward
        self.key_heads_axis = 2 if plan.page or (self.in_place and plan.layout == "BTNH") else 1
        self.pages = None if operands.pages is None else PageRows(plan, sizes, operands.pages)
        scales = operands.scales or (None, None)
        self.query = self.rows(operands.query)
        self.key = Pool(operands.key, scales[0]) if plan.page else self.columns(operands.key)
        self.value = Pool(operands.value, scales[1]) if plan.page else self.columns(operands.value)
        self.query_extra = None if operands.query_extra is None else self.rows(operands.query_extra)
        self.key_extra = None if operands.key_extra is None else self.columns(operands.key_extra)
        self.sinks = None if operands.sinks is None else operands.sinks.astype(self.compute)
        self.lists = operands.lists
        self.placed = (plan.origin, operands.origin)
        self.overhang = (sizes.padded_q - plan.q_len, sizes.padded_kv - plan.kv_len)
        # both read score_captures
        self.score_programs = (plan.score, derivative)
        self.score_captures = self.pad_score_captures(operands.score_captures)
        self.mask_captures = pad_captures(plan.mask, operands.mask_captures, self.overhang)
        self.dropout_captures = operands.dropout_captures
        self.overhang_q, self.overhang_kv = (n > 0 for n in self.overhang)

    def vary_like_operands(self, carry: Tree) -> Tree:
        """Cast to vary over the mesh axes over which query varies (in shard_map)."""
        return varying_as(self.query, carry)

    # ------------------------------------------------------------------ layout

    def pad_score_captures(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """score_mod's captured arrays, or tangents of them, padded for every program that reads them."""
        for program in self.score_programs:
            arrays = pad_captures(program, arrays, self.overhang)
        return tuple(arrays)

    def rows(self, x: Array) -> Array:
        """From the plan's layout to [B, N, padded_q, D] in operand_dtype, with 0 for queries that do not exist."""
        x = where_exists(x, self.lengths.query, self.plan)
        return pad_to(heads_first(x, self.plan), 2, self.sizes.padded_q).astype(self.operand_dtype)

    def columns(self, x: Array) -> Array:
        """From the plan's layout to [B, heads, padded_kv, D] in operand_dtype; with `in_place` the operand itself."""
        if self.in_place:
            return x
        return pad_to(heads_first(x, self.plan), 2, self.sizes.padded_kv).astype(self.operand_dtype)

    def take_rows(self, x: Array, row: TileRow) -> Array:
        """From [B, N, padded_q, ...] to [batch, heads, block_q, ...]."""
        s = self.sizes
        rest = (0,) * (x.ndim - 3)
        start = (row.b0, row.h0, row.q_block * s.block_q, *rest)
        return lax.dynamic_slice(x, int32s(start), (s.batch, s.heads, s.block_q, *x.shape[3:]))

    def key_group(self, heads: int, row: TileRow) -> tuple[Array | int, int]:
        """(first, how many) of the `heads` key heads that the query heads of the tile row read."""
        group = self.plan.q_heads // heads
        return row.h0 // group, max(1, self.sizes.heads // group)

    def take_columns(self, x: Array | Pool, row: TileRow, visit: BlockVisit) -> Array:
        """What one visit reads of `x`: [batch, key heads, blocks * block_kv, D] in operand_dtype, heads first in any
        layout.

        Keys that do not exist are 0, where the lengths may cut the key blocks of the visit.
        """
        s, heads, blocks = self.sizes, self.key_heads_axis, visit.blocks
        if isinstance(x, Pool):
            assert self.pages is not None
            tokens, blocks, row = self.pinned(x.tokens, blocks, row)
            pool = x._replace(tokens=tokens)
            found = self.pages.take(pool, self.key_group(tokens.shape[2], row), row.b0, blocks, self.operand_dtype)
            return self._existing_columns(found, row, visit)
        x, blocks, row = self.pinned(x, blocks, row)
        m0, nm = self.key_group(x.shape[heads], row)

        adjacent = 1 if self.plan.blocks is not None else blocks.shape[0]
        tokens = adjacent * s.block_kv

        def part(first: Array) -> Array:
            """`adjacent` blocks, [batch, key heads, tokens, D]; `first`: number of the first key in the call."""
            keys, at, size = 3 - heads, [row.b0, m0, m0, 0], [s.batch, nm, nm, x.shape[3]]
            at[keys], size[keys] = first, min(tokens, x.shape[keys])
            found = lax.dynamic_slice(x, int32s(at), size)
            if self.in_place and self.overhang_kv:
                # The slice of the last block was moved back to end where the array ends: move its keys to where they
                # belong.
                past = jnp.maximum(first + np.int32(size[keys] - x.shape[keys]), 0)
                size[keys] = tokens
                found = pad_to(found, keys, 2 * tokens)
                found = lax.dynamic_slice(found, int32s([past if axis == keys else 0 for axis in range(4)]), size)
            found = found.astype(self.operand_dtype)
            return jnp.swapaxes(found, 1, 2) if heads == 2 else found

        gathered = self.in_place and self.widens_slices and _is_narrow(x) and not self.overhang_kv
        if gathered and adjacent < blocks.shape[0]:  # joined slices are converted element by element
            parts = jax.vmap(part)(blocks * s.block_kv)
            return self._existing_columns(jnp.moveaxis(parts, 0, 2).reshape(s.batch, nm, -1, x.shape[3]), row, visit)
        parts = [part(blocks[j] * s.block_kv) for j in range(0, blocks.shape[0], adjacent)]
        return self._existing_columns(parts[0] if len(parts) == 1 else jnp.concatenate(parts, 2), row, visit)

    def pinned(self, x: Array, blocks: Array, row: TileRow) -> tuple[Array, Array, TileRow]:
        """(x, blocks, row), behind one optimization barrier if `x` is a narrow cache that a CPU reads in place."""
        if not (self.widens_slices and (self.in_place or self.pages) and _is_narrow(x)):
            return x, blocks, row
        # XLA has no slices of such arrays on a CPU: it converts the array to float32 and slices that, without the
        # barrier the whole cache once before the loop, in each step of decoding. Blocks change from visit to visit, and
        # batch entries from tile row to tile row: behind a barrier with them x cannot be converted before either loop.
        x, blocks, b0 = lax.optimization_barrier((x, blocks, row.b0))
        return x, blocks, row._replace(b0=b0)

    def _existing_columns(self, found: Array, row: TileRow, visit: BlockVisit) -> Array:
        """Keys or values [batch, key heads, keys, D], with 0 for keys that do not exist."""
        s, blocks = self.sizes, visit.blocks
        if not visit.cut:
            return found
        columns = (blocks[:, None] * s.block_kv + jnp.arange(s.block_kv, dtype=jnp.int32)).reshape(1, 1, -1, 1)
        return jnp.where(self.exists(columns, row, 1), found, jnp.zeros((), found.dtype))

    def exists(self, at: Array, row: TileRow, which: int) -> Array:
        """Which queries (`which` 0) or keys (1), numbered `at` in the call, exist: bool [batch, ...] of 4 dims."""
        lengths = self.lengths[which]
        assert lengths is not None
        return at < lax.dynamic_slice(lengths, int32s((row.b0,)), (self.sizes.batch,)).reshape(-1, 1, 1, 1)

    # ------------------------------------------------------------------ products over grouped heads

    def query_times_key(self, q: Array, k: Array) -> Array:
        """[b, heads, q, D] and [b, key heads, k, D] give [b, heads, q, k] in dtype `compute`."""
        return self._grouped("bmxd,bmkd->bmxk", q, k)

    def weights_times_value(self, w: Array, v: Array) -> Array:
        """w [b, heads, q, k] and v [b, key heads, k, E] give [b, heads, q, E] in dtype `compute`."""
        return self._grouped("bmxk,bmke->bmxe", w.astype(self.operand_dtype), v)

    def weights_transposed_times(self, w: Array, rows: Array, key_heads: int) -> Array:
        """The sum over queries, and over the query heads of each key head, of weight times row, as in dV = P^T dO.

        w [b, heads, q, k] and rows [b, heads, q, E] give [b, key_heads, k, E] in dtype `compute`.
        """
        b, n, q, _ = w.shape
        fold = lambda x: x.reshape(b, key_heads, n // key_heads * q, x.shape[-1])
        w, rows = fold(w.astype(self.operand_dtype)), fold(rows)
        return self._einsum("bmxk,bmxe->bmke", w, rows)

    def _grouped(self, formula: str, rows: Array, columns: Array) -> Array:
        """einsum where formula's x is the query heads of a key head and their queries; [b, heads, q, ..] in and out."""
        b, n, q, _ = rows.shape
        m = columns.shape[1]
        folded = rows.reshape(b, m, n // m * q, rows.shape[-1])
        out = self._einsum(formula, folded, columns)
        return out.reshape(b, n, q, out.shape[-1])

    def _einsum(self, formula: str, left: Array, right: Array) -> Array:
        precision = for_dot_general(self.plan.precision)
        return jnp.einsum(formula, left, right, precision=precision, preferred_element_type=self.compute)
