"""The scales of a quantised cache in the decode kernel: as operands, and applied to a tile.

Where scales belong to pages, XLA gathers them by logical page before the kernel, so that the kernel reads a number at an address that
it knows. A key tile is made of some parts of pages (`DecodeTile.page_rows` keys each), and each part has one scale, which all threads
read together.
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

from flexjax.backends.mosaic_gpu.decode_sm90_items import DecodeItem
from flexjax.backends.mosaic_gpu.decode_sm90_setup import DecodeSetup
from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, i32, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.registers import TILE, Item, assemble, element, lowered, positions_of
from flexjax.plan.kernel_plan import Operands


def scale_operands(
    setup: DecodeSetup, operands: Operands, lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array] | None:
    """The scales of keys and values by key head, or by batch entry, logical page and key head; None without.

    lengths   [B] int32 or None, keys of each batch entry

    Those of pages that do not exist are 0: a free page may have any scale, and 0 times NaN is NaN.
    """
    if operands.scales is None or operands.pages is None:
        return None
    pages, stored = operands.pages, setup.stored_pages
    inside = (pages >= 0) & (pages < stored)
    if lengths is not None:
        inside = inside & (np.arange(pages.shape[1], dtype=np.int32) * setup.page < lengths[:, None])

    def by_page(scale: jax.Array) -> jax.Array:
        """One of the two, in the form in which the kernel reads it."""
        if scale.ndim == 1:
            return scale
        return jnp.where(inside[..., None], scale.at[jnp.where(inside, pages, 0)].get(mode="promise_in_bounds"), 0.0)

    return by_page(operands.scales.key), by_page(operands.scales.value)


def scales_of_tile(setup: DecodeSetup, scale: Ref, item: DecodeItem, start: Scalar) -> list[Scalar]:
    """The scales of the parts of a key tile, or one for all of it; float32 scalars.

    scale   of keys or of values, as `scale_operands` gives it
    start   first key of the tile, a multiple of the keys of a part
    """
    if len(scale.shape) == 1:
        return [scale[item.kv_head]]
    first = range(0, setup.tile.block_kv, setup.tile.page_rows)
    pages = [lax.min(lax.div(start + i32(n), i32(setup.page)), i32(scale.shape[1] - 1)) for n in first]
    return [scale[item.b, page, item.kv_head] for page in pages]


def scaled_columns(tile: jax.Array, scales: Sequence[Scalar], interpret: bool) -> jax.Array:
    """The tile with its columns multiplied by scales, each by that of its part; the parts have equally many columns.

    tile   [rows, columns] float32
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
        """One thread's registers of the product: parts have a multiple of eight columns, so that the constant of an element
        says in which part it lies, whatever the thread.
        """
        layout = lowered(TILE)

        def items() -> typing.Iterator[Item]:
            """(register, number of the element in the register, product) of each element that the thread holds."""
            for register, item, (_, column) in positions_of(layout, tile.shape).constants:
                value = element(typing.cast(ir.Value, array.registers[register]), item)
                yield register, item, arith.mulf(value, scalar_of(factors[column // part]))

        return assemble(layout, tile.shape, items(), None)

    return multiply(tile, *scales)
