"""The scores of the tiles of one visit: products, score_mod or its derivatives, mask and dropout.

A visit is one step of a tile row (block_loop.py): its tiles are [batch, heads, block_q, keys], keys = chunk * block_kv. "Off" are
the entries that do not count: those that the mask hides, and those past the end or the length of queries or keys or past the end
of a block list.

TiledOperands are the operands of the pass, laid out for tiles; a TileRow says which tile row, a BlockVisit which key blocks a
visit computes. A Region is the same as a TileRow with its key blocks: a part of the attention matrix.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flexjax.backends.xla.block_loop import BlockVisit, TileRow, region_of
from flexjax.backends.xla.tile import Region, XlaTile
from flexjax.backends.xla.tiled_operands import TiledOperands
from flexjax.ir.evaluate import evaluate
from flexjax.ir.program import KV, Lit, Program, Q

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class VisitScores:
    """The scores of one visit, all [batch, heads, block_q, keys].

    raw       scale * q . k, what score_mod gets
    modified  after score_mod, -inf where `on` is False
    on        bool, broadcastable to the tile: which entries count; None: all
    partials  of a derivative program: the derivatives of `modified` with respect to the raw score, then to each load that has a
              gradient; arrays that broadcast to the tile, or literals. () for score_mod's own program
    tile      the tile on which the score program was evaluated; it keeps the index values of the loads
    """

    raw: Array
    modified: Array
    on: Array | None
    partials: tuple[Array | Lit, ...]
    tile: XlaTile


def raw_scores(tiled: TiledOperands, row: TileRow, visit: BlockVisit, q: Array, q_extra: Array | None) -> Array:
    """The scores of a visit before score_mod, scale * (q . k + query_extra . key_extra): [batch, heads, block_q, keys].

    tiled        the operands of the pass
    row, visit   the tile row, and its key blocks
    q            queries of the tile row, [batch, heads, block_q, D]
    q_extra      its part of query_extra, [batch, heads, block_q, R]; None without extra features
    """
    total = tiled.query_times_key(q, tiled.take_columns(tiled.key, row, visit))
    if q_extra is not None:
        assert tiled.key_extra is not None
        total = total + tiled.query_times_key(q_extra, tiled.take_columns(tiled.key_extra, row, visit))
    return total * jnp.asarray(tiled.plan.scale, tiled.compute)


def visit_scores(
    tiled: TiledOperands, row: TileRow, visit: BlockVisit, raw: Array, program: Program | None, mask_q_end: bool
) -> VisitScores:
    """The scores of a visit after a score program and the mask.

    tiled        the operands of the pass
    row, visit   the tile row, and its key blocks
    raw          what raw_scores returns for the visit
    program      score_mod's program, or that of its derivatives, whose results are also returned; None: the identity
    mask_q_end   whether queries past the end must be off, because sums over queries would count them; a forward pass need not,
                 since it drops their results

    Hidden entries are -inf in `modified`. Partials are in the dtype of scores, literals as they are; only for a differentiable
    plan are they 0 at hidden entries, which are then evaluated on operands of 1 (`XlaTile.guard`).
    """
    region = region_of(tiled.sizes, row, visit.blocks, tiled.placed)
    on = _on(tiled, region, row, visit, mask_q_end)
    tile = XlaTile(region, tiled.score_captures, raw, guard=on if tiled.plan.differentiable else None)
    results: Sequence[Array | Lit] = [raw]
    if program is not None:
        full = program.inputs[0].axes
        want = [
            full,
            *(full if isinstance(r, Lit) else r.axes | {"q", "kv"} for r in program.results[1:]),
        ]
        want = [frozenset(w) - {"delta"} for w in want]
        values = evaluate(program, tile, want)
        results = [r if isinstance(r, Lit) else v for r, v in zip(program.results, values, strict=True)]
        results = [results[0], *(r if isinstance(r, Lit) else _partial(tiled, r, on) for r in results[1:])]
        results[0] = jnp.broadcast_to(values[0].astype(tiled.compute), raw.shape)
    modified = typing.cast(Array, results[0])
    if on is not None:
        modified = jnp.where(on, modified, jnp.asarray(-jnp.inf, tiled.compute))
    return VisitScores(raw, modified, on, tuple(results[1:]), tile)


def _partial(tiled: TiledOperands, partial: Array, on: Array | None) -> Array:
    """One result of a derivative program over a tile, `partial`, cast to the dtype of the scores.

    tiled   the operands of the pass
    on      which entries count; None: all

    For a plan that jax differentiates again (plan.differentiable) it is 0 where `on` is False, because a NaN there would reach
    the second derivatives.
    """
    partial = partial.astype(tiled.compute)
    if on is None or not tiled.plan.differentiable:
        return partial
    return jnp.where(on, partial, jnp.zeros_like(partial))


def _on(tiled: TiledOperands, region: Region, row: TileRow, visit: BlockVisit, mask_q_end: bool) -> Array | None:
    """Which entries of a visit count: bool of rank 4, of size 1 along axes on which that does not depend; None if all count.

    tiled        the operands of the pass
    region       of the visit, in positions of the whole problem
    row, visit   the tile row, and its key blocks
    mask_q_end   whether queries past the end or that do not exist are off

    An entry counts if the mask program shows it or its block is full, its key block is valid, and its key, and with mask_q_end
    its query, exists and is not past the end. Without a block mask the mask program decides everywhere.
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
    """The mask program over a region: bool of rank 4, True at visible entries, of size 1 along axes that the mask does not
    read.

    tiled   operands of a plan with a mask
    """
    program = tiled.plan.mask
    assert program is not None
    want = program.axes - {"delta"} | ({"q", "kv"} if "delta" in program.axes else set())
    (mask,) = evaluate(program, XlaTile(region, tiled.mask_captures), [want])
    return jnp.reshape(mask, (1,) * (4 - mask.ndim) + mask.shape)


def dropout_multiplier(tiled: TiledOperands, row: TileRow, visit: BlockVisit) -> Array | None:
    """What dropout multiplies each probability of a visit by: 0 or 1 / (1 - rate), [batch, heads, block_q, keys] in the dtype
    of scores; None without dropout.

    tiled        the operands of the pass
    row, visit   the tile row, and its key blocks
    """
    program = tiled.plan.dropout
    if program is None:
        return None
    tile = XlaTile(region_of(tiled.sizes, row, visit.blocks, tiled.placed), tiled.dropout_captures)
    (multiplier,) = evaluate(program, tile, [frozenset({"b", "h", "q", "kv"})])
    return multiplier.astype(tiled.compute)


def times_partial(cotangent: Array, partial: Array | Lit) -> Array:
    """`cotangent` (a cotangent or tangent over the tile of a visit) times `partial`, one of VisitScores.partials."""
    return cotangent * (partial.value if isinstance(partial, Lit) else partial)


def zero_where_off(scores: VisitScores, values: Array) -> Array:
    """`values` over the tile of the visit of `scores`, with 0 at entries that do not count. Apply it after all products,
    because 0 times the NaN of a hidden entry is NaN.
    """
    return values if scores.on is None else jnp.where(scores.on, values, jnp.zeros_like(values))
