"""What surrounds every decode kernel: the operands as it reads them, its launch, and the merge of its results.

items.py assigns chunks of keys to CTAs; merge.py computes the softmax over all chunks.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.mosaic_gpu.decode import merge as decode_merge
from flexjax.backends.mosaic_gpu.decode import scales as decode_scales
from flexjax.backends.mosaic_gpu.decode.hopper_tiles import DecodeTile
from flexjax.backends.mosaic_gpu.decode.intervals import has_interval, visible_interval
from flexjax.backends.mosaic_gpu.decode.items import Work
from flexjax.backends.mosaic_gpu.decode.setup import DecodeInputs, DecodeOutputs, DecodeSetup
from flexjax.backends.mosaic_gpu.machine import memory
from flexjax.backends.mosaic_gpu.machine.kernel_parts import launch, output, pad, pool
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.ir.fold_heads import fold_heads
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results
from flexjax.rewrites.pack_heads import pack_rows


def launch_decode(
    plan: KernelPlan,
    operands: Operands,
    tile: DecodeTile,
    kernel: Callable[..., None],
    scratch: tuple,
    *,
    name: str,
    warpgroups: int,
) -> Results:
    """Launches `kernel(setup, inputs, outputs, scratch)` and merges its partial results, in the plan's layout."""
    query_lengths, key_lengths = _existing(plan, operands)
    setup, first = _setup(plan, tile, operands, key_lengths), None
    if has_interval(plan):
        # the work items are those of one run of keys (intervals.py), and block lists are not read
        first, end = visible_interval(plan, operands, query_lengths)
        key_lengths = end if key_lengths is None else jnp.minimum(key_lengths, end)
    work = setup.items.work(key_lengths, operands.lists, first)
    inputs = _inputs(setup, operands, work)
    shape = (plan.batch, plan.kv_heads, setup.items.chunks)
    results: DecodeOutputs[jax.Array] = launch(
        functools.partial(kernel, setup),
        inputs,
        DecodeOutputs(
            out=output((*shape, tile.used_rows, tile.value_dim), jnp.float32, inputs.query),
            stats=output((*shape, tile.statistics, tile.used_rows), jnp.float32, inputs.query),
        ),
        scratch,
        name=name,
        programs=setup.items.programs,
        warpgroups=warpgroups,
    )
    live = setup.items.live(work)
    chunks = None if live is None else decode_merge.Chunks(live, setup.items.last(work, live))
    # `plan` is of the unpacked heads
    return decode_merge.merged(plan, setup.softmax, results.out, results.stats, chunks, operands.sinks, query_lengths)


def _existing(plan: KernelPlan, operands: Operands) -> tuple[jax.Array | None, jax.Array | None]:
    """(how many queries, how many keys of each batch entry exist), int32 [B] each; None: all exist."""
    if operands.lengths is None:
        return None, None
    query, key = operands.lengths
    if query is not None:
        # no keys of a batch entry without queries are read
        key = jnp.where(query > 0, plan.kv_len if key is None else key, 0)
    return query, key


def _setup(plan: KernelPlan, tile: DecodeTile, operands: Operands, key_lengths: jax.Array | None) -> DecodeSetup:
    """What is known of the kernel before it is traced, with the programs for packed rows."""
    lengths, interval = (plan.batch, plan.kv_len), has_interval(plan)
    fold = lambda program: (
        None if program is None else fold_heads(program, plan.q_len, plan.group, lengths, plan.origin)
    )
    return DecodeSetup(
        plan=dataclasses.replace(plan, blocks=None) if interval else plan,
        tile=tile,
        score=fold(plan.score),
        mask=fold(plan.mask),
        lengths=interval or key_lengths is not None,
        page=plan.page,
        stored_pages=operands.key.shape[0] if plan.page else 0,
    )


@device_op
def padded_lengths(setup: DecodeSetup) -> tuple[int, int]:
    """(packed rows, keys) that the operands are padded to."""
    return setup.tile.stored_rows, setup.plan.kv_len


def _inputs(setup: DecodeSetup, operands: Operands, work: Work[jax.Array]) -> DecodeInputs[jax.Array]:
    """The operands as the kernel reads them: head dims and packed queries padded to those of the tile."""
    plan, tile, page = setup.plan, setup.tile, setup.page
    rows, stored = padded_lengths(setup)
    layout, key, value = plan.layout, operands.key, operands.value
    if page:
        stored, layout, key, value = page, "BTNH", pool(key), pool(value)
    pages: jax.Array | None = operands.pages
    if plan.cache_dtype is not None:  # as bytes: no instruction of the kernel knows 8-bit floats
        key, value = (lax.bitcast_convert_type(x, jnp.int8) for x in (key, value))
    tables = () if operands.origin is None else tuple(operands.origin)
    captures = lambda arrays: (*(memory.kernel_operand(x) for x in arrays), *tables)
    return DecodeInputs(
        query=pad(pack_rows(operands.query, plan, "BNTH"), "BNTH", rows, tile.head_dim),
        key=pad(key, layout, stored, tile.head_dim),
        value=pad(value, layout, stored, tile.value_dim),
        work=work,
        score=captures(operands.score_captures) if plan.score is not None else (),
        mask=captures(operands.mask_captures) if plan.mask is not None else (),
        pages=None if pages is None else pages.astype(jnp.int32),
        scales=decode_scales.scale_operands(setup, operands, work.lengths),
    )
