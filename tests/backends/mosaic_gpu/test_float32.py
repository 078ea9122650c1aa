"""float32 in the Hopper kernels, as products of parts: simulated against float64, and which tiles and precisions they take."""

import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.backward import hopper_dkv_tiles, hopper_dq_tiles
from flexjax.backends.mosaic_gpu.backward import hopper_tiles as backward_hopper_tiles
from flexjax.backends.mosaic_gpu.backward.kernels import TwoKernels
from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.backends.mosaic_gpu.forward import hopper_tiles as forward_hopper_tiles
from flexjax.backends.mosaic_gpu.machine.float_parts import join, pairs_of, split
from flexjax.backends.mosaic_gpu.machine.shared_memory import fits
from flexjax.backends.target import Target
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.types import KernelOptions
from tests.cases.on_hopper import assert_gradients_close, backward_problem, causal, forward_problem, normal, run_forward

HOPPER = Target("cuda", "NVIDIA H200", "9.0", 132)
JAX = (0, 11, 2)
TABLE, PAIR, SLOPES = normal(2, 640), normal(1, 128, 128), normal(1) / 100
table = lambda c, s, b, h, q, k: s + c[0][h, q - k + 300]
thinned = lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32)
SMALL = {"heads": 1, "q_len": 128, "kv_len": 128, "dtype": "float32"}
ODD = {
    "mask": causal,
    "heads": 2,
    "kv_heads": 1,
    "q_len": 70,
    "kv_len": 130,
    "dim": 40,
    "value_dim": 24,
    "dtype": "float32",
}

FORWARD: dict[str, dict[str, typing.Any]] = {
    "odd, grouped heads, table, sinks": {
        **ODD, "score": lambda s, b, h, q, k: s + TABLE[h, q - k + 300], "sinks": True, "max_scores": True,
    },
    "BNTH, dropout, head dim 128": {**SMALL, "dim": 128, "dropout": thinned, "layout": "BNTH"},
    "pair bias": {**SMALL, "mask": causal, "score": lambda s, b, h, q, k: s + PAIR[h, q, k]},
    "head dim 256": {**SMALL, "mask": causal, "dim": 256},
}  # fmt: skip
BACKWARD: dict[str, dict[str, typing.Any]] = {
    "odd, grouped heads, table, sinks": {**ODD, "captured": (TABLE,), "score": table, "sinks": True, "d_lse": True},
    "BNTH, dropout, extra features, head dim 128": {
        **SMALL, "dim": 112, "extra": 16, "value_dim": 32, "dropout": thinned, "layout": "BNTH",
    },
    "pair bias": {**SMALL, "captured": (PAIR,), "score": lambda c, s, b, h, q, k: s + c[0][h, q, k], "mask": causal},
    "slopes, head dim 160": {
        **SMALL, "dim": 160, "captured": (SLOPES,), "score": lambda c, s, b, h, q, k: s + c[0][h] * (k - q), "mask": causal,
    },
    "head dim 256": {**SMALL, "mask": causal, "dim": 256},
}  # fmt: skip
NEEDS_JAX = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11")


@NEEDS_JAX
@pytest.mark.slow
@pytest.mark.parametrize("name", FORWARD)
def test_forward_matches_float64(name: str) -> None:
    from flexjax.backends.mosaic_gpu.forward import hopper as forward_hopper

    made = forward_problem(**FORWARD[name])
    tile = forward_hopper_tiles.forward_tile(made.plan)
    got = run_forward(forward_hopper.forward, made.plan, made.operands, tile)
    assert got.out.dtype == jnp.float32
    assert np.linalg.norm(np.asarray(got.out) - made.out) <= 2e-5 * np.linalg.norm(made.out)
    np.testing.assert_array_equal(np.isneginf(got.lse), np.isneginf(made.lse))
    np.testing.assert_allclose(got.lse, made.lse, rtol=3e-7, atol=3e-5)
    if got.max_scores is not None:
        np.testing.assert_allclose(got.max_scores, made.max_scores, rtol=0, atol=6e-5)


@NEEDS_JAX
@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_match_dense(name: str) -> None:
    made = backward_problem(**BACKWARD[name])
    got = made.gradients()
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float32)}
    # Captured gradients are sums of numbers of both signs.
    assert_gradients_close(got, made.expected, tolerance=3e-4 if "captured" in BACKWARD[name] else 3e-5)


def test_parts_add_up() -> None:
    """Under jit too, where XLA may leave out a conversion to bfloat16 and back."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 7)), jnp.float32)
    parts = jax.jit(lambda x: split(x, 2))(x)
    assert (parts.shape, parts.dtype) == ((6, 5, 7), jnp.bfloat16)
    np.testing.assert_array_equal(parts[:3], x.astype(jnp.bfloat16))
    np.testing.assert_allclose(join(parts, 2), x, rtol=2.0**-17)
    assert split(x, 1) is x
    assert join(x, 1) is x
    infinite = split(jnp.asarray([[jnp.inf, -jnp.inf, 1.0]]), 2)
    np.testing.assert_array_equal(join(infinite, 2), [[jnp.inf, -jnp.inf, 1.0]])


def test_products_of_parts_begin_with_the_smallest() -> None:
    assert pairs_of(1) == ((0, 0),)
    assert pairs_of(2) == ((0, 1), (1, 0), (0, 0))


def plan(
    dim: int, value_dim: int, dtype: str = "float32", precision: str = "default", **options: typing.Any
) -> KernelPlan:
    return KernelPlan(
        *(1, 16, 16, 4096, 4096, dim, value_dim, dtype, "BTNH", dim**-0.5),
        precision=precision,
        options=KernelOptions(**options),
    )


@pytest.mark.parametrize(("dim", "value_dim"), [*itertools.product((8, 64, 72, 128, 192, 256), repeat=2)])
def test_every_head_dim_fits(dim: int, value_dim: int) -> None:
    made = plan(dim, value_dim)
    assert support.refuses(made, HOPPER, JAX) is None
    assert forward_hopper_tiles.forward_tile(made).fits
    kernels = choose_kernel.backward_kernels(made)
    assert isinstance(kernels, TwoKernels)
    assert fits(hopper_dq_tiles.dq_scratch(made, kernels.dq, backward_hopper_tiles.NO_DENSE_BIAS))
    if isinstance(kernels.dkv, hopper_dkv_tiles.SplitDkvTiles):
        assert fits(hopper_dkv_tiles.split_dkv_scratch(made, kernels.dkv))
    else:
        assert fits(hopper_dkv_tiles.dkv_scratch(made, kernels.dkv, backward_hopper_tiles.NO_DENSE_BIAS))


def test_tiles_that_options_ask_for_and_that_do_not_fit() -> None:
    assert support.refuses(plan(256, 256, block_q_bwd=64), HOPPER, JAX) is None
    assert support.refuses(plan(256, 256, block_q_bwd=128), HOPPER, JAX) == (
        "No tile of the dQ kernel fits float32 head dims 256 and 256 with block_q_bwd=128."
    )
    assert support.refuses(plan(128, 128, block_kv_bwd=128), HOPPER, JAX) == (
        "The GPU kernels of the backward pass take block_kv_bwd 64 for head dims above 64, not 128."
    )


@pytest.mark.parametrize("precision", support.FLOAT32_PRECISIONS)
def test_precisions_that_three_products_reach(precision: str) -> None:
    assert support.refuses(plan(64, 64, precision=precision), HOPPER, JAX) is None


@pytest.mark.parametrize("precision", ["highest", "F32_F32_F32"])
def test_more_exact_precisions_are_left_to_xla(precision: str) -> None:
    assert support.refuses(plan(64, 64, precision=precision), HOPPER, JAX) == (
        "The GPU kernels multiply float32 as three products of bfloat16 parts, exact to about 2^-17; "
        f"precision {precision!r} runs on xla."
    )
