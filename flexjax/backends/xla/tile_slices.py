"""Reads of a captured array at each (q, kv) that are slices: where the slice of each key block starts, and its size."""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from flexjax.backends.xla.region import Region
from flexjax.ir.program import TILE, ArrayType, Atom, Lit, Load, classify_load

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SlicePlan:
    """How to read, by slices, a load whose index in each dimension is a literal, b, h, q + c or kv + c."""

    # For each dimension ("at", i) for the literal i, ("b", 0), ("h", 0), ("q", c) or ("kv", c). Each of b, h, q and kv
    # occurs at most once; q and kv do occur.
    index: tuple[tuple[str, int], ...]

    @property
    def kv_dim(self) -> int:
        """Which dimension of the array the key position indexes."""
        return [w for w, _ in self.index].index("kv")

    @property
    def order(self) -> tuple[int, ...]:
        """Orders the dimensions of the array as literals, b, h, q, kv."""
        rank = {"at": 0, "b": 1, "h": 2, "q": 3, "kv": 4}
        return tuple(sorted(range(len(self.index)), key=lambda d: rank[self.index[d][0]]))

    def shape(self, region: Region) -> tuple[int, int, int, int]:
        """What the load reads over the region, [nb, nh, bq, keys]; 1 along b or h that it does not read."""
        names = {w for w, _ in self.index}
        nb, nh, bq, width = region.shape
        return (nb if "b" in names else 1, nh if "h" in names else 1, bq, width)

    def window(self, region: Region, block: int) -> tuple[list[Array | int], list[int]]:
        """(starts, sizes) of what key block `block` of the region reads; not clipped (see `padding`)."""
        at = {"b": region.b0, "h": region.h0, "q": region.q0, "kv": region.kv_starts[block], "at": 0}
        size = {"b": region.nb, "h": region.nh, "q": region.bq, "kv": region.bk, "at": 1}
        starts: list[Array | int] = [jnp.asarray(at[axis] + offset, jnp.int32) for axis, offset in self.index]
        return starts, [size[axis] for axis, _ in self.index]

    def padding(self, array: ArrayType, q_len: int, kv_len: int) -> list[tuple[int, int]]:
        """What to append to each dimension, so that the slices of all tiles lie inside; lengths are in whole blocks."""
        need = {"q": q_len, "kv": kv_len}
        return [
            (0, max(0, need[axis] + offset - size) if axis in need else 0)
            for (axis, offset), size in zip(self.index, array.shape, strict=True)
        ]


def slice_plan(load: Load) -> SlicePlan | None:
    """How to read the load as slices; None if it needs a gather."""
    if classify_load(load).kind != TILE or not classify_load(load).contiguous:
        return None
    index: list[tuple[str, int]] = []
    for atom in load.index:
        part = _index_part(atom)
        if part is None or (part[0] != "at" and part[0] in {w for w, _ in index}):
            return None
        index.append(part)
    return SlicePlan(tuple(index))


def _index_part(atom: Atom) -> tuple[str, int] | None:
    """An entry of SlicePlan.index; None unless the atom is a literal, b, h, q + c or kv + c with c >= 0."""
    if isinstance(atom, Lit):
        return ("at", int(typing.cast(int, atom.value)))
    linear = atom.linear
    if linear is None or linear.uniform:
        return None
    form = (linear.b, linear.h, linear.q, linear.kv)
    if form == (1, 0, 0, 0) and linear.const == 0:
        return ("b", 0)
    if form == (0, 1, 0, 0) and linear.const == 0:
        return ("h", 0)
    if form == (0, 0, 1, 0) and linear.const >= 0:
        return ("q", linear.const)
    if form == (0, 0, 0, 1) and linear.const >= 0:
        return ("kv", linear.const)
    return None
