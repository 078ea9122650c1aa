"""Times flexjax beside FlashAttention-3 on a Hopper GPU, in turns: `PYTHONPATH=. python3 tools/device/time_beside_fa3.py`.

Not collected by pytest. A line for each workload of the gpu suite that FlashAttention-3 has (package dew_flash_attn; without it ours alone
are timed): milliseconds of the kernels' own time (CUPTI) as the median of rounds in each of which every program is measured once, in an
order drawn anew, and FlashAttention-3's time over ours, for the forward pass, the backward pass in a fixed order and in any order. Programs
of one pass are measured after those of the other, because clocks are lower for a while after a backward pass. Backward is both passes less
forward. FlashAttention-3 adds in any order. Results are compared; the exit status is 1 where they differ. The programs of the next workloads
compile while those of one are lowered, and the last lines have the worst and the median ratio of each pass. About 100 s on 16 cores for
all workloads of the gpu suite.

    --suite NAME     of bench/suites.py: gpu, or gpu-sweep with its many lengths and head counts
    --only TEXT      workloads whose names contain one of these, by semicolons
    --rounds N       measurements of each program (7)
    --seconds N      begin no other line after so long (120)
"""

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import time
import typing
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

WORKLOADS = (  # of the gpu suite
    "causal d64;full d64;causal d128;full d128;causal grouped d128;12 documents d128;window 1025 d128;causal d256;"
    "causal d128, 8 x 2048;causal d128, 16 x 1024;causal d128, 32 x 512;causal d128, 64 x 256;causal d128, 1 x 32768"
)
MOST_APART = 1e-2
"""The most that two results may differ, in norm."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to time.

    name   "FA3", "fixed" or "any": FlashAttention-3, or ours by the order of the backward pass
    both   whether it computes out and gradients, else out alone
    run    the compiled program, once it is compiled
    """

    name: str
    both: bool
    run: Future[typing.Any]


def programs_of(problem: typing.Any, pool: ThreadPoolExecutor) -> list[Program]:
    """The programs of a workload; they are lowered here and compile in the pool."""
    import jax
    import jax.numpy as jnp

    from bench import gpu_peers
    from bench.suites import FA3

    shape = lambda n: jax.ShapeDtypeStruct((problem.batch, problem.length, n, problem.dim), jnp.dtype(problem.dtype))
    q, kv = shape(problem.heads), shape(problem.kv_heads)
    makers: dict[str, Callable[[], typing.Any]] = {
        "FA3": lambda: gpu_peers.PEERS[FA3](problem),
        "fixed": lambda: gpu_peers.flexjax(problem, True),
        "any": lambda: gpu_peers.flexjax(problem, False),
    }
    made: list[Program] = []
    for name, make in makers.items():
        try:
            attend = make()
        except ImportError as error:
            print(f"{FA3}: {error}", flush=True)
            continue
        out = lambda q, k, v, attend=attend: attend(q, k, v, None)
        both = lambda q, k, v, d_out, out=out: (out(q, k, v), jax.vjp(out, q, k, v)[1](d_out))
        if name != "any":  # the forward kernel is that of the fixed order
            made.append(Program(name, False, pool.submit(jax.jit(out).lower(q, kv, kv).compile)))
        made.append(Program(name, True, pool.submit(jax.jit(both).lower(q, kv, kv, q).compile)))
    return made


def line_of(problem: typing.Any, programs: list[Program], rounds: int) -> tuple[str, bool, dict[str, float]]:
    """(the line of a workload, whether all results agree, FlashAttention-3's time over ours by pass and order), once its programs are
    compiled.
    """
    import jax
    import jax.numpy as jnp

    from bench import gpu_peers

    arrays, _ = gpu_peers.on_device(problem)
    q, k, v, d_out = (arrays[name] for name in ("q", "k", "v", "d_out"))
    given = lambda program: (q, k, v, d_out) if program.both else (q, k, v)
    times: dict[tuple[str, bool], list[float]] = {}
    for both, turn in itertools.product((False, True), range(rounds)):
        alike = [program for program in programs if program.both == both]
        for program in random.Random(turn).sample(alike, len(alike)):
            took = gpu_peers.device_time(program.run.result(), *given(program), calls=5)[0]
            times.setdefault((program.name, program.both), []).append(1e3 * took)
    taken = {at: statistics.median(found) for at, found in times.items()}
    results = {p.name: jax.tree.leaves(p.run.result()(*given(p))) for p in programs if p.both}
    apart = lambda a, b: float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
    worst = max(
        apart(a, b.astype(jnp.float32)) for found in results.values() for a, b in zip(found, results["fixed"], strict=True)
    )  # fmt: skip
    first = lambda name: taken[("fixed" if name == "any" else name, False)]
    passes = {("forward", name): taken[name, False] for name, both in taken if not both}
    passes |= {("backward", name): taken[name, True] - first(name) for name, both in taken if both}
    parts, ratios = [], {}
    for (which, name), milliseconds in passes.items():
        peer, ratio = passes.get((which, "FA3")), ""
        if peer and name != "FA3":
            ratios[f"{which} {name}"] = peer / milliseconds
            ratio = f" ({peer / milliseconds:.2f})"
        parts.append(f"{which} {name} {milliseconds:.3f}{ratio}")
    differs = "" if worst < MOST_APART else f"; DIFFER by {worst:.0e}"
    return f"{problem.name:24} " + "; ".join(parts) + differs, worst < MOST_APART, ratios


def main() -> int:
    """Lowers all programs, then measures line by line; returns the exit status, 1 where results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="gpu", choices=("gpu", "gpu-sweep"))
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    from bench import report
    from bench.suites import SUITES

    began, pool = time.monotonic(), ThreadPoolExecutor(14)
    named = {p.name: p for p in SUITES[args.suite]}
    names = WORKLOADS.split(";") if args.suite == "gpu" else list(named)
    asked = [named[n] for n in names if n in named and any(t in n for t in args.only.split(";"))]
    lowered = [(problem, programs_of(problem, pool)) for problem in asked]
    print(f"lowered after {time.monotonic() - began:.0f} s", flush=True)
    wrong = 0
    all_ratios: dict[str, dict[str, float]] = {}
    for problem, programs in lowered:
        if time.monotonic() - began > args.seconds:
            print(f"{problem.name}: not begun within {args.seconds:g} seconds", flush=True)
            continue
        line, right, ratios = line_of(problem, programs, args.rounds)
        wrong += not right
        for which, ratio in ratios.items():
            all_ratios.setdefault(which, {})[problem.name] = ratio
        print(line, flush=True)
    for which, found in all_ratios.items():
        print(f"FlashAttention-3 / ours, {which}: {report.worst_and_median(found)}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
