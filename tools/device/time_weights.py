"""Times weights in place of softmax on a GPU, forward and both passes: `PYTHONPATH=. python3 tools/device/time_weights.py`.

Not collected by pytest. A line for each mask and weight function: milliseconds of the kernels of the forward pass (CUPTI), TFLOP/s of
visited positions, the time over softmax's, and milliseconds of both passes. 8192 tokens, batch 2, 16 heads of 128 and 32 of 64, bfloat16. To
compare two states of the library, run it in a checkout of each.

    --dims N ...     head dims (128 64)
    --masks TEXT     masks, by semicolons ("full;causal")
    --seconds N      begin no other line after so long (300)
"""

import argparse
import functools
import math
import sys
import time
import typing

TOKENS, BATCH, WIDTH = 8192, 2, 2048


def attend(kind: typing.Any, mask: str, q: typing.Any, k: typing.Any, v: typing.Any) -> typing.Any:
    """Attention with the weights `kind`, None for softmax, under the mask "causal" or "full"."""
    import flexjax

    words: dict[str, typing.Any] = dict(mask_mod=flexjax.masks.causal) if mask == "causal" else {}
    return flexjax.flex_attention(q, k, v, weights=kind, implementation="mosaic_gpu", **words)


def both_passes(
    kind: typing.Any, mask: str, q: typing.Any, k: typing.Any, v: typing.Any, d_out: typing.Any
) -> typing.Any:
    """The output and the gradients of q, k and v."""
    import jax

    out, pull = jax.vjp(functools.partial(attend, kind, mask), q, k, v)
    return out, pull(d_out)


def main() -> int:
    """Prints a line for each; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--masks", default="full;causal")
    parser.add_argument("--seconds", type=float, default=300)
    given = parser.parse_args()
    import jax
    import jax.numpy as jnp

    from bench import gpu_peers
    from flexjax import weights

    began = time.monotonic()
    for dim in given.dims:
        heads = WIDTH // dim
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, d_out = (jax.random.normal(key, (BATCH, TOKENS, heads, dim), jnp.bfloat16) for key in keys)
        kinds: dict[str, typing.Any] = {
            "softmax": None,
            "relu squared": weights.relu_squared(TOKENS),
            "sigmoid": weights.sigmoid(-math.log(TOKENS)),
            "silu": weights.silu(TOKENS),
            "retention": weights.retention(1 - 2.0 ** -(5 + jnp.arange(heads) % 8)),
        }
        for mask in given.masks.split(";"):
            operations = 4 * BATCH * heads * TOKENS * TOKENS * dim / (2 if mask == "causal" else 1)
            plain = 0.0
            for name, kind in kinds.items():
                if time.monotonic() - began > given.seconds:
                    print(f"{mask} d{dim} {name}: not begun", flush=True)
                    continue
                forward = gpu_peers.device_time(jax.jit(functools.partial(attend, kind, mask)), q, k, v)[0]
                plain = plain or forward
                passes = gpu_peers.device_time(jax.jit(functools.partial(both_passes, kind, mask)), q, k, v, d_out)[0]
                print(
                    f"{mask:6} d{dim:<3} {name:12} forward {1e3 * forward:7.3f} ms {operations / forward / 1e12:4.0f} TFLOP/s"
                    f" {forward / plain:.3f} of softmax, both passes {1e3 * passes:7.3f} ms",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
