"""compute-sanitizer over a small case of every feature, on a GPU: `PYTHONPATH=. python3 tests/device/check_sanitizer.py`.

Not collected by pytest. Forward and backward pass of each case run under each tool, in processes that are themselves started
under it; a read past the end in a kernel of its own shows that memcheck sees what it looks for. XLA's autotuning is off: it
times many kernels that are not ours, and under memcheck it took minutes and once ended the process.

    --tools NAMES     of memcheck, racecheck, synccheck, initcheck; default memcheck,racecheck
    --seconds N       for all; no case is begun after half of that
    --cases NAMES     of tests/cases.py, instead of one of every feature
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing

FEATURES = (
    "plain", "plain_bnth", "one_query", "length_300", "gqa3", "wider_values", "dim_17", "dim_256", "large_logits", "softcap",
    "rows_minus_inf", "window", "prefix", "documents", "packed", "zero_lengths", "nothing", "flagged_keys", "head_gate",
    "frozen_slope", "row_bias", "column_bias", "pair_bias", "head_pair_bias", "transposed_pair_bias", "relative_bias",
    "distance_bias", "bucket_bias", "modular_table", "int8_cost", "bf16_bias", "poison_root", "sinks", "dropout", "extra",
    "lse_only", "everything_at_once",
)  # fmt: skip
PLANTED = {"memcheck": "reads past the end"}
FOUND = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def run_cases(names: list[str], seconds: float) -> None:
    """Begins no other case after so many seconds: the tool sums up at the end of the process."""
    began = time.monotonic()
    import jax

    from tests.backends.conformance import Problem
    from tests.backends.mosaic_gpu.aot import with_blocks_of_64
    from tests.cases import CASES

    for name in names:
        if time.monotonic() - began > seconds:
            print(f"not begun {name}", flush=True)
            continue
        problem = Problem(with_blocks_of_64(CASES[name]), "bfloat16", "mosaic_gpu")
        try:
            step = jax.jit(jax.grad(problem.loss, argnums=(0, 1), has_aux=True))
            jax.block_until_ready(step(*problem.arrays()))
            print(f"ran {name}", flush=True)
        except NotImplementedError as refusal:
            print(f"refused {name}: {refusal}", flush=True)


def plant() -> None:
    """A kernel with a mistake that memcheck looks for."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from flexjax.backends.mosaic_gpu import memory

    def past_the_end(x_ref: typing.Any, out_ref: typing.Any) -> None:
        rows = memory.row_iota(128) + jnp.int32(1 << 28)
        out_ref[...] = memory.gather(x_ref, (rows,), (True,), "row", (128,), interpret=False)

    run = pl.kernel(
        past_the_end,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        mesh=plgpu.Mesh(grid=(1,), grid_names=("program",)),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    print(jax.block_until_ready(run(jnp.ones(128, jnp.float32))).sum())


def start(tool: str, what: list[str], path: str) -> subprocess.Popen:
    binary = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    environment = dict(
        os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_FLAGS="--xla_gpu_autotune_level=0", PYTHONPATH="."
    )
    command = [binary, "--tool", tool, sys.executable, os.path.abspath(__file__), *what]
    with open(path, "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)


def verdict(process: subprocess.Popen, path: str, until: float) -> tuple[int | None, str]:
    """(mistakes that the tool found, None where it did not come to its end; what it printed)."""
    try:
        process.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool's own end would leave the program running on the device
    with open(path) as file:
        text = file.read()
    found = FOUND.findall(text)
    return (int(found[-1]) if found else None), text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--cases")
    parser.add_argument("--shares", type=int, default=6)
    parser.add_argument("--run", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--plant", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        run_cases(args.run, args.seconds)
        return 0
    if args.plant:
        plant()
        return 0
    names = args.cases.split(",") if args.cases else FEATURES
    shares = [list(names[i :: args.shares]) for i in range(args.shares)]
    until = time.monotonic() + args.seconds
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for tool in args.tools.split(","):
            work = [[f"--seconds={args.seconds / 2}", "--run", *share] for share in shares]
            work += [["--plant"]] if tool in PLANTED else []
            for n, what in enumerate(work):
                path = os.path.join(folder, f"{tool}{n}")
                jobs.append((tool, what, path, start(tool, what, path)))
        for tool, what, path, process in jobs:
            count, text = verdict(process, path, until)
            planted = what[0] == "--plant"
            wrong += count is None or (count == 0) == planted
            ran = re.findall(r"^ran (\w+)", text, re.M)
            label = f"planted: {PLANTED[tool]}" if planted else "ran " + (", ".join(ran) or "nothing")
            print(f"{tool}: {'did not end' if count is None else f'{count} found'}; {label}", flush=True)
            if (count is None or (count == 0) == planted) or not (ran or planted):
                print(text[-600:])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
