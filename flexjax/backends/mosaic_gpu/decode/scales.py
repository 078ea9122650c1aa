"""The scales of a quantised cache in the decode kernel: as operands, and applied to a tile.

Where each page has scales of its own, XLA gathers them before the kernel by the place of the page in its batch entry,
so that the kernel does not read a page number to find a scale. A key tile has parts of `DecodeTile.page_rows` keys,
each from one page.
"""

import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from flexjax.backends.mosaic_gpu.decode.items import DecodeItem
from flexjax.backends.mosaic_gpu.decode.setup import DecodeSetup
from flexjax.backends.mosaic_gpu.machine.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, i32, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.machine.registers import TILE, Item, assemble, element, lowered, positions_of
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.plan.kernel_plan import Operands


def scale_operands(
    setup: DecodeSetup, operands: Operands, lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array] | None:
    """(scales of keys, of values): [M] where all pages share them, else [B, pages of an entry, M]."""
    if operands.scales is None or operands.pages is None:
        return None
    pages, stored = operands.pages, setup.stored_pages
    inside = (pages >= 0) & (pages < stored)
    if lengths is not None:
        # the scale of an unused page may be NaN, and 0 times NaN is NaN
        inside = inside & (np.arange(pages.shape[1], dtype=np.int32) * setup.page < lengths[:, None])

    def by_page(scale: jax.Array) -> jax.Array:
        if scale.ndim == 1:
            return scale
        return jnp.where(inside[..., None], scale.at[jnp.where(inside, pages, 0)].get(mode="promise_in_bounds"), 0.0)

    return by_page(operands.scales.key), by_page(operands.scales.value)


def scales_of_tile(setup: DecodeSetup, scale: Ref, item: DecodeItem, start: Scalar) -> list[Scalar]:
    """The scales of a key tile: a scalar for each part of `page_rows` keys, or one where all pages share them."""
    if len(scale.shape) == 1:
        return [scale[item.kv_head]]
    first = range(0, setup.tile.block_kv, setup.tile.page_rows)
    # a part past the last page of the table gets the scale of that page
    pages = [lax.min(lax.div(start + i32(n), i32(setup.page)), i32(scale.shape[1] - 1)) for n in first]
    return [scale[item.b, page, item.kv_head] for page in pages]


@device_op
def scaled_columns(tile: jax.Array, scales: Sequence[Scalar]) -> jax.Array:
    """The tile, [rows, columns], with each column multiplied by the scale of its part, an equal run of columns."""
    if len(scales) == 1:
        return tile * scales[0]
    part = tile.shape[1] // len(scales)

    @inline_mgpu(
        TILE, *[SCALAR_LAYOUT] * len(scales), returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE)
    )
    def multiply(array: mgpu.FragmentedArray, *factors: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout = lowered(TILE)

        def items() -> typing.Iterator[Item]:
            """(register, number of the element in the register, product) of each element that the thread holds."""
            # parts have a multiple of eight columns, so the part of an element is the same in every thread
            for register, item, (_, column) in positions_of(layout, tile.shape).constants:
                value = element(typing.cast(ir.Value, array.registers[register]), item)
                yield register, item, arith.mulf(value, scalar_of(factors[column // part]))

        return assemble(layout, tile.shape, items(), None)

    return multiply(tile, *scales)
