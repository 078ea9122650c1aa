"""The decode kernel: which calls it runs, its results in the simulator, bits that depend on nothing else, and machine code.

Compiled in a child process, which this file also is: `python test_decode.py name...`.
"""

import dataclasses
import itertools
import pathlib
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
from flexjax.backends.mosaic_gpu import support  # noqa: E402
from flexjax.backends.mosaic_gpu.decode import hopper_tiles as decode_hopper_tiles  # noqa: E402
from flexjax.backends.mosaic_gpu.decode import intervals as decode_intervals  # noqa: E402
from flexjax.backends.mosaic_gpu.families import choose_kernel  # noqa: E402
from flexjax.ir.evaluate_scalars import as_mask_mod  # noqa: E402
from flexjax.ir.fold_heads import fold_heads  # noqa: E402
from flexjax.ir.origin import OriginLayout, Starts  # noqa: E402
from flexjax.plan.kernel_plan import KernelPlan, Lengths, Operands, Results, Scales  # noqa: E402
from flexjax.trace.trace_mod import trace_mask_mod  # noqa: E402
from flexjax.types import KernelOptions  # noqa: E402
from tests.backends.mosaic_gpu import compile_hopper  # noqa: E402
from tests.cases.on_hopper import ForwardProblem, assert_results_close, forward_problem, run_forward  # noqa: E402
from tests.cases.small import quick_jit  # noqa: E402

needs_kernels = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12"
)

RNG = np.random.default_rng(7)
TABLE = jnp.asarray(RNG.normal(size=(12, 1200)), jnp.float32)
SLOPES = jnp.asarray(RNG.normal(size=12) / 100, jnp.float32)
DOCUMENTS = jnp.asarray((np.arange(600) // 70)[None].repeat(3, 0), jnp.int32)


def relative(s: typing.Any, b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return s + TABLE[h, q - k + 600]


# ------------------------------------------------------------------- the choice


def small(**fields: typing.Any) -> KernelPlan:
    given: dict[str, typing.Any] = dict(batch=2, q_heads=8, kv_heads=2, q_len=1, kv_len=512, head_dim=64, value_dim=64)
    split = KernelOptions(split="auto")
    return KernelPlan(**{**given, "dtype": "bfloat16", "layout": "BTNH", "scale": 0.1, "options": split, **fields})


REFUSED: dict[str, tuple[dict[str, typing.Any], str]] = {
    "rows": ({"q_len": 17}, "68 packed rows (queries times query heads of a key head) are more than 64."),
    "extra": ({"extra_dim": 8, "extra_heads": 2}, "It takes no extra features."),
    "tile": (
        {"options": KernelOptions(block_q=64, split="auto")},
        "block_q, block_kv and num_stages are options of the forward kernel.",
    ),
    "runs": (
        {"origin": OriginLayout(1, 1, 1, 256, 2)},
        "It takes an origin of one run of queries and one of keys.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_other_kernel_runs(name: str) -> None:
    fields, sentence = REFUSED[name]
    assert decode_hopper_tiles.decode_refuses(small(**fields)) == sentence
    assert choose_kernel.decode_kernel(small(**fields)) is None


NONE = KernelOptions()


@pytest.mark.parametrize(
    ("fields", "decodes"),
    [
        ({}, True),
        ({"kv_len": 32}, True),
        ({"kv_len": 31}, False),
        ({"kv_len": 31, "lengths": (False, True)}, True),
        ({"kv_len": 31, "lengths": (True, False)}, False),
        ({"q_len": 16, "kv_len": 16, "lengths": (True, True)}, False),
        ({"q_len": 16, "kv_len": 16, "page": 16}, True),
        ({"kv_len": 31, "options": KernelOptions(split="auto")}, True),
        ({"options": KernelOptions(block_kv=64)}, False),
    ],
)
def test_where_the_keys_are_many(fields: dict[str, typing.Any], decodes: bool) -> None:
    made = small(**{"options": NONE, **fields})
    assert (choose_kernel.decode_kernel(made) is not None) == decodes


def test_keys_are_split_as_the_user_asks() -> None:
    asked = choose_kernel.decode_kernel(small(options=KernelOptions(split=300)))
    assert asked is not None
    assert asked.chunk == 384  # whole tiles of 128 keys


PAGES: dict[str, tuple[dict[str, typing.Any], str | None]] = {
    "few": ({}, None),
    "many rows": ({"q_len": 17}, None),
    "many rows of float32, in odd pages": ({"q_len": 17, "dtype": "float32", "page": 12}, None),
    "many rows of a part": (
        {"q_len": 17, "partial": True},
        "The GPU kernel for keys in pages does not run this call: 68 packed rows (queries times query heads of a key head) are "
        "more than 64.",
    ),
    "odd pages": (
        {"page": 12},
        "The GPU kernel for keys in pages does not run this call: pages of 12 keys are no multiple of 8.",
    ),
    "int8": ({"cache_dtype": "int8"}, None),
    "int8, odd head dim": (
        {"cache_dtype": "int8", "value_dim": 80},
        "The GPU kernel for keys in pages does not run this call: it takes quantised caches of head dims that are multiples "
        "of 64, not 64 and 80.",
    ),
    "int8, no room": (
        {"cache_dtype": "int8", "q_len": 16, "head_dim": 256, "value_dim": 256},
        "The GPU kernel for keys in pages does not run this call: its tiles of int8 with head dims 256 and 256 do not fit shared "
        "memory beside 64 packed rows.",
    ),
    "float32": (
        {"dtype": "float32"},
        "The GPU kernel for keys in pages does not run this call: it takes inputs of 16 bits, not float32.",
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_keys_in_pages(name: str) -> None:
    fields, sentence = PAGES[name]
    made = small(**{"options": NONE, "page": 16, "lengths": (False, True), **fields})
    assert support.refuses(made, None, (0, 11, 0)) == sentence


@pytest.mark.parametrize(
    ("fields", "in_place"),
    [
        ({}, True),
        ({"q_len": 16}, False),
        ({"partial": True}, False),
        ({"cache_dtype": "int8"}, False),
        ({"dtype": "float32"}, False),
        ({"page": 12}, False),
        ({"value_dim": 320}, False),
    ],
)
def test_the_forward_kernel_reads_pages_in_place(fields: dict[str, typing.Any], in_place: bool) -> None:
    """Whatever the batch and the number of pages are."""
    made = small(**{"q_len": 17, "options": NONE, "page": 16, "lengths": (False, True), **fields})
    assert choose_kernel.reads_pages(made) == in_place
    assert choose_kernel.reads_pages(dataclasses.replace(made, batch=9, kv_len=4096)) == in_place


def test_in_words() -> None:
    text = support.BACKEND.tile_sizes(small(kv_len=8192), typing.cast(typing.Any, None))
    assert text.split(", backward")[0] == "forward decode 4 x 128, 16 work items of 2048 keys"
    text = support.BACKEND.tile_sizes(small(q_len=40, page=16, lengths=(False, True)), typing.cast(typing.Any, None))
    assert text == "keys read in their pages, forward 64 x 128"
    many = small(q_len=40, page=16, lengths=(False, True), cache_dtype="int8")
    text = support.BACKEND.tile_sizes(many, typing.cast(typing.Any, None))
    assert text == "keys gathered from their pages, or pools widened, forward 64 x 128"
    text = support.BACKEND.tile_sizes(small(extra_dim=8, extra_heads=2), typing.cast(typing.Any, None))
    assert text.split(", backward")[0] == "forward 64 x 128 (not the decode kernel: It takes no extra features.)"


def test_tuning_leaves_the_forward_pass_alone() -> None:
    found = support.BACKEND.tile_candidates(small(), typing.cast(typing.Any, None))
    assert found
    assert {name for tile in found for name in tile} == {"block_q_bwd", "block_kv_bwd"}


def test_sizes() -> None:
    """Every configuration fits, and neither batch nor length nor the number of key heads changes it."""
    for head_dim, value_dim, q_len, group in itertools.product((16, 72, 128, 192, 256), (64, 256), (1, 4), (1, 7, 16)):
        made = small(head_dim=head_dim, value_dim=value_dim, q_len=q_len, q_heads=2 * group)
        tile = decode_hopper_tiles.decode_tile(made)
        assert decode_hopper_tiles.decode_fits(tile)
        assert tile.stages in (2, 4, 6)
        assert tile.chunk % tile.block_kv == 0
        other = dataclasses.replace(made, batch=5, kv_len=100_000, q_heads=8 * group, kv_heads=8)
        assert decode_hopper_tiles.decode_tile(other) == tile


def test_sizes_of_quantised_caches() -> None:
    """Every configuration that is not refused fits, with a slot of the rings for each consumer."""
    refused = 0
    for head_dim, value_dim, rows in itertools.product((64, 128, 192, 256), (64, 128, 192, 256), (1, 16, 34, 40, 64)):
        made = small(head_dim=head_dim, value_dim=value_dim, q_heads=2 * rows, page=16, cache_dtype="int8")
        if decode_hopper_tiles.decode_refuses(made) is not None:
            refused += 1
            continue
        tile = decode_hopper_tiles.decode_tile(made)
        assert decode_hopper_tiles.decode_fits(tile)
        assert tile.stages in (2, 4, 6)
    assert refused <= 10  # few and large ones


@needs_kernels
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_a_slot_is_always_read_by_the_same_warpgroup(stages: int) -> None:
    """A thread knows the phase of a barrier by counting its own waits, so it must wait for every fill of a slot."""
    from flexjax.backends.mosaic_gpu.decode.items import DecodeItem, DecodeItems
    from flexjax.backends.mosaic_gpu.machine.kernel_parts import i32

    reader: dict[int, int] = {}
    first_step = 0
    for total in (3, 1, 0, 4, 5, 5, 2, 7):
        for n in range(total):
            assert reader.setdefault((first_step + n) % stages, n % 2) == n % 2
        item = DecodeItem(*map(i32, (0, 0, 0, total, 0, 0, 0)))
        first_step = int(DecodeItems.next_step(i32(first_step), item))
    assert len(reader) == stages


@pytest.mark.parametrize(("q_len", "group"), [(1, 3), (2, 3), (5, 1)])
@pytest.mark.parametrize("moved", [False, True])
def test_programs_of_packed_rows(q_len: int, group: int, moved: bool) -> None:
    """Each packed row sees the mask of its own query and head, at the positions of the call."""
    sizes = (2, 2 * group, 20, 40)
    mask = lambda b, h, q, k: (q * 5 + k * 3 + h * 2 + b) % 7 > 2
    traced = trace_mask_mod(mask, sizes if moved else (2, 2 * group, q_len, 30))
    origin = OriginLayout(2, q_len, 1, 30, 1) if moved else None
    packed = fold_heads(traced.program, q_len, group, (2, 30), origin)
    starts = np.array([[9], [4]], np.int32), np.array([[3], [10]], np.int32)
    arrays = [jnp.asarray(x) for x in starts] if moved else []
    call = as_mask_mod(packed, arrays)
    for b, m, row, k in itertools.product(range(2), range(2), range(q_len * group), (0, 11, 29)):
        q, key = row // group, k
        if moved:
            q, key = q + int(starts[0][b, 0]), key + int(starts[1][b, 0])
        want = mask(b, m * group + row % group, q, key)
        assert bool(call(*map(jnp.int32, (b, m, row, k)))) == want, (b, m, row, k)
    if q_len == 1:
        assert packed.inputs[3].high == group - 1


INTERVALS: dict[str, typing.Any] = {
    "causal": lambda b, h, q, k: q >= k,
    "window of each head": lambda b, h, q, k: (2 * k < 2 * q + b) & (q - k < 6 + 3 * h),
    "by request": lambda b, h, q, k: (k >= SPANS[b, 0]) & (SPANS[b, q % 3] > k),
    "nothing": lambda b, h, q, k: (k > q + 5) & (q > k),
}
SPANS = jnp.asarray([[3, 30, 9], [11, 40, 5]], jnp.int32)


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("moved", [False, True])
def test_visible_intervals(name: str, moved: bool) -> None:
    """The keys from the first to the last that any query of an entry sees, for queries and keys at any position."""
    mask, sizes = INTERVALS[name], (2, 4, 20, 40)
    traced = trace_mask_mod(mask, sizes)
    plan = small(q_heads=4, q_len=3, kv_len=30, mask=traced.program)
    starts = np.array([[9], [4]], np.int32), np.array([[3], [0]], np.int32)
    if moved:
        plan = dataclasses.replace(plan, origin=OriginLayout(2, 3, 1, 30, 1))
    operands = Operands(*[jnp.zeros(())] * 3, None, None, None, (), traced.arrays, (), None)
    operands = operands._replace(origin=Starts(*map(jnp.asarray, starts)) if moved else None)
    first, end = quick_jit(lambda *x: decode_intervals.visible_interval(plan, *x))(
        operands, jnp.asarray([3, 2], jnp.int32)
    )
    assert (first is None) == (name == "causal")
    for b in range(2):
        at = [s[b, 0] if moved else 0 for s in starts]
        indices = np.ogrid[b : b + 1, 0:4, at[0] : at[0] + (3, 2)[b], at[1] : at[1] + 30]
        seen = np.flatnonzero(
            np.broadcast_to(np.asarray(mask(*map(jnp.asarray, indices))), (1, 4, (3, 2)[b], 30)).any((0, 1, 2))
        )
        low, high = (int(seen[0]), int(seen[-1]) + 1) if seen.size else (0, 0)
        assert int(end[b]) == high
        assert first is None or int(first[b]) == low


@pytest.mark.parametrize("mask", [lambda b, h, q, k: (q >= k) | (k < 3), lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k],
                                  lambda b, h, q, k: k * 100 > q])  # fmt: skip
def test_other_masks_have_no_interval(mask: typing.Any) -> None:
    assert not decode_intervals.has_interval(small(mask=trace_mask_mod(mask, (2, 8, 1, 512)).program))


@needs_kernels
def test_sums_do_not_depend_on_chunks_without_visits() -> None:
    from flexjax.backends.mosaic_gpu.decode.merge import sum_in_order

    x = jnp.asarray(RNG.normal(size=(2, 1, 40, 3)), jnp.float32)
    want = np.asarray(sum_in_order(x))
    np.testing.assert_allclose(want, np.asarray(x, np.float64).sum(2), rtol=1e-5, atol=1e-5)
    for length in (41, 300):
        longer = jnp.pad(x, ((0, 0), (0, 0), (0, length - 40), (0, 0)))
        np.testing.assert_array_equal(np.asarray(sum_in_order(longer)), want)


# ------------------------------------------------------------------- results in the simulator

SIMULATED: dict[str, dict[str, typing.Any]] = {
    "relative table": {"q_len": 3, "heads": 6, "kv_len": 200, "layout": "BNTH", "sinks": True, "max_scores": True,
                       "score": relative, "mask": lambda b, h, q, k: (q + 150 >= k) & (h != 4)},
    "window": {"q_len": 2, "batch": 2, "block": (128, 128), "mask_heads": 4, "mask_batch": 2,
               "mask": lambda b, h, q, k: (q + 250 >= k) & (q - k < 10 * h - 190 - 40 * b)},
    "blocks": {"q_len": 2, "kv_len": 384, "batch": 2, "block": (128, 128), "mask_heads": 4, "mask_batch": 2,
               "mask": lambda b, h, q, k: ((k // 128) % 2 == (h // 2) % 2) & (k > q + 20 * b)},
}  # fmt: skip
SLOW: dict[str, dict[str, typing.Any]] = {
    "plain": {"batch": 2},
    "linear bias": {"dim": 32, "score": lambda s, b, h, q, k: s + SLOPES[h] * (k - q)},
    "soft cap": {"score": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30), "batch": 3},
    "documents": {"mask": lambda b, h, q, k: DOCUMENTS[b, q + 30] == DOCUMENTS[b, k]},
    "hidden rows": {"mask": lambda b, h, q, k: (k < 0) | (h > 2), "sinks": True},
    "head dims": {"dim": 40, "value_dim": 96, "kv_len": 130, "heads": 3, "kv_heads": 3, "dtype": "float16"},
    "short cache": {"kv_len": 40, "score": lambda s, b, h, q, k: s + TABLE[h, q - k + 39]},
    "odd length": {"kv_len": 100, "dim": 128, "score": lambda s, b, h, q, k: s + TABLE[h, q - k + 99]},
    "large scores": {"score": lambda s, b, h, q, k: jnp.where(k < 150, s, -1e10)},
}


def problem(case: dict[str, typing.Any], **fields: typing.Any) -> ForwardProblem:
    given: dict[str, typing.Any] = dict(q_len=1, kv_len=320, heads=4, kv_heads=2, block=None)
    return forward_problem(**{**given, **case, **fields})


def run(plan: KernelPlan, operands: Operands, programs: int = 3, chunk: int = 128) -> Results:
    from flexjax.backends.mosaic_gpu.decode import hopper as decode_hopper

    assert decode_hopper_tiles.decode_refuses(plan) is None
    tile = dataclasses.replace(decode_hopper_tiles.decode_tile(plan), programs=programs, chunk=chunk)
    return run_forward(decode_hopper.forward, plan, operands, tile)


@needs_kernels
@pytest.mark.parametrize("name", [*SIMULATED, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_matches_dense(name: str) -> None:
    made = problem({**SIMULATED, **SLOW}[name])
    assert_results_close(made, run(made.plan, made.operands))


KEYS = np.array([200, 0, 137], np.int32)
"""Lengths of three batch entries."""


def ragged(
    entries: list[int], buffer: int, page: int = 0, stored: str | None = None, **fields: typing.Any
) -> tuple[KernelPlan, typing.Any]:
    """Some of three batch entries of two queries, the last of which has one, in a buffer of that length that holds NaN where
    nothing is stored. In pages they lie in any order, and the table has numbers of no page past the lengths.

    stored   dtype of a quantised cache in pages, whose scales are NaN for pages past the lengths
    """
    made = problem({"q_len": 2, "batch": 3, "kv_len": 240, "score": relative, "seed": 5, **fields})
    given = problem({"q_len": 2, "kv_len": buffer, "score": relative, **fields})
    plan = dataclasses.replace(given.plan, lengths=(True, True))
    plan = dataclasses.replace(plan, batch=len(entries))
    lengths = Lengths(jnp.array([2, 2, 1], jnp.int32)[np.array(entries)], jnp.asarray(KEYS[entries]))
    buffers = []
    for x in made.operands[1:3]:
        x = np.pad(np.asarray(x.astype(jnp.float32)), ((0, 0), (0, buffer - x.shape[1]), (0, 0), (0, 0)))
        x[np.arange(buffer) >= KEYS[:, None]] = np.nan
        buffers.append(jnp.asarray(x[entries], plan.dtype))
    query = made.operands.query[np.array(entries)]
    if not page:
        return plan, made.operands._replace(query=query, key=buffers[0], value=buffers[1], lengths=lengths)
    count = buffer // page
    order = np.random.default_rng(1).permutation(len(entries) * count)
    pages = np.argsort(order).reshape(-1, count).astype(np.int32)
    pages[np.arange(count) * page >= KEYS[entries][:, None]] = 2**31 - 1
    key, value = (x.reshape(-1, page, *x.shape[2:])[order] for x in buffers)
    operands = made.operands._replace(query=query, key=key, value=value, lengths=lengths, pages=jnp.asarray(pages))
    if stored is not None:
        scale = jnp.where(jnp.isnan(key[:, 0, :, 0]), jnp.nan, 0.02 + 0.01 * jnp.arange(plan.kv_heads))
        quantised = [(jnp.nan_to_num(x.astype(jnp.float32)) / 0.03).clip(-127, 127) for x in (key, value)]
        quantised = [(x.round() if stored == "int8" else x).astype(stored) for x in quantised]
        operands = operands._replace(key=quantised[0], value=quantised[1], scales=Scales(scale, 1.5 * scale))
    return dataclasses.replace(plan, page=page, cache_dtype=stored), operands


@needs_kernels
def test_bits_depend_on_the_request_alone() -> None:
    """A batch entry alone, and among others, in a longer buffer, in pages."""
    assert_bits_of_a_request(run)


def assert_bits_of_a_request(run: typing.Callable[..., Results]) -> None:
    """A batch entry of `ragged` has the same bits alone, and among others in a longer buffer, in pages; `run` as the function here."""
    found = []
    for entries, buffer, page, programs in (([2], 240, 0, 2), ([0, 1, 2], 480, 16, 5)):
        got = run(*ragged(entries, buffer, page), programs=programs)
        assert np.isfinite(np.asarray(got.out.astype(jnp.float32))).all()
        found.append((np.asarray(got.out.astype(jnp.float32))[-1], np.asarray(got.lse)[-1]))
    for alone, among in zip(*found, strict=True):
        np.testing.assert_array_equal(alone, among)
    out, lse = found[0]
    assert (out[0] != 0).any()
    assert (out[1] == 0).all()
    assert np.isneginf(lse[1]).all()


def assert_ragged_close(got: Results, plan: KernelPlan, entries: list[int]) -> None:
    """Compares out of `ragged(entries, ...)`, whose score_mod is `relative`, with dense attention of each entry, query by query."""
    out = np.asarray(got.out.astype(jnp.float32))
    made = problem({"q_len": 2, "batch": 3, "kv_len": 240, "score": relative, "seed": 5})
    for place, entry in enumerate(entries):
        keys = KEYS[entry]
        for n, queries in itertools.product(range(4), [1 if entry == 2 else 2]):
            q, k, v = (np.asarray(x.astype(jnp.float32), np.float64)[entry] for x in made.operands[:3])
            s = q[:queries, n] @ k[:keys, n // 2].T * plan.scale
            s = s + np.asarray(TABLE)[n, np.arange(queries)[:, None] - np.arange(keys) + 600]
            p = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
            want = p @ v[:keys, n // 2] / np.maximum(p.sum(-1, keepdims=True), 1e-30)
            np.testing.assert_allclose(out[place, :queries, n], want, atol=2e-2)
            assert (out[place, queries:, n] == 0).all()


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("page", [0, 8, 24, 48, 80, 120])
def test_lengths_and_pages_match_dense(page: int) -> None:
    plan, operands = ragged([2, 1, 0], 240, page)
    assert_ragged_close(run(plan, operands), plan, [2, 1, 0])


# ------------------------------------------------------------------- machine code


def compiled() -> dict[str, dict[str, typing.Any]]:
    seen = lambda b, h, q, k: q + 500 >= k
    same = lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k]
    return {
        "plain": {"dim": 128},
        "keys that 8 does not divide": {"dim": 128, "kv_len": 571, "layout": "BNTH"},
        "group of 3, which fills shared memory": {"dim": 128, "heads": 6},
        "linear bias": {"dim": 128, "score": lambda s, b, h, q, k: s + SLOPES[h] * (k - q)},
        "soft cap": {"dim": 128, "score": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30)},
        "relative table": {"dim": 128, "score": relative},
        "relative table of 16 queries": {"dim": 128, "q_len": 16, "score": relative, "mask": same},
        "documents": {"dim": 128, "mask": same},
        "causal, head dim 64": {"dim": 64, "q_len": 4, "mask": seen},
        "head dim 256": {"dim": 256, "score": relative},
        "head dim 256, 64 rows": {"dim": 256, "q_len": 16},
        "sinks": {"dim": 192, "value_dim": 128, "sinks": True, "max_scores": True, "layout": "BNTH", "heads": 3,
                  "kv_heads": 1, "dtype": "float16"},
        "pages of 16": {"dim": 128, "page": 16, "score": relative},
        "pages of 16, int8": {"dim": 128, "page": 16, "stored": "int8"},
        "pages of 64, float8": {"dim": 128, "page": 64, "stored": "float8_e4m3fn", "score": relative},
        "pages of 8, int8, head dim 256": {"dim": 256, "value_dim": 128, "page": 8, "stored": "int8", "dtype": "float16"},
        "pages of 16, float8, 16 rows": {"dim": 128, "q_len": 4, "page": 16, "stored": "float8_e4m3fn", "score": relative,
                                         "mask": seen},
        "pages of 16, float8, a table by documents": {"dim": 128, "q_len": 2, "page": 16, "stored": "float8_e4m3fn",
                                                      "score": relative, "mask": same},
        "pages of 8, int8, head dim 64": {"dim": 64, "page": 8, "stored": "int8"},
        "pages of 16, int8, 64 rows": {"dim": 128, "q_len": 16, "page": 16, "stored": "int8", "score": relative},
        "pages of 8, int8, head dims 256": {"dim": 256, "page": 8, "stored": "int8", "dtype": "float16", "score": relative,
                                           "q_len": 2, "mask": seen},
    }  # fmt: skip


def in_pages(made: ForwardProblem, page: int, stored: str | None) -> tuple[KernelPlan, Operands]:
    """The plan and the operands of a problem whose keys lie in pages, which keep their order, perhaps quantised."""
    plan, operands = made.plan, made.operands
    count = plan.kv_len // page
    pages = jnp.arange(plan.batch * count, dtype=jnp.int32).reshape(plan.batch, count)
    shape = lambda x: (plan.batch * count, page, *x.shape[2:])
    key, value = (x.reshape(shape(x)).astype(stored or x.dtype) for x in operands[1:3])
    scales = None if stored is None else Scales(*(jnp.ones((pages.size, plan.kv_heads), jnp.float32) for _ in range(2)))
    operands = operands._replace(key=key, value=value, pages=pages, scales=scales)
    return dataclasses.replace(plan, page=page, cache_dtype=stored), operands


def compile_cases(names: list[str]) -> None:
    from flexjax.backends.mosaic_gpu.decode import hopper as decode_hopper

    for name in names:
        given: dict[str, typing.Any] = dict(q_len=1, heads=8, kv_heads=2, kv_len=576, block=None, interpret=False)
        case = compiled()[name]
        page, stored = case.pop("page", 0), case.pop("stored", None)
        made = forward_problem(**{**given, **case})
        plan, operands = in_pages(made, page, stored) if page else (made.plan, made.operands)
        tile = decode_hopper_tiles.decode_tile(plan)

        def forward(operands: typing.Any, plan: typing.Any = plan, tile: typing.Any = tile) -> typing.Any:
            return decode_hopper.forward(plan, operands, tile)

        print(f"case {name}", file=sys.stderr, flush=True)
        compile_hopper.compile_for_hopper(forward, operands)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_no_spills(part: int) -> None:
    reason = compile_hopper.missing()
    if reason:
        pytest.skip(reason)
    names = list(compiled())[part::2]
    spilled = compile_hopper.spills(__file__, names)
    assert {name: sum(kernels.values()) for name, kernels in spilled.items()} == dict.fromkeys(names, 0)


if __name__ == "__main__":
    compile_cases(sys.argv[1:])
