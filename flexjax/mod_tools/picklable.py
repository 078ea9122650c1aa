"""`Mod`: a function made inside a factory that can be pickled.

pickle stores a function as the name under which its module has it, and a function inside another one has none. A Mod is
stored as the place of its code and what it closed over.
"""

import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any, NoReturn, cast


class Mod:
    """A callable with the name, the signature and the attributes of the function `__wrapped__`."""

    __name__: str
    __wrapped__: Callable[..., object]

    def __init__(self, function: Callable[..., object]) -> None:
        self.__dict__.update(vars(function))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(self, name, getattr(function, name))
        self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.__name__}>"

    def __and__(self, other: object) -> NoReturn:
        raise TypeError("Functions have no `&`; of two masks write flexjax.and_masks(a, b).")

    def __or__(self, other: object) -> NoReturn:
        raise TypeError("Functions have no `|`; of two masks write flexjax.or_masks(a, b).")

    def __invert__(self) -> NoReturn:
        raise TypeError("Functions have no `~`; of a mask write flexjax.not_mask(a).")

    __rand__, __ror__ = __and__, __or__

    def __reduce__(self) -> tuple:
        attributes = {name: value for name, value in vars(self).items() if name != "__wrapped__"}
        return _mod, (_stored(cast(types.FunctionType, self.__wrapped__)), attributes)


def _mod(stored: tuple, attributes: dict[str, object]) -> Mod:
    made = Mod(_restored(*stored))
    made.__dict__.update(attributes)
    return made


class _Inner:
    """A function of this package that a stored function closes over."""

    def __init__(self, stored: tuple) -> None:
        self.stored = stored


def _stored(function: types.FunctionType) -> tuple:
    """What `_restored` takes: (module, path of the code, its number among those of the path, closure, ..)."""
    code = function.__code__
    names, cells = code.co_freevars, function.__closure__ or ()
    closed = {n: _to_store(c.cell_contents) for n, c in zip(names, cells, strict=True)}
    number = _codes(function.__module__, code.co_qualname).index(code)
    return function.__module__, code.co_qualname, number, closed, function.__defaults__, function.__kwdefaults__


def _to_store(value: object) -> object:
    package = __name__.partition(".")[0]
    if not isinstance(value, types.FunctionType) or "<locals>" not in value.__qualname__:
        return value
    return _Inner(_stored(value)) if value.__module__.startswith(f"{package}.") else value


def _restored(
    module: str,
    path: str,
    number: int,
    closed: dict[str, object],
    defaults: tuple | None,
    keywords: dict[str, object] | None,
) -> types.FunctionType:
    """The function that `_stored` stored. Raises ValueError where the file has changed since."""
    found = _codes(module, path)
    if number >= len(found) or found[number].co_freevars != tuple(closed):
        raise ValueError(f"`{path}` of {module} was pickled by another version of it. Make it again with its factory.")
    whole = {n: _restored(*x.stored) if isinstance(x, _Inner) else x for n, x in closed.items()}
    cells = tuple(map(types.CellType, whole.values()))
    made = types.FunctionType(found[number], vars(importlib.import_module(module)), None, defaults, cells)
    made.__kwdefaults__ = keywords
    return made


def _codes(module: str, path: str) -> list[types.CodeType]:
    """The codes of the functions at a path such as "factory.<locals>.mask_mod", in the order of the file."""
    first, *rest = [part for part in path.split(".") if part != "<locals>"]
    codes = [inspect.unwrap(vars(importlib.import_module(module))[first]).__code__]
    for name in rest:
        codes = [c for code in codes for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name]
    return codes
