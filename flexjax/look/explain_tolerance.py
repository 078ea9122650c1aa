"""The section of explain about `tolerance=`: why nothing is skipped, or which share of blocks each head visits."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.call.prepare import PreparedCall
from flexjax.tolerance.keep import compiled

MOST_HEADS = 8
"""Heads whose share is printed; of more, every n-th."""


def describe_tolerance(call: PreparedCall) -> str:
    """ "" for a call without; shares are of the blocks that the mask shows, where no score is above a bound."""
    skipped = call.skipped
    if skipped is None:
        return ""
    if skipped.spec is None or skipped.given is None:
        return f"tolerance: nothing is skipped. {skipped.why}"
    spec, given = skipped.spec, skipped.given
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(given)):
        return f"tolerance {spec.tolerance:.3g}: blocks are chosen when the program runs, and both passes visit them"
    known = given.bound is not None and given.bound.size == 1
    bound = float(np.asarray(given.bound).item()) if known else abs(call.plan.scale) * call.plan.head_dim
    with jax.ensure_compile_time_eval():
        limit = jnp.full((1, 1, 1, 1), bound, jnp.float32)
        keep = np.asarray(compiled(spec)(given._replace(bound=limit)).keep)
        visible = np.ones_like(keep)
        if given.flags is not None:
            visible = np.broadcast_to(np.asarray(given.flags[0] | given.flags[1]), keep.shape)
    shares = keep.sum((0, 2, 3)) / np.maximum(visible.sum((0, 2, 3)), 1)
    every = -(-len(shares) // MOST_HEADS)
    heads = ", ".join(f"{h}: {shares[h]:.2f}" for h in range(0, len(shares), every))
    of = "score_bound" if known else "|scale| D, that of rows of length sqrt(D)"
    share = f"of the blocks of the mask {shares.mean():.2f} stay where |score| <= {bound:.3g} ({of})"
    return f"tolerance {spec.tolerance:.3g}: {share}\n  by head {heads}"
