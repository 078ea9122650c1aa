"""How the mma.sync kernels bring tiles to shared memory: cp.async or TMA, behind one interface.

There is no producer warpgroup. Every warpgroup of a CTA copies its share of the rows of a tile, computes, and meets the others at a
barrier of the CTA:

    copies.start(source, target, arrived, rows)   begins to copy a tile
    copies.commit()                               ends a group of copies: those since the last call arrive together
    copies.wait(arrived, pending)                 the oldest group has arrived, for all threads, and all have read what they
                                                  read before: so a copy that starts now may overwrite it
    copies.sync()                                 the barrier alone
    copies.arrive(arrived, pending)               the oldest group has arrived, for all threads; others may still read

With cp.async a thread copies 16 bytes at a time; rows past the end of the array are filled with zeros by the copy itself. Groups
are the hardware's commit groups, and `pending` says how many of the newest may still be in flight. With TMA a tile arrives at the
mbarrier `arrived` of its slot, which TMA fills with zeros past the end.

In the simulator cp.async is an assignment, and the CTA's barrier an mbarrier.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from flexjax.backends.mosaic_gpu.allocation import swizzled
from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, ptx, scalar_of
from flexjax.backends.mosaic_gpu.shared_memory import swizzle_bytes
from flexjax.backends.mosaic_gpu.sm80_cards import Copying
from flexjax.backends.mosaic_gpu.warpgroup import WARPGROUP

CHUNK = 16
"""Bytes that one cp.async copies."""


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of one kernel.

    copying     how tiles come to shared memory
    groups      warpgroups of a CTA
    interpret   whether the kernel runs in the simulator
    meeting     the Ref of `sm80_cards.meeting_barrier`
    """

    copying: Copying
    groups: int
    interpret: bool
    meeting: Ref | None

    @property
    def group(self) -> Scalar | int:
        """Number of this warpgroup in the CTA."""
        return 0 if self.groups == 1 else lax.axis_index("wg")

    def start(self, source: Ref, target: Ref, arrived: Ref | None, rows: Scalar | None, plain: bool = False) -> None:
        """Begins to copy this warpgroup's share of the rows of a tile, and does not wait; every warpgroup of the CTA calls it with the
        same arguments. All must have read what `target` held before (`wait`, `sync`).

        source    [rows, D] in global memory; it may reach past the end of the array
        target    [rows, D] in shared memory, SwizzledTiles
        arrived   the barrier of the slot, at which the share arrives; None with cp.async
        rows      how many rows of the tile exist, counted from its first; cp.async writes zeros to the others and does not read them.
                  None: all, which then lie inside of the array. Not used with TMA, which gives zeros only past the end of the array
        plain     whether `target` is a PlainArray instead
        """
        share = target.shape[0] // self.groups
        first = 0
        if self.groups > 1:
            first = self.group * share
            source, target = source.at[pl.ds(first, share)], target.at[pl.ds(first, share)]
        if self.copying == "tma":
            assert arrived is not None
            plgpu.copy_gmem_to_smem(source, target, arrived)
        elif self.interpret:
            found = source[...]
            if rows is not None:
                found = jnp.where(lax.broadcasted_iota(jnp.int32, found.shape, 0) < rows - first, found, 0)
            target[...] = found
        else:
            copy = _copy_plain_by_threads if plain else _copy_by_threads
            copy(source, target, None if rows is None else rows - first)

    def clear(self, target: Ref, rows: Scalar) -> None:
        """Overwrites the rows of a tile from number `rows` on with zeros, in a CTA of one warpgroup, after the copy has arrived: TMA brings
        what lies past the keys that exist, and NaN there would spoil products with 0. All threads see the zeros, and TMA may overwrite
        them.

        target   [rows, D] of 16-bit elements in shared memory, SwizzledTiles
        rows     how many rows to keep, an int32 scalar
        """
        if self.interpret:
            found = target[...]
            target[...] = jnp.where(lax.broadcasted_iota(jnp.int32, found.shape, 0) < rows, found, 0)
        else:
            _clear_by_threads(target, rows)
        plgpu.commit_smem()

    def commit(self) -> None:
        """Ends a group of copies: those since the last call, perhaps none, arrive together. Does nothing with TMA and in the simulator."""
        if self.copying == "cp.async" and not self.interpret:

            @inline_mgpu()
            def end_group() -> None:
                """Makes the copies of this thread since the last call a group."""
                nvvm.cp_async_commit_group()

            end_group()

    def wait(self, arrived: Ref | None, pending: int) -> None:
        """Waits until a group of copies has arrived, then meets all threads of the CTA (`sync`), so that all of them see the tiles.

        arrived   the barrier of the slot; None with cp.async
        pending   how many groups were committed after the awaited one; not used with TMA
        """
        if self.copying == "tma":
            assert arrived is not None
            plgpu.barrier_wait(arrived)
        elif not self.interpret:

            @inline_mgpu()
            def wait_for_groups() -> None:
                """Waits until at most `pending` groups of this thread are in flight."""
                nvvm.cp_async_wait_group(pending)

            wait_for_groups()
        self.sync()

    def arrive(self, arrived: Ref | None, pending: int) -> None:
        """Waits until a group of copies has arrived and this warpgroup sees the tiles: with TMA for nothing else, with cp.async, whose
        copies only their own thread can wait for, for all threads of the CTA.

        arrived, pending   as for `wait`
        """
        if self.copying == "tma":
            assert arrived is not None
            plgpu.barrier_wait(arrived)
        else:
            self.wait(arrived, pending)

    def sync(self) -> None:
        """Waits until all threads of the CTA are here; what they wrote to shared memory before is then visible to all."""
        if self.interpret:
            plgpu.commit_smem()  # the simulator's products read the slots as ordinary memory
            if self.meeting is not None:
                plgpu.barrier_arrive(self.meeting.at[0])
                plgpu.barrier_wait(self.meeting.at[0])
            return
        groups = self.groups

        @inline_mgpu()
        def meet() -> None:
            """Emits the barrier of the CTA, or of its only warpgroup."""
            if groups == 1:
                mgpu.utils.warpgroup_barrier()
            else:  # lower numbers belong to the compiler
                ptx(f"bar.sync {groups + 2}, {groups * WARPGROUP};")

        meet()


def _copy_by_threads(source: Ref, target: Ref, rows: Scalar | None) -> None:
    """Copies a tile by cp.async, in all threads of this warpgroup.

    source, target   [rows, D] of elements of 8 or 16 bits in global and in shared memory, rows of a multiple of 32 bytes
    rows             how many rows exist; others become zeros without being read. None: all
    """
    height, item = target.shape[0], target.dtype.itemsize
    width = target.shape[1] * item  # bytes of a row
    swizzle = swizzle_bytes(width, 1)
    tile = 8 * swizzle  # bytes of a swizzled piece, 8 rows of `swizzle` bytes
    chunks = swizzle // CHUNK
    step = WARPGROUP // chunks  # rows that the warpgroup copies at once, a multiple of 8

    def copy(source: ir.Value, target: ir.Value, *limit: mgpu.FragmentedArray) -> None:
        """Emits the copies of one thread: one chunk of every `step`-th row, in each piece of `swizzle` bytes of a row.

        source, target   memrefs of this warpgroup's rows in global and in shared memory
        limit            how many rows exist, where that is given
        """
        i32 = ir.IntegerType.get_signless(32)
        constant = lambda n: mgpu.c(n, i32)
        strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
        pitch = strides[0] * item
        thread = arith.andi(mgpu.utils.thread_idx(), constant(WARPGROUP - 1))
        row = arith.divui(thread, constant(chunks))
        chunk = arith.remui(thread, constant(chunks))
        inner = arith.andi(row, constant(7))
        shift = {128: 0, 64: 1, 32: 2}[swizzle]
        turned = arith.xori(chunk, arith.shrui(inner, constant(shift)))
        to = arith.addi(
            arith.muli(arith.shrui(row, constant(3)), constant(8 * width)),
            arith.addi(arith.muli(inner, constant(swizzle)), arith.muli(turned, constant(CHUNK))),
        )
        of = arith.addi(arith.muli(row, constant(pitch)), arith.muli(chunk, constant(CHUNK)))
        i8 = ir.IntegerType.get_signless(8)
        shared = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(target), [to], i8)
        outer = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(source))
        outer = mgpu.utils.getelementptr(outer, [arith.extui(ir.IntegerType.get_signless(64), of)], i8)

        def emit() -> None:
            """Emits the copies of a thread whose first row is one of the tile."""
            for first in range(0, height, step):
                size = None
                if limit:
                    exists = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(row, constant(first)), scalar_of(limit[0]))
                    size = arith.select(exists, constant(CHUNK), constant(0))
                for piece in range(width // swizzle):
                    nvvm.cp_async_shared_global(
                        mgpu.utils.getelementptr(shared, [first // 8 * 8 * width + piece * tile], i8),
                        mgpu.utils.getelementptr(outer, [first * pitch + piece * swizzle], i8),
                        CHUNK,
                        nvvm.LoadCacheModifierKind.CG,
                        cp_size=size,
                    )

        if height % step:
            assert height < step, (height, step)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, row, constant(height))):
                emit()
        else:
            emit()

    types = (plgpu.RefType(), plgpu.RefType(swizzled(target.shape[1], item)))
    if rows is None:
        inline_mgpu(*types)(copy)(source, target)
    else:
        inline_mgpu(*types, SCALAR_LAYOUT)(copy)(source, target, rows)


def _copy_plain_by_threads(source: Ref, target: Ref, rows: Scalar | None) -> None:
    """Copies rows to a PlainArray by cp.async, in all threads of this warpgroup: neighbouring threads copy neighbouring 16 bytes.

    source, target   [rows, D] in global and in shared memory, rows of a multiple of 16 bytes
    rows             how many rows exist; others become zeros without being read. None: all
    """
    height, item = target.shape[0], target.dtype.itemsize
    chunks = target.shape[1] * item // CHUNK  # of a row

    def copy(source: ir.Value, target: ir.Value, *limit: mgpu.FragmentedArray) -> None:
        """Emits the copies of one thread: every WARPGROUP-th chunk.

        source, target   memrefs of this warpgroup's rows in global and in shared memory
        limit            how many rows exist, where that is given
        """
        i32, i64, i8 = (ir.IntegerType.get_signless(n) for n in (32, 64, 8))
        constant = lambda n: mgpu.c(n, i32)
        strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
        thread = arith.andi(mgpu.utils.thread_idx(), constant(WARPGROUP - 1))
        outer = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(source))
        at = lambda base, offset: mgpu.utils.getelementptr(base, [arith.extui(i64, offset)], i8)
        for first in range(0, height * chunks, WARPGROUP):
            number = arith.addi(thread, constant(first))
            row, chunk = arith.divui(number, constant(chunks)), arith.remui(number, constant(chunks))
            size = None
            if limit:
                exists = arith.cmpi(arith.CmpIPredicate.slt, row, scalar_of(limit[0]))
                size = arith.select(exists, constant(CHUNK), constant(0))
            inside = arith.cmpi(arith.CmpIPredicate.slt, number, constant(height * chunks))
            with mgpu.when(inside):
                of = arith.addi(arith.muli(row, constant(strides[0] * item)), arith.muli(chunk, constant(CHUNK)))
                nvvm.cp_async_shared_global(
                    at(mgpu.utils.memref_ptr(target), arith.muli(number, constant(CHUNK))),
                    at(outer, of),
                    CHUNK,
                    nvvm.LoadCacheModifierKind.CG,
                    cp_size=size,
                )

    types = (plgpu.RefType(), plgpu.RefType())
    if rows is None:
        inline_mgpu(*types)(copy)(source, target)
    else:
        inline_mgpu(*types, SCALAR_LAYOUT)(copy)(source, target, rows)


def _clear_by_threads(target: Ref, rows: Scalar) -> None:
    """Writes zeros to the rows of a tile from number `rows` on, in all threads of this warpgroup, each 16 bytes at a time. Swizzling moves
    these within a row, so it does not matter here.

    target   [rows, D] of 16-bit elements in shared memory, SwizzledTiles
    """
    height, width = target.shape
    swizzle = swizzle_bytes(width, 2)

    @inline_mgpu(plgpu.RefType(swizzled(width, 2)), SCALAR_LAYOUT)
    def clear(target: ir.Value, limit: mgpu.FragmentedArray) -> None:
        """Emits the stores of one thread: every WARPGROUP-th chunk of `target`, a memref, that belongs to a row from number `limit` on."""
        i32, i64, i8 = (ir.IntegerType.get_signless(n) for n in (32, 64, 8))
        constant = lambda n: mgpu.c(n, i32)
        vector = ir.VectorType.get((4,), i32)
        zero = arith.constant(vector, ir.DenseElementsAttr.get_splat(vector, ir.IntegerAttr.get(i32, 0)))
        thread = arith.andi(mgpu.utils.thread_idx(), constant(WARPGROUP - 1))
        of_rows = 8 * width * 2 // CHUNK  # chunks of 8 rows, which lie together
        for first in range(0, height * width * 2 // CHUNK, WARPGROUP):
            number = arith.addi(thread, constant(first))
            inner = arith.remui(arith.divui(number, constant(swizzle // CHUNK)), constant(8))
            row = arith.addi(arith.muli(arith.divui(number, constant(of_rows)), constant(8)), inner)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, row, scalar_of(limit))):
                place = arith.extui(i64, arith.muli(number, constant(CHUNK)))
                llvm.store(zero, mgpu.utils.getelementptr(mgpu.utils.memref_ptr(target), [place], i8), alignment=CHUNK)

    clear(target, rows)
