"""Merges attention over parts of the keys: the formula of split keys, shared prefixes and split sequences.

    lse = log sum_s exp(lse_s)        out = sum_s exp(lse_s - lse) out_s

for the lse_s and out_s of each part s over its own keys. A part without keys for a row has lse_s = -inf and weight 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.errors import bad_argument, kind_of, public
from flexjax.mod_tools.settings import own

Array = jax.Array


@public
@own
def merge_attention_states(outs: Array | np.ndarray, lses: Array | np.ndarray, axis: int = 0) -> tuple[Array, Array]:
    """Attention over all keys from K calls, each over some of them: (out [..., E], lse [...]).

    outs   [K, ..., E]: the outputs
    lses   [K, ...]: their lse, natural logarithms, as `AuxRequest(lse=True)` returns them
    axis   of lses, and of outs, along which the K calls lie

    Each key must be in exactly one call; give sinks to one of the calls. A row in which all lse are -inf gives 0 and
    -inf. Sums are in the dtype of lses and in the order of the calls; out has the dtype of outs. Differentiable. Raises
    ValueError for other types and shapes.

    Example, a prefix that all requests share, with its own keys merged in:

        asked = dict(return_aux=AuxRequest(lse=True))
        a, b = flex_attention(q, prefix_k, prefix_v, **asked), flex_attention(q, k, v, mask_mod=masks.causal, **asked)
        out, lse = merge_attention_states(jnp.stack([a[0], b[0]]), jnp.stack([a[1].lse, b[1].lse]))
    """
    for name, x in (("outs", outs), ("lses", lses)):
        if not isinstance(x, Array | np.ndarray) or not jnp.issubdtype(x.dtype, jnp.floating):
            got = f"{x.dtype.name}{list(x.shape)}" if isinstance(x, Array | np.ndarray) else kind_of(x)
            raise bad_argument(name, got, "an array of floats", "Stack the results of the calls with jnp.stack.")
    if lses.ndim == 0 or outs.shape[:-1] != lses.shape:
        raise bad_argument(
            "lses",
            f"of shape {lses.shape}",
            f"the shape of outs without its last dim, {outs.shape[:-1]}",
            "Make them agree.",
        )
    if isinstance(axis, bool) or not isinstance(axis, int) or not -lses.ndim <= axis < lses.ndim:
        raise bad_argument(
            "axis", repr(axis), f"an axis of lses, which has {lses.ndim}", "Pass the one of the K calls."
        )
    if lses.shape[axis] == 0:
        raise bad_argument("lses", f"of shape {lses.shape}", "at least one state along axis", "Leave out the merge.")
    axis %= lses.ndim
    parts, values = jnp.moveaxis(jnp.asarray(lses), axis, 0), jnp.moveaxis(jnp.asarray(outs), axis, 0)
    lse = joint_lse(parts)
    weight = weight_of(parts, lse)
    seen = jnp.where(jnp.isneginf(parts)[..., None], 0, values)
    return jnp.sum(weight[..., None] * seen, 0).astype(values.dtype), lse


def joint_lse(parts: Array) -> Array:
    """log sum_s exp(parts[s]) of [K, ...], elementwise [...]; -inf, with gradients of 0, where all parts are -inf."""
    top = lax.stop_gradient(jnp.max(parts, 0))
    top = jnp.where(jnp.isneginf(top), 0, top)
    total = jnp.sum(jnp.exp(parts - top), 0)
    empty = total == 0
    return jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))


def weight_of(part: Array, whole: Array) -> Array:
    """exp(part - whole), elementwise: the weight of a part of the keys; 0, with gradients of 0, where part is -inf."""
    empty = jnp.isneginf(part)
    distance = jnp.where(empty, 0, part) - jnp.where(jnp.isneginf(whole), 0, whole)
    return jnp.where(empty, 0, jnp.exp(jnp.where(empty, 0, distance)))
