"""Captured arrays with a number for each query and key, read and differentiated by the backward kernels in the simulator."""

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu.backward import pair_bias
from flexjax.backends.mosaic_gpu.backward.hopper_dkv_tiles import dkv_tiles
from flexjax.backends.mosaic_gpu.backward.hopper_dq_tiles import dq_tiles
from flexjax.backends.mosaic_gpu.captures import gradients as captures_gradients
from flexjax.backends.mosaic_gpu.captures import tiles as captures_tiles
from flexjax.backends.mosaic_gpu.machine import shared_memory
from tests.cases.hopper_backward import PAIR_BIAS, SMALL, by_head, rounded
from tests.cases.on_hopper import BackwardProblem, assert_gradients_close, backward_problem


def dense_bias_plan(made: BackwardProblem) -> pair_bias.DenseBiasPlan:
    return pair_bias.dense_bias_plan(made.plan, made.given.derivative, made.given.wanted.score_captures)


@pytest.mark.parametrize("name", PAIR_BIAS)
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, expected = PAIR_BIAS[name]
    made = backward_problem(**arguments)
    bias = dense_bias_plan(made)
    assert (bias.staged is not None, bool(bias.direct_gradients)) == expected
    if len(bias.direct_gradients) == len(made.given.operands.score_captures):  # no third kernel
        monkeypatch.setattr(captures_gradients, "capture_gradients", None)
    got = made.gradients()
    for found, array in zip(got.score_captures, made.given.operands.score_captures, strict=True):
        assert found is not None
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
    assert_gradients_close(got, made.expected, tolerance=3e-2)


def test_what_is_not_visited_is_zero() -> None:
    made = backward_problem(**PAIR_BIAS["empty blocks"][0])
    (found,) = made.gradients().score_captures
    assert found is not None
    assert not np.triu(np.asarray(found[0], np.float32), 1).any()


def test_without_the_gradient_of_the_array() -> None:
    made = backward_problem(**PAIR_BIAS["bfloat16"][0])
    wanted = made.given.wanted._replace(score_captures=(False,))
    made = made._replace(given=made.given._replace(wanted=wanted))
    assert not dense_bias_plan(made).direct_gradients
    got = made.gradients()
    assert got.score_captures == (None,)
    assert_gradients_close(got._replace(score_captures=()), made.expected._replace(score_captures=()))


def test_the_gradient_of_the_array_alone() -> None:
    made = backward_problem(**PAIR_BIAS["bfloat16"][0])
    wanted = made.given.wanted._replace(query=False, key=False, value=False)
    got = made._replace(given=made.given._replace(wanted=wanted)).gradients()
    assert got.query is got.key is got.value is None
    (found,), (expected,) = got.score_captures, made.expected.score_captures
    error = np.asarray(found, np.float32) - np.asarray(expected, np.float32)
    assert np.linalg.norm(error) <= 3e-2 * np.linalg.norm(np.asarray(expected, np.float32))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_fit_beside_the_others(dim: int, dtype: str) -> None:
    made = backward_problem(score=by_head, captured=(rounded(dtype, 1, 64, 128),), **{**SMALL, "q_len": 64, "dim": dim})
    bias = dense_bias_plan(made)
    assert len(bias.direct_gradients) == 1
    assert dq_tiles(made.plan, bias.types).staged_slots == 2
    assert dkv_tiles(made.plan, bias.types).staged_slots == 2


@pytest.mark.parametrize("staged", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (128, 128), (256, 256)], ids=str)
def test_rings_of_the_capture_kernel_fit(dims: tuple[int, int], staged: str | None) -> None:
    """A second slot for copies ahead wherever there is room for it."""
    groups = 2 if sum(dims) <= 256 else 1
    rings = captures_tiles.ring_depths(groups, dims, "bfloat16", staged)
    assert shared_memory.fits(captures_tiles.capture_scratch(groups, rings, dims, "bfloat16", staged))
    assert rings.queries >= 1
    assert rings.keys >= groups
    if sum(dims) <= 128:
        assert rings.queries == 2
        assert rings.staged == (staged is not None)
