"""The mask of a call with `context=`: that of the whole sequence, traced."""

import contextlib

import jax
import jax.numpy as jnp
from jax import core

from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.build import trace_placed_mask
from flexjax.block_mask.parts import BROADCAST
from flexjax.call.checks import CallSizes, check_block_mask
from flexjax.combine import and_masks
from flexjax.errors import bad_argument
from flexjax.ir.origin import OriginTable, agree
from flexjax.mod_tools.made_for import Reach
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.trace.lift_numpy import eager_without_mesh
from flexjax.trace.trace_mod import TracedMod
from flexjax.types import MaskMod

Array = jax.Array


def mask_of_whole(mask: BlockMask, plan: KernelPlan, lengths: tuple[int, int], origin: OriginTable) -> MaskMod:
    """The mask of a block mask as a function of indices of the whole problem.

    Raises ValueError for a block mask of other sizes, of another origin, or of own batch entries or heads without one.
    """
    sizes = CallSizes(plan.batch, plan.q_heads, plan.kv_heads, *lengths, plan.head_dim, plan.value_dim)
    check_block_mask(mask, sizes, plan.layout)
    if mask.origin is not None and not agree(
        mask.origin, OriginTable(origin.batch, origin.head, None, None, mask.origin.whole)
    ):
        raise bad_argument(
            "origin", "another than that of block_mask", "the same, or None", "None takes that of the block mask."
        )
    # lists alone count from 0 in the arrays of the call
    inputs = () if mask.program is None else mask.program.inputs[1:3]
    for known, count, shift in zip(inputs, mask.shape, (origin.batch, origin.head), strict=False):
        one_for_all = count == 1 and known.high == BROADCAST - 1
        if mask.origin is None and shift is not None and not one_for_all:
            raise bad_argument(
                "block_mask", "made without an origin beside `origin`", "one made with the same origin",
                "Pass origin= to create_block_mask too.",
            )  # fmt: skip
    with eager_if_known(mask):
        own = mask.mask_mod
    batch, head = origin.batch, origin.head
    less = lambda index, first: index if first is None else index - first
    return lambda b, h, q_idx, kv_idx: own(less(b, batch), less(h, head), q_idx, kv_idx)


def eager_if_known(mask: BlockMask) -> contextlib.AbstractContextManager[None]:
    """A context in which arrays made from the lists of a block mask are known if the lists are."""
    traced = any(isinstance(x, core.Tracer) for x in jax.tree.leaves(mask))
    # of unknown lists a call cannot tell which key blocks travel
    return contextlib.nullcontext() if traced else eager_without_mesh()


def trace_mask(
    mask_mod: MaskMod | None, lengths: tuple[int, int], plan: KernelPlan, origin: OriginTable, reach: Reach | None
) -> TracedMod:
    """The mask of the whole sequence, traced; it hides what lies past the end of the sequence in the last block.

    plan       before the call is split over devices; inside shard_map batch and heads are one device's
    origin     `Placed.origin` of the call (call.py), whose `whole` has the lengths in whole blocks
    reach      for warnings; None where mask_mod is of a block mask, whose own function gave them

    Raises ModError, a ValueError, for a mask_mod that cannot be traced.
    """

    def inside(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether q_idx and kv_idx lie before the end, on axes whose last block reaches past it."""
        on = jnp.asarray(True)
        if origin.whole[2] > lengths[0]:
            on = on & (q_idx < lengths[0])
        return on & (kv_idx < lengths[1]) if origin.whole[3] > lengths[1] else on

    sizes = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
    ends = origin.whole[2:] != lengths
    if mask_mod is None:
        return trace_placed_mask(inside, sizes, origin)
    return trace_placed_mask(and_masks(inside, mask_mod) if ends else mask_mod, sizes, origin, reach)
