"""`eager`: factories of mods whose arrays are known stay outside of the program that is being traced.

A jitted function may call `masks.document(ids)` with ids that are a numpy array. Traced, its jax.numpy operations would
make the block lists of the mask in every step.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.core import Tracer, eval_context

from flexjax.mod_tools.numpy_arrays import unwrapped
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.settings import own_settings

P = ParamSpec("P")
T = TypeVar("T")


def eager(factory: Callable[P, T]) -> Callable[P, T]:
    """Calls `factory` outside of transformations and meshes, unless an argument is traced or on several devices."""

    @without_frames
    @functools.wraps(factory)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        given = tuple(map(unwrapped, args)), {name: unwrapped(x) for name, x in kwargs.items()}
        leaves = jax.tree.leaves(given)
        if any(isinstance(x, Tracer) or (isinstance(x, jax.Array) and len(x.devices()) > 1) for x in leaves):
            with own_settings():
                return factory(*given[0], **given[1])
        with own_settings(), eval_context(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return factory(*given[0], **given[1])

    return run
