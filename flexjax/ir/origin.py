"""Where the arrays of a call lie in the whole problem: the position of every query and key, as tables of runs.

A call may compute a part of a larger problem: a device's queries, a chunk of a prefill, key blocks that came from other
devices. Mods and dropout then see the indices of the whole problem. The rows of a call may be several runs of the
sequence (zigzag layouts, exchanged blocks), so two of the four numbers are tables:

    b of the mod   = b of the call + batch                            one int32 for the call
    h of the mod   = h of the call + head                             one int32 for the call
    q_idx          = query[row of the table, r // G] + r % G          r: row of query, G: tokens of a run of queries
    kv_idx         = key[row of the table, c // G'] + c % G'          c: row of key, G': tokens of a run of keys

All are operands, so new values neither trace nor compile anything. A tile never straddles two runs (`tile_fits`), so
positions are consecutive within a tile: `q - kv + c` is a diagonal, `x[q]` a row, as without an origin. **The inputs q
and kv of a program are positions**; a backend reads the positions at which a tile starts and evaluates the program
there. Addresses of query, key, value and results count rows of the call.

Batch and head are one number each, so no backend knows of them: `shift_heads` writes `b + batch` and `h + head` into
the programs, with the two scalars as captured arrays.

Where the lengths of the whole problem are unknown, a position is anything below UNKNOWN. The index of `table[h, q - kv
+ c]` then keeps its clamp: the load is still one value for each difference, but no slice.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.errors import bad_argument, kind_of
from flexjax.ir.builder import Builder
from flexjax.ir.program import SCORE, Atom, Axes, B, H, Program
from flexjax.ir.replay import replay
from flexjax.types import Origin

Array = jax.Array
# batch, heads, q_len, kv_len
Sizes = tuple[int, int, int, int]

UNKNOWN = 1 << 29
"""Above all positions, batch entries and heads of a problem of unknown lengths. Sums and differences fit int32."""
NOT_KNOWN: Sizes = (UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)


class Starts(typing.NamedTuple):
    """The operands of an origin: the position of the first token of each run, int32 [1 or the batch, runs]."""

    query: Array
    key: Array


@dataclasses.dataclass(frozen=True)
class OriginLayout:
    """The static part of an origin; a run has `query_run` or `key_run` tokens."""

    rows: int
    # the last run may be shorter, and a single run is as long as the call
    query_run: int
    query_runs: int
    key_run: int
    key_runs: int
    aligned: int = 1  # every start is a multiple of this many tokens

    def tile_fits(self, queries: int, keys: int) -> bool:
        """Whether no tile of `queries` x `keys` tokens straddles two runs."""
        return not (self.query_runs > 1 and self.query_run % queries) and not (
            self.key_runs > 1 and self.key_run % keys
        )

    @property
    def single(self) -> bool:
        return self.query_runs == self.key_runs == 1

    def differs_by_entry(self, axes: Axes) -> bool:
        """Whether a value of these axes differs between batch entries because each has positions of its own."""
        return self.rows > 1 and bool(axes & {"q", "kv", "delta"})

    @property
    def table_dims(self) -> tuple[str, str]:
        """The dims of both tables for partitioning rules: "b" for a row for each entry, "origin_b" for one row."""
        entry = "b" if self.rows > 1 else "origin_b"
        return f"{entry} query_runs", f"{entry} key_runs"


Placed = tuple[OriginLayout | None, Starts | None]
# positions count from 0
NOWHERE: Placed = (None, None)


@dataclasses.dataclass(frozen=True, eq=False)
class OriginTable:
    """An origin in full generality, as `flex_attention` and `create_block_mask` use it; see `table_of_runs`."""

    # int32 scalars; None: 0
    batch: Array | None
    head: Array | None
    # None: queries and keys count from 0
    starts: Starts | None
    layout: OriginLayout | None
    whole: Sizes  # above every index of every row; UNKNOWN where unknown

    def __repr__(self) -> str:
        # the text of the arrays would wait for the device
        return f"OriginTable({self.layout}, whole={self.whole})"


jax.tree_util.register_dataclass(OriginTable, data_fields=["batch", "head", "starts"], meta_fields=["layout", "whole"])


def sizes_of(origin: OriginTable | None, sizes: Sizes) -> Sizes:
    """(batch, heads, q_len, kv_len) above the indices of a call's mods, which are traced for them."""
    if origin is None:
        return sizes
    moved = (origin.batch is not None, origin.head is not None, *(origin.layout is not None,) * 2)
    batch, heads, q_len, kv_len = (
        max(whole, own) if m else own for whole, own, m in zip(origin.whole, sizes, moved, strict=True)
    )
    return (batch, heads, q_len, kv_len)


def table_of_runs(
    query_starts: Array,
    key_starts: Array,
    *,
    query_run: int,
    key_run: int,
    whole: Sizes = NOT_KNOWN,
    batch: Array | None = None,
    head: Array | None = None,
    aligned: int = 1,
) -> OriginTable:
    """The origin of a call whose rows are several runs of the whole sequence.

    query_starts, key_starts   int32 [1 or B, runs]: position of the first token of each run
    query_run, key_run         tokens of a run, multiples of the block size of the mask
    whole                      above every position of every row, padding included; keeps reads of arrays of those
                               lengths slices
    aligned                    every start is a multiple of this many tokens: tiles that divide it and lie on one
                               diagonal then
                               share it exactly, and gradients of reads by q - kv are summed by diagonals
    """
    rows = max(query_starts.shape[0], key_starts.shape[0])
    spread = lambda x: jnp.broadcast_to(x.astype(jnp.int32), (rows, x.shape[1]))
    layout = OriginLayout(rows, query_run, query_starts.shape[1], key_run, key_starts.shape[1], aligned)
    return OriginTable(batch, head, Starts(spread(query_starts), spread(key_starts)), layout, whole)


def table_of(
    origin: Origin | OriginTable | None,
    batch: int,
    lengths: tuple[int, int],
    existing: tuple[Array | None, Array | None] = (None, None),
) -> OriginTable | None:
    """The argument `origin` of a call as an OriginTable; None if it is None or all its numbers are int 0.

    batch      batch entries of the call; 1 where one block mask serves any number of them
    lengths    (queries, keys) of the call; each is one run
    existing   how many queries and keys of each batch entry exist, int32 [batch], for query="end"; None: all

    Raises ValueError for other types or shapes, for numbers below 0 or too large for `whole` (jax arrays are clipped
    instead), and for a `whole` shorter than the call.
    """
    if origin is None or isinstance(origin, OriginTable):
        return origin
    if not isinstance(origin, Origin):
        raise bad_argument(
            "origin", kind_of(origin), "a flexjax.Origin", "Pass flexjax.Origin(query=...), for example."
        )
    if origin.documents is not None:
        raise bad_argument(
            "origin.documents", "given where it is not taken", "None",
            "Pass it to flex_attention, with mask_mod; its tokens are not split over devices by context=.",
        )  # fmt: skip
    whole = _whole(origin.whole)
    at_end = isinstance(origin.query, str) and origin.query == "end"
    if at_end:
        origin, whole = _at_end(origin, batch, whole, lengths, existing)
    ends = (("query", whole[2], lengths[0]), ("key", whole[3], lengths[1]))
    for name, size, length in ends:
        if size < length:
            raise bad_argument(
                "origin.whole", f"{size} for the length of {name}", f"at least {length}, the length in this call",
                "Pass the lengths of the whole problem.",
            )  # fmt: skip
    fields = {name: getattr(origin, name) for name in ("batch", "head", "query", "key")}
    zero = {name for name, x in fields.items() if isinstance(x, int) and not isinstance(x, bool) and x == 0}
    if len(zero) == 4:
        return None
    start, head = (
        None if name in zero else _number(f"origin.{name}", fields[name], (), size)
        for name, size in (("batch", whole[0]), ("head", whole[1]))
    )
    if {"query", "key"} <= zero:
        return OriginTable(start, head, None, None, whole)
    tables = []
    for name, size, length in ends:
        starts = _number(f"origin.{name}", fields[name], (batch,), size, length)
        if size < UNKNOWN:
            starts = jnp.clip(starts, 0, size - length)  # so that no read leaves its array, whatever a traced number is
        tables.append(starts.reshape(-1, 1))
    if at_end and "key" in zero and tables[0].shape[0] > 1:
        # 0, because positions of queries are not negative: XLA computes it in the kernel that computes these
        tables[1] = jnp.minimum(tables[0], 0)
    runs = [max(length, 1) for length in lengths]
    return table_of_runs(*tables, query_run=runs[0], key_run=runs[1], whole=whole, batch=start, head=head)


def _at_end(
    origin: Origin, batch: int, whole: Sizes, lengths: tuple[int, int], existing: tuple[Array | None, Array | None]
) -> tuple[Origin, Sizes]:
    """(`origin` with numbers in place of query="end", a `whole` above its positions); arguments as of `table_of`.

    The first query lies at the first key plus max(keys - queries, 0), of those that exist.
    """
    key = (
        0
        if isinstance(origin.key, int) and origin.key == 0
        else _number("origin.key", origin.key, (batch,), whole[3], lengths[1])
    )
    queries, keys = (own if length is None else length for own, length in zip(lengths, existing, strict=True))
    if isinstance(queries, int) and isinstance(keys, int):
        ahead: int | Array = max(keys - queries, 0)
    else:
        ahead = jnp.maximum(jnp.asarray(keys - queries, jnp.int32), 0)
    # keys end with the call if `origin.key` is int 0, else where `whole` says
    keys_end = lengths[1] if isinstance(key, int) else whole[3]
    # rows of queries that do not exist count on, so they may lie past the last key
    past = max(lengths) - lengths[1] + (0 if isinstance(queries, int) else lengths[0])
    sizes = (whole[0], whole[1], UNKNOWN if keys_end == UNKNOWN else keys_end + past, keys_end)
    return dataclasses.replace(origin, query=ahead if isinstance(key, int) else key + ahead), sizes


def _whole(given: object) -> tuple[int, int, int, int]:
    """`Origin.whole` as four ints, UNKNOWN for None; ValueError unless it is None or four of None and 1 .. UNKNOWN."""
    if given is None:
        return NOT_KNOWN
    valid = isinstance(given, tuple) and len(given) == 4
    if not valid or not all(n is None or (isinstance(n, int) and 0 < n <= UNKNOWN) for n in typing.cast(tuple, given)):
        raise bad_argument(
            "origin.whole",
            repr(given),
            "(batch, heads, q_len, kv_len) of the whole problem, positive ints up to 2^29 or None",
            "None where a number is not known.",
        )
    whole = [UNKNOWN if n is None else int(n) for n in typing.cast(tuple, given)]
    return (whole[0], whole[1], whole[2], whole[3])


def _number(name: str, given: object, batch: tuple[int, ...], size: int, length: int = 1) -> Array:
    """A field of an Origin as int32, [] or of the shape `batch`: (B,) where entries may have their own number, else ().

    size, length   of the whole problem, and of the call's arrays, along the axis of the field

    Raises ValueError for other types and shapes, and for a number outside of 0 .. size - length.
    """
    array = np.asarray(given) if isinstance(given, int | np.integer) and not isinstance(given, bool) else given
    valid = isinstance(array, np.ndarray | jax.Array) and jnp.issubdtype(array.dtype, jnp.integer)
    if not isinstance(array, np.ndarray | jax.Array) or not valid or array.shape not in ((), batch):
        is_array = isinstance(array, np.ndarray | jax.Array)
        got = f"{array.dtype.name}{list(array.shape)}" if is_array else repr(given)
        shapes = "an int or an int32 scalar" + (f", or int32[{batch[0]}], one for each batch entry" if batch else "")
        raise bad_argument(name, got, shapes, "Cast it, for example with jnp.int32().")
    most = size - length
    # the numbers of a jax array are not looked at, because that would wait for the device
    if isinstance(array, np.ndarray) and array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > most:
            raise bad_argument(
                name,
                str(low if low < 0 else high),
                f"0 to {most}",
                "The arrays of the call must lie in the whole problem.",
            )
    return jnp.asarray(array).astype(jnp.int32)


def agree(a: OriginTable, b: OriginTable) -> bool:
    """Whether two origins may be equal: traced arrays count as equal to any; None differs from an array."""
    if (a.layout, a.whole, a.batch is None, a.head is None) != (b.layout, b.whole, b.batch is None, b.head is None):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        isinstance(x, Tracer) or isinstance(y, Tracer) or np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs
    )


# ------------------------------------------------------------------- positions


def position(starts: Array, run: int, batch: Array | int, row: Array | int) -> Array:
    """The positions of rows of a call, int32.

    starts       int32 [rows, runs]: Starts.query or Starts.key
    run          tokens of a run
    batch, row   numbers or arrays that broadcast; rows past the end count on from the last run

    With one row of `starts`, `batch` is not read, and the result has the shape of `row`.
    """
    rows, runs = starts.shape
    if runs == 1:
        number: Array | int = 0
        rest = row
    else:
        number = jnp.minimum(jnp.asarray(row, jnp.int32) // run, runs - 1)
        rest = row - number * run
    entry = batch if rows > 1 else 0
    if rows == runs == 1:
        first = starts[0, 0]
    else:
        first = starts.at[jnp.asarray(entry, jnp.int32), jnp.asarray(number, jnp.int32)].get(mode="clip")
    return first + jnp.asarray(rest, jnp.int32)


def query_positions(layout: OriginLayout | None, starts: Starts | None, batch: Array | int, row: Array | int) -> Array:
    """The positions of query rows, int32, as `position`; the rows as they are without an origin."""
    if layout is None or starts is None:
        return jnp.asarray(row, jnp.int32)
    return position(starts.query, layout.query_run, batch, row)


def key_positions(layout: OriginLayout | None, starts: Starts | None, batch: Array | int, row: Array | int) -> Array:
    """The positions of key rows, int32, as `position`; the rows as they are without an origin."""
    if layout is None or starts is None:
        return jnp.asarray(row, jnp.int32)
    return position(starts.key, layout.key_run, batch, row)


def indices_of(origin: OriginTable, sizes: Sizes) -> list[Array]:
    """b, h, q_idx and kv_idx of a call's mods, int32 of 4 dims that broadcast to `sizes`."""
    own = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in sizes), indexing="ij", sparse=True)
    b, h, q, kv = own
    placed = (origin.layout, origin.starts)
    return [
        b if origin.batch is None else b + origin.batch,
        h if origin.head is None else h + origin.head,
        query_positions(*placed, b, q),
        key_positions(*placed, b, kv),
    ]


# ------------------------------------------------------------------- batch and heads


def shift_heads(
    programs: Sequence[Program], origin: OriginTable | None, batch: int, heads: int
) -> tuple[tuple[Program, ...], tuple[Array, ...]]:
    """(programs with b + origin.batch and h + origin.head in place of b and h, the extra captured arrays).

    programs       traced for `sizes_of(origin, ..)`, with the same captures
    batch, heads   sizes of the call

    The extra arrays are the scalars origin.batch and origin.head, each if a program reads its axis; they come last.
    """
    if origin is None:
        return tuple(programs), ()
    given = {"b": origin.batch, "h": origin.head}
    axes = tuple(a for a, start in given.items() if start is not None and any(p.reads(a) for p in programs))
    shifted = tuple(_shifted(p, axes, batch, heads) for p in programs)
    return shifted, tuple(typing.cast(Array, given[a]) for a in axes)


@functools.lru_cache(maxsize=512)
def _shifted(program: Program, axes: tuple[str, ...], batch: int, heads: int) -> Program:
    """The program with b or h (`axes`) plus a scalar, clamped so that the sum stays below program.sizes."""
    whole = program.sizes
    if not axes and (batch, heads) == whole[:2]:
        return program
    builder = Builder((batch, heads, whole[2], whole[3]), program.inputs[SCORE].dtype)
    builder.captures = list(program.captures)
    inputs: dict[int, Atom] = {v.id: v for v in builder.inputs}
    for axis in axes:
        ident, most, own = (B, whole[0], batch) if axis == "b" else (H, whole[1], heads)
        inputs[ident] = builder.plus_start(inputs[ident], (), (), max(0, most - own))
    found = replay(program, builder, inputs)
    return builder.finish([found.new(r) for r in program.results], [found.loads[n] for n in program.gradients])
