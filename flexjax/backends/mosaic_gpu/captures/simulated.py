"""What runs in the simulator in place of the operations of this room, by the same names (machine/simulator.py)."""

import jax

from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar


def add(sums: Ref, index: jax.Array, value: jax.Array, factor: Scalar) -> None:
    """The simulator sums float32 in the order of the visits."""
    sums[...] = sums[...].at[index].add(value)
