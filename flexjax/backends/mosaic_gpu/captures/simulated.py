"""What runs in the simulator in place of the operations of this room, by the same names (machine/simulator.py)."""

import jax

from flexjax.backends.mosaic_gpu.captures import kernel
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar


class CaptureKernel(kernel.CaptureKernel):
    """Every warpgroup adds to an array of its own."""

    def _scattered(self, inputs: kernel.CaptureInputs[jax.Array], total: jax.Array) -> jax.Array:
        (sums,) = self.family.launch(self, inputs)
        assert sums is not None
        return sums.sum((0, 1))

    def _scatter_shape(self, lists: int) -> tuple[int, ...] | None:
        return (lists, self.groups, self.size)


def add(sums: Ref, index: jax.Array, value: jax.Array, factor: Scalar) -> None:
    """The simulator sums float32 in the order of the visits."""
    sums[...] = sums[...].at[index].add(value)


def add_private(sums: Ref, index: jax.Array, value: jax.Array) -> None:
    """All in the first copy."""
    sums[...] = sums[...].at[index, 0].add(value)


def meet() -> None:
    """A warpgroup is one thread in the simulator."""
