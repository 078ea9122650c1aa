"""Writes the lengths of a call as a block mask, for kernels that know block masks and no lengths.

    lists    without blocks past a length; a full block that straddles one becomes a partial block
    program  mask_mod & (kv < end of the keys of b) & (q < end of the queries of b); ends, int32 [B], are captured

The lists have batch entries then, so that every batch entry costs its own length. Without a block mask the lists name
all blocks of a size that the caller chooses. Slots past a length get 0, because 0 * NaN is NaN.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flexjax.block_mask import transpose
from flexjax.block_mask.transpose import EMPTY, FULL, PARTIAL
from flexjax.integers import cdiv
from flexjax.ir.evaluate_scalars import as_mask_mod
from flexjax.ir.origin import UNKNOWN
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import BackwardInputs, BlockLayout, BlockLists, KernelPlan, Lengths, Operands, Results
from flexjax.plan.lengths import existing_results, where_exists
from flexjax.plan.rewrite import Rewrite
from flexjax.rewrites.mask_blocks import Captured, classes_of_plan, program_of_types
from flexjax.types import MaskMod

Array = jax.Array
Sizes = tuple[int, int, int, int]


def refuses(plan: KernelPlan) -> str | None:
    """Why the lengths of a plan cannot be written as a block mask, in a sentence; None if they can."""
    if plan.origin is not None and not plan.origin.single:
        return "Lengths beside an origin of several runs of queries or keys cannot be written as a block mask."
    if plan.blocks is not None and plan.blocks.from_user_lists and plan.mask is not None:
        return "Lengths beside a block mask from user lists with a mask_mod cannot be written as a block mask."
    return None


def plan_as_mask(plan: KernelPlan, block_q: int, block_kv: int) -> KernelPlan:
    """The plan without lengths, whose block mask also hides the queries and keys that do not exist.

    `refuses(plan)` must be None. The block size is for a plan without a block mask. List widths are upper bounds. With
    keys in pages the plan keeps the key lengths, which such a plan has.
    """
    if not any(plan.lengths):
        return plan
    blocks = plan.blocks
    if blocks is None:
        rows, columns = cdiv(plan.q_len, block_q), cdiv(plan.kv_len, block_kv)
        everywhere = (columns, 0, rows, 0) if plan.mask is not None else (0, columns, 0, rows)
        blocks = BlockLayout(1, 1, block_q, block_kv, *everywhere)
    rows, columns = cdiv(plan.q_len, blocks.block_q), cdiv(plan.kv_len, blocks.block_kv)
    # a query length makes all blocks of a row partial, a key length at most one; of a column it is the other way round
    by_query, by_key = plan.lengths
    more = blocks.full if by_query else 1
    more_t = blocks.full_t if by_key else 1
    blocks = blocks.changed(
        batch=plan.batch,
        partial=min(columns, blocks.partial + min(more, blocks.full)),
        partial_t=min(rows, blocks.partial_t + min(more_t, blocks.full_t)),
    )
    program = _program(plan.mask, _sizes(plan), plan.batch, plan.lengths)[0]
    return dataclasses.replace(plan, blocks=blocks, mask=program, lengths=(False, plan.page > 0))


def rewrite(plan: KernelPlan, block_q: int, block_kv: int) -> Rewrite | None:
    """The call of `plan_as_mask`, in which what does not exist is 0; None for a plan without lengths."""
    made = plan_as_mask(plan, block_q, block_kv)
    if made is plan or made.blocks is None:
        return None
    why = (
        f"lengths: a part of the block mask, in blocks of {made.blocks.block_q} x {made.blocks.block_kv} queries x keys"
    )
    return Rewrite(
        made,
        why,
        functools.partial(_operands, plan, made),
        functools.partial(_results, plan),
        functools.partial(_given, plan),
    )


def _operands(plan: KernelPlan, made: KernelPlan, operands: Operands) -> Operands:
    """The operands with the lists of `made`, the ends of the lengths, and 0 in what does not exist."""
    blocks, lengths = made.blocks, operands.lengths
    assert blocks is not None
    assert lengths is not None
    operands = _zeroed(plan, operands, lengths)
    classes = _classes(plan, operands, blocks, lengths)
    arrays: list[Array | None] = []
    for hit, width in ((classes == PARTIAL, blocks.partial), (classes == FULL, blocks.full)):
        num, index = transpose.lists_of(hit)
        arrays += (num, index[..., :width]) if width else (None, None)
    starts = (0, 0) if operands.origin is None else (x[:, 0] for x in operands.origin)
    ends = [start + length for start, length in zip(starts, lengths, strict=True) if length is not None]
    given = (*operands.mask_captures, *ends)
    captures = _program(plan.mask, _sizes(plan), plan.batch, plan.lengths)[1](given)
    kept = lengths._replace(query=None) if made.lengths[1] else None
    return operands._replace(mask_captures=captures, lists=BlockLists(*arrays), lengths=kept)


def _zeroed(plan: KernelPlan, operands: Operands, lengths: Lengths) -> Operands:
    """The operands with 0 in the queries and, unless in pages, in the keys that do not exist."""
    operands = operands._replace(query=where_exists(operands.query, lengths.query, plan))
    if plan.page:
        return operands
    maybe = lambda x, ends: None if x is None else where_exists(x, ends, plan)
    return operands._replace(
        key=where_exists(operands.key, lengths.key, plan),
        value=where_exists(operands.value, lengths.key, plan),
        query_extra=maybe(operands.query_extra, lengths.query),
        key_extra=maybe(operands.key_extra, lengths.key),
    )


def _results(plan: KernelPlan, results: Results, operands: Operands) -> Results:
    # out is 0 in rows of queries that do not exist, because the mask hides all of them; lse may be that of a sink
    return results._replace(lse=existing_results(results, operands.lengths, plan).lse)


def _given(plan: KernelPlan, given: BackwardInputs) -> BackwardInputs:
    # the cotangents of queries that do not exist count as 0
    assert given.operands.lengths is not None
    query, d_lse = given.operands.lengths.query, given.d_lse
    d_lse = None if d_lse is None else where_exists(d_lse, query, plan)
    return given._replace(d_out=where_exists(given.d_out, query, plan), d_lse=d_lse)


def _classes(plan: KernelPlan, operands: Operands, blocks: BlockLayout, lengths: Lengths) -> Array:
    """The class of each block with the lengths, int8 [batch of the plan, heads of the lists, q blocks, kv blocks].

    EMPTY past a length, PARTIAL for a full block that straddles one.
    """
    shape = (1, 1, cdiv(plan.q_len, blocks.block_q), cdiv(plan.kv_len, blocks.block_kv))
    if operands.lists is None:
        classes = jnp.full(shape, FULL if plan.mask is None else PARTIAL, jnp.int8)
    else:
        classes = classes_of_plan(plan, operands.lists)
    classes = jnp.broadcast_to(classes, (plan.batch, *classes.shape[1:]))
    for axis, (length, block) in enumerate(zip(lengths, (blocks.block_q, blocks.block_kv), strict=True), 2):
        if length is not None:
            spread = tuple(-1 if i == axis else 1 for i in range(4))
            starts = (jnp.arange(shape[axis], dtype=jnp.int32) * block).reshape(spread)
            end = length[:, None, None, None]
            classes = jnp.where((starts + block > end) & (classes == FULL), jnp.int8(PARTIAL), classes)
            classes = jnp.where(starts >= end, jnp.int8(EMPTY), classes)
    return classes


def _sizes(plan: KernelPlan) -> Sizes:
    """(batch, heads, q_len, kv_len) for which the new mask program is traced."""
    if plan.mask is not None:
        _, heads, q, kv = plan.mask.sizes
        return plan.batch, heads, q, kv
    # positions may lie beyond the lengths
    if plan.origin is not None:
        return plan.batch, plan.q_heads, UNKNOWN, UNKNOWN
    return plan.batch, plan.q_heads, plan.q_len, plan.kv_len


@functools.lru_cache(maxsize=512)
def _program(program: Program | None, sizes: Sizes, batch: int, lengths: tuple[bool, bool]) -> tuple[Program, Captured]:
    """(the mask program that also hides what lies past the lengths, what it captures).

    That is a function of (*captured arrays of `program`, *ends of the lengths that there are, queries first).
    """
    given = () if program is None else program.captures
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given]
    types += [jax.ShapeDtypeStruct((batch,), jnp.int32)] * sum(lengths)

    def extended(arrays: Sequence[Array]) -> MaskMod:
        inside = None if program is None else as_mask_mod(program, arrays[: len(given)])
        ends = list(arrays[len(given) :])
        query_end = ends.pop(0) if lengths[0] else None
        key_end = ends.pop(0) if lengths[1] else None

        def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
            parts = [] if inside is None else [inside(b, h, q_idx, kv_idx)]
            parts += [] if query_end is None else [q_idx < query_end[b]]
            parts += [] if key_end is None else [kv_idx < key_end[b]]
            return functools.reduce(jnp.logical_and, parts)

        return mask_mod

    return program_of_types(types, extended, sizes)
