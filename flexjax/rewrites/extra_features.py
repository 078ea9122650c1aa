"""Extra features of queries and keys, appended to the head dim, for kernels that know none.

q . k + q_extra . k_extra is the product of the longer rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands
from flexjax.plan.rewrite import Rewrite

Array = jax.Array


def joined_plan(plan: KernelPlan) -> KernelPlan:
    """The plan with the extra features in the head dim."""
    return dataclasses.replace(plan, head_dim=plan.head_dim + plan.extra_dim, extra_dim=0, extra_heads=0)


def rewrite(plan: KernelPlan) -> Rewrite | None:
    """The call without extra features, whose number of heads divides the key heads; None without them."""
    if not plan.extra_dim:
        return None
    made = joined_plan(plan)
    why = f"extra features: appended to the head dim, which becomes {made.head_dim}"
    return Rewrite(
        made, why, functools.partial(_operands, plan), given=_given, gradients=functools.partial(_gradients, plan)
    )


def _operands(plan: KernelPlan, operands: Operands) -> Operands:
    """Extra features of a key head that serves several adjacent key heads are repeated."""
    assert operands.query_extra is not None
    assert operands.key_extra is not None
    repeated = jnp.repeat(operands.key_extra, plan.kv_heads // plan.extra_heads, axis=_head_axis(plan))
    query = jnp.concatenate([operands.query, operands.query_extra.astype(plan.input_dtype)], axis=-1)
    key = jnp.concatenate([operands.key, repeated.astype(plan.input_dtype)], axis=-1)
    return operands._replace(query=query, key=key, query_extra=None, key_extra=None)


def _given(given: BackwardInputs) -> BackwardInputs:
    wanted = given.wanted
    query, key = wanted.query or wanted.query_extra, wanted.key or wanted.key_extra
    return given._replace(wanted=wanted._replace(query=query, key=key, query_extra=False, key_extra=False))


def _gradients(plan: KernelPlan, gradients: Gradients, given: BackwardInputs) -> Gradients:
    wanted, d_query, d_key = given.wanted, gradients.query, gradients.key
    own = lambda x, want: x[..., : plan.head_dim] if want else None
    extra = lambda x, want: x[..., plan.head_dim :] if want else None
    d_key_extra = extra(d_key, wanted.key_extra)
    return gradients._replace(
        query=own(d_query, wanted.query),
        key=own(d_key, wanted.key),
        query_extra=extra(d_query, wanted.query_extra),
        key_extra=None if d_key_extra is None else _sum_over_sharing_heads(plan, d_key_extra),
    )


def _sum_over_sharing_heads(plan: KernelPlan, x: Array) -> Array:
    """The gradient of key_extra: sums, in float32 or wider, over the adjacent key heads that share extra features."""
    axis = _head_axis(plan)
    shape = (*x.shape[:axis], plan.extra_heads, plan.kv_heads // plan.extra_heads, *x.shape[axis + 1 :])
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.sum(x.astype(wide).reshape(shape), axis=axis + 1).astype(x.dtype)


def _head_axis(plan: KernelPlan) -> int:
    return 2 if plan.layout == "BTNH" else 1
