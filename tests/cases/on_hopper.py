"""Plans of the Hopper kernels with their operands, made of a row of hopper_forward.py or hopper_backward.py, and what they compute.

What a forward kernel is compared with numpy computes in float64; a backward kernel, jax.vjp of dense attention in float32.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.mosaic_gpu.machine import simulator
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.plan import rewrite
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.rewrites import extra_features
from flexjax.trace import trace_mod
from flexjax.types import KernelOptions
from tests.arrays import array
from tests.cases.dense_masks import Mod, block_lists, over_all

RNG = np.random.default_rng(3)


def normal(*shape: int) -> jax.Array:
    return array(RNG.normal(size=shape), jnp.float32)


def causal(b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return q >= k


def benched(
    tokens: int = 8192,
    heads: int = 32,
    mask_mod: typing.Any = causal,
    score_mod: typing.Any = None,
    **options: typing.Any,
) -> KernelPlan:
    """The plan of attention as the benchmarks have it at head dim 64, batch 2."""
    x = jax.ShapeDtypeStruct((2, tokens, heads, 64), jnp.bfloat16)
    given = {"mask_mod": mask_mod, "score_mod": score_mod, "kernel_options": KernelOptions(**options)}
    plans: list[KernelPlan] = []
    jax.eval_shape(lambda x: plans.append(prepare(Arguments(x, x, x, **typing.cast(typing.Any, given))).plan), x)
    return plans[0]


# ------------------------------------------------------------------- forward


class ForwardProblem(typing.NamedTuple):
    plan: KernelPlan
    operands: Operands
    out: np.ndarray
    lse: np.ndarray
    max_scores: np.ndarray


def _index(sizes: tuple[int, int, int, int]) -> list[jax.Array]:
    return [jnp.arange(n, dtype=jnp.int32) for n in sizes]


def dense(
    arrays: tuple[jax.Array, ...],
    plan: KernelPlan,
    score: Mod | None,
    on: np.ndarray | None,
    dropout: Mod | None,
    sinks: jax.Array | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, lse and largest scores in float64, in the layout of the plan."""
    sizes = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
    q, k, v = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in arrays)
    if plan.layout == "BTNH":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    k, v = (np.repeat(x, plan.group, axis=1) for x in (k, v))
    s = np.einsum("bntd,bnsd->bnts", q, k) * plan.scale
    if score is not None:
        s = np.asarray(over_all(score, 1)(jnp.asarray(s, jnp.float32), *_index(sizes))).astype(np.float64)
    if on is not None:
        s = np.where(on, s, -np.inf)
    largest = s.max(-1)
    shift = largest if sinks is None else np.maximum(largest, np.asarray(sinks)[None, :, None])
    shift = np.where(np.isfinite(shift), shift, 0.0)
    p = np.exp(s - shift[..., None])
    total = p.sum(-1)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks)[None, :, None] - shift)
    dead = total == 0
    total = np.where(dead, 1.0, total)
    lse = np.where(dead, -np.inf, np.log(total) + shift)
    p = p / total[..., None]
    if dropout is not None:
        p = p * np.asarray(over_all(dropout, 1)(jnp.asarray(s, jnp.float32), *_index(sizes)))
    out = np.einsum("bnts,bnse->bnte", p, v)
    if plan.layout == "BTNH":
        return out.swapaxes(1, 2), lse.swapaxes(1, 2), largest.swapaxes(1, 2)
    return out, lse, largest


def forward_problem(
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    q_len: int = 256,
    kv_len: int = 256,
    dim: int = 64,
    value_dim: int | None = None,
    dtype: str = "bfloat16",
    layout: str = "BTNH",
    scale: float | None = None,
    score: Mod | None = None,
    mask: Mod | None = None,
    dropout: Mod | None = None,
    sinks: bool = False,
    block: tuple[int, int] | None = (128, 128),
    mask_batch: int = 1,
    mask_heads: int = 1,
    use_full: bool = True,
    max_scores: bool = False,
    interpret: bool = True,
    seed: int = 0,
) -> ForwardProblem:
    """`block=None`: no lists, the mask applies everywhere."""
    rng = np.random.default_rng(seed)
    value_dim = value_dim or dim
    sizes = (batch, heads, q_len, kv_len)

    def random(length: int, n: int, d: int) -> jax.Array:
        shape = (batch, length, n, d) if layout == "BTNH" else (batch, n, length, d)
        return array(rng.normal(size=shape).astype(np.float32)).astype(dtype)

    arrays = (random(q_len, heads, dim), random(kv_len, kv_heads, dim), random(kv_len, kv_heads, value_dim))
    traced_score = trace_mod.trace_score_mod(score, sizes) if score else None
    traced_mask = trace_mod.trace_mask_mod(mask, sizes) if mask else None
    traced_dropout = trace_mod.trace_score_mod(dropout, sizes) if dropout else None
    on = np.asarray(over_all(mask, 0)(*_index(sizes))) if mask else None
    blocks, lists = None, None
    if on is not None and block is not None:
        blocks, lists = block_lists(on[:mask_batch, :mask_heads], block, use_full)
    logits = array(rng.normal(size=heads), jnp.float32) if sinks else None
    plan = KernelPlan(
        batch, heads, kv_heads, q_len, kv_len, dim, value_dim, dtype, layout,
        dim**-0.5 if scale is None else scale,
        score=traced_score and traced_score.program,
        mask=traced_mask and traced_mask.program,
        dropout=traced_dropout and traced_dropout.program,
        blocks=blocks, has_sinks=sinks, max_scores=max_scores, options=KernelOptions(interpret=interpret),
    )  # fmt: skip
    captures = [t.arrays if t else () for t in (traced_score, traced_mask, traced_dropout)]
    operands = Operands(*arrays, None, None, logits, *captures, lists)
    return ForwardProblem(plan, operands, *dense(arrays, plan, score, on, dropout, logits))


def assert_results_close(made: ForwardProblem, got: Results) -> None:
    """Compares the results of a forward kernel on 16-bit operands with those of its problem."""
    out = np.asarray(got.out.astype(jnp.float32))
    assert np.isfinite(out).all()
    assert np.linalg.norm(out - made.out) <= 4e-3 * np.linalg.norm(made.out) + 1e-6
    np.testing.assert_array_equal(np.isneginf(got.lse), np.isneginf(made.lse))
    np.testing.assert_allclose(got.lse, made.lse, rtol=3e-7, atol=2e-5)
    if got.max_scores is not None:
        np.testing.assert_allclose(got.max_scores, made.max_scores, rtol=0, atol=2e-5)


# ------------------------------------------------------------------- backward


def run_forward(kernel: Callable[..., Results], plan: KernelPlan, operands: Operands, tile: typing.Any) -> Results:
    """The results of `kernel(plan, operands, tile)`, where the plan says."""
    with simulator.running(plan.options.interpret):
        return jax.jit(lambda operands: kernel(plan, operands, tile))(operands)


def with_extra(kernels: Callable[..., Gradients], plan: KernelPlan, given: BackwardInputs) -> Gradients:
    """The gradients by kernels that know no extra features: `kernels(plan, given)`."""
    steps = rewrite.chain(plan, extra_features.rewrite)
    with simulator.running(plan.options.interpret):
        return rewrite.backward(steps, given, lambda last: kernels(rewrite.last_plan(plan, steps), last))


class BackwardProblem(typing.NamedTuple):
    """What `backward` is called with, and the gradients of a dense computation."""

    plan: KernelPlan
    given: BackwardInputs
    expected: Gradients

    def gradients(self) -> Gradients:
        from flexjax.backends.mosaic_gpu.families import hopper_backward  # needs jax 0.11

        call = jax.jit(
            lambda *arrays: with_extra(hopper_backward.backward, self.plan, BackwardInputs(*arrays, *self.given[4:]))
        )
        return call(*self.given[:4])


def backward_problem(
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
    seed: int = 0,
) -> BackwardProblem:
    """`score(captured, s, b, h, q, kv)`; gradients of `captured` are wanted. The arrays follow from `seed`, so that they are the same in
    whatever order tests run.
    """
    rng = np.random.default_rng(seed)
    random = lambda *shape: array(rng.normal(size=shape), jnp.float32)
    kv_heads, value_dim = kv_heads or heads, value_dim or dim
    sizes, scale = (batch, heads, q_len, kv_len), 1 / math.sqrt(dim)
    draw = lambda t, n, d: random(batch, t, n, d).astype(dtype)
    query, key, value = (
        draw(q_len, heads, dim),
        draw(kv_len, kv_heads, dim),
        draw(kv_len, kv_heads, value_dim),
    )
    extras = (draw(q_len, heads, extra), draw(kv_len, 1, extra)) if extra else (None, None)
    d_out, d_row = draw(q_len, heads, value_dim), random(batch, q_len, heads)
    sink = random(heads) if sinks else None
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
    given = BackwardInputs(
        operands,
        Results(turn(out.astype(dtype)), turn(lse), None),
        turn(d_out),
        turn(d_row) if d_lse else None,
        Wanted(True, True, True, bool(extra), bool(extra), sinks, (True,) * len(captured)),
        None if traced is None else traced.derivative,
    )
    return BackwardProblem(plan, given, Gradients(*(turn(x) for x in want[:5]), want[5], want[6]))


def assert_gradients_close(got: Gradients, expected: Gradients, tolerance: float = 8e-3) -> None:
    for name, a, b in zip(Gradients._fields, got, expected, strict=True):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            assert np.isfinite(x).all(), name
            assert np.linalg.norm(x.reshape(y.shape) - y) <= tolerance * np.linalg.norm(y) + 1e-5, name
