"""Calls with `tolerance=`: against the same call without, in the bounds of the contract, on all paths of flex_attention."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import AuxRequest, masks, mods
from flexjax.block_mask.transpose import LARGE
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow

T, N, M, D, BLOCK = 256, 4, 2, 16, 32
TOLERANCE = 2.0**-24
RNG = np.random.default_rng(0)
Q, K, V, G = (array(RNG.standard_normal((2, T, n, D)), jnp.float32) for n in (N, M, M, N))
SLOPES = array([0.3, 0.5, 1.0, 2.0], jnp.float32)
DOCUMENTS = array(np.sort(RNG.integers(0, 6, (2, T)), -1), jnp.int32)
EXTRA = tuple(array(RNG.standard_normal((2, T, n, 8)), jnp.float32) for n in (N, 1))


def causal(block: int = BLOCK) -> flexjax.BlockMask:
    return flexjax.create_block_mask(masks.causal, None, None, T, T, block_size=block)


def falling(slopes: jax.Array) -> Callable:
    return lambda s, b, h, q, k: s - slopes[h] * jnp.abs(q - k)


def by_lists() -> flexjax.BlockMask:
    """The causal mask as a user's lists, in which the first block of keys is left out of the last rows."""
    made = causal()
    num, index = np.asarray(made.full_kv_num_blocks).copy(), np.asarray(made.full_kv_indices).copy()
    index[:, :, 6:, :-1] = index[:, :, 6:, 1:]
    num[:, :, 6:] -= 1
    return flexjax.BlockMask.from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, jnp.asarray(num), jnp.asarray(index), block_size=BLOCK,
        mask_mod=masks.causal,
    )  # fmt: skip


def of_documents() -> flexjax.BlockMask:
    mask_mod = lambda b, h, q, k: (q >= k) & (DOCUMENTS[b, q] == DOCUMENTS[b, k])
    return flexjax.create_block_mask(mask_mod, 2, None, T, T, block_size=BLOCK)


def refusal(kind: type[Exception] = ValueError) -> Any:
    """A block that raises; its whole message is compared after it."""
    return pytest.raises(kind, match=r".")


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: dict(block_mask=causal()),
    "no mask": lambda: dict(kernel_options=flexjax.KernelOptions(block_q=128, block_kv=128)),
    "mask_mod": lambda: dict(mask_mod=masks.causal),
    "documents": lambda: dict(block_mask=of_documents()),
    "lists of a user": lambda: dict(block_mask=by_lists()),
    "sinks": lambda: dict(block_mask=causal(), sinks=jnp.arange(N, dtype=jnp.float32)),
    "extra features": lambda: dict(block_mask=causal(), query_extra=EXTRA[0], key_extra=EXTRA[1], scale=-0.2),
    "traced scale": lambda: dict(block_mask=causal(), scale=jnp.float32(0.3)),
    "lengths": lambda: dict(
        block_mask=causal(), query_seq_lengths=jnp.asarray([200, 31]), key_value_seq_lengths=jnp.asarray([150, 256])
    ),
    "origin": lambda: dict(
        block_mask=flexjax.create_block_mask(
            masks.causal, None, None, T, T, block_size=BLOCK, origin=flexjax.Origin(query=64)
        )
    ),
    "dropout": lambda: dict(block_mask=causal(), dropout=flexjax.Dropout(0.25, jax.random.key(0))),
    "bound": lambda: dict(block_mask=causal(), score_bound=30.0),
    "bound by block": lambda: dict(block_mask=causal(), score_bound=jnp.full((2, N, 8, 1), 30.0)),
}
NO_REFERENCE = {"dropout"}
FEW_BLOCKS = {"no mask", "mask_mod"}
"""Two of queries and two of keys, neighbours of which only a steep fall leaves one out."""


def run(
    arrays: tuple[jax.Array, ...], tolerance: float | None, implementation: str = "xla", **arguments: Any
) -> tuple[Any, Any]:
    q, k, v, slopes = arrays
    if tolerance is None:
        arguments.pop("score_bound", None)
    return flexjax.flex_attention(
        q, k, v, score_mod=falling(slopes), tolerance=tolerance, implementation=implementation,
        return_aux=AuxRequest(lse=True, max_scores=True, lost=tolerance is not None), **arguments,
    )  # fmt: skip


def loss(arrays: tuple[jax.Array, ...], tolerance: float | None, **arguments: Any) -> tuple[jax.Array, Any]:
    out, aux = run(arrays, tolerance, **arguments)
    lse = jnp.where(jnp.isfinite(aux.lse), aux.lse, 0)
    return jnp.sum(out * G) + jnp.sum(jnp.sin(lse)), (out, aux)


def visited(tolerance: float | None, arrays: tuple[jax.Array, ...] = (Q, K, V, SLOPES), **arguments: Any) -> np.ndarray:
    q, k, v, slopes = arrays
    call = prepare(Arguments(q, k, v, score_mod=falling(slopes), tolerance=tolerance, **arguments))
    assert call.skipped is not None
    assert call.skipped.mask is not None
    return np.asarray(call.skipped.mask.to_dense())


@pytest.mark.parametrize("name", some_slow(CALLS, ("lengths", "lists of a user", "extra features")))
def test_a_call_is_the_whole_call_within_its_bounds(name: str) -> None:
    few = name in FEW_BLOCKS
    arguments, arrays = CALLS[name](), (Q, K, V, SLOPES * (100 if few else 1))
    step = lambda tolerance: quick_jit(
        jax.value_and_grad(functools.partial(loss, tolerance=tolerance, **arguments), has_aux=True)
    )
    (_, (want, whole)), d_want = step(None)(arrays)
    (_, (out, aux)), d_out = step(TOLERANCE)(arrays)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(aux.lse, whole.lse, atol=2e-6)
    np.testing.assert_array_equal(aux.max_scores, whole.max_scores)
    for a, b in zip(d_out, d_want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    assert aux.lost.shape == aux.lse.shape
    assert aux.lost.dtype == jnp.float32
    assert 0 < float(aux.lost.max()) <= TOLERANCE
    assert whole.lost is None
    dense = visited(TOLERANCE, arrays, **arguments)
    assert few or dense[:, 3].sum() < dense[:, 0].sum() < np.ones_like(dense[:, 0]).sum()


@pytest.mark.parametrize("name", some_slow(sorted(set(CALLS) - NO_REFERENCE), ("lengths", "lists of a user")))
def test_the_reference_is_exact_over_the_kept_blocks(name: str) -> None:
    """At a tolerance that shows: both lose the same keys."""
    arguments, arrays = CALLS[name](), (Q, K, V, SLOPES)
    (out, aux), (want, whole) = (
        quick_jit(functools.partial(run, tolerance=0.05, implementation=n, **arguments))(arrays)
        for n in ("xla", "reference")
    )
    np.testing.assert_allclose(out, want, atol=3e-6)
    np.testing.assert_allclose(aux.lse, whole.lse, atol=3e-6)
    np.testing.assert_array_equal(aux.lost, whole.lost)
    all_keys = run(arrays, None, **arguments)[0]
    assert float(jnp.abs(out - all_keys).max()) <= 2 * 0.05 * float(jnp.abs(V).max())


def test_what_is_minus_infinity_goes_at_0() -> None:
    segment = DOCUMENTS[0]
    mod = lambda s, b, h, q, k: jnp.where(segment[q] == segment[k], s, -jnp.inf)
    attend = lambda tolerance: quick_jit(
        lambda q, k, v: flexjax.flex_attention(
            q, k, v, score_mod=mod, block_mask=causal(), implementation="xla", tolerance=tolerance
        )
    )(Q, K, V)
    np.testing.assert_allclose(attend(0.0), attend(None), rtol=1e-6, atol=1e-6)
    call = prepare(Arguments(Q, K, V, score_mod=mod, block_mask=causal(), tolerance=0.0))
    same = np.asarray(segment).reshape(-1, BLOCK)
    may = (same[:, None, :, None] == same[None, :, None, :]).any((2, 3)) & np.tri(T // BLOCK, dtype=bool)
    np.testing.assert_array_equal(np.asarray(call.skipped.mask.to_dense())[0, 0], may)  # type: ignore[union-attr]


def test_a_large_negative_number_goes_too() -> None:
    segment = DOCUMENTS[0]
    mod = lambda s, b, h, q, k: jnp.where(segment[q] == segment[k], s, -1e9)
    call = prepare(Arguments(Q, K, V, score_mod=mod, block_mask=causal(), tolerance=TOLERANCE))
    assert np.asarray(call.skipped.mask.to_dense())[0, 0].sum() < 0.7 * np.tri(T // BLOCK).sum()  # type: ignore[union-attr]


def test_the_backward_pass_differentiates_the_attention_over_the_kept_blocks() -> None:
    """Against the reference over those blocks, at a tolerance that shows; lost keys get exactly 0."""
    arguments, arrays = dict(block_mask=causal()), (Q, K, V, SLOPES)
    grad = lambda name: quick_jit(jax.grad(lambda arrays: loss(arrays, 0.05, implementation=name, **arguments)[0]))(
        arrays
    )
    for a, b in zip(grad("xla"), grad("reference"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def test_lists_of_many_blocks_are_bits() -> None:
    """So that a training step keeps a bit a block and class between its passes."""
    length, heads = 2304, 16
    assert heads * (length // 16) ** 2 > LARGE
    q = jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32)
    mask = flexjax.create_block_mask(masks.causal, None, None, length, length, block_size=16)
    kinds = []

    def attend(q: jax.Array) -> jax.Array:
        call = prepare(Arguments(q, q, q, score_mod=mods.alibi(heads), block_mask=mask, tolerance=TOLERANCE))
        kinds.append(type(call.operands.lists).__name__)
        return flexjax.flex_attention(
            q, q, q, score_mod=mods.alibi(heads), block_mask=mask, tolerance=TOLERANCE, implementation="xla"
        )

    jax.eval_shape(jax.value_and_grad(lambda q: attend(q).sum()), q)
    assert kinds == ["BlockBits"]


# ------------------------------------------------------------------- transformations and meshes


def test_under_vmap_each_entry_has_its_own_blocks() -> None:
    arguments, scales = dict(block_mask=causal()), jnp.asarray([0.1, 3.0])
    one = lambda scale: run((Q * scale, K, V, SLOPES), TOLERANCE, **arguments)[0]
    both = quick_jit(jax.vmap(one))(scales)
    for found, scale in zip(both, scales, strict=True):
        np.testing.assert_allclose(found, run((Q * scale, K, V, SLOPES), None, **arguments)[0], atol=3e-6)
    shares = [visited(TOLERANCE, (Q * s, K, V, SLOPES), **arguments).sum() for s in scales]
    assert shares[0] < shares[1]


def test_forward_mode_is_that_of_the_kept_blocks() -> None:
    arguments = dict(block_mask=causal())
    ones = jnp.ones_like(SLOPES)

    def along_ones(name: str) -> jax.Array:
        f = lambda slopes: loss((Q, K, V, slopes), 0.05, implementation=name, **arguments)[0]
        return quick_jit(lambda x: jax.jvp(f, (x,), (ones,))[1])(SLOPES)

    tangent, want = map(along_ones, ("xla", "reference"))
    np.testing.assert_allclose(tangent, want, rtol=1e-4)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.filterwarnings("ignore:Each device receives:flexjax.FallbackWarning")
@pytest.mark.parametrize(
    ("kind", "spec"),
    some_slow(
        itertools.product((AxisType.Auto, AxisType.Explicit), (P("x"), P(None, None, "x"))),
        ((AxisType.Explicit, P(None, None, "x")),),
    ),
)
def test_each_device_makes_the_lists_of_its_share(kind: AxisType, spec: P) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    arguments = dict(block_mask=causal())
    step = lambda tolerance: jax.jit(
        jax.value_and_grad(functools.partial(loss_alone, tolerance=tolerance, **arguments))
    )
    want, d_want = step(TOLERANCE)((Q, K, V, SLOPES), G)
    put = lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    slopes = jax.device_put(SLOPES, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        found, d_found = step(TOLERANCE)((put(Q), put(K), put(V), slopes), put(G))
    np.testing.assert_allclose(found, want, rtol=1e-5)
    for a, b in zip(d_found, d_want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def loss_alone(arrays: tuple[jax.Array, ...], weights: jax.Array, tolerance: float, **arguments: Any) -> jax.Array:
    out, aux = run(arrays, tolerance, **arguments)
    return jnp.sum(out * weights) + jnp.sum(aux.lost * 0)


# ------------------------------------------------------------------- what is decided while tracing

CONSTANT = {
    "identity": None,
    "soft cap": lambda s, b, h, q, k: 20 * jnp.tanh(s / 20),
    "by query": lambda s, b, h, q, k: s * SLOPES[h] - q,
    "unbounded": lambda s, b, h, q, k: s - jax.lax.lgamma(1.0 + jnp.abs(q - k)),
    "too little": lambda s, b, h, q, k: s - 0.01 * jnp.abs(q - k),
    "nothing goes": lambda s, b, h, q, k: s + SLOPES[k % 4],
}


@pytest.mark.parametrize("name", CONSTANT)
def test_where_nothing_can_go_nothing_is_computed(name: str) -> None:
    mod, mask = CONSTANT[name], causal()
    attend = lambda tolerance: (
        lambda q, k, v: flexjax.flex_attention(
            q, k, v, score_mod=mod, block_mask=mask, implementation="xla", tolerance=tolerance
        )
    )
    texts = [jax.jit(attend(t)).lower(Q, K, V).as_text() for t in (None, TOLERANCE)]
    assert texts[0] == texts[1]


def test_lost_is_0_where_nothing_is_computed() -> None:
    ask = AuxRequest(lost=True)
    _, aux = flexjax.flex_attention(Q, K, V, tolerance=TOLERANCE, return_aux=ask, implementation="xla")
    np.testing.assert_array_equal(aux.lost, np.zeros((2, T, N), np.float32))


def test_explain_prints_shares_by_head_and_names_what_has_no_bounds() -> None:
    text = lambda mod, **more: str(
        flexjax.explain(Q, K, V, score_mod=mod, block_mask=causal(), tolerance=TOLERANCE, device="cpu", **more)
    )
    assert (
        "tolerance 5.96e-08: of the blocks of the mask 0.53 stay where |score| <= 4 (|scale| D, that of rows of length sqrt(D))\n"
        "  by head 0: 0.72, 1: 0.58, 2: 0.42, 3: 0.42"
    ) in text(falling(SLOPES))
    assert "stay where |score| <= 9 (score_bound)" in text(falling(SLOPES), score_bound=9.0)
    assert ("tolerance: nothing is skipped. `lgamma` in score_mod has no bounds.") in text(CONSTANT["unbounded"])


# ------------------------------------------------------------------- block masks that are made with tolerance


def made(**changed: Any) -> flexjax.BlockMask:
    given = dict(score_mod=mods.alibi(N), score_bound=8.0, tolerance=TOLERANCE, block_size=BLOCK) | changed
    return flexjax.create_block_mask(masks.causal, None, N, T, T, **given)


def test_a_block_mask_with_a_bound_leaves_out_blocks_beforehand() -> None:
    mask = made(score_mod=falling(SLOPES))
    plain = causal()
    assert mask.sparsity() > plain.sparsity()
    attend = lambda mask: flexjax.flex_attention(
        Q, K, V, score_mod=falling(SLOPES), block_mask=mask, implementation="xla"
    )
    np.testing.assert_allclose(attend(mask), attend(plain), atol=2e-6)
    want = visited(TOLERANCE, block_mask=plain, score_bound=8.0)
    assert (np.asarray(mask.to_dense()) >= want.max(0, keepdims=True)).all()


SAME = dict(score_mod=mods.alibi(N))
OTHER_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "another score_mod": (
        dict(score_mod=mods.distance_penalty(0.5)),
        "`block_mask` is made with tolerance for another score_mod",
    ),
    "none": (dict(score_mod=None), "`block_mask` is made with tolerance for another score_mod"),
    "another scale": (SAME | dict(scale=0.5), "`block_mask` is made with tolerance for another scale"),
    "tolerance twice": (
        SAME | dict(tolerance=1e-3),
        "`tolerance` is given beside a block mask that was made with tolerance",
    ),
    "lengths": (
        SAME | dict(key_value_seq_lengths=jnp.asarray([3, 4])),
        "`key_value_seq_lengths` is given beside a block mask that was made with tolerance",
    ),
    "the same bits": (
        SAME | dict(kernel_options=flexjax.KernelOptions(invariant=True)),
        "`block_mask` is made with tolerance, beside kernel_options.invariant; expected one without. "
        "What a tile of queries skips depends on its other tokens.",
    ),
    "extra": (
        SAME | dict(query_extra=EXTRA[0], key_extra=EXTRA[1]),
        "`query_extra` is given beside a block mask that was made with tolerance",
    ),
}


@pytest.mark.parametrize("name", [n for n in OTHER_CALLS if n != "another score_mod"])
def test_a_block_mask_with_a_claim_refuses_another_call(name: str) -> None:
    arguments, begins = OTHER_CALLS[name]
    with refusal() as error:
        flexjax.flex_attention(Q, K, V, block_mask=made(), **arguments)
    assert str(error.value).startswith(begins)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(score_mod=mods.distance_penalty(0.5)), "Make it with create_block_mask for this call."),
        (SAME | dict(key_value_seq_lengths=jnp.asarray([3, 4])), "Make the block mask without tolerance."),
    ],
)
def test_over_devices_the_advice_is_not_tolerance(arguments: dict[str, Any], sentence: str) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    context = flexjax.ContextParallel("x", flexjax.context_layout(masks.causal, T, devices=2, block_size=BLOCK))
    with jax.set_mesh(mesh), refusal() as error:
        flexjax.flex_attention(Q, K, V, block_mask=made(), context=context, **arguments)
    assert str(error.value).endswith(f" {sentence}")


def test_a_block_mask_with_a_claim_refuses_other_numbers() -> None:
    mask = made(score_mod=falling(SLOPES))
    with refusal() as error:
        flexjax.flex_attention(Q, K, V, score_mod=falling(SLOPES * 2), block_mask=mask)
    assert str(error.value) == (
        "`block_mask` is made with tolerance for another score_mod's captured numbers; expected one for this call's. "
        "Make it with create_block_mask for this call, or pass tolerance= to flex_attention."
    )
    with refusal() as error:
        jax.jit(lambda x: flexjax.flex_attention(Q, K, V, score_mod=falling(x), block_mask=mask))(SLOPES)
    assert str(error.value) == (
        "`block_mask` is made with tolerance, and the captured arrays of score_mod are traced; expected arrays that are "
        "known, to compare their numbers. Pass tolerance= to flex_attention, which takes it."
    )
    with refusal() as error:
        mask[0]
    assert str(error.value) == (
        "`block_mask` is made with tolerance; expected one without to select from. Its claim is of the positions of the "
        "whole: make the part with create_block_mask and an origin."
    )


# ------------------------------------------------------------------- refusals

RANGE = "; expected a Python float of at least 0 and less than 0.5, or None. "
F8 = tuple(x.astype(jnp.float8_e4m3fn) for x in (Q, K, V))
REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "traced": (
        lambda: jax.jit(lambda t: flexjax.flex_attention(Q, K, V, tolerance=t))(1e-3),
        "`tolerance` is traced" + RANGE + "It is decided while tracing what may go: make it a static argument of jit.",
    ),
    "an array": (
        lambda: flexjax.flex_attention(Q, K, V, tolerance=np.zeros(2)),  # type: ignore[arg-type]
        "`tolerance` is float64[2]" + RANGE + "It is decided while tracing what may go: make it a static argument of jit.",
    ),
    "a half": (
        lambda: flexjax.flex_attention(Q, K, V, tolerance=0.5),
        "`tolerance` is 0.5" + RANGE + "2.0**-24 is below the rounding of float32.",
    ),
    "negative": (
        lambda: flexjax.flex_attention(Q, K, V, tolerance=-1e-9),
        "`tolerance` is -1e-09" + RANGE + "2.0**-24 is below the rounding of float32.",
    ),
    "not a number": (
        lambda: flexjax.flex_attention(Q, K, V, tolerance=float("nan")),
        "`tolerance` is nan" + RANGE + "2.0**-24 is below the rounding of float32.",
    ),
    "the same bits": (
        lambda: flexjax.flex_attention(Q, K, V, tolerance=1e-3, kernel_options=flexjax.KernelOptions(invariant=True)),
        "`tolerance` is given beside kernel_options.invariant; expected None. What a tile of queries skips depends on its "
        "other tokens.",
    ),
    "float8": (
        lambda: flexjax.flex_attention(*F8, tolerance=1e-3),
        "`tolerance` is given for float8_e4m3fn inputs; expected None. Cast query, key and value to bfloat16.",
    ),
    "a bound alone": (
        lambda: flexjax.flex_attention(Q, K, V, score_bound=3.0),
        "`score_bound` is given without tolerance; expected None. Pass tolerance= too.",
    ),
    "a negative bound": (
        lambda: flexjax.flex_attention(Q, K, V, tolerance=1e-3, score_bound=-1.0),
        "`score_bound` is -1.0; expected a number of at least 0, or numbers of shape [2, 4, 2, 2] or of its first dims, 1 for "
        "all. The dims are batch entries, heads, blocks of queries and blocks of keys.",
    ),
    "a bound of another shape": (
        lambda: flexjax.flex_attention(Q, K, V, tolerance=1e-3, score_bound=np.ones((3, 4))),
        "`score_bound` is float64[3, 4]; expected a number of at least 0, or numbers of shape [2, 4, 2, 2] or of its first "
        "dims, 1 for all. The dims are batch entries, heads, blocks of queries and blocks of keys.",
    ),
    "decoding": (
        lambda: flexjax.flex_attention(Q[:, :1], K, V, tolerance=1e-3, score_mod=falling(SLOPES)),
        "`score_bound` is None for 1 queries and 256 keys; expected a number beside tolerance. Norms of all keys would take as "
        "long as the call. |scale * query . key| is at most score_bound.",
    ),
    "lost alone": (
        lambda: flexjax.flex_attention(Q, K, V, return_aux=AuxRequest(lost=True)),
        "`return_aux.lost` is True without tolerance; expected False. Without it nothing is lost.",
    ),
    "a wrong bound, by the reference": (
        lambda: flexjax.flex_attention(
            Q * 0 + 1, K * 0 + 1, V, scale=1.0, tolerance=1e-3, score_bound=15.0, score_mod=falling(SLOPES),
            implementation="reference",
        ),
        "`score_bound` is exceeded by 1; expected at least |scale * query . key| at each visible entry. A larger bound skips "
        "less; None takes norms of query and key.",
    ),
    "a block mask without a bound": (
        lambda: made(score_bound=None),
        "`score_bound` is None beside tolerance; expected a number. |scale * query . key| is at most score_bound.",
    ),
    "a block mask without a score_mod": (
        lambda: made(score_mod=None),
        "`score_mod` is None beside tolerance; expected the score_mod of the call. It says what falls.",
    ),
    "a block mask with a score_mod alone": (
        lambda: made(tolerance=None, score_bound=None),
        "`score_mod` is given without tolerance; expected None. Pass tolerance= too.",
    ),
    "a block mask of traced slopes": (
        lambda: jax.jit(lambda x: made(score_mod=falling(x)).to_dense())(SLOPES),
        "`tolerance` is given to create_block_mask with traced arrays; expected arrays that are known, whose numbers the block "
        "mask keeps. Pass tolerance= to flex_attention, which reads them in each call.",
    ),
    "a block mask of all heads": (
        lambda: flexjax.create_block_mask(
            masks.causal, None, None, T, T, score_mod=falling(SLOPES), score_bound=3.0, tolerance=1e-3
        ),
        "`heads` is None but `score_mod` depends on `h`; expected the number of heads. Pass heads=... so that each gets its "
        "own blocks.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_and_in_which_words(name: str) -> None:
    call, message = REFUSALS[name]
    with refusal() as error:
        call()
    assert str(error.value) == message


def test_a_traced_bound_that_is_wrong_gives_nan_by_the_reference() -> None:
    attend = lambda bound: flexjax.flex_attention(
        Q * 0 + 1,
        K * 0 + 1,
        V,
        scale=1.0,
        tolerance=1e-3,
        score_bound=bound,
        score_mod=falling(SLOPES),
        implementation="reference",
    )
    assert bool(jnp.isnan(jax.jit(attend)(15.0)).all())
    assert not bool(jnp.isnan(jax.jit(attend)(16.0)).any())


def test_decoding_with_a_bound_reads_no_norms() -> None:
    arguments = dict(origin=flexjax.Origin(query=T - 1), mask_mod=masks.causal, score_bound=12.0)
    arrays = (Q[:, :1], K, V, SLOPES * 20)
    out, aux = run(arrays, TOLERANCE, **arguments)
    np.testing.assert_allclose(out, run(arrays, None, **arguments)[0], atol=2e-6)
    assert float(aux.lost.max()) > 0
    call = lambda q, k, v: run((q, k, v, SLOPES * 20), TOLERANCE, **arguments)[0]
    assert "sqrt" not in str(jax.make_jaxpr(call)(*arrays[:3]))


SPLIT: dict[str, tuple[dict[str, Any], str]] = {
    "norms": (dict(score_bound=None), "score_bound of None"),
    "lost": (dict(return_aux=AuxRequest(lost=True)), "return_aux.lost"),
    "lengths": (dict(key_value_seq_lengths=jnp.asarray([3, 4])), "`key_value_seq_lengths`"),
    "a scale": (dict(scale=jnp.float32(0.5)), "a scale in an array"),
    "lists of a user": (dict(mask_mod=None, block_mask=by_lists()), "lists of a user"),
    "traced slopes": (dict(), "traced arrays in mods"),
}


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize("name", SPLIT)
def test_a_call_over_a_split_sequence_refuses(name: str) -> None:
    more, what = SPLIT[name]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    layout = flexjax.context_layout(masks.causal, T, devices=2, block_size=BLOCK)
    given = dict(mask_mod=masks.causal, score_bound=8.0, tolerance=TOLERANCE) | more

    def attend(slopes: jax.Array) -> Any:
        return flexjax.flex_attention(
            Q, K, V, score_mod=falling(slopes), context=flexjax.ContextParallel("x", layout), **given
        )

    with jax.set_mesh(mesh), refusal(NotImplementedError) as error:
        (jax.jit(attend) if name == "traced slopes" else attend)(SLOPES)
    assert str(error.value) == (
        f"A call with context= takes no tolerance beside {what}, because which keys travel is decided before their norms are "
        "known."
    )


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(dict(mask_mod=masks.causal), id="causal", marks=pytest.mark.slow),
        pytest.param(dict(block_mask=of_documents()), id="documents"),
        pytest.param({}, id="no mask", marks=pytest.mark.slow),
    ],
)
def test_a_split_sequence_leaves_out_blocks_by_head(mask: dict[str, Any]) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    context = flexjax.ContextParallel("x", flexjax.context_layout(masks.causal, T, devices=2, block_size=BLOCK))
    assert context.layout is not None
    arrays = [context.layout.shard(x) for x in (Q, K, V)]
    attend = functools.partial(flexjax.flex_attention, score_mod=falling(SLOPES), **mask)
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(attend, tolerance=0.05, score_bound=9.0, context=context))(*arrays)
    off = np.abs(context.layout.unshard(found) - attend(Q, K, V)).max()
    assert 0 < off < 2 * 0.05 * np.abs(V).max()


# ------------------------------------------------------------------- numbers that prove nothing


def probabilities(k: jax.Array, score_mod: Callable, **call: Any) -> tuple[np.ndarray, Any]:
    """(out for values that are an identity matrix, aux) of queries of ones, with blocks of 32."""
    q, eye = jnp.ones((1, T, 1, D)), jnp.eye(T)[None, :, None]
    asked = AuxRequest(lse=True, max_scores=True, lost=True)
    out, aux = quick_jit(
        lambda *x: flexjax.flex_attention(*x, score_mod=score_mod, block_mask=causal(), return_aux=asked, **call)
    )(q, k, eye)
    return np.asarray(out[0, :, 0]), aux


@pytest.mark.parametrize("scale", [0.01, jnp.float32(0.01)], ids=["float", "array"])
def test_a_bound_is_that_of_the_scaled_score(scale: Any) -> None:
    k = jnp.zeros((1, T, 1, D)).at[:, 63].set(84.0)  # 13.44
    near = lambda s, b, h, i, j: s - 0.5 * (i - j)
    whole, _ = probabilities(k, near, scale=scale, tolerance=0.0)
    found, aux = probabilities(k, near, scale=scale, tolerance=1e-4, score_bound=13.45)
    gone = np.where(found == 0, whole, 0).sum(-1)
    assert 0 < gone.max() < 1e-4
    assert (gone <= np.asarray(aux.lost)[0, :, 0] + 1e-9).all()


@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_an_infinite_score_is_no_witness(tolerance: float) -> None:
    """The row is NaN with and without."""
    k = jnp.zeros((1, T, 1, D))
    found, aux = probabilities(
        k, lambda s, b, h, i, j: jnp.where(i == j, jnp.inf, s - 0.5 * (i - j)), tolerance=tolerance
    )
    assert np.isnan(found).all()
    assert np.isnan(np.asarray(aux.lse)).all()


def test_blocks_of_infinite_keys_stay() -> None:
    capped = lambda s, b, h, i, j: 5 * jnp.tanh(s / 5) - 0.5 * (i - j)
    k = jnp.zeros((1, T, 1, D)).at[:, 5].set(array(np.tile([np.inf, -np.inf], D // 2)))  # the score is NaN
    found, _ = probabilities(k, capped, tolerance=1e-2)
    assert np.isnan(found[5:]).all()


def test_a_bound_of_more_digits_is_rounded_up() -> None:
    from flexjax.tolerance.checks import check_bound

    for given in (100.0000035, np.float64(1e39), np.full(1, 100.0000035)):
        bound = check_bound(given, (1, 1, 1, 1))
        assert bound is not None
        assert float(bound[0, 0, 0, 0]) >= np.max(given)
