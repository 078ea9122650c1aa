"""The derivatives of a score mod, as a program on the same captured arrays.

s' = f(s, b, h, q, kv, l_1 .. l_n), where s is the score, s' the new score and l_j are the elements that f loads. The derivative
program computes

    s',  ds'/ds,  ds'/dl_j for each load j of a floating array

on scalars. A backend multiplies each by the cotangent of s' and sums the products over the positions that read the same
element. Index expressions are integers and have no derivative. JAX differentiates f with the user's custom derivative rules in
place; the resulting jaxpr is then lowered like that of a mod.

The *source* program is that of the mod in which functions with a derivative rule of their own (jax.custom_jvp, jax.custom_vjp;
*custom functions* here) are whole, as Calls, and stop_gradient is a step. `sizes` is (batch, heads, q_len, kv_len).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from flexjax.errors import ModError
from flexjax.ir.builder import Builder
from flexjax.ir.evaluate_scalars import evaluate_scalars
from flexjax.ir.operations import STOP_GRADIENT
from flexjax.ir.program import SCORE, Atom, Call, Load, Op, Program
from flexjax.ir.replay import Replayed, append_call, replay
from flexjax.ir.verify import check
from flexjax.trace.equations import cast_over, varying_axes
from flexjax.trace.lower_jaxpr import Lowering
from flexjax.trace.primitives import CUSTOM, LOOPS
from flexjax.trace.values import MAX_UNROLL, object_array, scalar


def custom_calls(program: Program) -> tuple[Call, ...]:
    """The Calls of custom functions among the program's steps, in order."""
    return tuple(call for call in program.calls if call.name in CUSTOM)


def stops_gradients(program: Program) -> bool:
    """Whether stop_gradient is a step of the program."""
    return any(isinstance(step, Op) and step.prim == STOP_GRADIENT for step in program.steps)


def replay_inlined(source: Program, sizes: tuple[int, int, int, int]) -> tuple[Lowering, Replayed]:
    """Appends the steps of the source program to a new builder, with custom functions replaced by their bodies and without stop_gradient.

    source   the program of a mod in which functions with a derivative rule of their own (custom functions) are Calls
    sizes    (batch, heads, q_len, kv_len)

    Returns the translation (Lowering) that has the new builder, and what became of the old values and loads (Replayed); the caller ends
    the program. The captured arrays of the source keep their numbers; those of the bodies follow, and these alone are in
    `Lowering.arrays`.
    """
    lowering = Lowering(Builder(sizes, source.inputs[SCORE].dtype), inline_constants=True)
    builder = lowering.builder
    builder.captures = list(source.captures)

    def call(step: Call, new: Callable[[Atom], Atom]) -> Sequence[Atom]:
        """The new atoms of a Call's results, in order: from the body of a custom function, from a copy of any other Call.

        step   the Call of the source program
        new    from an atom of the source program to the new one
        """
        if step.name not in CUSTOM:
            return append_call(builder, step, new)
        assert step.inner is not None
        shaped = [(a[0], [new(x) for x in a[1]]) for a in step.arguments if not isinstance(a, int)]
        arrays = [object_array(atoms).reshape(shape) for shape, atoms in shaped]
        outs = lowering.run(step.inner.jaxpr, step.inner.consts, arrays)
        return [atom for out in outs for atom in lowering.as_atoms(out).ravel()]

    return lowering, replay(source, builder, {v.id: v for v in builder.inputs}, call=call)


def inline_custom(source: Program, sizes: tuple[int, int, int, int]) -> tuple[Program, tuple[jax.Array, ...]]:
    """Makes the forward program: the source program with custom functions replaced by their bodies and without stop_gradient.

    source   the program of a mod in which functions with a derivative rule of their own (custom functions) are Calls
    sizes    (batch, heads, q_len, kv_len)

    Returns (program, arrays that such bodies captured); the program reads these arrays after those of `source`. Without custom
    functions and stop_gradient it is `source` itself, with no arrays.
    """
    if not custom_calls(source) and not stops_gradients(source):
        return source, ()
    lowering, found = replay_inlined(source, sizes)
    program = lowering.builder.finish([found.new(r) for r in source.results])
    check(program)
    return program, tuple(lowering.arrays)


def derivative_program(source: Program, sizes: tuple[int, int, int, int]) -> tuple[Program, tuple[jax.Array, ...]]:
    """Makes the derivative program of a score_mod. Its results, all in the dtype of the score, are the new score s', its derivative
    ds'/ds by the score s that the mod gets, and ds'/dl for each element l of a floating array that the mod loads; its `gradients` are the
    loads of these l.

    source   the program of the mod in which functions with a derivative rule of their own (custom functions) are Calls
    sizes    (batch, heads, q_len, kv_len)

    Returns (program, arrays that it reads beyond those of `source`): those of inline_custom(source) and those that derivative rules
    captured. Raises ModError where JAX cannot differentiate the mod, and where a Call reads a whole captured array, of whatever dtype.
    jax's UnexpectedTracerError, of a derivative rule that closes over a value of the mod, is passed on.
    """
    lowering, found = replay_inlined(source, sizes)
    for call in source.calls:
        if any(is_float_capture(source, a) for a in call.arguments):
            raise ModError(_whole_array(call))
    loads = source.loads
    score_dtype = source.inputs[SCORE].dtype
    diff = [i for i, l in enumerate(loads) if jnp.issubdtype(jnp.dtype(l.out.dtype), jnp.floating)]

    def value(score: jax.Array, leaves: list[jax.Array], given: dict[int, jax.Array]) -> jax.Array:
        """s' as a function that JAX can differentiate.

        score    the scalar s
        leaves   the elements of floating arrays that the mod loads, by which JAX differentiates
        given    all inputs and loaded elements, by id; `score` and `leaves` replace theirs
        """
        known = {**given, SCORE: score, **{loads[i].out.id: x for i, x in zip(diff, leaves, strict=True)}}
        return evaluate_scalars(source, known, _unexpected_load, _no_whole_array)

    # Inside shard_map the operands are cast before jax.vjp: the transpose of a cast is a sum over devices.
    over = frozenset().union(
        *(varying_axes(v.aval) for c in custom_calls(source) if c.inner is not None for v in c.inner.jaxpr.invars)
    )

    def both(inputs: list[jax.Array], loaded: list[jax.Array]) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """(s', ds'/ds, [ds'/dl_j for each load of a floating array, in order]) at one position, by jax.vjp.

        inputs   the five scalar inputs of the program
        loaded   the element of each load of the source program
        """
        inputs, loaded = ([cast_over(x, over) for x in xs] for xs in (inputs, loaded))
        given = dict(enumerate(inputs)) | {l.out.id: x for l, x in zip(loads, loaded, strict=True)}
        out, pull = jax.vjp(lambda s, d: value(s, d, given), inputs[SCORE], [loaded[i] for i in diff])
        return out, *pull(jnp.ones_like(out))

    shape_of = lambda v: jax.ShapeDtypeStruct((), jnp.dtype(v.dtype))
    try:
        traced = jax.make_jaxpr(both)([shape_of(v) for v in source.inputs], [shape_of(l.out) for l in loads])
    except jax.errors.UnexpectedTracerError:
        raise  # the caller has a sentence for it
    except ModError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModError(_underivable(error)) from error
    atoms = [*lowering.builder.inputs, *(found.new(l.out) for l in loads)]
    outs = lowering.run(traced.jaxpr, traced.consts, [scalar(a) for a in atoms])
    flat = [lowering.builder.convert(lowering.as_atoms(o).item(), score_dtype) for o in outs]
    new_loads = list(found.loads.values())
    program = lowering.builder.finish(flat, [new_loads[i] for i in diff])
    check(program)
    return program, tuple(lowering.arrays)


def _underivable(error: Exception) -> str:
    """The error message for a mod that JAX cannot differentiate: "`score_mod` cannot be differentiated: ", JAX's own message `error`, and
    a sentence that says what to do.
    """
    return (
        f"`score_mod` cannot be differentiated: {str(error).rstrip('.')}. Stop the gradient before that operation with "
        "jax.lax.stop_gradient, or give the function a derivative rule with jax.custom_jvp."
    )


def _whole_array(call: Call) -> str:
    """The error message, which names `score_mod`, for `call`, which reads a whole floating or complex array and so has no derivative
    here: one for loops, one for all other primitives.
    """
    if call.name in LOOPS:
        return (
            "`score_mod` reads a whole floating array inside a loop that could not be unrolled, which has no derivative here; "
            "index the array outside the loop, use a loop of fixed length of at most 64, or pass implementation='reference', which is dense."
        )
    return (
        f"`score_mod` hands a whole captured array of more than {MAX_UNROLL} elements to `{call.name}` at each position, which "
        f"has no derivative here; compute `{call.name}` of the array outside the mod and index the result, or hand it fewer "
        "elements."
    )


def is_float_capture(source: Program, argument: object) -> bool:
    """Whether an argument of a Call of the program `source` is a captured array of floating or complex numbers that is passed
    whole.
    """
    return isinstance(argument, int) and jnp.issubdtype(jnp.dtype(source.captures[argument].dtype), jnp.inexact)


def _unexpected_load(load: Load, index: list[jax.Array]) -> jax.Array:
    """Raises AssertionError: evaluate_scalars asks for the element of a load, though every loaded element is given."""
    raise AssertionError(f"the element of {load.out} is a variable of the derivative")


def _no_whole_array(capture: int) -> jax.Array:
    """Raises ModError: evaluate_scalars asks for the whole captured array number `capture`, whose dtype is an integer or bool one here,
    because derivative_program has refused the others with a better message.
    """
    raise ModError(
        "`score_mod` reads a whole array inside a loop that could not be unrolled, which has no derivative here; "
        "index the array outside the loop, use a loop of fixed length of at most 64, or pass implementation='reference', which is dense."
    )
