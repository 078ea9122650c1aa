"""Queries and keys that do not exist, by query_seq_lengths and key_value_seq_lengths; the table of cases has two rows of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import AuxRequest, Origin, masks
from flexjax.backends import target as targets
from flexjax.backends.xla.block_loop import row_at, walk
from flexjax.backends.xla.tile_sizes import choose_tile_sizes
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.plan.kernel_plan import Lengths
from tests.arrays import array
from tests.cases.small import by_definition, quick_jit

Array = jax.Array
B, T, S, N, M, D, BLOCK = 3, 24, 40, 2, 1, 8, 8
MASK = flexjax.create_block_mask(masks.causal, None, None, T, S, block_size=BLOCK)


def normal(*shape: int, seed: int = 0) -> Array:
    return array(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


Q, K, V = normal(B, T, N, D), normal(B, S, M, D, seed=1), normal(B, S, M, D, seed=2)
BIAS, SINKS, TANGENT = normal(T, S), normal(N), normal(B, T, N, D, seed=3)


def filled(x: Array, lengths: Array, value: float) -> Array:
    """x [B, tokens, ..] with `value` in the slots from the lengths on."""
    exists = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(exists.reshape(*exists.shape, *[1] * (x.ndim - 2)), x, value)


def with_gradients(
    q: Array, k: Array, v: Array, d_out: Array, queries: Array, keys: Array, **options: Any
) -> list[Array]:
    """out, lse and max_scores, and the gradients of query, key, value, a pair bias and the sinks."""

    def results(q: Array, k: Array, v: Array, bias: Array, sinks: Array) -> tuple[Array, Array, Array]:
        out, aux = flexjax.flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + bias[i, j], sinks=sinks, query_seq_lengths=queries,
            key_value_seq_lengths=keys, return_aux=AuxRequest(lse=True, max_scores=True), implementation="xla", **options,
        )  # fmt: skip
        assert aux.lse is not None
        assert aux.max_scores is not None
        return out, aux.lse, aux.max_scores

    made, pull = jax.vjp(results, q, k, v, BIAS, SINKS)
    return [*made, *pull((d_out, d_out[..., 0], jnp.zeros_like(made[2])))]


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"block_mask": MASK}], ids=["dense", "blocks"]
)
def test_what_the_slots_hold_reaches_nothing(options: dict[str, Any]) -> None:
    """Bit for bit; also the cotangents of rows that do not exist. One program serves all lengths."""
    traces = []

    def run(value: Array, queries: Array, keys: Array) -> list[Array]:
        traces.append(1)
        q, d_out = (filled(x, queries, value) for x in (Q, TANGENT))
        return with_gradients(q, filled(K, keys, value), filled(V, keys, value), d_out, queries, keys, **options)

    compiled = quick_jit(run)
    for queries, keys in (((24, 9, 0), (40, 7, 8)), ((1, 8, 23), (0, 1, 9))):
        ends = jnp.asarray(queries), jnp.asarray(keys)
        want = compiled(0.0, *ends)
        for x, what in zip(want[3:6], ends[:1] + ends[1:] * 2, strict=True):
            np.testing.assert_array_equal(x, filled(x, what, 0.0))
        for x, low in zip(want[:3], (0.0, -jnp.inf, -jnp.inf), strict=True):
            np.testing.assert_array_equal(x, filled(x, ends[0], low))
        for value in (jnp.nan, jnp.inf, 1e30):
            for got, x in zip(compiled(value, *ends), want, strict=True):
                np.testing.assert_array_equal(got, x)
    assert len(traces) == 1


@pytest.mark.slow
def test_lengths_around_a_block_are_masks() -> None:
    """Of 0, 1, a block less or more by one, all, negative and more than all."""
    options = {"block_mask": MASK}
    compiled = quick_jit(functools.partial(with_gradients, Q, K, V, TANGENT, **options))

    @quick_jit
    def masked(keys: Array) -> list[Array]:
        both = lambda b, h, q, kv: (q >= kv) & (kv < keys[b])
        block = flexjax.create_block_mask(both, B, None, T, S, block_size=BLOCK)
        return with_gradients(Q, K, V, TANGENT, jnp.full(B, T), jnp.full(B, S), block_mask=block)

    for keys in ((0, 1, BLOCK - 1), (BLOCK, BLOCK + 1, S), (-5, 2 * BLOCK, S + 5)):
        ends = jnp.asarray(keys)
        for got, want in zip(compiled(jnp.full(B, T + 1), ends), masked(ends), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6)


def test_one_number_for_all_and_integers_of_other_widths() -> None:
    run = lambda keys: flexjax.flex_attention(Q, K, V, key_value_seq_lengths=keys, implementation="xla")
    want = run(jnp.full(B, 9, jnp.int32))
    for keys in (9, np.int64(9), jnp.asarray(9, jnp.uint8), np.full(B, 9, np.int8)):
        np.testing.assert_array_equal(run(keys), want)


@pytest.mark.parametrize("queries", [None, (24, 5, 0)], ids=["all queries", "queries"])
def test_the_last_query_lies_at_the_last_key(queries: tuple[int, ...] | None) -> None:
    keys = (40, 31, 7)  # fewer keys than queries: both count from 0
    ends = (T,) * B if queries is None else queries
    run = lambda **options: flexjax.flex_attention(Q, K, V, mask_mod=masks.causal, implementation="xla", **options)
    got = run(
        origin=Origin(query="end"),
        key_value_seq_lengths=jnp.asarray(keys),
        query_seq_lengths=None if queries is None else jnp.asarray(queries),
    )
    query, key, value, got = map(np.asarray, (Q, K, V, got))
    for b, (t, s) in enumerate(zip(ends, keys, strict=True)):
        if t:
            part = (query[b : b + 1, :t], key[b : b + 1, :s], value[b : b + 1, :s])
            ahead = max(s - t, 0)
            mask = lambda b, h, q, kv, ahead=ahead: q + ahead >= kv
            want = by_definition(*part, mask_mod=mask)
            np.testing.assert_allclose(got[b : b + 1, :t], want, atol=2e-6)


def test_an_origin_at_the_end_of_the_arrays() -> None:
    run = lambda origin: flexjax.flex_attention(Q, K, V, mask_mod=masks.causal, implementation="xla", origin=origin)
    np.testing.assert_array_equal(run(Origin(query="end")), run(Origin(query=S - T)))
    np.testing.assert_allclose(quick_jit(run)(Origin(query="end")), run(Origin(query=S - T)), atol=1e-6)
    assert repr(Origin(query="end")) == "Origin(query='end')"


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_large_sink_beside_queries_that_do_not_exist(implementation: str) -> None:
    """exp(100) is infinite in float32, and a query that does not exist has lse -inf and weight exp(sink - 0)."""
    attend = lambda sinks: flexjax.flex_attention(
        Q, K, V, sinks=sinks, query_seq_lengths=jnp.asarray([3, 1, T]), implementation=implementation
    )
    sinks = jnp.full_like(SINKS, 100.0)
    got = jax.grad(lambda sinks: (attend(sinks).astype(jnp.float32) ** 2).sum())(sinks)
    np.testing.assert_allclose(got, jnp.zeros_like(got), atol=1e-6)


def test_mapped_lengths_and_sinks() -> None:
    """Rows that do not exist keep lse -inf and give no gradient to sinks that differ between copies."""
    queries, keys = array([[24, 3, 0], [5, 8, 20]]), array([[40, 9, 1], [8, 0, 17]])
    sinks = jnp.stack([SINKS, 2 * SINKS])

    def gradients(sinks: Array, queries: Array, keys: Array) -> tuple[Array, tuple[Array, Array]]:
        def loss(sinks: Array) -> tuple[Array, tuple[Array, Array]]:
            out, aux = flexjax.flex_attention(
                Q, K, V, sinks=sinks, query_seq_lengths=queries, key_value_seq_lengths=keys, implementation="xla",
                return_aux=AuxRequest(lse=True),
            )  # fmt: skip
            assert aux.lse is not None
            return (out * TANGENT).sum() + jnp.where(jnp.isfinite(aux.lse), aux.lse, 0).sum(), (out, aux.lse)

        return jax.grad(loss, has_aux=True)(sinks)

    got = quick_jit(jax.vmap(gradients))(sinks, queries, keys)
    for i in range(2):
        want = quick_jit(gradients)(sinks[i], queries[i], keys[i])
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a[i], b, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "visits"),
    [({}, [[1, 1, 1], [0, 0, 0], [1, 0, 0]]), ({"block_mask": MASK}, [[1, 2, 3], [0, 0, 0], [1, 0, 0]])],
    ids=["dense", "blocks"],
)
def test_tiles_past_a_length_are_not_visited(options: dict[str, Any], visits: list[list[int]]) -> None:
    """Visited key blocks of each batch entry and query block."""
    ends = Lengths(jnp.asarray([T, T, BLOCK]), jnp.asarray([S, 0, BLOCK - 1]))
    options = options | {"query_seq_lengths": ends.query, "key_value_seq_lengths": ends.key}
    options["kernel_options"] = flexjax.KernelOptions(
        block_q=BLOCK, block_kv=S if "block_mask" not in options else BLOCK
    )
    call = prepare(Arguments(Q, K, V, **options))
    sizes = choose_tile_sizes(call.plan, targets.default())
    found = []
    for step in range(sizes.steps):
        row = row_at(
            call.plan, sizes, call.operands.lists, jnp.int32(step), call.operands.lengths or Lengths(None, None)
        )
        count = lambda total, visit: total + (1 if visit.valid is None else visit.valid.sum())
        found.append(int(walk(call.plan, sizes, row, count, jnp.int32(0))))
    assert np.reshape(found, (B, -1)).tolist() == visits


def test_messages() -> None:
    wrong = {
        "float32[3]": normal(B),
        "int32[2]": array([1, 2]),
        "True": True,
        "[1, 2, 3]": [1, 2, 3],
    }
    for got, value in wrong.items():
        with pytest.raises(ValueError, match="key_value_seq_lengths") as error:
            flexjax.flex_attention(Q, K, V, key_value_seq_lengths=value)  # type: ignore[arg-type]
        advice = "Reshape or cast it, for example with lengths.astype(jnp.int32)."
        advice = "Pass it through jnp.asarray." if isinstance(value, list) else advice
        assert str(error.value) == (
            f"`key_value_seq_lengths` is {got}; expected an int, or int32[3], one for each batch entry. {advice}"
        )
