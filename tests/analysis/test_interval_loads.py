"""Captured floats that hold NaN: no block is called full or empty because a NaN among the elements that it reads is lost.

XLA's reductions by min and max lose NaN on a CPU, in most shapes from 4096 elements on; what each row reads is as large.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import create_block_mask
from tests.arrays import array
from tests.block_mask.test_classify import classes_of
from tests.cases.random_masks import classes, dense
from tests.marks import some_slow

B, LONG, SHORT, SIDE, TABLE = 4, 2048, 64, 512, (1 << 20) + 99
SHIFT = array([0, 300, 700, 1500])

LOADS: dict[str, tuple[Callable, tuple[int, ...], tuple[int, int]]] = {
    "row": (lambda x, b, q, k: x[b, q], (B, LONG), (LONG, SHORT)),
    "column": (lambda x, b, q, k: x[b, k], (B, LONG), (SHORT, LONG)),
    "shifted column": (lambda x, b, q, k: x[k + SHIFT[b]], (2 * LONG,), (SHORT, LONG)),
    "every third column": (lambda x, b, q, k: x[3 * k + 1], (3 * LONG + 1,), (SHORT, LONG)),
    "column by a table": (lambda x, b, q, k: x[k], (TABLE,), (2, TABLE)),
    "diagonal": (lambda x, b, q, k: x[q - k + SIDE], (2 * SIDE,), (SIDE, SIDE)),
    "negative diagonal": (lambda x, b, q, k: x[q - k], (2 * SIDE,), (SIDE, SIDE)),
    "pair": (lambda x, b, q, k: x[q, k], (SIDE, SIDE), (SIDE, SIDE)),
    "pair of a batch entry": (lambda x, b, q, k: x[b, q, k], (B, SIDE // 2, SIDE // 2), (SIDE // 2, SIDE // 2)),
    "row and diagonal": (lambda x, b, q, k: x[q, jnp.abs(q - k)], (SIDE, SIDE), (SIDE, SIDE)),
    "three indices": (lambda x, b, q, k: x[q // 32, k // 32, (q + k) % 64], (16, 16, 64), (SIDE, SIDE)),
}
"""By the kind of load: what an entry reads, the shape of the captured array, and (q_len, kv_len)."""
INEXACT = ("negative diagonal", "row and diagonal", "three indices")
"""Loads whose bounds are not those of the elements that a block reads."""

MASKS: dict[str, Callable] = {
    "positive": lambda x: x > 0,
    "not positive": lambda x: ~(x > 0),
    "nan": jnp.isnan,
    "not nan": lambda x: ~jnp.isnan(x),
    "clipped": lambda x: jnp.clip(2 * x - 1, 0.5, 1.5) > 0.75,
}


def holes(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Ones: along the last axis a quarter without NaN, a quarter with NaN in every tenth place, one of nothing but NaN, and one with a
    single NaN. The numbers are equal, so that a block seems to hold one number where NaN is lost.
    """
    n = shape[-1]
    x = np.ones(shape)
    x[..., n // 4 : n // 2 : 10] = np.nan
    x[..., n // 2 : 3 * n // 4] = np.nan
    x[..., 3 * n // 4 + 7] = np.nan
    return array(x, dtype)


def check(load: str, block: int, mask: str, dtype: str = "float32") -> None:
    """Asserts that a block mask, made eagerly and under jit, skips no visible entry and has no hidden one in a full block; and that
    no full block is missed where NaN is hidden and the bounds are exact.
    """
    read, shape, tokens = LOADS[load]
    sizes = (B if shape[0] == B or load == "shifted column" else 1, 1, *tokens)
    mask_of = lambda x: lambda b, h, q, k: MASKS[mask](read(x, b, q, k))
    make = lambda x: create_block_mask(mask_of(x), *sizes, block_size=block, exact=False)
    x = holes(shape, dtype)
    want = classes(dense(mask_of(x), sizes), (block, block))
    for made in (make, jax.jit(make)):
        found = classes_of(made(x))
        wrong = (found != want) & (found != 1)
        assert not wrong.any(), f"called full or empty wrongly at {np.argwhere(wrong)[:3]}"
        if mask == "positive" and load not in INEXACT:
            np.testing.assert_array_equal(found == 2, want == 2)


EVERYDAY = [(load, 32, "positive") for load in LOADS if load != "column by a table"]
EVERYDAY += [("column", 64, "nan"), ("diagonal", 16, "not nan")]


@pytest.mark.parametrize(
    ("load", "block", "mask"), some_slow(itertools.product(LOADS, (16, 32, 64, 128), MASKS), EVERYDAY)
)
def test_nan_is_not_lost(load: str, block: int, mask: str) -> None:
    check(load, block, mask)


@pytest.mark.parametrize("load", some_slow(["column", "diagonal", "pair", "three indices"], ["pair"]))
@pytest.mark.parametrize("dtype", some_slow(["float16", "bfloat16", "float64"], ["float64"]))
def test_nan_of_other_types_is_not_lost(load: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        check(load, 32, "positive", dtype)
