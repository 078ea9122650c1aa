"""Chosen key blocks on the simulated kernels, against dense attention in float32: both passes, a captured bias among the gradients."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import BlockMask, KernelOptions, masks
from tests.arrays import array
from tests.block_mask.test_chosen import choices, dense
from tests.marks import some_slow

ROWS: dict[str, tuple[str | None, int, int]] = {  # instruction, tokens of a block, length
    "wgmma, blocks of 64": (None, 64, 200),
    "wgmma, blocks of 16": (None, 16, 192),
    "mma, blocks of 32": ("mma", 32, 192),
    "mma, blocks of 64": ("mma", 64, 200),
}


@pytest.mark.parametrize("name", some_slow(ROWS, ["wgmma, blocks of 64", "mma, blocks of 32"]))
def test_both_passes(name: str) -> None:
    instruction, block, length = ROWS[name]
    rng = np.random.default_rng(0)
    chosen = choices((1, 2, length, 2), block, length)
    shapes = ((1, length, 4, 16), (1, length, 2, 16), (1, length, 2, 16))
    x = [array(rng.standard_normal(s), jnp.bfloat16) for s in shapes]
    x.append(array(rng.standard_normal((4, length)), jnp.float32))
    on = dense(chosen, block, length, length) & (np.arange(length)[:, None] >= np.arange(length))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        mask = BlockMask.from_chosen_blocks(chosen, block, heads=4, mask_mod=masks.causal)
        return flexjax.flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, j], block_mask=mask, implementation="mosaic_gpu",
            kernel_options=KernelOptions(interpret=True, instruction=typing.cast(typing.Any, instruction)),
        )  # fmt: skip

    def definition(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        q, k, v = (jnp.repeat(y.astype(jnp.float32), 4 // y.shape[2], 2) for y in (q, k, v))
        scores = jnp.where(on, jnp.einsum("bihd,bjhd->bhij", q, k) / 4 + bias[None, :, None], -jnp.inf)
        p = jnp.exp(scores - jnp.max(scores, -1, keepdims=True, initial=-1e9))
        return jnp.einsum("bhij,bjhd->bihd", p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30), v)

    def both(function: typing.Callable) -> typing.Any:
        out, pull = jax.vjp(function, *x)
        return out, pull(array(rng_of_cotangent(), out.dtype))

    rng_of_cotangent = lambda: np.random.default_rng(1).standard_normal(shapes[0])
    for got, want in zip(*(jax.tree.leaves(both(f)) for f in (attend, definition)), strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want)
