"""The context in which a pass is lowered: one thread at a time, without Python's cyclic garbage collector, by shortcuts, and kernels compile
ahead.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

from flexjax.backends.target import Target

LOWERING_LOCK = threading.RLock()
"""Held while kernels are lowered: Mosaic keeps state of its lowering in globals of the process, and two Python threads that lower at
once get wrong machine code."""


@contextlib.contextmanager
def lowering(target: Target) -> Iterator[None]:
    """A context in which one pass of a call is lowered for `target`. Only one Python thread at a time is inside; others
    wait. When the context ends without an error, the kernels that were lowered in it begin to compile in background threads, if the
    target is a GPU of this process (compile_ahead.py).
    """
    with LOWERING_LOCK, collector_paused(), _faster(target):
        yield


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """A context without Python's cyclic garbage collector; afterwards the collector is on again if it was on before.

    A kernel is lowered to tens of thousands of Python objects, which live until the pass is lowered, so that the collector finds nothing
    to free and yet takes a seventh of the time. Reference counting still frees objects. The collector is paused in all threads of the process, for
    the half second that a pass takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _faster(target: Target) -> Iterator[None]:
    """`compile_ahead.lowering` with `lowering_shortcuts.shortcuts`, or a context that does nothing where this jax lacks what these files
    import: both only save time.
    """
    try:
        from flexjax.backends.mosaic_gpu import compile_ahead, lowering_shortcuts
    except ImportError:
        found = contextlib.nullcontext(), contextlib.nullcontext()
    else:
        found = lowering_shortcuts.shortcuts(), compile_ahead.lowering(target)
    with found[0], found[1]:
        yield
