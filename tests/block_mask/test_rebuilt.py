"""Block masks whose arrays a user replaced: kernels get ascending lists, whatever the order of the new arrays is."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import BlockMask, create_block_mask, masks
from flexjax.backends.reference.definition import reference_attention
from flexjax.backends.target import Target
from flexjax.backends.xla.support import XlaBackend
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.passes.dispatch import Run
from tests.arrays import array

LENGTH, BLOCK = 120, 16


def made() -> BlockMask:
    return create_block_mask(masks.causal, None, None, LENGTH, LENGTH, block_size=BLOCK)


def backwards(num: jax.Array, index: jax.Array) -> jax.Array:
    """The numbers of each row in descending order; those past the count stay where they are."""
    found = np.array(index)
    for at in np.ndindex(num.shape):
        found[at][: num[at]] = found[at][: num[at]][::-1]
    return array(found)


def by_replace(mask: BlockMask) -> BlockMask:
    full = backwards(mask.full_kv_num_blocks, mask.full_kv_indices)
    return dataclasses.replace(mask, full_kv_indices=full)


def by_constructor(mask: BlockMask) -> BlockMask:
    fields = {f.name: getattr(mask, f.name) for f in dataclasses.fields(mask) if f.name not in ("on_host", "made")}
    return BlockMask(**fields | {"full_kv_indices": backwards(mask.full_kv_num_blocks, mask.full_kv_indices)})


def arrays() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    return tuple(array(rng.standard_normal((2, LENGTH, 1, 8)), jnp.float32) for _ in range(3))


@pytest.mark.parametrize("rebuild", [by_constructor, by_replace])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_length_cuts_lists_in_any_order(rebuild: Callable[[BlockMask], BlockMask], jitted: bool) -> None:
    """The xla backend counts the first blocks of a row that lie before the length."""
    lengths = array([70, 37])
    attend = lambda mask: flexjax.flex_attention(
        *arrays(), block_mask=mask, key_value_seq_lengths=lengths, implementation="xla"
    )
    mask = rebuild(made())
    got = jax.jit(attend)(mask) if jitted else attend(mask)
    at = np.arange(LENGTH)
    shown = (at[:, None] >= at) & (at < np.asarray(lengths)[:, None, None])
    np.testing.assert_allclose(got, reference_attention(*arrays(), mask=array(shown[:, None]))[0], atol=2e-6)


def test_replaced_lists_are_not_those_on_the_host() -> None:
    """One block that a user takes off stays off: lists that are known while a call is traced are the new ones."""
    mask = made()
    fewer = dataclasses.replace(mask, full_kv_num_blocks=jnp.maximum(mask.full_kv_num_blocks - 1, 0))
    crossed = jax.tree.map(lambda x: x, fewer)
    for given, known in ((mask, True), (fewer, False), (crossed, False), (mask[:, :, :2], False)):
        tokens = given.q_len
        q, k, v = arrays()
        call = prepare(Arguments(q[:, :tokens], k, v, block_mask=given))
        assert call.plan.blocks is not None
        assert (call.plan.blocks.known is not None) == known


def test_lists_as_they_were_made_are_not_sorted() -> None:
    """Also where the mask follows from a traced array, as in a training step, or is an argument of the step."""

    def primitives(function: Callable, *args: object) -> str:
        return str(jax.make_jaxpr(function)(*args))

    attend = lambda mask: flexjax.flex_attention(*arrays(), block_mask=mask, implementation="xla")
    documents = array(np.repeat([0, 1], LENGTH // 2))
    in_step = lambda d: attend(create_block_mask(masks.document(d), None, None, LENGTH, LENGTH, block_size=BLOCK))
    assert "in_range" not in primitives(in_step, documents)
    assert "in_range" not in primitives(lambda: attend(made()))
    assert "in_range" not in primitives(attend, made())
    assert "in_range" not in primitives(lambda m: attend(jax.tree.map(lambda x: x, m[:, :, :])), made())
    assert "in_range" in primitives(attend, by_replace(made()))


@pytest.mark.parametrize("target", [Target("cpu"), Target("cuda", "NVIDIA T4", "7.5", 40)], ids=["cpu", "gpu"])
def test_a_block_that_is_taken_off_stays_off(target: Target) -> None:
    """Backends make other blocks of a mask's, where the program alone would show the entries of a removed block again."""
    mask = create_block_mask(masks.causal, None, None, 1024, 1024)
    fewer = dataclasses.replace(mask, full_kv_num_blocks=mask.full_kv_num_blocks * 0)
    rng = np.random.default_rng(1)
    q, k, v = (array(rng.standard_normal((1, 1024, 1, 8)), jnp.float32) for _ in range(3))
    call = prepare(Arguments(q, k, v, block_mask=fewer))
    got = Run(XlaBackend(), call.plan, target).forward(call.operands).out
    at = np.arange(1024)
    shown = (at[:, None] >= at) & (at[:, None] // 128 == at // 128)
    np.testing.assert_allclose(got, reference_attention(q, k, v, mask=array(shown[None, None]))[0], atol=2e-6)
    assert [bool(fewer.mask_mod(0, 0, 200, kv)) for kv in (10, 130, 201)] == [False, True, False]  # pyright: ignore[reportArgumentType]


def test_transposed_lists_of_replaced_lists_have_all_rows() -> None:
    """A column that every row lists has as many rows as there are, whatever the bound of the mask before was."""
    mask = create_block_mask(masks.sliding_window(BLOCK), None, None, LENGTH, LENGTH, block_size=BLOCK)
    rows = mask.blocks[0]
    num = mask.kv_num_blocks.at[..., 2:].add(1)
    index = jnp.concatenate([mask.kv_indices, jnp.zeros_like(mask.kv_indices[..., :1])], -1)
    wider = dataclasses.replace(mask, kv_num_blocks=num, kv_indices=index)
    assert mask.q_widths[0] < rows
    assert int(wider.q_num_blocks[0, 0, 0]) == rows
    np.testing.assert_array_equal(wider.q_indices[0, 0, 0], np.arange(rows))
    call = prepare(Arguments(*arrays(), block_mask=wider))
    assert call.plan.blocks is not None
    assert call.plan.blocks.partial_t == rows
