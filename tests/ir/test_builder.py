"""What the builder folds, shares and knows: ranges, linear forms, wrap-around."""

import pytest

from flexjax.ir.builder import Builder, literal
from flexjax.ir.program import KV, B, H, Lit, Q
from flexjax.ir.ranges import integer_range
from flexjax.ir.verify import check


@pytest.fixture
def builder() -> Builder:
    return Builder((2, 3, 100, 200), "float32")


I32 = lambda v: literal(v, "int32")


def test_equal_operations_are_one_value(builder: Builder) -> None:
    q, kv = builder.inputs[Q], builder.inputs[KV]
    assert builder.op("add", (q, kv), "int32") == builder.op("add", (kv, q), "int32")
    assert builder.op("sub", (q, kv), "int32") != builder.op("sub", (kv, q), "int32")


@pytest.mark.parametrize(
    ("prim", "value", "folds"),
    [("add", 0, True), ("mul", 1, True), ("floordiv", 1, True), ("sub", 0, True), ("add", 1, False)],
)
def test_neutral_elements(builder: Builder, prim: str, value: int, folds: bool) -> None:
    q = builder.inputs[Q]
    assert (builder.op(prim, (q, I32(value)), "int32") == q) == folds


@pytest.mark.parametrize(
    ("prim", "value", "known"),
    [("lt", 100, True), ("lt", 99, None), ("ge", 0, True), ("eq", 100, False), ("ne", -1, True), ("gt", 50, None)],
)
def test_comparisons_that_ranges_decide(builder: Builder, prim: str, value: int, known: bool | None) -> None:
    found = builder.op(prim, (builder.inputs[Q], I32(value)), "bool")
    assert (found.value if isinstance(found, Lit) else None) is known


def test_a_sum_that_can_wrap_is_neither_bounded_nor_linear(builder: Builder) -> None:
    large = builder.op("mul", (builder.inputs[Q], I32(2**25)), "int32")
    assert (large.low, large.linear) == (None, None)
    fits = builder.op("mul", (builder.inputs[Q], I32(2**20)), "int32")
    assert (fits.low, fits.high, fits.linear.q) == (0, 99 * 2**20, 2**20)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_an_index_type_that_ends_before_the_array(builder: Builder, dtype: str) -> None:
    """The limit of the array is no number of that type: there is nothing to clamp."""
    table = builder.capture((100,), dtype)
    index = builder.load(table, (builder.inputs[Q],))
    builder.clamped(index, 299)
    limits = {a.value for s in builder.steps for a in s.inputs if isinstance(a, Lit)}
    assert limits <= {0}


def test_what_cancels_is_said_without_it(builder: Builder) -> None:
    h, q, kv = (builder.inputs[i] for i in (H, Q, KV))
    difference = builder.op("sub", (q, kv), "int32")
    assert difference.axes == {"delta"}
    assert builder.op("add", (difference, kv), "int32") == q
    assert builder.op("sub", (q, q), "int32") == I32(0)
    shifted = builder.op("add", (q, h), "int32")
    assert builder.op("sub", (shifted, h), "int32") == q
    check(builder.finish([builder.op("sub", (builder.op("add", (difference, h), "int32"), h), "int32")]))


def test_a_value_of_batch_stays_one(builder: Builder) -> None:
    assert builder.op("mul", (builder.inputs[B], I32(4)), "int32").axes == {"b"}


@pytest.mark.parametrize("prim", ["floordiv", "floormod", "rem", "add", "sub", "mul", "max", "min"])
def test_ranges_hold_every_value(prim: str) -> None:
    run = {
        "floordiv": lambda a, b: a // b,
        "floormod": lambda a, b: a % b,
        "rem": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "max": max,
        "min": min,
    }[prim]
    for low in range(-6, 6):
        for high in range(low, 6):
            for other in ((1, 3), (2, 2), (4, 7)):
                values = [run(a, b) for a in range(low, high + 1) for b in range(other[0], other[1] + 1)]
                found = integer_range(prim, [(low, high), other])
                assert found[0] <= min(values)
                assert max(values) <= found[1]


@pytest.mark.parametrize(("value", "dtype"), [(3e9, "int32"), (float("nan"), "int32"), (-1.0, "uint8")])
def test_conversions_that_devices_decide_are_left_to_them(builder: Builder, value: float, dtype: str) -> None:
    assert not isinstance(builder.convert(literal(value, "float32"), dtype), Lit)
    assert builder.convert(literal(3.7, "float32"), "int32") == I32(3)
