"""Warns of reads such as `bias[q_idx]` of an array that is too short for the call, which jax clamps silently.

A read is bare if its index is `b`, `h`, `q_idx` or `kv_idx` itself, so it certainly reaches as far as that index counts
(made_for.Reach). Computed indices, `jnp.minimum(q_idx, n - 1)` or `q_idx % n`, are the user's own bounds.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend import core as jex_core

from flexjax.errors import INSIDE, stacklevel_of_user
from flexjax.mod_tools.made_for import Reach
from flexjax.trace.equations import aval_of

# which argument of the mod each element of an index is, by number; None: computed. One element of a scalar.
Bare = tuple[int | None, ...]

# the result is the operand, as far as a scalar index goes
PASSED = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "copy"})

_said: set[tuple[str, str, int]] = set()


def warn_of_short_arrays(name: str, closed: jex_core.ClosedJaxpr, arguments: Sequence[str], reach: Reach) -> None:
    """Warns, once for each line and message, of each bare read in a mod whose index passes the end of the array.

    `arguments` are the names of the inputs of the jaxpr; the last four are b, h, q_idx and kv_idx.
    """
    first = len(arguments) - len(reach.counts)
    bare: dict[object, Bare] = {v: (i,) for i, v in enumerate(closed.jaxpr.invars) if i >= first}
    for eqn, shape, axis, size, argument in _reads(closed.jaxpr, bare):
        count = reach.counts[argument - first]
        if count is None or not isinstance(shape[axis], int) or count - 1 <= shape[axis] - size:
            continue
        index, n = arguments[argument], shape[axis]
        end = "" if len(shape) == 1 else f" along axis {axis}"
        _warn(
            f"`{name}` reads an array of shape {shape} at `{index}`{end}, where it has {n} element{'s' * (n != 1)}, "
            f"but `{index}` goes up to {count - 1} in this call, and jax reads the last element past the end without "
            f"an error. Capture an array that has {count} elements there, or say what is meant, for example "
            f"jnp.minimum({index}, {n - 1}).",
            eqn,
        )


def _reads(jaxpr: jex_core.Jaxpr, bare: dict[object, Bare]) -> Iterator[tuple]:
    """Yields (equation, shape of the array, axis, elements read along it, argument number) of each bare index."""
    made_by: dict[object, object] = {}
    of: Callable[[Any], Bare] = lambda v: () if isinstance(v, jex_core.Literal) else bare.get(v, ())
    for eqn in jaxpr.eqns:
        primitive = eqn.primitive.name
        operands: Sequence[Any] = eqn.invars
        made_by.update((v, eqn) for v in eqn.outvars)
        found: Bare = ()
        if primitive in PASSED:
            found = of(operands[0])
        elif primitive == "select_n" and len(operands) == 3 and _counts_from_end(operands, made_by):
            found = of(operands[1])
        elif primitive == "concatenate" and any(map(of, operands)):
            found = tuple(x for v in operands for x in (of(v) or (None,) * aval_of(v).shape[-1]))
        elif primitive == "dynamic_slice":
            starts = [(axis, of(v)) for axis, v in enumerate(operands[1:])]
            sizes = eqn.params["slice_sizes"]
            yield from (
                (eqn, aval_of(operands[0]).shape, axis, sizes[axis], x)
                for axis, at in starts
                for x in at
                if x is not None
            )
        elif primitive == "gather" and eqn.params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
            axes, sizes = eqn.params["dimension_numbers"].start_index_map, eqn.params["slice_sizes"]
            at = of(operands[1])
            if len(at) == len(axes):
                yield from (
                    (eqn, aval_of(operands[0]).shape, axis, sizes[axis], x)
                    for axis, x in zip(axes, at, strict=True)
                    if x is not None
                )
        elif (inner := _inlined(eqn.params)) is not None and len(inner.invars) == len(operands):
            inside: dict[object, Bare] = {v: of(w) for v, w in zip(inner.invars, operands, strict=True) if of(w)}
            # at the line of the outer equation: jax keeps a function's jaxpr with the lines where it was traced first
            yield from ((eqn, *read) for _, *read in _reads(inner, inside))
            bare.update(
                (v, inside[w])
                for v, w in zip(eqn.outvars, inner.outvars, strict=True)
                if not isinstance(w, jex_core.Literal) and w in inside
            )
        if found:
            bare.update((v, found) for v in eqn.outvars)


def _counts_from_end(operands: Sequence, made_by: Mapping[object, object]) -> bool:
    """Whether the operands of a select are those of `where(i < 0, i + n, i)`, as jax writes an index i."""
    _, index, moved = operands
    eqn = None if isinstance(moved, jex_core.Literal) else made_by.get(moved)
    if eqn is None:  # the sum may be an input of a nested function
        return not isinstance(moved, jex_core.Literal)
    return eqn.primitive.name == "add" and index in eqn.invars  # type: ignore[attr-defined]


def _inlined(params: Mapping[str, object]) -> jex_core.Jaxpr | None:
    """The jaxpr of a nested function (jit, remat, a function with a derivative rule)."""
    given = params.get("jaxpr") or params.get("call_jaxpr")
    given = getattr(given, "jaxpr", given)
    return given if isinstance(given, jex_core.Jaxpr) else None


def _warn(message: str, eqn: object) -> None:
    """Warns at the user's line in the mod; at that of the call where jax has not kept it."""
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    stack = list(getattr(traceback, "frames", ()))
    frames = [f for f in stack if not f.file_name.startswith(INSIDE)]
    inside = itertools.takewhile(lambda f: f.file_name.startswith(INSIDE), stack)
    # `array.at[index].get(mode="clip")` says what is meant and makes the same equation
    if any(f.function_name.rpartition(".")[2] == "get" for f in inside):
        return
    key = (message, frames[0].file_name, frames[0].line_num) if frames else (message, "", 0)
    if key in _said:
        return
    if frames:
        warnings.warn_explicit(message, UserWarning, *key[1:])
    else:
        warnings.warn(message, UserWarning, stacklevel=stacklevel_of_user())
    _said.add(key)  # after the warning, so that one turned into an error is raised each time
