"""Times a step of decoding on a CPU beside dense attention in jax.numpy: `python -m tools.time_decode_cpu [--dtype bfloat16]`.

B4 N8 M2 S4096 D64, one query for each request, at full lengths and at an eighth of them. Each round runs every call once, so that a slow
phase of the machine slows all; a line has the medians of wall time and of processor time, and dense time over that of the call. Ten seconds.

    --dtype NAME     float32 (default), bfloat16 or float16
    --queries N      queries of each request (1)
    --rounds N       rounds (60)
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import masks

B, N, M, S, D = 4, 8, 2, 4096, 64
Call = Callable[..., jax.Array]


def dense(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """Attention [B, T, N, D] over the first `lengths` keys, with float32 scores."""
    grouped = q.reshape(B, -1, M, N // M, D)
    s = jnp.einsum("btmgd,bsmd->bmgts", grouped, k, preferred_element_type=jnp.float32) * D**-0.5
    s = jnp.where((jnp.arange(S) < lengths[:, None])[:, None, None, None], s, -jnp.inf)
    return jnp.einsum("bmgts,bsmd->btmgd", jax.nn.softmax(s, -1).astype(v.dtype), v).reshape(q.shape)


def with_lengths(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """The same by flex_attention."""
    return flexjax.flex_attention(q, k, v, key_value_seq_lengths=lengths)


def causal(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """The same with a causal mask, whose last query lies at the last key."""
    place = flexjax.Origin(query="end")
    return flexjax.flex_attention(q, k, v, key_value_seq_lengths=lengths, mask_mod=masks.causal, origin=place)


def main() -> None:
    """Prints a line for each call and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    draw = lambda tokens, heads: jnp.asarray(rng.standard_normal((B, tokens, heads, D)), args.dtype)
    arrays = draw(args.queries, N), draw(S, M), draw(S, M)
    lengths = {"full": jnp.full(B, S, jnp.int32), "an eighth": jnp.full(B, S // 8, jnp.int32)}
    calls: dict[str, Call] = {"dense": jax.jit(dense), "lengths": jax.jit(with_lengths), "causal": jax.jit(causal)}
    wall: dict[tuple[str, str], list[float]] = {(call, many): [] for call in calls for many in lengths}
    processor = {at: list(found) for at, found in wall.items()}
    for n in range(args.rounds + 1):
        for call, many in wall:
            start, began = time.perf_counter(), time.process_time()
            calls[call](*arrays, lengths[many]).block_until_ready()
            if n:  # the first round compiles
                wall[call, many].append(time.perf_counter() - start)
                processor[call, many].append(time.process_time() - began)
    base = statistics.median(wall["dense", "full"])
    for (call, many), found in wall.items():
        took, busy = statistics.median(found), statistics.median(processor[call, many])
        text = f"{call}, {many}"
        print(
            f"{text:<20} {1e3 * took:6.2f} ms, processor {1e3 * busy:6.2f} ms, dense at full lengths over it {base / took:.2f}"
        )


if __name__ == "__main__":
    main()
