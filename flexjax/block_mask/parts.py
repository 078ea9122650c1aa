"""The fields of a block mask: what build.py and slice.py make, and what a BlockMask is made of."""

import dataclasses
from collections.abc import Sequence

import jax

from flexjax.ir.program import Program

Array = jax.Array

ARRAY_FIELDS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "captures",
)
BROADCAST = 1 << 20
"""Stands for an unknown number of batch entries or heads while a mask shared by all is traced."""
STATIC_FIELDS = ("program", "q_len", "kv_len", "block_size", "q_widths", "listed")


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no truth to compare by: two are equal if they are one
class Parts:
    """Block lists of a mask over [B, H, q_len, kv_len]; B and H are 1 where the mask does not depend on them.

    kv_num_blocks        int32 [B, H, q_blocks]         how many key blocks of a query block are partly on
    kv_indices           int32 [B, H, q_blocks, width]  which, ascending; entries past the count mean nothing
    full_kv_num_blocks   int32 [B, H, q_blocks]         how many are on everywhere: the mask is not evaluated there
    full_kv_indices      int32 [B, H, q_blocks, width]  which
    captures             arrays that the mask program reads
    program              the traced mask_mod, None if every entry of a listed block is on
    q_len, kv_len        lengths in tokens; the last block may hang over
    block_size           (queries, keys) of a block
    q_widths             how many query blocks list the same key block at most, partly on and on everywhere
    listed               the lists are the user's: what is on follows from them as well as from the program

    Blocks in neither list are off.
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
    listed: bool = False

    @property
    def blocks(self) -> tuple[int, int]:
        """(query blocks, key blocks)."""
        return (-(-self.q_len // self.block_size[0]), -(-self.kv_len // self.block_size[1]))


def parts_of(
    lists: Sequence[Array],
    captures: tuple[Array, ...],
    program: Program | None,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    q_widths: tuple[int, int],
    listed: bool = False,
) -> Parts:
    """Parts from the four list arrays in the order of the fields; lengths: queries, keys."""
    num, index, full_num, full_index = lists
    return Parts(num, index, full_num, full_index, captures, program, *lengths, block_size, q_widths, listed)
