"""From a user's function to a traced mod.

The function is called once, on scalar tracers. What it captured (arrays, tracers of an outer transformation, numpy arrays)
comes out as operands; the rest is a `Program`. Why a function is refused is said here, in a sentence.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.errors import ModError
from flexjax.trace.builder import Builder
from flexjax.trace.check_ir import check
from flexjax.trace.derivative import derivative_program, has_custom_rules, inline_custom
from flexjax.trace.lower_jaxpr import Lowering, scalar
from flexjax.trace.mod_ir import Atom, Program
from flexjax.trace.rewrite import select_captures

Sizes = tuple[int, int, int, int]
"""batch, heads, q_len, kv_len: the matrix whose entries a mod is asked for."""

SCORE_ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx")
MASK_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")


@dataclasses.dataclass(frozen=True)
class TracedMod:
    """A program and the arrays it captured, in the order of `program.captures`.

    `derivative` (score mods only) computes the modified score and its derivatives, on the same arrays; where there is none,
    `why_not` says so.
    """

    program: Program
    arrays: tuple[jax.Array, ...]
    derivative: Program | None = None
    why_not: str = ""


def trace_score_mod(score_mod: Callable, sizes: Sizes, score_dtype: str = "float32") -> TracedMod:
    """Traces `score_mod(score, b, h, q_idx, kv_idx)`; raises ModError (a ValueError) with the reason it is refused."""
    closed, lowering = _trace("score_mod", score_mod, SCORE_ARGUMENTS, sizes, score_dtype)
    out = closed.out_avals[0]
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise ModError(
            f"`score_mod` returned a {out.dtype.name}; expected a floating scalar, the new score. "
            "To switch positions off, return -inf or use `mask_mod`."
        )
    (result,) = lowering.run(closed.jaxpr, closed.consts, [scalar(v) for v in lowering.builder.inputs])
    atom = lowering.builder.convert(lowering.as_atoms(result).item(), score_dtype)
    source, arrays = _finish(lowering, atom)
    derivative, why_not = _derivative(source, sizes)
    return TracedMod(inline_custom(source, sizes), arrays, derivative, why_not)


def trace_mask_mod(mask_mod: Callable, sizes: Sizes) -> TracedMod:
    """Traces `mask_mod(b, h, q_idx, kv_idx)`; raises ModError (a ValueError) with the reason it is refused."""
    closed, lowering = _trace("mask_mod", mask_mod, MASK_ARGUMENTS, sizes, "float32")
    out = closed.out_avals[0]
    if out.dtype != jnp.bool_:
        raise ModError(
            f"`mask_mod` returned a {out.dtype.name}; expected a bool scalar, True where the query may look at the key. "
            "Compare explicitly, for example `value != 0`."
        )
    (result,) = lowering.run(closed.jaxpr, closed.consts, [scalar(v) for v in lowering.builder.inputs[1:]])
    source, arrays = _finish(lowering, lowering.as_atoms(result).item())
    return TracedMod(inline_custom(source, sizes), arrays)


def trace_multiplier(name: str, function: Callable, sizes: Sizes) -> TracedMod:
    """Traces `function(b, h, q_idx, kv_idx) -> float`, a factor for each probability."""
    closed, lowering = _trace(name, function, MASK_ARGUMENTS, sizes, "float32")
    (result,) = lowering.run(closed.jaxpr, closed.consts, [scalar(v) for v in lowering.builder.inputs[1:]])
    program, arrays = _finish(lowering, lowering.as_atoms(result).item())
    return TracedMod(program, arrays)


def _finish(lowering: Lowering, result: Atom) -> tuple[Program, tuple[jax.Array, ...]]:
    """The checked program and the captured arrays that its live steps read."""
    program = lowering.builder.finish([result])
    check(program)
    used = sorted(
        {load.capture for load in program.loads}
        | {a for call in program.calls for a in call.arguments if isinstance(a, int)}
    )
    return select_captures(program, used), tuple(lowering.arrays[i] for i in used)


def _derivative(source: Program, sizes: Sizes) -> tuple[Program | None, str]:
    """The derivative program, or None and why there is none: a mod without one still has a forward pass."""
    try:
        # A custom rule is not part of the program's text, so such programs are not shared.
        make = derivative_program if has_custom_rules(source) else _cached_derivative
        return make(source, sizes), ""
    except ModError as error:
        return None, str(error)


_cached_derivative = functools.lru_cache(maxsize=512)(derivative_program)


# ------------------------------------------------------------------- calling the user's function


def _trace(
    name: str, mod: Callable, arguments: tuple[str, ...], sizes: Sizes, score_dtype: str
) -> tuple[jax.extend.core.ClosedJaxpr, Lowering]:
    check_callable(name, mod, arguments)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    score = jax.ShapeDtypeStruct((), jnp.dtype(score_dtype))
    avals = [score if a == "score" else index for a in arguments]
    try:
        closed = jax.make_jaxpr(lift_numpy(mod))(*avals)
    except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError) as error:
        raise ModError(
            f"`{name}` indexes a numpy array or calls numpy with a traced value; use jax.numpy inside the mod and capture the "
            "array as jnp.asarray(array)."
        ) from error
    except (jax.errors.TracerBoolConversionError, jax.errors.ConcretizationTypeError) as error:
        raise ModError(
            f"`{name}` decides in Python (if, while, and, or, not, int()) on a value known only at run time; use jnp.where, "
            "&, | and ~ instead."
        ) from error
    if len(closed.out_avals) != 1 or closed.out_avals[0].shape != ():
        got = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in closed.out_avals) or "nothing"
        raise ModError(
            f"`{name}` returned {got}; expected one scalar. It is called with scalars: one position at a time."
        )
    if closed.effects:
        raise ModError(
            f"`{name}` has side effects ({', '.join(map(str, closed.effects))}); a mod must be a pure function."
        )
    lowering = Lowering(Builder(sizes, score_dtype), keep_custom=True)
    return closed, _naming_errors(name, lowering)


def _naming_errors(name: str, lowering: Lowering) -> Lowering:
    """A lowering whose refusals start with the name of the argument."""
    run = lowering.run

    def named(*args: object) -> list:
        try:
            return run(*args)
        except ModError as error:
            if str(error).startswith("`"):
                raise
            raise ModError(f"`{name}` cannot be compiled: {error}") from error

    lowering.run = named
    return lowering


def check_callable(name: str, mod: object, arguments: tuple[str, ...]) -> None:
    """Raises ModError unless `mod` can be called with that many positional arguments."""
    wanted = f"{name}({', '.join(arguments)})"
    if not callable(mod):
        raise ModError(f"`{name}` is {type(mod).__name__}; expected a function {wanted}.")
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ModError(
            f"`{name}` has the signature {signature}; expected {len(arguments)} positional arguments, {wanted}."
        ) from None


def lift_numpy(mod: Callable) -> Callable:
    """The function with the numpy arrays of its closure, globals, defaults and partial arguments made JAX arrays.

    So that indexing them with a traced scalar works and their values are operands, not literals.
    """
    if isinstance(mod, functools.partial):
        keywords = {k: _lift_value(v) for k, v in mod.keywords.items()}
        return functools.partial(lift_numpy(mod.func), *map(_lift_value, mod.args), **keywords)
    if isinstance(mod, types.MethodType):
        return types.MethodType(lift_numpy(mod.__func__), mod.__self__)
    if not isinstance(mod, types.FunctionType):
        return mod
    if hasattr(mod, "__wrapped__"):
        return mod
    cells = mod.__closure__ or ()
    lifted = tuple(types.CellType(_lift_value(c.cell_contents)) if _holds_array(c) else c for c in cells)
    defaults = tuple(map(_lift_value, mod.__defaults__)) if mod.__defaults__ else mod.__defaults__
    names = {n: mod.__globals__[n] for n in mod.__code__.co_names if isinstance(mod.__globals__.get(n), np.ndarray)}
    if all(a is b for a, b in zip(lifted, cells, strict=True)) and not names:
        if not _any_lifted(mod.__defaults__, defaults):
            return mod
    scope = {**mod.__globals__, **{n: _lift_value(a) for n, a in names.items()}} if names else mod.__globals__
    fresh = types.FunctionType(mod.__code__, scope, mod.__name__, defaults, lifted)
    fresh.__kwdefaults__ = mod.__kwdefaults__
    return fresh


def _holds_array(cell: types.CellType) -> bool:
    try:
        return _lift_value(cell.cell_contents) is not cell.cell_contents
    except ValueError:  # a cell that is still empty
        return False


def _any_lifted(old: tuple | None, new: tuple | None) -> bool:
    return any(a is not b for a, b in zip(old or (), new or (), strict=True))


def _lift_value(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype != object:
        with jax.ensure_compile_time_eval():
            return jnp.asarray(value)
    if isinstance(value, types.FunctionType | functools.partial):
        return lift_numpy(value)
    return value
