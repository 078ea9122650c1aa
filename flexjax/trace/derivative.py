"""The derivatives of a score mod, as a program on the same captured arrays.

s' = f(s, b, h, q, kv, l_1 .. l_n), where s is the score, s' the new score and l_j are the elements that f loads. The
derivative program computes

    s',  ds'/ds,  ds'/dl_j for each load j of a floating array

on scalars; of a source with more results f_n(s', ..) the same of each, one *group* after the other
(`Program.groups`). A backend multiplies each by the cotangent of s' and sums the products over the positions that read
the same element. Where a derivative rule is not linear in the cotangent (linearity.py), the program takes the cotangent
and gives the products. JAX differentiates f with the user's derivative rules in place; the jaxpr is then lowered like
that of a mod.

The *source* program is that of the mod in which functions with a derivative rule of their own (jax.custom_jvp,
jax.custom_vjp; *custom functions* here) are whole, as Calls, and stop_gradient is a step. `sizes` is (batch, heads,
q_len, kv_len).
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from flexjax.errors import ModError
from flexjax.ir.builder import Builder, literal
from flexjax.ir.evaluate_scalars import evaluate_scalars
from flexjax.ir.operations import COTANGENT, STOP_GRADIENT
from flexjax.ir.program import (
    SCORE,
    Atom,
    Call,
    Lit,
    Load,
    Op,
    Program,
    axes_of,
    in_loop_order,
    is_vector,
    loop_indices,
    loop_size,
    uses,
)
from flexjax.ir.replay import Replayed, append_call, replay
from flexjax.ir.rewrite import with_results
from flexjax.ir.verify import check
from flexjax.trace.equations import aval_of, cast_over, varying_axes
from flexjax.trace.lazy_rules import element_of, too_large_of
from flexjax.trace.lower_call import vector_index
from flexjax.trace.lower_jaxpr import Lowering
from flexjax.trace.primitives import CONTROL_FLOW, CUSTOM
from flexjax.trace.random_keys import keys_of, words_of
from flexjax.trace.values import MAX_UNROLL, NotRolled, Value, object_array, scalar


def custom_calls(program: Program) -> tuple[Call, ...]:
    return tuple(call for call in program.calls if call.name in CUSTOM)


def stops_gradients(program: Program) -> bool:
    return any(isinstance(step, Op) and step.prim == STOP_GRADIENT for step in program.steps)


def replay_inlined(
    source: Program, sizes: tuple[int, int, int, int], lowering: Lowering | None = None
) -> tuple[Lowering, Replayed]:
    """Appends the source program to a builder, with custom functions replaced by their bodies and without
    stop_gradient.

    lowering   a translation that has the captured arrays already, whose builder takes the steps; None: a new one

    Returns the translation and what became of the old values and loads; the caller ends the program. `Lowering.arrays`
    of a new translation has the arrays that the bodies captured, whose numbers follow those of the source.
    """
    if lowering is None:
        lowering = Lowering(Builder(sizes, source.inputs[SCORE].dtype), inline_constants=True)
        lowering.builder.captures = list(source.captures)
    builder = lowering.builder

    def call(step: Call, new: Callable[[Atom], Atom]) -> Sequence[Atom]:
        if step.name not in CUSTOM:
            return append_call(builder, step, new)
        assert step.inner is not None
        shaped = [(a[0], [new(x) for x in a[1]]) for a in step.arguments if not isinstance(a, int)]
        body = step.inner.jaxpr
        words = [
            _vector(lowering, shape, atoms[0]) if is_vector(shape, atoms) else object_array(atoms).reshape(shape)
            for shape, atoms in shaped
        ]
        arrays = [keys_of(w, aval_of(v).dtype) for w, v in zip(words, body.invars, strict=True)]
        outs = zip(lowering.run(body, step.inner.consts, arrays), body.outvars, step.results, strict=True)
        made: list[Atom] = []
        for out, v, (shape, vals) in outs:
            if is_vector(shape, vals):
                made.append(_element(lowering, out, vector_index(builder, shape)))
            else:
                made += list(words_of(lowering.as_atoms(out), aval_of(v).dtype).ravel())
        return made

    return lowering, replay(source, builder, {v.id: v for v in builder.inputs}, call=call, keep_stops=False)


def _vector(lowering: Lowering, shape: tuple[int, ...], atom: Atom) -> Value:
    """The lazy array whose element at the loop indices of `vector_index` is `atom`."""
    own = vector_index(lowering.builder, shape)
    make = lambda index: lowering.builder.at(
        atom, {k: i for k, i in zip(own, index, strict=True) if not isinstance(k, Lit)}
    )
    return lowering.lazy(shape, atom.dtype, make, too_large_of([], shape))


def _element(lowering: Lowering, value: Value, index: Sequence[Atom]) -> Atom:
    """The element of a value at loop indices; of an array of atoms by selects."""
    if not index:
        return lowering.as_atoms(value).item()
    try:
        with lowering.builder.opened(index):
            return element_of(lowering, value, index)
    except NotRolled:
        return element_of(lowering, lowering.as_atoms(value), index)


def inline_custom(source: Program, sizes: tuple[int, int, int, int]) -> tuple[Program, tuple[jax.Array, ...]]:
    """The forward program: the source with custom functions replaced by their bodies and without stop_gradient.

    Returns (program, arrays that the bodies captured); the program reads these arrays after those of `source`.
    """
    if not custom_calls(source) and not stops_gradients(source):
        return source, ()
    lowering, found = replay_inlined(source, sizes)
    program = lowering.builder.finish([found.new(r) for r in source.results])
    check(program)
    return program, tuple(lowering.arrays)


class Derivatives(typing.NamedTuple):
    """The derivatives of a score_mod; all programs have the same captured arrays."""

    # results: s', ds'/ds, and ds'/dl for the loads `program.gradients`, in the dtype of the score, and the same of each
    # other result of the source; cotangents in place
    # of derivatives if it takes the cotangent of s' (`Program.takes_cotangent`)
    program: Program
    # `program` with derivative rules and stop_gradient in it, for second derivatives; None where there are none; a
    # sentence if it could not be made
    again: Program | str | None
    # numbers of captured arrays without a gradient, which is no sum over entries (`_sees_entries`)
    refused: frozenset[int]
    # derivatives of `again` with forward functions (jax.custom_vjp) and rules (jax.custom_jvp) in place of the
    # functions: jax differentiates those where it differentiates twice
    after: "Derivatives | None"
    arrays: tuple[jax.Array, ...]  # that the programs read beyond those of the source


def derivatives_of(source: Program, sizes: tuple[int, int, int, int], after: bool = True) -> Derivatives:
    """Makes the derivative programs of a score_mod; `after`: whether the result has `after` too.

    Raises ModError where JAX cannot differentiate the mod, and where a Call reads a whole captured array. Passes on
    jax's UnexpectedTracerError, of a derivative rule that closes over a value of the mod.
    """
    lowering, found = replay_inlined(source, sizes)
    for call in source.calls:
        if any(is_float_capture(source, a) for a in call.arguments):
            raise ModError(_whole_array(call, "floating array"))
    loads = source.loads
    score_dtype = source.inputs[SCORE].dtype
    diff = [i for i, l in enumerate(loads) if jnp.issubdtype(jnp.dtype(l.out.dtype), jnp.floating)]

    def whole(capture: int) -> jax.Array:
        raise ModError(_whole_array(next(c for c in source.calls if capture in c.arguments), "array"))

    def value(score: jax.Array, leaves: list[jax.Array], given: dict[int, jax.Array], result: int) -> jax.Array:
        """A result as a function that JAX can differentiate by the score and by `leaves`, loaded floating elements."""
        known = {**given, SCORE: score, **{loads[i].out.id: x for i, x in zip(diff, leaves, strict=True)}}
        return evaluate_scalars(source, known, _unexpected_load, whole, result)

    # Inside shard_map the operands are cast before jax.vjp: the transpose of a cast is a sum over devices.
    over = frozenset().union(
        *(varying_axes(v.aval) for c in custom_calls(source) if c.inner is not None for v in c.inner.jaxpr.invars)
    )

    jumps = [call for call in source.calls if call.linear is False]
    at_entries = any(_sees_entries(source, call) for call in jumps)
    elsewhere = [atom for call in jumps if not _sees_entries(source, call) for atom in call.inputs]
    summed = uses(source.steps, tuple(elsewhere))
    if at_entries and len(source.results) > 1:
        raise ModError(NOT_LINEAR_BESIDE_EXPECTATIONS)

    def both(
        inputs: list[jax.Array], loaded: list[jax.Array], *cotangent: jax.Array
    ) -> list[tuple[jax.Array, jax.Array, list[jax.Array]]]:
        """(s', ds'/ds, [ds'/dl_j]) of each result at one position; with the cotangent of s', cotangents instead."""
        inputs, loaded = ([cast_over(x, over) for x in xs] for xs in (inputs, loaded))
        given = dict(enumerate(inputs)) | {l.out.id: x for l, x in zip(loads, loaded, strict=True)}
        found = []
        for result in range(len(source.results)):
            at = functools.partial(value, given=given, result=result)
            out, pull = jax.vjp(at, inputs[SCORE], [loaded[i] for i in diff])
            found.append((out, *pull(cast_over(cotangent[0], over) if cotangent else jnp.ones_like(out))))
        return found

    shape_of = lambda v: jax.ShapeDtypeStruct(tuple(map(loop_size, in_loop_order(v.axes))), jnp.dtype(v.dtype))
    more = [shape_of(source.inputs[SCORE])] if at_entries else []
    try:
        traced = jax.make_jaxpr(both)([shape_of(v) for v in source.inputs], [shape_of(l.out) for l in loads], *more)
    except jax.errors.UnexpectedTracerError:
        raise  # the caller has a sentence for it
    except ModError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModError(_underivable(error)) from error

    def lowered(lowering: Lowering, found: Replayed) -> Program:
        builder, indices = lowering.builder, loop_indices(source)
        index_of = lambda val: [found.new(indices[axis]) for axis in in_loop_order(val.axes)]

        def loaded(load: Load) -> Value:
            atom, own, shape = found.new(load.out), index_of(load.out), shape_of(load.out).shape
            at = lambda index: builder.at(atom, dict(zip(own, index, strict=True)))
            return lowering.lazy(shape, atom.dtype, at, too_large_of([], shape)) if own else scalar(atom)

        given = [*map(scalar, builder.inputs), *map(loaded, loads)]
        if at_entries:
            given.append(scalar(builder.op(COTANGENT, (builder.inputs[SCORE],), score_dtype)))
        outs = lowering.run(traced.jaxpr, traced.consts, given)
        places = [[], [], *(index_of(loads[i].out) for i in diff)] * len(source.results)
        flat = [builder.convert(_element(lowering, o, at), score_dtype) for o, at in zip(outs, places, strict=True)]
        for place, i in enumerate(diff):
            if loads[i].out.id in summed:  # refused; should a backend read it, it shows
                for group in range(0, len(flat), 2 + len(diff)):
                    flat[group + 2 + place] = literal(float("nan"), score_dtype)
        new_loads = list(found.loads.values())
        program = builder.finish(flat, [new_loads[i] for i in diff])
        check(program)
        return program

    program, again = lowered(lowering, found), None
    ruled = {call.name for call in source.calls if call.linear is not None}
    if ruled or stops_gradients(source):
        kept = Lowering(Builder(sizes, score_dtype), keep_custom=True, inline_constants=True, again=True)
        kept.shares_captures_of(lowering)
        try:  # the loads need the indices alone, which have no derivative
            again = lowered(*replay_inlined(source, sizes, kept))
        except ModError as error:
            again = str(error)
        else:
            program, lowering = dataclasses.replace(program, captures=again.captures), kept
    refused = frozenset(loads[i].capture for i in diff if loads[i].out.id in summed)
    arrays, then = tuple(lowering.arrays), None
    if after and isinstance(again, Program) and ruled:
        then = derivatives_of(with_results(again, [group[0] for group in again.groups]), sizes, after=False)
        arrays += then.arrays
        program, again = (dataclasses.replace(p, captures=then.program.captures) for p in (program, again))
    return Derivatives(program, None if again == program else again, refused, then, arrays)


NOT_LINEAR_BESIDE_EXPECTATIONS = (
    "`score_mod` has a derivative rule that is not linear in the cotangent, so that a call with expectations has no "
    'gradient. Use a linear rule, or implementation="reference".'
)


def _sees_entries(source: Program, call: Call) -> bool:
    """Whether a derivative rule gets the cotangent of each entry: the operands of `call` differ along each long axis.

    Otherwise jax applies the rule to a sum of cotangents, which is known only when all entries are.
    """
    axes = frozenset().union(*(axes_of(a) for a in call.inputs))
    axes |= {"q", "kv"} if "delta" in axes else set()
    wanted = {axis for axis, size in zip(("b", "h", "q", "kv"), source.sizes, strict=True) if size > 1}
    return "score" in axes or wanted <= axes


def _underivable(error: Exception) -> str:
    return (
        f"`score_mod` cannot be differentiated: {str(error).rstrip('.')}. Stop the gradient before that operation with "
        "jax.lax.stop_gradient, or give the function a derivative rule with jax.custom_jvp."
    )


def _whole_array(call: Call, array: str) -> str:
    """The error for `call`, which reads a whole captured array and so has no derivative."""
    if call.name in CONTROL_FLOW:
        return (
            f"`score_mod` reads a whole {array} inside a loop that could not be unrolled, which has no derivative "
            "here; index the array outside the loop, use a loop of fixed length of at most 64, or pass "
            "implementation='reference', which is dense."
        )
    return (
        f"`score_mod` hands a whole captured array of more than {MAX_UNROLL} elements to `{call.name}` at each "
        f"position, which has no derivative here; compute `{call.name}` of the array outside the mod and index the "
        "result, or hand it fewer elements."
    )


def is_float_capture(source: Program, argument: object) -> bool:
    """Whether an argument of a Call is a captured array of floating or complex numbers that is passed whole."""
    return isinstance(argument, int) and jnp.issubdtype(jnp.dtype(source.captures[argument].dtype), jnp.inexact)


def _unexpected_load(load: Load, index: list[jax.Array]) -> jax.Array:
    raise AssertionError(f"the element of {load.out} is a variable of the derivative")
