"""Training over a scan of layers, compiled for Hopper without a GPU: how often XLA launches each kernel.

python -m tests.backends.mosaic_gpu.test_scan     prints the kernels of a gradient, by the checkpoint of the layers
"""

import collections
import os
import pathlib
import re
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import masks
from tests.backends.mosaic_gpu import compile_hopper

pytestmark = pytest.mark.skipif(compile_hopper.missing() is not None, reason=str(compile_hopper.missing()))
ROOT = pathlib.Path(__file__).parents[3]
KEPT = jax.checkpoint_policies.save_only_these_names("flexjax_out", "flexjax_lse")
POLICIES: dict[str, typing.Any] = {"none": None, "kept": KEPT}
CALL = re.compile(r'custom_call_target="mosaic_gpu_v2".*/(flexjax_\w+)/')


def launches(policy: typing.Any) -> collections.Counter[str]:
    """Kernel -> how often it stands in the gradient of a scan over four layers, whose two loops run each once a layer."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        y = (x @ w).reshape(1, 1024, 2, 64)
        return x + flexjax.flex_attention(y, y, y, mask_mod=masks.causal).reshape(x.shape) @ w, None

    layer = layer if policy is None else jax.checkpoint(layer, policy=policy)

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(layer, x, ws)[0].astype(jnp.float32) ** 2)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 128, 128), (1, 1024, 128))]
    text = compile_hopper.compile_for_hopper(jax.grad(loss), *shapes).as_text()
    return collections.Counter(found[1] for found in map(CALL.search, text.splitlines()) if found)


def test_each_kernel_runs_once_a_layer() -> None:
    """XLA of jax 0.11 wraps a kernel into the update that keeps its result for the backward pass, and launches it again for others."""
    command = [sys.executable, "-m", "tests.backends.mosaic_gpu.test_scan"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    once = "{'flexjax_backward_fused': 1, 'flexjax_forward': 1, 'flexjax_row_dots': 1}"
    assert run.stdout.splitlines() == [f"{name} {once}" for name in POLICIES], run.stderr[-2000:]


if __name__ == "__main__":
    for name, policy in POLICIES.items():
        print(name, dict(sorted(launches(policy).items())), flush=True)
