"""The cards that the mma.sync kernels run on: compute capability, way of copying, shared memory, registers.

`Card.ctas` is the occupancy model. Tiles are chosen with it, because a card whose CTAs may use 99 KB of shared memory
takes other tiles than one with 163 KB. Nothing here imports Mosaic.
"""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu.machine.shared_memory import Barriers
from flexjax.integers import round_up

Copying = typing.Literal["cp.async", "tma"]
"""How tiles come to shared memory: by 16-byte copies of the threads (`cp.async`), or by TMA."""

REGISTERS = 65536  # registers of 32 bits of an SM, on every card
MOST_REGISTERS = 255  # registers that one thread can have
CTA_OVERHEAD = 1024  # bytes of shared memory that the hardware takes for each CTA that an SM holds


@dataclasses.dataclass(frozen=True)
class Card:
    """What the choice of a tile depends on."""

    capability: str  # compute capability, such as "8.9"
    copying: Copying
    cta_memory: int  # bytes of shared memory that a CTA may use
    sm_memory: int  # bytes of shared memory of an SM
    spills: bool = False  # ptxas spills dK/dV kernels that visit 64 tokens at head dims from 65 to 128

    def __str__(self) -> str:
        return f"compute capability {self.capability}"

    def ctas(self, shared_bytes: int, threads: int, registers: int = MOST_REGISTERS) -> int:
        """How many CTAs of a kernel an SM holds at once, as far as shared memory (bytes) and registers allow."""
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
        Card("10.0", "tma", 227 * KB, 228 * KB, spills=True),  # B200
        Card("10.3", "tma", 227 * KB, 228 * KB, spills=True),  # B300
        Card("12.0", "tma", 99 * KB, 100 * KB),  # RTX 50, RTX PRO 6000
        Card("12.1", "tma", 99 * KB, 100 * KB),  # GB10
    )
}


def ring_barriers(copying: Copying, slots: int, copies: int) -> Barriers | None:
    """The barriers at which the tiles of a ring arrive, after `copies` copies a slot; None with cp.async."""
    return Barriers(slots, arrivals=copies) if copying == "tma" else None


def meeting_barrier(groups: int) -> Barriers | None:
    """The simulator's barrier in place of the CTA's (`Copies.sync`); None for one warpgroup."""
    return Barriers(1, arrivals=groups, in_simulator=True) if groups > 1 else None
