"""Which settings of jax hold in flexjax's own code: not those by which users have jax watch theirs.

Under strict promotion, a transfer guard or `jax_debug_nans`, jax refuses what a user may not have meant. `own` runs
flexjax's code under jax's defaults, and `users` gives a score_mod or mask_mod the user's settings back. Settings that
change numbers (x64, precision, the default device) stay as they are.
"""

import contextlib
import functools
import threading
import typing
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.core import Tracer

P = typing.ParamSpec("P")
R = typing.TypeVar("R")

# what flexjax transfers it transfers on purpose, so a guard that lets explicit transfers pass lets these pass
_EXPLICIT: dict[object, object] = {"disallow": "allow", "log": "allow"}
_SETTINGS: dict[str, tuple[dict[object, object], Callable]] = {
    "jax_numpy_dtype_promotion": ({"strict": "standard"}, jax.numpy_dtype_promotion),
    "jax_numpy_rank_promotion": ({"raise": "allow", "warn": "allow"}, jax.numpy_rank_promotion),
    "jax_debug_nans": ({True: False}, jax.debug_nans),
    "jax_debug_infs": ({True: False}, jax.debug_infs),
    "jax_transfer_guard_host_to_device": (_EXPLICIT, jax.transfer_guard_host_to_device),
    "jax_transfer_guard_device_to_device": (_EXPLICIT, jax.transfer_guard_device_to_device),
    "jax_transfer_guard_device_to_host": (_EXPLICIT, jax.transfer_guard_device_to_host),
}
"""For each setting: the values that flexjax's code does not run under, with those in their place, and its context."""

OF_TRACES = ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")


class _Users(threading.local):
    """What the user chose for the settings that are changed where this thread is now."""

    changed: dict[str, object] = {}  # noqa: RUF012  # replaced, never changed


_users = _Users()


@contextlib.contextmanager
def _set(values: dict[str, object], users: dict[str, object]) -> Iterator[None]:
    """Sets jax's settings `values`; `users` is what the user chose for those that are changed then."""
    before, _users.changed = _users.changed, users
    try:
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                stack.enter_context(_SETTINGS[name][1](value))
            yield
    finally:
        _users.changed = before


def _found() -> dict[str, object]:
    """The settings that flexjax's code does not run under, as they are now."""
    now = {name: getattr(jax.config, name) for name in _SETTINGS}
    return {name: value for name, value in now.items() if value in _SETTINGS[name][0]}


def own_settings() -> contextlib.AbstractContextManager[None]:
    """A context for code of flexjax."""
    found = _found()
    if not found:
        return contextlib.nullcontext()
    return _set({name: _SETTINGS[name][0][value] for name, value in found.items()}, {**_users.changed, **found})


def of_traces() -> tuple[object, ...]:
    """What the user chose for the settings that hold in `users_settings`."""
    return tuple(_users.changed.get(name, getattr(jax.config, name)) for name in OF_TRACES)


def users_settings() -> contextlib.AbstractContextManager[None]:
    """A context for a function of the user that flexjax calls."""
    # guards and checks of NaN stay off: that flexjax evaluates the function at hidden entries is not the user's doing
    given = {name: value for name, value in _users.changed.items() if name in OF_TRACES}
    return (
        _set(given, {n: v for n, v in _users.changed.items() if n not in given}) if given else contextlib.nullcontext()
    )


def own(function: Callable[P, R]) -> Callable[P, R]:
    """The function under `own_settings`."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with own_settings():
            return function(*args, **kwargs)

    return wrapped


def users(function: Callable[P, R]) -> Callable[P, R]:
    """The function of the user under `users_settings`."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with users_settings():
            return function(*args, **kwargs)

    return wrapped


def check_finite(what: str, *arrays: jax.Array | None, hidden: bool = True) -> None:
    """Raises FloatingPointError as jax_debug_nans and jax_debug_infs ask, if the user set them; tracers pass.

    hidden   whether all arrays but the first are -inf in rows without a key, as lse is, which is no error
    """
    chosen = {
        name: _users.changed.get(name, getattr(jax.config, name)) for name in ("jax_debug_nans", "jax_debug_infs")
    }
    if not any(chosen.values()):
        return
    with own_settings():
        for place, x in enumerate(arrays):
            if x is None or isinstance(x, Tracer) or not jnp.issubdtype(x.dtype, jnp.inexact):
                continue
            if chosen["jax_debug_nans"] and bool(jnp.isnan(x).any()):
                raise FloatingPointError(f"invalid value (nan) encountered in {what}")
            infinite = jnp.isposinf if hidden and place else jnp.isinf
            if chosen["jax_debug_infs"] and bool(infinite(x).any()):
                raise FloatingPointError(f"invalid value (inf) encountered in {what}")
