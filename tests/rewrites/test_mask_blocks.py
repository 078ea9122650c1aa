"""Masks in blocks of another size: no entry changes sides, and lists stay within their widths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import BlockMask, masks
from flexjax.backends.reference.support import block_mask_of
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import PreparedCall, prepare
from flexjax.rewrites import mask_blocks
from tests.arrays import array
from tests.block_mask.test_classify import classes_of
from tests.cases.small import to_mask
from tests.marks import some_slow

Q_LEN, KV_LEN = 250, 330
LENGTHS = array([330, 90])
WINDOWS = array([5, 300])
SIZES = {
    "16": ((16, 16), (128, 128)),
    "96": ((96, 96), (64, 128)),
    "32, 128": ((32, 128), (128, 64)),
    "1, 200": ((1, 200), (64, 128)),
    "7": ((7, 7), (48, 16)),
    "1000": ((1000, 1000), (128, 128)),
}


def mixed(b, h, q, k):
    return (k < LENGTHS[b]) & (k <= q + 80) & (q - k < WINDOWS[h])


def call_of(block_mask: BlockMask) -> PreparedCall:
    q, k = jnp.zeros((2, Q_LEN, 2, 8)), jnp.zeros((2, KV_LEN, 2, 8))
    return prepare(Arguments(q, k, k, block_mask=block_mask))


def made_again(block_mask: BlockMask, blocks: tuple[int, int]) -> BlockMask:
    """The mask of a call, in other blocks."""
    call = call_of(block_mask)
    step = mask_blocks.rewrite(call.plan, *blocks)
    assert step is not None
    plan, operands = step.plan, jax.jit(step.operands)(call.operands)
    assert plan.mask is not None
    assert [a.shape for a in plan.mask.captures] == [a.shape for a in operands.mask_captures]
    found = block_mask_of(plan, operands)
    assert found is not None
    assert found.block_size == blocks
    for name in ("kv", "full_kv", "q", "full_q"):
        num, index = getattr(found, f"{name}_num_blocks"), getattr(found, f"{name}_indices")
        assert int(num.max(initial=0)) <= index.shape[-1], "an entry was cut off"
    return found


@pytest.mark.parametrize("name", some_slow(SIZES, ("32, 128", "1, 200")))
def test_a_mask_stays_what_it_is(name: str) -> None:
    own, blocks = SIZES[name]
    mask = flexjax.create_block_mask(mixed, 2, 2, Q_LEN, KV_LEN, block_size=own)
    found = made_again(mask, blocks)
    np.testing.assert_array_equal(to_mask(found), to_mask(mask))
    exact = classes_of(flexjax.create_block_mask(mixed, 2, 2, Q_LEN, KV_LEN, block_size=blocks))
    kinds = classes_of(found)
    assert np.all((kinds == exact) | (kinds == 1)), "what is called full or empty is"
    if all(n % m == 0 for n, m in zip(blocks, own, strict=True)):
        np.testing.assert_array_equal(kinds, exact)


@pytest.mark.parametrize("mask_mod", [None, mixed])
@pytest.mark.parametrize("name", some_slow(["16", "96", "7"], ["16"]))
def test_lists_that_a_user_made_keep_their_say(name: str, mask_mod: Any) -> None:
    """Blocks that no list names stay off, and those of the full list stay on, whatever mask_mod says there."""
    own, blocks = SIZES[name]
    grid = (2, 2, -(-Q_LEN // own[0]), -(-KV_LEN // own[1]))
    kinds = np.random.default_rng(0).integers(0, 3, grid)
    index = [np.argsort(kinds != kind, -1, kind="stable") for kind in (1, 2)]
    partial, full = ((kinds == kind).sum(-1) for kind in (1, 2))
    mask = BlockMask.from_kv_blocks(
        partial, index[0], full, index[1], block_size=own, mask_mod=mask_mod, q_len=Q_LEN, kv_len=KV_LEN
    )
    np.testing.assert_array_equal(to_mask(made_again(mask, blocks)), to_mask(mask))


def test_the_same_blocks_are_the_same_plan() -> None:
    call = call_of(flexjax.create_block_mask(masks.causal, None, None, Q_LEN, KV_LEN, block_size=64))
    assert mask_blocks.plan_with_blocks(call.plan, 64, 64) is call.plan
    assert mask_blocks.rewrite(call.plan, 64, 64) is None
