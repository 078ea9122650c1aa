"""Tile sizes of the Hopper backward kernels: what is common to them, and what options may ask for.

A kernel owns a tile of one axis and visits tiles of the other. KernelOptions set the sizes (None: what fits):

    kernel         owns                              visits
    dQ             block_q_bwd queries: 64, 128      64 or 128 keys, at most block_kv_bwd (32 where 64 do not fit)
    dK/dV          block_kv_bwd keys: 64, 128        64 or 128 queries, at most block_q_bwd
    split dK/dV    64 keys, where `splits_dkv`       64 queries (32 of float32 with large head dims)
    fused          128 keys                          64 queries, or 128 where `fits_128_query_tile`
"""

import typing

from flexjax.analysis import patterns
from flexjax.backends.mosaic_gpu.machine.columns import columns_of, ctas_of
from flexjax.backends.mosaic_gpu.machine.float_parts import parts_of
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan

LARGEST_UNSPLIT_DIM = 128
"""The largest padded head dim at which one warpgroup has registers for both accumulators, dK and dV. float32, whose P
and dS take twice the registers, has half of this.
"""
FUSED_KEYS = 128  # keys that a CTA of the fused kernel owns
SPLIT_KEYS, SPLIT_QUERIES = 64, 64
"""Keys that a CTA of the split dK/dV kernel owns, and queries of a tile that it visits."""
SMALLEST_TILE = 32  # queries or keys of a visited tile where float32 operands or split columns leave no room for 64


class DenseBiasTypes(typing.NamedTuple):
    """What the sizes of a kernel depend on, of captured arrays with an element for each (query, key) (pair_bias.py)."""

    staged: str | None = None  # dtype of the staged array
    direct_gradients: tuple[str, ...] = ()  # dtype of each gradient that the dQ kernel writes
    batch_entries: int = 1  # that a CTA of the dQ kernel computes one after the other


NO_DENSE_BIAS = DenseBiasTypes()


def padded_dim(dim: int) -> int:
    """Head dim rounded up to what the kernels take: 16 up to 16, else a multiple of 32."""
    return 16 if dim <= 16 else round_up(dim, 32)


def padded_dims(plan: KernelPlan) -> tuple[int, int]:
    """The padded columns D of Q and K, extra features included, and E of V that a CTA takes."""
    ctas = ctas_of(plan)
    return padded_dim(columns_of(plan.head_dim + plan.extra_dim, ctas)), padded_dim(columns_of(plan.value_dim, ctas))


def swizzle_for(visited: int) -> int:
    """Bytes over which operands are swizzled; WGMMA contracts `visited` 2-byte elements, a multiple of the result."""
    return min(128, 2 * visited)


def splits_dkv(plan: KernelPlan) -> bool:
    """Whether the split kernel computes dK and dV."""
    return max(padded_dims(plan)) * parts_of(plan) > LARGEST_UNSPLIT_DIM


def computes_little(plan: KernelPlan) -> bool:
    """Whether the mods leave registers for visited tiles of 128 queries or keys."""
    if parts_of(plan) > 1:
        return False
    return plan.score is None and plan.dropout is None and not patterns.fills_registers(plan.mask)


def first_dividing(blocks: BlockLayout | None, axis: str, sizes: tuple[int, ...]) -> int:
    """The first size that divides the mask's block on axis "q" or "kv"; StopIteration if none (`refuses`)."""
    block = None if blocks is None else (blocks.block_q if axis == "q" else blocks.block_kv)
    return next(size for size in sizes if block is None or block % size == 0)


def owned_sizes(option: int | None) -> tuple[int, ...]:
    """Tile sizes to try, best first, for the axis that a kernel owns."""
    return (128, 64) if option is None else (option,)


def visited_sizes(option: int | None, most: int) -> tuple[int, ...]:
    """Tile sizes to try, best first, for the axis that a kernel visits; the kernel takes at most `most`."""
    return tuple(size for size in (128, 64) if size <= min(most, option or most))


def refuses(plan: KernelPlan) -> str | None:
    """A sentence that says why no kernel has the tile that block_q_bwd or block_kv_bwd asks for; None if both fit."""
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
