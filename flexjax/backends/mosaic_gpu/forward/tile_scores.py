"""The scores of a tile in the forward kernels: the score program applied to a product of queries and keys."""

import jax
import numpy as np

from flexjax.backends.mosaic_gpu.machine import thread_tiles
from flexjax.backends.mosaic_gpu.programs.tile_programs import TileProgram
from flexjax.backends.mosaic_gpu.programs.tile_values import Scaled

f32 = np.float32


def scores_of(
    program: TileProgram | None, s: jax.Array, scale: float, whole: bool, slack: float | None, keep_factor: bool = False
) -> Scaled:
    """The scores, before any mask, of Q K^T `s` without scale; with `whole` the tile of Scaled is the whole score.

    Those that are weights have a `slack` (TileProgram), and with `keep_factor` are without their factor.
    """
    if program is None:
        return Scaled(s * f32(scale), 1.0) if scale <= 0 else Scaled(s, scale)
    if keep_factor and slack is not None:
        return program.weights_tile(s, scale, slack)
    if whole:
        score, *others = program.tile(s, scale, slack)
        return Scaled(score, 1.0, other_results=tuple(others))
    # Terms that are cheaper to add to the exponent are fields beside the tile.
    scores = program.scaled_tile(s, scale, keep_column_slope=True)
    # The part of `column_slope` * c for c - c % PERIOD is added here; the softmax adds only that of c % PERIOD.
    if scores.column_slope is not None:
        slope = scores.column_slope / f32(scores.factor)
        scores = scores._replace(tile=thread_tiles.add_period_slope(scores.tile, slope))
    return scores
