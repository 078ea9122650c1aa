"""Tiles of the xla backend: what KernelOptions asks for is what runs, forward and backward apart."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, Origin, masks, mods
from flexjax.backends.target import Target
from flexjax.backends.xla import larger_blocks, tile_sizes
from flexjax.backends.xla.region import Region
from flexjax.backends.xla.tile import XlaTile
from flexjax.backends.xla.tile_sizes import choose_tile_sizes
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.ir.evaluate import evaluate
from flexjax.passes import dispatch
from flexjax.passes.dispatch import Run
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Results, Wanted
from flexjax.trace.trace_mod import trace_mask_mod
from tests.arrays import array
from tests.cases.random_masks import dense
from tests.cases.small import quick_jit
from tests.marks import some_slow

CPU = Target("cpu")
LENGTHS = (300, 200)
MASKS: dict[str, Callable | None] = {"plain": None, "causal": masks.causal}


def arrays() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(3)
    shapes = [(2, LENGTHS[0], 4, 16), (2, LENGTHS[1], 2, 16), (2, LENGTHS[1], 2, 16)]
    return tuple(array(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def plan(mask: str, **tiles: int) -> KernelPlan:
    options: Any = {"mask_mod": MASKS[mask], "kernel_options": KernelOptions(**tiles)}
    return prepare(Arguments(*arrays(), **options)).plan


def tile(plan: KernelPlan, backward: bool) -> tuple[int, int]:
    sizes = choose_tile_sizes(plan, CPU, backward)
    return sizes.block_q, sizes.block_kv * sizes.chunk


def value_and_slopes(mask: str, **tiles: int) -> Any:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        options = KernelOptions(**tiles)
        score_mod = lambda s, b, h, i, j: s + jnp.sin(1.0 * (i - j))
        out = flexjax.flex_attention(
            q, k, v, score_mod=score_mod, mask_mod=MASKS[mask], implementation="xla", kernel_options=options
        )
        return jnp.sum(out**2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays())


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["plain", "causal"])
def test_every_candidate_computes_the_same(mask: str) -> None:
    candidates = dispatch.backend("xla").tile_candidates(plan(mask), CPU)
    assert len(candidates) >= 2
    want = value_and_slopes(mask)
    for tiles in candidates:
        for got, wanted in zip(jax.tree.leaves(value_and_slopes(mask, **tiles)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_the_first_candidate_is_the_default(mask: str) -> None:
    default = plan(mask)
    first = dispatch.backend("xla").tile_candidates(default, CPU)[0]
    assert (first["block_q"], first["block_kv"]) == tile(default, backward=False)


def test_forward_and_backward_tiles_are_apart() -> None:
    asked = plan("plain", block_q=100, block_kv=50, block_q_bwd=60, block_kv_bwd=40)
    assert tile(asked, backward=False) == (100, 50)
    assert tile(asked, backward=True) == (60, 40)
    asked = plan("causal", block_kv=256, block_kv_bwd=128)
    assert tile(asked, backward=False) == (128, 256)
    assert tile(asked, backward=True) == (128, 128)


@pytest.mark.parametrize("backward", [False, True])
def test_a_call_of_few_keys_computes_those_alone(backward: bool) -> None:
    q, k, v = (jnp.zeros((1, tokens, 2, 8)) for tokens in (8, 24, 24))
    few = prepare(Arguments(q, k, v, mask_mod=masks.causal)).plan
    sizes = choose_tile_sizes(few, CPU, backward)
    assert (sizes.block_q, sizes.block_kv, sizes.padded_kv) == (8, 24, 24)


def test_tiles_that_suit_another_backend_give_way() -> None:
    """Under a mask: a block high, and as many whole blocks wide as were asked for; without one: no larger than the lengths."""
    for mask, asked, got in (
        ("causal", (64, 100), (128, 128)),
        ("causal", (512, 300), (128, 256)),
        ("causal", (16, 4096), (128, 256)),
        ("plain", (512, 1024), (300, 200)),
    ):
        made = plan(mask, block_q=asked[0], block_kv=asked[1], block_q_bwd=asked[0], block_kv_bwd=asked[1])
        assert tile(made, backward=False) == tile(made, backward=True) == got
        assert dispatch.backend("xla").refuses(made, CPU) is None
    for got, want in zip(
        jax.tree.leaves(value_and_slopes("causal", block_q=16, block_kv=48, block_q_bwd=512)),
        jax.tree.leaves(value_and_slopes("causal")),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_one_row_of_tiles_has_the_queries_that_there_are() -> None:
    q, k, v = arrays()
    options: Any = {"mask_mod": masks.causal_offset(jnp.asarray(100))}
    for tokens in (1, 5, 127):
        made = prepare(Arguments(q[:, :tokens], k, v, **options)).plan
        assert choose_tile_sizes(made, CPU).block_q == choose_tile_sizes(made, CPU, backward=True).block_q == tokens


@pytest.mark.parametrize(
    ("dtype", "layout"),
    some_slow(
        [(dtype, layout) for dtype in ("float32", "bfloat16") for layout in ("BTNH", "BNTH")],
        [("bfloat16", "BTNH")],
    ),
)
def test_a_token_of_decoding_copies_no_cache(dtype: str, layout: str) -> None:
    rng = np.random.default_rng(5)
    make = lambda *shape: array(rng.standard_normal(shape), dtype)
    q, k, v = make(2, 3, 4, 16), make(2, 2048, 2, 16), make(2, 2048, 2, 16)
    lengths = array([2048, 77])

    def attend(implementation: str, q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        turned = (q, k, v) if layout == "BTNH" else (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        out = flexjax.flex_attention(
            *turned, mask_mod=masks.padding(lengths), layout=layout, implementation=implementation
        )
        return out if layout == "BTNH" else jnp.swapaxes(out, 1, 2)

    run = quick_jit(attend, static_argnums=0)
    got, want = (np.asarray(run(name, q, k, v, lengths), np.float32) for name in ("xla", "reference"))
    np.testing.assert_allclose(got, want, atol=1e-5 if dtype == "float32" else 2e-2)
    if dtype == "float32":
        slopes = [
            quick_jit(jax.grad(lambda *x, n=name: (attend(n, *x, lengths) ** 2).sum(), (0, 1, 2)))
            for name in ("xla", "reference")
        ]
        for got, want in zip(*(slope(q, k, v) for slope in slopes), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4)
    # A cache whose last tile reaches past its end: neither padded nor moved nor widened, only sliced.
    sizes = {"BTNH": (8, 32766, 2, 16), "BNTH": (8, 2, 32766, 16)}
    cache = jax.ShapeDtypeStruct(sizes[layout], dtype)
    token = jax.ShapeDtypeStruct((8, 1, 4, 16) if layout == "BTNH" else (8, 4, 1, 16), dtype)
    step = lambda q, k, v, lengths: flexjax.flex_attention(
        q, k, v, mask_mod=masks.padding(lengths), layout=layout, implementation="xla"
    )
    compiled = jax.jit(step).lower(token, cache, cache, jax.ShapeDtypeStruct((8,), "int32")).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * math.prod(cache.shape) * cache.dtype.itemsize / 50
    whole = "|".join(",".join(map(str, shape)) for shape in sizes.values())
    if dtype == "bfloat16":  # the code of a fusion writes a slice of the widened cache as such
        return
    makers = set(re.findall(rf"= f32\[(?:{whole})\]\S* ([\w-]+)\(", compiled.as_text()))
    assert makers <= {"parameter", "get-tuple-element"}, makers


def test_a_visit_of_all_keys_widens_the_cache_of_one_request() -> None:
    """A tile row of one visit has no loop, and the loop over requests must not widen the caches of all of them before it starts."""
    token, cache = jax.ShapeDtypeStruct((32, 1, 4, 16), "bfloat16"), jax.ShapeDtypeStruct((32, 512, 2, 16), "bfloat16")
    step = lambda q, k, v: flexjax.flex_attention(q, k, v, implementation="xla")
    compiled = jax.jit(step).lower(token, cache, cache).compile()
    widened = 4 * math.prod(cache.shape)
    assert compiled.memory_analysis().temp_size_in_bytes < widened / 2


def test_bits_of_a_row_do_not_depend_on_the_batch() -> None:
    """Eight tiles of keys, and one of what is left, of which a larger batch once took fewer at a time."""
    rng = np.random.default_rng(5)
    make = lambda *shape: array(rng.standard_normal(shape), jnp.float32)
    q, k, v = make(4, 2, 8, 16), make(4, 1030, 2, 16), make(4, 1030, 2, 16)
    attend = jax.jit(
        lambda q, k, v: flexjax.flex_attention(
            q, k, v, mask_mod=masks.causal, score_mod=mods.alibi(8), origin=Origin(query=1028), implementation="xla"
        )
    )
    together = attend(q, k, v)
    for entry in (0, 3):
        alone = attend(*(x[entry : entry + 1] for x in (q, k, v)))
        np.testing.assert_array_equal(alone[0], together[entry])


@pytest.mark.parametrize(
    ("mask", "dtype", "size"),
    some_slow(
        [(mask, dtype, size) for mask in MASKS for dtype in ("float32", "bfloat16") for size in (2048, 2100)],
        [("plain", "float32", 2100), ("causal", "bfloat16", 2048)],
    ),
)
def test_lengths_end_anywhere_in_a_visit(mask: str, dtype: str, size: int) -> None:
    """Visits of 1024 keys, then of 512 that the length may cut; NaN past a length is not read, and a request alone has the same bits."""
    ends = array([0, 1, 511, 512, 513, 1023, 1024, 1025, 1536, 2047, 2048, size])
    rng = np.random.default_rng(7)
    make = lambda tokens, heads: rng.standard_normal((len(ends), tokens, heads, 16)).astype(np.float32)
    q, k, v = make(1, 8), make(size, 2), make(size, 2)
    past = np.arange(size) >= np.asarray(ends)[:, None]
    rounded = [np.asarray(array(x, dtype), np.float64) for x in (q, k, v)]
    scores = np.einsum("bngd,bsnd->bngs", rounded[0].reshape(-1, 2, 4, 16), rounded[1]) / 4
    weights = np.where(past[:, None, None], 0, np.exp(scores))
    total = weights.sum(-1, keepdims=True)
    want = np.einsum("bngs,bsnd->bngd", weights / np.where(total, total, 1), rounded[2]).reshape(-1, 1, 8, 16)
    k[past], v[past] = np.nan, np.nan
    given = [array(x, dtype) for x in (q, k, v)]
    attend = quick_jit(
        lambda q, k, v, ends: flexjax.flex_attention(
            q, k, v, key_value_seq_lengths=ends, mask_mod=MASKS[mask], origin=Origin(query="end"), implementation="xla"
        )
    )
    together = np.asarray(attend(*given, ends), np.float32)
    np.testing.assert_allclose(together, want, atol=1e-5 if dtype == "float32" else 2e-2)
    for entry in (4, 9):
        alone = attend(*(x[entry : entry + 1] for x in (*given, ends)))
        np.testing.assert_array_equal(np.asarray(alone[0], np.float32), together[entry])


@pytest.mark.parametrize(
    ("mask", "dtype", "sizes"),
    [
        ("plain", "float32", (512, 2, 1)),
        ("causal", "float32", (128, 8, 4)),
        ("plain", "bfloat16", (512, 8, 1)),
        ("causal", "bfloat16", (128, 8, 4)),
    ],
)
def test_visits_that_a_length_may_cut_have_at_most_512_keys(mask: str, dtype: str, sizes: tuple[int, int, int]) -> None:
    """(block_kv, chunk, tail), whatever the batch is; a request of an eighth of 4096 keys then computes no key that it lacks."""
    for batch in (1, 4):
        q, k = jnp.zeros((batch, 1, 8, 64), dtype), jnp.zeros((batch, 4096, 2, 64), dtype)
        options: Any = {"mask_mod": MASKS[mask], "key_value_seq_lengths": array([512] * batch)}
        made = choose_tile_sizes(prepare(Arguments(q, k, k, **options)).plan, CPU)
        assert (made.block_kv, made.chunk, made.tail) == sizes


def test_the_backward_pass_runs_the_tile_it_is_asked_for() -> None:
    """The loop of the backward pass has as many steps as the tile says."""
    text = lambda **tiles: str(jax.make_jaxpr(lambda: value_and_slopes("plain", **tiles))())
    assert text(block_q_bwd=60) != text()
    assert text(block_q_bwd=60) != text(block_q=60)


GPU = Target("cuda")
IDS = array(np.repeat(np.arange(6), 50), jnp.int32)
ON_A_GPU: dict[str, Callable | None] = {
    "plain": None,
    "causal": masks.causal,
    "documents": lambda b, h, q, k: IDS[q] == IDS[k],
    "by head": lambda b, h, q, k: q >= k + h * 20,
}


@pytest.mark.parametrize("full", [0, 1])
def test_one_block_of_a_user_is_no_mask_program(full: int) -> None:
    """An empty list, or a full block whose mask_mod hides entries: in one step the lists were dropped."""
    q, k, v = (x[:, :16] for x in arrays())
    one, index = jnp.full((1, 1, 1), full), jnp.zeros((1, 1, 1, 1), jnp.int32)
    causal = lambda b, h, q, k: q >= k
    mask = flexjax.BlockMask.from_kv_blocks(one * 0, index, one, index, block_size=16, mask_mod=causal, kv_len=16)
    options: Any = {"block_mask": mask}
    call, backend = prepare(Arguments(q, k, v, **options)), dispatch.backend("xla")
    found = [Run(backend, call.plan, target).forward(call.operands).out for target in (CPU, GPU)]
    np.testing.assert_allclose(*found, atol=1e-6)
    assert bool(np.any(found[0])) == bool(full)


@pytest.mark.parametrize(
    ("mask", "one_step"),
    some_slow(
        [("by head", True), *((mask, False) for mask in ON_A_GPU)],
        [("plain", False), ("by head", False)],
    ),
)
def test_larger_blocks_compute_the_same(mask: str, one_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a small call is one step and other calls merge mask blocks; both passes are those of the CPU's tiles."""
    for module in (larger_blocks, tile_sizes):
        monkeypatch.setattr(module, "ONE_STEP", 1 << 20 if one_step else 1 << 10)
    monkeypatch.setattr(larger_blocks, "LARGE", (160, 160))
    monkeypatch.setattr(larger_blocks, "MEDIUM", (160, 160))
    monkeypatch.setattr(tile_sizes, "ACCELERATOR_DENSE_QUERIES", 100)
    q, k, v = arrays()
    score_mod = lambda s, b, h, i, j: s + jnp.sin(1.0 * (i - j))
    options: Any = {"mask_mod": ON_A_GPU[mask], "score_mod": score_mod}
    call = prepare(Arguments(q, k, v, **options))
    backend, derivative = dispatch.backend("xla"), call.problem(None).needed_derivative()
    wanted = Wanted(True, True, True, False, False, False, ())

    def both_passes(target: Target) -> tuple[Results, Gradients]:
        run = Run(backend, call.plan, target)
        results = run.forward(call.operands)
        return results, run.backward(BackwardInputs(call.operands, results, q, None, wanted, derivative))

    rows = backend.tile_sizes(call.plan, GPU).rows
    assert rows == (1 if one_step else 3)
    for got, want in zip(
        *(jax.tree.leaves(jax.jit(both_passes, static_argnums=0)(t)) for t in (GPU, CPU)), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("mask_mod", "size"),
    [(masks.causal, (2048, 2048)), (masks.sliding_window(512), (512, 512)), (masks.sliding_window(2000), (2048, 2048))],
)
def test_blocks_are_larger_where_rows_see_many_keys(mask_mod: Any, size: tuple[int, int]) -> None:
    array = np.zeros((1, 16384, 1, 1), np.float32)
    call = prepare(Arguments(array, array, array, mask_mod=mask_mod))
    (step,) = dispatch.backend("xla").rewrites(call.plan, GPU)
    assert step.plan.blocks is not None
    assert (step.plan.blocks.block_q, step.plan.blocks.block_kv) == size
    sizes = choose_tile_sizes(step.plan, GPU)
    assert sizes.heads * sizes.block_q * sizes.block_kv * sizes.chunk <= tile_sizes.ACCELERATOR_TILE


# Differences of positions that int32 does not hold, or holds only modulo 2^32: (whether they need 64 bits, the mask).
WIDE_DIAGONALS: dict[str, tuple[bool, Callable]] = {
    "int64 multiples": (True, lambda b, h, q, k: q.astype("int64") * 2**30 - k.astype("int64") * 2**30 >= 0),
    "int64 offset": (True, lambda b, h, q, k: (q.astype("int64") + 2**40) - k.astype("int64") >= 2**40),
    "int64 by head": (True, lambda b, h, q, k: q - k.astype("int64") + h.astype("int64") * 2**33 >= 2**33 - 3),
    "uint64": (True, lambda b, h, q, k: (q.astype("uint64") + jnp.uint64(2**63)) - k.astype("uint64") >= jnp.uint64(2**63)),
    "uint32": (
        False,
        lambda b, h, q, k: (
            (q.astype("uint32") + jnp.uint32(3_000_000_000)) - k.astype("uint32") >= jnp.uint32(3_000_000_000)
        ),
    ),
    "uint32 by head": (
        False,
        lambda b, h, q, k: (q - k + 40).astype("uint32") + jnp.maximum(h.astype("uint32"), 1) * jnp.uint32(2**31) > jnp.uint32(2**31 + 38),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE_DIAGONALS)
def test_diagonals_keep_the_type_of_the_mod(name: str) -> None:
    wide, mask = WIDE_DIAGONALS[name]
    sizes = (1, 2, 24, 24)
    with jax.enable_x64(wide):
        program = trace_mask_mod(mask, sizes).program
        assert any("delta" in step.outs[0].axes for step in program.steps)
        region = Region(0, 1, 0, 2, 8, 16, array([0, 12], jnp.int32), 12)
        (got,) = quick_jit(lambda: evaluate(program, XlaTile(region, ()), [frozenset({"q", "kv"})]))()
        want = dense(mask, sizes)
    np.testing.assert_array_equal(np.broadcast_to(got, region.shape), want[:, :, 8:24])


@pytest.mark.parametrize(
    ("shape", "keys"),
    [((1, 8, 2, 64), 1024), ((1, 32, 8, 128), 256), ((1, 8, 4, 64), 512), ((64, 8, 2, 64), 512), ((64, 64, 1, 8), 256)],
)
def test_keys_of_a_visit_of_a_short_call(shape: tuple[int, int, int, int], keys: int) -> None:
    """By queries, query heads, key heads and head dim, whatever the batch and the length of the cache are."""
    queries, heads, kv_heads, dim = shape
    for batch, length in ((1, 4096), (3, 1000)):
        q, k = jnp.zeros((batch, queries, heads, dim)), jnp.zeros((batch, length, kv_heads, dim))
        assert tile_sizes.short_keys(prepare(Arguments(q, k, k)).plan) == keys
