"""What surrounds every decode kernel: the operands in the form in which it reads them, and the results of a call from its partial results.

decode_items.py assigns chunks of keys to CTAs; decode_merge.py computes the softmax over all chunks.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu import decode_merge, decode_scales, kernel_parts, memory
from flexjax.backends.mosaic_gpu.decode_intervals import has_interval, visible_interval
from flexjax.backends.mosaic_gpu.decode_items import Work
from flexjax.backends.mosaic_gpu.decode_setup import DecodeInputs, DecodeOutputs, DecodeSetup
from flexjax.backends.mosaic_gpu.decode_tiles import ROWS, DecodeTile
from flexjax.backends.mosaic_gpu.kernel_parts import pad
from flexjax.backends.mosaic_gpu.static_reference import static_reference
from flexjax.ir.fold_heads import fold_heads
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results
from flexjax.plan.pack_heads import pack_rows


def prepared(
    plan: KernelPlan, operands: Operands, tile: DecodeTile
) -> tuple[DecodeSetup, DecodeInputs[jax.Array], jax.Array | None]:
    """(what is known before the kernel is traced, the operands as it reads them, how many queries of each batch entry exist as [B] int32 or
    None for all).

    plan       of the call, before its heads are packed into rows
    operands   of the call
    tile       the configuration of the kernel, Hopper or mma.sync

    For a mask that shows every query one run of keys (decode_intervals.py) the work items are those of that run, and block lists are not
    read.
    """
    query_lengths, key_lengths = existing(plan, operands)
    setup, first = decode_setup(plan, tile, operands), None
    if has_interval(plan):
        first, end = visible_interval(plan, operands, query_lengths)
        key_lengths = end if key_lengths is None else jnp.minimum(key_lengths, end)
    work = setup.items.work(key_lengths, operands.lists, first)
    return setup, _inputs(setup, operands, work), query_lengths


def partial_results(setup: DecodeSetup, like: jax.Array) -> DecodeOutputs[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the partial results of the chunks (`DecodeOutputs`), which a kernel with this setup writes. Inside shard_map
    they vary over the mesh axes of the array `like`.
    """
    plan, tile = setup.plan, setup.tile
    shape = (plan.batch, plan.kv_heads, setup.items.chunks)
    return DecodeOutputs(
        out=kernel_parts.output((*shape, tile.used_rows, tile.value_dim), jnp.float32, like),
        stats=kernel_parts.output((*shape, 2, tile.used_rows), jnp.float32, like),
    )


def merged(
    plan: KernelPlan,
    setup: DecodeSetup,
    work: Work[jax.Array],
    results: DecodeOutputs[jax.Array],
    sinks: jax.Array | None,
    query_lengths: jax.Array | None,
) -> Results:
    """The results of a call, in the plan's layout, from the partial results of its chunks.

    plan                   of the call, before its heads are packed into rows
    setup, query_lengths   of `prepared`
    work                   `DecodeInputs.work`, which says which chunks have partial results
    results                what the kernel wrote
    sinks                  [N] or None
    """
    live = setup.items.live(work)
    chunks = None if live is None else decode_merge.Chunks(live, setup.items.last(work, live))
    return decode_merge.merged(plan, setup.softmax, results.out, results.stats, chunks, sinks, query_lengths)


def existing(plan: KernelPlan, operands: Operands) -> tuple[jax.Array | None, jax.Array | None]:
    """(how many queries, how many keys of each batch entry exist) by the lengths of the call, int32 [B] each; None: all exist. A batch
    entry without queries is given 0 keys, so that none of its keys are read.
    """
    if operands.lengths is None:
        return None, None
    query, key = operands.lengths
    if query is not None:
        key = jnp.where(query > 0, plan.kv_len if key is None else key, 0)
    return query, key


def decode_setup(plan: KernelPlan, tile: DecodeTile, operands: Operands) -> DecodeSetup:
    """What is known of the kernel with the configuration `tile` before it is traced, with the programs for packed rows. Of the operands
    only shapes matter, and which of them are None. The plan of the setup has no block mask if its mask shows every query one run of keys
    (`has_interval`).
    """
    lengths, interval = (plan.batch, plan.kv_len), has_interval(plan)
    fold = lambda program: (
        None if program is None else fold_heads(program, plan.q_len, plan.group, lengths, plan.origin)
    )
    return DecodeSetup(
        plan=dataclasses.replace(plan, blocks=None) if interval else plan,
        tile=tile,
        score=fold(plan.score),
        mask=fold(plan.mask),
        lengths=interval or existing(plan, operands)[1] is not None,
        page=plan.page,
        stored_pages=operands.key.shape[0] if plan.page else 0,
        reference=static_reference(plan),
        large_scores=may_be_large(plan.score),
    )


def _inputs(setup: DecodeSetup, operands: Operands, work: Work[jax.Array]) -> DecodeInputs[jax.Array]:
    """The operands in the form in which the kernel reads them (`DecodeInputs`).

    work   `DecodeItems.work` of the call

    Head dims are padded with zeros to those of the tile, and packed queries to `tile.stored_rows` rows. The simulator does not fill in zeros
    past the end of an array: there keys and values have `stored_keys` rows and at least those of a tile, the packed queries ROWS rows, and
    a cache in pages one more page, of zeros. Quantised keys and values become int8.
    """
    plan, tile, page = setup.plan, setup.tile, setup.page
    rows, stored = tile.stored_rows, plan.kv_len
    layout, key, value = plan.layout, operands.key, operands.value
    if setup.interpret:
        rows, stored = ROWS, max(setup.items.stored_keys, tile.block_kv)
    if page:
        stored, layout = page, "BTNH"
    if page and setup.interpret:  # read for page numbers that are not in the cache
        key, value = (jnp.pad(x, ((0, 1), (0, 0), (0, 0), (0, 0))) for x in (key, value))
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
