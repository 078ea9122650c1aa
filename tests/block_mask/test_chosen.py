"""Block masks of chosen key blocks, against a dense mask that numpy makes of the choices, and attention by it in float64."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import BlockMask, masks
from flexjax.block_mask import transpose
from tests.arrays import array
from tests.cases.random_masks import classes
from tests.cases.small import quick_jit, to_mask

B, N, M, T, S, D = 2, 4, 2, 90, 150, 8


def choices(
    shape: tuple[int, int, int, int], block: int, keys: int = S, seed: int = 0, dtype: Any = np.int32
) -> np.ndarray:
    """Random ones: repeated, in any order, -1 among them."""
    return np.random.default_rng(seed).integers(-1, -(-keys // block), shape).astype(dtype)


def dense(chosen: np.ndarray, block: int, queries: int = T, keys: int = S, heads: int = N) -> np.ndarray:
    """bool [B, heads, queries, keys], choice by choice."""
    batch, own, groups, _ = chosen.shape
    on = np.zeros((batch, heads, queries, keys), bool)
    for b, h, q in np.ndindex(batch, heads, queries):
        for number in chosen[b, h * own // heads, q * groups // queries]:
            if number >= 0:
                on[b, h, q, number * block : (number + 1) * block] = True
    return on


CAUSAL = np.arange(T)[:, None] >= np.arange(S)
ROWS = {  # chosen's [B, H, T, n], its block, the block of the lists, further arguments
    "blocks of 16": ((B, M, T, 3), 16, (128, 64), {}),
    "blocks of 32": ((B, N, T, 2), (16, 32), (16, 64), {}),
    "blocks of 64": ((B, M, T, 1), (32, 64), (32, 64), {}),
    "blocks of 80": ((1, M, T, 1), (8, 80), (8, 80), {}),
    "one head, one batch entry": ((1, 1, T, 4), (8, 16), (8, 64), {}),
    "groups of 9 queries": ((B, M, T // 9, 3), (8, 16), (8, 64), {"q_len": T}),
    "one choice": ((B, 1, 1, 3), (8, 16), (8, 64), {"q_len": T}),
    "with a mask": ((B, M, T, 4), (8, 16), (8, 64), {"mask_mod": masks.causal}),
    "all blocks": ((B, M, T, 40), (8, 64), (8, 64), {"mask_mod": masks.causal}),
}


@pytest.mark.parametrize("traced", [False, True], ids=["known", "traced"])
@pytest.mark.parametrize("name", ROWS)
def test_entries_and_blocks_are_those_of_the_choices(name: str, traced: bool) -> None:
    shape, block_size, listed, more = ROWS[name]
    block = block_size[1] if isinstance(block_size, tuple) else block_size
    chosen = choices(shape, block)
    make = lambda chosen: BlockMask.from_chosen_blocks(chosen, block_size, kv_len=S, heads=N, **more)
    mask = jax.jit(make)(chosen) if traced else make(chosen)
    on = dense(chosen, block) & (CAUSAL if "mask_mod" in more else True)
    assert mask.shape == (shape[0], N, T, S)
    assert mask.block_size == listed
    assert not mask.lists_decide
    np.testing.assert_array_equal(to_mask(mask), on)
    want = classes(on, listed)
    partial, full = mask.flags()
    np.testing.assert_array_equal(partial | full, mask.to_dense())
    assert not np.any(np.asarray(full) & (want != 2))
    if "mask_mod" in more:  # of two partial blocks none may be left
        assert not np.any((want > 0) & ~np.asarray(partial | full))
    else:
        np.testing.assert_array_equal(partial | full, want > 0)
    if name == "all blocks":
        np.testing.assert_array_equal(full, want == 2)


def test_the_bits_are_packed_and_repeated_for_no_head() -> None:
    """Of 150 keys in blocks of 4, for each key head and pair of queries: two words."""
    mask = BlockMask.from_chosen_blocks(choices((B, M, T // 2, 3), 4), 4, q_len=T, kv_len=S, heads=N)
    (words,) = mask.captures
    assert (words.shape, words.dtype) == ((B, M, T // 2, 2), jnp.int32)
    np.testing.assert_array_equal(to_mask(mask), dense(choices((B, M, T // 2, 3), 4), 4))


def test_large_masks_are_kept_as_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transpose, "LARGE", 0)
    chosen = choices((B, M, T, 3), 16)
    mask = jax.jit(lambda c: BlockMask.from_chosen_blocks(c, (8, 16), kv_len=S, heads=N))(chosen)
    assert mask.in_bits
    np.testing.assert_array_equal(to_mask(mask), dense(chosen, 16))


def test_a_traced_number_out_of_range_chooses_nothing() -> None:
    chosen = np.asarray([[[[-5, 0], [3, 99], [2, 2]]]], np.int64)
    mask = jax.jit(lambda c: BlockMask.from_chosen_blocks(c, 16, kv_len=40))(chosen)
    on = np.zeros((3, 40), bool)
    on[0, :16] = on[2, 32:] = True
    np.testing.assert_array_equal(to_mask(mask)[0, 0], on)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32])
def test_numbers_of_few_bits_count_blocks_beyond_them(dtype: type) -> None:
    chosen = np.maximum(choices((1, 1, 20, 3), 4), 0).astype(dtype)
    mask = BlockMask.from_chosen_blocks(chosen, 4, q_len=20, kv_len=1200)
    np.testing.assert_array_equal(to_mask(mask)[0, 0], dense(chosen.astype(np.int32), 4, 20, 1200)[0, 0])


@pytest.mark.parametrize(("batch", "tokens", "keys"), [(0, 8, 8), (2, 0, 8), (2, 0, 0), (2, 8, 0)])
def test_choices_of_nothing(batch: int, tokens: int, keys: int) -> None:
    """Of blocks that are lists of their own (64 keys) and joined (16)."""
    chosen = np.full((batch, 1, tokens, 2), -1, np.int32)
    for block in (16, 64):
        mask = BlockMask.from_chosen_blocks(chosen, block, q_len=tokens, kv_len=keys, mask_mod=masks.causal)
        assert to_mask(mask).shape == (batch, 1, tokens, keys)


# ------------------------------------------------------------------ attention


def inputs(seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, D), (B, S, M, D), (B, S, M, D), (N, S))
    return tuple(array(rng.standard_normal(s), jnp.float64) for s in shapes)


def by_definition(on: np.ndarray, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    k, v = (jnp.repeat(x, N // M, 2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(D) + bias[None, :, None]
    scores = jnp.where(on, scores, -jnp.inf)
    top = jnp.max(scores, -1, keepdims=True, initial=-1e9)
    p = jnp.exp(scores - top)
    return jnp.einsum("bhij,bjhd->bihd", p / jnp.maximum(p.sum(-1, keepdims=True), 1e-300), v)


def attend(chosen: Any, *x: jax.Array, block: Any = (32, 16), **more: Any) -> jax.Array:
    q, k, v, bias = x
    mask = BlockMask.from_chosen_blocks(chosen, block, kv_len=S, heads=N, **more)
    return flexjax.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, j], block_mask=mask)


def with_gradients(function: Any, *x: jax.Array) -> Any:
    out, pull = jax.vjp(function, *x)
    return out, pull(jnp.cos(3 * out))


def assert_close(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-13 * max(1.0, float(jnp.abs(y).max())))


def test_attention_and_all_gradients_are_those_of_the_dense_mask() -> None:
    with jax.enable_x64(True):
        chosen, x = choices((B, M, T, 3), 16), inputs()
        run = quick_jit(lambda c, *x: with_gradients(lambda *x: attend(c, *x, mask_mod=masks.causal), *x))
        want = quick_jit(lambda *x: with_gradients(lambda *x: by_definition(dense(chosen, 16) & CAUSAL, *x), *x))
        assert_close(run(chosen, *x), want(*x))


def test_heads_of_a_group_as_neighbouring_queries() -> None:
    """G heads of T queries as one head of T * G, each choice that of G rows: the same numbers, all gradients too."""
    share = N // M
    rows = lambda x: x.reshape(B, T, M, share, D).swapaxes(2, 3).reshape(B, T * share, M, D)

    def packed(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        mask = BlockMask.from_chosen_blocks(
            chosen, (32, 16), q_len=T * share, kv_len=S, mask_mod=lambda b, h, i, j: i // share >= j
        )
        score_mod = lambda s, b, h, i, j: s + bias[h * share + i % share, j]
        out = flexjax.flex_attention(rows(q), k, v, score_mod=score_mod, block_mask=mask)
        return out.reshape(B, T, share, M, D).swapaxes(2, 3).reshape(B, T, N, D)

    with jax.enable_x64(True):
        chosen, x = choices((B, M, T, 3), 16), inputs()
        want = quick_jit(lambda *x: with_gradients(lambda *x: by_definition(dense(chosen, 16) & CAUSAL, *x), *x))
        assert_close(quick_jit(lambda *x: with_gradients(packed, *x))(*x), want(*x))


@settings(max_examples=100 if settings().max_examples > 100 else 6, deadline=None)
@given(data=st.data())
def test_any_choices(data: st.DataObject) -> None:
    """Lengths, blocks, heads, groups and choices; several kinds of each."""
    block = data.draw(st.sampled_from([16, 32, 64]))
    heads, own = data.draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (2, 1)]))
    groups, each, keys = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 150))
    count, seed = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 99))
    causal = data.draw(st.booleans())
    chosen = choices((data.draw(st.sampled_from([1, 2])), own, groups, count), block, keys, seed)
    queries = groups * each
    size = (data.draw(st.sampled_from([8, 32, 128])), block)
    make = lambda c: BlockMask.from_chosen_blocks(
        c, size, q_len=queries, kv_len=keys, heads=heads, mask_mod=masks.causal if causal else None
    )
    on = dense(chosen, block, queries, keys, heads)
    on = on & (np.arange(queries)[:, None] >= np.arange(keys)) if causal else on
    for mask in (make(chosen), jax.jit(make)(chosen)):
        np.testing.assert_array_equal(to_mask(mask), on)
    rng = np.random.default_rng(seed)
    q, k, v = (array(rng.standard_normal((2, n, heads, 4)), jnp.float32) for n in (queries, keys, keys))
    out = flexjax.flex_attention(q, k, v, block_mask=make(chosen), implementation="xla")
    scores = np.where(on, np.einsum("bihd,bjhd->bhij", q, k) / 2, -np.inf)
    p = np.exp(scores - np.max(scores, -1, keepdims=True, initial=-1e9))
    want = np.einsum("bhij,bjhd->bihd", p / np.maximum(p.sum(-1, keepdims=True), 1e-30), v)
    np.testing.assert_allclose(out, want, atol=2e-5)


def test_vmap_over_choices() -> None:
    with jax.enable_x64(True):
        chosen, x = np.stack([choices((B, M, T, 2), 16, seed=n) for n in (0, 1)]), inputs()
        got = quick_jit(jax.vmap(attend, (0, None, None, None, None)))(chosen, *x)
        assert_close(got, jnp.stack([by_definition(dense(c, 16), *x) for c in chosen]))


needs_two_devices = pytest.mark.skipif(jax.device_count() < 2, reason="tests/conftest.py makes two devices of a CPU")


@needs_two_devices
@pytest.mark.filterwarnings("ignore:Each device receives:flexjax.FallbackWarning")  # of the bits, where heads are split
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_over_a_mesh(kind: AxisType, axis: str) -> None:
    """Out and gradients of two devices, of which each has a part of the batch or of the heads, are those of one."""
    with jax.enable_x64(True):
        chosen, x = choices((B, M, T, 3), 16), inputs()
        run = quick_jit(lambda c, *x: with_gradients(lambda *x: attend(c, *x, mask_mod=masks.causal), *x))
        want = run(chosen, *x)
        mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
        spec = P("x") if axis == "batch" else P(None, None, "x")
        specs = (P("x") if axis == "batch" else P(None, "x"), spec, spec, spec, P() if axis == "batch" else P("x"))
        placed = [jax.device_put(y, NamedSharding(mesh, s)) for y, s in zip((chosen, *x), specs, strict=True)]
        with jax.set_mesh(mesh):
            assert_close(run(*placed), want)


@needs_two_devices
@pytest.mark.filterwarnings("ignore:Each device receives:flexjax.FallbackWarning")
@pytest.mark.filterwarnings("ignore:Every device computes:flexjax.FallbackWarning")
def test_choices_of_tokens_that_a_mesh_splits() -> None:
    """XLA makes no reduction by bits over devices."""
    x = inputs()
    run = quick_jit(lambda c, *x: attend(c, *x, mask_mod=masks.causal))
    chosen = choices((B, M, T, 3), 16)
    want = run(chosen, *x)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    split = jax.device_put(chosen, NamedSharding(mesh, P(None, None, "x")))
    with jax.set_mesh(mesh):
        assert_close(run(split, *x), want)


# ------------------------------------------------------------------ errors

GOOD = choices((B, M, T, 3), 16)
ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dims": (
        GOOD[0],
        {},
        "`chosen` is int32[2, 90, 3]; expected int32 [B, H, T, n], key blocks of each query. Pass -1 where a query "
        "chose fewer.",
    ),
    "dtype": (
        GOOD.astype(np.float32),
        {},
        "`chosen` is float32[2, 2, 90, 3]; expected int32 [B, H, T, n], key blocks of each query. Pass -1 where a "
        "query chose fewer.",
    ),
    "number": (
        GOOD,
        {"kv_len": 64},
        "`chosen` is between -1 and 9; expected -1 or block numbers of 0 to 3. Check kv_len and the block size.",
    ),
    "queries": (
        GOOD,
        {"q_len": 100},
        "`q_len` is 100; expected a multiple of 90, the third dim of chosen. A choice is that of as many neighbouring "
        "queries as the quotient says.",
    ),
    "heads": (
        GOOD,
        {"heads": 3},
        "`heads` is 3; expected a multiple of 2, the second dim of chosen. Pass the query heads of the call, of which "
        "neighbouring ones share a choice.",
    ),
    "block size": (
        GOOD,
        {"block_size": 0},
        "`block_size` is 0; expected a positive int, or two: (queries, keys). 128 suits every backend.",
    ),
    "mask of a batch entry": (
        GOOD[:1],
        {"mask_mod": lambda b, h, q, k: q >= k + b},
        "`mask_mod` is a function that depends on `b`; expected one that does not, because the first dim of chosen is "
        "1, one choice for all. Broadcast chosen to the batch of the call.",
    ),
    "mask of a head": (
        GOOD[:, :1],
        {"mask_mod": lambda b, h, q, k: q >= k + h},
        "`mask_mod` is a function that depends on `h`; expected one that does not, because the second dim of chosen "
        "is 1, one choice for all. Pass heads=, the query heads of the call.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    chosen, more, message = ERRORS[name]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        BlockMask.from_chosen_blocks(chosen, **{"block_size": 16, "kv_len": S, **more})


def test_a_call_of_other_heads_says_so() -> None:
    q = jnp.zeros((B, T, N, D))
    mask = BlockMask.from_chosen_blocks(choices((B, M, T, 3), 16, T), 16)
    with pytest.raises(ValueError, match=r"^`block_mask` is made for heads=2; expected heads=4 or 1\. Build it with"):
        flexjax.flex_attention(q, q, q, block_mask=mask)
