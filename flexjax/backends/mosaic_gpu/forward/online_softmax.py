"""The online softmax of a warpgroup, by kind: exponentials of a tile, and what keeps row sums comparable.

    p = 2^(s log2(e) - m)        m, the reference of a row
    total = total * 2^(m_before - m) + rowsum(p)

    RunningMaximum    m follows the maximum of the row
    StaticReference   m is one number for all rows, because the scores are bounded (static_reference.py)
    LargeScores       scores may be too large to scale before the maximum is subtracted (analysis/large_scores.py):
                      references are scores, and the difference of score and reference is scaled
    RowScaled         LargeScores by one FMA an element, with a scale for each row (machine/row_scales.py)
    PlainSums         no softmax: the scores are the weights of a weighted plan, 0 at hidden entries

The *unit of references* is a score times log2(e), or a score for LargeScores and RowScaled. A part of the scores that
is the same over the whole row (`Scaled.row_term`) does not change the probabilities: `finish` adds it to the reference.

setup.py chooses the kind, consumers call it through `QueryRows.softmax` (rows.py); exponentials are those of
machine/exponential.py, maxima and sums those of machine/thread_tiles.py.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu.forward.static_reference import static_reference
from flexjax.backends.mosaic_gpu.machine import exponential, registers, row_scales, thread_tiles
from flexjax.backends.mosaic_gpu.programs.tile_values import Scaled
from flexjax.backends.tile_math import LN2, LOG2E
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan

RESCALE_THRESHOLD = 8.0
"""Powers of two by which a row maximum may exceed the reference under `lazy_rescale`; weights up to 2^8 are precise."""
# finite, so that -inf minus it is -inf and not NaN
LOWEST_REFERENCE = float(np.finfo(np.float32).min)
f32 = np.float32


class State(typing.NamedTuple):
    """The softmax between two tiles, both [rows] float32."""

    base: jax.Array  # the reference of each row
    total: jax.Array  # the sum of the exponentials relative to `base`: each thread sums its own columns until `finish`
    # like `total`, of the exponentials times each function whose expectation is asked for
    sums: tuple[jax.Array, ...] = ()
    # the largest score of each row as a reference, where `base` lags behind and it is a result
    top: jax.Array | None = None


class Rescale(typing.NamedTuple):
    """By how much a tile changes the reference, for the sums and products of the tiles before."""

    factor: jax.Array  # [rows] float32: e^(reference before - reference now), as scores
    # int32 scalar: 0 where every factor of this warp is known to be 1, so that the product can be skipped
    needed: jax.Array


@dataclasses.dataclass(frozen=True)
class Softmax:
    """What the kinds of softmax have in common; `step` is theirs."""

    shape: tuple[int, int]  # (rows, columns) of a tile
    polynomials: int = 0  # how many of eight exponentials are polynomials (machine/exponential.py)
    # references are whole powers of two, so that the backward pass can round its weights to these (tile_math.py)
    whole_powers: bool = False
    functions: int = 0  # of which expectations are asked for
    follows_top: bool = False  # the largest score of a row is a result, and `base` may lag behind it

    takes_whole_scores: typing.ClassVar[bool] = False  # `step` reads `Scaled.tile` alone, which is the whole score
    leaves_row_term: typing.ClassVar[bool] = False  # `step` leaves `Scaled.row_term` to `finish`
    rescales: typing.ClassVar[bool] = True  # references may change from tile to tile
    first_reference: typing.ClassVar[float] = LOWEST_REFERENCE
    hidden: typing.ClassVar[float] = -math.inf  # the score of a hidden entry

    @property
    def start(self) -> State:
        sums = tuple(self._row_vector(0.0) for _ in range(self.functions))
        top = self._row_vector(LOWEST_REFERENCE) if self.follows_top else None
        return State(self._row_vector(self.first_reference), self._row_vector(0.0), sums, top)

    @property
    def no_rescale(self) -> Rescale:
        return Rescale(self._row_vector(1.0), jnp.int32(0))

    def step(self, scores: Scaled, state: State) -> tuple[jax.Array, Rescale, State]:
        """(exponentials of a tile, [rows, columns] float32, before the division by their sum, rescaling, state).

        `scores.column_slope` multiplies only the column modulo PERIOD, because the tile contains the rest of the slope.
        """
        raise NotImplementedError

    def sums_after(
        self, p: jax.Array, values: tuple[jax.Array, ...], before: State, rescale: Rescale, masked: bool
    ) -> tuple[jax.Array, ...]:
        """`State.sums` after a step that gave `p`, of functions with `values`; `masked`: some entries may be hidden."""
        terms = (p * x for x in values)
        if masked:  # a function may be NaN where p is 0
            terms = (jnp.where(p == f32(0), f32(0), term) for term in terms)
        sums = (x * rescale.factor for x in before.sums) if self.rescales else before.sums
        return tuple(x + thread_tiles.partial_row_sums(term) for x, term in zip(sums, terms, strict=True))

    def rescale(self, out: jax.Array, rescale: Rescale) -> jax.Array:
        """`out`, [rows, value dim], the sum of P V over the tiles before, relative to the reference after a tile."""
        raise NotImplementedError

    def finish(self, state: State, row_term: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """(reference, sum) of each row after the last tile, [rows] float32; -inf and 0 for hidden rows.

        row_term   [rows], what `step` left out of the scores; -inf hides its row, NaN and +inf make the sum NaN
        """
        total, top = thread_tiles.sum_lanes(state.total), state.base
        unit = self.unit(state)
        total = total if unit is None else total * unit
        if row_term is not None:
            off = (row_term == f32(-math.inf)) | (total == f32(0))
            total = jnp.where(off, f32(0), total + f32(0) * row_term)
            top = top + row_term * f32(LOG2E)
            top = top - self._fraction(row_term) if self.whole_powers else top
        return jnp.where(total == f32(0), f32(-math.inf), top), total

    def largest(self, state: State, row_term: jax.Array | None, top: jax.Array) -> jax.Array:
        """The largest score of each row as a reference, -inf without visible scores; `top` is that of `finish`."""
        if state.top is None:
            return top
        return dataclasses.replace(self, whole_powers=False).finish(state._replace(base=state.top), row_term)[0]

    def unit(self, state: State) -> jax.Array | None:
        """[rows], what makes the exponentials relative to the reference after the last tile; None for 1."""
        return None

    # ----------------------------------------------------------------- the unit of references

    def to_reference(self, score: jax.Array) -> jax.Array:
        return score * f32(LOG2E)

    def to_score(self, reference: jax.Array) -> jax.Array:
        return reference * f32(LN2)

    def power(self, difference: jax.Array) -> jax.Array:
        """e^(difference of two scores), from the difference of their references."""
        return jnp.exp2(difference)

    def lse(self, reference: jax.Array, total: jax.Array) -> jax.Array:
        """The natural logarithm of the softmax denominator, [rows]; -inf for a row whose total is 0."""
        return (reference + jnp.log2(total)) * f32(LN2)

    # ----------------------------------------------------------------- what becomes of the sums

    def out_factor(self, total: jax.Array, dead: jax.Array) -> jax.Array | None:
        """[rows], what the sum of P V is multiplied by, None for 1; `dead` are the rows whose total is 0."""
        return jnp.where(dead, f32(0), f32(1) / total)  # a row that row_term hides may have products in `out`

    def statistic(self, reference: jax.Array, total: jax.Array, dead: jax.Array) -> jax.Array:
        """[rows], what the call returns as lse."""
        return jnp.where(dead, f32(-math.inf), self.lse(reference, total))

    # ----------------------------------------------------------------- what kinds share

    def _row_vector(self, value: float) -> jax.Array:
        return registers.splat(f32(value), "row", self.shape[:1])

    def _total(self, state: State, p: jax.Array, rescale: Rescale | None) -> jax.Array:
        before = state.total if rescale is None else state.total * rescale.factor
        return before + thread_tiles.partial_row_sums(p)

    def _fraction(self, row_term: jax.Array) -> jax.Array:
        """[rows], from -1 to 0: `row_term` * log2(e) less itself rounded up; 0 where it is infinite or NaN."""
        # in the exponent, so that `finish` adds an integer: `row_term` counts from a tile's first row, kernels differ
        power = row_term * f32(LOG2E)
        return tile_math.power_below(power, tile_math.rounded_up(power))

    def _maxima(
        self, scores: Scaled, log2_factor: np.float32
    ) -> tuple[jax.Array, np.float32, jax.Array | None, jax.Array | None]:
        """(maxima of a tile over columns that are PERIOD apart, [rows, PERIOD], the factor and the scalar addend that
        make powers of two of them, `scores.offset` in powers of two), without `row_term`.
        """
        largest = thread_tiles.maximum_by_column(scores.tile)
        if scores.narrow_factor is not None:  # positive: the largest product with one of them has the largest score
            largest = largest * scores.narrow_factor
        offset = scores.offset
        if offset is not None:
            offset = thread_tiles.times(offset, f32(LOG2E)) if offset.ndim else offset * f32(LOG2E)
        if scores.column_slope is not None:
            row = self._row_vector(0.0) + (f32(0) if offset is None else offset)
            return largest * log2_factor + self._row_plus_slope(row, scores.column_slope), f32(1), None, offset
        if offset is not None and offset.ndim:
            spread = registers.broadcast_vector(offset, "row", (self.shape[0], thread_tiles.PERIOD))
            return largest * log2_factor + spread, f32(1), None, offset
        return largest, log2_factor, offset, offset

    def _top(self, largest: jax.Array, factor: np.float32, addend: jax.Array | None, state: State) -> jax.Array | None:
        """`State.top` after a tile, from what `_maxima` gives; the addend may be [rows]."""
        if state.top is None:
            return None
        own = largest.max(axis=1) * factor
        return jnp.maximum(state.top, own if addend is None else own + addend)

    def _exponentials(
        self, scores: Scaled, log2_factor: np.float32, shift: jax.Array | np.float32, subtract: bool = True
    ) -> jax.Array:
        """2^(scores * log2(e) - shift), [rows, columns] float32, without `row_term` and `offset`.

        shift      [rows] or one number, in powers of two
        subtract   False: `shift` is known to be 0
        """
        if scores.column_slope is not None:
            row = -shift if isinstance(shift, jax.Array) else self._row_vector(float(-shift))
            slope = self._row_plus_slope(row, scores.column_slope)
            x = scores.tile * log2_factor + thread_tiles.repeat_columns(slope, self.shape)
            return exponential.exp2_tile(x, self.polynomials)
        if isinstance(shift, jax.Array):
            shift = registers.broadcast_vector(shift, "row", self.shape)
        factor = (
            log2_factor
            if scores.narrow_factor is None
            else thread_tiles.repeat_columns(scores.narrow_factor * log2_factor, self.shape)
        )
        x = scores.tile * factor
        x = x - shift if subtract else x
        return exponential.exp2_tile(x, self.polynomials)

    def _row_plus_slope(self, row: jax.Array, column_slope: jax.Array) -> jax.Array:
        """row[r] + column_slope * log2(e) * c at row r and column c, [rows, PERIOD]; `row` is in powers of two."""
        return thread_tiles.affine_tile(row, column_slope * f32(LOG2E), (self.shape[0], thread_tiles.PERIOD))


@dataclasses.dataclass(frozen=True)
class StaticReference(Softmax):
    """Every reference is the same number: there is no maximum, and nothing is rescaled."""

    reference: float = 0.0  # a score times log2(e)
    rescales: typing.ClassVar[bool] = False

    @property
    def first_reference(self) -> float:
        return self.reference

    def step(self, scores: Scaled, state: State) -> tuple[jax.Array, Rescale, State]:
        """See Softmax; `row_term` is part of the exponent."""
        shift = f32(self.reference)
        if scores.row_term is not None and scores.offset is not None:
            shift = shift - (scores.row_term + scores.offset) * f32(LOG2E)
        subtract = self.reference != 0.0 or scores.row_term is not None
        log2_factor = f32(LOG2E * scores.factor)
        top = None
        if state.top is not None:
            largest, factor, addend, _ = self._maxima(scores, log2_factor)
            if scores.row_term is not None:
                row = scores.row_term * f32(LOG2E)
                addend = row if addend is None else addend + row
            top = self._top(largest, factor, addend, state)
        p = self._exponentials(scores, log2_factor, shift, subtract)
        return p, self.no_rescale, State(state.base, self._total(state, p, None), top=top)

    def rescale(self, out: jax.Array, rescale: Rescale) -> jax.Array:
        return out


@dataclasses.dataclass(frozen=True)
class RunningMaximum(Softmax):
    """The reference of a row follows its running maximum, and never falls.

    The softmax lies between two WGMMAs of its warpgroup, so the order of its instructions counts: maximum and sum of a
    row are first taken within a thread, over columns that are PERIOD apart (machine/thread_tiles.py), in four chains.
    """

    # a reference rises only where the maximum exceeds it by more than `rise`; a warp votes before its lanes exchange
    # maxima, and mostly nothing is exchanged or rescaled
    lazy_rescale: bool = False
    rise: float = RESCALE_THRESHOLD  # powers of two by which the maximum may exceed the one that a reference follows
    # powers of two by which references lie below that maximum (hopper_float8.py); row maxima are then no result
    below: float = 0.0
    # False: P V sums the exponentials (hopper_float8.py), and the caller gives `finish` a state with the sum
    sums: bool = True
    leaves_row_term: typing.ClassVar[bool] = True
    powers_in_unit: typing.ClassVar[float] = 1.0  # powers of two in one unit of a reference
    row_scaled: typing.ClassVar[bool] = False

    def step(self, scores: Scaled, state: State) -> tuple[jax.Array, Rescale, State]:
        """See Softmax; the exponentials are without `row_term`, or with `whole_powers` without its `_fraction`."""
        log2_factor = f32(LOG2E * scores.factor)
        largest, factor, addend, offset = self._maxima(scores, log2_factor)
        base, rescale, top = self._follow_maximum(largest, factor, addend, state)
        shift = base if offset is None else base - offset
        if scores.row_term is not None and self.whole_powers:
            shift = shift - self._fraction(scores.row_term)
        p = self._exponentials(scores, log2_factor, shift)
        return p, rescale, State(base, self._total(state, p, rescale), top=top)

    def rescale(self, out: jax.Array, rescale: Rescale) -> jax.Array:
        """See Softmax."""
        # warps whose references did not change skip the product
        if self.lazy_rescale:
            return thread_tiles.scale_rows(out, rescale.factor, rescale.needed)
        return out * registers.broadcast_vector(rescale.factor, "row", out.shape)

    def _follow_maximum(
        self, largest: jax.Array, log2_factor: np.float32, offset: jax.Array | None, state: State
    ) -> tuple[jax.Array, Rescale, jax.Array | None]:
        """The reference after a tile, [rows], the rescaling from that of `state`, the one before, and `State.top`.

        largest       [rows, PERIOD]: maxima of the tile over columns that are PERIOD apart
        log2_factor   multiplies `largest`, which gives the unit of references
        offset        scalar that is added to the product
        """
        base, powers = state.base, self.powers_in_unit
        highest = self._top(largest, log2_factor, offset, state)
        unit = 1.0 if powers == 1.0 else LN2
        if self.below:
            offset = jnp.float32(-self.below * unit) if offset is None else offset - f32(self.below * unit)
        if self.lazy_rescale:
            top, factor, needed = thread_tiles.follow_maximum(
                largest, log2_factor, offset, base, self.rise * unit, powers, self.whole_powers, self.row_scaled
            )
            return top, Rescale(factor, needed), highest
        top = largest.max(axis=1) * log2_factor
        if offset is not None:
            top = top + offset
        if self.whole_powers:
            top = thread_tiles.whole_power(top, powers)
        top = jnp.maximum(top, base)
        return top, Rescale(self._rescaling(base, top), jnp.int32(1)), highest

    def _total(self, state: State, p: jax.Array, rescale: Rescale | None) -> jax.Array:
        return super()._total(state, p, rescale) if self.sums else state.total

    def _rescaling(self, before: jax.Array, now: jax.Array) -> jax.Array:
        """[rows], the factor of sums relative to the reference `before` where `now` becomes it."""
        return self.power(before - now)


@dataclasses.dataclass(frozen=True)
class LargeScores(RunningMaximum):
    """References are scores, and the difference of a score and its reference is scaled by log2(e)."""

    program: Program | None = None  # the score program, by which the difference is taken (`tile_math.large_distance`)
    takes_whole_scores: typing.ClassVar[bool] = True
    leaves_row_term: typing.ClassVar[bool] = False
    powers_in_unit: typing.ClassVar[float] = LOG2E

    def step(self, scores: Scaled, state: State) -> tuple[jax.Array, Rescale, State]:
        largest = thread_tiles.maximum_by_column(scores.tile)
        base, rescale, top = self._follow_maximum(largest, f32(1), None, state)
        p = exponential.exp2_tile(self._exponents(scores.tile, base), self.polynomials)
        return p, rescale, State(base, self._total(state, p, rescale), top=top)

    def _exponents(self, tile: jax.Array, base: jax.Array) -> jax.Array:
        """The powers of two of a tile of scores, [rows, columns], relative to the references."""
        spread = registers.broadcast_vector(base, "row", self.shape)
        return tile_math.large_distance(self.program, tile, spread) * f32(LOG2E)

    def to_reference(self, score: jax.Array) -> jax.Array:
        return score

    def to_score(self, reference: jax.Array) -> jax.Array:
        return reference

    def power(self, difference: jax.Array) -> jax.Array:
        return jnp.exp2(difference * f32(LOG2E))

    def lse(self, reference: jax.Array, total: jax.Array) -> jax.Array:
        return reference + jnp.log2(total) * f32(LN2)


@dataclasses.dataclass(frozen=True)
class RowScaled(LargeScores):
    """Exponents are relative to the `row_scale` of the reference: one FMA each."""

    row_scaled: typing.ClassVar[bool] = True

    def unit(self, state: State) -> jax.Array:
        return jnp.exp2(-row_scales.excess(state.base, self.whole_powers))

    def _exponents(self, tile: jax.Array, base: jax.Array) -> jax.Array:
        return row_scales.exponent(tile, row_scales.row_scale(base, self.whole_powers))

    def _rescaling(self, before: jax.Array, now: jax.Array) -> jax.Array:
        return row_scales.rescaling(before, now, self.whole_powers)


@dataclasses.dataclass(frozen=True)
class PlainSums(Softmax):
    """No softmax: a score is the weight of its value, and lse is the sum of a row. There are no references."""

    sums: bool = True  # whether the sum is a result
    takes_whole_scores: typing.ClassVar[bool] = True
    rescales: typing.ClassVar[bool] = False
    first_reference: typing.ClassVar[float] = 0.0
    hidden: typing.ClassVar[float] = 0.0

    def step(self, scores: Scaled, state: State) -> tuple[jax.Array, Rescale, State]:
        after = State(state.base, self._total(state, scores.tile, None)) if self.sums else state
        return scores.tile, self.no_rescale, after

    def rescale(self, out: jax.Array, rescale: Rescale) -> jax.Array:
        return out

    def finish(self, state: State, row_term: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return state.base, thread_tiles.sum_lanes(state.total)

    def out_factor(self, total: jax.Array, dead: jax.Array) -> None:
        return None

    def statistic(self, reference: jax.Array, total: jax.Array, dead: jax.Array) -> jax.Array:
        return total


def softmax_of(
    plan: KernelPlan,
    shape: tuple[int, int],
    *,
    lazy_rescale: bool,
    score: Program | None,
    polynomials: int = 0,
    whole_powers: bool = False,
    row_scaled: bool = False,
    follows_top: bool = False,
) -> Softmax:
    """The kind of softmax of a plan, for tiles of `shape`.

    score        the score program as the kernel evaluates it
    row_scaled   large scores have a scale for each row
    follows_top  the largest scores are a result, and references may lag behind them
    """
    common: typing.Any = dict(
        shape=shape,
        polynomials=polynomials,
        whole_powers=whole_powers,
        functions=plan.expectations,
        follows_top=follows_top,
    )
    if plan.weighted:
        return PlainSums(shape, sums=plan.total, functions=plan.expectations)
    if may_be_large(plan.score):
        kind = RowScaled if row_scaled else LargeScores
        return kind(**common, lazy_rescale=lazy_rescale, program=score)
    reference = static_reference(plan)
    if reference is not None:
        return StaticReference(**common, reference=reference)
    return RunningMaximum(**common, lazy_rescale=lazy_rescale)
