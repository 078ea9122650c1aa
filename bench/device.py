"""The gpu and decode suites: one process for each peer (implementation), which measures all workloads and prints a line of JSON for
each.

A line has: the median device time (kernel times by CUPTI if jax has it, else launches back to back) of the forward pass and of the
backward pass, which is the time of both less that of the forward pass (torch times it alone); the seconds from tracing to the first
result of both passes. The process also saves out and all gradients at the sample rows. The parent compares them with dense float32
attention, which the process `reference` computes in chunks of queries, and adds the largest error. The decode suite has one pass,
"decode".

Processes of a group run at the same time, so that one compiles while another is timed, under a lock; groups run one after another. A
process that dies is started again with the workload after the one it died of, until it was started four times.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.decode_cases import DECODE_SUITES, DecodeCase
from bench.inputs import REFERENCE
from bench.suites import SUITES, Workload

Row = dict[str, Any]
Problem = Workload | DecodeCase
NOT_STARTED, NOT_INSTALLED = 3, 4
"""Exit statuses of a peer's process."""


def measure_all(
    suite: str,
    problems: Sequence[Problem],
    peers: list[str],
    groups: Sequence[Sequence[str]],
    until: float,
    say: Callable[[str], None],
) -> tuple[list[Row], Row]:
    """Measures all workloads with all peers. It returns when all processes have ended.

    suite      name of the suite
    problems   workloads of that suite
    peers      names of the peers
    groups     the peers and REFERENCE, in groups whose processes run at the same time, one group after the other; each peer is in one of
               them
    until      time.time() at which processes are ended, each group after an equal share of what is left; a workload that is not measured
               by then has {"failed": "not reached in the time given"}
    say        called five times a second with a line about what runs now, such as "flexjax: causal d128, jax.nn: causal d64"

    Returns (rows, facts). facts: device and versions by name. rows: for each workload and each of its passes {"problem": its name,
    "which": the pass, "flops" or, for a decode case, "bytes", "peers": {name: result}}. A result is what the process printed, with
    "median" (seconds of this pass), and "error" and "errors" against the reference where both gave samples; {"failed": why}; or
    {"skipped": why}.
    """
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, dict[str, Row]] = {}
        for done, group in enumerate(groups):
            now = time.time()
            end = now + (until - now) / (len(groups) - done)  # so that a slow peer leaves time for the others
            children = {
                peer: PeerProcess(suite, peer, [p for p in problems if not p.skipped(peer)], folder) for peer in group
            }
            while any(child.running for child in children.values()):
                time.sleep(0.2)
                for child in children.values():
                    child.poll_results(end)
                say(", ".join(f"{peer}: {child.now}" for peer, child in children.items() if child.running))
            found |= {peer: child.results for peer, child in children.items()}
        facts: Row = {}
        for results in found.values():
            facts |= results.pop("facts", {})
        rows = []
        for problem in problems:
            results = {peer: _peer_result(problem, peer, found[peer], folder) for peer in peers}
            for which in problem.passes:
                rows.append(dict(problem=problem.name, which=which, **problem.counts(which), peers={}))
                for peer, result in results.items():
                    mine = {k: v for k, v in result.items() if k not in problem.passes}
                    if "failed" not in result and "skipped" not in result:
                        mine["median"] = result[which]
                    rows[-1]["peers"][peer] = mine
        return rows, facts


def _peer_result(problem: Problem, peer: str, found: dict[str, Row], folder: str) -> Row:
    """The result of a peer on a workload for the report: what its process printed, with `errors` against the reference by name of the
    array, and the largest of them as `error`.

    found    what the process printed, by name of the workload
    folder   the folder of the run, which has the samples

    {"skipped": why} if the peer is not timed on the workload, {"failed": why} if it gave no result. Without samples of
    the peer or of the reference the result has no errors.
    """
    reason = problem.skipped(peer)
    if reason:
        return dict(skipped=reason)
    result = found.get(problem.name, dict(failed="not reached in the time given"))
    paths = [_sample_path(folder, p, problem) for p in (REFERENCE, peer)]
    if "failed" in result or "skipped" in result or not all(map(os.path.exists, paths)):
        return result
    with np.load(paths[0]) as want, np.load(paths[1]) as got:
        errors = {name: _error(got[name], want[name]) for name in want.files if name in got.files}
    return result | dict(errors=errors, error=max(errors.values()))


def _error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference between two arrays over the largest magnitude of `want`; inf if shapes differ or `got` is not
    finite.
    """
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / np.abs(want).max())


def _sample_path(folder: str, peer: str, problem: Problem) -> str:
    """The .npz file in the folder of the run in which the process of a peer (or of REFERENCE) saves its sample rows of a workload, and
    from which the parent reads them; spaces in the two names become "_".
    """
    return os.path.join(folder, f"{peer} {problem.name}.npz".replace(" ", "_"))


class PeerProcess:
    """The process of one peer, restarted if it dies, and the results that it has printed so far.

    remaining   names of the workloads without a result
    results     by name of the workload what the process printed, or {"failed": why}; "facts" has the versions
    starts      how often the process was started; four times at most
    running     whether the process runs
    """

    def __init__(self, suite: str, peer: str, problems: Sequence[Problem], folder: str):
        """Starts the process, if there are workloads; returns at once.

        suite, peer   their names
        problems      the workloads that it measures, in this order
        folder        the folder of the run, for its output, its samples and the lock
        """
        self.suite, self.peer, self.folder = suite, peer, folder
        self.remaining = [p.name for p in problems]
        self.results: dict[str, Row] = {}
        self.starts = 0
        self.running = bool(self.remaining)
        if self.running:
            self._start()

    @property
    def now(self) -> str:
        """The name of the first workload without a result, which the process compiles or measures now; "done" after the last."""
        return self.remaining[0] if self.remaining else "done"

    def _start(self) -> None:
        """Starts a process that measures the remaining workloads, and returns at once.

        Sets `process`, and `path` to the new file in the folder that takes its lines; its errors go to the file `path`.err. Adds 1
        to `starts`; the caller sets `running` and sees to the limit of starts.
        """
        self.starts += 1
        self.path = os.path.join(self.folder, f"{self.peer.replace(' ', '_')}-{self.starts}")
        task = dict(suite=self.suite, peer=self.peer, problems=self.remaining, folder=self.folder)
        environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", TF_CPP_MIN_LOG_LEVEL="3")
        if self.suite in DECODE_SUITES:  # caches of 34 GB, which a process has to give back for the next one
            environment["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        command = [sys.executable, "-m", "bench.device", json.dumps(task)]
        with open(self.path, "w") as out, open(self.path + ".err", "w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)

    def poll_results(self, until: float) -> None:
        """Reads new results, ends the process if time.time() is past `until`, and restarts it if it has died.

        The workload that it died of has failed, with the last line of its errors; all that remain have failed if it could
        not begin, and are skipped if the peer is not installed. A process that was ended for time is not restarted, nor one that was
        started four times.
        """
        if not self.running:
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
                    self.remaining = [n for n in self.remaining if n != name]
        if not ended and not late:
            return
        self.running = False
        if late or not self.remaining:
            return
        with open(self.path + ".err") as file:
            last = (file.read().strip().splitlines() or ["no word"])[-1][:300]
        status = self.process.returncode
        if status in (NOT_STARTED, NOT_INSTALLED):
            self.results |= {n: {"failed" if status == NOT_STARTED else "skipped": last} for n in self.remaining}
            self.remaining = []
            return
        self.results[self.remaining[0]] = dict(failed=f"process ended with {status}: {last}")
        self.remaining = self.remaining[1:]
        if self.remaining and self.starts < 4:
            self.running = True
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
    """Runs in the process of a peer: measures the workloads of a JSON object, saves their samples, and prints a line of JSON for each,
    after one of facts.

    argument   JSON: suite, peer (or REFERENCE), problems (names of workloads of the suite) and folder. The samples are written to the
               folder (`_sample_path`), and its file "lock" is locked while the device is timed, so that of the processes with one folder
               only one times at once

    The lines:

        {"problem": "facts", "device": kind, "jax": version}, or {"problem": "facts", "torch": version} of a torch peer
        {"problem": name, "forward": s, "backward": s, "first_call": s, "how": how the passes were measured}, times in seconds; the decode
        suite has "decode" in place of the two passes, and REFERENCE, which is not timed, the name alone
        {"problem": name, "failed": why} if the workload raised; the next workload follows

    Returns the exit status: 0; NOT_INSTALLED if a module of the peer is missing, or NOT_STARTED if preparing the peer fails in another
    way, as when it finds no device. In these two cases no line is printed, and the reason is the last line of stderr.
    """
    task = json.loads(argument)
    by_name: dict[str, Problem] = {p.name: p for p in (SUITES | DECODE_SUITES)[task["suite"]]}
    problems = [by_name[n] for n in task["problems"]]
    try:
        run, facts = _host(task["suite"] in DECODE_SUITES, task["peer"], problems)
    except ModuleNotFoundError as error:
        print(f"is not installed ({error})", file=sys.stderr)
        return NOT_INSTALLED
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return NOT_STARTED
    print(json.dumps(dict(problem="facts", **facts)), flush=True)
    for problem in problems:
        try:
            result, samples = run(problem, task["folder"])
            arrays: dict[str, Any] = samples
            np.savez(_sample_path(task["folder"], task["peer"], problem), **arrays)
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            result = dict(failed=f"{type(error).__name__}: {text[:300]}")
        print(json.dumps(dict(problem=problem.name, **result)), flush=True)
    return 0


def _host(decode: bool, peer: str, problems: Sequence[Any]) -> tuple[Callable[..., Any], Row]:
    """(the function (workload, folder) -> (result, samples) of a peer, the device and versions by name).

    decode     whether the suite is one of DECODE_SUITES
    peer       a name of the suite's peers, or REFERENCE
    problems   what will be measured, in this order

    Imports the peer: raises ModuleNotFoundError if it is not installed, and RuntimeError if torch finds no GPU.
    """
    if peer.startswith("torch"):
        from bench import decode_torch, torch_flex

        measured = torch_flex.measure_flash if peer == "torch flash" else torch_flex.measure
        return decode_torch.measure if decode else measured, torch_flex.facts()
    from bench import decode_peers, gpu_peers

    facts = gpu_peers.facts()  # wakes the device first
    return (decode_peers.adapter(peer, problems) if decode else gpu_peers.adapter(peer)), facts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
