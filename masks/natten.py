"""Neighbourhood attention on a 2-D canvas, such as an image: a query sees the points around its own.

Three masks differ in how the canvas is laid out as a sequence: row by row, tile by tile, or along the Morton curve.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import positive_integers
from flexjax.mod_tools.made_for import Size
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named

Size2d = tuple[int, int]


@without_frames
def natten_2d(canvas: Size2d, kernel: Size2d) -> MaskMod:
    """mask = within(q_y, kv_y, height, kernel_y) & within(q_x, kv_x, width, kernel_x)

        within(q, kv, size, kernel) = start <= kv < start + kernel
        start = clip(q - kernel // 2, 0, size - kernel)
        y, x = index // width, index % width

    canvas:  (height, width): tokens are its points, row by row.
    kernel:  (kernel_y, kernel_x): size of the neighbourhood, no larger than the canvas; it stops moving at an edge.
    Source: Hassani et al., "Neighborhood Attention Transformer", arXiv:2204.07143. Raises ValueError for other sizes.
    Picture of `natten_2d((2, 4), (1, 3))`, 5 x 8:

        # # # . . . . .
        # # # . . . . .
        . # # # . . . .
        . # # # . . . .
        . . . . # # # .
    """
    (height, width), (kernel_y, kernel_x) = _checked("natten_2d", canvas, kernel)

    @named(f"natten_2d_{height}x{width}_{kernel_y}x{kernel_x}", *_sizes_of_canvas(height * width))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        in_y = within(q_idx // width, kv_idx // width, height, kernel_y)
        return in_y & within(q_idx % width, kv_idx % width, width, kernel_x)

    return mask_mod


@without_frames
def natten_2d_tiled(canvas: Size2d, kernel: Size2d, tile: Size2d) -> MaskMod:
    """mask = that of `natten_2d`, for tokens laid out tile by tile

        y = index // (tile_y * width) * tile_y + index % (tile_y * tile_x) // tile_x
        x = index // (tile_y * tile_x) % (width // tile_x) * tile_x + index % tile_x

    canvas:  (height, width).
    kernel:  (kernel_y, kernel_x): size of the neighbourhood, no larger than the canvas.
    tile:    (tile_y, tile_x): divides the canvas. Tiles, and the tokens in a tile, follow each other row by row.
    Source: Hassani et al., "Generalized Neighborhood Attention", arXiv:2504.16922. Raises ValueError for other sizes.
    Picture of `natten_2d_tiled((2, 4), (1, 3), (2, 2))`, 5 x 8:

        # # . . # . . .
        # # . . # . . .
        . . # # . . # .
        . . # # . . # .
        . # . . # # . .
    """
    (height, width), (kernel_y, kernel_x) = _checked("natten_2d_tiled", canvas, kernel)
    advice = "Pass a pair such as (8, 8)."
    tile_y, tile_x = positive_integers("natten_2d_tiled", "tile", tile, ("tile_y", "tile_x"), advice)
    if height % tile_y or width % tile_x:
        raise ValueError(
            f"`natten_2d_tiled`: `tile` is {(tile_y, tile_x)}; expected a divisor of `canvas`, which is "
            f"{(height, width)}. Pad the canvas or choose another tile."
        )

    def position(index: Array) -> tuple[Array, Array]:
        across = index // (tile_y * tile_x) % (width // tile_x)
        down = index // (tile_y * width)
        return down * tile_y + index % (tile_y * tile_x) // tile_x, across * tile_x + index % tile_x

    @named(
        f"natten_2d_tiled_{height}x{width}_{kernel_y}x{kernel_x}_{tile_y}x{tile_x}", *_sizes_of_canvas(height * width)
    )
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        (q_y, q_x), (kv_y, kv_x) = position(q_idx), position(kv_idx)
        return within(q_y, kv_y, height, kernel_y) & within(q_x, kv_x, width, kernel_x)

    return mask_mod


@eager
def natten_2d_morton(canvas: Size2d, kernel: Size2d) -> MaskMod:
    """mask = that of `natten_2d`, for tokens laid out along the Morton (Z-order) curve

        x = bits 0, 2, 4, .. of the index,  y = bits 1, 3, 5, .. of the index

    canvas:  (height, width): equal, and a power of two.
    kernel:  (kernel_y, kernel_x): size of the neighbourhood, no larger than the canvas.
    Two int32 arrays `[height * width]` are captured. Source: Morton, "A Computer Oriented Geodetic Data Base", IBM,
    1966, for the order; arXiv:2204.07143. Raises ValueError for other sizes.
    Picture of `natten_2d_morton((4, 4), (3, 3))`, 5 x 16:

        # # # # # . # . # # . . # . . .
        # # # # # . # . # # . . # . . .
        # # # # # . # . # # . . # . . .
        # # # # # . # . # # . . # . . .
        . # . # # # # # . # . . # # . .
    """
    (height, width), (kernel_y, kernel_x) = _checked("natten_2d_morton", canvas, kernel)
    if height != width or height & (height - 1):
        raise ValueError(
            f"`natten_2d_morton`: `canvas` is {(height, width)}; expected a square whose side is a power of "
            "two. Pad the canvas, or use `natten_2d_tiled`."
        )
    index = np.arange(height * width)
    x, y = (jnp.asarray(_every_other_bit(shifted), jnp.int32) for shifted in (index, index >> 1))

    @named(f"natten_2d_morton_{height}x{width}_{kernel_y}x{kernel_x}", *_sizes_of_canvas(height * width))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        in_y = within(y[q_idx], y[kv_idx], height, kernel_y)
        return in_y & within(x[q_idx], x[kv_idx], width, kernel_x)

    return mask_mod


def _sizes_of_canvas(points: int) -> tuple[Size, Size]:
    return Size("queries", 1, points, "`canvas`"), Size("keys", points, points, "`canvas`")


def within(q: Array, kv: Array, size: int, kernel: int) -> Array:
    """Whether the point `kv` of a line of `size` is in the neighbourhood of `q`, which stops moving at the ends."""
    start = jnp.clip(q - kernel // 2, 0, size - kernel)
    return (kv >= start) & (kv - start < kernel)


def _checked(call: str, canvas: Size2d, kernel: Size2d) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(canvas, kernel) as ints, pairs of which the kernel fits the canvas. Raises ValueError."""
    sides = positive_integers(call, "canvas", canvas, ("height", "width"), "Pass a pair such as (32, 32).")
    reach = positive_integers(call, "kernel", kernel, ("kernel_y", "kernel_x"), "Pass a pair such as (7, 7).")
    if any(k > s for k, s in zip(reach, sides, strict=True)):
        raise ValueError(
            f"`{call}`: `kernel` is {reach}; expected no more than `canvas`, which is {sides}. "
            "Use the canvas itself for attention to everything."
        )
    return sides, reach


def _every_other_bit(codes: np.ndarray) -> np.ndarray:
    """The numbers whose bits 0, 1, 2, .. are the bits 0, 2, 4, .. of the `codes`, which have up to 32."""
    return sum((codes >> 2 * bit & 1) << bit for bit in range(16)) + np.zeros_like(codes)
