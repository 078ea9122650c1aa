"""Numbers from an atomic counter in global memory, one for a warpgroup or for a whole CTA.

    take           the next number, for the warpgroup that asks (tile_scheduler.py)
    take_start,    the order in which CTAs started, for the whole CTA (dq_order.py): one warpgroup takes a number into global memory,
    read_start     all read it there after a barrier

CUDA promises no order in which CTAs start, so the number of a CTA in its grid says nothing about that. Functions that
`inline_mgpu` decorates are traced once and run in every thread of the calling warpgroup.
"""

import contextlib
from collections.abc import Iterator

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_INT, Ref, Scalar, inline_mgpu, ptx, splat_int

MEMORY = plgpu.RefType()


def take(counter: Ref, shared: Ref) -> Scalar:
    """One thread of the calling warpgroup adds one to `counter`; returns what the counter was before, the same number
    in all threads of the warpgroup. Not for the simulator, which has no atomic instructions.

    counter   [1] int32 in global memory
    shared    [1] int32 in shared memory, through which one thread passes the number to the others

    The threads of the warpgroup meet at a barrier between the write and the read of `shared`, but not after the read.
    So they must meet once more before the next call with the same `shared`.
    """

    @inline_mgpu(MEMORY, MEMORY, returns=SCALAR_INT)
    def add(counter: ir.Value, shared: ir.Value) -> mgpu.FragmentedArray:
        """Adds one to the counter in one thread, and returns what the counter was before to every thread of the
        warpgroup.

        counter   memref of the counter, in global memory
        shared    memref of one word in shared memory, through which the number passes
        """
        word = arith.constant(ir.IndexType.get(), 0)
        with _one_thread():
            memref.store(_fetch_add(counter), shared, [word])
        mgpu_utils.warpgroup_barrier()
        return splat_int(memref.load(shared, [word]))

    return add(counter, shared)


def take_start(counter: Ref, word: Ref) -> None:
    """One thread of the calling warpgroup adds one to `counter` and writes what the counter was before to `word`; the
    threads of the warpgroup then meet at a barrier. One warpgroup of the CTA calls it, with all threads; the other
    warpgroups need a barrier of their own before they read `word`. Not for the simulator.

    counter, word   [1] int32 in global memory. `word` lies there because the kernel that uses this has no shared memory
                    to spare
    """

    @inline_mgpu(MEMORY, MEMORY)
    def add(counter: ir.Value, word: ir.Value) -> None:
        """Adds one to the counter in one thread, and stores what the counter was before in `word`; the warpgroup
        meets at a barrier.

        counter, word   memrefs in global memory
        """
        with _one_thread():
            memref.store(_fetch_add(counter), word, [arith.constant(ir.IndexType.get(), 0)])
        mgpu_utils.warpgroup_barrier()

    add(counter, word)


def read_start(word: Ref) -> Scalar:
    """What `take_start` wrote to `word`, an int32, the same in all threads of the calling warpgroup, which all call it. Any
    warpgroup of the CTA may, after a barrier at which the one that took the number arrived.

    word   [1] int32 in global memory
    """

    @inline_mgpu(MEMORY, returns=SCALAR_INT)
    def read(word: ir.Value) -> mgpu.FragmentedArray:
        """What `take_start` wrote to `word`, a memref in global memory: each thread reads it, then takes the first
        lane's value.
        """
        i32 = ir.IntegerType.get_signless(32)
        found = ptx("ld.relaxed.cta.global.b32 $0, [$1];", mgpu_utils.memref_ptr(word), result=i32)
        # The first lane's value: the compiler then knows that a warp agrees, and keeps what follows in uniform registers.
        return splat_int(ptx("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", found, result=i32))

    return read(word)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A context: operations that are emitted inside run in one elected thread of the calling warpgroup. It ends without a barrier, so
    other threads need one before they read what that thread wrote to memory.

    It replaces Mosaic's `single_thread`, which remembers in a global of the process that it is inside: where two
    Python threads lower at once, one of them emits its body for all 128 threads.
    """
    elected = scf.IfOp(mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP))  # pyright: ignore[reportAttributeAccessIssue]
    with ir.InsertionPoint(elected.then_block):
        yield
        scf.yield_([])


def _fetch_add(counter: ir.Value) -> ir.Value:
    """Emits an addition of one to the counter, a memref in global memory, and returns the i32 that it was before. Every thread that
    runs it adds one, so callers emit it inside `_one_thread`.
    """
    i32 = ir.IntegerType.get_signless(32)
    return ptx("atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", mgpu_utils.memref_ptr(counter), result=i32)
