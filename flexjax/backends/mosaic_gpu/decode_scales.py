"""The scales of a quantised cache in the decode kernel: as operands, and applied to a tile.

Where each page has scales of its own, XLA gathers them by the place of the page in its batch entry before the kernel, so that the
kernel does not read a page number to find a scale. A key tile has parts of `DecodeTile.page_rows` keys, each from one page, and
all threads read the scale of a part.
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

from flexjax.backends.mosaic_gpu.decode_items import DecodeItem
from flexjax.backends.mosaic_gpu.decode_setup import DecodeSetup
from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, i32, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.registers import TILE, Item, assemble, element, lowered, positions_of
from flexjax.plan.kernel_plan import Operands


def scale_operands(
    setup: DecodeSetup, operands: Operands, lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array] | None:
    """(scales of keys, scales of values) as the kernel reads them: float32 [M] where all pages share them, otherwise [B, pages of a batch
    entry, M]; None if the cache is not quantised.

    setup      what is known of the kernel, of which the page size and the number of pages are read
    operands   of the call, of which scales and page table are read
    lengths    `Work.lengths`

    Scales of pages that begin at or past the length, and of page numbers that are not in the cache, are 0, because the scale of an unused
    page may be NaN, and 0 times NaN is NaN. Scales that all pages share come back as they are.
    """
    if operands.scales is None or operands.pages is None:
        return None
    pages, stored = operands.pages, setup.stored_pages
    inside = (pages >= 0) & (pages < stored)
    if lengths is not None:
        inside = inside & (np.arange(pages.shape[1], dtype=np.int32) * setup.page < lengths[:, None])

    def by_page(scale: jax.Array) -> jax.Array:
        """The scales of keys or of values as the kernel reads them.

        scale   [M], which is returned as it is, or [pages of the cache, M]
        """
        if scale.ndim == 1:
            return scale
        return jnp.where(inside[..., None], scale.at[jnp.where(inside, pages, 0)].get(mode="promise_in_bounds"), 0.0)

    return by_page(operands.scales.key), by_page(operands.scales.value)


def scales_of_tile(setup: DecodeSetup, scale: Ref, item: DecodeItem, start: Scalar) -> list[Scalar]:
    """The scales of a key tile, float32 scalars read inside the kernel: one for each part of `page_rows` keys, or a single one where all
    pages share their scales. A part past the last page of the table gets the scale of that page.

    setup   whose page and tile sizes are read
    scale   of keys or of values, as `scale_operands` gives it
    item    whose batch entry and key head are read
    start   first key of the tile, a multiple of the keys of a part
    """
    if len(scale.shape) == 1:
        return [scale[item.kv_head]]
    first = range(0, setup.tile.block_kv, setup.tile.page_rows)
    pages = [lax.min(lax.div(start + i32(n), i32(setup.page)), i32(scale.shape[1] - 1)) for n in first]
    return [scale[item.b, page, item.kv_head] for page in pages]


def scaled_columns(tile: jax.Array, scales: Sequence[Scalar], interpret: bool) -> jax.Array:
    """The tile with each column multiplied by the scale of the part that the column belongs to.

    tile     [rows, columns] float32
    scales   float32 scalars, one for each part; the parts are equal runs of neighbouring columns
    """
    if len(scales) == 1:
        return tile * scales[0]
    part = tile.shape[1] // len(scales)
    if interpret:
        return tile * jnp.repeat(jnp.stack(scales), part)[None, :]

    @inline_mgpu(
        TILE, *[SCALAR_LAYOUT] * len(scales), returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE)
    )
    def multiply(array: mgpu.FragmentedArray, *factors: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the product. Parts have a multiple of eight columns, so the part of an element
        follows from its position in the first thread (`registers.Positions`) and is the same in every thread.
        """
        layout = lowered(TILE)

        def items() -> typing.Iterator[Item]:
            """(register, number of the element in the register, product) of each element that the thread holds."""
            for register, item, (_, column) in positions_of(layout, tile.shape).constants:
                value = element(typing.cast(ir.Value, array.registers[register]), item)
                yield register, item, arith.mulf(value, scalar_of(factors[column // part]))

        return assemble(layout, tile.shape, items(), None)

    return multiply(tile, *scales)
