"""What the Hopper backward kernels share: prepared operands, the walk over block lists, and the mathematics of a tile.

For a tile of scores s = scale * q . k, with lse the logarithm of the softmax denominator of each query row,

    p   = exp(mod(s) - lse)            0 where the mask is off
    dP  = (dO V^T) * r                 r is the dropout multiplier, 1 without dropout
    dsp = p * (dP - delta)             delta = rowsum(dO * O) - d_lse
    ds  = dsp * mod'(s)
    dV += (p * r)^T dO     dK += scale * ds^T Q     dQ += scale * ds K

Kernels work in base 2 (`exp2` is one instruction): p = exp2(s * scale * log2(e) - lse2). The row statistics lse2 and delta
are prepared outside. A row past the end, or one where nothing is on, gets lse2 = +inf, which makes p exactly 0 there.
What must never leak (NaN of a mod at a masked entry) is removed by selecting on p > 0 *after* the multiplication.

Accumulators and products go through `Products`: tensor-core instructions on the device, plain dots in the simulator,
which knows neither operands in registers nor initialised accumulators.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import jax.ref
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from flexjax.backends.mosaic_gpu.backward_tiles import padded_dim
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.memory import slot_of as slot_of
from flexjax.backends.mosaic_gpu.static_reference import LOG2E as LOG2E
from flexjax.block_mask import transpose
from flexjax.plan.kernel_plan import BlockLists, KernelPlan, Operands

WGMMA = plgpu.Layout.WGMMA
ALONG_ROWS = WGMMA.reduce(1)  # a number for each row of a tile
ALONG_COLUMNS = WGMMA.reduce(0)  # a number for each column of a tile


# ------------------------------------------------------------------- operands as the kernels want them


def padded_len(length: int, interpret: bool) -> int:
    """Length as the copy engine takes it (tiles of 8 rows); the simulator clamps, so it gets whole tiles."""
    unit = 256 if interpret else 8
    return -(-length // unit) * unit


class Prepared(typing.NamedTuple):
    """Inputs of the kernels, padded, in the plan's layout; `stats` is [B, N, 2, T'] with lse2 and delta in float32."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    d_out: jax.Array
    stats: jax.Array


def pad(x: jax.Array, layout: str, interpret: bool) -> jax.Array:
    """Queries or keys and the head dim rounded up as the kernels take them."""
    axis = 1 if layout == "BTNH" else 2
    widths = [(0, 0)] * 4
    widths[axis] = (0, padded_len(x.shape[axis], interpret) - x.shape[axis])
    widths[3] = (0, padded_dim(x.shape[3]) - x.shape[3])
    return jnp.pad(x, widths) if any(w != (0, 0) for w in widths) else x


def prepare(plan: KernelPlan, operands: Operands, d_out: jax.Array, stats: jax.Array) -> Prepared:
    padded = lambda x: pad(x, plan.layout, plan.options.interpret)
    return Prepared(padded(operands.query), padded(operands.key), padded(operands.value), padded(d_out), stats)


def rows_of(ref: typing.Any, layout: str, b: jax.Array, h: jax.Array, start: jax.Array, size: int) -> typing.Any:
    """Rows start..start+size of head (b, h) of a [B, T, N, D] or [B, N, T, D] array."""
    rows = pl.ds(start, size)
    return ref.at[b, rows, h] if layout == "BTNH" else ref.at[b, h, rows]


def tile_smem(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, swizzle: int = 128) -> typing.Any:
    """Shared memory laid out for the matrix instructions: rows of 8, swizzled over at most `swizzle` bytes."""
    row_bytes = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = next(s for s in (128, 64, 32) if s <= swizzle and row_bytes % s == 0)
    columns = swizzle // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]  # jax 0.11: concrete, whatever its base class says
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def compiler_params() -> plgpu.CompilerParams:
    return plgpu.CompilerParams(
        approx_math=True,
        reduction_scratch_bytes=0,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=True,
    )


def raise_register_limit(groups: int) -> None:
    """In a compute warpgroup: with two of them and a copying one, 2 * 240 + 24 fill the register file."""
    if groups == 2:
        plgpu.set_max_registers(240, action="increase")


def lower_register_limit(groups: int) -> None:
    """In the copying warpgroup."""
    if groups == 2:
        plgpu.set_max_registers(24, action="decrease")


# ------------------------------------------------------------------- products


@dataclasses.dataclass(frozen=True)
class Products:
    """acc += a @ b on the tensor cores, asynchronous; in the simulator on plain float32 scratch."""

    simulated: bool

    def accumulators(self, body: typing.Callable[..., typing.Any], *shapes: tuple[int, int]) -> typing.Any:
        """Calls body with zeroed float32 accumulators."""
        return pl.run_scoped(body, *(plgpu.ACC(s, jnp.float32) for s in shapes))  # pyright: ignore[reportPrivateImportUsage]  # public, but re-exported under its own name

    def start(self, acc: typing.Any, value: jax.Array) -> None:
        """acc = value, before the first product into it."""
        if self.simulated:
            jax.ref.swap(acc, ..., value)
        else:
            acc[...] = value

    def add(self, acc: typing.Any, a: typing.Any, b: typing.Any, *, a_t: bool = False, b_t: bool = False) -> None:
        """acc += a @ b; `a` is a tile in registers or in shared memory, `_t` transposes."""
        if not self.simulated:
            plgpu.wgmma(acc, a.T if a_t else a, b.T if b_t else b)
            return
        left = a if isinstance(a, jax.Array) else a[...]
        right = b[...]
        left, right = (left.T if a_t else left), (right.T if b_t else right)
        total = acc[...] + jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32))
        jax.ref.swap(acc, ..., total)

    def read(self, acc: typing.Any, in_flight: int = 0) -> jax.Array:
        """Value of an accumulator once at most `in_flight` later products are unfinished."""
        return acc[...] if self.simulated else plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)

    def wait(self, in_flight: int) -> None:
        if not self.simulated:
            plgpu.wgmma_wait(in_flight)

    def release(self, barrier: typing.Any) -> None:
        """Tells the producer that a slot was read."""
        if self.simulated:
            plgpu.commit_smem()  # the stand-in read it through the generic proxy
        plgpu.barrier_arrive(barrier)


def not_hoisted(index: jax.Array, interpret: bool) -> jax.Array:
    """`index`, in a way that hides from the compiler that it does not change in a loop.

    Otherwise the addresses of all slices of a tile that stays in shared memory are computed before the loop and kept in
    registers, two for each slice of 16 columns, which at large head dims spills.
    """
    if interpret:
        return index
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(splat,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat))
    def opaque(_: typing.Any, value: typing.Any) -> typing.Any:
        i32 = ir.IntegerType.get_signless(32)
        moved = mgpu_utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
            "mov.b32 $0, $1;", value.registers.flat[0], result_types=i32, has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(moved, (), is_signed=True)

    return opaque(index)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def wait_until_read(total: jax.Array, *rings: tuple[typing.Any, int]) -> None:
    """The copying warpgroup waits until every slot of (free barriers, slots) was read for the last time."""
    for free, slots in rings:
        for slot in range(slots):
            when(total > slot)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))


# ------------------------------------------------------------------- the walk over the lists


@dataclasses.dataclass(frozen=True)
class TileVisits:
    """How a tile of one axis visits tiles of the other axis.

    `per_block` visited tiles make a listed block; `own_per_block` tiles of the walking axis share one list. Without lists
    all `tiles` are visited, masked if `mask_all`.
    """

    own_per_block: int
    per_block: int
    tiles: int
    lists: bool
    mask_all: bool
    batch: int = 1
    heads: int = 1

    def counts(self, refs: "VisitLists", b: jax.Array, h: jax.Array, own: jax.Array) -> "VisitCounts":
        """How many tiles without and with the mask this tile visits."""
        if not self.lists:
            zero, all_ = jnp.int32(0), jnp.int32(self.tiles)
            return VisitCounts(zero if self.mask_all else all_, all_ if self.mask_all else zero)
        at = self._at(b, h, own)
        number = lambda ref: jnp.int32(0) if ref is None else ref[at] * self.per_block
        return VisitCounts(number(refs.full_num), number(refs.partial_num))

    def tile(
        self, refs: "VisitLists", b: jax.Array, h: jax.Array, own: jax.Array, step: jax.Array, masked: bool
    ) -> jax.Array:
        """Number of the tile visited at `step` of the masked or of the plain list."""
        if not self.lists:
            return step
        index = refs.partial_index if masked else refs.full_index
        if index is None:
            return step
        if self.per_block == 1:
            return index[(*self._at(b, h, own), step)]
        block = index[(*self._at(b, h, own), lax.div(step, jnp.int32(self.per_block)))]
        return block * self.per_block + lax.rem(step, jnp.int32(self.per_block))

    def _at(self, b: jax.Array, h: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        own = own if self.own_per_block == 1 else lax.div(own, jnp.int32(self.own_per_block))
        zero = jnp.int32(0)
        return (b if self.batch > 1 else zero, h if self.heads > 1 else zero, own)


class VisitCounts(typing.NamedTuple):
    unmasked: jax.Array
    masked: jax.Array


class VisitLists(typing.NamedTuple):
    """One orientation of the lists (arrays outside, references inside a kernel)."""

    partial_num: typing.Any
    partial_index: typing.Any
    full_num: typing.Any
    full_index: typing.Any


def visits_for(plan: KernelPlan, own_tile: int, visited_tile: int, transposed: bool) -> TileVisits:
    length = plan.q_len if transposed else plan.kv_len
    tiles = -(-length // visited_tile)
    blocks = plan.blocks
    if blocks is None:
        return TileVisits(1, 1, tiles, lists=False, mask_all=plan.mask is not None)
    own, visited = (blocks.block_kv, blocks.block_q) if transposed else (blocks.block_q, blocks.block_kv)
    return TileVisits(
        own // own_tile,
        visited // visited_tile,
        tiles,
        lists=True,
        mask_all=False,
        batch=blocks.batch,
        heads=blocks.heads,
    )


def for_each_visit(
    begin: typing.Callable[[jax.Array], typing.Any],
    step: typing.Callable[[typing.Any, jax.Array, jax.Array, jax.Array, bool], None],
    *,
    plan: KernelPlan,
    visits: TileVisits,
    lists: "VisitLists",
    b: jax.Array,
    h_kv: jax.Array,
    tile: jax.Array,
    size: int,
) -> jax.Array:
    """For a tile of keys: calls step(begin(head), head, first query, running number, masked) for every tile of `size`
    queries that reads it, over the query heads of the group; returns how many."""

    def one_head(g: jax.Array, before: jax.Array) -> jax.Array:
        h = h_kv * plan.group + g
        counts = visits.counts(lists, b, h, tile)
        between = before + counts.unmasked
        state = begin(h)

        def one(i: jax.Array, start: jax.Array, masked: bool) -> None:
            step(state, h, visits.tile(lists, b, h, tile, i, masked) * size, start + i, masked)

        pl.loop(0, counts.unmasked)(lambda i: one(i, before, False))
        if plan.mask is not None or plan.blocks is not None:
            pl.loop(0, counts.masked)(lambda i: one(i, between, True))
        return between + counts.masked

    if plan.group == 1:
        return one_head(jnp.int32(0), jnp.int32(0))
    return lax.fori_loop(0, plan.group, one_head, jnp.int32(0))


def visit_lists(plan: KernelPlan, lists: BlockLists | None, transposed: bool) -> VisitLists:
    if lists is None or plan.blocks is None:
        return VisitLists(None, None, None, None)
    if not transposed:
        return VisitLists(*lists)
    columns = -(-plan.kv_len // plan.blocks.block_kv)
    arrays: list[jax.Array | None] = []
    for num, index, width in ((*lists[:2], plan.blocks.partial_t), (*lists[2:], plan.blocks.full_t)):
        known = num is not None and index is not None
        arrays += transpose.transposed(num, index, columns=columns, width=width) if known else (None, None)
    return VisitLists(*arrays)


def longest_first(visits: TileVisits, arrays: VisitLists, own_tiles: int) -> jax.Array | None:
    """[batch, heads, tiles] int32: tiles by falling amount of work; None where all have the same."""
    nums = [n for n in (arrays.partial_num, arrays.full_num) if n is not None]
    if not visits.lists or not nums:
        return None
    work = sum(nums[1:], start=nums[0])
    work = jnp.repeat(work, visits.own_per_block, axis=-1)[..., :own_tiles]
    return jnp.argsort(-work, axis=-1, stable=True).astype(jnp.int32)


def tile_and_head(program: jax.Array, tiles: int, heads: int, head_major: bool) -> tuple[jax.Array, jax.Array]:
    """(rank of the tile, number of the head) of a block of threads; blocks start in order of their number.

    By head, the tiles of one head run together, so that what they read stays in the cache; otherwise the first tiles of all
    heads come first, which with the longest first leaves no tail.
    """
    if head_major:
        return lax.rem(program, jnp.int32(tiles)), lax.div(program, jnp.int32(tiles))
    return lax.div(program, jnp.int32(heads)), lax.rem(program, jnp.int32(heads))
