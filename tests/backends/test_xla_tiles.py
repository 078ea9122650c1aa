"""Tiles of the xla backend: what KernelOptions asks for is what runs, forward and backward apart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, dispatch, masks
from flexjax.attention import DEFAULTS, prepare
from flexjax.backends.target import Target
from flexjax.backends.xla.schedule import choose
from flexjax.plan.kernel_plan import KernelPlan

CPU = Target("cpu")
LENGTHS = (300, 200)
MASKS: dict[str, Callable | None] = {"plain": None, "causal": masks.causal}


def arrays() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(3)
    shapes = [(2, LENGTHS[0], 4, 16), (2, LENGTHS[1], 2, 16), (2, LENGTHS[1], 2, 16)]
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def plan(mask: str, **tiles: int) -> KernelPlan:
    options: Any = DEFAULTS | {"mask_mod": MASKS[mask], "kernel_options": KernelOptions(**tiles)}
    return prepare(*arrays(), **options).plan


def tile(plan: KernelPlan, backward: bool) -> tuple[int, int]:
    schedule = choose(plan, CPU, backward)
    return schedule.block_q, schedule.block_kv * schedule.chunk


def value_and_slopes(mask: str, **tiles: int) -> Any:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        options = KernelOptions(**tiles)
        score_mod = lambda s, b, h, i, j: s + jnp.sin(1.0 * (i - j))
        out = flexjax.flex_attention(
            q, k, v, score_mod=score_mod, mask_mod=MASKS[mask], implementation="xla", kernel_options=options
        )
        return jnp.sum(out**2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays())


@pytest.mark.parametrize("mask", MASKS)
def test_every_candidate_computes_the_same(mask: str) -> None:
    candidates = dispatch.backend("xla").tile_candidates(plan(mask), CPU)
    assert len(candidates) >= 2
    want = value_and_slopes(mask)
    for tiles in candidates:
        for got, wanted in zip(jax.tree.leaves(value_and_slopes(mask, **tiles)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_the_first_candidate_is_the_default(mask: str) -> None:
    default = plan(mask)
    first = dispatch.backend("xla").tile_candidates(default, CPU)[0]
    assert (first["block_q"], first["block_kv"]) == tile(default, backward=False)


def test_forward_and_backward_tiles_are_apart() -> None:
    asked = plan("plain", block_q=100, block_kv=50, block_q_bwd=60, block_kv_bwd=40)
    assert tile(asked, backward=False) == (100, 50)
    assert tile(asked, backward=True) == (60, 40)
    asked = plan("causal", block_kv=256, block_kv_bwd=128)
    assert tile(asked, backward=False) == (128, 256)
    assert tile(asked, backward=True) == (128, 128)


def test_the_backward_pass_runs_the_tile_it_is_asked_for() -> None:
    """The loop of the backward pass has as many steps as the tile says."""
    text = lambda **tiles: str(jax.make_jaxpr(lambda: value_and_slopes("plain", **tiles))())
    assert text(block_q_bwd=60) != text()
    assert text(block_q_bwd=60) != text(block_q=60)
