"""A pass of a kernel is lowered once in a process: the next equal pass calls a copy of the module.

Lowering a kernel takes about a second, whatever it is lowered for, and most programs of a process have passes in
common: a step of training and one of evaluation, the forward pass alone and with its gradient.
"""

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
# settings of jax, beyond those of the plan, on which what is lowered depends
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable", "jax_default_prng_impl")

_lowered: Memo[export.Exported] = Memo(MOST)


def fits(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the program is for one platform and one device, with known sizes: a copy of a module can be called."""
    module = ctx.module_context
    where = module.axis_context
    sizes = (n for aval in ctx.avals_in for n in typing.cast(core.ShapedArray, aval).shape)
    return (
        len(module.platforms) == 1
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
    types = tuple((aval.shape, aval.dtype.name) for aval in avals)
    settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
    key = (key, types, platform, tuned.state(), settings)
    found = _lowered.get(key)
    if found is None:
        found = export.export(jax.jit(function), platforms=[platform], disabled_checks=_CHECKS)(*avals)
        _lowered.put(key, found)
    return typing.cast(Callable[..., Sequence[Array]], found.call)


forget = _lowered.clear
