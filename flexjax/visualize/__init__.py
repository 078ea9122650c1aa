"""Pictures of attention: masks, scores and weights as matplotlib figures (the `plot` extra).

    figures.py    mask, scores, weights: one call, one Figure
    dense.py      the numbers behind a picture: entries of small problems, means over blocks of large ones

The room computes densely, with the mods as plain functions, and does not touch the compiler beyond block masks.
"""

from flexjax.visualize.figures import Drawn as Drawn
from flexjax.visualize.figures import mask as mask
from flexjax.visualize.figures import scores as scores
from flexjax.visualize.figures import weights as weights

__all__ = ["Drawn", "mask", "scores", "weights"]
