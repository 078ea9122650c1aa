"""`Origin.documents`: a packed document gives what it gives alone, on every backend, with its gradients; bitwise if invariant."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, Origin, flex_attention, masks, paged
from tests.arrays import array
from tests.door.same_bits import Problem, bits
from tests.marks import some_slow

OFFSETS = np.array([0, 70, 70, 203, 260], np.int32)  # one document of no tokens; then tokens of none
T = 290
AUX = flexjax.AuxRequest(lse=True)


def inputs(T: int = T, B: int = 1) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [array(rng.standard_normal((B, T, n, 16)), np.float32) for n in (4, 2, 2)]


def score_mod(table: jax.Array) -> Any:
    return lambda s, b, h, q, kv: s + table[h, jnp.clip(q - kv, 0, 63)] + 0.01 * kv


@functools.partial(jax.jit, static_argnames=("mask_mod", "options", "implementation"))
def attend(
    q: Any,
    k: Any,
    v: Any,
    table: Any,
    offsets: Any,
    mask_mod: Any = masks.causal,
    options: Any = None,
    implementation: Any = None,
) -> Any:
    origin = None if offsets is None else Origin(documents=offsets)
    keywords = {"mask_mod": mask_mod, "origin": origin, "kernel_options": options, "implementation": implementation}
    return flex_attention(q, k, v, score_mod=score_mod(table), return_aux=AUX, **keywords)


TABLE = np.asarray(np.random.default_rng(1).standard_normal((4, 64)), np.float32)


def alone(q: Any, k: Any, v: Any, table: Any, mask_mod: Any) -> Any:
    """Each document by a call of its own, by the dense reference; 0 and -inf outside."""
    out, lse = jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf)
    for begin, end in itertools.pairwise(OFFSETS):
        if begin == end:
            continue
        cut = [x[:, begin:end] for x in (q, k, v)]
        o, aux = flex_attention(
            *cut, score_mod=score_mod(table), mask_mod=mask_mod, return_aux=AUX, implementation="reference"
        )
        out, lse = out.at[:, begin:end].set(o), lse.at[:, begin:end].set(aux.lse)
    return out, lse


def loss(found: Any) -> Any:
    out, lse = found
    return (out**2).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()


ROWS = [("xla", "causal"), ("xla", "none"), ("xla", "window"), ("reference", "causal"), ("xla, invariant", "causal")]
MASKS = {"causal": masks.causal, "none": None, "window": masks.sliding_window(30)}


@pytest.mark.parametrize(("backend", "mask"), some_slow(ROWS, [("xla", "causal"), ("reference", "causal")]))
def test_documents_give_what_they_give_alone(backend: str, mask: str) -> None:
    given = (*inputs(), jnp.asarray(TABLE))
    options = KernelOptions(invariant=True) if "invariant" in backend else None
    kind = {"mask_mod": MASKS[mask], "options": options, "implementation": backend.split(",")[0]}

    def packed(*x: Any) -> Any:
        out, aux = attend(*x, jnp.asarray(OFFSETS), **kind)
        return out, aux.lse

    dense = lambda *x: alone(*x, mask_mod=MASKS[mask])
    value = lambda f: jax.jit(lambda *x: (f(*x), jax.grad(lambda *y: loss(f(*y)), argnums=(0, 1, 2, 3))(*x)))
    (found, gradients), (want, want_gradients) = value(packed)(*given), value(dense)(*given)
    for x, y in zip((*found, *gradients), (*want, *want_gradients), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5)


def test_invariant_documents_have_their_bits_alone() -> None:
    q, k, v = inputs()
    table, options = jnp.asarray(TABLE), KernelOptions(invariant=True)
    out, aux = attend(q, k, v, table, jnp.asarray(OFFSETS), options=options)  # traced
    for begin, end in itertools.pairwise(OFFSETS):
        if begin == end:
            continue
        one, own = attend(*(x[:, begin:end] for x in (q, k, v)), table, None, options=options)
        assert np.array_equal(bits(np.asarray(out[:, begin:end])), bits(np.asarray(one)))
        assert np.array_equal(bits(np.asarray(aux.lse[:, begin:end])), bits(np.asarray(own.lse)))
    assert not np.asarray(out[:, 260:]).any()
    assert np.isneginf(aux.lse[:, 260:]).all()


@pytest.mark.slow
def test_rows_and_copies_have_documents_of_their_own() -> None:
    q, k, v = inputs(100, 3)
    offsets = np.array([[0, 40, 100], [0, 100, 100], [0, 1, 99]], np.int32)
    table, options = jnp.asarray(TABLE), KernelOptions(invariant=True)
    out, aux = attend(q, k, v, table, offsets, options=options)
    one = lambda q, k, v, o: attend(q[None], k[None], v[None], table, o, options=options)
    mapped, mapped_aux = jax.vmap(one)(q, k, v, jnp.asarray(offsets))
    assert np.array_equal(out, mapped[:, 0])
    assert np.array_equal(aux.lse, mapped_aux.lse[:, 0])
    single, _ = attend(q[:1, 40:], k[:1, 40:], v[:1, 40:], table, None, options=options)
    assert np.array_equal(out[:1, 40:], single)


@pytest.mark.skipif(jax.device_count() < 2, reason="tests/conftest.py makes two devices of a CPU")
def test_offsets_of_rows_that_explicit_axes_split() -> None:
    q, k, v = inputs(40, 2)
    offsets = jnp.asarray([[0, 13, 15], [3, 9, 14]], jnp.int32)
    want, _ = attend(q, k, v, jnp.asarray(TABLE), offsets)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
        out, _ = attend(put(q), put(k), put(v), jnp.asarray(TABLE), put(offsets))
    np.testing.assert_allclose(out, want, atol=2e-6)


@pytest.mark.slow
def test_a_mask_of_documents_alone_follows_the_packing() -> None:
    p = Problem(T=260)
    q, k, v = (x[None] for x in p.qkv)
    options = KernelOptions(invariant=True)
    packed = jax.jit(
        lambda q, k, v: flex_attention(
            q,
            k,
            v,
            mask_mod=flexjax.and_masks(masks.causal, masks.document(offsets=OFFSETS[[0, 1, 4]])),
            kernel_options=options,
        )
    )(q, k, v)
    one = jax.jit(lambda q, k, v: flex_attention(q, k, v, mask_mod=masks.causal, kernel_options=options))(
        *(x[:, 70:] for x in (q, k, v))
    )
    assert not np.array_equal(packed[:, 70:], one)


@pytest.mark.parametrize(
    ("origin", "keywords", "message"),
    [
        (
            Origin(documents=np.array([0, 5, 3], np.int32)),
            {},
            "`origin.documents` is offsets from 0 to 5, that fall; expected offsets from 0 to 8 that do not fall. "
            "Fill a short row with its last offset.",
        ),
        (
            Origin(documents=np.array([0.0, 8.0])),
            {},
            "`origin.documents` is float64[2]; expected int32 [n + 1] or [B, n + 1]. "
            "Give where each document begins, and where the last one ends.",
        ),
        (
            Origin(documents=np.zeros((2, 3), np.int32)),
            {},
            "`origin.documents` is int32[2, 3]; expected [n + 1] or [1, n + 1]. "
            "Give where each document begins, and where the last one ends.",
        ),
        (
            Origin(query="end", documents=np.array([0, 8], np.int32)),
            {},
            "`origin.query` is given beside documents; expected 0. Documents say where positions count from.",
        ),
        (
            Origin(documents=np.array([0, 8], np.int32)),
            {"block_mask": flexjax.create_block_mask(masks.causal, None, None, 8, 8)},
            "`block_mask` is given beside origin.documents; expected None. "
            "Pass its mask_mod: which tokens share a document is a part of the mask.",
        ),
    ],
)
def test_what_does_not_fit_is_refused(origin: Origin, keywords: dict, message: str) -> None:
    x = jnp.zeros((1, 8, 2, 8))
    with pytest.raises(ValueError, match="expected") as error:
        flex_attention(x, x, x, origin=origin, **keywords)
    assert str(error.value) == message


def test_a_call_without_tokens() -> None:
    x = jnp.zeros((1, 0, 2, 8))
    out = flexjax.flex_attention(x, x, x, mask_mod=masks.causal, origin=Origin(documents=jnp.zeros(2, jnp.int32)))
    assert out.shape == x.shape


def test_a_block_mask_takes_no_documents() -> None:
    with pytest.raises(ValueError, match="documents") as error:
        flexjax.create_block_mask(masks.causal, None, None, 8, 8, origin=Origin(documents=np.array([0, 8], np.int32)))
    assert str(error.value) == (
        "`origin.documents` is given where it is not taken; expected None. Pass it to flex_attention, with mask_mod; "
        "its tokens are not split over devices by context=."
    )


def test_context_and_pages_take_no_documents() -> None:
    origin = Origin(documents=np.array([0, 8], np.int32))
    x = jnp.zeros((1, 8, 2, 8))
    with (
        jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))),
        pytest.raises(ValueError, match="documents"),
    ):
        flex_attention(x, x, x, mask_mod=masks.causal, origin=origin, context=flexjax.ContextParallel("x"))
    cache, table = paged.empty(4, 8, 2, 8, dtype=jnp.float32), paged.table(1, 1, 4, 8)
    with pytest.raises(ValueError, match="documents") as error:
        flexjax.paged_attention(x, cache, table, origin=origin)
    assert str(error.value) == "`origin.documents` is given; expected None. Each request is a document; give requests."
