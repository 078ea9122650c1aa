"""The kernels inside shard_map over all GPUs of a machine: `PYTHONPATH=. python3 tools/device/check_mesh.py`.

Not collected by pytest: it needs two Hopper GPUs or more. It compares the call of tests/cases/on_mesh.py, batch over
the first axis of the mesh and heads over the second, with xla on one GPU; then it times dense attention on one GPU
and on all.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import flexjax
from tests.cases import on_mesh

ALLOWED = 2e-2  # of the largest value, bfloat16


def mesh_of_all() -> Mesh:
    """The mesh of all GPUs: axes "batch", of size 2, and "heads"."""
    devices = jax.devices()
    return Mesh(np.array(devices).reshape(2, len(devices) // 2), ("batch", "heads"))


def gap(got: jax.Array, right: jax.Array) -> float:
    """The largest difference of two arrays, over the largest magnitude of the second."""
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (got, right))
    return float(np.abs(a - b).max() / np.abs(b).max())


def check(mesh: Mesh) -> int:
    """Runs the call on the mesh, with and without check_vma, and prints the error of each result against xla on one
    GPU; returns how many results are wrong, by ALLOWED or more.
    """
    wrong = 0
    arrays = on_mesh.arrays("bfloat16")
    want = jax.jit(functools.partial(on_mesh.results, "xla", None, 64))(*arrays)
    for check_vma in (False, True):
        step = on_mesh.sharded(mesh, flexjax.KernelOptions(), check_vma, "mosaic_gpu", 64)
        for name, got, right in zip(on_mesh.NAMES, jax.jit(step)(*arrays), want, strict=True):
            error = gap(got, right)
            wrong += not error < ALLOWED
            print(f"check_vma={check_vma} {name}: error {error:.1e} on {len(got.sharding.device_set)} GPUs", flush=True)
    return wrong


def timed(mesh: Mesh) -> int:
    """Times causal attention forward and backward, on one GPU and on all, and prints both; returns 1 where their
    results differ, else 0.
    """
    from bench.gpu_peers import device_time

    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (4, 8192, 16, 128), jnp.bfloat16) for key in keys)

    def grads(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        """The gradients of q, k and v of the sum of causal attention's result."""
        attend = lambda *qkv: flexjax.flex_attention(*qkv, mask_mod=flexjax.masks.causal, implementation="mosaic_gpu")
        return jax.grad(lambda *qkv: attend(*qkv).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v)

    one = jax.jit(grads)
    shared = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=on_mesh.SPLIT, out_specs=on_mesh.SPLIT))
    split = [jax.device_put(x, NamedSharding(mesh, on_mesh.SPLIT)) for x in (q, k, v)]
    error = max(gap(a, b) for a, b in zip(shared(*split), one(q, k, v), strict=True))
    times = [1e3 * device_time(call, *given)[0] for call, given in ((one, (q, k, v)), (shared, split))]
    print(f"causal, B=4 T=8192 N=16 D=128: {times[0]:.2f} ms of kernels on one GPU, {times[1]:.2f} on all together")
    print(f"differs {error:.1e}")
    return int(not error < ALLOWED)


if __name__ == "__main__":
    whole = mesh_of_all()
    sys.exit(int(check(whole) + timed(whole) > 0))
