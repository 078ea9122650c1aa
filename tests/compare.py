"""How close is close enough, in one place.

float64   1e-10 of the largest value
float32   1e-5 * (1 + largest) for out, lse, max_scores; 5e-5 * max(largest, 0.1) for gradients
others    twice the error of plain dense attention in that dtype, plus half a unit in the last place of the
          largest value: what a fused kernel rounds differently from an eager one, and no more
"""

import jax.numpy as jnp
import numpy as np


def assert_close(
    name: str,
    got: np.ndarray,
    want: np.ndarray,
    *,
    dtype: str,
    plain: np.ndarray | None = None,
    result_dtype: str | None = None,
    roundings: int = 1,
    loosen: float = 1.0,
) -> None:
    """Shape, the places of -inf, no NaN, and the largest error against the float64 `want`.

    dtype         of q, k, v
    plain         the same quantity from plain dense attention in `dtype`; needed below float32
    result_dtype  of the result where it is narrower than `dtype` (a bfloat16 capture in float32 attention)
    roundings     how often the sum behind such a result is rounded to it
    """
    assert got.shape == want.shape, f"{name}: shape {got.shape}, not {want.shape}"
    got = np.asarray(got, np.float64)
    assert not np.isnan(got).any(), f"{name}: {int(np.isnan(got).sum())} NaN of {got.size}"
    minus = np.isneginf(got)
    assert np.array_equal(minus, np.isneginf(want)), (
        f"{name}: -inf at {int(minus.sum())} places, not at the {int(np.isneginf(want).sum())} expected"
    )
    live = np.isfinite(want)
    if not live.any():
        return
    top = float(np.abs(want[live]).max())
    allowed = loosen * _allowance(name, dtype, top, None if plain is None else _gap(plain, want, live).max())
    if result_dtype is not None:
        allowed += roundings * float(jnp.finfo(result_dtype).eps) * top
    gap = _gap(got, want, live)
    at = np.unravel_index(int(np.argmax(gap)), gap.shape)
    assert gap[at] <= allowed, (
        f"{name}: error {gap[at]:.3g} exceeds {allowed:.3g} at {tuple(map(int, at))} "
        f"(got {got[at]:.6g}, want {want[at]:.6g}, largest {top:.3g}; "
        f"{int((gap > allowed).sum())} of {gap.size} off)"
    )


def _gap(x: np.ndarray, want: np.ndarray, live: np.ndarray) -> np.ndarray:
    return np.abs(np.where(live, np.asarray(x, np.float64), 0) - np.where(live, want, 0))


def _allowance(name: str, dtype: str, top: float, plain_error: float | None) -> float:
    """The largest error that a result may have.

    name          of the result; gradients begin with "d:"
    top           the largest magnitude of the right result
    plain_error   the error of plain attention in the same dtype, needed below float32
    """
    gradient = name.startswith("d:")
    if dtype == "float64":
        return 1e-10 * (1 + top)
    if dtype == "float32":
        return 5e-5 * max(top, 0.1) if gradient else 1e-5 * (1 + top)
    if plain_error is None:
        raise ValueError(f"{dtype} needs `plain` to compare with")
    return 2 * plain_error + 0.5 * float(jnp.finfo(dtype).eps) * top + 1e-6
