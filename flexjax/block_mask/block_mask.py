"""BlockMask: which blocks of the attention matrix a kernel visits, and which of them it must mask.

A pytree: its arrays may be traced, mapped over and passed through jit; the mask program (without its arrays), lengths and
block size are static. Nothing in it has the size of the attention matrix.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.block_mask import transpose
from flexjax.trace.mod_ir import Program
from flexjax.trace.on_scalars import as_mask_mod

Array = jax.Array

ARRAY_FIELDS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
    "captures",
)
STATIC_FIELDS = ("program", "q_len", "kv_len", "block_size")


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """Block lists of a mask over [B, H, q_len, kv_len]; B and H are 1 where the mask does not depend on them.

    kv_num_blocks        int32 [B, H, q_blocks]         how many key blocks of a query block are partly on
    kv_indices           int32 [B, H, q_blocks, width]  which, ascending; entries past the count mean nothing
    full_kv_num_blocks   int32 [B, H, q_blocks]         how many are on everywhere: the mask is not evaluated there
    full_kv_indices      int32 [B, H, q_blocks, width]  which
    q_num_blocks ..      the same lists by key block, for the backward pass: [B, H, kv_blocks], [B, H, kv_blocks, width]
    captures             arrays that the mask program reads
    program              the traced mask_mod, None if every entry of a listed block is on
    q_len, kv_len        lengths in tokens; the last block may hang over
    block_size           (queries, keys) of a block

    Blocks in neither list are off. `create_block_mask` and `from_kv_blocks` make one.
    """

    kv_num_blocks: Array
    kv_indices: Array
    full_kv_num_blocks: Array
    full_kv_indices: Array
    q_num_blocks: Array
    q_indices: Array
    full_q_num_blocks: Array
    full_q_indices: Array
    captures: tuple[Array, ...]
    program: Program | None
    q_len: int
    kv_len: int
    block_size: tuple[int, int]

    # ------------------------------------------------------------------ shape and meaning

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, q_len, kv_len)."""
        return (*self.kv_num_blocks.shape[-3:-1], self.q_len, self.kv_len)

    @property
    def blocks(self) -> tuple[int, int]:
        """(query blocks, key blocks)."""
        return (-(-self.q_len // self.block_size[0]), -(-self.kv_len // self.block_size[1]))

    @property
    def mask_mod(self) -> Callable[[Array, Array, Array, Array], Array]:
        """The mask as a function (b, h, q_idx, kv_idx) -> bool, in the coordinates of this block mask."""
        if self.program is None:
            return lambda b, h, q_idx, kv_idx: jnp.asarray(True)
        return as_mask_mod(self.program, self.captures)

    def to_dense(self) -> Array:
        """int32 [B, H, q_blocks, kv_blocks]: 1 where a block is visited."""
        columns = self.blocks[1]
        partial = transpose.flags_of_lists(self.kv_num_blocks, self.kv_indices, columns)
        full = transpose.flags_of_lists(self.full_kv_num_blocks, self.full_kv_indices, columns)
        return (partial | full).astype(jnp.int32)

    def to_mask(self) -> Array:
        """bool [B, H, q_len, kv_len]: the mask entry by entry, as kernels apply it. As large as it sounds: for tests."""
        b, h, q_len, kv_len = self.shape
        q, kv = (jnp.arange(n, dtype=jnp.int32) for n in (q_len, kv_len))
        entries = self.mask_mod
        for axis in (3, 2, 1, 0):
            entries = jax.vmap(entries, in_axes=tuple(0 if i == axis else None for i in range(4)))
        on = entries(jnp.arange(b, dtype=jnp.int32), jnp.arange(h, dtype=jnp.int32), q, kv)
        spread = lambda flags: flags[:, :, q // self.block_size[0]][:, :, :, kv // self.block_size[1]]
        columns = self.blocks[1]
        partial = transpose.flags_of_lists(self.kv_num_blocks, self.kv_indices, columns)
        full = transpose.flags_of_lists(self.full_kv_num_blocks, self.full_kv_indices, columns)
        return (spread(partial) & on) | spread(full)

    def sparsity(self) -> float:
        """Percentage of blocks that are skipped, 0 to 100. Needs concrete arrays."""
        total = self.kv_num_blocks.size * self.blocks[1]
        counts = (np.asarray(self.kv_num_blocks), np.asarray(self.full_kv_num_blocks))
        visited = sum(int(c.sum(dtype=np.int64)) for c in counts)
        return 100.0 * (1.0 - visited / total) if total else 0.0

    # ------------------------------------------------------------------ making others

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Array,
        kv_indices: Array,
        full_kv_num_blocks: Array | None = None,
        full_kv_indices: Array | None = None,
        *,
        block_size: int | tuple[int, int] = 128,
        mask_mod: Callable | None = None,
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> "BlockMask":
        """A block mask from lists that you made: int32 [B, H, q_blocks] and [B, H, q_blocks, width] (see the fields).

        The lists may be traced (data-dependent blocks of a static width) and need no order, but name no block twice.
        `mask_mod` applies within the blocks of the first pair; None means all their entries are on. Without lengths, q_len is
        q_blocks and kv_len (largest index + 1, which needs concrete lists) times the block size.

        Raises ValueError for shapes, dtypes, block numbers or lengths that do not fit.
        """
        from flexjax.block_mask.build import from_lists

        lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        return from_lists(lists, block_size, mask_mod, q_len, kv_len)

    def __getitem__(self, index: object) -> "BlockMask":
        """Selects batch entries, heads and query blocks: `mask[b, h, q_blocks]`, ints, slices or 1-D int arrays.

        An int keeps its axis with size 1. The mask_mod of the result is shifted, so that its query 0 is the first query
        selected: what decoding and chunked prefill need. Query blocks selected out of order keep their own positions.
        """
        from flexjax.block_mask.slice import take

        return take(self, index)

    # ------------------------------------------------------------------ pictures

    def to_string(self, width: int = 64) -> str:
        """A picture of each (b, h): `█` full, `░` partial, ` ` empty; several blocks share a character past `width`."""
        from flexjax.block_mask.picture import picture

        return picture(self, width)

    def plot(self, batch: int = 0, head: int = 0, axes: object = None) -> object:
        """Draws one (batch, head) with matplotlib (the `plot` extra); returns its Axes."""
        from flexjax.block_mask.picture import plot

        return plot(self, batch, head, axes)

    def _repr_html_(self) -> str:
        from flexjax.block_mask.picture import html

        return html(self)

    def __repr__(self) -> str:
        b, h, q, kv = self.shape
        head = f"BlockMask(shape=({b}, {h}, {q}, {kv}), block_size={self.block_size}"
        if isinstance(self.kv_num_blocks, jax.core.Tracer) or not hasattr(self.kv_num_blocks, "__array__"):
            return head + ", traced)"
        return head + f", sparsity={self.sparsity():.1f}%)"


def _flatten(mask: BlockMask) -> tuple[tuple, tuple]:
    return tuple(getattr(mask, f) for f in ARRAY_FIELDS), tuple(getattr(mask, f) for f in STATIC_FIELDS)


def _unflatten(static: tuple, arrays: tuple) -> BlockMask:
    # jax puts placeholders in the leaves while it rearranges trees, so nothing is checked here
    mask = object.__new__(BlockMask)
    for name, value in (*zip(ARRAY_FIELDS, arrays, strict=True), *zip(STATIC_FIELDS, static, strict=True)):
        object.__setattr__(mask, name, value)
    return mask


def _flatten_with_keys(mask: BlockMask) -> tuple[tuple, tuple]:
    keys = tuple((jax.tree_util.GetAttrKey(f), getattr(mask, f)) for f in ARRAY_FIELDS)
    return keys, _flatten(mask)[1]


jax.tree_util.register_pytree_with_keys(BlockMask, _flatten_with_keys, _unflatten, _flatten)
