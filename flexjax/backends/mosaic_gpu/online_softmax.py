"""The running softmax of the forward kernel: exponentials of a tile, relative to a reference that follows the rows.

Powers of two throughout, relative to the part of the scores that is the same on all tiles of a row; that part comes in at the
end. What a step of a warpgroup does here lies between its two products, so the order of instructions counts (NOTES.md):

- the maximum and the sum of a row are first taken within a thread, columns apart by PERIOD (thread_tiles.py) together, in four chains;
- the sum stays so until the end: lanes do not meet for it;
- with `slack` the reference changes only where a maximum has grown by 2^SLACK. A warp votes on that before its lanes meet, and
  mostly that is all: exponentials up to 2^SLACK cost no precision, and nothing that was summed before is rescaled.

Where the scores are bounded (a soft cap), the reference is one number (bounded_scores.py).

Where they may be far out (`far`: an additive mask that leaves nothing of a row, analysis/large_scores.py), references are scores, not
powers of two, and the difference is taken before it is scaled.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu import exponential, memory, thread_tiles
from flexjax.backends.mosaic_gpu.bounded_scores import LN2, LOG2E
from flexjax.ir.program import Program

SLACK = 8.0
NOTHING = float(np.finfo(np.float32).min)
"""The reference of a row of which nothing was seen: finite, so that -inf relative to it is -inf."""
f32 = np.float32


class Scores(typing.NamedTuple):
    """Scores in the form `factor * by * tile + row[:, None] + at + along * (column % PERIOD)`, the factors positive; `by` is narrow
    (thread_tiles.py), `at` and `along` are scalars."""

    tile: jax.Array
    factor: float
    by: jax.Array | None = None
    row: jax.Array | None = None
    at: jax.Array | None = None
    along: jax.Array | None = None


class State(typing.NamedTuple):
    """Between two tiles: base [rows], the reference; total [rows], sums of exponentials, of each thread for itself."""

    base: jax.Array
    total: jax.Array


class Growth(typing.NamedTuple):
    """What a tile means for the sums before it: a factor for each row, and whether this warp has one that is not 1 (int32)."""

    shrink: jax.Array
    any: jax.Array


@dataclasses.dataclass(frozen=True)
class OnlineSoftmax:
    """shape        of a tile, (rows, columns)
    slack        the reference may lag behind the maximum
    reference    what exponentials are relative to, where it need not follow the maximum
    polynomials  how many of eight exponentials are multiplied out (exponential.py)
    far          scores may be far out: references are scores, not powers of two
    program      makes the scores
    """

    shape: tuple[int, int]
    slack: bool
    reference: float | None
    polynomials: int
    interpret: bool
    large: bool = False
    program: Program | None = None

    def _row(self, value: float) -> jax.Array:
        return memory.splat(f32(value), "row", self.shape[:1], self.interpret)

    @property
    def start(self) -> State:
        return State(self._row(NOTHING if self.reference is None else self.reference), self._row(0.0))

    @property
    def no_growth(self) -> Growth:
        return Growth(self._row(1.0), jnp.int32(0))

    def step(self, scores: Scores, state: State) -> tuple[jax.Array, Growth, State]:
        """The exponentials of a tile, what they mean for the sums so far, and the state after it."""
        if self.large:
            return self._step_of_large(scores.tile, state)
        units = f32(LOG2E * scores.factor)
        if self.reference is not None:
            less = f32(self.reference)
            if scores.row is not None and scores.at is not None:
                less = less - (scores.row + scores.at) * f32(LOG2E)
            p = self._powers(scores, units, less)
            return p, self.no_growth, State(state.base, state.total + thread_tiles.sums_of_thread(p, self.interpret))
        largest = thread_tiles.largest_by_column(scores.tile, self.interpret)
        if scores.by is not None:  # factors are positive: the largest of those with one factor, times that
            largest = largest * scores.by
        offset = None if scores.at is None else scores.at * f32(LOG2E)
        if scores.along is None:
            base, growth = self._raised(largest, units, offset, state.base)
        else:
            largest = largest * units + self._rising(
                self._row(0.0) + (f32(0) if offset is None else offset), scores.along
            )
            base, growth = self._raised(largest, f32(1), None, state.base)
        p = self._powers(scores, units, base if offset is None else base - offset)
        return p, growth, State(base, state.total * growth.shrink + thread_tiles.sums_of_thread(p, self.interpret))

    def _step_of_large(self, tile: jax.Array, state: State) -> tuple[jax.Array, Growth, State]:
        """`step` where references are scores; all of a score is in its tile."""
        largest = thread_tiles.largest_by_column(tile, self.interpret)
        base, growth = self._raised(largest, f32(1), None, state.base)
        x = tile_math.large_distance(self.program, tile, memory.stretch(base, "row", self.shape)) * f32(LOG2E)
        p = exponential.exp2_tile(x, self.polynomials, self.interpret)
        total = state.total * growth.shrink + thread_tiles.sums_of_thread(p, self.interpret)
        return p, growth, State(base, total)

    def _raised(
        self, largest: jax.Array, units: np.float32, offset: jax.Array | None, base: jax.Array
    ) -> tuple[jax.Array, Growth]:
        if self.slack:
            slack, power = (SLACK * LN2, LOG2E) if self.large else (SLACK, 1.0)
            raised, shrink, grown = thread_tiles.raised(largest, units, offset, base, slack, self.interpret, power)
            return raised, Growth(shrink, grown)
        top = largest.max(axis=1) * units
        if offset is not None:
            top = top + offset
        top = jnp.maximum(top, base)
        return top, Growth(self.power(base - top), jnp.int32(1))

    def _rising(self, row: jax.Array, along: jax.Array) -> jax.Array:
        """[rows, PERIOD]: what the columns add to `row`, in powers of two."""
        return thread_tiles.affine_tile(row, along * f32(LOG2E), (self.shape[0], thread_tiles.PERIOD), self.interpret)

    def _powers(self, scores: Scores, units: np.float32, less: jax.Array | np.float32) -> jax.Array:
        if scores.along is not None:
            rising = self._rising(-less if isinstance(less, jax.Array) else self._row(float(-less)), scores.along)
            x = scores.tile * units + thread_tiles.repeat_columns(rising, self.shape, self.interpret)
            return exponential.exp2_tile(x, self.polynomials, self.interpret)
        if isinstance(less, jax.Array):
            less = memory.stretch(less, "row", self.shape)
        factor = (
            units if scores.by is None else thread_tiles.repeat_columns(scores.by * units, self.shape, self.interpret)
        )
        x = scores.tile * factor
        x = x - less if self.reference != 0.0 or scores.row is not None else x
        return exponential.exp2_tile(x, self.polynomials, self.interpret)

    def finish(self, state: State, common: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """(reference, sum) of each row; `common` is the part of its scores that was left out. Reference -inf: nothing is on."""
        total, top = thread_tiles.join_lanes(state.total, self.interpret), state.base
        if common is not None:  # -inf switches a row off; what else is not finite shows
            off = (common == f32(-math.inf)) | (total == f32(0))
            total = jnp.where(off, f32(0), total + f32(0) * common)
            top = top + common * f32(LOG2E)
        return jnp.where(total == f32(0), f32(-math.inf), top), total

    def to_reference(self, score: jax.Array) -> jax.Array:
        """A score in the units of references."""
        return score if self.large else score * f32(LOG2E)

    def to_score(self, reference: jax.Array) -> jax.Array:
        return reference if self.large else reference * f32(LN2)

    def power(self, difference: jax.Array) -> jax.Array:
        """The exponential of a difference of references."""
        return jnp.exp2(difference * f32(LOG2E) if self.large else difference)

    def lse(self, reference: jax.Array, total: jax.Array) -> jax.Array:
        """The logarithm of a sum of exponentials relative to a reference, as a score."""
        if self.large:
            return reference + jnp.log2(total) * f32(LN2)
        return (reference + jnp.log2(total)) * f32(LN2)
