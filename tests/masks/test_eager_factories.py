"""Masks that are made inside a jitted function from known arrays have block lists that are made while it is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks

T = 64
IDS = np.arange(T) // 20
FACTORIES = {
    "document": lambda at: masks.document(IDS + at),
    "document of lengths": lambda at: masks.document(lengths=np.array([20, 30, 14]) + at),
    "document of offsets": lambda at: masks.document(offsets=[0, 20, 50, 64 + at]),
    "per_document": lambda at: masks.per_document(masks.causal, IDS + at),
    "padding": lambda at: masks.padding(np.array([40, 64]) + at),
    "prefix_lm": lambda at: masks.prefix_lm(np.array([10]) + at),
    "sliding_window": lambda at: masks.sliding_window(np.array([10]) + at),
    "causal_offset": lambda at: masks.causal_offset(np.array([3]) + at),
    "media_intervals": lambda at: masks.media_intervals(np.array([[0, 10], [20, 40]]) + at, T // 2),
    "tree": lambda at: masks.tree(np.arange(-1, T - 1) + at),
    "big_bird": lambda at: masks.big_bird(T, 8, seed=0 * at),
}


QUICK = ("document", "document of lengths", "padding")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FACTORIES])
def test_known_arrays_give_known_lists_inside_jit(name):
    found = []

    def make(x: jax.Array) -> jax.Array:
        """Makes the mask from numpy arrays, beside a traced array."""
        found.append(FACTORIES[name](0))
        mask = flexjax.create_block_mask(found[0], 2, 1, T, T, block_size=8)
        found.append(mask)
        return x

    jax.eval_shape(make, jnp.zeros(3))
    assert isinstance(found[1].sparsity(), float)  # traced lists have none
    outside = flexjax.create_block_mask(FACTORIES[name](0), 2, 1, T, T, block_size=8)
    np.testing.assert_array_equal(found[1].to_mask(), outside.to_mask())


def test_traced_arrays_are_traced():
    kinds = []
    jax.eval_shape(
        lambda ids: kinds.append(flexjax.create_block_mask(masks.document(ids), 1, 1, T, T)), jnp.asarray(IDS)
    )
    assert repr(kinds[0]).endswith("traced)")
