"""Captured arrays with a number for each query and key, such as a pair bias `bias[h, q, kv]`, in the backward kernels.

Reading. Such an array is as large as the scores. One of them, the one that the forward pass stages (staging.py), comes
through shared memory by the copy engine, in a ring of slots beside those of the queries and keys; the kernels whose tile is
transposed read it across its rows there.

Writing. Where no two places of the attention matrix read the same element, the gradient of an element is

    g = dsp * d mod / d load,    dsp = p * (dP - delta)

of its place alone, and the dQ kernel, which visits every place once, writes it: a tile goes to shared memory and from there
with the copy engine, and tiles that no list names are written as zeros. So nothing is summed or computed again, and the
result depends on no order. An array that the batch shares is written so too where the accumulators of dQ for all its entries
fit one warpgroup's registers: a block of threads then takes them together. Other gradients are those of capture_gradients.py.

Both up to head dim 128.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import backward_sm90_common as common
from flexjax.backends.mosaic_gpu import memory, staging
from flexjax.backends.mosaic_gpu.backward_tile_math import Captures, ColumnMath
from flexjax.backends.mosaic_gpu.backward_tiles import NARROW, DqTiles, PairBytes, dq_fits, padded_dims
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

AXES = ("b", "h", "q", "kv")
Ref = typing.Any
Dims = tuple[tuple[str, int], ...]
"""Per dimension of an array: the axis that it walks in steps of one ("" for none) and the index it begins at."""


# ------------------------------------------------------------------- which arrays, and where their elements lie


def _walk(atom: ir.Atom) -> tuple[str, int] | None:
    """An entry of Dims, None where the index is anything else."""
    if isinstance(atom, ir.Lit):
        return "", int(atom.value)
    line = atom.linear
    if line is None or line.uniform:
        return None
    moving = [(axis, n) for axis, n in zip(AXES, (line.b, line.h, line.q, line.kv), strict=True) if n]
    if len(moving) > 1 or any(n != 1 for _, n in moving):
        return None
    return moving[0][0] if moving else "", line.const


def plain_dims(load: ir.Load) -> Dims | None:
    """How the load walks its array, None where a dimension walks otherwise than along one axis of its own."""
    found = [_walk(atom) for atom in load.index]
    named = [dim[0] for dim in found if dim is not None and dim[0]]
    plain = tuple(dim for dim in found if dim is not None)
    return plain if len(plain) == len(found) and len(set(named)) == len(named) else None


def placed(values: jax.Array, dims: Dims, shape: tuple[int, ...]) -> jax.Array:
    """Numbers of [b, h, q, kv] (1 for an axis that the array lacks) where the load reads them, zeros elsewhere."""
    order = [AXES.index(axis) for axis, _ in dims if axis]
    lengths = [values.shape[AXES.index(axis)] if axis else 1 for axis, _ in dims]
    rest = [n for n in range(4) if n not in order]
    values = values.transpose(*rest, *order).reshape(lengths)
    widths = [(first, n - first - length) for (_, first), n, length in zip(dims, shape, lengths, strict=True)]
    return jnp.pad(values, widths) if any(w != (0, 0) for w in widths) else values


def gradient_loads(derivative: ir.Program) -> tuple[ir.Load, ...]:
    return tuple(typing.cast(ir.Load, derivative.steps[n]) for n in derivative.gradients)


@dataclasses.dataclass(frozen=True)
class Written:
    """The gradient of a captured array that the dQ kernel writes: derivatives[2 + place] of the score program."""

    place: int
    capture: int
    dims: Dims
    dtype: str
    shape: tuple[int, ...]

    @property
    def item(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def has(self, axis: str) -> bool:
        return any(axis == name for name, _ in self.dims)

    def out_type(self, plan: KernelPlan) -> jax.ShapeDtypeStruct:
        """[b, h, q, kv], in whole pieces of the copy engine; whole tiles for the simulator, which clamps."""
        interpret = plan.options.interpret
        unit = common.padded_len(1, True) if interpret else staging.PIECE[1] // self.item
        columns = -(-plan.kv_len // unit) * unit
        leading = (plan.batch if self.has("b") else 1, plan.q_heads if self.has("h") else 1)
        return jax.ShapeDtypeStruct((*leading, common.padded_len(plan.q_len, interpret), columns), self.dtype)

    def tile(self, ref: Ref, b: jax.Array, h: jax.Array, q0: jax.Array, kv0: jax.Array, shape: tuple[int, int]) -> Ref:
        at = (b if self.has("b") else 0, h if self.has("h") else 0)
        return ref.at[(*at, pl.ds(q0, shape[0]), pl.ds(kv0, shape[1]))]

    def gradient(self, plan: KernelPlan, values: jax.Array) -> jax.Array:
        """What the kernel wrote, in the shape of the array."""
        return placed(values[:, :, : plan.q_len, : plan.kv_len], self.dims, self.shape)


def _writable(plan: KernelPlan, derivative: ir.Program, place: int) -> Written | None:
    """What would be written, if sums over the batch are no obstacle."""
    loads = gradient_loads(derivative)
    load, slope = loads[place], derivative.results[2 + place]
    dims, array = plain_dims(load), derivative.captures[load.capture]
    if dims is None or array.dtype not in staging.ITEM_SIZES or sum(o.capture == load.capture for o in loads) > 1:
        return None
    if isinstance(slope, ir.Lit) and slope.value == 0:
        return None
    needed = {"q", "kv"} | ({"h"} if plan.q_heads > 1 else set())
    if not needed <= {axis for axis, _ in dims}:
        return None
    return Written(place, load.capture, dims, array.dtype, array.shape)


@dataclasses.dataclass(frozen=True)
class Pair:
    """What the kernels of one plan do with such arrays: the load that is staged, the gradients that the dQ kernel writes, and
    how many batch entries it takes together to sum them."""

    staged: ir.Load | None = None
    staged_type: str = "bfloat16"
    written: tuple[Written, ...] = ()
    entries: int = 1

    @property
    def bytes(self) -> PairBytes:
        staged = staging.ITEM_SIZES[self.staged_type] if self.staged is not None else 0
        return PairBytes(staged, sum(w.item for w in self.written), self.entries)


def _entries(plan: KernelPlan, pair: Pair, found: Written) -> int:
    """Batch entries to take together so that the gradient can be written beside the others, 0 where it cannot."""
    entries = 1 if found.has("b") else plan.batch
    if pair.written and entries != pair.entries:
        return 0
    if entries == 1:
        return 1
    same_lists = plan.blocks is None or plan.blocks.batch == 1
    same_tile = pair.staged is None or not any("b" in ir.axes_of(a) for a in pair.staged.index)
    return entries if same_lists and same_tile and entries * max(padded_dims(plan)) <= NARROW else 0


def pair_of(plan: KernelPlan, derivative: ir.Program | None, wanted: tuple[bool, ...]) -> Pair:
    """`plan` with extra features joined; `wanted` says which captured arrays need a gradient.

    Above head dim 128 the dQ kernel has no registers left for it: it spills 200 to 490 bytes a thread.
    """
    if derivative is None or max(padded_dims(plan)) > NARROW:
        return Pair()
    load = staging.staged_load(derivative)
    pair = Pair() if load is None else Pair(load, derivative.captures[load.capture].dtype)
    for place, source in enumerate(gradient_loads(derivative)):
        found = _writable(plan, derivative, place) if wanted[source.capture] else None
        entries = 0 if found is None else _entries(plan, pair, found)
        if found is None or not entries:
            continue
        more = dataclasses.replace(pair, written=(*pair.written, found), entries=entries)
        pair = more if dq_fits(plan, more.bytes) else pair
    return pair


def simulated_captures(plan: KernelPlan, pair: Pair, captures: Captures) -> Captures:
    """For the simulator, which does not fill in what lies past the end of a staged array: whole tiles."""
    if pair.staged is None or not plan.options.interpret:
        return captures
    arrays = list(captures.score)
    array = arrays[pair.staged.capture]
    least = (common.padded_len(plan.q_len, True), common.padded_len(plan.kv_len, True))
    widths = [(0, max(0, n - have)) for n, have in zip(least, array.shape[-2:], strict=True)]
    arrays[pair.staged.capture] = jnp.pad(array, [(0, 0)] * (array.ndim - 2) + widths)
    return captures._replace(score=tuple(arrays))


# ------------------------------------------------------------------- the ring of staged tiles


class Ring(typing.NamedTuple):
    """Shared memory for tiles on their way in, and its barriers; None where nothing is staged."""

    tiles: Ref = None
    full: Ref = None
    free: Ref = None


@dataclasses.dataclass(frozen=True)
class Staging:
    """The staged load of a kernel that has `slots` slots of `shape` (queries, keys), read by `readers` warpgroups.

    Each owns some of the queries of a slot, or `transposed` some of its keys, which are then the rows of its tile.
    """

    plan: KernelPlan
    derivative: ir.Program
    load: ir.Load
    dtype: str
    slots: int
    shape: tuple[int, int]
    readers: int
    transposed: bool = False

    def slot_memory(self) -> typing.Any:
        return memory.staged_memory(self.slots, self.shape, self.dtype)

    def scratch(self) -> Ring:
        return Ring(
            self.slot_memory(),
            plgpu.Barrier(num_barriers=self.slots),
            plgpu.Barrier(num_barriers=self.slots, num_arrivals=self.readers),
        )

    def source(self, captures: Captures, b: jax.Array, h: jax.Array) -> Ref:
        """The matrix of queries and keys that head (b, h) reads."""
        program = TileProgram(
            self.derivative,
            captures.score,
            self.shape,
            batch=b,
            head=h,
            results=(0,),
            interpret=self.plan.options.interpret,
        )
        return captures.score[self.load.capture].at[program.scalars(self.load.index[:-2])]

    def fetch(self, slot: Ref, source: Ref, q0: jax.Array, kv0: jax.Array, full: Ref) -> None:
        """In the copying warpgroup: a tile into a slot that is free."""
        tile = source.at[pl.ds(q0, self.shape[0]), pl.ds(kv0, self.shape[1])]
        plgpu.copy_gmem_to_smem(tile, slot, full)

    def copy(self, ring: Ring, source: Ref, q0: jax.Array, kv0: jax.Array, at: jax.Array) -> None:
        """In the copying warpgroup: the `at`-th tile."""
        slot = common.slot_of(at, self.slots)
        when(at >= self.slots)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
        self.fetch(ring.tiles.at[slot], source, q0, kv0, ring.full.at[slot])

    def held(self, tile: ColumnMath, slots: Ref, slot: jax.Array, group: jax.Array) -> ColumnMath:
        """In computing warpgroup `group`: its tile of the mod with its part of a full slot read."""
        size = self.shape[int(self.transposed)] // self.readers
        own = pl.ds(group * size, size)
        interpret = self.plan.options.interpret
        if self.transposed:
            value = memory.load_staged_transposed(slots.at[slot, :, own], interpret)
        else:
            value = memory.load_staged(slots.at[slot, own], interpret)
        return tile.holding(self.load, value)

    def taken(
        self, tile: ColumnMath, ring: Ring, at: jax.Array, group: jax.Array, first: bool, last: bool
    ) -> ColumnMath:
        """The same from a ring: the first reader of a step waits for the slot, the last gives it back."""
        slot = common.slot_of(at, self.slots)
        if first:
            plgpu.barrier_wait(ring.full.at[slot])
        tile = self.held(tile, ring.tiles, slot, group)
        if last:
            common.Products(self.plan.options.interpret).release(ring.free.at[slot])
        return tile


def staging_for(
    plan: KernelPlan,
    derivative: ir.Program | None,
    pair: Pair,
    slots: int,
    shape: tuple[int, int],
    readers: int,
    transposed: bool = False,
) -> Staging | None:
    if pair.staged is None or derivative is None or not slots:
        return None
    return Staging(plan, derivative, pair.staged, pair.staged_type, slots, shape, readers, transposed)


# ------------------------------------------------------------------- gradients on their way out


def empty_blocks(plan: KernelPlan, arrays: common.WalkRefs) -> common.WalkRefs:
    """The key blocks that no list of a query block names, as a walk's plain list; all None without a block mask."""
    blocks = plan.blocks
    if blocks is None:
        return common.WalkRefs(None, None, None, None)
    width = -(-plan.kv_len // blocks.block_kv)
    visited = jnp.zeros((blocks.batch, blocks.heads, -(-plan.q_len // blocks.block_q), width), jnp.bool_)
    for num, index in ((arrays.partial_num, arrays.partial_index), (arrays.full_num, arrays.full_index)):
        if num is None or index is None:
            continue
        listed = jnp.where(jnp.arange(index.shape[-1]) < num[..., None], index, width)
        b, h, row = (jnp.arange(n) for n in num.shape)
        visited = visited.at[b[:, None, None, None], h[:, None, None], row[:, None], listed].set(True, mode="drop")
    index = jnp.sort(jnp.where(visited, width, jnp.arange(width, dtype=jnp.int32)), axis=-1)
    return common.WalkRefs(None, None, jnp.sum(~visited, axis=-1, dtype=jnp.int32), index)


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes tiles of gradients from the computing warpgroup `group` of the dQ kernel, whose queries begin at `q0`."""

    written: tuple[Written, ...]
    tiles: DqTiles
    refs: tuple[Ref, ...]
    scratch: tuple[Ref, ...]
    group: jax.Array
    b: jax.Array
    h: jax.Array
    q0: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        return (self.tiles.rows, self.tiles.keys)

    def write(self, values: tuple[jax.Array, ...], kv0: jax.Array) -> None:
        """The tiles of the keys from `kv0`."""
        if self.written:
            self._fill(values)
            self._send(kv0)

    def zeros(self, walk: common.Walk, empty: common.WalkRefs, tile: jax.Array) -> None:
        """The tiles that are not visited."""
        if not self.written or empty.full_num is None:
            return
        count = walk.counts(empty, self.b, self.h, tile).plain

        @when(count > 0)
        def _() -> None:
            zero = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), common.WGMMA)
            self._fill((zero,) * len(self.written))
            pl.loop(0, count)(lambda i: self._send(walk.tile(empty, self.b, self.h, tile, i, False) * self.tiles.keys))

    def _fill(self, values: tuple[jax.Array, ...]) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for one, smem, value in zip(self.written, self.scratch, values, strict=True):
            smem.at[self.group][...] = value.astype(one.dtype)
        plgpu.commit_smem()

    def _send(self, kv0: jax.Array) -> None:
        for one, smem, ref in zip(self.written, self.scratch, self.refs, strict=True):
            plgpu.copy_smem_to_gmem(smem.at[self.group], one.tile(ref, self.b, self.h, self.q0, kv0, self.shape))


def writer_scratch(written: tuple[Written, ...], tiles: DqTiles) -> tuple[typing.Any, ...]:
    return tuple(memory.staged_memory(tiles.groups, (tiles.rows, tiles.keys), one.dtype) for one in written)
