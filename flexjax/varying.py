"""Casts of arrays inside jax.shard_map, so that they vary over the same mesh axes.

Inside shard_map the type of an array says over which mesh axes its values differ between devices. A primitive whose
arguments vary over different axes would have to say over which its results do.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax

Array = jax.Array
Tree = TypeVar("Tree")


def varying_alike(flat: Sequence[Array]) -> list[Array]:
    """The arrays, cast to vary over the union of their mesh axes inside shard_map.

    The transpose of the cast adds up the gradients of the devices that share an array.
    """
    over = [frozenset(jax.typeof(x).mat.varying) for x in flat]
    everywhere = frozenset().union(*over)
    missing = [tuple(sorted(everywhere - axes, key=str)) for axes in over]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(flat, missing, strict=True)]


def varying_as(like: Array, tree: Tree) -> Tree:
    """The arrays of a tree, cast to vary as `like` does too: a loop must return the type with which it starts."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, varying_alike([like, *leaves])[1:])
