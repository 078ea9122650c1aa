"""BlockMask: which blocks of the attention matrix a kernel visits, and in which of them it must apply the mask.

A BlockMask is a pytree. Its arrays may be traced, mapped over and passed through jit; the mask program (without its
arrays), the lengths and the block size are static. No array of it has the size of the attention matrix.
"""

import dataclasses
import html
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.block_mask import build, picture, transpose
from flexjax.block_mask.chosen import from_chosen as chosen_blocks
from flexjax.block_mask.kept import without_small_blocks
from flexjax.block_mask.parts import ARRAY_FIELDS, STATIC_FIELDS, Parts
from flexjax.block_mask.slice import take
from flexjax.errors import bad_argument, public
from flexjax.ir.evaluate_scalars import as_mask_mod
from flexjax.ir.origin import OriginTable, key_positions, query_positions
from flexjax.mod_tools.settings import own
from flexjax.types import ArrayArgument, MaskMod, Origin, ScoreMod

Array = jax.Array


class BlockMask(Parts):
    """The block lists of a mask over [B, H, q_len, kv_len], and what users do with them; the fields are those of Parts.

    A block is partial (the mask decides each entry), full (all entries are visible) or empty (in neither list, never
    visited). `create_block_mask` and `BlockMask.from_kv_blocks` make one. Where dataclasses.replace gives other lists,
    the lists decide, in any order; such a mask is another kind of pytree, so the branches of lax.cond and the carry of
    a loop need one kind. Lists exchanged as leaves of the pytree (jax.tree.map) count as made, and do not decide.
    """

    @classmethod
    def of(cls, parts: Parts) -> "BlockMask":
        return cls(**{f.name: vars(parts)[f.name] for f in dataclasses.fields(parts)})

    # ------------------------------------------------------------------ shape and meaning

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, q_len, kv_len), lengths in tokens; of one block mask if this is a stack of them, as vmap makes."""
        batch, heads = self.list_dims[-3:-1]
        return (batch, heads, self.q_len, self.kv_len)

    @property
    def mask_mod(self) -> Callable[[Array, Array, Array, Array], Array]:
        """The mask as a function (b, h, q_idx, kv_idx) -> bool scalar of numbers from 0 in the arrays of the call.

        For a mask made from lists, the lists decide first, and the mask_mod given with them (if any) decides the
        entries of partial blocks. A stack of such masks raises ValueError.
        """
        inside = self._within_partial_blocks
        if not self.lists_decide:
            return inside
        self._refuse_stack()
        partial, full = self.flags()

        @own
        def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
            batch, heads = (at if n > 1 else 0 for at, n in zip((b, h), partial.shape[:2], strict=True))
            block = (batch, heads, q_idx // self.block_size[0], kv_idx // self.block_size[1])
            return full[block] | (partial[block] & inside(b, h, q_idx, kv_idx))

        return mask_mod

    @property
    def _within_partial_blocks(self) -> Callable[[Array, Array, Array, Array], Array]:
        """The traced mask as a function (b, h, q_idx, kv_idx) -> bool scalar, which does not read the lists."""
        if self.program is None:
            return lambda b, h, q_idx, kv_idx: jnp.asarray(True)
        mask_mod = as_mask_mod(self.program, self.captures)
        origin = self.origin
        if origin is None or origin.layout is None:
            return mask_mod
        placed = (origin.layout, origin.starts)
        return lambda b, h, q_idx, kv_idx: mask_mod(
            b, h, query_positions(*placed, b, q_idx), key_positions(*placed, b, kv_idx)
        )

    @property
    @own
    def q_num_blocks(self) -> Array:
        """int32 [B, H, kv_blocks]: number of query blocks that list each key block as partial."""
        return self._transposed(0)[0]

    @property
    @own
    def q_indices(self) -> Array:
        """int32 [B, H, kv_blocks, width]: the query blocks that list each key block as partial, ascending."""
        return self._transposed(0)[1]

    @property
    @own
    def full_q_num_blocks(self) -> Array:
        """int32 [B, H, kv_blocks]: number of query blocks that list each key block as full."""
        return self._transposed(1)[0]

    @property
    @own
    def full_q_indices(self) -> Array:
        """int32 [B, H, kv_blocks, width]: the query blocks that list each key block as full, ascending."""
        return self._transposed(1)[1]

    def _transposed(self, pair: int) -> tuple[Array, Array]:
        """The transposed lists (counts, block numbers); pair: 0 partial, 1 full blocks."""
        lists = (self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices)[2 * pair :][:2]
        return transpose.transposed(*lists, columns=self.blocks[1], width=self.transposed_widths[pair])

    def _refuse_stack(self) -> None:
        stack = self.list_dims[:-3]
        if stack:
            raise bad_argument(
                "block_mask",
                f"a stack of {stack} block masks",
                "one block mask",
                "Map over the stack with vmap or scan, or take one of it: jax.tree.map(lambda x: x[0], block_mask).",
            )

    @own
    def to_dense(self) -> Array:
        """int32 [B, H, q_blocks, kv_blocks]: 1 for visited blocks, else 0. ValueError for a stack of masks."""
        self._refuse_stack()
        partial, full = self.flags()
        return (partial | full).astype(jnp.int32)

    @own
    def to_mask(self) -> Array:
        """bool [B, H, q_len, kv_len]: whether each entry is visible, by the lists and the mask as kernels apply them.

        For tests, because it has the size of the attention matrix. Raises ValueError for a stack of block masks.
        """
        self._refuse_stack()
        b, h, q_len, kv_len = self.shape
        q, kv = (jnp.arange(n, dtype=jnp.int32) for n in (q_len, kv_len))
        entries = self._within_partial_blocks
        for axis in (3, 2, 1, 0):
            entries = jax.vmap(entries, in_axes=tuple(0 if i == axis else None for i in range(4)))
        on = entries(jnp.arange(b, dtype=jnp.int32), jnp.arange(h, dtype=jnp.int32), q, kv)
        rows, columns = (np.arange(n) // size for n, size in zip((q_len, kv_len), self.block_size, strict=True))
        spread = lambda flags: flags[:, :, rows][:, :, :, columns]  # known lists have flags of numpy, also under jit
        partial, full = self.flags()
        return (spread(partial) & on) | spread(full)

    @own
    def sparsity(self) -> float:
        """The percentage of blocks that are empty and so are skipped, 0 to 100; 0 for a mask without blocks.

        Of a stack, that of all its masks together. Raises ValueError for traced lists.
        """
        if isinstance(self.kv_num_blocks, Tracer):
            raise bad_argument("block_mask", "traced", "concrete lists", "Count its blocks outside jit.")
        total = self.kv_num_blocks.size * self.blocks[1]
        counts = (np.asarray(self.kv_num_blocks), np.asarray(self.full_kv_num_blocks))
        visited = sum(int(c.sum(dtype=np.int64)) for c in counts)
        return 100.0 * (1.0 - visited / total) if total else 0.0

    # ------------------------------------------------------------------ making others

    @classmethod
    @public
    @own
    def from_kv_blocks(
        cls,
        kv_num_blocks: Array,
        kv_indices: Array,
        full_kv_num_blocks: Array | None = None,
        full_kv_indices: Array | None = None,
        *,
        block_size: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> "BlockMask":
        """A block mask from your own lists.

        kv_num_blocks, kv_indices             int32 [B, H, q_blocks] and [B, H, q_blocks, width]: the key blocks of each
                                              query block in which `mask_mod` applies
        full_kv_num_blocks, full_kv_indices   the same for key blocks whose entries are all visible; None for none
        block_size                            tokens of a block, one number or (queries, keys)
        mask_mod                              None: all entries of the blocks of the first pair are visible
        q_len, kv_len                         in tokens; by default the blocks of the lists times the block size; for
                                              kv_len this needs concrete lists

        The lists may be traced, need no order, and name a key block at most once for each query block. Raises
        ValueError for shapes, dtypes, block numbers, counts or lengths that do not fit. In traced lists a block number
        out of range is dropped, and a count is limited to 0..width.
        """
        lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        return cls.of(build.from_lists(lists, block_size, mask_mod, q_len, kv_len))

    @classmethod
    @public
    @own
    def from_chosen_blocks(
        cls,
        chosen: Array,
        block_size: int | tuple[int, int] = 64,
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
        mask_mod: MaskMod | None = None,
        heads: int | None = None,
    ) -> "BlockMask":
        """A block mask of the key blocks that each query chose, as in NSA and MoBA.

        chosen       integers [B, H, T, n]: numbers of key blocks, in any order, also repeated; -1 for none; B and H may
                     be 1. T is q_len, or a divisor of it: then each choice is that of q_len / T neighbouring queries
        block_size   tokens of a key block; or (queries, keys), by default 128 queries: those whose choices are joined
                     in one row of the lists
        q_len        by default T
        kv_len       by default q_len
        mask_mod     hides entries of chosen blocks, such as masks.causal; None: all of a chosen block is visible
        heads        the query heads of the call, a multiple of H, where neighbouring heads share a choice; by default H

        `chosen` may be traced, and has no gradient. A kernel visits, for each row of the lists, the union of what its
        queries chose, and hides from each query what it did not choose. Raises ValueError for shapes, dtypes, lengths,
        heads or block numbers that do not fit. In a traced array a number out of range chooses nothing.
        """
        return cls.of(chosen_blocks(chosen, block_size, q_len, kv_len, mask_mod, heads))

    @public
    @own
    def __getitem__(self, index: object) -> "BlockMask":
        """Selects batch entries, heads and query blocks: `mask[b, h, q_blocks]`, ints, slices or 1-D int arrays.

        A part that is left out, at the end or by an Ellipsis, selects all; an int keeps its axis with size 1. Query 0
        of the result is the first selected query, as decoding and chunked prefill need. Raises ValueError for a mask
        with an origin, for a stack of masks and for an index that does not fit.
        """
        self._refuse_stack()
        if self.claim is not None:
            raise bad_argument(
                "block_mask", "made with tolerance", "one without to select from",
                "Its claim is of the positions of the whole: make the part with create_block_mask and an origin.",
            )  # fmt: skip
        if self.origin is not None:
            raise bad_argument(
                "block_mask", "made with an origin", "one without to select from",
                "Make the part with create_block_mask and an origin of its own.",
            )  # fmt: skip
        return BlockMask.of(take(self, index, self._within_partial_blocks))

    # ------------------------------------------------------------------ pictures

    @own
    def to_string(self, width: int = 64) -> str:
        """The repr, then a framed picture of each (b, h), a character a block: `█` full, `░` partial, ` ` empty.

        With more than `width` blocks several share a character. Raises ValueError for traced lists and for a stack of
        masks.
        """
        self._refuse_stack()
        return picture.text(self, repr(self), width)

    @public
    @own
    def plot(self, batch: int = 0, head: int = 0, axes: object = None) -> object:
        """Draws the blocks of one batch entry and head with matplotlib (the `plot` extra); returns its Axes.

        `batch` and `head` count the mask's own batch entries and heads (`shape`). Raises ValueError for a number out of
        range, a traced mask or a stack of masks, ImportError without matplotlib.
        """
        self._refuse_stack()
        b, h, q_len, kv_len = self.shape
        for name, number, count, of in (("batch", batch, b, "batch entries"), ("head", head, h, "heads")):
            if not 0 <= number < count:
                raise bad_argument(
                    name,
                    str(number),
                    f"one of the {count} {of} of the block mask, counted from 0",
                    "Pass 0 where the block mask has one for all.",
                )
        place = f", b={batch} h={head}" if b * h > 1 else ""
        return picture.plot(self, f"{q_len} x {kv_len}, {self.sparsity():.1f}% skipped{place}", batch, head, axes)

    def _repr_html_(self) -> str:
        """HTML for notebooks: the repr, with a picture of the first (b, h) below it if it can be drawn."""
        if getattr(self.kv_num_blocks, "ndim", None) != 3:
            return f"<pre>{html.escape(repr(self))}</pre>"
        return picture.html(self, repr(self))

    def __repr__(self) -> str:
        """Such as "BlockMask(shape=(1, 1, 512, 512), block_size=(128, 128), sparsity=37.5%)"."""
        # in the in_axes of jax.vmap, or after jax.tree.map, the leaves are no arrays
        if not hasattr(self.kv_num_blocks, "shape"):
            return f"BlockMask({', '.join(f'{f}={vars(self)[f]!r}' for f in ARRAY_FIELDS)})"
        b, h, q, kv = self.shape
        stack = self.list_dims[:-3]
        head = (
            f"BlockMask({f'stack={stack}, ' if stack else ''}shape=({b}, {h}, {q}, {kv}), block_size={self.block_size}"
        )
        if isinstance(self.kv_num_blocks, Tracer) or not hasattr(self.kv_num_blocks, "__array__"):
            return head + ", traced)"
        return head + f", sparsity={self.sparsity():.1f}%)"


class Static(tuple):
    """The static data of a block mask. jax shows its text where block masks that are stacked together differ in it."""

    def __repr__(self) -> str:
        fields = dict(zip(STATIC_FIELDS, self, strict=False))
        shown = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        return (
            "Block masks of different functions, lengths, block sizes or widths cannot be stacked or mapped "
            "together. Make them by one function whose captured arrays differ, under jax.vmap, or keep them in a "
            f"list and call once for each. This one has: {shown}"
        )


def _stored(mask: BlockMask, field: str) -> object:
    """What a field of arrays stores; None for bits in whose place a user has put lists."""
    return None if field == "bits" and not mask.in_bits else vars(mask)[field]


def _flatten(mask: BlockMask) -> tuple[tuple, tuple]:
    """(array fields, static data) of a block mask for the pytree registry."""
    return tuple(_stored(mask, f) for f in ARRAY_FIELDS), Static(
        (*(getattr(mask, f) for f in STATIC_FIELDS), mask.as_made)
    )


def _unflatten(static: tuple, arrays: tuple) -> BlockMask:
    """The inverse of `_flatten`, without on_host; checks nothing, because jax puts placeholders in the leaves.

    A mask whose lists were as they were made counts as made of the new arrays, so that a mask that crosses jit as an
    argument is not sorted in every call.
    """
    mask = object.__new__(BlockMask)
    *fields, as_made = static
    for name, value in (*zip(ARRAY_FIELDS, arrays, strict=True), *zip(STATIC_FIELDS, fields, strict=True)):
        object.__setattr__(mask, name, value)
    object.__setattr__(mask, "made", mask.lists if as_made and not mask.in_bits else None)
    return mask


def _flatten_with_keys(mask: BlockMask) -> tuple[tuple, tuple]:
    keys = tuple((jax.tree_util.GetAttrKey(f), _stored(mask, f)) for f in ARRAY_FIELDS)
    return keys, _flatten(mask)[1]


# jax types the leaves as iterables
jax.tree_util.register_pytree_with_keys(
    BlockMask,
    _flatten_with_keys,
    _unflatten,  # pyright: ignore[reportArgumentType]
    _flatten,
)


@public
@own
def create_block_mask(
    mask_mod: MaskMod,
    batch: int | None,
    heads: int | None,
    q_len: int,
    kv_len: int,
    *,
    block_size: int | tuple[int, int] = 128,
    exact: bool | None = None,
    origin: Origin | OriginTable | None = None,
    tolerance: float | None = None,
    score_mod: ScoreMod | None = None,
    score_bound: float | ArrayArgument | None = None,
    scale: float | None = None,
) -> BlockMask:
    """The block mask of `mask_mod(b, h, q_idx, kv_idx) -> bool`, a function of int32 scalars, True at visible entries.

    batch, heads   None: the mask does not depend on b (h), and one mask serves all batch entries (heads)
    q_len, kv_len  lengths in tokens, any; the last block may reach past the end
    block_size     tokens of a block, one number or (queries, keys)
    exact          the interval analysis may call a full or empty block partial, which costs time and never correctness.
                   True: evaluate such blocks entry by entry. None: do so where the work is small and neither a captured
                   array nor the origin is traced. False: never.
    origin         where the queries and keys lie in the whole problem, whose indices mask_mod sees; q_len, kv_len and
                   the block numbers in the lists count from 0. Calls that use the block mask take it for score_mod and
                   dropout too.
    tolerance      also leaves out blocks that provably hold at most this share of each row, in total, in calls with
                   `score_mod` and `scale` where |scale * query . key| is at most `score_bound`, a number or an array as
                   for flex_attention. Captured arrays are kept by their numbers; a call with others, or with another
                   score_mod or scale, raises ValueError (docs/tolerance.md)

    Takes O(blocks) time, beside the entries that `exact` evaluates, and never makes a q_len x kv_len array. Works
    inside jit, and with captured arrays that are traced. Raises ValueError for arguments that do not fit each other,
    and for a mask_mod that cannot be compiled, or that reads `b` (`h`) where batch (heads) is None.
    """
    made = build.from_mask_mod(mask_mod, (batch, heads, q_len, kv_len), block_size, exact, origin)
    if tolerance is not None:
        made = without_small_blocks(made, score_mod, (batch, heads), score_bound, tolerance, scale)
    else:
        for name, given in (("score_mod", score_mod), ("score_bound", score_bound), ("scale", scale)):
            if given is not None:
                raise bad_argument(name, "given without tolerance", "None", "Pass tolerance= too.")
    return BlockMask.of(made)
