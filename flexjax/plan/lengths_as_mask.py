"""Writes the lengths of a call as a block mask, for kernels that know block masks and no lengths.

    lists    without blocks past a length; a full block that straddles one becomes a partial block
    program  mask_mod & (kv < end of the keys of b) & (q < end of the queries of b), ends as positions, captured int32 [B]

The lists have batch entries then, so that every batch entry costs its own length. Without a block mask the lists name all blocks of a
size that the caller chooses. What the slots past a length hold is not masked here: 0 * NaN is NaN, so `zeroed` gives operands with 0
there.

Classes are the numbers EMPTY < PARTIAL < FULL of block_mask/transpose.py.
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
from flexjax.plan.kernel_plan import BlockLayout, BlockLists, KernelPlan, Lengths, Operands
from flexjax.plan.lengths import NONE, where_exists
from flexjax.plan.mask_blocks import classes_of_plan, program_of_types
from flexjax.types import MaskMod

Array = jax.Array
Sizes = tuple[int, int, int, int]


def refuses(plan: KernelPlan) -> str | None:
    """Why the lengths of a plan cannot be written as a block mask, in a sentence; None if they can. Reasons: an origin of
    several runs, or user lists with a mask_mod.
    """
    if plan.origin is not None and not plan.origin.single:
        return "Lengths beside an origin of several runs of queries or keys cannot be written as a block mask."
    if plan.blocks is not None and plan.blocks.from_user_lists and plan.mask is not None:
        return "Lengths beside a block mask from user lists with a mask_mod cannot be written as a block mask."
    return None


def plan_as_mask(plan: KernelPlan, block_q: int, block_kv: int) -> KernelPlan:
    """The plan without lengths, whose block mask also hides the queries and keys that do not exist. `refuses(plan)` must be None. A plan
    without lengths is returned as it is.

    block_q, block_kv   queries and keys of a block, for a plan without a block mask; a plan with one keeps its block size

    The lists have an entry for each batch entry, their widths are upper bounds, and the new mask program captures the ends of the lengths
    (`as_mask` makes the lists and the captured arrays).
    """
    if not any(plan.lengths):
        return plan
    blocks = plan.blocks
    if blocks is None:
        rows, columns = cdiv(plan.q_len, block_q), cdiv(plan.kv_len, block_kv)
        everywhere = (columns, 0, rows, 0) if plan.mask is not None else (0, columns, 0, rows)
        blocks = BlockLayout(1, 1, block_q, block_kv, *everywhere)
    rows, columns = cdiv(plan.q_len, blocks.block_q), cdiv(plan.kv_len, blocks.block_kv)
    # A query length makes all blocks of a row partial, a key length at most one of them; of a column it is the other way round.
    by_query, by_key = plan.lengths
    more = blocks.full if by_query else 1
    more_t = blocks.full_t if by_key else 1
    blocks = blocks.changed(
        batch=plan.batch,
        partial=min(columns, blocks.partial + min(more, blocks.full)),
        partial_t=min(rows, blocks.partial_t + min(more_t, blocks.full_t)),
    )
    program = _program(plan.mask, _sizes(plan), plan.batch, plan.lengths)[0]
    return dataclasses.replace(plan, blocks=blocks, mask=program, lengths=(False, False))


def as_mask(plan: KernelPlan, operands: Operands, block_q: int, block_kv: int) -> tuple[KernelPlan, Operands]:
    """The plan that `plan_as_mask` returns, and its operands. `refuses(plan)` must be None. A plan without lengths and its operands are
    returned as they are.

    The returned operands have no lengths; they have the new block lists, and the ends of the lengths among the arrays that the mask
    captures. query, key and value stay: `zeroed` must have been called before, where a kernel multiplies what does not exist.

    block_q, block_kv   see `plan_as_mask`
    """
    made, lengths = plan_as_mask(plan, block_q, block_kv), operands.lengths
    if made is plan or lengths is None:
        return plan, operands
    blocks = made.blocks
    assert blocks is not None
    classes = _classes(plan, operands, blocks, lengths)
    arrays: list[Array | None] = []
    for hit, width in ((classes == PARTIAL, blocks.partial), (classes == FULL, blocks.full)):
        num, index = transpose.lists_of(hit)
        arrays += (num, index[..., :width]) if width else (None, None)
    starts = (0, 0) if operands.origin is None else (x[:, 0] for x in operands.origin)
    ends = [start + length for start, length in zip(starts, lengths, strict=True) if length is not None]
    given = (*operands.mask_captures, *ends)
    captures = tuple(given[n] for n in _program(plan.mask, _sizes(plan), plan.batch, plan.lengths)[1])
    return made, operands._replace(mask_captures=captures, lists=BlockLists(*arrays), lengths=None)


def zeroed(plan: KernelPlan, operands: Operands) -> Operands:
    """The operands with 0 in place of the queries, keys, values and extra features that do not exist; called before `as_mask`,
    which removes the lengths. Operands without lengths are returned as they are. Keys and values must not be in pages.
    """
    queries, keys = operands.lengths or NONE
    maybe = lambda x, ends: None if x is None else where_exists(x, ends, plan)
    return operands._replace(
        query=where_exists(operands.query, queries, plan),
        key=where_exists(operands.key, keys, plan),
        value=where_exists(operands.value, keys, plan),
        query_extra=maybe(operands.query_extra, queries),
        key_extra=maybe(operands.key_extra, keys),
    )


def _classes(plan: KernelPlan, operands: Operands, blocks: BlockLayout, lengths: Lengths) -> Array:
    """The class of each block with the lengths, int8 [batch, heads, q blocks, kv blocks]: EMPTY past a length, PARTIAL for a full block
    that straddles one, and otherwise the class in the plan's lists. Without lists a block is FULL, or PARTIAL if the plan has a mask
    program. `batch` is that of the plan, `heads` that of the lists (1 without).

    plan, operands   of the call, before the lengths become a mask
    blocks           the block layout of `plan_as_mask`, of which the block size is read
    lengths          of queries and keys; None for one that the call lacks
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
    """(batch, heads, q_len, kv_len) for which the new mask program is traced. `batch` is that of the plan. The others are those for which
    the plan's mask program was traced. A plan without a mask program gives its own, but UNKNOWN for q_len and kv_len if the plan has an
    origin, because positions may then lie beyond the lengths.
    """
    if plan.mask is not None:
        _, heads, q, kv = plan.mask.sizes
        return plan.batch, heads, q, kv
    if plan.origin is not None:
        return plan.batch, plan.q_heads, UNKNOWN, UNKNOWN
    return plan.batch, plan.q_heads, plan.q_len, plan.kv_len


@functools.lru_cache(maxsize=512)
def _program(
    program: Program | None, sizes: Sizes, batch: int, lengths: tuple[bool, bool]
) -> tuple[Program, tuple[int, ...]]:
    """The mask program that also hides what lies past the lengths, and which arrays it captures. Cached.

    program   the plan's mask program; None: every entry is visible
    sizes     (batch, heads, q_len, kv_len) for which it is traced
    batch     batch entries, the length of the arrays of ends
    lengths   whether there are lengths of (queries, keys)

    The arrays are indices into (*captured arrays of `program`, *ends of the lengths that there are).
    """
    given = () if program is None else program.captures
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given]
    types += [jax.ShapeDtypeStruct((batch,), jnp.int32)] * sum(lengths)

    def extended(arrays: Sequence[Array]) -> MaskMod:
        """The new mask function of `arrays`: (*captured arrays of `program`, *ends of the lengths that there are, queries first)."""
        inside = None if program is None else as_mask_mod(program, arrays[: len(given)])
        ends = list(arrays[len(given) :])
        query_end = ends.pop(0) if lengths[0] else None
        key_end = ends.pop(0) if lengths[1] else None

        def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
            """Whether the query and the key are before the ends of batch entry b, and the mask shows the entry; indices are positions."""
            parts = [] if inside is None else [inside(b, h, q_idx, kv_idx)]
            parts += [] if query_end is None else [q_idx < query_end[b]]
            parts += [] if key_end is None else [kv_idx < key_end[b]]
            return functools.reduce(jnp.logical_and, parts)

        return mask_mod

    return program_of_types(types, extended, sizes)
