"""`precision=`: what it takes, what it is by default, and that xla multiplies with it in every pass."""

import re
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import flexjax
from flexjax.plan.precision import for_dot_general, precision_name

X3 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3
HIGHEST = jax.lax.Precision.HIGHEST


def shape(dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, 40, 2, 8), dtype)


def attend(**words: typing.Any) -> Callable[[jax.Array], jax.Array]:
    return lambda q: flexjax.flex_attention(q, q, q, implementation="xla", mask_mod=flexjax.masks.causal, **words)


def gradient(**words: typing.Any) -> Callable[[jax.Array], jax.Array]:
    return jax.grad(lambda q: attend(**words)(q).astype(jnp.float32).sum())


def precisions(function: Callable, dtype: str = "float32") -> set[str]:
    """What the products of the lowered function say of their precision; "" for those that say nothing."""
    lines = [x for x in jax.jit(function).lower(shape(dtype)).as_text().splitlines() if "dot_general" in x]
    assert lines
    found = [re.search(r"precision = \[(\w+), \w+\]", line) for line in lines]
    return {
        "algorithm" if "algorithm = " in line else one[1] if one else "" for line, one in zip(lines, found, strict=True)
    }


@pytest.mark.parametrize("make", [attend, gradient])
def test_every_product_has_the_precision_of_the_call(make: Callable) -> None:
    assert precisions(make()) == {"DEFAULT"}
    assert precisions(make(precision="highest")) == {"HIGHEST"}
    assert precisions(make(precision=X3)) == {"algorithm"}
    with jax.default_matmul_precision("float32"):
        assert precisions(make()) == {"HIGHEST"}
        assert precisions(make(precision="high")) == {"HIGH"}


def test_the_default_is_that_of_the_trace() -> None:
    traced = jax.jit(attend()).trace(shape())
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" not in traced.lower().as_text()
        inside = jax.jit(attend()).trace(shape())
    assert "HIGHEST" in inside.lower().as_text()


def test_inputs_of_16_bits_have_no_precision() -> None:
    assert precision_name("highest", "bfloat16") == "default"
    assert precisions(attend(precision="highest"), "bfloat16") == {"DEFAULT"}


def test_explain_shows_what_is_not_the_default() -> None:
    assert " precision highest" in flexjax.explain(shape(), shape(), shape(), precision="highest")
    assert " precision " not in flexjax.explain(shape(), shape(), shape())


NAMES = {
    "fastest": "default", "bfloat16": "default", "tensorfloat32": "high", "bfloat16_3x": "high", "float32": "highest",
    HIGHEST: "highest", (HIGHEST, HIGHEST): "highest", ("high", "tensorfloat32"): "high", X3: "BF16_BF16_F32_X3",
    "TF32_TF32_F32": "TF32_TF32_F32", jax.lax.DotAlgorithmPreset.DEFAULT: "default", None: "default",
}  # fmt: skip


@pytest.mark.parametrize("given", NAMES)
def test_names(given: typing.Any) -> None:
    assert precision_name(given, "float32") == NAMES[given]


@pytest.mark.parametrize("name", ["default", "high", "highest", "BF16_BF16_F32_X3"])
def test_a_name_stands_for_what_dot_general_takes(name: str) -> None:
    assert precision_name(for_dot_general(name), "float32") == name


@pytest.mark.parametrize("given", ["exact", 3, ("high", "highest"), (None, None), ("high",)])
def test_what_is_no_precision_is_refused(given: typing.Any) -> None:
    x = jnp.ones((1, 4, 1, 8))
    text = (
        f'`precision` is {given!r}; expected None, "default", "high", "highest", another name of a jax.lax.Precision, a '
        "jax.lax.DotAlgorithmPreset, or a pair of two equal ones. None follows jax.default_matmul_precision."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}\n"):
        flexjax.flex_attention(x, x, x, precision=given)
