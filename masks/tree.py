"""A tree of candidate tokens, as speculative decoding checks them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.errors import TracerArrayConversionError
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import batched_value_at, value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer_or_vector, position_array
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def tree(parents: ArrayLike, context: ArrayLike = 0, *, queries_follow_context: bool = False) -> MaskMod:
    """mask = (kv_idx < context) | (node `kv_idx - context` is node `q_idx` or an ancestor of it)

    parents:  integer `[T]` or `[B, T]`: parent of each node, an earlier node, or -1 for a root.
    context:  int, or int32 `[]` or `[B]`: keys before the tree, which every node sees.
    queries_follow_context:  q_idx counts from the first token of the context, as the nodes' keys do: with
              `origin=Origin(query="end")` and in `flexjax.paged_attention`.  Otherwise it counts nodes.

    Queries are the `T` nodes; keys are `context` tokens and then the `T` nodes, later keys are hidden.  Both
    arrays may be traced.  Nodes are renumbered in depth-first order, in which a subtree is an interval:
    `a` is `n` or above it if `enter[a] <= enter[n] < leave[a]`.  Two arrays in the shape of `parents` are captured,
    not `[T, T]`.

    Sizes are not checked against those of the call: an index past the end of an array reads the last element.

    Source: Miao et al., "SpecInfer", arXiv:2305.09781; Cai et al., "Medusa", arXiv:2401.10774, section 2.1.

    Raises ValueError if an array is not integer, its rank is another, `context` is a negative int, or, where
    the values are known, a parent does not come before its child.

    Picture of `tree(np.array([-1, 0, 0, 1, 1, 2, 5]), context=1)`, 7 x 8:

        # # . . . . . .
        # # # . . . . .
        # # . # . . . .
        # # # . # . . .
        # # # . . # . .
        # # . # . . # .
        # # . # . . # #
    """
    advice = "Pass the parent of each node, -1 for a root."
    above = position_array("tree", "parents", parents, {1: "[T]", 2: "[B, T]"}, advice)
    _check_order(parents)
    before = integer_or_vector("tree", "context", context, "[B]", 0, "Pass the number of keys before the tree.")
    enter, leave = _intervals(above) if above.ndim == 1 else jax.vmap(_intervals)(above)
    last = above.shape[-1] - 1

    @named("tree")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is before the tree, or is the query's own node or an ancestor of it; False for keys after the tree."""
        node = kv_idx - value_at(before, b)
        inside = jnp.clip(node, 0, last)
        query = q_idx - value_at(before, b) if queries_follow_context else q_idx
        at = batched_value_at(enter, b, query)
        is_above = (batched_value_at(enter, b, inside) <= at) & (at < batched_value_at(leave, b, inside))
        return (node < 0) | ((node <= last) & is_above)

    return mask_mod


def _check_order(parents: ArrayLike) -> None:
    """Raises ValueError if a parent in `parents` is below -1 or does not come before its child; traced arrays, whose
    values are not known, pass.
    """
    try:
        known = np.asarray(parents)
    except TracerArrayConversionError:
        return
    nodes = np.arange(known.shape[-1])
    wrong = np.argwhere((known < -1) | (known >= nodes))
    if wrong.size:
        index = tuple(wrong[0].tolist())
        which = ", ".join(map(str, index))
        raise ValueError(
            f"`tree`: `parents[{which}]` is {known[index]}; expected -1 or an earlier node. "
            "Number the nodes so that each comes after its parent."
        )


@jax.jit
def _intervals(parents: Array) -> tuple[Array, Array]:
    """Numbers the nodes of one tree in depth-first order: the nodes of n's subtree get the numbers enter[n] .. leave[n]
    - 1.

    parents:   int32 `[T]`, as for `tree`; several roots are trees one after the other

    Returns (enter, leave), int32 `[T]` each.
    """
    nodes = parents.shape[0]
    above = jnp.where(parents < 0, nodes, parents)  # one more node is the parent of all roots

    def add_to_parent(i: Array, size: Array) -> Array:
        """Adds the number of nodes of a subtree to that of its parent; `i` counts the nodes from the last to the first."""
        node = nodes - 1 - i
        return size.at[above[node]].add(size[node])

    size = jax.lax.fori_loop(0, nodes, add_to_parent, jnp.ones(nodes + 1, jnp.int32))

    def number(node: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        """Gives the node its depth-first number; the state is (enter so far, the next free number below each node)."""
        enter, free = state  # free[n]: the first number below n that no node has yet
        start = free[above[node]]
        free = free.at[above[node]].add(size[node]).at[node].set(start + 1)
        return enter.at[node].set(start), free

    start = (jnp.zeros(nodes, jnp.int32), jnp.zeros(nodes + 1, jnp.int32))
    enter, _ = jax.lax.fori_loop(0, nodes, number, start)
    return enter, enter + size[:nodes]
