"""The kernels that choose_kernel.py chooses for a plan, as text for `flexjax.explain`."""

from flexjax.backends.mosaic_gpu import (
    backward_sm100_tiles,
    choose_kernel,
    decode_tiles,
    forward_sm80_tiles,
    forward_sm100_tiles,
    sm100_support,
)
from flexjax.backends.mosaic_gpu.backward_dkv_tiles import SplitDkvTiles
from flexjax.backends.mosaic_gpu.backward_tiles import FUSED_KEYS, SPLIT_KEYS
from flexjax.backends.mosaic_gpu.choose_kernel import FusedKernel
from flexjax.backends.mosaic_gpu.columns import ctas_of
from flexjax.backends.mosaic_gpu.decode_sm80_tiles import MmaDecodeTile
from flexjax.backends.mosaic_gpu.sm80_cards import Card
from flexjax.backends.target import Target
from flexjax.plan.kernel_plan import KernelPlan


def describe(plan: KernelPlan, backward: KernelPlan, given: KernelPlan, target: Target | None = None) -> str:
    """The kernels of both passes with their tiles, queries x keys, as one line of text: "forward 128 x 128, backward dQ 128 x 64, dK/dV
    64 x 128". The backward pass is that for all gradients of q, k and v; keys in pages have none, so the text has no backward pass. On
    Hopper it adds ", columns shared by clusters of two CTAs" where head dims are that wide.

    plan       with the blocks that the kernels of the forward pass visit
    backward   the same plan with the blocks that those of the backward pass visit; not read for keys in pages
    given      the same plan with the blocks of the user's block mask
    target     the device. Kernels on mma.sync are named with its compute capability, its way of copying, the slots of the rings of the
               kernel of the forward pass, and how many of its CTAs an SM holds; those on tcgen05 with its compute capability. None: not
               known

    With keys in pages for which the forward kernel runs, the text begins with "keys read in their pages, " or "keys gathered from their
    pages, ". On Hopper, for a call of at most 64 packed rows for which the decode kernel would be the faster one
    (`choose_kernel.decode_is_faster`) but which it refuses, the text says why.
    """
    card = choose_kernel.mma_card(target, plan.options)
    forward = _describe_forward(plan, given) if card is None else _describe_mma_forward(plan, given, card)
    if given.page:
        if not choose_kernel.many_in_pages(given):
            return forward
        if choose_kernel.reads_pages(given, card):
            return f"keys read in their pages, {forward}"
        # the plan does not have the size of the pool
        widened = choose_kernel.widens_pools(given, 0, card)
        return f"keys gathered from their pages{', or pools widened' if widened else ''}, {forward}"
    if card is not None:
        tiles = sm100_support.backward_kernel(backward)
        if tiles is not None:
            size = f"{backward_sm100_tiles.TILE} x {backward_sm100_tiles.TILE}"
            pairs = ", dK/dV in pairs of CTAs" if tiles.pairs else ""
            return f"{forward}, backward dQ and dK/dV {size} by tcgen05{pairs}"
        dq, dkv = choose_kernel.mma_backward_kernels(backward, card)
        return f"{forward}, backward dQ {dq.owned} x {dq.visited}, dK/dV {dkv.visited} x {dkv.owned}"
    shared = ", columns shared by clusters of two CTAs" if ctas_of(plan) > 1 else ""
    return f"{forward}, backward {_describe_backward(backward)}{shared}"


def _describe_mma_forward(plan: KernelPlan, given: KernelPlan, card: Card) -> str:
    """The kernel on mma.sync or tcgen05 of the forward pass as text: "mma.sync with cp.async for compute capability 8.0: " before
    "forward 128 x 64" or the text of `_work_items`, and after it ", " and that of `_occupancy`; or "tcgen05 for compute capability 10.0:
    forward 256 x 128, 2 stages".

    plan, given   as for `describe`
    """
    text = f"mma.sync with {card.copying} for compute capability {card.capability}: "
    decode = choose_kernel.mma_decode_kernel(given, card)
    if decode is not None:
        return f"{text}{_work_items(plan, decode)}, {_occupancy(decode, card)}"
    if sm100_support.asked_for(plan.options):
        return f"tcgen05 for compute capability {card.capability}: {forward_sm100_tiles.describe(plan)}"
    tile = forward_sm80_tiles.forward_tile(plan, card)
    return f"{text}forward {tile.block_q} x {tile.block_kv}, {_occupancy(tile, card)}"


def _describe_forward(plan: KernelPlan, given: KernelPlan) -> str:
    """The kernel of the forward pass on Hopper as text: "forward 128 x 128", with " (not the decode kernel: ...)" and the reason after it
    where `describe` says so; or that of `_work_items`.

    plan, given   as for `describe`
    """
    decode = choose_kernel.decode_kernel(given)
    if decode is not None:
        return _work_items(plan, decode)
    tile = choose_kernel.forward_kernel(plan)
    text = f"forward {tile.block_q} x {tile.block_kv}"
    why = decode_tiles.decode_refuses(given)
    if why is None or plan.q_len * plan.group > decode_tiles.ROWS or not choose_kernel.decode_is_faster(given):
        return text
    return f"{text} (not the decode kernel: {why})"


def _work_items(plan: KernelPlan, decode: decode_tiles.DecodeTile) -> str:
    """A decode kernel as text: "forward decode 4 x 64, 128 work items of 1024 keys", its packed rows x keys of a tile, and its work items
    where all keys exist.
    """
    items = plan.batch * plan.kv_heads * decode_tiles.chunks(plan, decode)
    return f"forward decode {decode.used_rows} x {decode.block_kv}, {items} work items of {decode.chunk} keys"


def _occupancy(tile: forward_sm80_tiles.MmaForwardTile | MmaDecodeTile, card: Card) -> str:
    """The slots of the rings of a kernel on mma.sync, and how many of its CTAs an SM of the card holds, as text: "2 stages, two CTAs on
    an SM", "1 stage, one CTA on an SM", or with another number "3 CTAs on an SM".
    """
    ctas = tile.resident_ctas(card)
    fits = {1: "one CTA", 2: "two CTAs"}.get(ctas, f"{ctas} CTAs")
    return f"{tile.stages} {'stage' if tile.stages == 1 else 'stages'}, {fits} on an SM"


def _describe_backward(plan: KernelPlan) -> str:
    """The kernels of the backward pass on Hopper, for all gradients of q, k and v and nothing staged, with their tiles, queries x keys,
    as text: "fused 64 x 128, dQ added in any order" (or "in a fixed order", and where query heads of a key tile are divided
    ", 4 CTAs for each key tile"), "dQ 128 x 64, dK/dV 64 x 128" or, with the split dK/dV
    kernel, "dQ 128 x 64, split dK/dV 64 x 64".
    """
    chosen = choose_kernel.backward_kernels(plan)
    if isinstance(chosen, FusedKernel):
        order = "a fixed order" if chosen.ordered else "any order"
        shares = "" if chosen.shares == 1 else f", {chosen.shares} CTAs for each key tile"
        return f"fused {chosen.tiles.queries} x {FUSED_KEYS}, dQ added in {order}{shares}"
    dq, dkv = chosen
    if isinstance(dkv, SplitDkvTiles):
        last = f"split dK/dV {dkv.queries} x {SPLIT_KEYS}"
    else:
        last = f"dK/dV {dkv.queries} x {dkv.rows * dkv.groups}"
    return f"dQ {dq.rows * dq.groups} x {dq.keys}, {last}"
