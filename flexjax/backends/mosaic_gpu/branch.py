"""`when` and `cond` for kernels, which lower faster than pl.when and lax.cond.

jax's versions convert the boolean condition to an integer. Each lowering of that conversion starts a ptxas process to ask for its
version, 15 ms, and a call with gradients has thirty of them. These versions select between the integers 0 and 1, which gives the
same machine code. Code of a single warp (`plgpu.warp_map`) has jax's versions, because Mosaic lacks an operation of the others there.
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
    """A context in which `when` and `cond` are jax's versions. The caller enters it while it traces code of a single
    warp (the body of `plgpu.warp_map`), where Mosaic lacks an operation of the versions of this file.
    """
    token = _ONE_WARP.set(True)
    try:
        yield
    finally:
        _ONE_WARP.reset(token)


def when(condition: Array | bool) -> Callable[[Callable[[], None]], None]:
    """Decorates a function without arguments, which then runs at once, where the condition is true; like pl.when.

    condition   a boolean scalar of the kernel, or a Python bool, which decides when the kernel is traced and leaves
                no branch in it

    The decorated name becomes None.
    """

    def run(function: Callable[[], None]) -> None:
        """Calls `function` under the condition: in a branch of the kernel, or, for a Python bool, while the kernel is
        traced.
        """
        if not isinstance(condition, bool):
            cond(condition, function, lambda: None)
        elif condition:
            function()

    return run


def cond(condition: Array, true: Callable[..., Result], false: Callable[..., Result], *operands: object) -> Result:
    """true(*operands) where the condition, a boolean scalar of the kernel, is true, otherwise false(*operands); like
    lax.cond.

    Both are traced, and return arrays of the same shapes and dtypes.
    """
    if _ONE_WARP.get():
        return lax.cond(condition, true, false, *operands)
    return lax.switch(lax.select(condition, jnp.int32(1), jnp.int32(0)), (false, true), *operands)
