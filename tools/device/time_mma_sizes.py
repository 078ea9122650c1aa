"""Times sizes of the backward kernels on mma.sync above head dim 128 on a Hopper GPU, in turns with FlashAttention-2 of torch:
`PYTHONPATH=. python3 tools/device/time_mma_sizes.py`.

Not collected by pytest. For each head dim a line for each choice of sizes: milliseconds of the backward pass, its TFLOP/s, the time of
FlashAttention-2 over it, and milliseconds of each kernel. Gradients are compared with those of the kernels for Hopper first; the exit status
is 1 where they differ. All choices are measured in turns, FlashAttention-2 too, and the least of each counts. About two minutes.

    --dims TEXT     head dims, by commas ("256,192")
    --masks TEXT    "causal", "full", by commas ("causal")
    --rounds N      rounds of measurements (5)
    --no-torch      without FlashAttention-2
"""

# pyright: reportMissingImports=false
# torch is measured where it is installed

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
from typing import Any

from tools.device import time_mma_backward

Size = tuple[int, int, int, int, bool]
CHOICES: dict[str, tuple[Size, Size] | None] = {
    "default": None,
    "rows 64 x 2, 32 visited, 2 slots": ((64, 2, 32, 2, False), (64, 2, 32, 2, False)),
    "split 128 x 64, joint 64 x 64": ((128, 2, 64, 1, True), (64, 2, 64, 1, True)),
    "split 128 x 64, apart 128 x 64": ((128, 2, 64, 1, True), (128, 2, 64, 1, True)),
    "split 64 x 64, joint 64 x 64 (163 KB)": ((64, 2, 64, 1, True), (64, 2, 64, 1, True)),
    "split 128 x 32, joint 64 x 32": ((128, 2, 32, 1, True), (64, 2, 32, 1, True)),
    "rows 64 x 2, 32 visited, 1 slot (163 KB)": ((64, 2, 32, 1, False), (64, 2, 32, 1, False)),
}
"""Name -> sizes of the dQ and of the dK/dV kernel, fields of Tiles after `copying`; None: those that the rule chooses. "(163 KB)": sizes that fit
the shared memory of 8.0."""


def problem_of(mask: str, dim: int) -> Any:
    """The workload "causal d256" of the gpu suite with this mask ("causal" or "full") and head dim."""
    from bench.suites import SUITES

    (problem,) = (p for p in SUITES["gpu"] if p.name == "causal d256")
    return dataclasses.replace(problem, name=f"{mask} d{dim}", mask=mask, dim=dim)


def serve_torch() -> None:
    """For each line "MASK DIM" of the input prints a line of JSON: the seconds of the backward pass of FlashAttention-2, by CUDA events."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from bench import torch_flex
    from bench.inputs import random_arrays

    made: dict[str, Any] = {}
    for line in sys.stdin:
        mask, dim = line.split()
        if line not in made:
            made.clear()
            problem = problem_of(mask, int(dim))
            arrays, _ = random_arrays(problem)
            of = lambda name, problem=problem, arrays=arrays: (
                torch_flex.tensor(arrays[name], problem.dtype).transpose(1, 2).contiguous()
            )
            inputs, d_out = [of(n).requires_grad_(True) for n in "qkv"], of("d_out")
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=mask == "causal")
            made[line] = functools.partial(torch.autograd.grad, out, inputs, d_out, retain_graph=True)
        print("answer " + json.dumps(torch_flex.events(made[line], 5)), flush=True)


def flash_attention(process: Any, mask: str, dim: int) -> float:
    """The seconds of one measurement of FlashAttention-2's backward pass, by the process of `serve_torch`."""
    process.stdin.write(f"{mask} {dim}\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("answer "):
            return json.loads(line[len("answer ") :])
    raise RuntimeError("The process of torch ended.")


def compiled(problem: Any, sizes: tuple[Size, Size] | None, instruction: str | None, given: tuple[Any, ...]) -> Any:
    """The compiled call that computes the gradients of a workload with these sizes."""
    import jax

    from flexjax.backends.mosaic_gpu.backward.mma_tiles import MmaBackwardTiles
    from flexjax.backends.mosaic_gpu.families import choose_kernel

    chosen = choose_kernel.mma_backward_kernels
    jax.clear_caches()
    try:
        if sizes is not None:
            choose_kernel.mma_backward_kernels = lambda plan, card: (
                MmaBackwardTiles(card.copying, *sizes[0]),
                MmaBackwardTiles(card.copying, *sizes[1]),
            )
        return time_mma_backward.step(problem, instruction=instruction)[0].lower(*given).compile()
    finally:
        choose_kernel.mma_backward_kernels = chosen


def backward_times(call: Any, given: tuple[Any, ...]) -> dict[str, float]:
    """Kernel -> seconds, of all kernels of a call but the forward kernel."""
    from bench.kernel_times import kernel_times

    found = kernel_times(call, *given, calls=5)
    return {name: took for name, took in found.items() if "flexjax_forward" not in name}


def measure(mask: str, dim: int, rounds: int, process: Any) -> int:
    """Times all choices at one head dim and prints their lines; returns how many gave wrong gradients."""
    import jax
    import jax.numpy as jnp

    from bench import gpu_peers

    problem, wrong = problem_of(mask, dim), 0
    arrays, array = gpu_peers.on_device(problem)
    given = (arrays["q"], arrays["k"], arrays["v"], arrays["d_out"], array)
    gap = lambda a, b: float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32)))
    want = compiled(problem, None, None, given)(*given)
    calls: dict[str, Any] = {}
    for name, sizes in CHOICES.items():
        try:
            call = compiled(problem, sizes, "mma", given)
            got = jax.block_until_ready(call(*given))
        except Exception as error:  # sizes that do not fit say so
            print(f"{problem.name:12} {name:42} {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        worst = max(gap(a, b) for a, b in zip(got, want, strict=True))
        if not worst < time_mma_backward.MOST_ERROR:
            wrong += 1
            print(f"{problem.name:12} {name:42} WRONG: differs by {worst:.2e}", flush=True)
        calls[name] = call
    least: dict[str, dict[str, float]] = {}
    flash: list[float] = []
    for _ in range(rounds):
        for name, call in calls.items():
            found = backward_times(call, given)
            least[name] = min(least.get(name, found), found, key=lambda x: sum(x.values()))
        if process is not None:
            flash.append(flash_attention(process, mask, dim))
    rate = lambda seconds: problem.flops("backward") / seconds / 1e12
    if flash:
        print(
            f"{problem.name:12} {'FlashAttention-2':42} {1e3 * min(flash):8.3f} ms {rate(min(flash)):4.0f} TFLOP/s",
            flush=True,
        )
    for name, found in least.items():
        took = sum(found.values())
        ratio = f"{min(flash) / took:.2f} of FA2  " if flash else ""
        short = lambda kernel: kernel.split("flexjax_")[-1].split("_mosaic")[0]
        parts = ", ".join(f"{short(kernel)} {1e3 * t:.3f}" for kernel, t in found.items() if t > 2e-5)
        print(f"{problem.name:12} {name:42} {1e3 * took:8.3f} ms {rate(took):4.0f} TFLOP/s  {ratio}{parts}", flush=True)
    return wrong


def main() -> int:
    """Times every head dim; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="256,192")
    parser.add_argument("--masks", default="causal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--serve-torch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_torch:
        serve_torch()
        return 0
    process = None
    if not args.no_torch:
        command = [sys.executable, __file__, "--serve-torch"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wrong = sum(
        measure(mask, int(dim), args.rounds, process) for mask in args.masks.split(",") for dim in args.dims.split(",")
    )
    if process is not None and process.stdin is not None:
        process.stdin.close()
        process.wait()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
