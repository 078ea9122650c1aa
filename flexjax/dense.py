"""The dense reference as a backend: reference.py, run from a plan instead of the user's functions.

An `implementation` sequence may name "reference" after a kernel. If the kernel refuses at lowering, only the traced programs are
left, and this backend runs them. Gradients are those of JAX. The whole score matrix is in memory at once. Shape letters are
those of plan/kernel_plan.py, and the methods of DenseBackend are documented in backends/base.py.
"""

import contextlib
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from flexjax.backends.base import BackwardInputs
from flexjax.backends.target import Target
from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.parts import parts_of
from flexjax.integers import cdiv
from flexjax.ir.evaluate_scalars import call_program
from flexjax.ir.origin import NOT_KNOWN, OriginTable, indices_of
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import FIRST_CAPTURE, Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.plan.lengths import NONE
from flexjax.plan.pages import contiguous
from flexjax.reference import over_entries, reference_attention

Array = jax.Array


class DenseBackend:
    """The backend "reference" (see backends/base.py). It refuses no plan."""

    name = "reference"

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        """None: it runs every plan on every target."""
        return None

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """None: it computes all gradients."""
        return None

    def tile_sizes(self, plan: KernelPlan, target: Target) -> None:
        """None: it has no tiles."""
        return None

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """An empty list: it has no tiles."""
        return []

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        """The forward pass: out, lse and, if the plan asks for them, max_scores and rounding (zeros), by reference_attention with the
        plan's programs as mods. max_scores and rounding are None if it does not. Keys in pages are gathered first; `target` is not read.
        """
        plan, operands = contiguous(plan, operands)
        out, lse, top = reference_attention(
            operands.query,
            operands.key,
            operands.value,
            score_mod=None if plan.score is None else _score_mod(plan, plan.score, operands),
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
        return Results(out, lse.astype(dtype), top.astype(dtype) if plan.max_scores else None, rounding)

    def backward(self, plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
        """The gradients of the wanted operands, None for the others: jax.vjp of `forward`, whose whole pass runs again. Of the results it
        reads the dtype of out and, where there is no cotangent of lse, the shape and dtype of lse.

        given    operands, results, cotangents (that of lse is None where it is zero) and the wanted gradients; the derivative program is
                 not read
        target   passed to `forward`, which does not read it
        """
        operands, results, d_out, d_lse, wanted, _ = given
        flags = wanted.flat
        moving = [x for x, want in zip(operands.movable, flags, strict=True) if want]

        def results_of(*moved: Array) -> tuple[Array, Array]:
            """The results out and lse as a function of the wanted operands alone, in the order of Operands.movable; the others stay as
            they are.
            """
            rest = iter(moved)
            values = [next(rest) if want else x for x, want in zip(operands.movable, flags, strict=True)]
            names = Operands._fields[:FIRST_CAPTURE]
            changed = operands._replace(
                **dict(zip(names, values, strict=False)), score_captures=tuple(values[FIRST_CAPTURE:])
            )
            made = self.forward(plan, changed, target)
            return made.out, made.lse

        _, pull = jax.vjp(results_of, *moving)
        found = iter(pull((d_out.astype(results.out.dtype), jnp.zeros_like(results.lse) if d_lse is None else d_lse)))
        return Gradients.of([next(found) if want else None for want in flags])

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        """An empty context: nothing about the lowered module changes."""
        return contextlib.nullcontext()


def _score_mod(plan: KernelPlan, program: Program, operands: Operands) -> Callable[..., Array]:
    """The plan's score program as a function (score, b, h, q_idx, kv_idx) -> score of scalars, which reads the captured arrays.

    plan       of which the score dtype is read, in which the program runs
    program    the score program
    operands   of which the captured arrays of score_mod are read

    The result of the function has the dtype of the score that the function is given.
    """

    def score_mod(score: Array, *at: Array) -> Array:
        """The new score, in the dtype of `score`; `at` are b, h, q_idx and kv_idx."""
        made = call_program(program, operands.score_captures, at, score.astype(plan.score_dtype))
        return made.astype(score.dtype)

    return score_mod


def _mask(plan: KernelPlan, operands: Operands) -> Array | None:
    """Which entries are visible by the block lists and the mask program: bool, broadcastable to [B, N, T, S]; None without a
    block mask.
    """
    mask = block_mask_of(plan, operands)
    return None if mask is None else mask.to_mask()


def _dropout(plan: KernelPlan, operands: Operands) -> dict:
    """The keywords dropout_keep and dropout_rate by which reference_attention drops what the plan drops; {} for a plan without dropout.

    plan       the call; its dropout program gives the factor 0 or 1 / (1 - rate) of each probability
    operands   the arrays of the call, of which the captured arrays of that program and the origin are read

    dropout_keep is bool [B, N, T, S] in both layouts: where the factor is positive. dropout_rate is a scalar array, found from the largest
    factor; it is 0 if every probability is dropped, which changes nothing.
    """
    program = plan.dropout
    if program is None:
        return {}
    multiplier = lambda *at: call_program(program, operands.dropout_captures, at)
    factors = over_entries(multiplier)(*_indices(plan, operands))
    return {"dropout_keep": factors > 0, "dropout_rate": 1.0 - 1.0 / jnp.max(factors, initial=1.0)}


def _indices(plan: KernelPlan, operands: Operands) -> list[Array]:
    """b, h, q and kv that the programs see, in this order, int32 of 4 dims that broadcast to [B, N, T, S]. b and h count from 0 in the
    arrays of the call, because the programs themselves add origin.batch and origin.head; q and kv are positions in the whole problem.
    """
    sizes = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
    return indices_of(_origin(plan, operands), sizes)


def _origin(plan: KernelPlan, operands: Operands) -> OriginTable:
    """The origin of the queries and keys of the plan as an OriginTable, whose batch and head are None, because the programs add those
    themselves. Without an origin, all four count from 0.
    """
    return OriginTable(None, None, operands.origin, plan.origin, NOT_KNOWN)


def block_mask_of(plan: KernelPlan, operands: Operands) -> BlockMask | None:
    """The BlockMask that a plan and its operands stand for: block lists, mask program and captured arrays put together again. None if the
    plan has no block mask.

    The mask has the origin of queries and keys of the plan; absent lists are empty, and on_host is None. Its arrays may be traced.
    """
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
