"""The backward kernels in the simulator, against dense jax.vjp in float32: every feature on a small problem."""

import dataclasses
import functools
import math
import os
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11", allow_module_level=True)

from flexjax.backends.mosaic_gpu import backward_sm90, choose_kernel
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import BlockLayout, BlockLists, Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.trace import trace_mod
from flexjax.types import KernelOptions

Mod = Callable[..., typing.Any]
RNG = np.random.default_rng(3)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def causal(b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return q >= k


class Problem(typing.NamedTuple):
    """What `backward` is called with, and the gradients of a dense computation."""

    plan: KernelPlan
    operands: Operands
    results: Results
    d_out: jax.Array
    d_lse: jax.Array | None
    wanted: Wanted
    derivative: Program | None
    expected: Gradients

    def gradients(self) -> Gradients:
        run = functools.partial(backward_sm90.backward, self.plan, wanted=self.wanted, derivative=self.derivative)
        call = jax.jit(lambda o, r, d, l: run(o, r, d, l))
        return call(self.operands, self.results, self.d_out, self.d_lse)


def over_all(mod: Mod, leading: int) -> Mod:
    for axis in (3, 2, 1, 0):
        mod = jax.vmap(mod, in_axes=(0,) * leading + tuple(0 if i == axis else None for i in range(4)))
    return mod


def block_lists(on: np.ndarray, block: tuple[int, int]) -> tuple[BlockLayout, BlockLists]:
    """Lists of a dense [b, h, T, S] mask, and the widths of those in both directions."""
    padding = [(0, 0), (0, 0), *((0, -n % s) for n, s in zip(on.shape[2:], block, strict=True))]
    shape = lambda x: x.reshape(*x.shape[:2], x.shape[2] // block[0], block[0], x.shape[3] // block[1], block[1])
    some = shape(np.pad(on, padding)).any((3, 5))
    every = shape(np.pad(on, padding, constant_values=True)).all((3, 5))
    arrays: list[jax.Array | None] = []
    widths = []
    for hit in (some & ~every, every, (some & ~every).swapaxes(2, 3), every.swapaxes(2, 3)):
        width = int(hit.sum(-1).max())
        widths.append(width)
        index = np.argsort(~hit, axis=-1, kind="stable")[..., :width].astype(np.int32)
        arrays += [jnp.asarray(hit.sum(-1).astype(np.int32)), jnp.asarray(index)] if width else [None, None]
    return BlockLayout(on.shape[0], on.shape[1], *block, *widths), BlockLists(*arrays[:4])


def problem(
    *,
    score: Mod | None = None,
    captured: tuple[jax.Array, ...] = (),
    mask: Mod | None = None,
    block: tuple[int, int] | None = (128, 128),
    mask_heads: int = 1,
    dropout: Mod | None = None,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    q_len: int = 256,
    kv_len: int = 256,
    dim: int = 32,
    value_dim: int | None = None,
    extra: int = 0,
    layout: str = "BTNH",
    dtype: str = "bfloat16",
    d_lse: bool = False,
    sinks: bool = False,
    options: KernelOptions | None = None,
) -> Problem:
    """`score(captured, s, b, h, q, kv)`; gradients of `captured` are wanted."""
    kv_heads, value_dim = kv_heads or heads, value_dim or dim
    sizes, scale = (batch, heads, q_len, kv_len), 1 / math.sqrt(dim)
    draw = lambda t, n, d: normal(batch, t, n, d).astype(dtype)
    query, key, value = (
        draw(q_len, heads, dim),
        draw(kv_len, kv_heads, dim),
        draw(kv_len, kv_heads, value_dim),
    )
    extras = (draw(q_len, heads, extra), draw(kv_len, 1, extra)) if extra else (None, None)
    d_out, d_row = draw(q_len, heads, value_dim), normal(batch, q_len, heads)
    sink = normal(heads) if sinks else None
    on = None
    if mask is not None:
        on = np.asarray(over_all(mask, 0)(*(jnp.arange(n) for n in (1, mask_heads, q_len, kv_len))))

    def attention(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        qe: typing.Any,
        ke: typing.Any,
        sink: typing.Any,
        c: typing.Any,
    ) -> tuple[jax.Array, jax.Array]:
        group = heads // kv_heads
        s = jnp.einsum("btnd,bsnd->bnts", q, jnp.repeat(k, group, 2), precision="highest")
        if extra:
            s = s + jnp.einsum("btnd,bsnd->bnts", qe, jnp.repeat(ke, heads, 2), precision="highest")
        index = [jnp.arange(n) for n in sizes]
        s = s * scale
        if score is not None:
            s = over_all(functools.partial(score, c), 1)(s if on is None else jnp.where(on, s, 0.0), *index)
        s = s if on is None else jnp.where(on, s, -jnp.inf)
        whole = s
        if sink is not None:
            whole = jnp.concatenate([s, jnp.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))], -1)
        top = jax.lax.stop_gradient(whole.max(-1))
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        total = jnp.exp(whole - top[..., None]).sum(-1)
        dead = total == 0
        lse = jnp.where(dead, -jnp.inf, jnp.log(jnp.where(dead, 1.0, total)) + top)
        p = jnp.exp(s - jnp.where(dead, 0.0, lse)[..., None])
        if dropout is not None:
            p = p * over_all(dropout, 1)(s, *index)
        out = jnp.einsum("bnts,bsnd->btnd", p, jnp.repeat(v, group, 2), precision="highest")
        return out, jnp.swapaxes(lse, 1, 2)

    wide = [None if x is None else x.astype(jnp.float32) for x in (query, key, value, *extras)]
    (out, lse), pull = jax.vjp(attention, *wide, sink, captured)
    d_row = jnp.where(jnp.isneginf(lse), 0.0, d_row) if d_lse else jnp.zeros_like(lse)
    want = pull((d_out.astype(jnp.float32), d_row))

    traced = None if score is None else trace_mod.trace_score_mod(functools.partial(score, captured), sizes)
    masked = None if mask is None else trace_mod.trace_mask_mod(mask, sizes)
    dropped = None if dropout is None else trace_mod.trace_score_mod(dropout, sizes)
    blocks, lists = (None, None) if on is None or block is None else block_lists(on, block)
    plan = KernelPlan(
        *(batch, heads, kv_heads, q_len, kv_len, dim, value_dim, dtype, layout, scale),
        score=None if traced is None else traced.program,
        mask=None if masked is None or (blocks is not None and not blocks.partial) else masked.program,
        dropout=None if dropped is None else dropped.program,
        blocks=blocks,
        has_sinks=sinks,
        extra_dim=extra,
        extra_heads=int(extra > 0),
        options=dataclasses.replace(options or KernelOptions(), interpret=True),
    )
    turn = lambda x: x if x is None or layout == "BTNH" else jnp.swapaxes(x, 1, 2)
    arrays = lambda t: () if t is None else tuple(t.arrays)
    if plan.mask is None:
        masked = None
    operands = Operands(
        *(turn(x) for x in (query, key, value, *extras)),
        sink,
        arrays(traced),
        arrays(masked),
        arrays(dropped),
        lists,
    )
    assert len(operands.score_captures) == len(captured)
    return Problem(
        plan,
        operands,
        Results(turn(out.astype(dtype)), turn(lse), None),
        turn(d_out),
        turn(d_row) if d_lse else None,
        Wanted(True, True, True, bool(extra), bool(extra), sinks, (True,) * len(captured)),
        None if traced is None else traced.derivative,
        Gradients(*(turn(x) for x in want[:5]), want[5], want[6]),
    )


def assert_close(got: Gradients, expected: Gradients, tolerance: float = 8e-3) -> None:
    for name, a, b in zip(Gradients._fields, got, expected, strict=True):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            assert np.isfinite(x).all(), name
            assert np.linalg.norm(x.reshape(y.shape) - y) <= tolerance * np.linalg.norm(y) + 1e-5, name


CASES: dict[str, dict[str, typing.Any]] = {
    "full": {},
    "causal, grouped heads": {"mask": causal, "heads": 4, "kv_heads": 2},
    "mask without lists": {"mask": causal, "block": None, "heads": 1},
    "odd lengths and dims": {"mask": causal, "q_len": 140, "kv_len": 203, "dim": 40, "value_dim": 24, "heads": 1},
    "one query": {"q_len": 1, "kv_len": 70, "heads": 1},
    "wide head": {"dim": 160, "value_dim": 32, "heads": 1, "q_len": 128, "kv_len": 128},
    "BNTH, float16, sinks, cotangent of lse": {
        "mask": causal, "layout": "BNTH", "dtype": "float16", "sinks": True, "d_lse": True, "heads": 1,
    },
    "soft cap": {"score": lambda c, s, b, h, q, k: 5.0 * jnp.tanh(s / 5.0), "q_len": 128, "kv_len": 128, "heads": 1},
    "checkerboard": {
        "score": lambda c, s, b, h, q, k: jnp.where((k - q) % 2 == 1, 2.0 * jnp.where((k + q) % 4 == 0, s * 0.5, s), s),
        "q_len": 128, "kv_len": 128, "heads": 1,
    },
    "checkerboard under a mask, then a slope": {
        "score": lambda c, s, b, h, q, k: jnp.where((k - q) % 2 == 1, 3.0 * s, s) - 0.1 * (q - k), "mask": causal,
        "q_len": 130, "kv_len": 200, "heads": 1,
    },
    "dropout": {
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
        "q_len": 128, "kv_len": 128, "heads": 1,
    },
    "dead rows": {"mask": lambda b, h, q, k: (q >= k) & (k > 100), "d_lse": True, "heads": 1},
    "nan where the mask is off": {
        "mask": causal, "score": lambda c, s, b, h, q, k: s + jnp.sqrt((q - k).astype(jnp.float32)), "heads": 1,
        "q_len": 128, "kv_len": 128,
    },
    "blocks of 64": {"mask": causal, "block": (64, 64), "q_len": 128, "kv_len": 128, "heads": 1},
    "mask of each head": {"mask": lambda b, h, q, k: (q >= k) & (k % (h + 2) != 0), "mask_heads": 2, "q_len": 128},
    "extra features": {"extra": 16, "q_len": 128, "kv_len": 128},
    "half a block of threads past the end": {
        "score": lambda c, s, b, h, q, k: s + jnp.sqrt(191.0 - k), "q_len": 64, "kv_len": 192, "heads": 1,
    },
    "full blocks of which half is past the end": {
        "score": lambda c, s, b, h, q, k: s + jnp.sqrt(191.0 - k), "mask": lambda b, h, q, k: q >= 0, "block": (64, 128),
        "q_len": 64, "kv_len": 192, "heads": 1,
    },
    "tiles of 64 x 64": {"mask": causal, "heads": 1, "options": KernelOptions(block_q_bwd=64, block_kv_bwd=64)},
}  # fmt: skip

CAPTURED: dict[str, dict[str, typing.Any]] = {
    "temperature of each head": {
        "score": lambda c, s, b, h, q, k: s * c[0][h], "captured": (1 + 0.2 * normal(2),), "q_len": 256, "kv_len": 128,
    },
    "gain of each query, bias of each key": {
        "score": lambda c, s, b, h, q, k: s * c[0][h, q] + c[1][k],
        "captured": (normal(1, 128), normal(128)), "q_len": 128, "kv_len": 128, "heads": 1,
    },
    "relative table, odd": {
        "score": lambda c, s, b, h, q, k: s + c[0][h, q - k + 69],
        "captured": (normal(1, 199),), "q_len": 130, "kv_len": 70, "heads": 1,
    },
    "clipped table": {
        "score": lambda c, s, b, h, q, k: s + c[0][jnp.clip(q - k, -20, 20) + 20],
        "captured": (normal(41),), "mask": causal, "q_len": 128, "kv_len": 128, "heads": 1,
    },
    "pair bias": {
        "score": lambda c, s, b, h, q, k: s + c[0][q, k],
        "captured": (normal(128, 128),), "mask": causal, "q_len": 128, "kv_len": 128, "batch": 2, "heads": 1,
    },
    "bias of each query, half a block of keys past the end": {
        "score": lambda c, s, b, h, q, k: s + c[0][q] * s, "captured": (normal(128),), "q_len": 128, "kv_len": 192, "heads": 1,
    },
    "relative table, half a block of keys past the end": {
        "score": lambda c, s, b, h, q, k: s + c[0][q - k + 191], "captured": (normal(319),), "q_len": 128, "kv_len": 192,
        "heads": 1,
    },
    "bias of each key, half a block of queries past the end": {
        "score": lambda c, s, b, h, q, k: s + c[0][k] * jnp.sqrt(191.0 - q), "captured": (normal(128),), "q_len": 192,
        "kv_len": 128, "heads": 1,
    },
    "gather": {
        "score": lambda c, s, b, h, q, k: s + c[0][(q * 7 + k * 3) % 50],
        "captured": (normal(50),), "q_len": 128, "kv_len": 128, "heads": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_matches_dense(name: str) -> None:
    made = problem(**CASES[name])
    assert_close(made.gradients(), made.expected)


@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_of_captures(name: str) -> None:
    made = problem(**CAPTURED[name])
    # Sums of numbers of both signs: what the rounding of the forward pass's output leaves in delta does not cancel in them.
    assert_close(made.gradients(), made.expected, tolerance=3e-2)


ONE_KERNEL: dict[str, dict[str, typing.Any]] = {
    "full": {},
    "lists": {"mask": lambda b, h, q, k: q // 128 >= k // 128, "kv_heads": 1},
    "half a block of threads past the end": CASES["half a block of threads past the end"],
    # from each tile of keys, blocks with and without a mask in turn; nobody reads the last tile of keys
    "runs": {
        "mask": lambda b, h, q, k: ((q // 128 % 2 == 0) | ((q + k) % 3 > 0)) & (k < 256), "kv_len": 384, "q_len": 512,
        "heads": 1,
    },
    "slopes": {
        "score": lambda c, s, b, h, q, k: s + c[0][h] * (k - q), "captured": (jnp.array([0.02, 0.1]),), "mask": causal,
    },
    "odd": {
        "mask": lambda b, h, q, k: (q >= k) & (k % (h + 2) != 0), "mask_heads": 2, "block": (256, 128), "q_len": 290,
        "kv_len": 131, "kv_heads": 1, "dim": 40, "extra": 16, "value_dim": 16, "layout": "BNTH", "dtype": "float16",
        "sinks": True, "d_lse": True,
    },
    "relative table": {
        "score": lambda c, s, b, h, q, k: s + c[0][h, q - k + 255], "captured": (normal(2, 511),), "mask": causal,
    },
}  # fmt: skip


TOO_MUCH = ("half a block of threads past the end",)
"""For the registers of tiles of 128 queries."""

# The simulator blocks one of XLA's threads for each of the four warpgroups; with as few threads as that it may stand still.
ENOUGH_THREADS = pytest.mark.skipif(
    int(os.environ.get("PJRT_NPROC") or os.cpu_count() or 1) < 8,
    reason="the simulator needs a core for each of four warpgroups, and more",
)


def check_one_kernel(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, queries: int, tolerance: float = 8e-3, **case: typing.Any
) -> None:
    monkeypatch.setattr(choose_kernel, "fused_is_faster", lambda plan: True)
    tiles = []
    run = backward_sm90.backward_fused
    monkeypatch.setattr(backward_sm90, "backward_fused", lambda *given: (tiles.append(given[-1].tiles), run(*given))[1])
    made = problem(**{"dim": 64, **case}, options=KernelOptions(deterministic=deterministic, block_q_bwd=queries))
    assert_close(made.gradients(), made.expected, tolerance=tolerance)
    assert [t.queries for t in tiles] == [queries]


@ENOUGH_THREADS
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("name", "queries"), [(name, n) for name in ONE_KERNEL for n in (64, 128) if n == 64 or name not in TOO_MUCH]
)
def test_one_kernel(name: str, deterministic: bool, queries: int, monkeypatch: pytest.MonkeyPatch, races: list) -> None:
    tolerance = 3e-2 if "captured" in ONE_KERNEL[name] else 8e-3
    check_one_kernel(monkeypatch, deterministic, queries, tolerance, **ONE_KERNEL[name])
    races.clear()  # blocks of threads add to one dQ: in any order, or by tickets, which the simulator does not know


ONE_TILE_OF_KEYS: dict[str, dict[str, typing.Any]] = {
    "full": {"q_len": 192, "heads": 1},
    "grouped heads with lists of their own": {
        "mask": lambda b, h, q, k: ((q // 128 == 1) | ((q + k) % 3 > 0)) & ((h == 0) | (q >= 128)), "mask_heads": 2,
        "q_len": 384, "heads": 2, "kv_heads": 1,
    },
    "one visit": {"mask": lambda b, h, q, k: (q < 64) & (k <= q), "block": (64, 128), "heads": 1},
    "runs": {
        "mask": lambda b, h, q, k: (q // 64 % 2 == 0) | (k <= q % 64), "block": (64, 128), "q_len": 320, "heads": 1,
    },
    "nothing, of each head": {"mask": lambda b, h, q, k: (q < 0) & (h > 0), "mask_heads": 2},
}  # fmt: skip


@ENOUGH_THREADS
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("name", "queries"),
    [(name, n) for name, case in ONE_TILE_OF_KEYS.items() for n in (64, 128) if n == 64 or "block" not in case],
)
def test_one_kernel_is_without_races(
    name: str, queries: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a single block of threads adds to dQ, what it shares between warpgroups is watched."""
    check_one_kernel(monkeypatch, deterministic, queries, **ONE_TILE_OF_KEYS[name], kv_len=128)


@pytest.mark.parametrize("deterministic", [True, False])
def test_query_visits_are_int32(deterministic: bool) -> None:
    from flexjax.backends.mosaic_gpu import backward_fused_visits, dq_order, tile_visits

    made = problem(**ONE_KERNEL["lists"], dim=64, options=KernelOptions(deterministic=deterministic))
    order = dq_order.order_for(made.plan, 4, 2) if deterministic else None
    with jax.enable_x64(True):
        lists = tile_visits.visit_lists(made.plan, made.operands.lists, transposed=True)
        visits = backward_fused_visits.query_visits(made.plan, lists, 2, 4, 64, order)
    assert {x.dtype for x in jax.tree.leaves(visits)} == {jnp.dtype("int32")}
