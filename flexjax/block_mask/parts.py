"""The fields of a block mask. build.py and slice.py make `Parts`, and BlockMask adds the methods of the user."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from flexjax.integers import cdiv
from flexjax.ir.origin import OriginTable
from flexjax.ir.program import Program

Array = jax.Array

ARRAY_FIELDS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "captures",
    "origin",
)
BROADCAST = 1 << 20
"""The number of batch entries or heads for which a mask that is shared by all of them is traced."""
STATIC_FIELDS = ("program", "q_len", "kv_len", "block_size", "q_widths", "from_user_lists")


@dataclasses.dataclass(frozen=True, eq=False)  # comparing arrays gives arrays, so equality is identity
class Parts:
    """Block lists of a mask over [B, H, q_len, kv_len]; B (H) is 1 where all batch entries (heads) of a call share the lists.

    The mask is evaluated at each entry of a partial block. All entries of a full block are visible, and the mask is not evaluated
    there. Blocks in neither list are empty: all their entries are hidden, and no kernel visits them.

    kv_num_blocks        int32 [B, H, q_blocks]         number of partial key blocks of each query block
    kv_indices           int32 [B, H, q_blocks, width]  their numbers, ascending; entries past the count are ignored
    full_kv_num_blocks   int32 [B, H, q_blocks]         number of full key blocks of each query block
    full_kv_indices      int32 [B, H, q_blocks, width]  their numbers, as in kv_indices, in lists of a width of their own
    captures             arrays that the mask program reads
    program              the traced mask_mod, None if every entry of a block in the lists is visible
    q_len, kv_len        lengths in tokens; the last block may reach past the end
    block_size           (queries, keys) of a block
    q_widths             widths of the transposed lists: bounds of how many query blocks list one key block as partial, and as full
    from_user_lists      the user gave the lists, so the program alone does not say which entries are visible
    origin               where the queries and keys of the lists lie in the whole problem, whose positions the program reads;
                         None: they count from 0
    on_host              the four lists as numpy arrays, as build.py keeps those that are not traced; None for others, and for a mask
                         that was selected (slice.py) or rebuilt from its arrays
    made                 the four lists as build.py or slice.py made them, with ascending numbers, or as the pytree of such a mask got
                         them; None where it is not known that the numbers ascend
    """

    kv_num_blocks: Array
    kv_indices: Array
    full_kv_num_blocks: Array
    full_kv_indices: Array
    captures: tuple[Array, ...]
    program: Program | None
    q_len: int
    kv_len: int
    block_size: tuple[int, int]
    q_widths: tuple[int, int]
    from_user_lists: bool = False
    origin: OriginTable | None = None
    on_host: tuple[np.ndarray, ...] | None = None
    made: tuple[Array, ...] | None = None

    @property
    def lists(self) -> tuple[Array, Array, Array, Array]:
        """kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices, in this order."""
        return self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices

    @property
    def as_made(self) -> bool:
        """Whether the lists are those that were made (`made`), so that their numbers ascend and `on_host`, if there, has them. False for a
        mask made by its constructor, and where a field was replaced (dataclasses.replace). Whoever replaces arrays by jax.tree.map keeps
        their numbers ascending.
        """
        return self.made is not None and all(x is y for x, y in zip(self.lists, self.made, strict=True))

    @property
    def lists_decide(self) -> bool:
        """Whether the lists say more than the program: a user gave them (`from_user_lists`) or replaced them. An entry of a block that they
        leave out is then hidden whatever the program says.
        """
        return self.from_user_lists or not self.as_made

    @property
    def transposed_widths(self) -> tuple[int, int]:
        """Bounds of how many query blocks list one key block as partial, and as full: `q_widths`, or all query blocks where the lists may have
        been replaced; 0 for lists of width 0.
        """
        if self.as_made:
            return self.q_widths
        rows = self.blocks[0]
        partial, full = (rows if index.shape[-1] else 0 for index in (self.kv_indices, self.full_kv_indices))
        return partial, full

    @property
    def blocks(self) -> tuple[int, int]:
        """How many (query blocks, key blocks) the attention matrix has."""
        return (cdiv(self.q_len, self.block_size[0]), cdiv(self.kv_len, self.block_size[1]))


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
    """Makes a Parts of its fields; nothing is checked or copied.

    lists       its kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices, in this order
    ascending   whether the numbers of the lists ascend, so that the lists are its `made`; else that is None
    lengths     its q_len and kv_len

    All other arguments are the fields of the same names.
    """
    num, index, full_num, full_index = lists
    return Parts(
        num, index, full_num, full_index, captures, program, *lengths, block_size, q_widths, from_user_lists, origin,
        on_host, (num, index, full_num, full_index) if ascending else None,
    )  # fmt: skip
