"""Makes block masks of choices: the key blocks that each query, or each group of neighbouring queries, chose.

Choices are kept as bits: those of 65536 queries and 4 heads among 1024 blocks take 33 MB. The mask program reads one
bit, whose index `kv // block` is the same for all keys of a block, so that kernels read a word for each query of a tile
and not for each entry (`patterns.run_lengths`). The lists are unions: a row of query blocks visits what one of its
queries chose. The program alone is exact, and the lists are classes of its blocks, as those of any mask function.
"""

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from flexjax import partition
from flexjax.block_mask import transpose
from flexjax.block_mask.build import block_sizes, from_traced, length_of, parts_of_places
from flexjax.block_mask.parts import BROADCAST, Parts, parts_of
from flexjax.block_mask.transpose import WORD
from flexjax.errors import bad_argument
from flexjax.integers import cdiv
from flexjax.ir.evaluate_scalars import as_mask_mod
from flexjax.mod_tools.made_for import check_sizes, exactly
from flexjax.mod_tools.signatures import MASK_ARGUMENTS
from flexjax.trace.trace_mod import TracedMod, check_callable, trace_mask_mod
from flexjax.types import MaskMod

Array = jax.Array

QUERIES = 128
"""Queries of a block of the lists where the caller does not say, as many as a tile of the kernels has."""
LEAST_KEYS = 64
"""Keys of a block of the lists at least: kernels visit no smaller ones, and would take blocks of 128 in their place."""


def from_chosen(
    chosen: Array,
    block_size: int | tuple[int, int],
    q_len: int | None,
    kv_len: int | None,
    mask_mod: Callable | None,
    heads: int | None,
) -> Parts:
    """What BlockMask.from_chosen_blocks returns, as Parts, after a check of all arguments."""
    chosen = chosen if isinstance(chosen, Array) else np.asarray(chosen)  # pyright: ignore[reportAssignmentType]
    if chosen.ndim != 4 or not jnp.issubdtype(chosen.dtype, jnp.integer):
        raise bad_argument(
            "chosen", f"{chosen.dtype.name}{list(chosen.shape)}", "int32 [B, H, T, n], key blocks of each query",
            "Pass -1 where a query chose fewer.",
        )  # fmt: skip
    batch, own_heads, groups, _ = chosen.shape
    block_q, block_kv = block_sizes(block_size)
    block_q = block_q if isinstance(block_size, tuple | list) else QUERIES
    q_len = groups if q_len is None else length_of("q_len", q_len)
    kv_len = q_len if kv_len is None else length_of("kv_len", kv_len)
    if q_len != groups and (groups == 0 or q_len % groups):
        raise bad_argument(
            "q_len", str(q_len), f"a multiple of {groups}, the third dim of chosen",
            "A choice is that of as many neighbouring queries as the quotient says.",
        )  # fmt: skip
    heads = own_heads if heads is None else length_of("heads", heads)
    if own_heads == 0 or heads == 0 or heads % own_heads:
        raise bad_argument(
            "heads", str(heads), f"a multiple of {own_heads}, the second dim of chosen",
            "Pass the query heads of the call, of which neighbouring ones share a choice.",
        )  # fmt: skip
    dims, columns = (batch, heads), cdiv(kv_len, block_kv)
    ends = () if isinstance(chosen, Tracer) or not chosen.size else (np.asarray(chosen).min(), np.asarray(chosen).max())
    if ends and (ends[0] < -1 or ends[1] >= columns):
        raise bad_argument(
            "chosen", f"between {ends[0]} and {ends[1]}", f"-1 or block numbers of 0 to {columns - 1}",
            "Check kv_len and the block size.",
        )  # fmt: skip
    merged = cdiv(LEAST_KEYS, block_kv)
    sizes = (q_len, kv_len, block_q, block_kv * merged)
    inside = None if mask_mod is None else _inside(mask_mod, dims, sizes[:2])
    bits: tuple[Array, ...] = ()
    if inside is not None:
        reads = (n if inside.program.reads(axis) else 1 for n, axis in zip(dims, "bh", strict=True))
        with _known(*inside.arrays):
            some, every = from_traced(inside, (next(reads), next(reads)), sizes, exact=False).flags()
            bits = transpose.bits_of(some | every), transpose.bits_of(every)
    known = not any(isinstance(x, Tracer) for x in (chosen, *bits))
    rows, tiles = cdiv(q_len, block_q), cdiv(kv_len, sizes[3])
    as_bits = known or batch * heads * rows * tiles > transpose.LARGE
    with _known(chosen, *bits):
        how = (q_len, block_q, columns, merged, heads // own_heads, as_bits)
        words, *lists = _on_devices(functools.partial(_listed, how), jnp.asarray(chosen), bits)
        pairs = [np.argwhere(transpose.flags_of_bits(x, tiles)).astype(np.int32) for x in lists] if known else []
    traced = _traced(words, inside, dims, sizes[:2], block_kv)
    if known:
        return parts_of_places((pairs[0], pairs[1]), traced, dims, sizes)
    return parts_of(lists, traced.arrays, traced.program, sizes[:2], sizes[2:], (rows, rows))


def _known(*arrays: object) -> contextlib.AbstractContextManager[None]:
    """A context in which what is made of these arrays is known under jit, too, if they are."""
    return contextlib.nullcontext() if any(isinstance(x, Tracer) for x in arrays) else jax.ensure_compile_time_eval()


def _on_devices(function: Callable[..., list[Array]], chosen: Array, bits: tuple[Array, ...]) -> list[Array]:
    """`function(chosen, *bits)`; over explicit mesh axes each device computes its batch entries and heads."""
    sharding = jax.typeof(chosen).sharding
    explicit = partition.explicit_names(sharding.mesh)
    if not explicit:
        return function(chosen, *bits)
    names = tuple(sharding.spec[:2])
    specs = [PartitionSpec(*(name if n > 1 else None for name, n in zip(names, x.shape, strict=False))) for x in bits]
    specs = [PartitionSpec(*names), *specs]
    mesh = sharding.mesh if jax.sharding.get_abstract_mesh().empty else None
    share = jax.shard_map(
        function, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec(*names), axis_names=set(explicit)
    )
    given = zip((chosen, *bits), specs, strict=True)
    return share(*(jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec)) for x, spec in given))


@functools.partial(jax.jit, static_argnums=0)  # eagerly the comparisons of `_bits` would be stored
def _listed(how: tuple[int, int, int, int, int, bool], chosen: Array, *bits: Array) -> list[Array]:
    """The words of choices, and the bits or the four arrays of the lists; `bits` are those of what a mask_mod shows.

    how   (q_len, queries of a block, key blocks, key blocks in one of the lists, heads of a choice, lists as bits)
    """
    q_len, block_q, columns, merged, share, as_bits = how
    words, union, shared = _bits(chosen, q_len, columns, block_q)
    if merged > 1:
        union, shared = _merged(union, columns, merged, jnp.any), _merged(shared, columns, merged, jnp.all)
    union, shared = (jnp.repeat(x, share, axis=1) for x in (union, shared))
    if bits:
        union, shared = union & bits[0], shared & bits[1]
    pair = (union & ~shared, shared)
    if as_bits:
        return [words, *pair]
    return [words, *(x for one in pair for x in transpose.lists_of_bits(one, cdiv(columns, merged)))]


def _bits(chosen: Array, q_len: int, columns: int, block_q: int) -> tuple[Array, Array, Array]:
    """(words, union, shared) of choices [B, H, T, n].

    words           int32 [B, H, T, words]: bit k of word w is key block 32 w + k
    union, shared   uint32 [B, H, q_blocks, words]: the blocks that one query of a query block chose, that all chose
    """
    chosen = chosen if chosen.dtype.itemsize >= 4 else chosen.astype(jnp.int32)  # which may hold no number of blocks
    place = jnp.where((chosen >= 0) & (chosen < columns), chosen, -1).astype(jnp.int32)[..., None, :]
    here = place // WORD == jnp.arange(max(1, cdiv(columns, WORD)), dtype=jnp.int32)[:, None]
    bit = jnp.where(here, jnp.uint32(1) << (place % WORD).astype(jnp.uint32), jnp.uint32(0))
    words = _joined(jnp.bitwise_or, bit, 4, 0)
    rows = jnp.repeat(words, q_len // max(1, words.shape[2]), axis=2)
    count = cdiv(q_len, block_q)  # -1 in a reshape is no size where another is 0
    past = count * block_q - q_len

    def of_blocks(join: Callable[[Array, Array], Array], unit: int) -> Array:
        padded = jnp.pad(rows, ((0, 0), (0, 0), (0, past), (0, 0)), constant_values=jnp.uint32(unit))
        return _joined(join, padded.reshape(*rows.shape[:2], count, block_q, rows.shape[-1]), 3, unit)

    union, shared = of_blocks(jnp.bitwise_or, 0), of_blocks(jnp.bitwise_and, 0xFFFFFFFF)
    return jax.lax.bitcast_convert_type(words, jnp.int32), union, shared


def _joined(join: Callable[[Array, Array], Array], x: Array, axis: int, unit: int) -> Array:
    """The elements along an axis of bits joined, by halves: XLA has no reduction by bits over devices."""
    if x.shape[axis] == 0:
        return jnp.full(np.delete(x.shape, axis), unit, x.dtype)
    while (n := x.shape[axis]) > 1:
        half = n // 2
        first, second = (jax.lax.slice_in_dim(x, at, at + half, axis=axis) for at in (0, half))
        rest = jax.lax.slice_in_dim(x, 2 * half, n, axis=axis)
        x = jnp.concatenate([join(first, second), rest], axis) if n % 2 else join(first, second)
    return jnp.squeeze(x, axis)


def _merged(bits: Array, columns: int, merged: int, join: Callable[..., Array]) -> Array:
    """The bits of blocks of `merged` neighbouring blocks, by `join` of theirs; those past the end count as 0."""
    flags = transpose.flags_of_bits(bits, columns)
    padded = jnp.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, -columns % merged)])
    return transpose.bits_of(join(padded.reshape(*bits.shape[:-1], cdiv(columns, merged), merged), -1))


def _inside(mask_mod: Callable, dims: tuple[int, int], lengths: tuple[int, int]) -> TracedMod:
    """`mask_mod`, traced. Raises ValueError where it reads an axis along which there is one choice for all."""
    check_callable("mask_mod", mask_mod, MASK_ARGUMENTS)
    several = tuple(n if n > 1 else None for n in dims)
    reach = exactly(several[0], several[1], *lengths)
    check_sizes("mask_mod", mask_mod, reach)
    counts = tuple(n if n > 1 else BROADCAST for n in dims)
    traced = trace_mask_mod(mask_mod, (counts[0], counts[1], *lengths), reach)
    for axis, count, dim, advice in (
        ("b", dims[0], "first", "Broadcast chosen to the batch of the call."),
        ("h", dims[1], "second", "Pass heads=, the query heads of the call."),
    ):
        if count == 1 and traced.program.reads(axis):
            raise bad_argument(
                "mask_mod", f"a function that depends on `{axis}`",
                f"one that does not, because the {dim} dim of chosen is 1, one choice for all", advice,
            )  # fmt: skip
    return traced


def _traced(
    words: Array, inside: TracedMod | None, dims: tuple[int, int], lengths: tuple[int, int], block: int
) -> TracedMod:
    """The mask of all: whether the word of the query has the bit of the key's block, and `inside` shows the entry."""
    batch, heads, groups = words.shape[:3]
    if words.size == 0:  # a call without tokens reads nothing, and jax indexes no axis of size 0
        words = jnp.zeros([max(1, n) for n in words.shape], words.dtype)
    each, share = lengths[0] // max(1, groups), dims[1] // heads
    mask_mod: MaskMod | None = None if inside is None else as_mask_mod(inside.program, inside.arrays)

    def chosen(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        at = (b if batch > 1 else 0, h // share if heads > 1 else 0, q_idx // each, kv_idx // (block * WORD))
        on = (words[at] >> (kv_idx // block) % WORD) & 1 != 0
        return on if mask_mod is None else on & mask_mod(b, h, q_idx, kv_idx)

    counts = tuple(n if n > 1 else BROADCAST for n in dims)
    return trace_mask_mod(chosen, (counts[0], counts[1], *lengths))
