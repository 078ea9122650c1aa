"""Which kernels run a plan on a GPU, with which tiles: the one place that answers it.

    refuses_device(target, options)   why no kernel is for the device
    mma_card(target, options)         the card whose kernels on mma.sync (sm80_*.py) or tcgen05 run; None: those for Hopper run

    compute capability     kernels
    8.0, 8.6, 8.7, 8.9     mma.sync, tiles copied by cp.async
    9.0                    WGMMA and TMA; with KernelOptions(instruction="mma"): mma.sync, tiles copied by TMA
    10.0, 10.3             mma.sync, tiles copied by TMA; with KernelOptions(instruction="tcgen05"): tcgen05 where it has kernels
    12.0, 12.1             mma.sync, tiles copied by TMA

The rest is about the kernels for Hopper. forward_sm100_tiles.py and backward_sm100_tiles.py choose the tiles on tcgen05, the latter also
where CTAs form pairs if the option cta_pairs asks for them;
forward_sm80_tiles.py, decode_sm80_tiles.py and backward_sm80_tiles.py those of the mma.sync kernels, by the card.
describe_kernels.py has the choice as text.

    decode_kernel(plan)      the configuration of the decode kernel, for few queries; None where the forward kernel runs
    mma_decode_kernel(..)    the same on mma.sync of a card, chosen by the same rules
    many_in_pages(plan)      whether keys lie in pages and the forward kernel runs, because the queries are many
    reads_pages(plan, card)  whether it then reads the pages in place; else their keys are gathered
    views_as_pages(..)       whether it reads contiguous keys with lengths as if they were pages, so that NaN past a length need no copy
    widens_pools(..)         whether a quantised pool becomes one of 16 bits first, so that its pages are read in place
    forward_blocks(plan)     the mask blocks that the forward kernel visits, where they are not the mask's own
    forward_kernel(plan)     the forward kernel's tile and pipeline: the first candidate of forward_tiles.py
    backward_kernels(plan)   the fused kernel or two kernels, their tiles, and the order in which dQ tiles are added (fused_choice.py)
    mma_backward_kernels(..) the tiles of the two kernels on mma.sync of a card

Every rule for Hopper follows from the plan alone, never from the GPU or from the number of its SMs, because the choice fixes the order
of sums: the same call gives the same bits on every GPU. forward_tiles.py and the backward_*_tiles.py say what fits; here is
what is faster. NOTES_backward.md has the reasons, LOG_backward.md the measurements.

The backward pass of one plan on Hopper, by the first line that fits:

    not both dQ and one of dK, dV wanted                      the wanted one of two kernels
    no tile of the fused kernel fits (`fused_tiles`)          two kernels
    float32                                                   two kernels
    a score_mod that reads an element for each (query, key)   two kernels: the fused kernel would read it transposed
    additions to dQ in any order (deterministic=False), and   the fused kernel
    a key head for each query head after `FusedKernel.spread`
    else                                                      the fused kernel where `fused_choice.ordered_dq_is_fast`, else two
"""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu import (
    backward_sm80_tiles,
    decode_sm80_tiles,
    decode_tiles,
    forward_tiles,
    fused_choice,
    sm100_support,
    three_groups,
)
from flexjax.backends.mosaic_gpu.backward_dkv_tiles import DkvTiles, SplitDkvTiles, dkv_tiles, split_dkv_tiles
from flexjax.backends.mosaic_gpu.backward_dq_tiles import DqTiles, dq_tiles
from flexjax.backends.mosaic_gpu.backward_fused_tiles import FusedTiles, fused_tiles
from flexjax.backends.mosaic_gpu.backward_sm80_tiles import Tiles
from flexjax.backends.mosaic_gpu.backward_tiles import (
    FUSED_KEYS,
    NO_DENSE_BIAS,
    SPLIT_KEYS,
    DenseBiasTypes,
    splits_dkv,
)
from flexjax.backends.mosaic_gpu.columns import ctas_of
from flexjax.backends.mosaic_gpu.decode_sm80_tiles import MmaDecodeTile
from flexjax.backends.mosaic_gpu.float_parts import parts_of
from flexjax.backends.mosaic_gpu.sm80_cards import CARDS, Card
from flexjax.backends.target import Target
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.types import KernelOptions

AnyDecodeTile = typing.TypeVar("AnyDecodeTile", bound=decode_tiles.DecodeTile)

VIEWED_PAGE = 128
"""Keys of the pages as which `views_as_pages` has contiguous keys read: those of the largest key tile, which is then one copy."""
KEYS_A_ROW = 8
"""The fewest keys for each packed row at which the decode kernel is expected to be faster: its partial results are then at
most a quarter of its memory traffic."""


# ------------------------------------------------------------------- the device

HOPPER = "9.0"


def refuses_device(target: Target | None, options: KernelOptions) -> str | None:
    """Why no kernels are for the target, in a sentence; None if some are, or if the target or its kind is not known yet.

    target    the device that the pass is lowered for; a kind whose compute capability is not known is refused
    options   with instruction="tcgen05" only the capabilities 10.0 and 10.3 have kernels; with `interpret`, the simulator, no
              device is refused
    """
    if options.interpret or target is None or target.kind is None:
        return None
    on, for_cards = (" on tcgen05", sm100_support.CAPABILITIES) if sm100_support.asked_for(options) else ("", CARDS)
    kernels = f"The GPU kernels{on} are for compute capability {', '.join(for_cards)}"
    if target.capability is None:
        return f"{kernels}; the compute capability of {target.kind} is not known."
    if target.capability not in for_cards:
        return f"{kernels}; {target.kind} has {target.capability}."
    return None


def mma_card(target: Target | None, options: KernelOptions) -> Card | None:
    """The card that the kernels on mma.sync or tcgen05 are for; None where the kernels for Hopper run. With a card, the kernels on
    tcgen05 run if the options ask for them and they have one for the pass (sm100_support.py), else those on mma.sync.

    target   the device that the pass is lowered for, one that `refuses_device` accepts; None: not known

    A target of compute capability 9.0 gives None, and its card with instruction="mma"; any other gives its card, whatever the options.
    In the simulator, and where the device or its capability is not known, the options decide: None without `instruction`, for "mma"
    the card of 9.0, for "tcgen05" that of 10.0.
    """
    capability = sm100_support.CAPABILITIES[0] if sm100_support.asked_for(options) else HOPPER
    if not options.interpret and target is not None and target.capability is not None:
        capability = target.capability
    if capability == HOPPER and options.instruction is None:
        return None
    return CARDS[capability]


# ------------------------------------------------------------------- forward


def decode_kernel(plan: KernelPlan) -> decode_tiles.DecodeTile | None:
    """Decides whether the decode kernel for Hopper runs the forward pass of a plan, and returns its configuration; None where the
    forward kernel runs.

    plan   of the call, as the user made it: its block mask has the blocks of the user, not those of the forward kernel's tiles

    It runs where `decode_tiles.decode_refuses` names no reason (more than 64 packed rows, float32, dropout, the options block_q,
    block_kv or num_stages are reasons) and `decode_is_faster`. The configuration is that of `decode_tiles.decode_tile`; a number in
    the option `split` replaces its chunk, rounded up to whole key tiles. The number of CTAs is that of the reference GPU; the caller
    replaces it. Neither the device nor the option `instruction` is looked at (`mma_card`).
    """
    if decode_tiles.decode_refuses(plan) or not decode_is_faster(plan):
        return None
    return _split_as_asked(plan, decode_tiles.decode_tile(plan))


def mma_decode_kernel(plan: KernelPlan, card: Card) -> MmaDecodeTile | None:
    """The configuration of the decode kernel on mma.sync that runs the forward pass of a plan on a card; None where the forward kernel
    does. It runs where `decode_sm80_tiles.mma_decode_refuses` names no reason and `decode_is_faster`; the option `split` counts as for
    `decode_kernel`.

    plan   with the blocks of the user's block mask
    """
    if decode_sm80_tiles.mma_decode_refuses(plan, card) or not decode_is_faster(plan):
        return None
    return _split_as_asked(plan, decode_sm80_tiles.mma_decode_tile(plan, card))


def _split_as_asked(plan: KernelPlan, tile: AnyDecodeTile) -> AnyDecodeTile:
    """The configuration with chunks of as many keys as the option `split` asks for, rounded up to whole key tiles; `tile` itself where
    `split` is None or "auto".
    """
    split = plan.options.split
    return tile if split in (None, "auto") else dataclasses.replace(tile, chunk=round_up(split, tile.block_kv))


def many_in_pages(plan: KernelPlan) -> bool:
    """Whether the keys of a plan lie in pages and its queries are too many for the decode kernel, as in a chunk of a prefill: the
    forward kernel then runs.

    False for a part of a call (`KernelPlan.partial`): its batch entries have few queries unless the option block_q of paged_attention asks
    for more, which the kernels then refuse.
    """
    return plan.page > 0 and not plan.partial and plan.q_len * plan.group > decode_tiles.ROWS


def reads_pages(plan: KernelPlan, card: Card | None) -> bool:
    """Whether the forward kernel runs a plan with keys in pages and reads the pages in place (forward_pages.py).

    card   that of `mma_card`; None: the kernel for Hopper runs

    False for plans without pages or with few queries, which the decode kernel runs (`many_in_pages`). Also False if keys have 8 bits
    or are float32, if pages are no multiple of 8 keys, which the copies need, and on Hopper if two CTAs share the columns of the head
    dims: the keys are then gathered before the forward kernel starts.
    """
    aligned = plan.page % decode_tiles.COPY_ROWS == 0
    return many_in_pages(plan) and plan.cache_dtype is None and aligned and _kernel_reads_pages(plan, card)


def views_as_pages(plan: KernelPlan, card: Card | None) -> bool:
    """Whether the forward kernel reads the contiguous keys and values of a plan with key lengths as pages of VIEWED_PAGE keys, where no
    decode kernel runs it. That kernel reads no key past a length, so that keys and values need no copy with 0 there, which NaN past a length
    would otherwise ask for.

    card   as for `reads_pages`

    Only where keys are more than queries, as in a buffer: beside as many queries the copy is a few percent of the products, and no GPU has
    compared the two ways. The bits are the same. False also for extra features, which are joined to the keys by a copy; where the kernel reads
    no pages in place (float32, whose keys are split into parts by a copy, and columns shared by two CTAs).
    """
    buffer = plan.page == 0 and plan.lengths[1] and plan.kv_len > plan.q_len
    return buffer and plan.extra_dim == 0 and _kernel_reads_pages(plan, card)


def _kernel_reads_pages(plan: KernelPlan, card: Card | None) -> bool:
    """Whether the forward kernel reads pages of the plan's inputs in place: of 16 bits and, on Hopper, of head dims whose columns no two
    CTAs share.
    """
    return parts_of(plan) == 1 and not plan.float8 and (card is not None or ctas_of(plan) == 1)


def widens_pools(plan: KernelPlan, stored_pages: int, card: Card | None) -> bool:
    """Whether the quantised pools of a plan are multiplied by their scales as a whole, so that the forward kernel reads their pages in
    place; otherwise it gets the keys of all pages of the table gathered.

    stored_pages   how many pages the pool has
    card           that of `mma_card`; None: the kernel for Hopper runs

    True where the pool has fewer pages than the table has places: less is written then. The bits of the results are the same.
    """
    fewer = stored_pages * plan.page < plan.batch * plan.kv_len
    return plan.cache_dtype is not None and fewer and reads_pages(dataclasses.replace(plan, cache_dtype=None), card)


def decode_is_faster(plan: KernelPlan) -> bool:
    """Whether the decode kernel is expected to be faster than the forward kernel, for a plan that it does not refuse.

    True for keys in pages and where the option `split` is set, also to "auto". Otherwise there must be more keys than queries, and at
    least KEYS_A_ROW keys for each packed row (a query with one of the query heads of a key head), because the decode kernel writes and
    reads partial results of each row.
    With key lengths the second condition does not count: the array is then a buffer, and the same kernel must run for
    every size of the buffer, so that the bits are the same.
    """
    if plan.page or plan.options.split is not None:
        return True
    if plan.q_len >= plan.kv_len:
        return False
    return plan.lengths[1] or plan.kv_len >= KEYS_A_ROW * plan.q_len * plan.group


def forward_kernel(plan: KernelPlan) -> forward_tiles.ForwardTile:
    """The configuration of the forward kernel that runs a plan: the size of its tiles, its rings and pipeline
    (`ForwardTile`).

    It is the first candidate of forward_tiles.py that fits. There is one, because `support.refuses` has checked it;
    IndexError for a plan without.
    """
    return forward_tiles.forward_tile(plan)


def forward_blocks(plan: KernelPlan) -> tuple[int, int] | None:
    """(queries, keys) of the mask blocks that the forward kernel visits instead of the mask's own; None for those of the mask."""
    return three_groups.mask_blocks(plan)


# ------------------------------------------------------------------- backward


class FusedKernel(typing.NamedTuple):
    """dQ, dK and dV in one kernel.

    tiles     its sizes
    ordered   whether CTAs add their dQ tiles in the fixed order of dq_order.py, or in any order
    shares    CTAs among which the query heads of a key tile are divided; each writes a dK and dV of its own, which are then added
    """

    tiles: FusedTiles
    ordered: bool
    shares: int = 1

    def spread(self, plan: KernelPlan) -> KernelPlan:
        """The plan as the kernel's CTAs see it: `fused_choice.spread` with its `shares`."""
        return fused_choice.spread(plan, self.shares)


class TwoKernels(typing.NamedTuple):
    """A kernel for dQ and one for dK and dV, the split one where `backward_tiles.splits_dkv`; the fields are their sizes."""

    dq: DqTiles
    dkv: DkvTiles | SplitDkvTiles


def backward_kernels(
    plan: KernelPlan, bias: DenseBiasTypes = NO_DENSE_BIAS, all_gradients: bool = True
) -> FusedKernel | TwoKernels:
    """The kernels of the backward pass of a plan, with their sizes, by the table at the top of this file.

    plan            with extra features joined to the head dim, or not joined: the choice is the same
    bias            dtypes of the staged array and of the gradients that the dQ kernel writes (pair_bias.py); only the sizes of
                    two kernels depend on it
    all_gradients   whether dQ and one of dK, dV are asked for. If not, the result is TwoKernels, of which the caller runs
                    those that it needs
    """
    shares = fused_choice.shares_of(plan)
    spread = fused_choice.spread(plan, shares)
    fused = fused_tiles(spread) if all_gradients and fused_choice.fused_is_faster(spread) else None
    if fused is not None:
        return FusedKernel(fused, fused_choice.adds_in_order(spread, fused), shares)
    dkv = split_dkv_tiles(plan) if splits_dkv(plan) else dkv_tiles(plan, bias)
    return TwoKernels(dq_tiles(plan, bias), dkv)


def mma_backward_kernels(plan: KernelPlan, card: Card) -> tuple[Tiles, Tiles]:
    """(sizes of the dQ kernel, sizes of the dK/dV kernel) for mma.sync. They depend on the card, the bits of the results do not.

    plan   with extra features joined to the head dim, or not joined: the choice is the same
    card   whose kernels run

    Both have sizes that fit, because `backward_sm80_tiles.refuses` has checked it; IndexError for a plan without.
    """
    return backward_sm80_tiles.dq_candidates(plan, card)[0], backward_sm80_tiles.dkv_candidates(plan, card)[0]


def backward_candidates(plan: KernelPlan) -> tuple[tuple[int, int], ...]:
    """The (block_q_bwd, block_kv_bwd) pairs of the Hopper kernels, each 64 or 128 tokens, that the options and the block
    mask allow, for `flexjax.autotune` to time. Keys are 64 where `splits_dkv`.

    plan   one that support.py does not refuse

    Pairs come by falling queries, then falling keys, but those that give the default kernels first. Whether a pair fits shared memory is not checked.
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
