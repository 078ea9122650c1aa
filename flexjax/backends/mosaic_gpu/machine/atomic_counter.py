"""Numbers from an atomic counter in global memory, one for a warpgroup or for a whole CTA.

    take           the next number, for the warpgroup that asks (forward/tile_scheduler.py)
    take_start,    the order in which CTAs started, for the whole CTA (dq_order.py): one warpgroup takes a number into
                   global memory,
    read_start     all read it there after a barrier

CUDA promises no order in which CTAs start, so the number of a CTA in its grid says nothing about that.
"""

import contextlib
from collections.abc import Iterator

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from flexjax.backends.mosaic_gpu.machine.kernel_parts import SCALAR_INT, Ref, Scalar, inline_mgpu, ptx, splat_int

MEMORY = plgpu.RefType()


def take(counter: Ref, shared: Ref) -> Scalar:
    """One thread of the warpgroup adds one to `counter`; returns the number before, the same in all its threads.

    The threads must meet once more before the next call with the same `shared`, [1] int32 in shared memory.
    """

    @inline_mgpu(MEMORY, MEMORY, returns=SCALAR_INT)
    def add(counter: ir.Value, shared: ir.Value) -> mgpu.FragmentedArray:
        word = arith.constant(ir.IndexType.get(), 0)
        with _one_thread():
            memref.store(_fetch_add(counter), shared, [word])
        mgpu_utils.warpgroup_barrier()
        return splat_int(memref.load(shared, [word]))

    return add(counter, shared)


def take_start(counter: Ref, word: Ref) -> None:
    """One thread of the warpgroup adds one to `counter` and writes the number before to `word`; then all meet."""
    # `word` is in global memory, because the kernel has no shared memory to spare.

    @inline_mgpu(MEMORY, MEMORY)
    def add(counter: ir.Value, word: ir.Value) -> None:
        with _one_thread():
            memref.store(_fetch_add(counter), word, [arith.constant(ir.IndexType.get(), 0)])
        mgpu_utils.warpgroup_barrier()

    add(counter, word)


def read_start(word: Ref) -> Scalar:
    """What `take_start` wrote to `word`, in any warpgroup after a barrier with the one that took the number."""

    @inline_mgpu(MEMORY, returns=SCALAR_INT)
    def read(word: ir.Value) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        found = ptx("ld.relaxed.cta.global.b32 $0, [$1];", mgpu_utils.memref_ptr(word), result=i32)
        # By the shuffle the compiler knows that a warp agrees, and keeps what follows in uniform registers.
        return splat_int(ptx("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", found, result=i32))

    return read(word)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A context whose operations run in one elected thread of the warpgroup; it ends without a barrier."""
    # Mosaic's `single_thread` keeps a global of the process: of two Python threads that lower at once, one emits its
    # body for all 128 threads.
    elected = scf.IfOp(
        mgpu_utils.single_thread_predicate(
            mgpu_utils.ThreadSubset.WARPGROUP  # pyright: ignore[reportAttributeAccessIssue]
        )
    )
    with ir.InsertionPoint(elected.then_block):
        yield
        scf.yield_([])


def _fetch_add(counter: ir.Value) -> ir.Value:
    """Emits the addition of one to the counter and returns the i32 before; every thread that runs it adds one."""
    i32 = ir.IntegerType.get_signless(32)
    return ptx("atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", mgpu_utils.memref_ptr(counter), result=i32)
