"""Choices between products of one score become products with a chosen number (flexjax/ir/simplify.py)."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax.ir.evaluate_scalars import call_program
from flexjax.trace import trace_mod
from tests.arrays import array

SIZES = (1, 2, 8, 8)
Mod = typing.Callable[..., typing.Any]


def steps(mod: Mod) -> list[str]:
    """What the program does after places have been compared."""
    program = trace_mod.trace_score_mod(mod, SIZES).program
    return [s.prim for s in program.steps if getattr(s, "prim", None) in ("mul", "select_n", "add", "div", "tanh")]


# fmt: off
CHOSEN: dict[str, tuple[Mod, list[str]]] = {
    "one side": (lambda s, b, h, q, k: jnp.where(q > k, s * 0.5, s), ["select_n", "mul"]),
    "both sides": (lambda s, b, h, q, k: jnp.where(q > k, s * 0.5, 3.0 * s), ["select_n", "mul"]),
    "of the raw score and of more": (
        lambda s, b, h, q, k: jnp.where(q > k, jnp.tanh(s) * 0.5, jnp.tanh(s)), ["tanh", "select_n", "mul"],
    ),
    "twice": (
        lambda s, b, h, q, k: jnp.where(k % 2 == 0, 2.0 * jnp.where(q > k, s * 0.5, s), jnp.where(q > k, s * 0.5, s)),
        ["select_n", "select_n", "mul", "mul"],
    ),
}
LEFT: dict[str, tuple[Mod, list[str]]] = {
    "nothing": (lambda s, b, h, q, k: jnp.where(q > k, s * 0.0, s), ["mul", "select_n"]),
    "another score": (lambda s, b, h, q, k: jnp.where(q > k, (s + 1.0) * 0.5, s), ["add", "mul", "select_n"]),
    "no product": (lambda s, b, h, q, k: jnp.where(q > k, s / 3.0, s), ["div", "select_n"]),
    "no score": (lambda s, b, h, q, k: jnp.where(q > k, s, -1e9), ["select_n"]),
    "too large to multiply twice": (
        lambda s, b, h, q, k: jnp.where(q > k, 1e18 * s, s) * jnp.where(k % 2 == 0, 1e17, 1.0),
        ["select_n", "mul", "select_n", "mul"],
    ),
    "too large": (lambda s, b, h, q, k: jnp.where(q > k, 1e19 * s, s), ["mul", "select_n"]),
}
# fmt: on


def both(mod: Mod) -> tuple[np.ndarray, np.ndarray]:
    """Every value of the mod, traced and as written."""
    traced = trace_mod.trace_score_mod(mod, SIZES)
    score = array(np.random.default_rng(0).normal(size=SIZES), jnp.float32)

    def over(one: Mod) -> np.ndarray:
        for axis in (3, 2, 1, 0):
            one = jax.vmap(one, in_axes=(0, *(0 if i == axis else None for i in range(4))))
        return np.asarray(jax.jit(one)(score, *(jnp.arange(n, dtype=jnp.int32) for n in SIZES)))

    return over(lambda s, *at: call_program(traced.program, traced.arrays, at, s)), over(mod)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_number_is_chosen(name: str) -> None:
    mod, expected = CHOSEN[name]
    assert steps(mod) == expected
    got, want = both(mod)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", LEFT)
def test_the_products_are_chosen(name: str) -> None:
    mod, expected = LEFT[name]
    assert steps(mod) == expected


def test_products_of_products_are_not_looked_into_for_ever() -> None:
    def mod(s, b, h, q, k):
        factor = jnp.where(q > k, -1.0, 1.0)
        for _ in range(40):
            factor = factor * factor
        return s * factor

    assert steps(mod).count("mul") == 41


def test_an_infinite_score_stays_what_it_is() -> None:
    mod = lambda s, b, h, q, k: jnp.where(q > k, jnp.exp(s * 1e3) * 0.5, jnp.exp(s * 1e3))
    got, want = both(mod)
    np.testing.assert_array_equal(got, want)
    assert np.isinf(got).any()
