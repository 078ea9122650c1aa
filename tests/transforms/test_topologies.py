"""Ahead of time for devices that are not here: the front door, with arguments on the devices of a topology and nothing else.

    python -m tests.transforms.test_topologies gpu | tpu | twice        what the tests run in child processes

Skipped where the wheels that describe such devices are missing.
"""

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import flexjax
from flexjax import masks

HAS_GPU = importlib.util.find_spec("jax_cuda13_plugin") is not None and jax.__version_info__ >= (0, 11)
HAS_TPU = importlib.util.find_spec("libtpu") is not None


def child(what: str) -> list[str]:
    """The words that `main` prints in a process of its own, which has no accelerator."""
    from tests.backends.mosaic_tpu import aot

    command = [sys.executable, "-m", "tests.transforms.test_topologies", what]
    environment = {**os.environ, **aot.ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def assert_forward_and_backward(counts: list[str]) -> None:
    """The same kernels wherever the arguments are."""
    assert len(counts) == 3
    assert len(set(counts)) == 1
    assert int(counts[0]) >= 2


@pytest.mark.skipif(not HAS_GPU, reason="describing a GPU needs the wheel jax-cuda13-plugin, and its kernels jax 0.11")
def test_gpu() -> None:
    assert_forward_and_backward(child("gpu"))


@pytest.mark.skipif(not HAS_TPU, reason="describing a TPU needs the wheel libtpu")
def test_tpu() -> None:
    assert_forward_and_backward(child("tpu"))


@pytest.mark.skipif(not (HAS_GPU or HAS_TPU), reason="a device is described by the wheel jax-cuda13-plugin or libtpu")
def test_kernels_that_are_imported_in_a_trace_do_not_have_it_made_twice() -> None:
    assert child("twice") == ["1"]


def loss(q: jax.Array) -> jax.Array:
    return flexjax.flex_attention(q, q, q, mask_mod=masks.causal).astype(jnp.float32).sum()


def kernels(devices: list, name: str) -> None:
    """Prints how many there are in a program whose arguments are on a device, on a mesh, and on a mesh that is set."""
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    def count(sharding: jax.sharding.Sharding) -> None:
        x = jax.ShapeDtypeStruct((2, 256, 2, 128), jnp.bfloat16, sharding=sharding)
        print(jax.jit(jax.grad(loss)).lower(x).as_text().count(name))

    mesh = Mesh(np.array(devices[:1]), ("x",))
    count(SingleDeviceSharding(devices[0]))
    count(NamedSharding(mesh, PartitionSpec("x")))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        count(NamedSharding(mesh, PartitionSpec("x")))


def main(what: str) -> None:
    if what == "gpu":
        from tests.backends.mosaic_gpu import compile_hopper

        kernels(compile_hopper.topology(1).devices, "mosaic_gpu_v2")
    elif what == "tpu":
        from jax.experimental import topologies

        kernels(topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices, "tpu_custom_call")
    else:
        traces = []

        @jax.jit
        def step(q: jax.Array) -> jax.Array:
            traces.append(1)
            names = ("mosaic_tpu", "xla")  # named, a backend is imported on every platform
            return flexjax.flex_attention(q, q, q, implementation=names)

        for _ in range(2):
            step(jnp.ones((1, 16, 1, 8)))
        print(len(traces))


if __name__ == "__main__":
    main(sys.argv[1])
