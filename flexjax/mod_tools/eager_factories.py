"""`eager`: factories of mods whose arrays are known stay outside of the program that is being traced.

`masks.document(ids)` may be called inside a jitted function with ids that are a numpy array. Each operation of jax.numpy would
then be a part of the program and its result a traced array, so that the block lists of the mask would be made in every step
although they are the same in all of them.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.core import Tracer, eval_context

P = ParamSpec("P")
T = TypeVar("T")


def eager(factory: Callable[P, T]) -> Callable[P, T]:
    """Makes a function that calls `factory` with its own arguments, outside of any transformation and mesh, so that what the factory
    computes is known at once.

    If an argument is traced or is an array on several devices, `factory` is called where the caller is. Arguments that are functions are
    not looked into. The function has the name, the docstring and the signature of `factory`.
    """

    @functools.wraps(factory)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `factory` for these arguments, computed outside of any transformation and mesh unless an argument is traced or is
        an array on several devices.
        """
        given = jax.tree.leaves((args, kwargs))
        if any(isinstance(x, Tracer) or (isinstance(x, jax.Array) and len(x.devices()) > 1) for x in given):
            return factory(*args, **kwargs)
        with eval_context(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return factory(*args, **kwargs)

    return run
