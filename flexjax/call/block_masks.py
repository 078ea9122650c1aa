"""What a call makes of its block mask: layout, lists, the split by residues, and masks kept for the next call."""

import dataclasses
import hashlib
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.build import in_range
from flexjax.plan import kernel_plan
from flexjax.plan.kernel_plan import BlockLayout, BlockLists, Residues
from flexjax.plan.known_lists import MOST_BLOCKS, KnownLists
from flexjax.rewrites.residues import residues_of
from flexjax.trace.memo import Memo
from flexjax.trace.trace_mod import TracedMod

Array = jax.Array

_BLOCKS: Memo[BlockMask] = Memo(128)  # block masks that calls computed from mask_mod, without captured arrays
MOST_BYTES = 1 << 18
"""Bytes of the lists of a block mask that is kept in _BLOCKS, and of captured arrays whose numbers are its key."""


def remembered(make: Callable[[], BlockMask], traced: TracedMod, sizes: tuple[object, ...]) -> BlockMask:
    """`make()`, from the last call with the same program and sizes, and the same captured arrays or equal ones."""
    arrays = traced.arrays
    if any(isinstance(x, Tracer) or x.is_deleted() for x in arrays):
        return make()
    # the lists lie on the default device, which jax.extend.backend.clear_backends makes anew
    at = jax.config.jax_default_device or jax.local_devices()[0]  # type: ignore[attr-defined]
    settings = jax.config.jax_enable_x64, at  # type: ignore[attr-defined]
    key = traced.program, tuple(map(id, arrays)), sizes, settings
    if (kept := _BLOCKS.get(key, arrays)) is not None:
        return dataclasses.replace(kept, captures=arrays)
    numbers = _numbers(arrays)
    by_numbers = None if numbers is None else (traced.program, numbers, sizes, settings)
    if by_numbers is not None and (kept := _BLOCKS.get(by_numbers)) is not None:
        return dataclasses.replace(kept, captures=arrays)
    made = make()
    if made.on_host is None or sum(x.nbytes for x in made.on_host) > MOST_BYTES:
        return made
    kept = dataclasses.replace(made, captures=())
    _BLOCKS.put(key, kept, arrays)
    if by_numbers is not None:
        _BLOCKS.put(by_numbers, kept)
    return made


def _numbers(arrays: Sequence[Array]) -> tuple[object, ...] | None:
    """The types of captured arrays and a digest of their numbers, by which block masks of equal arrays are the same;
    None for none, for many numbers, and for arrays whose numbers this process or the host does not have.
    """
    if not arrays or sum(x.nbytes for x in arrays) > MOST_BYTES:
        return None
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) or not x.is_fully_addressable for x in arrays):
        return None
    text = hashlib.sha256()
    for x in arrays:  # classing blocks reads the numbers too
        text.update(np.asarray(x).tobytes())
    return (*map(jax.typeof, arrays), text.digest())


def layout_of(mask: BlockMask, thinned: bool) -> BlockLayout:
    batch, heads = mask.list_dims[:2]
    widths = (*mask.list_widths, *mask.transposed_widths)
    return BlockLayout(
        batch,
        heads,
        *mask.block_size,
        *widths,
        from_user_lists=mask.lists_decide,
        known=_known_lists(mask),
        thinned=thinned or mask.claim is not None,
    )


def residues_by_mask(mask: BlockMask | None, score: TracedMod | None) -> Residues | None:
    """How the call is split by residues of its tokens (rewrites/residues.py); None if it is not."""
    # the blocks of traced lists and of lists of the user are not counted
    if mask is None or mask.program is None or mask.lists_decide or mask.on_host is None:
        return None
    num, _, full_num, _ = mask.on_host
    visited = (num.sum() + full_num.sum()) * math.prod(mask.block_size) / max(1, math.prod(num.shape[:2]))
    scores = () if score is None else score.programs
    return residues_of(mask.program, scores, (mask.q_len, mask.kv_len), float(visited))


def _known_lists(mask: BlockMask) -> KnownLists | None:
    """The lists of the block mask as numpy arrays; None if the host does not know them, or if they are many."""
    if mask.on_host is None or not mask.as_made:
        return None
    if mask.list_dims[:2] != (1, 1) or math.prod(mask.blocks) > MOST_BLOCKS:
        return None
    num, index, full_num, full_index = mask.on_host
    pairs = ((num, index), (full_num, full_index))
    arrays = tuple(x if pair[1].shape[-1] else None for pair in pairs for x in pair)
    follow = not mask.captures and mask.origin is None and not mask.from_user_lists and mask.claim is None
    return KnownLists(arrays, fixed=follow)


_sorted = jax.jit(in_range, static_argnums=2)  # one dispatch in an eager call


def lists_of(mask: BlockMask) -> BlockLists:
    """The block lists for the operands, by query block: partial, then full blocks; None for lists of width 0."""
    if mask.in_bits and mask.bits is not None:
        return typing.cast(BlockLists, kernel_plan.BlockBits(*map(jnp.asarray, mask.bits)))
    num, index, full_num, full_index = mask.lists
    pairs = ((num, index), (full_num, full_index))
    # lists whose fields a user set are in the user's order, and may have numbers that name no block
    if not mask.as_made:
        pairs = tuple(_sorted(*pair, mask.blocks[1]) if pair[1].shape[-1] else pair for pair in pairs)
    return BlockLists(*(x if index.shape[-1] else None for num, index in pairs for x in (num, index)))
