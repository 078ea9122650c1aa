"""The gpu suite: one process for each peer, which measures all workloads and prints a line of JSON for each.

A line has: the median device time (kernel times by CUPTI if jax has it, else launches back to back) of the forward pass and of the
backward pass, which is the time of both less that of the forward pass; the seconds from tracing to the first result of both
passes; and the largest error of out and all gradients at the sample rows, against dense float32 attention that the process
`reference` computes in chunks of queries.

With `together` the processes run at the same time, so that one compiles while another is timed, under a lock. Without it they run
one after another. A process that dies is started again with the workload after the one it died of.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flexjax.bench.inputs import REFERENCE
from flexjax.bench.suites import SUITES, Workload

Row = dict[str, Any]


def measure_all(
    suite: str, problems: list[Workload], peers: list[str], together: bool, until: float, say: Callable[[str], None]
) -> tuple[list[Row], Row]:
    """The rows of the report, and the versions by package; measurements that have not begun at `until` (time.time()) are left out.

    say   called with a line about what runs now
    """
    with tempfile.TemporaryDirectory() as folder:
        everyone = [REFERENCE, *peers]
        groups = [everyone] if together else [[peer] for peer in everyone]
        found: dict[str, dict[str, Row]] = {}
        for group in groups:
            children = {
                peer: Child(suite, peer, [p for p in problems if not _skipped(p, peer)], folder) for peer in group
            }
            while any(child.going for child in children.values()):
                time.sleep(0.2)
                for child in children.values():
                    child.look(until)
                say(", ".join(f"{peer}: {child.now}" for peer, child in children.items() if child.going))
            found |= {peer: child.results for peer, child in children.items()}
        facts: Row = {}
        for results in found.values():
            facts |= results.pop("facts", {})
        rows = []
        for problem in problems:
            results = {peer: _result(problem, peer, found[peer], folder) for peer in peers}
            for which in problem.passes:
                rows.append(dict(problem=problem.name, which=which, flops=problem.flops(which), peers={}))
                for peer, result in results.items():
                    mine = {k: v for k, v in result.items() if k not in ("forward", "backward")}
                    if "failed" not in result and "skipped" not in result:
                        mine["median"] = result[which]
                    rows[-1]["peers"][peer] = mine
        return rows, facts


def _skipped(problem: Workload, peer: str) -> str | None:
    """Why a peer is not timed on this workload; None if it is."""
    if peer == "jax.nn" and (problem.mod or problem.mask not in ("full", "causal", "window")):
        return "has no argument for this mask or mod; a dense mask costs it 8 to 14 times as much"
    if peer == "tokamax" and (problem.mod not in (None, "softcap") or problem.mask not in ("full", "causal", "window")):
        return "has no argument for this mask or mod"
    return dict(problem.skip).get(peer)


def _result(problem: Workload, peer: str, found: dict[str, Row], folder: str) -> Row:
    reason = _skipped(problem, peer)
    if reason:
        return dict(skipped=reason)
    result = found.get(problem.name, dict(failed="not reached in the time given"))
    paths = [_samples(folder, p, problem) for p in (REFERENCE, peer)]
    if "failed" in result or not all(map(os.path.exists, paths)):
        return result
    with np.load(paths[0]) as want, np.load(paths[1]) as got:
        errors = {name: _error(got[name], want[name]) for name in want.files if name in got.files}
    return result | dict(errors=errors, error=max(errors.values()))


def _error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over largest value."""
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / np.abs(want).max())


def _samples(folder: str, peer: str, problem: Workload) -> str:
    return os.path.join(folder, f"{peer} {problem.name}.npz".replace(" ", "_"))


class Child:
    """The process of one peer, and the results that it has printed."""

    def __init__(self, suite: str, peer: str, problems: list[Workload], folder: str):
        self.suite, self.peer, self.folder = suite, peer, folder
        self.left = [p.name for p in problems]
        self.results: dict[str, Row] = {}
        self.starts = 0
        self.going = bool(self.left)
        if self.going:
            self._start()

    @property
    def now(self) -> str:
        return self.left[0] if self.left else "done"

    def _start(self) -> None:
        self.starts += 1
        self.path = os.path.join(self.folder, f"{self.peer.replace(' ', '_')}-{self.starts}")
        task = dict(suite=self.suite, peer=self.peer, problems=self.left, folder=self.folder)
        environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", TF_CPP_MIN_LOG_LEVEL="3")
        command = [sys.executable, "-m", "flexjax.bench.device", json.dumps(task)]
        with open(self.path, "w") as out, open(self.path + ".err", "w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)

    def look(self, until: float) -> None:
        """Reads new results, ends the process if it is late, and restarts it if it has died."""
        if not self.going:
            return
        ended = self.process.poll() is not None
        late = not ended and time.time() > until
        if late:
            self.process.kill()
            self.process.wait()
        with open(self.path) as file:
            for line in file:
                if line.startswith('{"problem"') and line.endswith("\n"):
                    row = json.loads(line)
                    name = row.pop("problem")
                    self.results[name] = row
                    self.left = [n for n in self.left if n != name]
        if not ended and not late:
            return
        self.going = False
        if late or not self.left:
            return
        with open(self.path + ".err") as file:
            last = (file.read().strip().splitlines() or ["no word"])[-1][:300]
        self.results[self.left[0]] = dict(failed=f"process ended with {self.process.returncode}: {last}")
        never_began = self.process.returncode == 3
        if never_began:
            self.results |= {n: dict(failed=last) for n in self.left}
        self.left = [] if never_began else self.left[1:]
        if self.left and self.starts < 4:
            self.going = True
            self._start()


def other_processes() -> list[str]:
    """Names of the processes that use an NVIDIA device now; empty if nvidia-smi is missing or does not say.

    Another process on the device makes times two or three times as long.
    """
    command = ["nvidia-smi", "--query-compute-apps=process_name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


# ------------------------------------------------------------------------------- inside of a peer's process


def main(argument: str) -> int:
    task = json.loads(argument)
    by_name = {p.name: p for p in SUITES[task["suite"]]}
    problems = [by_name[n] for n in task["problems"]]
    try:
        if task["peer"] == "torch":
            from flexjax.bench import torch_flex as host

            run = host.measure
        else:
            from flexjax.bench import gpu_peers as host

            run = host.adapter(task["peer"])
        facts = host.facts()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 3
    print(json.dumps(dict(problem="facts", **facts)), flush=True)
    for problem in problems:
        try:
            result, samples = run(problem, task["folder"])
            arrays: dict[str, Any] = samples
            np.savez(_samples(task["folder"], task["peer"], problem), **arrays)
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            result = dict(failed=f"{type(error).__name__}: {text[:300]}")
        print(json.dumps(dict(problem=problem.name, **result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
