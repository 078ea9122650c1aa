"""Times a prefix that requests share on a GPU, with `shared=` and without: `PYTHONPATH=. python3 tools/device/time_shared_prefix.py`.

Not collected by pytest. 64 requests of one token share 32768 keys and have 512 of their own, 32 query and 8 key heads of 128 in
bfloat16, pages of 64. Each line is the sum of the times of the kernels of a call (CUPTI, median over the steps), then each
kernel; the last line is the largest difference between the two calls. About a minute on an H200, of which most is compilation.

    --requests N      requests (64)
    --prefix N        keys that they share (32768)
    --own N           keys of each alone (512)
    --steps N         measured steps (20)
"""

import argparse
import functools
import sys
import typing

PAGE = 64


def main() -> int:
    """Prints the lines; returns the exit status, 1 where an element of the two results differs by 0.02 or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 64), ("prefix", 32768), ("own", 512), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    import jax
    import jax.numpy as jnp
    import numpy as np

    import flexjax
    from bench.kernel_times import kernel_times
    from flexjax import paged

    common, own = args.prefix // PAGE, args.own // PAGE
    pool = common + args.requests * own
    number = np.random.default_rng(0).permutation(pool).astype(np.int32)
    rows = [np.concatenate([number[:common], number[common + r * own :][:own]]) for r in range(args.requests)]
    make = jax.jit(lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=range(1, 5))
    keys = jax.random.split(jax.random.key(0), 3)
    arrays: dict[str, typing.Any] = {
        "query": make(keys[0], args.requests, 1, 32, 128),
        "cache": paged.PagedCache(make(keys[1], pool, PAGE, 8, 128), make(keys[2], pool, PAGE, 8, 128)),
        "table": paged.PageTable(
            jnp.asarray(np.stack(rows)),
            jnp.full(args.requests, (common + own) * PAGE, jnp.int32),
            jnp.zeros(pool, jnp.int32),
            PAGE,
        ),
        "shared": flexjax.SharedPrefix(
            jnp.zeros(args.requests, jnp.int32),
            jnp.asarray(number[None, :common]),
            jnp.asarray([args.prefix], jnp.int32),
        ),
    }

    def attend(arrays: dict[str, typing.Any], shares: bool) -> typing.Any:
        """out [R, 1, 32, 128] of paged_attention; `shares`: whether it gets `shared=`."""
        given = arrays["shared"] if shares else None
        return flexjax.paged_attention(
            arrays["query"], arrays["cache"], arrays["table"], shared=given, implementation="mosaic_gpu"
        )

    outs = []
    for shares in (True, False):
        run = jax.jit(functools.partial(attend, shares=shares))
        kernels = kernel_times(run, arrays, calls=args.steps)
        print(f"{'shared' if shares else 'not shared':<12} {1e3 * sum(kernels.values()):8.4f} ms", flush=True)
        for name, part in kernels.items():
            print(f"      {1e3 * part:8.4f} ms  {name[:80]}", flush=True)
        outs.append(run(arrays).astype(jnp.float32))
    error = float(jnp.abs(outs[0] - outs[1]).max())
    print(f"largest difference {error:.1e}", flush=True)
    return int(not error < 0.02)


if __name__ == "__main__":
    sys.exit(main())
