"""How the warpgroups of the forward kernel wait for each other: slots of the rings, and the ping-pong of two consumers.

That TMA has filled a slot is an mbarrier's matter (`*_full` of ForwardScratch). What is here uses hardware named barriers
(`bar.arrive`, `bar.sync`), numbered by `ForwardTile.named_barriers`: they cost no shared memory and no polling.

The simulator knows no named barriers. There mbarriers (`*_free` of ForwardScratch) stand in for those of the slots, and consumers do
not alternate, which changes no result.
"""

import dataclasses

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.forward_tiles import ForwardTile
from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, i32, inline_mgpu, ptx, scalar_of

WARPGROUP = 128
"""Threads of a warpgroup."""


def _named_barrier(operation: str, number: Scalar | int, threads: int) -> None:
    """`bar.<operation>` on a named barrier that `threads` threads arrive at or wait for."""
    if isinstance(number, int):

        @inline_mgpu()
        def constant() -> None:
            ptx(f"bar.{operation} {number}, {threads};")

        constant()
        return

    @inline_mgpu(SCALAR_LAYOUT)
    def traced(number: mgpu.FragmentedArray) -> None:
        ptx(f"bar.{operation} $0, {threads};", scalar_of(number))

    traced(i32(number))


@dataclasses.dataclass(frozen=True)
class SlotBarriers:
    """Hands slots of a ring from the consumers back to the producer."""

    tile: ForwardTile
    interpret: bool

    def release(self, ring: str, free: Ref | None, slot: Scalar | int) -> None:
        """In a consumer: it has read the slot of `ring` ("query", "key", "value", "staged") for the last time."""
        if self.interpret:
            plgpu.commit_smem()  # the simulator's products read the slot as ordinary memory
            assert free is not None
            plgpu.barrier_arrive(free.at[slot])
        else:
            _named_barrier("arrive", self.tile.named_barriers[ring].start + slot, self._threads)

    def acquire(self, ring: str, free: Ref | None, slot: Scalar | int) -> None:
        """In the producer: waits until every consumer has released the slot."""
        if self.interpret:
            assert free is not None
            plgpu.barrier_wait(free.at[slot])
        else:
            _named_barrier("sync", self.tile.named_barriers[ring].start + slot, self._threads)

    @property
    def _threads(self) -> int:
        return (self.tile.groups + 1) * WARPGROUP


@dataclasses.dataclass(frozen=True)
class PingPong:
    """Two consumer warpgroups that issue WGMMAs in turn. Warpgroup g waits at barrier g and signals barrier 1 - g.

    Where the softmax overlaps P V (`ForwardTile.overlap`) both wait as often as they signal, and alternate strictly from the first query
    tile to the last. Otherwise a turn begins at P V and ends after the next Q K^T, so each query tile begins with a turn of warpgroup 0.
    A third barrier then keeps warpgroup 0 from signalling for the next query tile before warpgroup 1 has waited for its last turn in
    this one.
    """

    tile: ForwardTile
    interpret: bool

    @property
    def active(self) -> bool:
        return self.tile.ping_pong and not self.interpret

    def _barrier(self, which: Scalar | int) -> Scalar | int:
        return self.tile.named_barriers["ping_pong"].start + which

    def signal(self, group: Scalar | int) -> None:
        """Warpgroup `group` ends its turn."""
        if self.active:
            _named_barrier("arrive", self._barrier(1 - group), 2 * WARPGROUP)

    def wait(self, group: Scalar | int) -> None:
        """Warpgroup `group` waits for its turn."""
        if self.active:
            _named_barrier("sync", self._barrier(group), 2 * WARPGROUP)

    def begin(self, group: Scalar) -> None:
        """Before the first query tile: warpgroup 0 gets the first turn."""
        if self.active and self.tile.overlap:
            when(group == 1)(lambda: self.signal(1))

    def begin_tile(self, group: Scalar, first: Scalar) -> None:
        """At the start of a query tile without `overlap`; `first`: of the CTA's first one."""
        if self.active:
            when(group == 1)(lambda: self.wait(1))
            when((group == 0) & ~first)(lambda: _named_barrier("sync", self._barrier(2), 2 * WARPGROUP))

    def end_tile(self, group: Scalar) -> None:
        """At the end of a query tile without `overlap`."""
        if self.active:
            when(group == 0)(lambda: self.signal(0))
            when(group == 1)(lambda: _named_barrier("arrive", self._barrier(2), 2 * WARPGROUP))
