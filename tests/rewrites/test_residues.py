"""Calls split by residues of their tokens: which are, and that they compute what the whole call does."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flexjax
from flexjax import Origin, masks
from flexjax.analysis.patterns import residue_conjuncts
from flexjax.backends.target import Target
from flexjax.block_mask import transpose
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import PreparedCall, prepare
from flexjax.ir.evaluate_scalars import as_mask_mod
from flexjax.passes.dispatch import choose
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.rewrites.residues import known_lists, merge_rows, split_plan, split_rows
from flexjax.trace.trace_mod import trace_mask_mod
from tests.arrays import array
from tests.cases import CASES
from tests.cases.small import by_definition

CPU = Target("cpu")
RNG = np.random.default_rng(5)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return array(RNG.standard_normal(shape), dtype)


def call(lengths: tuple[int, int] = (512, 512), heads: tuple[int, int] = (2, 1), **arguments: Any) -> PreparedCall:
    arrays = [normal(1, n, h, 8) for n, h in ((lengths[0], heads[0]), (lengths[1], heads[1]), (lengths[1], heads[1]))]
    if arguments.get("layout") == "BNTH":
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    return prepare(Arguments(*arrays, **arguments))


# fmt: off
MODULI: dict[str, tuple[int, Any]] = {
    "window": (4, masks.dilated_window(8, 4)),
    "two_sided": (3, masks.dilated_two_sided_window(8, 2, 3)),
    "keys_first": (4, lambda b, h, q, k: ((k - q) % 4 == 0) & (q >= k)),
    "each_side": (4, lambda b, h, q, k: (q >= k) & (k % 4 == q % 4)),
    "remainder_of_c": (4, lambda b, h, q, k: (q >= k) & (jax.lax.rem(q - k, 4) == 0)),
    "alone": (5, lambda b, h, q, k: (q - k) % 5 == 0),
    "usual": (4, lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0)),
    "two": (6, lambda b, h, q, k: ((q - k) % 6 == 0) & ((q - k) % 4 == 0)),
    "causal": (1, masks.causal),
    "dilation_of_1": (1, masks.dilated_window(8, 1)),
    "shifted": (1, lambda b, h, q, k: (q - k + 1) % 4 == 0),
    "other_remainder": (1, lambda b, h, q, k: (q - k) % 4 == 1),
    "multiple": (1, lambda b, h, q, k: (2 * q - 2 * k) % 4 == 0),
    "sum": (1, lambda b, h, q, k: (q + k) % 4 == 0),
    "other_moduli": (1, lambda b, h, q, k: q % 4 == k % 2),
    "either": (1, masks.strided(4)),
    "not": (1, lambda b, h, q, k: (q - k) % 4 != 0),
}
# fmt: on


@pytest.mark.parametrize("name", MODULI)
def test_the_modulus_is_read_from_the_program(name: str) -> None:
    modulus, mask_mod = MODULI[name]
    program = trace_mask_mod(mask_mod, (2, 2, 64, 64)).program
    assert residue_conjuncts(program)[0] == modulus


TABLE = jnp.zeros(1023)
DILATED = masks.dilated_window(8, 4)
WHOLE: dict[str, dict[str, Any]] = {
    "few_blocks_fewer": {"lengths": (256, 256)},
    "few_queries": {"lengths": (4, 4096)},
    "fewer_keys_than_the_modulus": {"lengths": (512, 3)},
    "diagonal_bias": {"score_mod": lambda s, b, h, q, k: s + TABLE[q - k + 511]},
    "captured": {"mask_mod": flexjax.and_masks(DILATED, lambda b, h, q, k: jnp.zeros(512, bool)[k])},
    "by_head": {"mask_mod": flexjax.and_masks(DILATED, lambda b, h, q, k: (h == 0) | (q > k))},
    "by_residue": {"mask_mod": flexjax.and_masks(DILATED, lambda b, h, q, k: k > 5)},
    "origin": {"origin": Origin(query=4, whole=(1, 2, 516, 512))},
    "lengths": {"key_value_seq_lengths": array([500])},
}


@pytest.mark.parametrize("name", WHOLE)
def test_calls_that_stay_whole(name: str) -> None:
    arguments: dict[str, Any] = {"mask_mod": DILATED} | WHOLE[name]
    plan = call(**arguments).plan
    assert plan.residues is None
    assert choose(plan, None, CPU).steps == ()


def test_lists_of_the_user_stay_whole() -> None:
    one = array(np.ones((1, 1, 4), np.int32))
    lists = flexjax.BlockMask.from_kv_blocks(one, one[..., None] * 0, block_size=128, mask_mod=DILATED, kv_len=512)
    assert call(block_mask=lists).plan.residues is None


@pytest.mark.parametrize("compare", [lambda q, k: q >= k, lambda q, k: k < q + 1, lambda q, k: q - k >= 0])
def test_a_causal_conjunct_in_any_form_is_split(compare: Any) -> None:
    mask_mod = lambda b, h, q, k: compare(q, k) & ((q - k) % 4 == 0)
    made = call((2048, 2048), mask_mod=mask_mod)
    assert made.plan.residues is not None
    assert dense(split_plan(made.plan)).sum() > 0
    q, k, v = (normal(1, 1030, n, 8) for n in (2, 1, 1))
    got, want = (f(q, k, v, mask_mod=mask_mod) for f in (flexjax.flex_attention, by_definition))
    np.testing.assert_allclose(got, want, atol=2e-6)
    other = lambda b, h, q, k: (2 * q >= k) & ((q - k) % 4 == 0)  # says something else of each residue
    assert call((2048, 2048), mask_mod=other).plan.residues is None


def test_replaced_lists_stay_whole() -> None:
    """A split call would visit the blocks of the mask again that the user took off."""
    mask = flexjax.create_block_mask(masks.dilated_window(64, 4), None, None, 2048, 2048)
    fewer = dataclasses.replace(mask, kv_num_blocks=jnp.minimum(mask.kv_num_blocks, 1))
    assert call((2048, 2048), block_mask=mask).plan.residues is not None
    assert call((2048, 2048), block_mask=fewer).plan.residues is None


def dense(plan: KernelPlan) -> np.ndarray:
    """The class of each block of a plan whose mask does not depend on the head, evaluated entry by entry."""
    assert plan.mask is not None
    entry: Any = as_mask_mod(plan.mask, ())
    every = jax.vmap(jax.vmap(jax.vmap(entry, (None, None, None, 0)), (None, None, 0, None)), (None, 0, None, None))
    kept = np.asarray(every(0, jnp.arange(plan.q_heads), jnp.arange(plan.q_len), jnp.arange(plan.kv_len)))
    rows, columns = (range(0, n, 128) for n in kept.shape[1:])
    blocks = [[kept[:, i : i + 128, j : j + 128] for j in columns] for i in rows]
    code = lambda x: transpose.FULL if x.all() else transpose.PARTIAL if x.any() else transpose.EMPTY
    return np.array([[code(block) for block in row] for row in blocks])


@pytest.mark.parametrize("lengths", [(1024, 1024), (1023, 1021), (641, 1030)])
@pytest.mark.parametrize("name", ["window", "alone"])
def test_the_blocks_of_a_residue_are_those_of_its_mask(name: str, lengths: tuple[int, int]) -> None:
    modulus, mask_mod = MODULI[name] if name == "alone" else (4, masks.dilated_window(300, 4))
    plan = call(lengths, (1, 1), mask_mod=mask_mod).plan
    assert plan.residues is not None
    assert plan.residues.modulus == modulus
    lists, made = known_lists(plan), split_plan(plan)
    rows, columns = -(-made.q_len // 128), -(-made.kv_len // 128)
    found = np.zeros((rows, columns), int)
    for num, index, code in ((*lists[:2], transpose.PARTIAL), (*lists[2:], transpose.FULL)):
        if num is not None and index is not None:
            found += code * np.asarray(transpose.flags_of_lists(num, index, columns))[0, 0]
    assert np.array_equal(found, dense(made))


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("length", [12, 13, 15])
def test_rows_split_and_merge(layout: str, length: int) -> None:
    plan = dataclasses.replace(call(mask_mod=DILATED).plan, layout=layout)
    x = normal(2, length, 3, 5)
    given = x if layout == "BTNH" else jnp.swapaxes(x, 1, 2)
    split = split_rows(plan, given, fill=-1.0)
    assert np.array_equal(merge_rows(plan, split, length), given)
    tokens = split if layout == "BTNH" else jnp.swapaxes(split, 1, 2)
    for t in range(-(-length // 4) * 4):
        of_token = np.asarray(tokens)[:, t // 4, t % 4 * 3 : t % 4 * 3 + 3]
        assert np.array_equal(of_token, np.asarray(x)[:, t] if t < length else np.full_like(of_token, -1.0))


@pytest.mark.parametrize("name", ["dilated", "dilated_and_more", "residues"])
def test_the_rows_of_the_table_of_cases_are_split(name: str) -> None:
    case = CASES[name]
    B, N, M, T, S, D, E = case.shape
    q, k, v = (jax.ShapeDtypeStruct((B, n, h, d), jnp.float32) for n, h, d in ((T, N, D), (S, M, D), (S, M, E)))
    mask_mod = {"residues": lambda b, h, i, j: i % 3 == j % 3}.get(name, masks.dilated_window(40, 3))
    assert "split by residues" in flexjax.explain(q, k, v, mask_mod=mask_mod)


def test_a_block_mask_and_vmap_are_split_too() -> None:
    mask = flexjax.create_block_mask(masks.dilated_window(40, 3), None, None, 384, 384)
    x = normal(3, 1, 384, 2, 8)
    attend = lambda x, **how: flexjax.flex_attention(x, x, x, **how).sum()
    got = jax.jit(jax.vmap(jax.grad(lambda x: attend(x, block_mask=mask))))(x)
    reference = jax.jit(jax.grad(lambda x: attend(x, block_mask=mask, implementation="reference")))
    for n in range(3):
        np.testing.assert_allclose(got[n], reference(x[n]), rtol=1e-4, atol=2e-5)
    text = flexjax.explain(x[0], x[0], x[0], block_mask=mask)
    line = "  split by residues: token t is token t // 3 of residue t % 3, 3 x 2 heads of 128 queries and 128 keys, without a copy"
    assert text.count(line) == 1
    assert "blocks visited of each residue 1 of 1 (100.0%)" in text
    odd = flexjax.explain(*(normal(1, 383, 2, 8),) * 3, mask_mod=masks.dilated_window(40, 3))
    assert "3 x 2 heads of 128 queries and 128 keys, in copies of the arrays" in odd


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_split_their_own_heads(kind: AxisType) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    arrays = normal(1, 383, 4, 8), normal(1, 383, 2, 8), normal(1, 383, 4, 8)
    slopes = normal(4) * 0.01

    def loss(q: Any, k: Any, w: Any, slopes: Any, implementation: Any = None) -> Any:
        out = flexjax.flex_attention(
            q, k, k, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j), mask_mod=masks.dilated_window(40, 3),
            implementation=implementation,
        )  # fmt: skip
        return (out * w).sum()

    want = jax.jit(functools.partial(jax.grad(loss, (0, 1, 3)), implementation="reference"))(*arrays, slopes)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, "x"))) for x in arrays]
        step = jax.jit(jax.grad(loss, (0, 1, 3)))
        got = step(*placed, slopes)
        assert "all-gather" not in str(step.lower(*placed, slopes).compile().as_text())
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * float(np.abs(y).max()))
