"""The cards that the mma.sync kernels run on: compute capability, way of copying, shared memory, registers.

`Card.ctas` is the occupancy model: how many CTAs of a kernel an SM holds. Tiles are chosen with it, because a card whose CTAs may use
99 KB of shared memory takes other tiles than one with 163 KB. Nothing here imports Mosaic.
"""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu.shared_memory import Barriers
from flexjax.integers import round_up

Copying = typing.Literal["cp.async", "tma"]
"""How tiles come to shared memory: by 16-byte copies of the threads (`cp.async`), or by TMA."""

REGISTERS = 65536
"""Registers of 32 bits of an SM, on every card."""
MOST_REGISTERS = 255
"""Registers that one thread can have."""
CTA_OVERHEAD = 1024
"""Bytes of shared memory that the hardware takes for each CTA that an SM holds."""


@dataclasses.dataclass(frozen=True)
class Card:
    """What the choice of a tile depends on.

    capability     compute capability, such as "8.9"
    copying        how tiles come to shared memory
    cta_memory     bytes of shared memory that a CTA may use
    sm_memory      bytes of shared memory of an SM
    """

    capability: str
    copying: Copying
    cta_memory: int
    sm_memory: int

    def ctas(self, shared_bytes: int, threads: int, registers: int = MOST_REGISTERS) -> int:
        """How many CTAs of a kernel an SM holds at once, as far as its shared memory and registers allow; 0 where one does not fit.

        shared_bytes   of shared memory of a CTA
        threads        of a CTA
        registers      of a thread
        """
        if shared_bytes > self.cta_memory:
            return 0
        by_registers = REGISTERS // (round_up(registers, 8) * threads)
        return min(by_registers, self.sm_memory // (shared_bytes + CTA_OVERHEAD))


KB = 1024
CARDS = {
    card.capability: card
    for card in (
        Card("8.0", "cp.async", 163 * KB, 164 * KB),  # A100, A30
        Card("8.6", "cp.async", 99 * KB, 100 * KB),  # A10, A40, RTX 30
        Card("8.7", "cp.async", 163 * KB, 164 * KB),  # Orin
        Card("8.9", "cp.async", 99 * KB, 100 * KB),  # L4, L40S, RTX 40
        Card("9.0", "tma", 227 * KB, 228 * KB),  # H100, H200: only where the call asks for mma.sync
        Card("10.0", "tma", 227 * KB, 228 * KB),  # B200
        Card("10.3", "tma", 227 * KB, 228 * KB),  # B300
        Card("12.0", "tma", 99 * KB, 100 * KB),  # RTX 50, RTX PRO 6000
        Card("12.1", "tma", 99 * KB, 100 * KB),  # GB10
    )
}
"""Compute capability -> card."""


def ring_barriers(copying: Copying, slots: int, copies: int) -> Barriers | None:
    """The barriers at which the tiles of a ring with so many slots arrive, one for each slot; None with cp.async, which
    needs none.

    copying   how tiles come to shared memory
    slots     of the ring
    copies    that fill a slot, each of which arrives once: one of each warpgroup of the CTA, which copies its share of a tile, or several
    """
    return Barriers(slots, arrivals=copies) if copying == "tma" else None


def meeting_barrier(groups: int, interpret: bool) -> Barriers | None:
    """The scratch entry of the mbarrier that stands for the CTA's barrier in the simulator (`Copies.sync`): an array of one barrier,
    at index 0, which expects one arrival of each warpgroup. None on the device, and for a single warpgroup, which has nobody to
    wait for.

    groups      warpgroups of a CTA that call `Copies.sync`
    interpret   whether the kernel runs in the simulator
    """
    return Barriers(1, arrivals=groups) if interpret and groups > 1 else None
