"""A pass of a kernel is lowered once in a process: the next equal pass calls a copy of the module.

Lowering a kernel takes about a second, whatever it is lowered for, and most programs of a process have passes in
common: a step of training and one of evaluation, the forward pass alone and with its gradient.
"""

import importlib
import typing
from collections.abc import Callable, Hashable, Sequence

import jax
from jax import core, export
from jax.interpreters import mlir

from flexjax.plan import tuned
from flexjax.trace.memo import Memo

Array = jax.Array

MOST = 128  # passes that are kept, at some hundred kilobytes
KERNELS = ("mosaic_gpu_v2", "mosaic_gpu", "tpu_custom_call")
_CHECKS = tuple(export.DisabledSafetyCheck.custom_call(name) for name in KERNELS)
# jax keeps these two to itself: all settings and contexts on which a trace depends (compute_on, set_xla_metadata, x64,
# ..), and that a module is lowered for this process alone. A jax without them has every pass inlined
_CONFIG = importlib.import_module("jax._src.config")
_trace_context = getattr(_CONFIG, "trace_context", None)
_for_this_process = getattr(_CONFIG, "export_ignore_forward_compatibility", None)

_lowered: Memo[export.Exported] = Memo(MOST)


def fits(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the program is for one platform and one device, with known sizes: a copy of a module can be called."""
    module = ctx.module_context
    where = module.axis_context
    sizes = (n for aval in ctx.avals_in for n in typing.cast(core.ShapedArray, aval).shape)
    return (
        _trace_context is not None
        and _for_this_process is not None
        and len(module.platforms) == 1
        and isinstance(where, mlir.ShardingContext)
        and where.num_devices == 1
        and not module.lowering_parameters.for_export
        and all(isinstance(n, int) for n in sizes)
    )


def as_call(
    function: Callable[..., list[Array]], avals: Sequence[core.ShapedArray], platform: str, key: Hashable
) -> Callable[..., Sequence[Array]]:
    """A function that calls the module of `function`, which is lowered unless a pass of this key was before.

    key   what the module depends on, beside the avals, the platform, measured tiles and jax's settings
    """
    assert _trace_context is not None
    assert _for_this_process is not None
    types = tuple((aval.shape, aval.dtype.name) for aval in avals)
    key = (key, types, platform, tuned.state(), _trace_context())
    found = _lowered.get(key)
    if found is None:
        with _for_this_process(True):
            found = export.export(jax.jit(function), platforms=[platform], disabled_checks=_CHECKS)(*avals)
        _lowered.put(key, found)
    return typing.cast(Callable[..., Sequence[Array]], found.call)


forget = _lowered.clear
