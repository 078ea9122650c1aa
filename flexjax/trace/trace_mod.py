"""Traces a user's function to a program and the arrays that the function captured.

The function is called on scalar tracers, once unless it raises TypeError. The arrays that it captured (JAX arrays,
tracers of an outer transformation, numpy arrays) become operands; everything else becomes a `Program` (ir/program.py).

A *custom function* is one with a derivative rule of its own (jax.custom_jvp, jax.custom_vjp). The *derivative program*
of a score_mod computes the new score and its derivatives by the score and by each element that the mod loads.
"""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from flexjax.errors import ModError, kind_of, not_bool, shows_all_frames, with_article
from flexjax.ir.builder import Builder
from flexjax.ir.program import SCORE, Atom, Lit, Program
from flexjax.ir.rewrite import select_captures
from flexjax.ir.verify import check
from flexjax.mod_tools.made_for import Reach
from flexjax.mod_tools.picklable import Mod
from flexjax.mod_tools.settings import users_settings
from flexjax.mod_tools.signatures import MASK_ARGUMENTS, SCORE_ARGUMENTS, misplaced, other_kind, without_types
from flexjax.trace.advised import advised
from flexjax.trace.bare_reads import warn_of_short_arrays
from flexjax.trace.callbacks import callbacks_run, called_back, first_callback
from flexjax.trace.derivative import Derivatives, custom_calls, derivatives_of, inline_custom
from flexjax.trace.lift_numpy import as_operand, lift_numpy
from flexjax.trace.lower_jaxpr import Lowering
from flexjax.trace.memo import Memo
from flexjax.trace.reads import positions, reads_of
from flexjax.trace.statement import failed_at, traceback_of, where, where_made
from flexjax.trace.translation import Equation, Scope
from flexjax.trace.values import scalar

Sizes = tuple[int, int, int, int]
"""(batch, heads, q_len, kv_len) of the attention matrix whose positions a mod is called for."""


@dataclasses.dataclass(frozen=True)
class TracedMod:
    """A traced score_mod or mask_mod; all fields but two are those of a score_mod (`Derivatives`)."""

    program: Program
    arrays: tuple[jax.Array, ...]  # in the order of `program.captures`
    derivative: Program | None = None
    why_not: str = ""  # the sentence that says why there is no derivative
    again: Program | str | None = None
    refused: frozenset[int] = frozenset()
    after: "TracedMod | None" = None
    place: str = ""  # what an error that says `why_not` ends with
    ruled: bool = False  # whether functions with a derivative rule of their own are in it

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that there are, in the order of the fields; all have the same captured arrays."""
        after = () if self.after is None else self.after.programs
        return (*(p for p in (self.program, self.derivative, self.again) if isinstance(p, Program)), *after)

    def with_programs(self, programs: Sequence[Program], arrays: tuple[jax.Array, ...]) -> "TracedMod":
        program, *rest = programs
        derivative = rest.pop(0) if self.derivative is not None else None
        again = rest.pop(0) if isinstance(self.again, Program) else self.again
        after = None if self.after is None else self.after.with_programs(rest, arrays)
        return dataclasses.replace(
            self, program=program, derivative=derivative, again=again, after=after, arrays=arrays
        )

    @property
    def is_identity(self) -> bool:
        """Whether a score_mod and all its derivatives are those of the score itself."""
        made, score = self.derivative, self.program.inputs[SCORE]
        if self.program.results[0] != score or made is None or self.again is not None or self.refused:
            return False
        slope, *slopes = (r.value if isinstance(r, Lit) else None for r in made.results[1:])
        return slope == 1 and all(s == 0 for s in slopes)


def trace_score_mod(
    score_mod: Callable,
    sizes: Sizes,
    score_dtype: str = "float32",
    reach: Reach | None = None,
    count: int = 1,
    name: str = "score_mod",
) -> TracedMod:
    """Traces `score_mod(score, b, h, q_idx, kv_idx) -> score` to its program and its derivative program.

    score_dtype   of the score that the function gets and of the result of the program
    reach         how far the indices certainly count, for a warning of arrays that are too short (bare_reads.py)
    count         of the scalars that the function returns: the score and functions of it (call/expectations.py)
    name          what errors and warnings say between backticks

    A score_mod without a derivative is no error: `why_not` says why. Raises ModError if the function cannot be called,
    traced or translated, or returns anything but one floating scalar.
    """
    return _remembered(_score_mod, score_mod, sizes, score_dtype, reach, count, name)


def _score_mod(
    score_mod: Callable, sizes: Sizes, score_dtype: str, reach: Reach | None, count: int, name: str
) -> TracedMod:
    traced = _trace(name, score_mod, SCORE_ARGUMENTS, score_dtype, count)
    if reach is not None:
        warn_of_short_arrays(name, traced.closed, SCORE_ARGUMENTS, reach)
    out = traced.closed.out_avals[0]
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise _of_result(
            f"`score_mod` returned {with_article(out.dtype.name)}; expected a floating scalar, the new score. "
            "To switch positions off, return -inf or use `mask_mod`.",
            traced,
        )
    source, arrays = _lowered(name, traced, sizes, score_dtype, keep_custom=True)
    ruled = bool(custom_calls(source))
    if any(isinstance(a, int) for call in custom_calls(source) for a in call.arguments):
        program, arrays = _lowered(name, traced, sizes, score_dtype)
        return TracedMod(program, arrays, None, WHOLE_ARRAY_IN_RULE, place=where_made(score_mod), ruled=ruled)
    program, extra = inline_custom(source, sizes)
    made = _derivatives(source, sizes)
    if isinstance(made, str):
        return TracedMod(program, (*arrays, *extra), None, made, place=where_made(score_mod), ruled=ruled)
    program = dataclasses.replace(program, captures=made.program.captures)
    arrays, after = (*arrays, *made.arrays), None
    if made.after is not None:
        then = made.after
        after = TracedMod(program, arrays, then.program, "", then.again, then.refused)
    return TracedMod(program, arrays, made.program, "", made.again, made.refused, after, ruled=ruled)


def check_function(name: str, function: Callable, score_dtype: str, integers: bool = False) -> None:
    """Raises ModError for an argument `name` of the kind of score_mod that cannot be called and traced to a float.

    integers   whether integers and bools pass too
    """
    traced = _trace(name, function, SCORE_ARGUMENTS, score_dtype)
    out = traced.closed.out_avals[0]
    if integers and (jnp.issubdtype(out.dtype, jnp.integer) or out.dtype == jnp.bool_):
        return
    if not jnp.issubdtype(out.dtype, jnp.floating):
        expected = "a float, an integer or a bool" if integers else "a floating scalar"
        raise _of_result(f"`{name}` returned {with_article(out.dtype.name)}; expected {expected}.", traced)


def trace_mask_mod(mask_mod: Callable, sizes: Sizes, reach: Reach | None = None) -> TracedMod:
    """Traces `mask_mod(b, h, q_idx, kv_idx) -> bool` to its program. Raises ModError as trace_score_mod does."""
    return _remembered(_mask_mod, mask_mod, sizes, reach)


def _mask_mod(mask_mod: Callable, sizes: Sizes, reach: Reach | None) -> TracedMod:
    traced = _trace("mask_mod", mask_mod, MASK_ARGUMENTS)
    if reach is not None:
        warn_of_short_arrays("mask_mod", traced.closed, MASK_ARGUMENTS, reach)
    out = traced.closed.out_avals[0]
    if out.dtype != jnp.bool_:
        raise _of_result(not_bool("`mask_mod`", out.dtype), traced)
    return TracedMod(*_lowered("mask_mod", traced, sizes))


def trace_multiplier(name: str, function: Callable, sizes: Sizes) -> TracedMod:
    """Traces `function(b, h, q_idx, kv_idx) -> number` without a derivative; `name` is how errors call it."""
    return _remembered(_multiplier, function, name, sizes)


def _multiplier(function: Callable, name: str, sizes: Sizes) -> TracedMod:
    return TracedMod(*_lowered(name, _trace(name, function, MASK_ARGUMENTS), sizes))


_KEPT: Memo[tuple[TracedMod, tuple[int, ...]]] = Memo(256)
"""Traced mods without their arrays, and where each array is among those that the mod can read (reads.py)."""


def _remembered(trace: Callable[..., TracedMod], mod: Callable, *rest: object) -> TracedMod:
    """`trace(mod, *rest)`, from the last time where the mod reads the same. Errors and callbacks are made each time."""
    if callbacks_run() or (reads := reads_of(mod)) is None:
        return trace(mod, *rest)
    key = (trace, *rest, reads.key)
    same = () if reads.ours else reads.arrays
    if (kept := _KEPT.get(key, same)) is not None:
        made, places = kept
        return dataclasses.replace(made, arrays=tuple(reads.arrays[n] for n in places))
    made = trace(mod, *rest)
    places, again = positions(made.arrays, reads.arrays), reads_of(mod)
    # a derivative rule, or a step that jax computes, may hold a captured array or its numbers
    held = bool(reads.arrays) and (made.ruled or any(p.calls for p in made.programs))
    if places is not None and not held and again is not None and again.key == reads.key:
        _KEPT.put(key, (dataclasses.replace(made, arrays=()), places), same)
    return made


WHOLE_ARRAY_IN_RULE = (
    "`score_mod` hands a whole captured array to a function with a derivative rule of its own, which cannot be "
    "differentiated here; hand it the element, `function(score, array[q_idx])`."
)


class Traced(typing.NamedTuple):
    """What calling a mod on tracers gives."""

    closed: jex_core.ClosedJaxpr  # on scalars; its constants are the captured arrays
    # arrays over explicit mesh axes, by the id of the unsplit constant that replaces each (lift_numpy.py)
    split: dict[int, jax.Array]
    mod: Callable  # the user's function


VALUE_IN_RULE = (
    "`score_mod` cannot be differentiated: the derivative rule of a function in it closes over a value that the mod "
    "computes or is given; hand it over as an argument of that function."
)


def _lowered(
    name: str, traced: Traced, sizes: Sizes, score_dtype: str | None = None, keep_custom: bool = False
) -> tuple[Program, tuple[jax.Array, ...]]:
    """Translates the jaxpr of a mod; returns its program and the captured arrays that it reads, in the program's order.

    score_dtype   None for functions without a score; else the jaxpr's first input is the score
    keep_custom   custom functions stay whole, as Calls; they are inlined otherwise

    ModError has the user's argument, `name`, before the reason.
    """
    lowering = Lowering(Builder(sizes, score_dtype or "float32"), keep_custom, split=traced.split)
    closed = traced.closed
    inputs = lowering.builder.inputs[0 if score_dtype else 1 :]
    try:
        consts = [as_operand(c) if isinstance(c, np.ndarray) else c for c in closed.consts]
        results = lowering.run(closed.jaxpr, consts, [scalar(v) for v in inputs])
        atoms = [lowering.as_atoms(result).item() for result in results]
    except ModError as error:
        text = str(error)
        text = text if text.startswith("`") else f"`{name}` cannot be compiled: {text}"
        raise _at_equation(text, lowering.inside, traced.mod) from (error if shows_all_frames() else None)
    return _finish(lowering, [lowering.builder.convert(atom, score_dtype) if score_dtype else atom for atom in atoms])


def _at_equation(text: str, eqns: Sequence[Equation], mod: Callable) -> ModError:
    """The error `text` about the last of `eqns`, which are inside each other; it ends with the user's statement."""
    whole = traceback_of(eqns)
    return ModError(text + (where(failed_at(whole)) or where_made(mod))).with_traceback(whole)


def _of_result(text: str, traced: "Traced") -> ModError:
    """As `_at_equation`, for the equation that computes the first result, if there is one."""
    jaxpr = traced.closed.jaxpr
    eqns = typing.cast(Sequence[Equation], jaxpr.eqns)
    made = [e for e in eqns if any(v is r for v in e.outvars for r in jaxpr.outvars[:1])]
    return _at_equation(text, made, traced.mod)


def _finish(lowering: Lowering, results: Sequence[Atom]) -> tuple[Program, tuple[jax.Array, ...]]:
    """The checked program of `results`, without unused steps and arrays, and its arrays."""
    program = lowering.builder.finish(results)
    check(program)
    used = sorted(
        {load.capture for load in program.loads}
        | {a for call in program.calls for a in call.arguments if isinstance(a, int)}
    )
    return select_captures(program, used), tuple(lowering.arrays[i] for i in used)


def _derivatives(source: Program, sizes: Sizes) -> Derivatives | str:
    """The derivative programs of the program `source`, in which custom functions are whole; or why there are none."""
    try:
        # A custom rule is not part of the program's text, so such programs are not shared.
        return (derivatives_of if custom_calls(source) else _cached_derivatives)(source, sizes)
    except jax.errors.UnexpectedTracerError:
        return VALUE_IN_RULE
    except ModError as error:
        text = str(error)
        return text if text.startswith("`") else f"`score_mod` cannot be differentiated: {text}"


@functools.lru_cache(maxsize=512)
def _cached_derivatives(source: Program, sizes: Sizes) -> Derivatives:
    """As derivatives_of, cached."""
    # without a mesh, because JAX writes the mesh into a jaxpr and calls on every mesh share the result
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return derivatives_of(source, sizes)


# ------------------------------------------------------------------- calling the user's function


def _trace(
    name: str, mod: Callable, arguments: tuple[str, ...], score_dtype: str = "float32", count: int = 1
) -> Traced:
    """Calls the user's function `name` on tracers; returns its jaxpr to `count` scalars, and its split arrays.

    Arguments named "score" have the dtype `score_dtype`, all others int32. Raises ModError, with what to do in a
    sentence, for what a mod must not do. Other errors of the function pass, with a note that names it.
    """
    check_callable(name, mod, arguments)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    score = jax.ShapeDtypeStruct((), jnp.dtype(score_dtype))
    avals = [score if a == "score" else index for a in arguments]
    with advised(name, mod, ", which is called with scalars, one position at a time"):
        closed, split = _jaxpr_of(mod, avals)
    traced = Traced(closed, split, mod)
    if len(closed.out_avals) != count or any(a.shape != () for a in closed.out_avals):
        got = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in closed.out_avals) or "nothing"
        todo = "Index every axis of what it reads, or reduce: it is called with scalars, one position at a time."
        if len(closed.out_avals) != count:
            todo = "Write `return` before it." if got == "nothing" else "Return one number."
        raise _of_result(f"`{name}` returned {got}; expected one scalar. {todo}", traced)
    if found := first_callback(typing.cast(Scope, closed.jaxpr)):
        if callbacks_run():
            stand_in = AS_IF.get(name, AS_IF["weights"])
            several = stand_in if count == 1 else lambda *at: (stand_in(*at),) * count
            return _trace(name, several, arguments, score_dtype, count)
        raise _at_equation(f"`{name}` {called_back(found[-1])}", found, mod)
    # a named axis is the effect of a collective, which the lowering refuses by its name
    effects = [str(e) for e in closed.effects if type(e).__name__ != "NamedAxisEffect"]
    if effects:
        raise _at_equation(
            f"`{name}` has side effects ({', '.join(effects)}); a mod must be a pure function. To see its values, draw "
            "them with flexjax.visualize, or call it on arrays.",
            (),
            mod,
        )
    return traced


def call_on_arrays(name: str, function: Callable, *arrays: jax.Array) -> object:
    """What the user's function `name` of arrays returns. Raises ModError for what a traced function must not do."""
    with advised(name, function), users_settings():
        return function(*arrays)


AS_IF: dict[str, Callable] = {
    "score_mod": lambda score, b, h, q_idx, kv_idx: score,
    "weights": lambda score, b, h, q_idx, kv_idx: score,
    "mask_mod": lambda b, h, q_idx, kv_idx: True,
}
"""What is planned for a mod with callbacks: implementation="reference" runs the mod itself."""


def _jaxpr_of(mod: Callable, avals: list[jax.ShapeDtypeStruct]) -> tuple[jex_core.ClosedJaxpr, dict[int, jax.Array]]:
    """Calls `mod` on tracers, in the copy that lift_numpy makes; returns its jaxpr and its split arrays."""
    lifted, split = lift_numpy(mod)
    try:
        return _fresh_jaxpr(lifted, avals), split
    except TypeError as error:
        no_array = re.search(r"returned a value of type <class '(.+)'>.* not a valid JAX type", str(error))
        if no_array:
            kind = no_array[1].replace(f"{Mod.__module__}.{Mod.__name__}", "function")
            advice = "call it with the same arguments" if "function" in kind else "return a number of jax.numpy"
            raise ModError(f"it returns a value of type {kind}; {advice}.") from error
        if lifted is mod:
            raise
        first = error  # as where a function does not take a View
    try:
        return _fresh_jaxpr(mod, avals), {}  # with the arrays as they are
    except TypeError:
        raise first from None


def _fresh_jaxpr(mod: Callable, avals: list[jax.ShapeDtypeStruct]) -> jex_core.ClosedJaxpr:
    # JAX caches a jaxpr by the function object, and would miss what the function reads anew: a global, an attribute, a
    # tracer. A partial is a new object each time, and JAX takes the name of the function in it for errors.
    with users_settings():
        return jax.make_jaxpr(functools.partial(mod))(*avals)


def check_callable(name: str, mod: object, arguments: tuple[str, ...]) -> None:
    """Raises ModError unless `mod`, the argument `name`, takes positional arguments of these names in order.

    Other names of arguments pass, and so does a callable without a signature (written in C).
    """
    wanted = f"{name}({', '.join(arguments)})"
    if not callable(mod):
        score, ready = arguments is SCORE_ARGUMENTS, name in ("score_mod", "mask_mod")
        todo = f"Ready-made ones are in flexjax.{'mods' if score else 'masks'}." if ready else "Write one."
        if isinstance(mod, jax.Array | np.ndarray):
            todo = "Write a function that indexes the array."
        elif isinstance(mod, list | tuple):
            todo = f"Join functions by flexjax.{'chain_mods' if score else 'and_masks'}(a, b)."
        raise ModError(f"`{name}` is {kind_of(mod)}; expected a function {wanted}. {todo}")
    if inspect.isgeneratorfunction(mod) or inspect.iscoroutinefunction(mod):
        raise ModError(f"`{name}` is a generator or a coroutine; expected a function {wanted}. Return the number.")
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
            f"`{name}` has the signature {without_types(signature)}; expected {len(arguments)} positional "
            f"argument{'s' * (len(arguments) > 1)}, {wanted}.{advice}"
        ) from None
    if misplaced(signature, arguments):
        raise ModError(
            f"`{name}` has the signature {without_types(signature)}; expected the order {wanted}. Arguments are given "
            "by position: order them so, or use other names."
        )
