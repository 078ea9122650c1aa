"""The Mosaic GPU backend: what it refuses, and how it calls the kernels.

`refuses` decides from the plan, the target and the version of jax. The modules of the kernels are imported when a
kernel is first lowered, because flexjax imports on older versions of jax than the kernels need.

Whatever chooses a tile or runs a kernel here first replaces the plan by one that the kernels can visit (kernel_plans.py).
"""

import contextlib
import dataclasses
import sys

import jax
from jax.interpreters import mlir

from flexjax.backends.base import BackwardInputs
from flexjax.backends.mosaic_gpu import (
    backward_dq_tiles,
    backward_tiles,
    choose_kernel,
    decode_sm80_tiles,
    decode_tiles,
    describe_kernels,
    float8_support,
    forward_sm80_tiles,
    forward_sm100_tiles,
    forward_tiles,
    kernel_plans,
    lowering,
    program_support,
    sm80_support,
    sm100_support,
)
from flexjax.backends.mosaic_gpu.columns import WIDEST_CTA
from flexjax.backends.mosaic_gpu.reference_gpu import REFERENCE_SMS
from flexjax.backends.target import Target
from flexjax.ir.program import Program
from flexjax.plan import lengths_as_mask, pages
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.plan.lengths import existing_results, where_exists

OLDEST_JAX = (0, 11, 0)
LARGEST_DIMS = {"query and key": 576, "value": 512}
"""The largest head dims that two CTAs share (columns.py)."""
LARGEST_BACKWARD_DIM = 512
"""The largest head dim of queries and keys whose gradients a WGMMA, of at most 256 columns in each of two CTAs, adds to."""
FLOAT32_PRECISIONS = ("default", "high", "BF16_BF16_F32", "BF16_BF16_F32_X3", "TF32_TF32_F32")
"""The names of precisions (plan/precision.py) for which products of float_parts.py are exact enough."""
LARGEST_TILE = 128
"""Queries or keys of the largest tile that some kernel takes without a smaller one to choose instead. Several runs of an
origin must be multiples of it, so that no tile reaches over the end of a run."""


def refuses(plan: KernelPlan, target: Target | None, version: tuple[int, ...] | None = None) -> str | None:
    """Why the kernels cannot run the forward pass of this plan on the target, in a sentence; None if they can.

    The sentence names the first obstacle among lengths, the origin, the device, the version of jax, arrays, programs and tiles, in this
    order; for few queries and keys in pages what `_refuses_pages` says. In the simulator (`interpret`) any device will do.

    target    the device that the pass is lowered for; None: some GPU that the kernels are for
    version   of jax, such as (0, 11, 2); that of this process by default
    """
    if plan.page and not choose_kernel.many_in_pages(plan):
        return _refuses_pages(plan, target, version or jax.__version_info__[:3])
    reason = lengths_as_mask.refuses(plan) if any(plan.lengths) else None
    reason = reason or _refuses_origin(plan)
    if reason is None and plan.float8:
        reason = choose_kernel.refuses_device(target, plan.options)
        reason = reason or float8_support.refuses(plan, choose_kernel.mma_card(target, plan.options))
    if reason is not None:
        return reason
    given, plan = plan, kernel_plans.kernel_plan(plan)
    reason = (
        choose_kernel.refuses_device(target, plan.options)
        or _refuses_jax(version or jax.__version_info__[:3])
        or _refuses_arrays(plan)
        or _refuses_programs(plan)
    )
    if reason is not None:
        return reason
    card = choose_kernel.mma_card(target, plan.options)
    if card is not None:
        return sm80_support.refuses_mma(plan, kernel_plans.kernel_plan(given, backward=True), given, card)
    return _refuses_tiles(plan)


def _refuses_pages(plan: KernelPlan, target: Target | None, version: tuple[int, ...]) -> str | None:
    """Why the decode kernel for the target (Hopper or mma.sync), which reads the pages in place, cannot run the plan, in a sentence; None
    if it can.

    plan              with keys in pages and few queries: `choose_kernel.many_in_pages` is False. With more queries the forward kernel runs,
                      which reads pages in place too, or whose keys are gathered before
    target, version   as for `refuses`
    """
    device = choose_kernel.refuses_device(target, plan.options)
    card = None if device is not None else choose_kernel.mma_card(target, plan.options)
    reason = decode_tiles.decode_refuses(plan) if card is None else decode_sm80_tiles.mma_decode_refuses(plan, card)
    if reason is not None:
        return f"The GPU kernel for keys in pages does not run this call: {reason[0].lower()}{reason[1:]}"
    return device or _refuses_jax(version) or _refuses_arrays(plan) or _refuses_programs(plan)


def _refuses_origin(plan: KernelPlan) -> str | None:
    """Why the kernels cannot run at the origin of the plan, in a sentence; None if they can, or without an origin. Refused are a block
    mask from user lists whose blocks the kernels of a pass cannot visit as they are, because they are no multiples of 64 (on tcgen05 of
    128, and queries of the option block_q if that is larger), and several runs of queries or keys that are no multiples of LARGEST_TILE
    long.
    """
    origin, blocks = plan.origin, plan.blocks
    if origin is None:
        return None
    if blocks is not None and blocks.from_user_lists:
        given, by_tcgen05 = (blocks.block_q, blocks.block_kv), sm100_support.asked_for(plan.options)
        if any(kernel_plans.kernel_blocks(plan, backward) != given for backward in (False, True)):
            unit = max(sm100_support.TILE, plan.options.block_q or 0) if by_tcgen05 else 64
            return (
                f"The GPU kernels{' on tcgen05' if by_tcgen05 else ''} take a block mask from user lists beside an origin in blocks of "
                f"multiples of {unit} tokens, not {given[0]} x {given[1]}."
            )
    for name, run, runs in (
        ("queries", origin.query_run, origin.query_runs),
        ("keys", origin.key_run, origin.key_runs),
    ):
        if runs > 1 and run % LARGEST_TILE:
            return f"The GPU kernels take several runs of {name} that are multiples of {LARGEST_TILE} tokens long, not {run}."
    return None


def _refuses_jax(version: tuple[int, ...]) -> str | None:
    """Why jax of this version, such as (0, 11, 2), is too old for the kernels, in a sentence; None from OLDEST_JAX on."""
    if version >= OLDEST_JAX:
        return None
    have, python = ".".join(map(str, version)), ".".join(map(str, sys.version_info[:2]))
    return (
        f"The GPU kernels need jax 0.11 or later, which needs Python 3.12 or later (this is jax {have} on Python {python}). "
        "In such a Python, in a checkout: `pip install -U '.[cuda13]'`."
    )


def _refuses_arrays(plan: KernelPlan) -> str | None:
    """Why the kernels cannot take the arrays of this plan, in a sentence about the first obstacle; None if they can.

    They refuse dtypes other than float32, bfloat16 and float16, for float32 precisions that three products of bfloat16
    do not reach, head dims above LARGEST_DIMS, for float32 above WIDEST_CTA (extra features included), empty arrays, a
    number of extra feature heads that does not divide the key heads, and plans that jax itself has to differentiate.
    """
    if plan.dtype not in ("float32", "bfloat16", "float16"):
        return f"The GPU kernels take float32, bfloat16 and float16 inputs, not {plan.dtype}."
    if plan.dtype == "float32" and plan.precision not in FLOAT32_PRECISIONS:
        return (
            "The GPU kernels multiply float32 as three products of bfloat16 parts, exact to about 2^-17; "
            f"precision {plan.precision!r} runs on xla."
        )
    for name, dim in (("query and key", plan.head_dim + plan.extra_dim), ("value", plan.value_dim)):
        most = WIDEST_CTA if plan.dtype == "float32" else LARGEST_DIMS[name]
        if dim > most:
            of = " of float32" if plan.dtype == "float32" else ""
            return f"The head dim of {name} is {dim}; the GPU kernels take at most {most}{of}."
    if min(plan.batch, plan.q_heads, plan.q_len, plan.kv_len, plan.head_dim, plan.value_dim) == 0:
        return "The GPU kernels do not take empty arrays."
    if plan.extra_dim and plan.kv_heads % plan.extra_heads:
        return (
            "The GPU kernels take extra key features whose number of heads divides that of the keys, "
            f"not {plan.extra_heads} heads beside {plan.kv_heads}."
        )
    if plan.differentiable:
        return "The GPU kernels cannot be differentiated by jax itself (second order, forward mode)."
    return None


def _refuses_programs(plan: KernelPlan) -> str | None:
    """Why the kernels cannot evaluate score_mod, mask_mod or the dropout mod of the plan, in a sentence about the first
    of them that `program_support.unsupported` refuses; None if they can.
    """
    for name, program in (("score_mod", plan.score), ("mask_mod", plan.mask), ("The dropout mod", plan.dropout)):
        reason = None if program is None else program_support.unsupported(program)
        if reason:
            return f"{name} {reason}."
    return None


def _refuses_tiles(plan: KernelPlan) -> str | None:
    """Why no tile of the forward, or else of the backward kernels satisfies options and block mask, in a sentence; None if one does."""
    options = plan.options
    if not forward_tiles.forward_candidates(plan):
        asked = [f"{n}={getattr(options, n)}" for n in ("block_q", "block_kv", "num_stages") if getattr(options, n)]
        return (
            f"No tile fits head dims {plan.head_dim} and {plan.value_dim}"
            + (f" with {', '.join(asked)}" if asked else "")
            + ": the GPU kernels take block_q 64, 128 or 192, block_kv 64 or 128, num_stages 2 to 4, dividing the mask's blocks."
        )
    reason = backward_tiles.refuses(plan)
    if reason is None and not backward_dq_tiles.dq_fits(plan, backward_tiles.NO_DENSE_BIAS):
        asked = f" with block_q_bwd={options.block_q_bwd}" if options.block_q_bwd else ""
        return f"No tile of the dQ kernel fits {plan.dtype} head dims {plan.head_dim} and {plan.value_dim}{asked}."
    return reason


class MosaicGpu:
    """The Mosaic GPU backend, as the Backend protocol of backends/base.py asks for it: `plan` is everything static about a call, `target`
    the device that the pass is lowered for.
    """

    name = "mosaic_gpu"

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        """Why the kernels cannot run the forward pass of this plan on the target, in a sentence; None if they can."""
        return refuses(plan, target)

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """Why the kernels cannot run the backward pass of this plan, in a sentence; None if they can.

        Keys in pages are refused, then whatever the forward pass refuses, for that reason; then head dims above LARGEST_BACKWARD_DIM,
        derivatives of score_mod that the kernels cannot evaluate, and gradients of captured arrays that they cannot sum. Without a
        score_mod nothing more is refused.

        wanted       which gradients the pass has to compute; only those of captured arrays matter
        derivative   score_mod with its derivatives, None for a call without a score_mod
        """
        if plan.page:
            return "The GPU kernels have no backward pass for keys in pages."
        why = refuses(plan, target)
        dim = plan.head_dim + plan.extra_dim
        if why is None and dim > LARGEST_BACKWARD_DIM:
            why = f"The head dim of query and key is {dim}; the GPU kernels of the backward pass take at most {LARGEST_BACKWARD_DIM}."
        if why is not None:
            return why
        if derivative is None:
            return None
        plan = kernel_plans.kernel_plan(plan, backward=True)
        reason = program_support.unsupported(derivative)
        if reason is not None:
            return f"The derivative of score_mod {reason}."
        if not any(wanted.score_captures):
            return None
        from flexjax.backends.mosaic_gpu import capture_gradients

        return capture_gradients.refuses(plan, derivative, wanted.score_captures)

    def tile_sizes(self, plan: KernelPlan, target: Target) -> str:
        """The kernels of both passes on the target with their tiles, queries x keys, as text for `flexjax.explain`, such as "forward 128
        x 128, backward fused 64 x 128, dQ added in any order" (`describe_kernels.describe`).
        """
        decodes = plan.page > 0 and not choose_kernel.many_in_pages(plan)
        visited = (
            (plan, plan) if decodes else (kernel_plans.kernel_plan(plan), kernel_plans.kernel_plan(plan, backward=True))
        )
        return describe_kernels.describe(*visited, plan, target)

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """Values of KernelOptions that are worth timing, each a dict from field name to size in tokens or slots; fields that the plan's
        options fix have that size. The n-th dict pairs the n-th candidate of the forward pass with the n-th of the backward pass; the
        shorter of the two lists repeats its last. The first dict is what runs for the plan as it is. Where the decode kernel runs, the
        dicts have no sizes of the forward pass, because its bits may not depend on what is fastest.
        """
        card = choose_kernel.mma_card(target, plan.options)
        if card is not None:
            decodes = choose_kernel.mma_decode_kernel(plan, card) is not None
            return sm80_support.mma_candidates(
                kernel_plans.kernel_plan(plan), kernel_plans.kernel_plan(plan, backward=True), card, decodes
            )
        decodes = choose_kernel.decode_kernel(plan) is not None
        backward = choose_kernel.backward_candidates(kernel_plans.kernel_plan(plan, backward=True))
        return sm80_support.paired([] if decodes else kernel_plans.forward_candidates(plan), backward)

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        """Runs the forward kernel, or the decode kernel where choose_kernel.py takes that one, for few queries; for a plan that `refuses`
        does not refuse: out, lse and, where the plan wants them, row maxima and what rounding took from out (else None). Queries that do
        not exist get out 0 and lse -inf. For the forward kernel keys in pages are gathered first, unless it reads them in place;
        quantised pools may be widened for that (`choose_kernel.widens_pools`). Contiguous keys with lengths are read as pages where that
        saves a copy (`choose_kernel.views_as_pages`). On Hopper only the number of CTAs follows from the target
        (REFERENCE_SMS where its number of cores is not known), and no result depends on it; the tile follows from the plan. The tile of
        the kernel on mma.sync also follows from the compute capability.
        """
        card = choose_kernel.mma_card(target, plan.options)
        # Only the size of the grid, which no result depends on, follows from the GPU; the tile follows from the plan.
        programs = target.cores or REFERENCE_SMS
        if card is None:
            decode = choose_kernel.decode_kernel(plan)
            if decode is not None:
                from flexjax.backends.mosaic_gpu import decode_sm90

                return decode_sm90.forward(plan, operands, dataclasses.replace(decode, programs=programs))
        else:
            split = choose_kernel.mma_decode_kernel(plan, card)
            if split is not None:
                from flexjax.backends.mosaic_gpu import decode_sm80

                split = dataclasses.replace(split, programs=programs * split.resident_ctas(card))
                return decode_sm80.forward(plan, operands, split)
        if choose_kernel.widens_pools(plan, operands.key.shape[0], card):
            plan, operands = pages.widened(plan, operands)
        given = plan, operands
        in_pages = choose_kernel.reads_pages(plan, card)
        if choose_kernel.views_as_pages(plan, card):
            in_pages = True
            plan = dataclasses.replace(plan, page=choose_kernel.VIEWED_PAGE)
        key_pages = None
        if in_pages:
            from flexjax.backends.mosaic_gpu import forward_pages

            key_pages = forward_pages.key_pages(plan, operands, "tma" if card is None else card.copying)
        from flexjax.backends.mosaic_gpu import wide_captures

        plan, operands = wide_captures.wide_forward(*kernel_plans.for_kernels(plan, plan.on_host(operands), in_pages))
        if card is None:
            from flexjax.backends.mosaic_gpu import forward_sm90

            tile = dataclasses.replace(choose_kernel.forward_kernel(plan), programs=programs)
            results = forward_sm90.forward(plan, operands, tile, key_pages)
        elif sm100_support.asked_for(plan.options):
            from flexjax.backends.mosaic_gpu import forward_sm100

            large = dataclasses.replace(forward_sm100_tiles.forward_tile(plan), programs=programs)
            results = forward_sm100.forward(plan, operands, large, key_pages)
        else:
            from flexjax.backends.mosaic_gpu import forward_sm80

            results = forward_sm80.forward(plan, operands, forward_sm80_tiles.forward_tile(plan, card), key_pages)
        if given[1].lengths is None:
            return results
        # out is 0 in rows of queries that do not exist, because the mask hides all of them; lse may be that of a sink
        return results._replace(lse=existing_results(results, given[1].lengths, given[0]).lse)

    def backward(self, plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
        """Runs the backward kernels, for a plan that `refuses_backward` does not refuse: the gradients of the wanted operands, None for
        others. The cotangents of queries that do not exist count as 0.
        """
        if given.operands.lengths is not None:
            query, d_lse = given.operands.lengths.query, given.d_lse
            given = given._replace(
                d_out=where_exists(given.d_out, query, plan),
                d_lse=None if d_lse is None else where_exists(d_lse, query, plan),
            )
        plan, operands = kernel_plans.for_kernels(plan, plan.on_host(given.operands), backward=True)
        given = given._replace(operands=operands)
        card = choose_kernel.mma_card(target, plan.options)
        if card is None:
            from flexjax.backends.mosaic_gpu import backward_sm90

            return backward_sm90.backward(plan, given)
        from flexjax.backends.mosaic_gpu import backward_sm80

        return backward_sm80.backward(plan, given, card)

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        """A context in which one pass of the call is lowered for the target (lowering.py)."""
        return lowering.lowering(target)


BACKEND = MosaicGpu()
