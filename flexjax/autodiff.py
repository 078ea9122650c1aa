"""Attention as three JAX primitives: forward, backward, and the tangent that joins them.

Why primitives rather than custom_vjp: forward mode, reverse mode and their compositions must all work, and a mapped axis must
fold into the batch (one launch) rather than into a loop.

    forward    plan, operands                         -> out, lse, max_scores
    tangent    plan, operands, results, tangents      -> tangents of out and lse; linear in the tangents
    backward   plan, operands, results, cotangents    -> cotangents of the wanted operands; the transpose of tangent

jvp of forward is tangent; the transpose of tangent is backward; jvp of tangent and backward goes through their XLA code, with
loops that reverse mode can cross. Named residuals for jax.checkpoint policies: "flexjax_out" and "flexjax_lse".
"""

import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flexjax import dispatch
from flexjax.fold_batch import batch_rule
from flexjax.parallel.explicit_axes import split_of, split_work
from flexjax.plan.kernel_plan import Gradients, Operands, Results, Wanted
from flexjax.plan.problem import Problem

Array = jax.Array


def attention(problem: Problem, operands: Operands) -> Results:
    """Runs the forward pass of a problem; differentiable and mappable."""
    split = split_of(operands.query, problem.plan.layout)
    return _run(problem, operands) if split is None else split_work(problem, operands, split, _run)


def _run(problem: Problem, operands: Operands) -> Results:
    """The forward pass on arrays that no explicit axis splits."""
    flat = varying_alike(jax.tree.leaves(operands))
    out, lse, *top = _bind_forward(*flat, problem=problem)
    return Results(out, lse, top[0] if top else None)


def _bind_forward(*flat: Array, problem: Problem) -> list[Array]:
    """From one line, with and without gradients: machine code is found again by a module that names the line."""
    return forward_p.bind(*flat, problem=problem)


def varying_alike(flat: Sequence[Array]) -> list[Array]:
    """Inside shard_map: arrays that vary over fewer mesh axes than others are cast to vary over all of theirs.

    The transpose of the cast adds up gradients over the devices that share an array.
    """
    over = [frozenset(jax.typeof(x).mat.varying) for x in flat]
    everywhere = frozenset().union(*over)
    missing = [tuple(sorted(everywhere - axes, key=str)) for axes in over]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(flat, missing, strict=True)]


def varying_as(like: Array, results: Sequence[Array]) -> list[Array]:
    """Inside shard_map: the results, cast to vary over the mesh axes over which `like` does."""
    return varying_alike([like, *results])[1:]


# ------------------------------------------------------------------- what each primitive computes


Shapes = list[core.ShapedArray]
"""Types of results, of which shape and dtype count. Known without a trace: that of a kernel takes a good part of a first call."""


def _forward_shapes(avals: Sequence[core.ShapedArray], problem: Problem) -> Shapes:
    plan = problem.plan
    rows = avals[0].shape[:-1]
    stats = core.ShapedArray(rows, jnp.dtype(plan.score_dtype))
    return [core.ShapedArray((*rows, plan.value_dim), jnp.dtype(plan.dtype)), stats, *[stats] * plan.max_scores]


def _forward(*flat: Array, problem: Problem) -> list[Array]:
    results = dispatch.backend(problem.backend).forward(problem.plan, problem.operands(flat))
    return [x for x in results if x is not None]


def _split(problem: Problem, flat: Sequence[Array]) -> tuple[Operands, Results, list[Array]]:
    """Operands, out and lse, and the rest of a flat argument list."""
    n = problem.structure.num_leaves
    return problem.operands(flat[:n]), Results(flat[n], flat[n + 1], None), list(flat[n + 2 :])


def _tangent_shapes(avals: Sequence[core.ShapedArray], problem: Problem, moving: tuple[bool, ...]) -> Shapes:
    problem.needed_derivative()
    n = problem.structure.num_leaves
    return [avals[n], avals[n + 1]]


def _tangent(*flat: Array, problem: Problem, moving: tuple[bool, ...]) -> list[Array]:
    operands, results, tangents = _split(problem, flat)
    spread = _spread(tangents, moving)
    moved = Gradients._make((*spread[:6], tuple(spread[6:])))
    xla: typing.Any = dispatch.backend("xla")
    return list(xla.tangent(problem.plan, operands, results, moved, problem.needed_derivative()))


def _backward_shapes(
    avals: Sequence[core.ShapedArray], problem: Problem, wanted: tuple[bool, ...], has_lse: bool
) -> Shapes:
    problem.needed_derivative()
    places = problem.arrange(range(problem.structure.num_leaves)).movable
    return [avals[place] for place, want in zip(places, wanted, strict=True) if want]


def _backward(*flat: Array, problem: Problem, wanted: tuple[bool, ...], has_lse: bool) -> list[Array]:
    operands, results, cotangents = _split(problem, flat)
    asked = Wanted._make((*wanted[:6], wanted[6:]))
    derivative = problem.needed_derivative()
    run = dispatch.backward_backend(problem.backend, problem.plan, asked, derivative).backward
    d_lse = cotangents[1] if has_lse else None
    gradients = run(problem.plan, operands, results, cotangents[0], d_lse, asked, derivative)
    return [g for g in (*gradients[:6], *gradients.score_captures) if g is not None]


def _spread(values: Sequence[Array], present: Sequence[bool]) -> list[Array | None]:
    """Values in order where `present`, None elsewhere."""
    rest = iter(values)
    return [next(rest) if p else None for p in present]


# ------------------------------------------------------------------- primitives


def _primitive(name: str, function: Callable[..., list[Array]], shapes: Callable[..., Shapes]) -> Primitive:
    """A primitive that is lowered as the function, inlined; called eagerly, it is compiled once a parameter set."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.lru_cache(maxsize=512)
    def compiled(**params: object) -> Callable[..., list[Array]]:
        return jax.jit(functools.partial(function, **params))

    @primitive.def_impl
    def run(*flat: Array, **params: object) -> list[Array]:
        return compiled(**params)(*flat)

    @primitive.def_abstract_eval
    def types(*avals: core.ShapedArray, **params: object) -> list[core.ShapedArray]:
        return [_aval_like(avals[0], found.shape, found.dtype) for found in shapes(avals, **params)]

    inlined = mlir.lower_fun(function, multiple_results=True)

    def lower(ctx: mlir.LoweringRuleContext, *flat: typing.Any, **params: typing.Any) -> typing.Any:
        # What varies over which mesh axes is settled by now; loops that start from zeros need not know.
        avals: typing.Any = ctx.avals_in
        plain = [core.ShapedArray(a.shape, a.dtype) for a in avals]
        with dispatch.backend(params["problem"].backend).lowering(ctx.module_context):
            return inlined(ctx.replace(avals_in=plain), *flat, **params)

    mlir.register_lowering(primitive, lower)
    return primitive


def _aval_like(query: core.ShapedArray, shape: tuple[int, ...], dtype: jnp.dtype) -> core.ShapedArray:
    """A result's type: on the mesh of query, and varying over the same axes of it."""
    sharding = query.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
    return query.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


forward_p = _primitive("flexjax_forward", _forward, _forward_shapes)
tangent_p = _primitive("flexjax_tangent", _tangent, _tangent_shapes)
backward_p = _primitive("flexjax_backward", _backward, _backward_shapes)


# ------------------------------------------------------------------- differentiation


def _is_zero(tangent: object) -> bool:
    if isinstance(tangent, ad.Zero):
        return True
    return getattr(tangent, "dtype", None) == jax.dtypes.float0


def _forward_jvp(primals: Sequence[Array], tangents: Sequence[object], *, problem: Problem) -> tuple[list, list]:
    out, lse, *top = _bind_forward(*primals, problem=problem)
    out, lse = checkpoint_name(out, "flexjax_out"), checkpoint_name(lse, "flexjax_lse")
    places = problem.arrange(range(len(primals)))
    moving = [None if i is None or _is_zero(tangents[i]) else tangents[i] for i in places.movable]
    present = tuple(m is not None for m in moving)
    given = [ad.instantiate_zeros(m) for m in moving if m is not None]
    if given:
        moved = tangent_p.bind(*primals, out, lse, *given, problem=problem, moving=present)
    else:
        moved = [jnp.zeros_like(out), jnp.zeros_like(lse)]
    return [out, lse, *top], [*moved, *map(jnp.zeros_like, top)]


def _tangent_transpose(
    cotangents: Sequence[typing.Any], *flat: typing.Any, problem: Problem, moving: tuple[bool, ...]
) -> list:
    n = problem.structure.num_leaves + 2
    fixed = flat[:n]
    d_out, d_lse = cotangents
    nothing: list = [None] * n
    if _is_zero(d_out) and _is_zero(d_lse):
        return nothing + [ad.Zero(x.aval) for x in flat[n:]]
    like = fixed[problem.structure.num_leaves]
    d_out = jnp.zeros_like(like) if _is_zero(d_out) else d_out
    has_lse = not _is_zero(d_lse)
    given = [d_out, *([d_lse] if has_lse else [])]
    grads = backward_p.bind(*fixed, *given, problem=problem, wanted=moving, has_lse=has_lse)
    return nothing + list(grads)


def _through_xla(function: Callable) -> Callable:
    """jvp rule of tangent and backward: differentiate their XLA code."""

    def rule(primals: Sequence[Array], tangents: Sequence[object], *, problem: Problem, **params: object) -> tuple:
        plain = lambda *flat: varying_as(flat[0], function(*flat, problem=problem.differentiable(), **params))
        moved = [_instantiate(p, t) for p, t in zip(primals, tangents, strict=True)]
        return jax.jvp(plain, list(primals), moved)

    return rule


def _instantiate(primal: Array, tangent: object) -> object:
    if not _is_zero(tangent):
        return tangent
    if jnp.issubdtype(primal.dtype, jnp.inexact):
        return jnp.zeros_like(primal)
    return np.zeros(primal.shape, jax.dtypes.float0)


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_jvps[tangent_p] = _through_xla(_tangent)
ad.primitive_jvps[backward_p] = _through_xla(_backward)


# ------------------------------------------------------------------- mapping


def _batch_rule(primitive: Primitive) -> Callable:
    """A mapped axis becomes part of the batch."""

    def rule(flat: Sequence[Array], dims: Sequence[int | None], *, problem: Problem, **params: object) -> tuple:
        mapped = [d is not None for d in dims]
        front = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(flat, dims, strict=True)]
        outs = batch_rule(primitive, problem, front, mapped, params)
        return outs, [0] * len(outs)

    return rule


for _p in (forward_p, tangent_p, backward_p):
    batching.primitive_batchers[_p] = _batch_rule(_p)
