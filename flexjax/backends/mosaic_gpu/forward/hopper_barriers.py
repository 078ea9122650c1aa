"""How the warpgroups of the forward kernel wait for each other: slots of the rings, and the ping-pong of two consumers.

The producer warpgroup fills slots of rings in shared memory by TMA, and consumer warpgroups compute from them. An
mbarrier (`*_full` of ForwardScratch) says that TMA has filled a slot. The other direction (consumers have read a slot)
and the ping-pong use the hardware's named barriers (`bar.arrive`, `bar.sync`), numbered by
`ForwardTile.named_barriers`: they need no shared memory and no polling.

The simulator has no named barriers. It uses mbarriers (`*_free` of ForwardScratch) for the slots, and no ping-pong.
"""

import dataclasses

from jax.experimental.mosaic import gpu as mgpu

from flexjax.backends.mosaic_gpu.forward.hopper_tiles import ForwardTile
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import (
    SCALAR_LAYOUT,
    Ref,
    Scalar,
    i32,
    inline_mgpu,
    ptx,
    scalar_of,
)
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP


@device_op
def _named_barrier(operation: str, number: Scalar | int, threads: int) -> None:
    """Executes `bar.arrive` or `bar.sync` in every thread of the warpgroup; the barrier counts to `threads`."""
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
    """Hands slots of a ring from consumers to producer; the simulator alone uses `free` (`*_free`)."""

    tile: ForwardTile

    @device_op
    def release(self, ring: str, free: Ref | None, slot: Scalar | int) -> None:
        """In a consumer, after its last read of the slot and once at the kernel's start; does not wait."""
        _named_barrier("arrive", self.tile.named_barriers[ring].start + slot, self._threads)

    @device_op
    def acquire(self, ring: str, free: Ref | None, slot: Scalar | int) -> None:
        """In the producer: waits until every consumer has released the slot."""
        _named_barrier("sync", self.tile.named_barriers[ring].start + slot, self._threads)

    @property
    def _threads(self) -> int:
        """Threads of all consumers and of the producer."""
        return (self.tile.groups + 1) * WARPGROUP


@dataclasses.dataclass(frozen=True)
class PingPong:
    """Two consumer warpgroups issue WGMMAs in turns; without `tile.ping_pong` the methods do nothing.

    Warpgroup g waits at barrier g for its turn, and ends its turn by signalling barrier 1 - g. Where the softmax
    overlaps P V (`ForwardTile.overlap`) they alternate strictly from the first query tile to the last. Otherwise a turn
    begins at P V and ends after the next Q K^T, so each query tile begins with a turn of warpgroup 0. Barrier 2 keeps
    warpgroup 0 from signalling for the next query tile before warpgroup 1 has waited for its last turn in this one.
    """

    tile: ForwardTile

    def _barrier(self, which: Scalar | int) -> Scalar | int:
        return self.tile.named_barriers["ping_pong"].start + which

    def signal(self, group: Scalar | int) -> None:
        """Ends the turn of warpgroup `group`; does not wait."""
        if self.tile.ping_pong:
            _named_barrier("arrive", self._barrier(1 - group), 2 * WARPGROUP)

    def wait(self, group: Scalar | int) -> None:
        if self.tile.ping_pong:
            _named_barrier("sync", self._barrier(group), 2 * WARPGROUP)

    def begin(self, group: Scalar) -> None:
        """With `overlap`, before the CTA's first query tile: gives warpgroup 0 the first turn."""
        if self.tile.ping_pong and self.tile.overlap:
            when(group == 1)(lambda: self.signal(1))

    def begin_tile(self, group: Scalar, first: Scalar) -> None:
        """Without `overlap`, at the start of a query tile: each warpgroup waits for its first turn."""
        if self.tile.ping_pong:
            when(group == 1)(lambda: self.wait(1))  # Until warpgroup 0 has issued its first Q K^T.
            # Until warpgroup 1 has finished the query tile before.
            when((group == 0) & ~first)(lambda: _named_barrier("sync", self._barrier(2), 2 * WARPGROUP))

    def end_tile(self, group: Scalar) -> None:
        """Without `overlap`, at the end of a query tile: lets warpgroup 0 begin the next one."""
        if self.tile.ping_pong:
            # Warpgroup 1 waits once more often than warpgroup 0 has signalled.
            when(group == 0)(lambda: self.signal(0))
            when(group == 1)(lambda: _named_barrier("arrive", self._barrier(2), 2 * WARPGROUP))
