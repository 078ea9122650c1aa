"""What is traced and compiled again, and what is not."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks, mods, paged
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from tests.arrays import array
from tests.marks import some_slow

B, T, N, D = 1, 24, 2, 8
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by one for each compilation."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == COMPILED:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def qkv(seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(array(rng.standard_normal((B, T, N, D)), jnp.float32) for _ in range(3))


def values(seed: int) -> jax.Array:
    return array(np.random.default_rng(seed).standard_normal(2 * T), jnp.float32)


def biased(table: jax.Array) -> jax.Array:
    """A closure rebuilt with every call."""
    return flexjax.flex_attention(*qkv(), score_mod=lambda s, b, h, q, kv: s + table[q - kv + T], mask_mod=masks.causal)


def documents(ids: jax.Array) -> jax.Array:
    return flexjax.flex_attention(*qkv(), mask_mod=flexjax.and_masks(masks.causal, masks.document(ids)))


def gated(gate: jax.Array) -> jax.Array:
    return flexjax.flex_attention(*qkv(), score_mod=mods.softcap(3.0), sinks=gate)


def dropped(key: jax.Array) -> jax.Array:
    return flexjax.flex_attention(*qkv(), dropout=flexjax.Dropout(0.3, key))


def windowed(side: jax.Array) -> jax.Array:
    return flexjax.dot_product_attention(*qkv(), local_window_size=(side, 0))


def ids(seed: int) -> jax.Array:
    return array(np.sort(np.random.default_rng(seed).integers(0, 4, (B, T))), jnp.int32)


# name -> the function of what changes, and its values by seed
# fmt: off
CHANGES: dict[str, tuple[Callable, Callable]] = {
    "captured_floats": (biased, values),
    "captured_ids": (documents, ids),
    "sinks": (gated, lambda seed: values(seed)[:N]),
    "dropout_key": (dropped, jax.random.key),
    "scale": (lambda scale: flexjax.flex_attention(*qkv(), scale=scale), lambda seed: values(seed)[0]),
    "window": (windowed, lambda seed: jnp.asarray(5 + seed)),
}
# fmt: on


@pytest.mark.parametrize("name", some_slow(CHANGES, ["captured_floats", "captured_ids", "dropout_key"]))
def test_new_values_do_not_retrace(name: str) -> None:
    function, make = CHANGES[name]
    traces = []

    @jax.jit
    def step(value: jax.Array) -> jax.Array:
        traces.append(name)
        return function(value)

    for seed in range(4):
        step(make(seed))
    assert len(traces) == 1


@pytest.mark.parametrize("name", some_slow(CHANGES, ["captured_ids", "scale", "window"]))
def test_rebuilt_closures_do_not_recompile(name: str, compilations: list[str]) -> None:
    function, make = CHANGES[name]
    drawn = [make(seed) for seed in range(4)]
    jax.block_until_ready(function(drawn[0]))
    before = len(compilations)
    for value in drawn[1:]:
        jax.block_until_ready(function(value))
    assert len(compilations) == before


def packed(seed: int, length: int) -> jax.Array:
    """Segment ids of 2 to 12 documents of random lengths."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(1, length - 1, int(rng.integers(1, 12))))
    return array(np.searchsorted(cuts, np.arange(length), side="right"), jnp.int32)


def test_packed_layouts_share_their_programs(compilations: list[str]) -> None:
    """Eager calls whose block lists come from new segment ids each time."""
    q, k, v = (jnp.zeros((1, 2048, 1, 8)) for _ in range(3))
    plans, compiled = set(), []
    for seed in range(100):
        mask_mod = flexjax.and_masks(masks.causal, masks.document(packed(seed, 2048)[None]))
        plans.add(prepare(Arguments(q, k, v, mask_mod=mask_mod)).plan.for_any_lists())
        compiled.append(len(compilations))
    assert len(plans) == 1
    assert compiled[-1] == compiled[9], "all that the analysis needs is compiled by then"


def test_block_masks_of_packed_layouts_do_not_retrace() -> None:
    traces = []

    @jax.jit
    def step(mask: flexjax.BlockMask) -> jax.Array:
        traces.append(1)
        return mask.kv_num_blocks

    for seed in range(30):
        mask_mod = flexjax.and_masks(masks.causal, masks.document(packed(seed, 600)[None]))
        step(flexjax.create_block_mask(mask_mod, None, None, 600, 600, block_size=8))
    assert len(traces) <= 4, "of widths 16, 32, 64 and 75"


def test_rebuilt_closures_do_not_recompile_gradients(compilations: list[str]) -> None:
    step = lambda table: jax.grad(lambda t: (biased(t) ** 2).sum())(table)
    for seed in range(2):
        jax.block_until_ready(step(values(seed)))
    before = len(compilations)
    jax.block_until_ready(step(values(9)))
    assert len(compilations) == before


def test_ready_made_mods_made_anew_do_not_recompile(compilations: list[str]) -> None:
    """Those with a derivative rule of their own too."""
    for make in (lambda: mods.alibi(N), lambda: mods.softcap(5.0), lambda: mods.softcap_approx(5.0)):
        run = lambda make=make: jax.grad(lambda q: flexjax.flex_attention(q, *qkv()[1:], score_mod=make()).sum())
        jax.block_until_ready(run()(qkv()[0]))
        before = len(compilations)
        jax.block_until_ready(run()(qkv()[0]))
        assert len(compilations) == before


def test_another_literal_is_another_program(compilations: list[str]) -> None:
    run = lambda n: flexjax.flex_attention(*qkv(), score_mod=lambda s, b, h, q, kv: s * n)
    results = [run(n) for n in (2.0, 3.0)]
    assert len(compilations) >= 2
    assert not np.array_equal(*results)
    np.testing.assert_array_equal(run(2.0), results[0])


def test_another_shape_compiles_and_the_first_stays(compilations: list[str]) -> None:
    run = lambda t: jax.block_until_ready(flexjax.flex_attention(*(x[:, :t] for x in qkv()), mask_mod=masks.causal))
    run(24)
    run(16)
    before = len(compilations)
    run(24)
    run(16)
    assert len(compilations) == before


# ------------------------------------------------------------------ a mod that reads what was assigned since the last call


class Reader:
    """A score mod, a mask mod and a callable object that read `table` at each call."""

    def __init__(self, table: jax.Array) -> None:
        self.table = table
        self.score_mod = lambda score, b, h, q_idx, kv_idx: score + self.table[kv_idx]
        self.mask_mod = lambda b, h, q_idx, kv_idx: self.table[kv_idx] > 0

    def __call__(self, score: jax.Array, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> jax.Array:
        return score + self.table[kv_idx]


def attend(**arguments: Callable) -> jax.Array:
    return flexjax.flex_attention(*qkv(), **arguments)


@pytest.mark.parametrize("how", some_slow(["attribute", "object", "mask"], ["object"]))
def test_another_array_under_the_same_name_is_read(how: str) -> None:
    reader = Reader(jnp.ones(T))
    given = {"attribute": {"score_mod": reader.score_mod}, "object": {"score_mod": reader}}
    run = lambda reader=reader: attend(**given.get(how, {"mask_mod": reader.mask_mod}))
    run()
    reader.table = jnp.sin(jnp.arange(T)) - 0.1
    fresh = Reader(reader.table)
    wanted = attend(mask_mod=fresh.mask_mod) if how == "mask" else attend(score_mod=fresh.score_mod)
    np.testing.assert_array_equal(run(), wanted)


def test_gradients_reach_an_array_that_is_assigned_for_each_call() -> None:
    """First in a gradient, whose tracers are gone at the next call, and again after a call with an array."""
    reader = Reader(values(0)[:T])

    def loss(table: jax.Array) -> jax.Array:
        reader.table = table
        return (attend(score_mod=reader.score_mod) ** 2).sum()

    direct = lambda table: (attend(score_mod=lambda s, b, h, q, kv: s + table[kv]) ** 2).sum()
    for seed in (1, 2):
        table = values(seed)[:T]
        np.testing.assert_array_equal(jax.grad(loss)(table), jax.grad(direct)(table))
        np.testing.assert_array_equal(loss(table), direct(table))


def test_block_masks_read_what_was_assigned() -> None:
    reader = Reader(jnp.ones(T))
    build = lambda: flexjax.create_block_mask(reader.mask_mod, None, None, T, T, block_size=8)
    assert build().full_kv_num_blocks.tolist() == [[[3, 3, 3]]]
    reader.table = (jnp.arange(T) < 8).astype(jnp.float32)
    assert build().full_kv_num_blocks.tolist() == [[[1, 1, 1]]]


def test_explain_reads_what_was_assigned() -> None:
    numbers = {"slope": 0.25}
    mod = lambda score, b, h, q_idx, kv_idx: score - numbers["slope"] * kv_idx
    explain = lambda: flexjax.explain(*qkv(), score_mod=mod)
    assert "0.25" in explain()
    numbers["slope"] = 0.375
    assert "0.375" in explain()
    assert "0.25" not in explain()


def test_an_assigned_array_compiles_nothing(compilations: list[str]) -> None:
    reader = Reader(values(0)[:T])
    drawn = [values(seed)[:T] for seed in range(3)]
    jax.block_until_ready(attend(score_mod=reader.score_mod))
    before = len(compilations)
    for reader.table in drawn:
        jax.block_until_ready(attend(score_mod=reader.score_mod))
    assert len(compilations) == before


# ------------------------------------------------------------------ serving


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_eager_steps_over_pages_compile_nothing(dtype: str, compilations: list[str]) -> None:
    """New lengths, tables and requests, a copy of a shared page among them."""
    cache, table = paged.empty(16, 8, N, D, dtype=dtype), paged.table(3, 4, 16, 8)
    draw = lambda seed: array(np.random.default_rng(seed).standard_normal((3, 2, N, D)), jnp.dtype(dtype))
    sources = array(np.array([-1, 0, -1]), jnp.int32)
    compiled = []
    for step in range(5):
        if step in (1, 3):
            table = paged.release(table, array(np.arange(3) == 1))
            table = paged.fork(table, sources)
        counts = array(np.arange(3) % 3 if step % 2 else np.full(3, 2), jnp.int32)
        table, granted = paged.allocate(table, table.lengths + counts)
        assert bool(granted.all())
        cache, table = paged.append(cache, table, draw(step), draw(step + 9), query_seq_lengths=counts)
        jax.block_until_ready(flexjax.paged_attention(draw(step), cache, table, query_seq_lengths=counts))
        compiled.append(len(compilations))
    assert compiled[-1] == compiled[1], "the first two steps have each operation"
