"""block_mask[b, h, q_blocks]: selects part of a block mask, and shifts its mask_mod to the positions of the selection.

`picked` is everywhere the selection: three int arrays, the selected batch entries, heads and query blocks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.block_mask import transpose
from flexjax.block_mask.parts import BROADCAST, Parts, parts_of
from flexjax.errors import bad_argument
from flexjax.trace.trace_mod import TracedMod, trace_mask_mod

Array = jax.Array


def take(mask: Parts, index: object, mask_mod: Callable) -> Parts:
    """The part of a block mask that BlockMask.__getitem__ selects by `index`, as Parts without an origin.

    `mask_mod` decides the entries of partial blocks in the coordinates of `mask`; it adds the origin of `mask`.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [p for p in parts if p is Ellipsis]:
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts = (*parts[:at], *(slice(None),) * (4 - len(parts)), *parts[at + 1 :])
    if len(parts) > 3:
        raise bad_argument(
            "index", f"{len(parts)} indices", "at most 3: batch, head, query block", "Keys are not sliced."
        )
    sizes = (*mask.list_dims[:2], mask.blocks[0])
    parts = (*parts, *(slice(None),) * (3 - len(parts)))
    picked = [_numbers(p, n, name) for p, n, name in zip(parts, sizes, ("batch", "head", "query block"), strict=True)]
    cut = lambda x: x[jnp.ix_(*(jnp.asarray(p) for p in picked))] if x.ndim == 3 else _cut4(x, picked)
    if mask.in_bits:
        lists = [x for bits in mask.bits or () for x in transpose.lists_of_bits(_cut4(bits, picked), mask.blocks[1])]
    else:
        lists = [cut(x) for x in mask.lists]
    lists = transpose.narrowed(lists)
    q_len = _queries(mask, picked[2])
    traced = _shifted(mask, picked, q_len, mask_mod)
    lengths, widths = (q_len, mask.kv_len), transpose.q_widths(lists, mask.blocks[1])
    return parts_of(
        lists, traced.arrays, traced.program, lengths, mask.block_size, widths, mask.lists_decide,
        ascending=mask.as_made,
    )  # fmt: skip


def _cut4(x: Array, picked: list[np.ndarray]) -> Array:
    """The lists of the selection, from an index array x [B, H, q_blocks, width]."""
    return x[np.ix_(*picked)]


def _numbers(part: object, size: int, name: str) -> np.ndarray:
    """The positions along one axis that an int, a slice or a 1-D int array selects."""
    if isinstance(part, slice):
        return np.arange(size)[part]
    if isinstance(part, Tracer):
        raise bad_argument(
            "index",
            f"a traced {name} number",
            "numbers known while tracing, since they decide the shape of the lists",
            "For a query position that moves, capture it in the mask_mod (causal_offset does) and make a mask of one "
            "row.",
        )
    numbers = np.atleast_1d(np.asarray(part))
    if not np.issubdtype(numbers.dtype, np.integer) or numbers.ndim != 1:
        raise bad_argument(
            "index", repr(part), f"an int, a slice or a 1-D array of {name} numbers", "Select with those."
        )
    if numbers.size and (numbers.min() < -size or numbers.max() >= size):
        raise bad_argument("index", repr(part), f"{name} numbers of {-size} to {size - 1}", "Select what is there.")
    return numbers % size


def _queries(mask: Parts, blocks: np.ndarray) -> int:
    """How many queries the query blocks have together; ValueError if an incomplete last block comes before another."""
    size, last = mask.block_size[0], mask.blocks[0] - 1
    if len(blocks) and last in blocks[:-1] and mask.q_len % size:
        raise bad_argument(
            "index", "query blocks with the incomplete last block before others", "that block last", "Reorder them."
        )
    short = len(blocks) > 0 and blocks[-1] == last
    return len(blocks) * size - ((last + 1) * size - mask.q_len if short else 0)


def _shifted(mask: Parts, picked: list[np.ndarray], q_len: int, inner: Callable) -> TracedMod:
    """The mask traced in the coordinates of the selection; `inner` decides entries in those of `mask`."""
    # one selected batch entry (head) may serve any number in a call
    if mask.program is None:
        return TracedMod(None, ())  # type: ignore[arg-type]
    batch, heads, blocks = (jnp.asarray(p, jnp.int32) for p in picked)
    size = mask.block_size[0]
    in_order = len(picked[2]) == 0 or np.array_equal(picked[2], picked[2][0] + np.arange(len(picked[2])))
    offset = jnp.asarray(int(picked[2][0]) * size if len(picked[2]) else 0, jnp.int32)
    reads = [mask.program.reads(axis) for axis in ("b", "h")]

    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        query = q_idx + offset if in_order else blocks[q_idx // size] * size + q_idx % size
        return inner(batch[b] if reads[0] else b, heads[h] if reads[1] else h, query, kv_idx)

    # a list of one entry may serve any number of them
    counts = tuple(len(p) if len(p) > 1 else BROADCAST for p in picked[:2])
    return trace_mask_mod(mask_mod, (counts[0], counts[1], q_len, mask.kv_len))
