"""What stands in keys and values where the mask hides them: what the docstring of flex_attention promises of NaN and infinities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from tests.cases.small import quick_jit

VISIBLE = 8
BAD = {"nan": jnp.nan, "infinity": jnp.inf}


def inputs(bad: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 12, 2, 8))
    return query, key.at[:, VISIBLE:].set(bad), value.at[:, VISIBLE:].set(-bad)


def results(query: jax.Array, key: jax.Array, value: jax.Array, block: int, implementation: str) -> list[jax.Array]:
    """The output and the gradients of query, key and value."""
    mask = flexjax.create_block_mask(lambda b, h, q, k: k < VISIBLE, None, None, 12, 12, block_size=block)
    run = lambda *arrays: flexjax.flex_attention(*arrays, block_mask=mask, implementation=implementation)

    @quick_jit
    def all_of(*arrays: jax.Array) -> list[jax.Array]:
        out, pull = jax.vjp(run, *arrays)
        return [out, *pull(jnp.cos(out))]

    return all_of(query, key, value)


@pytest.mark.parametrize("bad", BAD)
def test_blocks_that_are_skipped_are_never_read(bad: str) -> None:
    query, key, value = inputs(BAD[bad])
    want = results(*inputs(0.0), 4, "reference")
    for got, wanted in zip(results(query, key, value, 4, "xla"), want, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_zeroed_contents_are_those_of_no_contents(implementation: str) -> None:
    """What the docstring says to do, in a block that is visited because a part of it is on."""
    query, key, value = inputs(jnp.nan)
    valid = jnp.arange(12)[None] < VISIBLE
    clean = [jnp.where(valid[:, :, None, None], x, 0) for x in (key, value)]
    for got, wanted in zip(
        results(query, *clean, 12, implementation), results(*inputs(0.0), 4, "reference"), strict=True
    ):
        np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_the_docstring_says_so() -> None:
    text = " ".join((flexjax.flex_attention.__doc__ or "").split())
    assert "NaN and infinity in key and value at a hidden position can reach the output" in text
    assert "jnp.where(valid[:, :, None, None], value, 0)" in text
