"""Rewritten operations against jax's own, as plain functions of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flexjax.backends.mosaic_tpu import diagonals, tile_ops
from flexjax.ir.evaluate import apply_op
from flexjax.ir.program import Lit, Op, Val
from tests.arrays import array
from tests.marks import some_slow

AXES = frozenset({"q", "kv"})
FLOAT = np.concatenate([np.linspace(-3, 3, 241), [1e-8, -1e-8, 20.0, -20.0, 0.0]]).astype(np.float32)
INTS = np.arange(-40, 41, dtype=np.int32)


def unary(prim: str, dtype: str = "float32") -> Op:
    return Op(prim, (Val(10, dtype, AXES),), Val(11, dtype, AXES))


@pytest.mark.parametrize(
    ("prim", "domain"),
    [("expm1", 20), ("erfc", 4), ("cbrt", 20), ("sinh", 20), ("cosh", 20), ("asinh", 20), ("acosh", 20), ("atanh", 0.99),
     ("atan", 20), ("asin", 0.99), ("acos", 0.99), ("logistic", 20), ("sign", 20), ("log1p", 20)],
)  # fmt: skip
def test_transcendental(prim: str, domain: float):
    x = jnp.asarray(FLOAT[np.abs(FLOAT) <= domain])
    x = jnp.abs(x) + 1 if prim == "acosh" else jnp.abs(x) if prim == "log1p" else x
    got, want = tile_ops.apply(unary(prim), [x]), getattr(lax, prim)(x)
    np.testing.assert_allclose(got, want, rtol=4e-6, atol=4e-7)


@pytest.mark.parametrize("prim", ["expm1", "erfc", "cbrt", "sinh", "cosh", "asinh", "atan", "logistic", "sign"])
def test_edges(prim: str) -> None:
    x = np.array([0, 88.9, -88.9, 1e10, -1e10, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_allclose(tile_ops.apply(unary(prim), [jnp.asarray(x)]), getattr(lax, prim)(x), rtol=2e-5)


@pytest.mark.parametrize("by", [1, 2, 7, 8, 128, 100])
@pytest.mark.parametrize("prim", ["floordiv", "floormod", "div", "rem"])
@pytest.mark.parametrize("low", [None, 0])
def test_integer_division(prim: str, by: int, low: int | None):
    x = INTS if low is None else np.arange(0, 100000, 37, dtype=np.int32)
    top = None if low is None else 100000
    op = Op(prim, (Val(10, "int32", AXES, None, low, top), Lit(by, "int32")), Val(11, "int32", AXES))
    want = apply_op(op, [jnp.asarray(x), jnp.full_like(x, by)])
    np.testing.assert_array_equal(tile_ops.apply(op, [jnp.asarray(x), np.int32(by)]), want)


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
@pytest.mark.parametrize("prim", ["floordiv", "floormod", "div", "rem"])
def test_division_where_no_quotient_exists(prim: str, dtype: str):
    """By 0, and of the least integer by -1; with what is known of the operands or without."""
    numbers = np.array([-(2**31), -7, -1, 0, 1, 6, 2**31 - 1], np.int32).astype(dtype)
    x, y = map(jnp.asarray, np.broadcast_arrays(numbers[:, None], numbers[None, :]))
    op = Op(prim, (Val(10, dtype, AXES), Val(11, dtype, AXES)), Val(12, dtype, AXES))
    function = {"floordiv": jnp.floor_divide, "floormod": jnp.remainder, "div": lax.div, "rem": lax.rem}[prim]
    np.testing.assert_array_equal(tile_ops.apply(op, [x, y]), function(x, y))
    few = jnp.arange(4, dtype=dtype)
    op = Op(prim, (Val(10, dtype, AXES, None, 0, 3), Val(11, dtype, AXES, None, 0, 3)), Val(12, dtype, AXES))
    x, y = jnp.repeat(few, 4), jnp.tile(few, 4)
    np.testing.assert_array_equal(tile_ops.apply(op, [x, y]), function(x, y))


def test_a_divisor_that_is_known_costs_no_select():
    for prim in ("floordiv", "floormod", "div", "rem"):
        for by in (Lit(7, "int32"), Val(11, "int32", AXES, None, 1, 9)):
            op = Op(prim, (Val(10, "int32", AXES), by), Val(12, "int32", AXES))
            plain = jax.make_jaxpr(lambda x, y, op=op: tile_ops.apply(op, [x, y]))(INTS, INTS)
            assert not any(e.primitive.name == "eq" for e in plain.jaxpr.eqns)


@pytest.mark.parametrize("prim", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparison_of_booleans(prim: str):
    x, y = jnp.asarray([False, False, True, True]), jnp.asarray([False, True, False, True])
    op = Op(prim, (Val(10, "bool", AXES), Val(11, "bool", AXES)), Val(12, "bool", AXES))
    np.testing.assert_array_equal(tile_ops.apply(op, [x, y]), getattr(lax, prim)(x, y))


def test_select_between_booleans():
    which, yes, no = (array(np.random.default_rng(n).integers(0, 2, 32), bool) for n in range(3))
    val = lambda n: Val(n, "bool", AXES)
    op = Op("select_n", (val(10), val(11), val(12)), val(13))
    np.testing.assert_array_equal(tile_ops.apply(op, [which, no, yes]), jnp.where(which, yes, no))


@pytest.mark.parametrize(("rows", "cols"), some_slow([(5, 128), (64, 256), (136, 128)], [(5, 128)]))
def test_diagonals_spread_and_summed(rows: int, cols: int, monkeypatch: pytest.MonkeyPatch):
    """toeplitz and its transpose, against a gather and a scatter; the kernel's roll is jnp's outside of one."""
    monkeypatch.setattr(diagonals.pltpu, "roll", jnp.roll)
    rng = np.random.default_rng(0)
    width = -(-(rows + cols) // 128) * 128
    values = array(rng.standard_normal(width), jnp.float32)
    i, j = np.indices((rows, cols))
    spread = diagonals.toeplitz(diagonals.skewed(values), rows, cols, rows)
    np.testing.assert_array_equal(spread, values[rows + j - i])
    tile = array(rng.standard_normal((rows, cols)), jnp.float32)
    sums = diagonals.toeplitz_sums(tile, width, rows)
    flat = sum(np.pad(np.asarray(sums)[r, r:], (0, r)) for r in range(8))
    want = np.zeros(width)
    np.add.at(want, rows + j - i, np.asarray(tile, np.float64))
    np.testing.assert_allclose(flat, want, rtol=1e-4, atol=1e-4)
