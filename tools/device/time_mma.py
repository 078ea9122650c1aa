"""Times the kernels on mma.sync on a Hopper GPU, in turns with torch: `PYTHONPATH=. python3 tools/device/time_mma.py`.

Not collected by pytest. It shows what the kernels for Ampere, Ada and RTX Blackwell do on the one card at hand, beside kernels that
also multiply by mma.sync there: torch's FlashAttention-2 and, in Triton, its FlexAttention. A line for each workload: milliseconds of
the forward pass and TFLOP/s of each, the ratio to both peers, and configurations beside the default. Every result is compared
with that of the kernels for Hopper first; the exit status is 1 where one differs. About two minutes.

    --workloads TEXT   names of workloads of the gpu suite, by semicolons
    --rounds N         measurements of each peer (3); the least counts
    --no-torch         without peers
"""

# pyright: reportMissingImports=false
# torch is measured where it is installed

import argparse
import dataclasses
import json
import subprocess
import sys
from typing import Any

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


def torch_peers(problem: Any) -> dict[str, float]:
    """Seconds of the forward pass of each torch peer that can run the workload, by CUDA events; in a process without jax."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from flexjax.bench import torch_flex
    from flexjax.bench.inputs import random_arrays
    from flexjax.bench.suites import MODS

    arrays, array = random_arrays(problem)
    q, k, v = (torch_flex.tensor(arrays[n], problem.dtype).transpose(1, 2).contiguous() for n in "qkv")
    found = {}
    if problem.mod is None and problem.mask in ("full", "causal"):
        attend = torch.nn.functional.scaled_dot_product_attention
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found["FA2"] = torch_flex.events(
                lambda: attend(
                    q, k, v, is_causal=problem.mask == "causal", enable_gqa=problem.heads != problem.kv_heads
                )
            )
    stored = None if array is None or problem.mod is None else torch_flex.tensor(array, MODS[problem.mod].stored)
    mask, length = torch_flex._mask(problem, "cuda"), problem.length
    made = None if mask is None else torch.compile(create_block_mask)(mask, None, None, length, length, device="cuda")
    compiled, mod = torch.compile(flex_attention, dynamic=False), torch_flex._mod(problem, stored)
    options = {"enable_gqa": problem.heads != problem.kv_heads}
    found["Flex"] = torch_flex.events(lambda: compiled(q, k, v, score_mod=mod, block_mask=made, **options))
    return found


def serve_torch() -> None:
    """Times the workload that each line of the input names, and prints a line of JSON."""
    from flexjax.bench import torch_flex
    from flexjax.bench.suites import SUITES

    torch_flex.facts()
    named = {p.name: p for p in SUITES["gpu"]}
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = torch_peers(named[line.strip()])
        except Exception as error:  # a peer that fails says so and the others go on
            answer = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        print("answer " + json.dumps(answer), flush=True)


def ask(process: Any, name: str) -> dict[str, float]:
    """The seconds of the torch peers on a workload; {} without them."""
    if process is None:
        return {}
    process.stdin.write(name + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("answer "):
            found = json.loads(line[len("answer ") :])
            if "error" in found:
                print(f"{name}: torch {found['error']}", flush=True)
                return {}
            return found
    return {}


def forward(problem: Any, instruction: str | None, fields: dict[str, Any]) -> Any:
    """The jitted forward pass of a workload, with fields of the tile replaced while it is traced."""
    import jax

    import flexjax
    from flexjax.backends.mosaic_gpu import forward_sm80_tiles
    from flexjax.bench import gpu_peers

    chosen, attend = forward_sm80_tiles.forward_tile, flexjax.flex_attention

    def asking(*arrays: Any, kernel_options: Any = None, **options: Any) -> Any:
        """flex_attention with the instruction among its options."""
        asked = dataclasses.replace(kernel_options or flexjax.KernelOptions(), instruction=instruction)
        return attend(*arrays, kernel_options=asked, **options)

    def run(*operands: Any) -> Any:
        """The call, under the replaced functions."""
        replaced = lambda plan, card: dataclasses.replace(chosen(plan, card), **fields)
        forward_sm80_tiles.forward_tile, flexjax.flex_attention = replaced, asking
        try:
            return jax.jit(gpu_peers.flexjax(problem)).trace(*operands).lower().compile()
        finally:
            forward_sm80_tiles.forward_tile, flexjax.flex_attention = chosen, attend

    return run


def rate(problem: Any, seconds: float) -> float:
    """TFLOP/s of a forward pass."""
    return problem.flops("forward") / seconds / 1e12


def main() -> int:
    """Times every workload; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument(
        "--tiles", default=";".join(TILES), help="of TILES, by semicolons; beside the first only on causal"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--serve-torch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_torch:
        serve_torch()
        return 0
    import jax
    import jax.numpy as jnp

    from flexjax.bench import gpu_peers
    from flexjax.bench.suites import SUITES

    process: Any = None
    if not args.no_torch:
        command = [sys.executable, __file__, "--serve-torch"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    named, wrong = {p.name: p for p in SUITES["gpu"]}, 0
    for name in args.workloads.split(";"):
        problem = named[name]
        arrays, array = gpu_peers.on_device(problem)
        operands = (arrays["q"], arrays["k"], arrays["v"], array)
        want = forward(problem, None, {})(*operands)(*operands).astype(jnp.float32)
        tiles = args.tiles.split(";") if name in ("causal d128", "causal d64") else ["default"]
        calls: dict[str, Any] = {}
        for tile in tiles:
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
        own: dict[str, float] = {}
        peers: dict[str, float] = {}
        for _ in range(args.rounds):
            for tile, call in calls.items():
                own[tile] = min(own.get(tile, 1e9), gpu_peers.device_time(call, *operands, calls=10)[0])
            for peer, took in ask(process, name).items():
                peers[peer] = min(peers.get(peer, 1e9), took)
        beside = ", ".join(f"{p} {1e3 * t:.3f} ms {rate(problem, t):.0f}" for p, t in peers.items())
        for tile, took in own.items():
            ratios = " ".join(f"{t / took:.2f} of {p}" for p, t in peers.items()) if tile == "default" else ""
            text = f"{name:26} {tile:18} {1e3 * took:8.3f} ms {rate(problem, took):4.0f} TFLOP/s  {ratios}"
            print(text + (f"  ({beside})" if tile == "default" and beside else ""), flush=True)
    if process is not None:
        process.stdin.close()
        process.wait()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
