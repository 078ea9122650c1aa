"""Pictures show the numbers of the attention that they draw."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks, mods, visualize
from flexjax.look import figure_values

Q = jax.random.normal(jax.random.key(0), (2, 12, 4, 8))
K = jax.random.normal(jax.random.key(1), (2, 12, 2, 8))


def drawn(figure: object) -> list[np.ndarray]:
    """The arrays behind the images of a figure, NaN where nothing is drawn."""
    return [axes.images[0].get_array().filled(np.nan) for axes in figure.axes if axes.images and axes.get_xlabel()]


@pytest.mark.slow
def test_weights_are_those_of_attention():
    options = {"score_mod": mods.alibi(4), "mask_mod": masks.sliding_window(5)}
    figure = visualize.weights(Q, K, batch=1, heads=[0, 3], **options)
    expected = flexjax.attention_weights(Q, K, **options)[1]
    for image, h in zip(drawn(figure), (0, 3), strict=True):
        np.testing.assert_allclose(np.nan_to_num(image), expected[h], atol=1e-6)
    assert [axes.get_title() for axes in figure.axes[:2]] == ["head 0", "head 3"]


def test_attention_weights_give_the_output():
    value = jax.random.normal(jax.random.key(2), K.shape)
    for layout in ("BTNH", "BNTH"):
        q, k, v = (x if layout == "BTNH" else x.swapaxes(1, 2) for x in (Q, K, value))
        p = flexjax.attention_weights(q, k, mask_mod=masks.causal, layout=layout)
        out = jnp.einsum("bnts,bsnd->btnd", p, jnp.repeat(value, 2, axis=2))
        expected = flexjax.flex_attention(q, k, v, mask_mod=masks.causal, layout=layout)
        np.testing.assert_allclose(out if layout == "BTNH" else out.swapaxes(1, 2), expected, atol=2e-6)


def test_attention_weights_refuse_a_huge_matrix():
    big = jax.ShapeDtypeStruct((1, 65536, 1, 8), jnp.float32)
    message = (
        "`query` is of shape (1, 65536, 1, 8) with 65536 keys, 4294967296 weights; expected at most 268435456 weights. "
        "Look at fewer heads or tokens at a time."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        flexjax.attention_weights(big, big)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Q[0], K, "BTNH"), "`query` is of shape (12, 4, 8); expected 4 dims, [B, T, N, D]. Add a batch axis with x[None] or use jax.vmap."),
        ((Q, K[0, 0], "BNTH"), "`key` is of shape (2, 8); expected 4 dims, [B, M, S, D]. Add a batch axis with x[None] or use jax.vmap."),
        ((Q[None], K, "BTNH"), "`query` is of shape (1, 2, 12, 4, 8); expected 4 dims, [B, T, N, D]. Map over its first axes with jax.vmap."),
        ((Q, 2.0, "BTNH"), "`key` is a float; expected an array. Pass a jax.Array or a numpy array."),
        ((Q, K, "TBNH"), "`layout` is 'TBNH'; expected 'BTNH' or 'BNTH'. BTNH is [batch, tokens, heads, dim]."),
    ],
    ids=["query", "key", "many dims", "no array", "layout"],
)  # fmt: skip
def test_attention_weights_name_a_wrong_argument(arguments: tuple[jax.Array, object, str], message: str):
    query, key, layout = arguments
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        flexjax.attention_weights(query, key, layout=layout)


def test_scores_are_grey_where_masked():
    captured = np.linspace(0, 1, 12, dtype=np.float32)  # a numpy array, indexed by a tracer
    score_mod = lambda s, b, h, q, kv: s * 2 + captured[kv]
    (image,) = drawn(visualize.scores(Q, K, score_mod=score_mod, mask_mod=masks.causal, heads=3))
    dots = np.asarray(Q[0, :, 3] @ K[0, :, 1].T) / np.sqrt(8)
    np.testing.assert_allclose(image[np.tril_indices(12)], (2 * dots + captured)[np.tril_indices(12)], rtol=1e-5)
    assert np.isnan(image[np.triu_indices(12, 1)]).all()


def test_long_masks_are_drawn_by_blocks():
    (image,) = drawn(visualize.mask(masks.causal, 600, 1500))
    tall, wide = figure_values.block_of(600), figure_values.block_of(1500)
    assert (tall, wide) == (3, 6)
    kept = np.arange(600)[:, None] >= np.arange(1500)
    np.testing.assert_allclose(image, kept.reshape(200, 3, 250, 6).mean((1, 3)))


def test_tokens_label_the_axes():
    words = ["the", "cat", "sat", "on", "the", "mat"]
    axes = visualize.mask(masks.causal, 6, 6, tokens=words).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == words
    assert [label.get_text() for label in axes.get_yticklabels()] == words
    with pytest.raises(ValueError, match=r"^`tokens` is 6 labels; expected 7, one for each key\. Label every token\.$"):
        visualize.mask(masks.causal, 7, 7, tokens=words)


def test_figures_are_saved_without_a_display(tmp_path: types.SimpleNamespace):
    for n, figure in enumerate((visualize.mask(masks.causal, 300, 300, heads=[0, 1]), visualize.weights(Q, K))):
        figure.savefig(tmp_path / f"{n}.png")
        assert (tmp_path / f"{n}.png").stat().st_size > 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 2}, "`batch` is 2; expected from 0 to 1. Indices count from 0."),
        ({"heads": [0, 4]}, "`heads` is 4; expected from 0 to 3. Indices count from 0."),
    ],
)
def test_bad_indices(arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        visualize.scores(Q, K, **arguments)


def test_heads_may_be_numbers_of_numpy():
    one, same = (drawn(visualize.scores(Q, K, heads=h))[0] for h in (np.int64(1), 1))
    np.testing.assert_array_equal(one, same)
    with pytest.raises(ValueError, match=r"^`heads` is \[\]; expected a head or several\. Each gets a panel\.$"):
        visualize.scores(Q, K, heads=[])


def test_a_row_of_scores_minus_infinity_has_weights_0():
    image = drawn(visualize.weights(Q, K, heads=0, score_mod=lambda s, b, h, q, kv: jnp.where(q == 2, -jnp.inf, s)))[0]
    np.testing.assert_array_equal(image[2], 0)
    assert np.isfinite(image).all()


def test_nothing_cannot_be_drawn():
    with pytest.raises(ValueError, match=r"^`q_len` is 0; expected at least 1\. Nothing could be drawn\.$"):
        visualize.mask(lambda b, h, q, kv: q > kv, 0, 4)
    with pytest.raises(ValueError, match=r"^`kv_len` is 0; expected at least 1\. Nothing could be drawn\.$"):
        visualize.scores(Q, K[:, :0])


def test_unknown_keywords_are_refused():
    message = "visualize got unexpected arguments head; it takes score_mod, mask_mod, batch, heads, tokens, scale, layout, title."
    with pytest.raises(TypeError, match="^" + re.escape(message) + "$"):
        visualize.weights(Q, K, head=3)


def test_heads_before_tokens_and_unnamed_masks():
    swapped = visualize.scores(Q.swapaxes(1, 2), K.swapaxes(1, 2), layout="BNTH", heads=[1, 2])
    for image, expected in zip(drawn(swapped), drawn(visualize.scores(Q, K, heads=[1, 2])), strict=True):
        np.testing.assert_array_equal(image, expected)
    assert visualize.mask(lambda b, h, q, kv: q > kv, 4, 4).get_suptitle() == "mask"
    with pytest.raises(
        ValueError, match=r"^`layout` is 'BHTD'; expected 'BTNH' or 'BNTH'\. BTNH is \[batch, tokens, heads, dim\]\.$"
    ):
        visualize.scores(Q, K, layout="BHTD")
    with pytest.raises(ValueError, match=r'Pass layout="BNTH" for \[B, N, T, D\] and \[B, M, S, D\]\.$'):
        visualize.scores(Q.swapaxes(1, 2)[:, :3], K.swapaxes(1, 2)[:, :, :5])


def test_a_batch_of_keys_that_does_not_fit_is_refused():
    three = jnp.concatenate([K[:1]] * 3)
    message = (
        f"`query` is of shape {Q.shape} beside a key of shape {three.shape}; expected [B, T, N, D] and [B, S, M, D] or [1, S, M, D], M "
        'divides N. Pass layout="BNTH" for [B, N, T, D] and [B, M, S, D].'
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        visualize.scores(Q, three)
    assert visualize.scores(Q, K[:1]) is not None


def test_a_mod_is_traced_once_for_all_heads_and_rows():
    traced = []

    def mask_mod(b, h, q_idx, kv_idx):
        traced.append(h)
        return (q_idx >= kv_idx) & (q_idx - kv_idx < h + 2)

    images = drawn(visualize.mask(mask_mod, 150, 150, heads=[0, 1, 5]))
    assert len(traced) == 1
    distance = np.arange(150)[:, None] - np.arange(150)
    for image, h in zip(images, (0, 1, 5), strict=True):
        np.testing.assert_array_equal(image, (distance >= 0) & (distance < h + 2))
