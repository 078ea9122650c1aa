"""The descriptions of shared_memory.py in the form in which Pallas allocates shared and tensor memory."""

import math
import typing

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.columns import COLUMNS
from flexjax.backends.mosaic_gpu.shared_memory import (
    Barriers,
    ClusterBarriers,
    ClusterTiles,
    Description,
    OverlaidTensorTiles,
    PlainArray,
    TensorTiles,
    swizzle_bytes,
)


def allocated(part: Description, interpret: bool) -> object:
    """The Pallas allocation for `part`, a description of shared or tensor memory, from which `launch` (kernel_parts.py) makes a Ref:

        description           allocation
        SwizzledTiles         shared memory of its shape, with the largest swizzle up to `part.swizzle` that divides a row;
                              StopIteration if none does
        PlainArray            shared memory of its shape, in row-major order
        Barriers              so many mbarriers; of a count of None one that takes no index. With `pair` barriers of the cluster
        TensorTiles           tensor memory of its shape; with `pair` for instructions of two CTAs
        OverlaidTensorTiles   both arrays of tiles at one place of tensor memory; in the simulator each has a place of its own
        ClusterTiles          shared memory [groups, rows * columns] float32. `launch` does not ask for it in the simulator
        ClusterBarriers       shared memory [groups, 4] int32 for two mbarriers a group; in the simulator barriers of the cluster

    interpret   whether the kernel runs in the simulator
    """
    if isinstance(part, ClusterTiles):
        return plgpu.SMEM((part.groups, math.prod(part.shape)), jnp.float32)
    if isinstance(part, ClusterBarriers):
        if interpret:
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
        both = tuple(allocated(tiles, interpret) for tiles in (part.first, part.second))
        return both if interpret else plgpu.RefUnion(*both)  # pyright: ignore[reportArgumentType]  # descriptions have no public type
    dtype = jnp.dtype(part.dtype)
    if isinstance(part, PlainArray):
        return plgpu.SMEM(part.shape, dtype)
    return plgpu.SMEM(part.shape, dtype, transforms=swizzled(part.shape[-1], dtype.itemsize, part.swizzle))


def swizzled(columns: int, item: int, largest: int = 128) -> tuple[typing.Any, ...]:
    """The two transforms by which Pallas stores swizzled tiles: (tiling, in pieces of 8 rows of as many bytes as the swizzle has;
    the swizzle). The swizzle is the largest of 128, 64 and 32 bytes that divides a row; StopIteration if none does.

    columns   of a row
    item      bytes of an element
    largest   a larger swizzle, in bytes, is not taken
    """
    swizzle = swizzle_bytes(columns, item, largest)
    return plgpu.TilingTransform((8, swizzle // item)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]  # jax 0.11: concrete, whatever its base class says
