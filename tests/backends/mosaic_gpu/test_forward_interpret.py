"""The forward kernel in the simulator, against dense numpy: every feature on a small problem, and data races."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import pytest
from jax import lax

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

import flexjax
from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.forward import hopper as forward_hopper
from flexjax.backends.mosaic_gpu.forward import hopper_tiles as forward_hopper_tiles
from flexjax.backends.mosaic_gpu.forward import static_reference
from flexjax.backends.mosaic_gpu.machine import memory
from flexjax.backends.target import Target
from flexjax.backends.tile_math import LOG2E
from flexjax.plan.kernel_plan import Results
from tests.cases.hopper_forward import FORWARD, TABLE
from tests.cases.on_hopper import ForwardProblem, assert_results_close, causal, forward_problem, run_forward
from tests.cases.parts import assert_a_part_is_not_rounded_to_16_bits
from tests.marks import some_slow

REFERENCES = {
    "soft cap that needs no maximum": 0.0,
    "bounded away from 0": 27.0 * LOG2E,  # 24 to 30 over both heads
    "far from the sinks": 120.0 * LOG2E,
    "soft cap, float16": None,
    "soft cap": 0.0,
    "full": None,
    "relative table": None,
}


def test_no_read_lies_outside_where_blocks_hang_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile divides the lengths, the blocks of the mask do not: tiles lie wholly past the end."""
    read, places = memory.gather, []

    def watched(ref: typing.Any, index: tuple, moving: tuple[bool, ...], *rest: typing.Any) -> jax.Array:
        for at, moves, size in zip(index, moving, ref.shape, strict=True):
            if moves:
                note = lambda low, high, size=size: places.append((int(low), int(high), size))
                jax.debug.callback(note, jnp.min(at), jnp.max(at))
        return read(ref, index, moving, *rest)

    monkeypatch.setattr(memory, "gather", watched)
    mod = lambda s, b, h, q, k: s + TABLE[h, (383 - k) // 2] + TABLE[h, (383 - q) // 2]
    run(forward_problem(score=mod, mask=causal, q_len=384, kv_len=384, block=(256, 256)))
    jax.effects_barrier()
    assert places
    assert all(low >= 0 and high < size for low, high, size in places)


def test_simulated_kernels_are_no_part_of_a_jitted_function() -> None:
    q = jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    options = flexjax.KernelOptions(interpret=True)
    attend = lambda q: flexjax.flex_attention(q, q, q, implementation="mosaic_gpu", kernel_options=options)
    with pytest.raises(NotImplementedError) as caught:
        jax.jit(attend)(q)
    assert str(caught.value) == (
        "The kernels of mosaic_gpu are simulated outside of jax.jit and of loops only. Call flex_attention without them (jax.grad and "
        "jax.vmap may stay), or leave out kernel_options.interpret."
    )


@pytest.mark.parametrize("name", REFERENCES)
def test_where_the_maximum_is_left_out(name: str) -> None:
    plan = forward_problem(**FORWARD[name]).plan
    assert static_reference.static_reference(plan) == pytest.approx(REFERENCES[name])
    assert static_reference.static_reference(dataclasses.replace(plan, max_scores=True)) is None


def test_wide_scores_keep_their_maximum() -> None:
    for mod in (lambda s, b, h, q, k: 56.0 * jnp.tanh(s), lambda s, b, h, q, k: jnp.tanh(s) + 1e9):
        assert static_reference.static_reference(forward_problem(score=mod).plan) is None


@pytest.mark.parametrize("dtype", some_slow(("bfloat16", "float16"), ("bfloat16",)))
def test_a_part_is_not_rounded_to_16_bits(dtype: str) -> None:
    assert_a_part_is_not_rounded_to_16_bits(support.BACKEND, Target("cpu"), dtype)


def run(made: ForwardProblem, programs: int = 3, **fields: typing.Any) -> Results:
    tile = dataclasses.replace(forward_hopper_tiles.forward_tile(made.plan), programs=programs, **fields)
    return run_forward(forward_hopper.forward, made.plan, made.operands, tile)


EVERYDAY = [name for name in FORWARD if "two CTAs," not in name]


@pytest.mark.parametrize("name", some_slow(FORWARD, EVERYDAY))
def test_matches_dense(name: str) -> None:
    made = forward_problem(**FORWARD[name])
    assert_results_close(made, run(made))


STAGGERED = (
    "soft cap that needs no maximum", "far from the sinks", "slope", "steep slope, odd", "slope, rows switched off",
    "slope, infinite rows of which nothing is on", "root of a scaled distance",
    "slope of bounded scores", "slope and two factors", "odd lengths and dims", "dead rows", "dropout", "documents",
    "blocks of 256, odd", "pair bias, odd",
)  # fmt: skip


@pytest.mark.parametrize("name", STAGGERED)
def test_staggered_steps(name: str) -> None:
    """The pipeline of larger head dims: softmax overlaps P V, key barriers are prefetched, unmasked keys run backwards."""
    made = forward_problem(**FORWARD[name])
    assert_results_close(made, run(made, overlap=True, lazy_rescale=True, prefetch_key_barrier=True, reverse_kv=True))


@pytest.mark.parametrize("name", ["slope", "documents", "blocks of 256, odd", "mask without lists"])
@pytest.mark.parametrize("field", ["prefetch_key_barrier", "reverse_kv"])
def test_whole_steps(name: str, field: str) -> None:
    made = forward_problem(**FORWARD[name])
    assert_results_close(made, run(made, overlap=False, **{field: True}))


@pytest.mark.parametrize("name", ["causal, two batches, grouped heads", "soft cap that needs no maximum", "dead rows"])
def test_exponentials_by_polynomial(name: str) -> None:
    made = forward_problem(**FORWARD[name])
    assert_results_close(made, run(made, polynomials=4))


STAGED = {
    "pair bias": (2, "bfloat16"),
    "pair bias, odd": (2, "bfloat16"),
    "pair bias of each batch, float32": (1, "float32"),
    "two pair biases, blocks of 64": (2, "bfloat16"),
    "pair bias that is no whole pieces": (0, "bfloat16"),
    "relative table": (0, "bfloat16"),
    "bool array": (0, "bfloat16"),
}


@pytest.mark.parametrize("name", STAGED)
def test_what_comes_through_shared_memory(name: str) -> None:
    tile = forward_hopper_tiles.forward_tile(forward_problem(**FORWARD[name]).plan)
    assert (tile.staged_slots, tile.staged_dtype) == STAGED[name]


def test_a_pair_bias_that_does_not_fit_is_read_directly() -> None:
    made = forward_problem(**FORWARD["pair bias"])
    assert_results_close(made, run(made, staged_slots=0))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", ["causal, two batches, grouped heads", "mask of each head", "dead rows"])
def test_dynamic_scheduler(name: str, slots: int) -> None:
    made = forward_problem(**FORWARD[name])
    assert_results_close(made, run(made, persistent=False, dynamic_scheduler=True, query_slots=slots, stages=2))


SCHEDULERS = {
    "persistent": {"persistent": True},
    "one tile each": {"persistent": False},
    "dynamic scheduler": {"persistent": False, "dynamic_scheduler": True},
}


@pytest.mark.parametrize("overlap", [True, False], ids=["staggered", "whole"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers(races: list, overlap: bool, scheduler: str) -> None:
    """With one program that takes every tile, so that each slot of a ring comes round; conftest.py looks for races."""
    made = forward_problem(mask=causal, heads=1, q_len=256, kv_len=384)
    assert_results_close(made, run(made, programs=1, overlap=overlap, **SCHEDULERS[scheduler]))
    assert len(races) == 1


def test_a_race_would_be_seen(races: list) -> None:
    """Two warpgroups write the same shared memory."""

    def body(out: typing.Any, shared: typing.Any) -> None:
        shared[...] = jnp.full((128,), lax.axis_index("wg"), jnp.float32)
        out[...] = shared[...]

    out = jax.ShapeDtypeStruct((128,), jnp.float32)
    interpret = plgpu.InterpretGPUParams()
    run = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        num_threads=2,
        thread_name="wg",
        interpret=interpret,
    )
    jax.block_until_ready(run())
    assert races.pop().races_found


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False], ids=["staggered", "whole"])
@pytest.mark.parametrize("name", ["causal, two batches, grouped heads", "mask of each head", "blocks of 256, odd"])
def test_both_orders_of_steps(name: str, overlap: bool) -> None:
    made = forward_problem(**FORWARD[name])
    assert_results_close(made, run(made, overlap=overlap, lazy_rescale=overlap))
    assert_results_close(made, run(made, overlap=overlap, persistent=False, query_slots=1, stages=3))
