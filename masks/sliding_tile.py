"""Sliding tile attention: a query sees the tiles of an image or video around its own tile.

The tokens are the points of a canvas, laid out tile by tile; text tokens may follow.
"""

import math

from jax import Array

from flexjax.masks.natten import within
from flexjax.mod_tools.factory_arguments import integer, positive_integers
from flexjax.mod_tools.made_for import ANY, Size
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named


@without_frames
def sliding_tile_2d(canvas: tuple[int, int], kernel: tuple[int, int], tile: tuple[int, int], text: int = 0) -> MaskMod:
    """mask = near | with_text

        near = query and key are on the canvas, and within(q_tile, kv_tile, tiles, kernel_tiles) on both axes
        within(q, kv, size, kernel) = start <= kv < start + kernel,  start = clip(q - kernel // 2, 0, size - kernel)
        with_text = query, key or both are text tokens, and neither comes after the text

    canvas:  (height, width): tokens, tile by tile; tiles follow each other row by row.
    kernel:  (kernel_y, kernel_x): size of the neighbourhood in tokens, a multiple of the tile.
    tile:    (tile_y, tile_x): divides the canvas. With a tile as block, no block is partial.
    text:    int of at least 0: text tokens that follow the canvas and see, and are seen by, everyone.
    Source: Zhang et al., "Sliding Tile Attention", arXiv:2502.04507. Raises ValueError for other sizes.
    Picture of `sliding_tile_2d((1, 4), (1, 2), (1, 1), text=1)`, 5 x 5:

        # # . . #
        # # . . #
        . # # . #
        . . # # #
        # # # # #
    """
    return _sliding_tile("sliding_tile_2d", ("y", "x"), canvas, kernel, tile, text)


@without_frames
def sliding_tile_3d(
    canvas: tuple[int, int, int], kernel: tuple[int, int, int], tile: tuple[int, int, int], text: int = 0
) -> MaskMod:
    """mask = that of `sliding_tile_2d`, with a third axis, time, before the two

    canvas:  (frames, height, width): tokens, tile by tile; tiles go frame by frame, row by row.
    kernel:  (kernel_t, kernel_y, kernel_x): size of the neighbourhood in tokens, a multiple of the tile.
    tile:    (tile_t, tile_y, tile_x): divides the canvas.
    text:    int of at least 0: text tokens that follow the canvas and see, and are seen by, everyone.
    Source: Zhang et al., arXiv:2502.04507. Raises ValueError for other sizes.
    Picture of `sliding_tile_3d((2, 1, 2), (2, 1, 1), (1, 1, 1))`, 4 x 4:

        # . # .
        . # . #
        # . # .
        . # . #
    """
    return _sliding_tile("sliding_tile_3d", ("t", "y", "x"), canvas, kernel, tile, text)


def _sliding_tile(
    call: str, axes: tuple[str, ...], canvas: tuple[int, ...], kernel: tuple[int, ...], tile: tuple[int, ...], text: int
) -> MaskMod:
    """The mask of `sliding_tile_2d` for a canvas with any number of axes. Raises ValueError."""
    canvas = positive_integers(call, "canvas", canvas, axes, "Pass the size of the canvas in tokens.")
    kernel = positive_integers(call, "kernel", kernel, axes, "Pass the size of the neighbourhood in tokens.")
    tile = positive_integers(call, "tile", tile, axes, "Pass the size of a tile in tokens.")
    text = integer(call, "text", text, 0, "It counts the text tokens after the canvas.")
    _check_division(call, canvas, kernel, tile)
    tiles = tuple(c // t for c, t in zip(canvas, tile, strict=True))
    reach = tuple(k // t for k, t in zip(kernel, tile, strict=True))
    tile_tokens, canvas_tokens = math.prod(tile), math.prod(canvas)
    tokens = canvas_tokens + text
    sizes = (Size(axis, tokens, ANY, "`canvas` and `text`") for axis in ("queries", "keys"))  # later tokens are hidden

    @named(f"{call}_{_times(canvas)}_{_times(kernel)}_{_times(tile)}", *sizes)
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        near = (q_idx < canvas_tokens) & (kv_idx < canvas_tokens)
        q_tile, kv_tile = q_idx // tile_tokens, kv_idx // tile_tokens
        for axis, (size, width) in enumerate(zip(tiles, reach, strict=True)):
            step = math.prod(tiles[axis + 1 :])
            near = near & within(q_tile // step % size, kv_tile // step % size, size, width)
        if text == 0:
            return near
        real = (q_idx < tokens) & (kv_idx < tokens)
        return near | (real & ((q_idx >= canvas_tokens) | (kv_idx >= canvas_tokens)))

    return mask_mod


def _check_division(call: str, canvas: tuple[int, ...], kernel: tuple[int, ...], tile: tuple[int, ...]) -> None:
    """Raises ValueError unless the tile divides canvas and kernel, and the kernel fits the canvas."""
    for name, size in (("canvas", canvas), ("kernel", kernel)):
        if any(s % t for s, t in zip(size, tile, strict=True)):
            raise ValueError(
                f"`{call}`: `{name}` is {size}; expected a multiple of `tile`, which is {tile}. "
                "Pad the canvas or choose another tile."
            )
    if any(k > c for k, c in zip(kernel, canvas, strict=True)):
        raise ValueError(
            f"`{call}`: `kernel` is {kernel}; expected no more than `canvas`, which is {canvas}. "
            "Use the canvas itself for attention to everything."
        )


def _times(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))
