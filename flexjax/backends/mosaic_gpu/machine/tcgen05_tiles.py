"""Tiles between tensor memory and the registers of a warpgroup, in the register layout of a WGMMA accumulator.

Mods, masks and softmax compute on tiles in that layout (registers.py). tcgen05.ld gives warp w lanes 32 w .. 32 w + 31
of tensor memory, four groups of eight rows; a warp of a WGMMA accumulator of 128 rows has rows 16 w .. 16 w + 15 and 64
more than these. Within eight rows both layouts are the same. So the rows of a query tile lie in tensor memory in an
order of their own,

    lane 32 w + 16 a + i     holds row 64 a + 16 w + i of the tile      w = 0 .. 3, a = 0 .. 1, i = 0 .. 15

and then what a thread loads is its part of a WGMMA accumulator as it is. A product has the rows of its left operand, so
the order comes from the copies of the queries (`copied_rows`), and P and the output have it too.
"""

from collections.abc import Iterator

import jax
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, inline_mgpu, ptx
from flexjax.backends.mosaic_gpu.machine.registers import TILE, lowered
from flexjax.backends.mosaic_gpu.machine.shared_memory import COPIED_ROWS, TMEM_LANES
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPS

LANES = plgpu.Layout.TCGEN05
"""The layout in which tcgen05.ld and tcgen05.st take a tile: rows are lanes of tensor memory."""


def copied_rows() -> Iterator[tuple[int, int]]:
    """Yields (first lane, first row) of every COPIED_ROWS rows of a tile, by rising lane."""
    for lane in range(0, TMEM_LANES, COPIED_ROWS):
        warp, half = lane // (2 * COPIED_ROWS), lane // COPIED_ROWS % 2
        yield lane, half * WARPS * COPIED_ROWS + warp * COPIED_ROWS


@device_op
def load_tile(source: Ref) -> jax.Array:
    """A tile in registers, [TMEM_LANES, columns], from tensor memory; a warp may call it alone."""
    found = plgpu.async_load_tmem(source, layout=LANES)

    @inline_mgpu()
    def wait() -> None:
        """`plgpu.wait_load_tmem` also waits for the other warps."""
        ptx("tcgen05.wait::ld.sync.aligned;")

    wait()

    @inline_mgpu(LANES, returns=plgpu.ShapeDtypeStruct(found.shape, found.dtype, layout=TILE))
    def renamed(tile: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """[columns / 8][2 a + half] becomes [a][columns / 8][half]."""
        columns, layout = tile.shape[1], lowered(TILE)
        registers = tile.registers.reshape(columns // 8, 2, 2).transpose(1, 0, 2)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(tile.shape)), _layout=layout, _is_signed=None
        )

    # Nothing but the barrier keeps the compiler from using the registers before the wait.
    return renamed(lax.optimization_barrier(found))


@device_op
def store_tile(target: Ref, tile: jax.Array) -> None:
    """Writes a tile, [TMEM_LANES, columns], to tensor memory, for readers after `stored`; a warp may call it alone."""

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=LANES))
    def renamed(tile: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """The inverse of that of `load_tile`."""
        columns, layout = tile.shape[1], lowered(LANES)
        registers = tile.registers.reshape(2, columns // 8, 2).transpose(1, 0, 2)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(tile.shape)), _layout=layout, _is_signed=None
        )

    plgpu.async_store_tmem(target, renamed(tile))


@device_op
def stored() -> None:
    """Waits until this warp's stores to tensor memory are there; others read after a barrier that orders it."""

    @inline_mgpu()
    def wait() -> None:
        """`plgpu.commit_tmem` also waits for the other warps."""
        ptx("tcgen05.wait::st.sync.aligned;")

    wait()
