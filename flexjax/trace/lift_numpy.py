"""Copies a user's function so that arrays that it captured can be indexed by tracers.

numpy arrays. `array[q_idx]` fails where `array` is a numpy array and `q_idx` a tracer. The copy of the function has a
View in place of each numpy array that the function reaches: through its closure, globals, defaults, arguments of
functools.partial, attributes of its object, and containers and functions found there. A View behaves as numpy in
everything that numpy computes and becomes a JAX array where it meets a tracer.

Arrays over explicit mesh axes (split arrays). JAX refuses to index a split dimension by a number. The copy has an
unsplit array in its place; a program that loads elements captures the original.
"""

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_context

from flexjax.errors import ModError
from flexjax.mod_tools.numpy_arrays import as_array


class View(np.ndarray):
    """A numpy array that a tracer may index and that JAX takes as an operand, not as a literal of the program."""

    _operand: tuple[bytes, jax.Array] | None = None

    def __getitem__(self, index: object) -> Any:
        traced = isinstance(index, Tracer) or (isinstance(index, tuple) and any(isinstance(i, Tracer) for i in index))
        return self.__jax_array__()[index] if traced else super().__getitem__(index)  # type: ignore[index]

    def __jax_array__(self) -> jax.Array:
        """The same object as long as the numbers are the same."""
        content = self.tobytes()
        if self._operand is None or self._operand[0] != content:
            self._operand = (content, as_operand(self.view(np.ndarray)))
        return self._operand[1]

    def __array_wrap__(self, array: np.ndarray, context: object = None, return_scalar: bool = False) -> Any:
        """numpy calls this for results: a View, or a numpy scalar where numpy asks for one."""
        return array[()] if return_scalar else np.asarray(array).view(View)


@contextlib.contextmanager
def eager_without_mesh() -> Iterator[None]:
    """Runs the body eagerly, as if no transformation and no mesh were around it."""
    with (
        # under jax.ensure_compile_time_eval each operation would be compiled and run alone
        eval_context(),
        jax.disable_jit(False),
        # what the body makes are constants, as those that JAX makes for a jitted program
        jax.transfer_guard("allow"),
        # inside shard_map an array would be made for the manual mesh
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
    ):
        yield


def as_operand(array: np.ndarray) -> jax.Array:
    """Copies a numpy array to a JAX array; ModError for integers that the JAX dtype does not hold."""
    with eager_without_mesh():
        made = as_array(array)
    if array.dtype.kind in "iu" and made.dtype != array.dtype and array.size:
        info, low, high = jnp.iinfo(made.dtype), int(array.min()), int(array.max())
        if low < info.min or high > info.max:
            raise ModError(
                f"it reads a captured numpy array of {array.dtype} with numbers from {low} to {high}, which "
                f"{made.dtype} does not "
                "hold; number ids anew, as np.unique(ids, return_inverse=True)[1] does, the same in all arrays that "
                "are compared, subtract the least number, or turn on jax_enable_x64."
            )
    return made


def lift_numpy(mod: Callable) -> tuple[Callable, dict[int, jax.Array]]:
    """Copies the function with Views for the numpy arrays that it reaches, and unsplit arrays for split ones.

    Returns (copy, {id of unsplit array: the split array that it replaces}); the function itself if it reaches no array.
    """
    if not reaches_array(mod, set()):
        return mod, {}
    lift = Lift()
    return lift.value(mod), lift.split  # type: ignore[return-value]


def is_array(value: object) -> bool:
    """Whether the value is a numpy array of numbers or bools (bfloat16 and its like included)."""
    return isinstance(value, np.ndarray) and (value.dtype.kind in "biufc" or jnp.issubdtype(value.dtype, np.number))


def is_split(value: object) -> bool:
    """Whether the value is a JAX array that explicit mesh axes split."""
    return isinstance(value, jax.Array) and any(part is not None for part in jax.typeof(value).sharding.spec)


def is_replaced(value: object) -> bool:
    return is_array(value) or is_split(value)


def reaches_array(value: object, seen: set[int]) -> bool:
    """Whether the value, or a part of it, is an array to replace; ids in `seen` are not visited again."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    return is_replaced(value) or any(reaches_array(part, seen) for part in parts(value))


def parts(value: object) -> Iterator[object]:
    """Yields the values that a function, a container (no subclass) or a callable object is made of."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__func__
        yield from attributes(value.__self__).values()
    elif isinstance(value, types.FunctionType):
        yield from filled(value.__closure__ or ())
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        yield from names_used(value).values()
    elif type(value) in (tuple, list):
        yield from value  # type: ignore[misc]
    elif type(value) is dict:
        yield from value.values()
    elif is_plain_callable(value):
        yield from (type(value).__call__, *attributes(value).values())


def filled(cells: tuple[types.CellType, ...]) -> Iterator[object]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue


def attributes(value: object) -> dict[str, object]:
    """The attributes of an object of a class written in Python and the numpy arrays of its class, by name; else {}."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return {}
    of_class = {n: v for c in reversed(type(value).__mro__) for n, v in vars(c).items() if is_array(v)}
    return of_class | vars(value)


def is_plain_callable(value: object) -> bool:
    """Whether the value is an object, not a class, whose class defines __call__ in Python."""
    return (
        not isinstance(value, type)
        and hasattr(value, "__dict__")
        and callable(value)
        and isinstance(type(value).__call__, types.FunctionType)
    )


def names_used(function: types.FunctionType) -> dict[str, object]:
    """The globals that the function, or one defined in it, uses and that may reach arrays.

    They are arrays to replace, tuples, lists, dicts, and functions of the same file.
    """
    found: dict[str, object] = {}
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            here = isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__
            if here or is_replaced(value) or type(value) in (tuple, list, dict):
                found[name] = value
    return found


class Lift:
    """Makes one copy of a function and of everything through which it reaches arrays; shared values are copied once."""

    def __init__(self) -> None:
        self._copies: dict[int, object] = {}
        self._scopes: dict[int, dict[str, object]] = {}
        self._alive: list[object] = []
        self.split: dict[int, jax.Array] = {}  # split arrays, by the id of the unsplit array that replaces each

    def value(self, value: object) -> object:
        """The copy of any value, or the value itself if it reaches no array that has to be replaced."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if is_array(value):
            return self._keep(value, value.view(View))  # type: ignore[attr-defined]
        if is_split(value):
            return self._unsplit(value)  # type: ignore[arg-type]
        if not reaches_array(value, set()):
            return value
        if isinstance(value, functools.partial):
            keywords = {k: self.value(v) for k, v in value.keywords.items()}
            return functools.partial(
                self.value(value.func),  # type: ignore[arg-type]
                *map(self.value, value.args),
                **keywords,
            )
        if isinstance(value, types.MethodType):
            return types.MethodType(self.value(value.__func__), self._object(value.__self__))  # type: ignore[arg-type]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, tuple):
            return tuple(map(self.value, value))
        if isinstance(value, list):
            # recorded before it is filled, because a value may contain itself
            fresh = self._keep(value, [])
            fresh.extend(map(self.value, value))
            return fresh
        if isinstance(value, dict):
            table = self._keep(value, {})
            table.update({k: self.value(v) for k, v in value.items()})
            return table
        return self._callable_object(value)

    def _unsplit(self, value: jax.Array) -> jax.Array:
        where = jax.sharding.NamedSharding(jax.typeof(value).sharding.mesh, jax.sharding.PartitionSpec())
        whole = self._keep(value, jax.sharding.reshard(value, where))
        self.split[id(whole)] = value
        return whole

    def _keep(self, old: object, fresh: object) -> Any:
        self._copies[id(old)] = fresh
        # copies are found by the id of `old`
        self._alive.append(old)
        return fresh

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """Copies a Python function, with its closure, its defaults and the globals that it uses."""
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        names = names_used(function)
        lifted_names = any(reaches_array(v, set()) for v in names.values())
        scope = function.__globals__
        if lifted_names:
            # one copy of the globals for all functions of a file
            scope = self._scopes.setdefault(id(scope), dict(scope))
        fresh = types.FunctionType(function.__code__, scope, function.__name__, None, cells)
        self._keep(function, fresh)
        fresh.__dict__.update(function.__dict__)
        for old, cell in zip(function.__closure__ or (), cells, strict=True):
            for content in filled((old,)):
                cell.cell_contents = self.value(content)
        if function.__defaults__:
            fresh.__defaults__ = tuple(map(self.value, function.__defaults__))
        if function.__kwdefaults__:
            fresh.__kwdefaults__ = {k: self.value(v) for k, v in function.__kwdefaults__.items()}
        if lifted_names:
            scope.update({name: self.value(v) for name, v in names.items()})
        return fresh

    def _object(self, value: object) -> object:
        """A shallow copy of an object with its arrays replaced; the object itself if its attributes reach none."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        held = attributes(value)
        if not any(reaches_array(v, set()) for v in held.values()):
            return value
        fresh = self._keep(value, copy.copy(value))
        vars(fresh).update({k: self.value(v) for k, v in held.items()})
        return fresh

    def _callable_object(self, value: object) -> object:
        """The object with its arrays replaced; a bound copy of its `__call__` if that reaches arrays."""
        fresh = self._object(value)
        call = type(value).__call__
        lifted = self.value(call)
        return fresh if lifted is call else types.MethodType(lifted, fresh)  # type: ignore[arg-type]
