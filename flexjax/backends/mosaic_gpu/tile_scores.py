"""The scores of a tile in the forward kernels: the score program applied to a product of queries and keys."""

import jax
import numpy as np

from flexjax.backends.mosaic_gpu import thread_tiles
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.backends.mosaic_gpu.tile_values import Scaled

f32 = np.float32


def scores_of(program: TileProgram | None, s: jax.Array, scale: float, large_scores: bool, interpret: bool) -> Scaled:
    """The scores of a tile in the parts of Scaled: the score program applied to Q K^T, before any mask.

    program        at the rows and columns of the tile; None: there is no score_mod
    s              Q K^T, [rows, columns] float32 without scale
    scale          multiplies `s`
    large_scores   scores may be too large to scale before the maximum is subtracted; False without a score_mod

    no score_mod         `tile` is `s` and `factor` the scale; where the scale is not positive, `tile` is the whole score
    large_scores         `tile` is the whole score
    any other program    the parts of `TileProgram.scaled_tile`: the scale, and terms that are cheaper to add to the exponent, are fields of
                         Scaled beside its tile. Of `column_slope` * c the part for c - c % PERIOD is added to the tile here, so the softmax
                         adds only the part for c % PERIOD

    Where `tile` is the whole score, `factor` is 1. In the first two cases all other fields have their defaults.
    """
    if program is None:
        return Scaled(s * f32(scale), 1.0) if scale <= 0 else Scaled(s, scale)
    if large_scores:
        return Scaled(program.tile(s, scale)[0], 1.0)
    scores = program.scaled_tile(s, scale, keep_column_slope=True)
    if scores.column_slope is not None:
        slope = scores.column_slope / f32(scores.factor)
        scores = scores._replace(tile=thread_tiles.add_period_slope(scores.tile, slope, interpret))
    return scores
