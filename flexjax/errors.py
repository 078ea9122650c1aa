"""How flexjax refuses: one place that writes the sentences.

ValueError           the caller gave something wrong. The message names the argument, what it got, what was expected and
                     what to do.
NotImplementedError  a backend cannot do this; the default dispatch goes on to one that can.
FallbackWarning      the default dispatch went on, on a GPU or TPU, and a pass runs outside of the kernels.
"""


class FallbackWarning(UserWarning):
    """A call on a GPU or TPU left the kernels by itself: the message says which pass, why and what to do."""


def bad_argument(name: str, got: object, expected: str, todo: str) -> ValueError:
    """ValueError in the house form: argument, got, expected, what to do."""
    return ValueError(f"`{name}` is {got}; expected {expected}. {todo}")


class ModError(ValueError):
    """A mod that cannot be traced or returns the wrong thing."""


def add_note_once(error: BaseException, note: str) -> None:
    """Adds a note unless the error has it: an error that is raised while a call is lowered passes the door as well."""
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
