"""`tolerance=` beside `weights=`: the sizes of the weights that a row loses sum to at most the tolerance, absolutely."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import flexjax
from flexjax import AuxRequest, Weights, masks, paged, weights
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.tolerance import keep
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow
from tests.tolerance.attack import Attack, Scene, scene_of
from tests.tolerance.proof import MASKS, WEIGHTS, Case, Choice, D, H, M, params_of

# ------------------------------------------------------------------- the bound

TOLERANCE = 1e-6
SCENES = [
    Scene((), "causal", (512, 512, 8), (2, 1), 1e-6, False, "float32", "retention"),
    Scene(("alibi",), "full", (520, 576, 8), (4, 2), 1e-11, False, "float64", "silu"),
    *(scene_of(np.random.default_rng(n), large=n > 4, weighted=True) for n in range(8)),
]


@pytest.mark.parametrize("number", some_slow(range(len(SCENES)), (0,)))
def test_no_attack_takes_more_weight_from_a_row_than_its_bound(number: int) -> None:
    attack = Attack(SCENES[number], np.random.default_rng(7))
    with attack.scene.x64:
        found = [attack.draw() for _ in range(24)]
    assert [x for x in found if x.broken] == []
    if number < 2:
        assert sum(x.dropped for x in found) > 8


def retained(sign: float = 1.0, blocks: int = 64, factor: float = 0.95) -> Case:
    """Retention over `blocks` of 8 keys, along one vector: the weights of each of the farthest 4 fifths hold, by their
    bound, `factor` of the tolerance in all.
    """
    u, length = np.ones(D) / 4.0, 8 * blocks
    q, k = np.tile(u, (1, H, length, 1)), np.tile(sign * u, (1, M, length, 1))
    far = np.arange(length) < length * 4 // 5
    size = np.where(far, factor * TOLERANCE / (8 * (blocks * 4 // 5)), 1.0) * D**0.5
    params = params_of(np.random.default_rng(0), length, length) | {"slope": np.full(H, 1e-4, np.float32)}
    return Case(
        lambda p: lambda s, b, h, i, j: s, MASKS["causal"], np.float32(q), np.float32(k * size[:, None]), params,
        weights=WEIGHTS["retention"],
    )  # fmt: skip


def most_lost(**given: Any) -> float:
    """The largest loss over the tolerance."""
    case = retained(**given)
    return float(Choice(case, TOLERANCE, 8)(case).lost.max() / TOLERANCE)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_weights_at_the_bound_reach_most_of_the_tolerance(sign: float) -> None:
    assert 0.8 < most_lost(sign=sign) <= 1


def test_many_blocks_of_weights_keep_within_the_tolerance_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_lost(factor=40.0) <= 1
    one_by_one = lambda share, most: (share <= np.log(most), jnp.zeros((*share.shape[:-1], 1)))
    monkeypatch.setattr(keep, "_smallest", one_by_one)
    assert most_lost(factor=40.0) > 20


def test_half_the_bound_of_scores_is_no_bound_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_lost(factor=1.9) <= 1
    whole = keep._limit
    monkeypatch.setattr(keep, "_limit", lambda *given: whole(*given) / 2)
    assert most_lost(factor=1.9) > 1.5


def test_each_key_of_a_block_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "_log_keys", lambda spec, kv_blocks: jnp.zeros(kv_blocks.shape))
    assert most_lost(factor=7.0) > 5


def test_negative_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys opposite to the query: the upper end of the weight alone is that of the positive side, 0 for their relu."""
    case = retained(-1.0, factor=40.0)
    case.weights = lambda p: lambda s, b, h, i, j: jnp.minimum(s, 0) * jnp.exp(-p["slope"][h] * (i - j))
    choose = lambda: float(Choice(case, TOLERANCE, 8)(case).lost.max() / TOLERANCE)
    assert choose() <= 1
    monkeypatch.setattr(keep, "_size", lambda low, high: high)
    assert choose() > 20


def test_the_total_of_a_row_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance is absolute: witnesses as of a softmax, with a total above 1, would let more go."""
    assert most_lost(factor=1.5) <= 1
    of_softmax = keep._lower_of_rows
    monkeypatch.setattr(keep, "_lower_of_rows", lambda spec, given: of_softmax(spec, given) + 1.0)
    assert most_lost(factor=1.5) > 1.2


# ------------------------------------------------------------------- calls

B, T, N, K, BLOCK = 2, 256, 4, 2, 32
RNG = np.random.default_rng(0)
Q, KEY, V, G = (array(RNG.standard_normal((B, T, n, D)), jnp.float32) for n in (N, K, K, N))
SLOPES = array([0.3, 0.5, 1.0, 2.0], jnp.float32)
MASK = flexjax.create_block_mask(masks.causal, None, None, T, T, block_size=BLOCK)


def falling(slopes: jax.Array) -> Callable:
    return lambda s, b, h, q, k: s - slopes[h] * jnp.abs(q - k)


CALLS: dict[str, Callable[[jax.Array], dict[str, Any]]] = {
    "retention": lambda slopes: dict(weights=weights.retention(jnp.exp(-slopes))),
    "sigmoid": lambda slopes: dict(weights=weights.sigmoid(-5.0), score_mod=falling(slopes)),
    "silu": lambda slopes: dict(weights=weights.silu(T), score_mod=falling(slopes)),
    "relu squared": lambda slopes: dict(weights=weights.relu_squared(T), score_mod=falling(slopes)),
    "exponentials": lambda slopes: dict(
        weights=Weights(lambda s, b, h, q, k: jnp.exp(s), lambda total: total), score_mod=falling(slopes)
    ),
    "lengths": lambda slopes: (
        CALLS["retention"](slopes)
        | dict(query_seq_lengths=jnp.asarray([200, 31]), key_value_seq_lengths=jnp.asarray([150, 256]))
    ),
    "bound": lambda slopes: CALLS["retention"](slopes) | dict(score_bound=30.0),
    "dropout": lambda slopes: CALLS["silu"](slopes) | dict(dropout=flexjax.Dropout(0.25, jax.random.key(0))),
}


def attend(
    arrays: tuple[jax.Array, ...], name: str, tolerance: float | None, implementation: str = "xla", **more: Any
) -> tuple[jax.Array, Any]:
    q, k, v, slopes = arrays
    given = dict(block_mask=MASK) | CALLS[name](slopes) | more
    if tolerance is None:
        given.pop("score_bound", None)
    asked = AuxRequest(total=True, lost=tolerance is not None)
    return flexjax.flex_attention(
        q, k, v, tolerance=tolerance, return_aux=asked, implementation=implementation, **given
    )  # fmt: skip


def gradients(
    arrays: tuple[jax.Array, ...], name: str, tolerance: float | None, implementation: str
) -> tuple[Any, tuple[jax.Array, ...]]:
    """((out, aux), gradients of all arrays)."""

    def loss(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
        out, aux = attend(arrays, name, tolerance, implementation)
        return jnp.sum(out * G) + jnp.sum(jnp.sin(aux.total)), (out, aux)

    (_, found), slopes = quick_jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return found, slopes


@pytest.mark.parametrize("name", some_slow(CALLS, ("retention",)))
def test_a_call_is_the_whole_call_within_its_bounds(name: str) -> None:
    """Also with a tolerance that shows, where both passes are those of the reference over the blocks that stay."""
    arrays, most = (Q, KEY, V, SLOPES), 0.02
    want, whole = attend(arrays, name, None)
    ((out, aux), d_out), ((same, _), d_same) = (
        gradients(arrays, name, most, n) for n in ("xla", "xla" if name == "dropout" else "reference")
    )
    np.testing.assert_allclose(out, same, atol=3e-6)
    for a, b in zip(d_out, d_same, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))
    assert float(aux.lost.max()) <= most
    assert float(aux.lost.max()) > 0 or name == "relu squared"  # of which no block is small without being 0
    lost = np.asarray(aux.lost) + 1e-6
    assert (np.abs(aux.total - whole.total) <= lost).all()
    rate = 0.25 if name == "dropout" else 0.0
    largest = float(jnp.abs(V).max()) / (1 - rate)
    if name != "exponentials":  # the divisor is at least 1, and moves by no more than the total
        assert (np.abs(out - want) <= (lost * (largest + np.abs(want).max()))[..., None]).all()
    call = prepare(Arguments(Q, KEY, V, block_mask=MASK, tolerance=most, **CALLS[name](SLOPES)))
    assert call.skipped is not None
    assert call.skipped.mask is not None
    dense = np.asarray(call.skipped.mask.to_dense())
    assert dense[:, 3].sum() <= dense[:, 0].sum() < B * np.tri(T // BLOCK).sum()


def test_what_is_exactly_0_goes_at_0() -> None:
    """A squared ReLU of what is below 0 for any query and key of this length."""
    arguments = dict(block_mask=MASK, tolerance=0.0, **CALLS["relu squared"](SLOPES))
    call = prepare(Arguments(Q, KEY, V, **arguments))  # type: ignore[arg-type]
    assert call.skipped is not None
    assert call.skipped.mask is not None
    assert np.asarray(call.skipped.mask.to_dense())[0, 3].sum() < 0.7 * np.tri(T // BLOCK).sum()
    found = quick_jit(lambda: attend((Q, KEY, V, SLOPES), "relu squared", 0.0))()
    want = quick_jit(lambda: attend((Q, KEY, V, SLOPES), "relu squared", None))()
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(found[1].lost, np.zeros((B, T, N)))


def test_under_vmap_each_entry_has_its_own_blocks() -> None:
    scales = jnp.asarray([0.1, 3.0])
    one = lambda scale, tolerance: attend((Q * scale, KEY, V, SLOPES), "silu", tolerance)[0]
    both = quick_jit(jax.vmap(functools.partial(one, tolerance=1e-5)))(scales)
    for found, scale in zip(both, scales, strict=True):
        np.testing.assert_allclose(found, one(scale, None), atol=5e-5)


def test_explain_says_that_the_tolerance_is_absolute() -> None:
    text = lambda name, slopes: str(
        flexjax.explain(
            Q, KEY, V, block_mask=MASK, tolerance=TOLERANCE, score_bound=9.0, device="cpu", **CALLS[name](slopes)
        )
    )
    assert (
        "tolerance 1e-06 of the sum of |weight| of a row, absolute: of the blocks of the mask 0.46 stay where |score| <= 9 "
        "(score_bound)\n  by head 0: 0.58, 1: 0.42, 2: 0.42, 3: 0.42"
    ) in text("silu", SLOPES * 2)
    plain = str(flexjax.explain(Q, KEY, V, weights=weights.silu(T), tolerance=TOLERANCE, device="cpu"))
    assert (
        "tolerance: nothing is skipped. The weight does not depend on kv_idx, so that no block is provably small."
        in plain
    )


def test_a_block_mask_made_for_a_softmax_is_not_for_weights() -> None:
    mod = falling(SLOPES)
    mask = flexjax.create_block_mask(
        masks.causal, None, N, T, T, block_size=BLOCK, score_mod=mod, score_bound=8.0, tolerance=TOLERANCE
    )
    with pytest.raises(ValueError, match=r".") as error:
        flexjax.flex_attention(Q, KEY, V, weights=mod, block_mask=mask)
    assert str(error.value) == (
        "`block_mask` is made with tolerance for another score_mod; expected one for this call's. Make it with "
        "create_block_mask for this call, or pass tolerance= to flex_attention."
    )


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize("name", some_slow(["retention", "sigmoid"], ["retention"]))
def test_a_split_sequence_leaves_out_weights(name: str) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    context = flexjax.ContextParallel("x", flexjax.context_layout(masks.causal, T, devices=2, block_size=BLOCK))
    assert context.layout is not None
    arrays = [context.layout.shard(x) for x in (Q, KEY, V)]
    call = functools.partial(flexjax.flex_attention, mask_mod=masks.causal, **CALLS[name](SLOPES))
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(call, tolerance=0.02, score_bound=9.0, context=context))(*arrays)
    want = call(Q, KEY, V)
    off = np.abs(context.layout.unshard(found) - want).max()
    assert 0 < off < 0.02 * (np.abs(V).max() + np.abs(want).max())


def test_pages_whose_weights_are_small_are_not_read() -> None:
    table, _ = paged.allocate(paged.table(1, 8, 8, BLOCK), jnp.asarray([T]))
    cache = paged.empty(8, BLOCK, K, D, dtype=jnp.float32, norms=True)
    cache, table = paged.append(cache, table, KEY[:1], V[:1])
    step = lambda tolerance: flexjax.paged_attention(
        Q[:1, -1:], cache, table, tolerance=tolerance, weights=weights.retention(jnp.exp(-SLOPES)),
        return_aux=AuxRequest(total=True, lost=tolerance is not None),
    )  # fmt: skip
    (out, aux), (want, whole) = step(1e-4), step(None)
    assert 0 < float(aux.lost.max()) <= 1e-4
    assert (np.abs(aux.total - whole.total) <= np.asarray(aux.lost) + 1e-6).all()
    np.testing.assert_allclose(out, want, atol=1e-4 * (float(np.abs(V).max()) + float(np.abs(want).max())))


KERNELS = {
    "mosaic_tpu": ("mosaic_tpu", flexjax.KernelOptions(interpret=True)),
    "hopper": ("mosaic_gpu", flexjax.KernelOptions(interpret=True)),
    "mma": ("mosaic_gpu", flexjax.KernelOptions(interpret=True, instruction="mma")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_both_passes_run_on_the_kernels(name: str) -> None:
    implementation, options = KERNELS[name]
    if implementation == "mosaic_gpu" and jax.__version_info__ < (0, 11):
        pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12")
    arrays = tuple(x[:1].astype(jnp.bfloat16) for x in (Q, KEY, V))

    def loss(arrays: Any, implementation: str, options: Any, tolerance: float | None) -> Any:
        out = flexjax.flex_attention(
            *arrays, block_mask=MASK, tolerance=tolerance, implementation=implementation, kernel_options=options,
            **CALLS["retention"](SLOPES),
        )  # fmt: skip
        return jnp.sum((out * G[:1]).astype(jnp.float32)), out

    step = functools.partial(jax.value_and_grad(loss, has_aux=True), arrays)
    (_, out), found = step(implementation, options, 1e-4)
    (_, want), wanted = step("reference", None, None)
    for a, b in zip((out, *found), (want, *wanted), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=8e-2, rtol=3e-2)
