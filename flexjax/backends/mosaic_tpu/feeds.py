"""How the values computed outside reach a kernel: arrays, block specs, and reads on a part of a tile.

A kernel has several programs (score or its derivative, mask, dropout); `Feeds` gathers the operands of all of them:

    scalars      two SMEM tables by scalar prefetch, float32 and int32, [n, batch * heads]
    rows         [batch or 1, heads or 1, 1, length] blocks along the lanes
    diagonals    [batch or 1, heads or 1, 8, length] windows at 128-aligned offsets
    tiles        [batch or 1, heads or 1, q_len, kv_len] blocks; a captured array itself as [lead, rows, columns]
    tables       [1, n] whole, for gathers
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_tpu import outside, tile_programs
from flexjax.backends.mosaic_tpu.tile_programs import LANES, Feed, Split, View
from flexjax.ir.program import Load

ZERO = np.int32(0)

Where = Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array]]
"""(grid indices and prefetched refs) -> batch, query head, q tile, kv tile."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes that block specs need: the call, the tile, and the orientation of a kernel."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    q_axis: int

    @property
    def q_tiles(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def kv_tiles(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def row_block(self) -> int:
        return self.block_q if self.q_axis == 0 else self.block_kv

    @property
    def col_block(self) -> int:
        return self.block_kv if self.q_axis == 0 else self.block_q

    @property
    def window(self) -> int:
        """Lanes of a diagonal window: all diagonals of a tile, from one tile row before its start."""
        return -(-(self.row_block + self.col_block) // LANES) * LANES

    @property
    def diagonals(self) -> int:
        """Length of an array of diagonals, padded so that every window lies inside."""
        rows = self.q_tiles * self.block_q if self.q_axis == 0 else self.kv_tiles * self.block_kv
        cols = self.kv_tiles * self.block_kv if self.q_axis == 0 else self.q_tiles * self.block_q
        return -(-(rows + cols) // LANES) * LANES + LANES

    def window_start(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """First lane of the window of tile (q tile i, kv tile j)."""
        q_step = self.block_q // LANES if self.q_tiles > 1 else 0
        kv_step = self.block_kv // LANES if self.kv_tiles > 1 else 0
        q0, k0 = i * np.int32(q_step), j * np.int32(kv_step)
        ahead = k0 - q0 if self.q_axis == 0 else q0 - k0
        before = (self.q_tiles - 1) * q_step if self.q_axis == 0 else (self.kv_tiles - 1) * kv_step
        # Written as a multiple of the lanes, for the compiler to see that it is one.
        return (ahead + np.int32(before)) * np.int32(LANES)

    def lay_diagonals(self, values: jax.Array) -> jax.Array:
        """[..., kv_len + q_len - 1] by ascending q - kv -> [..., diagonals] in the kernel's order.

        Element (row i, column j) of the matrix reads place j - i + rows_total.
        """
        rows_total = self.q_tiles * self.block_q if self.q_axis == 0 else self.kv_tiles * self.block_kv
        if self.q_axis == 0:
            values = jnp.flip(values, -1)  # kv - q ascending from 1 - q_len
            before = rows_total + 1 - self.q_len
        else:
            before = rows_total + 1 - self.kv_len
        after = self.diagonals - before - values.shape[-1]
        return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(before, after)])

    def unlay_diagonals(self, values: jax.Array) -> jax.Array:
        """The transpose of `lay_diagonals`."""
        rows_total = self.q_tiles * self.block_q if self.q_axis == 0 else self.kv_tiles * self.block_kv
        n = self.q_len + self.kv_len - 1
        if self.q_axis == 0:
            start = rows_total + 1 - self.q_len
            return jnp.flip(values[..., start : start + n], -1)
        start = rows_total + 1 - self.kv_len
        return values[..., start : start + n]


@dataclasses.dataclass
class Operand:
    """One array of a kernel with its block spec."""

    array: jax.Array
    spec: pl.BlockSpec


class Feeds:
    """Operands of the programs of one kernel, and the reading of them inside it."""

    def __init__(
        self, geometry: Geometry, programs: Sequence[tuple[Split, Sequence[jax.Array]]], where: Where, scalar_at: int
    ):
        """`where` decodes a grid step; `scalar_at` is the place of the two scalar tables among the prefetched operands."""
        self.geometry = geometry
        self.where = where
        self.operands: list[Operand] = []
        self.scalar_at = scalar_at
        self._slot: dict[tuple[int, int], int] = {}
        self._lead: dict[tuple[int, int], int] = {}
        floats: list[jax.Array] = []
        ints: list[jax.Array] = []
        self._scalar: dict[tuple[int, int], tuple[int, int]] = {}
        flat = geometry.batch * geometry.heads

        def scalar(values: jax.Array, dtype: str) -> tuple[int, int]:
            pile = floats if dtype == "float32" else ints
            kind = 0 if dtype == "float32" else 1
            wide = jnp.broadcast_to(values, (geometry.batch, geometry.heads, 1, 1)).reshape(flat)
            pile.append(_travelling(wide, dtype))
            return kind, len(pile) - 1

        for number, (parts, captures) in enumerate(programs):
            values = self._evaluate(parts, captures)
            for feed in parts.feeds:
                key = (number, feed.val.id)
                if feed.place == tile_programs.UNIFORM:
                    self._scalar[key] = scalar(values[feed.val.id], feed.dtype)
                elif feed.direct is not None:
                    self._add_direct(key, parts, feed.direct, captures, scalar)
                else:
                    self._slot[key] = len(self.operands)
                    self.operands.append(self._operand(feed, _travelling(values[feed.val.id], feed.dtype)))
            for load in parts.gathers:
                self._slot[(number, load.out.id)] = len(self.operands)
                self.operands.append(_table(captures[load.capture]))
        self.tables = (
            jnp.stack(floats) if floats else jnp.zeros((1, 1), jnp.float32),
            jnp.stack(ints) if ints else jnp.zeros((1, 1), jnp.int32),
        )

    def _evaluate(self, parts: Split, captures: Sequence[jax.Array]) -> dict[int, jax.Array]:
        g = self.geometry
        found: dict[int, jax.Array] = {}
        whole = outside.whole_grid(g.batch, g.heads, g.q_len, g.kv_len)
        slant = outside.diagonal_grid(g.batch, g.heads, g.q_len, g.kv_len)
        for grid, places in ((whole, ("uniform", "q", "kv", "tile")), (slant, ("delta",))):
            feeds = [f for f in parts.of_place(*places) if f.direct is None]
            arrays = outside.evaluate(parts.program, captures, grid, [f.val for f in feeds]) if feeds else []
            found |= {f.val.id: a for f, a in zip(feeds, arrays, strict=True)}
        return found

    # ------------------------------------------------------------------ operands

    def _operand(self, feed: Feed, values: jax.Array) -> Operand:
        g = self.geometry
        batch, heads = feed.sizes(g.batch, g.heads)

        def lead(b: jax.Array, h: jax.Array) -> tuple[jax.Array | np.int32, jax.Array | np.int32]:
            return (b if batch > 1 else ZERO, h if heads > 1 else ZERO)

        if feed.place in (tile_programs.ROW, tile_programs.COLUMN):
            length, block = (g.q_len, g.block_q) if feed.place == tile_programs.ROW else (g.kv_len, g.block_kv)
            values = jnp.broadcast_to(values.reshape(*values.shape[:2], 1, -1), (batch, heads, 1, length))

            def at_row(*grid: jax.Array) -> tuple:
                b, h, i, j = self.where(*grid)
                return (*lead(b, h), ZERO, i if feed.place == tile_programs.ROW else j)

            return Operand(values, pl.BlockSpec((None, None, 1, block), at_row))
        if feed.place == tile_programs.DELTA:
            values = jnp.broadcast_to(values[..., 0], (batch, heads, g.q_len + g.kv_len - 1))
            values = tile_programs.skewed(g.lay_diagonals(values))

            def at_window(*grid: jax.Array) -> tuple:
                b, h, i, j = self.where(*grid)
                return (*lead(b, h), ZERO, g.window_start(i, j))

            return Operand(values, pl.BlockSpec((None, None, pl.Element(8), pl.Element(g.window)), at_window))
        values = jnp.broadcast_to(values, (batch, heads, g.q_len, g.kv_len))

        def at_tile(*grid: jax.Array) -> tuple:
            b, h, i, j = self.where(*grid)
            return (*lead(b, h), i, j)

        return Operand(values, pl.BlockSpec((None, None, g.block_q, g.block_kv), at_tile))

    def _add_direct(
        self,
        key: tuple[int, int],
        parts: Split,
        load: Load,
        captures: Sequence[jax.Array],
        scalar: Callable[[jax.Array, str], tuple[int, int]],
    ) -> None:
        """Blocks of a captured array; which [rows, columns] plane is a number in the int32 table."""
        g = self.geometry
        array = captures[load.capture]
        shape = array.shape[:-2]
        grid = outside.whole_grid(g.batch, g.heads, 1, 1)
        plane = jnp.zeros((1, 1, 1, 1), jnp.int32)
        if shape:
            indices = outside.evaluate(parts.program, captures, grid, load.index[:-2])
            for size, index in zip(shape, indices, strict=True):
                plane = plane * np.int32(size) + index.astype(jnp.int32)
        _, row = scalar(plane, "int32")
        one = math.prod(shape) == 1

        def at_plane(*grid_and_tables: jax.Array) -> tuple:
            b, h, i, j = self.where(*grid_and_tables)
            table = grid_and_tables[self.scalar_at - self._prefetched :][1] if not one else None
            lead = ZERO if table is None else table[row, b * np.int32(g.heads) + h]
            return (lead, i, j)

        self._slot[key] = len(self.operands)
        flat = array.reshape(-1, *array.shape[-2:])
        self.operands.append(Operand(flat, pl.BlockSpec((None, g.block_q, g.block_kv), at_plane)))

    _prefetched = 0

    def set_prefetched(self, count: int) -> None:
        """Number of prefetched operands in all, so that index maps find the scalar tables from the end."""
        self._prefetched = count

    # ------------------------------------------------------------------ inside the kernel

    def view(
        self,
        number: int,
        scalars: Sequence[jax.Ref],
        refs: Sequence[jax.Ref],
        at: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
        part: tuple[int, int, int, int],
    ) -> View:
        """The part (row offset, rows, column offset, columns) of the tile at (b, h, q tile, kv tile) for one program."""
        g = self.geometry
        b, h, i, j = at
        row0, rows, col0, cols = part
        q0, k0 = i * np.int32(g.block_q), j * np.int32(g.block_kv)
        q_off, kv_off = (row0, col0) if g.q_axis == 0 else (col0, row0)
        q_size, kv_size = (rows, cols) if g.q_axis == 0 else (cols, rows)

        def read(feed: Feed) -> jax.Array:
            key = (number, feed.val.id)
            if feed.place == tile_programs.UNIFORM:
                kind, row = self._scalar[key]
                return scalars[kind][row, b * np.int32(g.heads) + h]
            ref = refs[self._slot[key]]
            if feed.place == tile_programs.ROW:
                line = ref[:, q_off : q_off + q_size]
                return line if g.q_axis == 1 else _stand(line)
            if feed.place == tile_programs.COLUMN:
                line = ref[:, kv_off : kv_off + kv_size]
                return line if g.q_axis == 0 else _stand(line)
            if feed.place == tile_programs.DELTA:
                return tile_programs.toeplitz(ref[...], rows, cols, g.row_block + col0 - row0)
            block = ref[q_off : q_off + q_size, kv_off : kv_off + kv_size]
            return block if g.q_axis == 0 else _turn(block)

        def table(load: Load) -> jax.Array:
            return refs[self._slot[(number, load.out.id)]][...]

        return View(g.q_axis, q0 + np.int32(q_off), k0 + np.int32(kv_off), b, h, rows, cols, read, table)


def _stand(line: jax.Array) -> jax.Array:
    """(1, n) -> (n, 1)."""
    return line.reshape(line.shape[1], 1)


def _travelling(values: jax.Array, dtype: str) -> jax.Array:
    """float32 or int32; uint32 keeps its bits."""
    if values.dtype == jnp.uint32:
        return lax.bitcast_convert_type(values, jnp.int32)
    return values.astype(dtype)


def _turn(block: jax.Array) -> jax.Array:
    return block.astype(jnp.float32).T if block.dtype == jnp.bfloat16 else block.T


def _table(array: jax.Array) -> Operand:
    """A captured array as one row of 32-bit lanes."""
    flat = array.reshape(1, -1)
    flat = flat.astype("float32" if jnp.issubdtype(array.dtype, jnp.floating) else "int32")
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % LANES)))
    return Operand(flat, pl.BlockSpec(flat.shape, lambda *_: (ZERO, ZERO)))
