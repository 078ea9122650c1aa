"""Branches of kernels: pl.when and lax.cond that are lowered faster.

Both turn the condition, a boolean, into a number, and jax asks ptxas for its version, in a process of its own, each time that
it lowers such a conversion: 15 ms, thirty times in a call with gradients. A choice of two numbers is the same machine code.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Result = TypeVar("Result")


def when(condition: Array | bool) -> Callable[[Callable[[], None]], None]:
    """As pl.when: the decorated function takes part where the condition, a boolean scalar, is true."""

    def run(function: Callable[[], None]) -> None:
        if not isinstance(condition, bool):
            cond(condition, function, lambda: None)
        elif condition:
            function()

    return run


def cond(condition: Array, true: Callable[..., Result], false: Callable[..., Result], *operands: object) -> Result:
    """As lax.cond, of a boolean scalar; branches return alike."""
    return lax.switch(lax.select(condition, jnp.int32(1), jnp.int32(0)), (false, true), *operands)
