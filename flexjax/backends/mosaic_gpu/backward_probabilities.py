"""The probabilities of one tile of the backward pass, and the cotangents of its scores and loads that follow from them.

backward_tile_math.py computes the probabilities p from the scores. With dP = dO V^T and delta, the row statistic, the cotangents are

    dS = p * d mod / d score * (dP - delta)
    g  = p * d mod / d load * (dP - delta)

"mod" is score_mod, a "load" one of its reads of a captured array. Where both passes round the weights alike
(`KernelPlan.rounds_weights_alike`), the exponentials are relative to a `WeightReference`, which makes them the weights of the forward
kernel up to a whole power of two, and g takes the rounded weights.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu import row_scales
from flexjax.backends.mosaic_gpu.thread_tiles import whole_power
from flexjax.backends.tile_math import LOG2E
from flexjax.plan.kernel_plan import KernelPlan


class WeightReference(typing.NamedTuple):
    """What exponentials are relative to, [rows] each, so that they are the weights of the forward kernel up to a whole power of two.

    lse2    takes the place of lse2
    scale   about 1 to 2: the exponentials times it are the probabilities
    """

    lse2: jax.Array
    scale: jax.Array


def weight_reference(plan: KernelPlan, lse2: jax.Array) -> WeightReference:
    """The reference of the exponentials of some rows, whose weights both passes round alike.

    lse2   of row_statistics.py, [rows] (lse where scores may be large); where it is +inf the reference is too

    The reference is lse2 rounded up to an integer, so the scale is from 1 to 2. Where scores may be large, the
    reference is that of a row whose maximum is lse, by the same operations as in the forward kernel: an error of 1e-5 of the
    reference would round an entry in 400 to the other neighbour. lse itself is the reference if it is too large.
    """
    if may_be_large(plan.score):
        reference = whole_power(lse2, LOG2E)
        above = -row_scales.exponent(lse2, row_scales.row_scale(reference, True), plan.options.interpret)
        return WeightReference(reference, jnp.exp2(jnp.where(jnp.abs(lse2) < jnp.inf, above, 0.0)))
    fraction = tile_math.power_below(lse2, tile_math.rounded_up(lse2))
    return WeightReference(lse2 - fraction, jnp.exp2(-fraction))


class Probabilities(typing.NamedTuple):
    """What the gradients of one tile need, each in the shape of the tile. "mod" is score_mod, a "load" one of its reads
    of a captured array; dP = dO V^T, and delta is the row statistic.

    p             probabilities divided by `scale`, 0 where the mask is off
    slope         d mod / d score; None where it is the constant 1, and where `TileMath` has `loads_only`, which need none
    dropout       the dropout multiplier, None without dropout
    load_slopes   d mod / d load for each load that `TileMath` was asked for; None where it is the constant 1
    rounded       p times the dropout multiplier, rounded as the forward pass rounded it; None where the passes do not
                  round weights alike (`TileMath.rounds_weights`)
    load_finite   for each load whether d mod / d load is known to be finite, also where the mask is off
    scale         [rows], about 1 to 2, by which p and `rounded` are to be multiplied; None, which stands for 1, where `rounded` is
                  None
    """

    p: jax.Array
    slope: jax.Array | None
    dropout: jax.Array | None
    load_slopes: tuple[jax.Array | None, ...]
    load_finite: tuple[bool, ...]
    rounded: jax.Array | None = None
    scale: jax.Array | None = None

    def weights(self) -> jax.Array:
        """What multiplies V in the forward pass: p times the dropout multiplier, or p without dropout (`dropout` None), in the shape
        and dtype of p. It is not rounded. Only where there is no `scale`.
        """
        assert self.scale is None
        return self.p if self.dropout is None else self.p * self.dropout

    def factor(self) -> jax.Array:
        """p * d mod / d score in the shape of the tile, and 0 wherever p is 0: ds = factor * (dP - delta), dP and delta being
        `scaled`. Not for a `TileMath` with `loads_only`, which does not compute d mod / d score.
        """
        return self._times(self.p, self.slope)

    def scaled(self, dp: jax.Array, delta: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """(dP, delta) times `scale`, by which p is then multiplied in every cotangent; delta is None only where `scale` is."""
        if self.scale is None:
            return dp, delta
        assert delta is not None
        scale = lax.broadcast_in_dim(self.scale, self.p.shape, (0,))
        return dp * scale, delta * scale

    def cotangents(
        self, factor: jax.Array, dp: jax.Array, delta: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """(dS, the cotangents of the values that each load read), each in the shape of the tile, for a `TileMath` with `loads_too`.

        factor      that `factor` returned, which may come before dP
        dp, delta   as for `cotangent`, `scaled`
        """
        if self.rounded is None or factor is not self.p or self.dropout is not None:
            ds, shared = self.cotangent(factor, dp, delta), self.rounded is None and factor is self.p
            same = shared and all(slope is None for slope in self.load_slopes)
            return ds, (ds,) * len(self.load_slopes) if same else self.load_cotangents(dp, delta)
        assert delta is not None  # both cotangents take one product with delta
        return self.p * dp - self.p * delta, self.load_cotangents(dp, delta)

    def load_cotangents(self, dp: jax.Array, delta: jax.Array | None) -> tuple[jax.Array, ...]:
        """The cotangent of the values that a load read, in the shape of the tile, for each load that `TileMath` was asked for;
        divided by `scale` unless dP and delta are `scaled`.

        dp, delta   as for `cotangent`; delta may be None only if `rounded` is

        Without `rounded` it is p * (dP - delta), otherwise rounded * dP - p * delta, times d mod / d load: its sum along a row is
        then free of what rounding the weights does to delta (`KernelPlan.rounds_weights_alike`). It is 0 wherever p is 0.
        """
        loads = tuple(zip(self.load_slopes, self.load_finite, strict=True))
        if self.rounded is None:
            factors = (self._times(self.p, slope, finite) for slope, finite in loads)
            return tuple(self.cotangent(factor, dp, delta) for factor in factors)
        assert delta is not None
        whole = self.rounded * dp - self.p * delta
        return tuple(self._times(whole, slope, finite) for slope, finite in loads)

    def _times(self, tile: jax.Array, slope: jax.Array | None, finite: bool = False) -> jax.Array:
        """tile * slope, and 0 wherever p is 0, because a derivative that is not `finite` may be NaN there; `tile` without a slope."""
        if slope is None:
            return tile
        return tile * slope if finite else jnp.where(self.p > 0.0, tile * slope, 0.0)

    def cotangent(self, factor: jax.Array, dp: jax.Array, delta: jax.Array | None) -> jax.Array:
        """factor * (dP - delta) in the shape of the tile: a cotangent of the scores, or of the values that a load
        read.

        factor   p times a derivative
        dp       dO V^T, without dropout
        delta    broadcast to the tile; None where dp already contains -delta (`TileMath.starts_at_minus_delta`)
        """
        if delta is None:
            return factor * dp
        return factor * ((dp if self.dropout is None else dp * self.dropout) - delta)
