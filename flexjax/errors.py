"""How flexjax refuses: one place that writes the sentences.

ValueError           the caller gave something wrong. The message names the argument, what it got, what was expected and
                     what to do.
NotImplementedError  a backend cannot do this; the default dispatch goes on to one that can.
"""


def bad_argument(name: str, got: object, expected: str, todo: str) -> ValueError:
    """ValueError in the house form: argument, got, expected, what to do."""
    return ValueError(f"`{name}` is {got}; expected {expected}. {todo}")


class ModError(ValueError):
    """A mod that cannot be traced or returns the wrong thing."""
