"""The scores of the tiles of one visit: products, score_mod or its derivatives, mask and dropout.

A visit is one step of a tile row (block_loop.py): its tiles are [batch, heads, block_q, keys], keys = chunk * block_kv.
"Off" are the entries that do not count: those that the mask hides, and those past the end or the length of queries or
keys or past the end of a block list.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from flexjax.analysis.patterns import run_lengths
from flexjax.backends.xla.block_loop import BlockVisit, TileRow, region_of
from flexjax.backends.xla.region import Region
from flexjax.backends.xla.tile import XlaTile
from flexjax.backends.xla.tiled_operands import TiledOperands
from flexjax.ir.evaluate import Values, evaluate
from flexjax.ir.program import KV, Atom, Axes, Lit, Program, Q, Val, loops_of
from flexjax.ir.rewrite import with_results

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class LoopedPartial:
    """A derivative that depends on loop indices: one for each element of a vector that score_mod reads."""

    result: Val  # of the derivative program
    read: Callable[[Values], Array]  # from the program's values, once the loop indices have values


@dataclasses.dataclass(frozen=True)
class VisitScores:
    """The scores of one visit, all [batch, heads, block_q, keys]."""

    raw: Array  # scale * q . k, what score_mod gets
    modified: Array  # after score_mod, -inf where `on` is False; weights of a weighted plan, 0 there
    on: Array | None  # which entries count, broadcastable to the tile; None: all
    # of a derivative program: derivatives of `modified` by the raw score, then by each load that has a gradient, and
    # its other groups; cotangents if it takes the cotangent of `modified`, and () until that is known. Of a score
    # program the functions of `modified` whose expectations are asked for
    partials: tuple[Array | Lit | LoopedPartial, ...]
    tile: XlaTile  # keeps the index values of the loads
    values: Values | None = None  # of the score program's steps


def raw_scores(tiled: TiledOperands, row: TileRow, visit: BlockVisit, q: Array, q_extra: Array | None) -> Array:
    """scale * (q . k + query_extra . key_extra): [batch, heads, block_q, keys].

    q         [batch, heads, block_q, D]
    q_extra   [batch, heads, block_q, R]
    """
    total = tiled.query_times_key(q, tiled.take_columns(tiled.key, row, visit))
    if q_extra is not None:
        assert tiled.key_extra is not None
        total = total + tiled.query_times_key(q_extra, tiled.take_columns(tiled.key_extra, row, visit))
    return total * jnp.asarray(tiled.plan.scale, tiled.compute)


def visit_scores(
    tiled: TiledOperands,
    row: TileRow,
    visit: BlockVisit,
    raw: Array,
    program: Program | None,
    mask_q_end: bool,
    cotangent: Array | None = None,
) -> VisitScores:
    """The scores of a visit after a score program and the mask.

    raw          what raw_scores returns for the visit
    program      score_mod's, or that of its derivatives, whose results are also returned; None: the identity
    mask_q_end   queries past the end are off, because sums over queries would count them
    cotangent    of the scores after score_mod; a program that takes it is cut to its first result without

    For a differentiable plan partials are 0 at hidden entries, which are evaluated on operands of 1 (`XlaTile.guard`).
    """
    region = region_of(tiled.sizes, row, visit.blocks, tiled.placed)
    on = _on(tiled, region, row, visit, mask_q_end)
    if program is not None and program.takes_cotangent and cotangent is None:
        program = with_results(program, program.results[:1])
    tile = XlaTile(
        region, tiled.score_captures, raw, guard=on if tiled.plan.differentiable else None, cotangent=cotangent
    )
    results: Sequence[Array | Lit | LoopedPartial] = [raw]
    values = None
    if program is not None:
        full = program.inputs[0].axes
        want = [full, *(full if isinstance(r, Lit) else r.axes | {"q", "kv"} for r in program.results[1:])]
        want = [frozenset(w) - {"delta"} for w in want]
        values = Values.of(program, tile)

        def partial(result: Atom, axes: Axes) -> Array | Lit | LoopedPartial:
            if isinstance(result, Lit):
                return result
            read = lambda values: _partial(tiled, values.read(result, axes), on)
            return LoopedPartial(result, read) if loops_of(result.axes) else read(typing.cast(Values, values))

        modified = jnp.broadcast_to(values.read(program.results[0], want[0]).astype(tiled.compute), raw.shape)
        results = [modified, *map(partial, program.results[1:], want[1:])]
    modified = typing.cast(Array, results[0])
    if on is not None:
        hidden = 0.0 if tiled.plan.weighted else -jnp.inf
        modified = jnp.where(on, modified, jnp.asarray(hidden, tiled.compute))
    return VisitScores(raw, modified, on, tuple(results[1:]), tile, values)


def _partial(tiled: TiledOperands, partial: Array, on: Array | None) -> Array:
    """One result of a derivative program over a tile, in the dtype of the scores."""
    partial = partial.astype(tiled.compute)
    if on is None or not tiled.plan.differentiable:
        return partial
    return jnp.where(on, partial, jnp.zeros_like(partial))  # a NaN would reach the second derivatives


def _on(tiled: TiledOperands, region: Region, row: TileRow, visit: BlockVisit, mask_q_end: bool) -> Array | None:
    """Which entries of a visit count: bool of rank 4, of size 1 along axes on which that does not depend; None: all.

    Without a block mask the mask program decides everywhere. With mask_q_end queries past the end are off.
    """
    plan, lengths = tiled.plan, tiled.lengths
    rows = region_of(tiled.sizes, row, visit.blocks)
    parts: list[Array] = []
    if plan.mask is not None and (visit.valid is not None or plan.blocks is None):
        mask = _mask(tiled, region)
        if visit.whole is not None:
            mask = mask | jnp.repeat(visit.whole, region.bk)[None, None, None, :]
        parts.append(mask)
    if visit.valid is not None:
        parts.append(jnp.repeat(visit.valid, region.bk)[None, None, None, :])
    if visit.cut:
        parts.append(tiled.exists(rows.index(KV), row, 1))
    elif tiled.overhang_kv and lengths.key is None:  # a key length cuts the block that reaches past the end
        parts.append(rows.index(KV) < plan.kv_len)
    if mask_q_end and lengths.query is not None:
        parts.append(tiled.exists(rows.index(Q), row, 0))
    elif mask_q_end and tiled.overhang_q:
        parts.append(rows.index(Q) < plan.q_len)
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _mask(tiled: TiledOperands, region: Region) -> Array:
    """The mask program over a region: bool of rank 4, of size 1 along axes that the mask does not read."""
    program = tiled.plan.mask
    assert program is not None
    want = program.axes - {"delta"} | ({"q", "kv"} if "delta" in program.axes else set())
    runs = run_lengths(program, "kv") if tiled.plan.origin is None else None
    (mask,) = evaluate(program, XlaTile(region, tiled.mask_captures, runs=runs), [want])
    return jnp.reshape(mask, (1,) * (4 - mask.ndim) + mask.shape)


def dropout_multiplier(tiled: TiledOperands, row: TileRow, visit: BlockVisit) -> Array | None:
    """What dropout multiplies each probability by: 0 or 1 / (1 - rate), [batch, heads, block_q, keys]."""
    program = tiled.plan.dropout
    if program is None:
        return None
    tile = XlaTile(region_of(tiled.sizes, row, visit.blocks, tiled.placed), tiled.dropout_captures)
    (multiplier,) = evaluate(program, tile, [frozenset({"b", "h", "q", "kv"})])
    return multiplier.astype(tiled.compute)


def times_partial(cotangent: Array, partial: Array | Lit | LoopedPartial) -> Array:
    """A cotangent or tangent over the tile of a visit times a partial whose loop indices have values."""
    assert not isinstance(partial, LoopedPartial)
    return cotangent * (partial.value if isinstance(partial, Lit) else partial)


def zero_where_off(scores: VisitScores, values: Array) -> Array:
    """`values` with 0 at entries that do not count; to apply after products, because 0 times a hidden NaN is NaN."""
    return values if scores.on is None else jnp.where(scores.on, values, jnp.zeros_like(values))
