"""Blocks are never called full or empty wrongly; for the families named in the design, and on demand, never partial wrongly."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexjax import BlockMask, create_block_mask
from tests.arrays import array
from tests.cases import random_masks
from tests.cases.random_masks import BLOCKS, EXACT, SIZES, SOUND, build, classes, dense, trees
from tests.marks import some_slow

LEAVES = [(name, p) for name in {**EXACT, **SOUND} for p in (0, 7, 60)]


def classes_of(mask: BlockMask) -> np.ndarray:
    """What the lists say, after a look at whether they are well formed."""
    found = np.zeros((*mask.kv_num_blocks.shape[:2], *mask.blocks), int)
    back = np.zeros_like(found)
    lists = (
        (found, 1, mask.kv_num_blocks, mask.kv_indices),
        (found, 2, mask.full_kv_num_blocks, mask.full_kv_indices),
        (back.swapaxes(2, 3), 1, mask.q_num_blocks, mask.q_indices),
        (back.swapaxes(2, 3), 2, mask.full_q_num_blocks, mask.full_q_indices),
    )
    for out, kind, num, index in lists:
        num, index = np.asarray(num), np.asarray(index)
        assert num.dtype == index.dtype == np.int32
        assert num.shape == index.shape[:3] == out.shape[:3]
        for place in np.ndindex(*num.shape):
            row = index[place][: num[place]]
            assert np.all(np.diff(row) > 0), "ascending, no block twice"
            assert not np.any(out[(*place, row)]), "in one list only"
            out[(*place, row)] = kind
    np.testing.assert_array_equal(found, back)
    return found


def check(
    tree: tuple,
    sizes: tuple,
    blocks: tuple,
    seed: int,
    exact: bool | None,
    traced: bool,
    promised: bool,
) -> None:
    """Asserts that a block mask calls no block full or empty wrongly, and none partial wrongly if exactness is `promised`.

    tree            the mask, as random_masks builds it
    sizes, blocks   (batch, heads, q_len, kv_len) and the block size
    seed            of the captured arrays
    exact           argument of create_block_mask
    traced          whether the block mask is built under jit
    """
    arrays = random_masks.arrays_of(sizes, np.random.default_rng(seed))
    concrete = {name: array(a) for name, a in arrays.items()}

    def make(arrays: dict) -> BlockMask:
        mask_mod = build(tree, arrays)
        unsized = lambda b, h, q_idx, kv_idx: mask_mod(b, h, q_idx, kv_idx)  # grids of the families fit no call here
        return create_block_mask(unsized, *sizes, block_size=blocks, exact=exact)

    mask = jax.jit(make)(concrete) if traced else make(concrete)
    want = classes(dense(build(tree, concrete), sizes, tree[0] != "compared"), blocks)
    found = classes_of(mask)
    wrong = (found != want) & (found != 1)
    assert not wrong.any(), f"called full or empty wrongly at {np.argwhere(wrong)[:3]}"
    if promised:
        np.testing.assert_array_equal(found, want)


# families that are computed as another one is, from other numbers
SIBLINGS = frozenset({
    "two_sided_window", "prefix_captured", "query_padding", "dilated_two_sided", "global_flags", "local_global",
    "strided_fixed", "natten_tiled", "shuffled_documents", "negative_modulus", "overflow_sum", "not_float_threshold",
    "dense_by_head", "byte_product", "masked_head", "captured_chunks", "circle",
})  # fmt: skip


@pytest.mark.parametrize(
    "leaf",
    [pytest.param(leaf, marks=[pytest.mark.slow] if leaf[0] in SIBLINGS else []) for leaf in LEAVES[1::3]],
    ids=str,
)
def test_each_family_is_sound(leaf: tuple) -> None:
    check(leaf, (2, 2, 150, 210), (32, 48), 0, False, False, leaf[0] in EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES, ids=str)
@pytest.mark.parametrize("blocks", [(16, 16), (64, 19), (128, 256)])
def test_each_family_is_sound_for_more_parameters(leaf: tuple, blocks: tuple) -> None:
    for seed, sizes in enumerate([(2, 3, 400, 400), (1, 2, 113, 203)]):
        check(leaf, sizes, blocks, seed, False, False, leaf[0] in EXACT)


SEEDS = st.integers(0, 1000)


@pytest.mark.parametrize(
    ("exact", "traced"), some_slow(itertools.product((False, True), (False, True)), [(False, True), (True, False)])
)
@settings(max_examples=3)
@given(tree=trees({**EXACT, **SOUND}), sizes=SIZES, blocks=BLOCKS, seed=SEEDS)
def test_any_combination_is_sound(
    tree: tuple, sizes: tuple, blocks: tuple, seed: int, exact: bool, traced: bool
) -> None:
    """And exact where that is asked for."""
    check(tree, sizes, blocks, seed, exact, traced, exact)


@settings(max_examples=4)
@given(trees(EXACT), SIZES, BLOCKS, SEEDS)
def test_combinations_of_named_families_are_exact_by_default(
    tree: tuple, sizes: tuple, blocks: tuple, seed: int
) -> None:
    check(tree, sizes, blocks, seed, None, False, True)


@settings(max_examples=4)
@given(st.tuples(st.sampled_from(sorted(EXACT)), st.integers(0, 60)), SIZES, BLOCKS, SEEDS)
def test_single_families_are_exact_from_traced_arrays(tree: tuple, sizes: tuple, blocks: tuple, seed: int) -> None:
    check(tree, sizes, blocks, seed, None, True, True)


@pytest.mark.slow
@settings(max_examples=300)
@given(trees({**EXACT, **SOUND}), SIZES, BLOCKS, SEEDS, st.sampled_from([False, None, True]), st.booleans())
def test_any_combination_any_path(
    tree: tuple, sizes: tuple, blocks: tuple, seed: int, exact: bool | None, traced: bool
) -> None:
    check(tree, sizes, blocks, seed, exact, traced, bool(exact))


@pytest.mark.slow
@settings(max_examples=200)
@given(trees(EXACT), SIZES, BLOCKS, SEEDS)
def test_combinations_of_named_families_are_exact_more_often(
    tree: tuple, sizes: tuple, blocks: tuple, seed: int
) -> None:
    check(tree, sizes, blocks, seed, None, False, True)
