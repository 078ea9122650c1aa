"""The differentiable function of a call with `context=`: a function of its operands and tables with rules of its own.

    forward   Forward.forward      inside shard_map; a primitive with a partitioning rule for automatic axes
    tangent   a primitive, linear in the tangents, whose transpose is
    backward  Backward.backward

Reverse mode therefore stores the operands of each device, out and lse, and nothing that a device received.

`flat` begins with the leaves of the operands, then those of the tables. `moving` and `wanted` say for each of
Operands.movable whether it has a tangent and whether it gets a gradient.
"""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import core
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from flexjax.context import axes as context_axes
from flexjax.context.axes import residuals
from flexjax.context.backward import Backward
from flexjax.context.context_parallel import ContextCall
from flexjax.context.device import Passes
from flexjax.context.forward import Forward
from flexjax.mod_tools.settings import own
from flexjax.passes import autodiff, expectations
from flexjax.passes.primitive import aval_like
from flexjax.plan.kernel_plan import FIRST_CAPTURE, Results
from flexjax.varying import varying_alike

Array = jax.Array

PASSES = Passes(autodiff.forward_p, autodiff.tangent_p, autodiff.backward_p, varying_alike)


def run(call: ContextCall, flat: Sequence[Array]) -> list[Array]:
    """The results of a call: [out, lse] and perhaps max_scores and expectations. Can be differentiated and jitted."""
    return list(_compiled(call, *(flat if call.is_global else varying_alike(flat))))


def _split(call: ContextCall, flat: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """(the leaves of the operands and of the tables, the arguments after them)."""
    n = call.problem.structure.num_leaves + call.structure.num_leaves
    return list(flat[:n]), list(flat[n:])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: ContextCall, *flat: Array) -> tuple[Array, ...]:
    """The Results that the plan asks for, in the order of their fields: on global arrays by the primitive `forward`."""
    if call.is_global:
        return tuple(forward_p.bind(*flat, call=call))
    return tuple(Forward.of(PASSES, call, flat).forward())


# under jit also where the call is not: inside shard_map, each operation would be a program of its own
_compiled = jax.jit(_attend, static_argnums=0)


@functools.partial(_attend.defjvp, symbolic_zeros=True)
@own
def _jvp(call: ContextCall, primals: Sequence[Array], tangents: Sequence[object]) -> tuple[tuple, tuple]:
    """The jvp rule of `_attend`. max_scores and rounding have zero tangents."""
    indices = call.problem.arrange(range(call.problem.structure.num_leaves)).movable
    given = [None if i is None or isinstance(tangents[i], SymbolicZero) else tangents[i] for i in indices]
    moving = tuple(x is not None for x in given)
    asked = call.plan.returns_rounding
    # A captured array has a tangent and inputs have 16 bits: later passes get the float32 out, to which the rounding
    # error is added again.
    if any(moving[FIRST_CAPTURE:]):
        call = dataclasses.replace(call, problem=call.problem.for_captures())
    named = lambda x, name: None if x is None else checkpoint_name(x, name)
    out, lse, top, rounding, sums = Results.of(call.plan, _attend(call, *primals))
    out, lse = checkpoint_name(out, "flexjax_out"), checkpoint_name(lse, "flexjax_lse")
    rounding, sums = named(rounding, "flexjax_out"), named(sums, "flexjax_lse")
    more = [] if sums is None else [sums]
    if any(moving):
        exact = out if rounding is None else Results(out, lse, None, rounding).float32_out
        given = [x for x in given if x is not None]
        t_out, *moved = tangent_p.bind(*primals, exact, lse, *more, *given, call=call, moving=moving)
        moved = [t_out.astype(out.dtype), *moved]
    else:
        moved = [jnp.zeros_like(x) for x in (out, lse, *more)]
    others = [x for x in (top, rounding if asked else None) if x is not None]
    return (out, lse, *others, *more), (*moved[:2], *map(jnp.zeros_like, others), *moved[2:])


def _tangent(*flat: Array, call: ContextCall, moving: tuple[bool, ...]) -> list[Array]:
    """The code of `tangent`: flat has out, lse, perhaps expectations, and the tangents of the moving at its end."""
    fixed, rest = _split(call, flat)
    kept = residuals(call.plan)
    return Backward.of(PASSES, call, fixed).tangent(rest[:kept], rest[kept:], moving)


def _backward(*flat: Array, call: ContextCall, wanted: tuple[bool, ...], has_lse: bool) -> list[Array]:
    """The code of `backward`: flat has out, lse and the cotangents of out, with `has_lse` lse, and expectations."""
    fixed, (out, lse, d_out, *others) = _split(call, flat)
    d_lse = others.pop(0) if has_lse else None
    device = dataclasses.replace(Backward.of(PASSES, call, fixed), d_sums=others[0] if others else None)
    return device.backward(out, lse, d_out.astype(call.plan.dtype), d_lse, wanted)


@own
def _tangent_transpose(
    cotangents: Sequence[Array | ad.Zero], *flat: typing.Any, call: ContextCall, moving: tuple[bool, ...]
) -> list:
    """The transpose rule of `tangent`, by `backward`; None for each fixed argument (operands, tables and results)."""
    fixed, rest = _split(call, flat)
    kept = residuals(call.plan)
    out, lse, *sums = rest[:kept]
    d_out, d_lse, *d_sums = (None if isinstance(x, ad.Zero) else x for x in cotangents)
    nothing: list = [None] * (len(fixed) + kept)
    if d_out is None and d_lse is None and not any(x is not None for x in d_sums):
        return nothing + [ad.Zero(x.aval) for x in rest[kept:]]
    d_out = jnp.zeros_like(out) if d_out is None else d_out
    if d_sums and d_sums[0] is None:
        call, d_sums = dataclasses.replace(call, problem=expectations.without(call.problem)), []
    elif d_sums and not call.plan.weighted:
        d_lse = expectations.cotangent_of_lse(d_lse, typing.cast(Array, d_sums[0]), sums[0])
    given = [*fixed, out, lse, *(x for x in (d_out, d_lse, *d_sums) if x is not None)]
    run = backward_p.bind if call.is_global else _backward
    return nothing + list(run(*given, call=call, wanted=moving, has_lse=d_lse is not None))


def _primitive(name: str, function: typing.Callable[..., list[Array]], types: typing.Callable[..., list]) -> Primitive:
    """Makes a primitive that computes `function`, on one device's arrays or on global ones under a partitioning rule.

    types   types(avals, call=, **params) returns the types of the results

    Its jvp and vmap rules raise NotImplementedError on global arrays.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, **params: types(avals, **params))

    @primitive.def_impl
    @own
    def run(*flat: Array, **params: object) -> list[Array]:
        """Evaluates outside of jit: compiled, also under jax.disable_jit, where a jit would bind it again."""
        with jax.disable_jit(False):
            return jax.jit(functools.partial(primitive.bind, **params))(*flat)

    @own
    def lower(ctx: mlir.LoweringRuleContext, *flat: typing.Any, call: ContextCall, **params: typing.Any) -> typing.Any:
        """Inlines the code on one device's arrays; on global ones, makes a call with the partitioning rule."""
        if call.is_global and call.axes:
            return context_axes.lower_with_rule(ctx, flat, primitive, function, call, params)
        sizes = [(name, size) for name, size in context_axes.manual_shape(ctx).items()]
        plain = [core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]  # type: ignore[attr-defined]
        jaxpr = jax.make_jaxpr(functools.partial(function, call=call, **params), axis_env=sizes)(*plain)
        inlined = mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)
        return inlined(ctx.replace(avals_in=plain), *flat)

    @own
    def differentiate(primals: Sequence[Array], tangents: Sequence[typing.Any], **params: typing.Any) -> tuple:
        """The jvp rule, for second derivatives: JAX differentiates the code."""
        if params["call"].is_global:
            raise NotImplementedError(
                "Second derivatives of a call with context= are not computed over automatic mesh axes. Make the axes "
                "explicit, or call it inside jax.shard_map."
            )
        return jax.jvp(functools.partial(function, **params), list(primals), list(map(ad.instantiate_zeros, tangents)))

    @own
    def batch(flat: Sequence[Array], dims: Sequence[int | None], **params: typing.Any) -> tuple:
        """The vmap rule: JAX maps the code."""
        if params["call"].is_global:
            raise NotImplementedError(
                "A call with context= is not mapped by jax.vmap over automatic mesh axes. Make the mapped axis a part "
                "of the batch, make the axes explicit, or call it inside jax.shard_map."
            )
        outs = jax.vmap(functools.partial(function, **params), in_axes=tuple(dims))(*flat)
        return outs, [0] * len(outs)

    mlir.register_lowering(primitive, lower)
    ad.primitive_jvps[primitive] = differentiate
    batching.primitive_batchers[primitive] = batch
    return primitive


def _forward(*flat: Array, call: ContextCall) -> list[Array]:
    """The code of `forward`: the Results that the plan asks for, in the order of their fields."""
    return Forward.of(PASSES, call, flat).forward()


def _forward_types(avals: Sequence[core.ShapedArray], call: ContextCall) -> list[core.ShapedArray]:
    """The types of the results of `forward`, on the mesh of query, split over no axis. out is in the dtype of query."""
    plan, query = call.plan, avals[0]
    rows = query.shape[:-1]
    stats = core.ShapedArray(rows, jnp.dtype(plan.score_dtype))
    out = core.ShapedArray((*rows, plan.value_dim), query.dtype)
    sums = core.ShapedArray((*rows, plan.expectations), stats.dtype)
    asked = [stats] * plan.max_scores, [out] * plan.returns_rounding, [sums] * (plan.expectations > 0)
    found = [out, stats, *itertools.chain(*asked)]
    return [aval_like(query, x.shape, x.dtype) for x in found]


def _tangent_types(avals: Sequence[core.ShapedArray], call: ContextCall, moving: tuple[bool, ...]) -> list:
    """The types of the tangents of out, lse and expectations; ValueError if score_mod has no derivative."""
    call.problem.needed_derivative(moving[FIRST_CAPTURE:])
    return list(_split(call, avals)[1][: residuals(call.plan)])  # type: ignore[arg-type]


def _backward_types(
    avals: Sequence[core.ShapedArray], call: ContextCall, wanted: tuple[bool, ...], has_lse: bool
) -> list[core.ShapedArray]:
    """The types of the gradients, which are those of the wanted operands."""
    places = call.problem.arrange(range(call.problem.structure.num_leaves)).movable
    return [avals[place] for place, want in zip(places, wanted, strict=True) if want]


forward_p = _primitive("flexjax_context_forward", _forward, _forward_types)
tangent_p = _primitive("flexjax_context_tangent", _tangent, _tangent_types)
backward_p = _primitive("flexjax_context_backward", _backward, _backward_types)
ad.primitive_transposes[tangent_p] = _tangent_transpose
