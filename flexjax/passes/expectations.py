"""The backward pass of a call with expectations, as that of a call without: their cotangents are captured arrays.

With E_n = sum_k p F_n, e_n the cotangent of E_n, r dropout's multiplier and c the cotangent of the new score over p:

    fbar = sum_n e_n F_n            c    = r do v^T + fbar - delta,  delta = rowsum(do out) + sum_n e_n E_n - dlse
    ds   = p (c ds'/ds + sum_n e_n dF_n/ds)          dl_j = p (c ds'/dl_j + sum_n e_n dF_n/dl_j)

So sum_n e_n E_n is subtracted from dlse, and the derivative program loads e_n[b, h, q] and has a second group of
results, fbar and its derivatives, beside the group of s' (trace/derivative.py). Of a weighted plan s' is the weight w:

    dw   = r do v^T + dtotal + fbar
    ds   = dw dw/ds + w sum_n e_n dF_n/ds            dl_j = dw dw/dl_j + w sum_n e_n dF_n/dl_j
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from flexjax.ir.builder import Builder
from flexjax.ir.origin import UNKNOWN, query_positions
from flexjax.ir.program import SCORE, ArrayType, Atom, B, H, Lit, Program, Q
from flexjax.ir.replay import replay
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results
from flexjax.plan.problem import Problem

Array = jax.Array


def without(problem: Problem) -> Problem:
    """The problem of out and lse alone."""
    return _changed(problem, lambda program: _first_group(program), ())


def as_captures(
    problem: Problem, operands: Operands, results: Results, cotangents: tuple[Array | None, Array]
) -> tuple[Problem, Operands, Array | None]:
    """(problem, operands, cotangent of lse) of a call without expectations, which has the same gradients.

    cotangents   of lse, None for zero, and of the expectations, [B, T, N, n]
    """
    plan, (d_lse, given) = problem.plan, cotangents
    if not plan.weighted:
        assert results.expectations is not None
        d_lse = cotangent_of_lse(d_lse, given, results.expectations)
    rows = [_at_positions(x, problem, operands) for x in by_function(plan, given)]
    return *capturing(problem, operands, rows), d_lse


def cotangent_of_lse(d_lse: Array | None, given: Array, expectations: Array) -> Array:
    """That of a call without expectations, from theirs, `given`; both [.., n]."""
    of_rows = -(given * expectations).sum(-1)
    return of_rows if d_lse is None else d_lse + of_rows


def by_function(plan: KernelPlan, given: Array) -> Array:
    """Cotangents of expectations, in the plan's layout, as [n, B, N, T]."""
    first = jnp.moveaxis(given, -1, 0)
    return jnp.swapaxes(first, 2, 3) if plan.layout == "BTNH" else first


def capturing(problem: Problem, operands: Operands, rows: Sequence[Array]) -> tuple[Problem, Operands]:
    """The call whose derivative programs load the cotangents `rows`, each [B, N, positions of queries]."""
    made = operands._replace(score_captures=(*operands.score_captures, *rows))
    types = tuple(ArrayType(x.shape, x.dtype.name) for x in rows)
    changed = _changed(problem, lambda program: _summed(program, types, len(rows)), types)
    return dataclasses.replace(changed, structure=jax.tree.structure(made)), made


def _at_positions(rows: Array, problem: Problem, operands: Operands) -> Array:
    """`rows` [B, N, T] at the positions of the queries in the whole problem, [B, N, whole length], 0 elsewhere."""
    plan = problem.plan
    if plan.origin is None:
        return rows
    length = typing.cast(Program, problem.derivative).sizes[2]
    if length >= UNKNOWN:
        raise NotImplementedError(
            "The gradient of expectations needs the length of the whole problem. Give whole= in origin, or put "
            "jax.lax.stop_gradient around the expectations."
        )
    b = jnp.arange(plan.batch, dtype=jnp.int32)[:, None]
    at = query_positions(plan.origin, operands.origin, b, jnp.arange(plan.q_len, dtype=jnp.int32)[None])
    by_token = jnp.moveaxis(rows, 1, 2)
    made = jnp.zeros((plan.batch, length, plan.q_heads), rows.dtype).at[b, at].set(by_token, mode="drop")
    return jnp.moveaxis(made, 1, 2)


def _changed(problem: Problem, change: Callable[[Program], Program], more: tuple[ArrayType, ...]) -> Problem:
    """The problem without expectations; `change` makes its derivative programs, and all programs capture `more`."""

    def one(program: Program) -> Program:
        if program is not problem.plan.score:
            return change(program)
        first = with_results(program, program.results[:1])
        return dataclasses.replace(first, captures=(*first.captures, *more))

    plan = dataclasses.replace(problem.plan, expectations=0, crowded=bool(more))
    operands = problem.arrange(range(problem.structure.num_leaves))
    return problem.with_programs([one(p) for p in problem.programs], plan, operands)


@functools.lru_cache(maxsize=256)
def _first_group(derivative: Program) -> Program:
    builder = Builder(derivative.sizes, derivative.inputs[SCORE].dtype)
    builder.captures = list(derivative.captures)
    found = replay(derivative, builder, {v.id: v for v in builder.inputs})
    results = [found.new(r) for r in derivative.groups[0]]
    return builder.finish(results, [found.loads[n] for n in derivative.gradients])


@functools.lru_cache(maxsize=256)
def _summed(derivative: Program, types: tuple[ArrayType, ...], count: int) -> Program:
    """The program of two groups: that of s', and the sum of the others times e_1 .. e_n, arrays of `types`."""
    dtype = derivative.inputs[SCORE].dtype
    builder = Builder(derivative.sizes, dtype)
    builder.captures = [*derivative.captures, *types]
    found = replay(derivative, builder, {v.id: v for v in builder.inputs})
    at = [builder.inputs[axis] for axis in (B, H, Q)]
    rows = [builder.load(len(derivative.captures) + n, at) for n in range(count)]
    first, *others = ([found.new(r) for r in group] for group in derivative.groups)
    sums = [_sum_of_products(builder, rows, terms, dtype) for terms in zip(*others, strict=True)]
    return builder.finish([*first, *sums], [found.loads[n] for n in derivative.gradients])


def _sum_of_products(builder: Builder, rows: Sequence[Atom], terms: Sequence[Atom], dtype: str) -> Atom:
    """sum_n rows[n] * terms[n], without the terms that are the literal 0."""
    total: Atom | None = None
    for row, term in zip(rows, terms, strict=True):
        value = term.value if isinstance(term, Lit) else None
        if value == 0:
            continue
        product = row if value == 1 else builder.op("mul", (row, term), dtype)
        total = product if total is None else builder.op("add", (total, product), dtype)
    return Lit(0.0, dtype) if total is None else total
