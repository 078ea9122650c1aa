"""In which order the fused backward kernel adds and multiplies, and that it is right in each of them."""

import typing

import jax
import pytest

from flexjax import KernelOptions, masks
from tests.cases.on_hopper import backward_problem, benched, causal
from tests.marks import some_slow

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu import backward_fused_tiles, choose_kernel, dq_order
from flexjax.backends.mosaic_gpu.backward_fused_tiles import fused_tiles
from flexjax.backends.mosaic_gpu.support import _kernel_plan
from tests.backends.mosaic_gpu.test_backward_interpret import ENOUGH_THREADS, check_one_kernel


def test_an_upward_order_is_for_square_tiles_and_many_of_them() -> None:
    fused = choose_kernel.backward_kernels(_kernel_plan(benched(), True))
    assert isinstance(fused, choose_kernel.FusedKernel)
    assert fused.tiles.queries == 128
    upward = dq_order.order_for(benched(), 64, 64)
    assert (upward.downward, upward.waits, upward.sums) == (False, False, 1)
    assert dq_order.order_for(benched(), 128, 64).downward  # tiles of 64 queries: a hand-off is shorter than two steps
    assert dq_order.order_for(benched(heads=2), 64, 64).downward  # the longest CTAs would end last
    alibi = lambda s, b, h, q, k: s + 0.1 * (k - q)  # its registers leave no room for a late dQ
    assert dq_order.order_for(benched(score_mod=alibi), 64, 64).downward


def test_heads_side_by_side_in_any_order_for_full_and_causal_masks() -> None:
    tiles = lambda mask_mod: fused_tiles(_kernel_plan(benched(mask_mod=mask_mod), True))
    for mask_mod, heads in ((masks.causal, 8), (None, 8), (masks.sliding_window(1025), 0)):
        found = tiles(mask_mod)
        assert found is not None
        assert found.heads == heads


@pytest.mark.parametrize(("deterministic", "mask"), some_slow([(True, causal), (True, None), (False, causal)], []))
@ENOUGH_THREADS
def test_fused_kernel(deterministic: bool, mask: typing.Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upward in a fixed order with late dQ, dQ before dK in a fixed order, and heads side by side in any order."""
    monkeypatch.setattr(dq_order, "MOST_UPWARD_DELAY", 100.0)
    monkeypatch.setattr(dq_order, "HEADS", 2)
    monkeypatch.setattr(dq_order, "L2_BYTES", 1)
    case: dict[str, typing.Any] = dict(heads=3, kv_heads=3, q_len=384, kv_len=384, mask=mask)
    check_one_kernel(monkeypatch, deterministic, 128, **case)
    options = KernelOptions(deterministic=deterministic, block_q_bwd=128)
    plan = backward_problem(**case, dim=64, options=options).plan
    fused = choose_kernel.backward_kernels(plan)
    assert isinstance(fused, choose_kernel.FusedKernel)
    assert fused.tiles.dq_first
    assert fused.tiles.heads == 2
    assert dq_order.order_for(plan, 3, 3).waits == (mask is None)


def near_causal(b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return (q >= k) & (q - k <= 150)


TO_TIME: dict[str, tuple[bool, dict[str, typing.Any]]] = {
    "late, downward": (True, {"mask": causal, "heads": 3, "kv_heads": 3, "kv_len": 384}),
    "late, key tiles without visits": (True, {"mask": causal, "q_len": 256, "kv_len": 512}),
    "late, full": (True, {"kv_len": 384}),
    "late, upward": (True, {"mask": near_causal, "q_len": 512, "kv_len": 512}),
    "late, grouped": (True, {"mask": causal, "heads": 4, "kv_heads": 2, "kv_len": 384}),
    "in step": (False, {"mask": causal, "heads": 4, "kv_heads": 2, "kv_len": 384}),
    "in step, full": (False, {"heads": 4, "kv_heads": 2, "q_len": 256, "kv_len": 384}),
}


@pytest.mark.parametrize("name", some_slow(list(TO_TIME), []))
@ENOUGH_THREADS
def test_choices_to_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 64 queries at head dim 128 with all choices that are off until they are timed."""
    deterministic, case = TO_TIME[name]
    orders, order_for = [], dq_order.order_for
    monkeypatch.setattr(dq_order, "order_for", lambda *given: orders.append(order_for(*given)) or orders[-1])
    monkeypatch.setattr(dq_order, "LATE_IN_ORDER", {"ahead", "downward", "full"})
    monkeypatch.setattr(backward_fused_tiles, "GROUPED_IN_STEP", True)
    check_one_kernel(monkeypatch, deterministic, 64, **{"dim": 128, "q_len": 384, **case})
    assert bool(orders) == deterministic
    assert not any(order.waits for order in orders)


@ENOUGH_THREADS
@pytest.mark.slow
def test_dq_first_with_tiles_of_64_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_fused_tiles, "DQ_FIRST", (64, 128))
    check_one_kernel(monkeypatch, True, 64, mask=causal, dim=128, q_len=384, kv_len=384)
