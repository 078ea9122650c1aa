"""Which keys the queries of each batch entry see, for masks of one run of keys: causal masks, windows, prefixes.

Such a mask is a comparison of integers, or several that all must hold, and each bounds kv from one side:

    a(b, h, q) >= c * kv        visible up to a // c
    c * kv >= a(b, h, q)        visible from -(-a // c) on

So two numbers of a batch entry say which key tiles the decode kernel visits, from the smallest lower bound of its
queries to the largest upper bound. XLA computes them in one or two kernels; block lists, which the decode kernel takes
for other masks, take some fifteen.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.ir.evaluate_scalars import call_program
from flexjax.ir.origin import key_positions, query_positions
from flexjax.ir.program import Atom, Linear, Lit, Op, Program, Val, axes_of
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import KernelPlan, Operands

Array = jax.Array

UNBOUNDED = 1 << 30  # larger than any position: the bound of a side that no comparison bounds
MOST_SLOPE = 16
"""The largest multiple of kv: no difference of clipped values overflows, and bounds below 2^25 are exact."""


class Bound(typing.NamedTuple):
    """One comparison of a mask: visible are the keys with greater - less >= least."""

    greater: Atom  # int32, affine in kv, as less
    less: Atom
    least: int  # 0 or 1
    slope: int  # what greater - less grows by from key to key, not 0


@functools.lru_cache(maxsize=512)
def bounds_of(program: Program) -> tuple[Bound, ...] | None:
    """The comparisons of a mask program, if a key is visible exactly where all hold; else None.

    Each must bound kv from one side, with a slope of magnitude at most MOST_SLOPE.
    """
    made = {out.id: step for step in program.steps for out in step.outs}
    found: list[Bound] = []
    left: list[Atom] = [program.results[0]]
    while left:
        atom = left.pop()
        step = made.get(atom.id) if isinstance(atom, Val) else None
        if not isinstance(step, Op):
            return None
        if step.prim == "and":
            left += step.inputs
            continue
        if step.prim not in ("ge", "gt", "le", "lt"):
            return None
        greater, less = step.inputs if step.prim in ("ge", "gt") else step.inputs[::-1]
        slopes = [_slope(atom) for atom in (greater, less)]
        if slopes[0] is None or slopes[1] is None or not 0 < abs(slopes[0] - slopes[1]) <= MOST_SLOPE:
            return None
        found.append(Bound(greater, less, int(step.prim in ("gt", "lt")), slopes[0] - slopes[1]))
    return tuple(found)


def _slope(atom: Atom) -> int | None:
    """By how much an int32 atom grows from a key to the next; None where that is not known to be constant."""
    if atom.dtype != "int32":
        return None
    if isinstance(atom, Lit) or not axes_of(atom) & {"kv", "delta"}:
        return 0
    linear: Linear | None = atom.linear
    return None if linear is None else linear.kv


def has_interval(plan: KernelPlan) -> bool:
    """Whether the form of the mask's program shows every query one run of keys (`bounds_of`)."""
    # such lists may leave out blocks that the mask program shows
    fewer = plan.blocks is not None and (plan.blocks.from_user_lists or plan.blocks.thinned)
    return plan.mask is not None and not fewer and bounds_of(plan.mask) is not None


def visible_interval(plan: KernelPlan, operands: Operands, query_lengths: Array | None) -> tuple[Array | None, Array]:
    """(first, end), int32 [B] each: no query of an entry sees a key before row `first` or from row `end` on.

    Rows count from 0 in the arrays of the call, 0 <= first <= end <= kv_len; `first` None stands for 0. A query may see
    fewer keys: these are bounds over all heads and all queries that exist (`query_lengths`, [B]). Key lengths are not
    read: the caller takes the smaller of `end` and the key length, which may be less than `first`.
    """
    program = plan.mask
    bounds = None if program is None else bounds_of(program)
    assert program is not None
    assert bounds is not None
    heads = plan.q_heads if program.reads("h") else 1
    b, h, row = jnp.meshgrid(
        *(jnp.arange(n, dtype=jnp.int32) for n in (plan.batch, heads, plan.q_len)), indexing="ij", sparse=True
    )
    placed = (plan.origin, operands.origin)
    shape = (plan.batch, heads, plan.q_len)
    at = [jnp.broadcast_to(x, shape).reshape(-1) for x in (b, h, query_positions(*placed, b, row))]

    def value(atom: Atom) -> Array:
        """The value of an atom of the mask at position 0 of kv, clipped, [B, heads or 1, T]."""
        single = with_results(program, (atom,))
        zero = jnp.int32(0)
        found = jax.vmap(lambda b, h, q: call_program(single, operands.mask_captures, (b, h, q, zero)))(*at)
        return jnp.clip(found.reshape(shape), -(UNBOUNDED // 2), UNBOUNDED // 2)

    low, high = jnp.int32(-UNBOUNDED), jnp.int32(UNBOUNDED)
    for bound in bounds:
        excess = value(bound.greater) - value(bound.less) - np.int32(bound.least)
        if bound.slope < 0:
            high = jnp.minimum(high, excess // np.int32(-bound.slope))
        else:
            low = jnp.maximum(low, -(excess // np.int32(bound.slope)))
    exists = jnp.broadcast_to(low <= high, shape)
    if query_lengths is not None:
        exists = exists & (row < query_lengths[:, None, None])
    start = jnp.broadcast_to(key_positions(*placed, b, jnp.int32(0)), (plan.batch, 1, 1))[:, 0, 0]
    inside = lambda x: jnp.clip(x - start, 0, plan.kv_len).astype(jnp.int32)
    end = inside(jnp.where(exists, high, np.int32(-UNBOUNDED)).max((1, 2)) + 1)
    if all(bound.slope < 0 for bound in bounds):
        return None, end
    return jnp.minimum(inside(jnp.where(exists, low, np.int32(UNBOUNDED)).min((1, 2))), end), end
