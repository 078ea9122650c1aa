"""How the mma.sync kernels bring tiles to shared memory: cp.async or TMA, behind one interface.

There is no producer warpgroup. Every warpgroup of a CTA copies its share of the rows of a tile, computes, and meets the
others at a barrier of the CTA:

    copies.start(source, target, arrived, rows)   begins to copy a tile
    copies.commit()                               ends a group of copies: those since the last call arrive together
    copies.wait(arrived, pending)                 the oldest group has arrived, for all threads, and all have read what
                                                  they read before, which a copy may overwrite from now on
    copies.sync()                                 the barrier alone
    copies.arrive(arrived, pending)               the oldest group has arrived, for all threads; others may still read

With cp.async a thread copies 16 bytes at a time, and zeros for rows past the end of the array. Groups are the
hardware's commit groups, and `pending` says how many of the newest may still be in flight. With TMA a tile arrives at
the mbarrier `arrived` of its slot, with zeros past the end.
"""

import dataclasses

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from flexjax.backends.mosaic_gpu.machine.allocation import swizzled
from flexjax.backends.mosaic_gpu.machine.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, ptx, scalar_of
from flexjax.backends.mosaic_gpu.machine.mma_cards import Copying
from flexjax.backends.mosaic_gpu.machine.shared_memory import swizzle_bytes
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP

CHUNK = 16  # bytes that one cp.async copies


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of one kernel."""

    copying: Copying
    groups: int  # warpgroups of a CTA
    meeting: Ref | None  # of `mma_cards.meeting_barrier`

    @property
    def group(self) -> Scalar | int:
        return 0 if self.groups == 1 else lax.axis_index("wg")

    def start(self, source: Ref, target: Ref, arrived: Ref | None, rows: Scalar | None, plain: bool = False) -> None:
        """Begins to copy this warpgroup's share of a tile [rows, D]; all must have read what `target` held before.

        rows    how many rows of the tile exist; cp.async writes zeros to the others, TMA ignores this. None: all
        plain   whether `target` is a PlainArray instead of SwizzledTiles
        """
        share = target.shape[0] // self.groups
        first = 0
        if self.groups > 1:
            first = self.group * share
            source, target = source.at[pl.ds(first, share)], target.at[pl.ds(first, share)]
        if self.copying == "tma":
            assert arrived is not None
            plgpu.copy_gmem_to_smem(source, target, arrived)
        else:
            copy = _copy_plain_by_threads if plain else _copy_by_threads
            copy(source, target, None if rows is None else rows - first)

    def clear(self, target: Ref, rows: Scalar) -> None:
        """Overwrites the rows of an arrived tile from number `rows` on with zeros, in a CTA of one warpgroup."""
        # TMA brings what lies past the keys that exist, and NaN there would spoil products with 0.
        _clear_by_threads(target, rows)
        plgpu.commit_smem()

    def commit(self) -> None:
        """Ends a group of copies: those since the last call, perhaps none, arrive together."""
        if self.copying == "cp.async":
            _end_group()

    def wait(self, arrived: Ref | None, pending: int) -> None:
        """Waits until a group of copies, before the newest `pending`, has arrived for all threads of the CTA."""
        if self.copying == "tma":
            assert arrived is not None
            plgpu.barrier_wait(arrived)
        else:
            _wait_for_groups(pending)
        self.sync()

    def arrive(self, arrived: Ref | None, pending: int) -> None:
        """Waits until a group of copies has arrived and this warpgroup sees the tiles."""
        if self.copying == "tma":
            assert arrived is not None
            plgpu.barrier_wait(arrived)
        else:
            self.wait(arrived, pending)  # A copy of cp.async can only be waited for by its own thread.

    def sync(self) -> None:
        """Waits until all threads of the CTA are here; all then see what they wrote to shared memory."""
        _meet(self.groups, self.meeting)


@device_op
def _end_group() -> None:
    @inline_mgpu()
    def end_group() -> None:
        nvvm.cp_async_commit_group()

    end_group()


@device_op
def _wait_for_groups(pending: int) -> None:
    @inline_mgpu()
    def wait() -> None:
        nvvm.cp_async_wait_group(pending)

    wait()


@device_op
def _meet(groups: int, meeting: Ref | None) -> None:
    """The barrier of a CTA of `groups` warpgroups; `meeting` stands for it in the simulator."""

    @inline_mgpu()
    def meet() -> None:
        if groups == 1:
            mgpu.utils.warpgroup_barrier()
        else:  # lower numbers belong to the compiler
            ptx(f"bar.sync {groups + 2}, {groups * WARPGROUP};")

    meet()


@device_op
def _copy_by_threads(source: Ref, target: Ref, rows: Scalar | None) -> None:
    """Copies `rows` rows (None: all) of 8 or 16 bits by cp.async; the other rows of the tile become zeros."""
    height, item = target.shape[0], target.dtype.itemsize
    width = target.shape[1] * item  # bytes of a row
    swizzle = swizzle_bytes(width, 1)
    tile = 8 * swizzle  # bytes of a swizzled piece, 8 rows of `swizzle` bytes
    chunks = swizzle // CHUNK
    step = WARPGROUP // chunks  # rows that the warpgroup copies at once, a multiple of 8

    def copy(source: ir.Value, target: ir.Value, *limit: mgpu.FragmentedArray) -> None:
        """Emits the copies of one thread: one chunk of every `step`-th row, in each piece of a row."""
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


@device_op
def _copy_plain_by_threads(source: Ref, target: Ref, rows: Scalar | None) -> None:
    """`_copy_by_threads` to a PlainArray: neighbouring threads copy neighbouring 16 bytes."""
    height, item = target.shape[0], target.dtype.itemsize
    chunks = target.shape[1] * item // CHUNK  # of a row

    def copy(source: ir.Value, target: ir.Value, *limit: mgpu.FragmentedArray) -> None:
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


@device_op
def _clear_by_threads(target: Ref, rows: Scalar) -> None:
    """Writes zeros to the rows of a tile of 16-bit elements from number `rows` on, in all threads of this warpgroup."""
    height, width = target.shape
    swizzle = swizzle_bytes(width, 2)  # Swizzling moves 16 bytes within a row, so it does not matter here.

    @inline_mgpu(plgpu.RefType(swizzled(width, 2)), SCALAR_LAYOUT)
    def clear(target: ir.Value, limit: mgpu.FragmentedArray) -> None:
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
