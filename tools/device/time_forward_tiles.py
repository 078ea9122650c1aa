"""Times configurations of the forward kernel on a GPU: `PYTHONPATH=. python3 tools/device/time_forward_tiles.py`.

Not collected by pytest. A configuration is a set of fields of `ForwardTile` that replace what the heuristics choose.
Before it is timed, its result is compared with that of the default.

    --problems TEXT   of the gpu suite (bench/suites.py), those whose names contain one of these, by semicolons
    --tiles TEXT      names of configurations in TILES, by semicolons
    --minutes N       begin no other problem after that long
"""

import argparse
import dataclasses
import sys
import time
from typing import Any

DYNAMIC = {"persistent": False, "dynamic_scheduler": True}
TILES: dict[str, dict[str, Any]] = {
    "default": {},
    "dynamic scheduler": DYNAMIC,
    "dynamic scheduler, two query slots": {**DYNAMIC, "stages": 2, "value_stages": 2, "query_slots": 2},
    "dynamic scheduler, staggered": {**DYNAMIC, "overlap": True},
    "dynamic scheduler, whole steps": {**DYNAMIC, "overlap": False},
    "dynamic scheduler, no ping-pong": {**DYNAMIC, "ping_pong": False},
    "persistent": {"persistent": True, "dynamic_scheduler": False},
    "three groups": {"groups": 3, "ping_pong": False},
    "three groups, overlap": {"groups": 3, "ping_pong": False, "overlap": True},
    "one tile each": {"persistent": False, "dynamic_scheduler": False},
    "polynomials 1/8": {"polynomials": 1},
    "polynomials 2/8": {"polynomials": 2},
    "polynomials 4/8": {"polynomials": 4},
    "nothing staged": {"staged_slots": 0},
    "keys backwards": {"reverse_kv": True},
    "keys forwards": {"reverse_kv": False},
    "key barrier prefetched": {"prefetch_key_barrier": True},
    "key barrier not prefetched": {"prefetch_key_barrier": False},
    "no ping-pong": {"ping_pong": False},
    "lazy rescaling": {"lazy_rescale": True},
    "dynamic scheduler, polynomials 1/8": {**DYNAMIC, "polynomials": 1},
    "dynamic scheduler, polynomials 2/8": {**DYNAMIC, "polynomials": 2},
}


def measure(problem: Any, fields: dict[str, Any], operands: tuple[Any, ...]) -> tuple[float, Any]:
    """(milliseconds of device time, out) of the forward pass of a problem.

    fields     of ForwardTile, which replace what the heuristics choose; whether they fit is checked by the kernel alone
    operands   query, key, value and the captured array

    It clears jax's caches before, and puts the heuristics back afterwards, also where the call raises.
    """
    import jax

    from bench import gpu_peers
    from flexjax.backends.mosaic_gpu.families import choose_kernel
    from flexjax.passes import lowered

    chosen = choose_kernel.forward_kernel
    choose_kernel.forward_kernel = lambda plan: dataclasses.replace(chosen(plan), **fields)
    try:
        jax.clear_caches()
        lowered.forget()
        forward = jax.jit(gpu_peers.flexjax(problem))
        out = jax.block_until_ready(forward(*operands))
        return 1e3 * gpu_peers.device_time(forward, *operands)[0], out
    finally:
        choose_kernel.forward_kernel = chosen


def main() -> int:
    """Times every configuration on every problem and prints a line for each; returns the exit status, 1 where a result
    differs from that of the first configuration that ran by 5e-3 or more of its norm. Problems that learn are left out;
    a configuration that raises has a line with its error and does not count.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="")
    parser.add_argument("--tiles", default="")
    parser.add_argument("--minutes", type=float, default=8)
    args = parser.parse_args()
    began = time.monotonic()
    import jax
    import jax.numpy as jnp

    from bench import gpu_peers
    from bench.suites import SUITES

    asked = [t for t in args.tiles.split(";") if t] or list(TILES)
    wrong = 0
    for problem in SUITES["gpu"]:
        parts = [p for p in args.problems.split(";") if p]
        if problem.learns or (parts and not any(p in problem.name for p in parts)):
            continue
        if time.monotonic() - began > 60 * args.minutes:
            print(f"{problem.name}: not begun within {args.minutes:g} minutes", flush=True)
            continue
        arrays, array = gpu_peers.on_device(problem)
        operands = (arrays["q"], arrays["k"], arrays["v"], array)
        plain: Any = None
        for name in asked:
            try:
                took, out = measure(problem, TILES[name], operands)
            except Exception as error:  # a configuration that does not fit says so
                print(f"{problem.name:28} {name:36} {type(error).__name__}: {str(error)[:120]}", flush=True)
                continue
            out = out.astype(jnp.float32)
            plain = out if plain is None else plain
            gap = float(jnp.linalg.norm(out - plain) / jnp.linalg.norm(plain))
            wrong += not gap < 5e-3
            rate = problem.flops("forward") / took / 1e9
            print(f"{problem.name:28} {name:36} {took:8.3f} ms {rate:6.0f} TFLOP/s  differs {gap:.1e}", flush=True)
        jax.clear_caches()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
