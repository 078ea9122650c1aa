"""Composition of masks and mods: plain functions, whole messages."""

import functools
import itertools
import operator
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import masks, mods
from flexjax.combine import and_masks, chain_mods, not_mask, or_masks


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 3


def even(b, h, q_idx, kv_idx):
    return kv_idx % 2 == 0


def dense(mask: Callable[..., object]) -> np.ndarray:
    """bool `[8, 8]`, on plain ints: nothing here needs jax."""
    return np.array([[mask(0, 0, q, kv) for kv in range(8)] for q in range(8)])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_masks_combine_as_booleans_do(count: int) -> None:
    for chosen in itertools.product((causal, near, even), repeat=count):
        grids = [dense(mask) for mask in chosen]
        np.testing.assert_array_equal(dense(and_masks(*chosen)), functools.reduce(operator.and_, grids))
        np.testing.assert_array_equal(dense(or_masks(*chosen)), functools.reduce(operator.or_, grids))
        np.testing.assert_array_equal(dense(not_mask(and_masks(*chosen))), dense(or_masks(*map(not_mask, chosen))))


@pytest.mark.parametrize("kept", [True, np.bool_(True), jnp.asarray(True)])
def test_not_of_every_kind_of_true_is_false(kept: object) -> None:
    assert bool(not_mask(lambda b, h, q_idx, kv_idx: kept)(0, 0, 0, 0)) is False


def test_combined_masks_trace_to_booleans() -> None:
    ids = jnp.array([0, 0, 1, 1])
    mask = or_masks(and_masks(masks.causal, masks.document(ids)), not_mask(masks.sliding_window(3)))
    index = jnp.int32(1)
    assert jax.eval_shape(mask, index, index, index, index).dtype == jnp.bool_


def test_mods_apply_from_left_to_right() -> None:
    def double(score, b, h, q_idx, kv_idx):
        return 2 * score

    def add_key(score, b, h, q_idx, kv_idx):
        return score + kv_idx

    assert chain_mods(double)(5, 0, 0, 0, 3) == 10
    assert chain_mods(double, add_key)(5, 0, 0, 0, 3) == 13
    assert chain_mods(add_key, double)(5, 0, 0, 0, 3) == 16
    assert chain_mods(chain_mods(add_key, add_key), double)(5, 0, 0, 0, 3) == 22


def test_any_callable_with_the_right_arguments_will_do() -> None:
    class Limit:
        def __call__(self, b: int, h: int, q_idx: int, kv_idx: int) -> bool:
            return kv_idx < 2

    def limit(bound, b, h, q_idx, kv_idx, more=0):
        return kv_idx < bound + more

    wanted = dense(Limit())
    np.testing.assert_array_equal(dense(and_masks(Limit(), functools.partial(limit, 2))), wanted)
    np.testing.assert_array_equal(dense(or_masks(lambda *indices: indices[3] < 2)), wanted)
    np.testing.assert_array_equal(dense(not_mask(not_mask(jax.jit(Limit())))), wanted)


def test_names_tell_the_parts() -> None:
    assert and_masks(masks.causal, masks.sliding_window(4)).__name__ == "and_masks(causal, sliding_window_4)"
    assert or_masks(causal, not_mask(near)).__name__ == "or_masks(causal, not_mask(near))"
    assert chain_mods(mods.softcap(20), mods.alibi(2)).__name__ == "chain_mods(softcap_20, alibi_2)"


MASK = "expected a function of (b, h, q_idx, kv_idx)"
SCORE = "expected a function of (score, b, h, q_idx, kv_idx)"
ERRORS: list[tuple[Callable[[], object], str]] = [
    (and_masks, "`and_masks` got no functions; expected at least one. Pass `mask_mods` one by one."),
    (or_masks, "`or_masks` got no functions; expected at least one. Pass `mask_mods` one by one."),
    (chain_mods, "`chain_mods` got no functions; expected at least one. Pass `score_mods` one by one."),
    (lambda: and_masks(causal, None), f"`and_masks`: `mask_mods[1]` is None; {MASK}. Leave it out."),
    (
        lambda: or_masks([None]),
        f"`or_masks`: `mask_mods[0]` is [None]; {MASK}. Pass its functions one by one.",
    ),
    (
        lambda: and_masks(causal, np.ones((16, 16), bool)),
        f"`and_masks`: `mask_mods[1]` is bool[16, 16]; {MASK}. Pass the function itself.",
    ),
    (lambda: not_mask(7), f"`not_mask`: `mask_mod` is 7; {MASK}. Pass the function itself."),
    (lambda: not_mask((7,)), f"`not_mask`: `mask_mod` is (7,); {MASK}. Join them with and_masks or or_masks."),
    (
        lambda: not_mask(lambda q_idx, kv_idx: True),
        f"`not_mask`: `mask_mod` is `<lambda>(q_idx, kv_idx)`; {MASK}. If it makes such a function, call it first.",
    ),
    (
        lambda: and_masks(causal, lambda window: causal),
        f"`and_masks`: `mask_mods[1]` is `<lambda>(window)`; {MASK}. If it makes such a function, call it first.",
    ),
    (
        lambda: chain_mods(causal),
        f"`chain_mods`: `score_mods[0]` is `causal(b, h, q_idx, kv_idx)`; {SCORE}. "
        "If it is a mask_mod, pass it as mask_mod=; and_masks joins several.",
    ),
    (
        lambda: chain_mods(masks.causal),
        f"`chain_mods`: `score_mods[0]` is `causal(b, h, q_idx, kv_idx)`; {SCORE}. "
        "If it is a mask_mod, pass it as mask_mod=; and_masks joins several.",
    ),
    (
        lambda: and_masks(mods.softcap(20)),
        f"`and_masks`: `mask_mods[0]` is `softcap_20(score, b, h, q_idx, kv_idx)`; {MASK}. "
        "If it is a score_mod, pass it as score_mod=; chain_mods joins several.",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors_say_everything(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        call()
