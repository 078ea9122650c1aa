"""Draws a thumbnail of each ready-made mask and score mod, and writes the pages that show them.

`PYTHONPATH=. python tools/docs_gallery.py` takes ten seconds and writes docs/images/thumbnails/NAME.svg, docs/masks.md, docs/mods.md
and docs/gallery.md. To add a mask or a mod, add its line to MASKS or MODS; a test says so if it is forgotten.
"""

import pathlib
import typing

import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import masks, mods
from flexjax.mod_tools.made_for import ANY, AXES, sizes_of

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SIDE = 144
"""Largest width and height of a thumbnail, in pixels."""

LEVELS = 8
VISIBLE, HIDDEN = "#4d83e0", "#808080"
"""Colours that are seen on the light page and on the dark one; a thumbnail has no background."""


class Shown(typing.NamedTuple):
    """A line of the gallery: the call whose thumbnail is drawn.

    kind   "mask", "scores" (of score 1), "curve" (the score after over the score before) or "bars" (numbers that a helper returns)
    """

    call: str
    queries: int = 36
    keys: int = 36
    kind: str = "mask"

    @property
    def name(self) -> str:
        return self.call.partition("(")[0].rpartition(".")[2]

    @property
    def module(self) -> typing.Any:
        return masks if self.call.startswith("masks") else mods

    @property
    def value(self) -> typing.Any:
        return eval(self.call, {"flexjax": flexjax, "masks": masks, "mods": mods, "jnp": jnp, "np": np})


MASKS = {
    "Order": [
        Shown("masks.causal"),
        Shown("masks.causal_offset(12)", 24, 36),
        Shown("masks.block_causal(6)"),
        Shown("masks.prefix_lm(12)"),
        Shown("masks.full"),
        Shown("masks.noop_mask"),
    ],
    "Windows": [
        Shown("masks.sliding_window(9)"),
        Shown("masks.two_sided_window(6, 3)"),
        Shown("masks.chunked(12)"),
        Shown("masks.block_diagonal(12)"),
        Shown("masks.dilated_window(5, 3)"),
        Shown("masks.dilated_two_sided_window(3, 3, 3)"),
        Shown("masks.strided(6)"),
        Shown("masks.strided_fixed(6)"),
        Shown("masks.streaming(3, 9)"),
        Shown("masks.local_global(3, 4)"),
        Shown("masks.global_tokens(4)"),
        Shown("masks.big_bird(36, 3, global_blocks=1, random_blocks=2)"),
    ],
    "Documents and padding": [
        Shown("masks.document(lengths=jnp.array([8, 15, 4, 9]))"),
        Shown("masks.per_document(masks.causal, jnp.repeat(jnp.arange(3), 12))"),
        Shown("masks.shared_prefix(8, masks.chunked(8))"),
        Shown("masks.batched([masks.sliding_window(9), masks.causal])"),
        Shown("masks.padding(jnp.array([28]))"),
        Shown("masks.left_padding(jnp.array([8]))"),
        Shown("masks.query_padding(jnp.array([28]))"),
    ],
    "Images, video, media": [
        Shown("masks.natten_2d((6, 6), (3, 3))"),
        Shown("masks.natten_2d_tiled((6, 6), (3, 3), (3, 3))"),
        Shown("masks.natten_2d_morton((8, 8), (5, 5))", 64, 64),
        Shown("masks.sliding_tile_2d((8, 8), (4, 4), (2, 2), text=8)", 72, 72),
        Shown("masks.sliding_tile_3d((3, 4, 4), (3, 2, 2), (1, 2, 2))", 48, 48),
        Shown("masks.interleaved_media(jnp.arange(36) % 12 == 4, 8)", 36, 24),
        Shown("masks.media_intervals(jnp.array([[0, 12], [8, 24], [20, 36]]), 8)", 36, 24),
    ],
    "Trees and diffusion": [
        Shown("masks.tree(jnp.arange(-1, 23) // 2, context=12)", 24, 36),
        Shown("masks.block_diffusion(18, 6)"),
    ],
}
MODS = {
    "Positions": [
        Shown("mods.alibi(8)", kind="scores"),
        Shown("mods.alibi_slopes(12)", kind="bars"),
        Shown("mods.distance_penalty(0.1)", kind="scores"),
        Shown("mods.log_distance_penalty(1.0, 0.5)", kind="scores"),
        Shown("mods.relative_table(jnp.sin(jnp.arange(71) / 4))", kind="scores"),
        Shown("mods.t5_bias(-jnp.arange(16.0)[None], bidirectional=True)", kind="scores"),
        Shown("mods.t5_buckets(np.arange(-18, 18), num_buckets=16, bidirectional=True)", kind="bars"),
        Shown("mods.pair_bias(jnp.sin(jnp.arange(36) * jnp.arange(36)[:, None] / 99))", kind="scores"),
    ],
    "Scales and caps": [
        Shown("mods.softcap(2.0)", kind="curve"),
        Shown("mods.softcap_approx(2.0)", kind="curve"),
        Shown("mods.tanh_approx", kind="curve"),
        Shown("mods.temperature(2.0)", kind="curve"),
        Shown("mods.scalable_softmax(0.5)", kind="scores"),
        Shown("mods.log_n_scaling(8)", kind="scores"),
        Shown("mods.head_gate(jnp.zeros(8))", kind="curve"),
        Shown("mods.query_scales(2 + jnp.sin(jnp.arange(36) / 2))", kind="scores"),
        Shown("mods.key_scales(2 + jnp.sin(jnp.arange(36) / 2))", kind="scores"),
    ],
    "Others": [
        Shown("mods.identity", kind="curve"),
        Shown("mods.checkerboard()", kind="scores"),
    ],
}


def cells(shown: Shown) -> np.ndarray:
    """int [rows, columns]: how strongly each cell is coloured, 0 to LEVELS; batch entry 0 and head 0."""
    value, rows, columns = shown.value, shown.queries, shown.keys
    where = (jnp.int32(0), jnp.int32(0), jnp.arange(rows)[:, None], jnp.arange(columns)[None])
    if shown.kind == "mask":
        return LEVELS * np.broadcast_to(value(*where), (rows, columns))
    if shown.kind == "scores":
        score = np.asarray(value(jnp.ones((rows, columns)), *where), np.float64)
        share = (score - score.min()) / (score.max() - score.min())
        return np.rint(share * (LEVELS - 1)).astype(int) + 1
    up = np.arange(rows)[::-1, None]  # rows are drawn from the top
    if shown.kind == "bars":
        numbers = np.repeat(value, columns // len(value))
        return LEVELS * (up < np.rint(numbers / numbers.max() * rows))
    most = 4.0  # scores from -4 to 4
    before = jnp.linspace(-most, most, columns)
    after = value(before) if shown.name == "tanh_approx" else value(before, *where)
    row = np.rint((np.broadcast_to(after, (rows, columns))[0] + most) / (2 * most) * (rows - 1))
    return np.where(up == row, LEVELS, np.where(up == np.arange(columns), 2, 0))


def svg(levels: np.ndarray, most: int = SIDE) -> str:
    """An SVG image of cells of one size, at most `most` pixels wide and high: a path of runs for each level."""
    rows, columns = levels.shape
    side = most // max(rows, columns)
    paths = [f'<path fill="{HIDDEN}" fill-opacity=".16" d="M0 0h{columns}v{rows}h-{columns}z"/>']
    for level in range(1, LEVELS + 1):
        runs = []
        for y, row in enumerate(levels == level):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], row, [0]])))
            runs += [f"M{x} {y}h{end - x}v1h-{end - x}z" for x, end in edges.reshape(-1, 2)]
        if runs:
            paths.append(f'<path fill="{VISIBLE}" fill-opacity="{level / LEVELS:g}" d="{"".join(runs)}"/>')
    size = f'width="{side * columns}" height="{side * rows}" viewBox="0 0 {columns} {rows}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} shape-rendering="crispEdges">\n'
        + "\n".join(paths)
        + "\n</svg>\n"
    )


def sizes(shown: Shown) -> str:
    """Which calls take the mod, as a sentence."""
    found = {}
    for size in sizes_of(shown.value):
        amount = f"{size.least}" if size.least == size.most else f"at most {size.most}"
        amount = f"at least {size.least}" if size.most == ANY else amount
        found.setdefault(size.axis, f"{amount} {AXES[size.axis]}")
    return f"For calls of {', '.join(found.values())}." if found else "For calls of any size."


def usage(shown: Shown) -> str:
    if shown.kind == "bars" or shown.name == "tanh_approx":
        return shown.call if "(" in shown.call else f"{shown.call}(score)"
    argument = "mask_mod" if shown.kind == "mask" else "score_mod"
    return f"flexjax.flex_attention(q, k, v, {argument}={shown.call})"


def image(shown: Shown) -> str:
    return f"![{shown.call}](images/thumbnails/{shown.name}.svg)"


def dotted(shown: Shown) -> str:
    function = getattr(shown.module, shown.name)
    home = getattr(function, "__wrapped__", function).__module__
    return f"{home}.{shown.name}"


def entry(shown: Shown) -> str:
    last = "" if usage(shown) == shown.call or shown.name == "tanh_approx" else f"\n{sizes(shown)}\n"
    return (
        f"::: {dotted(shown)}\n"
        f"    options: {{heading: {shown.module.__name__.rpartition('.')[2]}.{shown.name}, toc_label: {shown.name}}}\n\n"
        f"{image(shown)}\n\n```py\n{usage(shown)}\n```\n{last}"
    )


def reference(head: str, sections: dict[str, list[Shown]]) -> str:
    return head + "".join(f"\n## {name}\n\n" + "\n".join(map(entry, lines)) for name, lines in sections.items())


def gallery(page: str, sections: dict[str, list[Shown]]) -> str:
    link = lambda x: f"- [{image(x)} `{x.name}`]({page}#{dotted(x)})\n"
    blocks = (
        f'\n### {name}\n\n<div class="gallery" markdown>\n\n{"".join(map(link, x))}\n</div>\n'
        for name, x in sections.items()
    )
    return "".join(blocks)


def pages() -> dict[str, str]:
    """The pages that this tool writes: name -> text."""
    written = "<!-- written by tools/docs_gallery.py -->\n"
    legend = "A row is a query, a column a key."
    return {
        "masks.md": reference(
            f"{written}# Masks\n\nReady-made masks of `flexjax.masks`: functions `mask_mod(b, h, q_idx, kv_idx) -> bool`, and functions that return one. "
            f"Combine several with\n`flexjax.and_masks`, `or_masks` and `not_mask`. {legend} The [gallery](gallery.md) has all pictures on one page.\n",
            MASKS,
        ),
        "mods.md": reference(
            f"{written}# Score mods\n\nReady-made score functions of `flexjax.mods`: functions `score_mod(score, b, h, q_idx, kv_idx) -> score`, and functions "
            f"that return one. Apply\nseveral, one after the other, with `flexjax.chain_mods`. {legend} The stronger its colour, the higher the "
            "score. A curve shows the score after\nover the score before, from -4 to 4.\n",
            MODS,
        ),
        "gallery.md": f"{written}# Gallery\n\n{legend} Each picture leads to its entry.\n\n## Masks\n"
        + gallery("masks.md", MASKS)
        + "\n## Score mods\n\nThe stronger the colour, the higher the score. A curve shows the score after over the score before.\n"
        + gallery("mods.md", MODS),
    }


def thumbnails() -> dict[str, str]:
    """name -> SVG"""
    return {x.name: svg(cells(x)) for sections in (MASKS, MODS) for lines in sections.values() for x in lines}


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    for name, text in thumbnails().items():
        (DOCS / "images" / "thumbnails" / f"{name}.svg").write_text(text)
