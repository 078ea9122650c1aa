"""Tile sizes of the Hopper backward kernels: what is common to them, and what options may ask for.

A kernel owns a tile of one axis and visits tiles of the other. KernelOptions set the sizes (None: the largest that fits):

    kernel         owns                              visits
    dQ             block_q_bwd queries: 64, 128      64 or 128 keys, at most block_kv_bwd (32 where 64 do not fit)
    dK/dV          block_kv_bwd keys: 64, 128        64 or 128 queries, at most block_q_bwd
    split dK/dV    64 keys, where `splits_dkv`       64 queries (32 of float32 with large head dims)
    fused          128 keys                          64 queries, or 128 where `fits_128_query_tile`

backward_dq_tiles.py, backward_dkv_tiles.py and backward_fused_tiles.py list the sizes and the shared memory of each kernel and what
fits; choose_kernel.py decides which of the kernels run. None of these files imports Mosaic.
"""

import typing

from flexjax.analysis import patterns
from flexjax.backends.mosaic_gpu.columns import columns_of, ctas_of
from flexjax.backends.mosaic_gpu.float_parts import parts_of
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan

LARGEST_UNSPLIT_DIM = 128
"""The largest padded head dim at which one warpgroup has registers for both accumulators, dK and dV; for float32, whose
P and dS take twice the registers, half of this. Above it the split kernel gives the accumulators to two warpgroups."""
FUSED_KEYS = 128
"""Keys that a CTA of the fused kernel owns."""
SPLIT_KEYS, SPLIT_QUERIES = 64, 64
"""Keys that a CTA of the split dK/dV kernel owns, and queries of a tile that it visits."""
SMALLEST_TILE = 32
"""Queries or keys of a visited tile where float32 operands or split columns leave no room for 64."""


class DenseBiasTypes(typing.NamedTuple):
    """What the sizes of a kernel depend on, of captured arrays with an element for each (query, key) (pair_bias.py).

    staged             name of the dtype of the staged array; None: no array is staged
    direct_gradients   name of the dtype of each gradient that the dQ kernel itself writes
    batch_entries      batch entries that a CTA of the dQ kernel computes one after the other
    """

    staged: str | None = None
    direct_gradients: tuple[str, ...] = ()
    batch_entries: int = 1


NO_DENSE_BIAS = DenseBiasTypes()


def padded_dim(dim: int) -> int:
    """Head dim rounded up to what the kernels take: 16 up to 16, else a multiple of 32."""
    return 16 if dim <= 16 else round_up(dim, 32)


def padded_dims(plan: KernelPlan) -> tuple[int, int]:
    """The padded columns of a CTA (D of queries and keys, extra features included; E of values): of the head dims, or of their parts
    where the CTAs of a cluster share the columns (columns.py). Extra features may be joined to the head dim in `plan` or apart.
    """
    ctas = ctas_of(plan)
    return padded_dim(columns_of(plan.head_dim + plan.extra_dim, ctas)), padded_dim(columns_of(plan.value_dim, ctas))


def swizzle_for(visited: int) -> int:
    """Bytes over which the tiles of operands are swizzled: those of the dimension that WGMMA contracts, 2 * visited, at most 128. That
    dimension must be a multiple of the result.

    visited   tokens of a visited tile, of 2-byte elements
    """
    return min(128, 2 * visited)


def splits_dkv(plan: KernelPlan) -> bool:
    """Whether the split kernel computes dK and dV: for padded columns of a CTA above LARGEST_UNSPLIT_DIM, half of it
    for float32.
    """
    return max(padded_dims(plan)) * parts_of(plan) > LARGEST_UNSPLIT_DIM


def computes_little(plan: KernelPlan) -> bool:
    """Whether the mods leave registers for visited tiles of 128 queries or keys.

    They do for inputs of 16 bits without a score_mod and without dropout, if there is no mask_mod or one that divides no
    tile of integers (`patterns.divides_tiles`).
    """
    if parts_of(plan) > 1:
        return False
    return plan.score is None and plan.dropout is None and not patterns.divides_tiles(plan.mask)


def first_dividing(blocks: BlockLayout | None, axis: str, sizes: tuple[int, ...]) -> int:
    """The first of the tile sizes, in tokens, that divides the mask's block size of queries (`axis` "q") or keys
    ("kv").

    blocks   None: there is no block mask, and the first size is taken

    Raises StopIteration if none divides. Callers ask `refuses` first, which says so in a sentence.
    """
    block = None if blocks is None else (blocks.block_q if axis == "q" else blocks.block_kv)
    return next(size for size in sizes if block is None or block % size == 0)


def owned_sizes(option: int | None) -> tuple[int, ...]:
    """Tile sizes in tokens to try, best first, for the axis that a kernel owns; `option` is what KernelOptions ask
    for, None for any.
    """
    return (128, 64) if option is None else (option,)


def visited_sizes(option: int | None, most: int) -> tuple[int, ...]:
    """Tile sizes in tokens to try, best first, for the axis that a kernel visits: 128 and 64, without those above
    `most`, the largest that the kernel takes, or above `option`, what KernelOptions ask for (None: any).
    """
    return tuple(size for size in (128, 64) if size <= min(most, option or most))


def refuses(plan: KernelPlan) -> str | None:
    """A sentence that says why no kernel has the tile that the option block_q_bwd or, if that fits, block_kv_bwd asks
    for; None if both fit or are not set.

    A tile has 64 or 128 tokens, 64 keys where the split kernel computes dK and dV (`splits_dkv`), and divides the
    mask's blocks.
    """
    options, blocks = plan.options, plan.blocks
    split = splits_dkv(plan)
    key_sizes = (64,) if split else (64, 128)
    for name, asked, choices, block in (
        ("block_q_bwd", options.block_q_bwd, (64, 128), None if blocks is None else blocks.block_q),
        ("block_kv_bwd", options.block_kv_bwd, key_sizes, None if blocks is None else blocks.block_kv),
    ):
        allowed = [n for n in choices if block is None or block % n == 0]
        if asked is None or asked in allowed:
            continue
        why = ""
        if asked in choices:
            why = f", dividing the mask's blocks of {block}"
        elif split and name == "block_kv_bwd":
            why = f" for head dims above {LARGEST_UNSPLIT_DIM // parts_of(plan)}"
        sizes = " or ".join(map(str, allowed))
        return f"The GPU kernels of the backward pass take {name} {sizes}{why}, not {asked}."
    return None
