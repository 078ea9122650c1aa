"""The mathematics of the backward pass on a strip of a tile, the same for both of its kernels.

    p       = exp(s' - lse)                           s', ds'/ds and ds'/dload_n come from the derivative program
    ds'     = p * (r * (dO . V) - (delta - d_lse))    cotangent of s'; r: dropout's multiplier, delta = rowsum(dO * O)
    ds      = ds' * ds'/ds                            cotangent of the scaled score
    dload_n = ds' * ds'/dload_n                       cotangent of each read of a captured array, for each entry

Of a weighted plan s' is the weight, p = s' and ds' = r * (dO . V) + d_lse, with d_lse the cotangent of the total.

Beside expectations (passes/expectations.py) the derivative program has a second group, fbar and its derivatives: fbar
is added to dO . V, and p times its derivative to ds and to each dload.

Where both passes round weights alike (tile_math.py), dload_n is computed with w * (dO . V) - p * (delta - d_lse) in
place of ds'. w is p * r with the rounding of the forward kernel. The sum of that along a row is free of what the
rounding does to delta.

Entries that are off (hidden, or past the end of queries or keys) are set to 0 after all products, because score_mod may
be NaN there. Where all their values are known to be finite (TileScores.finite_where_off), one select before the
exponential is enough, and costs less. Derivatives by the score and by reads are called slopes.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends import tile_math
from flexjax.backends.mosaic_tpu import layouts, vmem
from flexjax.backends.mosaic_tpu.hoisted_operands import Operand
from flexjax.backends.mosaic_tpu.launch import KernelStep
from flexjax.backends.mosaic_tpu.tile_scores import TileScores
from flexjax.backends.mosaic_tpu.vector_ops import round_to
from flexjax.backends.tile_math import LOG2E
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan, Operands

T = typing.TypeVar("T")


class BackwardArrays(typing.NamedTuple, typing.Generic[T]):
    """What both backward kernels read, in the shapes of layouts.fold; lse and shift are float32 [B, N, 1, T]."""

    query: T
    key: T
    value: T
    d_out: T
    lse: T  # to base 2 (natural where scores may be large), +inf in empty rows, so that their exponentials are 0
    shift: T  # delta - d_lse


class BackwardCall(typing.NamedTuple):
    """One backward pass, from which both backward kernels are made."""

    plan: KernelPlan
    operands: Operands  # captured arrays and block lists are read from here
    arrays: BackwardArrays[jax.Array]
    derivative: Program | None  # None: the identity
    tiles: vmem.VmemTiles
    chip: vmem.Chip

    def inputs(self, shapes: layouts.FoldedShapes, maps: layouts.IndexMaps) -> BackwardArrays[Operand]:
        """The arrays with their block specs, by the query tile and the key tile of a grid step."""
        tiles, rows = self.tiles, maps.row_spec(self.tiles.q)
        specs = BackwardArrays(
            shapes.query.spec(tiles.q, maps.query),
            shapes.key.spec(tiles.kv, maps.key),
            shapes.value.spec(tiles.kv, maps.key),
            shapes.out.spec(tiles.q, maps.query),
            rows,
            rows,
        )
        return BackwardArrays(*map(Operand, self.arrays, specs))


class StripProducts(typing.NamedTuple):
    """What a kernel computes or reads before the gradients of a strip."""

    qk: jax.Array  # q . k, not scaled, float32 (rows, cols)
    dp: jax.Array  # dO . v, float32 (rows, cols)
    lse: jax.Array  # as BackwardArrays has it, broadcastable to (rows, cols)
    shift: jax.Array  # as BackwardArrays has it, broadcastable to (rows, cols)


@dataclasses.dataclass
class StripGradients:
    """The gradients on a strip, float32 (rows, cols), 0 at entries that are off."""

    p: jax.Array  # probabilities times dropout's multiplier
    ds: jax.Array  # cotangent of the scaled score
    loads: dict[int, jax.Array]  # cotangent of what each wanted read reads, by its number


def strip_gradients(
    scores: TileScores, step: KernelStep, products: StripProducts, wanted: tuple[int, ...]
) -> StripGradients:
    """The gradients of a strip by the formulas above; `wanted` reads are numbers in derivative.gradients."""
    on = scores.on(step) if step.checked else None
    on_before_exp = on if scores.finite_where_off else None
    on_after_products = None if scores.finite_where_off else on

    def zero_where_off(values: jax.Array) -> jax.Array:
        return values if on_after_products is None else jnp.where(on_after_products, values, 0.0)

    weighted = scores.plan.weighted
    if weighted:
        p, slope, *rest = scores.scores(step, products.qk * np.float32(scores.plan.scale))
    else:
        exponent, slope, rest = _exponent_and_slopes(scores, step, products.qk, products.lse)
        p = jnp.exp2(exponent if on_before_exp is None else jnp.where(on_before_exp, exponent, -jnp.inf))
    multiplier = scores.dropout(step)
    dp = products.dp if multiplier is None else products.dp * multiplier
    reads = 0 if scores.score is None else len(scores.score.gradients)
    load_slopes, beside = rest[:reads], rest[reads:]
    shift = products.shift - beside[0] if beside else products.shift
    d_score = dp - shift if weighted else p * (dp - shift)
    ds = d_score if slope is None else d_score * slope
    ds = zero_where_off(ds + p * beside[1] if beside else ds)
    weights = p if multiplier is None else p * multiplier
    if wanted and scores.plan.rounds_weights_alike:
        power = products.lse * np.float32(LOG2E) if scores.large else products.lse
        fraction = tile_math.power_below(power, jnp.ceil(power))
        rounded = round_to(weights * jnp.exp2(fraction), scores.plan.dtype, scores.plan.options.interpret)
        d_score = rounded * jnp.exp2(-fraction) * products.dp - p * shift
    loads = {n: d_score * load_slopes[n] for n in wanted}
    loads = {n: x + p * beside[2 + n] for n, x in loads.items()} if beside else loads
    loads = {n: zero_where_off(jnp.broadcast_to(x, products.qk.shape)) for n, x in loads.items()}
    return StripGradients(zero_where_off(weights), ds, loads)


def _exponent_and_slopes(
    scores: TileScores, step: KernelStep, qk: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
    """(s' - lse in base 2, ds'/ds or None for 1, the results after that of the derivative program, [] where there is
    none or it is a separated bias) on a strip.
    """
    scale = scores.plan.scale
    if scores.score is None:
        return qk * np.float32(scale * LOG2E) - lse, None, []
    if scores.separated is not None:
        bias, c = scores.bias(step), scores.separated.scale
        exponent = qk * np.float32(scale * c * LOG2E)
        exponent = exponent if bias.tile is None else exponent + bias.tile
        exponent = exponent - (lse if bias.row_term is None else lse - bias.row_term)
        return exponent, None if c == 1.0 else jnp.float32(c), []
    score, slope, *rest = scores.scores(step, qk * np.float32(scale))
    # a large lse is natural, and is subtracted before the conversion to base 2
    if scores.large:
        distance = tile_math.large_distance(scores.plan.score, score, lse)
        return distance * np.float32(LOG2E), slope, rest
    return score * np.float32(LOG2E) - lse, slope, rest
