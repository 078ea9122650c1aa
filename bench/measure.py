"""One measurement of the cpu suite: a workload, a peer (an implementation of PEERS) and a pass, in a process of its own.

Every call runs to its end before the next. The first call compiles and two more warm up; then calls are timed one by one until the budget
is spent, at least 5 and at most 200 of them. The result also has the peak memory of the process (of the device, if the device counts its
memory), and the error of the results at a sample of rows against float64 numpy.

A pass is "forward" or "forward+backward". A result is a dict: median, fastest and first_call in seconds, calls (how many were timed),
peak_bytes, and error, relative to the largest value.
"""

import dataclasses
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.inputs import sample_rows
from bench.peers import PEERS
from bench.suites import SUITES, Workload

TIMEOUT = 1800
"""Seconds that a child may take."""


def measure_apart(suite: str, problem: Workload, peer: str, which: str) -> dict[str, Any]:
    """Runs `measure` in a child process; returns its result, or {"failed": why}. A child that takes longer than TIMEOUT is ended.

    suite     name of the suite in which the child finds the workload
    problem   the workload, of which the child gets the name and `seconds`
    peer      name of the implementation
    which     the pass
    """
    task = dict(suite=suite, problem=problem.name, peer=peer, which=which, seconds=problem.seconds)
    command = [sys.executable, "-m", "bench.measure", json.dumps(task)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return dict(failed=f"not done after {TIMEOUT} s")
    if child.returncode == 0:
        return json.loads(child.stdout.splitlines()[-1])
    if child.returncode < 0:
        return dict(failed=f"ended by signal {-child.returncode}, as when memory runs out")
    return dict(failed=(child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1])


def measure(problem: Workload, peer: str, which: str) -> dict[str, Any]:
    """Measures one pass of one peer on a workload, in this process; returns the result (see the top of the file).

    The calls are timed for `problem.seconds`. `error` is that of out, and in the pass "forward+backward" of dq too.
    """
    attend = PEERS[peer](problem)
    arrays = {name: jnp.asarray(x, problem.dtype) for name, x in problem.arrays().items()}

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> tuple[jax.Array, ...]:
        """(out,), by the forward pass; d_out is not used."""
        return (attend(q, k, v),)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> tuple[jax.Array, ...]:
        """(out, dq, dk, dv), by the forward and the backward pass."""
        out, pull = jax.vjp(attend, q, k, v)
        return (out, *pull(d_out))

    step = jax.jit(forward if which == "forward" else both)
    call = lambda: jax.block_until_ready(step(**arrays))
    start = time.perf_counter()
    results = call()
    compiled = time.perf_counter() - start
    rows = sample_rows(problem.length)
    sample = [np.asarray(x[:, rows].astype(jnp.float32), np.float64) for x in results[:2]]
    del results  # so that the peak is that of one call
    times = _timed(call, problem.seconds)
    return dict(
        median=float(np.median(times)),
        fastest=min(times),
        calls=len(times),
        first_call=compiled,
        peak_bytes=_peak_bytes(),
        error=_error(problem, sample),
    )


def _timed(call: Callable[[], object], seconds: float) -> list[float]:
    """Times single calls until `seconds` have passed, 5 to 200 of them, after two calls that are not timed; returns the seconds of each.

    call   makes one call and waits for its results
    """
    for _ in range(2):
        call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < until and len(times) < 200):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _peak_bytes() -> int:
    """The peak memory in bytes so far: of the device if it counts it, else the resident memory of this process, with interpreter and
    compiler.
    """
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _error(problem: Workload, sample: list[np.ndarray]) -> float:
    """The largest error of out and of the gradient of q at the sample rows, each over the largest magnitude of its float64 reference at
    these rows; inf for NaN or infinity.

    problem   the workload, from which numpy computes the reference
    sample    out and, if the pass has it, the gradient of q, float64 [B, sample rows, N, D]
    """
    worst = 0.0
    for got, want in zip(sample, rows_by_numpy(problem, sample_rows(problem.length)), strict=False):
        if not np.isfinite(got).all():
            return math.inf
        worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
    return worst


def rows_by_numpy(problem: Workload, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes out and the gradient of q of a workload by dense attention in numpy, at some queries: float64 [B, rows,
    N, D] each.

    rows   int [n]: the positions of these queries, each of which must see a key

    The workload's mask is applied; a score mod is not. The arrays are rounded to the dtype of the workload first.
    """
    stored = {name: jnp.asarray(x, problem.dtype).astype(jnp.float32) for name, x in problem.arrays().items()}
    q, k, v, d_out = (np.asarray(stored[name], np.float64) for name in ("q", "k", "v", "d_out"))
    q, d_out = q[:, rows], d_out[:, rows]
    k, v = (np.repeat(x, problem.heads // problem.kv_heads, axis=2) for x in (k, v))
    mask = problem.allowed()(rows[:, None], np.arange(problem.length)[None, :])
    scale = 1 / math.sqrt(problem.dim)
    scores = np.where(mask, np.einsum("bqhd,bkhd->bhqk", q, k, optimize=True) * scale, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs = weights / weights.sum(axis=-1, keepdims=True)
    out = np.einsum("bhqk,bkhd->bqhd", probs, v, optimize=True)
    d_probs = np.einsum("bqhd,bkhd->bhqk", d_out, v, optimize=True)
    delta = np.einsum("bqhd,bqhd->bhq", out, d_out)[..., None]
    d_q = np.einsum("bhqk,bkhd->bqhd", probs * (d_probs - delta) * scale, k, optimize=True)
    return out, d_q


def machine() -> dict[str, str]:
    """What the line below the table says, text by name: "device" (the kind of a GPU or TPU, else the model of the CPU), "cores" (those
    that this process may use), and the versions "python", "jax" and "numpy".
    """
    device = jax.devices()[0]
    return dict(
        device=device.device_kind if device.platform != "cpu" else cpu_name(),
        cores=str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        python=platform.python_version(),
        jax=jax.__version__,
        numpy=np.__version__,
    )


def cpu_name() -> str:
    """The model name of the CPU, from /proc/cpuinfo; where there is none, what Python's `platform` says."""
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def main(argument: str) -> None:
    """Runs the measurement that a JSON object describes and prints the result as a line of JSON.

    argument   JSON, from measure_apart: suite, problem (a name in the suite), peer, which (the pass), and seconds (time budget)
    """
    task = json.loads(argument)
    problem = next(p for p in SUITES[task["suite"]] if p.name == task["problem"])
    problem = dataclasses.replace(problem, seconds=task["seconds"])
    print(json.dumps(measure(problem, task["peer"], task["which"])))


if __name__ == "__main__":
    main(sys.argv[1])
