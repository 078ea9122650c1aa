"""The online softmax of large scores whose exponents are one FMA each (machine/row_scales.py), tile by tile, against float64."""

import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from hypothesis import given, settings
from hypothesis import strategies as st

from flexjax.backends.mosaic_gpu.forward.online_softmax import RowScaled
from flexjax.backends.mosaic_gpu.machine import row_scales, simulator
from flexjax.backends.mosaic_gpu.programs.tile_values import Scaled
from flexjax.backends.tile_math import LOG2E
from tests.arrays import array

COLUMNS, TILES = 16, 6
LOWEST = float(np.finfo(np.float32).min)
BASES = (0.0, 5.0, -100.0, 2.0**16, -(2.0**16), 1e6, -1e6, 2.0**26, 2.0**27, -(2.0**27), 2.0**27 + 16, -(2.0**27) - 16, 1.5e8, 3.1e8, 4.3e8, 1e9, -1e10, 1e30,
         -1e30, 2.0**100, LOWEST, -LOWEST, -math.inf)  # fmt: skip
"""Numbers that scores of a tile lie around: on both sides of each limit of machine/row_scales.py, and what masks are made of."""


@pytest.fixture(autouse=True, scope="module")
def simulated() -> typing.Iterator[None]:
    with simulator.running(True):
        yield


def weights_and_lse(scores: np.ndarray, lazy: bool, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """What the kernels compute of rows of scores, [rows, TILES * COLUMNS]: probabilities in that shape, and lse [rows]."""
    rows = scores.shape[0]
    softmax = RowScaled((rows, COLUMNS), lazy_rescale=lazy, whole_powers=whole)
    state, out = softmax.start, jnp.zeros(scores.shape, jnp.float32)
    for n in range(TILES):
        of = slice(n * COLUMNS, (n + 1) * COLUMNS)
        p, rescale, state = softmax.step(Scaled(array(scores[:, of]), 1.0), state)
        assert not (p > 2.0**13).any()  # float16 holds it
        out = softmax.rescale(out, rescale).at[:, of].set(p)
    top, total = softmax.finish(state, None)
    unit = softmax.unit(state)
    assert unit is not None
    dead = total == 0
    out = out * jnp.where(dead, 0.0, unit / total)[:, None]
    return np.asarray(out), np.asarray(jnp.where(dead, -jnp.inf, softmax.lse(jnp.where(dead, 0.0, top), total)))


def expected(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same in float64."""
    scores = scores.astype(np.float64)
    top = scores.max(axis=1)
    dead = np.isneginf(top)
    p = np.exp(scores - np.where(dead, 0.0, top)[:, None])
    total = np.where(dead, 1.0, p.sum(axis=1))
    return p / total[:, None], np.where(dead, -np.inf, np.log(total) + np.where(dead, 0.0, top))


def check(scores: np.ndarray, lazy: bool, whole: bool = False) -> None:
    got, want = weights_and_lse(scores, lazy, whole), expected(scores)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=4e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1.2e-7, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    bases=st.lists(st.lists(st.sampled_from(BASES), min_size=TILES, max_size=TILES), min_size=8, max_size=8),
    spread=st.sampled_from((0.0, 1.0, 20.0, 3e-7)),
    seed=st.integers(0, 2**31),
    lazy=st.booleans(),
    whole=st.booleans(),
)
def test_rows_of_tiles_around_any_numbers(
    bases: list[list[float]], spread: float, seed: int, lazy: bool, whole: bool
) -> None:
    """Of every tile of a row its own number, so that references cross each limit in both signs; a spread of 3e-7 is relative: a
    few of the float32 numbers next to one another.
    """
    rng = np.random.default_rng(seed)
    around = np.repeat(np.asarray(bases, np.float64), COLUMNS, axis=1)
    noise = rng.normal(size=around.shape) * spread
    with np.errstate(invalid="ignore", over="ignore"):
        moved = around * (1 + noise) if spread == 3e-7 else around + noise
        scores = np.where(np.isfinite(around), np.clip(moved, LOWEST, -LOWEST), around).astype(np.float32)
    check(scores, lazy, whole)


@pytest.mark.parametrize("lazy", [False, True])
def test_references_that_rise_by_single_floats(lazy: bool) -> None:
    """Each tile of a row is one float32 above the one before."""
    starts = np.asarray([1e6, -1e6, 2.0**25, 9e7, 1.1e8, -9e7, -1.1e8, 2.0**27 - 16, -(2.0**27) - 16], np.float32)
    rows = [starts]
    for _ in range(TILES - 1):
        rows.append(np.nextafter(rows[-1], np.float32(np.inf)))
    check(np.repeat(np.stack(rows, axis=1), COLUMNS, axis=1), lazy)


def test_infinite_scores_give_nan_and_only_in_their_rows() -> None:
    scores = np.zeros((3, TILES * COLUMNS), np.float32)
    scores[0, 40], scores[1, 40] = np.inf, np.nan
    p, lse = weights_and_lse(scores, lazy=True)
    assert np.isnan(p[:2]).any(axis=1).all()
    assert np.isnan(lse[:2]).all()
    np.testing.assert_allclose(p[2], 1 / scores.shape[1], rtol=1e-6)


def test_the_simulated_fma_rounds_once() -> None:
    """Also where the product alone is rounded by up to 8: the distance of a reference from itself is its excess."""
    rng = np.random.default_rng(0)
    reference = (rng.choice([-1, 1], 4000) * 2.0 ** rng.uniform(-10, 27, 4000)).astype(np.float32)
    scale = row_scales.row_scale(array(reference))
    exact = reference.astype(np.float64) * np.float32(LOG2E) - np.asarray(scale.shift, np.float64)
    found = np.asarray(row_scales.excess(array(reference)), np.float64)
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=0)
    assert 4 < np.abs(exact).max() <= 8
    score = (reference * (1 + rng.normal(size=4000) * 1e-6)).astype(np.float32)
    exact = score.astype(np.float64) * np.float32(LOG2E) - np.asarray(scale.shift, np.float64)
    found = np.asarray(row_scales.exponent(array(score), scale), np.float64)
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-30)
