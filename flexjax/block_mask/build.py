"""Makes block masks: from a mask_mod, also one that was traced already, and from the user's lists.

The blocks of a mask whose captured arrays are known are classified in chunks from the host, and the lists are about as
wide as the longest row. A mask with traced captured arrays is classified on the device, inside the caller's jit, with
lists as wide as the number of key blocks.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.block_mask import transpose
from flexjax.block_mask.classify import BlockedMask, classify_on_host
from flexjax.block_mask.parts import BROADCAST, Parts, parts_of
from flexjax.block_mask.traced_lists import Split, traced_lists
from flexjax.errors import bad_argument
from flexjax.integers import cdiv
from flexjax.ir.origin import OriginTable, Sizes, shift_heads, sizes_of, table_of
from flexjax.ir.reach import reach_of
from flexjax.mod_tools.made_for import Reach, check_sizes, exactly
from flexjax.mod_tools.numpy_arrays import as_array, shown
from flexjax.mod_tools.signatures import MASK_ARGUMENTS
from flexjax.partition import explicit_names
from flexjax.trace.lift_numpy import eager_without_mesh
from flexjax.trace.trace_mod import TracedMod, check_callable, trace_mask_mod
from flexjax.types import Origin

Array = jax.Array


def from_mask_mod(
    mask_mod: Callable,
    dims: tuple[int | None, int | None, int, int],
    block_size: int | tuple[int, int],
    exact: bool | None,
    origin: Origin | OriginTable | None = None,
) -> Parts:
    """What create_block_mask returns, as Parts, after a check of all arguments."""
    check_callable("mask_mod", mask_mod, MASK_ARGUMENTS)  # before lengths, which a mask may stand in the place of
    if not isinstance(exact, bool | np.bool_ | None):
        raise bad_argument(
            "exact", repr(exact), "True, False or None", "None evaluates entries where that is little work."
        )
    batch, heads, q_len, kv_len = dims
    sizes = (length_of("q_len", q_len), length_of("kv_len", kv_len), *block_sizes(block_size))
    counts = (_count("batch", batch), _count("heads", heads))
    table = table_of(origin, counts[0] or 1, sizes[:2])
    known = reach_of(origin, table, (counts[0] or 1, counts[1] or 1, *sizes[:2]))
    reach = Reach((counts[0] and known.counts[0], counts[1] and known.counts[1], *known.counts[2:]), known.exact)
    check_sizes("mask_mod", mask_mod, reach)
    traced = trace_placed_mask(mask_mod, (counts[0] or BROADCAST, counts[1] or BROADCAST, q_len, kv_len), table, reach)
    for name, axis, count in (("batch", "b", batch), ("heads", "h", heads)):
        if count is None and traced.program.reads(axis):
            raise ValueError(
                f"`{name}` is None but `mask_mod` depends on `{axis}`; expected the number of "
                f"{name if name == 'heads' else 'batch entries'}. Pass {name}=... so that each gets its own blocks."
            )
    return from_traced(traced, (counts[0] or 1, counts[1] or 1), sizes, exact, table)


def trace_placed_mask(
    mask_mod: Callable, sizes: Sizes, origin: OriginTable | None, reach: Reach | None = None
) -> TracedMod:
    """Traces `mask_mod` for a call; numbers of the origin that it reads follow its captured arrays."""
    traced = trace_mask_mod(mask_mod, sizes_of(origin, sizes), reach)
    (program,), more = shift_heads((traced.program,), origin, *sizes[:2])
    return dataclasses.replace(traced, program=program, arrays=(*traced.arrays, *more))


def from_traced(
    traced: TracedMod,
    heads: tuple[int, int],
    sizes: tuple[int, int, int, int],
    exact: bool | None = None,
    origin: OriginTable | None = None,
    work: Split | None = None,
) -> Parts:
    """The block mask of a mask function that was traced already (`trace_placed_mask`).

    `heads` is (batch, heads), 1 if all share one list; `sizes` is (q_len, kv_len, block_q, block_kv). `work` has the
    explicit mesh axes that split the batch and the heads of the call; None: those that split the captured arrays.
    Raises ValueError if the origin has several runs that the block size does not divide.
    """
    layout, given = None, tuple(traced.arrays)
    if origin is not None and origin.layout is not None and origin.starts is not None:
        layout, given = origin.layout, (*given, *origin.starts)
        if not layout.tile_fits(*sizes[2:]):
            raise bad_argument(
                "block_size",
                f"{sizes[2:]}",
                f"one that divides the runs of the origin, {layout.query_run} queries and {layout.key_run} keys",
                "Use smaller blocks.",
            )
        heads = (max(heads[0], layout.rows), heads[1])
    mask = BlockedMask(traced.program, heads, sizes, layout)
    rows = mask.counts[0]
    if any(isinstance(a, Tracer) for a in given):
        lists = traced_lists(mask, given, bool(exact), work)
        return parts_of(lists, tuple(traced.arrays), traced.program, sizes[:2], sizes[2:], (rows, rows), origin=origin)
    with jax.ensure_compile_time_eval():
        split = any(explicit_names(jax.typeof(a).sharding.mesh) for a in given)
        known = [jnp.asarray(np.asarray(a)) for a in given] if split else given
    with eager_without_mesh():
        pairs = classify_on_host(mask, known, exact)
    return parts_of_places(pairs, traced, heads, sizes, origin)


def parts_of_places(
    pairs: tuple[np.ndarray, np.ndarray],
    traced: TracedMod,
    heads: tuple[int, int],
    sizes: tuple[int, int, int, int],
    origin: OriginTable | None = None,
) -> Parts:
    """The block mask whose (partial, full) blocks are at these coordinates [n, 4]; the rest is as in `from_traced`."""
    rows, columns = cdiv(sizes[0], sizes[2]), cdiv(sizes[1], sizes[3])
    grid = ((*heads, rows), (*heads, columns))
    widths = [transpose.longest_row(places, grid[0]) for places in pairs]
    q_widths = [transpose.longest_row(transpose.transposed_places(places), grid[1]) for places in pairs]
    if traced.arrays or (
        origin and origin.starts
    ):  # rounded up, because another call with other values of the arrays should have the same shapes
        widths, q_widths = transpose.rounded(widths, columns), transpose.rounded(q_widths, rows)
    lists = [x for p, w in zip(pairs, widths, strict=True) for x in transpose.lists_of_places(p, grid[0], w)]
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):  # the lists are constants of the program
        arrays = tuple(map(as_array, lists))
    return parts_of(
        arrays, traced.arrays, traced.program, sizes[:2], sizes[2:], (q_widths[0], q_widths[1]), origin=origin,
        on_host=tuple(lists),
    )  # fmt: skip


# ------------------------------------------------------------------- from lists


def from_lists(
    lists: tuple[Array, Array, Array | None, Array | None],
    block_size: int | tuple[int, int],
    mask_mod: Callable | None,
    q_len: int | None,
    kv_len: int | None,
) -> Parts:
    """What BlockMask.from_kv_blocks returns, as Parts, after a check of all arguments."""
    num, index, full_num, full_index = lists
    if (full_num is None) != (full_index is None):
        raise bad_argument(
            "full_kv_indices" if full_index is None else "full_kv_num_blocks",
            "None",
            "both of full_kv_num_blocks and full_kv_indices, or neither",
            "Pass the other one too.",
        )
    num, index = _checked_pair("kv", num, index)
    if full_num is None or full_index is None:
        full_num, full_index = jnp.zeros_like(num), jnp.zeros((*num.shape, 0), jnp.int32)
    full_num, full_index = _checked_pair("full_kv", full_num, full_index)
    if full_num.shape != num.shape:
        raise bad_argument(
            "full_kv_num_blocks",
            f"of shape {full_num.shape}",
            f"{num.shape}, that of kv_num_blocks",
            "Make them agree.",
        )
    block_q, block_kv = block_sizes(block_size)
    given = (q_len, kv_len)
    q_len = num.shape[2] * block_q if q_len is None else length_of("q_len", q_len)
    if cdiv(q_len, block_q) != num.shape[2]:
        raise bad_argument(
            "q_len",
            str(q_len),
            f"a length of {num.shape[2]} blocks of {block_q} queries, the third dim of kv_num_blocks",
            "Pass the number of queries that the lists were made for.",
        )
    kv_len = _kv_len(lists, block_kv) if kv_len is None else length_of("kv_len", kv_len)
    columns = cdiv(kv_len, block_kv)
    if any(isinstance(x, Tracer) for x in (num, index, full_num, full_index)):
        num, index = in_range(num, index, columns)
        full_num, full_index = in_range(full_num, full_index, columns)
    else:
        _check_columns((num, index, full_num, full_index), columns)
        index, full_index = _ascending(num, index), _ascending(full_num, full_index)
    traced = TracedMod(None, ())  # type: ignore[arg-type]
    if mask_mod is not None:
        # a list of one entry may serve any number of them
        several = tuple(n if n > 1 else None for n in num.shape[:2])
        reach = exactly(several[0], several[1], *given)
        check_sizes("mask_mod", mask_mod, reach)
        counts = tuple(n or BROADCAST for n in several)
        traced = trace_mask_mod(mask_mod, (counts[0], counts[1], q_len, kv_len), reach)
    arrays = (num, index, full_num, full_index)
    widths = transpose.q_widths(arrays, columns)
    on_host = None if any(isinstance(x, Tracer) for x in arrays) else tuple(np.asarray(x) for x in arrays)
    return parts_of(
        arrays, traced.arrays, traced.program, (q_len, kv_len), (block_q, block_kv), widths, from_user_lists=True,
        on_host=on_host,
    )  # fmt: skip


def _checked_pair(name: str, num: Array, index: Array) -> tuple[Array, Array]:
    """A pair of lists as int32 arrays, after a check of shapes and dtypes; `name` is "kv" or "full_kv"."""
    counts, blocks = (x if isinstance(x, Array) else np.asarray(x) for x in (num, index))
    for suffix, array, rank in (("num_blocks", counts, 3), ("indices", blocks, 4)):
        if array.ndim != rank or not jnp.issubdtype(array.dtype, jnp.integer):
            raise bad_argument(
                f"{name}_{suffix}",
                f"{array.dtype.name}{list(array.shape)}",
                "int32 [B, H, q_blocks]" if rank == 3 else "int32 [B, H, q_blocks, width]",
                "Pass the lists as documented.",
            )
    if blocks.shape[:3] != counts.shape:
        raise bad_argument(
            f"{name}_indices",
            f"of shape {blocks.shape}",
            f"({', '.join(map(str, counts.shape))}, width)",
            "Make them agree.",
        )
    return _as_int32(counts), _as_int32(blocks)


def _as_int32(array: Array | np.ndarray) -> Array:
    """The integers as int32, clipped to its ends, so that later checks still find them out of range."""
    ends = jnp.iinfo(jnp.int32)
    if jnp.iinfo(array.dtype).max > ends.max:
        array = array.clip(max(ends.min, jnp.iinfo(array.dtype).min), ends.max)
    return jnp.asarray(array.astype(jnp.int32))


def in_range(num: Array, index: Array, columns: int) -> tuple[Array, Array]:
    """A pair of lists, sorted, without numbers outside of 0 .. columns - 1; 0 past the counts."""
    live = jnp.arange(index.shape[-1], dtype=jnp.int32) < num[..., None]
    live &= (index >= 0) & (index < columns)
    index = jnp.sort(jnp.where(live, index, columns), axis=-1)
    return jnp.sum(live, -1, dtype=jnp.int32), jnp.where(index < columns, index, 0)


def _ascending(num: Array, index: Array) -> Array:
    """The numbers of a pair of checked, concrete lists, ascending in each row; those past the count stay behind."""
    numbers, beyond = np.asarray(index), np.arange(index.shape[-1]) >= np.asarray(num)[..., None]
    keys = np.where(beyond, np.iinfo(np.int32).max, numbers)
    if (keys[..., 1:] >= keys[..., :-1]).all():
        return index
    with jax.ensure_compile_time_eval():  # known under jit, too
        return jnp.asarray(np.take_along_axis(numbers, np.argsort(keys, axis=-1, kind="stable"), axis=-1))


def _kv_len(lists: tuple[Array, Array, Array | None, Array | None], block_kv: int) -> int:
    """The assumed key length: (largest block number in the lists + 1) * block_kv; 0 if they name no block."""
    if any(isinstance(x, Tracer) for x in lists):
        raise bad_argument(
            "kv_len", "None", "the number of keys, since the lists are traced", "Pass kv_len=key.shape[1]."
        )
    largest = 0
    for num, index in (lists[:2], lists[2:]):
        if num is not None and index is not None:
            places = transpose.places_of_lists(np.asarray(num), np.asarray(index))
            largest = max(largest, int(places[:, 3].max()) + 1 if len(places) else 0)
    return largest * block_kv


def _check_columns(lists: tuple[Array, Array, Array, Array], columns: int) -> None:
    """Raises ValueError if concrete lists have a number out of range, or name a block twice in one row."""
    seen = []
    for name, num, index in (("kv", *lists[:2]), ("full_kv", *lists[2:])):
        num, index = np.asarray(num), np.asarray(index)
        if num.size and (num.min() < 0 or num.max() > index.shape[-1]):
            raise bad_argument(
                f"{name}_num_blocks",
                f"between {num.min()} and {num.max()}",
                f"counts of 0 to {index.shape[-1]}, the width of {name}_indices",
                "Widen the index array or lower the counts.",
            )
        places = transpose.places_of_lists(num, index)
        if len(places) and (places[:, 3].min() < 0 or places[:, 3].max() >= columns):
            raise bad_argument(
                f"{name}_indices",
                f"between {places[:, 3].min()} and {places[:, 3].max()}",
                f"block numbers of 0 to {columns - 1}",
                "Check kv_len and the block size.",
            )
        seen.append(places)
    both = np.concatenate(seen)
    if len(np.unique(both, axis=0)) != len(both):
        raise bad_argument(
            "kv_indices",
            "listing a block twice",
            "each block at most once in a row, in one of the two lists",
            "Remove it.",
        )


# ------------------------------------------------------------------- arguments


def block_sizes(block_size: object) -> tuple[int, int]:
    """(queries, keys) of a block from the argument block_size, one number or two."""
    pair = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(pair) != 2 or not all(isinstance(x, int | np.integer) and not isinstance(x, bool) and x > 0 for x in pair):
        raise bad_argument(
            "block_size", shown(block_size), "a positive int, or two: (queries, keys)", "128 suits every backend."
        )
    queries, keys = typing.cast(Sequence[int], pair)
    return int(queries), int(keys)


def length_of(name: str, value: object) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
        raise bad_argument(name, shown(value), "a length in tokens, an int of at least 0", "Pass a static int.")
    return int(value)


def _count(name: str, value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise bad_argument(
            name, shown(value), "a positive int, or None for one mask shared by all", "Pass a static int."
        )
    return int(value)
