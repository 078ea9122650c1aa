"""The kernels inside shard_map over a mesh of four devices.

    python -m tests.cases.on_mesh [WAY ...]      prints how far each result of mosaic_tpu is from that of xla on one device

Runs as a child process with XLA_FLAGS=--xla_force_host_platform_device_count=4; the two aot.py compile the same call for TPUs
and for GPUs.
Batch over one axis of the mesh, heads over the other. Captured slopes are split with the heads and learned, documents with
the batch; the block mask is built inside the shard.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import flexjax
from tests.arrays import array

WAYS = ("unchecked", "checked", "explicit")
"""Inside shard_map without and with check_vma, and under jit over explicit axes."""
NAMES = ("out", "d:q", "d:k", "d:v", "d:slopes")

SPLIT, BY_HEAD, BY_BATCH = PartitionSpec("batch", None, "heads"), PartitionSpec("heads"), PartitionSpec("batch")
IN_SPECS = (SPLIT, SPLIT, SPLIT, BY_HEAD, BY_BATCH, SPLIT)
OUT_SPECS = (SPLIT, SPLIT, SPLIT, SPLIT, BY_HEAD)


def mesh_of(devices, kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(devices).reshape(2, 2), ("batch", "heads"), axis_types=(kind, kind))


def loss(implementation: str, options: flexjax.KernelOptions | None, block: int, q, k, v, slopes, documents, w):
    """[B, T, N, D] arrays, slopes [N], documents [B, T]: sum(out * w), and out."""
    length = q.shape[1]

    def score_mod(s, b, h, i, j):
        return s - slopes[h] * jnp.abs(i - j)

    def mask_mod(b, h, i, j):
        return (i >= j) & (documents[b, i] == documents[b, j])

    block_mask = flexjax.create_block_mask(mask_mod, q.shape[0], None, length, length, block_size=block)
    out = flexjax.flex_attention(
        q, k, v, score_mod=score_mod, block_mask=block_mask, implementation=implementation, kernel_options=options
    )
    return jnp.sum((out * w).astype(jnp.float32)), out


def results(implementation: str, options: flexjax.KernelOptions | None, block: int, *arrays):
    """out and the gradients of q, k, v and slopes; `block` is the side of the mask's blocks."""
    step = jax.grad(functools.partial(loss, implementation, options, block), argnums=(0, 1, 2, 3), has_aux=True)
    grads, out = step(*arrays)
    return out, *grads


def sharded(
    mesh: Mesh, options: flexjax.KernelOptions, check_vma: bool, implementation: str = "mosaic_tpu", block: int = 32
):
    """The kernels' `results` over the mesh."""

    def shard(*arrays):
        out, dq, dk, dv, d_slopes = results(implementation, options, block, *arrays)
        # With check_vma jax adds up what the batches of a replicated array give; without it that is left to the caller.
        return out, dq, dk, dv, d_slopes if check_vma else jax.lax.psum(d_slopes, "batch")

    return jax.shard_map(shard, mesh=mesh, in_specs=IN_SPECS, out_specs=OUT_SPECS, check_vma=check_vma)


def arrays(dtype: str = "float32") -> tuple[jax.Array, ...]:
    """Random query, key, value, slopes, documents and weights of the output, for two batch entries and eight heads."""
    rng = np.random.default_rng(0)
    batch, length, heads, kv_heads, dim = 2, 200, 8, 4, 16
    q, k, v, w = (
        array(rng.standard_normal((batch, length, n, dim)), dtype) for n in (heads, kv_heads, kv_heads, heads)
    )
    slopes = array(rng.uniform(0.01, 0.3, heads), jnp.float32)
    documents = array(np.sort(rng.integers(0, 4, (batch, length)), axis=-1), jnp.int32)
    return q, k, v, slopes, documents, w


def main(*ways: str) -> None:
    """Prints the error of each result on a mesh of all devices against one device, in each way of WAYS, or in these."""
    want = jax.jit(functools.partial(results, "xla", None, 32))(*arrays())
    options = flexjax.KernelOptions(interpret=True)
    for way in ways or WAYS:
        if way == "explicit":
            mesh = mesh_of(jax.devices(), AxisType.Explicit)
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays(), IN_SPECS, strict=True)]
            with jax.set_mesh(mesh):
                split = jax.jit(functools.partial(results, "mosaic_tpu", options, 32))(*placed)
        else:
            split = jax.jit(sharded(mesh_of(jax.devices()), options, way == "checked"))(*arrays())
        for name, got, right in zip(NAMES, split, want, strict=True):
            error = np.abs(np.asarray(got) - np.asarray(right)).max() / np.abs(np.asarray(right)).max()
            print(way, name, float(error), len(got.sharding.device_set))


if __name__ == "__main__":
    main(*sys.argv[1:])
