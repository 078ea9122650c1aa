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
    TensorTiles,
    swizzle_bytes,
)


def allocated(part: Description, simulated: bool) -> object:
    """The Pallas allocation for `part`, a description of shared or tensor memory, from which `launch` makes a Ref."""
    if isinstance(part, Barriers | ClusterBarriers) and part.simulated and not simulated:
        return None
    if isinstance(part, ClusterTiles):
        return plgpu.SMEM((part.groups, math.prod(part.shape)), jnp.float32)
    if isinstance(part, ClusterBarriers):
        if simulated:
            return plgpu.ClusterBarrier(collective_axes=(COLUMNS,), num_barriers=part.groups)
        return plgpu.SMEM((part.groups, 4), jnp.int32)
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
    if isinstance(part, TensorTiles):
        dtype = jnp.dtype(part.dtype)
        return plgpu.TMEM(part.shape, dtype, packed=dtype.itemsize < 4, collective=part.pair)
    if isinstance(part, OverlaidTensorTiles):
        both = tuple(allocated(tiles, simulated) for tiles in (part.first, part.second))
        # In the simulator each of the two has a place of its own. Descriptions have no public type.
        return both if simulated else plgpu.RefUnion(*both)  # pyright: ignore[reportArgumentType]
    dtype = jnp.dtype(part.dtype)
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
