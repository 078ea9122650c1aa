"""Masks of functions that devices round differently: no block is full or empty by the code that classified it alone.

The truth is the mask at every entry, computed eagerly and under jit, one entry at a time and many at once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flexjax import create_block_mask
from flexjax.analysis.interval_functions import INEXACT
from tests.arrays import array
from tests.block_mask.test_classify import classes_of
from tests.cases.random_masks import classes
from tests.marks import some_slow

T, S, BLOCK = 24, 100, 8
NUMBERS = np.random.default_rng(0)
SAME = np.repeat([0.0, 0.5, 1.0, 4.0, 7.905, 9.0, 20.0, 88.0, 1e-39, 1e-5, -2.0, 3.0, -1e-39], BLOCK)[:S]
EACH = SAME * (1 + 1e-6 * NUMBERS.standard_normal(S))
OF_TWO = {
    "pow": lambda x: lax.pow(x, x * 0 + 1.7),
    "atan2": lambda x: lax.atan2(x, x * 0 + 1.7),
    "rem": lambda x: lax.rem(x, x * 0 + 1.7),
}
FUNCTIONS = {name: getattr(lax, name) for name in INEXACT if name not in OF_TWO} | OF_TWO


def all_codes(function: Callable, x: jax.Array, limit: jax.Array, compare: Callable) -> list[np.ndarray]:
    """bool [T, S] by code: each row of keys compared with the limit of its query."""
    whole = lambda x, limit: compare(function(x)[None], limit[:, None])
    one = lambda x, limit: lax.map(lambda at: lax.map(lambda l: compare(function(at), l), limit), x).T
    odd = lambda x, limit: jnp.concatenate([whole(x[:3], limit), whole(x[3:10], limit), whole(x[10:], limit)], 1)
    return [np.asarray(f(x, limit)) for f in (whole, jax.jit(whole), jax.jit(one), jax.jit(odd))]


@pytest.mark.parametrize("name", some_slow(FUNCTIONS, ("tanh", "logistic", "exp2", "sin", "sqrt", "pow")))
def test_every_code_agrees_with_full_and_empty_blocks(name: str) -> None:
    """Limits lie at the values of the function, at the ends at which it saturates, and beside both."""
    function = FUNCTIONS[name]
    for numbers in (SAME, EACH):
        x = array(numbers, jnp.float32)
        values = np.nan_to_num(np.asarray(function(x))[:: S // 6][:6], posinf=1.0, neginf=0.0)
        limit = array(np.concatenate([values, np.nextafter(values, np.float32(-9)), [1, -1, 0, 0.5] * 3]), jnp.float32)
        for compare in (jnp.equal, jnp.greater_equal, jnp.less):
            mask_mod = lambda b, h, q, k, x=x, compare=compare, limit=limit: compare(function(x[k]), limit[q])
            wanted = [classes(on[None, None], (1, BLOCK)) for on in all_codes(function, x, limit, compare)]
            for exact in (False, True):
                make = lambda mask_mod=mask_mod, exact=exact: create_block_mask(
                    mask_mod, None, None, T, S, block_size=(1, BLOCK), exact=exact
                )
                found = classes_of(make())
                for want in wanted:
                    assert ((found == want) | (found == 1)).all(), (compare.__name__, exact)


def test_what_saturates_is_left_to_the_kernel() -> None:
    """And what does not is decided, entry by entry where that is asked for."""
    x = array(np.repeat([30.0, 0.5, -30.0, 1.0], 8), jnp.float32)
    made = lambda limit: classes_of(
        create_block_mask(lambda b, h, q, k: jnp.tanh(x[k]) >= limit, None, None, 8, 32, block_size=8, exact=True)
    )
    np.testing.assert_array_equal(made(1.0)[0, 0, 0], [1, 0, 0, 0])
    np.testing.assert_array_equal(made(0.6)[0, 0, 0], [2, 0, 0, 2])
    wave = lambda b, h, q, k: jnp.sin(x[k]) > 0
    np.testing.assert_array_equal(
        classes_of(create_block_mask(wave, None, None, 8, 32, block_size=8, exact=True))[0, 0, 0], [0, 2, 2, 2]
    )
