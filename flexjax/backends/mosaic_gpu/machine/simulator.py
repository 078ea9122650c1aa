"""Where a kernel runs, on the device or in Pallas's simulator on the CPU: a pass says it once, and no kernel asks.

A function that `device_op` decorates is for the device. While a pass is traced whose kernels are `running` in the
simulator, the function of the same name in the file `simulated.py` of the same room runs in its place.
"""

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from jax import lax

Given = ParamSpec("Given")
Result = TypeVar("Result")

_SIMULATED = contextvars.ContextVar("simulated", default=False)

DEVICE_OPS: list[Callable] = []  # every function that `device_op` has decorated


@contextlib.contextmanager
def running(simulated: bool) -> Iterator[None]:
    """A context in which a pass is traced, for the simulator or for the device."""
    token = _SIMULATED.set(simulated)
    try:
        yield
    finally:
        _SIMULATED.reset(token)


def stand_in(function: Callable) -> Callable:
    """What runs in place of a device operation in the simulator."""
    room = function.__module__.rpartition(".")[0]
    return functools.reduce(getattr, function.__qualname__.split("."), importlib.import_module(f"{room}.simulated"))


def device_op(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorates an operation of the device, a function or a method, whose `stand_in` runs in the simulator."""

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return (stand_in(function) if _SIMULATED.get() else function)(*args, **kwargs)

    DEVICE_OPS.append(run)
    return run


def only_simulated(run: Callable[[], None]) -> None:
    """Calls `run` in the simulator alone, which wants every arrival at a barrier to be waited for."""
    if _SIMULATED.get():
        run()


@device_op
def ordered(values: Result) -> Result:
    """`values` in registers, which the compiler may not compute later than here."""
    return lax.optimization_barrier(values)
