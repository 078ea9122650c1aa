"""The differentiable function of a call with `context=`: one function of its operands and tables, with rules of its own.

    forward   Forward.forward      inside shard_map; a primitive with a partitioning rule for automatic axes
    tangent   a primitive, linear in the tangents, whose transpose is
    backward  Backward.backward

Reverse mode therefore stores the operands of each device, out and lse, and nothing that a device received.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import core
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from flexjax import autodiff
from flexjax.parallel import context_axes
from flexjax.parallel.context_backward import Backward
from flexjax.parallel.context_device import Passes
from flexjax.parallel.context_forward import Forward
from flexjax.parallel.context_parallel import ContextCall
from flexjax.plan.kernel_plan import FIRST_CAPTURE, Results
from flexjax.primitive import aval_like
from flexjax.varying import varying_alike

Array = jax.Array

PASSES = Passes(autodiff.forward_p, autodiff.tangent_p, autodiff.backward_p, varying_alike)


def run(call: ContextCall, flat: Sequence[Array]) -> list[Array]:
    """The results of a call as a list: out, lse and, if the plan asks for it, max_scores. Can be differentiated and jitted.

    flat   the leaves of the operands, then those of the tables
    """
    return list(_compiled(call, *(flat if call.is_global else varying_alike(flat))))


def _split(call: ContextCall, flat: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """The arguments `flat` of a primitive in two parts: (the leaves of the operands and of the tables, the arguments after them)."""
    n = call.problem.structure.num_leaves + call.structure.num_leaves
    return list(flat[:n]), list(flat[n:])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: ContextCall, *flat: Array) -> tuple[Array, ...]:
    """out, lse and, if the plan asks for them, max_scores and rounding: by the primitive `forward` on global arrays, by its code on
    arrays of one device.

    call   the static part of the call
    flat   the leaves of the operands, then those of the tables
    """
    if call.is_global:
        return tuple(forward_p.bind(*flat, call=call))
    return tuple(Forward.of(PASSES, call, flat).forward())


_compiled = jax.jit(_attend, static_argnums=0)
"""Under jit also where the call is not: inside shard_map, each operation would be a program of its own."""


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _jvp(call: ContextCall, primals: Sequence[Array], tangents: Sequence[object]) -> tuple[tuple, tuple]:
    """The jvp rule of `_attend`: (results, their tangents). The tangents of out and lse are those of the primitive `tangent`, or zeros if
    no operand has a tangent; those of the other results are zeros.

    primals, tangents   the arguments `flat` of `_attend`, and for each of them its tangent or a SymbolicZero

    Where a captured array has a tangent and inputs have 16 bits, the forward pass is that of `Problem.for_captures`, and the passes after
    it get the float32 out, to which the rounding error is added again.
    """
    indices = call.problem.arrange(range(call.problem.structure.num_leaves)).movable
    given = [None if i is None or isinstance(tangents[i], SymbolicZero) else tangents[i] for i in indices]
    moving = tuple(x is not None for x in given)
    asked = call.plan.returns_rounding
    if any(moving[FIRST_CAPTURE:]):
        call = dataclasses.replace(call, problem=call.problem.for_captures())
    out, lse, *others = _attend(call, *primals)
    out, lse = checkpoint_name(out, "flexjax_out"), checkpoint_name(lse, "flexjax_lse")
    rounding = [checkpoint_name(others.pop(), "flexjax_out")] if call.plan.returns_rounding else []
    if any(moving):
        fixed = [*primals, Results(out, lse, None, *rounding).float32_out if rounding else out, lse]
        t_out, t_lse = tangent_p.bind(*fixed, *(x for x in given if x is not None), call=call, moving=moving)
        moved = [t_out.astype(out.dtype), t_lse]
    else:
        moved = [jnp.zeros_like(out), jnp.zeros_like(lse)]
    others += rounding if asked else []
    return (out, lse, *others), (*moved, *map(jnp.zeros_like, others))


def _tangent(*flat: Array, call: ContextCall, moving: tuple[bool, ...]) -> list[Array]:
    """The code of `tangent`: the tangents of out and lse.

    flat     operands and tables, out, lse, and the tangents of the operands that have one
    moving   for each movable operand, in the order of Operands.movable, whether it has a tangent
    """
    fixed, (out, lse, *tangents) = _split(call, flat)
    return Backward.of(PASSES, call, fixed).tangent(out, lse, tangents, moving)


def _backward(*flat: Array, call: ContextCall, wanted: tuple[bool, ...], has_lse: bool) -> list[Array]:
    """The code of `backward`: the gradients of the wanted operands alone, in the order of Operands.movable and in their dtypes.

    flat      operands and tables, out, lse, the cotangent of out and, with `has_lse`, that of lse
    wanted    for each movable operand, whether it gets a gradient
    has_lse   False: the cotangent of lse is zero
    """
    fixed, (out, lse, d_out, *d_lse) = _split(call, flat)
    d_out = d_out.astype(call.plan.dtype)
    return Backward.of(PASSES, call, fixed).backward(out, lse, d_out, d_lse[0] if has_lse else None, wanted)


def _tangent_transpose(
    cotangents: Sequence[Array | ad.Zero], *flat: typing.Any, call: ContextCall, moving: tuple[bool, ...]
) -> list:
    """The transpose rule of `tangent`: a list with None for each fixed argument (operands, tables, out and lse), then the cotangents of
    the tangents, by `backward`.

    cotangents   of the tangents of out and lse
    flat         the arguments of `tangent`; those that are tangents are placeholders
    moving       for each movable operand, whether it has a tangent

    If both cotangents are symbolic zeros, so are the results, and `backward` does not run. On global arrays the primitive `backward` is
    bound; on arrays of one device its code is called.
    """
    fixed, (out, lse, *linear) = _split(call, flat)
    d_out, d_lse = cotangents
    nothing: list = [None] * (len(fixed) + 2)
    if isinstance(d_out, ad.Zero) and isinstance(d_lse, ad.Zero):
        return nothing + [ad.Zero(x.aval) for x in linear]
    d_out = jnp.zeros_like(out) if isinstance(d_out, ad.Zero) else d_out
    given = [*fixed, out, lse, d_out, *([] if isinstance(d_lse, ad.Zero) else [d_lse])]
    run = backward_p.bind if call.is_global else _backward
    return nothing + list(run(*given, call=call, wanted=moving, has_lse=not isinstance(d_lse, ad.Zero)))


def _primitive(name: str, function: typing.Callable[..., list[Array]], types: typing.Callable[..., list]) -> Primitive:
    """Makes a primitive that computes `function` on arrays of one device, or on global arrays under a partitioning rule.

    function   function(*arrays, call=, **params) computes the results on one device
    types      types(avals, call=, **params) returns the types of the results; `avals` is the sequence of the arguments' types

    The primitive has a list of results, and rules for jvp and vmap. A caller that needs a transpose rule registers it. The jvp
    and vmap rules raise NotImplementedError on global arrays.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, **params: types(avals, **params))

    @primitive.def_impl
    def run(*flat: Array, **params: object) -> list[Array]:
        """Evaluates the primitive outside of jit: compiled, also under jax.disable_jit, where a jit would bind it again."""
        with jax.disable_jit(False):
            return jax.jit(functools.partial(primitive.bind, **params))(*flat)

    def lower(ctx: mlir.LoweringRuleContext, *flat: typing.Any, call: ContextCall, **params: typing.Any) -> typing.Any:
        """The lowering rule: the code inlined on one device's arrays, or a call with the partitioning rule on global ones."""
        if call.is_global and call.axes:
            return context_axes.lower_with_rule(ctx, flat, primitive, function, call, params)
        sizes = [(name, size) for name, size in context_axes.manual_shape(ctx).items()]
        plain = [core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]  # type: ignore[attr-defined]
        jaxpr = jax.make_jaxpr(functools.partial(function, call=call, **params), axis_env=sizes)(*plain)
        inlined = mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)
        return inlined(ctx.replace(avals_in=plain), *flat)

    def differentiate(primals: Sequence[Array], tangents: Sequence[typing.Any], **params: typing.Any) -> tuple:
        """The jvp rule, for second derivatives: JAX differentiates the code. Returns (results, their tangents). Raises
        NotImplementedError on global arrays.

        primals, tangents   the arguments, and for each of them its tangent or a symbolic zero
        """
        if params["call"].is_global:
            raise NotImplementedError(
                "Second derivatives of a call with context= are not computed over automatic mesh axes. Make the axes explicit, or "
                "call it inside jax.shard_map."
            )
        return jax.jvp(functools.partial(function, **params), list(primals), list(map(ad.instantiate_zeros, tangents)))

    def batch(flat: Sequence[Array], dims: Sequence[int | None], **params: typing.Any) -> tuple:
        """The vmap rule: JAX maps the code. Returns (results, their mapped axes, all 0). Raises NotImplementedError on global arrays.

        dims   the mapped axis of each argument, None for one that is not mapped
        """
        if params["call"].is_global:
            raise NotImplementedError(
                "A call with context= is not mapped by jax.vmap over automatic mesh axes. Make the mapped axis a part of the batch, "
                "make the axes explicit, or call it inside jax.shard_map."
            )
        outs = jax.vmap(functools.partial(function, **params), in_axes=tuple(dims))(*flat)
        return outs, [0] * len(outs)

    mlir.register_lowering(primitive, lower)
    ad.primitive_jvps[primitive] = differentiate
    batching.primitive_batchers[primitive] = batch
    return primitive


def _forward(*flat: Array, call: ContextCall) -> list[Array]:
    """The code of `forward`: out, lse and, if the plan asks for them, max_scores and rounding, as a list.

    flat   the leaves of the operands, then those of the tables
    """
    return Forward.of(PASSES, call, flat).forward()


def _forward_types(avals: Sequence[core.ShapedArray], call: ContextCall) -> list[core.ShapedArray]:
    """The types of the results of `forward`, in its order, on the mesh of query, split over no axis. out is in the dtype of query.

    avals   types of the operands, of which the first is query, and of the tables
    call    the static part of the call
    """
    plan, query = call.plan, avals[0]
    rows = query.shape[:-1]
    stats = core.ShapedArray(rows, jnp.dtype(plan.score_dtype))
    out = core.ShapedArray((*rows, plan.value_dim), query.dtype)
    found = [out, stats, *[stats] * plan.max_scores, *[out] * plan.returns_rounding]
    return [aval_like(query, x.shape, x.dtype) for x in found]


def _tangent_types(avals: Sequence[core.ShapedArray], call: ContextCall, moving: tuple[bool, ...]) -> list:
    """The types of the tangents, which are those of out and lse among `avals`, the types of the arguments of `tangent`; `moving` is not
    read. Raises ValueError if score_mod has no derivative.
    """
    call.problem.needed_derivative()
    return list(_split(call, avals)[1][:2])  # type: ignore[arg-type]


def _backward_types(
    avals: Sequence[core.ShapedArray], call: ContextCall, wanted: tuple[bool, ...], has_lse: bool
) -> list[core.ShapedArray]:
    """The types of the gradients, which are those of the wanted operands, in the order of Operands.movable.

    avals     types of the arguments of `backward`, of which the first are the operands
    wanted    for each movable operand, whether it gets a gradient
    has_lse   not read: it says how many arguments there are
    """
    places = call.problem.arrange(range(call.problem.structure.num_leaves)).movable
    return [avals[place] for place, want in zip(places, wanted, strict=True) if want]


forward_p = _primitive("flexjax_context_forward", _forward, _forward_types)
tangent_p = _primitive("flexjax_context_tangent", _tangent, _tangent_types)
backward_p = _primitive("flexjax_context_backward", _backward, _backward_types)
ad.primitive_transposes[tangent_p] = _tangent_transpose
