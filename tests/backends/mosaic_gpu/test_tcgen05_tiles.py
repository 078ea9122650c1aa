"""The order of rows in tensor memory makes what tcgen05.ld gives a thread its part of a WGMMA accumulator."""

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.machine import tcgen05_tiles as machine_tcgen05_tiles
from flexjax.backends.mosaic_gpu.machine.registers import TILE, lowered
from flexjax.backends.mosaic_gpu.machine.shared_memory import TMEM_LANES


def positions(layout: fragmented_array.TiledLayout, shape: tuple[int, int]) -> np.ndarray:
    """[warps * lanes, registers, elements of a register, 2]: (row, column) of what each thread holds."""
    tiles = layout.tiling
    where = np.stack(np.indices(shape), axis=-1)
    for tile in tiles.tiles:  # each splits the trailing dimensions of the one before, as Tiling.tile_shape does
        lead = where.shape[: where.ndim - 1 - len(tile)]
        tail = where.shape[where.ndim - 1 - len(tile) : -1]
        split = [n for size, part in zip(tail, tile, strict=True) for n in (size // part, part)]
        where = where.reshape(*lead, *split, 2)
        first = len(lead)
        outer, inner = range(first, first + 2 * len(tile), 2), range(first + 1, first + 2 * len(tile), 2)
        where = where.transpose(*range(first), *outer, *inner, where.ndim - 1)
    last = where.ndim - 1
    threads = [last + d for d in (*layout.warp_dims, *layout.lane_dims)]
    vector = last + layout.vector_dim
    others = [d for d in range(last) if d not in (*threads, vector)]
    count = int(np.prod([where.shape[d] for d in threads]))
    return where.transpose(*threads, *others, vector, last).reshape(count, -1, where.shape[vector], 2)


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_registers_are_a_wgmma_accumulator(columns: int) -> None:
    shape = (TMEM_LANES, columns)
    lanes, tile = (positions(lowered(x), shape) for x in (machine_tcgen05_tiles.LANES, TILE))
    row_of_lane = np.empty(TMEM_LANES, int)
    for lane, row in machine_tcgen05_tiles.copied_rows():
        row_of_lane[lane : lane + 16] = np.arange(row, row + 16)
    np.testing.assert_array_equal(np.sort(row_of_lane), np.arange(TMEM_LANES))
    renamed = lanes.reshape(128, columns // 8, 2, 2, 2, 2).transpose(0, 2, 1, 3, 4, 5).reshape(tile.shape)
    np.testing.assert_array_equal(row_of_lane[renamed[..., 0]], tile[..., 0])
    np.testing.assert_array_equal(renamed[..., 1], tile[..., 1])


def test_layouts_are_those_that_mosaic_loads_and_stores() -> None:
    assert lowered(machine_tcgen05_tiles.LANES) == fragmented_array.TCGEN05_LAYOUT
    assert machine_tcgen05_tiles.LANES is plgpu.Layout.TCGEN05
