"""cached_attention over a ring, beside attention over the whole sequence in its order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
import flexjax.nn
from flexjax import masks, mods

BATCH, TOKENS, HEADS, DIM = 2, 12, 4, 8
Q, K, V = (jax.random.normal(jax.random.key(i), (BATCH, TOKENS, n, DIM)) for i, n in enumerate((HEADS, 2, 2)))
ORDER = np.roll(np.arange(TOKENS), 5)  # the slots of the ring, which has wrapped around
RING = (K[:, ORDER], V[:, ORDER])
AT = jnp.arange(TOKENS)


@pytest.mark.parametrize(
    ("arguments", "mask_mod"),
    [
        ({}, masks.causal),
        ({"window": 4}, flexjax.and_masks(masks.causal, lambda b, h, q, kv: q - kv < 4)),
        ({"window": (2, 9)}, flexjax.and_masks(masks.causal, lambda b, h, q, kv: q - kv <= 2)),
        ({"softcap": 0}, masks.causal),
    ],
)
def test_a_ring_gives_what_the_sequence_gives(arguments: dict[str, object], mask_mod: object) -> None:
    at = jnp.arange(8, TOKENS)
    run = lambda q, k, v: flexjax.nn.cached_attention(q, k, v, positions=at, kv_positions=ORDER, scale=0.3, **arguments)
    whole = flexjax.flex_attention(Q, K, V, mask_mod=mask_mod, scale=0.3)
    np.testing.assert_allclose(run(Q[:, 8:], *RING), whole[:, 8:], atol=2e-6)


def test_a_mask_says_what_is_seen_and_the_window_has_two_sides() -> None:
    mask = jax.random.bernoulli(jax.random.key(7), 0.7, (BATCH, TOKENS, TOKENS))
    ours = flexjax.nn.cached_attention(
        Q, *RING, mask=mask[:, :, ORDER], positions=AT, kv_positions=ORDER, window=4, softcap=2.0
    )
    both = lambda b, h, q, kv: mask[b, q, kv] & (jnp.abs(q - kv) < 4)
    np.testing.assert_allclose(
        ours, flexjax.flex_attention(Q, K, V, mask_mod=both, score_mod=mods.softcap(2.0)), atol=2e-6
    )


def test_empty_slots_are_not_seen() -> None:
    slots = jnp.where(AT < 3, AT, -1)
    k, v = (jnp.where((AT < 3)[:, None, None], x, 1e4) for x in (K, V))
    out = flexjax.nn.cached_attention(Q[:, 2:3], k, v, positions=jnp.array([2]), kv_positions=slots)
    np.testing.assert_allclose(out, flexjax.flex_attention(Q, K, V, mask_mod=masks.causal)[:, 2:3], atol=2e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"positions": AT[:3]}, "`positions` is int32[3]; expected int32[2, 12] or int32[12]. One for each token."),
        ({"mask": jnp.ones((BATCH, TOKENS, TOKENS))}, "`mask` is of dtype float32; expected bool, True where attended. Compare it with != 0."),
        ({"softcap": -1}, "`cached_attention`: `softcap` is -1; expected a finite number above 0. None or 0 means no cap."),
    ],
)  # fmt: skip
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        flexjax.nn.cached_attention(Q, K, V, **({"positions": AT, "kv_positions": AT} | arguments))
