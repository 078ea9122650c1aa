"""The probabilities of one tile of the backward pass, and the cotangents of its scores and loads that follow from them.

tile_math.py computes the probabilities p from the scores. With dP = dO V^T and the row statistic delta, cotangents are

    dS = p * d mod / d score * (dP - delta)
    g  = p * d mod / d load * (dP - delta)

"mod" is score_mod, a "load" one of its reads of a captured array. Where both passes round the weights alike
(`KernelPlan.rounds_weights_alike`), the exponentials are relative to a `WeightReference`, which makes them the weights
of the forward kernel up to a whole power of two, and g takes the rounded weights. Of a weighted plan mod is the weight
itself, p = mod, and the cotangents have no factor p.

Beside expectations (passes/expectations.py) the derivative program has a second group, fbar and its derivatives:

    dS = p * d mod / d score * (dP - delta + fbar) + p * d fbar / d score        and so g
"""

import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu.machine import row_scales
from flexjax.backends.mosaic_gpu.machine.thread_tiles import whole_power
from flexjax.backends.tile_math import LOG2E
from flexjax.plan.kernel_plan import KernelPlan


class WeightReference(typing.NamedTuple):
    """What exponentials are relative to, [rows] each, to be the weights of the forward kernel."""

    lse2: jax.Array  # takes the place of lse2
    scale: jax.Array  # about 1 to 2: the exponentials times it are the probabilities


def weight_reference(plan: KernelPlan, lse2: jax.Array) -> WeightReference:
    """The reference of the exponentials of some rows, [rows] each; where lse2 is +inf the reference is too."""
    # By the operations of the forward kernel on a row whose maximum is lse: an error of 1e-5 of the reference would
    # round an entry in 400 to the other neighbour. lse itself is the reference if it is too large.
    if may_be_large(plan.score):
        reference = whole_power(lse2, LOG2E)
        above = -row_scales.exponent(lse2, row_scales.row_scale(reference, True))
        return WeightReference(reference, jnp.exp2(jnp.where(jnp.abs(lse2) < jnp.inf, above, 0.0)))
    # lse2 rounded up to an integer, so the scale is from 1 to 2
    fraction = tile_math.power_below(lse2, tile_math.rounded_up(lse2))
    return WeightReference(lse2 - fraction, jnp.exp2(-fraction))


class Probabilities(typing.NamedTuple):
    """What the gradients of one tile need, each in the shape of the tile."""

    p: jax.Array  # divided by `scale`, 0 where the mask is off
    slope: jax.Array | None  # d mod / d score; None: the constant 1, or not needed (`loads_only`)
    dropout: jax.Array | None  # the multiplier
    load_slopes: tuple[jax.Array | None, ...]  # d mod / d load; None: the constant 1
    load_finite: tuple[bool, ...]  # whether d mod / d load is known to be finite, also where the mask is off
    # p times the dropout multiplier, rounded as the forward pass rounded it, where `TileMath.rounds_weights`
    rounded: jax.Array | None = None
    scale: jax.Array | None = None  # [rows], about 1 to 2, a factor of p and `rounded`; None: 1
    weighted: bool = False  # no slope is None then, and those of hidden entries are 0
    value: jax.Array | None = None  # fbar, 0 where the mask is off; None without expectations
    beside: jax.Array | None = None  # d fbar / d score, likewise; None: 0
    load_beside: tuple[jax.Array | None, ...] = ()  # d fbar / d load; () without expectations

    def weights(self) -> jax.Array:
        """What multiplies V in the forward pass, not rounded: p times dropout; only where there is no `scale`."""
        assert self.scale is None
        return self.p if self.dropout is None else self.p * self.dropout

    def factor(self) -> jax.Array:
        """p * d mod / d score, and 0 wherever p is 0: ds = factor * (dP - delta), dP and delta being `scaled`."""
        return self._times(self.p, self.slope)

    def scaled(self, dp: jax.Array, delta: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """(dP, delta) times `scale`, by which p is then multiplied in every cotangent."""
        if self.scale is None:
            return dp, delta
        assert delta is not None
        scale = lax.broadcast_in_dim(self.scale, self.p.shape, (0,))
        return dp * scale, delta * scale

    def cotangents(
        self, factor: jax.Array, dp: jax.Array, delta: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """(dS, the cotangents of the values that each load read), for `loads_too`; dP and delta are `scaled`."""
        if self.rounded is None or factor is not self.p or self.dropout is not None:
            ds, shared = self.cotangent(factor, dp, delta), self.rounded is None and factor is self.p
            same = shared and self.value is None and all(slope is None for slope in self.load_slopes)
            return ds, (ds,) * len(self.load_slopes) if same else self.load_cotangents(dp, delta)
        assert delta is not None  # both cotangents take one product with delta
        return self.p * dp - self.p * delta, self.load_cotangents(dp, delta)

    def load_cotangents(self, dp: jax.Array, delta: jax.Array | None) -> tuple[jax.Array, ...]:
        """The cotangent of what each load read, divided by `scale` unless dP is `scaled`."""
        if self.rounded is None:
            beside = self.load_beside or (None,) * len(self.load_slopes)
            made = (self._cotangent(factor, dp, delta) for factor in self.load_factors())
            return tuple(map(self._plus, made, beside))
        loads = tuple(zip(self.load_slopes, self.load_finite, strict=True))
        assert delta is not None
        # its sum along a row is free of what rounding the weights does to delta (`KernelPlan.rounds_weights_alike`)
        whole = self.rounded * dp - self.p * delta
        return tuple(self._times(whole, slope, finite) for slope, finite in loads)

    def load_factors(self) -> Iterator[jax.Array]:
        """p * d mod / d load of each load, and 0 wherever p is 0."""
        loads = zip(self.load_slopes, self.load_finite, strict=True)
        return (self._times(self.p, slope, finite) for slope, finite in loads)

    def _times(self, tile: jax.Array, slope: jax.Array | None, finite: bool = False) -> jax.Array:
        """tile * slope, and 0 wherever p is 0, because a derivative that is not `finite` may be NaN there."""
        if self.weighted:
            assert slope is not None
            return slope
        if slope is None:
            return tile
        return tile * slope if finite else jnp.where(self.p > 0.0, tile * slope, 0.0)

    def cotangent(self, factor: jax.Array, dp: jax.Array, delta: jax.Array | None) -> jax.Array:
        """dS from `factor()` and dP without dropout; delta None: `dp` contains -delta already."""
        return self._plus(self._cotangent(factor, dp, delta), self.beside)

    def beside_product(self, factor: jax.Array) -> jax.Array:
        """dS less factor * (dP - delta), for a kernel that hands both terms on; only beside expectations."""
        assert self.value is not None
        return self._plus(factor * self.value, self.beside)

    def _cotangent(self, factor: jax.Array, dp: jax.Array, delta: jax.Array | None) -> jax.Array:
        """factor * (dP - delta + fbar)."""
        if delta is not None:
            dp = (dp if self.dropout is None else dp * self.dropout) - delta
        return factor * (dp if self.value is None else dp + self.value)

    def _plus(self, cotangent: jax.Array, beside: jax.Array | None) -> jax.Array:
        return cotangent if beside is None else cotangent + self.p * beside
