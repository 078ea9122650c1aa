"""The exchange of partial sums between the two CTAs of a cluster that share the columns of a tile (columns.py).

Each exchanging warpgroup has one tile of distributed shared memory, which its partner, the warpgroup with the same
number in the other CTA, writes by `st.async`: the element of thread t is read by thread t, so the layout is that of
registers. Two mbarriers go with it:

    full   the partner's bytes have arrived: one thread arrives and expects the bytes, `st.async` counts them
    free   the partner has read what this CTA sent, which may send again; one arrival of each warp

Each CTA sends its tile before it waits for one, so they do not wait for each other in a circle. A CTA must not end
while its partner may still write to its shared memory: `begin` and `end` are barriers of the cluster, which the
hardware starts as a whole.

Waits and arrivals have the default scope, the CTA, as in CUTLASS's barriers of a cluster. The scope of the cluster
would add a fence of all global memory to each arrival and an invalidation of the L1 to each wait, for nothing here.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from flexjax.backends.mosaic_gpu.machine.columns import COLUMNS, Exchange
from flexjax.backends.mosaic_gpu.machine.kernel_parts import (
    SCALAR_LAYOUT,
    Ref,
    Scalar,
    i32,
    inline_mgpu,
    ptx,
    scalar_of,
)
from flexjax.backends.mosaic_gpu.machine.registers import TILE, assemble, element, lowered, positions_of
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP, WARPS

VECTOR = 4  # numbers that one `st.async` sends
MEMORY = plgpu.RefType()


def first_cta(exchange: Exchange[Ref] | None) -> Scalar | bool:
    """Whether this CTA is the first of its cluster, which writes what both know; True without an exchange."""
    return True if exchange is None else lax.axis_index(COLUMNS) == 0


def in_first_cta(exchange: Exchange[Ref] | None, value: jax.Array) -> jax.Array:
    """`value` in the first CTA of a cluster, 0 times `value` in the other: a sum over both contains it once."""
    return (
        value if exchange is None else value * jnp.where(lax.axis_index(COLUMNS) == 0, jnp.float32(1), jnp.float32(0))
    )


@device_op
def begin(exchange: Exchange[Ref] | None) -> None:
    """Called at the start by all warpgroups: makes the mbarriers of the exchange and waits for the partner's."""
    if exchange is None:
        return
    groups = exchange.arrived.shape[0]

    @inline_mgpu(MEMORY)
    def make(barriers: ir.Value) -> None:
        address = _address(barriers)
        code = ["{ .reg .u32 t; .reg .pred p;", "mov.u32 t, %tid.x;", "setp.eq.u32 p, t, 0;"]
        for group in range(groups):
            code += [
                f"@p mbarrier.init.shared::cta.b64 [$0 + {16 * group}], 1;",
                f"@p mbarrier.init.shared::cta.b64 [$0 + {16 * group + 8}], {WARPS};",
            ]
        code += ["@p fence.mbarrier_init.release.cluster;", _MEET, "}"]
        ptx(" ".join(code), address)

    make(exchange.arrived)


@device_op
def end(exchange: Exchange[Ref] | None) -> None:
    """Called at the end by all warpgroups: waits for the partner, which may still write to this CTA's shared memory."""
    if exchange is None:
        return

    @inline_mgpu()
    def meet() -> None:
        ptx(_MEET)

    meet()


_MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """Adds up the partial sums of one warpgroup and its partner; nothing to add without an exchange."""

    exchange: Exchange[Ref] | None
    group: Scalar | int  # number of the warpgroup among those that exchange

    def total(self, tile: jax.Array, number: Scalar | int) -> jax.Array:
        """The sum of the two warpgroups' tiles, float32, with the same bits in both; `number` counts the calls."""
        if self.exchange is None:
            return tile
        self.send(tile, number)
        return self.receive(tile, number)

    @device_op
    def send(self, tile: jax.Array, number: Scalar | int) -> None:
        """Sends the tile to the partner, once the partner has read the one before."""
        if self.exchange is None:
            return
        exchange, rank = self.exchange, lax.axis_index(COLUMNS)

        @inline_mgpu(TILE, MEMORY, MEMORY, SCALAR_LAYOUT, SCALAR_LAYOUT, SCALAR_LAYOUT)
        def store(
            tile: mgpu.FragmentedArray,
            tiles: ir.Value,
            barriers: ir.Value,
            group: mgpu.FragmentedArray,
            odd: mgpu.FragmentedArray,
            rank: mgpu.FragmentedArray,
        ) -> None:
            values = [
                element(tile.registers[at], item) for at, item, _ in positions_of(lowered(TILE), tile.shape).constants
            ]
            size = len(values) * 4 * WARPGROUP
            full, slot = _places(tiles, barriers, scalar_of(group), size)
            # `free` has a phase for each tile sent; the phase before the first counts as complete
            _wait(arith.addi(full, _i32(8)), arith.xori(scalar_of(odd), _i32(1)))
            ptx(
                "{ .reg .u32 t; .reg .pred p; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; "
                f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size}; }}",
                full,
            )
            partner = arith.xori(scalar_of(rank), _i32(1))
            there, arrived = (_in_partner(x, partner) for x in (slot, full))
            for n in range(0, len(values), VECTOR):
                ptx(
                    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                    f"[$0 + {n * 4 * WARPGROUP}], {{$2, $3, $4, $5}}, [$1];",
                    there,
                    arrived,
                    *values[n : n + VECTOR],
                )

        store(tile, exchange.tiles, exchange.arrived, i32(self.group), i32(number) & 1, rank)

    @device_op
    def receive(self, tile: jax.Array, number: Scalar | int) -> jax.Array:
        """The sum of `tile` and the tile that the partner has sent, once it is there."""
        if self.exchange is None:
            return tile
        exchange, rank = self.exchange, lax.axis_index(COLUMNS)

        @inline_mgpu(
            TILE, MEMORY, MEMORY, SCALAR_LAYOUT, SCALAR_LAYOUT, SCALAR_LAYOUT,
            returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE),
        )  # fmt: skip
        def add(
            tile: mgpu.FragmentedArray,
            tiles: ir.Value,
            barriers: ir.Value,
            group: mgpu.FragmentedArray,
            odd: mgpu.FragmentedArray,
            rank: mgpu.FragmentedArray,
        ) -> mgpu.FragmentedArray:
            positions = positions_of(lowered(TILE), tile.shape).constants
            full, slot = _places(tiles, barriers, scalar_of(group), len(positions) * 4 * WARPGROUP)
            _wait(full, scalar_of(odd))
            items, f32 = [], ir.F32Type.get()
            for n in range(0, len(positions), VECTOR):
                found = mgpu_utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
                    f"ld.shared::cta.v4.f32 {{$0, $1, $2, $3}}, [$4 + {n * 4 * WARPGROUP}];",
                    slot,
                    result_types=[f32] * VECTOR,
                    has_side_effects=True,
                )
                for (at, item, _), value in zip(positions[n : n + VECTOR], found, strict=True):
                    items.append((at, item, arith.addf(element(tile.registers[at], item), value)))
            partner = arith.xori(scalar_of(rank), _i32(1))
            ptx(
                "{ .reg .u32 t; .reg .pred p; bar.warp.sync 0xffffffff; mov.u32 t, %tid.x; "
                "and.b32 t, t, 31; setp.eq.u32 p, t, 0; @p mbarrier.arrive.shared::cluster.b64 _, [$0]; }",
                _in_partner(arith.addi(full, _i32(8)), partner),
            )
            return assemble(lowered(TILE), tile.shape, items, None)

        return add(tile, exchange.tiles, exchange.arrived, i32(self.group), i32(number) & 1, rank)


# ------------------------------------------------------------------- MLIR values, inside inline_mgpu


def _i32(value: int) -> ir.Value:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _address(memref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu_utils.memref_ptr(memref))


def _places(tiles: ir.Value, barriers: ir.Value, group: ir.Value, size: int) -> tuple[ir.Value, ir.Value]:
    """(address of the barrier `full` of the group, this thread's address in its tile), i32; `free` is 8 bytes later."""
    thread = arith.andi(ptx("mov.u32 $0, %tid.x;", result=ir.IntegerType.get_signless(32)), _i32(WARPGROUP - 1))
    own = arith.addi(arith.muli(group, _i32(size)), arith.muli(thread, _i32(4 * VECTOR)))
    return arith.addi(_address(barriers), arith.muli(group, _i32(16))), arith.addi(_address(tiles), own)


def _in_partner(address: ir.Value, partner: ir.Value) -> ir.Value:
    """The address, in the shared memory of the cluster, of what this CTA has at `address`, in CTA `partner`."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", address, partner, result=ir.IntegerType.get_signless(32))


def _wait(barrier: ir.Value, parity: ir.Value) -> None:
    """Waits for the phase with this parity (0 for the first) of an mbarrier: each thread polls."""
    ptx(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE; bra AGAIN; DONE: }",
        barrier,
        parity,
    )
