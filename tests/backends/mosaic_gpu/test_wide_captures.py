"""Captured arrays that are converted to float32 before the forward kernels: which ones, and that nothing of the results changes."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import masks
from flexjax.backends.mosaic_gpu.families import wide_captures
from flexjax.plan.kernel_plan import BlockLayout
from tests.arrays import array
from tests.cases.on_hopper import benched

TOKENS, HEADS, DIM = 128, 2, 64
RNG = np.random.default_rng(0)


def table(dtype: str = "bfloat16") -> jax.Array:
    return array(RNG.normal(size=(HEADS, 2 * TOKENS)), jnp.float32).astype(dtype)


def relative(s: typing.Any, t: jax.Array, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return s + t[h, q - k + TOKENS]


def times(s: typing.Any, t: jax.Array, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    """A product with an element, and an element that no difference of positions gives."""
    return s * t[h, q - k + TOKENS] + t[h, (q * k) % TOKENS]


@pytest.mark.parametrize(
    ("mod", "dtype", "sees"), [(relative, "bfloat16", True), (times, "bfloat16", False), (relative, "float16", False)]
)
def test_bits_and_dtypes_stay(mod: typing.Any, dtype: str, sees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, lse and gradients, that of the table too."""
    shape = (1, TOKENS, HEADS, DIM)
    q, k, v, d_out = (array(RNG.normal(size=shape), jnp.float32).astype(dtype) for _ in range(4))
    options, captured = flexjax.KernelOptions(interpret=True), table(dtype)
    made: list[frozenset[int]] = []
    chosen = wide_captures._chosen
    monkeypatch.setattr(wide_captures, "_chosen", lambda *a: made.append(chosen(*a)) or made[-1])

    def run(least: int) -> list[np.ndarray]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array) -> typing.Any:
            score_mod = lambda s, b, h, q, k: mod(s, t, h, q, k)
            return flexjax.flex_attention(
                q, k, v, score_mod=score_mod, mask_mod=masks.causal if sees else None,
                implementation="mosaic_gpu", kernel_options=options, return_aux=flexjax.AuxRequest(lse=True),
            )  # fmt: skip

        monkeypatch.setattr(wide_captures, "LEAST_ENTRIES", least)
        jax.clear_caches()  # of the passes, which are lowered once a plan
        (out, aux), pull = jax.vjp(attend, q, k, v, captured)
        gradients = pull((d_out, jax.tree.map(jnp.ones_like, aux)))
        assert [x.dtype for x in gradients] == [jnp.dtype(dtype)] * 4
        return [np.asarray(x.astype(jnp.float32)) for x in (out, aux.lse, *gradients)]

    plain, wide = run(1 << 60), run(0)
    assert made == [frozenset(), frozenset({0})]  # a forward pass each
    for x, y in zip(plain, wide, strict=True):
        np.testing.assert_array_equal(x, y)


def chosen(mod: typing.Any, tokens: int = 8192, **words: typing.Any) -> frozenset[int]:
    """The numbers of captured arrays that are converted in the forward pass of a call at head dim 64, batch 2, 32 heads."""
    plan = benched(tokens=tokens, score_mod=mod, **words)
    assert plan.score is not None
    return wide_captures._chosen(plan, plan.score)


T = 8192
SMALL, ROWS = jnp.zeros(2 * T, jnp.bfloat16), jnp.zeros(T, jnp.bfloat16)


def test_which_arrays_are_converted() -> None:
    assert chosen(lambda s, b, h, q, k: s + SMALL[q - k + T]) == {0}
    half = SMALL.astype(jnp.float16)
    assert chosen(lambda s, b, h, q, k: s * half[(q * k) % T] + half[q - k + T]) == {0}
    assert not chosen(lambda s, b, h, q, k: s + SMALL.astype(jnp.float32)[q - k + T])
    assert not chosen(lambda s, b, h, q, k: s + SMALL[q - k + T] * SMALL[q - k + T])  # a product in bfloat16
    assert not chosen(lambda s, b, h, q, k: s + SMALL[q - k + T] + jnp.cos(SMALL[q - k + T]))
    assert not chosen(lambda s, b, h, q, k: s + ROWS[q] + ROWS[k])  # once a row or column
    large = jnp.zeros((128, 2 * T), jnp.bfloat16)
    assert not chosen(lambda s, b, h, q, k: s + large[h, q - k + T])
    pair = jnp.zeros((1024, 1024), jnp.bfloat16)
    assert not chosen(lambda s, b, h, q, k: s + pair[q, k], tokens=1024, heads=256)
    by_group = jnp.zeros((1, 1024, 1024), jnp.bfloat16)  # copied tile by tile
    assert not chosen(lambda s, b, h, q, k: s + by_group[h // 256, q, k], tokens=1024, heads=256)
    assert chosen(lambda s, b, h, q, k: s + SMALL[q - k + T], tokens=1024, heads=256) == {0}


def test_small_calls_convert_nothing() -> None:
    mod = lambda s, b, h, q, k: s + SMALL[q - k + T]
    assert not chosen(mod, tokens=1024)
    plan = benched(score_mod=mod)
    assert plan.score is not None
    assert plan.blocks is not None
    assert isinstance(plan.blocks, BlockLayout)
    narrow = dataclasses.replace(plan, blocks=plan.blocks.changed(partial=2, full=1))  # of 128 keys each
    assert not wide_captures._chosen(narrow, plan.score)
