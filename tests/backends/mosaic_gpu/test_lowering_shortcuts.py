"""Shortcuts through jax's lowering: that they shorten it, that jax is as before afterwards and in other threads, and that calls work without.

That machine code stays the same is tested in test_compile_ahead.py.
"""

import collections
import contextlib
import importlib
import logging
import threading
import typing
from collections.abc import Callable

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from jax.experimental.mosaic.gpu import core, fragmented_array, launch_context, utils
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from flexjax.backends.mosaic_gpu.lowering import compile_ahead, simplified_module
from flexjax.backends.mosaic_gpu.lowering import shortcuts as lowering_shortcuts
from flexjax.backends.mosaic_gpu.machine import registers
from flexjax.passes import lowered as passes_lowered
from tests.backends.mosaic_gpu.test_compile_ahead import attend, gradient, lowered

MMA = importlib.import_module("jax.experimental.mosaic.gpu.mma")  # the package has a function of that name
PLACES = (
    (core, "_launch"),
    (arith, "constant"),
    (llvm, "mlir_undef"),
    (utils, "thread_idx"),
    (launch_context.Scratch, "_find_alloc_load_and_device_ptr"),
    (fragmented_array.Tiling, "tile_shape"),
    (fragmented_array.Tiling, "untile_shape"),
    (fragmented_array.TiledLayout, "remove_dimension"),
    (fragmented_array.TiledLayout, "canonicalize"),
    (MMA, "MMALayouts"),
)


def now() -> list[object]:
    return [vars(place)[name] for place, name in PLACES]


def built(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How many operations of each name jax builds for both passes, and under "kept" how many are left."""
    found: collections.Counter[str] = collections.Counter()
    real = simplified_module.simplify

    def count(module: typing.Any, names: collections.Counter[str]) -> None:
        def visit(operation: ir.Operation) -> ir.WalkResult:
            names[operation.name] += 1
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)

    def counted(module: typing.Any) -> None:
        count(module, found)
        real(module)
        left: collections.Counter[str] = collections.Counter()
        count(module, left)
        found["kept"] += left.total()

    with monkeypatch.context() as patch:
        patch.setattr(simplified_module, "simplify", counted)
        passes_lowered.forget()  # what an earlier call of the process built is not built again
        lowered(gradient)
    return found


def test_fewer_operations_are_built_and_as_many_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = built(monkeypatch)
    monkeypatch.setattr(lowering_shortcuts, "shortcuts", contextlib.nullcontext)
    longer = built(monkeypatch)
    assert shorter.pop("kept") == longer.pop("kept")
    assert shorter.total() < 0.8 * longer.total()
    for name in ("arith.constant", "gpu.thread_id", "llvm.mlir.undef"):
        assert shorter[name] < 0.2 * longer[name]


def test_jax_is_as_before_afterwards() -> None:
    before = now()
    with lowering_shortcuts.shortcuts():
        assert not any(a is b for a, b in zip(now(), before, strict=True))
        with lowering_shortcuts.shortcuts():
            pass
    assert all(a is b for a, b in zip(now(), before, strict=True))
    with pytest.raises(ZeroDivisionError), lowering_shortcuts.shortcuts():
        _ = 1 // 0
    assert all(a is b for a, b in zip(now(), before, strict=True))


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_without_a_piece_a_call_is_lowered_all_the_same(
    place: object, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The piece is missing when a shortcut looks for it, and jax has it."""
    real: Callable = lowering_shortcuts.replaced

    def without(where: object, **functions: object) -> contextlib.AbstractContextManager[None]:
        if where is place and name in functions:
            raise KeyError(name)
        return real(where, **functions)

    monkeypatch.setattr(lowering_shortcuts, "replaced", without)
    before = now()
    with caplog.at_level(logging.INFO, compile_ahead.__name__):
        assert len(lowered(attend)) == 1
    said = [record.getMessage() for record in caplog.records if record.name == compile_ahead.__name__]
    assert said == [f"compiling kernels takes longer with this jax: KeyError: '{name}'"]
    assert all(a is b for a, b in zip(now(), before, strict=True))


def constants() -> list[bool]:
    """Whether constants that are built outside of a kernel are one: the integer 1 and the integer 1, then the floats 0.0 and -0.0."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            number, float32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
            pairs = [
                (arith.constant(number, 1), arith.constant(number, 1)),
                (arith.constant(float32, 0.0), arith.constant(float32, -0.0)),
            ]
            return [one == other for one, other in pairs]


def test_outside_of_a_kernel_each_constant_is_built() -> None:
    with lowering_shortcuts.shortcuts():
        assert constants() == [False, False]


@contextlib.contextmanager
def no_launch(*_: object, **__: object) -> typing.Iterator[None]:
    """A kernel that begins where jax is."""
    yield


def constants_of_a_kernel() -> list[bool]:
    """As `constants`, inside a kernel; and whether a constant of what launches it is the kernel's."""
    with mlir.make_ir_context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            launch = ir.Operation.create("test.launch", regions=1)
            entry = launch.regions[0].blocks.append()
            number, float32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

            @contextlib.contextmanager
            def launched() -> typing.Iterator[None]:
                with ir.InsertionPoint(entry):
                    yield

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(core, "_launch", launched)
                with lowering_shortcuts.values_once(), core._launch():
                    one, other = arith.constant(number, 1), arith.constant(number, 1)
                    zeros = arith.constant(float32, 0.0), arith.constant(float32, -0.0)
                    with ir.InsertionPoint(launch):
                        outside = arith.constant(number, 1)
            return [one == other, zeros[0] == zeros[1], one == outside]


def test_a_kernel_has_each_constant_once() -> None:
    assert constants_of_a_kernel() == [True, False, False]


def test_other_threads_lower_as_before() -> None:
    """Two kernels at once would take each other's values."""
    found: list[list[bool]] = []
    with mlir.make_ir_context(), ir.Location.unknown(), pytest.MonkeyPatch.context() as patch:
        module = ir.Module.create()
        patch.setattr(core, "_launch", no_launch)
        with lowering_shortcuts.values_once(), ir.InsertionPoint(module.body), core._launch():
            thread = threading.Thread(target=lambda: found.append(constants()))
            thread.start()
            thread.join()

            def launch() -> None:
                """Another kernel."""
                with mlir.make_ir_context(), ir.Location.unknown():
                    other = ir.Module.create()
                    with ir.InsertionPoint(other.body), core._launch():
                        found.append(constants())

            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
    assert found == [[False, False], [False, False]]


def test_where_the_elements_of_a_thread_lie_is_derived_once() -> None:
    """The first thread of a warpgroup holds two adjacent elements of each 8 columns in the first row and in the ninth."""
    tile, shape = registers.lowered(registers.TILE), (64, 32)
    found = registers._constants_of(tile, shape)
    assert registers._constants_of(tile, shape) is found
    expected = [(row, column + item) for row in (0, 8) for column in range(0, 32, 8) for item in (0, 1)]
    assert sorted(position for _, _, position in found) == expected
    assert len({register for register, _, _ in found}) == 8
    assert len(registers._constants_of(tile, (128, 32))) == 2 * len(expected)
