"""The program of a call whose query heads of one key head are packed into rows: for kernels that read each key once.

A key head serves `group` query heads. A call with few queries has too few rows to fill a tile, so a kernel packs the
heads of a group: row r of key head m is query r // group of query head m * group + r % group. In the new program h is
the key head and q the row. Without a group or with one query those indices stay affine, and loads slices.

The positions of an origin become part of the program: it reads the position of the first query and of the first key
from two more captured arrays. Then q and kv count from 0 in the arrays of the call.
"""

import functools

from flexjax.ir.builder import Builder, literal
from flexjax.ir.origin import OriginLayout
from flexjax.ir.program import KV, SCORE, Atom, B, H, Program, Q
from flexjax.ir.replay import replay


@functools.lru_cache(maxsize=512)
def fold_heads(
    program: Program, q_len: int, group: int, lengths: tuple[int, int], origin: OriginLayout | None
) -> Program:
    """The program of a call's packed rows, whose h is the key head and whose q is the row. Cached.

    q_len     queries of a head
    lengths   (batch entries, keys) of the call
    origin    with one run each; adds the captured arrays of `Starts`: query and key, both int32 [origin.rows, 1]

    Rows past the last one are the kernel's to hide.
    """
    batch, heads, q_size, kv_size = program.sizes
    rows = q_len * group
    builder = Builder((batch, heads // group, rows, lengths[1]), program.inputs[SCORE].dtype)
    builder.captures = list(program.captures)
    inputs: dict[int, Atom] = {v.id: v for v in builder.inputs}
    inputs[H], inputs[Q] = head_and_query(builder, q_len, group)
    if origin is not None:
        zero = literal(0, "int32")
        entry: Atom = builder.inputs[B] if origin.rows > 1 else zero
        for ident, size, own in ((Q, q_size, q_len), (KV, kv_size, lengths[1])):
            inputs[ident] = builder.plus_start(inputs[ident], (origin.rows, 1), (entry, zero), max(0, size - own))
    found = replay(program, builder, inputs)
    return builder.finish([found.new(r) for r in program.results], [found.loads[n] for n in program.gradients])


def head_and_query(builder: Builder, q_len: int, group: int) -> tuple[Atom, Atom]:
    """Appends the steps that compute the (query head, query) of a packed row, int32 atoms."""
    row, size = builder.inputs[Q], literal(group, "int32")
    # with one query the member of the group is the row itself, so `x[h]` stays a read along the rows
    member: Atom = row
    query: Atom = literal(0, "int32")
    if group == 1:
        member, query = query, row
    elif q_len > 1:
        member = builder.op("floormod", (row, size), "int32")
        query = builder.op("floordiv", (row, size), "int32")
    first = builder.op("mul", (builder.inputs[H], size), "int32")
    return builder.op("add", (first, member), "int32"), query
