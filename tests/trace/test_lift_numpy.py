"""numpy inside a mod is numpy: its dtypes, its functions in place, its errors; what a tracer indexes is an operand."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import flex_attention, masks
from flexjax.ir.evaluate_scalars import call_program
from flexjax.trace.trace_mod import trace_mask_mod, trace_score_mod
from tests.cases.small import by_definition

SIZES = (1, 1, 12, 12)
RNG = np.random.default_rng(0)
NANOSECONDS = 1_700_000_000_000_000_000 + np.cumsum(RNG.integers(1, 9, 12)) * 10**9
SECONDS = 1.7e9 + np.cumsum(RNG.random(12))
NUMBERS = np.array([30, 20, 10, 5], np.int32)
IDS = np.arange(12) // 4
FAR_IDS = np.array([1, 2**32 + 1, 2**33 + 1] * 4)


def of_int64(b, h, q, k):
    relative = jnp.asarray((NANOSECONDS - NANOSECONDS[0]) // 10**9, jnp.int32)
    return jnp.abs(relative[q] - relative[k]) <= 12


def of_int64_indexed(b, h, q, k):
    relative = (NANOSECONDS - NANOSECONDS[0]) // 10**9
    return abs(relative[q] - relative[k]) <= 12


def sorts_in_place(b, h, q, k):
    numbers = NUMBERS.copy()
    numbers.sort()
    return q >= numbers[0]


def fills(b, h, q, k):
    numbers = NUMBERS.copy()
    numbers.fill(3)
    return (q >= numbers[0]) & (k >= numbers[q % 4])


def reduces(b, h, q, k):
    return k < int(NUMBERS.max()) // 3 - len(NUMBERS) - isinstance(NUMBERS.sum(), np.ndarray)


class Table:
    of_class = IDS

    def __init__(self) -> None:
        self.of_object = IDS

    def mask(self, b, h, q, k):
        return self.of_class[q] == self.of_object[k]


def wanted(mask: Callable) -> np.ndarray:
    """bool [12, 12], position by position, with numpy's own indices."""
    return np.array([[bool(mask(0, 0, q, k)) for k in range(12)] for q in range(12)])


MASKS = {
    "int64": of_int64,
    "int64 indexed": of_int64_indexed,
    "sorts in place": sorts_in_place,
    "fills": fills,
    "reduces": reduces,
    "object": Table().mask,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_what_numpy_computes(name: str) -> None:
    traced = trace_mask_mod(MASKS[name], SIZES)
    q, k = np.indices((12, 12), dtype=np.int32)
    at = lambda q, k: call_program(traced.program, traced.arrays, (0, 0, q, k))
    np.testing.assert_array_equal(jax.vmap(jax.vmap(at))(q, k), wanted(MASKS[name]))


def test_float64_is_subtracted_as_such() -> None:
    traced = trace_score_mod(lambda s, b, h, q, k: s - jnp.abs((SECONDS - SECONDS[0])[q]), SIZES)
    got = [float(call_program(traced.program, traced.arrays, (0, 0, q, 0), jnp.float32(0))) for q in range(12)]
    np.testing.assert_allclose(got, SECONDS[0] - SECONDS, rtol=1e-6)


def test_numpy_raises_its_own_errors() -> None:
    with pytest.raises(IndexError, match=r"^index 7 is out of bounds for axis 0 with size 4"):
        trace_mask_mod(lambda b, h, q, k: q >= NUMBERS[7], SIZES)


TOO_LARGE = (
    "`mask_mod` cannot be compiled: it reads a captured numpy array of int64 with numbers from 1 to 8589934593, which int32 does "
    "not hold; number ids anew, as np.unique(ids, return_inverse=True)[1] does, the same in all arrays that are compared, "
    "subtract the least number, or turn on jax_enable_x64."
)
TOO_LARGE_FOR_MASKS = (
    "`document`: `segment_ids` has numbers from 1 to 8589934593; expected numbers that int32 holds. Number them anew, as "
    "np.unique(segment_ids, return_inverse=True)[1] does, the same in all arrays that are compared, or turn on jax_enable_x64."
)
READS = {
    "indexed": lambda b, h, q, k: FAR_IDS[q] == FAR_IDS[k],
    "as an operand": lambda b, h, q, k: (q == FAR_IDS).any(),
}


@pytest.mark.parametrize("how", READS)
def test_ids_that_do_not_fit_are_refused(how: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(TOO_LARGE)}\nin <lambda>, test_lift_numpy.py:"):
        trace_mask_mod(READS[how], SIZES)


def test_ids_that_do_not_fit_are_refused_by_masks() -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(TOO_LARGE_FOR_MASKS)}$"):
        masks.document(FAR_IDS)
    with jax.enable_x64(True):
        assert len(trace_mask_mod(masks.document(FAR_IDS), SIZES).arrays) == 1
        assert [a.dtype for a in trace_mask_mod(READS["indexed"], SIZES).arrays] == [jnp.int64]


def test_the_reference_takes_what_the_kernels_take() -> None:
    query = jax.random.normal(jax.random.key(0), (1, 12, 1, 8))
    gain = np.linspace(0.5, 2.0, 12)

    options = {"mask_mod": Table().mask, "score_mod": lambda s, b, h, q, k: s * gain[q]}
    got = flex_attention(query, query, query, **options, implementation="xla")
    np.testing.assert_allclose(by_definition(query, query, query, **options), got, atol=2e-6)
