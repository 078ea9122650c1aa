"""The backward kernels in the simulator, against dense jax.vjp in float32: every feature on a small problem."""

import os
import typing

import jax
import jax.numpy as jnp
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice
from flexjax.backends.mosaic_gpu.families import hopper_backward
from flexjax.types import KernelOptions
from tests.cases.hopper_backward import BACKWARD, CAPTURED, FUSED, FUSED_ONE_KEY_TILE
from tests.cases.on_hopper import assert_gradients_close, backward_problem
from tests.marks import some_slow


@pytest.mark.parametrize("name", some_slow(BACKWARD, [name for name in BACKWARD if "two CTAs," not in name]))
def test_matches_dense(name: str) -> None:
    made = backward_problem(**BACKWARD[name])
    assert_gradients_close(made.gradients(), made.expected)


@pytest.mark.parametrize("name", some_slow(CAPTURED, [name for name in CAPTURED if "two CTAs" not in name]))
def test_gradients_of_captures(name: str) -> None:
    made = backward_problem(**CAPTURED[name])
    # Sums of numbers of both signs: what the rounding of the forward pass's output leaves in delta does not cancel in them.
    assert_gradients_close(made.gradients(), made.expected, tolerance=3e-2)


TOO_MUCH = ("half a block of threads past the end",)
"""For the registers of tiles of 128 queries."""

# The simulator blocks one of XLA's threads for each of the four warpgroups; with as few threads as that it may stand still.
ENOUGH_THREADS = pytest.mark.skipif(
    int(os.environ.get("PJRT_NPROC") or os.cpu_count() or 1) < 8,
    reason="the simulator needs a core for each of four warpgroups, and more",
)


def check_one_kernel(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, queries: int, tolerance: float = 8e-3, **case: typing.Any
) -> None:
    monkeypatch.setattr(hopper_fused_choice, "fused_is_faster", lambda plan: True)
    monkeypatch.setattr(hopper_fused_choice, "adds_in_order", lambda plan, tiles: plan.options.deterministic)
    tiles = []
    run = hopper_backward.backward_fused
    monkeypatch.setattr(
        hopper_backward, "backward_fused", lambda *given: (tiles.append(given[-1].tiles), run(*given))[1]
    )
    made = backward_problem(
        **{"dim": 64, **case}, options=KernelOptions(deterministic=deterministic, block_q_bwd=queries)
    )
    assert_gradients_close(made.gradients(), made.expected, tolerance=tolerance)
    assert [t.queries for t in tiles] == [queries]


@ENOUGH_THREADS
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("name", "queries"), [(name, n) for name in FUSED for n in (64, 128) if n == 64 or name not in TOO_MUCH]
)
def test_one_kernel(name: str, deterministic: bool, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tolerance = 3e-2 if "captured" in FUSED[name] else 8e-3
    check_one_kernel(monkeypatch, deterministic, queries, tolerance, **FUSED[name])


@ENOUGH_THREADS
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("name", "queries"),
    [(name, n) for name, case in FUSED_ONE_KEY_TILE.items() for n in (64, 128) if n == 64 or "block" not in case],
)
def test_one_kernel_is_without_races(
    name: str, queries: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a single block of threads adds to dQ, what it shares between warpgroups is watched."""
    check_one_kernel(monkeypatch, deterministic, queries, **FUSED_ONE_KEY_TILE[name], kv_len=128)


@pytest.mark.parametrize("deterministic", [True, False])
def test_query_visits_are_int32(deterministic: bool) -> None:
    from flexjax.backends.mosaic_gpu.backward import hopper_fused_visits, tile_visits
    from flexjax.backends.mosaic_gpu.machine import dq_order

    made = backward_problem(**FUSED["lists"], dim=64, options=KernelOptions(deterministic=deterministic))
    order = dq_order.order_for(made.plan, 4, 2) if deterministic else None
    with jax.enable_x64(True):
        lists = tile_visits.visit_lists(made.plan, made.given.operands.lists, transposed=True)
        visits = hopper_fused_visits.query_visits(made.plan, lists, 2, 4, 64, order)
    assert {x.dtype for x in jax.tree.leaves(visits)} == {jnp.dtype("int32")}
