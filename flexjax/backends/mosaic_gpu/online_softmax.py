"""The online softmax of a consumer warpgroup: exponentials of a tile of scores, and what keeps their row sums
comparable.

    p = 2^(s log2(e) - m)        m, the reference of a row, follows its running maximum
    total = total * 2^(m_before - m) + rowsum(p)

Everything is in powers of two, since `ex2` is the instruction. A score program whose result has a part that is the
same over the whole row (`Scaled.row_term`) is computed without that part, which does not change the probabilities;
`finish` adds it to the reference.

The softmax lies between two WGMMAs of its warpgroup, so the order of its instructions counts (LOG.md):

- maximum and sum of a row are first taken within a thread, over columns that are PERIOD apart (thread_tiles.py), in
  four chains;
- the sum stays in the threads until the end, so lanes do not exchange it at each step;
- with `lazy_rescale` a reference changes only where the maximum exceeds it by a factor of 2^RESCALE_THRESHOLD. A warp
  votes on that before its lanes exchange maxima. Mostly nothing is above the threshold, and nothing is exchanged or
  rescaled. Probabilities up to 2^RESCALE_THRESHOLD cost no precision.

With a static reference (static_reference.py) there is no maximum at all. Where scores may be too large to scale
before the maximum is subtracted (`large_scores`, analysis/large_scores.py), references are scores. The difference is then
taken before it is scaled, or one FMA does both by the scale of the row (`row_scaled`, row_scales.py). The *unit of
references* is therefore a score times log2(e), or a score with large scores.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu import exponential, registers, row_scales, thread_tiles
from flexjax.backends.mosaic_gpu.tile_values import Scaled
from flexjax.backends.tile_math import LN2, LOG2E
from flexjax.ir.program import Program

RESCALE_THRESHOLD = 8.0
"""Powers of two by which a row maximum may exceed the reference under `lazy_rescale`."""
LOWEST_REFERENCE = float(np.finfo(np.float32).min)
"""The reference of a row before its first score: finite, so that -inf minus it is -inf and not NaN."""
f32 = np.float32


class State(typing.NamedTuple):
    """The softmax between two tiles, both [rows] float32.

    base    the reference of each row, in the unit of references
    total   sum of the exponentials relative to `base`, with `row_scaled` relative to the scale of `base` (row_scales.py); each thread has
            the sum over its own columns
    """

    base: jax.Array
    total: jax.Array


class Rescale(typing.NamedTuple):
    """By how much a tile changes the reference, for the sums and products of the tiles before.

    factor   [rows] float32, what exponentials of the tiles before are multiplied by: e^(reference before - reference now), as scores, with
             `row_scaled` up to what rounding moved both (row_scales.py)
    needed   int32 scalar: 0 where every factor of this warp is known to be 1, so that the product can be skipped, else 1
    """

    factor: jax.Array
    needed: jax.Array


@dataclasses.dataclass(frozen=True)
class OnlineSoftmax:
    """The softmax of one kernel. The reference of a row is what its exponentials are relative to, by default its running maximum; it is
    kept as a score times log2(e), or as a score with `large_scores` (the unit of references).

    shape          of a tile, (rows, columns)
    lazy_rescale   references may lag behind the maximum
    reference      static reference, a score times log2(e) (`static_reference`); None: the running maximum
    polynomials    how many of eight exponentials are polynomials (exponential.py)
    interpret      whether the kernel runs in the simulator
    large_scores   references are scores, not scores times log2(e); `reference` is then None
    program        the score program, None for the identity
    whole_powers   references are integers (multiples of ln 2 with large scores), so that the backward pass can round its weights to those
                   of this pass (tile_math.py)
    row_scaled     exponents of large scores are one FMA each, of the scale of their row (row_scales.py). Only with `large_scores`
    rise           powers of two by which the maximum may exceed the one that a reference follows, under `lazy_rescale`
    below          powers of two by which references lie below the maximum that they follow (float8_products.py). Row maxima are then no
                   result
    sums           the exponentials are summed here. False: P V sums them (float8_products.py), and the caller gives `finish` a state with
                   the sum
    """

    shape: tuple[int, int]
    lazy_rescale: bool
    reference: float | None
    polynomials: int
    interpret: bool
    large_scores: bool = False
    program: Program | None = None
    whole_powers: bool = False
    row_scaled: bool = False
    rise: float = RESCALE_THRESHOLD
    below: float = 0.0
    sums: bool = True

    def _row_vector(self, value: float) -> jax.Array:
        """The row vector, [rows] float32, whose elements are all `value`."""
        return registers.splat(f32(value), "row", self.shape[:1], self.interpret)

    @property
    def start(self) -> State:
        """The state before the first tile: the static or the lowest reference, and sum 0."""
        return State(
            self._row_vector(LOWEST_REFERENCE if self.reference is None else self.reference), self._row_vector(0.0)
        )

    @property
    def no_rescale(self) -> Rescale:
        """The rescaling of a tile that leaves every reference as it was: factors 1, and `needed` 0."""
        return Rescale(self._row_vector(1.0), jnp.int32(0))

    def step(self, scores: Scaled, state: State) -> tuple[jax.Array, Rescale, State]:
        """The exponentials of a tile, [rows, columns] float32 and not yet divided by their sum, how to rescale what
        was summed before, and the state after the tile.

        scores   as `tile_scores.scores_of` gives them: `column_slope` multiplies only the column modulo PERIOD, because
                 the tile contains the rest of the slope
        state    before the tile

        With large scores only `scores.tile` is read, which is the whole score. With a static reference nothing is
        rescaled, and `row_term` is part of the exponent. Otherwise the reference follows the maximum of the scores
        without `row_term`, and the exponentials are without it too, or with `whole_powers` without its `_fraction`; `finish` adds what is
        missing to the reference.
        """
        if self.large_scores:
            return self._step_of_large_scores(scores.tile, state)
        log2_factor = f32(LOG2E * scores.factor)
        if self.reference is not None:
            shift = f32(self.reference)
            if scores.row_term is not None and scores.offset is not None:
                shift = shift - (scores.row_term + scores.offset) * f32(LOG2E)
            p = self._exponentials(scores, log2_factor, shift)
            return p, self.no_rescale, State(state.base, self._total(state, p, None))
        largest = thread_tiles.maximum_by_column(scores.tile, self.interpret)
        if (
            scores.narrow_factor is not None
        ):  # positive factors: the largest product with one factor is the largest score times that
            largest = largest * scores.narrow_factor
        offset = None if scores.offset is None else scores.offset * f32(LOG2E)
        if scores.column_slope is None:
            base, rescale = self._follow_maximum(largest, log2_factor, offset, state.base)
        else:
            largest = largest * log2_factor + self._row_plus_slope(
                self._row_vector(0.0) + (f32(0) if offset is None else offset), scores.column_slope
            )
            base, rescale = self._follow_maximum(largest, f32(1), None, state.base)
        shift = base if offset is None else base - offset
        if scores.row_term is not None and self.whole_powers:
            shift = shift - self._fraction(scores.row_term)
        p = self._exponentials(scores, log2_factor, shift)
        return p, rescale, State(base, self._total(state, p, rescale))

    def _total(self, state: State, p: jax.Array, rescale: Rescale | None) -> jax.Array:
        """The sum of the exponentials after a tile, [rows]: that of `state`, before the tile, made relative to the reference after it, and the
        sums of the tile's exponentials `p`. Without `sums` that of `state`.
        """
        if not self.sums:
            return state.total
        before = state.total if rescale is None else state.total * rescale.factor
        return before + thread_tiles.partial_row_sums(p, self.interpret)

    def _fraction(self, row_term: jax.Array) -> jax.Array:
        """[rows], from -1 to 0: `row_term` * log2(e) less that number rounded up, and 0 where it is infinite or NaN. With `whole_powers` it is
        part of the exponent, so that what `finish` adds to the reference is an integer. `row_term` counts from the first row of
        a tile, and tiles of other kernels begin at other rows: their backward pass could not know which fraction was left out.
        """
        power = row_term * f32(LOG2E)
        return tile_math.power_below(power, tile_math.rounded_up(power))

    def _step_of_large_scores(self, tile: jax.Array, state: State) -> tuple[jax.Array, Rescale, State]:
        """The exponentials of a tile of large scores, [rows, columns] float32, how to rescale what was summed before,
        and the state after the tile.

        tile    [rows, columns] final scores, with the parts that `Scaled` otherwise keeps apart (factor, row and
                column terms) already added
        state   before the tile

        With `row_scaled` the exponents are relative to the `row_scale` of the reference. Otherwise only the difference of a score and
        the reference is scaled by log2(e).
        """
        largest = thread_tiles.maximum_by_column(tile, self.interpret)
        base, rescale = self._follow_maximum(largest, f32(1), None, state.base)
        if self.row_scaled:
            x = row_scales.exponent(tile, row_scales.row_scale(base, self.whole_powers), self.interpret)
        else:
            spread = registers.broadcast_vector(base, "row", self.shape)
            x = tile_math.large_distance(self.program, tile, spread) * f32(LOG2E)
        p = exponential.exp2_tile(x, self.polynomials, self.interpret)
        return p, rescale, State(base, self._total(state, p, rescale))

    def _follow_maximum(
        self, largest: jax.Array, log2_factor: np.float32, offset: jax.Array | None, base: jax.Array
    ) -> tuple[jax.Array, Rescale]:
        """The reference after a tile, [rows], and the rescaling from `base`, the reference before. Not called with a static reference.

        largest       [rows, PERIOD]: maxima of the tile over columns that are PERIOD apart
        log2_factor   multiplies `largest`, which gives the unit of references
        offset        scalar that is added to the product; None: nothing
        base          [rows] float32

        "The maximum" is here the maximum less `below`. The reference never falls. With `lazy_rescale` it rises to the maximum only where the maximum exceeds it by more than `rise` powers
        of two. Without `lazy_rescale` it is the larger of both, and `needed` is always 1. With `whole_powers` it rises to
        `thread_tiles.whole_power` of the maximum instead.
        """
        unit = LN2 if self.large_scores else 1.0
        if self.below:
            offset = jnp.float32(-self.below * unit) if offset is None else offset - f32(self.below * unit)
        if self.lazy_rescale:
            threshold, power = self.rise * unit, LOG2E if self.large_scores else 1.0
            top, factor, needed = thread_tiles.follow_maximum(
                largest, log2_factor, offset, base, threshold, self.interpret, power, self.whole_powers, self.row_scaled
            )
            return top, Rescale(factor, needed)
        top = largest.max(axis=1) * log2_factor
        if offset is not None:
            top = top + offset
        if self.whole_powers:
            top = thread_tiles.whole_power(top, LOG2E if self.large_scores else 1.0)
        top = jnp.maximum(top, base)
        whole = self.whole_powers
        factor = row_scales.rescaling(base, top, self.interpret, whole) if self.row_scaled else self.power(base - top)
        return top, Rescale(factor, jnp.int32(1))

    def _row_plus_slope(self, row: jax.Array, column_slope: jax.Array) -> jax.Array:
        """The narrow tile [rows, PERIOD] of row[r] + column_slope * log2(e) * c at row r and column c.

        row            [rows] float32, in powers of two
        column_slope   scalar, in units of scores
        """
        return thread_tiles.affine_tile(
            row, column_slope * f32(LOG2E), (self.shape[0], thread_tiles.PERIOD), self.interpret
        )

    def _exponentials(self, scores: Scaled, log2_factor: np.float32, shift: jax.Array | np.float32) -> jax.Array:
        """2^(scores * log2(e) - shift), [rows, columns] float32, where the scores are taken without `row_term` and
        `offset`.

        log2_factor   scores.factor * log2(e)
        shift         [rows] or one number, in powers of two

        `narrow_factor` multiplies the tile only if there is no `column_slope`; the two do not occur together. A static
        reference of 0 without a `row_term` is not subtracted.
        """
        if scores.column_slope is not None:
            slope = self._row_plus_slope(
                -shift if isinstance(shift, jax.Array) else self._row_vector(float(-shift)), scores.column_slope
            )
            x = scores.tile * log2_factor + thread_tiles.repeat_columns(slope, self.shape, self.interpret)
            return exponential.exp2_tile(x, self.polynomials, self.interpret)
        if isinstance(shift, jax.Array):
            shift = registers.broadcast_vector(shift, "row", self.shape)
        factor = (
            log2_factor
            if scores.narrow_factor is None
            else thread_tiles.repeat_columns(scores.narrow_factor * log2_factor, self.shape, self.interpret)
        )
        x = scores.tile * factor
        x = x - shift if self.reference != 0.0 or scores.row_term is not None else x
        return exponential.exp2_tile(x, self.polynomials, self.interpret)

    def rescale(self, out: jax.Array, rescale: Rescale) -> jax.Array:
        """`out` made relative to the reference after a tile: each row multiplied by its `rescale.factor`. Called after `step` of that tile,
        before its P V is added.

        out       [rows, value dim] float32, the sum of P V over the tiles before, relative to the reference before the tile
        rescale   that `step` returned for the tile

        With a static reference `out` itself; with `lazy_rescale` warps whose references did not change skip the product.
        """
        if self.reference is not None:
            return out
        if self.lazy_rescale:
            return thread_tiles.scale_rows(out, rescale.factor, rescale.needed, self.interpret)
        return out * registers.broadcast_vector(rescale.factor, "row", out.shape)

    def finish(self, state: State, row_term: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Sums the exponentials of each row over the lanes and returns (reference, sum), both [rows] float32, after the
        last tile.

        state      after the last tile
        row_term   [rows], the part of the scores that `step` left out because it is the same over the row, in units of
                   scores; None: nothing was left out, as always with large scores and with a static reference

        The reference includes `row_term` and has the unit of `State.base`. A row without visible scores has reference
        -inf and sum 0; a `row_term` of -inf hides its row. A visible row whose `row_term` is NaN or +inf has sum NaN. A
        finite `row_term` leaves the sum as it is.

        The sum is relative to the reference, so that with `row_scaled` it is not the sum of the exponentials of the tiles but that times
        `unit`.
        """
        total, top = thread_tiles.sum_lanes(state.total, self.interpret), state.base
        unit = self.unit(state)
        total = total if unit is None else total * unit
        if row_term is not None:  # -inf hides the row; any other value that is not finite is passed on
            off = (row_term == f32(-math.inf)) | (total == f32(0))
            total = jnp.where(off, f32(0), total + f32(0) * row_term)
            top = top + row_term * f32(LOG2E)
            top = top - self._fraction(row_term) if self.whole_powers else top
        return jnp.where(total == f32(0), f32(-math.inf), top), total

    def unit(self, state: State) -> jax.Array | None:
        """What the exponentials of each row are multiplied by to be relative to its reference, [rows]; None, which stands for 1, without
        `row_scaled`.

        state   after the last tile
        """
        if not self.row_scaled:
            return None
        return jnp.exp2(-row_scales.excess(state.base, self.interpret, self.whole_powers))

    def to_reference(self, score: jax.Array) -> jax.Array:
        """A score in the unit of references: times log2(e), or itself with large scores."""
        return score if self.large_scores else score * f32(LOG2E)

    def to_score(self, reference: jax.Array) -> jax.Array:
        """A reference as a score, the inverse of `to_reference`."""
        return reference if self.large_scores else reference * f32(LN2)

    def power(self, difference: jax.Array) -> jax.Array:
        """e^(difference of two scores), from the difference of their references: 2^difference, or with large scores
        2^(difference * log2(e)).
        """
        return jnp.exp2(difference * f32(LOG2E) if self.large_scores else difference)

    def lse(self, reference: jax.Array, total: jax.Array) -> jax.Array:
        """The natural logarithm of the softmax denominator, [rows]; -inf for a row whose total is 0.

        reference   [rows], in the unit of references
        total       [rows], the sum of exponentials relative to `reference`
        """
        if self.large_scores:
            return reference + jnp.log2(total) * f32(LN2)
        return (reference + jnp.log2(total)) * f32(LN2)
