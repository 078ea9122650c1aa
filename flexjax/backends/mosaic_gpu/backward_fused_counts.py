"""How CTAs of the fused backward kernel wait for the additions of others to a dQ tile in memory, and count their own (dq_order.py)."""

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir as mlir

from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, scalar_of

ONE_WARP = mgpu_utils.ThreadSubset.WARP


def wait_for_additions(counts: Ref, index: Scalar, least: Scalar) -> None:
    """Waits until counts[index] is at least `least`, without changing it, and then makes visible what other CTAs wrote before
    they counted. All threads of the calling warp call it: one polls, then all meet at a barrier.

    counts   int32 in global memory
    """

    @inline_mgpu(plgpu.RefType(), SCALAR_LAYOUT)
    def wait(count: mlir.Value, least: FragmentedArray) -> None:
        """Waits on a semaphore, in global memory at the address of `count`, until it is at least `least`."""
        semaphore = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(count))
        semaphore.wait(scalar_of(least), decrement=False, scope=ONE_WARP, memory_scope="gpu")

    wait(counts.at[pl.ds(index, 1)], least)


def signal_addition(counts: Ref, index: Scalar) -> None:
    """In one thread of the calling warp: adds one to counts[index]. A CTA that waits for this count (`wait_for_additions`) then sees
    the copies by TMA to global memory that the warp has waited for.

    counts   int32 in global memory
    """

    @inline_mgpu(plgpu.RefType())
    def signal(count: mlir.Value) -> None:
        """Adds one to a semaphore, in global memory at the address of `count`."""
        semaphore = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(count))
        semaphore.signal(1, mgpu_utils.single_thread_predicate(ONE_WARP), memory_scope="gpu")

    signal(counts.at[pl.ds(index, 1)])
