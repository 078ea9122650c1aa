"""Choices of kernels for Hopper that compile and are right in the simulator, but that no device has timed yet: all are off.

    with untimed.using(backward_dq_first=True):
        jax.jit(call).lower(*arrays).compile()      # lowered with the choice

The choices are read while a call is lowered, so `using` must be open then, not when the program runs. LOG.md and LOG_backward.md
say what each is predicted to gain; tools/device/time_untimed.py times them. A choice that a device finds faster becomes a rule of
choose_kernel.py or of the tiles, and leaves this file; one that is not faster leaves it too.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Untimed:
    """Which choices are on.

    backward_dq_first     fused kernel with tiles of 128 queries, without score_mod and dropout: dQ is multiplied before dK and stored
                          beside it, where it is not late
    """

    backward_dq_first: bool = False


_CHOICES: contextvars.ContextVar[Untimed | None] = contextvars.ContextVar("untimed", default=None)


def choices() -> Untimed:
    """The choices of this thread; all off outside of `using`."""
    return _CHOICES.get() or Untimed()


@contextlib.contextmanager
def using(**fields: bool) -> Iterator[None]:
    """A context in which these choices are on (True) or off (False), and the others as around it.

    fields   names of Untimed
    """
    token = _CHOICES.set(dataclasses.replace(choices(), **fields))
    try:
        yield
    finally:
        _CHOICES.reset(token)
