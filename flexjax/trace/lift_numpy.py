"""numpy arrays that a mod captured, made operands; arrays that explicit mesh axes split, made whole for the trace.

`array[q_idx]` does not work where `array` is a numpy array and `q_idx` a tracer, and what does work would be a literal of the
program. So the function is copied with JAX arrays in place of the numpy arrays that it reaches: through its closure, its
globals, its defaults, the arguments of functools.partial, the attributes of an object that it is a method of, and through
tuples, lists, dicts and functions found there.

JAX types say how explicit mesh axes split an array, and JAX refuses to index a dimension that is split by a number, as a mod
does. So the copy reads whole arrays; where a mod reads just elements of one, the array that was captured is the operand.
"""

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def lift_numpy(mod: Callable) -> tuple[Callable, dict[int, jax.Array]]:
    """The function on whole JAX arrays, and of each array that was split over explicit mesh axes, by the id of the whole one
    that took its place, the array itself. `mod` itself where there is nothing to replace."""
    if not reaches_array(mod, set()):
        return mod, {}
    lift = Lift()
    return lift.value(mod), lift.split  # type: ignore[return-value]


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) and (value.dtype.kind in "biufc" or jnp.issubdtype(value.dtype, np.number))


def is_split(value: object) -> bool:
    """Whether the type of a JAX array says that explicit mesh axes split it; then JAX refuses many ways to index it."""
    return isinstance(value, jax.Array) and any(part is not None for part in jax.typeof(value).sharding.spec)


def is_replaced(value: object) -> bool:
    return is_array(value) or is_split(value)


def reaches_array(value: object, seen: set[int]) -> bool:
    """Whether an array that is replaced is found by following `parts`."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    return is_replaced(value) or any(reaches_array(part, seen) for part in parts(value))


def parts(value: object) -> Iterator[object]:
    """What the value holds, as far as it can be replaced in a copy."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from filled(value.__closure__ or ())
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        yield from names_used(value).values()
    elif type(value) in (tuple, list):
        yield from value  # type: ignore[misc]
    elif type(value) is dict:
        yield from value.values()
    elif is_plain_callable(value):
        yield from (type(value).__call__, *vars(value).values())


def filled(cells: tuple[types.CellType, ...]) -> Iterator[object]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue


def is_plain_callable(value: object) -> bool:
    """An object of a class written in Python with a __call__ of its own."""
    return (
        not isinstance(value, type)
        and hasattr(value, "__dict__")
        and callable(value)
        and isinstance(type(value).__call__, types.FunctionType)
    )


def names_used(function: types.FunctionType) -> dict[str, object]:
    """Arrays, their containers and functions of the same file that the function's code, or code inside it, calls by name."""
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
    """One copy; what is met twice (a function that calls itself, for one) is copied once."""

    def __init__(self) -> None:
        self._copies: dict[int, object] = {}
        self._scopes: dict[int, dict[str, object]] = {}
        self._alive: list[object] = []
        self.split: dict[int, jax.Array] = {}

    def value(self, value: object) -> object:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if is_array(value):
            with jax.ensure_compile_time_eval():
                return self._keep(value, jnp.asarray(value))
        if is_split(value):
            return self._whole(value)  # type: ignore[arg-type]
        if not reaches_array(value, set()):
            return value
        if isinstance(value, functools.partial):
            keywords = {k: self.value(v) for k, v in value.keywords.items()}
            return functools.partial(self.value(value.func), *map(self.value, value.args), **keywords)  # type: ignore[arg-type]
        if isinstance(value, types.MethodType):
            return types.MethodType(self.value(value.__func__), self.value(value.__self__))  # type: ignore[arg-type]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, tuple):
            return tuple(map(self.value, value))
        if isinstance(value, list):
            fresh = self._keep(value, [])
            fresh.extend(map(self.value, value))
            return fresh
        if isinstance(value, dict):
            table = self._keep(value, {})
            table.update({k: self.value(v) for k, v in value.items()})
            return table
        return self._object(value)

    def _whole(self, value: jax.Array) -> jax.Array:
        where = jax.sharding.NamedSharding(jax.typeof(value).sharding.mesh, jax.sharding.PartitionSpec())
        whole = self._keep(value, jax.sharding.reshard(value, where))
        self.split[id(whole)] = value
        return whole

    def _keep(self, old: object, fresh: object) -> Any:
        self._copies[id(old)] = fresh
        self._alive.append(old)
        return fresh

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        names = names_used(function)
        lifted_names = any(reaches_array(v, set()) for v in names.values())
        scope = function.__globals__
        if lifted_names:
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
        """A callable object with its arrays replaced, and a __call__ that sees them."""
        fresh = copy.copy(value)
        self._keep(value, fresh)
        vars(fresh).update({k: self.value(v) for k, v in vars(value).items()})
        call = type(value).__call__
        lifted = self.value(call)
        return fresh if lifted is call else types.MethodType(lifted, fresh)  # type: ignore[arg-type]
