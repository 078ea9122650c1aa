"""Lowers random calls with their gradients for GPUs and TPUs on a machine without one: what a backend does not refuse must lower.

    JAX_PLATFORMS=cpu python -m tests.backends.lowering_fuzz [--seed TEXT] [--minutes M | --count N] [--only NUMBER] [TARGET ...]

The n-th call of a seed is drawn from "SEED n" (tests/cases/random_programs.py), for the targets in turn (TARGETS; all by default). Each call
that fails is printed as a program with its error, at the end the counts. Exits with 1 if a call failed.
"""

import argparse
import collections
import contextlib
import sys
import time
import traceback
import typing
import warnings

import jax

import flexjax
from flexjax.backends.target import DescribedDevice
from tests.cases.random_programs import RandomCall, draw


class Lowered(typing.NamedTuple):
    """A device to lower for: its description, None for one that is not known; the implementation; and options of kernels."""

    device: typing.Any
    implementation: str
    options: dict[str, typing.Any]

    @property
    def platform(self) -> str:
        return "tpu" if self.implementation == "mosaic_tpu" else "cuda"


def _gpu(kind: str | None, capability: str, cores: int, **options: typing.Any) -> Lowered:
    return Lowered(DescribedDevice(kind, cores, "gpu", capability) if kind else None, "mosaic_gpu", options)


def _tpu(kind: str) -> Lowered:
    return Lowered(jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu"), "mosaic_tpu", {})


TARGETS = {
    "hopper": _gpu(None, "9.0", 132),
    "tpu": Lowered(None, "mosaic_tpu", {}),
    "hopper-mma": _gpu("NVIDIA H200", "9.0", 132, instruction="mma"),
    "v5e": _tpu("TPU v5 lite"),
    "ampere": _gpu("NVIDIA A100-SXM4-80GB", "8.0", 108),
    "blackwell": _gpu("NVIDIA B200", "10.0", 148, instruction="tcgen05"),
    "hopper-any-order": _gpu("NVIDIA H200", "9.0", 132, deterministic=False),
    "v6e": _tpu("TPU v6 lite"),
    "ada": _gpu("NVIDIA L40S", "8.9", 142),
    "blackwell-mma": _gpu("NVIDIA B200", "10.0", 148),
    "blackwell-pairs": _gpu("NVIDIA B200", "10.0", 148, instruction="tcgen05", cta_pairs=True),
    "rtx": _gpu("NVIDIA GeForce RTX 5090", "12.0", 170),
}
"""GPU and TPU in turn; the kernels for Hopper and those on mma.sync and tcgen05."""
REFUSED = "No implementation accepts this call: "
KERNELS, BACKWARD_REFUSED, CALL_REFUSED = "kernels", "gradients refused", "call refused"


def lower(call: RandomCall, target: Lowered) -> tuple[str, str]:
    """What happened to a call and its gradients: one of KERNELS, BACKWARD_REFUSED and CALL_REFUSED, and the refusal. Raises what lowering
    raises but for a refusal of the backend.
    """
    options = {"implementation": target.implementation, "kernel_options": flexjax.KernelOptions(**target.options)}
    around = contextlib.nullcontext()
    if target.device is not None:
        around = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=target.device))
    with around, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            traced = jax.jit(call.gradient(**options)).trace(call.operands())
            traced.lower(lowering_platforms=(target.platform,))
        except NotImplementedError as error:
            if not str(error).startswith(REFUSED):
                raise
            return CALL_REFUSED, str(error).removeprefix(REFUSED).splitlines()[0]
    fallbacks = [str(w.message) for w in warned if issubclass(w.category, flexjax.FallbackWarning)]
    return (BACKWARD_REFUSED, fallbacks[0]) if fallbacks else (KERNELS, "")


def failure(seed: str, number: int, target: str) -> tuple[str, str]:
    """("", outcome) of a call, or (its program with the error, "failed")."""
    call = draw(f"{seed} {number}")
    try:
        outcome, why = lower(call, TARGETS[target])
    except Exception as error:
        frames = [line for line in traceback.format_exc().splitlines() if "/flexjax/" in line][-6:]
        told = f"{type(error).__name__}: {str(error)[:600]}"
        return f"---- seed {seed!r}, call {number}, for {target}\n{call}\n{told}\n" + "\n".join(frames), "failed"
    return "", outcome if not why else f"{outcome}: {why}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", default="", help="such as the hash of a commit")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--count", type=int, help="how many calls; by default as many as --minutes allow")
    parser.add_argument("--only", type=int, help="the number of one call, for all targets")
    parser.add_argument("--reasons", action="store_true", help="print the refusals")
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    asked = parser.parse_args()
    began, number, counts, reasons = time.monotonic(), 0, collections.Counter(), collections.Counter()
    while True:
        if asked.only is not None and number == len(asked.targets):
            break
        if asked.only is None and (
            number == asked.count if asked.count else time.monotonic() - began > 60 * asked.minutes
        ):
            break
        target = asked.targets[number % len(asked.targets)]
        said, outcome = failure(asked.seed, number if asked.only is None else asked.only, target)
        if said:
            print(said, flush=True)
        kind, _, why = outcome.partition(": ")
        counts[TARGETS[target].implementation, kind] += 1
        reasons[target, why] += bool(why)
        number += 1
        if number % 50 == 0:
            jax.clear_caches()
    if asked.reasons:
        for (target, why), n in reasons.most_common():
            print(f"{n:5d} {target}: {why[:300]}")
    told = ", ".join(f"{n} {name} {kind}" for (name, kind), n in sorted(counts.items()))
    print(f"{number} random calls lowered in {time.monotonic() - began:.0f} s, seed {asked.seed!r}: {told}")
    return int(any(kind == "failed" for _, kind in counts))


if __name__ == "__main__":
    sys.exit(main())
