"""The reference itself: its values against numpy, its gradients against finite differences, in float64."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle
from tests.arrays import array
from tests.backends.conformance import Conformance, TransformationConformance
from tests.cases import CASES, Case
from tests.cases.small import quick_jit

EVERYDAY = frozenset({
    "plain_bnth", "no_keys", "large_logits", "chain", "rows_minus_inf", "zero_lengths",
    "batch_head_scale", "row_bias", "head_pair_bias", "relative_bias", "bucket_bias", "poison_bias", "sinks_masked_rows",
    "extra", "lse_only",
})  # fmt: skip
"""Kinds of reads, of masks and of inputs, each once."""
SAMPLE = [
    pytest.param(case, id=name, marks=[] if name in EVERYDAY else [pytest.mark.slow])
    for name, case in CASES.items()
    if not case.dropout and "custom" not in case.name  # its rule is not the derivative of its value, by design
]


class TestReference(Conformance):
    implementation = "reference"
    extra_dtypes = ()
    roundings = 4  # jax adds the gradients of reads up in the dtype of the array
    everyday = frozenset({"plain", "poison_root", "sinks", "dropout"})
    everyday_forward = frozenset({"plain"})
    slow_tests = frozenset(  # it is plain jax, which jax transforms
        name for name in vars(TransformationConformance) if name.startswith("test_") and "large_scores" not in name
    ) | {"test_large_scores[bfloat16-True-False]", "test_large_scores[float32-False-True]"}


@pytest.mark.parametrize("case", SAMPLE)
def test_values_are_numpys_and_gradients_are_finite_differences(case: Case):
    """The slope is taken along one random direction through all inputs and learned captures at once."""
    inputs, captured = oracle.float64_inputs(case)
    gradients = oracle.expected(case)
    for name, x in oracle.attention_values(case, inputs, captured).items():
        np.testing.assert_allclose(gradients[name], x, rtol=1e-12, atol=1e-12, err_msg=name)
    rng = np.random.default_rng(7)

    def direction(name: str, x: np.ndarray) -> np.ndarray:
        fixed = "d:" + name not in gradients
        return np.zeros(x.shape) if fixed else np.where(np.isnan(x), 0.0, rng.standard_normal(x.shape))

    toward = {name: direction(name, x) for name, x in {**inputs, **captured}.items()}
    step = 1e-6 / max(1.0, case.gain)

    def loss_at(t: float) -> float:
        moved = [
            {n: x + t * toward[n] if "d:" + n in gradients else x for n, x in arrays.items()}
            for arrays in (inputs, captured)
        ]
        return oracle.loss_value(inputs, oracle.attention_values(case, *moved))

    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    along = [float(np.sum(g * toward[n[2:]])) for n, g in gradients.items() if n.startswith("d:")]
    size = np.sqrt(sum(float(np.sum(g * g)) for n, g in gradients.items() if n.startswith("d:")))
    assert not np.isnan(size)
    assert abs(slope - sum(along)) <= 1e-6 * max(1.0, size, abs(slope))


def test_keep_array_drops_and_rescales():
    x = np.ones((1, 1, 3, 4), np.float32)
    keep = np.array([[True, True, False], [True, False, False], [False, False, False]])[None, None]
    attend = quick_jit(functools.partial(oracle.reference_attention, layout="BNTH", dropout_rate=0.5))
    out = attend(x, x, x, dropout_keep=keep)[0]
    np.testing.assert_allclose(out[0, 0, :, 0], np.array([2, 1, 0]) / 3 * 2, rtol=1e-6)


def test_a_dense_mask_joins_the_mask_mod():
    x = array(np.random.default_rng(1).standard_normal((1, 5, 2, 4)), jnp.float32)
    causal, allowed = lambda b, h, q, k: q >= k, np.random.default_rng(0).integers(0, 2, (1, 1, 5, 5)) > 0
    both = lambda b, h, q, k: causal(b, h, q, k) & jnp.asarray(allowed)[0, 0, q, k]
    attend = lambda **masks: quick_jit(functools.partial(oracle.reference_attention, **masks))(x, x, x)
    got, want = attend(mask_mod=causal, mask=allowed), attend(mask_mod=both)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
