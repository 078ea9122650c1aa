"""How the warpgroups of the forward kernel wait for each other: slots of the rings, and the ping-pong of two
consumers.

A CTA has one producer warpgroup, which fills slots of rings in shared memory by TMA, and consumer warpgroups, which
compute from them. An mbarrier (`*_full` of ForwardScratch) says that TMA has filled a slot. The other direction, a
slot that consumers have read, and the ping-pong use the hardware's named barriers (`bar.arrive`, `bar.sync`),
numbered by `ForwardTile.named_barriers`: they cost no shared memory and no polling.

The simulator has no named barriers. It uses mbarriers (`*_free` of ForwardScratch) instead of those of the slots, and
consumers do not alternate there, which changes no result.
"""

import dataclasses

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.forward_tiles import ForwardTile
from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, i32, inline_mgpu, ptx, scalar_of
from flexjax.backends.mosaic_gpu.warpgroup import WARPGROUP


def _named_barrier(operation: str, number: Scalar | int, threads: int) -> None:
    """Executes `bar.<operation>` on a named barrier, in every thread of the warpgroup.

    operation   "arrive", which does not wait, or "sync", which arrives and waits for all others
    number      of the barrier: a Python int, or a scalar of the kernel
    threads     threads that the barrier counts until it completes, arriving and waiting ones together
    """
    if isinstance(number, int):

        @inline_mgpu()
        def constant() -> None:
            """Emits `bar.<operation>` for a barrier whose number is known when the kernel is traced."""
            ptx(f"bar.{operation} {number}, {threads};")

        constant()
        return

    @inline_mgpu(SCALAR_LAYOUT)
    def traced(number: mgpu.FragmentedArray) -> None:
        """Emits `bar.<operation>` for a barrier whose number is a scalar of the kernel."""
        ptx(f"bar.{operation} $0, {threads};", scalar_of(number))

    traced(i32(number))


@dataclasses.dataclass(frozen=True)
class SlotBarriers:
    """Hands slots of a ring from the consumers back to the producer.

    In its methods `ring` is "query", "key", "value" or "staged", `slot` the number of a slot in it, and `free` the
    ring's `*_free` barriers of ForwardScratch, which only the simulator uses (None on the device).

    tile        the kernel's configuration
    interpret   whether the kernel runs in the simulator
    """

    tile: ForwardTile
    interpret: bool

    def release(self, ring: str, free: Ref | None, slot: Scalar | int) -> None:
        """In a consumer: tells the producer that this warpgroup has read the slot for the last time, or, at the start
        of the kernel, that the slot is free. It does not wait.
        """
        if self.interpret:
            plgpu.commit_smem()  # the simulator's products read the slot as ordinary memory
            assert free is not None
            plgpu.barrier_arrive(free.at[slot])
        else:
            _named_barrier("arrive", self.tile.named_barriers[ring].start + slot, self._threads)

    def acquire(self, ring: str, free: Ref | None, slot: Scalar | int) -> None:
        """In the producer: waits until every consumer has released the slot, once for each use of the slot. So
        consumers also release every slot before its first use.
        """
        if self.interpret:
            assert free is not None
            plgpu.barrier_wait(free.at[slot])
        else:
            _named_barrier("sync", self.tile.named_barriers[ring].start + slot, self._threads)

    @property
    def _threads(self) -> int:
        """Threads at the barrier of a slot: those of all consumers and of the producer."""
        return (self.tile.groups + 1) * WARPGROUP


@dataclasses.dataclass(frozen=True)
class PingPong:
    """Two consumer warpgroups that issue WGMMAs alternately. A *turn* is the time in which one of them may issue WGMMAs.
    Warpgroup g waits at barrier g for its turn, and ends its turn by signalling barrier 1 - g.

    Where the softmax overlaps P V (`ForwardTile.overlap`) both wait as often as they signal, and alternate strictly
    from the first query tile to the last. Otherwise a turn begins at P V and ends after the next Q K^T, so each query
    tile begins with a turn of warpgroup 0. A third barrier (number 2) then keeps warpgroup 0 from signalling for the
    next query tile before warpgroup 1 has waited for its last turn in this one.

    In its methods `group` is the number of the calling warpgroup, 0 or 1. They do nothing where `active` is false.

    tile        the kernel's configuration
    interpret   whether the kernel runs in the simulator
    """

    tile: ForwardTile
    interpret: bool

    @property
    def active(self) -> bool:
        """Whether the consumers alternate: the configuration says so, and the kernel runs on the device."""
        return self.tile.ping_pong and not self.interpret

    def _barrier(self, which: Scalar | int) -> Scalar | int:
        """The hardware's number of the ping-pong's barrier `which`, 0 to 2."""
        return self.tile.named_barriers["ping_pong"].start + which

    def signal(self, group: Scalar | int) -> None:
        """Ends the turn of warpgroup `group`: arrives at the barrier at which the other one waits. It does not wait."""
        if self.active:
            _named_barrier("arrive", self._barrier(1 - group), 2 * WARPGROUP)

    def wait(self, group: Scalar | int) -> None:
        """Waits until the other warpgroup has ended its turn."""
        if self.active:
            _named_barrier("sync", self._barrier(group), 2 * WARPGROUP)

    def begin(self, group: Scalar) -> None:
        """Before the CTA's first query tile, in every consumer: gives warpgroup 0 the first turn, by a signal of warpgroup 1.
        Nothing without `overlap`.
        """
        if self.active and self.tile.overlap:
            when(group == 1)(lambda: self.signal(1))

    def begin_tile(self, group: Scalar, first: Scalar) -> None:
        """At the start of a query tile: makes each warpgroup wait until its first turn may begin. Called only without
        `overlap`.

        Warpgroup 1 waits until warpgroup 0 has issued its first Q K^T. Warpgroup 0 waits at the third barrier until
        warpgroup 1 has finished the query tile before, unless this is the CTA's `first` query tile.
        """
        if self.active:
            when(group == 1)(lambda: self.wait(1))
            when((group == 0) & ~first)(lambda: _named_barrier("sync", self._barrier(2), 2 * WARPGROUP))

    def end_tile(self, group: Scalar) -> None:
        """At the end of a query tile: warpgroup 0 signals once more, since warpgroup 1 waits once more often than
        warpgroup 0 has signalled. Called only without `overlap`.

        Warpgroup 1 arrives at the third barrier, which lets warpgroup 0 begin the next query tile.
        """
        if self.active:
            when(group == 0)(lambda: self.signal(0))
            when(group == 1)(lambda: _named_barrier("arrive", self._barrier(2), 2 * WARPGROUP))
