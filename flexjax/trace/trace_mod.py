"""Traces a user's function to a program and the arrays that the function captured.

The function is called on scalar tracers, once unless it raises TypeError. The arrays that it captured (JAX arrays, tracers of an outer
transformation, numpy arrays) become operands; everything else becomes a `Program` (ir/program.py). A function that cannot be used raises
ModError with the reason in a sentence.

The file's terms: a *custom function* is one with a derivative rule of its own (jax.custom_jvp, jax.custom_vjp). The *derivative program*
of a score_mod computes the new score and its derivatives by the score and by each element that the mod loads.
"""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex_core

from flexjax.errors import ModError, add_note_once, kind_of, with_article
from flexjax.ir.builder import Builder
from flexjax.ir.program import Atom, Program
from flexjax.ir.rewrite import select_captures
from flexjax.ir.verify import check
from flexjax.mod_tools.signatures import MASK_ARGUMENTS, SCORE_ARGUMENTS, other_kind, without_types
from flexjax.trace.derivative import custom_calls, derivative_program, inline_custom
from flexjax.trace.lift_numpy import as_operand, lift_numpy
from flexjax.trace.lower_jaxpr import Lowering
from flexjax.trace.values import scalar

Sizes = tuple[int, int, int, int]
"""(batch, heads, q_len, kv_len) of the attention matrix whose positions a mod is called for."""


@dataclasses.dataclass(frozen=True)
class TracedMod:
    """The result of tracing a user's function.

    program      what the function computes
    arrays       the captured arrays, in the order of `program.captures`
    derivative   of a score_mod: the derivative program, on the same arrays; None where it has none
    why_not      of a score_mod without a derivative: why, as a sentence
    """

    program: Program
    arrays: tuple[jax.Array, ...]
    derivative: Program | None = None
    why_not: str = ""


def trace_score_mod(score_mod: Callable, sizes: Sizes, score_dtype: str = "float32") -> TracedMod:
    """Traces `score_mod(score, b, h, q_idx, kv_idx) -> score` to its program and its derivative program.

    sizes         (batch, heads, q_len, kv_len), which bound the indices
    score_dtype   dtype name of the score that the function gets and of the result of the program

    A score_mod without a derivative, such as one whose custom function takes a whole array, is no error: `why_not` says
    why. Raises ModError if the function cannot be called, traced or translated, or returns anything but one floating
    scalar.
    """
    traced = _trace("score_mod", score_mod, SCORE_ARGUMENTS, score_dtype)
    out = traced.closed.out_avals[0]
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise ModError(
            f"`score_mod` returned {with_article(out.dtype.name)}; expected a floating scalar, the new score. "
            "To switch positions off, return -inf or use `mask_mod`."
        )
    source, arrays = _lowered("score_mod", traced, sizes, score_dtype, keep_custom=True)
    if any(isinstance(a, int) for call in custom_calls(source) for a in call.arguments):
        program, arrays = _lowered("score_mod", traced, sizes, score_dtype)
        return TracedMod(program, arrays, None, WHOLE_ARRAY_IN_RULE)
    program, extra = inline_custom(source, sizes)
    derivative, more, why_not = _derivative(source, sizes)
    if derivative is not None:
        extra = more
        program = dataclasses.replace(program, captures=derivative.captures)
    return TracedMod(program, (*arrays, *extra), derivative, why_not)


def trace_mask_mod(mask_mod: Callable, sizes: Sizes) -> TracedMod:
    """Traces `mask_mod(b, h, q_idx, kv_idx) -> bool` to its program, without a derivative.

    sizes   (batch, heads, q_len, kv_len), which bound the indices

    Raises ModError if the function cannot be called, traced or translated, or returns anything but one bool scalar.
    """
    traced = _trace("mask_mod", mask_mod, MASK_ARGUMENTS)
    out = traced.closed.out_avals[0]
    if out.dtype != jnp.bool_:
        raise ModError(
            f"`mask_mod` returned {with_article(out.dtype.name)}; expected a bool scalar, True where the query may look at the key. "
            "Compare explicitly, for example `value != 0`."
        )
    return TracedMod(*_lowered("mask_mod", traced, sizes))


def trace_multiplier(name: str, function: Callable, sizes: Sizes) -> TracedMod:
    """Traces `function(b, h, q_idx, kv_idx) -> number`, such as the dropout factor of a probability, to its program, without a
    derivative. The result keeps the dtype that the function gives it.

    name    how errors call the function
    sizes   (batch, heads, q_len, kv_len), which bound the indices

    Raises ModError if the function cannot be called, traced or translated, or does not return one scalar.
    """
    return TracedMod(*_lowered(name, _trace(name, function, MASK_ARGUMENTS), sizes))


WHOLE_ARRAY_IN_RULE = (
    "`score_mod` hands a whole captured array to a function with a derivative rule of its own, which cannot be differentiated "
    "here; hand it the element, `function(score, array[q_idx])`."
)


class Traced(typing.NamedTuple):
    """The result of calling a mod on tracers.

    closed   its jaxpr on scalars, with the values of its constants, the captured arrays
    split    the original arrays over explicit mesh axes, by the id of the unsplit constant that replaces each (lift_numpy.py)
    """

    closed: jex_core.ClosedJaxpr
    split: dict[int, jax.Array]


VALUE_IN_RULE = (
    "`score_mod` cannot be differentiated: the derivative rule of a function in it closes over a value that the mod computes or "
    "is given; hand it over as an argument of that function."
)


def _lowered(
    name: str,
    traced: Traced,
    sizes: Sizes,
    score_dtype: str | None = None,
    keep_custom: bool = False,
) -> tuple[Program, tuple[jax.Array, ...]]:
    """Translates the jaxpr of a mod to a program; returns the program and the captured arrays that it reads, in its
    order.

    name          the user's argument, for errors
    traced        the jaxpr
    sizes         (batch, heads, q_len, kv_len)
    score_dtype   of a score_mod, whose jaxpr has the score as its first input: the dtype of the score and of the
                  result; else None
    keep_custom   whether custom functions stay whole, as Calls; they are inlined otherwise

    Raises ModError, with `name` before the reason, for a jaxpr that cannot be translated.
    """
    lowering = Lowering(Builder(sizes, score_dtype or "float32"), keep_custom, split=traced.split)
    closed = traced.closed
    inputs = lowering.builder.inputs[0 if score_dtype else 1 :]
    try:
        consts = [as_operand(c) if isinstance(c, np.ndarray) else c for c in closed.consts]
        (result,) = lowering.run(closed.jaxpr, consts, [scalar(v) for v in inputs])
        atom = lowering.as_atoms(result).item()
    except ModError as error:
        text = str(error)
        raise ModError(text if text.startswith("`") else f"`{name}` cannot be compiled: {text}") from error
    return _finish(lowering, lowering.builder.convert(atom, score_dtype) if score_dtype else atom)


def _finish(lowering: Lowering, result: Atom) -> tuple[Program, tuple[jax.Array, ...]]:
    """Ends a translation: returns the checked program whose one result is `result`, and the captured arrays that it
    reads.

    lowering   the translation; steps that the result does not need are left out, captured arrays that no step reads are
               dropped, and the others are renumbered

    Raises IllegalProgram if the program breaks a rule of ir/verify.py, which is a mistake of the compiler and not of the user.
    """
    program = lowering.builder.finish([result])
    check(program)
    used = sorted(
        {load.capture for load in program.loads}
        | {a for call in program.calls for a in call.arguments if isinstance(a, int)}
    )
    return select_captures(program, used), tuple(lowering.arrays[i] for i in used)


def _derivative(source: Program, sizes: Sizes) -> tuple[Program | None, tuple[jax.Array, ...], str]:
    """Makes the derivative program of a score_mod's program.

    source   the program, in which custom functions are whole
    sizes    (batch, heads, q_len, kv_len)

    Returns (derivative program, arrays that it reads beyond those of `source`, ""), or (None, (), why there is none). A
    score_mod without a derivative still has a forward pass.
    """
    try:
        # A custom rule is not part of the program's text, so such programs are not shared.
        make = derivative_program if custom_calls(source) else _cached_derivative
        return *make(source, sizes), ""
    except jax.errors.UnexpectedTracerError:
        return None, (), VALUE_IN_RULE
    except ModError as error:
        text = str(error)
        return None, (), text if text.startswith("`") else f"`score_mod` cannot be differentiated: {text}"


@functools.lru_cache(maxsize=512)
def _cached_derivative(source: Program, sizes: Sizes) -> tuple[Program, tuple[jax.Array, ...]]:
    """As derivative_program, but remembers its results by (source, sizes).

    It runs without a mesh, because JAX writes the mesh into a jaxpr and calls on every mesh share the result.
    """
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return derivative_program(source, sizes)


# ------------------------------------------------------------------- calling the user's function


def _trace(name: str, mod: Callable, arguments: tuple[str, ...], score_dtype: str = "float32") -> Traced:
    """Calls the user's function on tracers (`_jaxpr_of`); returns its jaxpr on scalars, and its split arrays (`Traced`).

    name        the user's argument, for errors
    mod         the function
    arguments   the names of its arguments; "score" has the dtype `score_dtype`, all others are int32

    Raises ModError, with what to do in a sentence, if the function does not take these arguments, uses a tracer as a Python number, in
    numpy or with an attribute that tracers lack, decides in Python on one, has side effects, or returns anything but one scalar. Any
    other error of the function is passed on, with a note that names it.
    """
    check_callable(name, mod, arguments)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    score = jax.ShapeDtypeStruct((), jnp.dtype(score_dtype))
    avals = [score if a == "score" else index for a in arguments]
    try:
        closed, split = _jaxpr_of(mod, avals)
    except ModError as error:
        raise ModError(f"`{name}` cannot be compiled: {error}") from error
    except AttributeError as error:
        if not isinstance(error.obj, Tracer):
            raise
        raise ModError(
            f"`{name}` uses .{error.name} of a scalar, which JAX scalars do not have; use a function of jax.numpy, for example "
            "jnp.abs(x) for torch's x.abs() and jnp.clip(x, low, high) for x.clamp(low, high)."
        ) from error
    except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError) as error:
        raise ModError(
            f"`{name}` uses a traced value as a Python integer or hands it to numpy (it indexes a list, calls range() or np.*); "
            "use jax.numpy inside the mod and index arrays made by jnp.asarray."
        ) from error
    except (
        jax.errors.TracerBoolConversionError,
        jax.errors.ConcretizationTypeError,
        jax.errors.NonConcreteBooleanIndexError,
    ) as error:
        raise ModError(
            f"`{name}` decides in Python (if, while, and, or, not, int()) on a value known only at run time; use jnp.where, "
            "&, | and ~ instead."
        ) from error
    except Exception as error:
        add_note_once(error, f"In `{name}`, which is called with scalars, one position at a time.")
        raise
    if len(closed.out_avals) != 1 or closed.out_avals[0].shape != ():
        got = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in closed.out_avals) or "nothing"
        raise ModError(
            f"`{name}` returned {got}; expected one scalar. It is called with scalars: one position at a time."
        )
    # a named axis is the effect of a collective, which the lowering refuses by its name
    effects = [str(e) for e in closed.effects if type(e).__name__ != "NamedAxisEffect"]
    if effects:
        raise ModError(
            f"`{name}` has side effects ({', '.join(effects)}); a mod must be a pure function. To see its values, draw them with "
            "flexjax.visualize, or call it on arrays."
        )
    return Traced(closed, split)


def _jaxpr_of(mod: Callable, avals: list[jax.ShapeDtypeStruct]) -> Traced:
    """Calls `mod` on tracers; returns its jaxpr, whose constants are the arrays that it captured, and its split arrays (`Traced`).

    mod     the user's function
    avals   the types of its arguments, scalars

    What is called is the copy of lift_numpy, in which numpy arrays are Views, so that tracers can index them, and split arrays are unsplit.
    If that raises TypeError, as where a function does not take a View, `mod` itself is called, with its arrays as they are, and `split` is
    empty. If `mod` itself cannot index its arrays, the first error is raised. TypeError of a mod that reaches no such array, and all
    other errors, are passed on, but a result that is no array raises ModError.
    """
    lifted, split = lift_numpy(mod)
    try:
        return Traced(_fresh_jaxpr(lifted, avals), split)
    except TypeError as error:
        no_array = re.search(r"returned a value of type <class '(.+)'>.* not a valid JAX type", str(error))
        if no_array:
            advice = "call it with the same arguments" if "function" in no_array[1] else "return a number of jax.numpy"
            raise ModError(f"it returns a value of type {no_array[1]}; {advice}.") from error
        if lifted is mod:
            raise
        first = error
    try:
        return Traced(_fresh_jaxpr(mod, avals), {})
    except TypeError:
        raise first from None


def _fresh_jaxpr(mod: Callable, avals: list[jax.ShapeDtypeStruct]) -> jex_core.ClosedJaxpr:
    """Calls `mod` on tracers of the types `avals`; returns its jaxpr.

    JAX caches a jaxpr by the function object and would return the old one where the function reads something new: an attribute, a global
    or an entry of a dict that was assigned since, or a tracer of another transformation. A partial is a new object each time, and JAX
    takes the name of the function in it for errors.
    """
    return jax.make_jaxpr(functools.partial(mod))(*avals)


def check_callable(name: str, mod: object, arguments: tuple[str, ...]) -> None:
    """Raises ModError unless `mod` can be called with as many positional arguments as there are names in `arguments`.

    name   the user's argument, for errors

    A callable without a signature (written in C) passes.
    """
    wanted = f"{name}({', '.join(arguments)})"
    if not callable(mod):
        indexed = " Write a function that indexes the array." if isinstance(mod, jax.Array | np.ndarray) else ""
        raise ModError(f"`{name}` is {kind_of(mod)}; expected a function {wanted}.{indexed}")
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        makes_one = getattr(mod, "__name__", "") if len(signature.parameters) < len(MASK_ARGUMENTS) else ""
        advice = f" If it returns one, call it: {name}={makes_one}(...)." if makes_one.isidentifier() else ""
        if other := other_kind(signature, arguments):
            advice = f" If it is a {other}, pass it as {other}=."
        raise ModError(
            f"`{name}` has the signature {without_types(signature)}; expected {len(arguments)} positional arguments, {wanted}.{advice}"
        ) from None
