"""The dense reference as a backend: definition.py, run from a plan instead of the user's functions.

An `implementation` sequence may name "reference" after a kernel. If the kernel refuses at lowering, only the traced
programs are left, and this backend runs them. Gradients are those of JAX. The whole score matrix is in memory at once.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.base import Backend
from flexjax.backends.reference.definition import over_entries, reference_attention
from flexjax.backends.target import Target
from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.parts import parts_of
from flexjax.integers import cdiv
from flexjax.ir.evaluate_scalars import call_program
from flexjax.ir.origin import NOT_KNOWN, OriginTable, indices_of
from flexjax.ir.program import Load, Program
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import FIRST_CAPTURE, BackwardInputs, Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.plan.lengths import NONE
from flexjax.plan.rewrite import Steps, chain
from flexjax.rewrites import pages

Array = jax.Array


class DenseBackend(Backend):
    """The backend "reference" (see backends/base.py)."""

    name = "reference"

    def refuses_tangent(self, plan: KernelPlan, target: Target, moving: Wanted, derivative: Program | None) -> str:
        return "The reference has forward mode only where its mods are functions, not traced programs."

    def rewrites(self, plan: KernelPlan, target: Target, backward: bool = False) -> Steps:
        """Keys in pages are gathered."""
        return chain(plan, pages.gathered)

    def forward(
        self, plan: KernelPlan, operands: Operands, target: Target, derivative: Program | None = None
    ) -> Results:
        """out, lse and perhaps max_scores and rounding (zeros), by reference_attention on the plan's programs.

        derivative   program of score_mod's derivatives, if the pass is differentiated
        """
        program = derivative or plan.score
        several = [] if program is None else [program.results, program.groups][derivative is not None]
        mods = [_score_mod(plan, program, operands, derivative, n) for n in range(len(several))] if program else []
        score_mod = mods[0] if mods else None
        out, lse, top, *sums = reference_attention(
            operands.query,
            operands.key,
            operands.value,
            score_mod=None if plan.weighted else score_mod,
            weights=score_mod if plan.weighted else None,
            expectations=mods[1:],
            of_products=True,
            mask=_mask(plan, operands),
            scale=plan.scale,
            sinks=operands.sinks,
            layout=plan.layout,
            query_extra=operands.query_extra,
            key_extra=operands.key_extra,
            indices=_indices(plan, operands),
            lengths=operands.lengths or NONE,
            **_dropout(plan, operands),
        )
        dtype = plan.score_dtype
        # backward forms no delta: it differentiates this pass
        rounding = jnp.zeros_like(out) if plan.returns_rounding else None
        top = top.astype(dtype) if plan.max_scores else None
        return Results(out, lse.astype(dtype), top, rounding, *(x.astype(dtype) for x in sums))

    def backward(self, plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
        """The gradients of the wanted operands, None for the others: jax.vjp of `forward`, which runs again."""
        operands, results, d_out, d_lse, wanted, derivative = given
        # the plan's own program has lost the rules of derivatives
        flags = wanted.flat
        moving = [x for x, want in zip(operands.movable, flags, strict=True) if want]

        def results_of(*moved: Array) -> tuple[Array, ...]:
            """out, lse and the sums of the second group of a derivative program, of the wanted operands in order."""
            rest = iter(moved)
            values = [next(rest) if want else x for x, want in zip(operands.movable, flags, strict=True)]
            names = Operands._fields[:FIRST_CAPTURE]
            changed = operands._replace(
                **dict(zip(names, values, strict=False)), score_captures=tuple(values[FIRST_CAPTURE:])
            )
            made = self.forward(plan, changed, target, derivative)
            return made.out, made.lse, *([] if made.expectations is None else [made.expectations])

        (_, lse, *sums), pull = jax.vjp(results_of, *moving)
        d_lse = jnp.zeros_like(lse) if d_lse is None else d_lse
        if sums and not plan.weighted:
            d_lse = d_lse + sums[0][..., 0]  # d_lse already lacks the sum that is differentiated here
        found = iter(pull((d_out.astype(results.out.dtype), d_lse, *map(jnp.ones_like, sums))))
        return Gradients.of([next(found) if want else None for want in flags])


def _score_mod(
    plan: KernelPlan, whole: Program, operands: Operands, derivative: Program | None, number: int
) -> Callable[..., Array]:
    """A result of the plan's score program `whole` as a function (score, b, h, q_idx, kv_idx) -> number of scalars; if
    `whole` is the `derivative` program, that of its group `number`, with its derivatives.
    """
    captures = operands.score_captures
    group = whole.results[number : number + 1] if derivative is None else whole.groups[number]
    program = with_results(whole, group[:1])

    def score_mod(score: Array, *at: Array) -> Array:
        made = call_program(program, captures, at, score.astype(plan.score_dtype))
        return made.astype(score.dtype)

    if derivative is None:
        return score_mod
    loads = [typing.cast(Load, whole.steps[n]) for n in whole.gradients]

    @jax.custom_vjp
    def with_rules(score: Array, loaded: list[Array], at: tuple[Array, ...], captures: tuple[Array, ...]) -> Array:
        """The new score; its derivatives by `score` and by `loaded`, what `loads` read, are those of the program."""
        return call_program(program, captures, at, score)

    def pull(given: tuple, cotangent: Array) -> tuple:
        """The cotangents of `score` and `loaded`; the other arguments have none."""
        score, _, at, captures = given
        results = [call_program(with_results(whole, [r]), captures, at, score, cotangent) for r in group[1:]]
        if not whole.takes_cotangent:
            results = [cotangent * r for r in results]
        dtypes = [load.out.dtype for load in loads]
        return results[0], [r.astype(d) for r, d in zip(results[1:], dtypes, strict=True)], None, None

    with_rules.defvjp(lambda *given: (with_rules(*given), given), pull)

    def differentiable(score: Array, *at: Array) -> Array:
        """As score_mod, with the derivatives of the program."""
        loaded = [call_program(with_results(whole, [load.out]), captures, at) for load in loads]
        stopped = jax.lax.stop_gradient(captures)
        return with_rules(score.astype(plan.score_dtype), loaded, at, stopped).astype(score.dtype)

    return differentiable


def _mask(plan: KernelPlan, operands: Operands) -> Array | None:
    """By the block lists and the mask program: bool, broadcastable to [B, N, T, S]; None without a block mask."""
    mask = block_mask_of(plan, operands)
    return None if mask is None else mask.to_mask()


def _dropout(plan: KernelPlan, operands: Operands) -> dict:
    """The keywords dropout_keep, bool [B, N, T, S] in both layouts, and dropout_rate; {} without dropout.

    dropout_rate is found from the largest factor; it is 0 if every probability is dropped, which changes nothing.
    """
    program = plan.dropout
    if program is None:
        return {}
    multiplier = lambda *at: call_program(program, operands.dropout_captures, at)
    factors = over_entries(multiplier)(*_indices(plan, operands))
    return {"dropout_keep": factors > 0, "dropout_rate": 1.0 - 1.0 / jnp.max(factors, initial=1.0)}


def _indices(plan: KernelPlan, operands: Operands) -> list[Array]:
    """b, h, q and kv that the programs see, int32 of 4 dims that broadcast to [B, N, T, S]."""
    sizes = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
    return indices_of(_origin(plan, operands), sizes)


def _origin(plan: KernelPlan, operands: Operands) -> OriginTable:
    """Batch and head are None, because the programs add those themselves."""
    return OriginTable(None, None, operands.origin, plan.origin, NOT_KNOWN)


def block_mask_of(plan: KernelPlan, operands: Operands) -> BlockMask | None:
    """The BlockMask that a plan and its operands stand for, whose arrays may be traced; None without a block mask."""
    lists = operands.lists
    if plan.blocks is None or lists is None:
        return None
    blocks = plan.blocks
    shape = (blocks.batch, blocks.heads, cdiv(plan.q_len, blocks.block_q))
    # numpy, because jnp would trace these arrays under jit
    empty: typing.Any = (np.zeros(shape, np.int32), np.zeros((*shape, 0), np.int32)) * 2
    arrays = [e if x is None else x for x, e in zip(lists, empty, strict=True)]
    sizes, widths = (blocks.block_q, blocks.block_kv), (blocks.partial_t, blocks.full_t)
    captures, lengths = tuple(operands.mask_captures), (plan.q_len, plan.kv_len)
    origin = None if plan.origin is None else _origin(plan, operands)
    parts = parts_of(arrays, captures, plan.mask, lengths, sizes, widths, blocks.from_user_lists, origin)
    return BlockMask.of(parts)
