"""The maxtext suite without a GPU: the same numbers from both attentions, packed rows, and its tables."""

import importlib.util
import time
import types

import jax
import numpy as np
import pytest

import flexjax.nn
from bench import __main__ as command
from bench import maxtext_step as suite
from flexjax.backends import target as targets

TINY = suite.Size(layers=1, width=16, heads=2, kv_heads=1, mlp=16, words=32, rows=2, tokens=32, documents=3)
needs_maxtext = pytest.mark.skipif(importlib.util.find_spec("maxtext") is None, reason="pip install maxtext")
quiet = pytest.mark.filterwarnings("ignore")  # what MaxText imports is deprecated in places


def test_packed_rows_restart_their_positions() -> None:
    given = suite.batches(TINY)
    one, packed = given[suite.ONE], given[suite.PACKED]
    assert (one.tokens == packed.tokens).all()
    np.testing.assert_array_equal(one.positions, np.broadcast_to(np.arange(TINY.tokens), one.ids.shape))
    assert (one.ids == 1).all()
    for ids, positions in zip(np.asarray(packed.ids), np.asarray(packed.positions), strict=True):
        assert ids[0] == 1
        assert ids[-1] == TINY.documents
        expected = np.concatenate([np.arange(n) for n in np.bincount(ids)[1:]])
        np.testing.assert_array_equal(positions, expected)


def test_errors_are_of_the_same_model_and_packing() -> None:
    right = {suite.ONE: {"loss": 2.0, "w": 1.0}, suite.PACKED: {"loss": 4.0, "w": 1.0}}
    off = {suite.ONE: {"loss": 2.1, "w": 0.5}, suite.PACKED: {"loss": float("nan"), "w": 1.0}}
    errors = suite.errors_of({suite.OWN: off, suite.CUDNN: off, suite.DENSE: right})
    assert set(errors) == {(suite.OWN, suite.ONE), (suite.OWN, suite.PACKED), (suite.CUDNN, suite.ONE)}
    assert errors[suite.OWN, suite.ONE] == pytest.approx((0.05, 0.5))
    assert errors[suite.OWN, suite.PACKED] == (float("inf"), 0.0)
    assert set(suite.errors_of({suite.OWN: off, suite.OWN_XLA: right})) == set(errors) - {(suite.CUDNN, suite.ONE)}
    assert suite.errors_of({suite.OWN: off}) == {}


def test_no_variant_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def ten_seconds(*given: object) -> None:
        clock[0] += 10
        raise RuntimeError("no")

    monkeypatch.setattr(suite, "time", types.SimpleNamespace(time=lambda: clock[0]))
    monkeypatch.setattr(suite, "compiled_step", ten_seconds)
    trained = types.SimpleNamespace(restart=lambda: None, weights=None)
    found = suite.run_variants(TINY, trained, 25.0)
    assert found.missing == {
        suite.OWN: "failed, RuntimeError: no",
        suite.CUDNN: "needs an NVIDIA GPU",
        suite.DENSE: "failed, RuntimeError: no",
        suite.TWICE: "not reached in the time given",
        suite.FLASH: "not reached in the time given",
        suite.OWN_XLA: "not reached in the time given",
    }


@needs_maxtext
@quiet
@pytest.mark.slow
def test_flexjax_trains_the_model_of_the_dot_product(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = flexjax.nn.maxtext.flex_attention
    monkeypatch.setattr(flexjax.nn.maxtext, "flex_attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    found = suite.run_variants(TINY, suite.Trained(TINY), time.time() + 600)
    assert found.missing == dict.fromkeys(suite.ON_GPU, "needs an NVIDIA GPU")
    assert set(found.compiled) == set(found.numbers) == {suite.OWN, suite.DENSE, suite.TWICE}
    assert calls
    errors = suite.errors_of(found.numbers)
    assert set(errors) == {(name, rows) for name in (suite.OWN, suite.TWICE) for rows in (suite.ONE, suite.PACKED)}
    assert max(max(pair) for pair in errors.values()) < suite.ALLOWED_ERROR
    assert found.numbers[suite.DENSE][suite.ONE] != found.numbers[suite.DENSE][suite.PACKED]


@needs_maxtext
@quiet
@pytest.mark.slow
def test_a_failure_is_a_line_and_xla_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size: suite.Size, variant: suite.Variant, weights: object) -> object:
        if variant == suite.VARIANTS[suite.DENSE]:
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nmore")
        return real(size, variant, weights)

    real = suite.compiled_step
    monkeypatch.setattr(suite, "compiled_step", fail)
    found = suite.run_variants(TINY, suite.Trained(TINY), time.time() + 600)
    assert found.missing[suite.DENSE] == "failed, RuntimeError: RESOURCE_EXHAUSTED: no memory"
    assert set(found.numbers) == {suite.OWN, suite.TWICE, suite.OWN_XLA}
    errors = suite.errors_of(found.numbers)
    lines = suite.table(TINY, found, {}, errors, {})
    assert f"| dot_product | failed, RuntimeError: RESOURCE_EXHAUSTED: no memory {'| - ' * 6}|" in lines


@needs_maxtext
@quiet
@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11")
@pytest.mark.parametrize(("name", "kernels"), [(suite.OWN, 3), (suite.TWICE, 4)])
def test_the_step_has_the_kernels(name: str, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered for an H200. A FallbackWarning is an error."""
    assert isinstance(suite.maxtext_version(), str)
    size = TINY._replace(width=256, heads=2, tokens=512)
    monkeypatch.setattr(targets, "of_lowering", lambda *given: targets.Target("cuda", "NVIDIA H200", "9.0", 132))
    weights = jax.eval_shape(lambda: suite.first_weights(size))
    variant = suite.VARIANTS[name]
    with suite.installed(variant), suite.maxtext_model(size, variant) as model:
        traced = jax.jit(suite.make_step(model)).trace(weights, suite.batches(size)[suite.PACKED])
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == kernels


@needs_maxtext
@quiet
@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--suite", "maxtext", "--small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith(("| flexjax", "| dot_product"))]
    assert [row[1] for row in rows] == ["one document"] * 3 + ["packed"] * 3
    assert all(row[2] != "-" for row in rows)
    assert all(row[-1] != "- |" for row in rows if "flexjax" in row[0])
    assert f"| cudnn_flash_jax | needs an NVIDIA GPU {'| - ' * 6}|" in lines


@needs_maxtext
@quiet
def test_what_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--suite", "maxtext", "--small", "--minutes", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-6:] == [f"| {name} | not reached in the time given {'| - ' * 6}|" for name in suite.VARIANTS]


def test_without_maxtext_a_line_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "maxtext_version", lambda: ImportError("No module named 'maxtext'"))
    assert command.main(["--suite", "maxtext"]) == 1
    line = "The suite maxtext needs MaxText: failed, ImportError: No module named 'maxtext'"
    assert capsys.readouterr().out.splitlines() == [line]
