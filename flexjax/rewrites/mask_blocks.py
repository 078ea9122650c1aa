"""Rebuilds a block mask with another block size, for kernels whose tiles do not fit the mask's own blocks.

Each new block covers some old blocks, wholly or in part. The new block is full if all of them are full, empty if all
are empty, and partial otherwise. This takes O(blocks) work on the device, so the block lists may be traced.

For masks of create_block_mask the program alone is exact. For a mask made from the user's lists the program is
extended: it looks up the class of the entry's old block first.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.block_mask import transpose
from flexjax.block_mask.host_or_program import module_of, not_folded
from flexjax.block_mask.parts import Parts
from flexjax.block_mask.transpose import EMPTY, FULL, PARTIAL
from flexjax.integers import cdiv
from flexjax.ir.evaluate_scalars import as_mask_mod
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import BlockLayout, BlockLists, KernelPlan, Operands
from flexjax.plan.rewrite import Rewrite
from flexjax.trace.trace_mod import trace_mask_mod
from flexjax.types import MaskMod

Array = jax.Array
Captured = Callable[[Sequence[Array]], tuple[Array, ...]]
"""What a program captures, of the arrays from which its function was made."""


def plan_with_blocks(plan: KernelPlan, block_q: int, block_kv: int) -> KernelPlan:
    """The plan with mask blocks of another size; list widths are upper bounds, no lists are known."""
    blocks = plan.blocks
    if blocks is None or (blocks.block_q, blocks.block_kv) == (block_q, block_kv):
        return plan
    mask = _program_with_lists(plan)[0] if blocks.from_user_lists else plan.mask
    rows, columns = _covered(plan.q_len, blocks.block_q, block_q), _covered(plan.kv_len, blocks.block_kv, block_kv)
    partial, full = _widths(blocks.partial, blocks.full, rows, columns)
    partial_t, full_t = _widths(blocks.partial_t, blocks.full_t, columns, rows)
    dims = blocks.batch, blocks.heads, block_q, block_kv
    sizes = BlockLayout(*dims, partial, full, partial_t, full_t, thinned=blocks.thinned)
    return dataclasses.replace(plan, mask=mask, blocks=sizes)


def rewrite(plan: KernelPlan, block_q: int, block_kv: int) -> Rewrite | None:
    """The call with mask blocks of this size; None where its blocks have that size or it has none."""
    made = plan_with_blocks(plan, block_q, block_kv)
    if made is plan or plan.blocks is None:
        return None
    old = f"{plan.blocks.block_q} x {plan.blocks.block_kv}"
    why = f"block mask: blocks of {old} queries x keys become blocks of {block_q} x {block_kv}"
    return Rewrite(made, why, functools.partial(_operands, plan, made))


def _operands(plan: KernelPlan, made: KernelPlan, operands: Operands) -> Operands:
    """With the block lists of `made`, and for user lists the classes of the old blocks as a captured array."""
    old, new, lists = plan.blocks, made.blocks, operands.lists
    assert old is not None
    assert new is not None
    assert lists is not None
    lists = BlockLists(*not_folded(*lists))
    classes = classes_of_plan(plan, lists)
    captures = operands.mask_captures
    if old.from_user_lists:
        given = (jnp.asarray(classes, jnp.int32), *captures)
        captures = _program_with_lists(plan)[1](given)
    sizes = (old.block_q, old.block_kv), (new.block_q, new.block_kv)
    low, high = _extremes(classes, (plan.q_len, plan.kv_len), *sizes)
    return operands._replace(mask_captures=captures, lists=_lists_of_classes(low, high, new))


def _lists_of_classes(low: Array, high: Array, blocks: BlockLayout) -> BlockLists:
    """The lists of blocks that hold old ones of the classes `low` to `high`."""
    arrays: list[Array | None] = []
    for hit, width in (((low < FULL) & (high > EMPTY), blocks.partial), (low == FULL, blocks.full)):
        num, index = transpose.lists_of(hit)
        arrays += (num, index[..., :width]) if width else (None, None)
    return BlockLists(*arrays)


# ------------------------------------------------------------------- fewer heads


def blocks_of_heads(plan: KernelPlan, heads: int) -> BlockLayout:
    """The plan's blocks for `heads` lists, each of what any query head of a group visits. They may not be a user's."""
    blocks = plan.blocks
    assert blocks is not None
    if blocks.heads in (1, heads):
        return blocks
    columns, group = cdiv(plan.kv_len, blocks.block_kv), blocks.heads // heads
    partial = blocks.partial + (blocks.full if _splits_full(plan) else 0)
    widths = {"partial": min(columns, group * partial), "full": min(columns, group * blocks.full)}
    return blocks.changed(heads=heads, **widths)


def lists_of_heads(plan: KernelPlan, lists: BlockLists, heads: int) -> BlockLists:
    """The lists of `blocks_of_heads`."""
    blocks = blocks_of_heads(plan, heads)
    if blocks is plan.blocks:
        return lists
    classes = classes_of_plan(plan, BlockLists(*not_folded(*lists)))
    grouped = classes.reshape(classes.shape[0], heads, -1, *classes.shape[2:])
    high = grouped.max(2)
    return _lists_of_classes(grouped.min(2) if _splits_full(plan) else high, high, blocks)


def _splits_full(plan: KernelPlan) -> bool:
    """Whether a block that is full in a head may hide entries of another that visits it."""
    return plan.mask is not None and plan.mask.reads("h")


def classes_of_lists(mask: Parts, block_q: int, block_kv: int) -> Array:
    """The classes of a block mask's lists in blocks of another size: int8 [batch, heads, q blocks, kv blocks].

    A full block that reaches past an end of the matrix counts as partial.
    """
    width = mask.blocks[1]
    partial = transpose.flags_of_lists(mask.kv_num_blocks, mask.kv_indices, width)
    full = transpose.flags_of_lists(mask.full_kv_num_blocks, mask.full_kv_indices, width)
    classes = jnp.where(full, FULL, jnp.where(partial, PARTIAL, EMPTY)).astype(jnp.int8)
    sizes = (block_q, block_kv)
    low, high = _extremes(classes, (mask.q_len, mask.kv_len), mask.block_size, sizes)
    found = jnp.where(low == FULL, FULL, jnp.where(high == EMPTY, EMPTY, PARTIAL)).astype(jnp.int8)
    for axis, length, size in zip((2, 3), (mask.q_len, mask.kv_len), sizes, strict=True):
        if length % size:
            last = jnp.arange(found.shape[axis]) == found.shape[axis] - 1
            last = last.reshape(tuple(-1 if i == axis else 1 for i in range(4)))
            found = jnp.where(last & (found == FULL), jnp.int8(PARTIAL), found)
    return found


def _extremes(
    classes: Array, lengths: tuple[int, int], old: tuple[int, int], new: tuple[int, int]
) -> tuple[Array, Array]:
    """(smallest, largest) class of the old blocks under each new block, int8 [B, H, new q blocks, new kv blocks]."""
    low = high = classes
    for axis, length, before, after in zip((2, 3), lengths, old, new, strict=True):
        places = _covered(length, before, after)
        low, high = _spread(low, axis, places).min(axis + 1), _spread(high, axis, places).max(axis + 1)
    return low, high


def _covered(length: int, old: int, new: int) -> np.ndarray:
    """The old blocks that each new block overlaps along one axis: int [new blocks, most]; the last one is repeated."""
    first = np.arange(cdiv(length, new)) * new
    low, high = first // old, (np.minimum(first + new, length) - 1) // old
    most = int((high - low).max(initial=0)) + 1
    return np.minimum(low[:, None] + np.arange(most), high[:, None])


def _spread(x: Array, axis: int, places: np.ndarray) -> Array:
    """x with `axis`, the old blocks, replaced by the two axes of `places` (`_covered`)."""
    taken = module_of(x).take(x, places.reshape(-1), axis)
    return taken.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


def _widths(partial: int, full: int, rows: np.ndarray, columns: np.ndarray) -> tuple[int, int]:
    """Upper bounds of the widths of the new (partial, full) lists; `rows` and `columns` are what `_covered` returns."""
    # an entry of an old row yields at most as many entries as new blocks overlap its old block
    _, overlaps = np.unique(np.concatenate([np.unique(n) for n in columns] or [columns[:0, 0]]), return_counts=True)
    overlap = int(overlaps.max(initial=0))
    most = len(columns)
    return min(most, rows.shape[1] * (partial + full) * overlap), min(most, full * overlap)


def classes_of_plan(plan: KernelPlan, lists: BlockLists) -> Array:
    """The class of each block of the plan, int8 [batch, heads, q blocks, kv blocks]; numpy for numpy lists."""
    blocks, xp = plan.blocks, module_of(*lists)
    assert blocks is not None
    shape = (blocks.batch, blocks.heads, cdiv(plan.q_len, blocks.block_q), cdiv(plan.kv_len, blocks.block_kv))
    classes = xp.zeros(shape, np.int8)
    for num, index, value in ((*lists[:2], PARTIAL), (*lists[2:], FULL)):
        if num is not None and index is not None:
            flags = transpose.flags_of_lists(num, index, shape[3])
            classes = xp.where(flags, np.int8(value), classes)
    return classes


# ------------------------------------------------------------------- masks from the user's lists


def _program_with_lists(plan: KernelPlan) -> tuple[Program, Captured]:
    """(mask that looks up the class of an entry's old block, what it captures of (classes, *captures))."""
    assert plan.blocks is not None
    sizes = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
    return _traced(plan.mask, sizes, dataclasses.astuple(plan.blocks)[:4])


@functools.lru_cache(maxsize=512)
def _traced(
    program: Program | None, sizes: tuple[int, int, int, int], blocks: tuple[int, int, int, int]
) -> tuple[Program, Captured]:
    """`_program_with_lists`, cached by what it depends on; `blocks` is (batch, heads, block_q, block_kv)."""
    batch, heads, block_q, block_kv = blocks
    shape = (batch, heads, cdiv(sizes[2], block_q), cdiv(sizes[3], block_kv))
    given = () if program is None else program.captures
    types = [jax.ShapeDtypeStruct(shape, jnp.int32), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given)]

    def extended(arrays: Sequence[Array]) -> MaskMod:
        classes, *captures = arrays
        inside = None if program is None else as_mask_mod(program, captures)

        def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
            """Whether the entry is visible; indices count from 0 in the arrays of the call."""
            at = (b if batch > 1 else 0, h if heads > 1 else 0, q_idx // block_q, kv_idx // block_kv)
            kind = classes[at]
            return (
                kind > EMPTY if inside is None else (kind == FULL) | ((kind == PARTIAL) & inside(b, h, q_idx, kv_idx))
            )

        return mask_mod

    return program_of_types(types, extended, sizes)


def program_of_types(
    types: Sequence[jax.ShapeDtypeStruct],
    mask_of: Callable[[Sequence[Array]], MaskMod],
    sizes: tuple[int, int, int, int],
) -> tuple[Program, Captured]:
    """The program of a mask function of arrays of these types, and what it captures, as a function of them."""
    found: list[tuple[Program, Captured]] = []

    def captured(places: tuple[int | None, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        if None in places:  # of captured scalars jax computes what is no position's before the function is traced
            return tuple(trace_mask_mod(mask_of(arrays), sizes).arrays)
        return tuple(arrays[n] for n in places if n is not None)

    def trace(arrays: Sequence[Array]) -> None:
        traced = trace_mask_mod(mask_of(arrays), sizes)
        places = {id(a): n for n, a in enumerate(arrays)}
        found.append((traced.program, functools.partial(captured, tuple(places.get(id(a)) for a in traced.arrays))))

    # Traced without a mesh, so that calls on every mesh share the program.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        jax.eval_shape(trace, list(types))
    return found[0]
