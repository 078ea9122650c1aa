"""Conversions in the interval analysis: whatever lies between two numbers lies within their interval afterwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax.analysis.interval_values import Interval, wide_type
from flexjax.analysis.intervals import _operation
from flexjax.ir.program import Op, Val
from tests.marks import some_slow

NARROW = ["float16", "bfloat16", "float8_e5m2", "float8_e5m2fnuz", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz",
          "float8_e4m3b11fnuz", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn"]  # fmt: skip
TARGETS = [*NARROW, "float32", "int8", "uint8", "int16", "int32", "uint32"]
AXES = frozenset({"kv"})


def samples(dtype: str) -> np.ndarray:
    """Sorted numbers of the type: random bits, small numbers, and what lies around the ends of every target."""
    rng = np.random.default_rng(0)
    kind = jnp.dtype(dtype)
    words = rng.integers(0, 2**8, (4096, kind.itemsize), dtype=np.uint8).view(kind).ravel()
    ends = [0.0]
    for target in TARGETS:
        info = (jnp.finfo if jnp.issubdtype(jnp.dtype(target), jnp.floating) else jnp.iinfo)(jnp.dtype(target))
        ends += [float(info.max), float(getattr(info, "tiny", 1)), float(getattr(info, "smallest_subnormal", 1))]
    near = np.concatenate(
        [np.multiply.outer(ends, 1 + np.arange(-40, 41) * s).ravel() for s in (2.0**-3, 2.0**-9, 2.0**-24)]
    )
    near = np.concatenate([near, -near, rng.standard_normal(2000) * 300, np.arange(-600, 600)])
    with np.errstate(all="ignore"):
        if jnp.issubdtype(kind, jnp.integer):
            info = jnp.iinfo(kind)
            near = near[(near > float(info.min)) & (near < float(info.max))]
        found = np.unique(np.concatenate([words, near.astype(kind)]))
    if not jnp.issubdtype(kind, jnp.floating):
        return found
    return found[~np.isnan(found) & ~((found != 0) & (np.abs(found) < float(jnp.finfo("float32").tiny)))]


@pytest.mark.parametrize("source", some_slow(["float32", "int32", "float64", "int64"], ["float32"]))
def test_conversions_are_sound(source: str) -> None:
    with jax.enable_x64(source.endswith("64")):
        numbers = samples(source)
        # intervals of one number, of a few neighbours, of many
        cuts = [np.arange(0, len(numbers), step) for step in (3, 40, 700)]
        last = lambda starts: np.append(starts[1:], len(numbers)) - 1
        low = jnp.asarray(numbers[np.concatenate(cuts)], wide_type(source))
        high = jnp.asarray(numbers[np.concatenate([last(starts) for starts in cuts])], wide_type(source))
        for target in TARGETS:
            op = Op("convert_element_type", (Val(5, source, AXES),), Val(6, target, AXES))
            found = _operation(op, [Interval(low, high)], {}, set())
            assert isinstance(found, Interval)
            least, most = (np.broadcast_to(np.asarray(e, np.float64).ravel(), low.shape) for e in found[:2])
            got = np.asarray(jnp.asarray(numbers).astype(jnp.dtype(target))).astype(np.float64)
            reached = [np.concatenate([f.reduceat(got, starts) for starts in cuts]) for f in (np.minimum, np.maximum)]
            inside = np.isnan(least) | ((reached[0] >= least) & (reached[1] <= most))
            assert inside.all(), (
                f"{source} {low[~inside]}..{high[~inside]} to {target}: {least[~inside]}..{most[~inside]}"
            )
            assert not np.isnan(least).all() or target == "float8_e8m0fnu", f"nothing is known of {target}"
