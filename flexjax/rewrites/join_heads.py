"""Joins all heads of a short call into one, for kernels that would have to move the heads of a cache to read them.

Keys in layout BTNH are [B, S, M, D]: the keys of all heads for one token follow one another. A kernel that reads one
head at a time needs them in another order, and reordering a cache costs two to three times reading it. Read as [B, S *
M, D] they need no copy, and are the keys of a single head whose mask tells the heads apart:

    row r      is   query r // N of query head r % N
    column c   is   token c // M of key head c % M
    visible    where r % N reads key head c % M, and the mask of the call says so

Entries of a row and a column of another head are computed and hidden, which costs less than the copy while rows are
few.

A page [page, M, D] holds the keys of all heads too, and is copied whole. So every call with keys in pages is joined: a
page of the joined plan has page * M columns. Of lists that differ by head it visits what any head does, and the mask
decides each entry.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from flexjax.integers import cdiv
from flexjax.ir.builder import Builder, literal
from flexjax.ir.origin import Starts
from flexjax.ir.program import KV, SCORE, Atom, B, H, Program, Q
from flexjax.ir.replay import replay
from flexjax.plan.kernel_plan import BlockLists, KernelPlan, Operands, Results
from flexjax.plan.rewrite import Rewrite
from flexjax.rewrites import mask_blocks

Array = jax.Array

MOST_ROWS = 64  # the most rows of the joined head
HEADS = (8, 16)
"""Numbers of key heads that are joined: whole vectors of eight sublanes need no copy; more heads hide too much."""
TILE_BYTES, TILE_BYTES_OF_MANY_ROWS = 4 << 20, 512 << 10
"""Bytes of the keys and values of a tile for up to MOST_ROWS rows, and for more."""
LANES = 128  # columns of a tile are a multiple of this


def joined_plan(plan: KernelPlan) -> KernelPlan | None:
    """The plan with all heads joined: one query head of T * N rows, one key head of S * M columns; None for others.

    With several key heads the mask also hides the columns of other heads, and no block is full.
    """
    heads, origin, options = plan.kv_heads, plan.origin, plan.options
    rows, blocks = plan.q_len * plan.q_heads, plan.blocks
    few = heads in HEADS and rows <= MOST_ROWS and not plan.has_sinks
    if plan.layout != "BTNH" or not rows or not (few or plan.page) or plan.extra_dim:
        return None
    if origin is not None:
        if not origin.single:
            return None
        origin = dataclasses.replace(origin, query_run=rows, key_run=plan.kv_len * heads, aligned=1)
    if blocks is not None:
        if blocks.from_user_lists or (blocks.block_q < plan.q_len and not plan.page):
            return None
        if blocks.heads > 1 and not (blocks.thinned or plan.page):
            return None
        blocks = mask_blocks.blocks_of_heads(plan, 1)
        block_q, block_kv = blocks.block_q * plan.q_heads, blocks.block_kv * heads
        blocks = blocks.changed(block_q=block_q, block_kv=block_kv)
        if heads > 1:  # every block has columns of other heads, so none is full
            columns = -(-plan.kv_len * heads // block_kv)
            width = min(blocks.partial + blocks.full, columns)
            blocks = blocks.changed(partial=width, full=0)
    options = dataclasses.replace(
        options,
        block_q=None if options.block_q is None else options.block_q * plan.q_heads,
        block_kv=(options.block_kv or _tile_tokens(plan)) * heads,
    )
    static = (plan.q_heads, heads, plan.q_len, plan.kv_len, None if origin is None else origin.rows)
    join = lambda program: None if program is None else _joined_program(program, *static)
    mask = join(plan.mask)
    if heads > 1:
        mask = _own_head(plan) if plan.mask is None else _joined_program(plan.mask, *static, is_mask=True)
    return dataclasses.replace(
        plan,
        q_heads=1,
        kv_heads=1,
        q_len=rows,
        kv_len=plan.kv_len * heads,
        score=join(plan.score),
        mask=mask,
        dropout=join(plan.dropout),
        blocks=blocks,
        origin=origin,
        options=options,
        page=plan.page * heads,
    )


def _tile_tokens(plan: KernelPlan) -> int:
    """Tokens of a tile, if the options do not say: whole pages whose columns are a multiple of LANES, if they fit."""
    few = plan.q_len * plan.q_heads <= MOST_ROWS
    columns = (TILE_BYTES if few else TILE_BYTES_OF_MANY_ROWS) // (_item_size(plan) * (plan.head_dim + plan.value_dim))
    most = max(1, columns // plan.kv_heads)
    step = math.lcm(plan.page or 1, LANES // math.gcd(LANES, plan.kv_heads))
    return most // step * step or most


def _item_size(plan: KernelPlan) -> int:
    """Bytes of one number in `plan.dtype`, also where the cache is quantised."""
    return jnp.dtype(plan.dtype).itemsize


def rewrite(plan: KernelPlan) -> Rewrite | None:
    """The call with all heads joined into one; None where `joined_plan` is. For forward passes only."""
    made = joined_plan(plan)
    if made is None:
        return None
    why = (
        f"heads: all {plan.q_heads} are joined into one of {made.q_len} queries, beside one key head of "
        f"{made.kv_len} keys"
    )

    def results(found: Results, operands: Operands) -> Results:
        shape = (plan.batch, plan.q_len, plan.q_heads)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[3:]), found)

    return Rewrite(made, why, functools.partial(_operands, plan), results)


def _operands(plan: KernelPlan, operands: Operands) -> Operands:
    """The operands of the joined call.

    query, key, value   [B, T * N, 1, D], [B, S * M, 1, D or E]; in pages [P, page * M, 1, D or E]
    lengths             in rows and columns
    sinks               [1, T * N], one for each row
    captured arrays     with an origin, followed by its tables of starts, which the programs read in place of the origin
    scales              as they are: still by the M key heads of `plan`
    """
    origin, lengths, lists = operands.origin, operands.lengths, operands.lists
    starts: tuple[Array, ...] = ()
    if origin is not None:
        starts = tuple(x.reshape(() if x.shape[0] == 1 else (-1,)) for x in origin)
        origin = Starts(*map(jnp.zeros_like, origin))
    if lengths is not None:
        times = lambda x, n: None if x is None else x * n
        lengths = lengths._replace(query=times(lengths.query, plan.q_heads), key=times(lengths.key, plan.kv_heads))
    one_head = lambda x: x.reshape(x.shape[0], -1, 1, x.shape[3])
    placed = lambda program, captures: captures if program is None else (*captures, *starts)
    return operands._replace(
        query=one_head(operands.query),
        key=one_head(operands.key),
        value=one_head(operands.value),
        score_captures=placed(plan.score, operands.score_captures),
        sinks=None if operands.sinks is None else jnp.tile(operands.sinks, plan.q_len)[None],
        mask_captures=placed(plan.mask, operands.mask_captures),
        dropout_captures=placed(plan.dropout, operands.dropout_captures),
        lists=_joined_lists(plan, lists),
        origin=origin,
        lengths=lengths,
    )


def _joined_lists(plan: KernelPlan, lists: BlockLists | None) -> BlockLists | None:
    """The block lists of the joined plan."""
    if lists is None:
        return None
    lists = mask_blocks.lists_of_heads(plan, lists, 1)
    if plan.kv_heads == 1:
        return lists
    assert plan.blocks is not None
    if lists.full_num is None or lists.full_index is None:
        return lists
    if lists.partial_num is None or lists.partial_index is None:
        return BlockLists(lists.full_num, lists.full_index, None, None)
    # with several key heads no joined block is full, so the full blocks join the partial ones
    columns = cdiv(plan.kv_len, plan.blocks.block_kv)
    counted = lambda num, index: jnp.where(jnp.arange(index.shape[-1]) < num[..., None], index, columns)
    pairs = ((lists.partial_num, lists.partial_index), (lists.full_num, lists.full_index))
    index = jnp.sort(jnp.concatenate([counted(*pair) for pair in pairs], -1), -1)[..., :columns]
    return BlockLists(lists.partial_num + lists.full_num, jnp.minimum(index, columns - 1), None, None)


def _own_head(plan: KernelPlan) -> Program:
    """The mask of a joined plan of a plan without a mask: True where the query head reads the key head."""
    builder = Builder((plan.batch, 1, plan.q_len * plan.q_heads, plan.kv_len * plan.kv_heads), plan.score_dtype)
    return builder.finish([_reads(builder, plan.q_heads, plan.kv_heads)], [])


def _reads(builder: Builder, q_heads: int, kv_heads: int) -> Atom:
    """Appends steps that say whether the query head of the row (q) reads the key head of the column (kv)."""
    number = lambda n: literal(n, "int32")
    head = builder.op("floormod", (builder.inputs[Q], number(q_heads)), "int32")
    read = builder.op("floordiv", (head, number(q_heads // kv_heads)), "int32")
    return builder.op("eq", (read, builder.op("floormod", (builder.inputs[KV], number(kv_heads)), "int32")), "bool")


@functools.lru_cache(maxsize=512)
def _joined_program(
    program: Program,
    q_heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    origin_rows: int | None,
    is_mask: bool = False,
) -> Program:
    """The program of a joined plan, whose q is a row and whose kv is a column; sizes are those before heads are joined.

    With `origin_rows` (1 or the batch size) it captures the starts of the queries and of the keys last, each int32 []
    or [batch], and adds them to the query and the token. A mask also hides the columns of other heads.
    """
    sizes = program.sizes
    builder = Builder((sizes[0], 1, q_len * q_heads, kv_len * kv_heads), program.inputs[SCORE].dtype)
    builder.captures = list(program.captures)
    inputs: dict[int, Atom] = {v.id: v for v in builder.inputs}
    row, column = inputs[Q], inputs[KV]
    number = lambda n: literal(n, "int32")
    inputs[H] = row if q_len == 1 else builder.op("floormod", (row, number(q_heads)), "int32")
    inputs[Q] = number(0) if q_len == 1 else builder.op("floordiv", (row, number(q_heads)), "int32")
    inputs[KV] = builder.op("floordiv", (column, number(kv_heads)), "int32")
    if origin_rows is not None:
        table, entry = ((), ()) if origin_rows == 1 else ((origin_rows,), (inputs[B],))
        for axis, whole, own in ((Q, sizes[2], q_len), (KV, sizes[3], kv_len)):
            inputs[axis] = builder.plus_start(inputs[axis], table, entry, max(0, whole - own))
    found = replay(program, builder, inputs)
    results = [found.new(r) for r in program.results]
    if is_mask:
        results = [builder.op("and", (results[0], _reads(builder, q_heads, kv_heads)), "bool")]
    return builder.finish(results, [found.loads[n] for n in program.gradients])
