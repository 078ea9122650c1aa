"""Each operation of the device has a stand-in in the simulator that takes the same arguments."""

import importlib
import inspect
import pkgutil
import typing

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends import mosaic_gpu
from flexjax.backends.mosaic_gpu.machine import simulator

for module in pkgutil.walk_packages(mosaic_gpu.__path__, f"{mosaic_gpu.__name__}."):
    importlib.import_module(module.name)

OPS = {f"{op.__module__.removeprefix(mosaic_gpu.__name__ + '.')}.{op.__qualname__}": op for op in simulator.DEVICE_OPS}


def test_there_are_operations_of_every_kind() -> None:
    rooms = {name.split(".")[0] for name in OPS}
    assert {"machine", "forward", "backward", "decode", "captures"} <= rooms


@pytest.mark.parametrize("name", OPS)
def test_a_stand_in_takes_the_arguments_of_its_operation(name: str) -> None:
    op = OPS[name]
    found: typing.Any = simulator.stand_in(op)
    given = [(p.name, p.kind, p.default) for p in inspect.signature(op).parameters.values()]
    assert [(p.name, p.kind, p.default) for p in inspect.signature(found).parameters.values()] == given


@pytest.mark.parametrize("room", ["machine", "forward", "backward", "decode", "captures"])
def test_nothing_stands_in_for_what_does_not_exist(room: str) -> None:
    module = importlib.import_module(f"{mosaic_gpu.__name__}.{room}.simulated")
    wanted = {op.__qualname__ for name, op in OPS.items() if name.startswith(f"{room}.")}
    have = set()
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        have |= (
            {f"{name}.{m}" for m, x in vars(thing).items() if inspect.isfunction(x)}
            if inspect.isclass(thing)
            else {name}
        )
    assert have - {"_store"} == wanted
