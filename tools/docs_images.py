"""Draws the images of the documentation: `PYTHONPATH=. python tools/docs_images.py`.

Half a minute on one core; needs matplotlib. It writes docs/images/NAME.png for each of `figures`.
"""

import pathlib

import jax
import numpy as np
from matplotlib.figure import Figure

import flexjax
from flexjax import masks, mods, visualize

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"
TOKENS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "then",
    "it",
    "sleeps",
    "a",
    "while",
    "longer",
]


def figures() -> dict[str, Figure]:
    """The figures of the documentation: name of the image file without ".png" -> matplotlib figure."""
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 16, 4, 32))
    lengths = np.array([700, 300, 1500, 100, 400, 1096])
    packed = flexjax.and_masks(masks.document(lengths=lengths), masks.causal)
    block_mask = flexjax.create_block_mask(packed, None, None, 4096, 4096)
    blocks = Figure(figsize=(4.4, 4.4), layout="constrained")
    block_mask.plot(axes=blocks.subplots())
    return {
        "weights": visualize.weights(
            query, key, score_mod=mods.alibi(4), mask_mod=masks.causal, tokens=TOKENS, heads=[0, 3]
        ),
        "scores": visualize.scores(
            query, key, score_mod=mods.softcap(2.0), mask_mod=masks.sliding_window(6), heads=[0, 1]
        ),
        "mask": visualize.mask(masks.prefix_lm(30), 96, 96),  # cells of 2 pixels on a phone too
        "block_mask": blocks,
    }


if __name__ == "__main__":
    for name, figure in figures().items():
        figure.savefig(IMAGES / f"{name}.png", dpi=90, metadata={"Software": None})
        print(IMAGES / f"{name}.png")
