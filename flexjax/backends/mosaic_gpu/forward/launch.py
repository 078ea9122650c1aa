"""What surrounds every forward kernel: the operands as it reads them, its launch, and the call's results.

A family file gives its kernel, its scratch, and what its operands have of their own.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flexjax.backends.mosaic_gpu.forward import tile_scheduler
from flexjax.backends.mosaic_gpu.forward.pages import pools_for
from flexjax.backends.mosaic_gpu.forward.setup import AnyTile, ForwardInputs, ForwardOutputs, ForwardSetup
from flexjax.backends.mosaic_gpu.forward.tile_scheduler import MaskRows
from flexjax.backends.mosaic_gpu.machine import memory
from flexjax.backends.mosaic_gpu.machine.kernel_parts import launch, output, pad, whole_tiles
from flexjax.backends.mosaic_gpu.machine.mma_cards import Copying
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def inputs_for(
    setup: ForwardSetup[AnyTile], operands: Operands, unit: int = 1, copying: Copying = "tma"
) -> ForwardInputs[jax.Array]:
    """The operands as a kernel reads them; pools of pages, where `plan.page` asks for them, take the place of key and
    value.

    unit   lengths are padded to multiples of so many rows
    """
    plan, tile, scheduler = setup.plan, setup.tile, setup.scheduler
    lengths = q_length, kv_length = padded_lengths(setup, unit)
    head_dim, value_dim = tile.head_dim * tile.ctas, tile.value_dim * tile.ctas
    padded = lambda x, length, dim: pad(x, plan.layout, length, dim)
    if plan.page:
        key, value, pages = pools_for(plan, operands, (head_dim, value_dim), copying)
    else:
        key, value = padded(operands.key, kv_length, head_dim), padded(operands.value, kv_length, value_dim)
        pages = None
    captures = lambda arrays: tuple(memory.kernel_operand(x) for x in arrays)
    staged = None if setup.staged is None else setup.staged.capture
    score = tuple(
        whole_tiles(x, lengths) if n == staged else x for n, x in enumerate(captures(operands.score_captures))
    )
    return ForwardInputs(
        query=padded(operands.query, q_length, head_dim),
        key=key,
        value=value,
        sinks=operands.sinks,
        mask_rows=MaskRows(
            scheduler.order(operands.lists),
            tile_scheduler.flat(operands.lists),
            scheduler.visits(operands.lists, operands.documents),
        ),
        score=score,
        mask=captures(operands.mask_captures) if plan.mask is not None else (),
        dropout=captures(operands.dropout_captures),
        counter=tile_scheduler.new_counter(scheduler.programs) if tile.dynamic_scheduler else None,
        origin=() if operands.origin is None else tuple(operands.origin),
        pages=pages,
    )


class Inputs(typing.Protocol):
    """The operands of a kernel: ForwardInputs, or a tuple with them."""

    @property
    def query(self) -> jax.Array: ...


def launch_forward(
    setup: ForwardSetup[AnyTile],
    inputs: Inputs,
    kernel: Callable[..., None],
    scratch: tuple,
    *,
    name: str,
    warpgroups: int,
) -> Results:
    """Launches `kernel(inputs, outputs, scratch)` as `kernel_parts.launch` says; the results in the plan's layout."""
    plan, tile, scheduler, like = setup.plan, setup.tile, setup.scheduler, inputs.query
    stats = output((plan.batch, plan.q_heads, scheduler.q_tiles * tile.block_q), jnp.float32, like)
    out = output((plan.batch, *like.shape[1:3], tile.value_dim * tile.ctas), plan.dtype, like)
    max_scores, rounding = stats if plan.max_scores else None, out if plan.writes_rounding else None
    outputs: ForwardOutputs[jax.Array] = launch(
        kernel,
        typing.cast(tuple, inputs),
        ForwardOutputs(out, stats, max_scores, rounding, (stats,) * plan.expectations),
        scratch,
        name=name,
        programs=scheduler.programs,
        warpgroups=warpgroups,
        ctas=tile.ctas,
    )
    return _results_from(plan, outputs)


@device_op
def padded_lengths(setup: ForwardSetup[AnyTile], unit: int) -> tuple[int, int]:
    """(queries, keys) that the operands are padded to, multiples of `unit` rows."""
    # More keys than queries, as in a cache, keep their number: padding them would copy them.
    queries, keys = setup.plan.q_len, setup.plan.kv_len
    return round_up(queries, unit), keys if keys > queries else round_up(keys, unit)


def _results_from(plan: KernelPlan, outputs: ForwardOutputs[jax.Array]) -> Results:
    """What the kernel wrote, padding cut off, in the plan's layout."""
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
        jnp.stack([statistic(x) for x in outputs.expectations], -1) if outputs.expectations else None,
    )
