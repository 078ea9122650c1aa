"""In which order the fused backward kernel adds and multiplies, and that it is right in each of them."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, masks
from tests.arrays import array
from tests.cases.on_hopper import backward_problem, benched, causal
from tests.marks import some_slow

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice
from flexjax.backends.mosaic_gpu.backward.hopper_fused_tiles import fused_tiles
from flexjax.backends.mosaic_gpu.backward.kernels import FusedKernel
from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.backends.mosaic_gpu.families.hopper import HOPPER
from flexjax.backends.mosaic_gpu.families.kernel_plans import kernel_plan
from flexjax.backends.mosaic_gpu.machine import dq_order
from tests.backends.mosaic_gpu.test_backward_interpret import ENOUGH_THREADS, check_one_kernel


def test_an_upward_order_is_for_square_tiles_and_many_of_them() -> None:
    fused = choose_kernel.backward_kernels(kernel_plan(benched(), HOPPER, True))
    assert isinstance(fused, FusedKernel)
    assert fused.tiles.queries == 128
    upward = dq_order.order_for(benched(), 64, 64)
    assert (upward.downward, upward.sums) == (False, 1)
    assert dq_order.order_for(benched(), 128, 64).downward  # tiles of 64 queries: a hand-off is shorter than two steps
    assert dq_order.order_for(benched(heads=2), 64, 64).downward  # the longest CTAs would end last
    alibi = lambda s, b, h, q, k: s + 0.1 * (k - q)  # its registers leave no room for a late dQ
    assert dq_order.order_for(benched(score_mod=alibi), 64, 64).downward


def test_heads_side_by_side_in_any_order_for_full_and_causal_masks() -> None:
    tiles = lambda mask_mod: fused_tiles(kernel_plan(benched(mask_mod=mask_mod), HOPPER, True))
    for mask_mod, heads in ((masks.causal, 8), (None, 8), (masks.sliding_window(1025), 0)):
        found = tiles(mask_mod)
        assert found is not None
        assert found.heads == heads


@pytest.mark.parametrize(("deterministic", "mask"), some_slow([(True, causal), (True, None), (False, causal)], []))
@ENOUGH_THREADS
def test_fused_kernel(deterministic: bool, mask: typing.Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upward and downward in a fixed order, and heads side by side in any order."""
    monkeypatch.setattr(dq_order, "MOST_UPWARD_DELAY", 100.0)
    monkeypatch.setattr(dq_order, "HEADS", 2)
    monkeypatch.setattr(dq_order, "L2_BYTES", 1)
    case: dict[str, typing.Any] = dict(heads=3, kv_heads=3, q_len=384, kv_len=384, mask=mask)
    check_one_kernel(monkeypatch, deterministic, 128, **case)
    options = KernelOptions(deterministic=deterministic, block_q_bwd=128)
    plan = backward_problem(**case, dim=64, options=options).plan
    fused = choose_kernel.backward_kernels(plan)
    assert isinstance(fused, FusedKernel)
    assert fused.tiles.heads == 2
    assert dq_order.order_for(plan, 3, 3).downward == (mask is None)


def near_causal(b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return (q >= k) & (q - k <= 150)


def by_head(
    captured: typing.Any, s: typing.Any, b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any
) -> typing.Any:
    return s + 0.01 * (h + 1) * (k - q)


AT_128: dict[str, dict[str, typing.Any]] = {
    "downward": {"mask": causal, "heads": 3, "kv_heads": 3, "kv_len": 384},
    "key tiles without visits": {"mask": causal, "q_len": 256, "kv_len": 512},
    "full": {"kv_len": 384},
    "upward": {"mask": near_causal, "q_len": 512, "kv_len": 512},
}


@pytest.mark.parametrize("name", some_slow(list(AT_128), []))
@ENOUGH_THREADS
def test_orders_with_tiles_of_64_queries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_one_kernel(monkeypatch, True, 64, **{"dim": 128, "q_len": 384, **AT_128[name]})


def head_beside_score(
    captured: typing.Any, s: typing.Any, b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any
) -> typing.Any:
    return jnp.where((s > 0).astype(jnp.int32) < h, 2 * s, s)


GROUPED: dict[str, tuple[int, dict[str, typing.Any]]] = {
    "one CTA": (1, {"mask": causal, "heads": 4, "kv_heads": 2}),
    "one CTA, rows of each head": (1, {"score": by_head, "mask": causal, "heads": 4, "kv_heads": 2}),
    "one CTA, the head beside the score": (1, {"score": head_beside_score, "mask": causal, "heads": 4, "kv_heads": 2}),
    "two CTAs": (2, {"mask": causal, "heads": 4, "kv_heads": 1}),
    "four CTAs": (4, {"heads": 4, "kv_heads": 1, "q_len": 256, "layout": "BNTH"}),
}
"""`FusedKernel.shares`, and arguments of the problem."""


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", some_slow(list(GROUPED), ["one CTA, the head beside the score", "two CTAs"]))
@ENOUGH_THREADS
def test_grouped_heads(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, case = GROUPED[name]
    monkeypatch.setattr(hopper_fused_choice, "shares_of", lambda plan: shares)
    check_one_kernel(monkeypatch, deterministic, 64, **{"dim": 128, "q_len": 384, "kv_len": 384, **case})


@pytest.mark.parametrize(
    ("kv_heads", "batch", "keys", "mask_mod", "shares"),
    [
        (16, 1, 8192, masks.causal, 1),
        (1, 1, 8192, masks.causal, 16),
        (1, 2, 8192, masks.causal, 8),
        (1, 8, 8192, masks.causal, 2),
        (4, 8, 8192, masks.causal, 1),
        (4, 8, 8192, masks.sliding_window(100), 4),
        (4, 8, 16384, masks.sliding_window(100), 2),
        (4, 8, 65536, masks.sliding_window(100), 1),
    ],
)
def test_how_many_ctas_divide_the_heads_of_a_key_tile(
    kv_heads: int, batch: int, keys: int, mask_mod: typing.Any, shares: int
) -> None:
    plan = kernel_plan(benched(heads=16, mask_mod=mask_mod), HOPPER, True)
    plan = dataclasses.replace(plan, kv_heads=kv_heads, batch=batch, kv_len=keys)
    chosen = choose_kernel.backward_kernels(plan)
    assert isinstance(chosen, FusedKernel)
    assert chosen.shares == shares


DOCUMENTS = jnp.stack([jnp.arange(256) // 100, jnp.arange(256) // 60])


def near_in_document(b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return (q >= k) & (q - k < 40 * (h + 1)) & (DOCUMENTS[b, q] == DOCUMENTS[b, k])


PLACED: dict[str, dict[str, typing.Any]] = {
    "lengths": {
        "query_seq_lengths": jnp.array([256, 130]),
        "key_value_seq_lengths": jnp.array([200, 131]),
        "mask_mod": masks.causal,
    },
    "lists of each batch entry and head": {"mask_mod": near_in_document},
}


@pytest.mark.slow
@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize("name", PLACED)
@ENOUGH_THREADS
def test_grouped_heads_as_on_xla(name: str, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_fused_choice, "fused_is_faster", lambda plan: True)
    monkeypatch.setattr(hopper_fused_choice, "shares_of", lambda plan: shares)
    given = dict(PLACED[name])
    if given["mask_mod"] is near_in_document:
        given = {"block_mask": flexjax.create_block_mask(near_in_document, 2, 4, 256, 256)}
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (
        jax.random.normal(key, (2, 256, heads, 64), jnp.bfloat16) for key, heads in zip(keys, (4, 1, 1, 4), strict=True)
    )

    def gradients(implementation: typing.Any, interpret: bool) -> tuple[jax.Array, ...]:
        options = KernelOptions(interpret=interpret)
        attend = lambda q, k, v: flexjax.flex_attention(
            q, k, v, implementation=implementation, kernel_options=options, **given
        )
        return jax.vjp(attend, q, k, v)[1](d_out)

    for found, expected in zip(gradients("mosaic_gpu", True), gradients("xla", False), strict=True):
        found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
        assert jnp.linalg.norm(found - expected) <= 6e-3 * jnp.linalg.norm(expected)


@pytest.mark.parametrize(("dim", "queries"), [(64, 128), (64, 64), (128, 64)])
@ENOUGH_THREADS
def test_rows_past_the_last_key_do_not_reach_dq(dim: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scores of this call are about -400, so that the exponential of a row of zeros, relative to lse, is infinite."""
    monkeypatch.setattr(hopper_fused_choice, "fused_is_faster", lambda plan: True)
    options = KernelOptions(interpret=True, block_q_bwd=queries)
    shape, rng = (1, 200, 2, dim), np.random.default_rng(0)
    noise = lambda: rng.normal(size=shape)
    given = -400 / dim**0.5 + 0.3 * noise(), 1 + 0.3 * noise(), noise(), noise()
    q, k, v, d_out = (array(x, jnp.float32).astype(jnp.bfloat16) for x in given)
    attend = lambda *a: flexjax.flex_attention(*a, implementation="mosaic_gpu", kernel_options=options)
    _, pull = jax.vjp(attend, q, k, v)
    reference = lambda *a: jax.nn.dot_product_attention(*a, implementation="xla")
    _, expected = jax.vjp(reference, *(x.astype(jnp.float32) for x in (q, k, v)))
    for got, want in zip(pull(d_out), expected(d_out.astype(jnp.float32)), strict=True):
        assert float(jnp.linalg.norm(got.astype(jnp.float32) - want)) <= 0.1 * float(jnp.linalg.norm(want))
