"""Expectations in the GPU kernels beyond the table of cases: kinds of softmax, few queries, what is refused."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import AuxRequest, masks
from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.families.choose_family import family_of
from flexjax.backends.target import Target
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.plan.kernel_plan import Wanted
from tests.arrays import array
from tests.marks import some_slow

H200 = Target("cuda", "NVIDIA H200", "9.0", 132)


def normal(dtype: str, *shape: int) -> jax.Array:
    return array(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def score(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return s


def log_of_distance(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.log(1.0 + q - k)  # NaN above the diagonal


def soft(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return 3 * jnp.tanh(s / 3)


def alibi(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return s + 0.1 * (k - q)


ASKED = AuxRequest(lse=True, expectations={"score": score, "log": log_of_distance})

KINDS: dict[str, tuple[typing.Any, str, dict]] = {
    "running maximum": (None, "bfloat16", dict(mask_mod=masks.causal)),
    "static reference": (None, "bfloat16", dict(mask_mod=masks.causal, score_mod=soft)),
    "row term": (None, "bfloat16", dict(mask_mod=masks.causal, score_mod=alibi, sinks=jnp.ones(2))),
    "large scores": (None, "float16", dict(mask_mod=masks.causal, score_mod=lambda s, b, h, q, k: s * jnp.exp2(h))),
    "float32": (None, "float32", dict(mask_mod=masks.causal)),
    "mma": ("mma", "float16", dict(mask_mod=masks.causal, score_mod=alibi)),
    "tcgen05": ("tcgen05", "bfloat16", dict(mask_mod=masks.causal, score_mod=alibi)),
}


@pytest.mark.parametrize("name", some_slow(KINDS, ["mma"]))
def test_kinds_of_softmax(name: str) -> None:
    instruction, dtype, words = KINDS[name]
    arrays = [normal(dtype, 1, 100, heads, 32) for heads in (2, 1, 1)]
    options = flexjax.KernelOptions(interpret=True, instruction=instruction)
    attend = lambda **more: flexjax.flex_attention(*arrays, return_aux=ASKED, **words, **more)[1].expectations
    got, want = attend(implementation="mosaic_gpu", kernel_options=options), attend(implementation="xla")
    for x in got:
        np.testing.assert_allclose(got[x], want[x], rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_gradients_of_wide_heads_beside_dropout() -> None:
    """Of float32, which is three parts in 16 bits, so that two warpgroups share dK and dV at head dim 64."""
    q, k, v = (normal("float32", 1, 100, heads, 64) for heads in (2, 1, 1))
    words = dict(mask_mod=masks.causal, score_mod=alibi, dropout=flexjax.Dropout(0.2, jax.random.key(0)))

    def loss(arrays: tuple[jax.Array, ...], **more: typing.Any) -> jax.Array:
        out, aux = flexjax.flex_attention(*arrays, return_aux=ASKED, **words, **more)
        return (out**2).sum() + sum((x**2).sum() for x in (aux.lse, *aux.expectations.values()))

    got, want = (jax.grad(loss)((q, k, v), **more) for more in (options_of(None), dict(implementation="xla")))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * float(jnp.abs(y).max()))


def plan_of(queries: int, count: int, **words: typing.Any) -> typing.Any:
    arrays = [normal("bfloat16", 2, n, heads, 64) for n, heads in ((queries, 8), (768, 2), (768, 2))]
    asked = AuxRequest(expectations={str(n): score for n in range(count)})
    return prepare(Arguments(*arrays, return_aux=asked, **words)).plan


def silu(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return s * jax.nn.sigmoid(s)


FEW: dict[str, tuple[typing.Any, dict]] = {
    "running maximum": (None, dict(mask_mod=masks.causal)),
    "row term, sinks": (None, dict(mask_mod=masks.causal, score_mod=alibi, sinks=jnp.ones(4))),
    "weights": (None, dict(mask_mod=masks.causal, weights=silu)),
    "mma": ("mma", dict(mask_mod=masks.causal, score_mod=alibi)),
    "mma, weights": ("mma", dict(mask_mod=masks.causal, weights=silu)),
}


def options_of(instruction: typing.Any, **more: typing.Any) -> dict:
    return dict(
        implementation="mosaic_gpu",
        kernel_options=flexjax.KernelOptions(interpret=True, instruction=instruction, **more),
    )


def assert_same(got: dict[str, jax.Array], want: dict[str, jax.Array]) -> None:
    for x in want:
        np.testing.assert_allclose(got[x], want[x], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", some_slow(FEW, ["running maximum"]))
def test_few_queries_over_chunks_of_keys(name: str) -> None:
    """Three chunks; of the second batch entry no key, and of the first no query at the end."""
    instruction, words = FEW[name]
    arrays = [normal("bfloat16", 2, n, heads, 64) for n, heads in ((3, 4), (300, 2), (300, 2))]
    words |= dict(query_seq_lengths=jnp.asarray([2, 3]), key_value_seq_lengths=jnp.asarray([290, 0]))
    words |= dict(origin=flexjax.Origin(query="end"), return_aux=AuxRequest(expectations=ASKED.expectations))
    attend = lambda **more: flexjax.flex_attention(*arrays, **words, **more)[1].expectations
    assert_same(attend(**options_of(instruction, split=128)), attend(implementation="xla"))


PAGED = {"bfloat16": (None, None), "int8": (None, "int8"), "mma, float8": ("mma", "float8_e4m3fn")}


@pytest.mark.parametrize("name", some_slow(PAGED, ["int8"]))
def test_few_queries_beside_pages(name: str) -> None:
    instruction, stored = PAGED[name]
    key, value = (normal("bfloat16", 20, 16, 2, 128) + i for i in range(2))
    cache = flexjax.paged.PagedCache(key, value)
    if stored is not None:
        bytes_ = (flexjax.Quantized((x * 16).astype(stored), jnp.full(2, 0.06)) for x in (key, value))
        cache = flexjax.paged.PagedCache(*bytes_)
    pages = array(np.random.default_rng(1).permutation(20)[:18].reshape(2, 9).astype(np.int32))
    table = flexjax.paged.PageTable(pages, jnp.asarray([140, 37]), jnp.zeros(20, jnp.int32), 16)
    query = normal("bfloat16", 2, 2, 4, 128)
    attend = lambda **more: flexjax.paged_attention(query, cache, table, return_aux=ASKED, **more)[1].expectations
    assert_same(attend(**options_of(instruction)), attend(implementation="xla"))


def test_few_queries_run_on_the_decode_kernel() -> None:
    for count in (0, 1, 4):
        assert family_of(H200, flexjax.KernelOptions()).decodes(plan_of(1, count))
        assert support.refuses(plan_of(1, count), H200) is None


def test_five_are_refused() -> None:
    why = "The GPU kernels compute at most 4 expectations, not 5."
    assert support.refuses(plan_of(768, 5), H200) == why


def test_forward_mode_runs_on_xla() -> None:
    moving = Wanted(True, False, False, False, False, False, ())
    why = support.BACKEND.refuses_tangent(plan_of(768, 1), H200, moving, None)
    assert why == "The GPU kernels have no forward mode of expectations."
