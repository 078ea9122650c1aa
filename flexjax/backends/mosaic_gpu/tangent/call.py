"""What every tangent kernel is given of a call, and one tile of it in registers.

With t before the name of a tangent, s' the modified score, l_j the loads of captured arrays, r dropout's multiplier:

    ts'  = ds'/ds scale (tq k + q tk) + sum_j ds'/dl_j tl_j
    tlse = sum p ts' + p_sink t_sink                              p = exp(s' - lse)
    tout = sum r (p ts' v + p tv) - out tlse

Of a weighted plan p = s' is the weight, sum ts' is the tangent of the total, and `out tlse` is left out. Products of
operands that do not move are left out.

An operand that moves lies beside its tangent: at batch entry b + B, and in the second half of a slot in shared memory,
as parts of float32 do (machine/float_parts.py). Tangents of captured arrays are captured arrays of the program that
computes ts' (ir/tangent_program.py).
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu.backward.common import Captures
from flexjax.backends.mosaic_gpu.backward.probabilities import Probabilities
from flexjax.backends.mosaic_gpu.backward.tile_math import RowMath, TileMath
from flexjax.backends.mosaic_gpu.forward.launch import inputs_for
from flexjax.backends.mosaic_gpu.forward.rows import Phase
from flexjax.backends.mosaic_gpu.forward.setup import AnyTile, ForwardInputs, ForwardSetup
from flexjax.backends.mosaic_gpu.forward.tile_scheduler import WorkItem
from flexjax.backends.mosaic_gpu.machine import kernel_parts, registers, thread_tiles
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.machine.mma_cards import Copying
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.backends.mosaic_gpu.tangent.tiles import Moving
from flexjax.backends.tile_math import LOG2E
from flexjax.ir.program import Program
from flexjax.ir.tangent_program import tangent_program
from flexjax.plan.kernel_plan import KernelPlan, TangentInputs


class TangentOperands(typing.NamedTuple, typing.Generic[Part]):
    """Operands in global memory; T'' is the number of queries in whole query tiles."""

    forward: ForwardInputs[Part]  # operands with their tangents, captured arrays with theirs; no sinks
    rows: Part  # [B, N, 2, T''] float32: lse2 as of backward/row_statistics.py, and p_sink t_sink
    out: Part | None  # [B, T'', N, E] or [B, N, T'', E]; None for a weighted plan

    @property
    def query(self) -> Part:
        return self.forward.query


@dataclasses.dataclass(frozen=True)
class TangentCall:
    """The static part of a call. What a tangent has not, such as row maxima, the plan has not either."""

    plan: KernelPlan
    program: Program | None  # of `tangent_program`; None without score_mod
    moving: Moving

    @classmethod
    def of(cls, plan: KernelPlan, given: TangentInputs) -> "TangentCall":
        tangents, derivative = given.tangents, given.derivative
        plan = dataclasses.replace(plan, exact_captures=False, max_scores=False, has_sinks=False)
        moving = Moving(*(t is not None for t in tangents[:3]), loads=False)
        captures = [t is not None for t in tangents.score_captures]
        program = None if derivative is None else tangent_program(derivative, captures, moving.score)
        return cls(plan, program, moving._replace(loads=program is not None and len(program.results) > 2))

    def inputs(
        self, setup: ForwardSetup[AnyTile], given: TangentInputs, unit: int = 1, copying: Copying = "tma"
    ) -> TangentOperands[jax.Array]:
        """The operands as a kernel reads them; `unit` and `copying` as of `inputs_for`."""
        plan, operands, results, tangents = self.plan, *given[:3]
        beside = lambda x, t: x if t is None else jnp.concatenate([x, t.astype(x.dtype)])
        moved = (t for t in tangents.score_captures if t is not None)
        both = operands._replace(
            query=beside(operands.query, tangents.query),
            key=beside(operands.key, tangents.key),
            value=beside(operands.value, tangents.value),
            score_captures=(*operands.score_captures, *moved),
            sinks=None,
        )
        rows = setup.scheduler.q_tiles * setup.tile.block_q
        out = None
        if not plan.weighted:
            found = results.out if results.rounding is None else results.float32_out
            out = kernel_parts.pad(found, plan.layout, rows, setup.tile.value_dim)
        stats = _rows(plan, given, rows)
        return TangentOperands(inputs_for(setup, both, unit, copying), stats, out)


def _rows(plan: KernelPlan, given: TangentInputs, length: int) -> jax.Array:
    """`TangentOperands.rows` for `length` rows of each head; lse2 is +inf where p is 0 in the whole row."""
    sinks, t_sinks = given.operands.sinks, given.tangents.sinks
    lse = given.results.lse.astype(jnp.float32)
    lse = jnp.swapaxes(lse, 1, 2) if plan.layout == "BTNH" else lse
    if plan.weighted:
        lse = jnp.zeros_like(lse)
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, length - plan.q_len)), constant_values=0 if plan.weighted else -jnp.inf)
    dead = jnp.isneginf(lse)
    first = jnp.zeros_like(lse)
    if t_sinks is not None and sinks is not None:
        sinks, t_sinks = (x.astype(jnp.float32)[None, :, None] for x in (sinks, t_sinks))
        first = jnp.where(dead, 0.0, jnp.exp(sinks - jnp.where(dead, 0.0, lse)) * t_sinks)
    return jnp.stack([jnp.where(dead, jnp.inf, lse if may_be_large(plan.score) else lse * LOG2E), first], axis=2)


class Terms(typing.NamedTuple):
    """What a tile adds, each [rows, keys] float32 but for `sums`; None for 0."""

    scores: jax.Array | None  # r p ts', which multiplies V
    values: jax.Array | None  # r p, which multiplies tV
    sums: jax.Array | None  # [rows], of p ts': a thread's part (`thread_tiles.partial_row_sums`)


@dataclasses.dataclass(frozen=True)
class TangentMath:
    """How a warpgroup computes its tiles of a call; static."""

    call: TangentCall
    shape: tuple[int, int]  # rows and keys of its tile
    cta_tile: tuple[int, int]

    @functools.cached_property
    def tile(self) -> TileMath:
        call = self.call
        loads = (0,) if call.moving.loads else ()
        return TileMath(call.plan, call.program, self.shape, "q", self.cta_tile, loads_too=loads)

    def at_rows(self, inputs: ForwardInputs[Ref], item: WorkItem, start: Scalar) -> RowMath:
        captures = Captures(inputs.score, inputs.mask, inputs.dropout, inputs.origin)
        return self.tile.at_rows(item.b, item.h, start, captures)

    def needs_start(self, setup: ForwardSetup[AnyTile]) -> bool:
        """Whether anything in a step depends on which keys it visits."""
        plan = self.call.plan
        return setup.has_masked_steps or self.call.program is not None or plan.dropout is not None

    def terms(self, found: Probabilities, raw: jax.Array | None) -> Terms:
        """What a tile adds, from its probabilities, or weights, and `raw`, [rows, keys]: tq k + q tk without scale."""
        moved = None
        if raw is not None:
            moved = found.factor() * (raw * self.call.plan.scale)
        for factor in found.load_factors():
            moved = factor if moved is None else moved + factor
        kept = lambda x: x if found.dropout is None else x * found.dropout
        return Terms(
            None if moved is None else kept(moved),
            kept(found.p) if self.call.moving.value else None,
            None if moved is None else thread_tiles.partial_row_sums(moved),
        )


def masked(setup: ForwardSetup[AnyTile], item: WorkItem, n: Scalar, phase: Phase) -> bool | Scalar:
    """Whether the mask applies in step n of a phase."""
    if phase is Phase.UNMASKED:
        return False
    return n >= item.full if setup.full_blocks_may_overhang else True


def row_vectors(inputs: TangentOperands[Ref], item: WorkItem, start: Scalar, rows: int) -> tuple[jax.Array, jax.Array]:
    """(lse2, p_sink t_sink) of `rows` rows from `start` on, from global memory."""
    own = pl.ds(start, rows)
    one = lambda which: kernel_parts.load(inputs.rows.at[item.b, item.h, which, own], registers.ROW, optimized=False)
    return one(0), one(1)


def finished(out: Ref | None, moved: jax.Array, sums: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(tout [rows, E], tlse [rows]) from the sums over all tiles; `out`: the rows of the forward pass, unread."""
    total = thread_tiles.sum_lanes(sums) + first
    if out is None:
        return moved, total
    known = kernel_parts.load(out, registers.TILE, optimized=False).astype(jnp.float32)
    return moved - known * registers.broadcast_vector(total, "row", moved.shape), total
