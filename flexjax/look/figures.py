"""`mask`, `scores` and `weights`: draw attention as a matplotlib Figure with a panel for each head.

A panel has queries as rows and keys as columns. Short sequences are drawn token by token, long ones by blocks
(figure_values.py). The figures are made without pyplot, so that they need no display and are not kept alive.
"""

import functools
import math
import operator
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.block_mask.block_mask import BlockMask
from flexjax.call.checks import check_array, check_scale
from flexjax.errors import bad_argument, public
from flexjax.look import figure_values
from flexjax.mod_tools.settings import own
from flexjax.types import Layout, MaskMod, ScoreMod

if typing.TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = jax.Array

MOST_LABELS = 40  # most token labels along an axis; longer axes show positions

HIDDEN = "#e8e8e8"
VISIBLE = "#08519c"


@public
@own
def mask(
    mask_mod: MaskMod,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 0,
    heads: int | Sequence[int] = 0,
    tokens: Sequence[str] | None = None,
    title: str | None = None,
) -> "Figure":
    """Draws which entries `mask_mod(b, h, q_idx, kv_idx)` keeps, a panel for each of `heads`.

    q_len, kv_len   lengths in tokens
    batch, heads    the b and h that mask_mod is asked about: a number or, for heads, several
    tokens          labels of the keys, and of the queries where the lengths are equal; shown for at most 40 tokens
    title           above the panels; by default the name of mask_mod or of its type, "mask" for a lambda

    Beyond 256 tokens along an axis a cell is several, and its colour the share of visible entries. Returns a matplotlib
    Figure. Raises ValueError for a wrong number of labels, ImportError without matplotlib.
    """
    if isinstance(mask_mod, BlockMask):
        raise bad_argument(
            "mask_mod", "a BlockMask", "a function mask_mod(b, h, q_idx, kv_idx)",
            "Pass block_mask.mask_mod for its entries; block_mask.plot() draws its blocks.",
        )  # fmt: skip
    heads = _several(heads)
    _check_lengths(q_len, kv_len)

    @jax.jit
    def rows_of(h: Array, rows: Array) -> tuple[Array, Array]:
        kept = figure_values.visible(mask_mod, batch, h, rows, kv_len)
        return kept, jnp.ones_like(kept)

    panels = [figure_values.cells(rows_of, h, q_len, kv_len) for h in heads]
    name = getattr(mask_mod, "__name__", type(mask_mod).__name__)
    return _figure(panels, heads, (q_len, kv_len), tokens, title or ("mask" if name == "<lambda>" else name), "kept")


class Drawn(typing.TypedDict, total=False):
    """The keywords of `scores` and `weights`.

    score_mod, mask_mod   as in flex_attention
    batch                 the batch entry; 0 by default
    heads                 one query head or several; the first four by default
    tokens                labels of the keys, and of the queries where T == S
    scale                 as in flex_attention: 1 / sqrt(D) by default
    layout                the order of the axes of query and key, "BTNH" by default or "BNTH"
    title                 above the panels
    """

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    batch: int
    heads: int | Sequence[int] | None
    tokens: Sequence[str] | None
    scale: float | None
    layout: Layout
    title: str | None


@public
@own
def scores(query: Array, key: Array, **drawn: typing.Unpack[Drawn]) -> "Figure":
    """Draws the scores after score_mod, a panel for each head; hidden entries are grey.

    query   [B, T, N, D]
    key     [B, S, M, D], M divides N; layout="BNTH": heads before tokens
    drawn   score_mod, mask_mod, batch, heads, tokens, scale, layout, title; see Drawn

    Beyond 256 tokens a cell is a mean over visible entries. Returns a matplotlib Figure. Raises ValueError for
    arguments that do not fit, TypeError for unknown keywords, ImportError without matplotlib.

    Example: visualize.scores(q, k, score_mod=mods.alibi(8), mask_mod=masks.causal, heads=[0, 7])
    """
    return _over_heads(query, key, drawn, "score")


@public
@own
def weights(query: Array, key: Array, **drawn: typing.Unpack[Drawn]) -> "Figure":
    """Draws the probabilities, a panel for each head: the softmax over the visible keys of what `scores` draws.

    query   [B, T, N, D]
    key     [B, S, M, D], M divides N; layout="BNTH": heads before tokens
    drawn   score_mod, mask_mod, batch, heads, tokens, scale, layout, title; see Drawn

    Returns a matplotlib Figure and raises as `scores` does. A query that sees no key has probabilities 0.
    """
    return _over_heads(query, key, drawn, "weight")


def _over_heads(query: Array, key: Array, drawn: Drawn, unit: str) -> "Figure":
    """The figure of the scores (`unit` "score") or of the probabilities (`unit` "weight"), a panel for each head.

    A key of batch 1 serves every batch entry. Raises what `scores` raises.
    """
    unknown = sorted(set(drawn) - set(Drawn.__annotations__))
    if unknown:
        raise TypeError(
            f"visualize got unexpected arguments {', '.join(unknown)}; it takes {', '.join(Drawn.__annotations__)}."
        )
    score_mod, mask_mod, batch, heads = (
        drawn.get("score_mod"),
        drawn.get("mask_mod"),
        drawn.get("batch", 0),
        drawn.get("heads"),
    )
    layout = drawn.get("layout", "BTNH")
    for name, x in (("query", query), ("key", key)):
        check_array(name, x)
    if layout not in ("BTNH", "BNTH"):
        raise bad_argument("layout", repr(layout), "'BTNH' or 'BNTH'", "BTNH is [batch, tokens, heads, dim].")
    if layout == "BNTH" and query.ndim == key.ndim == 4:
        query, key = query.swapaxes(1, 2), key.swapaxes(1, 2)
    fits = query.ndim == key.ndim == 4 and key.shape[0] in (1, query.shape[0]) and query.shape[3] == key.shape[3]
    if not fits or query.shape[2] % max(key.shape[2], 1):
        raise bad_argument(
            "query",
            f"of shape {query.shape} beside a key of shape {key.shape}",
            "[B, T, N, D] and [B, S, M, D] or [1, S, M, D], M divides N",
            'Pass layout="BNTH" for [B, N, T, D] and [B, M, S, D].',
        )
    count = query.shape[2]
    chosen = list(range(min(4, count))) if heads is None else _several(heads)
    for name, index, limit in (("batch", batch, query.shape[0]), *(("heads", h, count) for h in chosen)):
        if not 0 <= index < limit:
            raise bad_argument(name, str(index), f"from 0 to {limit - 1}", "Indices count from 0.")
    scale = drawn.get("scale")
    factor = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    if not isinstance(factor, Array):
        factor = check_scale(factor)
    kv_len = key.shape[1]
    _check_lengths(query.shape[1], kv_len)

    @jax.jit
    def computed(query: Array, key: Array, h: Array, rows: Array) -> tuple[Array, Array]:
        """(values, which are visible and finite), [len(rows), kv_len], of head h; 0 in rows of weights without any."""
        one_query, one_key = query[batch, :, h], key[batch % key.shape[0], :, h // (count // key.shape[2])]
        on = figure_values.visible(mask_mod, batch, h, rows, kv_len)
        values = figure_values.scores_of_rows(one_query, one_key, score_mod, batch, h, rows, factor)
        if unit == "weight":
            seen = jnp.where(on, values, -jnp.inf)
            values = jnp.where((seen == -jnp.inf).all(1, keepdims=True), 0, jax.nn.softmax(seen))
        return values, on & jnp.isfinite(values)

    lengths, title = (query.shape[1], kv_len), drawn.get("title") or f"{unit}s"
    # as arguments, because a captured array would be a literal of the program
    rows_of = functools.partial(computed, query, key)
    panels = [figure_values.cells(rows_of, h, *lengths) for h in chosen]
    return _figure(panels, chosen, lengths, drawn.get("tokens"), title, unit)


def _check_lengths(q_len: int, kv_len: int) -> None:
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if length < 1:
            raise bad_argument(name, str(length), "at least 1", "Nothing could be drawn.")


def _several(heads: int | Sequence[int]) -> list[int]:
    """The numbers of heads as a list, for one number too. Raises ValueError for none."""
    numbers = [operator.index(heads)] if isinstance(heads, typing.SupportsIndex) else list(map(operator.index, heads))
    if not numbers:
        raise bad_argument("heads", repr(heads), "a head or several", "Each gets a panel.")
    return numbers


def _figure(
    panels: Sequence[np.ndarray],
    heads: Sequence[int],
    lengths: tuple[int, int],
    tokens: Sequence[str] | None,
    title: str,
    unit: str,
) -> "Figure":
    """Draws the cells of each head beside each other under one title, with one colour scale; NaN is grey.

    unit   "kept" (colours from 0 to 1), "score" (from the least to the greatest) or "weight" (the square root, from 0
           on)
    """
    try:
        from matplotlib import colormaps
        from matplotlib.colors import LinearSegmentedColormap, Normalize, PowerNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("flexjax.visualize needs matplotlib: pip install matplotlib") from error
    if tokens is not None and len(tokens) != lengths[1]:
        raise bad_argument("tokens", f"{len(tokens)} labels", f"{lengths[1]}, one for each key", "Label every token.")
    finite = np.concatenate([p[np.isfinite(p)] for p in panels] or [np.zeros(0)])
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    if unit == "kept":
        colours, norm = LinearSegmentedColormap.from_list("kept", [HIDDEN, VISIBLE]), Normalize(0, 1)
    else:
        colours = colormaps["viridis"].with_extremes(bad=HIDDEN)
        # a row of n keys has weights of about 1 / n: their square roots still differ beside a weight of 1
        norm = PowerNorm(0.5, 0, high) if unit == "weight" else Normalize(low, high)
    columns = 3 if len(panels) in (5, 6) else min(len(panels), 4)
    rows = -(-len(panels) // columns)
    ratio = min(max(panels[0].shape[0] / panels[0].shape[1], 0.3), 1.5) if panels and panels[0].size else 1.0
    figure = Figure(figsize=(1.2 + 3.2 * columns, max(2.6, 0.7 + 3.2 * rows * ratio)), layout="compressed")
    grid = figure.subplots(rows, columns, squeeze=False)
    image = None
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for place, (axes, panel, h) in enumerate(zip(grid.flat, panels, heads, strict=False)):
        image = axes.imshow(panel, cmap=colours, norm=norm, interpolation="nearest", aspect="equal")
        if len(panels) > 1:
            axes.set_title(f"head {h}", fontsize=9)
        _label(axes, lengths, tokens)
        if place % columns:  # the panel to the left has the same labels
            axes.yaxis.set_tick_params(labelleft=False)
            axes.set_ylabel("")
    figure.suptitle(title, fontsize=11)
    single = all(figure_values.block_of(n) == 1 for n in lengths)
    if image is not None and not (unit == "kept" and single):
        figure.colorbar(image, ax=list(grid.flat), shrink=0.8, label=unit if single else f"{unit}, mean of a block")
    return figure


def _label(axes: "Axes", lengths: tuple[int, int], tokens: Sequence[str] | None) -> None:
    """Names the axes of a panel, says how many tokens a cell stands for, and labels the tokens where there is room."""
    for axis, length, name, labelled in (
        (axes.yaxis, lengths[0], "query", lengths[0] == lengths[1]),
        (axes.xaxis, lengths[1], "key", True),
    ):
        block = figure_values.block_of(length)
        axis.set_label_text(name if block == 1 else f"{name}, {block} tokens a cell")
        if tokens is not None and labelled and length <= MOST_LABELS:
            axis.set_ticks(range(length), list(tokens), rotation=90 if name == "key" else 0, fontsize=7)
        else:
            cells = -(-length // block)
            step = max(1, 2 ** math.ceil(math.log2(cells / 8)))
            ticks = list(range(0, cells, step))
            axis.set_ticks(ticks, [str(cell * block) for cell in ticks], fontsize=8)
