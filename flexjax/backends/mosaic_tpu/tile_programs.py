"""Evaluates a split program on a strip of a tile, inside a kernel.

`evaluate_strip` runs the steps that split_program.py leaves to the kernel; hoisted values are read through the
callbacks of a `StripView`. Values have the shapes (), (rows, 1), (1, columns) or (rows, columns) of the strip, by their
axes. It has a loop of its own beside ir/evaluate.py because the hoisted values are read before the first step.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.mosaic_tpu import tile_ops
from flexjax.backends.mosaic_tpu.split_program import HoistedValue, SplitProgram
from flexjax.backends.mosaic_tpu.vector_ops import LANES
from flexjax.integers import cdiv
from flexjax.ir import program as ir
from flexjax.ir.program import Atom, Call, Lit, Load, Op


class Strip(typing.NamedTuple):
    """The columns of a tile whose scores are computed at a time: all `rows` of the tile, `cols` columns from `col0`."""

    rows: int
    col0: int
    cols: int

    @property
    def columns(self) -> slice:
        return slice(self.col0, self.col0 + self.cols)


@dataclasses.dataclass
class StripView:
    """Where a strip lies in the attention matrix, and how to read the operands of one program on it."""

    q_axis: int  # 0: queries are rows (sublanes), keys columns (lanes); 1: the other way round
    q_start: jax.Array  # position of the first query
    kv_start: jax.Array  # position of the first key
    q_row: jax.Array  # row of the call of the first query
    kv_row: jax.Array  # row of the call of the first key
    b: jax.Array
    h: jax.Array
    rows: int
    cols: int
    # a hoisted value on the strip, in a shape that broadcasts to (rows, cols)
    read: Callable[[HoistedValue], jax.Array]
    table: Callable[[Load], jax.Array]  # the whole (1, n) table of a gathering load

    def _count(self, dim: int) -> jax.Array:
        """int32 0, 1, ... along dimension `dim` of the strip: (rows, 1) for 0, (1, cols) for 1."""
        return lax.broadcasted_iota(jnp.int32, (self.rows, 1) if dim == 0 else (1, self.cols), dim)

    def offsets(self, dim: int) -> jax.Array:
        """float32 0, 1, ... along dimension `dim` of the strip: (rows, 1) for 0, (1, cols) for 1."""
        return self._count(dim).astype(jnp.float32)

    @functools.cached_property
    def q(self) -> jax.Array:
        """Positions, int32 (rows, 1), or (1, cols) if q_axis is 1; they may lie past the end."""
        return self.q_start + self._count(self.q_axis)

    @functools.cached_property
    def kv(self) -> jax.Array:
        """Positions, int32 (1, cols), or (rows, 1) if q_axis is 1; they may lie past the end."""
        return self.kv_start + self._count(1 - self.q_axis)

    @property
    def q_rows(self) -> jax.Array:
        """Rows of query, counted in the call, in the shape of `q`."""
        return self.q_row + self._count(self.q_axis)

    @property
    def kv_rows(self) -> jax.Array:
        """Rows of key, counted in the call, in the shape of `kv`."""
        return self.kv_row + self._count(1 - self.q_axis)


def evaluate_strip(split: SplitProgram, view: StripView, score: jax.Array | None) -> list[jax.Array]:
    """The results of a split program on a strip, broadcastable to (rows, cols); `score` None for a mask or dropout."""
    env: dict[int, jax.Array] = {}
    for value in split.hoisted:
        env[value.val.id] = _as_dtype(view.read(value), value.val.dtype)

    def read(atom: Atom) -> jax.Array:
        if isinstance(atom, Lit):
            return typing.cast(jax.Array, np.asarray(atom.value, jnp.dtype(atom.dtype))[()])
        if atom.id in env:
            return env[atom.id]
        if atom.id == ir.SCORE:
            assert score is not None, "a mask reads the score"
            return score.astype(jnp.dtype(atom.dtype))
        return {ir.B: view.b, ir.H: view.h, ir.Q: view.q, ir.KV: view.kv}[atom.id]

    for step in split.steps:
        if isinstance(step, Op):
            env[step.out.id] = tile_ops.apply(step, [read(a) for a in step.inputs])
        elif isinstance(step, Call):
            env[step.outs[0].id] = tile_ops.CALLS[step.name](read(step.inputs[0]))
        else:
            assert isinstance(step, Load)
            capture = split.program.captures[step.capture]
            flat = _flat_index([read(a) for a in step.index], capture.shape, (view.rows, view.cols))
            env[step.out.id] = _as_dtype(_gather(view.table(step), flat, math.prod(capture.shape)), step.out.dtype)
    return [jnp.asarray(read(a)) for a in split.results]


def _as_dtype(value: jax.Array, dtype: str) -> jax.Array:
    """A hoisted or gathered value, which the kernel gets as float32 or int32, in its own dtype."""
    target = jnp.dtype(dtype)
    if value.dtype == target:
        return value
    return value != 0 if dtype == "bool" else value.astype(target)


def _flat_index(index: Sequence[jax.Array], shape: tuple[int, ...], strip: tuple[int, int]) -> jax.Array:
    """The row-major position of the elements with these indices, int32 in the (rows, cols) of the strip."""
    flat: jax.Array | np.ndarray = np.zeros((), np.int32)
    for atom, size in zip(index, shape, strict=True):
        flat = flat * np.int32(size) + jnp.asarray(atom).astype(jnp.int32)
    return jnp.broadcast_to(flat, strip)


ALONG_LANES = lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
)
"""The gather of `x[i, index[i, j]]`."""


def _gather(table: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """table[0, index], (rows, cols), by lane gathers from 128 entries at a time; `size` entries are real."""
    rows, cols = index.shape
    # Positions past the end of the matrix may read anything.
    index = jnp.clip(index, 0, size - 1)
    chunks = cdiv(size, LANES)
    parts = []
    for start in range(0, cols, LANES):
        here = index[:, start : start + LANES]
        width = here.shape[1]
        if width < LANES:
            here = jnp.concatenate([here, jnp.zeros((rows, LANES - width), here.dtype)], axis=1)
        low = here & (LANES - 1)
        found = None
        for c in range(chunks):
            entries = jnp.broadcast_to(table[:, c * LANES : (c + 1) * LANES], (rows, LANES))
            # jnp.take_along_axis would make another gather of a single row, which has no form in a kernel
            picked = lax.gather(entries, low[..., None], ALONG_LANES, (1, 1), mode="promise_in_bounds")
            found = picked if found is None else jnp.where((here >> 7) == c, picked, found)
        assert found is not None
        parts.append(found[:, :width])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
