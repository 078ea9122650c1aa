"""Spreads a window of diagonals over a tile, and sums a tile along its diagonals, with aligned slices and few rolls.

An entry (i, j) of a tile reads element `first + j - i` of a window: the part of a diagonal array (geometry.py) that has
the diagonals of the tile. TPUs have no such skewed read, so a window is stored *skewed*, in 8 copies: row r is the
window shifted right by r. Rows 8 g .. 8 g + 7 of the tile are then one slice of the skewed window that starts at lane
`first - 8 g`; one roll serves all groups g with the same start modulo 128 lanes. `toeplitz_sums` is the transpose,
which gradients need.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends.mosaic_tpu.vector_ops import LANES
from flexjax.integers import cdiv

SKEW = 8  # rows of a skewed window: the sublanes of one vector register


def skewed(diagonals: jax.Array) -> jax.Array:
    """[..., n] in 8 copies [..., 8, n]: out[..., r, x] = diagonals[..., x - r], 0 for x < r."""
    rows = [
        jnp.pad(diagonals, [(0, 0)] * (diagonals.ndim - 1) + [(r, 0)])[..., : diagonals.shape[-1]] for r in range(SKEW)
    ]
    return jnp.stack(rows, axis=-2)


def unskewed_sums(array: jax.Array) -> jax.Array:
    """The transpose of `skewed`: out[..., x] = sum over r of array[..., r, x + r], from [..., 8, n] to [..., n]."""
    length = array.shape[-1]
    widths = [(0, 0)] * (array.ndim - 2)
    parts = [jnp.pad(array[..., r, r:], [*widths, (0, r)])[..., :length] for r in range(SKEW)]
    return jnp.asarray(sum(parts))


def toeplitz(window: jax.Array, rows: int, cols: int, first: int) -> jax.Array:
    """A skewed window [8, lanes] spread over a tile [rows, cols], so that each diagonal of the tile has one value.

        out[i, j] = window[i % 8, first + j - 8 * (i // 8)]

    `first` is so large that no row starts before lane 0.
    """
    rolled: dict[int, jax.Array] = {}
    groups = []
    for g in range(cdiv(rows, SKEW)):
        at = first - SKEW * g
        phase = at % LANES
        if phase not in rolled:
            rolled[phase] = window if phase == 0 else _roll(window, window.shape[1] - phase)
        base = at - phase
        groups.append(rolled[phase][:, base : base + cols])
    out = groups[0] if len(groups) == 1 else jnp.concatenate(groups, axis=0)
    return out[:rows]


def toeplitz_sums(tile: jax.Array, width: int, first: int) -> jax.Array:
    """The transpose of `toeplitz`: the sums of a tile [rows, cols] along its diagonals, as a skewed window [8, width].

    tile[i, j] is added at (i % 8, first + j - 8 * (i // 8)); `unskewed_sums` then adds the 8 rows.
    """
    rows, cols = tile.shape
    if rows % SKEW:
        tile = jnp.concatenate([tile, jnp.zeros((SKEW - rows % SKEW, cols), tile.dtype)], axis=0)
    sums: dict[int, jax.Array] = {}
    for g in range(cdiv(rows, SKEW)):
        at = first - SKEW * g
        phase = at % LANES
        base = at - phase
        band = tile[g * SKEW : (g + 1) * SKEW]
        pieces = [jnp.zeros((SKEW, base), tile.dtype)] if base else []
        pieces.append(band)
        if width - base - cols:
            pieces.append(jnp.zeros((SKEW, width - base - cols), tile.dtype))
        band = jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else band
        sums[phase] = band if phase not in sums else sums[phase] + band
    total = None
    for phase, part in sums.items():
        part = part if phase == 0 else _roll(part, phase)
        total = part if total is None else total + part
    assert total is not None
    return total


def _roll(window: jax.Array, shift: int) -> jax.Array:
    """Rolled right by `shift` lanes: what leaves on the right comes in on the left."""
    # an int would be int64 with x64
    return pltpu.roll(window, np.int32(shift), 1)  # pyright: ignore[reportArgumentType]
