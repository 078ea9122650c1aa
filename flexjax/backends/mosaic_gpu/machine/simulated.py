"""What runs in the simulator in place of the operations of this room, by the same names: plain jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu.machine import partial_sums as sums
from flexjax.backends.mosaic_gpu.machine import row_scales
from flexjax.backends.mosaic_gpu.machine.allocation import alike
from flexjax.backends.mosaic_gpu.machine.columns import COLUMNS, Exchange
from flexjax.backends.mosaic_gpu.machine.exponential import GROUP, exp2_polynomial
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.machine.memory import Index, in_compute_dtype
from flexjax.backends.mosaic_gpu.machine.mma_products import half_piece
from flexjax.backends.mosaic_gpu.machine.registers import column_iota
from flexjax.backends.mosaic_gpu.machine.row_scales import RowScale
from flexjax.backends.mosaic_gpu.machine.shared_memory import (
    COPIED_ROWS,
    ClusterBarriers,
    ClusterTiles,
    Description,
    OverlaidTensorTiles,
)
from flexjax.backends.mosaic_gpu.machine.simulator import Result
from flexjax.backends.mosaic_gpu.machine.thread_tiles import PERIOD, SMALL_POWER, whole_power
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPS

# ------------------------------------------------------------------- the launch


def interpreter() -> object:
    return plgpu.InterpretGPUParams()  # pyright: ignore[reportAttributeAccessIssue]  # it exists from jax 0.11 on


def allocated(part: Description) -> object:
    """Tiles of a cluster lie in global memory, each of two overlaid ones in a place of its own."""
    if isinstance(part, ClusterTiles):
        return None
    if isinstance(part, ClusterBarriers):
        return plgpu.ClusterBarrier(collective_axes=(COLUMNS,), num_barriers=part.groups)
    if isinstance(part, OverlaidTensorTiles):
        return alike(part.first), alike(part.second)
    return alike(part)


# Nothing here fills in zeros past the end of an array, so operands have what a kernel reads there.


def whole_tiles(x: jax.Array, lengths: tuple[int, int]) -> jax.Array:
    widths = [(0, max(0, length - size)) for length, size in zip(lengths, x.shape[-2:], strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + widths)


def pool(pages: jax.Array) -> jax.Array:
    return jnp.pad(pages, ((0, 1), (0, 0), (0, 0), (0, 0)))


# ------------------------------------------------------------------- order, barriers, copies


def ordered(values: Result) -> Result:
    return values


def not_hoisted(index: Scalar) -> Scalar:
    return index


def fence_shared() -> None:
    plgpu.commit_smem()


def arrive_read(free: Ref) -> None:
    plgpu.commit_smem()  # the simulator's products read the slot as ordinary memory
    plgpu.barrier_arrive(free)


def clip_rows(*, aligned: bool = False) -> None:
    """Nothing: arrays have whole tiles."""


def begin(exchange: Exchange[Ref] | None) -> None:
    """Nothing: the barriers are the simulator's."""


def end(exchange: Exchange[Ref] | None) -> None:
    """Nothing: the tiles lie in global memory."""


class PartialSums(sums.PartialSums):
    """The exchange through global memory."""

    def send(self, tile: jax.Array, number: Scalar | int) -> None:
        if self.exchange is None:
            return
        self.exchange.tiles[lax.axis_index("program"), lax.axis_index(COLUMNS), self.group] = tile
        plgpu.barrier_arrive(self.exchange.arrived.at[self.group])

    def receive(self, tile: jax.Array, number: Scalar | int) -> jax.Array:
        if self.exchange is None:
            return tile
        exchange, rank = self.exchange, lax.axis_index(COLUMNS)
        assert exchange.read is not None
        plgpu.barrier_wait(exchange.arrived.at[self.group])
        found = tile + exchange.tiles[lax.axis_index("program"), 1 - rank, self.group]
        plgpu.barrier_arrive(exchange.read.at[self.group])
        plgpu.barrier_wait(exchange.read.at[self.group])
        return found


def _copy_by_threads(source: Ref, target: Ref, rows: Scalar | None) -> None:
    found = source[...]
    if rows is not None:
        found = jnp.where(lax.broadcasted_iota(jnp.int32, found.shape, 0) < rows, found, 0)
    target[...] = found


_copy_plain_by_threads = _copy_by_threads


def _clear_by_threads(target: Ref, rows: Scalar) -> None:
    found = target[...]
    target[...] = jnp.where(lax.broadcasted_iota(jnp.int32, found.shape, 0) < rows, found, 0)


def _end_group() -> None:
    """Nothing: a copy is an assignment."""


def _wait_for_groups(pending: int) -> None:
    """Nothing: a copy is an assignment."""


def _meet(groups: int, meeting: Ref | None) -> None:
    plgpu.commit_smem()  # the simulator's products read the slots as ordinary memory
    if meeting is not None:
        plgpu.barrier_arrive(meeting.at[0])
        plgpu.barrier_wait(meeting.at[0])


# ------------------------------------------------------------------- captured arrays


def gather(
    ref: Ref, index: tuple[Index, ...], varies: tuple[bool, ...], kind: str, shape: tuple[int, ...]
) -> jax.Array:
    return in_compute_dtype(ref[...][tuple(jnp.broadcast_to(i, shape) for i in index)])


def load_affine(
    ref: Ref,
    index: tuple[Index, ...],
    steps: tuple[tuple[int, int] | None, ...],
    kind: str,
    shape: tuple[int, ...],
    used_rows: int | None = None,
    pairs: bool = False,
) -> jax.Array:
    """Unlike the device it clamps indices to the array."""
    rows = jnp.arange(shape[0]) if used_rows is None else jnp.minimum(jnp.arange(shape[0]), used_rows - 1)
    columns = jnp.arange(shape[-1])
    row = {"row": rows, "column": 0, "tile": rows[:, None]}[kind]
    column = {"row": 0, "column": columns, "tile": columns[None, :]}[kind]
    full = [i if s is None else i + s[0] * row + s[1] * column for i, s in zip(index, steps, strict=True)]
    full = [jnp.clip(i, 0, n - 1) for i, n in zip(full, ref.shape, strict=True)]
    return in_compute_dtype(ref[...][tuple(jnp.broadcast_to(i, shape) for i in full)])


def load(ref: Ref, layout: object, *, optimized: bool = True) -> jax.Array:
    return ref[...]


def load_staged(tile: Ref) -> jax.Array:
    return in_compute_dtype(tile[...])


def load_staged_transposed(tile: Ref) -> jax.Array:
    return in_compute_dtype(tile[...].T)


# ------------------------------------------------------------------- products


def add_wgmma(total: jax.Array, weights: jax.Array, values: Ref) -> jax.Array:
    return total + jnp.dot(weights.astype(jnp.float32), values[...].astype(jnp.float32))


def add_product(total: jax.Array, weights: jax.Array, right: Ref) -> jax.Array:
    return add_wgmma(total, weights, right)


def product_transposed(left: Ref, right: Ref) -> jax.Array:
    return jnp.dot(left[...].astype(jnp.float32), right[...].astype(jnp.float32).T)


def half_shape(rows: int, columns: int) -> tuple[int, int]:
    return rows, columns // 2


def add_half(total: jax.Array, weights: Ref, right: Ref, half: Scalar) -> jax.Array:
    depth, columns = right.shape
    pieces = right[...].astype(jnp.float32).reshape(depth, -1, 2, half_piece(columns))
    own = jnp.where(half == 0, pieces[:, :, 0], pieces[:, :, 1]).reshape(depth, columns // 2)
    return total + jnp.dot(weights[...].astype(jnp.float32), own)


def write_rows(tile: jax.Array, target: Ref, rows: Scalar | None, half: Scalar | None = None) -> None:
    width = tile.shape[1]
    piece = width if half is None else half_piece(target.shape[1])
    for first in range(0, width, piece):
        start = 0 if half is None else 2 * first + half * piece
        target.at[:, pl.ds(start, piece)][...] = tile[:, first : first + piece]


# ------------------------------------------------------------------- tensor memory


def load_tile(source: Ref) -> jax.Array:
    lanes = plgpu.async_load_tmem(source)
    plgpu.wait_load_tmem()
    return lanes.reshape(WARPS, 2, COPIED_ROWS, -1).transpose(1, 0, 2, 3).reshape(lanes.shape)


def store_tile(target: Ref, tile: jax.Array) -> None:
    lanes = tile.reshape(2, WARPS, COPIED_ROWS, -1).transpose(1, 0, 2, 3).reshape(tile.shape)
    plgpu.async_store_tmem(target, lanes)


def stored() -> None:
    plgpu.commit_tmem()


# ------------------------------------------------------------------- tiles and vectors


def splat(value: jax.typing.ArrayLike, kind: str, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast(jnp.asarray(value), shape)


def columns_from(start: Scalar, columns: int) -> jax.Array:
    return column_iota(columns) + start


def repeat_columns(narrow: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jnp.tile(narrow, (1, shape[1] // PERIOD))


def affine_tile(
    row: jax.Array, step: float | np.float32 | Scalar, shape: tuple[int, int], period: int = 0
) -> jax.Array:
    whole = row[:, None] + jnp.arange(shape[1]).astype(row.dtype)[None, :] * jnp.asarray(step, row.dtype)
    return whole & np.int32(period - 1) if period else whole


def add_column_slope(vector: jax.Array, step: jax.Array) -> jax.Array:
    return vector + step * jnp.arange(vector.shape[0]).astype(vector.dtype)


def compare_columns(step: int, name: str, row: jax.Array, shape: tuple[int, int]) -> jax.Array:
    columns = step * jnp.arange(shape[1], dtype=jnp.int32)[None, :]
    compare = {"lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge, "eq": lax.eq, "ne": lax.ne}[name]
    return compare(*jnp.broadcast_arrays(columns, row[:, None]))


def add_period_slope(tile: jax.Array, step: jax.Array) -> jax.Array:
    return tile + step * (jnp.arange(tile.shape[1]) // PERIOD * PERIOD).astype(tile.dtype)[None, :]


def maximum_by_column(tile: jax.Array) -> jax.Array:
    rows, columns = tile.shape
    return tile.reshape(rows, columns // PERIOD, PERIOD).max(axis=1)


def follow_maximum(
    maximum: jax.Array,
    factor: np.float32,
    offset: jax.Array | None,
    base: jax.Array,
    threshold: float,
    powers_of_two: float = 1.0,
    whole: bool = False,
    row_scaled: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    top = maximum.max(axis=1) * factor + (np.float32(0) if offset is None else offset)
    above_base = top - base > np.float32(threshold) if row_scaled else top > base + np.float32(threshold)
    top = jnp.where(above_base, whole_power(top, powers_of_two) if whole else top, base)
    if row_scaled:
        return top, row_scales.rescaling(base, top, whole), jnp.int32(1)
    return top, jnp.exp2((base - top) * np.float32(powers_of_two)), jnp.int32(1)


def exponent(scores: jax.Array, scale: RowScale) -> jax.Array:
    factor, shift = (x.reshape(x.shape + (1,) * (scores.ndim - 1)) for x in scale)
    return row_scales.fused(scores, factor, shift)


def exp2_tile(x: jax.Array, share: int) -> jax.Array:
    """A simulated thread has no registers: pairs of columns take their place."""
    if not share:
        return jnp.exp2(x)
    chosen = jnp.arange(x.shape[1]) // 2 % GROUP < share
    return jnp.where(chosen[None, :], exp2_polynomial(x), jnp.exp2(x))


def logistic_tile(exponents: jax.Array, small: bool) -> jax.Array:
    """A simulated thread is alone: it votes for the whole tile."""
    z, one = jnp.exp2(exponents), np.float32(1)
    if not small:
        return one / (one + z)
    return jnp.where((z > np.float32(SMALL_POWER)).any(), one / (one + one / z), z - z * z)


def times(row: jax.Array, factor: np.float32) -> jax.Array:
    return row * factor


def rounded_tile(tile: jax.Array, dtype: str) -> jax.Array:
    return tile_math.round_to(tile, dtype)


def bfloat16_tile(tile: jax.Array) -> jax.Array:
    return tile_math.round_to(tile, "bfloat16")


def partial_row_sums(tile: jax.Array, fuse: bool = False) -> jax.Array:
    """The sum of the whole row."""
    return tile.sum(axis=1)


def sum_lanes(row: jax.Array) -> jax.Array:
    return row


def shared_by_lanes(row: jax.Array) -> jax.Array:
    return row


def scale_rows(tile: jax.Array, factor: jax.Array, needed: jax.Array) -> jax.Array:
    return tile * factor[:, None]


def hide(tile: jax.Array, visible: jax.Array, hidden: float = -np.inf) -> jax.Array:
    return jnp.where(visible, tile, np.float32(hidden))
