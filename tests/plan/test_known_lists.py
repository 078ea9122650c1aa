"""Lists that are known while a call is traced: equal to those that the program computes, and not part of a program that serves others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import masks
from flexjax.block_mask import host_or_program, transpose
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.plan.known_lists import KnownLists

T = 1000


def call(mask_mod=None, **more) -> tuple[KernelPlan, Operands]:
    """The plan and the operands of a call over T tokens in bfloat16, four query heads and two key heads."""
    query, key = jnp.zeros((1, T, 4, 64), jnp.bfloat16), jnp.zeros((1, T, 2, 64), jnp.bfloat16)
    made = prepare(Arguments(query, key, key, mask_mod=mask_mod, **more))
    return made.plan, made.operands


def documents(seed: int) -> np.ndarray:
    """Document ids of T tokens, six documents of random lengths."""
    ends = np.sort(np.random.default_rng(seed).integers(0, T, 5))
    return np.searchsorted(ends, np.arange(T), side="right").astype(np.int32)


def same(host: object, program: object) -> None:
    """Asserts that both trees have the same numbers, and that the first has numpy arrays only."""
    found, expected = jax.tree.leaves(host), jax.tree.leaves(program)
    assert len(found) == len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        assert isinstance(x, np.ndarray)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("rows", [7, 8])
def test_operations_on_the_host_agree_with_those_in_the_program(rows: int, monkeypatch: pytest.MonkeyPatch):
    if rows == 8:  # as on a GPU
        on_gpu = lambda *arrays, cpu, default: default(*arrays)
        monkeypatch.setattr(transpose.lax, "platform_dependent", on_gpu)
    random = np.random.default_rng(0)
    flags = random.random((2, 3, rows, 9)) < 0.4
    same(transpose.lists_of(flags), transpose.lists_of(jnp.asarray(flags)))  # type: ignore[arg-type]
    num, index = transpose.lists_of(flags)  # type: ignore[arg-type]
    index[..., -1] = np.where(num < 9, 40, index[..., -1])  # past the count any number may stand
    on_device = (jnp.asarray(num), jnp.asarray(index))
    same(transpose.flags_of_lists(num, index, 9), transpose.flags_of_lists(*on_device, 9))
    same(
        transpose.transposed(num, index, columns=9, width=rows), transpose.transposed(*on_device, columns=9, width=rows)
    )
    numbers = random.integers(0, 4, (2, 3, 20)).astype(np.int32)
    other = random.integers(0, 9, (2, 3, 20)).astype(np.int32)
    both = (jnp.asarray(numbers), jnp.asarray(other))
    same(host_or_program.largest_first(numbers), host_or_program.largest_first(both[0]))
    same(host_or_program.sort_together((numbers, other)), host_or_program.sort_together(both))
    same(host_or_program.counts_of(numbers, 3), host_or_program.counts_of(both[0], 3))


@pytest.mark.parametrize("shape", [(1, 1, 0, 0), (1, 1, 3, 0), (1, 1, 0, 3)])
def test_empty_lists_on_the_host(shape: tuple[int, ...]) -> None:
    num, index = np.zeros(shape[:3], np.int32), np.zeros(shape, np.int32)
    assert transpose.flags_of_lists(num, index, 5).shape == (*shape[:3], 5)  # type: ignore[arg-type]
    back_num, back = transpose.transposed(num, index, columns=5, width=shape[2])  # type: ignore[arg-type]
    assert back_num.shape == (1, 1, 5)
    assert back.shape == (1, 1, 5, shape[2])
    assert host_or_program.counts_of(index, 2).shape == (*shape[:3], 2)  # type: ignore[arg-type]


def test_known_lists_are_equal_if_their_numbers_are():
    a, b = np.arange(6, dtype=np.int32), np.arange(6, dtype=np.int32)
    one, same_one = KnownLists((a, None), fixed=True), KnownLists((b, None), fixed=True)
    assert one == same_one
    assert hash(one) == hash(same_one)
    assert one != KnownLists((a.reshape(2, 3), None), fixed=True)
    assert one != KnownLists((None, a), fixed=True)
    assert one != KnownLists((a, None), fixed=False)
    assert one != KnownLists((a + 1, None), fixed=True)
    assert "KnownLists(" in repr(one)


def test_a_program_outside_jit_serves_other_captured_arrays():
    first, second = (call(masks.document(documents(seed)))[0] for seed in (1, 2))
    assert first != second
    assert first.blocks is not None
    assert second.blocks is not None
    widths = [dataclasses.replace(plan.blocks, partial_t=0, full_t=0, partial=0, full=0) for plan in (first, second)]
    plans = [dataclasses.replace(plan, blocks=blocks) for plan, blocks in zip((first, second), widths, strict=True)]
    assert plans[0].for_any_lists() == plans[1].for_any_lists()
    causal = call(masks.causal)[0]
    assert causal.for_any_lists() is causal


def test_lists_by_head_and_large_and_traced_lists_are_not_kept():
    by_head = call(lambda b, h, q, kv: q >= kv + h)[0]
    assert by_head.blocks is not None
    assert by_head.blocks.known is None
    plans = []
    jax.eval_shape(lambda ids: plans.append(call(masks.document(ids))[0]), jax.ShapeDtypeStruct((T,), jnp.int32))
    assert plans[0].blocks.known is None
    long = jnp.zeros((1, 1 << 17, 1, 8), jnp.bfloat16)
    large = prepare(Arguments(long, long, long, mask_mod=masks.causal)).plan
    assert large.blocks is not None
    assert large.blocks.known is None
