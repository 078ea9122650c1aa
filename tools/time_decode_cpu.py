"""Times a step of decoding on a CPU beside dense attention in jax.numpy: `python -m tools.time_decode_cpu [--dtype bfloat16]`.

B4 N8 M2 S4096 D64, one query for each request unless options say otherwise, at full lengths and at an eighth of them. Each round runs every call five times, so that a
slow phase of the machine slows all, and counts the last four, whose keys may be in a cache. A line has the fifth percentile of wall time, because other processes
take cores away, the median of processor time, and dense time over that of the call. Ten seconds. On one core (taskset) processor time is
what a call computes; on more it includes waiting threads.

    --dtype NAME     float32 (default), bfloat16 or float16
    --queries N ..   queries of each request (1); with several numbers, a table for each
    --key-heads N    key heads (2); 8 without groups
    --rounds N       rounds (40)
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import masks, paged

B, N, S, D = 4, 8, 4096, 64
PAGE, BURST = 64, 5
Call = Callable[..., jax.Array]


def dense(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """Attention [B, T, N, D] over the first `lengths` keys, with float32 scores."""
    heads = k.shape[2]
    grouped = q.reshape(B, -1, heads, N // heads, D)
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


def in_pages(q: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
    """The same as `causal` by paged_attention; key and value are pools [P, PAGE, key heads, D] that hold the pages of all requests backwards."""
    pages = jnp.arange(len(key) - 1, -1, -1, dtype=jnp.int32).reshape(B, -1)
    table = paged.PageTable(pages, lengths, jnp.zeros(len(key), jnp.int32), PAGE)
    return flexjax.paged_attention(q, paged.PagedCache(key, value), table)


def main() -> None:
    """Prints a table for each number of queries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--queries", type=int, nargs="+", default=[1])
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    for queries in args.queries:
        print(f"{args.dtype}, {queries} queries, {N} heads, {args.key_heads} key heads")
        measure(args.dtype, queries, args.key_heads, args.rounds)


def measure(dtype: str, queries: int, key_heads: int, rounds: int) -> None:
    """Prints a line for each call and length; the arguments are the options of the same names."""
    rng = np.random.default_rng(0)
    draw = lambda tokens, heads: jnp.asarray(rng.standard_normal((B, tokens, heads, D)), dtype)
    q, k, v = draw(queries, N), draw(S, key_heads), draw(S, key_heads)
    pools = [jnp.flip(x.reshape(-1, PAGE, key_heads, D), 0) for x in (k, v)]
    lengths = {"full": jnp.full(B, S, jnp.int32), "an eighth": jnp.full(B, S // 8, jnp.int32)}
    calls: dict[str, Call] = {"dense": dense, "lengths": with_lengths, "causal": causal, "pages": in_pages}
    jitted = {name: jax.jit(call) for name, call in calls.items()}
    wall: dict[tuple[str, str], list[float]] = {(call, many): [] for call in calls for many in lengths}
    processor = {at: list(found) for at, found in wall.items()}
    for n in range(rounds + 1):
        for call, many in wall:
            arrays = (q, *pools) if call == "pages" else (q, k, v)
            for again in range(BURST):
                start, began = time.perf_counter(), time.process_time()
                jitted[call](*arrays, lengths[many]).block_until_ready()
                if n and again:  # the first round compiles
                    wall[call, many].append(time.perf_counter() - start)
                    processor[call, many].append(time.process_time() - began)
    base, busy_base = np.percentile(wall["dense", "full"], 5), np.median(processor["dense", "full"])
    for (call, many), found in wall.items():
        took, busy = np.percentile(found, 5), np.median(processor[call, many])
        text = f"{call}, {many}"
        print(
            f"{text:<20} {1e3 * took:6.2f} ms, processor {1e3 * busy:6.2f} ms, "
            f"dense at full lengths over it {base / took:.2f}, processor {busy_base / busy:.2f}"
        )


if __name__ == "__main__":
    main()
