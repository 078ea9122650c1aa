"""Traced masks of many blocks, whose lists are stored as bits: against dense oracles and against lists."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexjax import BlockMask, create_block_mask, flex_attention
from flexjax.block_mask import classify, transpose
from tests.arrays import array
from tests.marks import some_slow

FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
TRANSPOSED = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
BATCH, HEADS, T, S, BLOCK = 2, 3, 70, 85, (4, 8)
rng = np.random.default_rng(0)
IDS = array(np.sort(rng.integers(0, 4, (BATCH, S))).astype(np.int32))


@pytest.fixture
def in_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All traced masks are large, and are classified and listed in several parts."""
    monkeypatch.setattr(transpose, "LARGE", 0)
    monkeypatch.setattr(transpose, "AT_ONCE", 1 << 6)
    monkeypatch.setattr(classify, "CHUNK_BLOCKS", BATCH * HEADS * 11 * 4)


def documents(ids: jax.Array, exact: bool = False) -> BlockMask:
    mask = lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j]) & (i - j < 40 + 10 * h)
    return create_block_mask(mask, BATCH, HEADS, T, S, block_size=BLOCK, exact=exact)


@settings(max_examples=200 if settings().max_examples > 100 else 10, deadline=None)
@given(
    lead=st.sampled_from([(1, 1), (2, 3)]), rows=st.sampled_from([1, 31, 64, 70]), columns=st.sampled_from([1, 32, 33, 70]),
    share=st.sampled_from([0.0, 0.1, 0.9, 1.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_lists_of_bits(lead: tuple[int, int], rows: int, columns: int, share: float, seed: int) -> None:
    flags = np.random.default_rng(seed).random((*lead, rows, columns)) < share
    bits = transpose.bits_of(jnp.asarray(flags))
    assert bits.shape == (*lead, rows, -(-columns // 32))
    np.testing.assert_array_equal(transpose.flags_of_bits(bits, columns), flags)
    np.testing.assert_array_equal(transpose.counts_of_bits(bits), flags.sum(-1))
    turned = flags.swapaxes(-1, -2)
    np.testing.assert_array_equal(transpose.flags_of_bits(transpose.transposed_bits(bits, columns), rows), turned)
    lists = transpose.lists_of_bits(bits, columns)
    for found, want in zip(lists, transpose.lists_of(flags), strict=True):  # pyright: ignore[reportArgumentType]
        np.testing.assert_array_equal(found, want)
    for found, want in zip(transpose.transposed(*lists, columns, rows), transpose.lists_of(turned), strict=True):  # pyright: ignore[reportArgumentType]
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("exact", some_slow([False, True], (True,)))
@pytest.mark.usefixtures("in_bits")
def test_a_mask_in_bits_has_the_lists_of_the_known_mask(exact: bool) -> None:
    """Its four lists, the transposed ones, its pictures and its parts; also from inside of jit and vmap."""
    want, mask = documents(IDS, exact), jax.jit(documents, static_argnums=1)(IDS, exact)
    assert mask.in_bits
    assert not want.in_bits
    assert [x.shape[-1] for x in jax.tree.leaves(mask)[:2]] == [1, 1]
    inside = jax.jit(lambda m: [getattr(m, f) for f in (*FIELDS, *TRANSPOSED)])(mask)
    for name, found in zip((*FIELDS, *TRANSPOSED), inside, strict=True):
        np.testing.assert_array_equal(found, getattr(mask, name))
    for num, index in zip((*FIELDS, *TRANSPOSED)[::2], (*FIELDS, *TRANSPOSED)[1::2], strict=True):
        listed = [
            np.where(np.arange(width) < np.asarray(getattr(m, num))[..., None], getattr(m, index)[..., :width], -1)
            for m in (mask, want)
            for width in [min(getattr(mask, index).shape[-1], getattr(want, index).shape[-1])]
        ]
        np.testing.assert_array_equal(getattr(mask, num), getattr(want, num))
        np.testing.assert_array_equal(*listed)
    assert mask.as_made
    assert not mask.lists_decide
    assert (mask.shape, mask.sparsity(), mask.list_widths) == (want.shape, want.sparsity(), (11, 11))
    np.testing.assert_array_equal(mask.to_mask(), want.to_mask())
    assert repr(mask) == repr(want)
    assert mask.to_string() == want.to_string()
    np.testing.assert_array_equal(mask[1, :, 3:7].to_mask(), want[1, :, 3:7].to_mask())
    np.testing.assert_array_equal(jax.jit(lambda m: m[:, 2, 5].to_mask())(mask), want[:, 2, 5].to_mask())


@pytest.mark.usefixtures("in_bits")
def test_a_mask_in_bits_as_a_pytree() -> None:
    mask = jax.jit(documents)(IDS)
    types = jax.eval_shape(documents, IDS)
    assert types.kv_indices.shape == mask.kv_indices.shape
    assert repr(types) == repr(mask).split(", sparsity")[0] + ", traced)"
    assert "bits=" in repr(jax.tree.map(lambda _: 0, mask))
    stack = jax.vmap(documents)(jnp.stack([IDS, IDS[::-1]]))
    assert stack.in_bits
    assert stack.list_dims == (2, BATCH, HEADS, 18)
    one = jax.tree.map(lambda x: x[1], stack)
    np.testing.assert_array_equal(one.to_mask(), documents(IDS[::-1]).to_mask())
    fewer = dataclasses.replace(mask, full_kv_num_blocks=mask.full_kv_num_blocks * 0)
    assert not fewer.in_bits
    assert fewer.lists_decide
    again = jax.tree.unflatten(jax.tree.structure(fewer), jax.tree.leaves(fewer))
    np.testing.assert_array_equal(again.full_kv_num_blocks, 0)
    np.testing.assert_array_equal(again.kv_indices, mask.kv_indices)


@pytest.mark.parametrize("way", ["jit", "vmap", "scan"])
def test_attention_is_the_same_from_bits_and_from_lists(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results and the gradients, bit for bit; a mask made outside of the layers is stored for the backward pass."""
    q = array(rng.standard_normal((BATCH, T, HEADS, 8)).astype(np.float32))
    k, v = (array(rng.standard_normal((BATCH, S, HEADS, 8)).astype(np.float32)) for _ in "kv")

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        mask = documents(ids)
        if way == "vmap":
            out = jax.vmap(lambda q: flex_attention(q, k, v, block_mask=mask))(jnp.stack([q, 2 * q]))
        elif way == "scan":
            out = jax.lax.scan(lambda x, _: (flex_attention(x, k, v, block_mask=mask), None), q, None, length=2)[0]
        else:
            out = flex_attention(q, k, v, block_mask=mask)
        return jnp.sum(out * out[..., ::-1])

    results = []
    for large in (1 << 18, 0):
        monkeypatch.setattr(transpose, "LARGE", large)
        results.append(jax.jit(jax.value_and_grad(lambda *x: loss(*x), (0, 1, 2)))(q, k, v, IDS))
    for found, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(found, want)


def large_documents(length: int) -> tuple[Callable, jax.ShapeDtypeStruct]:
    mask = lambda ids: create_block_mask(
        lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), None, None, length, length, block_size=16
    )
    return mask, jax.ShapeDtypeStruct((length,), jnp.int32)


def test_bytes_and_operations_grow_as_the_blocks() -> None:
    """A mask of 16 times the blocks: its arrays, what making it stores beside them, and what it computes."""
    stored, temporary, computed = [], [], []
    for length in (1 << 14, 1 << 16):
        make, ids = large_documents(length)
        blocks = (length // 16) ** 2
        stored.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make, ids))))
        compiled = jax.jit(make).lower(ids).compile()
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        assert memory is not None
        assert cost is not None
        temporary.append(memory.temp_size_in_bytes)
        computed.append(cost["flops"] / blocks)
        assert stored[-1] <= blocks / 4 + 4 * length
        assert temporary[-1] <= 24 * min(blocks, classify.CHUNK_BLOCKS) + 2 * stored[-1]
    assert computed[1] <= 1.2 * computed[0]
