"""The command line of the benchmarks.

`python -m bench --suite cpu|gpu|gpu-sweep|decode|order|mesh|step|maxtext|first-hour [--only PATTERN] [--peers A,B] [--json FILE] [--plot FILE]`
times flexjax and its peers (other implementations) on the workloads of a suite and prints a Markdown table.
"""

import argparse
import dataclasses
import fnmatch
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench import decode_cases, device, report
from bench.decode_cases import DECODE_SUITES
from bench.measure import machine, measure_apart
from bench.peers import PEERS
from bench.suites import FA3, PASSES, SUITES, Workload

ORDER, MESH, STEP, MAXTEXT, FIRST_HOUR = "order", "mesh", "step", "maxtext", "first-hour"
ON_GPU = ("jax.nn", "tokamax", FA3, "torch", "flexjax", "flexjax any order")  # peers of the gpu suites
ALLOWED_ERROR = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3, "float64": 1e-10}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line to a namespace with a field for each option; unknown suites, peers and passes end the process with a
    message and status 2.

    argv   the arguments; None: those of the process

    `peers` and `passes` are names joined by commas; without --peers `peers` names all that the suite offers (of the suites order, mesh,
    step and maxtext, which do not read it, those of cpu). `seconds`, `json` and `plot` are None if not given.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description="Timings against peers.")
    parser.add_argument(
        "--suite", choices=sorted([*SUITES, *DECODE_SUITES, ORDER, MESH, STEP, MAXTEXT, FIRST_HOUR]), default="cpu"
    )
    parser.add_argument("--only", default="*", help="shell patterns for the names of problems, by semicolons")
    offered = (
        f"comma-separated, of {', '.join(PEERS)}; gpu: {', '.join(ON_GPU)}; decode: {', '.join(decode_cases.PEERS)}"
    )
    parser.add_argument("--peers", help=offered)
    parser.add_argument("--passes", default=",".join(PASSES), help="cpu: comma-separated, of " + ", ".join(PASSES))
    parser.add_argument("--seconds", type=float, help="time budget of one measurement; default: the suite's")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="gpu, decode, step, maxtext: what is not done by then is left out"
    )
    parser.add_argument(
        "--together", action="store_true", help="gpu, decode: one peer compiles while another is measured"
    )
    parser.add_argument(
        "--small", action="store_true", help="mesh, step, maxtext, first-hour: short sequences, to try it without GPUs"
    )
    parser.add_argument("--json", metavar="FILE", help="write every measurement there")
    parser.add_argument("--plot", metavar="FILE", help="draw the medians there; needs matplotlib")
    args = parser.parse_args(argv)
    choice = ON_GPU if args.suite.startswith("gpu") else tuple(PEERS)
    choice = decode_cases.PEERS if args.suite in DECODE_SUITES else choice
    args.peers = args.peers or ",".join(choice)
    unknown = set(args.peers.split(",")) - set(choice) | set(args.passes.split(",")) - set(PASSES)
    if unknown:
        parser.error(f"no such peer or pass: {', '.join(sorted(unknown))}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the command line: measures, prints the table to stdout and writes the files of --json and --plot. Returns the exit status.

    argv   the arguments; None: those of the process

    The status of a cpu suite is 1 if a measurement failed or an error exceeds ALLOWED_ERROR, else 0; a skipped peer does not count. That
    of a gpu or decode suite is that of `_on_gpu`; that of "order", "mesh", "step", "maxtext" and "first-hour" comes from the `main` of the
    suite, which prints its own tables and reads no --plot and no --json.
    """
    args = parse(argv)
    if args.suite == FIRST_HOUR:
        given = [
            "--only",
            args.only,
            *(["--small"] if args.small else []),
            *(["--json", args.json] if args.json else []),
        ]
        return subprocess.call([sys.executable, "-m", "lab", *given])  # a program of its own, in a room above this one
    if args.suite == ORDER:
        from bench import order

        return order.main()
    if args.suite == MESH:
        from bench import mesh

        return mesh.main(args.small)
    if args.suite == STEP:
        from bench import step

        return step.main(args.small, args.minutes)
    if args.suite == MAXTEXT:
        from bench import maxtext_step

        return maxtext_step.main(args.small, args.minutes)
    wanted = lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in args.only.split(";"))
    command = args.command = "python -m bench " + shlex.join(sys.argv[1:] if argv is None else argv)
    if args.suite in DECODE_SUITES:
        return _on_gpu(args, [c for c in DECODE_SUITES[args.suite] if wanted(c.name)], args.peers.split(","))
    problems = [p for p in SUITES[args.suite] if wanted(p.name)]
    if args.seconds is not None:
        problems = [dataclasses.replace(p, seconds=args.seconds) for p in problems]
    peers, passes = args.peers.split(","), args.passes.split(",")
    if args.suite.startswith("gpu"):
        return _on_gpu(args, problems, peers)
    tasks = [(p, which) for p in problems for which in p.passes if which in passes]
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    for i, (problem, which) in enumerate(tasks):
        row: dict[str, Any] = dict(problem=problem.name, which=which, flops=problem.flops(which), peers={})
        for j, peer in enumerate(peers):
            _progress(start, i * len(peers) + j, len(tasks) * len(peers), f"{problem.name}, {which}, {peer}")
            row["peers"][peer] = _one(args.suite, problem, peer, which)
        rows.append(row)
    _progress(start, 1, 1, "done")
    print(file=sys.stderr)
    facts = machine()
    print(report.markdown(rows, peers, facts, command))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(dict(machine=facts, command=command, rows=rows), file, indent=1)
    if args.plot:
        report.plot(rows, peers, facts, args.plot)
    complaints = report.wrong(rows, max((ALLOWED_ERROR[p.dtype] for p in problems), default=0.0))
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


def _on_gpu(args: argparse.Namespace, problems: Sequence[device.Problem], peers: list[str]) -> int:
    """Runs a gpu or a decode suite, prints its table and writes the files that the command line asks for; returns the exit status.

    args       the parsed command line
    problems   the workloads
    peers      names of the peers

    The status is 1 if a result (decode: of flexjax) is wrong or failed, or if other processes were on the device before the first
    measurement; else 0.
    """
    until, start = time.time() + 60 * args.minutes, time.monotonic()

    def say(now: str) -> None:
        """Writes the elapsed seconds and the first 110 characters of `now`, what runs, over the present line of stderr, without ending
        it; nothing if stderr is not a terminal.
        """
        if sys.stderr.isatty():
            print(f"\r{time.monotonic() - start:5.0f} s  {now:110.110}", end="", file=sys.stderr, flush=True)

    others = device.other_processes()
    everyone = [device.REFERENCE, *peers]
    groups = [everyone] if args.together else [[peer] for peer in everyone]
    rows, facts = device.measure_all(args.suite, problems, peers, groups, until, say)
    decode = args.suite in DECODE_SUITES
    if decode:
        cudnn = [p for p in peers if p in (decode_cases.CUDNN, decode_cases.CUDNN_PAGES)]
        print(report.of_decode(rows, peers, facts, args.command, cudnn), flush=True)
    else:
        print(report.on_gpu(rows, peers, facts, args.command), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(dict(machine=facts, command=args.command, rows=rows), file, indent=1)
    if args.plot:
        report.plot(rows, peers, facts, args.plot)
    if decode:  # peers round dense biases, and refuse some cases
        rows = [row | dict(peers={p: r for p, r in row["peers"].items() if p == decode_cases.OWN_PEER}) for row in rows]
    complaints = report.wrong(rows, max((ALLOWED_ERROR[p.dtype] for p in problems), default=0.0))
    if others:
        complaints.append(f"Other processes were on the device before the first measurement: {', '.join(others)}.")
    for complaint in dict.fromkeys(complaints):
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


def _one(suite: str, problem: Workload, peer: str, which: str) -> dict[str, Any]:
    """The result of one peer of a cpu suite on one workload and pass: {"skipped": why} if `problem.skip` names the peer; else what a
    process of its own measured (the dict that measure.py describes), or {"failed": why}.

    suite     name of the suite that has the workload
    problem   the workload
    peer      name of the implementation
    which     the pass, "forward" or "forward+backward"
    """
    reason = dict(problem.skip).get(peer)
    return dict(skipped=reason) if reason else measure_apart(suite, problem, peer, which)


def _progress(start: float, done: int, of: int, now: str) -> None:
    """Draws a progress bar with the elapsed seconds over the present line of stderr; nothing if stderr is not a terminal, wherever
    stdout goes. It never ends the line: the caller prints a newline to stderr after the last call.

    start      time.monotonic() when the run began
    done, of   number of measurements that are done, and of all
    now        what is measured now; its first 60 characters are shown
    """
    if sys.stderr.isatty():
        filled = 30 * done // max(of, 1)
        clock = time.monotonic() - start
        bar = "#" * filled + "." * (30 - filled)
        print(f"\r[{bar}] {done}/{of} {clock:5.0f} s  {now:60.60}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
