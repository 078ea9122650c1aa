"""Times a mixed batch of paged_attention on a GPU: `PYTHONPATH=. python3 tools/device/time_mixed.py`.

Not collected by pytest. 60 requests of 4096 tokens decode one token each, and one reads a chunk of 2048 tokens of its prompt, in one call
with cu_q_lens; then the same work in two calls, one for the requests that decode and one for the chunk. 32 query and 8 key heads of 128 in
bfloat16, pages of 64. Each line is the sum of the times of the kernels of a call (CUPTI, median over the steps), then each kernel;
the last lines are the ratio, which is to be at most 1.1, and the largest difference of the results. About a minute on an H200, of which
most is compilation.

    --decoding N      requests that decode (60)
    --keys N          tokens of each of them (4096)
    --chunk N         queries of the chunk (2048)
    --context N       tokens before the chunk (0)
    --steps N         measured steps (20)
"""

import argparse
import sys
import typing

PAGE = 64


def main() -> int:
    """Prints the lines; returns the exit status, 1 where an element of the results differs by 0.02 or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("decoding", 60), ("keys", 4096), ("chunk", 2048), ("context", 0), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    import jax
    import jax.numpy as jnp
    import numpy as np

    import flexjax
    from bench.kernel_times import kernel_times
    from flexjax import paged

    requests, last = args.decoding + 1, args.context + args.chunk
    columns = -(-max(args.keys, last) // PAGE)
    pool = requests * columns
    number = np.random.default_rng(0).permutation(pool).astype(np.int32).reshape(requests, columns)
    make = jax.jit(lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=range(1, 5))
    keys = jax.random.split(jax.random.key(0), 4)
    lengths = np.asarray([args.keys] * args.decoding + [last], np.int32)
    counts = np.asarray([1] * args.decoding + [args.chunk])
    arrays: dict[str, typing.Any] = {
        "one": make(keys[0], args.decoding, 1, 32, 128),
        "many": make(keys[3], 1, args.chunk, 32, 128),
        "cache": paged.PagedCache(make(keys[1], pool, PAGE, 8, 128), make(keys[2], pool, PAGE, 8, 128)),
        "pages": jnp.asarray(number),
        "lengths": jnp.asarray(lengths),
        "ends": jnp.asarray(np.cumsum([0, *counts]), jnp.int32),
    }

    def table_of(x: dict[str, typing.Any], rows: slice) -> paged.PageTable:
        """The table of some of the requests."""
        return paged.PageTable(x["pages"][rows], x["lengths"][rows], jnp.zeros(pool, jnp.int32), PAGE)

    def together(x: dict[str, typing.Any]) -> typing.Any:
        """out [tokens, 32, 128] of one call."""
        query = jnp.concatenate([x["one"][:, 0], x["many"][0]])
        table = table_of(x, slice(None))
        return flexjax.paged_attention(query, x["cache"], table, cu_q_lens=x["ends"], implementation="mosaic_gpu")

    def apart(x: dict[str, typing.Any]) -> typing.Any:
        """The same of two calls, as (out of those that decode, out of the chunk)."""
        attend = lambda q, rows: flexjax.paged_attention(q, x["cache"], table_of(x, rows), implementation="mosaic_gpu")
        return attend(x["one"], slice(args.decoding)), attend(x["many"], slice(args.decoding, None))

    took, outs = [], []
    for name, call in (("one call", together), ("two calls", apart)):
        run = jax.jit(call)
        kernels = kernel_times(run, arrays, calls=args.steps)
        took.append(sum(kernels.values()))
        print(f"{name:<12} {1e3 * took[-1]:8.4f} ms", flush=True)
        for kernel, part in kernels.items():
            print(f"      {1e3 * part:8.4f} ms  {kernel[:80]}", flush=True)
        outs.append(run(arrays))
    one, many = (x.astype(jnp.float32).reshape(-1, 32, 128) for x in outs[1])
    error = float(jnp.abs(outs[0].astype(jnp.float32) - jnp.concatenate([one, many])).max())
    print(f"one call / two calls {took[0] / took[1]:.2f}\nlargest difference {error:.1e}", flush=True)
    return int(not error < 0.02)


if __name__ == "__main__":
    sys.exit(main())
