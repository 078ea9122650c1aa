"""The fields of a block mask. build.py and slice.py make `Parts`, and BlockMask adds the methods of the user."""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.block_mask import transpose
from flexjax.integers import cdiv
from flexjax.ir.origin import OriginTable
from flexjax.ir.program import Program
from flexjax.tolerance.claim import Claim

Array = jax.Array

ARRAY_FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "bits", "captures", "origin")
BROADCAST = 1 << 20  # batch entries or heads for which a mask that all of them share is traced
STATIC_FIELDS = ("program", "q_len", "kv_len", "block_size", "q_widths", "from_user_lists", "claim")


class ListArray:
    """A list array among the fields of Parts, made of the bits where these are stored; of placeholders it is one."""

    def __init__(self, name: str, pair: int, counts: bool) -> None:
        self.name, self.pair, self.counts = name, pair, counts  # pair: 0 partial, 1 full blocks

    def __set__(self, mask: "Parts", value: Array | None) -> None:
        vars(mask)[self.name] = value

    def __get__(self, mask: "Parts | None", owner: type) -> typing.Any:
        if mask is None or mask.bits is None or not mask.in_bits:
            return self if mask is None else vars(mask)[self.name]
        bits, columns = mask.bits[self.pair], mask.blocks[1]
        if not hasattr(bits, "shape"):
            return bits
        make = transpose.counts_of_bits if self.counts else lambda words: transpose.lists_of_bits(words, columns)[1]
        concrete = isinstance(bits, jax.Array | np.ndarray)
        return make(jnp.asarray(bits)) if concrete else jax.eval_shape(make, bits)


@dataclasses.dataclass(frozen=True, eq=False)  # comparing arrays gives arrays, so equality is identity
class Parts:
    """Block lists of a mask over [B, H, q_len, kv_len]; B (H) is 1 where all batch entries (heads) share the lists.

    The mask is evaluated at each entry of a partial block. All entries of a full block are visible, and the mask is not
    evaluated there. Blocks in neither list are empty: all their entries are hidden, and no kernel visits them.
    """

    # [B, H, q_blocks] and [B, H, q_blocks, width]; block numbers ascend, and those past the count are ignored
    kv_num_blocks: Array
    kv_indices: Array
    full_kv_num_blocks: Array
    full_kv_indices: Array
    captures: tuple[Array, ...]
    program: Program | None  # None if every entry of a block in the lists is visible
    # in tokens; the last block may reach past the end
    q_len: int
    kv_len: int
    block_size: tuple[int, int]  # (queries, keys)
    # of the transposed lists: bounds of how many query blocks list one key block as partial, and as full
    q_widths: tuple[int, int]
    # the user gave the lists, so the program alone does not say which entries are visible
    from_user_lists: bool = False
    # where the lists lie in the whole problem, whose positions the program reads; None: they count from 0
    origin: OriginTable | None = None
    # uint32 [B, H, q_blocks, words] of the partial and of the full blocks (transpose.py), stored in place of the lists
    bits: tuple[Array, Array] | None = None
    # the four lists as numpy arrays, if build.py made them and they are not traced
    on_host: tuple[np.ndarray, ...] | None = None
    claim: Claim | None = None  # what the lists hold for, if blocks were left out by `tolerance`
    # the four lists as they were made, with ascending numbers; None where it is not known that they ascend
    made: tuple[Array, ...] | None = None

    @property
    def in_bits(self) -> bool:
        """Whether the lists are stored as bits: those that were made, since a user replaces lists by lists."""
        return self.bits is not None and vars(self)["kv_num_blocks"] is None

    @property
    def list_dims(self) -> tuple[int, ...]:
        """The dims of kv_num_blocks: [B, H, q_blocks], and those of a stack in front."""
        return self.bits[0].shape[:-1] if self.bits is not None and self.in_bits else self.kv_num_blocks.shape

    @property
    def list_widths(self) -> tuple[int, int]:
        """The widths of kv_indices and full_kv_indices."""
        if self.in_bits:
            return self.blocks[1], self.blocks[1]
        return self.kv_indices.shape[-1], self.full_kv_indices.shape[-1]

    @property
    def lists(self) -> tuple[Array, Array, Array, Array]:
        return self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices

    @property
    def as_made(self) -> bool:
        """Whether the lists are those that were made, so that their numbers ascend and `on_host` has them."""
        if self.in_bits or self.made is None:
            return self.in_bits
        return all(x is y for x, y in zip(self.lists, self.made, strict=True))

    @property
    def lists_decide(self) -> bool:
        """Whether a user gave or replaced the lists, so that they hide entries whatever the program says."""
        return self.from_user_lists or not self.as_made

    @property
    def transposed_widths(self) -> tuple[int, int]:
        """`q_widths`, or all query blocks where the lists may have been replaced; 0 for lists of width 0."""
        if self.as_made:
            return self.q_widths
        rows = self.blocks[0]
        partial, full = (rows if width else 0 for width in self.list_widths)
        return partial, full

    @property
    def blocks(self) -> tuple[int, int]:
        """How many (query blocks, key blocks) the attention matrix has."""
        return (cdiv(self.q_len, self.block_size[0]), cdiv(self.kv_len, self.block_size[1]))

    def flags(self) -> tuple[Array, Array]:
        """(partial, full): whether a list names the block, bool [B, H, q_blocks, kv_blocks]."""
        columns = self.blocks[1]
        if self.in_bits:
            partial, full = (transpose.flags_of_bits(jnp.asarray(x), columns) for x in self.bits or ())
            return partial, full
        partial = transpose.flags_of_lists(self.kv_num_blocks, self.kv_indices, columns)
        return partial, transpose.flags_of_lists(self.full_kv_num_blocks, self.full_kv_indices, columns)


for _n, _name in enumerate(ARRAY_FIELDS[:4]):
    setattr(Parts, _name, ListArray(_name, _n // 2, counts=_n % 2 == 0))


def parts_of(
    lists: Sequence[Array],
    captures: tuple[Array, ...],
    program: Program | None,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    q_widths: tuple[int, int],
    from_user_lists: bool = False,
    origin: OriginTable | None = None,
    on_host: tuple[np.ndarray, ...] | None = None,
    ascending: bool = True,
) -> Parts:
    """Makes a Parts of its fields, nothing checked; `lists` are the four list arrays, or the bits in their place.

    `ascending` says that the numbers of the lists ascend.
    """
    given: typing.Any = (*lists, None) if len(lists) == 4 else (*[None] * 4, tuple(lists))
    num, index, full_num, full_index, bits = given
    made = (num, index, full_num, full_index) if ascending and bits is None else None
    return Parts(
        num, index, full_num, full_index, captures, program, *lengths, block_size, q_widths, from_user_lists, origin,
        bits, on_host, made=made,
    )  # fmt: skip
