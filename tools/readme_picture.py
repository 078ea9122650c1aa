"""Draws the picture of README.md, one program three times: `PYTHONPATH=. python tools/readme_picture.py`.

Ten seconds on one core; needs matplotlib. It writes docs/images/readme.png: the scores after `score_mod`, the entries that
`mask_mod` shows, and the blocks that the kernels visit.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import flexjax
from flexjax import masks, mods

IMAGE = pathlib.Path(__file__).parents[1] / "docs" / "images" / "readme.png"
TOKENS, BLOCK = 512, 64
LENGTHS = (150, 90, 272)
"""Tokens of each document."""


def program() -> tuple[flexjax.MaskMod, flexjax.ScoreMod]:
    """(mask_mod, score_mod) of the picture: causal attention in packed documents, with ALiBi."""
    return flexjax.and_masks(masks.causal, masks.document(lengths=np.array(LENGTHS))), mods.alibi(8)


def figure() -> Figure:
    """Its three panels."""
    mask_mod, score_mod = program()
    query, key = jax.random.normal(jax.random.key(0), (2, TOKENS, 32))
    rows, columns = jnp.arange(TOKENS)[:, None], jnp.arange(TOKENS)[None]
    seen = np.asarray(mask_mod(0, 4, rows, columns))
    scores = np.asarray(score_mod(query @ key.T / np.sqrt(32), 0, 4, rows, columns))

    drawn = Figure(figsize=(9, 3.3), layout="constrained")
    left, middle, right = drawn.subplots(1, 3)
    left.imshow(np.where(seen, scores, np.nan), cmap="viridis", vmin=np.quantile(scores[seen], 0.02), vmax=3)
    middle.imshow(np.where(seen, 0.7, np.nan), cmap="Blues", vmin=0, vmax=1)
    flexjax.create_block_mask(mask_mod, None, None, TOKENS, TOKENS, block_size=BLOCK).plot(axes=right)
    left.set(title="scores", xlabel="key", ylabel="query")
    middle.set(title="mask", xlabel="key")
    right.set(title="blocks: full, partial, skipped", xlabel=f"key block of {BLOCK}", ylabel="")
    right.title.set_fontsize(left.title.get_fontsize())
    return drawn


if __name__ == "__main__":
    figure().savefig(IMAGE, dpi=100, metadata={"Software": None})
    print(IMAGE)
