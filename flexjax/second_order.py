"""Second derivatives of attention: the code of a pass on the xla backend, differentiated by JAX.

`jvp_through_xla` makes the jvp rule of the primitives `tangent` and `backward` (autodiff.py). Their code becomes plain JAX in the
caller's program, with loops that reverse mode can differentiate, and does not run on the kernels of a GPU or TPU; a primitive that is
the identity marks the place, so that lowering warns.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir

from flexjax import dispatch
from flexjax.backends import target as targets
from flexjax.backends.target import Target
from flexjax.plan.problem import Problem
from flexjax.primitive import target_of
from flexjax.varying import varying_as

Array = jax.Array


def jvp_through_xla(function: Callable) -> Callable:
    """Makes the jvp rule of `tangent` or `backward`: jax.jvp of `function`, the code of that primitive, on the xla backend.

    function   function(*flat, run=, problem=, **params) -> results, as for `make_primitive`

    The rule makes the code a part of the caller's program before the target is known, so the tiles are those for the default device.
    The code runs on every device.
    """

    def rule(primals: Sequence[Array], tangents: Sequence[object], *, problem: Problem, **params: object) -> tuple:
        """(results, their tangents) of the primitive `tangent` or `backward`.

        primals, tangents   the arguments of the primitive, and for each of them its tangent or a symbolic zero
        problem, params     the static parameters of the primitive

        The tangents pass through `second_order_p`, which warns where this code is lowered for a GPU or TPU.
        """
        again = problem.differentiable()
        run = dispatch.on_xla(again.plan, targets.default())
        plain = lambda *flat: varying_as(flat[0], function(*flat, run=run, problem=again, **params))
        moved = [_instantiate(p, t) for p, t in zip(primals, tangents, strict=True)]
        results, moved_results = jax.jvp(plain, list(primals), moved)
        return results, [second_order_p.bind(x, problem=again) for x in moved_results]

    return rule


def is_zero(tangent: object) -> bool:
    """Whether a tangent or cotangent is known to be zero: a symbolic zero, or that of an integer array."""
    if isinstance(tangent, ad.Zero):
        return True
    return getattr(tangent, "dtype", None) == jax.dtypes.float0


def _instantiate(primal: Array, tangent: object) -> object:
    """The tangent of `primal` as an array, as jax.jvp takes it: itself unless it is known to be zero (`is_zero`), else zeros, of dtype
    float0 if the primal is of integers or bools.
    """
    if not is_zero(tangent):
        return tangent
    if jnp.issubdtype(primal.dtype, jnp.inexact):
        return jnp.zeros_like(primal)
    return np.zeros(primal.shape, jax.dtypes.float0)


def _second_order() -> Primitive:
    """Makes a primitive that is the identity on second-order tangents and cotangents, and that warns of the fallback when it is lowered
    for a GPU or TPU, because JAX code that was traced before the target was known cannot warn. It takes one array and the parameter
    `problem`, and has rules for transposition and vmap.
    """
    primitive = Primitive("flexjax_second_order")
    primitive.def_abstract_eval(lambda x, problem: x)

    def warn(target: Target, problem: Problem) -> None:
        """Warns that the second derivatives of the problem do not run on the kernels of the target's platform, if it has any."""
        run = dispatch.on_xla(problem.plan, target, "The kernels compute first derivatives only.")
        dispatch.warn_of_fallback(problem, dispatch.SECOND, run)

    @primitive.def_impl
    def run_now(x: Array, problem: Problem) -> Array:
        """Evaluates the primitive outside of jit: warns if the device of x is a GPU or TPU, and returns x."""
        warn(target_of(x), problem)
        return x

    def lower(ctx: mlir.LoweringRuleContext, x: ir.Value, *, platform: str, problem: Problem) -> list:
        """The lowering rule for the platform of a GPU or TPU: warns while lowering, and returns [x]. Other platforms have a rule without
        a warning.
        """
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
