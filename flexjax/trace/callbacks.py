"""Callbacks into Python in a mod: jax.debug.print, jax.debug.breakpoint, jax.pure_callback and their like.

No kernel can run them. implementation="reference" calls the mods as they are on a dense matrix, and runs them.
"""

import contextlib
import contextvars
import typing
from collections.abc import Iterator

from jax.extend import core as jex_core

from flexjax.trace.primitives import CALLBACKS
from flexjax.trace.translation import Equation, Scope

_RUN: contextvars.ContextVar[bool] = contextvars.ContextVar("flexjax_callbacks_run", default=False)


def callbacks_run() -> bool:
    """Whether mods are traced for implementation="reference" alone."""
    return _RUN.get()


@contextlib.contextmanager
def run_callbacks(here: bool) -> Iterator[None]:
    """In the body `callbacks_run` is `here`."""
    token = _RUN.set(here)
    try:
        yield
    finally:
        _RUN.reset(token)


def first_callback(jaxpr: Scope) -> list[Equation]:
    """The first callback of a jaxpr, after the equations around it (calls, branches, loops); empty without one."""
    for eqn in typing.cast("list[Equation]", jaxpr.eqns):
        if eqn.primitive.name in CALLBACKS:
            return [eqn]
        for inner in _inner(tuple(eqn.params.values())):
            if found := first_callback(inner):
                return [eqn, *found]
    return []


def _inner(params: tuple) -> Iterator[Scope]:
    for param in params:
        if isinstance(param, tuple | list):
            yield from _inner(tuple(param))
        elif isinstance(param, jex_core.ClosedJaxpr):
            yield typing.cast(Scope, param.jaxpr)
        elif isinstance(param, jex_core.Jaxpr):
            yield typing.cast(Scope, param)


def called_back(eqn: Equation) -> str:
    """The predicate of the sentence that refuses the callback."""
    return (
        f"calls back into Python (`{eqn.primitive.name}`), which no kernel can do; pass implementation='reference' to "
        "flex_attention, which calls the mod on a dense matrix of positions, or leave it out."
    )
