"""The derivative of a score mod, as a program on the same captured arrays.

s' = f(s, b, h, q, kv, l_1 .. l_n), where l_j are the elements that f loads. The program returned computes

    s',  ds'/ds,  ds'/dl_j for each load j of a floating array

on scalars. A backend multiplies them by the cotangent of s' and sums each over the positions that read the same element.
Index expressions are integers, so no derivative passes through them. Custom derivative rules are those of the user: f is
replayed with them in place and differentiated by JAX.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from flexjax.errors import ModError
from flexjax.ir.builder import Builder
from flexjax.ir.evaluate import apply_op, literal_array
from flexjax.ir.program import SCORE, Atom, Call, Lit, Load, Op, Program
from flexjax.ir.verify import check
from flexjax.trace.atoms import MAX_UNROLL, object_array, scalar
from flexjax.trace.lower_jaxpr import Lowering, cast_over, varying_axes
from flexjax.trace.primitives import CUSTOM, LOOPS


def custom_calls(program: Program) -> tuple[Call, ...]:
    """The functions with a derivative rule of their own, which are still whole in the program."""
    return tuple(call for call in program.calls if call.name in CUSTOM)


def stops_gradients(program: Program) -> bool:
    """Whether the program still says where no derivative passes."""
    return any(isinstance(step, Op) and step.prim == "stop_gradient" for step in program.steps)


def replay(source: Program, sizes: tuple[int, int, int, int]) -> tuple[Lowering, dict[int, Atom], list[Load]]:
    """A fresh builder with the steps of `source`, custom functions inlined.

    Returns it, the new atom of each old value and the new Load steps of source's loads, in order.
    """
    lowering = Lowering(Builder(sizes, source.inputs[SCORE].dtype), inline_constants=True)
    builder = lowering.builder
    builder.captures = list(source.captures)
    env: dict[int, Atom] = {v.id: v for v in builder.inputs}
    loads: list[Load] = []

    def new(atom: Atom) -> Atom:
        return atom if isinstance(atom, Lit) else env[atom.id]

    for step in source.steps:
        if isinstance(step, Op):
            params = dict(step.params)
            env[step.out.id] = builder.op(step.prim, [new(a) for a in step.inputs], step.out.dtype, **params)
        elif isinstance(step, Load):
            env[step.out.id] = builder.load(step.capture, [new(a) for a in step.index])
            loads.append(next(s for s in builder.steps if isinstance(s, Load) and s.out == env[step.out.id]))
        else:
            for val, atom in zip(step.outs, _replay_call(lowering, step, new), strict=True):
                env[val.id] = atom
    return lowering, env, loads


def _replay_call(lowering: Lowering, step: Call, new: Callable[[Atom], Atom]) -> list[Atom]:
    arguments = [a if isinstance(a, int) else (a[0], tuple(map(new, a[1]))) for a in step.arguments]
    if step.name in CUSTOM:
        arrays = [object_array(a[1]).reshape(a[0]) for a in arguments if not isinstance(a, int)]
        outs = lowering.run(step.inner.jaxpr, step.inner.consts, arrays)
        return [atom for out in outs for atom in lowering.as_atoms(out).ravel()]
    results = tuple(
        (shape, tuple(lowering.builder.fresh(v.dtype, v.axes) for v in vals)) for shape, vals in step.results
    )
    lowering.builder.steps.append(Call(step.name, step.text, tuple(arguments), results, step.bind, step.inner))
    return [v for _, vals in results for v in vals]


def inline_custom(source: Program, sizes: tuple[int, int, int, int]) -> tuple[Program, tuple[jax.Array, ...]]:
    """The program with functions that have their own derivative rules replaced by their bodies: what is computed.

    Arrays that such bodies captured are added to the program's; they are returned.
    """
    if not custom_calls(source) and not stops_gradients(source):
        return source, ()
    lowering, env, _ = replay(source, sizes)
    results = [r if isinstance(r, Lit) else env[r.id] for r in source.results]
    program = lowering.builder.finish(results)
    check(program)
    return program, tuple(lowering.arrays)


def derivative_program(source: Program, sizes: tuple[int, int, int, int]) -> tuple[Program, tuple[jax.Array, ...]]:
    """The program of s', ds'/ds and ds'/dl_j; `gradients` names the loads. Raises ModError where JAX cannot.

    Its captures are those of inline_custom(source) and arrays that derivative rules captured; all that source lacks are returned.
    """
    lowering, env, new_loads = replay(source, sizes)
    for call in source.calls:
        if any(source_is_float(source, a) for a in call.arguments):
            raise ModError(_whole_array(call))
    loads = source.loads
    score_dtype = source.inputs[SCORE].dtype
    diff = [i for i, l in enumerate(loads) if jnp.issubdtype(jnp.dtype(l.out.dtype), jnp.floating)]

    def value(score: jax.Array, leaves: list[jax.Array], given: dict[int, jax.Array]) -> jax.Array:
        known = {**given, SCORE: score, **{loads[i].out.id: x for i, x in zip(diff, leaves, strict=True)}}
        return evaluate_scalars(source, known)

    # Inside shard_map: a cast within what is differentiated would have a sum over devices as its transpose.
    over = frozenset().union(*(varying_axes(v.aval) for c in custom_calls(source) for v in c.inner.jaxpr.invars))

    def both(inputs: list[jax.Array], loaded: list[jax.Array]) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
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
    atoms = [*lowering.builder.inputs, *(env[l.out.id] for l in loads)]
    outs = lowering.run(traced.jaxpr, traced.consts, [scalar(a) for a in atoms])
    flat = [lowering.builder.convert(lowering.as_atoms(o).item(), score_dtype) for o in outs]
    program = lowering.builder.finish(flat, [new_loads[i] for i in diff])
    check(program)
    return program, tuple(lowering.arrays)


def _underivable(error: Exception) -> str:
    """What jax says of the mod's derivative, and what to do."""
    return (
        f"`score_mod` cannot be differentiated: {str(error).rstrip('.')}. Stop the gradient before that operation with "
        "jax.lax.stop_gradient, or give the function a derivative rule with jax.custom_jvp."
    )


def _whole_array(call: Call) -> str:
    if call.name in LOOPS:
        return (
            "`score_mod` reads a whole floating array inside a loop that could not be unrolled, which has no derivative here; "
            "index the array outside the loop or use a loop of fixed length of at most 64."
        )
    return (
        f"`score_mod` hands a whole captured array of more than {MAX_UNROLL} elements to `{call.name}` at each position, which "
        f"has no derivative here; compute `{call.name}` of the array outside the mod and index the result, or hand it fewer "
        "elements."
    )


def source_is_float(source: Program, argument: object) -> bool:
    return isinstance(argument, int) and jnp.issubdtype(jnp.dtype(source.captures[argument].dtype), jnp.inexact)


def evaluate_scalars(program: Program, known: dict[int, jax.Array]) -> jax.Array:
    """The first result from given inputs and loads; index arithmetic is not needed and not done."""
    env = dict(known)

    def read(atom: Atom) -> jax.Array:
        return literal_array(atom) if isinstance(atom, Lit) else env[atom.id]

    for step in program.steps:
        if isinstance(step, Load) or all(out.id in env for out in step.outs):
            continue
        if isinstance(step, Op):
            env[step.out.id] = apply_op(step, [read(a) for a in step.inputs])
            continue
        if any(isinstance(a, int) for a in step.arguments):
            raise ModError("`score_mod` reads a whole array inside a loop that could not be unrolled.")
        operands = [_joined(a[0], [read(x) for x in a[1]]) for a in step.arguments if not isinstance(a, int)]
        outs = step.bind(*operands)
        for (_, vals), out in zip(step.results, outs, strict=True):
            env.update({v.id: out.ravel()[i] for i, v in enumerate(vals)})
    return read(program.results[0])


def _joined(shape: tuple[int, ...], scalars: list[jax.Array]) -> jax.Array:
    return jnp.stack(scalars).reshape(shape) if shape else scalars[0]
