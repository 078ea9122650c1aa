"""A million tokens: block masks of windows and documents in seconds and megabytes, without anything quadratic."""

import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import create_block_mask, masks
from flexjax.block_mask import classify, transpose
from flexjax.trace.trace_mod import trace_mask_mod
from tests.arrays import array
from tests.marks import some_slow

TOKENS = 1 << 20
IDS = np.sort(np.random.default_rng(0).integers(0, 500, TOKENS)).astype(np.int32)
MASKS = {
    "window": masks.sliding_window(1024),
    "two-sided window": masks.two_sided_window(512, 512),
    "documents": masks.document(jnp.asarray(IDS)),
}


@pytest.mark.parametrize("name", some_slow(MASKS, MASKS.keys() - {"documents"}))
def test_a_million_tokens(name: str) -> None:
    tracemalloc.start()
    start = time.perf_counter()
    mask = create_block_mask(MASKS[name], None, None, TOKENS, TOKENS)
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = sum(x.nbytes for x in jax.tree.leaves(mask))
    assert size < 100e6
    assert peak < 100e6
    assert seconds < 60  # about 2 on two quiet cores, nearly all of it compilation
    assert mask.sparsity() > 99
    visited = np.asarray(mask.kv_num_blocks + mask.full_kv_num_blocks)[0, 0]
    if name == "window":
        np.testing.assert_array_equal(visited[8:], 9)
    if name == "documents":
        first, last = IDS[::128], IDS[127::128]
        want = np.searchsorted(first, last, "right") - np.searchsorted(last, first, "left")
        np.testing.assert_array_equal(visited, want)


@pytest.mark.parametrize("heads", [(1, 1), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_coarse_to_fine_is_what_all_blocks_say(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    shift = array([0, 3, 500])
    ids = jnp.asarray(IDS[: 1 << 10] // 3)
    mask = lambda b, h, q, k: ((q >= k + shift[h]) & (ids[q] == ids[k])) | (k < 40 * b) | ((q > 900) & (k < 500))
    sizes = (1000, 1024, 8, 8)
    traced = trace_mask_mod(mask, (*heads, *sizes[:2]))
    blocked = classify.BlockedMask(traced.program, heads, sizes)
    plain = classify.classify_on_host(blocked, traced.arrays, True)
    monkeypatch.setattr(classify, "COARSE_FROM", 4)
    fine = classify.classify_on_host(blocked, traced.arrays, True)
    for a, b in zip(plain, fine, strict=True):
        np.testing.assert_array_equal(a, b)


def test_transposed_lists_are_not_folded_while_compiling() -> None:
    """XLA took two minutes to fold them for 131072 tokens: what is computed from constant lists stays in the program."""
    num, index = np.full((1, 1, 64), 64, np.int32), np.tile(np.arange(64, dtype=np.int32), (1, 1, 64, 1))
    make = jax.jit(lambda: transpose.transposed(jnp.asarray(num), jnp.asarray(index), columns=64, width=64))
    assert "optimization_barrier" in make.lower().as_text()
    np.testing.assert_array_equal(make()[0], num)
