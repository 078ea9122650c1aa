"""The arrays of a forward kernel of any family: its operands, what it writes, and the call's results from that."""

import jax
import jax.numpy as jnp

from flexjax.backends.mosaic_gpu.forward import tile_scheduler
from flexjax.backends.mosaic_gpu.forward.setup import AnyTile, ForwardInputs, ForwardOutputs, ForwardSetup
from flexjax.backends.mosaic_gpu.forward.tile_scheduler import MaskRows
from flexjax.backends.mosaic_gpu.machine import kernel_parts, memory
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def padded_lengths(setup: ForwardSetup[AnyTile], unit: int) -> tuple[int, int]:
    """(queries, keys) that the operands of a forward kernel are padded to, multiples of `unit` rows."""
    plan, tile = setup.plan, setup.tile
    if not plan.options.interpret:
        # More keys than queries, as in a cache, keep their number: padding them would copy them.
        more_keys = plan.kv_len > plan.q_len
        return round_up(plan.q_len, unit), plan.kv_len if more_keys else round_up(plan.kv_len, unit)
    # The simulator does not fill in zeros past the end of an array.
    keys = tile.block_kv if plan.blocks is None else plan.blocks.block_kv
    return setup.scheduler.q_tiles * tile.block_q, round_up(plan.kv_len, keys)


def inputs_of(
    setup: ForwardSetup[AnyTile], operands: Operands, query: jax.Array, key: jax.Array, value: jax.Array
) -> ForwardInputs[jax.Array]:
    """The operands as a kernel reads them, without counter and pages; query, key and value are padded."""
    scheduler = setup.scheduler
    captures = lambda arrays: tuple(memory.kernel_operand(x) for x in arrays)
    return ForwardInputs(
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


def outputs_for(setup: ForwardSetup[AnyTile], query: jax.Array) -> ForwardOutputs[jax.ShapeDtypeStruct]:
    """Shapes of what a kernel writes, for `launch`; lse is [B, N, rows of whole query tiles] float32."""
    plan, tile = setup.plan, setup.tile
    rows = setup.scheduler.q_tiles * tile.block_q
    stats = kernel_parts.output((plan.batch, plan.q_heads, rows), jnp.float32, query)
    shape = (plan.batch, *query.shape[1:3], tile.value_dim * tile.ctas)
    out = kernel_parts.output(shape, plan.dtype, query)
    return ForwardOutputs(
        out=out,
        lse=stats,
        max_scores=stats if plan.max_scores else None,
        rounding=out if plan.writes_rounding else None,
    )


def results_from(plan: KernelPlan, outputs: ForwardOutputs[jax.Array]) -> Results:
    """The results of a call from what its kernel wrote: padding cut off, in the plan's layout."""
    lengths = (plan.q_len, plan.q_heads) if plan.layout == "BTNH" else (plan.q_heads, plan.q_len)
    cut = lambda x: x[:, : lengths[0], : lengths[1], : plan.value_dim]

    def statistic(x: jax.Array) -> jax.Array:
        x = x[:, :, : plan.q_len]
        return jnp.swapaxes(x, 1, 2) if plan.layout == "BTNH" else x

    return Results(
        cut(outputs.out),
        statistic(outputs.lse),
        None if outputs.max_scores is None else statistic(outputs.max_scores),
        None if outputs.rounding is None else cut(outputs.rounding),
    )
