"""A million tokens: block masks of windows and documents in seconds, with lists as wide as the longest row."""

import pathlib
import re
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import and_masks, create_block_mask, masks
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


CUTS = np.sort(np.random.default_rng(0).choice(np.arange(1, TOKENS), 999, replace=False))
RANDOM_1000 = masks.document(np.searchsorted(CUTS, np.arange(TOKENS), side="right").astype(np.int32))
EQUAL_12 = masks.document((np.arange(TOKENS) * 12 // TOKENS).astype(np.int32))
IN_RESULTS = {
    "window of 1024": masks.sliding_window(1024),
    "causal, 1000 documents of random lengths": and_masks(masks.causal, RANDOM_1000),
    "causal, 12 documents of equal length": and_masks(masks.causal, EQUAL_12),
    "12 documents of equal length": EQUAL_12,
    "causal": masks.causal,
}


def in_results() -> dict[str, str]:
    """The megabytes of the lists that lab/results/CPU.md has, and with it docs/speed.md: name of the mask -> number."""
    _, _, section = (pathlib.Path(__file__).parents[2] / "lab/results/CPU.md").read_text().partition("## Block lists")
    return dict(re.findall(r"^\| (.+?) \| ([\d.]+) \|", section, re.MULTILINE))


def test_the_results_have_these_masks() -> None:
    """Apart from the next test, most of which is left to the slow run."""
    assert in_results().keys() == IN_RESULTS.keys()


@pytest.mark.parametrize("name", some_slow(IN_RESULTS, ["window of 1024"]))
def test_the_memory_of_lists_is_that_of_the_results(name: str) -> None:
    mask = create_block_mask(IN_RESULTS[name], None, None, TOKENS, TOKENS)
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    megabytes = sum(x.nbytes for x in lists) / 1e6
    wanted = in_results()[name]
    assert f"{megabytes:.{len(wanted.partition('.')[2])}f}" == wanted


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
