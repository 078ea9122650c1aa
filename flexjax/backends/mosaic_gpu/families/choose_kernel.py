"""Which kernels of a family run a plan, with which tiles: what is faster. *_tiles.py say what fits.

    decode_kernel            the decode kernel's configuration, for few queries; None where the forward kernel runs
    mma_decode_kernel        the same on mma.sync of a card, by the same rules
    many_in_pages and on     how the forward kernel gets keys that lie in pages
    forward_kernel           the forward kernel's tile and pipeline
    backward_kernels         the fused kernel or two kernels, their tiles, and the order in which dQ tiles are added
    mma_backward_kernels     the tiles of the two kernels on mma.sync of a card

Every rule for Hopper follows from the plan alone, never from the GPU or from the number of its SMs, because the choice
fixes the order of sums: the same call gives the same bits on every GPU. lab/notes/hopper_backward.md has the reasons,
lab/logs/hopper_backward.md the measurements.

The backward pass of one plan on Hopper, by the first line that fits:

    not both dQ and one of dK, dV wanted                      the wanted one of two kernels
    no tile of the fused kernel fits (`fused_tiles`)          two kernels
    float32                                                   two kernels
    a score_mod that reads an element for each (query, key)   two kernels: the fused kernel would read it transposed
    additions to dQ in any order (deterministic=False), and   the fused kernel
    a key head for each query head after `FusedKernel.spread`
    else                                                      the fused kernel where
                                                              `hopper_fused_choice.ordered_dq_is_fast`, else two
"""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice
from flexjax.backends.mosaic_gpu.backward import mma_tiles as backward_mma_tiles
from flexjax.backends.mosaic_gpu.backward.hopper_dkv_tiles import dkv_tiles, split_dkv_tiles
from flexjax.backends.mosaic_gpu.backward.hopper_dq_tiles import dq_tiles
from flexjax.backends.mosaic_gpu.backward.hopper_fused_tiles import fused_tiles
from flexjax.backends.mosaic_gpu.backward.hopper_tiles import (
    FUSED_KEYS,
    NO_DENSE_BIAS,
    SPLIT_KEYS,
    DenseBiasTypes,
    splits_dkv,
)
from flexjax.backends.mosaic_gpu.backward.kernels import FusedKernel, TwoKernels
from flexjax.backends.mosaic_gpu.backward.mma_tiles import MmaBackwardTiles
from flexjax.backends.mosaic_gpu.decode import hopper_tiles as decode_hopper_tiles
from flexjax.backends.mosaic_gpu.decode import mma_tiles as decode_mma_tiles
from flexjax.backends.mosaic_gpu.decode.mma_tiles import MmaDecodeTile
from flexjax.backends.mosaic_gpu.forward import hopper_tiles as forward_hopper_tiles
from flexjax.backends.mosaic_gpu.machine.columns import ctas_of
from flexjax.backends.mosaic_gpu.machine.float_parts import parts_of
from flexjax.backends.mosaic_gpu.machine.mma_cards import Card
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import KernelPlan

AnyDecodeTile = typing.TypeVar("AnyDecodeTile", bound=decode_hopper_tiles.DecodeTile)

VIEWED_PAGE = 128
"""Keys of the pages as which `views_as_pages` has contiguous keys read: the largest key tile, then one copy."""
KEYS_A_ROW = 8
"""The fewest keys for each packed row at which the decode kernel is expected to be faster: its partial results are then
at most a quarter of its memory traffic.
"""


# ------------------------------------------------------------------- forward


def decode_kernel(plan: KernelPlan) -> decode_hopper_tiles.DecodeTile | None:
    """The tile of the decode kernel for Hopper, for a plan with the user's blocks; None: the forward kernel runs."""
    if decode_hopper_tiles.decode_refuses(plan) or not decode_is_faster(plan):
        return None
    return _split_as_asked(plan, decode_hopper_tiles.decode_tile(plan))


def mma_decode_kernel(plan: KernelPlan, card: Card) -> MmaDecodeTile | None:
    """`decode_kernel` on mma.sync."""
    if decode_mma_tiles.mma_decode_refuses(plan, card) or not decode_is_faster(plan):
        return None
    return _split_as_asked(plan, decode_mma_tiles.mma_decode_tile(plan, card))


def _split_as_asked(plan: KernelPlan, tile: AnyDecodeTile) -> AnyDecodeTile:
    """With chunks of as many keys as the option `split` asks for, rounded up to whole key tiles."""
    split = plan.options.split
    return tile if split in (None, "auto") else dataclasses.replace(tile, chunk=round_up(split, tile.block_kv))


def many_in_pages(plan: KernelPlan) -> bool:
    """Whether keys lie in pages and the queries are too many for the decode kernel, as in a prefill."""
    # The batch entries of a part have few queries, unless the option block_q of paged_attention asks for more, which
    # kernels then refuse.
    many = plan.options.invariant or plan.q_len * plan.group > decode_hopper_tiles.ROWS
    return plan.page > 0 and not plan.partial and many


def reads_pages(plan: KernelPlan) -> bool:
    """Whether the forward kernel reads keys in pages in place (forward/pages.py); else they are gathered."""
    aligned = plan.page % decode_hopper_tiles.COPY_ROWS == 0
    return many_in_pages(plan) and plan.cache_dtype is None and aligned and _kernel_reads_pages(plan)


def views_as_pages(plan: KernelPlan) -> bool:
    """Whether the forward kernel reads contiguous keys with lengths as pages of VIEWED_PAGE keys.

    It reads no key past a length, so that keys and values need no copy with 0 there, which NaN past a length would
    otherwise ask for. The bits are the same.
    """
    # Beside as many queries as keys, the copy is a few percent of the products.
    buffer = plan.page == 0 and plan.lengths[1] and plan.kv_len > plan.q_len
    return buffer and plan.extra_dim == 0 and _kernel_reads_pages(plan)


def _kernel_reads_pages(plan: KernelPlan) -> bool:
    """Whether it reads 16 bits, of head dims whose columns no two CTAs share."""
    return parts_of(plan) == 1 and not plan.float8 and ctas_of(plan) == 1


def widens_pools(plan: KernelPlan) -> bool:
    """Whether quantised pools are multiplied by their scales as a whole, so that the forward kernel reads their pages
    in place: where that writes less than gathering the keys of all pages of the table. The bits are the same.
    """
    fewer = plan.stored_pages * plan.page < plan.batch * plan.kv_len
    return plan.cache_dtype is not None and fewer and reads_pages(dataclasses.replace(plan, cache_dtype=None))


def decode_is_faster(plan: KernelPlan) -> bool:
    """Whether the decode kernel is expected to be faster than the forward kernel, for a plan that it takes."""
    if plan.for_tiles or plan.options.invariant:
        return False
    if plan.page or plan.options.split is not None:
        return True
    if plan.q_len >= plan.kv_len:
        return False
    # With lengths the array is a buffer, and the same kernel runs for every size of the buffer, so that the bits are
    # the same.
    return plan.lengths[1] or plan.kv_len >= KEYS_A_ROW * plan.q_len * plan.group


def forward_kernel(plan: KernelPlan) -> forward_hopper_tiles.ForwardTile:
    """The tile and pipeline of the forward kernel for Hopper; `plan` has the blocks that it visits."""
    return forward_hopper_tiles.forward_tile(plan)


# ------------------------------------------------------------------- backward


def backward_kernels(
    plan: KernelPlan, bias: DenseBiasTypes = NO_DENSE_BIAS, all_gradients: bool = True
) -> FusedKernel | TwoKernels:
    """The kernels of the backward pass of a plan, with their sizes, by the table at the top of this file.

    bias            dtypes of the staged array and of the gradients that the dQ kernel writes (backward/pair_bias.py)
    all_gradients   whether dQ and one of dK, dV are asked for; else the caller runs one of two kernels
    """
    shares = hopper_fused_choice.shares_of(plan)
    spread = hopper_fused_choice.spread(plan, shares)
    fused = fused_tiles(spread) if all_gradients and hopper_fused_choice.fused_is_faster(spread) else None
    if fused is not None:
        return FusedKernel(fused, hopper_fused_choice.adds_in_order(spread, fused), shares)
    dkv = split_dkv_tiles(plan) if splits_dkv(plan) else dkv_tiles(plan, bias)
    return TwoKernels(dq_tiles(plan, bias), dkv)


def mma_backward_kernels(plan: KernelPlan, card: Card) -> tuple[MmaBackwardTiles, MmaBackwardTiles]:
    """(sizes of the dQ kernel, sizes of the dK/dV kernel), which depend on the card; the bits of the results do not."""
    return backward_mma_tiles.dq_candidates(plan, card)[0], backward_mma_tiles.dkv_candidates(plan, card)[0]


def backward_candidates(plan: KernelPlan) -> tuple[tuple[int, int], ...]:
    """The (block_q_bwd, block_kv_bwd) pairs of the Hopper kernels that options and block mask allow, those of the
    default kernels first. Whether a pair fits shared memory is not checked.
    """
    options, blocks = plan.options, plan.blocks
    fits = lambda n, block: block is None or block % n == 0
    queries = [n for n in (128, 64) if options.block_q_bwd in (None, n) and fits(n, blocks and blocks.block_q)]
    keys = [n for n in (128, 64) if options.block_kv_bwd in (None, n) and fits(n, blocks and blocks.block_kv)]
    if splits_dkv(plan):
        keys = [n for n in keys if n == SPLIT_KEYS]
    pairs = [(q, kv) for q in queries for kv in keys]
    chosen = backward_kernels(plan)
    if isinstance(chosen, FusedKernel):
        pairs.sort(key=lambda pair: pair != (chosen.tiles.queries, FUSED_KEYS))
    else:
        asked = lambda q, kv: dataclasses.replace(options, block_q_bwd=q, block_kv_bwd=kv)
        pairs.sort(key=lambda pair: backward_kernels(dataclasses.replace(plan, options=asked(*pair))) != chosen)
    return tuple(pairs)
