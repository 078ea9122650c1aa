"""Times the backward pass on mma.sync on a Hopper GPU: `PYTHONPATH=. python3 tools/device/time_mma_backward.py`.

Not collected by pytest. A line for each workload and choice of sizes: milliseconds of the backward pass, its TFLOP/s, and the ratio to
the kernels for Hopper, with whose gradients every result is compared first; the exit status is 1 where one differs. About two minutes.
Torch's backward passes on the same card: `python -m bench --suite gpu --peers torch`.

    --workloads TEXT   names of workloads of the gpu suite, by semicolons
    --rounds N         measurements of each (3); the least counts
"""

import argparse
import functools
from typing import Any

WORKLOADS = (
    "causal d128;full d128;causal d64;full d64;window 1025 d128;ALiBi causal d128;relative bias causal d64;causal d256"
)
SIZES: dict[str, dict[str, int]] = {
    "default": {},
    "64 queries, 64 keys": {"block_q_bwd": 64, "block_kv_bwd": 64},
    "128 queries, 64 keys": {"block_q_bwd": 128, "block_kv_bwd": 64},
}
MOST_ERROR = 1e-2
"""The largest norm of a difference from the gradients of the kernels for Hopper, in norms of the gradient."""


def step(problem: Any, **options: Any) -> Any:
    """A workload, jitted: (q, k, v, d_out, array) -> its gradients, and (q, k, v, array) -> its result.

    options   of KernelOptions
    """
    import jax
    import jax.numpy as jnp

    import flexjax
    from bench.suites import MODS

    allowed, mask = problem.allowed(), None
    if problem.mask != "full":
        on = lambda b, h, q, kv: jnp.asarray(allowed(q, kv))
        mask = flexjax.create_block_mask(on, None, None, problem.length, problem.length)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, array: jax.Array | None) -> jax.Array:
        """Attention of the workload."""
        mod = None
        if problem.mod:
            mod = lambda s, b, h, i, j: MODS[problem.mod].apply(array, s, h, i, j)
        chosen = flexjax.KernelOptions(**options)
        return flexjax.flex_attention(q, k, v, score_mod=mod, block_mask=mask, kernel_options=chosen)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, array: jax.Array | None) -> Any:
        """The gradients of q, k and v, and of what a mod learns."""
        if not problem.learns:
            return jax.vjp(lambda q, k, v: attend(q, k, v, array), q, k, v)[1](d_out)
        return jax.vjp(attend, q, k, v, array)[1](d_out)

    return jax.jit(both), jax.jit(attend)


def main() -> int:
    """Times every workload; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    import jax
    import jax.numpy as jnp

    from bench import gpu_peers
    from bench.suites import SUITES

    named, wrong = {p.name: p for p in SUITES["gpu"]}, 0
    for name in args.workloads.split(";"):
        problem = named[name]
        arrays, array = gpu_peers.on_device(problem)
        operands = arrays["q"], arrays["k"], arrays["v"], array
        least = lambda call, *given: min(gpu_peers.device_time(call, *given)[0] for _ in range(args.rounds))
        gap = lambda a, b: float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32)))
        hopper, want = 0.0, None
        for label, options in {"Hopper": {}, **{n: {"instruction": "mma", **s} for n, s in SIZES.items()}}.items():
            jax.clear_caches()
            both, attend = step(problem, **options)
            try:
                got = jax.block_until_ready(both(**arrays, array=array))
            except NotImplementedError as error:
                print(f"{name:26} {label:22} {str(error)[:150]}", flush=True)
                continue
            want = got if want is None else want
            worst = max(gap(a, b) for a, b in zip(got, want, strict=True))
            if not worst < MOST_ERROR:
                wrong += 1
                print(f"{name:26} {label:22} WRONG: differs by {worst:.2e}", flush=True)
            took = least(functools.partial(both, **arrays, array=array)) - least(attend, *operands)
            hopper = hopper or took
            rate = problem.flops("backward") / took / 1e12
            print(
                f"{name:26} {label:22} {1e3 * took:8.3f} ms {rate:4.0f} TFLOP/s  {hopper / took:.2f} of Hopper",
                flush=True,
            )
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
