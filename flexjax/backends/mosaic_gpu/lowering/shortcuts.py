"""Shortcuts through jax's lowering of GPU kernels to MLIR, where a first call spends most of its time in Python.

jax builds about 43000 operations for both passes of causal attention, each in 5 to 10 microseconds of Python, and
throws half of them away again. Inside `shortcuts`,

- constants and the number of the thread are computed once in a kernel, at its beginning (`values_once`);
- the memory of TMA descriptors is looked for once in a kernel (`scratch_once`);
- register layouts and their shapes are derived once (`layouts_once`).

This only saves time: MLIR removes the same operations (simplified_module.py), so the machine code is the same. The
shortcuts replace functions of jax that are not public, while one thread lowers a pass (`lowering.LOWERING_LOCK`). Where
a version of jax has changed them, calls work without, and the log says why (`compile_ahead.attempt`).
"""

import contextlib
import functools
import importlib
import threading
import typing
import weakref
from collections.abc import Callable, Iterator

from flexjax.backends.mosaic_gpu.lowering.compile_ahead import attempt

if typing.TYPE_CHECKING:
    from jax.extend.mlir import ir

ROOM = "jax.experimental.mosaic.gpu."  # the package of jax whose modules are changed, beside two dialects of jaxlib


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """A context in which this thread lowers kernels by the shortcuts that this jax allows."""
    with contextlib.ExitStack() as stack:
        for shortcut in (values_once, scratch_once, layouts_once):
            attempt(stack.enter_context, shortcut())
        yield


@contextlib.contextmanager
def replaced(place: object, **functions: object) -> Iterator[None]:
    """A context in which functions of a module or class are others; KeyError, and no change, where one is missing."""
    before = {name: vars(place)[name] for name in functions}
    for name, function in functions.items():
        setattr(place, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(place, name, function)


# ------------------------------------------------------------------- values of a kernel


class Kernel(typing.NamedTuple):
    """The kernel that is being lowered."""

    host: "ir.Block"  # block of the operations that launch the kernel
    entry: "ir.Block"  # first block of the kernel; what is at its beginning can be used everywhere in the kernel
    values: dict[tuple, "ir.Value"]  # by (type, attribute or int), (type,) for undefined, () for the thread


@contextlib.contextmanager
def values_once() -> Iterator[None]:
    """A context in which constants, undefined values and the thread's number are one operation each in a kernel."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    core, utils = importlib.import_module(ROOM + "core"), importlib.import_module(ROOM + "utils")
    launch, constant, undefined, thread_idx = core._launch, arith.constant, llvm.mlir_undef, utils.thread_idx
    point: typing.Any = ir.InsertionPoint
    state, thread = threading.local(), threading.get_ident()

    @contextlib.contextmanager
    def launched(*arguments: object, **options: object) -> Iterator[object]:
        if threading.get_ident() != thread:
            with launch(*arguments, **options) as built:
                yield built
            return
        host = point.current.block
        with launch(*arguments, **options) as built:
            state.kernel = Kernel(host, point.current.block, {})
            try:
                yield built
            finally:
                state.kernel = None

    def once(key: tuple, build: Callable[[], "ir.Value"]) -> "ir.Value":
        """The value `key`, built at the kernel's beginning when first asked for; outside of a kernel in place."""
        kernel: Kernel | None = getattr(state, "kernel", None)
        if kernel is None or point.current.block == kernel.host:
            return build()
        found = kernel.values.get(key)
        if found is None:
            state.kernel = None  # what `build` needs goes where the value goes, before the values that are there
            try:
                with point.at_block_begin(kernel.entry):
                    found = kernel.values[key] = build()
            finally:
                state.kernel = kernel
        return found

    def constant_once(result: "ir.Type", value: typing.Any, *, loc: object = None, ip: object = None) -> "ir.Value":
        if ip is not None or not isinstance(value, int | ir.Attribute):  # the floats 0.0 and -0.0 are one key
            return constant(result, value, loc=loc, ip=ip)
        return once((result, value), lambda: constant(result, value, loc=loc))

    def undefined_once(result: "ir.Type", **where: typing.Any) -> "ir.Value":
        return undefined(result, **where) if where else once((result,), lambda: undefined(result))

    with (
        replaced(core, _launch=launched),
        replaced(arith, constant=constant_once),
        replaced(llvm, mlir_undef=undefined_once),
        replaced(utils, thread_idx=lambda: once((), thread_idx)),
    ):
        yield


# ------------------------------------------------------------------- memory of TMA descriptors


@contextlib.contextmanager
def scratch_once() -> Iterator[None]:
    """A context in which jax looks once for a kernel's allocation of TMA descriptors, not once for each copy."""
    scratch = importlib.import_module(ROOM + "launch_context").Scratch
    find, thread = scratch._find_alloc_load_and_device_ptr, threading.get_ident()
    found: weakref.WeakKeyDictionary[object, object] = weakref.WeakKeyDictionary()

    def find_once(self: object) -> object:
        if threading.get_ident() != thread:
            return find(self)
        if self not in found:
            found[self] = find(self)
        return found[self]

    with replaced(scratch, _find_alloc_load_and_device_ptr=find_once):
        yield


# ------------------------------------------------------------------- layouts


@contextlib.contextmanager
def layouts_once() -> Iterator[None]:
    """A context in which pure functions of register layouts keep their results."""
    array, mma = importlib.import_module(ROOM + "fragmented_array"), importlib.import_module(ROOM + "mma")

    def kept(place: object, *names: str) -> contextlib.AbstractContextManager[None]:
        return replaced(place, **{name: keep(getattr(place, name)) for name in names})

    with (
        kept(array.Tiling, "tile_shape", "untile_shape"),
        kept(array.TiledLayout, "remove_dimension", "canonicalize"),
        kept(mma, "MMALayouts"),
    ):
        yield


def keep(function: Callable[..., object]) -> Callable[..., object]:
    """`function`, which keeps its results if all arguments can be hashed."""
    cached = functools.cache(function)

    def result(*arguments: object, **options: object) -> object:
        try:
            return cached(*arguments, **options)
        except TypeError:  # arguments that have no hash; raised again where it was another
            return function(*arguments, **options)

    return result
