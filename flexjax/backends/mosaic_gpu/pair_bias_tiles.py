"""Tiles of pair biases inside the backward kernels: staged tiles on their way in, gradient tiles on their way out.

`Staging` copies tiles of the staged array into a ring in shared memory (in the copying warpgroup) and reads them
there (in the computing warpgroups). A ring has several slots of one tile each; the running number of a tile, counted
over the visits of the CTA, gives its slot. `DirectGradientWriter` writes tiles of direct gradients, those that the dQ
kernel writes itself, from the computing warpgroups. pair_bias.py decides which arrays are treated so. q0 and kv0 are
the first query and the first key of a tile.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import backward_common as common
from flexjax.backends.mosaic_gpu import memory
from flexjax.backends.mosaic_gpu.backward_common import Captures
from flexjax.backends.mosaic_gpu.backward_dq_tiles import DqTiles, StagedRing
from flexjax.backends.mosaic_gpu.backward_tile_math import ColumnMath
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.pair_bias import DenseBiasPlan, DirectGradient
from flexjax.backends.mosaic_gpu.tile_origin import Place
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.backends.mosaic_gpu.tile_visits import TileVisits, VisitLists
from flexjax.integers import cdiv
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

# ------------------------------------------------------------------- staged tiles


@dataclasses.dataclass(frozen=True)
class Staging:
    """How one kernel stages the array that `load` reads: TMA copies its tiles to a ring in shared memory, from where
    the computing warpgroups read them. q0 and kv0 are the first query and the first key of a tile.

    plan         of the call
    derivative   the program of the load, which computes its leading indices
    load         its index is [..., q, kv]
    slots        tiles in the ring
    shape        (queries, keys) of a tile
    readers      computing warpgroups that read a tile, each an equal part of its queries
    transposed   the kernel's score tile is [keys, queries]: each reader reads a part of the tile's keys, transposed
    """

    plan: KernelPlan
    derivative: ir.Program
    load: ir.Load
    slots: int
    shape: tuple[int, int]
    readers: int
    transposed: bool = False

    def source(self, captures: Captures[Ref], b: Scalar, h: Scalar) -> Ref:
        """A Ref to the [query, key] matrix of the array in global memory that head (b, h) reads, found by the load's
        leading indices; nothing is read of it.

        captures   captured arrays, Refs
        """
        program = TileProgram(
            self.derivative,
            captures.score,
            self.shape,
            Place(b, h),
            results=(0,),
            interpret=self.plan.options.interpret,
        )
        return captures.score[self.load.capture].at[program.scalar_values(self.load.index[:-2])]

    def fetch(self, slot: Ref, source: Ref, q0: Scalar, kv0: Scalar, full: Ref) -> None:
        """In the copying warpgroup: starts the copy of one tile into a free slot, and does not wait.

        slot      the slot in shared memory
        source    the matrix from `source`
        q0, kv0   first query and key of the tile
        full      the barrier at which the copy arrives
        """
        tile = source.at[pl.ds(q0, self.shape[0]), pl.ds(kv0, self.shape[1])]
        plgpu.copy_gmem_to_smem(tile, slot, full)

    def copy(self, ring: StagedRing[Ref], source: Ref, q0: Scalar, kv0: Scalar, number: Scalar) -> None:
        """In the copying warpgroup: waits until the slot of the tile in the ring is free, and starts the copy of the tile into it.

        ring      the slots in shared memory with their barriers
        source    the matrix from `source`
        q0, kv0   first query and key of the tile
        number    running number of the tile
        """
        slot = common.slot_of(number, self.slots)
        when(number >= self.slots)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
        self.fetch(ring.tiles.at[slot], source, q0, kv0, ring.full.at[slot])

    def read_staged(self, tile: ColumnMath, slots: Ref, slot: Scalar, group: Scalar) -> ColumnMath:
        """In computing warpgroup `group`: `tile` with the values of the load, which it reads from `slots[slot]` to registers. It neither
        waits nor frees the slot.

        tile          the math of the kernel's score tile, at its rows and columns
        slots, slot   the ring in shared memory, and the number of a slot into which the copy has arrived
        group         number of the warpgroup, 0 to `readers` - 1

        The warpgroup reads an equal share of the staged tile's queries; if the kernel's score tile is transposed, an equal share of its
        keys, transposed.
        """
        size = self.shape[int(self.transposed)] // self.readers
        own = pl.ds(group * size, size)
        interpret = self.plan.options.interpret
        if self.transposed:
            value = memory.load_staged_transposed(slots.at[slot, :, own], interpret)
        else:
            value = memory.load_staged(slots.at[slot, own], interpret)
        return tile.with_loaded(self.load, value)

    def read_from_ring(
        self, tile: ColumnMath, ring: StagedRing[Ref], number: Scalar, group: Scalar, first: bool, last: bool
    ) -> ColumnMath:
        """`tile` with the values of the load, which the warpgroup reads from the ring to registers; waits until they are there, and frees
        the slot.

        tile          the math of the kernel's score tile, at its rows and columns
        ring          the staged tiles in shared memory with their barriers
        number        running number of the staged tile
        group         number of the warpgroup, which reads its share of the tile
        first, last   whether this is the warpgroup's first, last read of the tile: it reads once for each batch entry. Only the first read
                      waits, only the last frees the slot
        """
        slot = common.slot_of(number, self.slots)
        if first:
            plgpu.barrier_wait(ring.full.at[slot])
        tile = self.read_staged(tile, ring.tiles, slot, group)
        if last:
            common.Products(self.plan.options.interpret).release(ring.free.at[slot])
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
    """The `Staging` of a kernel, None where no array is staged or there is no room for it (0 slots).

    derivative   the program of the load; None without a score_mod
    bias         says which array is staged
    slots        of the ring
    shape        (queries, keys) of a tile
    readers      computing warpgroups that read a tile
    transposed   whether the kernel's score tile is [keys, queries]
    """
    if bias.staged is None or derivative is None or not slots:
        return None
    return Staging(plan, derivative, bias.staged, slots, shape, readers, transposed)


# ------------------------------------------------------------------- gradient tiles


def skipped_blocks(plan: KernelPlan, lists: VisitLists[jax.Array]) -> VisitLists[jax.Array]:
    """The key blocks that neither list of a query block names, as a full list (number, ascending indices) for each
    query block; all None without a block mask. A mask without lists skips every block.

    lists   the block lists of each query block

    Indices past the number of a list are the number of key blocks.
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
    """Writes gradient tiles from computing warpgroup `group` of the dQ kernel.

    gradients   the direct gradients
    tiles       sizes of the dQ kernel
    outputs     for each gradient its array in global memory, of `DirectGradient.output_shape`
    buffers     for each gradient [warpgroups, queries, keys] in shared memory, a tile for each warpgroup, in the gradient's dtype
    group       number of the warpgroup
    b, h, q0    head and first query of this warpgroup's tiles; arrays that the batch entries or heads share are written at 0
    """

    gradients: tuple[DirectGradient, ...]
    tiles: DqTiles
    outputs: tuple[Ref, ...]
    buffers: tuple[Ref, ...]
    group: Scalar
    b: Scalar
    h: Scalar
    q0: Scalar

    @property
    def shape(self) -> tuple[int, int]:
        """(queries, keys) of a warpgroup's tile."""
        return (self.tiles.rows, self.tiles.keys)

    def write(self, values: tuple[jax.Array, ...], kv0: Scalar) -> None:
        """Stores one tile of each gradient in shared memory and starts its copy to global memory, for the keys from `kv0`, once the copies
        that were started earlier have read the buffers. It does not wait for the new copies: the kernel waits for them before it ends.
        Nothing without direct gradients.

        values   [queries, keys] float32 for each gradient
        kv0      number of the first key of the tile
        """
        if self.gradients:
            self._fill(values)
            self._send(kv0)

    def write_zeros(self, visits: TileVisits, skipped: VisitLists[Ref], tile: Scalar) -> None:
        """Starts the copies of zeros to the key tiles that query tile `tile` does not visit, for each gradient and this warpgroup's
        queries; waits before, as `write`, until earlier copies have read the buffers. Nothing is copied without direct gradients, without a
        block mask, or if the query tile visits all key tiles.

        visits    of the dQ kernel
        skipped   from `skipped_blocks`, as Refs
        tile      number of the CTA's query tile in its head
        """
        if not self.gradients or skipped.full_num is None:
            return
        count = visits.counts(skipped, self.b, self.h, tile).unmasked

        @when(count > 0)
        def fill_and_send() -> None:
            """Fills the buffers with zeros, and starts their copies to every key tile that the query tile skips."""
            zero = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), common.WGMMA)
            self._fill((zero,) * len(self.gradients))
            key_tile = lambda i: visits.tile(skipped, self.b, self.h, tile, i, False)
            pl.loop(0, count)(lambda i: self._send(key_tile(i) * self.tiles.keys))

    def _fill(self, values: tuple[jax.Array, ...]) -> None:
        """Stores one tile of each gradient in this warpgroup's buffers, converted to its dtype. Before, it waits until
        the copies that were started earlier have read the buffers. Afterwards `plgpu.commit_smem` makes the tiles
        visible to TMA, so that `_send` can follow at once; `_fill` itself starts no copy.

        values   [queries, keys] float32 for each gradient
        """
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for one, smem, value in zip(self.gradients, self.buffers, values, strict=True):
            smem.at[self.group][...] = value.astype(one.dtype)
        plgpu.commit_smem()

    def _send(self, kv0: Scalar) -> None:
        """Starts the copies of this warpgroup's buffers to `outputs`, at its queries and the keys from `kv0`; does not wait
        for them.
        """
        for one, smem, ref in zip(self.gradients, self.buffers, self.outputs, strict=True):
            plgpu.copy_smem_to_gmem(smem.at[self.group], one.tile(ref, self.b, self.h, self.q0, kv0, self.shape))
