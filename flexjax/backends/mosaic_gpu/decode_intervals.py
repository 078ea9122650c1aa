"""Which keys the queries of each batch entry see, for masks that show every query one run of keys: causal masks, windows, prefixes.

Such a mask is a comparison of integers, or several that all must hold, and each bounds kv from one side:

    a(b, h, q) >= c * kv        visible up to a // c
    c * kv >= a(b, h, q)        visible from -(-a // c) on

So two numbers of a batch entry say which key tiles the decode kernel visits, from the smallest lower bound of its queries to the largest
upper bound, and XLA computes them in one or two kernels. Block lists, which the decode kernel takes for other masks, take some fifteen
small kernels.
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

UNBOUNDED = 1 << 30
"""Larger than any position: the bound of a side that no comparison bounds."""
MOST_SLOPE = 16
"""The largest multiple of kv: with values clipped to half of UNBOUNDED no difference overflows, and all bounds below 2^25 are exact."""


class Bound(typing.NamedTuple):
    """One comparison of a mask: visible are the keys with greater - less >= least.

    greater, less   int32 atoms of the program, affine in kv
    least           0 or 1
    slope           what greater - less grows by from key to key, not 0
    """

    greater: Atom
    less: Atom
    least: int
    slope: int


@functools.lru_cache(maxsize=512)
def bounds_of(program: Program) -> tuple[Bound, ...] | None:
    """The comparisons (>=, >, <=, <) of a mask program, if a key is visible exactly where all of them hold and each bounds kv from one side
    (`Bound`), with a slope of magnitude at most MOST_SLOPE; None for any other program. Cached by the program.
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
    """By how much the value of an int32 atom grows from a key to the next; None where that is not known to be the same for
    all keys, and for other dtypes.
    """
    if atom.dtype != "int32":
        return None
    if isinstance(atom, Lit) or not axes_of(atom) & {"kv", "delta"}:
        return 0
    linear: Linear | None = atom.linear
    return None if linear is None else linear.kv


def has_interval(plan: KernelPlan) -> bool:
    """Whether the mask of a plan is known to show every query one run of keys, by the form of its program (`bounds_of`).

    False without a mask, and with user lists, because these may hide blocks that the mask program shows. Where it is
    True, the decode kernels visit keys by `visible_interval` and do not read the block lists.
    """
    user_lists = plan.blocks is not None and plan.blocks.from_user_lists
    return plan.mask is not None and not user_lists and bounds_of(plan.mask) is not None


def visible_interval(plan: KernelPlan, operands: Operands, query_lengths: Array | None) -> tuple[Array | None, Array]:
    """(first, end), int32 [B] each, 0 <= first <= end <= kv_len: the queries of a batch entry see no key before row `first` and none from
    row `end` on, rows counted from 0 in the arrays of the call. `first` is None, which stands for 0, if no comparison bounds kv from below.

    They are bounds over all heads and all queries that exist. A query may see fewer keys, or none: a run of keys that lies outside of the
    array counts as an empty run at the nearest end, 0 or kv_len. So `end` 0 means that no query of the entry sees a key, but an entry that
    sees none may have another `end`, such as first = end = kv_len. An entry without queries has `end` 0.

    Key lengths are not read: the caller takes the smaller of `end` and the key length, which may be less than `first`.

    plan            one for which `has_interval` is True
    operands        of the call, of which the arrays that mask_mod captured and the origin are read
    query_lengths   int32 [B]: how many queries of each entry exist; None: all
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
        """The value of an atom of the mask program at position 0 of kv, [B, heads or 1, T] int32, clipped to half of UNBOUNDED."""
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
