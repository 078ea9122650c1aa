"""Weights in place of softmax (forward/online_softmax.py, `PlainSums`) beyond the table of cases: few queries, float32, identities."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import masks
from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.families.choose_family import family_of
from flexjax.backends.target import Target
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from tests.arrays import array
from tests.marks import some_slow

TOTAL = flexjax.AuxRequest(total=True)
H200 = Target("cuda", "NVIDIA H200", "9.0", 132)


def normal(dtype: str, *shape: int) -> jax.Array:
    return array(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def silu(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return jax.nn.silu(s) / 16


def linear(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return s / 16


def compared(words: dict, arrays: list[jax.Array], options: flexjax.KernelOptions, within: float) -> None:
    """out and total of the simulated kernels and of xla."""
    attend = lambda **more: flexjax.flex_attention(*arrays, return_aux=TOTAL, **words, **more)
    got = attend(implementation="mosaic_gpu", kernel_options=options)
    want = attend(implementation="xla")
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= within * np.linalg.norm(y)


FEW: dict[str, tuple[typing.Any, dict]] = {
    "wgmma": (None, dict(weights=silu)),
    "mma": ("mma", dict(weights=silu, mask_mod=masks.causal, origin=flexjax.Origin(query=700))),
    "lengths": (None, dict(weights=linear, key_value_seq_lengths=jnp.asarray([600, 100]))),
}


@pytest.mark.parametrize("name", some_slow(FEW, ["lengths"]))
def test_few_queries_beside_many_keys(name: str) -> None:
    """The decode kernels, whose chunks add up."""
    instruction, words = FEW[name]
    arrays = [normal("bfloat16", 2, n, heads, 64) for n, heads in ((1, 8), (768, 2), (768, 2))]
    options = flexjax.KernelOptions(interpret=True, instruction=instruction, split=256)
    plan = prepare(Arguments(*arrays, **words, return_aux=TOTAL, kernel_options=options)).plan
    assert family_of(None, options).decodes(plan)
    compared(words, arrays, options, 6e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_constant_factor_leaves_no_weight_that_the_dtype_cannot_hold(dtype: str) -> None:
    """max(s, 0) ** 2 / n is below 65504 where the square of the product of query and key is not."""
    q, k, v = (normal(dtype, 1, 96, 2, 32) for _ in range(3))
    compared(
        dict(weights=flexjax.weights.relu_squared(96)), [q * 32, k, v], flexjax.KernelOptions(interpret=True), 6e-3
    )


@pytest.mark.slow
def test_float32() -> None:
    arrays = [normal("float32", 1, 96, 2, 32) for _ in range(3)]
    words = dict(weights=silu, mask_mod=masks.causal)
    compared(words, arrays, flexjax.KernelOptions(interpret=True), 2e-5)


@pytest.mark.slow
def test_weights_without_a_total() -> None:
    """Nothing sums the weights; gradients are those of xla."""
    arrays = [normal("bfloat16", 1, 96, 2, 32) for _ in range(3)]

    def slopes(**more: typing.Any) -> tuple[jax.Array, ...]:
        loss = lambda *given: jnp.sum(
            flexjax.flex_attention(*given, weights=linear, score_mod=lambda s, b, h, q, k: s * 2, **more).astype(
                jnp.float32
            )
            ** 2
        )
        return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

    got = slopes(implementation="mosaic_gpu", kernel_options=flexjax.KernelOptions(interpret=True))
    for x, y in zip(got, slopes(implementation="xla"), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 8e-3 * np.linalg.norm(y)


def test_an_h200_takes_weights() -> None:
    arrays = [normal("bfloat16", 2, n, heads, 64) for n, heads in ((1, 8), (768, 2), (768, 2))]
    assert support.refuses(prepare(Arguments(*arrays, weights=silu)).plan, H200) is None
