"""Each of the ready-made weights against its definition in numpy, entry by entry, and through a call with its divisor and gradients."""

import functools
import math
import pickle
import types
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import Weights, masks, weights
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.mods.test_mods import HEADS, SCORES, everywhere

LOGITS = np.asarray([-1.0, 0.5, -2.5], np.float32)
DECAY = np.asarray([0.9, 0.5, 0.97], np.float32)


class Case(typing.NamedTuple):
    """`make(*arrays)` are the weights; `one` is the definition of a weight, `divisor` that of a row, of its weights."""

    make: Callable[..., typing.Any]
    arrays: tuple[np.ndarray, ...]
    one: Callable[[float, int, int, int], float]
    divisor: Callable[[np.ndarray], np.ndarray | float] = lambda w: 1.0


logistic = lambda x: 1 / (1 + math.exp(-x))
CASES: dict[str, Case] = {
    "sigmoid": Case(weights.sigmoid, (LOGITS,), lambda s, h, q, k: logistic(s + LOGITS[h])),
    "sigmoid of a number": Case(
        lambda: weights.sigmoid(-math.log(7)), (), lambda s, h, q, k: logistic(s - math.log(7))
    ),
    "silu": Case(lambda: weights.silu(7), (), lambda s, h, q, k: s * logistic(s) / 7),
    "relu_squared": Case(lambda: weights.relu_squared(7), (), lambda s, h, q, k: max(s, 0) ** 2 / 7),
    "retention": Case(
        weights.retention,
        (DECAY,),
        lambda s, h, q, k: s * float(DECAY[h]) ** max(q - k, 0),
        lambda w: np.maximum(np.abs(w.sum(-1)), 1),
    ),
    "power": Case(lambda: weights.power(4), (), lambda s, h, q, k: s**4, lambda w: w.sum(-1)),
    "linear": Case(lambda: weights.linear, (), lambda s, h, q, k: s, lambda w: w.sum(-1)),
}


def test_every_function_has_a_case() -> None:
    public = {n for n, x in vars(weights).items() if not n.startswith("_") and not isinstance(x, types.ModuleType)}
    assert public == {name.split()[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_weight_is_its_definition(name: str) -> None:
    case = CASES[name]
    given = case.make(*map(jnp.asarray, case.arrays))
    function = given.function if isinstance(given, Weights) else given
    wanted = np.empty_like(SCORES, dtype=np.float64)
    for b, h, q, k in np.ndindex(SCORES.shape):
        wanted[b, h, q, k] = case.one(float(SCORES[b, h, q, k]), h, q, k)
    np.testing.assert_allclose(everywhere(function), wanted, rtol=1e-5, atol=1e-5)
    divisor = given.divisor if isinstance(given, Weights) else None
    if divisor is not None:
        total = jnp.asarray(wanted.sum(-1), jnp.float32)
        np.testing.assert_allclose(divisor(total), case.divisor(wanted), rtol=1e-5)
    pickle.loads(pickle.dumps(given))


@pytest.mark.parametrize("name", CASES)
def test_a_call_divides_and_has_gradients(name: str) -> None:
    """Against the reference, which has the user's functions, on xla, which has the program."""
    case, rng = CASES[name], np.random.default_rng(1)
    q, k, v = (array(rng.uniform(0.1, 1.0, (1, 12, HEADS, 8)), jnp.float32) for _ in range(3))

    def loss(implementation: typing.Any, q: jax.Array, *arrays: jax.Array) -> jax.Array:
        made = case.make(*arrays)
        out = flexjax.flex_attention(q, k, v, weights=made, mask_mod=masks.causal, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    given = (q, *map(jnp.asarray, case.arrays))
    found = [
        quick_jit(jax.value_and_grad(functools.partial(loss, name), argnums=tuple(range(len(given)))))(*given)
        for name in ("xla", "reference")
    ]
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: weights.sigmoid("x"), "`sigmoid`: `bias` is a str"),
        (lambda: weights.sigmoid(math.inf), "`sigmoid`: `bias` is inf; expected a finite number."),
        (lambda: weights.silu(0), "`silu`: `n` is 0; expected a finite number above 0."),
        (lambda: weights.relu_squared(-1), "`relu_squared`: `n` is -1; expected a finite number above 0."),
        (lambda: weights.retention(0.0), "`retention`: `decay` is 0.0; expected a finite number above 0."),
        (lambda: weights.power(3), "`power`: `p` is 3; expected an even int."),
        (lambda: weights.power(0), "`power`: `p` is 0; expected an int of at least 2."),
    ],
)
def test_refusals(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 the sentence is compared
        make()
    assert str(error.value).startswith(sentence)


def test_a_call_of_other_sizes_is_refused() -> None:
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="`bias` float32\\[3\\]"):
        flexjax.flex_attention(x, x, x, weights=weights.sigmoid(jnp.asarray(LOGITS)))
