"""Gradients of small arrays that are read at computed places, summed by element in shared memory."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import AuxRequest, masks, weights
from flexjax.backends.mosaic_gpu.captures import kernel as captures_kernel
from flexjax.backends.mosaic_gpu.captures import private_sums, tiles
from flexjax.backends.mosaic_gpu.captures.kernel import Sink
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
from flexjax.ir import program as ir
from flexjax.trace import trace_mod
from tests.backends.mosaic_gpu.test_capture_gradients import plan_of
from tests.cases.on_hopper import assert_gradients_close, backward_problem, causal, normal

Array = jax.Array
TIMES = jnp.cumsum(jnp.abs(normal(2, 128)), 1)
SMALL = {"q_len": 64, "kv_len": 64, "block": (64, 64)}


def bucket(times: Array, b: Array, i: Array, j: Array, buckets: int) -> Array:
    """The bucket of the time from key j to query i."""
    return jnp.clip((jnp.log2(jnp.abs(times[b, i] - times[b, j]) + 1.0) * 3.0).astype(jnp.int32), 0, buckets - 1)


PROBLEMS: dict[str, dict[str, typing.Any]] = {
    "a row of each head": {
        "score": lambda c, s, b, h, i, j: s + c[1][h, bucket(c[0], b, i, j, 16)], "captured": (TIMES, normal(2, 16)),
        "mask": causal, "batch": 2, **SMALL,
    },
    "a row of each key head, odd lengths, float16": {
        "score": lambda c, s, b, h, i, j: s + c[1][h // 2, bucket(c[0], b, i, j, 70)], "captured": (TIMES, normal(2, 70)),
        "heads": 4, "kv_heads": 2, "q_len": 70, "kv_len": 100, "dtype": "float16", "layout": "BNTH", "batch": 2,
    },
    "all heads and batch entries, two tiles a head": {
        "score": lambda c, s, b, h, i, j: s + c[1][bucket(c[0], 0, i, j, 9)], "captured": (TIMES, normal(9)),
        "batch": 2, "mask": causal, **SMALL, "kv_len": 128,
    },
    "a column of each head, in bfloat16, dead rows": {
        "score": lambda c, s, b, h, i, j: s * (1.0 + c[1][bucket(c[0], 0, i, j, 12), h].astype(jnp.float32)),
        "captured": (TIMES, normal(12, 2).astype("bfloat16")), "mask": lambda b, h, q, k: (q >= k) & (k > 20),
        "d_lse": True, **SMALL,
    },
    "a batch entry and a head, in another order": {
        "score": lambda c, s, b, h, i, j: s + c[1][bucket(c[0], b, i, j, 8), (h + 1) % 2, b], "captured": (TIMES, normal(8, 2, 2)),
        "batch": 2, **SMALL,
    },
    "two tables, one read twice": {
        "score": lambda c, s, b, h, i, j: (
            s * (1.0 + c[1][h, bucket(c[0], 0, i, j, 10)]) + c[2][bucket(c[0], 0, i, j, 6), i // 32] + c[1][0, (i * j) % 10]
        ),
        "captured": (TIMES, normal(2, 10), normal(6, 2)), **SMALL,
    },
    "float32": {
        "score": lambda c, s, b, h, i, j: s + c[1][h, bucket(c[0], 0, i, j, 16)], "captured": (TIMES, normal(1, 16)),
        "mask": causal, "dtype": "float32", "heads": 1, **SMALL,
    },
    "in turns": {
        "score": lambda c, s, b, h, i, j: s + c[0][h, (i * 31 + j * 17) % 700], "captured": (normal(1, 700),), "heads": 1, **SMALL,
    },
}  # fmt: skip


@pytest.fixture
def sinks(monkeypatch: pytest.MonkeyPatch) -> list[Sink]:
    """What the kernel does with g, for each of its runs."""
    found: list[Sink] = []
    run = captures_kernel.CaptureKernel.run
    watched = lambda self, *given: (found.append(self.sink), run(self, *given))[1]
    monkeypatch.setattr(captures_kernel.CaptureKernel, "run", watched)
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients(name: str, sinks: list[Sink]) -> None:
    made = backward_problem(**PROBLEMS[name])
    got = made.gradients()
    assert_gradients_close(got, made.expected, tolerance=1e-4 if name == "float32" else 1.5e-2)
    assert set(sinks) == {Sink.PRIVATE}
    assert len(sinks) == (3 if "twice" in name else 1)
    if "odd" in name:  # two warpgroups, which are threads of the simulator
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(made.gradients()), strict=True):
            np.testing.assert_array_equal(x, y)


def both_passes(implementation: typing.Any, **words: typing.Any) -> tuple[typing.Callable[..., Array], list[Array]]:
    """(a loss of query, key, value and a table, these arrays)."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    *arrays, weight = (draw(2, 64, 2, 16) for _ in range(4))
    options = flexjax.KernelOptions(interpret=True) if implementation == "mosaic_gpu" else None

    def loss(q: Array, k: Array, v: Array, table: Array) -> Array:
        mod = lambda s, b, h, i, j: s + table[h, bucket(TIMES, b, i, j, 12)]
        words_ = {**words, "score_mod": mod, "implementation": implementation, "kernel_options": options}
        out = flexjax.flex_attention(q, k, v, **words_)
        out, extra = out if "return_aux" in words else (out, None)
        seen = lambda x: jnp.where(jnp.isfinite(x), x, 0.0)
        return jnp.sum(out * weight) + sum(jnp.sum(seen(x) * weight[..., 0]) for x in jax.tree.leaves(extra))

    return loss, [*arrays, 0.3 * draw(2, 12)]


CALLS: dict[str, dict[str, typing.Any]] = {
    "weights, and their total": {
        "weights": weights.silu(64), "return_aux": AuxRequest(total=True), "mask_mod": masks.causal,
    },
    "lengths, a batch entry without rows": {
        "query_seq_lengths": jnp.array([50, 0]), "key_value_seq_lengths": jnp.array([60, 0]), "return_aux": AuxRequest(lse=True),
    },
    "an expectation": {
        "return_aux": AuxRequest(expectations={"score": lambda s, b, h, i, j: s}), "mask_mod": masks.causal,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, sinks: list[Sink]) -> None:
    """Against the reference, and its differences in a direction of the table."""
    gradients = []
    for implementation in ("mosaic_gpu", "reference"):
        loss, arrays = both_passes(implementation, **CALLS[name])
        gradients.append(jax.grad(loss, (0, 1, 2, 3))(*arrays))
    for x, y in zip(*gradients, strict=True):
        assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y)
    assert sinks == [Sink.PRIVATE]
    *others, table = arrays
    step = 1e-2 * np.random.default_rng(1).standard_normal(table.shape).astype(np.float32)
    difference = loss(*others, table + step) - loss(*others, table - step)
    np.testing.assert_allclose(2 * np.sum(gradients[0][3] * step), difference, rtol=1e-2, atol=1e-3)


def test_what_has_room() -> None:
    plan = dataclasses.replace(plan_of(256, 2), head_dim=128, value_dim=128)
    shapes = {
        n: None if (made := tiles.private_sums(plan, n)) is None else made.shape for n in (1, 128, 129, 256, 1024, 1025)
    }
    assert shapes == {
        1: (2, 64, 128), 128: (2, 128, 128), 129: (2, 192, 64), 256: (2, 256, 64), 1024: (2, 1024, 16), 1025: None,
    }  # fmt: skip
    assert tiles.mma_private_sums(plan, 64, CARDS["8.9"]) is None
    small = tiles.mma_private_sums(plan_of(256, 2), 128, CARDS["8.9"])
    assert small is not None
    assert small.shape == (2, 128, 32)


def test_what_a_head_reads() -> None:
    tables = {"rows": jnp.zeros((2, 5, 7)), "flat": jnp.zeros(70)}
    heads = jnp.array([1, 0])

    def elements(mod: typing.Callable[..., Array]) -> int | None:
        traced = trace_mod.trace_score_mod(mod, (2, 2, 64, 64))
        load = typing.cast(ir.Load, traced.derivative.steps[traced.derivative.gradients[0]])
        return private_sums.elements_of_head(traced.derivative, load)

    assert elements(lambda s, b, h, i, j: s + tables["rows"][h, i * j % 5, i % 7]) == 35
    assert elements(lambda s, b, h, i, j: s + tables["rows"][heads[h], i * j % 5, 3]) == 5
    assert elements(lambda s, b, h, i, j: s + tables["flat"][h * 35 + i * j % 35]) == 70
    counted = lambda h: jax.lax.while_loop(lambda n: n < h, lambda n: n + 1, 0)
    assert elements(lambda s, b, h, i, j: s + tables["rows"][counted(h), i * j % 5, i % 7]) is None
