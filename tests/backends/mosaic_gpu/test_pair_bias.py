"""Captured arrays with a number for each query and key, read and differentiated by the backward kernels in the simulator."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11", allow_module_level=True)

from flexjax.backends.mosaic_gpu import capture_gradients, capture_tiles, pair_bias, shared_memory
from flexjax.backends.mosaic_gpu.backward_dkv_tiles import dkv_tiles
from flexjax.backends.mosaic_gpu.backward_dq_tiles import dq_tiles
from tests.backends.mosaic_gpu.test_backward_interpret import Problem, assert_close, causal, normal, problem

SMALL = {"q_len": 128, "kv_len": 128, "heads": 1}
by_head = lambda c, s, b, h, q, k: s + c[0][h, q, k].astype(jnp.float32)
rounded = lambda dtype, *shape: normal(*shape).astype(dtype)


class Expected(typing.NamedTuple):
    """What the kernels are to do with the array: whether it is staged, whether the dQ kernel writes its gradient."""

    staged: bool
    written: bool


# name: (the problem, what is expected)
CASES: dict[str, tuple[dict[str, typing.Any], Expected]] = {
    "bfloat16": (
        {"score": by_head, "captured": (rounded("bfloat16", 2, 128, 128),), **SMALL, "heads": 2}, Expected(True, True),
    ),
    "float16, head dim 64": (
        {"score": by_head, "captured": (rounded("float16", 1, 128, 128),), **SMALL, "dtype": "float16", "dim": 64},
        Expected(True, True),
    ),
    "float32": ({"score": by_head, "captured": (normal(1, 128, 128),), **SMALL}, Expected(True, True)),
    "grouped heads": (
        {"score": by_head, "captured": (rounded("bfloat16", 4, 64, 128),), **SMALL, "q_len": 64, "heads": 4, "kv_heads": 2},
        Expected(True, True),
    ),
    "empty blocks": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 256, 256),), "mask": causal, "heads": 1},
        Expected(True, True),
    ),
    "empty rows and heads of the mask": (
        {
            "score": by_head, "captured": (rounded("bfloat16", 2, 256, 128),), "q_len": 256, "kv_len": 128,
            "mask": lambda b, h, q, k: (h == 1) & (q < 100) & (k < 70), "mask_heads": 2, "block": (128, 64),
        },
        Expected(True, True),
    ),
    "odd lengths": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 140, 203),), "mask": causal, "heads": 1, "q_len": 140, "kv_len": 203},
        Expected(False, True),
    ),
    "array larger than the matrix": (
        {"score": by_head, "captured": (rounded("bfloat16", 3, 144, 256),), "heads": 2, "q_len": 140, "kv_len": 203},
        Expected(True, True),
    ),
    "each batch entry": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][b, h, q, k].astype(jnp.float32),
            "captured": (rounded("bfloat16", 2, 1, 64, 128),), **SMALL, "q_len": 64, "batch": 2,
        },
        Expected(True, True),
    ),
    "sum over the batch": (
        {"score": by_head, "captured": (rounded("bfloat16", 2, 64, 128),), **SMALL, "heads": 2, "q_len": 64, "batch": 2},
        Expected(True, True),
    ),
    "sum over three batch entries, odd": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 64, 128),), **SMALL, "q_len": 50, "kv_len": 101, "batch": 3},
        Expected(True, True),
    ),
    "sum over too much for one warpgroup": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 64, 128),), **SMALL, "q_len": 64, "batch": 2, "dim": 96},
        Expected(True, False),
    ),
    "sum over the batch under a mask of each head": (
        {
            "score": by_head, "captured": (rounded("bfloat16", 2, 128, 128),), "mask": lambda b, h, q, k: q + h >= k,
            "mask_heads": 2, "q_len": 128, "kv_len": 128, "batch": 2, "block": (64, 64),
        },
        Expected(True, True),
    ),
    "sum over the heads": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][0, q, k].astype(jnp.float32),
            "captured": (rounded("bfloat16", 1, 64, 128),), **SMALL, "heads": 2, "q_len": 64,
        },
        Expected(True, False),
    ),
    "sum over the batch under a mask, float32": (
        {
            "score": by_head, "captured": (normal(1, 72, 128),), "mask": causal, "block": (64, 64),
            "heads": 1, "q_len": 70, "kv_len": 100, "batch": 2,
        },
        Expected(True, True),
    ),
    "sum over the batch, head dim 160": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 64, 128),), **SMALL, "q_len": 64, "batch": 2, "dim": 160},
        Expected(False, False),
    ),
    "keys before queries": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][k, h, q].astype(jnp.float32),
            "captured": (rounded("bfloat16", 128, 2, 64),), **SMALL, "heads": 2, "q_len": 64,
        },
        Expected(False, True),
    ),
    "offset": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][q + 3, k + 1].astype(jnp.float32),
            "captured": (rounded("bfloat16", 72, 130),), **SMALL, "q_len": 64,
        },
        Expected(False, True),
    ),
    "gain under a soft cap": (
        {
            "score": lambda c, s, b, h, q, k: 4.0 * jnp.tanh(s * c[0][h, q, k].astype(jnp.float32) / 4.0),
            "captured": (rounded("bfloat16", 1, 128, 128),), **SMALL,
        },
        Expected(True, True),
    ),
    "two arrays": (
        {
            "score": lambda c, s, b, h, q, k: s * c[0][h, q, k].astype(jnp.float32) + c[1][q, k],
            "captured": (rounded("bfloat16", 1, 128, 128), normal(128, 128)), **SMALL,
        },
        Expected(True, True),
    ),
    "beside a relative table": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][h, q, k].astype(jnp.float32) + c[1][q - k + 127],
            "captured": (rounded("bfloat16", 1, 128, 128), normal(255)), **SMALL,
        },
        Expected(True, True),
    ),
    "read twice": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][q, k].astype(jnp.float32) * c[0][k, q].astype(jnp.float32),
            "captured": (rounded("bfloat16", 128, 128),), **SMALL,
        },
        Expected(True, False),
    ),
    "dropout": (
        {
            "score": by_head, "captured": (rounded("bfloat16", 1, 128, 128),), **SMALL,
            "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
        },
        Expected(True, True),
    ),
    "wide head": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 64, 128),), **SMALL, "q_len": 64, "dim": 160},
        Expected(False, False),
    ),
}  # fmt: skip


def dense_bias_plan(made: Problem) -> pair_bias.DenseBiasPlan:
    return pair_bias.dense_bias_plan(made.plan, made.derivative, made.wanted.score_captures)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, expected = CASES[name]
    made = problem(**arguments)
    bias = dense_bias_plan(made)
    assert (bias.staged is not None, bool(bias.direct_gradients)) == expected
    if len(bias.direct_gradients) == len(made.operands.score_captures):  # no third kernel
        monkeypatch.setattr(capture_gradients, "capture_gradients", None)
    got = made.gradients()
    for found, array in zip(got.score_captures, made.operands.score_captures, strict=True):
        assert found is not None
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
    assert_close(got, made.expected, tolerance=3e-2)


def test_what_is_not_visited_is_zero() -> None:
    made = problem(**CASES["empty blocks"][0])
    (found,) = made.gradients().score_captures
    assert found is not None
    assert not np.triu(np.asarray(found[0], np.float32), 1).any()


def test_without_the_gradient_of_the_array() -> None:
    made = problem(**CASES["bfloat16"][0])
    made = made._replace(wanted=made.wanted._replace(score_captures=(False,)))
    assert not dense_bias_plan(made).direct_gradients
    got = made.gradients()
    assert got.score_captures == (None,)
    assert_close(got._replace(score_captures=()), made.expected._replace(score_captures=()))


def test_the_gradient_of_the_array_alone() -> None:
    made = problem(**CASES["bfloat16"][0])
    wanted = made.wanted._replace(query=False, key=False, value=False)
    got = made._replace(wanted=wanted).gradients()
    assert got.query is got.key is got.value is None
    (found,), (expected,) = got.score_captures, made.expected.score_captures
    error = np.asarray(found, np.float32) - np.asarray(expected, np.float32)
    assert np.linalg.norm(error) <= 3e-2 * np.linalg.norm(np.asarray(expected, np.float32))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_fit_beside_the_others(dim: int, dtype: str) -> None:
    made = problem(score=by_head, captured=(rounded(dtype, 1, 64, 128),), **{**SMALL, "q_len": 64, "dim": dim})
    bias = dense_bias_plan(made)
    assert len(bias.direct_gradients) == 1
    assert dq_tiles(made.plan, bias.types).staged_slots == 2
    assert dkv_tiles(made.plan, bias.types).staged_slots == 2


@pytest.mark.parametrize("staged", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (128, 128), (256, 256)], ids=str)
def test_rings_of_the_capture_kernel_fit(dims: tuple[int, int], staged: str | None) -> None:
    """A second slot for copies ahead wherever there is room for it."""
    groups = 2 if sum(dims) <= 256 else 1
    rings = capture_tiles.ring_depths(groups, dims, "bfloat16", staged)
    assert shared_memory.fits(capture_tiles.capture_scratch(groups, rings, dims, "bfloat16", staged))
    assert rings.queries >= 1
    assert rings.keys >= groups
    if sum(dims) <= 128:
        assert rings.queries == 2
        assert rings.staged == (staged is not None)
