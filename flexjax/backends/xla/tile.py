"""A tile of the attention matrix as XLA sees it: rank-4 arrays.

A tile has `nb` batch entries from b0, `nh` query heads from h0, `bq` queries from q0 and, side by side, one or more key
blocks of `bk` keys each, starting at `kv_starts`. A value is [nb, nh, bq, blocks * bk] with 1 in place of every axis that it
does not depend on. A value of q - kv is [nb, nh, blocks, bq + bk - 1]: element t belongs to the difference
q0 - kv_start + t - (bk - 1).
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.ir.evaluate import apply_op, literal_array
from flexjax.ir.program import (
    INPUT_NAMES,
    KV,
    TILE,
    ArrayType,
    Atom,
    Axes,
    B,
    Call,
    H,
    Lit,
    Load,
    Op,
    Q,
    Val,
    axes_of,
    classify_load,
)
from flexjax.ir.ranges import modular

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Region:
    """Where a tile lies; b0, h0, q0 may be traced scalars, kv_starts is an int32 array [blocks]."""

    b0: Array | int
    nb: int
    h0: Array | int
    nh: int
    q0: Array | int
    bq: int
    kv_starts: Array
    bk: int

    @property
    def blocks(self) -> int:
        return self.kv_starts.shape[0]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.nb, self.nh, self.bq, self.blocks * self.bk)

    def index(self, axis: int) -> Array:
        """int32 positions along b, h, q or kv, as a rank-4 array."""
        start = {B: self.b0, H: self.h0, Q: self.q0}
        size = {B: self.nb, H: self.nh, Q: self.bq}
        if axis == KV:
            return (self.kv_starts[:, None] + jnp.arange(self.bk, dtype=jnp.int32)[None]).reshape(1, 1, 1, -1)
        spread = [1, 1, 1, 1]
        spread[axis - B] = size[axis]
        return (start[axis] + jnp.arange(size[axis], dtype=jnp.int32)).reshape(spread)

    def differences(self) -> Array:
        """q - kv along the diagonals, [1, 1, blocks, bq + bk - 1]."""
        t = jnp.arange(self.bq + self.bk - 1, dtype=jnp.int32) - (self.bk - 1)
        return (self.q0 - self.kv_starts[:, None] + t[None])[None, None]


class XlaTile:
    """Evaluates a program over a region (see on_tiles.Tile).

    guard    where entries count: elsewhere operations see 1 in place of their operands, so that differentiating the
             evaluation itself meets no NaN of an entry that is masked; None: operands as they are
    """

    def __init__(
        self, region: Region, captures: Sequence[Array], score: Array | None = None, guard: Array | None = None
    ):
        self.region = region
        self.captures = captures
        self.score = score
        self.guard = guard
        self.indices: dict[int, list[Array]] = {}

    def input(self, val: Val) -> Array:
        if INPUT_NAMES[val.id] == "score":
            assert self.score is not None, "a mask program reads no score"
            return self.score
        return self.region.index(val.id)

    def literal(self, lit: Lit) -> Array:
        return literal_array(lit)

    def spread(self, value: Array, have: Axes, want: Axes) -> Array:
        if "delta" in have and "delta" not in want:
            return along_diagonals(value, self.region.bq, self.region.bk)
        return value

    def diagonal(self, val: Val, uniform: Mapping[int, Array]) -> Array:
        linear = val.linear
        assert linear is not None
        terms = [(linear.q, self.region.differences())]
        terms += [(c, self.region.index(axis)) for c, axis in ((linear.b, B), (linear.h, H)) if c]
        terms += [(c, uniform[ident]) for ident, c in linear.uniform]
        # The whole fits the type of the value, so sums within that type may wrap around and come back.
        total = jnp.asarray(modular(linear.const, val.dtype))
        for coefficient, term in terms:
            total = total + term.astype(val.dtype) * modular(coefficient, val.dtype)
        return total

    def apply(self, op: Op, args: Sequence[Array]) -> Array:
        if self.guard is not None and {"q", "kv"} <= op.out.axes:
            args = [_guarded(a, self.guard) for a in args]
        return apply_op(op, jnp.broadcast_arrays(*args) if len(args) > 1 else args)

    def load(self, load: Load, index: Sequence[Array]) -> Array:
        self.indices[load.out.id] = list(index)
        return self.read(load, self.captures[load.capture])

    def read(self, load: Load, array: Array) -> Array:
        """What the load finds in `array` (its capture, or the tangent of it); evaluate the program first."""
        plan = slice_plan(load, ArrayType(array.shape, array.dtype.name))
        if plan is not None:
            return self._read_slices(plan, array)
        index = self.indices[load.out.id]
        if not index:
            return array.reshape(1, 1, 1, 1)
        index = [jnp.broadcast_to(i, jnp.broadcast_shapes((1, 1, 1, 1), *(x.shape for x in index))) for i in index]
        return array.at[tuple(index)].get(mode="clip")

    def _read_slices(self, plan: "SlicePlan", array: Array) -> Array:
        """A tile load as slices: one for each key block. The array is padded where a tile hangs over its end."""
        return (
            jnp.concatenate(
                [lax.dynamic_slice(array, *plan.window(self.region, j)) for j in range(self.region.blocks)],
                plan.kv_dim,
            )
            .transpose(plan.order)
            .reshape(plan.shape(self.region))
        )

    def call(self, call: Call, read: Callable[[Atom], Array]) -> Sequence[Array]:
        """The equation mapped over every position that its operands distinguish."""
        atoms = [a for arg in call.arguments if not isinstance(arg, int) for a in arg[1]]
        values = [jnp.broadcast_to(jnp.asarray(read(a)), _rank4(read(a))) for a in atoms]
        shape = jnp.broadcast_shapes((1, 1, 1, 1), *(v.shape for v in values))
        columns = iter(jnp.broadcast_to(v, shape).reshape(-1) for v in values)
        operands, axes = [], []
        for arg in call.arguments:
            if isinstance(arg, int):
                operands.append(self.captures[arg])
                axes.append(None)
            else:
                inner, members = arg
                stacked = jnp.stack([next(columns) for _ in members], -1)
                operands.append(stacked.reshape(-1, *inner))
                axes.append(0)
        results = jax.vmap(call.bind, in_axes=axes, out_axes=0)(*operands) if 0 in axes else call.bind(*operands)
        flat = [r.reshape(*shape, -1) if 0 in axes else r.reshape(1, 1, 1, 1, -1) for r in results]
        return [r[..., i] for r in flat for i in range(r.shape[-1])]


def _guarded(value: Array, guard: Array) -> Array:
    return jnp.where(guard, value, jnp.ones_like(value)) if jnp.issubdtype(value.dtype, jnp.floating) else value


def _rank4(value: Array) -> tuple[int, ...]:
    return value.shape if value.ndim == 4 else (1, 1, 1, 1)


# ------------------------------------------------------------------- diagonals


def along_diagonals(windows: Array, bq: int, bk: int) -> Array:
    """[.., blocks, bq + bk - 1] by difference -> [.., bq, blocks * bk]: out[i, j * bk + k] = windows[j, i - k + bk - 1].

    Row i of a block is the reversed window read from place bq - 1 - i. Repeating a window of L + 1 numbers and cutting the
    repetition into rows of L moves each row one place, so no gather is needed.
    """
    length = bq + bk - 1
    *head, blocks, _ = windows.shape
    turned = jnp.flip(windows, -1)
    ring = jnp.concatenate([turned[..., bq - 1 :], jnp.zeros_like(turned[..., :1]), turned[..., : bq - 1]], -1)
    rows = jnp.broadcast_to(ring[..., None, :], (*head, blocks, bq, length + 1)).reshape(*head, blocks, -1)
    rows = rows[..., : bq * length].reshape(*head, blocks, bq, length)[..., :bk]
    return jnp.moveaxis(rows, -3, -2).reshape(*head, bq, blocks * bk)


def sum_diagonals(tile: Array, bq: int, bk: int) -> Array:
    """The transpose of along_diagonals: sums [.., bq, blocks * bk] over equal differences."""
    length = bq + bk - 1
    *head, _, width = tile.shape
    blocks = width // bk
    rows = jnp.moveaxis(tile.reshape(*head, bq, blocks, bk), -2, -3)
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, length - bk)]).reshape(*head, blocks, bq * length)
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, bq)]).reshape(*head, blocks, bq, length + 1)
    ring = rows.sum(-2)
    turned = jnp.concatenate([ring[..., bk + 1 :], ring[..., :bk]], -1)
    return jnp.flip(turned, -1)


# ------------------------------------------------------------------- tile loads that are slices


@dataclasses.dataclass(frozen=True)
class SlicePlan:
    """A tile load whose every dimension is a literal, b, h, q + c or kv + c, each at most once.

    walks   per dimension of the array: ("at", i), ("b", 0), ("h", 0), ("q", c) or ("kv", c)
    """

    walks: tuple[tuple[str, int], ...]

    @property
    def kv_dim(self) -> int:
        return [w for w, _ in self.walks].index("kv")

    @property
    def order(self) -> tuple[int, ...]:
        """Permutation of the array's dimensions to literals, b, h, q, kv."""
        rank = {"at": 0, "b": 1, "h": 2, "q": 3, "kv": 4}
        return tuple(sorted(range(len(self.walks)), key=lambda d: rank[self.walks[d][0]]))

    def shape(self, region: Region) -> tuple[int, int, int, int]:
        names = {w for w, _ in self.walks}
        nb, nh, bq, width = region.shape
        return (nb if "b" in names else 1, nh if "h" in names else 1, bq, width)

    def window(self, region: Region, block: int) -> tuple[list[Array | int], list[int]]:
        """Starts and sizes of the slice of one key block."""
        at = {"b": region.b0, "h": region.h0, "q": region.q0, "kv": region.kv_starts[block], "at": 0}
        size = {"b": region.nb, "h": region.nh, "q": region.bq, "kv": region.bk, "at": 1}
        starts: list[Array | int] = [jnp.asarray(at[walk] + offset, jnp.int32) for walk, offset in self.walks]
        return starts, [size[walk] for walk, _ in self.walks]

    def padding(self, array: ArrayType, q_len: int, kv_len: int) -> list[tuple[int, int]]:
        """How much each dimension must grow for tiles that cover q_len x kv_len (multiples of the tile)."""
        need = {"q": q_len, "kv": kv_len}
        return [
            (0, max(0, need[walk] + offset - size) if walk in need else 0)
            for (walk, offset), size in zip(self.walks, array.shape, strict=True)
        ]


def slice_plan(load: Load, array: ArrayType) -> SlicePlan | None:
    """The plan of a contiguous tile load, None where it must gather."""
    if classify_load(load).kind != TILE or not classify_load(load).contiguous:
        return None
    walks: list[tuple[str, int]] = []
    for atom, size in zip(load.index, array.shape, strict=True):
        walk = _walk(atom, size)
        if walk is None or (walk[0] != "at" and walk[0] in {w for w, _ in walks}):
            return None
        walks.append(walk)
    return SlicePlan(tuple(walks))


def _walk(atom: Atom, size: int) -> tuple[str, int] | None:
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


def cells(axes: Axes, region: Region) -> int:
    """How many numbers a value of these axes has over the region."""
    sizes = dict(zip(("b", "h", "q", "kv"), region.shape, strict=True))
    return math.prod(n for a, n in sizes.items() if a in axes)


def joint_axes(atoms: Sequence[Atom]) -> Axes:
    return frozenset().union(*(axes_of(a) for a in atoms))
