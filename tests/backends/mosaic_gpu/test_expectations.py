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


def plan_of(queries: int, count: int, **words: typing.Any) -> typing.Any:
    arrays = [normal("bfloat16", 2, n, heads, 64) for n, heads in ((queries, 8), (768, 2), (768, 2))]
    asked = AuxRequest(expectations={str(n): score for n in range(count)})
    return prepare(Arguments(*arrays, return_aux=asked, **words)).plan


def test_few_queries_run_on_the_forward_kernel() -> None:
    assert family_of(H200, flexjax.KernelOptions()).decodes(plan_of(1, 0))
    assert not family_of(H200, flexjax.KernelOptions()).decodes(plan_of(1, 1))
    assert support.refuses(plan_of(1, 4), H200) is None


def test_five_are_refused() -> None:
    why = "The GPU kernels compute at most 4 expectations, not 5."
    assert support.refuses(plan_of(768, 5), H200) == why


def test_forward_mode_runs_on_xla() -> None:
    moving = Wanted(True, False, False, False, False, False, ())
    why = support.BACKEND.refuses_tangent(plan_of(768, 1), H200, moving, None)
    assert why == "The GPU kernels have no forward mode of expectations."
