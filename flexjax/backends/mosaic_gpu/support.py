"""The Mosaic GPU backend: what every family of kernels refuses; what differs is asked of the family of the call
(families/family.py).

The modules of the kernels are imported when a kernel is first lowered, because flexjax imports on older versions of jax
than the kernels need.
"""

import contextlib
import sys

import jax
from jax import lax
from jax.interpreters import mlir

from flexjax.backends.base import ForwardMode, WorkItems, rule_not_linear
from flexjax.backends.mosaic_gpu.families import choose_kernel, kernel_plans, texts
from flexjax.backends.mosaic_gpu.families.choose_family import family_of, refuses_device
from flexjax.backends.mosaic_gpu.families.family import Family
from flexjax.backends.mosaic_gpu.lowering import lowering
from flexjax.backends.mosaic_gpu.machine.columns import WIDEST_CTA
from flexjax.backends.mosaic_gpu.machine.reference_gpu import REFERENCE_SMS
from flexjax.backends.mosaic_gpu.machine.simulator import running
from flexjax.backends.mosaic_gpu.programs import support as programs_support
from flexjax.backends.mosaic_gpu.tangent.tiles import Moving
from flexjax.backends.target import Target
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results, TangentInputs, Wanted
from flexjax.plan.rewrite import Steps
from flexjax.rewrites import lengths_as_mask

OLDEST_JAX = (0, 11, 0)
MOST_EXPECTATIONS = 4  # a sum is two registers of a thread
LARGEST_DIMS = {"query and key": 576, "value": 512}
"""The largest head dims that two CTAs share (machine/columns.py)."""
LARGEST_BACKWARD_DIM = 512
"""The largest head dim of queries and keys whose gradients a WGMMA, of at most 256 columns in each of two CTAs, adds
to.
"""
FLOAT32_PRECISIONS = ("default", "high", "BF16_BF16_F32", "BF16_BF16_F32_X3", "TF32_TF32_F32")
"""The names of precisions (plan/precision.py) for which products of machine/float_parts.py are exact enough."""
LARGEST_TILE = 128
"""Queries or keys of the largest tile that some kernel takes without a smaller one to choose instead. Several runs of
an origin must be multiples of it, so that no tile reaches over the end of a run.
"""


def refuses(plan: KernelPlan, target: Target | None, version: tuple[int, ...] | None = None) -> str | None:
    """Why the kernels cannot run the forward pass of this plan on the target, in a sentence about the first obstacle;
    None if they can.

    target    None: some GPU that the kernels are for
    version   of jax, such as (0, 11, 2); None: that of this process
    """
    if plan.expectations > MOST_EXPECTATIONS:
        return f"The GPU kernels compute at most {MOST_EXPECTATIONS} expectations, not {plan.expectations}."
    family, device = family_of(target, plan.options), refuses_device(target, plan.options)
    version = version or jax.__version_info__[:3]
    if plan.options.invariant and (why := family.refuses_invariant(plan)) is not None:
        return why
    if plan.page and not choose_kernel.many_in_pages(plan):
        reason = family.refuses_decode(plan)
        if reason is not None:
            return f"The GPU kernel for keys in pages does not run this call: {reason[0].lower()}{reason[1:]}"
        return device or _refuses_jax(version) or _refuses_arrays(plan) or _refuses_programs(plan)
    reason = (lengths_as_mask.refuses(plan) if any(plan.lengths) else None) or _refuses_origin(plan, family) or device
    if reason is None and plan.float8:
        reason = family.refuses_float8(plan)
    if reason is not None:
        return reason
    made = kernel_plans.kernel_plan(plan, family)
    return _refuses_jax(version) or _refuses_arrays(made) or _refuses_programs(made) or family.refuses(plan)


def _refuses_origin(plan: KernelPlan, family: Family) -> str | None:
    """Why the kernels cannot run at the origin of the plan, in a sentence; None if they can, or without an origin."""
    origin, blocks = plan.origin, plan.blocks
    if origin is None:
        return None
    if blocks is not None and blocks.from_user_lists:
        given = blocks.block_q, blocks.block_kv
        if any(kernel_plans.kernel_blocks(plan, family, backward) != given for backward in (False, True)):
            return (
                f"{family.kernels} take a block mask from user lists beside an origin in blocks of "
                f"multiples of {family.block_unit(plan)} tokens, not {given[0]} x {given[1]}."
            )
    for name, run, runs in (
        ("queries", origin.query_run, origin.query_runs),
        ("keys", origin.key_run, origin.key_runs),
    ):
        if runs > 1 and run % LARGEST_TILE:
            return (
                f"The GPU kernels take several runs of {name} that are multiples of {LARGEST_TILE} "
                f"tokens long, not {run}."
            )
    return None


def _refuses_jax(version: tuple[int, ...]) -> str | None:
    """Why this version of jax is too old for the kernels, in a sentence; None from OLDEST_JAX on."""
    if version >= OLDEST_JAX:
        return None
    have, python = ".".join(map(str, version)), ".".join(map(str, sys.version_info[:2]))
    return (
        "The GPU kernels need jax 0.11 or later, which needs Python 3.12 or later (this is jax "
        f"{have} on Python {python}). "
        "In such a Python, in a checkout: `pip install -U '.[cuda13]'`."
    )


def _refuses_arrays(plan: KernelPlan) -> str | None:
    """Why the kernels cannot take the arrays of this plan, in a sentence about the first obstacle; None if they can."""
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
    """Why the kernels cannot evaluate score_mod, mask_mod or dropout, in a sentence about the first."""
    for name, program in (("score_mod", plan.score), ("mask_mod", plan.mask), ("The dropout mod", plan.dropout)):
        reason = None if program is None else programs_support.unsupported(program)
        if reason:
            return f"{name} {reason}."
    return None


class MosaicGpu(ForwardMode):
    """The Mosaic GPU backend (see backends/base.py)."""

    name = "mosaic_gpu"
    slow_to_lower = True
    simulates_in_jit = False  # ordered effects, whose tokens a lowering rule does not get

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        return refuses(plan, target)

    def refuses_request(self, plan: KernelPlan) -> None:
        return None

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """The sentence of the refusal. Without a score_mod, and so without `derivative`, the forward pass, pages and
        the head dim decide.
        """
        if plan.page:
            return "The GPU kernels have no backward pass for keys in pages."
        why = refuses(plan, target)
        dim = plan.head_dim + plan.extra_dim
        if why is None and dim > LARGEST_BACKWARD_DIM:
            why = (
                f"The head dim of query and key is {dim}; the GPU kernels of the backward pass take "
                f"at most {LARGEST_BACKWARD_DIM}."
            )
        if why is not None:
            return why
        if derivative is None:
            return None
        if derivative.takes_cotangent:
            return rule_not_linear("GPU")
        plan = kernel_plans.kernel_plan(plan, family_of(target, plan.options), backward=True)
        reason = programs_support.unsupported(derivative)
        if reason is not None:
            return f"The derivative of score_mod {reason}."
        if not any(wanted.score_captures):
            return None
        from flexjax.backends.mosaic_gpu.captures import gradients as captures_gradients

        return captures_gradients.refuses(plan, derivative, wanted.score_captures)

    def refuses_tangent(
        self, plan: KernelPlan, target: Target, moving: Wanted, derivative: Program | None
    ) -> str | None:
        if plan.page:
            return "The GPU kernels have no forward mode for keys in pages."
        if plan.expectations:
            return "The GPU kernels have no forward mode of expectations."
        reason = refuses(plan, target)
        if reason is not None:
            return reason
        reason = None if derivative is None else programs_support.unsupported(derivative)
        if reason is not None:
            return f"The derivative of score_mod {reason}."
        query, key = moving.query or moving.query_extra, moving.key or moving.key_extra
        moves = Moving(query, key, moving.value, any(moving.score_captures))
        return family_of(target, plan.options).refuses_tangent(plan, moves)

    def tile_sizes(self, plan: KernelPlan, target: Target) -> str:
        """The kernels of both passes with their tiles, queries x keys, such as "forward 128 x 128, backward fused 64 x
        128, dQ added in any order"; for keys in pages of the forward pass alone.
        """
        family = family_of(target, plan.options)
        forward = f"{texts.pages_before(plan)}{family.describe_forward(plan)}"
        return forward if plan.page else f"{forward}, backward {family.describe_backward(plan)}"

    def reads(self, plan: KernelPlan, target: Target) -> WorkItems | str | None:
        items = family_of(target, plan.options).work_items(plan, target)
        return texts.page_reads(plan) if items is None and plan.page else items

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        return family_of(target, plan.options).candidates(plan)

    def rewrites(self, plan: KernelPlan, target: Target, backward: bool = False) -> Steps:
        """Known lists, blocks that the kernels visit, lengths as a part of the block mask, extra features in the head
        dim; in the forward pass also pages, which are gathered unless the kernel reads them in place, and captured
        arrays. () for the decode kernel.
        """
        family = family_of(target, plan.options)
        return kernel_plans.backward_steps(plan, family) if backward else kernel_plans.forward_steps(plan, family)

    def tangent_steps(self, plan: KernelPlan, target: Target) -> Steps:
        return self.rewrites(plan, target, backward=True)

    def describe_tangent(self, plan: KernelPlan, target: Target) -> str:
        return family_of(target, plan.options).describe_tangent(plan)

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        with running(plan.options.interpret):
            results = family_of(target, plan.options).forward(plan, operands, target.cores or REFERENCE_SMS)
        # In a scan over layers XLA moves a kernel into the update that keeps its result for the backward pass, and runs
        # it once more for the other users of the result; not past a barrier.
        return jax.tree.map(lax.optimization_barrier, results)

    def backward(self, plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
        with running(plan.options.interpret):
            return family_of(target, plan.options).backward(plan, given)

    def tangent(self, plan: KernelPlan, given: TangentInputs, target: Target) -> tuple[jax.Array, jax.Array]:
        with running(plan.options.interpret):
            return family_of(target, plan.options).tangent(plan, given, target.cores or REFERENCE_SMS)

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        """A context in which one pass of the call is lowered for the target (lowering/lowering.py)."""
        return lowering.lowering(module, target)


BACKEND = MosaicGpu()
