"""Which backend runs a plan: an ordered table, the first that accepts, and every refusal kept as a sentence."""

import dataclasses
import functools
import typing
import warnings
from collections.abc import Sequence

import jax

from flexjax.backends.base import Backend
from flexjax.errors import bad_argument
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import KernelPlan, Wanted
from flexjax.trace.mod_ir import Program


def _mosaic_gpu() -> Backend:
    from flexjax.backends.mosaic_gpu.support import BACKEND

    return BACKEND


def _mosaic_tpu() -> Backend:
    from flexjax.backends.mosaic_tpu.support import MosaicTpuBackend

    return MosaicTpuBackend()


def _xla() -> Backend:
    from flexjax.backends.xla.support import XlaBackend

    return XlaBackend()


TABLE: dict[str, typing.Callable[[], Backend]] = {
    "mosaic_gpu": _mosaic_gpu,
    "mosaic_tpu": _mosaic_tpu,
    "xla": _xla,
}
"""Backends by name, in the order in which the default dispatch asks them."""

REFERENCE = "reference"
"""The dense implementation: not a backend, it takes the mods as they are."""

NAMES = (*TABLE, REFERENCE)


@functools.cache
def backend(name: str) -> Backend:
    return TABLE[name]()


class Choice(typing.NamedTuple):
    """The backend that runs and (name, sentence) of those asked before it."""

    name: str
    refusals: tuple[tuple[str, str], ...]


def candidates(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names to ask, in order. Raises ValueError for a name that is none."""
    if implementation is None:
        return tuple(TABLE)
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


def choose(plan: KernelPlan, implementation: str | Sequence[str] | None) -> Choice:
    """The first candidate that accepts the plan. Raises NotImplementedError with every refusal if none does."""
    refusals: list[tuple[str, str]] = []
    for name in candidates(implementation):
        why = None if name == REFERENCE else _refusal(name, plan, named=implementation is not None)
        if why is None:
            return Choice(name, tuple(refusals))
        refusals.append((name, why))
    raise NotImplementedError("No implementation accepts this call: " + " ".join(f"{n}: {why}" for n, why in refusals))


def _refusal(name: str, plan: KernelPlan, named: bool) -> str | None:
    """The backend's own sentence; by default a backend is also left alone where its hardware is not."""
    platform = jax.default_backend()
    home = {"mosaic_gpu": ("gpu", "an NVIDIA GPU"), "mosaic_tpu": ("tpu", "a TPU")}.get(name)
    if home and platform != home[0] and not plan.options.interpret:
        advice = "" if not named else " Pass kernel_options=KernelOptions(interpret=True) to simulate it."
        return f"{name} runs on {home[1]}; the default device is a {platform}.{advice}"
    if home and plan.options.interpret and not named:
        return f"{name} is simulated only where implementation names it."
    return backend(name).refuses(plan)


def with_measured_tiles(plan: KernelPlan, name: str) -> KernelPlan:
    """The plan with tiles that were measured for it on this device, where its options leave them open (plan/tuned.py)."""
    found = tuned.find(plan, name)
    return _filled(plan, name, tuple(found.tiles.items())) if found.tiles else plan


@functools.lru_cache(maxsize=4096)
def _filled(plan: KernelPlan, name: str, tiles: tuple[tuple[str, int], ...]) -> KernelPlan:
    filled = dataclasses.replace(plan, options=dataclasses.replace(plan.options, **dict(tiles)))
    why = backend(name).refuses(filled)
    if why is None:
        return filled
    text = ", ".join(f"{n}={v}" for n, v in tiles)
    warnings.warn(f"Measured tiles ({text}) are not used. {why} Run flexjax.autotune again.", stacklevel=2)
    return plan


def backward_backend(name: str, plan: KernelPlan, wanted: Wanted, derivative: Program | None) -> Backend:
    """The backend of the backward pass: the one that ran forward, or xla where that one refuses this gradient."""
    chosen = backend(name)
    return backend("xla") if chosen.refuses_backward(plan, wanted, derivative) is not None else chosen
