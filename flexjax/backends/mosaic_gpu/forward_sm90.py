"""The forward kernel for Hopper (compute capability 9.0): its operands, its launch, and its results.

A CTA is one producer warpgroup (forward_producer.py), which copies by TMA, and one to three consumer warpgroups of 64 queries each
(forward_consumer.py), which compute by WGMMA. They share HopperSetup, everything that is known before the kernel is traced.
tile_scheduler.py assigns query tiles to CTAs, and forward_tiles.py chooses the configuration.

Products with an operand in registers and named barriers do not exist in the simulator (`interpret`), which uses plain dots
and mbarriers instead. Lengths are padded to whole tiles there, because the simulator does not fill in zeros past the end of
an array.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu import float8_products, forward_arrays, partial_sums, staging, tile_scheduler
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.float_parts import part_dtype, split
from flexjax.backends.mosaic_gpu.forward_consumer import Consumer
from flexjax.backends.mosaic_gpu.forward_pages import KeyPages, pools_for
from flexjax.backends.mosaic_gpu.forward_producer import Producer
from flexjax.backends.mosaic_gpu.forward_setup import HopperSetup, Inputs, Outputs
from flexjax.backends.mosaic_gpu.forward_tiles import ForwardScratch, ForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, join_extra, launch, pad
from flexjax.backends.mosaic_gpu.static_reference import static_reference
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def forward(
    plan: KernelPlan, operands: Operands, tile: ForwardTile, pages: KeyPages[jax.Array] | None = None
) -> Results:
    """Runs the forward kernel: out, lse and, where the plan wants them, row maxima and what rounding took from out (else None),
    in the plan's layout.

    tile    one of `forward_candidates(plan)`, whose head dim includes the extra features
    pages   of a plan whose keys lie in pages, or are read as if they did; None for other contiguous keys

    `support.refuses(plan)` must have answered None. out is [B, T, N, E] or [B, N, T, E] in the plan's dtype, lse and
    row maxima are [B, T, N] or [B, N, T] float32; padding of the operands is cut off.
    """
    assert tile.fits, tile
    plan, operands = join_extra(plan, operands)
    setup = forward_setup(plan, tile)
    if pages is not None:
        tile = dataclasses.replace(tile, page_rows=math.gcd(plan.page, tile.block_kv))
        setup = dataclasses.replace(setup, tile=tile, stored_pages=operands.key.shape[0])
    inputs = _inputs(setup, operands, pages)

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: ForwardScratch[Ref]) -> None:
        """The forward kernel: runs one warpgroup of a CTA, a consumer or, as the last of them, the producer."""
        clip_rows(setup.interpret, aligned=True)
        role = lax.axis_index("wg")
        partial_sums.begin(scratch.exchange, setup.interpret)
        when(role < tile.groups)(Consumer(setup, inputs, outputs, scratch).run)
        when(role == tile.groups)(Producer(setup, inputs, scratch).run)
        partial_sums.end(scratch.exchange, setup.interpret)

    outputs: Outputs[jax.Array] = launch(
        kernel,
        inputs,
        forward_arrays.outputs_for(setup, inputs.query),
        forward_scratch(tile, part_dtype(plan), setup.interpret),
        name="flexjax_forward",
        programs=setup.scheduler.programs,
        warpgroups=tile.groups + 1,
        interpret=setup.interpret,
        ctas=tile.ctas,
    )
    return forward_arrays.results_from(plan, outputs)


def forward_setup(plan: KernelPlan, tile: ForwardTile) -> HopperSetup:
    """What is known of the kernel before it is traced.

    plan   with extra features joined to the head dim
    tile   the kernel's configuration
    """
    staged = staging.staged_load(plan, plan.score) if tile.staged_slots else None
    return HopperSetup(plan, tile, plan.options.interpret, staged, static_reference(plan), may_be_large(plan.score))


def _inputs(setup: HopperSetup, operands: Operands, pages: KeyPages[jax.Array] | None) -> Inputs[jax.Array]:
    """The operands in the form in which the kernel reads them (`forward_arrays.inputs_of`).

    operands   of the call, with extra features joined to the head dim
    pages      of keys in pages, whose pool takes the place of key and value; None for contiguous keys

    Head dims are padded with zeros, lengths for the simulator alone (`forward_arrays.padded_lengths`).
    Queries, keys and values of float32 are split into parts (float_parts.py); values of float8 are key-major (float8_products.py). In the simulator the staged array is
    padded too. The dynamic scheduler gets a new counter, except in the simulator.
    """
    plan, tile = setup.plan, setup.tile
    q_length, kv_length = forward_arrays.padded_lengths(setup, 1)
    padded = lambda x, length, dim: split(pad(x, plan.layout, length, dim), tile.parts)
    key_dim, value_dim = tile.head_dim * tile.ctas, tile.value_dim * tile.ctas
    if pages is None:
        key, value = padded(operands.key, kv_length, key_dim), padded(operands.value, kv_length, value_dim)
        value = float8_products.key_major(value, plan.layout) if tile.float8 else value
    else:
        key, value, pages = pools_for(setup.plan, operands, pages, (key_dim, value_dim), setup.interpret)
    inputs = forward_arrays.inputs_of(setup, operands, padded(operands.query, q_length, key_dim), key, value)
    if setup.interpret and setup.staged is not None:
        whole = setup.staged.capture
        score = tuple(_whole_tiles(x, q_length, kv_length) if n == whole else x for n, x in enumerate(inputs.score))
        inputs = inputs._replace(score=score)
    if tile.dynamic_scheduler and not setup.interpret:
        counter = jax.new_ref(tile_scheduler.new_counter(setup.scheduler.programs))
        inputs = inputs._replace(counter=typing.cast(jax.Array, counter))
    return inputs._replace(pages=pages)


def _whole_tiles(x: jax.Array, q_length: int, kv_length: int) -> jax.Array:
    """`x`, a staged array [..., T, S], with zeros appended up to `q_length` and `kv_length`, for the simulator, which
    does not fill in zeros past an end; dimensions that are longer stay.
    """
    widths = [(0, 0)] * (x.ndim - 2) + [(0, max(0, q_length - x.shape[-2])), (0, max(0, kv_length - x.shape[-1]))]
    return jnp.pad(x, widths)
