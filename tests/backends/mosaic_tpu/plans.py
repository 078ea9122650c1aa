"""Plans and operands of the table of cases, made without the front door: block lists are read off the dense mask."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.target import Target
from flexjax.ir.program import Program
from flexjax.passes.dispatch import Run
from flexjax.plan.kernel_plan import BackwardInputs, KernelPlan, Operands, Wanted
from flexjax.trace.trace_mod import trace_mask_mod, trace_score_mod
from flexjax.types import KernelOptions
from tests import oracle
from tests.arrays import array
from tests.cases import Case
from tests.cases.dense_masks import block_lists, over_all

CPU = Target("cpu")
"""Where the kernels are simulated."""


class Problem(typing.NamedTuple):
    """What a backend gets for a case; `learn` names the captured array behind each score capture (None: not one of ours)."""

    plan: KernelPlan
    operands: Operands
    derivative: Program | None
    learn: tuple[str | None, ...]


def dropout_mod(rate: float):
    """A hash of the position that keeps about 1 - rate."""

    def mod(s, b, h, q, k):
        x = (b.astype(jnp.uint32) * 7 + h.astype(jnp.uint32)) * np.uint32(0x9E3779B1)
        x = (x ^ q.astype(jnp.uint32)) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13) ^ k.astype(jnp.uint32)) * np.uint32(0xC2B2AE35)
        x = x ^ (x >> 16)
        keep = (x & 0xFFFF) >= np.uint32(int(rate * 65536))
        return jnp.where(keep, 1.0 / (1.0 - rate), 0.0).astype(jnp.float32)

    return mod


def dropout_keep(case: Case) -> np.ndarray | None:
    if not case.dropout:
        return None
    B, N, _, T, S, _, _ = case.shape
    mod = dropout_mod(case.dropout)
    at = jnp.indices((B, N, T, S), dtype=jnp.int32)
    return np.asarray(mod(None, *at) > 0)


def problem_of(case: Case, dtype: str, options: KernelOptions | None = None) -> Problem:
    B, N, M, T, S, D, E = case.shape
    sizes = (B, N, T, S)
    captured = {name: array(x) for name, x in case.captured().items()}
    score_mod, mask_mod = case.mods(captured)
    score = None if score_mod is None else trace_score_mod(score_mod, sizes, "float32")
    mask = None if mask_mod is None else trace_mask_mod(mask_mod, sizes)
    drop = trace_score_mod(dropout_mod(case.dropout), sizes, "float32") if case.dropout else None
    tokens_first = case.layout == "BTNH"
    inputs = case.inputs()
    turn = lambda x: np.swapaxes(x, 1, 2) if tokens_first else x
    arrays = {n: array(turn(x), dtype) for n, x in inputs.items() if n not in ("sinks", "u")}
    lists = layout = None
    if case.block is not None:
        size = case.block.size
        block_q, block_kv = (size, size) if isinstance(size, int) else size
        on = np.asarray(over_all(mask_mod, 0)(*(jnp.arange(n, dtype=jnp.int32) for n in sizes)))
        on = on[: B if case.block.batch else 1, : N if case.block.heads else 1]
        layout, lists = block_lists(on, (block_q, block_kv))
    extra_heads, extra_dim = case.extra or (0, 0)
    plan = KernelPlan(
        B,
        N,
        M,
        T,
        S,
        D,
        E,
        dtype,
        case.layout,
        D**-0.5 if case.scale is None else case.scale,
        score=score.program if score else None,
        mask=mask.program if mask else None,
        dropout=drop.program if drop else None,
        blocks=layout,
        has_sinks=case.sinks,
        extra_dim=extra_dim,
        extra_heads=extra_heads,
        max_scores=True,
        options=options or KernelOptions(interpret=True),
    )
    operands = Operands(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        arrays.get("query_extra"),
        arrays.get("key_extra"),
        array(inputs["sinks"]) if case.sinks else None,
        score.arrays if score else (),
        mask.arrays if mask else (),
        drop.arrays if drop else (),
        lists,
    )
    learned = oracle.learned(case, captured)
    names = []
    for read in operands.score_captures:
        names.append(next((n for n, x in learned.items() if x is read or _same(x, read)), None))
    return Problem(plan, operands, score.derivative if score else None, tuple(names))


def _same(x: jax.Array, y: jax.Array) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)


def wanted_of(problem: Problem) -> Wanted:
    plan = problem.plan
    captured = zip(problem.operands.score_captures, problem.learn, strict=True)
    floats = tuple(jnp.issubdtype(a.dtype, jnp.floating) and n is not None for a, n in captured)
    extra = plan.extra_dim > 0
    return Wanted(True, True, True, extra, extra, plan.has_sinks, floats)


def run(backend, problem: Problem, case: Case, backward: bool = True) -> dict[str, np.ndarray]:
    """Results and gradients by name, heads first, as the oracle has them."""
    plan = problem.plan
    weights = case.inputs()
    tokens_first = case.layout == "BTNH"
    turn = lambda x: jnp.swapaxes(x, 1, 2) if tokens_first else x
    w = turn(array(weights["w"], plan.dtype))
    u = turn(array(weights["u"], jnp.float32))
    wanted = wanted_of(problem)
    run = Run(backend, plan, CPU)

    @jax.jit
    def step(operands: Operands):
        results = run.forward(operands)
        if not backward:
            return results, None
        d_lse = jnp.where(jnp.isfinite(results.lse), u, 0.0)
        return results, run.backward(BackwardInputs(operands, results, w, d_lse, wanted, problem.derivative))

    results, grads = step(problem.operands)
    found = {"out": turn(results.out), "lse": turn(results.lse), "max_scores": turn(results.max_scores)}
    if grads is not None:
        named = dict(
            q=grads.query, k=grads.key, v=grads.value, query_extra=grads.query_extra, key_extra=grads.key_extra
        )
        found |= {"d:" + n: turn(x) for n, x in named.items() if x is not None}
        if grads.sinks is not None:
            found["d:sinks"] = grads.sinks
        for name, grad in zip(problem.learn, grads.score_captures, strict=True):
            if name is not None and grad is not None:
                key = "d:" + name
                found[key] = found[key] + grad if key in found else grad
    return found


__all__ = ["Problem", "dataclasses", "dropout_keep", "problem_of", "run", "wanted_of"]
