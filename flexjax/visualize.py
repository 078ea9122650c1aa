"""Pictures of attention: masks, scores and weights as matplotlib figures (the `plot` extra)."""

from flexjax.look.figures import Drawn as Drawn
from flexjax.look.figures import mask as mask
from flexjax.look.figures import scores as scores
from flexjax.look.figures import weights as weights

__all__ = ["Drawn", "mask", "scores", "weights"]
