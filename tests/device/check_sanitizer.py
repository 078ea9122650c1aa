"""compute-sanitizer over a small case of every feature, on a GPU: `PYTHONPATH=. python3 tests/device/check_sanitizer.py`.

Not collected by pytest. Forward and backward pass of each case run under each tool, in processes that are themselves started
under it; a planted mistake in a kernel of its own shows that the tool sees what it looks for. XLA's autotuning is off: it times
many kernels that are not ours, and under memcheck it took minutes and once ended the process.

    --tools NAMES     of memcheck, racecheck, synccheck, initcheck; default memcheck,racecheck
    --seconds N       for each process
"""

import argparse
import os
import re
import shutil
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
PLANTED = {"memcheck": "reads past the end", "racecheck": "writes shared memory twice"}
FOUND = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def run_cases(names: list[str]) -> None:
    import jax

    from tests.backends.conformance import Problem
    from tests.backends.mosaic_gpu.aot import with_blocks_of_64
    from tests.cases import CASES

    for name in names:
        problem = Problem(with_blocks_of_64(CASES[name]), "bfloat16", "mosaic_gpu")
        try:
            step = jax.jit(jax.grad(problem.loss, argnums=(0, 1), has_aux=True))
            jax.block_until_ready(step(*problem.arrays()))
            print(f"ran {name}", flush=True)
        except NotImplementedError as refusal:
            print(f"refused {name}: {refusal}", flush=True)


def plant(tool: str) -> None:
    """A kernel with a mistake of the kind that the tool looks for."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from flexjax.backends.mosaic_gpu import memory

    def past_the_end(x_ref: typing.Any, out_ref: typing.Any) -> None:
        rows = memory.row_iota(64) + jnp.int32(1 << 28)
        out_ref[...] = memory.gather(x_ref, (rows,), (True,), "row", (64,), interpret=False)

    def twice(x_ref: typing.Any, out_ref: typing.Any) -> None:
        def body(shared: typing.Any) -> None:
            shared[...] = plgpu.load(x_ref, layout=memory.ROW, optimized=False)
            out_ref[...] = plgpu.load(shared, layout=plgpu.Layout.WG_STRIDED((64,), 1), optimized=False)

        pl.run_scoped(body, plgpu.SMEM((64,), jnp.float32))

    run = pl.kernel(
        past_the_end if tool == "memcheck" else twice,
        out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
        mesh=plgpu.Mesh(grid=(1,), grid_names=("program",)),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    print(jax.block_until_ready(run(jnp.ones(64, jnp.float32))).sum())


def start(tool: str, what: list[str], path: str) -> subprocess.Popen:
    binary = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    environment = dict(
        os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_FLAGS="--xla_gpu_autotune_level=0", PYTHONPATH="."
    )
    command = [binary, "--tool", tool, sys.executable, os.path.abspath(__file__), *what]
    with open(path, "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment)


def verdict(process: subprocess.Popen, path: str, until: float) -> tuple[int | None, str]:
    """(mistakes that the tool found, None where it did not come to its end; what it printed)."""
    try:
        process.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
    with open(path) as file:
        text = file.read()
    found = FOUND.findall(text)
    return (int(found[-1]) if found else None), text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--shares", type=int, default=6)
    parser.add_argument("--run", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        run_cases(args.run)
        return 0
    if args.plant:
        plant(args.plant)
        return 0
    shares = [list(FEATURES[i :: args.shares]) for i in range(args.shares)]
    until = time.monotonic() + args.seconds
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for tool in args.tools.split(","):
            work = [["--run", *share] for share in shares]
            work += [["--plant", tool]] if tool in PLANTED else []
            for n, what in enumerate(work):
                path = os.path.join(folder, f"{tool}{n}")
                jobs.append((tool, what, path, start(tool, what, path)))
        for tool, what, path, process in jobs:
            count, text = verdict(process, path, until)
            planted = what[0] == "--plant"
            wrong += count is None or (count == 0) == planted
            ran, refused = len(re.findall(r"^ran ", text, re.M)), len(re.findall(r"^refused ", text, re.M))
            label = f"planted: {PLANTED[tool]}" if planted else f"{ran} cases ran, {refused} refused"
            print(f"{tool:10} {label:36} {'did not end' if count is None else f'{count} found'}", flush=True)
            if count is None or (count and not planted) or (not planted and ran + refused < len(what) - 1):
                print(text[-1500:])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
