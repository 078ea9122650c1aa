"""Refusals at the user's line: factories and mods whose errors have no frames of flexjax."""

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")

_OURS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<string>")
"""Beginnings of the names of files of flexjax; a dataclass has its __init__ from a string."""


def _drop_frames(error: Exception) -> None:
    """Takes the frames of flexjax at the outer end out of the traceback, unless jax shows all; the caller raises."""
    link = error.__traceback__
    while link is not None and link.tb_frame.f_code.co_filename.startswith(_OURS):
        link = link.tb_next
    if jax.config.jax_traceback_filtering != "off":  # type: ignore[attr-defined]
        error.__traceback__ = link


def without_frames(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: what `function` refuses is raised at the line of its caller."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            _drop_frames(error)
            raise

    return called


def no_factory(mod: Callable[P, T]) -> Callable[P, T]:
    """A decorator for a mod among factories of mods: to call it without arguments is an error that says so."""

    @functools.wraps(mod)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        if args or kwargs:
            return mod(*args, **kwargs)
        try:
            raise TypeError(f"`{mod.__name__}` is a mod itself, no factory of mods: pass it without calling it.")
        except TypeError as error:
            _drop_frames(error)
            raise

    return called
