"""Mods that read whole vectors: a program whose size does not grow with them, and the numbers and gradients of the dense oracle."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax.backends.target import Target
from flexjax.ir.program import Program
from flexjax.passes import dispatch
from flexjax.plan.kernel_plan import KernelPlan, Wanted
from flexjax.trace.trace_mod import trace_score_mod
from tests.arrays import array
from tests.cases.small import to_mask
from tests.marks import some_slow

needs_new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12"
)
REFUSALS = (
    (
        "mosaic_tpu",
        Target("tpu", "TPU v6 lite"),
        "mosaic_tpu has no gradient for a captured array (float32[1,128,20]) of which score_mod reads a vector in a loop.",
    ),
    pytest.param(
        "mosaic_gpu",
        Target("cuda", "NVIDIA H200", "9.0"),
        "captured array 0 is read as a vector in a loop, and its gradient has a number for each element.",
        marks=needs_new_jax,
    ),
)
B, T, S, N, D = 2, 10, 14, 2, 8
Mod = Callable[..., Any]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def neighbours(K: int) -> np.ndarray:
    return np.random.default_rng(K).integers(0, S, (B, T, K)).astype(np.int32)


# ------------------------------------------------------------------- score functions of two arrays [B, T, K] and [B, S, K]


def weighted_sum(w: Any, u: Any) -> Mod:
    return lambda s, b, h, q, k: s + (w[b, q] * jnp.cos(0.3 * k)).mean()


def inner_product(w: Any, u: Any) -> Mod:
    return lambda s, b, h, q, k: s * jnp.tanh(w[b, q] @ u[b, k])


def bias_of_neighbours(w: Any, u: Any) -> Mod:
    nb = array(neighbours(w.shape[-1]))
    return lambda s, b, h, q, k: s + jnp.where(nb[b, q] == k, w[b, q], 0).sum() * s


def softmax(w: Any, u: Any) -> Mod:
    return lambda s, b, h, q, k: s + jax.nn.softmax(w[b, q] * s) @ u[b, k]


def extremes(w: Any, u: Any) -> Mod:
    return lambda s, b, h, q, k: s + jnp.max(w[b, q] * u[b, k]) - jnp.min(w[b, q] + u[b, k]) * s


def product(w: Any, u: Any) -> Mod:
    return lambda s, b, h, q, k: s * jnp.prod(1 + 0.2 * jnp.tanh(w[b, q]))


def best(w: Any, u: Any) -> Mod:
    return lambda s, b, h, q, k: s + u[b, k, jnp.argmax(w[b, q] * jnp.where(k % 2, 1.0, -1.0))]


def running_sum(w: Any, u: Any) -> Mod:
    return lambda s, b, h, q, k: s + jnp.cumsum(w[b, q])[k % w.shape[-1]] / 4


def joined(w: Any, u: Any) -> Mod:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        both = jnp.concatenate([w[b, q], u[b, k]])[3::-1]
        return s + (both * jnp.arange(both.size)).sum() + (u[b, k][::-1] * w[b, q]).sum() * 0.1

    return mod


def buckets(w: Any, u: Any) -> Mod:
    nb = array(neighbours(w.shape[-1]))
    return lambda s, b, h, q, k: s + jnp.where(nb[b, q] // 3 == k % 3, jnp.tanh(w[b, q] * s), 0).sum() / 8


def network(w: Any, u: Any) -> Mod:
    """Two nested products; the loops of the derivative meet the same loop index again."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        hidden = jax.nn.relu(s * 0.3 * w[b, q])
        return s + jax.nn.gelu(hidden @ u[b, :12, :12]) @ w[b, 0, :12]

    return mod


SCORES = (
    weighted_sum, inner_product, bias_of_neighbours, softmax, extremes, product, best, running_sum, joined, buckets, network
)  # fmt: skip


def numbers(implementation: str, make: Callable, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The loss of a call and its gradients by query, key, value and the arrays."""

    def loss(query: Any, key: Any, value: Any, *read: Any) -> Any:
        out = flexjax.flex_attention(query, key, value, implementation=implementation, **make(*read))
        return (out * draw(B, T, N, D, seed=4)).sum()

    given = [draw(B, T, N, D, seed=1), draw(B, S, N, D, seed=2), draw(B, S, N, D, seed=3), *arrays]
    by = tuple(n for n, x in enumerate(given) if x.dtype == np.float32)
    return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, by))(*given))


@pytest.mark.parametrize("make", some_slow(SCORES, (inner_product, network, bias_of_neighbours)))
def test_gradients_are_those_of_the_dense_oracle(make: Callable) -> None:
    arrays = [draw(B, T, 12, seed=5), draw(B, S, 12, seed=6)]
    score = lambda *read: {"score_mod": make(*read)}
    for got, wanted in zip(numbers("xla", score, arrays), numbers("reference", score, arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("K", some_slow((1, 8, 9, 13, 64, 65, 2048), (1, 13, 65)))
def test_vectors_of_every_length(K: int) -> None:
    def mods(w: Any, nb: Any) -> dict[str, Mod]:
        return {
            "score_mod": lambda s, b, h, q, k: s + (w[b, q] * jnp.cos(0.3 * k)).mean(),
            "mask_mod": lambda b, h, q, k: jnp.any(nb[b, q] == k) | (k == 0),
        }

    arrays = [draw(B, T, K, seed=5), neighbours(K)]
    for got, wanted in zip(numbers("xla", mods, arrays), numbers("reference", mods, arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)


def test_forward_mode_reads_vectors() -> None:
    w, u = draw(B, T, 12, seed=5), draw(B, S, 12, seed=6)
    main = [draw(B, T, N, D, seed=1), draw(B, S, N, D, seed=2), draw(B, S, N, D, seed=3)]

    def tangent(implementation: str) -> Any:
        call = lambda w, u: flexjax.flex_attention(*main, score_mod=inner_product(w, u), implementation=implementation)
        return jax.jit(lambda w, u: jax.jvp(call, (w, u), (jnp.cos(w), jnp.sin(u)))[1])(w, u)

    np.testing.assert_allclose(tangent("xla"), tangent("reference"), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------- the size of a program


def programs(K: int, make: Callable) -> tuple[Program, Program]:
    traced = trace_score_mod(make(array(draw(B, T, K)), array(draw(B, S, K))), (B, N, T, S))
    assert traced.derivative is not None, traced.why_not
    return traced.program, traced.derivative


@pytest.mark.parametrize("make", [m for m in SCORES if m is not network])
def test_the_program_does_not_grow_with_the_vectors(make: Callable) -> None:
    if make is not running_sum:  # its index is reduced only below the number of keys
        assert len(programs(2000, make)[1].steps) == len(programs(13, make)[1].steps)
    for few, many in zip(programs(11, make), programs(13, make), strict=True):
        assert len(many.steps) == len(few.steps)


def test_a_network_does_not_grow_with_its_width() -> None:
    def steps(W: int) -> list[int]:
        first, second, last = (array(draw(*s)) for s in ((1, W), (W, W), (W,)))
        relu = jax.nn.relu
        mod = lambda s, b, h, q, k: s + relu(relu(((q - k) / T)[None] @ first) @ second) @ last
        traced = trace_score_mod(mod, (B, N, T, S))
        assert traced.derivative is not None
        return [len(traced.program.steps), len(traced.derivative.steps)]

    assert steps(12) == steps(40)


# ------------------------------------------------------------------- block lists


def masks_of_vectors(K: int) -> dict[str, Mod]:
    nb, near = neighbours(K), (np.arange(T)[:, None] + np.arange(K) // 5 - 1).clip(0, S - 1).astype(np.int32)
    nb, near, w = array(nb), array(near), array(draw(B, T, K))
    return {
        "any": lambda b, h, q, k: jnp.any(nb[b, q] == k),
        "any_near": lambda b, h, q, k: jnp.any(near[q] == k),
        "all": lambda b, h, q, k: jnp.all(near[q] <= k),
        "count": lambda b, h, q, k: (near[q] < k).sum() > 3,
        "sum": lambda b, h, q, k: (w[b, q] * k).sum() < 2.0,
        "extremes": lambda b, h, q, k: (near[q].max() < k) | (near[q].min() > k),
        "arange": lambda b, h, q, k: jnp.any(jnp.arange(K) + q == k),
        "nested": lambda b, h, q, k: jnp.any(jnp.any(nb[b, q][:, None] == near[k % T][None], 1)),
    }


@pytest.mark.parametrize("name", masks_of_vectors(9))
def test_the_analysis_calls_no_block_full_or_empty_that_is_not(name: str) -> None:
    mod = masks_of_vectors(12)[name]
    dense = jax.jit(lambda: jnp.stack([dense_mask(mod, b) for b in range(B)]))()
    for exact in (False, True):
        made = flexjax.create_block_mask(mod, B, None, T, S, block_size=4, exact=exact)
        np.testing.assert_array_equal(np.asarray(to_mask(made))[:, 0], dense)


def dense_mask(mod: Mod, b: int) -> jax.Array:
    """bool [T, S] of one batch entry."""
    return jax.vmap(lambda q: jax.vmap(lambda k: mod(b, 0, q, k))(jnp.arange(S)))(jnp.arange(T))


# ------------------------------------------------------------------- the kernels


def kernel_call(implementation: str, **options: Any) -> Callable:
    """(query, w, neighbours) -> the sum of a call that reads vectors in score_mod and mask_mod."""
    key, value = (array(draw(1, 128, 1, 64, seed=n), jnp.bfloat16) for n in (2, 3))

    def call(query: Any, w: Any, nb: Any) -> Any:
        out = flexjax.flex_attention(
            query, key, value, implementation=implementation, **options,
            score_mod=lambda s, b, h, q, k: s + jnp.tanh(w[b, q] @ w[b, k]),
            mask_mod=lambda b, h, q, k: jnp.any(nb[b, q] == k) | (k == 0),
        )  # fmt: skip
        return (out.astype(jnp.float32) * jnp.cos(jnp.arange(64))).sum()

    return call


def kernel_arrays(K: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    nb = np.random.default_rng(K).integers(0, 128, (1, 128, K)).astype(np.int32)
    return array(draw(1, 128, 1, 64), jnp.bfloat16), array(draw(1, 128, K) / K**0.5), array(nb)


@pytest.mark.parametrize("backend", [pytest.param("mosaic_gpu", marks=[needs_new_jax, pytest.mark.slow]), "mosaic_tpu"])
@pytest.mark.parametrize("by", [(0,), (0, 1)])
def test_kernels_read_vectors(backend: str, by: tuple[int, ...]) -> None:
    """A gradient of a vector is that of xla."""
    arrays = kernel_arrays(20)
    kernel = kernel_call(backend, kernel_options=flexjax.KernelOptions(interpret=True))
    got = jax.value_and_grad(kernel, by)(*arrays)
    wanted = jax.jit(jax.value_and_grad(kernel_call("reference"), by))(*arrays)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0.03, atol=0.02 * max(1, np.abs(y).max()))


@needs_new_jax
@pytest.mark.parametrize("by", [0, (0, 1)])
def test_gpu_kernels_lower_loops_of_any_length_alike(by: Any) -> None:
    def lines(K: int) -> int:
        run = jax.jit(jax.grad(kernel_call(("mosaic_gpu", "xla")), by))
        traced = run.trace(*kernel_arrays(K))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", flexjax.FallbackWarning)  # the gradient of w runs on xla
            return len(traced.lower(lowering_platforms=("cuda",)).as_text())

    assert abs(lines(1000) / lines(20) - 1) < 0.05


@pytest.mark.parametrize("make", [weighted_sum, inner_product])
@pytest.mark.parametrize(("backend", "target", "sentence"), REFUSALS)
def test_kernels_refuse_the_gradient_of_a_vector(backend: str, target: Target, sentence: str, make: Callable) -> None:
    w = array(np.zeros((1, 128, 20), np.float32))
    traced = trace_score_mod(make(w, array(np.ones((1, 128, 20), np.float32))), (1, 1, 128, 128))
    plan = KernelPlan(1, 1, 1, 128, 128, 64, 64, "bfloat16", "BTNH", 1.0, traced.program, None)

    def refusal(gradient: bool) -> str | None:
        wanted = Wanted(True, True, True, False, False, False, (gradient,) * len(traced.program.captures))
        return dispatch.backend(backend).refuses_backward(plan, target, wanted, traced.derivative)

    assert refusal(True) == sentence
    assert refusal(False) is None
