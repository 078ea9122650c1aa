"""Pictures of a block mask as text, HTML and a matplotlib image: a character or cell for each block, by its class.

Traced lists raise ValueError, except in `html`. In text and HTML several blocks share a cell where there are many.
"""

import html as html_text
import typing

import numpy as np
from jax.core import Tracer

from flexjax.block_mask.parts import Parts
from flexjax.block_mask.transpose import EMPTY, FULL, PARTIAL, places_of_lists
from flexjax.errors import bad_argument
from flexjax.integers import cdiv

SHADES = {EMPTY: " ", PARTIAL: "░", FULL: "█"}
COLORS = {EMPTY: "#ffffff", PARTIAL: "#9ecae1", FULL: "#08519c"}


def classes(mask: Parts, batch: int, head: int) -> np.ndarray:
    """The classes of all blocks of one batch entry and head: int8 [q_blocks, kv_blocks]."""
    if isinstance(mask.kv_num_blocks, Tracer):
        raise bad_argument("block_mask", "traced", "concrete lists", "Draw it outside jit.")
    out = np.zeros(mask.blocks, np.int8)
    for kind, num, index in (
        (PARTIAL, mask.kv_num_blocks, mask.kv_indices),
        (FULL, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        one = (slice(batch, batch + 1), slice(head, head + 1))
        places = places_of_lists(np.asarray(num[one]), np.asarray(index[one]))
        out[places[:, 2], places[:, 3]] = kind
    return out


def shrink(grid: np.ndarray, most: int) -> np.ndarray:
    """The classes in at most `most` rows and columns; a cell is full (empty) if all its blocks are, else partial."""
    for axis in (0, 1):
        group = cdiv(grid.shape[axis], most) if grid.shape[axis] else 1
        if group > 1:
            cuts = np.arange(0, grid.shape[axis], group)
            low, high = np.minimum.reduceat(grid, cuts, axis), np.maximum.reduceat(grid, cuts, axis)
            grid = np.where(low == high, low, PARTIAL).astype(np.int8)
    return grid


def text(mask: Parts, title: str, width: int) -> str:
    """The title, then a picture of every (b, h) of the mask, at most `width` rows and columns of cells."""
    batches, heads = mask.kv_num_blocks.shape[:2]
    parts = [title]
    for b in range(batches):
        for h in range(heads):
            grid = shrink(classes(mask, b, h), width)
            rule = "─" * grid.shape[1]
            rows = ["│" + "".join(SHADES[int(c)] for c in row) + "│" for row in grid]
            parts.append("\n".join([f"b={b} h={h}", f"┌{rule}┐", *rows, f"└{rule}┘"]))
    return "\n".join(parts)


def html(mask: Parts, title: str) -> str:
    """HTML of the title and of the first (b, h), at most 64 by 64 cells; only the title for traced lists."""
    title = html_text.escape(title)
    if isinstance(mask.kv_num_blocks, Tracer) or not mask.kv_num_blocks.size:
        return f"<code>{title}</code>"
    cell = '<td style="width:6px;height:6px;padding:0;background:{}"></td>'
    rows = [
        "<tr>" + "".join(cell.format(COLORS[int(c)]) for c in row) + "</tr>" for row in shrink(classes(mask, 0, 0), 64)
    ]
    return f'<code>{title}</code><table style="border:1px solid #888;border-collapse:collapse">{"".join(rows)}</table>'


def plot(mask: Parts, title: str, batch: int, head: int, axes: typing.Any) -> typing.Any:
    """Draws the classes of the blocks of one batch entry and head as a matplotlib image, and returns the Axes."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("BlockMask.plot needs matplotlib: pip install matplotlib") from error
    axes = axes if axes is not None else plt.subplots(layout="constrained")[1]
    rows, columns = mask.blocks
    square = "equal" if columns <= 4 * rows and rows <= 4 * columns else "auto"  # long strips would be too thin to see
    axes.imshow(classes(mask, batch, head), cmap=ListedColormap(list(COLORS.values())), vmin=0, vmax=2, aspect=square)
    axes.set_xlabel(f"key block of {mask.block_size[1]}")
    axes.set_ylabel(f"query block of {mask.block_size[0]}")
    axes.set_title(title, fontsize=9, wrap=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # on blocks, not between them
    return axes
