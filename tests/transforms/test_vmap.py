"""vmap against a Python loop: values, per-example gradients, gradients and tangents of mapped calls; and that it folds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks
from tests.arrays import array
from tests.cases.small import PROBLEMS, Arrays, N, S, T, launches, quick_jit

COPIES = 3
QKV = ("query", "key", "value")
READS = ("row", "column", "diagonal", "gate", "pair")

# problem, the arrays that are mapped
# fmt: off
ROWS = [
    ("causal", QKV), ("blocks", ("query",)), ("blocks", ("key", "value")), ("reads", (*QKV, *READS)), ("reads", READS),
    ("reads", ("gate",)), ("documents", QKV), ("sinks", ("sinks",)), ("sinks", (*QKV, "sinks")), ("dropout", QKV),
    ("extra", ("key_extra", "query")), ("bnth", ("sinks", "value")), ("wide_value", ("scale",)),
]
# fmt: on
EVERYDAY = {5, 8, 10}
TABLE = [
    pytest.param(name, mapped, id=f"{name}-{'+'.join(mapped)}", marks=[] if i in EVERYDAY else [pytest.mark.slow])
    for i, (name, mapped) in enumerate(ROWS)
]


def copies(name: str, mapped: tuple[str, ...]) -> tuple[Arrays, dict[str, int | None]]:
    """Arrays, and in_axes: the mapped ones have an axis of COPIES, first or last."""
    problem = PROBLEMS[name]
    stacks = [problem.arrays(seed) for seed in range(COPIES)]
    axes: dict[str, int | None] = dict.fromkeys(stacks[0])
    for place, name in enumerate(mapped):
        axes[name] = 0 if place % 2 == 0 else stacks[0][name].ndim
    arrays = {n: x if axes[n] is None else np.stack([s[n] for s in stacks], axes[n]) for n, x in stacks[0].items()}
    return arrays, axes


def looped(function: Callable, arrays: Arrays, axes: dict[str, int | None], *rest: Any, numpy: Any = np) -> Any:
    """What vmap over `arrays` must give, by a loop; the other arguments are mapped along their first axis."""
    outs = []
    for i in range(COPIES):
        one = {n: x if axes[n] is None else numpy.take(x, i, axes[n]) for n, x in arrays.items()}
        outs.append(function(one, *jax.tree.map(lambda x, i=i: x[i], rest)))
    return jax.tree.map(lambda *x: numpy.stack(x), *outs)


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def folds(function: Callable, *arguments: Any) -> None:
    """Every primitive of attention is launched at most once, outside any loop; so are the lists of a traced mask."""
    names = launches(jax.make_jaxpr(function)(*arguments).jaxpr)
    assert names.count("flexjax_forward") == 1
    assert set(names) <= {"flexjax_forward", "flexjax_backward", "flexjax_tangent", "flexjax_block_lists"}
    assert len(names) == len(set(names))
    assert not {"flexjax_backward", "flexjax_tangent"} <= set(names)


@pytest.mark.parametrize(("name", "mapped"), TABLE)
def test_values_and_gradients_of_each_copy(name: str, mapped: tuple[str, ...]) -> None:
    """Unmapped arrays have a gradient of their own in every copy."""
    problem = PROBLEMS[name]
    with jax.enable_x64(True):
        arrays, axes = copies(name, mapped)
        each = jax.value_and_grad(problem.loss)
        over = jax.vmap(each, in_axes=(axes,))
        folds(over, arrays)
        close(quick_jit(over)(arrays), looped(quick_jit(each), arrays, axes))


@pytest.mark.parametrize(("name", "mapped"), [TABLE[4], TABLE[10]])
def test_gradient_of_a_mapped_call(name: str, mapped: tuple[str, ...]) -> None:
    problem = PROBLEMS[name]
    with jax.enable_x64(True):
        arrays, axes = copies(name, mapped)
        total = lambda a: jax.vmap(problem.loss, in_axes=(axes,))(a).sum()
        each = jax.jit(problem.loss)
        one_by_one = lambda a: looped(each, a, axes, numpy=jnp).sum()
        close(quick_jit(jax.grad(total))(arrays), quick_jit(jax.grad(one_by_one))(arrays))


@pytest.mark.parametrize(("name", "mapped"), [TABLE[4], TABLE[8], TABLE[0]])
def test_tangent_of_a_mapped_call(name: str, mapped: tuple[str, ...]) -> None:
    """All tangents are mapped, whether their arrays are or not."""
    problem = PROBLEMS[name]
    with jax.enable_x64(True):
        arrays, axes = copies(name, mapped)
        tangents = jax.tree.map(lambda *x: np.stack(x), *(problem.arrays(50 + i) for i in range(COPIES)))
        push = lambda a, t: jax.jvp(problem.run, (a,), (t,))
        over = jax.vmap(push, in_axes=(axes, 0))
        folds(over, arrays, tangents)
        close(quick_jit(over)(arrays, tangents), looped(quick_jit(push), arrays, axes, tangents))


@pytest.mark.slow
def test_nested() -> None:
    problem = PROBLEMS["reads"]
    with jax.enable_x64(True):
        arrays = problem.arrays()
        queries = np.stack([problem.arrays(i)["query"] for i in range(2)])
        gates = np.stack([problem.arrays(i)["gate"] for i in range(3)], axis=-1)
        one = lambda q, g: jax.value_and_grad(lambda g: problem.loss(arrays | {"query": q, "gate": g}))(g)
        over = jax.vmap(jax.vmap(one, (None, 1)), (0, None))
        folds(over, queries, gates)
        each = quick_jit(one)
        want = [[each(q, gates[:, j]) for j in range(3)] for q in queries]
        got = jax.tree.map(np.asarray, quick_jit(over)(queries, gates))
        for i in range(2):
            for j in range(3):
                close(jax.tree.map(lambda x, i=i, j=j: x[i, j], got), want[i][j])


@pytest.mark.slow
def test_hessian_vector_products_of_each_copy() -> None:
    problem = PROBLEMS["sinks"]
    with jax.enable_x64(True):
        arrays, axes = copies("sinks", ("query", "sinks"))
        product = lambda a: jax.jvp(jax.grad(problem.loss), (a,), (jax.tree.map(jnp.cos, a),))[1]
        close(quick_jit(jax.vmap(product, in_axes=(axes,)))(arrays), looped(quick_jit(product), arrays, axes))


# ------------------------------------------------------------------- what is not a floating array


def _loop(function: Callable, *arguments: Any) -> np.ndarray:
    size = jax.tree.leaves(arguments)[0].shape[0]
    key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    arguments = jax.tree.map(lambda x: x if key(x) else np.asarray(x), arguments)
    return np.stack([function(*jax.tree.map(lambda x, i=i: x[i], arguments)) for i in range(size)])


def _call(**keywords: Any) -> jax.Array:
    arrays = PROBLEMS["plain"].arrays()
    return flexjax.flex_attention(arrays["query"], arrays["key"], arrays["value"], **keywords)


def test_mapped_block_masks() -> None:
    rng = np.random.default_rng(0)
    ids = array(np.sort(rng.integers(0, 3, (COPIES, 2, S)), -1), jnp.int32)
    make = lambda ids: flexjax.create_block_mask(masks.document(ids[:, :T], ids), 2, None, T, S, block_size=4)
    stack = jax.vmap(make)(ids)
    run = lambda mask: _call(block_mask=mask)
    folds(jax.vmap(run), stack)
    got = jax.vmap(run)(stack)
    np.testing.assert_allclose(got, _loop(run, stack), atol=1e-6)
    of_ids = jax.jit(lambda i: _call(mask_mod=masks.document(i[:, :T], i)))
    np.testing.assert_allclose(got, _loop(of_ids, ids), atol=1e-6)


def test_mapped_ids_and_lengths_inside() -> None:
    lengths = array([1, 5, 11], jnp.int32)
    run = lambda n: _call(mask_mod=lambda b, h, q, kv: (kv < n) & (kv <= q + h))
    folds(jax.vmap(run), lengths)
    np.testing.assert_allclose(jax.vmap(run)(lengths), _loop(run, lengths), atol=1e-6)


def test_mapped_integers_in_a_score_mod() -> None:
    offsets = jnp.arange(COPIES * N, dtype=jnp.int32).reshape(COPIES, N)
    run = lambda o: _call(score_mod=lambda s, b, h, q, kv: s + 0.1 * o[h] + b)
    np.testing.assert_allclose(jax.vmap(run)(offsets), _loop(run, offsets), atol=1e-6)


@pytest.mark.parametrize("make", [lambda i: jax.random.key(i), lambda i: jax.random.PRNGKey(i)], ids=["typed", "raw"])
def test_mapped_dropout_keys(make: Callable) -> None:
    keys = jnp.stack([make(i) for i in range(COPIES)])
    run = lambda key: _call(dropout=flexjax.Dropout(0.5, key))
    folds(jax.vmap(run), keys)
    got = jax.vmap(run)(keys)
    np.testing.assert_allclose(got, _loop(run, keys), atol=1e-6)
    assert not np.array_equal(got[0], got[1])


def test_copies_share_a_key_that_is_not_mapped() -> None:
    query = jnp.stack([PROBLEMS["plain"].arrays()["query"]] * 2)
    arrays = PROBLEMS["plain"].arrays()
    run = lambda q: flexjax.flex_attention(
        q, arrays["key"], arrays["value"], dropout=flexjax.Dropout(0.5, jax.random.key(1))
    )
    got = jax.vmap(run)(query)
    np.testing.assert_array_equal(got[0], got[1])


def test_an_axis_of_one_and_of_none() -> None:
    arrays = PROBLEMS["plain"].arrays()
    run = lambda q: flexjax.flex_attention(q, arrays["key"], arrays["value"], mask_mod=lambda b, h, i, j: j <= i + b)
    want = run(arrays["query"])
    np.testing.assert_allclose(jax.vmap(run)(arrays["query"][None])[0], want, atol=1e-6)
    assert jax.vmap(run)(jnp.zeros((0, *arrays["query"].shape))).shape == (0, *want.shape)


def test_max_scores_are_mapped() -> None:
    problem = PROBLEMS["sinks"]
    arrays, _ = copies("sinks", ("sinks",))
    asked = flexjax.AuxRequest(lse=True, max_scores=True)
    run = lambda s: (
        flexjax.flex_attention(arrays["query"], arrays["key"], arrays["value"], sinks=s, return_aux=asked)[1].max_scores
    )
    np.testing.assert_allclose(jax.vmap(run)(arrays["sinks"]), _loop(run, arrays["sinks"]), atol=1e-6)
    assert problem.heads == N
