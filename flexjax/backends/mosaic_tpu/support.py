"""The mosaic_tpu backend: what it takes, its tiles, and its two passes (see backends/base.py).

A plan is refused in a sentence, from the plan alone. One thing is known only later: which captured arrays want a gradient.
A gradient that the kernels cannot make raises NotImplementedError with its sentence (`refuses_backward` tells beforehand).
"""

import contextlib

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_tpu import captured, layouts, tile_programs, vmem
from flexjax.backends.mosaic_tpu.backward import Saved, dq_kernel
from flexjax.backends.mosaic_tpu.backward_dkv import dkv_kernel
from flexjax.backends.mosaic_tpu.feeds import Geometry
from flexjax.backends.mosaic_tpu.forward import LOG2E, forward
from flexjax.backends.mosaic_tpu.tables import list_shape
from flexjax.backends.mosaic_tpu.tile_programs import Unsupported
from flexjax.backends.target import Target
from flexjax.ir import program as ir
from flexjax.ir.program import Program
from flexjax.plan import mask_blocks
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted

DIAGONAL_BYTES = 8 << 20
"""VMEM that the sums along the diagonals of a head may take."""


class MosaicTpuBackend:
    """Attention as Pallas Mosaic TPU kernels."""

    name = "mosaic_tpu"

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        return _refusal(plan, vmem.chip_of(target))

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """Why the backward pass of an accepted plan cannot give the wanted gradients; None if it can."""
        plan = mask_blocks.plan_with_blocks(plan, *_blocks(plan))
        return _backward_refusal(plan, wanted, derivative, vmem.chip_of(target))

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """Options that fit the chip, best guess first."""
        plan = mask_blocks.plan_with_blocks(plan, *_blocks(plan))
        facts = vmem.chip_of(target)
        forward_tiles = vmem.forward_candidates(plan, facts)
        backward_tiles = vmem.backward_candidates(plan, facts, plan.score)
        pairs = [(f, backward_tiles[min(n, len(backward_tiles) - 1)]) for n, f in enumerate(forward_tiles)]
        return [{"block_q": f.q, "block_kv": f.kv, "block_q_bwd": b.q, "block_kv_bwd": b.kv} for f, b in pairs]

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        return forward(*mask_blocks.with_blocks(plan, operands, *_blocks(plan)), vmem.chip_of(target))

    def backward(
        self,
        plan: KernelPlan,
        operands: Operands,
        results: Results,
        d_out: jax.Array,
        d_lse: jax.Array | None,
        wanted: Wanted,
        derivative: Program | None,
        target: Target,
    ) -> Gradients:
        chip = vmem.chip_of(target)
        plan, operands = mask_blocks.with_blocks(plan, operands, *_blocks(plan))
        reason = _backward_refusal(plan, wanted, derivative, chip)
        if reason is not None:
            raise NotImplementedError(reason)
        return _backward(plan, operands, results, d_out, d_lse, wanted, derivative, chip)

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


# ------------------------------------------------------------------- refusals


def _blocks(plan: KernelPlan) -> tuple[int, int]:
    """Blocks in which the kernels walk the mask: its own, or 128 tokens where tiles cannot hold or divide those."""
    if plan.blocks is None:
        return 0, 0

    def suits(block: int, length: int) -> bool:
        try:
            vmem.fit(128, length, block, 128)
        except vmem.NoTile:
            return False
        return block % 8 == 0 or block >= length

    pairs = ((plan.blocks.block_q, plan.q_len), (plan.blocks.block_kv, plan.kv_len))
    block_q, block_kv = (block if suits(block, length) else 128 for block, length in pairs)
    return block_q, block_kv


def _refusal(plan: KernelPlan, chip: vmem.Chip) -> str | None:
    plan = mask_blocks.plan_with_blocks(plan, *_blocks(plan))
    if plan.dtype not in ("float32", "bfloat16"):
        return f"mosaic_tpu computes float32 and bfloat16; query, key and value are {plan.dtype}."
    if not all((plan.batch, plan.q_heads, plan.kv_heads, plan.q_len, plan.kv_len, plan.head_dim, plan.value_dim)):
        return "mosaic_tpu takes no empty arrays; some dimension of query, key or value is 0."
    if plan.differentiable:
        return "mosaic_tpu has no second derivatives; its kernels cannot be differentiated again."
    if plan.head_dim + plan.extra_dim > 1024 or plan.value_dim > 1024:
        return f"mosaic_tpu takes head dims up to 1024; this call has {plan.head_dim + plan.extra_dim} and {plan.value_dim}."
    if plan.extra_dim and _uneven(plan):
        return f"mosaic_tpu needs the heads of key ({plan.kv_heads}) and key_extra ({plan.extra_heads}) to divide each other."
    for name, program in (("score_mod", plan.score), ("mask_mod", plan.mask), ("dropout", plan.dropout)):
        if program is None:
            continue
        try:
            tile_programs.split(program, plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
        except Unsupported as why:
            return f"mosaic_tpu cannot run this {name}: {why}."
    try:
        vmem.forward_tiles(plan, chip)
        vmem.backward_tiles(plan, chip, plan.score)
    except vmem.NoTile as why:
        return f"mosaic_tpu has no tile for this call: {why}."
    return None


def _uneven(plan: KernelPlan) -> bool:
    low, high = sorted((plan.kv_heads, plan.extra_heads))
    return low == 0 or high % low != 0


def _backward_refusal(plan: KernelPlan, wanted: Wanted, derivative: Program | None, chip: vmem.Chip) -> str | None:
    if plan.score is not None and derivative is None:
        return "mosaic_tpu needs the derivative of score_mod, and there is none."
    if derivative is None:
        return None
    try:
        tile_programs.split(derivative, plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
        tiles = vmem.backward_tiles(plan, chip, derivative)
    except Unsupported as why:
        return f"mosaic_tpu cannot run the derivative of this score_mod: {why}."
    except vmem.NoTile as why:
        return f"mosaic_tpu has no tile for the backward pass of this call: {why}."
    geometry = Geometry(plan.batch, plan.q_heads, plan.q_len, plan.kv_len, tiles.q, tiles.kv, 0)
    for number, kind in captured.kinds_wanted(derivative, wanted.score_captures).items():
        load = captured.load_of(derivative, number)
        shown = derivative.captures[load.capture]
        if any("score" in ir.axes_of(a) for a in load.index):
            return (
                f"mosaic_tpu has no gradient for a captured array ({shown}) read at an index computed from the score."
            )
        if kind == ir.DIAGONAL and 32 * geometry.diagonals > DIAGONAL_BYTES:
            return (
                f"mosaic_tpu sums the gradient of a captured array ({shown}) read at q - kv in VMEM, "
                f"{32 * geometry.diagonals >> 20} MiB for these lengths, more than {DIAGONAL_BYTES >> 20} MiB."
            )
        if kind == ir.DIAGONAL and plan.blocks is not None:
            group = layouts.problem_of(plan).group
            if not list_shape(plan, geometry, group, False).whole_heads:
                return (
                    f"mosaic_tpu splits the block lists of a head for this many blocks, and so cannot sum the gradient of a "
                    f"captured array ({shown}) read at q - kv."
                )
        size = 4 * plan.batch * plan.q_heads * plan.q_len * plan.kv_len
        if kind == ir.TILE and size > tile_programs.DENSE_LIMIT:
            return (
                f"mosaic_tpu needs {size / 2**30:.1f} GiB for the gradient of a captured array ({shown}) read at each "
                f"(q, kv), more than {tile_programs.DENSE_LIMIT >> 30} GiB."
            )
    return None


# ------------------------------------------------------------------- the backward pass


def _backward(
    plan: KernelPlan,
    operands: Operands,
    results: Results,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    wanted: Wanted,
    derivative: Program | None,
    chip: vmem.Chip,
) -> Gradients:
    problem = layouts.problem_of(plan)
    tokens_first = problem.tokens_first
    tiles = vmem.backward_tiles(plan, chip, derivative)
    q, k, v = layouts.fold(plan, operands)
    delta = jnp.sum(d_out.astype(jnp.float32) * results.out.astype(jnp.float32), axis=-1)
    shift = delta if d_lse is None else delta - d_lse.astype(jnp.float32)
    lse = results.lse.astype(jnp.float32)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse if may_be_large(plan.score) else lse * jnp.float32(LOG2E))
    saved = Saved(
        q,
        k,
        v,
        problem.out.lay(d_out.astype(plan.dtype)),
        layouts.row_values(lse, tokens_first),
        layouts.row_values(shift, tokens_first),
    )
    kinds = captured.kinds_wanted(derivative, wanted.score_captures)
    columns = tuple(n for n, kind in kinds.items() if kind == ir.COLUMN)
    others = {n: kind for n, kind in kinds.items() if kind != ir.COLUMN}

    dq = dk = dv = None
    sums: dict[int, jax.Array] = {}
    want_query = wanted.query or wanted.query_extra
    want_kv = wanted.key or wanted.key_extra or wanted.value
    geometry = Geometry(plan.batch, plan.q_heads, plan.q_len, plan.kv_len, tiles.q, tiles.kv, 1)
    whole = plan.blocks is None or list_shape(plan, geometry, problem.group, True).whole_heads
    fused = want_query and want_kv and not others and whole and vmem.fuses(plan, tiles, derivative, chip)
    if others or (want_query and not fused):
        dq, sums = dq_kernel(plan, operands, saved, derivative, others, want_query, tiles, chip)
    if want_kv or columns:
        made, dk, dv, more = dkv_kernel(plan, operands, saved, derivative, columns, want_kv, fused, tiles, chip)
        dq = made if fused else dq
        sums |= more
    captures = captured.gather_gradients(plan, derivative, operands.score_captures, wanted.score_captures, sums)
    return _gradients(plan, operands, wanted, dq, dk, dv, _sinks(plan, operands, results, shift, wanted), captures)


def _sinks(
    plan: KernelPlan, operands: Operands, results: Results, shift: jax.Array, wanted: Wanted
) -> jax.Array | None:
    """A sink is one more entry of each row, with no value behind it: its ds is -p * (delta - d_lse)."""
    if not wanted.sinks or operands.sinks is None:
        return None
    heads_last = plan.layout == "BTNH"
    sinks = operands.sinks.astype(jnp.float32)
    lse = results.lse.astype(jnp.float32)
    logits = sinks if heads_last else sinks[:, None]
    p = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(logits - jnp.where(lse == -jnp.inf, 0.0, lse)))
    return -jnp.sum(p * shift, (0, 1) if heads_last else (0, 2)).astype(operands.sinks.dtype)


def _gradients(
    plan: KernelPlan,
    operands: Operands,
    wanted: Wanted,
    dq: jax.Array | None,
    dk: jax.Array | None,
    dv: jax.Array | None,
    sinks: jax.Array | None,
    captures: tuple[jax.Array | None, ...],
) -> Gradients:
    """Unfolds what layouts.fold folded."""
    problem = layouts.problem_of(plan)
    dim = 2 if problem.tokens_first else 1
    own = plan.head_dim

    def part(
        array: jax.Array | None, layout: layouts.HeadLayout, extra: bool, heads: int, want: bool
    ) -> jax.Array | None:
        if array is None or not want:
            return None
        laid = layout.unlay(array)
        return layouts.fold_heads(laid[..., own:] if extra else laid[..., :own], heads, dim)

    value = None
    if wanted.value and dv is not None:
        value = layouts.fold_heads(problem.value.unlay(dv), plan.kv_heads, dim)
    has_extra = operands.query_extra is not None
    return Gradients(
        part(dq, problem.query, False, plan.q_heads, wanted.query),
        part(dk, problem.key, False, plan.kv_heads, wanted.key),
        value,
        part(dq, problem.query, True, plan.q_heads, wanted.query_extra) if has_extra else None,
        part(dk, problem.key, True, plan.extra_heads, wanted.key_extra) if has_extra else None,
        sinks,
        captures,
    )
