"""BlockMask: which blocks of the attention matrix a kernel visits, and which of them it must mask.

A pytree: its arrays may be traced, mapped over and passed through jit; the mask program (without its arrays), lengths and
block size are static. Nothing in it has the size of the attention matrix.
"""

import dataclasses
import html
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.block_mask import build, picture, transpose
from flexjax.block_mask.parts import ARRAY_FIELDS, STATIC_FIELDS, Parts
from flexjax.block_mask.slice import take
from flexjax.errors import bad_argument
from flexjax.ir.evaluate_scalars import as_mask_mod

Array = jax.Array


class BlockMask(Parts):
    """Block lists of a mask over [B, H, q_len, kv_len]; the fields are those of Parts.

    `create_block_mask` and `BlockMask.from_kv_blocks` make one.
    """

    @classmethod
    def of(cls, parts: Parts) -> "BlockMask":
        return cls(**{f.name: getattr(parts, f.name) for f in dataclasses.fields(parts)})

    # ------------------------------------------------------------------ shape and meaning

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, q_len, kv_len), of each one where this is a stack of block masks, as vmap makes them."""
        batch, heads = self.kv_num_blocks.shape[-3:-1]
        return (batch, heads, self.q_len, self.kv_len)

    @property
    def mask_mod(self) -> Callable[[Array, Array, Array, Array], Array]:
        """The mask as a function (b, h, q_idx, kv_idx) -> bool, in the coordinates of this block mask.

        Of a mask made from lists it looks them up, so that it says of each entry whether it is on.
        """
        inside = self._inside_blocks
        if not self.listed:
            return inside
        self._refuse_stack()
        partial, full = self._flags()

        def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
            batch, heads = (at if n > 1 else 0 for at, n in zip((b, h), partial.shape[:2], strict=True))
            block = (batch, heads, q_idx // self.block_size[0], kv_idx // self.block_size[1])
            return full[block] | (partial[block] & inside(b, h, q_idx, kv_idx))

        return mask_mod

    @property
    def _inside_blocks(self) -> Callable[[Array, Array, Array, Array], Array]:
        """What is on in the blocks of the first pair of lists, as a function (b, h, q_idx, kv_idx) -> bool."""
        if self.program is None:
            return lambda b, h, q_idx, kv_idx: jnp.asarray(True)
        return as_mask_mod(self.program, self.captures)

    def _flags(self) -> tuple[Array, Array]:
        """bool [B, H, q_blocks, kv_blocks] each: the blocks of the first pair of lists, and of the second."""
        columns = self.blocks[1]
        partial = transpose.flags_of_lists(self.kv_num_blocks, self.kv_indices, columns)
        return partial, transpose.flags_of_lists(self.full_kv_num_blocks, self.full_kv_indices, columns)

    @property
    def q_num_blocks(self) -> Array:
        """int32 [B, H, kv_blocks]: how many query blocks list a key block as partly on. Computed at each access, as are the next."""
        return self._transposed(0)[0]

    @property
    def q_indices(self) -> Array:
        """int32 [B, H, kv_blocks, width]: which query blocks, ascending; entries past the count mean nothing."""
        return self._transposed(0)[1]

    @property
    def full_q_num_blocks(self) -> Array:
        """int32 [B, H, kv_blocks]: how many query blocks list a key block as on everywhere."""
        return self._transposed(1)[0]

    @property
    def full_q_indices(self) -> Array:
        """int32 [B, H, kv_blocks, width]: which query blocks, ascending."""
        return self._transposed(1)[1]

    def _transposed(self, pair: int) -> tuple[Array, Array]:
        lists = (self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices)[2 * pair :][:2]
        return transpose.transposed(*lists, columns=self.blocks[1], width=self.q_widths[pair])

    def _refuse_stack(self) -> None:
        stack = self.kv_num_blocks.shape[:-3]
        if stack:
            raise bad_argument(
                "block_mask",
                f"a stack of {stack} block masks",
                "one block mask",
                "Map over the stack with vmap or scan, or take one of it: jax.tree.map(lambda x: x[0], block_mask).",
            )

    def to_dense(self) -> Array:
        """int32 [B, H, q_blocks, kv_blocks]: 1 where a block is visited."""
        self._refuse_stack()
        partial, full = self._flags()
        return (partial | full).astype(jnp.int32)

    def to_mask(self) -> Array:
        """bool [B, H, q_len, kv_len]: the mask entry by entry, as kernels apply it. As large as it sounds: for tests."""
        self._refuse_stack()
        b, h, q_len, kv_len = self.shape
        q, kv = (jnp.arange(n, dtype=jnp.int32) for n in (q_len, kv_len))
        entries = self._inside_blocks
        for axis in (3, 2, 1, 0):
            entries = jax.vmap(entries, in_axes=tuple(0 if i == axis else None for i in range(4)))
        on = entries(jnp.arange(b, dtype=jnp.int32), jnp.arange(h, dtype=jnp.int32), q, kv)
        spread = lambda flags: flags[:, :, q // self.block_size[0]][:, :, :, kv // self.block_size[1]]
        partial, full = self._flags()
        return (spread(partial) & on) | spread(full)

    def sparsity(self) -> float:
        """Percentage of blocks that are skipped, 0 to 100. Needs concrete arrays."""
        if isinstance(self.kv_num_blocks, Tracer):
            raise bad_argument("block_mask", "traced", "concrete lists", "Count its blocks outside jit.")
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

        Raises ValueError for shapes, dtypes, block numbers, counts or lengths that do not fit. Traced numbers cannot be checked:
        a block number that is negative or past the last block is dropped, and a count is limited to 0..width.
        """
        lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        return cls.of(build.from_lists(lists, block_size, mask_mod, q_len, kv_len))

    def __getitem__(self, index: object) -> "BlockMask":
        """Selects batch entries, heads and query blocks: `mask[b, h, q_blocks]`, ints, slices or 1-D int arrays.

        An int keeps its axis with size 1. The mask_mod of the result is shifted, so that its query 0 is the first query
        selected: what decoding and chunked prefill need. Query blocks selected out of order keep their own positions.
        """
        self._refuse_stack()
        return BlockMask.of(take(self, index, self._inside_blocks))

    # ------------------------------------------------------------------ pictures

    def to_string(self, width: int = 64) -> str:
        """A picture of each (b, h): `█` full, `░` partial, ` ` empty; several blocks share a character past `width`."""
        self._refuse_stack()
        return picture.text(self, repr(self), width)

    def plot(self, batch: int = 0, head: int = 0, axes: object = None) -> object:
        """Draws one (batch, head) with matplotlib (the `plot` extra); returns its Axes."""
        self._refuse_stack()
        return picture.plot(self, repr(self), batch, head, axes)

    def _repr_html_(self) -> str:
        if self.kv_num_blocks.ndim != 3:
            return f"<pre>{html.escape(repr(self))}</pre>"
        return picture.html(self, repr(self))

    def __repr__(self) -> str:
        b, h, q, kv = self.shape
        stack = self.kv_num_blocks.shape[:-3]
        head = (
            f"BlockMask({f'stack={stack}, ' if stack else ''}shape=({b}, {h}, {q}, {kv}), block_size={self.block_size}"
        )
        if isinstance(self.kv_num_blocks, Tracer) or not hasattr(self.kv_num_blocks, "__array__"):
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


jax.tree_util.register_pytree_with_keys(BlockMask, _flatten_with_keys, _unflatten, _flatten)  # pyright: ignore[reportArgumentType] jax types the leaves as iterables


def create_block_mask(
    mask_mod: Callable,
    batch: int | None,
    heads: int | None,
    q_len: int,
    kv_len: int,
    *,
    block_size: int | tuple[int, int] = 128,
    exact: bool | None = None,
) -> BlockMask:
    """The blocks that `mask_mod(b, h, q_idx, kv_idx) -> bool` leaves to visit.

    batch, heads   None: the mask does not depend on it and is shared by all
    q_len, kv_len  lengths in tokens, any (blocks may hang over the end)
    block_size     tokens of a block, one number or (queries, keys)
    exact          the analysis is sound but may call a full or empty block partial, which costs time and never correctness.
                   True: evaluate such blocks entry by entry. None: do so where the captured arrays are known and the work is
                   small. False: never.

    Costs O(blocks) time and never makes a q_len x kv_len array. Works inside jit, and on captured arrays that are traced.
    Raises ValueError for a mask_mod that cannot be compiled, or that reads `b` or `h` when that is None.
    """
    return BlockMask.of(build.from_mask_mod(mask_mod, (batch, heads, q_len, kv_len), block_size, exact))
