"""`make_primitive`: a JAX primitive of attention, which chooses its backend when it is lowered for a platform.

This file has what the primitives have in common: their evaluation outside of jit, their abstract evaluation and their
lowering. The rules of differentiation and of vmap are in autodiff.py.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import core
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir

from flexjax import partition
from flexjax.backends import target as targets
from flexjax.backends.target import Target
from flexjax.errors import add_note_once, hide_frames
from flexjax.mod_tools.settings import check_finite, own
from flexjax.parallel import auto_axes
from flexjax.parallel.gathers import warn_of_whole_calls
from flexjax.passes import dispatch, lowered
from flexjax.passes.dispatch import Run
from flexjax.plan import tuned
from flexjax.plan.problem import Problem

Array = jax.Array

Shapes = list[core.ShapedArray]
"""Types of a primitive's results, derived from the problem because tracing a kernel for them takes long."""

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""Platforms with their own lowering rules; all others share a rule, for the first platform of a lowering."""


def make_primitive(
    name: str, function: Callable[..., list[Array]], shapes: Callable[..., Shapes], choose: Callable[..., Run]
) -> Primitive:
    """Makes a primitive with its evaluation, its types and its lowering; the caller registers its other rules.

    function(*flat, run=, problem=, **params) -> results    its code, inlined where the primitive is lowered
    shapes(avals, problem=, **params)                       types of the results, from those of the arguments
    choose(target, problem=, **params) -> Run               chooses the backend when the primitive is lowered
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.lru_cache(maxsize=512)
    def compiled(measured: object, **params: object) -> Callable[..., list[Array]]:
        """The primitive as a jitted function, for calls outside of jit."""
        # cached by `measured` too, the state of the files of measured tiles, because other tiles are another program
        return jax.jit(functools.partial(primitive.bind, **params))

    @functools.lru_cache(maxsize=64)
    def simulated(target: Target, problem: Problem, **params: object) -> Callable[..., list[Array]]:
        """`function` as a jitted function without the primitive, for simulated kernels outside of jit."""
        # under jit it is refused: the simulator has ordered effects, for which a lowering rule gets no tokens
        run = choose(target, problem=problem, **params)
        return jax.jit(functools.partial(function, run=run, problem=problem, **params))

    @primitive.def_impl
    @own
    def run(*flat: Array, problem: Problem, **params: object) -> list[Array]:
        """Evaluates the primitive outside of jit, by `simulated` for options.interpret, else by `compiled`."""
        if (plan := problem.plan.for_any_lists()) is not problem.plan:
            problem = dataclasses.replace(problem, plan=plan)
        # a jit that is disabled would bind the primitive again
        with jax.disable_jit(False):
            if problem.plan.options.interpret:
                results = simulated(target_of(flat[0]), problem=problem, **params)(*flat)
            else:
                results = compiled(tuned.state(), problem=problem, **params)(*flat)
        check_finite(f"the results of {name}", *results, hidden="wanted" not in params)
        return results

    @primitive.def_abstract_eval
    @own
    def types(*avals: core.ShapedArray, **params: object) -> list[core.ShapedArray]:
        """The types of the results, for abstract evaluation: on the mesh of query, the first argument."""
        return [aval_like(avals[0], found.shape, found.dtype) for found in shapes(avals, **params)]

    @own
    def inlined_code(
        ctx: mlir.LoweringRuleContext, *flat: ir.Value, platform: str | None, problem: Problem, **params: object
    ) -> typing.Any:
        """The lowering rule: chooses the backend for the target and inlines the code of `function` on that backend.

        If XLA's partitioner splits the program over devices by rules, the primitive becomes a call with a partitioning
        rule, and is lowered again for one device's share. If it splits the program without rules, or keys are in pages,
        for which there is no rule, every device computes the whole call, with a warning. `platform` None: the first
        platform of the module.
        """
        # Types without sharding: a loop that starts from zeros would not match operands that vary over mesh axes.
        avals: typing.Any = ctx.avals_in
        plain = [core.ShapedArray(a.shape, a.dtype) for a in avals]
        target = targets.of_lowering(ctx, platform or ctx.module_context.platforms[0])
        how = None if problem.plan.options.interpret else partition.how_split(ctx, target.platform)
        if problem.plan.page and isinstance(how, partition.Mesh):
            how = partition.NoRule(partition.OF_PAGES)
        if isinstance(how, partition.NoRule):
            target = dataclasses.replace(target, automatic=True)
            warn_of_whole_calls(problem, how.why)
        elif how is not None:
            # asked here, because a refusal that the partitioner meets is an internal error of XLA
            dispatch.choose(problem.plan, problem.implementation, target)
            shared = dataclasses.replace(problem, settings=partition.settings_now())
            rule = auto_axes.rule_of(auto_axes.SplitPrimitive(primitive, shared, params), how, target.kind)
            whole = functools.partial(primitive.bind, problem=problem, **params)
            return partition.lower_with_rule(ctx, how, whole, rule, flat)
        run = choose(target, problem=problem, **params)
        if problem.plan.options.interpret and not run.backend.simulates_in_jit:
            raise NotImplementedError(
                f"The kernels of {run.backend.name} are simulated outside of jax.jit and of loops only. Call "
                "flex_attention without them (jax.grad and jax.vmap may stay), or leave out "
                "kernel_options.interpret."
            )
        code = functools.partial(function, run=run, problem=problem, **params)
        with problem.settings(), targets.as_seen_by_pallas(target), run.backend.lowering(ctx.module_context, target):
            if run.backend.slow_to_lower and not problem.plan.options.interpret and lowered.fits(ctx):
                key = (name, target, problem, *sorted(params.items()))
                code = lowered.as_call(code, plain, ctx.module_context.platforms[0], key)
            return mlir.lower_fun(code, multiple_results=True)(ctx.replace(avals_in=plain), *flat)

    def lower(
        ctx: mlir.LoweringRuleContext, *flat: ir.Value, platform: str | None, problem: Problem, **params: object
    ) -> typing.Any:
        """`inlined_code`, whose errors have the call as a note and no frames of flexjax."""
        try:
            return inlined_code(ctx, *flat, platform=platform, problem=problem, **params)
        except Exception as error:
            add_note_once(error, problem.call)
            hide_frames(error)
            raise

    for platform in PLATFORMS:
        mlir.register_lowering(primitive, functools.partial(lower, platform=platform), platform=platform)
    mlir.register_lowering(primitive, functools.partial(lower, platform=None))
    return primitive


def target_of(array: Array) -> Target:
    """The device on which a call outside of jit runs: that of `array`, the first by name if it is on several."""
    return targets.of_device(min(jnp.asarray(array).devices(), key=str))


def aval_like(query: core.ShapedArray, shape: tuple[int, ...], dtype: jnp.dtype) -> core.ShapedArray:
    """The type of a result: on the mesh of query, split over no axis, and varying (in shard_map) as query varies."""
    sharding = query.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
    return query.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
