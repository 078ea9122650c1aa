"""`python -m lab`: the first hour on a GPU or TPU that flexjax has not seen, in under ten minutes.

The stages run in this order. STAGES says by which part of the time each has to be done, so a stage also has what those before it left:

    facts       card, driver, versions, and which GPU kernels take a plain call, with which options
    numerics    a case of each feature, results and gradients, against a float64 oracle that shares no code with the compiler
    ceilings    large bfloat16 and float16 matrix products, and a large read of memory
    times       flexjax beside cuDNN (jax.nn) and, where torch is installed, FlexAttention and FlashAttention-2
    sustained   flexjax back to back, with SM clock and power meanwhile: a model of the card predicts a rate for a clock, and this is it
    tune        flexjax.autotune on a few workloads

The report is written after each stage, as JSON and as Markdown, so that an interrupted run leaves one too: send both back. Every task runs
in a process that is replaced when it dies or hangs. A TPU belongs to one process, so there they run one after the other. Without a GPU, `--small` runs all of it on a few tokens.

Exit status: 1 if a number was wrong; 2 if none was, but a task of flexjax failed in another way; else 0. Refusals and what the time did
not reach are no failures.
"""

import os
import tempfile
import time
import typing
from collections.abc import Callable, Sequence

from bench import device
from bench.suites import SUITES
from lab import first_hour_cases, first_hour_report
from lab.first_hour_pool import Answer, Task, run_all

STAGES = {"facts": 0.08, "numerics": 0.40, "ceilings": 0.46, "times": 0.76, "sustained": 0.87, "tune": 1.0}
"""Stage -> the part of the time at whose end it has to be done."""
WORKLOADS = ("causal d128", "full d128", "causal d64", "full d64", "window 1025 d128", "ALiBi causal d128")
"""Names of workloads of the gpu suite that are timed, the most telling first."""
TUNED = ("causal d128", "causal d64")
SMALL_SUITE, SMALL_WORKLOAD = "gpu-tiny", "causal 128"
DEFAULT_CASES = ("plain d64", "causal d128", "ALiBi, learned", "lengths", "float32")
"""Cases that the default choice of a backend runs too, whatever that is on this card."""
PEERS = ("jax.nn", "torch", "torch flash")
WRONG = 2e-2
"""The largest error of a timed result, over the largest value, as in the other suites on a GPU."""


def main(
    small: bool, minutes: float, stages: Sequence[str] = tuple(STAGES), path: str | None = None, processes: bool = True
) -> int:
    """Runs the stages, writes the report after each of them, and prints its Markdown page at the end; returns the exit status that the
    top of this file explains.

    small       few tokens, for a CPU
    minutes     time budget of the whole run
    stages      which of STAGES run; "facts" always does
    path        of the JSON file; the Markdown file beside it ends in .md instead. None: first-hour-<card>.json in the working directory
    processes   False: tasks run in this process, and no peers are timed; for tests
    """
    start = time.time()
    end = {name: start + 60 * minutes * part for name, part in STAGES.items()}
    found: Answer = dict(command="python -m lab", minutes=minutes, small=small)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(small, folder, processes)
        found["facts"] = run.one("facts", end["facts"])
        path = path or first_hour_report.file_name(found)
        for name, stage in RUNNERS.items():
            if name in stages:
                _say(f"{name}, until {end[name] - start:.0f} s")
                try:
                    found[name] = stage(run, found, end[name])
                except Exception as error:  # a stage that fails says so, and the others run
                    found[name] = dict(failed=f"{type(error).__name__}: {error}")
            found["took"] = time.time() - start
            first_hour_report.write(found, path)
    print(first_hour_report.markdown(found), flush=True)
    print(f"\nSend back {path} and {first_hour_report.markdown_path(path)}.", flush=True)
    if first_hour_report.wrong(found, WRONG):
        return 1
    return 2 if first_hour_report.failures(found) else 0


def _say(text: str) -> None:
    """Prints the line "# text" about what runs now."""
    print(f"# {text}", flush=True)


class Run(typing.NamedTuple):
    """How tasks run.

    small       few tokens, for a CPU
    folder      for files of processes
    processes   whether tasks have processes of their own
    """

    small: bool
    folder: str
    processes: bool

    def all(self, tasks: Sequence[Task], until: float, workers: int, most_seconds: float = 120.0) -> list[Answer]:
        """The answers of all tasks, in their order: for each the dict that its function in first_hour_tasks.TASKS returns, {"failed":
        why}, or {"unreached": why} where the time was up (first_hour_pool.py).

        until          time.time() at which tasks are ended
        workers        the most processes at once
        most_seconds   after which a task is ended, and has failed

        Without `processes` every task runs in this process, whatever `until`, `workers` and `most_seconds` say.
        """
        if self.processes:
            return run_all(tasks, workers, until, self.folder, most_seconds)
        from lab.first_hour_tasks import run_here  # imports jax

        return [run_here(task) for task in tasks]

    def one(self, task: str, until: float, **arguments: object) -> Answer:
        """The answer of one task: the dict that its function returns, {"failed": why}, also after 120 seconds, or {"unreached": why}.

        task        a name in first_hour_tasks.TASKS
        until       time.time() at which it is ended
        arguments   the keywords of that function
        """
        return self.all([dict(task=task, arguments=arguments)], until, 1)[0]


def families(found: Answer) -> list[Answer]:
    """The ways to ask for GPU kernels that this card takes: those dicts in found["facts"]["families"] (first_hour_tasks.families) whose
    "verdict" is "ok", in their order. Of several whose "kernels" is the same text only the first of them is returned. [] where the task failed.
    """
    taken = [f for f in found["facts"].get("families", []) if f["verdict"] == "ok"]
    first: dict[str, Answer] = {}
    for family in taken:
        first.setdefault(family["kernels"], family)
    return list(first.values())


def on_tpu(found: Answer) -> bool:
    return found["facts"].get("platform") == "tpu"


def peer_name(options: dict[str, typing.Any]) -> str:
    """The name of flexjax with options among the peers: "flexjax", or "flexjax instruction=mma"."""
    return " ".join(["flexjax", *(f"{n}={v}" for n, v in options.items())])


def numerics(run: Run, found: Answer, until: float) -> Answer:
    """The stage "numerics": {"rows": list}, with a dict for each case, dtype and way to ask for kernels that the card takes, and for the
    default choice of some cases. A row has name, dtype, `by` (`_rows`), and the answer of its task: verdict, ratio and notes, or "failed"
    or "unreached".

    run     how tasks run; `small` reduces the cases
    found   what earlier stages gave; "facts" is read
    until   time.time() at which what is left out is "unreached"; the default choice comes first, float16 last
    """
    tasks: list[Task] = []
    kernels = families(found)
    dtypes = ("bfloat16", "float32", "float16")  # what the time does not reach is float16
    for dtype in dtypes:
        for family in kernels:
            for name, case in first_hour_cases.CASES.items():
                if dtype in case.dtypes:
                    arguments = dict(name=name, dtype=dtype, options=family["options"], kernels=True, small=run.small)
                    tasks.append(dict(task="numerics", arguments=arguments))
    chosen = first_hour_cases.SMALL if run.small else DEFAULT_CASES
    for name in chosen:
        dtype = first_hour_cases.CASES[name].dtypes[0]
        arguments = dict(name=name, dtype=dtype, options={}, kernels=False, small=run.small)
        tasks.insert(0, dict(task="numerics", arguments=arguments))
    workers = min(12, max(1, (os.cpu_count() or 2) - 1)) if not run.small and not on_tpu(found) else 1
    return dict(rows=_rows(tasks, run.all(tasks, until, workers, 90.0)))


def _rows(tasks: Sequence[Task], answers: Sequence[Answer]) -> list[Answer]:
    """The answers, each with the name of its case or workload, its dtype where the task has one, and `by`: which flexjax, as `peer_name`
    says, or "default choice" for a numerics task that does not ask for the GPU kernels.

    tasks, answers   of the same length and order
    """
    rows = []
    for task, answer in zip(tasks, answers, strict=True):
        given = task["arguments"]
        by = peer_name(given["options"]) if given.get("kernels", True) else "default choice"
        rows.append({n: given[n] for n in ("name", "dtype") if n in given} | dict(by=by) | answer)
    return rows


def ceilings(run: Run, found: Answer, until: float) -> Answer:
    """The stage "ceilings", the answer of first_hour_tasks.ceilings: by "matmul bfloat16 N", "matmul float16 N" and "memory read" a dict
    with `rate`, `unit` and, where NVML says, `clock`; beside these dicts `seconds_taken`, a number. If there are no such dicts, it is

    {"failed": why}      where the task raised (with `seconds_taken`), where its process died or could not start, or where it took 120
                         seconds (with `ended_after`)
    {"unreached": why}   where `until` came before its answer

    run     how tasks run; `small` makes products and read small
    found   not read
    until   time.time() at which the task is ended, if it has a process of its own
    """
    return run.one("ceilings", until, seconds=0.05 if run.small else 1.5, small=run.small)


def times(run: Run, found: Answer, until: float) -> Answer:
    """The stage "times": {"rows": rows of the gpu suite (bench/report.py) for WORKLOADS, "peers": names of all that are timed, flexjax by each
    way to ask for kernels first, "facts": device and versions}. If `run.processes` is False, nothing is timed: there are no rows and no
    facts.

    found   what earlier stages gave; "facts" is read
    until   time.time() at which processes are ended
    """
    suite, names = (SMALL_SUITE, (SMALL_WORKLOAD,)) if run.small else ("gpu", WORKLOADS)
    problems = [p for n in names for p in SUITES[suite] if p.name == n]
    asked = [peer_name(f["options"]) for f in families(found)]
    ours = list(dict.fromkeys(["flexjax", *asked]))
    peers = [*ours, "jax.nn"] if run.small or on_tpu(found) else [*ours, *PEERS]
    if not run.processes:
        return dict(rows=[], peers=peers)
    everyone = [device.REFERENCE, *peers]
    groups = (
        [[peer] for peer in everyone] if on_tpu(found) else [everyone]
    )  # together: compiling takes most of the time
    rows, facts = device.measure_all(suite, problems, peers, groups, until, lambda text: None)
    return dict(rows=rows, peers=peers, facts=facts)


def sustained(run: Run, found: Answer, until: float) -> Answer:
    """The stage "sustained": {"rows": list}, with a dict for each of four workloads (one, if small) and each way to ask for kernels, one
    task after the other. A row has name, `by` (`_rows`), and the answer of its task: "forward" and "both", a dict of seconds and clock
    each, or "failed" or "unreached".

    found   what earlier stages gave; "facts" is read
    until   time.time() at which what is left out is "unreached"
    """
    suite, names = (SMALL_SUITE, (SMALL_WORKLOAD,)) if run.small else ("gpu", WORKLOADS[:4])
    asked = [f["options"] for f in families(found)] or [{}]
    tasks = [
        dict(
            task="sustained",
            arguments=dict(suite=suite, name=name, options=options, seconds=0.05 if run.small else 0.7),
        )
        for name in names
        for options in asked
    ]
    return dict(rows=_rows(tasks, run.all(tasks, until, 1)))


def tune(run: Run, found: Answer, until: float) -> Answer:
    """The stage "tune": {"rows": list}, with a dict for each workload of TUNED (one, if small) and each way to ask for kernels. A row has
    name, `by` (`_rows`), and the answer of its task: backend, passes, options and finished, or "failed" or "unreached". The tasks share
    0.7 of the time that is left, at most 25 seconds each.

    found   what earlier stages gave; "facts" is read
    until   time.time() at which what is left out is "unreached"
    """
    suite, names = (SMALL_SUITE, (SMALL_WORKLOAD,)) if run.small else ("gpu", TUNED)
    asked = [f["options"] for f in families(found)] or [{}]
    chosen = [(options, name) for name in names for options in asked]
    each = 1.0 if run.small else min(25.0, 0.7 * max(1.0, until - time.time()) / len(chosen))
    tasks = [
        dict(task="tune", arguments=dict(suite=suite, name=name, options=options, seconds=each))
        for options, name in chosen
    ]
    return dict(rows=_rows(tasks, run.all(tasks, until, 1)))


RUNNERS: dict[str, Callable[[Run, Answer, float], Answer]] = dict(
    numerics=numerics, ceilings=ceilings, times=times, sustained=sustained, tune=tune
)
