"""Which backend runs a pass: the first of an ordered table that accepts its plan.

`choose` and `choose_backward` are asked when a pass is lowered, because only then the target (backends/target.py) is
known: a call runs where its arrays are. `runs_everywhere` is asked before. Each backend that refuses says why in a
sentence; the sentences are kept for errors, for `explain` and for the warning of a fallback: a call on a GPU or TPU
runs outside of its kernels.

Two rewrites are decided here and not by a backend: a float8 call that a backend refuses is asked again in 16 bits
(rewrites/float8.py), and a dilated mask is split by residues (rewrites/residues.py). Which of its kernels a backend
launches is the backend's own choice.

A plan (KernelPlan) is everything static about one call; operands are its arrays; a problem is a plan with the
derivative program of score_mod and the backends to ask (plan/problem.py).
"""

import contextlib
import dataclasses
import functools
import importlib.util
import typing
import warnings
from collections.abc import Callable, Sequence

import jax

from flexjax.backends import target as targets
from flexjax.backends.base import Backend, ForwardMode
from flexjax.backends.reference.support import DenseBackend
from flexjax.backends.target import Target
from flexjax.block_mask import transpose
from flexjax.errors import FallbackWarning, bad_argument, stacklevel_of_user
from flexjax.integers import cdiv
from flexjax.ir.program import Program
from flexjax.plan import invariant, kernel_plan, rewrite, tuned
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results, TangentInputs, Wanted
from flexjax.plan.problem import Problem
from flexjax.plan.rewrite import Steps, last_plan
from flexjax.rewrites import float8, residues


def _mosaic_gpu() -> Backend:
    """The backend of the GPU kernels, imported only if it is asked, so that other calls do not import its kernels."""
    from flexjax.backends.mosaic_gpu.support import BACKEND

    return BACKEND


def _mosaic_tpu() -> Backend:
    """The backend of the TPU kernels, imported only if it is asked, so that other calls do not import its kernels."""
    from flexjax.backends.mosaic_tpu.support import MosaicTpuBackend

    return MosaicTpuBackend()


def _xla() -> Backend:
    """The backend in plain JAX."""
    from flexjax.backends.xla.support import XlaBackend

    return XlaBackend()


TABLE: dict[str, Callable[[], Backend]] = {"mosaic_gpu": _mosaic_gpu, "mosaic_tpu": _mosaic_tpu, "xla": _xla}
"""By name, functions that import a backend, in the order in which the default dispatch asks the backends."""

REFERENCE = DenseBackend.name
"""The dense implementation. If a call names it first, attention.py runs it on the mods as the user wrote them."""

NAMES = (*TABLE, REFERENCE)
KERNELS = {"cuda": "mosaic_gpu", "rocm": "mosaic_gpu", "tpu": "mosaic_tpu"}
"""By platform, the backend whose kernels a user expects there; a fall back to another gives a warning."""

PLATFORMS = {"mosaic_gpu": ("cuda", "an NVIDIA GPU"), "mosaic_tpu": ("tpu", "a TPU")}
"""By backend, the platform of its kernels: a call for another platform does not import them."""

if any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu")):
    # This module of Pallas adds a setting to the cache key of jax's traces. If the kernels imported it during the first
    # trace of a function, the key would change and the function would be traced and compiled twice.
    with contextlib.suppress(ImportError):
        from jax.experimental.pallas import fuser as fuser


@functools.cache
def backend(name: str) -> Backend:
    """The backend with a name of NAMES, imported when it is first asked for."""
    return DenseBackend() if name == REFERENCE else TABLE[name]()


# ------------------------------------------------------------------- before the target is known


def candidates(implementation: object) -> tuple[str, ...] | None:
    """The argument `implementation`, a name or a sequence, as the names to ask in order; None: the default.

    Names are those of NAMES: the backends and "reference". ValueError for any other value.
    """
    if implementation is None:
        return None
    names: tuple = (implementation,)
    if isinstance(implementation, Sequence) and not isinstance(implementation, str):
        names = tuple(implementation)
    if not names or any(n not in NAMES for n in names):
        raise bad_argument(
            "implementation",
            repr(implementation),
            "None, or one or several of " + ", ".join(map(repr, NAMES)),
            "None takes the first backend that accepts the call.",
        )
    return names


def runs_everywhere(plan: KernelPlan, implementation: tuple[str, ...] | None) -> str | None:
    """The backend that runs the plan on every target ("xla" or "reference"); None if that depends on it.

    implementation   names of backends to ask, in order; None: the default order

    In the default order the result is None if xla accepts the plan. Otherwise the first backend in order that does not
    refuse the plan on every target decides: None if it has kernels for a GPU or TPU, else its name. Raises
    NotImplementedError with each refusal if no backend accepts the plan on any target.
    """
    if implementation is None and refuses(backend("xla"), float8.in_16_bits(plan), None) is None:
        return None
    refusals: list[tuple[str, str]] = []
    for name in implementation or tuple(TABLE):
        why = refuses(backend(name), plan, None)
        if why is not None and plan.float8:
            why = refuses(backend(name), float8.in_16_bits(plan), None)
        if why is None:
            return None if name in PLATFORMS else name
        refusals.append((name, why + _no_device(name, plan)))
    raise _none_accepts(refusals)


def _no_device(name: str, plan: KernelPlan) -> str:
    """A sentence, with a space before it, for the kernels `name` where the default device is of another platform."""
    if plan.options.interpret:
        return ""
    here, (platform, hardware) = targets.default().platform, PLATFORMS.get(name, ("", ""))
    return f" {name} runs on {hardware}; the default device is a {here}." if platform not in ("", here) else ""


def _none_accepts(refusals: Sequence[tuple[str, str]]) -> NotImplementedError:
    """The error for a call that no backend accepts. refusals: for each backend (its name, the sentence of why)."""
    return NotImplementedError("No implementation accepts this call: " + " ".join(f"{n}: {why}" for n, why in refusals))


# ------------------------------------------------------------------- the choice


Array = jax.Array


class Run(typing.NamedTuple):
    """The choice for a pass, and how it runs: through `steps`, then those of the backend, to a kernel and back."""

    backend: Backend
    plan: KernelPlan  # that the backend is asked to run, after `steps`, with measured tiles in place of options of None
    target: Target  # the device that the pass is lowered for
    refusals: tuple[
        tuple[str, str], ...
    ] = ()  # of the backends that were asked before: (its name, a sentence that says why)
    steps: Steps = ()  # from the call to `plan`

    def every_step(self, backward: bool = False) -> Steps:
        """The steps from the call to a kernel of the pass (`backward` or forward)."""
        return (*self.steps, *self.backend.rewrites(self.plan, self.target, backward))

    def forward(self, operands: Operands) -> Results:
        """The results of the call from its operands."""
        steps, operands = self.every_step(), with_lists(self.plan, operands)
        plan = last_plan(self.plan, steps)
        return rewrite.forward(steps, operands, lambda last: self.backend.forward(plan, last, self.target))

    def backward(self, given: BackwardInputs) -> Gradients:
        """The wanted gradients of the call from what the call gives."""
        steps = self.every_step(backward=True)
        given = given._replace(operands=with_lists(self.plan, given.operands))
        plan = last_plan(self.plan, steps)
        return rewrite.backward(steps, given, lambda last: self.backend.backward(plan, last, self.target))

    def tangent(self, given: TangentInputs) -> tuple[Array, ...]:
        """The tangents of out, lse and perhaps expectations."""
        backend, given = self.backend, given._replace(operands=with_lists(self.plan, given.operands))
        assert isinstance(backend, ForwardMode)
        steps = (*self.steps, *backend.tangent_steps(self.plan, self.target))
        return backend.tangent(last_plan(self.plan, steps), rewrite.last_inputs(steps, given), self.target)


def with_lists(plan: KernelPlan, operands: Operands) -> Operands:
    """The operands with block lists in place of bits, which a program keeps between passes."""
    bits = typing.cast(object, operands.lists)
    if plan.blocks is None or not isinstance(bits, kernel_plan.BlockBits):
        return operands
    columns = cdiv(plan.kv_len, plan.blocks.block_kv)
    lists = (x for one in bits for x in transpose.lists_of_bits(one, columns))
    return operands._replace(lists=kernel_plan.BlockLists(*lists))


def choose(plan: KernelPlan, implementation: tuple[str, ...] | None, target: Target) -> Run:
    """The choice for the forward pass: the first backend in order that accepts the plan on the target.

    implementation   names of backends to ask, in order; None: the default order

    Raises NotImplementedError with each refusal if no backend accepts.
    """
    return _by_residues(_whole(plan, implementation, target))


def _whole(plan: KernelPlan, implementation: tuple[str, ...] | None, target: Target) -> Run:
    """What `choose` chooses, not split by residues."""
    refusals: list[tuple[str, str]] = []
    for name in implementation or tuple(TABLE):
        why, steps = _refusal(name, plan, target, named=implementation is not None), ()
        if why is not None and plan.float8:
            steps = (float8.rewrite(plan, why),)
            why = _refusal(name, last_plan(plan, steps), target, named=implementation is not None)
        if why is None:
            made = with_measured_tiles(last_plan(plan, steps), name, target)
            return Run(backend(name), made, target, tuple(refusals), steps)
        refusals.append((name, why))
    raise _none_accepts(refusals)


def _by_residues(run: Run) -> Run:
    """The run split by residues, if its plan says how and the backend accepts the split plan; else the run itself."""
    fixed = run.backend.name == REFERENCE or run.plan.options.invariant
    step = None if fixed else residues.rewrite(run.plan)
    if step is None or run.backend.refuses(step.plan, run.target) is not None:
        return run
    return run._replace(plan=step.plan, steps=(*run.steps, step))


def choose_backward(
    plan: KernelPlan, implementation: tuple[str, ...] | None, target: Target, wanted: Wanted, derivative: Program | None
) -> Run:
    """The choice for the backward pass: the backend of the forward pass, or xla if it refuses these gradients.

    implementation   names of backends to ask, in order; None: the default order. xla is taken although it may not be
                     among them
    wanted           which operands get a gradient
    derivative       the derivative program of score_mod, None without score_mod

    Raises NotImplementedError if no backend accepts the forward pass.
    """
    run = _whole(plan, implementation, target)
    split = _by_residues(run)
    if split is not run:
        of_split = residues.split_derivative(run.plan, derivative)
        if run.backend.refuses_backward(split.plan, target, wanted, of_split) is None:
            return split
    why = run.backend.refuses_backward(run.plan, target, wanted, derivative)
    if why is None:
        return run
    refusals = (*run.refusals, (run.backend.name, why))
    return _by_residues(Run(backend("xla"), with_measured_tiles(plan, "xla", target), target, refusals))


def choose_tangent(
    plan: KernelPlan, implementation: tuple[str, ...] | None, target: Target, moving: Wanted, derivative: Program | None
) -> Run:
    """The choice for forward mode, as `choose_backward`; `moving` says which operands have a tangent."""
    run = _whole(plan, implementation, target)
    why = run.backend.refuses_tangent(run.plan, target, moving, derivative)
    return run if why is None else on_xla(plan, target, (*run.refusals, (run.backend.name, why)))


def on_xla(plan: KernelPlan, target: Target, refusals: tuple[tuple[str, str], ...] = ()) -> Run:
    """The choice of xla for a pass that the backends refuse: for each (its name, the sentence that says why)."""
    return Run(backend("xla"), with_measured_tiles(plan, "xla", target), target, refusals)


def _refusal(name: str, plan: KernelPlan, target: Target, named: bool) -> str | None:
    """Why the backend `name`, which the call may have named, cannot run the plan on the target; None if it can."""
    if name in PLATFORMS:
        platform, hardware = PLATFORMS[name]
        if plan.options.interpret and not named:
            return f"{name} is simulated only where implementation names it."
        if target.platform != platform and not plan.options.interpret:
            advice = " Pass kernel_options=KernelOptions(interpret=True) to simulate it." if named else ""
            return f"{name} runs on {hardware}; this call is for the platform {target.platform}.{advice}"
        if target.platform == platform and target.kind is None and not named:  # kernels may not run on that kind
            return (
                f"The program is lowered for the platform {platform} without a device, so its kind is unknown. Lower "
                f"it with arguments or a mesh on such a device or on its topology, or pass implementation={name!r}."
            )
    return refuses(backend(name), plan, target)


def refuses(backend: Backend, plan: KernelPlan, target: Target | None) -> str | None:
    why = invariant.refuses_backend(backend.name, plan, None if target is None else target.platform)
    return why or backend.refuses_request(plan) or backend.refuses(plan, target)


def with_measured_tiles(plan: KernelPlan, name: str, target: Target) -> KernelPlan:
    """The plan with the tiles that were measured for it on devices of the target's kind (plan/tuned.py).

    name   of the backend that runs the plan

    Measured tiles only fill options that are None. The plan itself is returned if none were measured, if the tiles are
    fixed because the call is invariant, and, with a warning, if the backend refuses the plan with them.
    """
    if plan.options.invariant:
        return plan
    found = tuned.find(plan, name, target.kind)
    return _filled(plan, name, target, tuple(found.tiles.items())) if found.tiles else plan


@functools.lru_cache(maxsize=4096)
def _filled(plan: KernelPlan, name: str, target: Target, tiles: tuple[tuple[str, int], ...]) -> KernelPlan:
    """The plan with `tiles` among its options; the plan itself, with a warning, if the backend refuses it with them.
    The result is cached, so that the same arguments warn once.

    name     of the backend
    target   the device that is asked about
    tiles    pairs (KernelOptions field, value), of fields that are None in the plan
    """
    filled = dataclasses.replace(plan, options=dataclasses.replace(plan.options, **dict(tiles)))
    why = backend(name).refuses(filled, target)
    if why is None:
        return filled
    text = ", ".join(f"{n}={v}" for n, v in tiles)
    warnings.warn(
        f"Measured tiles ({text}) are not used. {why} Run flexjax.autotune again.", stacklevel=stacklevel_of_user()
    )
    return plan


# ------------------------------------------------------------------- the warning about leaving the kernels

FORWARD, BACKWARD, TANGENT, SECOND = "forward pass", "backward pass", "tangent (forward mode)", "second derivative"
"""Names of passes in warnings."""

_warned: set[tuple[str, KernelPlan, Target]] = set()
"""The (pass, plan, target) that this process has warned of."""


def warn_of_fallback(problem: Problem, which: str, run: Run) -> None:
    """Warns if a pass on a GPU or TPU runs outside of its kernels on a backend that `implementation` does not name.

    It warns once for each pass, plan and target; a warning that is turned into an error is raised each time.

    problem   of the call: its plan, its `implementation` and its text, which ends the message
    which     the name of the pass: FORWARD, BACKWARD, TANGENT or SECOND, or BACKWARD with words that say more
    run       the choice that was made for it
    """
    kernels = KERNELS.get(run.target.platform)
    if kernels in (None, run.backend.name) or run.backend.name in (problem.implementation or ()):
        return
    key = (which, problem.plan, run.target)
    if key in _warned:
        return
    refusals = dict(run.refusals)
    why = refusals.get(kernels) or next(iter(refusals.values()), "")
    name = run.backend.name
    asked = name if which == FORWARD else (kernels, name)
    warnings.warn(
        f"The {which} of a call runs on {name}, not on the kernels of {kernels}, for {run.target.name}. {why} "
        f"To get the kernels, change what is refused; to run on {name} without this warning, "
        f"pass implementation={asked!r}. {problem.call}",
        FallbackWarning,
        stacklevel=stacklevel_of_user(),
    )
    _warned.add(key)  # after the warning, so that a warning that is turned into an error is raised at the next call too
