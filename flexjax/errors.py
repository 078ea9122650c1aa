"""The errors and warnings of flexjax, and the form of their messages.

ValueError           the caller passed something wrong; the message names the argument, what it got, what was expected and
                     what to do
ModError             a ValueError about a score_mod, mask_mod or similar function
NotImplementedError  no backend that was asked can run this call, or flexjax has no such function; the message says why
FallbackWarning      a pass of a call on a GPU or TPU runs on a backend that the call does not name, and not on the kernels; or, on
                     any platform, arrays that a mesh splits are gathered, or every device computes the whole call
"""

import contextlib
import functools
import inspect
import os
import sys

import jax

INSIDE = (
    *(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, jax.__file__)),
    *(inspect.getfile(module) for module in (contextlib, functools)),
)
"""Beginnings of the paths of files that a user did not write: flexjax, JAX, and what their decorators call."""


class FallbackWarning(UserWarning):
    """A call runs slower than it could. On a GPU or TPU: a pass runs outside of the kernels. On any platform: devices of a mesh gather
    arrays before the call, because they are split over tokens or the head dim, or each device computes the whole call. The message says
    which pass or arrays, why and what to do.
    """


def stacklevel_of_user() -> int:
    """The `stacklevel` that the caller passes to warnings.warn, so that the warning names the user's line: the innermost one on the
    stack outside of flexjax and JAX.
    """
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        level, frame = level + 1, frame.f_back
    return level


def kind_of(value: object) -> str:
    """What a value is, for a message: "an int", "a list", "an ndarray"; "None" for None."""
    return "None" if value is None else with_article(type(value).__name__)


def with_article(word: str) -> str:
    """The name of a type or dtype with its article, as it is spoken: "an int32", "an ndarray", "a uint8"."""
    return f"an {word}" if word.lower().startswith(("a", "e", "i", "o", "nd")) else f"a {word}"


def bad_argument(name: str, got: object, expected: str, todo: str) -> ValueError:
    """The ValueError with the message "`NAME` is GOT; expected EXPECTED. TODO"; the caller raises it.

    name       of the argument, without the backticks
    got        what it is, as the text shows it
    expected   what was expected, a phrase
    todo       what to do, one or several sentences with their full stops
    """
    return ValueError(f"`{name}` is {got}; expected {expected}. {todo}")


class ModError(ValueError):
    """A user's function that cannot be traced or differentiated, or that returns the wrong type or shape."""


def add_note_once(error: BaseException, note: str) -> None:
    """Adds a note to the error unless the error has that note.

    An error of lowering passes two places that add the note: the lowering rule and flex_attention.
    """
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
