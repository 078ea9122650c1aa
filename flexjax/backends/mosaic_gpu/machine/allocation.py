"""The descriptions of shared_memory.py in the form in which Pallas allocates shared and tensor memory."""

import math
import typing

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.machine.columns import COLUMNS
from flexjax.backends.mosaic_gpu.machine.shared_memory import (
    Barriers,
    ClusterBarriers,
    ClusterTiles,
    Description,
    OverlaidTensorTiles,
    PlainArray,
    SwizzledTiles,
    TensorTiles,
    swizzle_bytes,
)
from flexjax.backends.mosaic_gpu.machine.simulator import device_op


@device_op
def allocated(part: Description) -> object:
    """The Pallas allocation for `part`, a description of shared or tensor memory, from which `launch` makes a Ref; None
    for what is not in that memory where the kernel runs.
    """
    if isinstance(part, Barriers | ClusterBarriers) and part.in_simulator:
        return None
    if isinstance(part, ClusterTiles):
        return plgpu.SMEM((part.groups, math.prod(part.shape)), jnp.float32)
    if isinstance(part, ClusterBarriers):
        return plgpu.SMEM((part.groups, 4), jnp.int32)
    if isinstance(part, OverlaidTensorTiles):
        # descriptions have no public type
        return plgpu.RefUnion(allocated(part.first), allocated(part.second))  # pyright: ignore[reportArgumentType]
    return alike(part)


def alike(part: Barriers | TensorTiles | PlainArray | SwizzledTiles) -> object:
    """The Pallas allocation for a description that is the same on the device and in the simulator."""
    if isinstance(part, Barriers):
        count = () if part.count is None else part.count
        if part.pair:
            return plgpu.ClusterBarrier(
                collective_axes=(COLUMNS,),
                num_arrivals=part.arrivals,
                num_barriers=count,
                orders_tensor_core=part.tcgen05,
                leader_tracked=True,
            )
        return plgpu.Barrier(num_arrivals=part.arrivals, num_barriers=count, orders_tensor_core=part.tcgen05)
    dtype = jnp.dtype(part.dtype)
    if isinstance(part, TensorTiles):
        return plgpu.TMEM(part.shape, dtype, packed=dtype.itemsize < 4, collective=part.pair)
    if isinstance(part, PlainArray):
        return plgpu.SMEM(part.shape, dtype)
    return plgpu.SMEM(part.shape, dtype, transforms=swizzled(part.shape[-1], dtype.itemsize, part.swizzle))


def swizzled(columns: int, item: int, largest: int = 128) -> tuple[typing.Any, ...]:
    """The two transforms by which Pallas stores swizzled tiles: tiling in pieces of 8 rows, and the swizzle."""
    swizzle = swizzle_bytes(columns, item, largest)
    # In jax 0.11 the class is concrete, whatever its base class says.
    return (
        plgpu.TilingTransform((8, swizzle // item)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
