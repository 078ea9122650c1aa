"""Times the manners of the forward kernel beside each other, on a GPU: `PYTHONPATH=. python3 tools/device/time_manners.py`.

Not collected by pytest. A manner is a set of fields of `ForwardTile` in place of what the heuristics choose; each runs once for
its numbers, against the default, before it is timed.

    --problems TEXT   of the gpu suite (flexjax/bench/suites.py), those whose names contain one of these, by semicolons
    --manners TEXT    names below, by semicolons
    --minutes N       begin no other problem after that long
"""

import argparse
import dataclasses
import sys
import time
from typing import Any

QUEUE = {"persistent": False, "queue": True}
MANNERS: dict[str, dict[str, Any]] = {
    "default": {},
    "queue": QUEUE,
    "queue, two query slots": {**QUEUE, "stages": 2, "value_stages": 2, "query_slots": 2},
    "queue, staggered": {**QUEUE, "overlap": True},
    "queue, whole steps": {**QUEUE, "overlap": False},
    "queue, no turns": {**QUEUE, "turns": False},
    "persistent": {"persistent": True, "queue": False},
    "three groups": {"groups": 3, "turns": False, "query_slots": 1},
    "three groups, overlap": {"groups": 3, "turns": False, "query_slots": 1, "overlap": True},
    "one tile each": {"persistent": False, "queue": False},
    "polynomials 1/8": {"polynomials": 1},
    "polynomials 2/8": {"polynomials": 2},
    "polynomials 4/8": {"polynomials": 4},
    "nothing staged": {"staged_slots": 0},
    "reverse": {"reverse": True},
    "forwards": {"reverse": False},
    "early": {"early": True},
    "not early": {"early": False},
    "no turns": {"turns": False},
    "slack": {"slack": True},
    "queue, polynomials 1/8": {**QUEUE, "polynomials": 1},
    "queue, polynomials 2/8": {**QUEUE, "polynomials": 2},
}


def measure(problem: Any, manner: dict[str, Any], operands: tuple[Any, ...]) -> tuple[float, Any]:
    """(milliseconds, out) of the forward pass; the manner stands in for the heuristics."""
    import jax

    from flexjax.backends.mosaic_gpu import tiles
    from flexjax.bench import gpu_peers

    chosen = tiles.forward_tile
    tiles.forward_tile = lambda plan: dataclasses.replace(chosen(plan), **manner)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.clear_caches()
        forward = jax.jit(gpu_peers.flexjax(problem))
        out = jax.block_until_ready(forward(*operands))
        return 1e3 * gpu_peers.device_time(forward, *operands)[0], out
    finally:
        tiles.forward_tile = chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="")
    parser.add_argument("--manners", default="")
    parser.add_argument("--minutes", type=float, default=8)
    args = parser.parse_args()
    began = time.monotonic()
    import jax
    import jax.numpy as jnp

    from flexjax.bench import gpu_peers
    from flexjax.bench.suites import SUITES

    asked = [t for t in args.manners.split(";") if t] or list(MANNERS)
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
                took, out = measure(problem, MANNERS[name], operands)
            except Exception as error:  # a manner that does not fit says so
                print(f"{problem.name:28} {name:26} {type(error).__name__}: {str(error)[:120]}", flush=True)
                continue
            out = out.astype(jnp.float32)
            plain = out if plain is None else plain
            gap = float(jnp.linalg.norm(out - plain) / jnp.linalg.norm(plain))
            wrong += not gap < 5e-3
            rate = problem.flops("forward") / took / 1e9
            print(f"{problem.name:28} {name:26} {took:8.3f} ms {rate:6.0f} TFLOP/s  differs {gap:.1e}", flush=True)
        jax.clear_caches()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
