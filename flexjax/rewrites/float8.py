"""A call with float8 operands, where no kernel multiplies them: the same call with operands in the plan's 16-bit dtype.

Every number of float8_e4m3fn is one of bfloat16, so that nothing is lost. Scales are no part of the operands
(call/float8_scales.py).
"""

import dataclasses

import jax
import jax.numpy as jnp

from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.plan.rewrite import Rewrite


def in_16_bits(plan: KernelPlan) -> KernelPlan:
    """The plan without `float8`."""
    return dataclasses.replace(plan, float8=False) if plan.float8 else plan


def rewrite(plan: KernelPlan, why: str) -> Rewrite:
    """The call without `float8`; `why` a backend does not multiply its operands as they are, in a sentence."""

    def operands(given: Operands) -> Operands:
        wide = lambda x: None if x is None else x.astype(jnp.dtype(plan.dtype))
        names = ("query", "key", "value", "query_extra", "key_extra")
        made: dict[str, jax.Array | None] = {name: wide(getattr(given, name)) for name in names}
        return given._replace(**made)  # pyright: ignore[reportArgumentType]  # None only where it was

    return Rewrite(in_16_bits(plan), f"in {plan.dtype}: {why}", operands)
