"""What a kernel keeps in the shared memory of its CTA, described once for the launch and for the choice of its tiles.

Each kernel has a named tuple `Scratch` whose fields are made of the descriptions below. `kernel_parts.launch` allocates
them in the order of the fields, and `scratch_bytes` adds them up, so that a tile that is chosen because it fits does
fit. Nothing here imports Mosaic.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp

SHARED_MEMORY = 227 * 1024  # bytes of shared memory that a CTA may use on Hopper
RESERVED = 1024  # bytes that `scratch_bytes` adds for barriers, 8 bytes each, and for the alignment of small arrays
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int8": 1, "float8_e4m3fn": 1}

Part = typing.TypeVar("Part")
"""What a field of Inputs, Outputs or Scratch holds: a description or an array outside the kernel, a Ref inside."""


@dataclasses.dataclass(frozen=True)
class SwizzledTiles:
    """Tiles in shared memory as TMA writes and WGMMA reads them: [..., rows, columns] in pieces of 8 rows, swizzled."""

    shape: tuple[int, ...]  # leading dimensions count slots or warpgroups
    dtype: str
    swizzle: int = 128  # the most bytes to swizzle over; the largest of 128, 64 and 32 that divides a row is taken

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class PlainArray:
    """An array in shared memory, in row-major order, which threads read and write by index."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Barriers:
    """`count` mbarriers, each complete after `arrivals` arrivals; None is one barrier that takes no index."""

    count: int | None = None
    arrivals: int = 1
    tcgen05: bool = False  # they also order accesses to tensor memory, and tcgen05.commit may arrive
    pair: bool = False  # both CTAs of a pair arrive at the barrier of the first, which alone may wait
    in_simulator: bool = False  # in the simulator alone; on the device the Ref is None

    bytes = 0  # part of RESERVED


@dataclasses.dataclass(frozen=True)
class ClusterTiles:
    """A float32 tile [rows, columns] for each of `groups` warpgroups, which the other CTA of the cluster writes."""

    groups: int
    shape: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.groups * math.prod(self.shape) * ITEM_BYTES["float32"]


@dataclasses.dataclass(frozen=True)
class ClusterBarriers:
    """A barrier for each of `groups` tiles at which both CTAs of a cluster arrive (partial_sums.py)."""

    groups: int
    in_simulator: bool = False  # in the simulator alone; on the device the Ref is None

    bytes = 0  # part of RESERVED


@dataclasses.dataclass(frozen=True)
class TensorTiles:
    """Tiles in tensor memory (TMEM) of Blackwell, one for each warpgroup that computes on one."""

    shape: tuple[int, int, int]  # (count, TMEM_LANES, columns); two elements of 16 bits share a column of 32 bits
    dtype: str
    pair: bool = False  # whether instructions of two CTAs (cta_group::2) use all tensor memory of the kernel

    bytes = 0  # not of shared memory

    @property
    def tmem_columns(self) -> int:
        return self.shape[0] * self.shape[2] * ITEM_BYTES[self.dtype] // 4


@dataclasses.dataclass(frozen=True)
class OverlaidTensorTiles:
    """Two arrays of tiles that begin at the same column of tensor memory: a kernel has a pair of Refs."""

    first: TensorTiles
    second: TensorTiles

    bytes = 0  # not of shared memory

    @property
    def tmem_columns(self) -> int:
        """Columns of 32 bits of the larger one."""
        return max(self.first.tmem_columns, self.second.tmem_columns)


TMEM_LANES = 128  # lanes of tensor memory, the rows of a tile there
COPIED_ROWS = 16  # rows of a query tile that one copy brings to shared memory (tcgen05_tiles.py)
TMEM_COLUMNS = 512  # columns of 32 bits of the tensor memory of an SM

Description = SwizzledTiles | PlainArray | Barriers | ClusterTiles | ClusterBarriers | TensorTiles | OverlaidTensorTiles


def scratch_bytes(scratch: tuple) -> int:
    """Bytes of shared memory that a CTA needs for `scratch`, a tree of descriptions, and RESERVED."""
    parts: list[Description] = jax.tree.leaves(scratch)
    return sum(part.bytes for part in parts) + RESERVED


def tmem_columns(scratch: tuple) -> int:
    """Columns of tensor memory that a CTA needs for `scratch`, a tree of descriptions."""
    parts: list[Description] = jax.tree.leaves(scratch)
    return sum(part.tmem_columns for part in parts if isinstance(part, TensorTiles | OverlaidTensorTiles))


def fits(scratch: tuple) -> bool:
    """Whether a CTA of Hopper or data-center Blackwell (SHARED_MEMORY) has room for these descriptions."""
    return scratch_bytes(scratch) <= SHARED_MEMORY


def swizzle_bytes(columns: int, item: int, most: int = 128) -> int:
    """The swizzle of rows of `columns` elements of `item` bytes: the largest that divides a row, else StopIteration."""
    return next(n for n in (128, 64, 32) if n <= most and columns * item % n == 0)


def dtype_name(dtype: jax.typing.DTypeLike) -> str:
    """The name by which descriptions and plans call a dtype, such as "bfloat16"."""
    return jnp.dtype(dtype).name
