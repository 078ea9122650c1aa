"""Small captured arrays of 16-bit floats that XLA converts to float32 before a forward kernel, such as a table of
relative positions in bfloat16.

A kernel converts each element that it reads: for a table by q - kv, where a thread reads the same element twice, 34
conversions in a step of a 64 x 128 tile, beside about 500 other instructions. The kernel reads an array in float32
without, and the results have the same bits, because the conversion is exact. An array stays as it is where

    the program uses its elements otherwise            in arithmetic of 16 bits, or in a Call
    no load depends on query and key                   elements are then converted once a row or column
    it has an element for each (query, key)            a pair bias, whose bytes count (backward/pair_bias.py)
    it takes more than MOST_BYTES in float32           the conversion would take longer
    the call has fewer than LEAST_ENTRIES              the kernels would save less than the conversion takes

A conversion takes 2 us, its launch, and 2 us more at MOST_BYTES. A forward pass takes 0.7 ms for 2^32 entries under a
causal mask on an H100, so that a sixteenth of its instructions is 2.7 us for LEAST_ENTRIES. The backward kernels read
16 bits: with float32 they have fewer instructions, but took 1.6% longer.
"""

import dataclasses
import math

import jax.numpy as jnp

from flexjax.backends.mosaic_gpu.backward.pair_bias import axis_aligned_dims
from flexjax.backends.mosaic_gpu.programs.staging import can_be_staged
from flexjax.ir.program import Load, Program, axes_of
from flexjax.ir.widened_loads import widenable, widened
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.plan.rewrite import Rewrite

MOST_BYTES = 1 << 22  # the largest array that is converted, in bytes of float32
LEAST_ENTRIES = 1 << 28
"""The fewest entries of the attention matrix, over batch and heads, that blocks of the mask may visit in such a call.
"""


def rewrite(plan: KernelPlan) -> Rewrite | None:
    """The call with captured arrays of score_mod in float32, where that saves time; None elsewhere."""
    chosen = frozenset() if plan.score is None else _chosen(plan, plan.score)
    if plan.score is None or not chosen:
        return None
    made = dataclasses.replace(plan, score=widened(plan.score, chosen))
    why = f"captured arrays {', '.join(f'c{n}' for n in sorted(chosen))} of score_mod: converted to float32"
    return Rewrite(made, why, lambda operands: _converted(operands, chosen))


def _converted(operands: Operands, chosen: frozenset[int]) -> Operands:
    arrays = enumerate(operands.score_captures)
    return operands._replace(score_captures=tuple(x.astype(jnp.float32) if n in chosen else x for n, x in arrays))


def _chosen(plan: KernelPlan, score: Program) -> frozenset[int]:
    """The numbers of the captured arrays of score_mod that are converted."""
    if _entries(plan) < LEAST_ENTRIES:
        return frozenset()
    gathered = {load.capture for load in score.loads if _by_entry(load)}
    dense = {load.capture for load in score.loads if _is_pair_bias(load) or can_be_staged(score, load)}
    small = {n for n in gathered - dense if 4 * math.prod(score.captures[n].shape) <= MOST_BYTES}
    return widenable((score,)) & small


def _by_entry(load: Load) -> bool:
    """Whether the index of the load depends on query and key."""
    axes = frozenset[str]().union(*map(axes_of, load.index))
    return "delta" in axes or {"q", "kv"} <= axes


def _is_pair_bias(load: Load) -> bool:
    """Whether the load reads another element for each query and key, at an index of each."""
    dims = axis_aligned_dims(load)
    return dims is not None and {"q", "kv"} <= {axis for axis, _ in dims}


def _entries(plan: KernelPlan) -> int:
    """An upper bound of the entries of the attention matrix, over batch and heads, that are visited."""
    keys = plan.kv_len
    if plan.blocks is not None:
        keys = min(keys, (plan.blocks.partial + plan.blocks.full) * plan.blocks.block_kv)
    return plan.batch * plan.q_heads * plan.q_len * keys
