"""Every public function runs under the settings by which users have jax watch their own code, and computes the same numbers."""

import contextlib
import functools
import typing
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import AuxRequest, KernelOptions, Origin, SharedPrefix, masks, mods, paged
from flexjax.nn import attention_fn, segment_attention
from tests.arrays import array
from tests.masks import test_masks
from tests.mods import test_mods

B, T, N, M, D = 2, 24, 4, 2, 8
rng = np.random.default_rng(0)
Q, QUERY_32 = (array(rng.standard_normal((B, T, N, D)), d) for d in (jnp.bfloat16, jnp.float32))
K, V = (array(rng.standard_normal((B, T, M, D)), jnp.bfloat16) for _ in range(2))
X = array(rng.standard_normal((B, T, N, D)), jnp.float32)
IDS = array(np.sort(rng.integers(0, 3, (B, T)), 1), jnp.int32)
LENGTHS = array([5, 20], jnp.int32)
KEY, RAW_KEY = jax.random.key(0), jax.random.PRNGKey(0)
GAIN, HALF = array(rng.standard_normal(N), jnp.float32), array(0.5, jnp.float32)
RATES = array(np.linspace(0.8, 0.99, N), jnp.float32)
PAIR = array(rng.standard_normal((N, T, T)), jnp.float32)
EXTRA = array(rng.standard_normal((B, T, 1, 4)), jnp.bfloat16), array(rng.standard_normal((B, T, 1, 4)), jnp.bfloat16)
BIAS, KEEP = array(rng.standard_normal((B, N, T, T)), jnp.bfloat16), array(rng.random((B, 1, T, T)) < 0.8, bool)
SCALES = array(np.full((B, N), 0.5), jnp.float32)
SCALES_OF_KEYS = SCALES[:, :M]
SINKS = array(np.zeros(N), jnp.float32)
BIASED = lambda s, b, h, i, j: s * GAIN[h] + PAIR[h, i, j]
TOGETHER = lambda b, h, i, j: (i >= j) & (IDS[b, i] == IDS[b, j])
BLOCKS = flexjax.create_block_mask(masks.causal, None, None, T, T, block_size=8)
ALL = AuxRequest(lse=True, max_scores=True)


def gradients(function: Callable, *arrays: jax.Array) -> typing.Any:
    """The results and the gradients; the cotangents are made by a program, because eager jax.grad makes them by a transfer."""
    results, pull = jax.vjp(function, *arrays)
    return results, pull(ONES(results))


ONES = jax.jit(lambda tree: jax.tree.map(jnp.ones_like, tree))


def attend(*, implementation: str = "xla", **arguments: typing.Any) -> Callable[[], typing.Any]:
    """The results of a call and its gradients by query, key and value."""

    def run(*arrays: jax.Array) -> tuple:
        out, aux = flexjax.flex_attention(*arrays, return_aux=ALL, implementation=implementation, **arguments)  # type: ignore[misc]
        return out, aux.lse

    return lambda: gradients(run, Q, K, V)


_b, _n, _t, _s = test_mods.SCORES.shape
OF_MODS = tuple(jax.ShapeDtypeStruct((_b, length, _n, D), jnp.float32) for length in (_t, _s, _s))


def learned(gain: jax.Array, pair: jax.Array, scale: jax.Array) -> jax.Array:
    mod = lambda s, b, h, i, j: s * gain[h] + pair[h, i, j]
    return flexjax.flex_attention(X, X, X, score_mod=mod, scale=scale, mask_mod=masks.causal)


def divided(rates: jax.Array) -> jax.Array:
    return flexjax.flex_attention(X, X, X, weights=flexjax.weights.retention(rates), mask_mod=masks.causal)


def second_order() -> typing.Any:
    run = lambda x: flexjax.flex_attention(x, X, X, mask_mod=masks.causal, score_mod=mods.softcap(5.0))
    return jax.jvp(lambda x: jax.vjp(run, x)[1](X)[0], (X,), (X,))


def pages(quantised: bool = False) -> typing.Any:
    """Every function of flexjax.paged, and attention by rows, with packed queries and over a shared prefix."""
    cache = paged.empty(16, 8, M, D, dtype=jnp.int8 if quantised else jnp.bfloat16, scales=0.5 if quantised else None)
    table, enough = paged.allocate(paged.table(3, 4, 16, 8), FIRST)
    cache, table = paged.append(cache, table, K3, K3, cu_q_lens=CU)
    table, _ = paged.allocate(paged.fork(table, FORKED), SECOND)
    cache, table = paged.append(cache, table, K1, K1)
    packed = flexjax.paged_attention(Q3, cache, table, cu_q_lens=CU, score_mod=BIASED, sinks=SINKS)
    rows = flexjax.paged_attention(Q1, cache, table, query_seq_lengths=1, return_aux=ALL)
    prefix = SharedPrefix(NONE_SHARED, PREFIX_PAGES, PREFIX_LENGTHS)
    with_prefix = flexjax.paged_attention(Q1, cache, table, shared=prefix)
    text = flexjax.explain(Q1, cache, table)
    return packed, rows, with_prefix, paged.gather(cache, paged.release(table, RELEASED)), enough, len(text)


FIRST, SECOND, CU = (array(x, jnp.int32) for x in ([5, 9, 0], [6, 10, 6], [0, 5, 14, 14]))
FORKED, RELEASED = array([-1, -1, 0], jnp.int32), array([False, True, False], bool)
NONE_SHARED, PREFIX_PAGES, PREFIX_LENGTHS = (array(x, jnp.int32) for x in ([-1, -1, -1], [[0, 1]], [8]))
K3, Q3 = (array(rng.standard_normal((16, n, D)), jnp.bfloat16) for n in (M, N))
K1, Q1 = (array(rng.standard_normal((3, 1, n, D)), jnp.bfloat16) for n in (M, N))


def mask_of(case: typing.Any) -> typing.Any:
    """The block mask of a case of test_masks.py, of the sizes that its mask is made for."""
    made_for = {size.axis: min(size.most, max(size.least, 16)) for size in getattr(case.mask, "made_for", ())}
    sizes = (
        made_for.get(axis, n)
        for axis, n in (("batch", B), ("heads", N), *zip(("queries", "keys"), case.sizes[0], strict=True))
    )
    with warnings.catch_warnings():  # of ids that are read past their end, which some cases are about
        warnings.filterwarnings("ignore", "`mask_mod` reads an array of shape")
        return flexjax.create_block_mask(case.mask, *sizes, block_size=8)


def blocks() -> typing.Any:
    made = flexjax.create_block_mask(TOGETHER, B, None, T, T, block_size=8, exact=True)
    lists = made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices
    again = flexjax.BlockMask.from_kv_blocks(*lists, mask_mod=TOGETHER, block_size=8, q_len=T, kv_len=T)
    part = made[:, :, 1]
    shown = (
        made.to_string(),
        repr(part),
        made.sparsity(),
        made.to_dense(),
        made.to_mask(),
        part.q_indices,
        again.full_q_indices,
    )
    return shown, attend(mask_mod=made.mask_mod)(), attend(block_mask=again)(), jax.jit(lambda m: m.to_mask())(made)


def heads_of(layer: Callable) -> typing.Any:
    return gradients(lambda x: layer(x, x, x, bias=BIAS, mask=KEEP, dtype=jnp.float32), X)


def equinox() -> typing.Any:
    eqx = pytest.importorskip("equinox")
    from flexjax.nn.equinox_adapter import MultiheadAttention

    with jax.transfer_guard("allow"), jax.legacy_prng_key("allow"), jax.numpy_rank_promotion("allow"):
        layer = MultiheadAttention(2, 8, dropout_p=0.1, key=KEY, mask_mod=masks.causal)  # equinox's own code
        x = jnp.ones((T, 8))
        call = eqx.filter_jit(lambda layer, x: layer(x, x, x, KEEP[0, 0], key=KEY).sum())
        return call(layer, x)


def pictures() -> typing.Any:
    pytest.importorskip("matplotlib")
    flexjax.visualize.mask(TOGETHER, T, T)
    flexjax.visualize.scores(X, X, score_mod=BIASED, mask_mod=masks.causal)
    flexjax.visualize.weights(X, X, score_mod=BIASED, mask_mod=masks.causal)


OUTS, LSES = (
    array(rng.standard_normal((2, B, T, N, D)), jnp.float32),
    array(rng.standard_normal((2, B, T, N)), jnp.float32),
)


def merged() -> typing.Any:
    return gradients(flexjax.merge_attention_states, OUTS, LSES)


jax_nn = functools.partial(flexjax.dot_product_attention, X, X, X, implementation="xla")
# fmt: off
ENTRIES: dict[str, Callable[[], typing.Any]] = {
    "plain": attend(), "causal": attend(mask_mod=masks.causal), "biased": attend(score_mod=BIASED, mask_mod=TOGETHER),
    "lengths": attend(key_value_seq_lengths=LENGTHS, query_seq_lengths=LENGTHS),
    "origin at the end": attend(mask_mod=TOGETHER, score_mod=mods.alibi(N), origin=Origin(query="end"), key_value_seq_lengths=LENGTHS, query_seq_lengths=LENGTHS),
    "origin": attend(mask_mod=masks.causal, origin=Origin(batch=1, head=2, query=LENGTHS, key=3)),
    "dropout": attend(dropout=flexjax.Dropout(0.1, KEY)), "one dropout": attend(dropout=flexjax.Dropout(0.1, RAW_KEY, broadcast=True)),
    "extras": attend(query_extra=EXTRA[0].repeat(N, 2), key_extra=EXTRA[1], sinks=SINKS, scale=HALF),
    "options": attend(kernel_options=KernelOptions(block_q=8, block_kv=8, block_q_bwd=8, block_kv_bwd=8), block_mask=BLOCKS, precision="high", scale=0.25),
    "float8": lambda: flexjax.flex_attention(*(flexjax.Quantized(x.astype(jnp.float8_e4m3fn), s) for x, s in ((Q, SCALES), (K, SCALES_OF_KEYS))), V.astype(jnp.float8_e4m3fn)),
    "reference": attend(score_mod=BIASED, mask_mod=TOGETHER, implementation="reference", sinks=SINKS, dropout=flexjax.Dropout(0.1, KEY)),
    "reference, lengths": attend(mask_mod=masks.causal, origin=Origin(query="end"), key_value_seq_lengths=LENGTHS, implementation="reference"),
    "learned": lambda: gradients(learned, GAIN, PAIR, HALF),
    "learned, in jit": lambda: jax.jit(functools.partial(gradients, learned))(GAIN, PAIR, HALF),
    "weights with a divisor": lambda: gradients(divided, RATES), "second order": second_order, "mapped": lambda: jax.vmap(lambda x: flexjax.flex_attention(x[None], x[None], x[None], mask_mod=masks.causal))(X),
    "weights": lambda: flexjax.attention_weights(X, X, mask_mod=masks.causal, score_mod=BIASED),
    "merged": merged, "pages": pages, "quantised pages": functools.partial(pages, True), "blocks": blocks,
    "jax.nn": lambda: jax_nn(bias=BIAS.astype(jnp.float32), mask=KEEP, is_causal=True),
    "jax.nn, lengths": lambda: jax_nn(query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS, local_window_size=(3, 2), scale=0.5),
    "flax": lambda: heads_of(attention_fn(BIASED, masks.causal)), "equinox": equinox,
    "segments": lambda: segment_attention(X, X, X, IDS, IDS),
    "explain": lambda: (flexjax.explain(Q, K, V, mask_mod=TOGETHER, score_mod=BIASED, key_value_seq_lengths=LENGTHS), flexjax.explain(Q, K, V, device="cuda", mask_mod=masks.causal, dropout=flexjax.Dropout(0.1, KEY))),
    "pictures": pictures, "layout": lambda: flexjax.context_layout(TOGETHER, T, T, devices=4, batch=B, block_size=2).positions,
    "profile": lambda: flexjax.profile(X, X, X, mask_mod=masks.causal, seconds=0.01).backend,
    "autotune": lambda: flexjax.autotune(X, X, X, mask_mod=masks.causal, seconds=0.01, cache=False).backend,
    "every mask": lambda: [mask_of(c.values[0]) for c in test_masks.ALL_CASES],
    "every mod": lambda: [flexjax.explain(*OF_MODS, score_mod=functools.partial(c.values[0].mod)) for c in test_mods.ALL_CASES],
}
MODES: dict[str, Callable[[], typing.Any]] = {
    "strict": lambda: jax.numpy_dtype_promotion("strict"), "rank": lambda: jax.numpy_rank_promotion("raise"),
    "guard": lambda: jax.transfer_guard("disallow"), "nans": lambda: jax.debug_nans(True), "infs": lambda: jax.debug_infs(True),
    "leaks": jax.checking_leaks, "x64": lambda: jax.enable_x64(True), "eager": jax.disable_jit,
    "device": lambda: jax.default_device(jax.devices()[0]), "precision": lambda: jax.default_matmul_precision("highest"),
    "legacy keys": lambda: jax.legacy_prng_key("error"), "typed keys": lambda: jax.enable_custom_prng(True),
}
# fmt: on

THREE = "strict, rank and guard"  # each raises for itself, so one run of an entry asks all of them

QUICK = {  # of each mode the entries of the default run; the others are slow
    THREE: (
        "biased",
        "origin at the end",
        "dropout",
        "reference",
        "weights with a divisor",
        "second order",
        "pages",
        "merged",
        "jax.nn",
        "flax",
        "explain",
        "every mod",
    ),
    "nans": ("biased", "origin at the end", "reference"),
    "infs": ("biased", "reference"),
    "leaks": ("plain",),
    "eager": ("plain",),
    "legacy keys": ("dropout",),
    "typed keys": ("dropout",),
    "x64": ("plain",),
    "device": ("plain",),
    "precision": ("plain",),
}


def row(mode: str, name: str) -> typing.Any:
    slow = name not in QUICK.get(mode, ())
    return pytest.param(mode, name, marks=[pytest.mark.slow] if slow else [], id=f"{mode}-{name}")


@pytest.mark.parametrize(
    ("mode", "name"), [row(mode, name) for mode in MODES for name in ENTRIES] + [row(THREE, n) for n in QUICK[THREE]]
)
def test_flexjax_runs_under_the_modes_that_watch_a_users_code(mode: str, name: str) -> None:
    with contextlib.ExitStack() as modes:
        for one in ("strict", "rank", "guard") if mode == THREE else (mode,):
            modes.enter_context(MODES[one]())
        ENTRIES[name]()


LONG = array(rng.standard_normal((N, 128, 128)), jnp.float32)
LOWERED = {
    "plain": dict(mask_mod=masks.causal),
    "biased": dict(score_mod=lambda s, b, h, i, j: s * GAIN[h] + LONG[h, i, j], mask_mod=masks.causal),
    "dropout": dict(dropout=flexjax.Dropout(0.1, KEY), key_value_seq_lengths=LENGTHS),
}  # fmt: skip


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", LOWERED)
def test_the_kernels_are_lowered_under_strict_modes(platform: str, name: str) -> None:
    backend = {"cuda": "mosaic_gpu", "tpu": "mosaic_tpu"}[platform]
    if platform == "cuda" and jax.__version_info__ < (0, 11):
        pytest.skip("the GPU kernels need jax 0.11")
    q, k, v = (jax.ShapeDtypeStruct((B, 128, n, 64), jnp.bfloat16) for n in (N, M, M))
    arguments: typing.Any = LOWERED[name]
    run = lambda *x: flexjax.flex_attention(*x, implementation=backend, **arguments).astype(jnp.float32).sum()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), jax.transfer_guard("disallow"):
        jax.jit(jax.grad(run, (0, 1, 2))).trace(q, k, v).lower(lowering_platforms=(platform,))


def test_a_score_mod_is_the_users_code() -> None:
    unclean = lambda s, b, h, i, j: s + HALF.astype(jnp.bfloat16)
    for implementation in ("xla", "reference"):
        run = functools.partial(flexjax.flex_attention, X, X, X, score_mod=unclean, implementation=implementation)
        run()
        with (
            jax.numpy_dtype_promotion("strict"),
            pytest.raises(
                jax.errors.TypePromotionError if hasattr(jax.errors, "TypePromotionError") else Exception,
                match="promotion path",
            ),
        ):
            run()


BAD = lambda s, b, h, i, j: s + jnp.log((i - j).astype(jnp.float32))
CASES_OF_NAN: dict[str, Callable[[], typing.Any]] = {
    "eager": lambda: flexjax.flex_attention(X, X, X, score_mod=BAD),
    "jit": lambda: jax.jit(lambda x: flexjax.flex_attention(x, x, x, score_mod=BAD))(X),
    "reference": lambda: flexjax.flex_attention(X, X, X, score_mod=BAD, implementation="reference"),
    "gradient": lambda: gradients(lambda x: flexjax.flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: jnp.sqrt(s * 0)), X),
    "gradient in jit": lambda: jax.jit(jax.grad(lambda x: flexjax.flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: jnp.sqrt(s * 0)).sum()))(X),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES_OF_NAN)
def test_debug_nans_says_where_a_nan_is(name: str) -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        CASES_OF_NAN[name]()


def test_debug_infs_passes_rows_without_keys() -> None:
    hidden = lambda b, h, i, j: i > 3
    infinite = array(np.full(X.shape, np.inf), jnp.float32)
    with jax.debug_infs(True):
        flexjax.flex_attention(X, X, X, mask_mod=hidden, return_aux=ALL)  # lse is -inf there
        with pytest.raises(FloatingPointError, match="inf"):
            flexjax.flex_attention(X, X, infinite)


def test_results_are_those_without_the_modes() -> None:
    wanted = ENTRIES["origin at the end"]()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), jax.transfer_guard("disallow"):
        got = ENTRIES["origin at the end"]()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
