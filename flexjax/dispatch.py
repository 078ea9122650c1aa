"""Which backend runs a pass: an ordered table, the first that accepts, and every refusal kept as a sentence.

The choice is made when a pass is lowered, from the plan and the target (backends/target.py): a call runs where its arrays
are. `settled` is all that is known before.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import typing
import warnings
from collections.abc import Callable, Sequence

from flexjax.backends.base import Backend
from flexjax.backends.target import Target
from flexjax.dense import DenseBackend
from flexjax.errors import FallbackWarning, bad_argument
from flexjax.ir.program import Program
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import KernelPlan, Wanted
from flexjax.plan.problem import Problem


def _mosaic_gpu() -> Backend:
    from flexjax.backends.mosaic_gpu.support import BACKEND

    return BACKEND


def _mosaic_tpu() -> Backend:
    from flexjax.backends.mosaic_tpu.support import MosaicTpuBackend

    return MosaicTpuBackend()


def _xla() -> Backend:
    from flexjax.backends.xla.support import XlaBackend

    return XlaBackend()


TABLE: dict[str, Callable[[], Backend]] = {
    "mosaic_gpu": _mosaic_gpu,
    "mosaic_tpu": _mosaic_tpu,
    "xla": _xla,
}
"""Backends by name, in the order in which the default dispatch asks them."""

REFERENCE = DenseBackend.name
"""The dense implementation. Where it is the first that may run, it takes the mods as they are, before anything is lowered."""

NAMES = (*TABLE, REFERENCE)
KERNELS = {"cuda": "mosaic_gpu", "rocm": "mosaic_gpu", "tpu": "mosaic_tpu"}
"""The backend whose kernels a user of a platform expects."""
PLATFORMS = {"mosaic_gpu": ("cuda", "an NVIDIA GPU"), "mosaic_tpu": ("tpu", "a TPU")}
"""Where kernels run. Asked here, so that a call for another platform imports nothing of them."""

if any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu")):
    # This part of Pallas adds a setting to what jax's traces are kept by. Imported during the first trace of a function, with the
    # kernels, it would have that function traced and compiled a second time.
    with contextlib.suppress(ImportError):
        from jax.experimental.pallas import fuser as fuser


@functools.cache
def backend(name: str) -> Backend:
    return DenseBackend() if name == REFERENCE else TABLE[name]()


# ------------------------------------------------------------------- before the target is known


def candidates(implementation: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Names to ask, in order; None: the default order. Raises ValueError for a name that is none."""
    if implementation is None:
        return None
    one = isinstance(implementation, str) or not isinstance(implementation, Sequence)
    names: tuple = (implementation,) if one else tuple(implementation)
    if not names or any(n not in NAMES for n in names):
        raise bad_argument(
            "implementation",
            repr(implementation),
            "None, or one or several of " + ", ".join(map(repr, NAMES)),
            "None picks the best one that accepts.",
        )
    return names


def runs_everywhere(plan: KernelPlan, implementation: tuple[str, ...] | None) -> str | None:
    """The name of the one that runs the plan on every target, None where it depends on the target.

    Raises NotImplementedError with every refusal if none accepts the plan on any target.
    """
    if implementation is None and backend("xla").refuses(plan, None) is None:
        return None
    refusals: list[tuple[str, str]] = []
    for name in implementation or tuple(TABLE):
        why = backend(name).refuses(plan, None)
        if why is None:
            return None if name in PLATFORMS else name
        refusals.append((name, why))
    raise _none_accepts(refusals)


def _none_accepts(refusals: Sequence[tuple[str, str]]) -> NotImplementedError:
    return NotImplementedError("No implementation accepts this call: " + " ".join(f"{n}: {why}" for n, why in refusals))


# ------------------------------------------------------------------- the choice


class Run(typing.NamedTuple):
    """Who runs a pass: the backend, the plan with its tiles, the target, and (name, sentence) of those asked before."""

    backend: Backend
    plan: KernelPlan
    target: Target
    refusals: tuple[tuple[str, str], ...]


def choose(plan: KernelPlan, implementation: tuple[str, ...] | None, target: Target) -> Run:
    """Who runs the forward pass. Raises NotImplementedError with every refusal if none accepts."""
    refusals: list[tuple[str, str]] = []
    for name in implementation or tuple(TABLE):
        why = _refusal(name, plan, target, named=implementation is not None)
        if why is None:
            return Run(backend(name), with_measured_tiles(plan, name, target), target, tuple(refusals))
        refusals.append((name, why))
    raise _none_accepts(refusals)


def choose_backward(
    plan: KernelPlan,
    implementation: tuple[str, ...] | None,
    target: Target,
    wanted: Wanted,
    derivative: Program | None,
) -> Run:
    """Who runs the backward pass: the one that runs the forward pass, or xla where that one refuses these gradients."""
    run = choose(plan, implementation, target)
    why = run.backend.refuses_backward(run.plan, target, wanted, derivative)
    if why is None:
        return run
    refusals = (*run.refusals, (run.backend.name, why))
    return Run(backend("xla"), with_measured_tiles(plan, "xla", target), target, refusals)


def on_xla(plan: KernelPlan, target: Target, why: str = "") -> Run:
    """What xla alone can run, whatever ran the forward pass."""
    refusals = tuple((name, why) for name in PLATFORMS)
    return Run(backend("xla"), with_measured_tiles(plan, "xla", target), target, refusals)


def _refusal(name: str, plan: KernelPlan, target: Target, named: bool) -> str | None:
    """The backend's own sentence; by default a simulator is left alone, and so are kernels that may not be for the device."""
    if name in PLATFORMS:
        platform, hardware = PLATFORMS[name]
        if plan.options.interpret and not named:
            return f"{name} is simulated only where implementation names it."
        if target.platform != platform and not plan.options.interpret:
            advice = " Pass kernel_options=KernelOptions(interpret=True) to simulate it." if named else ""
            return f"{name} runs on {hardware}; this call is for the platform {target.platform}.{advice}"
        if target.platform == platform and target.kind is None and not named:
            return (
                f"It is not known which device of the platform {platform} this program is for. For its kernels, lower it "
                f"with arguments or a mesh on such a device or its topology, or pass implementation={name!r}."
            )
    return backend(name).refuses(plan, target)


def with_measured_tiles(plan: KernelPlan, name: str, target: Target) -> KernelPlan:
    """The plan with tiles that were measured for it on this device, where its options leave them open (plan/tuned.py)."""
    found = tuned.find(plan, name, target.kind)
    return _filled(plan, name, target, tuple(found.tiles.items())) if found.tiles else plan


@functools.lru_cache(maxsize=4096)
def _filled(plan: KernelPlan, name: str, target: Target, tiles: tuple[tuple[str, int], ...]) -> KernelPlan:
    filled = dataclasses.replace(plan, options=dataclasses.replace(plan.options, **dict(tiles)))
    why = backend(name).refuses(filled, target)
    if why is None:
        return filled
    text = ", ".join(f"{n}={v}" for n, v in tiles)
    warnings.warn(f"Measured tiles ({text}) are not used. {why} Run flexjax.autotune again.", stacklevel=2)
    return plan


# ------------------------------------------------------------------- nothing leaves the kernels in silence

FORWARD, BACKWARD, TANGENT, SECOND = "forward pass", "backward pass", "tangent (forward mode)", "second derivative"
"""Passes, in words."""

_said: set[tuple[str, KernelPlan, Target]] = set()
"""(pass, plan, target) of the warnings of this process."""


def warn_of_fallback(problem: Problem, which: str, run: Run) -> None:
    """Warns, once a pass and plan, where a pass on a GPU or TPU runs outside of its kernels and nobody asked for that.

    which       the pass, one of the words above
    """
    kernels = KERNELS.get(run.target.platform)
    if kernels in (None, run.backend.name) or run.backend.name in (problem.implementation or ()):
        return
    key = (which, problem.plan, run.target)
    if key in _said:
        return
    refusals = dict(run.refusals)
    why = refusals.get(kernels) or next(iter(refusals.values()), "")
    name = run.backend.name
    quiet = name if which == FORWARD else (kernels, name)
    warnings.warn(
        f"The {which} of a call runs on {name}, not on the kernels of {kernels}, for {run.target.name}. {why} Change that for the "
        f"kernels, or pass implementation={quiet!r} for the same without this warning. {problem.call}",
        FallbackWarning,
        stacklevel=2,
    )
    _said.add(key)  # last: a warning that is an error is one at the next call too
