"""What the backend refuses, and which tiles it proposes for timing, where the kernels on mma.sync or tcgen05 run."""

from collections.abc import Sequence

from flexjax.backends.mosaic_gpu import (
    backward_sm80_tiles,
    decode_sm80_tiles,
    decode_tiles,
    forward_sm80_tiles,
    forward_sm100_tiles,
    sm100_support,
)
from flexjax.backends.mosaic_gpu.columns import WIDEST_CTA, ctas_of
from flexjax.backends.mosaic_gpu.sm80_cards import Card
from flexjax.plan.kernel_plan import KernelPlan


def refuses_mma(plan: KernelPlan, backward: KernelPlan, given: KernelPlan, card: Card) -> str | None:
    """Why the kernels on mma.sync, or tcgen05 where the options ask for it, cannot run a plan whose arrays and programs
    the kernels take, in a sentence; None if they can.

    plan       with the blocks that the kernels of the forward pass visit
    backward   the same plan with the blocks that those of the backward pass visit
    given      the same plan with the blocks of the user's block mask and its lengths
    card       the GPU of the call

    Reasons: float32 inputs, head dims above WIDEST_CTA, a split of a call of few queries that the decode kernel cannot run, and
    options or a block mask that no tile of the forward or the backward kernels fits.
    """
    by_tcgen05 = sm100_support.asked_for(plan.options)
    kernels = f"The GPU kernels on {'tcgen05' if by_tcgen05 else 'mma.sync'}"
    if plan.dtype == "float32":
        return f"{kernels} take bfloat16 and float16 inputs, not float32."
    if ctas_of(plan) > 1:
        dims = f"{plan.head_dim + plan.extra_dim} and {plan.value_dim}"
        return f"{kernels} take head dims up to {WIDEST_CTA}, not {dims}."
    if plan.options.split is not None and given.q_len * given.group <= decode_tiles.ROWS:
        reason = decode_sm80_tiles.mma_decode_refuses(given, card)
        if reason is not None:
            asked = f"kernel_options.split={plan.options.split!r}"
            return f"{kernels} do not split the keys of this call ({asked}): {reason[0].lower()}{reason[1:]}"
    if by_tcgen05:
        fits, queries, keys = bool(forward_sm100_tiles.forward_candidates(plan)), "128 or 256", "64 or 128"
    else:
        fits, queries, keys = bool(forward_sm80_tiles.forward_candidates(plan, card)), "64 or 128", "32, 64 or 128"
    if not fits:
        names = ("block_q", "block_kv", "num_stages")
        asked = [f"{n}={getattr(plan.options, n)}" for n in names if getattr(plan.options, n)]
        return (
            f"No tile fits head dims {plan.head_dim} and {plan.value_dim} on compute capability {card.capability}"
            + (f" with {', '.join(asked)}" if asked else "")
            + f": the {kernels.removeprefix('The ')} take block_q {queries}, block_kv {keys}, num_stages 1 to 3, dividing the mask's "
            "blocks."
        )
    return backward_sm80_tiles.refuses(backward, card)


def mma_candidates(plan: KernelPlan, backward: KernelPlan, card: Card, decodes: bool) -> list[dict[str, int]]:
    """Tiles worth timing of the kernels on mma.sync or tcgen05, the expected best first: each a dict of the fields of
    KernelOptions to set (`paired`).

    plan, backward   as for `refuses_mma`
    card             the GPU of the call
    decodes          whether the decode kernel runs the forward pass, which then has no candidates

    Where the backward pass runs on tcgen05, its tile comes first; the other ones run on mma.sync.
    """
    found: Sequence[forward_sm80_tiles.MmaForwardTile | forward_sm100_tiles.Tcgen05ForwardTile]
    if sm100_support.asked_for(plan.options):
        found = forward_sm100_tiles.forward_candidates(plan)
    else:
        found = forward_sm80_tiles.forward_candidates(plan, card)
    forward = dict.fromkeys((t.block_q, t.block_kv, t.stages) for t in found)
    queries = dict.fromkeys(t.owned for t in backward_sm80_tiles.dq_candidates(backward, card))
    keys = dict.fromkeys(t.owned for t in backward_sm80_tiles.dkv_candidates(backward, card))
    pairs = [(q, kv) for q in queries for kv in keys]
    tcgen05 = sm100_support.backward_kernel(backward)
    if tcgen05 is not None:
        pairs = list(dict.fromkeys([(tcgen05.owned, tcgen05.owned), *pairs]))
    return paired([] if decodes else list(forward), pairs)


def paired(forward: Sequence[tuple[int, int, int]], backward: Sequence[tuple[int, int]]) -> list[dict[str, int]]:
    """A dict of fields of KernelOptions for each pair of the n-th candidate of the forward pass and the n-th of the
    backward pass; the shorter list repeats its last. Without candidates of the forward pass, those of the backward pass
    alone. With candidates of the forward pass there must be some of the backward pass.

    forward    (block_q, block_kv, num_stages) of each
    backward   (block_q_bwd, block_kv_bwd) of each
    """
    names = ("block_q", "block_kv", "num_stages", "block_q_bwd", "block_kv_bwd")
    if not forward:
        return [dict(zip(names[3:], pair, strict=True)) for pair in backward]
    count = max(len(forward), len(backward))
    at = lambda found, n: found[min(n, len(found) - 1)]
    return [dict(zip(names, (*at(forward, n), *at(backward, n)), strict=True)) for n in range(count)]
