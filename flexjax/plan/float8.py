"""Calls with float8 operands where their products are not of float8: the same call with operands in the plan's 16-bit dtype.

Every number of float8_e4m3fn is one of bfloat16, so that nothing is lost. Scales are no part of the operands (float8_scales.py).
"""

import dataclasses

import jax
import jax.numpy as jnp

from flexjax.plan.kernel_plan import KernelPlan, Operands


def widened_plan(plan: KernelPlan) -> KernelPlan:
    """The plan of a call on the operands of `widened`: without `float8`, otherwise `plan`."""
    return dataclasses.replace(plan, float8=False)


def widened(plan: KernelPlan, operands: Operands) -> Operands:
    """The operands with query, key, value and extra features in the dtype of `plan`, one without `float8`; other arrays as they are."""
    wide = lambda x: None if x is None else x.astype(jnp.dtype(plan.dtype))
    names = ("query", "key", "value", "query_extra", "key_extra")
    made: dict[str, jax.Array | None] = {name: wide(getattr(operands, name)) for name in names}
    return operands._replace(**made)  # pyright: ignore[reportArgumentType]  # None only where it was
