"""Times flexjax beside FlashAttention-3 at the clocks of a GPU that has worked for a while: `PYTHONPATH=. python3 tools/device/time_sustained.py`.

Not collected by pytest. A large matrix product or attention call takes a GPU to its power limit within a second, and its clocks then fall by a
sixth. How fast a program is from then on follows from the energy that it takes; kernels timed one at a time (time_beside_fa3.py) are somewhere
between. A line for each workload, pass and program: milliseconds of a call by the wall clock, FlashAttention-3's time over it, millijoules of
a call (NVML), and the median clock in MHz. Each program runs alone, without a pause, twice; its line has the mean. Backward is both passes
less forward.

    --only NAMES     workloads of the gpu suite, by semicolons
    --each SECONDS   how long a program is measured each time (0.8), after half as long without
    --seconds N      begin no other workload after so long (150)
"""

import argparse
import ctypes
import statistics
import sys
import time
import typing
from concurrent.futures import ThreadPoolExecutor

from tools.device.time_beside_fa3 import Program, programs_of

WORKLOADS = (
    "full d128;causal d128;causal grouped d128;12 documents d128;window 1025 d128;causal d128, 1 x 32768;causal d128, 8 x 2048;"
    "causal d64;full d64;causal d256"
)
AT_ONCE = 10
"""Calls that are queued before the host waits for them."""


class Meter:
    """NVML's readings of the first GPU."""

    def __init__(self) -> None:
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.gpu = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.gpu))

    def _call(self, name: str, *arguments: typing.Any) -> None:
        """Calls a function of NVML; raises RuntimeError where it fails."""
        status = getattr(self.nvml, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")

    def joules(self) -> float:
        """Energy that the GPU has taken since its driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self.gpu, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def megahertz(self) -> int:
        """The clock of the SMs at present."""
        clock = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self.gpu, 1, ctypes.byref(clock))
        return clock.value


class Reading(typing.NamedTuple):
    """Seconds and joules of a call, and the median clock in MHz."""

    seconds: float
    joules: float
    megahertz: float


def sustained(call: typing.Callable[[], typing.Any], seconds: float, meter: Meter) -> Reading:
    """Runs `call` for half of `seconds` unmeasured, then for `seconds`."""
    import jax

    for length in (seconds / 2, seconds):
        calls, clocks, before, began = 0, [], meter.joules(), time.perf_counter()
        while time.perf_counter() - began < length:
            out = [call() for _ in range(AT_ONCE)]
            clocks.append(meter.megahertz())
            jax.block_until_ready(out[-1])
            del out
            calls += AT_ONCE
    return Reading((time.perf_counter() - began) / calls, (meter.joules() - before) / calls, statistics.median(clocks))


def report(problem: typing.Any, programs: list[Program], seconds: float, meter: Meter) -> None:
    """Measures the programs of a workload, one after the other and then backwards, and prints their lines."""
    from flexjax.bench import gpu_peers

    arrays, _ = gpu_peers.on_device(problem)
    found: dict[tuple[bool, str], list[Reading]] = {}
    for program in [*programs, *programs[::-1]]:
        run, given = program.run.result(), [arrays[name] for name in ("q", "k", "v", *["d_out"] * program.both)]
        reading = sustained(lambda run=run, given=given: run(*given), seconds, meter)
        found.setdefault((program.both, program.name), []).append(reading)
    mean = {at: Reading(*map(statistics.mean, zip(*readings, strict=True))) for at, readings in found.items()}

    def backward(name: str) -> Reading:
        """Both passes less forward; the clock is that of both."""
        both, forward = mean[True, name], mean[False, "fixed" if name == "any" else name]
        return Reading(both.seconds - forward.seconds, both.joules - forward.joules, both.megahertz)

    passes = {("forward", name): reading for (both, name), reading in mean.items() if not both}
    passes |= {("backward", name): backward(name) for both, name in mean if both}
    for (which, name), reading in passes.items():
        peer = passes.get((which, "FA3"), reading)
        print(
            f"{problem.name:24} {which:8} {name:5} {1e3 * reading.seconds:7.3f} ms ({peer.seconds / reading.seconds:.3f})"
            f" {1e3 * reading.joules:6.0f} mJ ({reading.joules / peer.joules:.3f}) {reading.megahertz:.0f} MHz",
            flush=True,
        )


def main() -> int:
    """Lowers all programs, then measures workload by workload; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=WORKLOADS)
    parser.add_argument("--each", type=float, default=0.8)
    parser.add_argument("--seconds", type=float, default=150)
    arguments = parser.parse_args()
    from flexjax.bench.suites import SUITES

    began, pool, meter = time.monotonic(), ThreadPoolExecutor(14), Meter()
    problems = {problem.name: problem for problem in SUITES["gpu"]}
    lowered = [(problems[name], programs_of(problems[name], pool)) for name in arguments.only.split(";")]
    for _, programs in lowered:  # nothing else may run on the GPU beside what is measured, as XLA's autotuning does
        for program in programs:
            program.run.result()
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    for problem, programs in lowered:
        if time.monotonic() - began > arguments.seconds:
            print(f"{problem.name}: not begun within {arguments.seconds:g} seconds", flush=True)
            continue
        report(problem, programs, arguments.each, meter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
