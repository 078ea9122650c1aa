"""The mathematics of the backward pass on a strip of a tile, the same for both of its kernels.

    p       = exp(s' - lse)                           s', ds'/ds and ds'/dload_n come from the derivative program
    ds'     = p * (r * (dO . V) - (delta - d_lse))    cotangent of s'; r: dropout's multiplier, delta = rowsum(dO * O)
    ds      = ds' * ds'/ds                            cotangent of the scaled score
    dload_n = ds' * ds'/dload_n                       cotangent of each read of a captured array, for each entry

Where both passes round weights alike (tile_math.py), dload_n is computed with w * (dO . V) - p * (delta - d_lse) in place of ds', where
w is p * r with the rounding of the forward kernel. The sum of that along a row is free of what the rounding does to delta.

Entries that are off are set to 0 after all products, because score_mod may be NaN there. Where all their values are known to be
finite (TileScores.finite_where_off), one select before the exponential is enough, and costs less.

Entries that are "off" are hidden by the mask or past the end of queries or keys. A read is a load of the score program: it reads
an element of a captured array for each entry; reads are numbered as in derivative.gradients. Derivatives by the score and by
reads are called slopes. A strip is the part of a tile whose scores are computed at once, (rows, cols).

A visit is a grid step, which computes one tile. A KernelStep is one strip of the tile of a visit: references of the kernel, the
visit, the strip, and whether some of its entries may be off ("checked").
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
    """What both backward kernels read: query, key, value and d_out in the shapes of layouts.fold; and, float32 [B, N, 1, T]:

    lse      to base 2 (natural where scores may be large), +inf in empty rows, so that their exponentials are 0
    shift    delta - d_lse
    """

    query: T
    key: T
    value: T
    d_out: T
    lse: T
    shift: T


class BackwardCall(typing.NamedTuple):
    """One backward pass, from which both backward kernels are made.

    plan, operands   of the call; the kernels read captured arrays and block lists from the operands
    arrays           what the kernels read of the other operands
    derivative       the program of score_mod's derivatives; None: the identity
    tiles            sizes of a tile
    chip             the TPU that the kernels are compiled for
    """

    plan: KernelPlan
    operands: Operands
    arrays: BackwardArrays[jax.Array]
    derivative: Program | None
    tiles: vmem.Tiles
    chip: vmem.Chip

    def inputs(self, shapes: layouts.FoldedShapes, maps: layouts.IndexMaps) -> BackwardArrays[Operand]:
        """The arrays with their block specs: in a grid step a kernel reads the blocks of the step's query tile and key tile.

        shapes, maps   sizes of the folded arrays and index maps of the kernel
        """
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
    """What a kernel computes or reads before the gradients of a strip.

    qk, dp       the products q . k (not scaled) and dO . v, float32 (rows, cols)
    lse, shift   of the queries of the strip (see BackwardArrays), in shapes that broadcast to (rows, cols)
    """

    qk: jax.Array
    dp: jax.Array
    lse: jax.Array
    shift: jax.Array


@dataclasses.dataclass
class StripGradients:
    """The gradients on a strip, float32 (rows, cols), 0 at entries that are off.

    p       probabilities times dropout's multiplier
    ds      cotangent of the scaled score
    loads   cotangent of what each wanted read reads, by its number
    """

    p: jax.Array
    ds: jax.Array
    loads: dict[int, jax.Array]


def strip_gradients(
    scores: TileScores, step: KernelStep, products: StripProducts, wanted: tuple[int, ...]
) -> StripGradients:
    """The gradients of a strip, by the formulas at the top of this file; runs inside a kernel.

    scores     the programs of the kernel
    step       which strip of which visit; unless it is checked, no entry counts as off
    products   q . k, dO . v, lse and shift of the strip
    wanted     the captured reads whose cotangents are wanted, as numbers in derivative.gradients; only these are in `loads`
    """
    on = scores.on(step) if step.checked else None
    on_before_exp = on if scores.finite_where_off else None
    on_after_products = None if scores.finite_where_off else on

    def zero_where_off(values: jax.Array) -> jax.Array:
        """`values` with 0 at entries that are off; unchanged where the select before the exponential is enough
        (`finite_where_off`).
        """
        return values if on_after_products is None else jnp.where(on_after_products, values, 0.0)

    exponent, slope, load_slopes = _exponent_and_slopes(scores, step, products.qk, products.lse)
    p = jnp.exp2(exponent if on_before_exp is None else jnp.where(on_before_exp, exponent, -jnp.inf))
    multiplier = scores.dropout(step)
    dp = products.dp if multiplier is None else products.dp * multiplier
    d_score = p * (dp - products.shift)
    ds = zero_where_off(d_score if slope is None else d_score * slope)
    weights = p if multiplier is None else p * multiplier
    if wanted and scores.plan.rounds_weights_alike:
        power = products.lse * np.float32(LOG2E) if scores.large else products.lse
        fraction = tile_math.power_below(power, jnp.ceil(power))
        rounded = round_to(weights * jnp.exp2(fraction), scores.plan.dtype, scores.plan.options.interpret)
        d_score = rounded * jnp.exp2(-fraction) * products.dp - p * products.shift
    loads = {n: zero_where_off(jnp.broadcast_to(d_score * load_slopes[n], products.qk.shape)) for n in wanted}
    return StripGradients(zero_where_off(weights), ds, loads)


def _exponent_and_slopes(
    scores: TileScores, step: KernelStep, qk: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
    """(s' - lse in base 2, ds'/ds or None for 1, [ds'/dload of each read in derivative.gradients]) on a strip.

    qk    the products q . k, not scaled, (rows, cols)
    lse   of the queries of the strip, as BackwardArrays has it; where scores may be large it is subtracted before the
          conversion to base 2

    Without a derivative program and with a separated bias the list of derivatives by reads is empty, because the kernel
    does not evaluate the whole program; ds'/ds is then 1 or the factor c of the separated score.
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
    score, slope, *load_slopes = scores.scores(step, qk * np.float32(scale))
    if scores.large:
        distance = tile_math.large_distance(scores.plan.score, score, lse)
        return distance * np.float32(LOG2E), slope, load_slopes
    return score * np.float32(LOG2E) - lse, slope, load_slopes
