"""Times the untimed choices of the Hopper kernels beside the default and FlashAttention-3, in turns:

    PYTHONPATH=. python3 tools/device/time_untimed.py [--only TEXT] [--rounds N] [--seconds N]

Not collected by pytest. flexjax/backends/mosaic_gpu/untimed.py has the choices. A line for each workload and pass: milliseconds of the
kernels' own time (CUPTI) of each program, as the median of rounds in which every program is measured once, and the time of
FlashAttention-3 over it; backward is both passes less forward of the default. Results are compared with the default's. FlashAttention-3
is left out where `dew_flash_attn` cannot be imported.

    --only TEXT   workloads whose line contains it
    --rounds N    measurements of each program, 5 by default
    --seconds N   begin no other line after so long, 85 by default
"""

import argparse
import dataclasses
import statistics
import sys
import time
import typing
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Choices = dict[str, bool]


@dataclasses.dataclass(frozen=True)
class Case:
    """A line.

    workload        name in the gpu suite
    backward        whether the backward pass is timed, else forward alone
    deterministic   whether dQ is added in a fixed order
    variants        choices that are timed beside the default
    """

    workload: str
    backward: bool
    deterministic: bool
    variants: tuple[Choices, ...]

    @property
    def name(self) -> str:
        """How the table calls it."""
        order = ", fixed order" if self.deterministic else ", any order"
        return f"{self.workload} {'backward' + order if self.backward else 'forward'}"


FIRST = {"backward_dq_first": True}
STORES = dict.fromkeys(("backward_minus_delta", "backward_ds_operand", "backward_fence"), True)
FRAGMENTS, BETWEEN, STARTS = (
    {"backward_dq_fragments": True},
    {"backward_dq_between": True},
    {"backward_both_starts": True},
)
BESIDE = {"backward_dq_beside": True, "backward_early_zeros": True}
LATE = (STORES, STORES | BESIDE, STORES | BESIDE | FRAGMENTS, STORES | FRAGMENTS | BETWEEN)
CASES = (
    Case("causal d64", True, True, LATE),
    Case(
        "full d64", True, True, (STARTS, STORES | STARTS, STORES | STARTS | FIRST, STORES | STARTS | FIRST | FRAGMENTS)
    ),
    Case("causal d64", True, False, LATE[2:]),
    Case("causal d128", True, False, ()),
    Case("causal d64", False, True, ()),
    Case("12 documents d128", False, True, ()),
    Case("causal d128", False, True, ()),
)
"""The most wanted first."""


class Program(typing.NamedTuple):
    """A program to time.

    name         for the line
    run          the compiled program, once it is compiled
    both         whether it computes gradients
    """

    name: str
    run: Future[typing.Any]
    both: bool


def label(choices: Choices) -> str:
    """The choices as text; "default" for none."""
    return "+".join(name.removeprefix("forward_").removeprefix("backward_") for name in choices) or "default"


def programs_of(case: Case, pool: ThreadPoolExecutor, known: dict[tuple, Program]) -> list[Program]:
    """The programs of a line: FlashAttention-3 if it is there, the default and the variants; before them the forward passes that are
    subtracted. They are lowered here and compile in the pool.

    known   programs of the lines before, which are not lowered again
    """
    import jax
    import jax.numpy as jnp

    from flexjax.backends.mosaic_gpu import untimed
    from flexjax.bench import gpu_peers
    from flexjax.bench.suites import FA3, SUITES

    problem = next(p for p in SUITES["gpu"] if p.name == case.workload)
    shape = lambda n: jax.ShapeDtypeStruct((problem.batch, problem.length, n, problem.dim), jnp.dtype(problem.dtype))
    q, kv = shape(problem.heads), shape(problem.kv_heads)

    def program(name: str, make: Callable[[], Callable[..., jax.Array]], both: bool) -> Program:
        """One program, lowered, and compiled later."""
        key = (case.workload, name, both, case.deterministic or name == FA3 or not both)
        if key in known:
            return known[key]
        attend = make()
        alone = lambda q, k, v: attend(q, k, v, None)
        gradients = lambda q, k, v, d_out: jax.vjp(alone, q, k, v)[1](d_out)
        lowered = jax.jit(gradients).lower(q, kv, kv, q) if both else jax.jit(alone).lower(q, kv, kv)
        return known.setdefault(key, Program(name, pool.submit(lowered.compile), both))

    made: list[Program] = []
    for both in (False, True) if case.backward else (False,):
        try:
            made.append(program(FA3, lambda: gpu_peers.PEERS[FA3](problem), both))
        except ImportError as error:
            print(f"{FA3}: {error}", flush=True)
        for choices in ({}, *case.variants) if both or not case.backward else ({},):
            with untimed.using(**choices):
                made.append(program(label(choices), lambda: gpu_peers.flexjax(problem, case.deterministic), both))
    return made


def line_of(case: Case, programs: list[Program], rounds: int) -> str:
    """The line of a case, once its programs are compiled."""
    import jax
    import jax.numpy as jnp

    from flexjax.bench import gpu_peers
    from flexjax.bench.suites import FA3, SUITES

    problem = next(p for p in SUITES["gpu"] if p.name == case.workload)
    arrays, _ = gpu_peers.on_device(problem)
    q, k, v, d_out = (arrays[name] for name in ("q", "k", "v", "d_out"))
    given = lambda program: (q, k, v, d_out) if program.both else (q, k, v)
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(rounds):
        for program, found in zip(programs, times, strict=True):
            found.append(1e3 * gpu_peers.device_time(program.run.result(), *given(program), calls=5)[0])
    taken = [statistics.median(found) for found in times]
    timed = {p.name: t for p, t in zip(programs, taken, strict=True) if p.both == case.backward}
    forward = {p.name: t for p, t in zip(programs, taken, strict=True) if case.backward and not p.both}
    own = {name: t - forward.get(FA3 if name == FA3 else label({}), 0.0) for name, t in timed.items()}
    leaves = lambda name: [
        x.astype(jnp.float32)
        for p in programs
        if p.name == name and p.both == case.backward
        for x in jax.tree.leaves(p.run.result()(*given(p)))
    ]
    want, parts = leaves(label({})), []
    for name, milliseconds in own.items():
        gap = max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(leaves(name), want, strict=True))
        ratio = f" ({own[FA3] / milliseconds:.2f})" if FA3 in own and name != FA3 else ""
        parts.append(f"{name} {milliseconds:.3f}{ratio}{'' if gap < 1e-2 else f' DIFFERS {gap:.0e}'}")
    return f"{case.name:40} " + "; ".join(parts)


def main() -> int:
    """Lowers all programs, then measures line by line; returns the exit status, 1 where a result differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=85)
    given = parser.parse_args()
    began, pool = time.monotonic(), ThreadPoolExecutor(14)
    asked = [case for case in CASES if given.only in case.name]
    known: dict[tuple, Program] = {}
    lowered = [(case, programs_of(case, pool, known)) for case in asked]
    print(f"lowered after {time.monotonic() - began:.0f} s", flush=True)
    lines: list[str] = []
    for case, programs in lowered:
        if time.monotonic() - began > given.seconds:
            print(f"{case.name}: not begun within {given.seconds:g} seconds", flush=True)
            continue
        lines.append(line_of(case, programs, given.rounds))
        print(lines[-1], flush=True)
    return int(any("DIFFERS" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
