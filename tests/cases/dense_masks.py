"""Mods over whole matrices, and block lists read off a dense mask: what all makers of plans for kernel tests start from."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.plan.kernel_plan import BlockLayout, BlockLists

Mod = Callable[..., typing.Any]


def over_all(mod: Mod, leading: int) -> Mod:
    """The mod of arrays of batch entries, heads, queries and keys, after `leading` arrays [B, H, T, S]."""
    for axis in (3, 2, 1, 0):
        mod = jax.vmap(mod, in_axes=(0,) * leading + tuple(0 if i == axis else None for i in range(4)))
    return mod


def block_lists(on: np.ndarray, block: tuple[int, int], use_full: bool = True) -> tuple[BlockLayout, BlockLists]:
    """Lists of a dense [B, H, T, S] mask, and the widths of those in both directions; without `use_full` no block is full."""
    padding = [(0, 0), (0, 0), *((0, -n % s) for n, s in zip(on.shape[2:], block, strict=True))]
    shape = lambda x: x.reshape(*x.shape[:2], x.shape[2] // block[0], block[0], x.shape[3] // block[1], block[1])
    some = shape(np.pad(on, padding)).any((3, 5))
    every = shape(np.pad(on, padding, constant_values=True)).all((3, 5)) & use_full
    arrays: list[jax.Array | None] = []
    widths = []
    for hit in (some & ~every, every, (some & ~every).swapaxes(2, 3), every.swapaxes(2, 3)):
        width = int(hit.sum(-1).max())
        widths.append(width)
        index = np.argsort(~hit, axis=-1, kind="stable")[..., :width].astype(np.int32)
        arrays += [jnp.asarray(hit.sum(-1).astype(np.int32)), jnp.asarray(index)] if width else [None, None]
    return BlockLayout(on.shape[0], on.shape[1], *block, *widths), BlockLists(*arrays[:4])
