"""The arrays of a forward kernel: its operands as it reads them, what it writes, and the results of the call from that.

The forward kernels of all families use it (forward_sm90.py, forward_sm80.py, forward_sm100.py). Each pads queries, keys and values
itself, to the lengths of `padded_lengths` and to the columns of its tile.
"""

import jax
import jax.numpy as jnp

from flexjax.backends.mosaic_gpu import kernel_parts, memory, tile_scheduler
from flexjax.backends.mosaic_gpu.forward_setup import AnyTile, ForwardSetup, Inputs, Outputs
from flexjax.backends.mosaic_gpu.tile_scheduler import MaskRows
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def padded_lengths(setup: ForwardSetup[AnyTile], unit: int) -> tuple[int, int]:
    """(queries, keys) that the operands of a forward kernel are padded to: both to a multiple of `unit` rows, but more keys than queries, as
    in a cache, keep their number. In the simulator whole query tiles, and whole key tiles or, with a block mask, whole blocks of it, because
    the simulator does not fill in zeros past the end of an array.

    unit   1 for a kernel that reads and writes arrays of any length. PIECE_ROWS for the one on mma.sync that copies by TMA: its threads
           also compute, and spill up to 36 bytes more where arrays have any length, while a copy of the keys is little beside as many queries
    """
    plan, tile = setup.plan, setup.tile
    if not setup.interpret:
        more_keys = plan.kv_len > plan.q_len
        return round_up(plan.q_len, unit), plan.kv_len if more_keys else round_up(plan.kv_len, unit)
    keys = tile.block_kv if plan.blocks is None else plan.blocks.block_kv
    return setup.scheduler.q_tiles * tile.block_q, round_up(plan.kv_len, keys)


def inputs_of(
    setup: ForwardSetup[AnyTile], operands: Operands, query: jax.Array, key: jax.Array, value: jax.Array
) -> Inputs[jax.Array]:
    """The operands of a kernel in the form in which it reads them, without counter and pages, which the caller adds.

    operands            of the call
    query, key, value   padded

    Block lists are flat; captured arrays are as `memory.kernel_operand` makes them, and those of mask_mod are left out
    if the plan has no mask program.
    """
    scheduler = setup.scheduler
    captures = lambda arrays: tuple(memory.kernel_operand(x) for x in arrays)
    return Inputs(
        query=query,
        key=key,
        value=value,
        sinks=operands.sinks,
        mask_rows=MaskRows(scheduler.order(operands.lists), tile_scheduler.flat(operands.lists)),
        score=captures(operands.score_captures),
        mask=captures(operands.mask_captures) if setup.plan.mask is not None else (),
        dropout=captures(operands.dropout_captures),
        origin=() if operands.origin is None else tuple(operands.origin),
    )


def outputs_for(setup: ForwardSetup[AnyTile], query: jax.Array) -> Outputs[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what a kernel with this setup writes, for `kernel_parts.launch`: out (and `rounding`) with the queries and heads
    of `query`, the padded queries, and the value columns of the tile (of all CTAs of a cluster), in the plan's dtype; lse (and row maxima)
    [B, N, rows of whole query tiles] float32. What the plan does not want is None.
    """
    plan, tile = setup.plan, setup.tile
    rows = setup.scheduler.q_tiles * tile.block_q
    stats = kernel_parts.output((plan.batch, plan.q_heads, rows), jnp.float32, query)
    shape = (plan.batch, *query.shape[1:3], tile.value_dim * tile.ctas)
    out = kernel_parts.output(shape, plan.dtype, query)
    return Outputs(
        out=out,
        lse=stats,
        max_scores=stats if plan.max_scores else None,
        rounding=out if plan.writes_rounding else None,
    )


def results_from(plan: KernelPlan, outputs: Outputs[jax.Array]) -> Results:
    """The results of a call from `outputs`, what its kernel wrote: padding cut off, lse and row maxima [B, T, N] or [B,
    N, T] by the plan's layout; None stays None.
    """
    lengths = (plan.q_len, plan.q_heads) if plan.layout == "BTNH" else (plan.q_heads, plan.q_len)
    cut = lambda x: x[:, : lengths[0], : lengths[1], : plan.value_dim]

    def statistic(x: jax.Array) -> jax.Array:
        """`x`, a row statistic [B, N, padded T], without padding in the plan's layout."""
        x = x[:, :, : plan.q_len]
        return jnp.swapaxes(x, 1, 2) if plan.layout == "BTNH" else x

    return Results(
        cut(outputs.out),
        statistic(outputs.lse),
        None if outputs.max_scores is None else statistic(outputs.max_scores),
        None if outputs.rounding is None else cut(outputs.rounding),
    )
