"""All that a mod can read, as a key: where two mods have equal keys, tracing them gives the same program.

A function reads its code, what it closed over, its defaults and its globals, and these may be functions too. Of mods of
flexjax the code is known, so globals are not looked at, and of captured arrays the types alone count. Of a user's
function the key also has its globals, and of captured arrays the objects. A mod that may read anything else has no key:
a list, a dict, an attribute, numpy, a class, an import, a variable that it assigns itself.
"""

import dis
import functools
import itertools
import re
import sys
import types
import typing
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex_core

from flexjax.mod_tools.picklable import Mod
from flexjax.mod_tools.settings import of_traces
from flexjax.trace.lift_numpy import is_split


class Reads(typing.NamedTuple):
    """What a mod can read."""

    key: Hashable
    arrays: tuple[jax.Array, ...]  # the captured arrays, in the order in which they were found
    ours: bool  # whether all code is that of flexjax, so that `key` holds types and not objects in place of the arrays


def reads_of(*values: object) -> Reads | None:
    """What the values can read together; None where that is not known."""
    walk = _Walk()
    try:
        found = tuple(map(walk.value, values))
    except (_Unknown, RecursionError):
        return None
    if not walk.ours and _in_named_axes():
        return None  # jax.lax.axis_size depends on them
    of_array: Callable[[jax.Array], Hashable] = jax.typeof if walk.ours else id
    return Reads((found, tuple(map(of_array, walk.arrays)), _settings()), tuple(walk.arrays), walk.ours)


_in_named_axes: Callable[[], bool] = getattr(jex_core, "nonempty_axis_env_DO_NOT_USE", lambda: True)

SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_disable_jit", "jax_default_prng_impl",
    "jax_enable_custom_prng", "jax_threefry_partitionable", "jax_softmax_custom_jvp", "jax_explicit_x64_dtypes",
    "jax_error_checking_behavior_nan", "jax_error_checking_behavior_divide", "jax_error_checking_behavior_oob",
)  # fmt: skip
"""Settings of jax that a trace of scalar code depends on, beside those of `of_traces`."""


def _settings() -> Hashable:
    return (*(getattr(jax.config, name, None) for name in SETTINGS), of_traces(), jax.sharding.get_abstract_mesh())


class _Unknown(Exception):
    """A value that may change without another key."""


NUMBERS = (int, bool, str, bytes, type(None), type(Ellipsis), np.dtype)
MODULES = ("jax.numpy", "jax.lax", "jax.nn")
"""Modules whose functions depend on their arguments and on `_settings` alone, but for IMPURE."""

IMPURE = frozenset(
    {"load", "fromfile", "save", "savez", "set_printoptions", "get_printoptions", "printoptions", "made_for", "format"}
)
WARNS = frozenset({"float64", "int64", "uint64", "complex128", "double", "cdouble", "longlong", "ulonglong"})
"""Names of types for which jax warns at each trace where it has no 64 bits."""

OF_64_BITS = re.compile(
    r"[<>=|]?(?:[iuf]8|f16|c(?:8|16|32)|[dDgGlLqQpP])|u?int(?:64|p)?|float(?:64|128)?|complex(?:64|128)?|"
    r"u?long(?:long)?|c?(?:long)?double"
)
"""Texts that numpy reads as a type of 64 bits or more."""

BUILTINS = {
    function.__name__: function
    for function in (
        abs, all, any, bool, complex, divmod, enumerate, float, int, isinstance, len, list, max, min, pow, range,
        reversed, round, slice, sorted, sum, tuple, zip,
    )
}  # fmt: skip
MOST_VALUES, LONGEST = 2000, 2000
"""Most values that a key is made of, and the longest text or bytes in it: a longer key costs more than a trace."""
OURS = ("flexjax.masks.", "flexjax.mods.", "flexjax.mod_tools.", "flexjax.combine", "flexjax.call.", "flexjax.jax_nn")
"""Beginnings of the names of modules whose globals stay as they are."""


class _Walk:
    """Turns values into keys. A function that was met already is its number, so functions may contain themselves."""

    def __init__(self) -> None:
        self.arrays: list[jax.Array] = []
        self.ours = True
        self._met: dict[int, int] = {}
        self._values = 0

    def value(self, value: object) -> Hashable:
        kind, self._values = type(value), self._values + 1
        if self._values > MOST_VALUES or (isinstance(value, str | bytes) and len(value) > LONGEST):
            raise _Unknown
        if kind in NUMBERS and not _may_warn(value):
            return kind, value
        if kind is float:
            return kind, typing.cast(float, value).hex()  # 0.0 == -0.0 and nan != nan
        if kind.__module__ == "numpy" and isinstance(value, np.number | np.bool_) and value.dtype.kind in "biufc":
            return kind, value.tobytes()
        if kind is tuple:
            return kind, tuple(map(self.value, value))  # type: ignore[call-overload]
        if isinstance(value, jax.Array):
            return self._array(value)
        if kind is types.FunctionType:
            return self._function(value)  # type: ignore[arg-type]
        if kind is Mod and vars(value).keys() <= OF_MOD:
            return kind, self.value(value.__wrapped__)  # type: ignore[attr-defined]
        if kind is functools.partial and not vars(value):
            return kind, tuple(map(self.value, (value.func, value.args, *itertools.chain(*value.keywords.items()))))  # type: ignore[attr-defined]
        if kind is types.ModuleType and value is sys.modules.get(value.__name__) and value.__name__ in MODULES:  # type: ignore[attr-defined]
            return kind, value.__name__  # type: ignore[attr-defined]
        return _name_in_jax(value)

    def _array(self, array: jax.Array) -> Hashable:
        if isinstance(array, Tracer) or array.is_deleted() or is_split(array):
            raise _Unknown
        place = next((n for n, x in enumerate(self.arrays) if x is array), len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(array)
        return jax.Array, place

    def _function(self, function: types.FunctionType) -> Hashable:
        if id(function) in self._met:
            return types.FunctionType, self._met[id(function)]
        self._met[id(function)] = len(self._met)
        code, scope = function.__code__, function.__globals__
        if type(scope) is not dict:
            raise _Unknown
        held: list[object] = []
        for cell in function.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # a variable that has no value yet
                raise _Unknown from None
        held += [*(function.__defaults__ or ()), *itertools.chain(*(function.__kwdefaults__ or {}).items())]
        of_scope: tuple[Hashable, ...] = ()
        if not _is_ours(scope):
            self.ours = False
            names = _globals_of(code)
            if names is None or not vars(function).keys() <= {"made_for"}:
                raise _Unknown
            of_scope = tuple((name, self._global(name, function)) for name in names)
        # of equal codes the files may differ, which errors name
        return code, code.co_filename, len(function.__defaults__ or ()), tuple(map(self.value, held)), of_scope

    def _global(self, name: str, function: types.FunctionType) -> Hashable:
        if name in function.__globals__:
            return self.value(function.__globals__[name])
        if name in BUILTINS and function.__builtins__.get(name) is BUILTINS[name]:
            return name
        raise _Unknown


OF_MOD = frozenset({"__name__", "__qualname__", "__module__", "__doc__", "__wrapped__", "made_for"})
"""The attributes of a Mod that flexjax sets."""


def _is_ours(scope: dict[str, object]) -> bool:
    name = scope.get("__name__")
    if not isinstance(name, str) or not name.startswith(OURS):
        return False
    module = sys.modules.get(name)
    return module is not None and vars(module) is scope


def _name_in_jax(value: object) -> Hashable:
    """The place of a function of jax, such as jax.numpy.tanh."""
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and name not in IMPURE | WARNS:
        for module in MODULES:
            if getattr(sys.modules.get(module), name, None) is value:
                return module, name
    raise _Unknown


def _may_warn(value: object) -> bool:
    """Whether a constant is, or has in it, the name of a type for which jax may warn."""
    if isinstance(value, tuple | frozenset):
        return any(map(_may_warn, value))
    if isinstance(value, np.dtype):
        return value.itemsize >= 8
    return isinstance(value, str) and OF_64_BITS.fullmatch(value) is not None


# ------------------------------------------------------------------- code

PURE = (
    "BINARY_", "BUILD_", "CALL", "COMPARE_OP", "CONTAINS_OP", "COPY", "DICT_", "END_FOR", "EXTENDED_ARG", "FOR_ITER",
    "GET_ITER", "JUMP_", "KW_NAMES", "LIST_", "LOAD_CLOSURE", "LOAD_CONST", "LOAD_DEREF",
    "LOAD_FAST", "LOAD_GLOBAL", "LOAD_SMALL_INT", "MAKE_CELL", "MAKE_FUNCTION", "MAP_ADD", "NOP", "NOT_TAKEN",
    "POP_ITER", "POP_JUMP_", "POP_TOP", "PRECALL", "PUSH_NULL", "RESUME", "RETURN_CONST", "RETURN_VALUE", "SET_ADD",
    "SET_FUNCTION_ATTRIBUTE", "STORE_FAST", "SWAP", "TO_BOOL", "UNARY_", "UNPACK_",
)  # fmt: skip
"""Beginnings of the names of instructions that change nothing outside of a call, and read what `_globals_of` says."""


@functools.lru_cache(maxsize=1024)
def _globals_of(code: types.CodeType) -> tuple[str, ...] | None:
    """The names of the globals that the code, or code in it, reads; None if it may read or change anything else."""
    names: dict[str, None] = {}
    before: object = ...
    for step in dis.get_instructions(code):
        one, before = before, step.argval if step.opname == "LOAD_CONST" else ...
        if step.opname == "IS_OP" and (one is None or one is True or one is False):
            continue  # of other objects `is` reads more than their values
        if step.opname == "LOAD_GLOBAL":
            names[step.argval] = None
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if step.argval in IMPURE or step.argval in WARNS or step.argval.startswith("_"):
                return None
        elif step.opname == "STORE_DEREF":
            if step.argval not in code.co_cellvars:
                return None
        elif not step.opname.startswith(PURE):
            return None
    if _may_warn(code.co_consts):
        return None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            inside = _globals_of(inner)
            if inside is None:
                return None
            names.update(dict.fromkeys(inside))
    return tuple(names)


def positions(arrays: Sequence[jax.Array], among: Sequence[jax.Array]) -> tuple[int, ...] | None:
    """Where each of `arrays` is among the others, by identity; None if one is not."""
    place = {id(x): n for n, x in enumerate(among)}
    found = tuple(place.get(id(x), -1) for x in arrays)
    return None if -1 in found else found
