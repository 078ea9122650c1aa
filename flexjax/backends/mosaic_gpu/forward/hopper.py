"""The forward kernel for Hopper (compute capability 9.0): its operands, its launch, and its results.

A CTA has one to three consumer warpgroups of 64 queries each (hopper_consumer.py), which compute by WGMMA, and one
producer warpgroup (hopper_producer.py), which copies by TMA. tile_scheduler.py assigns query tiles to CTAs, and
hopper_tiles.py chooses the configuration.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.mosaic_gpu.forward import arrays as forward_arrays
from flexjax.backends.mosaic_gpu.forward import hopper_float8, tile_scheduler
from flexjax.backends.mosaic_gpu.forward.hopper_consumer import Consumer
from flexjax.backends.mosaic_gpu.forward.hopper_producer import Producer
from flexjax.backends.mosaic_gpu.forward.hopper_tiles import ForwardScratch, ForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.forward.pages import KeyPages, pools_for
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, ForwardOutputs, HopperSetup
from flexjax.backends.mosaic_gpu.machine import partial_sums
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.float_parts import part_dtype, split
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, launch, pad
from flexjax.backends.mosaic_gpu.programs import staging
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def forward(
    plan: KernelPlan, operands: Operands, tile: ForwardTile, pages: KeyPages[jax.Array] | None = None
) -> Results:
    """Runs the forward kernel; `support.refuses(plan)` must have answered None.

    pages   of a plan whose keys lie in pages, or are read as if they did; None for other contiguous keys
    """
    assert tile.fits, tile
    setup = forward_setup(plan, tile)
    if pages is not None:
        tile = dataclasses.replace(tile, page_rows=math.gcd(plan.page, tile.block_kv))
        setup = dataclasses.replace(setup, tile=tile, stored_pages=operands.key.shape[0])
    inputs = _inputs(setup, operands, pages)

    def kernel(inputs: ForwardInputs[Ref], outputs: ForwardOutputs[Ref], scratch: ForwardScratch[Ref]) -> None:
        clip_rows(aligned=True)
        role = lax.axis_index("wg")
        partial_sums.begin(scratch.exchange)
        when(role < tile.groups)(Consumer(setup, inputs, outputs, scratch).run)
        when(role == tile.groups)(Producer(setup, inputs, scratch).run)
        partial_sums.end(scratch.exchange)

    outputs: ForwardOutputs[jax.Array] = launch(
        kernel,
        inputs,
        forward_arrays.outputs_for(setup, inputs.query),
        forward_scratch(tile, part_dtype(plan)),
        name="flexjax_forward",
        programs=setup.scheduler.programs,
        warpgroups=tile.groups + 1,
        simulated=plan.options.interpret,
        ctas=tile.ctas,
    )
    return forward_arrays.results_from(plan, outputs)


def forward_setup(plan: KernelPlan, tile: ForwardTile) -> HopperSetup:
    """What is known before the kernel is traced, for a plan whose extra features are joined to the head dim."""
    staged = staging.staged_load(plan, plan.score) if tile.staged_slots else None
    return HopperSetup(plan, tile, staged)


def _inputs(setup: HopperSetup, operands: Operands, pages: KeyPages[jax.Array] | None) -> ForwardInputs[jax.Array]:
    """The operands as the kernel reads them; the pool of `pages`, if any, takes the place of key and value."""
    plan, tile = setup.plan, setup.tile
    q_length, kv_length = forward_arrays.padded_lengths(setup, 1)
    padded = lambda x, length, dim: split(pad(x, plan.layout, length, dim), tile.parts)
    key_dim, value_dim = tile.head_dim * tile.ctas, tile.value_dim * tile.ctas
    if pages is None:
        key, value = padded(operands.key, kv_length, key_dim), padded(operands.value, kv_length, value_dim)
        # WGMMA transposes no operands of 8 bits.
        value = hopper_float8.key_major(value, plan.layout) if tile.float8 else value
    else:
        key, value, pages = pools_for(setup.plan, operands, pages, (key_dim, value_dim))
    inputs = forward_arrays.inputs_of(setup, operands, padded(operands.query, q_length, key_dim), key, value)
    # The simulator does not fill in zeros past the end of an array.
    if plan.options.interpret and setup.staged is not None:
        whole = setup.staged.capture
        score = tuple(_whole_tiles(x, q_length, kv_length) if n == whole else x for n, x in enumerate(inputs.score))
        inputs = inputs._replace(score=score)
    if tile.dynamic_scheduler and not plan.options.interpret:
        counter = jax.new_ref(tile_scheduler.new_counter(setup.scheduler.programs))
        inputs = inputs._replace(counter=typing.cast(jax.Array, counter))
    return inputs._replace(pages=pages)


def _whole_tiles(x: jax.Array, q_length: int, kv_length: int) -> jax.Array:
    """`x` [..., T, S] with zeros appended up to the two lengths; a longer dimension stays as it is."""
    widths = [(0, 0)] * (x.ndim - 2) + [(0, max(0, q_length - x.shape[-2])), (0, max(0, kv_length - x.shape[-1]))]
    return jnp.pad(x, widths)
