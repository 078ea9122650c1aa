"""The context in which a pass is lowered: one thread at a time, without the garbage collector, by shortcuts."""

import contextlib
import gc
import threading
from collections.abc import Iterator

from jax.interpreters import mlir

from flexjax.backends.target import Target

LOWERING_LOCK = threading.RLock()
"""Held while kernels are lowered: Mosaic's lowering keeps globals, and two threads at once get wrong machine code."""


@contextlib.contextmanager
def lowering(module: mlir.ModuleContext, target: Target) -> Iterator[None]:
    """A context in which one pass of a call is lowered for `target`; other Python threads wait."""
    with LOWERING_LOCK, collector_paused(), _faster(module, target):
        yield


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """A context without Python's cyclic garbage collector, in all threads of the process."""
    enabled = gc.isenabled()
    # The tens of thousands of objects of a kernel live until the pass is lowered: the collector frees nothing and takes
    # a seventh of the time.
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _faster(module: mlir.ModuleContext, target: Target) -> Iterator[None]:
    """`compile_ahead.lowering` with `shortcuts`; both only save time, and may lack what they import."""
    try:
        from flexjax.backends.mosaic_gpu.lowering import compile_ahead
        from flexjax.backends.mosaic_gpu.lowering import shortcuts as lowering_shortcuts
    except ImportError:
        found = contextlib.nullcontext(), contextlib.nullcontext()
    else:
        found = lowering_shortcuts.shortcuts(), compile_ahead.lowering(module, target)
    with found[0], found[1]:
        yield
