"""Weights in place of softmax over a cache in pages: ragged requests, a shared prefix whose parts add, and the kernels."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import AuxRequest, KernelOptions, Weights
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow
from tests.paged import test_on_kernels as on_kernels
from tests.paged.test_paged_attention import LENGTHS, assert_same, biased, definition, draw, served
from tests.paged.test_shared_prefix import COUNTS, OWN, forked, window

N, D = 4, 8
TOTAL = AuxRequest(total=True)


def silu(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return jax.nn.silu(s + 0.1 * b) * jnp.exp(-0.05 * (q - k))


DIVIDED = Weights(silu, lambda total: 1 + total**2)


@pytest.mark.parametrize("ragged", some_slow([False, True], [True]))
def test_it_is_attention_on_gathered_keys(ragged: bool) -> None:
    cache, table = served(LENGTHS, 8)
    counts = np.asarray([3, 0, 1, 2], np.int32)
    q = draw(100, len(LENGTHS), 3, N, D)
    call: dict[str, typing.Any] = dict(score_mod=biased(draw(8, N, 30)), weights=DIVIDED, return_aux=TOTAL)
    out, aux = definition(q, cache, table, query_seq_lengths=array(counts), **call)
    want: typing.Any = out, aux.total
    given: dict[str, typing.Any] = dict(query_seq_lengths=array(counts))
    if ragged:
        own = lambda x: jnp.concatenate([*(x[r, :c] for r, c in enumerate(counts)), jnp.zeros((2, *x.shape[2:]))])
        q, want, given = own(q), jax.tree.map(own, want), dict(cu_q_lens=array(np.cumsum([0, *counts]), np.int32))
    got, found = quick_jit(lambda *x: flexjax.paged_attention(*x, **given, **call))(q, cache, table)
    assert_same((got, found.total), want)


def test_parts_of_a_shared_prefix_add() -> None:
    cache, table, shared = forked(OWN, {0: 16, 1: 11})
    q, counts = draw(3, len(OWN), 3, N, D), array(np.asarray(COUNTS))
    call: dict[str, typing.Any] = dict(weights=DIVIDED, mask_mod=window, return_aux=TOTAL, query_seq_lengths=counts)
    attend = lambda **more: quick_jit(lambda *x: flexjax.paged_attention(*x, **call, **more))(q, cache, table)
    (out, aux), (want, of_whole) = attend(shared=shared), attend()
    assert_same((out, aux.total), (want, of_whole.total), 1e-5)


@pytest.mark.slow
@on_kernels.both
def test_kernels(backend: str) -> None:
    cache, table = on_kernels.stored(backend, [300, 1, 40], 16, n=20, pool=40)
    q = on_kernels.draw(7, 3, 2, on_kernels.N, on_kernels.D).astype(on_kernels.dtype_of(backend))
    small = lambda *at: silu(*at) / 8
    got = on_kernels.run(backend, q, cache, table, weights=small)
    want = flexjax.paged_attention(q, cache, table, weights=small, implementation="xla")
    on_kernels.assert_near(backend, got, want)


def test_a_cache_of_bytes_and_weights_run_on_xla() -> None:
    """The GPU kernel for keys in pages says why not."""
    cache, table = on_kernels.stored(on_kernels.GPU, [40], 16, n=3, pool=5)
    cache = flexjax.paged.empty(*cache.key.shape[:3], 64, dtype="int8")
    q = jnp.zeros((1, 1, on_kernels.N, 64), "bfloat16")
    with pytest.raises(NotImplementedError, match=r"it takes no weights beside a quantised cache\."):
        flexjax.paged_attention(
            q, cache, table, weights=silu, implementation="mosaic_gpu", kernel_options=KernelOptions(interpret=True)
        )
    assert flexjax.paged_attention(q, cache, table, weights=silu).shape == q.shape
