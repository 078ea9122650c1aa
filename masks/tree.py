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
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def tree(parents: ArrayLike, context: ArrayLike = 0, *, queries_follow_context: bool = False) -> MaskMod:
    """mask = (kv_idx < context) | (node `kv_idx - context` is node `q_idx` or an ancestor of it)

    parents:  integer `[T]` or `[B, T]`: parent of each node, an earlier node, or -1 for a root. May be traced.
    context:  int, or int32 `[]` or `[B]`: keys before the tree, which every node sees. May be traced.
    queries_follow_context:  q_idx counts from the first token of the context, as in `flexjax.paged_attention`.
    Keys are `context` tokens, then the `T` nodes; later ones are hidden. A call of other sizes raises ValueError.
    Source: Miao et al., "SpecInfer", arXiv:2305.09781; Cai et al., "Medusa", arXiv:2401.10774, section 2.1.
    Raises ValueError for other arguments, and where it is known that a parent does not come before its child.
    Picture of `tree(np.array([-1, 0, 0, 1, 2]), context=1)`, 5 x 6:

        # # . . . .
        # # # . . .
        # # . # . .
        # # # . # .
        # # . # . #
    """
    advice = "Pass the parent of each node, -1 for a root."
    above = position_array("tree", "parents", parents, {1: "[T]", 2: "[B, T]"}, advice)
    _check_order(parents)
    before = integer_or_vector("tree", "context", context, "[B]", 0, "Pass the number of keys before the tree.")
    enter, leave = _intervals(above) if above.ndim == 1 else jax.vmap(_intervals)(above)
    last = above.shape[-1] - 1

    nodes = of_array("parents", above, "B." if queries_follow_context else "BT")

    @named("tree", *nodes, *of_array("context", before, "B"))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        node = kv_idx - value_at(before, b)
        inside = jnp.clip(node, 0, last)
        query = q_idx - value_at(before, b) if queries_follow_context else q_idx
        at = batched_value_at(enter, b, query)
        is_above = (batched_value_at(enter, b, inside) <= at) & (at < batched_value_at(leave, b, inside))
        return (node < 0) | ((node <= last) & is_above)

    return mask_mod


def _check_order(parents: ArrayLike) -> None:
    """Raises ValueError if a parent is below -1 or does not come before its child; traced arrays pass."""
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
    """(enter, leave), int32 `[T]`: node n and its subtree have the depth-first numbers enter[n] .. leave[n] - 1."""
    nodes = parents.shape[0]
    above = jnp.where(parents < 0, nodes, parents)  # one more node is the parent of all roots

    def add_to_parent(i: Array, size: Array) -> Array:
        node = nodes - 1 - i
        return size.at[above[node]].add(size[node])

    size = jax.lax.fori_loop(0, nodes, add_to_parent, jnp.ones(nodes + 1, jnp.int32))

    def number(node: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        enter, free = state  # free[n]: the first number below n that no node has yet
        start = free[above[node]]
        free = free.at[above[node]].add(size[node]).at[node].set(start + 1)
        return enter.at[node].set(start), free

    start = (jnp.zeros(nodes, jnp.int32), jnp.zeros(nodes + 1, jnp.int32))
    enter, _ = jax.lax.fori_loop(0, nodes, number, start)
    return enter, enter + size[:nodes]
