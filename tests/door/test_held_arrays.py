"""Objects that hold an array and say so by `__jax_array__`, such as flax.nnx.Param, at every door; and keywords of other libraries."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import Origin, masks, mods, paged
from flexjax.errors import INSTEAD
from flexjax.nn.packed_segments import segment_attention
from tests.arrays import array

N, T, D = 2, 8, 4
visualize: Any = flexjax.visualize
profile: Any = flexjax.profile


class Held:
    def __init__(self, value: Any):
        self.value = value

    def __jax_array__(self) -> jax.Array:
        return self.value


def x(seed: int = 0) -> jax.Array:
    return array(np.random.default_rng(seed).standard_normal((1, T, N, D)).astype(np.float32))


def served(hold: Callable) -> jax.Array:
    cache = paged.empty(4, 8, N, D, dtype="float32")
    table = paged.table(1, 4, 4, 8)
    table = paged.PageTable(hold(table.pages), hold(table.lengths), hold(table.uses), 8)
    table, _ = paged.allocate(table, hold(array([1], np.int32)))
    cache, table = paged.append(
        paged.PagedCache(hold(cache.key), hold(cache.value)), table, hold(x()[:, :1]), hold(x(1)[:, :1])
    )
    return flexjax.paged_attention(hold(x(2)[:, :1]), cache, table)


def additive(b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> Any:
    return jnp.where(i >= j, 0.0, -jnp.inf)


attend: Any = flexjax.flex_attention
ids, heads = np.array([[0, 0, 0, 1, 1, 1, 2, 2]], np.int32), np.array([0.5, 2.0], np.float32)

# each makes a result of arrays that went through `hold`, which is Held or leaves them as they are
DOORS = {
    "query, key, value": lambda hold: attend(hold(x()), hold(x(1)), hold(x(2))),
    "numbers": lambda hold: attend(x(), x(), x(), scale=hold(jnp.float32(0.3)), sinks=hold(array(heads))),
    "extra features": lambda hold: attend(x(), x(), x(), query_extra=hold(x(1)), key_extra=hold(x(2))),
    "lengths": lambda hold: attend(x(), x(), x(), query_seq_lengths=hold(array([5], np.int32)), key_value_seq_lengths=hold(jnp.int32(3))),
    "dropout": lambda hold: attend(x(), x(), x(), dropout=flexjax.Dropout(0.5, hold(jax.random.key(1)))),
    "origin": lambda hold: attend(x(), x(), x(), mask_mod=masks.causal, origin=Origin(query=hold(jnp.int32(3)), head=hold(jnp.int32(1)))),
    "masks": lambda hold: attend(x(), x(), x(), mask_mod=flexjax.and_masks(masks.document(hold(array(ids))), masks.padding(lengths=hold(array([5], np.int32))))),
    "mods": lambda hold: attend(x(), x(), x(), score_mod=flexjax.chain_mods(mods.temperature(hold(array(heads))), mods.head_gate(hold(array(heads))))),
    "in a mod": lambda hold: attend(x(), x(), x(), score_mod=lambda s, b, h, i, j: s * hold(jnp.float32(2)) + jnp.asarray(hold(array(heads)))[h]),
    "lists": lambda hold: attend(x(), x(), x(), block_mask=flexjax.BlockMask.from_kv_blocks(hold(jnp.ones((1, 1, 1), jnp.int32)), hold(jnp.zeros((1, 1, 1, 1), jnp.int32)), block_size=8)),
    "jax.nn's arguments": lambda hold: flexjax.dot_product_attention(hold(x()), hold(x()), hold(x()), bias=hold(x()[0, :, 0, :1])),
    "weights": lambda hold: flexjax.attention_weights(hold(x()), hold(x())),
    "merge": lambda hold: flexjax.merge_attention_states(hold(x()), hold(x()[..., 0]))[0],
    "pages": served,
    "segments": lambda hold: segment_attention(hold(x()), hold(x()), hold(x()), hold(array(ids))),
    "explain": lambda hold: flexjax.explain(hold(x()), hold(x()), hold(x()), sinks=hold(array(heads))),
}  # fmt: skip


@pytest.mark.parametrize("name", DOORS)
def test_an_object_that_holds_an_array_stands_for_it(name: str) -> None:
    got, want = DOORS[name](Held), DOORS[name](lambda array: array)
    assert got == want if isinstance(got, str) else (np.asarray(got) == np.asarray(want)).all()


def test_gradients_reach_what_is_held() -> None:
    loss = lambda hold: lambda w: attend(x(), x(), x(), score_mod=mods.temperature(hold(w)), sinks=hold(w)).sum()
    got, want = (jax.jit(jax.grad(loss(hold)))(array(heads)) for hold in (Held, lambda w: w))
    np.testing.assert_array_equal(got, want)


# ------------------------------------------------------------------- what is said of other mistakes


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match=r"\w") as error:
        call()
    return str(error.value).partition("\nin <lambda>")[0]


BLOCKS = (masks.causal, masks.full)
EMPTY = np.zeros(0)
MESSAGES = {
    "scale, a string": (lambda: attend(x(), x(), x(), scale="0.5"), "`scale` is '0.5'; expected a finite float. None means 1 / sqrt(head dim)."),
    "scale, a bool": (lambda: attend(x(), x(), x(), scale=True), "`scale` is True; expected a finite float. None means 1 / sqrt(head dim)."),
    "scale of a picture": (lambda: visualize.scores(x(), x(), scale="1"), "`scale` is '1'; expected a finite float. None means 1 / sqrt(head dim)."),
    "profile of shapes": (
        lambda: profile(*[jax.ShapeDtypeStruct((1, T, N, D), jnp.float32)] * 3),
        "`query` is the shape float32[1, 8, 2, 4]; expected a concrete array, because profile runs the call. Pass arrays, or take "
        "flexjax.explain, which predicts the work from shapes.",
    ),
    "a picture of a block mask": (
        lambda: visualize.mask(flexjax.create_block_mask(masks.causal, None, None, T, T), T, T),
        "`mask_mod` is a BlockMask; expected a function mask_mod(b, h, q_idx, kv_idx). Pass block_mask.mask_mod for its entries; "
        "block_mask.plot() draws its blocks.",
    ),
    "a picture under jit": (
        lambda: jax.jit(lambda q: visualize.scores(q, q))(x()),
        "A picture is drawn inside jit or another transformation, where numbers are traced; expected known numbers. Return the arrays from "
        "the transformed function, and draw outside of it.",
    ),
    "a dict": (
        lambda: attend(x(), x(), x(), score_mod=lambda s, b, h, i, j: s * {0: 1.0}[b]),
        "`score_mod` looks a value that is known only at run time up in a dict; make an array of the values, "
        "values = jnp.asarray([...]), and write `values[b]`.",
    ),
    "an empty array": (
        lambda: attend(x(), x(), x(), score_mod=lambda s, b, h, i, j: s + EMPTY[i]),
        "`score_mod` reads an array of size 0, which has no element to read; leave the read out where the array is empty.",
    ),
    "an additive mask": (
        lambda: attend(x(), x(), x(), mask_mod=lambda b, h, i, j: jnp.where(i >= j, 0.0, -jnp.inf)),
        "`mask_mod` returned a float32; expected a bool scalar, True where the query may look at the key. Where it is an additive mask, 0 or "
        "-inf, `value == 0` shows what it shows; or add it to the score in score_mod.",
    ),
    "an additive mask in and_masks": (
        lambda: attend(x(), x(), x(), mask_mod=flexjax.and_masks(masks.causal, additive)),
        "`mask_mod` cannot be compiled: `and_masks`: `mask_mods[1]`, `additive`, returned a float32; expected a bool scalar, True where the query "
        "may look at the key. Where it is an additive mask, 0 or -inf, `value == 0` shows what it shows; or add it to the score in score_mod.",
    ),
    "an additive mask in or_masks": (
        lambda: attend(x(), x(), x(), mask_mod=flexjax.or_masks(masks.causal, additive)),
        "`mask_mod` cannot be compiled: `or_masks`: `mask_mods[1]`, `additive`, returned a float32; expected a bool scalar, True where the query "
        "may look at the key. Where it is an additive mask, 0 or -inf, `value == 0` shows what it shows; or add it to the score in score_mod.",
    ),
    "an inverted bool": (
        lambda: attend(x(), x(), x(), mask_mod=lambda b, h, i, j: (i >= j) | -2),
        "`mask_mod` returned an int32; expected a bool scalar, True where the query may look at the key. Compare explicitly, for example "
        "`value != 0`; of a Python bool write `not x`, because `~x` is -1 or -2.",
    ),
    "a number in not_mask": (
        lambda: attend(x(), x(), x(), mask_mod=flexjax.not_mask(lambda b, h, i, j: i - j)),
        "`mask_mod` cannot be compiled: `not_mask`: `mask_mod`, `<lambda>`, returned an int32; expected a bool scalar, True where the query may "
        "look at the key. Compare explicitly, for example `value != 0`; of a Python bool write `not x`, because `~x` is -1 or -2.",
    ),
    "another order": (
        lambda: attend(x(), x(), x(), mask_mod=lambda q_idx, kv_idx, b, h: q_idx >= kv_idx),
        "`mask_mod` has the signature (q_idx, kv_idx, b, h); expected the order mask_mod(b, h, q_idx, kv_idx). Arguments are given by "
        "position: order them so, or use other names.",
    ),
    "another order in a chain": (
        lambda: flexjax.chain_mods(lambda score, b, h, kv_idx, q_idx: score),
        "`chain_mods`: `score_mods[0]` is `<lambda>(score, b, h, kv_idx, q_idx)`; expected a function of (score, b, h, q_idx, kv_idx), in this "
        "order. Arguments are given by position: order them so, or use other names.",
    ),
    "torch's create_block_mask": (
        lambda: flexjax.create_block_mask(masks.causal, B=1, H=1, q_len=T, kv_len=T),  # pyright: ignore[reportCallIssue]
        "create_block_mask() got unexpected arguments B, H; help(flexjax.create_block_mask) lists those that it takes. In place of `B` write "
        "batch=. In place of `H` write heads=.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    call, message = MESSAGES[name]
    assert message_of(call) == message


@pytest.mark.parametrize("name", ["enable_gqa", "return_lse", "attn_mask"])
def test_keywords_of_torch_say_what_to_write(name: str) -> None:
    assert message_of(lambda: attend(x(), x(), x(), **{name: True})) == (
        f"flex_attention() got unexpected arguments {name}; help(flexjax.flex_attention) lists those that it takes. In place of `{name}` "
        f"write {INSTEAD[name]}."
    )


def test_stacking_block_masks_that_differ_says_why() -> None:
    made = [flexjax.create_block_mask(mod, None, None, T, T) for mod in BLOCKS]
    with pytest.raises(
        ValueError,
        match=r"cannot be stacked or mapped together\. Make them by one function whose captured arrays differ",
    ):
        jax.tree.map(lambda *parts: jnp.stack(parts), *made)


def test_a_read_in_a_held_array_is_no_false_alarm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(x(), x(), x(), score_mod=mods.temperature(Held(array(heads))))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("join", "message"),
    [
        (lambda a, b: a & b, "Functions have no `&`; of two masks write flexjax.and_masks(a, b)."),
        (lambda a, b: b | a, "Functions have no `|`; of two masks write flexjax.or_masks(a, b)."),
        (lambda a, b: ~a, "Functions have no `~`; of a mask write flexjax.not_mask(a)."),
    ],
)
def test_operators_of_masks_say_what_to_write(join: Callable, message: str) -> None:
    with pytest.raises(TypeError) as refused:
        join(masks.sliding_window(4), masks.causal)
    assert str(refused.value) == message


def test_arguments_by_position_and_near_names() -> None:
    with pytest.raises(TypeError) as refused:
        attend(x(), x(), x(), masks.causal)
    assert str(refused.value) == (
        "flex_attention() got 4 arguments by position; expected at most 3, query, key, value. Write the names of the others, for example "
        "score_mod=."
    )
    with pytest.raises(TypeError, match=r"In place of `maskmod` write mask_mod=\.$"):
        attend(x(), x(), x(), maskmod=masks.causal)


@pytest.mark.parametrize("given", [{"lengths": jnp.array([2, 3])}, {"offsets": jnp.array([0, 2, 5])}])
def test_documents_may_end_before_the_call(given: dict[str, jax.Array]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = attend(x(), x(), x(), mask_mod=masks.document(**given))
    assert not out[:, 5:].any()
    assert out[:, :5].any()
