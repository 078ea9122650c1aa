"""jax.export: serialize, deserialize, call; the gradient too; and ahead-of-time compilation."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import BlockMask, flex_attention
from tests.cases.small import PROBLEMS, assert_same_to_rounding


@pytest.mark.parametrize("name", ["reads", pytest.param("documents", marks=pytest.mark.slow)])
def test_round_trip(name: str) -> None:
    problem = PROBLEMS[name]
    arrays = problem.arrays()
    exported = jax.export.export(jax.jit(problem.run))(arrays)
    assert_same_to_rounding(exported.call(arrays), problem.run(arrays))
    loaded = jax.export.deserialize(bytearray(exported.serialize(vjp_order=1)))
    assert_same_to_rounding(loaded.call(arrays), problem.run(arrays))
    if name == "reads":
        got = jax.grad(lambda a: sum(x.sum() for x in loaded.call(a)))(arrays)
        want = jax.grad(lambda a: sum(x.sum() for x in problem.run(a)))(arrays)
        for array, value in want.items():
            np.testing.assert_allclose(got[array], value, rtol=1e-5, atol=1e-5)


SYMBOLIC = "Export once for each size that you need, and pad the arrays to the nearest one."
NUMBERS = f"expected sizes that are numbers, for which kernels are planned. {SYMBOLIC}"
IN_MOD = "whose size is symbolic; sizes have to be numbers, so export once for each size that you need, and pad the array to the"
# name: (function of query and another array, shape of query, shape of the other, message)
SYMBOLIC_SIZES = {
    "batch": (
        lambda q, x: flex_attention(q, q, q), "n, 12, 2, 8", "1",
        f"`query` is of shape (n, 12, 2, 8) with the symbolic size n; {NUMBERS}",
    ),
    "keys": (
        lambda q, x: flex_attention(q, x, x), "1, 12, 2, 8", "1, n, 2, 8",
        f"`key` is of shape (1, n, 2, 8) with the symbolic size n; {NUMBERS}",
    ),
    "sinks": (
        lambda q, x: flex_attention(q, q, q, sinks=x), "1, 12, 2, 8", "n",
        f"`sinks` is of shape (n) with the symbolic size n; {NUMBERS}",
    ),
    "captured": (
        lambda q, x: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + x[h][i]), "1, 12, 2, 8", "2, n",
        f"`score_mod` cannot be compiled: it reads a captured array of shape (2, n), {IN_MOD} nearest one.",
    ),
    "block mask": (
        lambda q, x: flex_attention(q, q, q, block_mask=of_lists(x)), "1, 12, 2, 8", "1, 1, 3, n",
        f"`block_mask` is of shape (1, 1, 3, n) in kv_indices with the symbolic size n; {NUMBERS}",
    ),
}  # fmt: skip


def of_lists(x: jax.Array) -> BlockMask:
    count = jnp.ones((1, 1, 3), int)
    return BlockMask.from_kv_blocks(count, x.astype(int), block_size=4, kv_len=12)


@pytest.mark.parametrize("what", SYMBOLIC_SIZES)
def test_symbolic_sizes_are_refused(what: str) -> None:
    function, query, other, message = SYMBOLIC_SIZES[what]
    scope = jax.export.SymbolicScope()
    shapes = [jax.ShapeDtypeStruct(jax.export.symbolic_shape(s, scope=scope), jnp.float32) for s in (query, other)]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.export.export(jax.jit(function))(*shapes)


def test_what_is_computed_of_a_symbolic_size_outside_is_taken() -> None:
    (count,) = jax.export.symbolic_shape("n")
    query, table = jax.random.normal(jax.random.key(0), (1, 12, 2, 8)), jnp.arange(5.0)
    attend = lambda q, x: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * jnp.sum(x))
    shape = jax.ShapeDtypeStruct((count,), table.dtype)
    exported = jax.export.export(jax.jit(attend))(jax.ShapeDtypeStruct(query.shape, query.dtype), shape)
    np.testing.assert_allclose(exported.call(query, table), attend(query, table), atol=2e-6)


def test_lower_and_compile_from_shapes() -> None:
    problem = PROBLEMS["causal"]
    arrays = problem.arrays()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    compiled = jax.jit(problem.run).lower(shapes).compile()
    assert_same_to_rounding(compiled(arrays), problem.run(arrays))
