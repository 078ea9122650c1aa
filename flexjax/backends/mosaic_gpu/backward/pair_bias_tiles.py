"""Tiles of pair biases inside the backward kernels: staged tiles on their way in, gradient tiles on their way out.

pair_bias.py decides which arrays are staged and which gradients are direct. q0 and kv0 are the first query and the
first key of a tile.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward import common
from flexjax.backends.mosaic_gpu.backward.common import Captures
from flexjax.backends.mosaic_gpu.backward.hopper_dq_tiles import DqTiles, StagedRing
from flexjax.backends.mosaic_gpu.backward.pair_bias import DenseBiasPlan, DirectGradient
from flexjax.backends.mosaic_gpu.backward.tile_math import ColumnMath
from flexjax.backends.mosaic_gpu.backward.tile_visits import TileVisits, VisitLists
from flexjax.backends.mosaic_gpu.machine import memory
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, arrive_read
from flexjax.backends.mosaic_gpu.programs.tile_origin import Place
from flexjax.backends.mosaic_gpu.programs.tile_programs import TileProgram
from flexjax.integers import cdiv
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

# ------------------------------------------------------------------- staged tiles


@dataclasses.dataclass(frozen=True)
class Staging:
    """How a kernel stages an array: TMA copies its tiles to a ring, from which computing warpgroups read."""

    plan: KernelPlan
    derivative: ir.Program  # the program of the load, which computes its leading indices
    load: ir.Load  # its index is [..., q, kv]
    slots: int
    shape: tuple[int, int]  # (queries, keys) of a tile
    readers: int  # computing warpgroups that read a tile, each an equal part of its queries
    # the kernel's score tile is [keys, queries]: each reader reads a part of the tile's keys, transposed
    transposed: bool = False

    def source(self, captures: Captures[Ref], b: Scalar, h: Scalar) -> Ref:
        """A Ref to the [query, key] matrix of head (b, h) in global memory, found by the load's leading indices."""
        program = TileProgram(self.derivative, captures.score, self.shape, Place(b, h), results=(0,))
        return captures.score[self.load.capture].at[program.scalar_values(self.load.index[:-2])]

    def fetch(self, slot: Ref, source: Ref, q0: Scalar, kv0: Scalar, full: Ref) -> None:
        """In the copying warpgroup: starts the copy of one tile into a free slot; it arrives at barrier `full`."""
        tile = source.at[pl.ds(q0, self.shape[0]), pl.ds(kv0, self.shape[1])]
        plgpu.copy_gmem_to_smem(tile, slot, full)

    def copy(self, ring: StagedRing[Ref], source: Ref, q0: Scalar, kv0: Scalar, number: Scalar) -> None:
        """In the copying warpgroup: starts the copy of a tile into its slot, once this is free."""
        slot = common.slot_of(number, self.slots)
        when(number >= self.slots)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
        self.fetch(ring.tiles.at[slot], source, q0, kv0, ring.full.at[slot])

    def read_staged(self, tile: ColumnMath, slots: Ref, slot: Scalar, group: Scalar) -> ColumnMath:
        """`tile` with this warpgroup's share of the load's values from `slots[slot]`; neither waits nor frees."""
        size = self.shape[int(self.transposed)] // self.readers
        own = pl.ds(group * size, size)
        if self.transposed:
            value = memory.load_staged_transposed(slots.at[slot, :, own])
        else:
            value = memory.load_staged(slots.at[slot, own])
        return tile.with_loaded(self.load, value)

    def read_from_ring(
        self, tile: ColumnMath, ring: StagedRing[Ref], number: Scalar, group: Scalar, first: bool, last: bool
    ) -> ColumnMath:
        """`tile` with this warpgroup's values of the load, read from the ring once for each batch entry.

        Only the `first` read waits for the staged tile `number`, only the `last` frees its slot.
        """
        slot = common.slot_of(number, self.slots)
        if first:
            plgpu.barrier_wait(ring.full.at[slot])
        tile = self.read_staged(tile, ring.tiles, slot, group)
        if last:
            arrive_read(ring.free.at[slot])
        return tile


def staging_for(
    plan: KernelPlan,
    derivative: ir.Program | None,
    bias: DenseBiasPlan,
    slots: int,
    shape: tuple[int, int],
    readers: int,
    transposed: bool = False,
) -> Staging | None:
    """The `Staging` of a kernel, None where no array is staged or there is no room for it (0 slots)."""
    if bias.staged is None or derivative is None or not slots:
        return None
    return Staging(plan, derivative, bias.staged, slots, shape, readers, transposed)


# ------------------------------------------------------------------- gradient tiles


def skipped_blocks(plan: KernelPlan, lists: VisitLists[jax.Array]) -> VisitLists[jax.Array]:
    """The key blocks that neither list of a query block names, as a full list; all None without a block mask.

    A mask without lists skips every block. Indices past the number of a list are the number of key blocks.
    """
    blocks = plan.blocks
    if blocks is None:
        return VisitLists()
    width = cdiv(plan.kv_len, blocks.block_kv)
    visited = jnp.zeros((blocks.batch, blocks.heads, cdiv(plan.q_len, blocks.block_q), width), jnp.bool_)
    for num, index in ((lists.partial_num, lists.partial_index), (lists.full_num, lists.full_index)):
        if num is None or index is None:
            continue
        named = jnp.where(jnp.arange(index.shape[-1]) < num[..., None], index, width)
        b, h, row = (jnp.arange(n) for n in num.shape)
        visited = visited.at[b[:, None, None, None], h[:, None, None], row[:, None], named].set(True, mode="drop")
    index = jnp.sort(jnp.where(visited, width, jnp.arange(width, dtype=jnp.int32)), axis=-1)
    return VisitLists(None, None, jnp.sum(~visited, axis=-1, dtype=jnp.int32), index)


@dataclasses.dataclass(frozen=True)
class DirectGradientWriter:
    """Writes gradient tiles from computing warpgroup `group` of the dQ kernel."""

    gradients: tuple[DirectGradient, ...]
    tiles: DqTiles
    outputs: tuple[Ref, ...]  # arrays in global memory, of `DirectGradient.output_shape`
    buffers: tuple[Ref, ...]  # [warpgroups, queries, keys] in shared memory for each gradient
    group: Scalar
    b: Scalar
    h: Scalar
    q0: Scalar  # first query of this warpgroup's tiles

    @property
    def shape(self) -> tuple[int, int]:
        """(queries, keys) of a warpgroup's tile."""
        return (self.tiles.rows, self.tiles.keys)

    def write(self, values: tuple[jax.Array, ...], kv0: Scalar) -> None:
        """Starts the copies of a tile of each gradient, [queries, keys] float32, for the keys from kv0 on."""
        if self.gradients:
            self._fill(values)
            self._send(kv0)

    def write_zeros(self, visits: TileVisits, skipped: VisitLists[Ref], tile: Scalar) -> None:
        """Starts the copies of zeros to the key tiles that query tile `tile` does not visit, for each gradient."""
        if not self.gradients or skipped.full_num is None:
            return
        count = visits.counts(skipped, self.b, self.h, tile).unmasked

        @when(count > 0)
        def fill_and_send() -> None:
            zero = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), common.WGMMA)
            self._fill((zero,) * len(self.gradients))
            key_tile = lambda i: visits.tile(skipped, self.b, self.h, tile, i, False)
            pl.loop(0, count)(lambda i: self._send(key_tile(i) * self.tiles.keys))

    def _fill(self, values: tuple[jax.Array, ...]) -> None:
        """Stores one tile of each gradient in this warpgroup's buffers, once earlier copies have read them."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for one, smem, value in zip(self.gradients, self.buffers, values, strict=True):
            smem.at[self.group][...] = value.astype(one.dtype)
        plgpu.commit_smem()

    def _send(self, kv0: Scalar) -> None:
        """Starts the copies of this warpgroup's buffers to `outputs`, for the keys from kv0 on."""
        for one, smem, ref in zip(self.gradients, self.buffers, self.outputs, strict=True):
            plgpu.copy_smem_to_gmem(smem.at[self.group], one.tile(ref, self.b, self.h, self.q0, kv0, self.shape))
