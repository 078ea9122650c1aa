"""Numbers that Python calls equal, and that compute different things, make different programs."""

import dataclasses
import itertools
import typing
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.ir.literals import literal
from tests.arrays import array

X = array(np.random.default_rng(0).standard_normal((1, 4, 2, 8)), jnp.float32)
EPS = float(np.finfo(np.float32).eps)
NUMBERS: list[typing.Any] = [
    0.0,
    -0.0,
    0,
    False,
    1.0,
    1,
    True,
    1 + EPS,
    float("nan"),
    float("inf"),
    -float("inf"),
    2,
    np.float32(2),
]
MODS: dict[str, Callable[[typing.Any], Callable]] = {
    "quotient": lambda c: lambda s, b, h, i, j: jnp.where(i >= j, 1 / (jnp.abs(s) * c), s),
    "chosen": lambda c: lambda s, b, h, i, j: jnp.where((i == j) & (h == 1), 1 / jnp.where(s > 9, s, c), s),
    "power": lambda c: lambda s, b, h, i, j: jnp.where(i == 0, s, jnp.abs(s) ** c),
    "type": lambda c: lambda s, b, h, i, j: s * (2 if jnp.asarray(c).dtype == jnp.float32 else 3) + (c == c),
}  # fmt: skip


def test_each_scale_has_its_own_sign_of_zero() -> None:
    x = jnp.abs(X)
    mod = lambda s, b, h, i, j: jnp.where(i >= j, jnp.maximum(1 / s, -5.0), 0.0)  # of inf and of -inf
    call = lambda scale, name: flexjax.flex_attention(x, x, x, scale=scale, score_mod=mod, implementation=name)
    for scale in (0.0, -0.0, 0.0):
        np.testing.assert_allclose(call(scale, "xla"), call(scale, "reference"), rtol=1e-5, err_msg=str(scale))
    assert bool(jnp.isnan(call(0.0, "xla")).any()) != bool(jnp.isnan(call(-0.0, "xla")).any())


@pytest.mark.parametrize("name", MODS)
def test_results_do_not_depend_on_what_was_called_before(name: str) -> None:
    for _ in range(2):
        for number in NUMBERS:
            mod = MODS[name](number)
            got, wanted = (
                flexjax.flex_attention(X, X, X, score_mod=mod, implementation=implementation)
                for implementation in ("xla", "reference")
            )
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5, err_msg=f"{number!r}")


def test_plans_and_literals_are_equal_where_their_numbers_have_one_text() -> None:
    plan = prepare(Arguments(X, X, X)).plan
    floats = [x for x in NUMBERS if type(x) is float]
    for a, b in itertools.product([*floats, float("nan")], repeat=2):
        one, other = (dataclasses.replace(plan, scale=x) for x in (a, b))
        assert (one == other) == (hash(one) == hash(other)) == (repr(a) == repr(b)), (a, b)
    for (a, s), (b, t) in itertools.product(itertools.product(NUMBERS, ("float32", "int32", "bool")), repeat=2):
        if any(not np.isfinite(float(x)) and d != "float32" for x, d in ((a, s), (b, t))):
            continue
        one, other = literal(a, s), literal(b, t)
        same = s == t and np.asarray(a).astype(s).tobytes() == np.asarray(b).astype(t).tobytes()
        assert (one == other) == same, (a, s, b, t)
