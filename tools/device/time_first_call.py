"""Times the stages of a first call, trace to result: `PYTHONPATH=. python3 tools/device/time_first_call.py`.

Not collected by pytest. It runs forward and backward pass of a problem, in a process of its own that has imported
flexjax and run one matrix product. Before, flexjax is compiled to bytecode, as pip does when it installs a package. Columns:
the block mask; tracing; lowering to kernels; compiling; the first run; their sum; and the same again for a second program with
the same attention.

    --suite NAME      of bench/suites.py
    --problems TEXT   the problems of these names, separated by semicolons
"""

import argparse
import compileall
import itertools
import pathlib
import subprocess
import sys
import time
from typing import Any

import flexjax

PROBLEMS = "causal d128;causal d64;full d128;12 documents d128;window 1025 d128;relative bias causal d64"
STAGES = ("mask", "trace", "lower", "compile", "run")


def stages(problem: Any) -> list[float]:
    """Seconds that each of STAGES takes for a problem of bench/suites.py, in this process: both passes
    together; the operands are on the device before.
    """
    import jax

    from bench import gpu_peers

    arrays, array = gpu_peers.on_device(problem)
    jax.block_until_ready((arrays, array))
    ticks = [time.perf_counter()]
    done = lambda: ticks.append(time.perf_counter())
    attend = gpu_peers.flexjax(problem)
    done()

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, array: Any) -> Any:
        """Forward pass and gradients of q, k, v, and of the captured array where the problem learns it."""
        if problem.learns:
            out, pull = jax.vjp(attend, q, k, v, array)
        else:
            out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, array), q, k, v)
        return out, pull(d_out)

    traced = jax.jit(both).trace(**arrays, array=array)
    done()
    lowered = traced.lower()
    done()
    compiled = lowered.compile()
    done()
    jax.block_until_ready(compiled(**arrays, array=array))
    done()
    return [later - earlier for earlier, later in itertools.pairwise(ticks)]


def one(suite: str, name: str) -> None:
    """Times a problem twice in this process and prints its row of the table.

    suite, name   of the problem, in bench/suites.py
    """
    from bench import gpu_peers
    from bench.suites import SUITES

    gpu_peers.facts()  # wakes the device
    problem = next(p for p in SUITES[suite] if p.name == name)
    cells = []
    for _ in range(2):
        seconds = stages(problem)
        cells += [f"{x:.2f}" for x in (*seconds, sum(seconds))]
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> int:
    """Times each problem in a process of its own and prints the table; returns the exit status, 1 where a process
    failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="gpu")
    parser.add_argument("--problems", default=PROBLEMS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.suite, arguments.one)
        return 0
    titles = (*STAGES, "all, s")
    print("| problem | " + " | ".join((*titles, *(f"again: {t}" for t in titles))) + " |")
    print("|---" * (1 + 2 * len(titles)) + "|", flush=True)
    compileall.compile_dir(pathlib.Path(flexjax.__file__).parent, quiet=1)
    failed = 0
    for name in arguments.problems.split(";"):
        command = [sys.executable, __file__, "--suite", arguments.suite, "--one", name]
        failed += subprocess.run(command, check=False).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
