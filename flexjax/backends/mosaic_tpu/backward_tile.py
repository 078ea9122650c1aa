"""The mathematics of the backward pass on a part of a tile, the same for both of its kernels.

    p   = exp(s' - lse)                       s', ds'/ds, ds'/dload_n from the derivative program
    dsp = p * (r * (dO . V) - (delta - d_lse))      cotangent of s'; r is dropout's multiplier, delta = rowsum(dO * O)
    ds  = dsp * ds'/ds                        cotangent of the scaled score
    dload_n = dsp * ds'/dload_n               cotangent of each read of a captured array, per entry

Entries that are off are set to 0 after all products, whatever a mod made of them. Where nothing but finite numbers can turn
up in them (no ragged end, and a program that cannot make others: tile_programs.stays_finite) one select before exp does.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends import tile_math
from flexjax.backends.mosaic_tpu.forward import LOG2E
from flexjax.backends.mosaic_tpu.launch import Refs
from flexjax.backends.mosaic_tpu.modded import Modded, Part
from flexjax.backends.mosaic_tpu.tables import Visit


@dataclasses.dataclass
class TileGradients:
    """Full-size float32 arrays of a part of a tile; `loads` has the wanted ones, by number of the gradient."""

    p: jax.Array
    ds: jax.Array
    loads: dict[int, jax.Array]


def tile_gradients(
    modded: Modded,
    refs: Refs,
    visit: Visit,
    part: Part,
    checked: bool,
    qk: jax.Array,
    dp: jax.Array,
    lse: jax.Array,
    shift: jax.Array,
    wanted: tuple[int, ...],
) -> TileGradients:
    """`qk` and `dp` are the raw products; `lse` (base 2, but not where scores may be far out) and `shift` = delta - d_lse broadcast
    against them."""
    plan = modded.plan
    identity = modded.score is None
    valid = modded.valid(refs, visit, part) if checked else None
    early = valid if modded.gentle else None
    valid = None if modded.gentle else valid

    def on(values: jax.Array) -> jax.Array:
        return values if valid is None else jnp.where(valid, values, 0.0)

    results: list[jax.Array] = []
    slope: jax.Array | None = None
    if identity:
        exponent = qk * np.float32(plan.scale * LOG2E) - lse
    elif modded.separated is not None:
        bias = modded.bias(refs, visit, part)
        scale = modded.separated.scale
        exponent = qk * np.float32(plan.scale * scale * LOG2E)
        exponent = exponent if bias.tile is None else exponent + bias.tile
        exponent = exponent - (lse if bias.q_line is None else lse - bias.q_line)
        slope = None if scale == 1.0 else jnp.float32(scale)
    else:
        score, slope, *results = modded.scores(refs, visit, part, qk * np.float32(plan.scale))
        if modded.large:
            exponent = tile_math.large_distance(plan.score, score, lse) * np.float32(LOG2E)
        else:
            exponent = score * np.float32(LOG2E) - lse
    p = jnp.exp2(exponent if early is None else jnp.where(early, exponent, -jnp.inf))
    r = modded.dropout(refs, visit, part)
    if r is not None:
        dp = dp * r
    dsp = p * (dp - shift)
    ds = on(dsp if slope is None else dsp * slope)
    loads = {n: on(jnp.broadcast_to(dsp * results[n], qk.shape)) for n in wanted}
    return TileGradients(on(p if r is None else p * r), ds, loads)


def reduced(values: list[jax.Array]) -> jax.Array:
    return functools.reduce(lambda a, b: a + b, values)
