"""Attention as three JAX primitives: forward, backward, and the tangent that connects them for differentiation.

    forward    operands                          -> out, lse, max_scores, expectations
    tangent    operands, out, lse, tangents      -> tangents of out, lse and expectations; linear in the tangents
    backward   operands, out, lse, cotangents    -> cotangents of the wanted operands; the transpose of tangent

If inputs have 16 bits and a captured array has a tangent (`exact_captures`), forward also returns the rounding error of
out (Results.rounding), and the other two primitives take it as an argument after lse. `tangent` takes expectations
after that; `backward` knows none (expectations.py). The rules:

    jvp of forward               is tangent
    transpose of tangent         is backward, so that reverse mode runs forward and backward
    jvp of tangent and backward  differentiates the JAX code of the xla backend (second_order.py)
    vmap                         makes the mapped axis a part of the batch (fold_batch.py)
    lowering                     chooses the backend, once for each platform (primitive.py)

They are primitives and not custom_vjp functions because forward mode, reverse mode and their compositions must work,
and because vmap must run one kernel and not a loop. out and lse have the names "flexjax_out" and "flexjax_lse" for
jax.checkpoint policies.

`flat` are the arguments of a primitive as a flat list of arrays, in the order of the table above; the operands are the
leaves of Operands (Problem.structure).
"""

import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import core
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from flexjax.backends.target import Target
from flexjax.errors import of_call
from flexjax.mod_tools.settings import own
from flexjax.parallel.explicit_axes import split_of, split_work
from flexjax.passes import dispatch, expectations
from flexjax.passes.dispatch import Run
from flexjax.passes.fold_batch import batch_rule
from flexjax.passes.primitive import Shapes, make_primitive
from flexjax.passes.second_order import is_zero, jvp_through_xla
from flexjax.plan.kernel_plan import (
    FIRST_CAPTURE,
    FLOAT8,
    BackwardInputs,
    Gradients,
    KernelPlan,
    Operands,
    Results,
    TangentInputs,
    Wanted,
)
from flexjax.plan.problem import Problem
from flexjax.varying import varying_alike, varying_as

Array = jax.Array
Cotangent = Array | ad.Zero


def attention(problem: Problem, operands: Operands) -> Results:
    """The forward pass of a problem, which flex_attention calls. It can be differentiated, mapped and jitted."""
    split = split_of(operands.query, problem.plan.layout)
    return _run(problem, operands) if split is None else split_work(problem, operands, split, _run)


def _run(problem: Problem, operands: Operands) -> Results:
    """Binds the primitive `forward` to operands that no explicit mesh axis splits; its errors come later."""
    # inside shard_map; the transpose of this cast sums the gradients of arrays that devices share
    flat = varying_alike(jax.tree.leaves(operands))
    return Results.of(problem.plan, _bind_forward(*flat, problem=problem))._replace(rounding=None)


def _bind_forward(*flat: Array, problem: Problem) -> list[Array]:
    """Binds `forward` to the operands: the Results that the plan asks for, in the order of their fields."""
    # with and without gradients it is bound here, from one source line, because Mosaic's cache key includes the line
    return forward_p.bind(*flat, problem=problem)


# ------------------------------------------------------------------- what each primitive computes


def _forward_shapes(avals: Sequence[core.ShapedArray], problem: Problem) -> Shapes:
    """The types of the Results that the plan asks for."""
    plan = problem.plan
    rows = avals[0].shape[:-1]
    stats = core.ShapedArray(rows, jnp.dtype(plan.score_dtype))
    out = core.ShapedArray((*rows, plan.value_dim), jnp.dtype(plan.out_dtype))
    return [out, stats, *[stats] * plan.max_scores, *[out] * plan.returns_rounding, *_expectations(rows, plan)]


def _expectations(rows: tuple[int, ...], plan: KernelPlan) -> Shapes:
    """The type of the expectations of `rows` [B, T, N]; [] without."""
    return [core.ShapedArray((*rows, plan.expectations), jnp.dtype(plan.score_dtype))] * (plan.expectations > 0)


def _forward(*flat: Array, run: Run, problem: Problem) -> list[Array]:
    """The code of `forward` on the backend of `run`, whose plan may have measured tiles."""
    results = run.forward(problem.operands(flat))
    out, rounding = results.out, results.rounding
    if problem.plan.partial:  # kernels may round the out of a partial plan
        out, rounding = results.float32_out, None
    top = results.max_scores
    if (
        top is not None
    ):  # the maxima of most backends lose NaN: kernels take the larger number, and so do XLA's reductions on a CPU
        top = jnp.where(jnp.isnan(results.lse), jnp.array(jnp.nan, top.dtype), top)
    results = results._replace(out=out.astype(problem.plan.out_dtype), max_scores=top, rounding=rounding)
    return [x for x in results if x is not None]


def _choose_forward(target: Target, problem: Problem) -> Run:
    """Chooses the backend of the forward pass; warns of a fallback."""
    run = dispatch.choose(problem.plan, problem.implementation, target)
    dispatch.warn_of_fallback(problem, dispatch.FORWARD, run)
    return run


def _split(problem: Problem, flat: Sequence[Array]) -> tuple[Operands, Results, list[Array]]:
    """The arguments of `tangent` or `backward` as (operands, results, tangents or cotangents)."""
    n, residuals = problem.structure.num_leaves, problem.residuals
    out, lse, *rest = flat[n : n + residuals] if residuals else _nothing(problem, flat[0])
    rounding, expectations = (rest.pop(0) if rest and has else None for has in (problem.plan.exact_captures, True))
    results = Results(out, lse, None, rounding, expectations)
    return problem.operands(flat[:n]), results, list(flat[n + residuals :])


def _nothing(problem: Problem, like: Array) -> list[Array]:
    """Zeros in place of out and lse, varying over mesh axes as `like`, the query, does."""
    return varying_as(like, [jnp.zeros(x.shape, x.dtype) for x in _forward_shapes([jax.typeof(like)], problem)[:2]])


def _tangent_shapes(avals: Sequence[core.ShapedArray], problem: Problem, moving: tuple[bool, ...]) -> Shapes:
    """The types of the tangents; ValueError if score_mod has no derivative, or none by what moves."""
    problem.needed_derivative(moving[FIRST_CAPTURE:])
    return [*_forward_shapes(avals, problem)[:2], *_expectations(avals[0].shape[:-1], problem.plan)]


def _tangent(*flat: Array, run: Run, problem: Problem, moving: tuple[bool, ...]) -> list[Array]:
    """The code of `tangent`; `moving` says which movable operands have a tangent, among the last arguments."""
    operands, results, tangents = _split(problem, flat)
    moved = Gradients.of(_spread(tangents, moving))
    return list(run.tangent(TangentInputs(operands, results, moved, problem.linear_derivative())))


def _choose_tangent(target: Target, problem: Problem, moving: tuple[bool, ...]) -> Run:
    """Chooses the backend of forward mode; warns of a fallback."""
    asked = problem.plan, problem.implementation, target
    run = dispatch.choose_tangent(*asked, Wanted.of(moving), problem.linear_derivative())
    dispatch.warn_of_fallback(problem, dispatch.TANGENT, run)
    return run


def _backward_shapes(
    avals: Sequence[core.ShapedArray], problem: Problem, wanted: tuple[bool, ...], has_lse: bool
) -> Shapes:
    """The types of the gradients of the wanted operands; ValueError if score_mod has no such derivative."""
    problem.needed_derivative(wanted[FIRST_CAPTURE:])
    indices = problem.arrange(range(problem.structure.num_leaves)).movable
    found = [avals[index] for index, want in zip(indices, wanted, strict=True) if want]
    # the gradients of a partial plan are summed in the score dtype
    if not problem.plan.partial:
        return found
    return [core.ShapedArray(x.shape, jnp.promote_types(x.dtype, problem.plan.score_dtype)) for x in found]


def _backward(*flat: Array, run: Run, problem: Problem, wanted: tuple[bool, ...], has_lse: bool) -> list[Array]:
    """The code of `backward` on the backend of `run`: the gradients of the wanted operands alone.

    Without `has_lse` the cotangent of lse is zero and no argument.
    """
    operands, results, cotangents = _split(problem, flat)
    d_lse = cotangents[1] if has_lse else None
    derivative = problem.needed_derivative()
    given = BackwardInputs(operands, results, cotangents[0], d_lse, Wanted.of(wanted), derivative)
    gradients = run.backward(given)
    found = [g for g in gradients.flat if g is not None]
    types = _backward_shapes([core.ShapedArray(x.shape, x.dtype) for x in flat], problem, wanted, has_lse)
    return [g.astype(x.dtype) for g, x in zip(found, types, strict=True)]


def _choose_backward(target: Target, problem: Problem, wanted: tuple[bool, ...], has_lse: bool) -> Run:
    """Chooses the backend of the backward pass; warns of a fallback, and whether captured arrays are why."""
    asked = problem.plan, problem.implementation, target
    run = dispatch.choose_backward(*asked, Wanted.of(wanted), problem.needed_derivative())
    which = dispatch.BACKWARD
    if any(wanted[FIRST_CAPTURE:]):
        no_captures = Wanted.of((*wanted[:FIRST_CAPTURE], *[False] * len(wanted[FIRST_CAPTURE:])))
        without = dispatch.choose_backward(*asked, no_captures, problem.derivative)
        if without.backend is not run.backend:
            which = f"{dispatch.BACKWARD} with the gradients of captured arrays"
    dispatch.warn_of_fallback(problem, which, run)
    return run


def _spread(values: Sequence[Array], present: Sequence[bool]) -> list[Array | None]:
    """A list as long as `present`: the next of `values` for each True, None for each False."""
    rest = iter(values)
    return [next(rest) if p else None for p in present]


# ------------------------------------------------------------------- primitives


forward_p = make_primitive("flexjax_forward", _forward, _forward_shapes, _choose_forward)
tangent_p = make_primitive("flexjax_tangent", _tangent, _tangent_shapes, _choose_tangent)
backward_p = make_primitive("flexjax_backward", _backward, _backward_shapes, _choose_backward)


# ------------------------------------------------------------------- differentiation


@of_call
@own
def _forward_jvp(primals: Sequence[Array], tangents: Sequence[object], *, problem: Problem) -> tuple[list, list]:
    """The jvp rule of `forward`: (results, their tangents), zeros for max_scores and rounding.

    If a captured array has a tangent, both primitives are bound with the problem `for_captures`, so that `forward`
    returns rounding for `tangent` too. out and lse get their names for checkpoint policies here; rounding gets the name
    of out, because a policy that saves out needs both.
    """
    indices = problem.arrange(range(len(primals))).movable
    moving = [None if i is None or is_zero(tangents[i]) else tangents[i] for i in indices]
    if problem.plan.page:
        _refuse_gradients_of_cache(problem, tangents)
    if problem.plan.float8 and not all(is_zero(t) for t in tangents):
        raise NotImplementedError(
            f"A call with {FLOAT8} inputs has no gradients. Cast the inputs to bfloat16, or put jax.lax.stop_gradient "
            "around what the call is given and what its mods capture."
        )
    present = tuple(m is not None for m in moving)
    moved_problem = problem.for_captures() if any(present[FIRST_CAPTURE:]) else problem
    flat = _bind_forward(*primals, problem=moved_problem.differentiated())
    out, lse, top, rounding, sums = Results.of(moved_problem.plan, flat)
    out, lse = checkpoint_name(out, "flexjax_out"), checkpoint_name(lse, "flexjax_lse")
    sums = None if sums is None else checkpoint_name(sums, "flexjax_lse")
    if rounding is not None:
        rounding = checkpoint_name(rounding, "flexjax_out")
    elif moved_problem.plan.exact_captures:
        rounding = jnp.zeros_like(out)  # the out of a partial plan is not rounded
    given = [ad.instantiate_zeros(m) for m in moving if m is not None]
    if given:
        kept = [x for x in (out, lse, rounding, sums) if x is not None][: moved_problem.residuals]
        moved = tangent_p.bind(*primals, *kept, *given, problem=moved_problem, moving=present)
    else:
        moved = [jnp.zeros_like(x) for x in (out, lse, sums) if x is not None]
    others = [x for x in (top, rounding if problem.plan.returns_rounding else None) if x is not None]
    zeros = map(jnp.zeros_like, others)
    return [out, lse, *others, *([] if sums is None else [sums])], [*moved[:2], *zeros, *moved[2:]]


def _refuse_gradients_of_cache(problem: Problem, tangents: Sequence[object]) -> None:
    """Raises NotImplementedError if keys and values in pages, or their scales, have tangents."""
    given = problem.arrange(list(tangents))
    if not all(is_zero(t) for t in (given.key, given.value, *(given.scales or ()))):
        raise NotImplementedError(
            "paged_attention has no gradients of the keys and values in the cache. Compute them with flex_attention "
            "on contiguous keys, or put jax.lax.stop_gradient around the cache."
        )


@of_call
@own
def _tangent_transpose(
    cotangents: Sequence[Cotangent], *flat: typing.Any, problem: Problem, moving: tuple[bool, ...]
) -> list:
    """The transpose rule of `tangent`, by the primitive `backward`; None for operands, out, lse and rounding.

    If all cotangents are known to be zero, `backward` is not bound; if only that of lse is, it is left out.
    """
    leaves = problem.structure.num_leaves
    n = leaves + problem.residuals
    d_out, of_lse, *others = cotangents
    nothing: list = [None] * n
    if all(map(is_zero, cotangents)):
        return nothing + [ad.Zero(x.aval) for x in flat[n:]]
    kept = flat[leaves:n]
    if is_zero(d_out):
        d_out = jnp.zeros_like(kept[0]) if kept else _nothing(problem, flat[0])[0]
    d_lse: Array | None = None if is_zero(of_lse) else typing.cast(Array, of_lse)
    wanted, operands = moving, flat[:leaves]
    if others and is_zero(others[0]):
        problem = expectations.without(problem)
    elif others:
        given, results, _ = _split(problem, flat[:n])
        cotangents_of = (d_lse, typing.cast(Array, others[0]))
        problem, given, d_lse = expectations.as_captures(problem, given, results, cotangents_of)
        operands = jax.tree.leaves(given)
        wanted = (*moving, *[False] * (len(given.movable) - len(moving)))
    fixed, has_lse = (*operands, *kept[: problem.residuals]), d_lse is not None
    given = [d_out, *([d_lse] if has_lse else [])]
    gradients = backward_p.bind(*fixed, *given, problem=problem, wanted=wanted, has_lse=has_lse)
    # the gradients of a partial plan are in the score dtype
    return nothing + [g.astype(x.aval.dtype) for g, x in zip(gradients, flat[n:], strict=True)]


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_jvps[tangent_p] = jvp_through_xla(_tangent, tangent_p)
ad.primitive_jvps[backward_p] = jvp_through_xla(_backward, backward_p)


# ------------------------------------------------------------------- mapping


def _batch_rule(primitive: Primitive) -> Callable:
    """The vmap rule of a primitive, which moves each mapped axis to the front for `batch_rule` of fold_batch.py."""

    @own
    def rule(flat: Sequence[Array], dims: Sequence[int | None], *, problem: Problem, **params: object) -> tuple:
        mapped = [d is not None for d in dims]
        front = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(flat, dims, strict=True)]
        outs = batch_rule(primitive, problem, front, mapped, params)
        return outs, [0] * len(outs)

    return rule


for _p in (forward_p, tangent_p, backward_p):
    batching.primitive_batchers[_p] = _batch_rule(_p)
