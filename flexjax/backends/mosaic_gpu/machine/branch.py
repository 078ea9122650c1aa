"""`when` and `cond` for kernels, which lower faster than pl.when and lax.cond.

jax's versions convert the boolean condition to an integer. Each lowering of that conversion starts a ptxas process to
ask for its version, 15 ms. These versions select between the integers 0 and 1, which gives the same machine code. Code
of a single warp (`plgpu.warp_map`) has jax's versions, because Mosaic lacks an operation of the others there.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Result = TypeVar("Result")


_ONE_WARP = contextvars.ContextVar("one_warp", default=False)


@contextlib.contextmanager
def one_warp() -> Iterator[None]:
    """A context in which `when` and `cond` are jax's versions, for tracing the body of `plgpu.warp_map`."""
    token = _ONE_WARP.set(True)
    try:
        yield
    finally:
        _ONE_WARP.reset(token)


def when(condition: Array | bool) -> Callable[[Callable[[], None]], None]:
    """Runs the decorated function at once where the condition is true, like pl.when; a Python bool leaves no branch."""

    def run(function: Callable[[], None]) -> None:
        if not isinstance(condition, bool):
            cond(condition, function, lambda: None)
        elif condition:
            function()

    return run


def cond(condition: Array, true: Callable[..., Result], false: Callable[..., Result], *operands: object) -> Result:
    """Like lax.cond: true(*operands) where the condition is true, otherwise false(*operands)."""
    if _ONE_WARP.get():
        return lax.cond(condition, true, false, *operands)
    return lax.switch(lax.select(condition, jnp.int32(1), jnp.int32(0)), (false, true), *operands)
