"""A call whose sequence is split over two processes of four CPU devices; a child process of test_context.py.

python -m tests.context.context_processes ADDRESS NUMBER      prints the largest difference from one device
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import masks

B, T, N, D = 2, 60, 4, 4


def main(address: str, number: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=int(number))
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
    rng = np.random.default_rng(0)  # the same numbers in both processes
    q, k, v = rng.standard_normal((3, B, T, N, D)).astype(np.float32)
    table = rng.standard_normal((N, 2 * T)).astype(np.float32)
    ids = np.sort(rng.integers(0, 3, T))
    mask_mod = flexjax.and_masks(masks.causal, masks.document(ids))
    layout = flexjax.context_layout(mask_mod, T, devices=4, block_size=4)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, context: object = None) -> jax.Array:
        mod = lambda s, b, h, i, j: s + table[h, i - j + T]
        out = flexjax.flex_attention(q, k, v, score_mod=mod, mask_mod=mask_mod, context=context)  # type: ignore[call-overload]
        return (out**2).sum()

    want = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, table)
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(AxisType.Auto,) * 2)
    split, whole = NamedSharding(mesh, P("dp", "sp")), NamedSharding(mesh, P())

    def place(x: np.ndarray, where: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(x.shape, where, lambda at: x[at])

    given = (*(place(layout.shard(x), split) for x in (q, k, v)), place(table, whole))
    context = flexjax.ContextParallel("sp", layout, "neighbours")
    with jax.set_mesh(mesh):
        grads = jax.jit(jax.grad(lambda *a: loss(*a, context=context), (0, 1, 2, 3)))(*given)
    worst = 0.0
    for i, (got, one) in enumerate(zip(grads, want, strict=True)):
        full = layout.shard(np.asarray(one)) if i < 3 else np.asarray(one)
        for shard in got.addressable_shards:
            worst = max(worst, float(jnp.abs(shard.data - full[shard.index]).max()))
    print(f"worst {worst}", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
