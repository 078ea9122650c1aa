"""What a kernel keeps in the shared memory of its CTA, described once for the launch and for the choice of its tiles.

Each kernel has a named tuple `Scratch` whose fields are made of the descriptions below. `kernel_parts.launch` allocates them in
the order of the fields, and `scratch_bytes` adds them up, so that a tile that is chosen because it fits does fit.

Nothing here imports Mosaic: tiles are also chosen where there is no GPU and an older jax.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a CTA may use on Hopper."""
RESERVED = 1024
"""Bytes that `scratch_bytes` adds for barriers, 8 bytes each, and for the alignment of small arrays."""
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int8": 1, "float8_e4m3fn": 1}

Part = typing.TypeVar("Part")
"""What a field of a kernel's Inputs, Outputs or Scratch holds: a description or an array outside the kernel, a Ref inside."""


@dataclasses.dataclass(frozen=True)
class SwizzledTiles:
    """Tiles in shared memory as TMA writes and WGMMA reads them: [..., rows, columns] in pieces of 8 rows, swizzled.

    shape     of the whole; leading dimensions count slots or warpgroups
    dtype     name of the dtype
    swizzle   largest number of bytes to swizzle over: 128, 64 or 32; the largest that divides a row is taken
    """

    shape: tuple[int, ...]
    dtype: str
    swizzle: int = 128

    @property
    def bytes(self) -> int:
        """Bytes of shared memory that the tiles take."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class PlainArray:
    """An array in shared memory, in row-major order, which threads read and write by index; `dtype` is a name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of shared memory that the array takes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Barriers:
    """`count` mbarriers, each complete after `arrivals` arrivals; a count of None is one barrier that takes no index.

    tcgen05   arrivals and waits also order accesses to tensor memory, and tcgen05.commit may arrive
    pair      warpgroups of both CTAs of a pair arrive, `arrivals` of each, at the barrier of the first CTA, which alone may wait
    """

    count: int | None = None
    arrivals: int = 1
    tcgen05: bool = False
    pair: bool = False

    bytes = 0  # part of RESERVED


@dataclasses.dataclass(frozen=True)
class ClusterTiles:
    """One float32 tile for each of `groups` warpgroups, which the other CTA of the cluster writes (partial_sums.py); in the
    simulator an array in global memory.

    shape   (rows, columns) of a tile
    """

    groups: int
    shape: tuple[int, int]

    @property
    def bytes(self) -> int:
        """Bytes of shared memory that the tiles take."""
        return self.groups * math.prod(self.shape) * ITEM_BYTES["float32"]


@dataclasses.dataclass(frozen=True)
class ClusterBarriers:
    """A barrier for each of `groups` tiles at which both CTAs of a cluster arrive (partial_sums.py); on the device two
    mbarriers in a plain array, because they count single threads.
    """

    groups: int

    bytes = 0  # part of RESERVED


@dataclasses.dataclass(frozen=True)
class TensorTiles:
    """Tiles in tensor memory (TMEM) of Blackwell, [count, TMEM_LANES, columns], an array with one tile for each warpgroup that
    computes on one; two elements of 16 bits share a column of 32 bits.

    shape   (count, rows, columns), rows being TMEM_LANES
    dtype   name of the dtype
    pair    whether instructions of two CTAs (cta_group::2) use it: all tensor memory of a kernel, or none
    """

    shape: tuple[int, int, int]
    dtype: str
    pair: bool = False

    bytes = 0  # not of shared memory

    @property
    def tmem_columns(self) -> int:
        """Columns of 32 bits that the tiles take."""
        return self.shape[0] * self.shape[2] * ITEM_BYTES[self.dtype] // 4


@dataclasses.dataclass(frozen=True)
class OverlaidTensorTiles:
    """Two arrays of tiles that begin at the same column of tensor memory: a kernel has a pair of Refs. In the simulator each
    has memory of its own.
    """

    first: TensorTiles
    second: TensorTiles

    bytes = 0  # not of shared memory

    @property
    def tmem_columns(self) -> int:
        """Columns of 32 bits that the two together take: those of the larger one."""
        return max(self.first.tmem_columns, self.second.tmem_columns)


TMEM_LANES = 128
"""Lanes of tensor memory, the rows of a tile there."""
TMEM_COLUMNS = 512
"""Columns of 32 bits of the tensor memory of an SM."""

Description = SwizzledTiles | PlainArray | Barriers | ClusterTiles | ClusterBarriers | TensorTiles | OverlaidTensorTiles


def scratch_bytes(scratch: tuple) -> int:
    """Bytes of shared memory that a CTA needs for `scratch`, a tree of descriptions (None for what a kernel leaves out), plus RESERVED for
    barriers and alignment. Tiles in tensor memory count 0.
    """
    parts: list[Description] = jax.tree.leaves(scratch)
    return sum(part.bytes for part in parts) + RESERVED


def tmem_columns(scratch: tuple) -> int:
    """Columns of tensor memory that a CTA needs for `scratch`, a tree of descriptions."""
    parts: list[Description] = jax.tree.leaves(scratch)
    return sum(part.tmem_columns for part in parts if isinstance(part, TensorTiles | OverlaidTensorTiles))


def fits(scratch: tuple) -> bool:
    """Whether a CTA on Hopper, or on a Blackwell card with as much shared memory (SHARED_MEMORY), has room for `scratch`, a tree of
    descriptions.
    """
    return scratch_bytes(scratch) <= SHARED_MEMORY


def swizzle_bytes(columns: int, item: int, most: int = 128) -> int:
    """The bytes over which SwizzledTiles with rows of `columns` elements are swizzled: the largest of 128, 64 and 32
    that divides a row. Raises StopIteration if 32 does not divide it.

    item   bytes of an element
    most   a larger swizzle is not taken
    """
    return next(n for n in (128, 64, 32) if n <= most and columns * item % n == 0)


def dtype_name(dtype: jax.typing.DTypeLike) -> str:
    """The name by which descriptions and plans call a dtype, such as "bfloat16".

    dtype   anything that `jnp.dtype` accepts; a name gives itself
    """
    return jnp.dtype(dtype).name
