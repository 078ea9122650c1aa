"""The section of explain about `tolerance=`: why nothing is skipped, or which share of blocks each head visits."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.call.prepare import PreparedCall
from flexjax.passes.dispatch import PLATFORMS, Run
from flexjax.plan.rewrite import last_plan
from flexjax.tolerance.keep import compiled

MOST_HEADS = 8  # heads whose share is printed; of more, every n-th


def describe_tolerance(call: PreparedCall, run: Run) -> str:
    """ "" for a call without; shares are of the blocks that the mask shows, where no score is above a bound.

    A kernel that reads keys once for several heads visits what any of them does.
    """
    skipped = call.skipped
    if skipped is None:
        return ""
    if skipped.spec is None or skipped.given is None:
        return f"tolerance: nothing is skipped. {skipped.why}"
    spec, given = skipped.spec, skipped.given
    title = f"tolerance {spec.tolerance:.3g}" + (" of the sum of |weight| of a row, absolute" if spec.weighted else "")
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(given)):
        return f"{title}: blocks are chosen when the program runs, and both passes visit them"
    known = given.bound is not None and given.bound.size == 1
    bound = float(np.asarray(given.bound).item()) if known else abs(call.plan.scale) * call.plan.head_dim
    with jax.ensure_compile_time_eval():
        limit = jnp.full((1, 1, 1, 1), bound, jnp.float32)
        keep = np.asarray(compiled(spec)(given._replace(bound=limit)).keep)
        visible = np.ones_like(keep)
        if given.flags is not None:
            visible = np.broadcast_to(np.asarray(given.flags[0] | given.flags[1]), keep.shape)
    last = last_plan(run.plan, run.backend.rewrites(run.plan, run.target))
    joins = last.q_heads < call.plan.q_heads or (last.page and run.backend.name in PLATFORMS)
    lists = last.kv_heads if joins else call.plan.q_heads
    # a tile of a TPU that has a block's pages has those of its neighbours
    tile = (last.options.block_kv or 0) * call.plan.kv_len // last.kv_len if last.page and lists == 1 else 0
    blocks = max(1, tile // spec.sizes[3])

    def of_lists(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % blocks)])
        return x.reshape(x.shape[0], lists, -1, x.shape[2], x.shape[3] // blocks, blocks).any((2, 5)).sum((0, 2, 3))

    shares = of_lists(keep) / np.maximum(of_lists(visible), 1)
    together = call.plan.q_heads // lists
    which = "head" if together == 1 else f"group of {together} heads, whose keys are read together"
    every = -(-len(shares) // MOST_HEADS)
    heads = ", ".join(f"{h}: {shares[h]:.2f}" for h in range(0, len(shares), every))
    of = "score_bound" if known else "|scale| D, that of rows of length sqrt(D)"
    share = f"of the blocks of the mask {shares.mean():.2f} stay where |score| <= {bound:.3g} ({of})"
    return f"{title}: {share}\n  by {which} {heads}"
