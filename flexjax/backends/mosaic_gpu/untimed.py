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
    backward_fence        fused kernel: dS and dQ in shared memory are published by a fence in each thread, without a barrier of the warpgroup
    backward_dq_beside    fused kernel with tiles of 128 queries and late dQ: dQ is published beside the product for dP, not before it
    backward_ds_operand   fused kernel with tiles of 128 queries: dS is stored from the registers that the product for dK reads, in their order
    backward_dq_fragments fused kernel with tiles of 128 queries: dQ tiles are stored and added in the order of the registers of WGMMA
    backward_minus_delta  fused kernel: the row statistics in memory are lse2 and -delta, so that no thread changes the sign
    backward_dq_between   fused kernel with tiles of 128 queries and late dQ: dQ of the visit before is multiplied between dV and dK, and S and dP
                          start together
    backward_early_zeros  fused kernel with tiles of 128 queries: accumulators are set to zero after the waits for the operands
    backward_both_starts  fused kernel where dQ is not late: the accumulator of dP is set to -delta before the product for S starts
    """

    backward_dq_first: bool = False
    backward_fence: bool = False
    backward_dq_beside: bool = False
    backward_ds_operand: bool = False
    backward_dq_fragments: bool = False
    backward_minus_delta: bool = False
    backward_dq_between: bool = False
    backward_early_zeros: bool = False
    backward_both_starts: bool = False


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
