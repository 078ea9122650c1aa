"""Times the kernels on mma.sync on a Hopper GPU, in turns with torch: `PYTHONPATH=. python3 tools/device/time_mma.py`.

Not collected by pytest. It shows what the kernels for Ampere, Ada and RTX Blackwell do on the one card at hand, beside torch's
FlashAttention-2, which multiplies by mma.sync there too, and its FlexAttention in Triton, twice: with WGMMA, as Triton compiles it there,
and with mma.sync. Two lines for each workload: milliseconds and TFLOP/s of a pass, and the time of each peer over ours. In each round every
peer is measured once, then each of ours; of all rounds the least counts. Every forward result is compared with that of the kernels for
Hopper first; the exit status is 1 where one differs. Torch compiles every workload at the same time, in two processes of its own for each;
nothing is timed before all of them have compiled or --compile seconds have passed, after which a process that has not is ended and its
workload says so. time_mma_backward.py compares gradients and sizes of the backward pass.

    --workloads TEXT   names of workloads of the gpu suite, by semicolons
    --tiles TEXT       configurations of the forward pass beside the default, by semicolons
    --rounds N         measurements of each peer and of each of ours (3)
    --compile N        seconds that torch has to compile (150)
    --seconds N        workloads that begin later are left out (300)
    --no-torch         without peers
"""

# pyright: reportMissingImports=false
# torch is measured where it is installed

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from tools.device import time_mma_backward

WORKLOADS = (
    "causal d128;full d128;causal d64;full d64;window 1025 d128;12 documents d128;ALiBi causal d128;soft cap causal d128;"
    "relative bias causal d64;causal d256"
)
TILES: dict[str, dict[str, Any]] = {
    "default": {},
    "cp.async": {"copying": "cp.async"},
    "one stage": {"stages": 1},
    "rescale always": {"lazy_rescale": False},
    "two groups of 64": {"groups": 2, "rows": 64},
    "32 keys": {"block_kv": 32},
    "128 keys": {"block_kv": 128},
    "keys backwards": {"reverse_kv": True},
    "polynomials 2/8": {"polynomials": 2},
}
MOST_ERROR = 5e-3
"""The largest norm of a difference from the kernels for Hopper, in norms of the result."""
STEP = "both passes"
"""The name of our training step beside those of TILES."""
MMA_SYNC = "DISABLE_MMA_V3"
"""The variable by which Triton compiles products as mma.sync on Hopper, where it takes WGMMA without it."""


def torch_calls(problem: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name of a torch peer that can run the workload -> its forward and its backward pass, compiled; in a process without jax."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from bench import torch_flex
    from bench.inputs import random_arrays
    from bench.suites import MODS

    torch._dynamo.reset()
    arrays, array = random_arrays(problem)
    tensors = (
        torch_flex.tensor(arrays[n], problem.dtype).transpose(1, 2).contiguous() for n in ("q", "k", "v", "d_out")
    )
    *inputs, d_out = tensors
    for x in inputs:
        x.requires_grad_(True)
    grouped = {"enable_gqa": problem.heads != problem.kv_heads}
    found = {}
    if MMA_SYNC not in os.environ and problem.mod is None and problem.mask in ("full", "causal"):
        attend, causal = torch.nn.functional.scaled_dot_product_attention, problem.mask == "causal"

        def flash() -> Any:
            """FlashAttention-2."""
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return attend(*inputs, is_causal=causal, **grouped)

        found["FA2"] = flash
    stored = None if array is None or problem.mod is None else torch_flex.tensor(array, MODS[problem.mod].stored)
    if stored is not None and problem.learns:
        inputs.append(stored.requires_grad_(True))
    mask, length = torch_flex._mask(problem, "cuda"), problem.length
    # not compiled: inductor takes minutes for the entries of documents and windows at this length
    made = None if mask is None else create_block_mask(mask, None, None, length, length, device="cuda")
    compiled, mod = torch.compile(flex_attention, dynamic=False), torch_flex._mod(problem, stored)
    flex = "Flex on mma.sync" if MMA_SYNC in os.environ else "Flex"
    found[flex] = lambda: compiled(*inputs[:3], score_mod=mod, block_mask=made, **grouped)
    calls = {}
    for name, call in found.items():
        out, wanted = call(), inputs[:3] if name == "FA2" else inputs
        pull = functools.partial(torch.autograd.grad, out, wanted, d_out, retain_graph=True)
        pull()
        calls[name] = call, pull
    torch.cuda.synchronize()
    return calls


def serve_torch(name: str) -> None:
    """Compiles a workload and prints the line "compiled". At each line of the input "time" measures it once and prints a line of JSON:
    peer -> seconds of both passes, by CUDA events; {"error": why} in its place, also where the workload does not compile.

    name   of the workload, one of the gpu suite
    """
    from bench import torch_flex
    from bench.suites import SUITES

    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    failed: dict[str, Any] = {}
    try:
        torch_flex.facts()
        calls = torch_calls({p.name: p for p in SUITES["gpu"]}[name])
    except Exception as error:  # a peer that fails says so and the others go on
        failed = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    print("compiled", flush=True)
    for _ in sys.stdin:
        try:
            answer = failed or {n: [torch_flex.events(c, 3) for c in passes] for n, passes in calls.items()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        print("answer " + json.dumps(answer), flush=True)


class Torch:
    """A process that has compiled a workload in torch.

    name       of the workload
    apart      variables of the process beside ours
    compiled   set when the workload is compiled, has failed to, or the process has ended
    """

    def __init__(self, name: str, apart: dict[str, str]) -> None:
        """Starts the process."""
        self.name = name
        self.compiled = threading.Event()
        given = {
            **os.environ,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            **apart,
        }  # else each starts a pool of as many as there are cores
        command = [sys.executable, __file__, "--serve-torch", name]
        pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, env=given, start_new_session=True, **pipes)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        """Sets `compiled` at the line that says so, or at the last one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == "compiled\n":
                break
        self.compiled.set()

    def measure(self) -> dict[str, Any]:
        """Peer -> seconds of one measurement of the forward and of the backward pass, or {"error": why}."""
        if self.process.returncode is not None:
            return {"error": f"has ended with {self.process.returncode}"}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # of a process that has ended
            self.process.stdin.write("time\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line[len("answer ") :])
        return {"error": f"has ended with {self.process.wait()}"}

    def end(self) -> None:
        """Ends the process, which frees its memory of the GPU, and the compilers that it has started, which share its files."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.compiled.wait()  # the other thread has read the last line
        with contextlib.suppress(BrokenPipeError), self.process:
            pass  # leaving it closes its files


def answers(processes: list[Torch]) -> tuple[dict[str, list[float]], set[str]]:
    """(peer -> seconds of one measurement of the forward and of the backward pass, why peers failed), of one process after the other."""
    found: dict[str, list[float]] = {}
    errors: set[str] = set()
    for process in processes:
        answer = process.measure()
        if "error" in answer:
            errors.add(answer["error"])
        else:
            found |= answer
    return found, errors


def in_turns(
    rounds: int, processes: list[Torch], ours: dict[str, Callable[[], float]]
) -> tuple[dict[str, list[float]], dict[str, float], set[str]]:
    """Measures torch and our calls in turns, so that both see the same clocks of the GPU: in each round every torch process once, then each
    of ours once.

    ours   name -> a function that measures a call and returns seconds

    Returns (peer -> its least seconds of the forward and of the backward pass, name -> the least seconds, why peers failed).
    """
    peers: dict[str, list[float]] = {}
    own: dict[str, float] = {}
    errors: set[str] = set()
    for _ in range(rounds):
        found, failed = answers(processes)
        errors |= failed
        for peer, passes in found.items():
            peers[peer] = [min(pair) for pair in zip(peers.get(peer, passes), passes, strict=True)]
        for name, measure in ours.items():
            took = measure()
            own[name] = min(own.get(name, took), took)
    return peers, own, errors


def forward(problem: Any, instruction: str | None, fields: dict[str, Any]) -> Any:
    """The jitted forward pass of a workload, with fields of the tile replaced while it is traced."""
    import jax

    import flexjax
    from bench import gpu_peers
    from flexjax.backends.mosaic_gpu.forward import mma_tiles as forward_mma_tiles

    chosen, attend = forward_mma_tiles.forward_tile, flexjax.flex_attention

    def asking(*arrays: Any, kernel_options: Any = None, **options: Any) -> Any:
        """flex_attention with the instruction among its options."""
        asked = dataclasses.replace(kernel_options or flexjax.KernelOptions(), instruction=instruction)
        return attend(*arrays, kernel_options=asked, **options)

    def run(*operands: Any) -> Any:
        """The call, under the replaced functions."""
        replaced = lambda plan, card: dataclasses.replace(chosen(plan, card), **fields)
        forward_mma_tiles.forward_tile, flexjax.flex_attention = replaced, asking
        try:
            return jax.jit(gpu_peers.flexjax(problem)).trace(*operands).lower().compile()
        finally:
            forward_mma_tiles.forward_tile, flexjax.flex_attention = chosen, attend

    return run


def report(problem: Any, which: str, tile: str, took: float, peers: dict[str, float]) -> None:
    """Prints a line: milliseconds and TFLOP/s of a pass ("forward" or "backward"), and the times of the peers over it."""
    rate = lambda seconds: problem.flops(which) / seconds / 1e12
    ratios = ", ".join(f"{t / took:.2f} of {p} ({1e3 * t:.3f} ms {rate(t):.0f})" for p, t in peers.items())
    print(f"{problem.name:26} {which:8} {tile:18} {1e3 * took:8.3f} ms {rate(took):4.0f} TFLOP/s  {ratios}", flush=True)


def main() -> int:
    """Times every workload; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--tiles", default="default", help=f"of {', '.join(TILES)}, by semicolons")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--compile", type=float, default=150.0)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--serve-torch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_torch:
        serve_torch(args.serve_torch)
        return 0
    import jax
    import jax.numpy as jnp

    from bench import gpu_peers
    from bench.suites import SUITES

    names, began = args.workloads.split(";"), time.perf_counter()
    caches = tempfile.mkdtemp()  # of the processes whose code is compiled for mma.sync
    apart = {MMA_SYNC: "1", "TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": os.path.join(caches, "triton")}
    torch = [] if args.no_torch else [Torch(name, more) for name in names for more in ({}, apart)]
    for process in torch:
        process.compiled.wait(max(0.0, began + args.compile - time.perf_counter()))
    for process in torch:
        if not process.compiled.is_set():
            print(f"{process.name}: torch has not compiled in {args.compile:g} s", flush=True)
            process.end()
    if torch:
        print(f"torch compiled in {time.perf_counter() - began:.0f} s", flush=True)
    named, wrong, began = {p.name: p for p in SUITES["gpu"]}, 0, time.perf_counter()
    for name in names:
        if time.perf_counter() - began > args.seconds:
            print(f"{name:26} not measured: no time is left", flush=True)
            continue
        problem, processes = named[name], [p for p in torch if p.name == name]
        arrays, array = gpu_peers.on_device(problem)
        operands = (arrays["q"], arrays["k"], arrays["v"], array)
        want = forward(problem, None, {})(*operands)(*operands).astype(jnp.float32)
        calls: dict[str, Any] = {}
        for tile in args.tiles.split(";"):
            try:
                jax.clear_caches()
                calls[tile] = forward(problem, "mma", TILES[tile])(*operands)
                got = calls[tile](*operands).astype(jnp.float32)
            except Exception as error:  # a configuration that does not fit says so
                print(f"{name:26} {tile:18} {type(error).__name__}: {str(error)[:150]}", flush=True)
                calls.pop(tile, None)
                continue
            gap = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
            if not gap < MOST_ERROR:
                wrong += 1
                print(f"{name:26} {tile:18} WRONG: differs by {gap:.2e}", flush=True)
        both = functools.partial(time_mma_backward.step(problem, instruction="mma")[0], **arrays, array=array)
        jax.block_until_ready(both())
        measure = lambda call, *given: lambda: gpu_peers.device_time(call, *given, calls=10)[0]
        ours = {tile: measure(call, *operands) for tile, call in calls.items()}
        peers, own, errors = in_turns(args.rounds, processes, ours | {STEP: measure(both)})
        for error in sorted(errors):
            print(f"{name}: torch {error}", flush=True)
        for tile in calls:
            beside = {p: t[0] for p, t in peers.items()} if tile == "default" else {}
            report(problem, "forward", tile, own[tile], beside)
        if "default" in calls:
            took = own[STEP] - own["default"]
            report(problem, "backward", "default", took, {p: t[1] for p, t in peers.items()})
        for process in processes:
            process.end()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
