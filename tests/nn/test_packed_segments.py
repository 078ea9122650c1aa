"""segment_attention against dense attention with the mask written out, and trained beside it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
import flexjax.nn
from flexjax import masks
from tests.arrays import array
from tests.nn.training import assert_same_training, batch, losses

HEADS, DIM = 2, 8
X, _ = batch()
ROWS, TOKENS, WIDTH = X.shape
IDS = array(np.repeat([[1, 2, 3, 0]], ROWS, 0).repeat([9, 4, 5, 2], axis=1))  # 20 tokens, the last two padding
RESTARTING = jnp.broadcast_to(jnp.concatenate([jnp.arange(n) for n in (9, 4, 5, 2)]), IDS.shape)
Q, K, V = jax.random.normal(jax.random.key(0), (3, ROWS, TOKENS, HEADS, DIM))


def dense(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None = None, causal: bool = True) -> jax.Array:
    """Attention over the documents IDS with all scores in memory, as numpy would write it."""
    at = jnp.arange(TOKENS)
    distance = at[:, None] - at
    mask = (IDS[:, :, None] == IDS[:, None]) & (IDS[:, :, None] != 0)
    mask &= (distance >= 0) if causal else True
    mask &= True if window is None else (jnp.abs(distance) < window)
    logits = jnp.where(mask[:, None], jnp.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(q.shape[-1]), -1e30)
    weights = jnp.where(mask[:, None], jax.nn.softmax(logits), 0)
    return jnp.einsum("bnts,bsnd->btnd", weights, v)


@pytest.mark.parametrize(
    ("window", "causal", "positions"),
    [
        pytest.param(
            window, causal, positions, marks=[] if count == 1 else [pytest.mark.slow], id=f"{window}-{causal}-{where}"
        )
        for window in (None, 3)
        for causal in (True, False)
        for where, positions in (("whole", None), ("restarting", RESTARTING))
        for count in [(window is None) + causal + (positions is None)]  # one of the three as it is by default
    ],
)
def test_documents(window: int | None, causal: bool, positions: jax.Array | None) -> None:
    out = flexjax.nn.segment_attention(Q, K, V, IDS, positions, window=window, causal=causal)
    np.testing.assert_allclose(out, dense(Q, K, V, window, causal), atol=2e-6)


def test_padding_gives_zero_and_no_gradient_crosses_documents() -> None:
    out = flexjax.nn.segment_attention(Q, K, V, IDS)
    assert (np.asarray(out[:, 18:]) == 0).all()
    grad = jax.grad(lambda v: flexjax.nn.segment_attention(Q, K, v, IDS)[:, 9:].sum())(V)
    assert (np.asarray(grad[:, :9]) == 0).all()
    assert (np.asarray(grad[:, 18:]) == 0).all()
    assert (np.abs(grad[:, 9:18]) > 0).all()


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(("window", "causal"), [(None, True), (3, False)])
def test_positions_of_any_integer_type(dtype: str, window: int | None, causal: bool) -> None:
    """Differences of unsigned and of short integers would wrap around: all keys would be behind every query."""
    step, first = (27, -110) if dtype == "int8" else (1, 0)
    positions = array((first + step * np.asarray(RESTARTING)).astype(dtype))
    wide = None if window is None else step * window
    out = flexjax.nn.segment_attention(Q, K, V, IDS, positions, window=wide, causal=causal)
    np.testing.assert_allclose(out, dense(Q, K, V, window, causal), atol=2e-6)


@pytest.mark.parametrize("name", ["segment_ids", "positions"])
def test_numbers_of_64_bits_are_not_cut_off(name: str) -> None:
    """Without x64, 7 and 7 + 2^32 would be one document, and 2^32 padding."""
    numbers = np.where(np.arange(TOKENS) < 9, 7, 7 + 2**32) + np.zeros((ROWS, 1), np.int64)
    with pytest.raises(ValueError, match=f"^`segment_attention`: `{name}` has numbers from 7 to 4294967303; expected"):
        flexjax.nn.segment_attention(Q, K, V, **{name: numbers})


def test_windows_and_caps_that_are_arrays() -> None:
    """Unsigned, traced, and one for each head; the cap is learned."""
    want = dense(Q, K, V, 3, False)
    for window in (jnp.uint8(3), np.uint16(3), jnp.full(Q.shape[2], 3, jnp.uint8)):
        np.testing.assert_allclose(
            flexjax.nn.segment_attention(Q, K, V, IDS, window=window, causal=False), want, atol=2e-6
        )

    def loss(cap: jax.Array | float) -> jax.Array:
        return jnp.sum(flexjax.nn.segment_attention(Q, K, V, IDS, softcap=cap) ** 2)

    heads = jnp.full(Q.shape[2], 0.7)
    value, gradient = jax.jit(jax.value_and_grad(loss))(heads)
    np.testing.assert_allclose(value, loss(0.7), rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(gradient), (loss(0.7 + 1e-2) - loss(0.7 - 1e-2)) / 2e-2, rtol=2e-2)


@pytest.mark.parametrize("argument", [{"window": np.ones(3, np.int32)}, {"softcap": jnp.ones(3)}])
def test_numbers_for_other_heads_are_refused(argument: dict[str, object]) -> None:
    with pytest.raises(
        ValueError, match=r"^`(window|softcap)` is \w+\[3\]; expected one number, or 2, one for each query head"
    ):
        flexjax.nn.segment_attention(Q, K, V, IDS, **argument)


@pytest.mark.slow
def test_softcap_sinks_mods_and_layout_reach_the_call() -> None:
    sinks = jnp.array([0.3, -0.2])
    score_mod = lambda s, b, h, i, j: s + 0.1 * (i - j)
    heads_first = [x.swapaxes(1, 2) for x in (Q, K, V)]
    ours = flexjax.nn.segment_attention(
        *heads_first,
        IDS,
        softcap=2.0,
        sinks=sinks,
        score_mod=score_mod,
        mask_mod=masks.sliding_window(4),
        layout="BNTH",
    )
    theirs = flexjax.flex_attention(
        Q,
        K,
        V,
        sinks=sinks,
        score_mod=lambda s, b, h, i, j: score_mod(2.0 * jnp.tanh(s / 2.0), b, h, i, j),
        mask_mod=lambda b, h, i, j: (IDS[b, i] == IDS[b, j]) & (IDS[b, i] != 0) & (i >= j) & (i - j < 4),
    )
    np.testing.assert_allclose(ours.swapaxes(1, 2), theirs, atol=2e-6)


def test_a_chunk_of_queries_with_ids_and_positions_of_its_own() -> None:
    whole = flexjax.nn.segment_attention(Q, K, V, IDS)
    at = jnp.broadcast_to(jnp.arange(TOKENS), IDS.shape)
    part = flexjax.nn.segment_attention(
        Q[:, 5:12], K, V, IDS[:, 5:12], at[:, 5:12], kv_segment_ids=IDS, kv_positions=at
    )
    np.testing.assert_allclose(part, whole[:, 5:12], atol=2e-6)


@pytest.mark.slow
def test_trains_as_dense_attention() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    parameters = [jax.random.normal(k, (WIDTH, HEADS * DIM)) / 4 for k in keys[:3]]
    parameters.append(jax.random.normal(keys[3], (HEADS * DIM, WIDTH)) / 4)

    def layer(attend: object) -> object:
        def apply(p: list[jax.Array], x: jax.Array, _: jax.Array) -> jax.Array:
            q, k, v = ((x @ w).reshape(ROWS, TOKENS, HEADS, DIM) for w in p[:3])
            return attend(q, k, v).reshape(ROWS, TOKENS, -1) @ p[3]

        return apply

    ours = losses(parameters, layer(lambda q, k, v: flexjax.nn.segment_attention(q, k, v, IDS)))
    assert_same_training(ours, losses(parameters, layer(dense)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"segment_ids": IDS[:, :5]},
            "`segment_ids` is int32[4, 5]; expected integers of shape [4, 20]. One for each token.",
        ),
        (
            {"positions": IDS * 1.0},
            "`positions` is float32[4, 20]; expected integers of shape [4, 20]. One for each token.",
        ),
        *(
            (
                {"window": window},
                f"`segment_attention`: `window` is {window!r}; expected an int of at least 1. 1 sees the query's own position only.",
            )
            for window in (0, np.int64(0), np.int32(-2), True)
        ),
        (
            {"window": jnp.float32(3)},
            "`segment_attention`: `window` has dtype float32; expected integers. 1 sees the query's own position only.",
        ),
        (
            {"softcap": -1.0},
            "`segment_attention`: `softcap` is -1.0; expected a finite number above 0. None or 0 means no cap.",
        ),
        (
            {"window": (1, 2, 3)},
            "`window` is (1, 2, 3); expected a number or (left, right). None in a pair leaves a side open.",
        ),
        (
            {"window": (-1, 0)},
            "`segment_attention`: `window[0]` is -1; expected an int of at least 0. 0 sees no neighbour on this side.",
        ),
        (
            {"chunk": 0},
            "`segment_attention`: `chunk` is 0; expected an int of at least 1. It counts the positions of a chunk.",
        ),
        ({"padding": "none"}, "`padding` is 'none'; expected 'zero' or 'negative'. It says which ids are padding."),
        (
            {"kv_positions": IDS},
            "`kv_positions` is given without `positions`; expected both or `positions` alone. Pass `positions` too.",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        flexjax.nn.segment_attention(Q, K, V, **arguments)


def test_keys_of_another_length_need_ids_of_their_own() -> None:
    message = "`kv_segment_ids` is None; expected integers of shape [4, 20]. There are 6 queries and 20 keys."
    with pytest.raises(ValueError, match=re.escape(message)):
        flexjax.nn.segment_attention(Q[:, :6], K, V, IDS[:, :6])


@pytest.mark.parametrize(
    ("query", "said"),
    [
        (None, "None; expected an array. Pass a jax.Array or a numpy array."),
        (
            Q[0],
            f"of shape {Q.shape[1:]}; expected 4 dims, [B, T, N, D]. Add a batch axis with x[None] or use jax.vmap.",
        ),
    ],
)
def test_what_is_no_query_is_refused(query: object, said: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole message is compared
        flexjax.nn.segment_attention(query, K, V, IDS)  # pyright: ignore[reportArgumentType]
    assert str(error.value) == f"`query` is {said}"


def _dense(mask: jax.Array) -> jax.Array:
    """Attention with the mask [B, T, S] and all scores in memory."""
    logits = jnp.where(mask[:, None], jnp.einsum("btnd,bsnd->bnts", Q, K) / np.sqrt(DIM), -1e30)
    return jnp.einsum("bnts,bsnd->btnd", jnp.where(mask[:, None], jax.nn.softmax(logits), 0), V)


AT = np.arange(TOKENS)
BEHIND = AT[:, None] - AT
SAME = np.asarray(IDS)[:, :, None] == np.asarray(IDS)[:, None]
REAL = SAME & (np.asarray(IDS)[:, :, None] != 0)


@pytest.mark.parametrize(
    ("arguments", "mask"),
    [
        ({"window": (3, 2), "causal": False}, REAL & (BEHIND <= 3) & (BEHIND >= -2)),
        ({"window": (None, 1), "causal": False}, REAL & (BEHIND >= -1)),
        ({"window": (2, 5)}, REAL & (BEHIND <= 2) & (BEHIND >= 0)),
        ({"chunk": 4}, REAL & (AT[:, None] // 4 == AT // 4) & (BEHIND >= 0)),
        ({"padding": "negative", "softcap": 0.0}, SAME & (BEHIND >= 0)),
        ({"or_mask": lambda b, h, q, kv: (q < 6) & (kv < 12)}, REAL & (BEHIND >= 0) | (AT[:, None] < 6) & (AT < 12)),
        (
            {"or_mask": lambda b, h, q, kv: q > kv, "causal": False, "mask_mod": masks.causal},
            REAL & (BEHIND >= 0) | (BEHIND > 0),
        ),
    ],
)
def test_masks(arguments: dict[str, object], mask: np.ndarray) -> None:
    out = flexjax.nn.segment_attention(Q, K, V, IDS, **arguments)
    np.testing.assert_allclose(out, _dense(jnp.asarray(mask)), atol=2e-6)


def test_an_or_mask_hides_nothing_where_all_is_seen() -> None:
    out = flexjax.nn.segment_attention(Q, K, V, causal=False, or_mask=masks.causal)
    np.testing.assert_allclose(out, flexjax.flex_attention(Q, K, V), atol=1e-6)


def test_lse_lengths_and_origin_are_those_of_the_call() -> None:
    """A step at the end of a cache, whose ids are those of the whole row."""
    whole, aux = flexjax.nn.segment_attention(Q, K, V, IDS, return_aux=flexjax.AuxRequest(lse=True))
    origin = flexjax.Origin(query=15)
    part, some = flexjax.nn.segment_attention(
        Q[:, 15:17], K, V, IDS, origin=origin, return_aux=flexjax.AuxRequest(lse=True)
    )
    np.testing.assert_allclose(part, whole[:, 15:17], atol=2e-6)
    np.testing.assert_allclose(some.lse, aux.lse[:, 15:17], atol=2e-6)
    end = flexjax.Origin(query="end")
    step = flexjax.nn.segment_attention(Q[:, 12:13], K, V, key_value_seq_lengths=13, window=4, origin=end)
    np.testing.assert_allclose(step, flexjax.nn.segment_attention(Q, K, V, window=4)[:, 12:13], atol=2e-6)


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("arguments", [{}, {"causal": False, "window": 3}, {"causal": False, "chunk": 4}])
def test_queries_that_stand_nowhere_are_refused(queries: int, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole message is compared
        flexjax.nn.segment_attention(Q[:, :queries], K, V, **arguments)
    assert str(error.value) == (
        f"`positions` is None in a call of {queries} queries and 20 keys; expected the positions of both, "
        "positions=[B, T] and kv_positions=[B, S], or origin=. Nothing says where the queries stand; "
        'origin=Origin(query="end") puts them at the end of the keys.'
    )
