"""Choices of kernels for Hopper that compile and are right in the simulator, but that no device has timed yet: all are off.

    with untimed.using(forward_three=True):
        jax.jit(call).lower(*arrays).compile()      # lowered with the choice

The choices are read while a call is lowered, so `using` must be open then, not when the program runs. LOG.md and LOG_backward.md
say what each is predicted to gain; tools/device/time_untimed.py times them. A choice that a device finds faster becomes a rule of
choose_kernel.py or of the tiles, and leaves this file; one that is not faster leaves it too.
"""

import contextlib
import contextvars
import dataclasses
import typing
from collections.abc import Iterator

from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class Untimed:
    """Which choices are on.

    forward_three         head dims up to 64 under a mask_mod that captures nothing: three consumer warpgroups, softmax beside P V
    forward_turns         three consumer warpgroups issue WGMMAs in turns, one after another, where softmax runs beside P V
    forward_free_ends     softmax beside P V: the first Q K^T and the last P V of a work item do not wait for a turn
    forward_query_slots   three consumer warpgroups have the slots of queries that two would have, so that with two slots those of the
                          next work item are copied early
    backward_upward       fused kernel in a fixed order under a causal-like mask: queries upward, the last key tile first; dQ late
    backward_dq_first     fused kernel with tiles of 128 queries, without score_mod and dropout: dQ is multiplied before dK and stored
                          beside it, where it is not late
    backward_heads        fused kernel in any order, one query head a key head: a few heads side by side, the longest key tiles of all of
                          them first
    """

    forward_three: bool = False
    forward_turns: bool = False
    forward_free_ends: bool = False
    forward_query_slots: bool = False
    backward_upward: bool = False
    backward_dq_first: bool = False
    backward_heads: bool = False


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


# ------------------------------------------------------------------- what the choices of the forward kernel ask for

THREE_GROUPS_BLOCK = (192, 128)
"""(queries, keys) of the mask blocks that three consumer warpgroups visit where `three_groups_under_mask`."""


def three_groups_under_mask(plan: KernelPlan) -> bool:
    """Whether `forward_three` asks for three consumer warpgroups under the plan's mask_mod: with a block mask that is not from user
    lists, without score_mod, dropout, lengths, pages and an origin, where mask_mod captures nothing, the plan is no partial one, and the
    options set no instruction and no other block_q or block_kv than THREE_GROUPS_BLOCK. The head dims, at most 64, are checked by the
    callers.

    The kernel then has 160 registers a thread and spills none. It visits blocks of THREE_GROUPS_BLOCK instead of the mask's own.
    """
    mask, blocks, options = plan.mask, plan.blocks, plan.options
    if not choices().forward_three or mask is None or blocks is None or mask.loads or blocks.from_user_lists:
        return False
    allowed = options.block_q in (None, 192) and options.block_kv in (None, 128) and options.instruction is None
    plain = plan.score is None and plan.dropout is None and plan.origin is None and plan.page == 0
    return allowed and plain and not plan.partial and not any(plan.lengths)


def forward_fields(groups: int, overlap: bool, query_slots: int) -> dict[str, typing.Any]:
    """The fields of ForwardTile that the choices set, name -> value: `turns_at_ends` False with forward_free_ends and `overlap`;
    `ping_pong` True with forward_turns, `overlap` and three groups; `query_slots` with forward_query_slots and three groups. {} where
    these choices are off.

    groups        consumer warpgroups
    overlap       whether the softmax of a step runs beside P V of the step before
    query_slots   slots of queries that two groups would have
    """
    now, fields = choices(), {}
    if now.forward_free_ends and overlap:
        fields["turns_at_ends"] = False
    if now.forward_turns and overlap and groups == 3:
        fields["ping_pong"] = True
    if now.forward_query_slots and groups == 3:
        fields["query_slots"] = query_slots
    return fields
