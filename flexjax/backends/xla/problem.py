"""One attention problem laid out for tiles: padded operands, and the scores of a tile.

Operands are [B, heads, tokens, D], tokens padded to whole blocks, so that every slice has one size. What lies beyond the end
is switched off by a mask that exists only where there is an overhang. Keys and values that are read only once (a forward pass
of one row of tiles, as in decoding) keep the layout and the dtype that they came in: copying a cache costs as much as
reading it.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.target import Target
from flexjax.backends.xla.schedule import Row, Schedule, Visit, choose, region_of
from flexjax.backends.xla.tile import Region, XlaTile, slice_plan
from flexjax.ir.evaluate import evaluate
from flexjax.ir.program import Lit, Program
from flexjax.plan.kernel_plan import KernelPlan, Operands

Array = jax.Array


def heads_first(x: Array, plan: KernelPlan) -> Array:
    """[B, T, N, ...] or [B, N, T, ...] as [B, N, T, ...]; its own inverse."""
    return jnp.swapaxes(x, 1, 2) if plan.layout == "BTNH" else x


def int32s(numbers: Sequence[Array | int]) -> list[Array]:
    """Slice starts of one dtype, whatever the default int is."""
    return [jnp.asarray(n, jnp.int32) for n in numbers]


def pad_to(x: Array, axis: int, size: int, value: float = 0.0) -> Array:
    short = size - x.shape[axis]
    if short == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, short)
    return jnp.pad(x, widths, constant_values=value)


def pad_captures(program: Program | None, arrays: Sequence[Array], schedule: Schedule) -> tuple[Array, ...]:
    """Captured arrays, grown where a tile that is read as a slice hangs over their end."""
    grown = list(arrays)
    if program is None:
        return tuple(grown)
    for load in program.loads:
        plan = slice_plan(load, program.captures[load.capture])
        if plan is not None:
            more = plan.padding(program.captures[load.capture], schedule.padded_q, schedule.padded_kv)
            have = [g - s for g, s in zip(grown[load.capture].shape, program.captures[load.capture].shape, strict=True)]
            rest = [(0, max(0, high - h)) for (_, high), h in zip(more, have, strict=True)]
            if any(high for _, high in rest):
                grown[load.capture] = jnp.pad(grown[load.capture], rest)
    return tuple(grown)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of one visit, all [batch, heads, block_q, keys].

    raw       scale * q . k, what the mod gets
    modified  after score_mod, -inf where `on` is False
    on        None where every entry counts
    partials  derivatives of `modified`: with respect to the raw score, then to each load (derivative program only)
    """

    raw: Array
    modified: Array
    on: Array | None
    partials: tuple[Array | Lit, ...]
    tile: XlaTile


class Problem:
    """The operands of one pass in tiles."""

    def __init__(
        self,
        plan: KernelPlan,
        operands: Operands,
        target: Target,
        derivative: Program | None = None,
        *,
        backward: bool = False,
    ):
        self.plan = plan
        self.schedule = choose(plan, target, backward)
        self.compute = jnp.dtype(plan.score_dtype)
        # A CPU has no low-precision units: widening once beats widening in every product.
        narrow = target.platform != "cpu" and plan.dtype in ("bfloat16", "float16")
        self.operand_dtype = jnp.dtype(plan.dtype) if narrow else self.compute
        schedule = self.schedule
        self.read_once = schedule.rows == 1 and not backward
        self.key_heads_axis = 2 if self.read_once and plan.layout == "BTNH" else 1
        self.query = self.rows(operands.query)
        self.key = self.columns(operands.key)
        self.value = self.columns(operands.value)
        self.query_extra = None if operands.query_extra is None else self.rows(operands.query_extra)
        self.key_extra = None if operands.key_extra is None else self.columns(operands.key_extra)
        self.sinks = None if operands.sinks is None else operands.sinks.astype(self.compute)
        self.lists = operands.lists
        self.score_programs = (plan.score, derivative)
        self.score_captures = self.pad_score_captures(operands.score_captures)
        self.mask_captures = pad_captures(plan.mask, operands.mask_captures, schedule)
        self.dropout_captures = operands.dropout_captures
        self.overhang_q = schedule.padded_q != plan.q_len
        self.overhang_kv = schedule.padded_kv != plan.kv_len

    def as_operands_vary(self, carry: typing.Any) -> typing.Any:
        """Inside shard_map: the arrays of a carry, cast to vary over the mesh axes over which all operands do.

        A loop returns the type of what it starts from. Only where JAX differentiates these loops does it ask for it.
        """
        over = jax.typeof(self.query).mat.varying

        def cast(x: Array) -> Array:
            missing = tuple(sorted(over - jax.typeof(x).mat.varying, key=str))
            return lax.pcast(x, missing, to="varying") if missing else x

        return jax.tree.map(cast, carry)

    # ------------------------------------------------------------------ layout

    def pad_score_captures(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Arrays in the place of score_mod's captures, grown for every program that reads them."""
        for program in self.score_programs:
            arrays = pad_captures(program, arrays, self.schedule)
        return tuple(arrays)

    def rows(self, x: Array) -> Array:
        """Query-like operand as [B, N, padded_q, D]."""
        return pad_to(heads_first(x, self.plan), 2, self.schedule.padded_q).astype(self.operand_dtype)

    def columns(self, x: Array) -> Array:
        """Key-like operand as [B, heads, padded_kv, D]; as it is but for its length where it is read once."""
        if self.read_once:
            return pad_to(x, 3 - self.key_heads_axis, self.schedule.padded_kv)
        return pad_to(heads_first(x, self.plan), 2, self.schedule.padded_kv).astype(self.operand_dtype)

    def take_rows(self, x: Array, row: Row) -> Array:
        """[batch, heads, block_q, ...] of a [B, N, padded_q, ...] array."""
        s = self.schedule
        rest = (0,) * (x.ndim - 3)
        start = (row.b0, row.h0, row.row * s.block_q, *rest)
        return lax.dynamic_slice(x, int32s(start), (s.batch, s.heads, s.block_q, *x.shape[3:]))

    def key_group(self, heads: int, row: Row) -> tuple[Array | int, int]:
        """(first head, how many) of a key-like operand with `heads` heads that the row's query heads read."""
        group = self.plan.q_heads // heads
        return row.h0 // group, max(1, self.schedule.heads // group)

    def take_columns(self, x: Array, row: Row, blocks: Array) -> Array:
        """[batch, key heads, chunk * block_kv, D] of what `columns` made."""
        s, heads = self.schedule, self.key_heads_axis
        m0, nm = self.key_group(x.shape[heads], row)

        def part(first: Array) -> Array:
            start, size = [row.b0, m0, first, 0], [s.batch, nm, s.block_kv, x.shape[3]]
            if heads == 2:
                start[1:3], size[1:3] = start[2:0:-1], size[2:0:-1]
            found = lax.dynamic_slice(x, int32s(start), size).astype(self.operand_dtype)
            return jnp.swapaxes(found, 1, 2) if heads == 2 else found

        parts = [part(blocks[j] * s.block_kv) for j in range(blocks.shape[0])]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 2)

    # ------------------------------------------------------------------ products over grouped heads

    def query_times_key(self, q: Array, k: Array) -> Array:
        """[b, heads, q, D] . [b, key heads, k, D] -> [b, heads, q, k]."""
        return self._grouped("bmxd,bmkd->bmxk", q, k)

    def weights_times_value(self, w: Array, v: Array) -> Array:
        """[b, heads, q, k] . [b, key heads, k, E] -> [b, heads, q, E]."""
        return self._grouped("bmxk,bmke->bmxe", w.astype(self.operand_dtype), v)

    def weights_transposed_times(self, w: Array, rows: Array, key_heads: int) -> Array:
        """[b, heads, q, k], [b, heads, q, E] -> [b, key heads, k, E], summed over the heads of a group."""
        b, n, q, _ = w.shape
        fold = lambda x: x.reshape(b, key_heads, n // key_heads * q, x.shape[-1])
        w, rows = fold(w.astype(self.operand_dtype)), fold(rows)
        return jnp.einsum("bmxk,bmxe->bmke", w, rows, preferred_element_type=self.compute)

    def _grouped(self, formula: str, rows: Array, columns: Array) -> Array:
        b, n, q, _ = rows.shape
        m = columns.shape[1]
        folded = rows.reshape(b, m, n // m * q, rows.shape[-1])
        out = jnp.einsum(formula, folded, columns, preferred_element_type=self.compute)
        return out.reshape(b, n, q, out.shape[-1])

    # ------------------------------------------------------------------ scores

    def scores(
        self,
        row: Row,
        visit: Visit,
        raw: Array,
        program: Program | None,
        bound_rows: bool,
    ) -> Scores:
        """Applies the score program (or its derivative) and the mask to the raw scores of a visit."""
        region = region_of(self.schedule, row, visit.blocks)
        on = self.visible(region, visit, bound_rows)
        tile = XlaTile(region, self.score_captures, raw, guard=on if self.plan.differentiable else None)
        results: Sequence[Array | Lit] = [raw]
        if program is not None:
            full = program.inputs[0].axes
            want = [
                full,
                *(full if isinstance(r, Lit) else r.axes | {"q", "kv"} - {"delta"} for r in program.results[1:]),
            ]
            want = [frozenset(w) - {"delta"} for w in want]
            values = evaluate(program, tile, want)
            results = [r if isinstance(r, Lit) else v for r, v in zip(program.results, values, strict=True)]
            results = [results[0], *(r if isinstance(r, Lit) else self._partial(r, on) for r in results[1:])]
            results[0] = jnp.broadcast_to(values[0].astype(self.compute), raw.shape)
        modified = typing.cast(Array, results[0])
        if on is not None:
            modified = jnp.where(on, modified, jnp.asarray(-jnp.inf, self.compute))
        return Scores(raw, modified, on, tuple(results[1:]), tile)

    def _partial(self, partial: Array, on: Array | None) -> Array:
        """A derivative in the dtype of the scores; 0 where masked, if it is to be differentiated again."""
        partial = partial.astype(self.compute)
        return (
            jnp.where(on, partial, jnp.zeros_like(partial)) if self.plan.differentiable and on is not None else partial
        )

    def visible(self, region: Region, visit: Visit, bound_rows: bool) -> Array | None:
        """Which entries of a visit count, None for all; rank 4, 1 where an axis does not matter."""
        parts: list[Array] = []
        masked = self.plan.mask is not None and (visit.valid is not None or self.plan.blocks is None)
        if masked:
            mask = self.mask(region)
            if visit.whole is not None:
                mask = mask | jnp.repeat(visit.whole, region.bk)[None, None, None, :]
            parts.append(mask)
        if visit.valid is not None:
            parts.append(jnp.repeat(visit.valid, region.bk)[None, None, None, :])
        if self.overhang_kv:
            parts.append(region.index(4) < self.plan.kv_len)
        if self.overhang_q and bound_rows:
            parts.append(region.index(3) < self.plan.q_len)
        return functools.reduce(jnp.logical_and, parts) if parts else None

    def mask(self, region: Region) -> Array:
        """The mask program over a region, rank 4."""
        assert self.plan.mask is not None
        axes = self.plan.mask.axes
        want = axes - {"delta"} | ({"q", "kv"} if "delta" in axes else set())
        (mask,) = evaluate(self.plan.mask, XlaTile(region, self.mask_captures), [want])
        return jnp.reshape(mask, (1,) * (4 - mask.ndim) + mask.shape)

    def keep(self, row: Row, visit: Visit) -> Array | None:
        """Dropout's multiplier of each probability, None without dropout."""
        program = self.plan.dropout
        if program is None:
            return None
        tile = XlaTile(region_of(self.schedule, row, visit.blocks), self.dropout_captures)
        (multiplier,) = evaluate(program, tile, [frozenset({"b", "h", "q", "kv"})])
        return multiplier.astype(self.compute)

    def raw_scores(self, row: Row, visit: Visit, q: Array, qx: Array | None) -> Array:
        """scale * (q . k + query_extra . key_extra)."""
        total = self.query_times_key(q, self.take_columns(self.key, row, visit.blocks))
        if qx is not None:
            assert self.key_extra is not None
            total = total + self.query_times_key(qx, self.take_columns(self.key_extra, row, visit.blocks))
        return total * jnp.asarray(self.plan.scale, self.compute)
