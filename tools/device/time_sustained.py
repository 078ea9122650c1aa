"""Times flexjax beside FlashAttention-3 at the clocks of a GPU that has worked for a while: `PYTHONPATH=. python3 tools/device/time_sustained.py`.

Not collected by pytest. A large matrix product or attention call takes a GPU to its power limit within a second, and its clocks then fall by a
sixth. How fast a program is from then on follows from the energy that it takes; kernels timed one at a time (time_beside_fa3.py) are somewhere
between. A line for each workload, pass and program: milliseconds of a call by the wall clock, FlashAttention-3's time over it, millijoules of
a call (NVML, which counts every 20 to 100 ms, so to 3 to 14% of 0.7 s), and the median clock in MHz. Each program runs alone, without a pause, twice; its line has the mean. Backward is both passes
less forward.

With --programs no FlashAttention-3 is needed: each workload with a score_mod, or with documents by ids of the call, has a line with its time
over that of the same call without, for the forward and the backward pass in a fixed order. Where the mod's array is learned, the backward pass
has its gradient.

    --programs       all PROGRAMS of this file; --only and --seconds do not count
    --only NAMES     workloads of the gpu suite, by semicolons
    --each SECONDS   how long a program is measured each time (0.8), after half as long without
    --seconds N      begin no other workload after so long (150)
"""

import argparse
import ctypes
import functools
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
PROGRAMS = {
    "causal d128": ("ALiBi causal d128", "soft cap causal d128"),
    "plain causal d64": ("relative bias causal d64", "learned table causal d64"),
    "plain 4096 d64": ("learned pair bias d64",),
    "12 documents d128": ("by ids",),
}
"""Workload without a score_mod -> the workloads that are compared with it; "by ids": itself, with the documents as an argument."""
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
    from bench import gpu_peers

    arrays, _ = gpu_peers.on_device(problem)
    found: dict[tuple[bool, str], list[Reading]] = {}
    for program in [*programs, *programs[::-1]]:
        run, given = program.run.result(), [arrays[name] for name in ("q", "k", "v", *["d_out"] * program.both)]
        reading = sustained(functools.partial(run, *given), seconds, meter)
        found.setdefault((program.both, program.name), []).append(reading)
    mean = {at: Reading(*map(statistics.mean, zip(*readings, strict=True))) for at, readings in found.items()}

    def backward(name: str) -> Reading:
        """Both passes less forward; the clock is that of both."""
        both, forward = mean[True, name], mean[False, "fixed" if name == "any" else name]
        return Reading(both.seconds - forward.seconds, both.joules - forward.joules, both.megahertz)

    passes = {("forward", name): reading for (both, name), reading in mean.items() if not both}
    passes |= {("backward", name): backward(name) for both, name in mean if both}
    for (which, name), reading in passes.items():
        peer = passes.get((which, "FA3"))
        speed, energy = ("", "") if peer is None else (
            f" ({peer.seconds / reading.seconds:.3f})", f" ({reading.joules / peer.joules:.3f})"
        )  # fmt: skip
        print(
            f"{problem.name:24} {which:8} {name:5} {1e3 * reading.seconds:7.3f} ms{speed}"
            f" {1e3 * reading.joules:6.0f} mJ{energy} {reading.megahertz:.0f} MHz",
            flush=True,
        )


class Pair(typing.NamedTuple):
    """Futures of the compiled forward pass and both passes of a workload, and the arrays of its mod or mask that they take after q, k, v and
    d_out.
    """

    forward: typing.Any
    both: typing.Any
    more: tuple[typing.Any, ...]


def with_program(problem: typing.Any, by_ids: bool, pool: ThreadPoolExecutor) -> Pair:
    """The programs of a workload; they are lowered here and compile in the pool, so that both are futures.

    by_ids   its documents are an argument of the program, and the lists of blocks are derived in it
    """
    import jax
    import jax.numpy as jnp

    import flexjax
    from bench import gpu_peers
    from bench.suites import document_ids

    arrays, array = gpu_peers.on_device(problem)
    attend = gpu_peers.flexjax(problem)
    more = () if array is None else (array,)
    if by_ids:
        more = (jnp.asarray(document_ids(problem.length, problem.parameter, problem.seed)),)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
            """Causal attention in documents."""
            mask_mod = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
            return flexjax.flex_attention(q, k, v, mask_mod=mask_mod)

    out = lambda q, k, v, *more: attend(q, k, v, *(more or (None,)))

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, *more: jax.Array) -> typing.Any:
        """Output and gradients of q, k, v, and of the array where the workload learns it."""
        if problem.learns:
            value, pull = jax.vjp(out, q, k, v, *more)
        else:
            value, pull = jax.vjp(lambda q, k, v: out(q, k, v, *more), q, k, v)
        return value, pull(d_out)

    q, k, v, d_out = (arrays[name] for name in ("q", "k", "v", "d_out"))
    lowered = jax.jit(out).lower(q, k, v, *more), jax.jit(both).lower(q, k, v, d_out, *more)
    return Pair(*(pool.submit(program.compile) for program in lowered), more)


def report_programs(seconds: float, meter: Meter) -> None:
    """Measures PROGRAMS and prints a line for each."""
    from bench import gpu_peers
    from bench.suites import SUITES

    pool, named = ThreadPoolExecutor(14), {problem.name: problem for problem in SUITES["gpu"]}
    made = {
        name: with_program(named[plain if name == "by ids" else name], name == "by ids", pool)
        for plain, names in PROGRAMS.items()
        for name in (plain, *names)
    }
    for pair in made.values():
        _ = pair.forward.result(), pair.both.result()
    for plain, names in PROGRAMS.items():
        arrays, _ = gpu_peers.on_device(named[plain])
        q, k, v, d_out = (arrays[name] for name in ("q", "k", "v", "d_out"))
        found: dict[str, list[tuple[Reading, Reading]]] = {}
        for name in (plain, *names, *names[::-1], plain):
            forward, both, more = made[name]
            calls = (
                functools.partial(forward.result(), q, k, v, *more),
                functools.partial(both.result(), q, k, v, d_out, *more),
            )
            found.setdefault(name, []).append(
                (sustained(calls[0], seconds, meter), sustained(calls[1], seconds, meter))
            )
        for name, readings in found.items():
            forward, both = (statistics.mean(r[n].seconds for r in readings) for n in (0, 1))
            base = tuple(statistics.mean(r[n].seconds for r in found[plain]) for n in (0, 1))
            backward = both - forward
            print(
                f"{name:26} forward {1e3 * forward:7.3f} ms ({forward / base[0]:.3f}), backward {1e3 * backward:7.3f} ms"
                f" ({backward / (base[1] - base[0]):.3f})  {readings[0][0].megahertz:.0f}, {readings[0][1].megahertz:.0f} MHz",
                flush=True,
            )


def main() -> int:
    """Lowers all programs, then measures workload by workload; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=WORKLOADS)
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--each", type=float, default=0.8)
    parser.add_argument("--seconds", type=float, default=150)
    arguments = parser.parse_args()
    from bench.suites import SUITES

    if arguments.programs:
        report_programs(arguments.each, Meter())
        return 0
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
