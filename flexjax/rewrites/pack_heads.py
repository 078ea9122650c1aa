"""Packs the query heads of a group into the rows of a tile, for kernels whose tile is larger than a call's queries.

A kernel's tile has tens of rows of one query head, and a step of decoding has one query. Query heads of one key head
read the same keys, so a call of N query heads and T queries is also one of M heads and T * G rows, G = N / M:

    row r of head m   is   query r // G of query head m * G + r % G

The packed plan has group 1; of lists of `tolerance` that differ by head it visits what any head of a group does. Its
programs get the head m * G + r % G as h, and the position of query r // G as q. Positions of queries that an origin
gives are a captured array of the packed programs, and the packed plan's own origin of queries is 0.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from flexjax.ir.builder import Builder
from flexjax.ir.fold_heads import head_and_query
from flexjax.ir.origin import Starts
from flexjax.ir.program import SCORE, Atom, B, H, Program, Q
from flexjax.ir.replay import replay
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.plan.rewrite import Rewrite
from flexjax.rewrites import mask_blocks

Array = jax.Array

MOST_ROWS = 64  # the most rows that a packed head has


def packed_plan(plan: KernelPlan) -> KernelPlan | None:
    """The plan with the query heads of each group as rows: M query heads of T * G rows each; None for others."""
    group, origin, blocks = plan.group, plan.origin, plan.blocks
    if group == 1 or not 0 < plan.q_len * group <= MOST_ROWS or plan.has_sinks or plan.extra_dim:
        return None
    if origin is not None:
        if origin.query_runs > 1:
            return None
        origin = dataclasses.replace(origin, query_run=plan.q_len * group, aligned=1)
    if blocks is not None:
        if blocks.from_user_lists or blocks.block_q < plan.q_len or (blocks.heads > 1 and not blocks.thinned):
            return None
        blocks = mask_blocks.blocks_of_heads(plan, plan.kv_heads).changed(block_q=blocks.block_q * group)
    options = plan.options
    if options.block_q is not None:
        options = dataclasses.replace(options, block_q=options.block_q * group)
    rows = None if origin is None else origin.rows
    pack = lambda program: None if program is None else _packed_program(program, group, plan.kv_heads, plan.q_len, rows)
    return dataclasses.replace(
        plan,
        q_heads=plan.kv_heads,
        q_len=plan.q_len * group,
        score=pack(plan.score),
        mask=pack(plan.mask),
        dropout=pack(plan.dropout),
        blocks=blocks,
        origin=origin,
        options=options,
    )


def rewrite(plan: KernelPlan) -> Rewrite | None:
    """The call with query heads packed into rows; None where `packed_plan` is. For forward passes only."""
    made = packed_plan(plan)
    if made is None:
        return None
    why = f"heads: the {plan.group} query heads of a key head are packed into one of {made.q_len} queries"
    results = lambda found, operands: jax.tree.map(lambda x: unpack_rows(x, plan, plan.layout), found)
    return Rewrite(made, why, functools.partial(_operands, plan), results)


def _operands(plan: KernelPlan, operands: Operands) -> Operands:
    """The packed operands; programs that read q capture the origin's table of queries last."""
    group, origin, lengths = plan.group, operands.origin, operands.lengths
    starts: tuple[Array, ...] = ()
    if origin is not None:
        starts = (origin.query.reshape(()) if origin.query.shape[0] == 1 else origin.query.reshape(-1),)
        origin = Starts(jnp.zeros_like(origin.query), origin.key)
    if lengths is not None and lengths.query is not None:
        lengths = lengths._replace(query=lengths.query * group)

    def with_starts(program: Program | None, captures: tuple[Array, ...]) -> tuple[Array, ...]:
        return captures if program is None or not program.reads("q") else (*captures, *starts)

    return operands._replace(
        query=pack_rows(operands.query, plan, plan.layout),
        score_captures=with_starts(plan.score, operands.score_captures),
        mask_captures=with_starts(plan.mask, operands.mask_captures),
        dropout_captures=with_starts(plan.dropout, operands.dropout_captures),
        lists=operands.lists and mask_blocks.lists_of_heads(plan, operands.lists, plan.kv_heads),
        origin=origin,
        lengths=lengths,
    )


def pack_rows(x: Array, plan: KernelPlan, layout: str) -> Array:
    """[B, T, N, ...] in the plan's layout as [B, T * G, M, ...] ("BTNH") or [B, M, T * G, ...] ("BNTH")."""
    sizes = {"t": plan.q_len, "m": plan.kv_heads, "g": plan.group}
    given = "tmg" if plan.layout == "BTNH" else "mgt"
    rows = plan.q_len * plan.group
    wanted, ends = ("tgm", (rows, plan.kv_heads)) if layout == "BTNH" else ("mtg", (plan.kv_heads, rows))
    split = x.reshape(plan.batch, *(sizes[axis] for axis in given), *x.shape[3:])
    return _reordered(split, given, wanted).reshape(plan.batch, *ends, *x.shape[3:])


def unpack_rows(x: Array, plan: KernelPlan, layout: str) -> Array:
    """The inverse of `pack_rows`, with the same plan, the one before it is packed."""
    sizes = {"t": plan.q_len, "m": plan.kv_heads, "g": plan.group}
    given = "tgm" if layout == "BTNH" else "mtg"
    heads_last = plan.layout == "BTNH"
    wanted, ends = ("tmg", (plan.q_len, plan.q_heads)) if heads_last else ("mgt", (plan.q_heads, plan.q_len))
    split = x.reshape(plan.batch, *(sizes[axis] for axis in given), *x.shape[3:])
    return _reordered(split, given, wanted).reshape(plan.batch, *ends, *x.shape[3:])


def _reordered(x: Array, given: str, wanted: str) -> Array:
    """x with its dimensions 1, 2 and 3, which are named in `given`, in the order of `wanted`."""
    order = (0, *(1 + given.index(axis) for axis in wanted), *range(4, x.ndim))
    return jnp.transpose(x, order)


@functools.lru_cache(maxsize=512)
def _packed_program(program: Program, group: int, kv_heads: int, q_len: int, origin_rows: int | None) -> Program:
    """The program of a packed plan, whose h is a key head and whose q is a row; sizes are those before packing.

    A program that reads q captures the origin's table of queries last, int32 [] or [batch].
    """
    sizes = program.sizes
    builder = Builder((sizes[0], kv_heads, q_len * group, sizes[3]), program.inputs[SCORE].dtype)
    builder.captures = list(program.captures)
    inputs: dict[int, Atom] = {v.id: v for v in builder.inputs}
    inputs[H], query = head_and_query(builder, q_len, group)
    if origin_rows is not None and program.reads("q"):
        table, entry = ((), ()) if origin_rows == 1 else ((origin_rows,), (inputs[B],))
        query = builder.plus_start(query, table, entry, max(0, sizes[2] - q_len))
    inputs[Q] = query
    found = replay(program, builder, inputs)
    return builder.finish([found.new(r) for r in program.results], [found.loads[n] for n in program.gradients])
