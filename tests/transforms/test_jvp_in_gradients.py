"""A step of MeanFlow: the gradient of a loss that holds a tangent as a constant. On a GPU all of it comes from the kernels."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import FallbackWarning
from flexjax.passes import dispatch
from tests.transforms.test_platforms import A100, H200, KERNEL, V6E, needs_gpu_kernels, program


def loss(x: jax.Array, implementation: flexjax.Implementation | None = None) -> jax.Array:
    network = lambda x: flexjax.flex_attention(x, x, x, implementation=implementation)
    out, moved = jax.jvp(network, (x,), (jnp.ones_like(x),))
    return ((out - jax.lax.stop_gradient(moved)).astype(jnp.float32) ** 2).mean()


@pytest.mark.parametrize(
    "device", [pytest.param(H200, marks=needs_gpu_kernels), V6E], ids=lambda device: str(device.platform)
)
def test_the_passes_run_on_kernels(device: jax.sharding.AbstractDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward, and on a GPU the tangent; on a TPU that says that it does not."""
    monkeypatch.setattr(dispatch, "_warned", set())
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        text = program(jax.grad(loss), device, x)
        alone = program(jax.grad(lambda x: flexjax.flex_attention(x, x, x).astype(jnp.float32).sum()), device, x)
    said = [str(w.message) for w in seen if issubclass(w.category, FallbackWarning)]
    if device is V6E:
        assert len(said) == 1
        assert re.match(
            r"The tangent \(forward mode\) of a call runs on xla, not on the kernels of mosaic_tpu", said[0]
        )
        assert text.count(KERNEL[device]) == alone.count(KERNEL[device]) > 1
    else:
        assert said == []
        assert text.count(KERNEL[device]) == alone.count(KERNEL[device]) + 1 > 2


@needs_gpu_kernels
@pytest.mark.parametrize("device", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("name", ["jvp", "linearize", "jvp of vmap", "vmap of jvp", "jacfwd"])
def test_forward_mode_runs_on_the_kernels_of_a_gpu(name: str, device: jax.sharding.AbstractDevice) -> None:
    """A FallbackWarning is an error in these tests."""
    x = jax.ShapeDtypeStruct((2, 1, 128, 2, 64), jnp.bfloat16)
    attend = lambda x: flexjax.flex_attention(x, x, x, mask_mod=flexjax.masks.causal)
    tangent = lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]
    run = {
        "jvp": lambda x: tangent(attend)(x[0]),
        "linearize": lambda x: jax.linearize(attend, x[0])[1](x[1]),
        "jvp of vmap": tangent(jax.vmap(attend)),
        "vmap of jvp": jax.vmap(tangent(attend)),
        "jacfwd": lambda x: jax.jacfwd(lambda c: attend(c * x[0]).astype(jnp.float32).sum())(x[0, 0, 0, 0, 0]),
    }[name]
    text = program(run, device, x)
    assert "flexjax_tangent" in text
    assert text.count(KERNEL[device]) == 2


def test_the_step_is_that_of_the_reference() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 33, 2, 8)), jnp.float32)
    got, want = (jax.jit(jax.value_and_grad(lambda x, name=name: loss(x, name)))(x) for name in ("xla", "reference"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    loops = str(jax.make_jaxpr(jax.grad(lambda x: loss(x, "xla")))(x)).count("scan[")
    assert loops == 0  # none is inlined
