"""Chosen key blocks on simulated kernels against dense attention in float32: both passes, a captured bias among the gradients."""

import typing

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import BlockMask, KernelOptions, masks
from tests.arrays import array
from tests.block_mask.test_chosen import choices, dense


def check(implementation: typing.Any, options: KernelOptions, block: int, length: int) -> None:
    rng = np.random.default_rng(0)
    chosen = choices((1, 2, length, 2), block, length)
    shapes = ((1, length, 4, 16), (1, length, 2, 16), (1, length, 2, 16))
    x = [array(rng.standard_normal(s), jnp.bfloat16) for s in shapes]
    x.append(array(rng.standard_normal((4, length)), jnp.float32))
    cotangent = rng.standard_normal(shapes[0])
    on = dense(chosen, block, length, length) & (np.arange(length)[:, None] >= np.arange(length))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        mask = BlockMask.from_chosen_blocks(chosen, block, heads=4, mask_mod=masks.causal)
        return flexjax.flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, j], block_mask=mask, implementation=implementation,
            kernel_options=options,
        )  # fmt: skip

    def definition(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        q, k, v = (jnp.repeat(y.astype(jnp.float32), 4 // y.shape[2], 2) for y in (q, k, v))
        scores = jnp.where(on, jnp.einsum("bihd,bjhd->bhij", q, k) / 4 + bias[None, :, None], -jnp.inf)
        p = jnp.exp(scores - jnp.max(scores, -1, keepdims=True, initial=-1e9))
        return jnp.einsum("bhij,bjhd->bihd", p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30), v)

    def both(function: typing.Callable) -> typing.Any:
        out, pull = jax.vjp(function, *x)
        return out, pull(array(cotangent, out.dtype))

    for got, want in zip(*(jax.tree.leaves(both(f)) for f in (attend, jax.jit(definition))), strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want)
