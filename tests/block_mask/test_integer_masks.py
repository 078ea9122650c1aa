"""Masks of random integer arithmetic: division by 0, numbers that wrap around, every type, empty shapes, with 64 bits and without.

No block is called full or empty wrongly, and attention under the mask is that of the mod itself, entry by entry.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexjax
from flexjax.backends.xla.region import Region
from flexjax.backends.xla.tile import XlaTile
from flexjax.ir.evaluate import evaluate
from flexjax.trace.trace_mod import trace_mask_mod
from tests.arrays import array
from tests.block_mask.test_classify import check
from tests.cases.random_masks import (
    INTEGER_PROGRAMS,
    SMALL_BLOCKS,
    SMALL_SIZES,
    arrays_of,
    build,
    dense,
)
from tests.marks import some_slow

SEEDS = st.integers(0, 1000)
LONG = settings().max_examples > 100


def mask_of(tree: tuple, sizes: tuple, seed: int) -> Callable:
    arrays = arrays_of(sizes, np.random.default_rng(seed))
    return build(tree, {name: array(a) for name, a in arrays.items()})


@settings(max_examples=1000 if LONG else 3)
@given(INTEGER_PROGRAMS, SMALL_SIZES, SMALL_BLOCKS, SEEDS, st.booleans())
def test_blocks_are_sound(tree: tuple, sizes: tuple, blocks: tuple, seed: int, x64: bool) -> None:
    with jax.enable_x64(x64):
        # a block mask of no batch entries is refused
        check(tree, (max(sizes[0], 1), *sizes[1:]), blocks, seed, False, False, False)


@settings(max_examples=1000 if LONG else 2)
@given(INTEGER_PROGRAMS, SMALL_SIZES, SEEDS, st.booleans())
def test_tiles_are_those_of_the_mod(tree: tuple, sizes: tuple, seed: int, x64: bool) -> None:
    """What the xla backend makes of the mask on a tile of two key blocks, past the end of the matrix too."""
    b, h, t, s = sizes
    half = s // 2 + 1
    with jax.enable_x64(x64):
        mask = mask_of(tree, sizes, seed)
        traced = trace_mask_mod(mask, sizes)
        region = Region(0, b, 0, h, 0, t + 1, array([0, half], jnp.int32), half)
        tile = XlaTile(region, traced.arrays)
        (got,) = evaluate(traced.program, tile, [frozenset({"q", "kv"})])
        np.testing.assert_array_equal(np.broadcast_to(got, region.shape)[:, :, :t, :s], dense(mask, sizes, False))


@settings(max_examples=300 if LONG else 2)
@given(INTEGER_PROGRAMS, SMALL_SIZES, SEEDS, st.booleans())
def test_attention_sees_what_the_mod_says(tree: tuple, sizes: tuple, seed: int, x64: bool) -> None:
    """With scores of 0 and the identity for values, the output is 1 / (number of keys) where the mask is on."""
    b, h, t, s = sizes
    with jax.enable_x64(x64):
        mask = mask_of(tree, sizes, seed)
        value = np.broadcast_to(np.eye(s, dtype=np.float32)[None, :, None], (b, s, h, s))
        zeros = np.zeros((b, max(t, s), h, 4), np.float32)
        if s == 0:
            value = np.zeros((b, 0, h, 4), np.float32)
        out = flexjax.flex_attention(zeros[:, :t], zeros[:, :s], value, mask_mod=mask, implementation="xla")
        on = dense(mask, sizes, False)
    wanted = on / np.maximum(on.sum(-1, keepdims=True), 1) if s else np.zeros((b, h, t, 4))
    np.testing.assert_allclose(np.swapaxes(out, 1, 2), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "x64"),
    some_slow(
        itertools.product(("floor_divide", "remainder", "div", "rem"), (False, True)),
        [("floor_divide", False), ("rem", False), ("remainder", True)],
    ),
)
def test_each_division_of_each_type(how: str, x64: bool) -> None:
    """By zeros, ones, negatives and the least integer, on every block of one matrix."""
    for dtype in ["int64"] if x64 else ["int8", "uint32", "int32"]:
        quotient = ("arithmetic", how, dtype, ("load", "divisors", "q"), ("load", "divisors", "k"))
        with jax.enable_x64(x64):
            check(("compared", "ge", dtype, quotient, ("literal", 0)), (1, 1, 24, 24), (5, 7), 0, False, False, False)
