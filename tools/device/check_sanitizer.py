"""compute-sanitizer over a small case of every feature, on a GPU:
`PYTHONPATH=. python3 tools/device/check_sanitizer.py`.

Not collected by pytest. Forward and backward pass of each case run under each tool of compute-sanitizer, in processes
that are themselves started under the tool; a *planted* kernel, which has a mistake on purpose, shows whether a tool
finds what it looks for. Kernels that are not ours are not watched, and XLA's autotuning, which times many of those,
is off.

    --tools NAMES     of memcheck, racecheck, synccheck, initcheck; default memcheck,racecheck
    --seconds N       for all; what has not ended then is ended, and wrong
    --cases NAMES     of tests/cases/calls.py, instead of one of every feature
    --together N      processes at a time
    --logs FOLDER     where to write what was printed under a tool that found something
"""

import argparse
import collections
import concurrent.futures
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
ONE_KERNEL = (
    "one_kernel", "one_kernel_causal", "one_kernel_any_order", "one_kernel_64", "one_kernel_64_causal", "one_kernel_64_any_order",
)  # fmt: skip
"""Backward passes in one kernel, which wants head dims that no case of the table has."""
CHOSEN = ("three_groups", "third_key_slot", "split_columns", "split_by_residues")
"""Kernels that no case of the table is large enough to choose."""
PAGED = ("pages", "ragged_pages", "tree_in_pages", "int8_pages", "prefill_in_pages")
"""Keys in pages, checks of tests/backends/mosaic_gpu/test_pages.py."""
FLOAT8 = ("float8", "float8_by_block", "float8_three_groups", "float8_wide", "float8_equal_weights")
"""Products of float8, checks of tests/backends/mosaic_gpu/test_float8.py; equal weights of 32768 keys."""
PLANTED = {"memcheck": "reads past the end", "racecheck": "reads what another warp writes"}
OPTIONS = {"racecheck": ("--racecheck-report", "all", "--racecheck-detect-level", "info")}
"""Without these racecheck says nothing of the planted race: it drops what its analysis does not rank."""
OURS = "kernel_substring=mosaic_gpu_kernel"
"""The kernels that are watched: XLA's own take most of the time otherwise."""
SHARE = 1  # cases of a process
TRIES = 12  # the tool itself breaks in every third process or so, before the program under it has begun
FOUND = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def run_cases(names: list[str]) -> None:
    """Runs these cases in this process and prints for each a line `ran NAME`, or `refused NAME: why`.

    names   of tests/cases/calls.py, of ONE_KERNEL, of CHOSEN, of PAGED or of FLOAT8
    """
    import jax

    from tests.bound_case import BoundCase
    from tests.cases import CASES

    for name in names:
        try:
            if name in ONE_KERNEL:
                jax.block_until_ready(one_kernel(name))
            elif name in CHOSEN:
                jax.block_until_ready(chosen_kernel(name))
            elif name in PAGED:
                paged_call(name)
            elif name in FLOAT8:
                float8_call(name)
            else:
                problem = BoundCase(CASES[name], "bfloat16", "mosaic_gpu")
                step = jax.jit(jax.grad(problem.loss, argnums=(0, 1), has_aux=True))
                jax.block_until_ready(step(*problem.arrays()))
            print(f"ran {name}", flush=True)
        except NotImplementedError as refusal:
            print(f"refused {name}: {refusal}", flush=True)


def paged_call(name: str) -> None:
    """Runs a call over pages and compares its result with the definition, which raises AssertionError.

    name   of PAGED
    """
    from tests.backends.mosaic_gpu import test_pages

    calls = {
        "pages": lambda: test_pages.check_case("bias_by_request", interpret=False),
        "ragged_pages": lambda: test_pages.check_ragged(interpret=False),
        "tree_in_pages": lambda: test_pages.check_tree(interpret=False),
        "int8_pages": lambda: test_pages.check_quantised(*test_pages.QUANTISED[0], interpret=False),
        "prefill_in_pages": lambda: test_pages.check_prefill_in_pages(*test_pages.PREFILL[1], interpret=False),
    }
    calls[name]()


def float8_call(name: str) -> None:
    """Runs a call on float8 and compares its result with that of bfloat16, which raises AssertionError.

    name   of FLOAT8
    """
    from tests.backends.mosaic_gpu import test_float8

    cases = ("causal, scales by head", "scales by block, odd lengths", "192 queries", "two tiles of columns")
    calls = dict(zip(FLOAT8, cases, strict=False))
    if name in calls:
        test_float8.check_case(calls[name], interpret=False)
    else:
        test_float8.check_equal_weights(32768, interpret=False)


def one_kernel(name: str) -> typing.Any:
    """The gradients of q, k and v of the sum of squares of attention over 300 tokens, computed by the fused backward
    kernel.

    name   of ONE_KERNEL. "64" in it: head dim 64, otherwise 128; "causal": a causal mask, and dQ added in a fixed order; "any_order": a
           causal mask, and dQ added in any order; otherwise full attention in a fixed order

    It makes the heuristics choose the fused kernel for the rest of the process.
    """
    import jax
    import jax.numpy as jnp

    import flexjax
    from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice

    dim, deterministic = 64 if "64" in name else 128, "any_order" not in name
    full = deterministic and "causal" not in name
    hopper_fused_choice.fused_is_faster = lambda plan: True  # a problem this small would take two kernels

    def loss(*qkv: jax.Array) -> jax.Array:
        """The sum of the squares of attention's result."""
        mask_mod = None if full else flexjax.masks.causal
        options = flexjax.KernelOptions(deterministic=deterministic)
        out = flexjax.flex_attention(*qkv, mask_mod=mask_mod, kernel_options=options, implementation="mosaic_gpu")
        return jnp.square(out.astype(jnp.float32)).sum()

    draw = lambda key: jax.random.normal(key, (1, 300, 2, dim), jnp.bfloat16)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(draw, jax.random.split(jax.random.key(0), 3)))


def chosen_kernel(name: str) -> typing.Any:
    """The gradients of q, k and v of the sum of squares of attention: with three consumer warpgroups under a mask and dQ added upward
    ("hopper_three_groups"), with the ring of long rows ("third_key_slot"), by mma.sync with columns split between warpgroups ("split_columns"), or
    split by residues ("split_by_residues").

    It makes the heuristics choose these kernels for the rest of the process.
    """
    import jax
    import jax.numpy as jnp

    import flexjax
    from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice
    from flexjax.backends.mosaic_gpu.forward import hopper_three_groups
    from flexjax.backends.mosaic_gpu.machine import dq_order

    mask_mod, dim, instruction, tokens = {
        "three_groups": (flexjax.masks.causal, 64, None, 640),
        "third_key_slot": (flexjax.masks.causal, 128, None, 1021),
        "split_columns": (flexjax.masks.causal, 256, "mma", 300),
        "split_by_residues": (flexjax.masks.dilated_window(64, 4), 64, None, 1021),
    }[name]
    hopper_three_groups.SPEED_UNDER_MASK = dq_order.MOST_UPWARD_DELAY = 100.0
    if name == "three_groups":
        hopper_fused_choice.fused_is_faster = lambda plan: True

    def loss(*qkv: jax.Array) -> jax.Array:
        """The sum of the squares of attention's result."""
        options = flexjax.KernelOptions(instruction=instruction, num_stages=3 if name == "third_key_slot" else None)
        out = flexjax.flex_attention(*qkv, mask_mod=mask_mod, kernel_options=options, implementation="mosaic_gpu")
        return jnp.square(out.astype(jnp.float32)).sum()

    draw = lambda key: jax.random.normal(key, (1, tokens, 2, dim), jnp.bfloat16)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(draw, jax.random.split(jax.random.key(0), 3)))


def planted_kernel(tool: str) -> typing.Any:
    """A kernel with a mistake that the tool looks for, jitted: float32 [128] to float32 [128]."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from flexjax.backends.mosaic_gpu.machine import memory, registers

    def past_the_end(x_ref: typing.Any, out_ref: typing.Any) -> None:
        """Reads elements whose numbers are 2^28 and more, past the end of the input."""
        rows = registers.row_iota(128) + jnp.int32(1 << 28)
        out_ref[...] = memory.gather(x_ref, (rows,), (True,), "row", (128,))

    def without_a_barrier(x_ref: typing.Any, out_ref: typing.Any) -> None:
        """Reads elements of shared memory that other warps have written, without a barrier between."""

        def through(shared: typing.Any) -> None:
            """Copies the input to `shared` in one layout and from there to the output in another."""
            shared[...] = plgpu.load(x_ref, layout=plgpu.Layout.WG_STRIDED((128,), 1), optimized=False)
            out_ref[...] = plgpu.load(shared, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        pl.run_scoped(through, plgpu.SMEM((128,), jnp.float32))

    run = pl.kernel(
        {"memcheck": past_the_end, "racecheck": without_a_barrier}[tool],
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        mesh=plgpu.Mesh(grid=(1,), grid_names=("program",)),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return jax.jit(run)


def run_planted(tool: str) -> None:
    """Runs the kernel with the mistake that the tool looks for, and prints the sum of its result."""
    import jax
    import jax.numpy as jnp

    print(jax.block_until_ready(planted_kernel(tool)(jnp.ones(128, jnp.float32))).sum())


def under(tool: str, what: list[str], until: float) -> tuple[int, str]:
    """(exit status, printed text) of a child process that runs this script under a tool of compute-sanitizer.

    what    arguments of the script, ["--run", case, ...] or ["--plant", tool]
    until   time.monotonic() at which the process is killed
    """
    binary = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    environment = dict(
        os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_FLAGS="--xla_gpu_autotune_level=0", PYTHONPATH="."
    )
    command = [
        binary,
        "--tool",
        tool,
        *OPTIONS.get(tool, ()),
        "--kernel-name",
        OURS,
        sys.executable,
        os.path.abspath(__file__),
        *what,
    ]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool's own end would leave the program running on the device
            process.wait()
        out.seek(0)
        return process.returncode, out.read()


def verdict(tool: str, what: list[str], until: float, logs: str | None) -> tuple[bool, str]:
    """(whether the process under the tool ended as it should, text to print). A tool that breaks is started again.

    what    arguments of the script in that process, ["--run", case, ...] or ["--plant", tool]
    until   time.monotonic() at which the process is killed
    logs    folder for what was printed under a tool that found something; None: nowhere

    It should end with nothing found and every case run or refused, or for a planted mistake with something found.
    """
    tries, found = 0, []
    while not found and tries < TRIES and time.monotonic() < until:
        status, text = under(tool, what, until)
        found = FOUND.findall(text)
        tries += 1
    if not tries:
        return False, f"{tool}: not begun: {' '.join(what[1:])}"
    planted = what[0] == "--plant"
    count = int(found[-1]) if found else None
    ran = re.findall(r"^ran (\w+)", text, re.M)
    refused = re.findall(r"^refused .*", text, re.M)
    right = count is not None and (count > 0 if planted else count == 0 and len(ran + refused) == len(what) - 1)
    label = f"planted: {PLANTED[tool]}" if planted else ", ".join(ran) or "nothing"
    said = f"{tool}: {f'no summary, exit {status}' if count is None else f'{count} found'} in {label}"
    said += f" (begun {tries} times)" if tries > 1 else ""
    if logs and count:
        os.makedirs(logs, exist_ok=True)
        with open(os.path.join(logs, f"{tool}_{'_'.join(what[1:])}.log"), "w") as log:
            log.write(text)
    return right, "\n".join([said, *refused, *([] if right else [kinds(text) or text[-600:]])])


def kinds(text: str) -> str:
    """The findings in the tool's output, without addresses and numbers of threads: the eight most frequent lines,
    each once with its count.
    """
    plain = (
        re.sub(r"0x[0-9a-f]+|\d+", "#", line) for line in text.splitlines() if "azard" in line or "Invalid" in line
    )
    return "\n".join(f"{count:6} x {line}" for line, count in collections.Counter(plain).most_common(8))


def main() -> int:
    """Runs every process under every tool and prints the verdicts; returns the exit status, 1 where one is not as it
    should be. With --run or --plant, the arguments of its children, it runs these cases or the planted kernel instead.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--cases")
    parser.add_argument("--together", type=int, default=8)
    parser.add_argument("--logs")
    parser.add_argument("--run", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        run_cases(args.run)
        return 0
    if args.plant:
        run_planted(args.plant)
        return 0
    names = args.cases.split(",") if args.cases else [*FEATURES, *ONE_KERNEL, *CHOSEN, *PAGED, *FLOAT8]
    shares = [names[i : i + SHARE] for i in range(0, len(names), SHARE)]
    jobs = [(tool, what) for tool in args.tools.split(",") for what in work(tool, shares)]
    until = time.monotonic() + args.seconds
    wrong = 0
    with concurrent.futures.ThreadPoolExecutor(args.together) as pool:
        for right, said in pool.map(lambda job: verdict(*job, until, args.logs), jobs):
            wrong += not right
            print(said, flush=True)
    print(f"{len(jobs) - wrong} of {len(jobs)} processes as they should be")
    return int(wrong > 0)


def work(tool: str, shares: list[list[str]]) -> list[list[str]]:
    """The arguments of each process that runs under the tool: one for each share of the cases, and one for the
    planted mistake.

    shares   lists of names of cases
    """
    return [["--run", *share] for share in shares] + ([["--plant", tool]] if tool in PLANTED else [])


if __name__ == "__main__":
    sys.exit(main())
