"""A stage of a call whose sequence is split: a device's queries with some key blocks, as a problem for the kernels.

Queries and keys come as blocks with their numbers in the sequence, in any order. The stage's problem has the programs
of the call, whose inputs are positions in the whole sequence, and an origin (ir/origin.py) that says where each block
begins. Its block lists were made on the host (lists.py), or the device makes them by interval analysis of the mask
program on the positions of the blocks.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.block_grid import BlockGrid
from flexjax.analysis.intervals import decide
from flexjax.block_mask.classify import classes_of
from flexjax.block_mask.traced_lists import lists_of_classes
from flexjax.block_mask.transpose import EMPTY
from flexjax.context.context_parallel import ContextCall, Tables
from flexjax.integers import cdiv
from flexjax.ir.origin import OriginLayout, OriginTable, Starts, shift_heads
from flexjax.plan.kernel_plan import BlockLayout, BlockLists, KernelPlan, Operands
from flexjax.plan.lengths import token_axis as token_axis
from flexjax.plan.problem import Problem

Array = jax.Array


class Keys(typing.NamedTuple):
    """Key blocks that a device has, with everything over keys: in the plan's layout, the blocks one after the other."""

    key: Array
    value: Array
    key_extra: Array | None
    numbers: Array  # int32 [blocks], in the sequence; -1, or a number past the end, stands for no block
    stage: tuple[int, Array | int] = (0, 0)  # whose lists belong to them: (number of the stage, step of the ring)

    @property
    def arrays(self) -> list[Array]:
        return [x for x in self[:3] if x is not None]


class Stage(typing.NamedTuple):
    problem: Problem
    operands: Operands

    @property
    def flat(self) -> list[Array]:
        return jax.tree.leaves(self.operands)


def take_blocks(plan: KernelPlan, x: Array, slots: Array, size: int) -> Array:
    """The blocks, of `size` tokens, of x at `slots`, one after the other; slots past the end take the last block."""
    axis = token_axis(plan)
    blocks = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.take(blocks, slots, axis=axis, mode="clip").reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def put_blocks(plan: KernelPlan, x: Array, slots: Array, size: int, new: Array) -> Array:
    """x with its blocks of `size` tokens at `slots` replaced by those of `new`. Slots past the end are left out."""
    # The barrier lets XLA write into x where nothing else reads it. Without it XLA fuses what computes `new` into the
    # scatter, and copies x first if `new` is computed from x.
    return _blocks_at(
        plan, x, slots, size, lambda at, blocks: at.set(lax.optimization_barrier(blocks), mode="drop"), new
    )


def add_blocks(plan: KernelPlan, x: Array, slots: Array, size: int, new: Array) -> Array:
    """x with the blocks of `new` added to its blocks of `size` tokens at `slots`. Slots past the end are left out."""
    return _blocks_at(plan, x, slots, size, lambda at, blocks: at.add(blocks, mode="drop"), new)


def _blocks_at(
    plan: KernelPlan, x: Array, slots: Array, size: int, update: Callable[[typing.Any, Array], Array], new: Array
) -> Array:
    """x with its blocks at `slots` changed by `update`: (x.at[..], blocks of `new`) -> the changed array."""
    axis = token_axis(plan)
    blocks = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    new = new.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return update(blocks.at[(*[slice(None)] * axis, slots)], new).reshape(x.shape)


def classes_on(
    call: ContextCall, plan: KernelPlan, captures: Sequence[Array], tables: Tables, queries: Array, keys: Array
) -> Array:
    """The class of each pair of blocks under the mask of the call: int8 [1 or B, 1 or N, len(queries), len(keys)].

    queries, keys   int32 numbers of blocks in the sequence; one below 0 or past the last block stands for none (EMPTY)
    """
    counts = [cdiv(length, size) for length, size in zip(call.lengths, call.block_size, strict=True)]
    real = [(n >= 0) & (n < count) for n, count in zip((queries, keys), counts, strict=True)]
    rows, columns = (jnp.where(on, n, 0) for on, n in zip(real, (queries, keys), strict=True))
    if tables.classes is not None:
        found = tables.classes[:, :, rows][:, :, :, columns]
    else:
        program = plan.mask
        assert program is not None, "the mask of a split sequence has a program"
        heads = (plan.batch if program.reads("b") else 1, plan.q_heads if program.reads("h") else 1)
        along = lambda x, axis: jnp.reshape(x, tuple(-1 if i == axis else 1 for i in range(4)))
        b, h = (along(jnp.arange(n, dtype=jnp.int32), axis) for axis, n in enumerate(heads))
        first_q, first_kv = along(rows * call.block_size[0], 2), along(columns * call.block_size[1], 3)
        ends = (first_q + (call.block_size[0] - 1), first_kv + (call.block_size[1] - 1))
        grid = BlockGrid(b, h, first_q, ends[0], first_kv, ends[1], *call.block_size)
        shape = (*heads, queries.shape[0], keys.shape[0])
        found, _ = classes_of(decide(program, captures, grid), shape)
    both = real[0][:, None] & real[1][None, :]
    return jnp.where(both, found, jnp.int8(EMPTY))


def stage_of(
    call: ContextCall,
    problem: Problem,
    operands: Operands,
    tables: Tables,
    me: Array | int,
    keys: Keys,
    sinks: bool = False,
    partial: bool = True,
) -> Stage:
    """The stage of a device's queries, `tables.query_blocks`, with some key blocks.

    problem    of the device's batch entries and heads
    sinks      whether the stage has the sinks
    partial    whether results of other stages are added to those of this one
    """
    plan, queries = problem.plan, tables.query_blocks[me]
    rows, columns = queries.shape[0], keys.numbers.shape[0]
    if tables.lists is not None:
        number, step = keys.stage
        blocks, of_devices = call.blocks[number], tables.lists[number]
        lists = BlockLists(*(None if x is None else x[step, me] for x in of_devices))
    else:
        # without `tables.lists` the device classifies each pair of blocks when the program runs
        classes = classes_on(call, plan, operands.mask_captures, tables, queries, keys.numbers)
        batch, heads = classes.shape[:2]
        blocks = BlockLayout(batch, heads, *call.block_size, columns, columns, rows, rows)
        made: typing.Any = lists_of_classes(classes)
        lists = BlockLists(*made)
    starts = [
        jnp.where((n >= 0) & (n * size < length), n * size, 0)[None].astype(jnp.int32)
        for n, size, length in zip((queries, keys.numbers), call.block_size, call.lengths, strict=True)
    ]
    own_plan = plan_of_stage(plan, call.block_size, rows, columns, blocks, sinks, partial)
    own = operands._replace(
        key=keys.key,
        value=keys.value,
        key_extra=keys.key_extra,
        sinks=operands.sinks if sinks else None,
        lists=lists,
        origin=Starts(starts[0], starts[1]),
    )
    return Stage(dataclasses.replace(problem, plan=own_plan, structure=jax.tree.structure(own)), own)


def plan_of_stage(
    plan: KernelPlan,
    block_size: tuple[int, int],
    rows: int,
    columns: int,
    blocks: BlockLayout,
    sinks: bool = False,
    partial: bool = True,
) -> KernelPlan:
    """The plan of a stage of `rows` query blocks and `columns` key blocks, from that of the call."""
    block_q, block_kv = block_size
    return dataclasses.replace(
        plan,
        q_len=rows * block_q,
        kv_len=columns * block_kv,
        blocks=blocks,
        origin=OriginLayout(1, block_q, rows, block_kv, columns, math.gcd(block_q, block_kv)),
        has_sinks=sinks,
        partial=partial,
    )


def at_head(problem: Problem, operands: Operands, head: Array | int, parts: int) -> tuple[Problem, Operands]:
    """(problem, operands) of one of `parts` equal parts of the query heads, from `head` on; mods see all heads.

    operands   their arrays over heads are those of the part; the new ones also have the captured start of the part
    """
    plan = problem.plan
    whole = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
    origin = OriginTable(None, jnp.asarray(head, jnp.int32), None, None, whole)
    shifted = []
    for programs in (problem.programs, (plan.mask,), (plan.dropout,)):
        given = [p for p in programs if p is not None]
        new, more = shift_heads(given, origin, plan.batch, plan.q_heads // parts)
        shifted.append((iter(new), more))
    take = lambda part, old: None if old is None else next(part[0])
    score, mask, dropout = shifted
    own_plan = dataclasses.replace(
        plan,
        q_heads=plan.q_heads // parts, kv_heads=plan.kv_heads // parts, extra_heads=plan.extra_heads // parts,
        mask=take(mask, plan.mask), dropout=take(dropout, plan.dropout),
    )  # fmt: skip
    own = operands._replace(
        score_captures=(*operands.score_captures, *score[1]),
        mask_captures=(*operands.mask_captures, *mask[1]),
        dropout_captures=(*operands.dropout_captures, *dropout[1]),
    )
    return problem.with_programs(list(score[0]), own_plan, own), own
