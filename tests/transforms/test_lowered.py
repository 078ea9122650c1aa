"""Passes that are lowered once in a process (passes/lowered.py)."""

import collections
import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

import flexjax
from flexjax import masks
from flexjax.backends.xla.support import XlaBackend
from flexjax.passes import lowered
from tests.arrays import array

SHAPE = (1, 40, 2, 16)
Q, K, V = (array(np.random.default_rng(n).standard_normal(SHAPE).astype("float32")) for n in range(3))
BIAS = array(np.random.default_rng(3).standard_normal((2, 79)).astype("float32"))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often each pass of xla, which is kept as those of kernels are, was traced for a module."""
    counts: collections.Counter[str] = collections.Counter()
    monkeypatch.setattr(XlaBackend, "slow_to_lower", True)

    def counted(name: str) -> Callable:
        whole = getattr(XlaBackend, name)

        def run(*args: object) -> object:
            counts[name] += 1
            return whole(*args)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(XlaBackend, name, counted(name))
    return counts


def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    score_mod = lambda s, b, h, i, j: s + bias[h, i - j + 39]
    return flexjax.flex_attention(q, k, v, score_mod=score_mod, mask_mod=masks.causal, implementation="xla")


def gradients() -> Callable[..., tuple[jax.Array, ...]]:
    """A function that no jit has seen."""
    return jax.jit(lambda *given: jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2, 3))(*given))


def fresh() -> Callable[..., jax.Array]:
    return jax.jit(lambda *given: attend(*given))


def test_an_equal_pass_is_traced_once_and_gives_the_same(traced: collections.Counter[str]) -> None:
    first = gradients()(Q, K, V, BIAS)
    assert traced == {"forward": 1, "backward": 1}
    jax.tree.map(np.testing.assert_array_equal, gradients()(Q, K, V, BIAS), first)
    assert traced == {"forward": 1, "backward": 1}
    step = lambda x, _: (attend(x, K, V, BIAS), None)
    scanned = jax.jit(lambda x: jax.lax.scan(jax.checkpoint(step), x, None, length=2)[0])(Q)
    np.testing.assert_allclose(scanned, attend(attend(Q, K, V, BIAS), K, V, BIAS), atol=1e-5)
    assert traced == {"forward": 1, "backward": 1}


def test_it_is_what_is_inlined_otherwise(traced: collections.Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called = gradients()(Q, K, V, BIAS)
    monkeypatch.setattr(XlaBackend, "slow_to_lower", False)
    for got, want in zip(called, gradients()(Q, K, V, BIAS), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


OTHERS = {
    "length": lambda: fresh()(Q[:, :39], K, V, BIAS),
    "dtype": lambda: fresh()(*(x.astype("bfloat16") for x in (Q, K, V)), BIAS),
    "tiles": lambda: jax.jit(
        lambda *x: flexjax.flex_attention(*x, implementation="xla", kernel_options=flexjax.KernelOptions(block_q=16))
    )(Q, K, V),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_pass_is_another_module(other: str, traced: collections.Counter[str]) -> None:
    fresh()(Q, K, V, BIAS)
    OTHERS[other]()
    assert traced["forward"] == 2


@pytest.mark.parametrize("setting", ["x64", "precision"])
def test_settings_that_change_numbers_are_part_of_the_key(setting: str, traced: collections.Counter[str]) -> None:
    fresh()(Q, K, V, BIAS)
    with jax.enable_x64(True) if setting == "x64" else jax.default_matmul_precision("highest"):
        fresh()(Q, K, V, BIAS)
    assert traced["forward"] == 2


@pytest.mark.parametrize("annotated_first", [True, False])
def test_annotations_of_a_program_stay_its_own(annotated_first: bool, traced: collections.Counter[str]) -> None:
    """XLA's metadata is put on every operation that is traced under it."""

    def text(annotated: bool) -> str:
        with set_xla_metadata(inlineable="false") if annotated else contextlib.nullcontext():
            return fresh().lower(Q, K, V, BIAS).as_text()

    for annotated in (annotated_first, not annotated_first):
        assert ("inlineable" in text(annotated)) == annotated


def test_programs_that_cannot_call_a_copy_are_inlined(traced: collections.Counter[str]) -> None:
    """Of several devices, with symbolic sizes, and exported ones."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    two = jax.device_put(jnp.concatenate([Q, Q]), jax.NamedSharding(mesh, jax.P("x")))
    with jax.set_mesh(mesh):
        jax.jit(lambda x: flexjax.flex_attention(x, x, x, implementation="xla"))(two)
    exported = jax.export.export(jax.jit(lambda x: flexjax.flex_attention(x, x, x, implementation="xla")))(Q)
    assert exported.platforms == ("cpu",)
    assert traced["forward"] == 2
    assert len(lowered._lowered) == 0


def test_no_more_than_so_many_are_kept(traced: collections.Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered, "_lowered", lowered.Memo(2))
    for length in (8, 9, 10):
        jax.jit(lambda x: flexjax.flex_attention(x, x, x, implementation="xla")).lower(
            jax.ShapeDtypeStruct((1, length, 1, 8), "float32")
        )
    assert traced["forward"] == 3
    assert len(lowered._lowered) == 2


def test_two_programs_with_one_pass_have_one_text(traced: collections.Counter[str]) -> None:
    """jax's cache of compiled programs on disk finds them by it."""
    here = jax.jit(lambda *x: attend(*x)).lower(Q, K, V, BIAS).as_text()
    there = jax.jit(lambda *x: attend(*x)).lower(Q, K, V, BIAS).as_text()
    assert here == there
    assert traced["forward"] == 1
