"""paged_attention over devices: in jax.shard_map by heads or requests it is the whole call; other splits are refused or warned of."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import FallbackWarning, Origin, paged
from tests.cases.small import quick_jit
from tests.paged.test_paged_attention import N, assert_same, draw, served

Array = jax.Array
CACHE, TABLE = served([21, 8, 3, 13], 8, hole=0.0)
Q = draw(3, 4, 2, N, 8)
SLOPES, BIASES = draw(4, N), draw(5, 4)


def mod(score: Array, b: Array, h: Array, q: Array, kv: Array) -> Array:
    return score - SLOPES[h] * 0.1 * (q - kv) + BIASES[b] * (kv % 3)


def mask(b: Array, h: Array, q: Array, kv: Array) -> Array:
    return (q >= kv) & ((q - kv < 9 + b) | (h == 3))


@pytest.mark.slow
def test_by_heads_and_by_requests() -> None:
    """With mods that read both, once by the heads over one axis and once by the requests."""
    whole = quick_jit(lambda *x: flexjax.paged_attention(*x, score_mod=mod, mask_mod=mask))(Q, CACHE, TABLE)
    for axis, size in (("heads", N // 2), ("requests", 2)):
        mesh = jax.make_mesh((2,), (axis,), axis_types=(AxisType.Auto,))
        heads = axis == "heads"
        pool, rows = (P(None, None, axis), P()) if heads else (P(), P(axis))
        specs = (
            P(None, None, axis) if heads else P(axis),
            paged.PagedCache(pool, pool),
            paged.PageTable(rows, rows, P(), 8),
        )  # type: ignore[arg-type]

        def share(
            q: Array, cache: paged.PagedCache, table: paged.PageTable, axis: str = axis, size: int = size
        ) -> Array:
            first = jax.lax.axis_index(axis) * size
            origin = Origin(head=first) if axis == "heads" else Origin(batch=first)
            return flexjax.paged_attention(q, cache, table, score_mod=mod, mask_mod=mask, origin=origin)

        split = jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=specs[0])
        assert_same(quick_jit(split)(Q, CACHE, TABLE), whole)


@pytest.mark.slow
def test_an_origin_of_ints_with_ragged_queries_and_a_prefix() -> None:
    """The request of a tile, and of each query of a tile of a prefix, is one of the whole problem too."""
    moved = lambda score, b, h, q, kv: mod(score, b - 1, h - 2, q, kv)
    shared = flexjax.SharedPrefix(jnp.asarray([0, -1, -1, -1]), TABLE.pages[:1], jnp.asarray([11]))
    call = dict(cu_q_lens=jnp.asarray([0, 2, 3, 4, 6]), shared=shared)
    flat = Q.reshape(-1, N, 8)[:6]
    got = quick_jit(
        lambda q: flexjax.paged_attention(q, CACHE, TABLE, score_mod=moved, origin=Origin(batch=1, head=2), **call)  # type: ignore[arg-type]
    )(flat)
    assert_same(got, quick_jit(lambda q: flexjax.paged_attention(q, CACHE, TABLE, score_mod=mod, **call))(flat))  # type: ignore[arg-type]


def test_explicit_axes_are_refused() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    split = jax.device_put(Q, NamedSharding(mesh, P("x")))
    message = (
        "paged_attention does not split its work over explicit mesh axes. Use jax.shard_map over the requests or the heads, with "
        "origin=Origin(batch=..., head=...) for mods that read them."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        flexjax.paged_attention(split, CACHE, TABLE)


def test_automatic_axes_are_gathered_with_a_warning() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    split = jax.device_put(Q, NamedSharding(mesh, P(None, None, "x")))
    message = (
        "Every device computes all of a call, and gathers first what is split: keys in pages have no partitioning rule. Use "
        "jax.shard_map over the requests or the heads, with origin=Origin(batch=..., head=...) for mods that read them, to have the "
        "batch and the heads split."
    )
    with pytest.warns(FallbackWarning, match=re.escape(message)):
        got = quick_jit(lambda *x: flexjax.paged_attention(*x, score_mod=mod))(split, CACHE, TABLE)
    assert_same(got, flexjax.paged_attention(np.asarray(Q), CACHE, TABLE, score_mod=mod))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        (3, "`origin` is an int; expected a flexjax.Origin or None. None starts at 0."),
        (
            Origin(query="end"),
            "`origin.query` is a str; expected 0: positions count in the request. Give batch and head alone.",
        ),
        (
            Origin(key=2),
            "`origin.key` is an int; expected 0: positions count in the request. Give batch and head alone.",
        ),
        (
            Origin(head=-1),
            "`origin.head` is -1; expected an int that is not negative, or an int32 scalar. Pass one number.",
        ),
        (
            Origin(batch=jnp.zeros(2, jnp.int32)),
            "`origin.batch` is int32[2]; expected an int that is not negative, or an int32 scalar. Pass one number.",
        ),
    ],
)
def test_messages(origin: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        flexjax.paged_attention(Q, CACHE, TABLE, origin=origin)  # type: ignore[arg-type]
    assert str(caught.value) == message
