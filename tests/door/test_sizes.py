"""Sizes of masks and mods beside those of a call: what is refused, what is legal, and reads of arrays that are too short."""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import flexjax
from flexjax import Origin, masks, mods
from flexjax.types import MaskMod, ScoreMod
from tests.arrays import array

ADVICE = "Make it for the sizes of the call; if the call is a part of a larger problem, say by origin= where it lies."


def explained(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    sizes: tuple[int, int, int, int] = (1, 4, 64, 64),
    **arguments: object,
) -> str:
    """Checks and traces a call of (batch, heads, queries, keys) without computing it; two query heads share a key head."""
    batch, heads, queries, keys = sizes
    q, kv = (
        jax.ShapeDtypeStruct((batch, n, h, 8), jnp.float32) for n, h in ((queries, heads), (keys, max(heads // 2, 1)))
    )
    return flexjax.explain(q, kv, kv, score_mod=score_mod, mask_mod=mask_mod, device="cpu", **arguments)  # pyright: ignore[reportArgumentType]


def message_of(call: Callable[[], object]) -> str:
    """Without the notes, which `match` would see too."""
    with pytest.raises(ValueError, match="is made for") as error:
        call()
    return str(error.value)


IDS = np.zeros((1, 64), np.int32)
FLAGS = np.zeros(64, bool)
PAIR = np.zeros((64, 64), np.float32)
f32 = lambda *shape: np.zeros(shape, np.float32)

# name: (the mod, sizes of a call that it does not fit, the beginning of the message)
REFUSED_MASKS = {
    "document": (lambda: masks.document(IDS[:, :32]), (1, 4, 64, 64), "at most 32 queries, by `segment_ids` int32[1, 32] of `document`; expected 64, as this call has."),
    "longer ids": (lambda: masks.document(IDS), (1, 4, 32, 32), "64 keys, by `segment_ids` int32[1, 64] of `document`; expected 32, as this call has."),
    "ids of two sides": (lambda: masks.document(IDS[:, :32], IDS), (1, 4, 64, 64), "32 queries, by `segment_ids` int32[1, 32] of `document`; expected 64, as this call has."),
    "rows of offsets": (lambda: masks.document(offsets=np.zeros((3, 2), np.int32)), (2, 4, 64, 64), "3 batch entries, by `offsets` int32[3, 2] of `document`; expected 2, as this call has."),
    "padding": (lambda: masks.padding(np.array([5, 6, 7])), (1, 4, 64, 64), "3 batch entries, by `lengths` int32[3] of `padding`; expected 1, as this call has."),
    "window": (lambda: masks.sliding_window(np.array([5, 6])), (1, 4, 64, 64), "2 query heads, by `window` int32[2] of `sliding_window`; expected 4, as this call has."),
    "natten": (lambda: masks.natten_2d((4, 8), (3, 3)), (1, 4, 64, 64), "at most 32 queries, by `canvas` of `natten_2d_4x8_3x3`; expected 64, as this call has."),
    "a larger canvas": (lambda: masks.natten_2d((16, 16), (3, 3)), (1, 4, 64, 64), "256 keys, by `canvas` of `natten_2d_16x16_3x3`; expected 64, as this call has."),
    "sliding tiles": (lambda: masks.sliding_tile_2d((16, 16), (4, 4), (2, 2)), (1, 4, 64, 64), "at least 256 queries, by `canvas` and `text` of `sliding_tile_2d_16x16_4x4_2x2`; expected 64, as this call has."),
    "block diffusion": (lambda: masks.block_diffusion(64, 4), (1, 4, 64, 64), "128 keys, by `length` 64 of each copy of `block_diffusion_64_4`; expected 64, as this call has."),
    "media": (lambda: masks.media_intervals(np.zeros((3, 2), np.int32), 4), (1, 4, 64, 64), "12 keys, by `intervals` int32[3, 2] of `media_intervals_4`; expected 64, as this call has."),
    "batched": (lambda: masks.batched([masks.causal, masks.full]), (3, 4, 64, 64), "2 batch entries, by `mask_mods` of length 2 of `batched_causal_full`; expected 3, as this call has."),
    "of a document": (lambda: masks.per_document(masks.padding(np.array([5, 6])), IDS), (1, 4, 64, 64), "2 batch entries, by `lengths` int32[2] of `padding`; expected 1, as this call has."),
    "joined": (lambda: flexjax.or_masks(masks.causal, flexjax.not_mask(flexjax.and_masks(masks.causal, masks.global_tokens(FLAGS[:9])))), (1, 4, 64, 64), "at most 9 queries, by `tokens` bool[9] of `global_tokens`; expected 64, as this call has."),
    "of a user": (lambda: flexjax.made_for(keys=range(1, 33))(lambda b, h, q, kv: q >= kv), (1, 4, 64, 64), "at most 32 keys, by `keys` of `<lambda>`; expected 64, as this call has."),
}  # fmt: skip
REFUSED_SCORES = {
    "alibi": (lambda: mods.alibi(8), (1, 4, 64, 64), "8 query heads, by `num_heads` of `alibi_8`; expected 4, as this call has."),
    "chained": (lambda: flexjax.chain_mods(mods.softcap(5.0), mods.temperature(f32(3))), (1, 4, 64, 64), "3 query heads, by `value` float32[3] of `temperature`; expected 4, as this call has."),
    "t5": (lambda: mods.t5_bias(f32(32, 8), bidirectional=True), (1, 8, 64, 64), "32 query heads, by `table` float32[32, 8] of `t5_bias`; expected 8, as this call has. Heads are the first axis: transpose a table of [num_buckets, N]."),
    "table": (lambda: mods.relative_table(f32(4, 63)), (1, 4, 64, 64), "at most 32 queries, by `table` float32[4, 63] of `relative_table`; expected 64, as this call has."),
    "pairs": (lambda: mods.pair_bias(PAIR[:, :32]), (1, 4, 64, 64), "32 keys, by `bias` float32[64, 32] of `pair_bias`; expected 64, as this call has."),
    "groups": (lambda: mods.key_scales(f32(1, 4, 64), group=2), (1, 4, 64, 64), "8 query heads, by `scales` float32[1, 4, 64] of `key_scales`; expected 4, as this call has."),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_MASKS)
def test_a_mask_of_other_sizes_is_refused(name: str) -> None:
    make, sizes, message = REFUSED_MASKS[name]
    whole = f"`mask_mod` is made for {message} {ADVICE}"
    assert message_of(lambda: explained(mask_mod=make(), sizes=sizes)) == whole
    assert message_of(lambda: flexjax.create_block_mask(make(), *sizes)) == whole


@pytest.mark.parametrize("name", REFUSED_SCORES)
def test_a_score_mod_of_other_sizes_is_refused(name: str) -> None:
    make, sizes, message = REFUSED_SCORES[name]
    assert message_of(lambda: explained(make(), sizes=sizes)) == f"`score_mod` is made for {message} {ADVICE}"


LEGAL = {
    "grouped query heads": lambda: explained(mods.alibi(8), sizes=(1, 8, 64, 64)),
    "one row for all": lambda: explained(mods.head_gate(f32(1, 4)), masks.document(IDS), sizes=(3, 4, 64, 64)),
    "decoding": lambda: explained(mods.pair_bias(PAIR), masks.document(IDS), sizes=(1, 4, 1, 64)),
    "a table of more distances": lambda: explained(mods.relative_table(f32(4, 255))),
    "tokens after a canvas": lambda: explained(mask_mod=masks.sliding_tile_2d((4, 4), (2, 2), (2, 2))),
    "the end of a cache": lambda: explained(mask_mod=masks.document(IDS), sizes=(1, 4, 4, 64), origin=Origin(query="end")),
    "a cache that is cut": lambda: explained(mask_mod=masks.document(IDS), sizes=(1, 4, 4, 48), origin=Origin(query="end")),
    "a shard of heads": lambda: explained(mods.alibi(8), origin=Origin(head=4)),
    "the first shard of heads": lambda: explained(mods.alibi(8), origin=Origin(head=0)),
    "a known whole": lambda: explained(mods.alibi(8), origin=Origin(head=4, whole=(None, 8, None, None))),
    "tokens past a length": lambda: explained(mask_mod=masks.document(IDS), sizes=(1, 4, 128, 128), query_seq_lengths=60, key_value_seq_lengths=64),
    "one mask for all": lambda: flexjax.create_block_mask(masks.document(IDS), None, None, 64, 64),
    "no tokens": lambda: explained(mask_mod=masks.natten_2d((4, 8), (3, 3)), sizes=(1, 4, 0, 0)),
    "called by hand": lambda: explained(mask_mod=lambda b, h, q, kv: masks.natten_2d((4, 8), (3, 3))(b, h, q % 32, kv % 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_legal_sizes_give_no_error_and_no_warning(name: str) -> None:
    assert LEGAL[name]()


def test_the_whole_problem_of_an_origin_is_what_counts() -> None:
    message = (
        f"`score_mod` is made for 8 query heads, by `num_heads` of `alibi_8`; expected 16, as this call has. {ADVICE}"
    )
    assert message_of(lambda: explained(mods.alibi(8), origin=Origin(head=4, whole=(None, 16, None, None)))) == message
    message = (
        "`mask_mod` is made for at most 64 queries, by `segment_ids` int32[1, 64] of `document`; expected at least 256, which this call "
        f"reaches. {ADVICE}"
    )
    assert (
        message_of(
            lambda: explained(mask_mod=masks.document(IDS), origin=Origin(query=64, whole=(None, None, 256, None)))
        )
        == message
    )


def test_under_vmap_sizes_are_those_of_one_example() -> None:
    x = array(np.ones((3, 16, 2, 8), np.float32))
    one = lambda x, ids: flexjax.flex_attention(x[None], x[None], x[None], mask_mod=masks.document(ids))
    assert jax.vmap(one)(x, jnp.zeros((3, 16), jnp.int32)).shape == (3, 1, 16, 2, 8)


def test_made_for_takes_numbers_and_ranges() -> None:
    message = "`made_for`: `heads` is range(0, 3); expected a positive int, a range of positive ints or None. Pass range(1, n + 1) for at most n."
    with pytest.raises(ValueError, match=r"^`made_for`") as error:
        flexjax.made_for(heads=range(3))
    assert str(error.value) == message


# ------------------------------------------------------------------- bare reads

SHORT, TABLE = f32(32), f32(4, 32, 64)


def test_a_bare_read_of_a_short_array_warns_once_at_its_line() -> None:
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return score + jnp.asarray(TABLE)[h, q_idx, kv_idx]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        explained(score_mod)
        explained(score_mod)
    assert [(w.filename, w.lineno) for w in said] == [(__file__, score_mod.__code__.co_firstlineno + 1)]
    assert str(said[0].message) == (
        "`score_mod` reads an array of shape (4, 32, 64) at `q_idx` along axis 1, where it has 32 elements, but `q_idx` goes up to 63 in "
        "this call, and jax reads the last element past the end without an error. Capture an array that has 64 elements there, or say what "
        "is meant, for example jnp.minimum(q_idx, 31)."
    )


BARE = {
    "b": lambda s, b, h, i, j: s + jnp.asarray(f32(2))[b],
    "numpy": lambda s, b, h, i, j: s + SHORT[j],
    "a row first": lambda s, b, h, i, j: s + jnp.asarray(TABLE)[h][i][j],
    "a nested function": lambda s, b, h, i, j: s + jax.jit(lambda x, at: x[at])(SHORT, i),
    "several at once": lambda s, b, h, i, j: s + jnp.asarray(TABLE)[jnp.arange(4), i, j].sum(),
    "a mask by hand": lambda s, b, h, i, j: s * masks.global_tokens(FLAGS[:9])(b, h, i, j),
}


@pytest.mark.parametrize("name", BARE)
def test_bare_reads_are_found(name: str) -> None:
    with pytest.warns(UserWarning, match="without an error"):
        explained(BARE[name], sizes=(3, 4, 64, 64))


GUARDED = {
    "clipped": lambda s, b, h, i, j: s + jnp.asarray(SHORT)[jnp.clip(i, 0, 31)],
    "wrapped": lambda s, b, h, i, j: s + jnp.asarray(SHORT)[j % 32],
    "a mode": lambda s, b, h, i, j: s + jnp.asarray(SHORT).at[i].get(mode="clip") + jnp.take(SHORT, j, mode="clip"),
    "a fill": lambda s, b, h, i, j: s + jnp.asarray(SHORT).at[i].get(mode="fill", fill_value=0),
    "long enough": lambda s, b, h, i, j: s + jnp.asarray(TABLE)[h, j // 2, i],
}


@pytest.mark.parametrize("name", GUARDED)
def test_other_reads_say_nothing(name: str) -> None:
    assert explained(GUARDED[name])
