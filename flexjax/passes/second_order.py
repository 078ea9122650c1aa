"""Second derivatives of attention: the code of a pass on the xla backend, differentiated by JAX.

The code of `tangent` and `backward` (autodiff.py) becomes plain JAX in the caller's program, with loops that reverse
mode can differentiate, and does not run on the kernels of a GPU or TPU; a primitive that is the identity marks the
place, so that lowering warns.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir

from flexjax.backends import target as targets
from flexjax.backends.target import Target
from flexjax.mod_tools.settings import own
from flexjax.passes import dispatch
from flexjax.passes.primitive import target_of
from flexjax.plan.problem import Problem
from flexjax.varying import varying_as

Array = jax.Array


def jvp_through_xla(function: Callable, primitive: Primitive) -> Callable:
    """The jvp rule of `tangent` or `backward`: results of the primitive, tangents by jax.jvp of its code on xla."""

    @own
    def rule(primals: Sequence[Array], tangents: Sequence[object], *, problem: Problem, **params: object) -> tuple:
        again = problem.differentiable()
        # the target is not known yet, so the tiles are those for the default device
        run = dispatch.on_xla(again.plan, targets.default())
        plain = lambda *flat: varying_as(flat[0], function(*flat, run=run, problem=again, **params))
        moved = [_instantiate(p, t) for p, t in zip(primals, tangents, strict=True)]
        _, moved_results = jax.jvp(plain, list(primals), moved)
        results = primitive.bind(*primals, problem=problem, **params)
        return results, [second_order_p.bind(x, problem=again) for x in moved_results]

    return rule


def is_zero(tangent: object) -> bool:
    """Whether a tangent or cotangent is known to be zero: a symbolic zero, or that of an integer array."""
    if isinstance(tangent, ad.Zero):
        return True
    return getattr(tangent, "dtype", None) == jax.dtypes.float0


def _instantiate(primal: Array, tangent: object) -> object:
    """The tangent as an array, as jax.jvp takes it: zeros for a symbolic zero, of float0 for integers and bools."""
    if not is_zero(tangent):
        return tangent
    if jnp.issubdtype(primal.dtype, jnp.inexact):
        return jnp.zeros_like(primal)
    return np.zeros(primal.shape, jax.dtypes.float0)


def _second_order() -> Primitive:
    """A primitive that is the identity, and that warns of the fallback when it is lowered for a GPU or TPU.

    JAX code that was traced before the target was known cannot warn.
    """
    primitive = Primitive("flexjax_second_order")
    primitive.def_abstract_eval(lambda x, problem: x)

    def warn(target: Target, problem: Problem) -> None:
        why = "The kernels compute first derivatives only."
        run = dispatch.on_xla(problem.plan, target, tuple((name, why) for name in dispatch.PLATFORMS))
        dispatch.warn_of_fallback(problem, dispatch.SECOND, run)

    @primitive.def_impl
    def run_now(x: Array, problem: Problem) -> Array:
        warn(target_of(x), problem)
        return x

    def lower(ctx: mlir.LoweringRuleContext, x: ir.Value, *, platform: str, problem: Problem) -> list:
        warn(targets.of_lowering(ctx, platform), problem)
        return [x]

    for platform in dispatch.KERNELS:
        mlir.register_lowering(primitive, functools.partial(lower, platform=platform), platform=platform)
    mlir.register_lowering(primitive, lambda ctx, x, problem: [x])
    ad.deflinear2(primitive, lambda cotangent, x, problem: [primitive.bind(cotangent, problem=problem)])
    batching.primitive_batchers[primitive] = lambda values, dims, problem: (
        primitive.bind(values[0], problem=problem),
        dims[0],
    )
    return primitive


second_order_p = _second_order()
