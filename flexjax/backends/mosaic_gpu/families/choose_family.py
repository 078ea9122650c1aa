"""Which family of kernels runs a call: the one place that knows compute capabilities.

compute capability     kernels
8.0, 8.6, 8.7, 8.9     mma.sync, tiles copied by cp.async
9.0                    WGMMA and TMA; with KernelOptions(instruction="mma"): mma.sync, tiles copied by TMA
10.0, 10.3             mma.sync, tiles copied by TMA; with KernelOptions(instruction="tcgen05"): tcgen05 where it has
                       kernels
12.0, 12.1             mma.sync, tiles copied by TMA
"""

from flexjax.backends.mosaic_gpu.families import tcgen05
from flexjax.backends.mosaic_gpu.families.family import Family
from flexjax.backends.mosaic_gpu.families.hopper import HOPPER
from flexjax.backends.mosaic_gpu.families.mma import Mma
from flexjax.backends.mosaic_gpu.families.tcgen05 import Tcgen05
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
from flexjax.backends.target import Target, known_device
from flexjax.types import KernelOptions

CAPABILITY = "9.0"  # of the kernels for Hopper


def refuses_device(target: Target | None, options: KernelOptions) -> str | None:
    """Why no kernels are for the target, in a sentence; None if some are, and where the device is not known."""
    target = known_device(target, options)
    if target is None:
        return None
    on, for_cards = (" on tcgen05", tcgen05.CAPABILITIES) if options.instruction == "tcgen05" else ("", CARDS)
    kernels = f"The GPU kernels{on} are for compute capability {', '.join(for_cards)}"
    if target.capability is None:
        return f"{kernels}; the compute capability of {target.kind} is not known."
    if target.capability not in for_cards:
        return f"{kernels}; {target.kind} has {target.capability}."
    return None


def family_of(target: Target | None, options: KernelOptions) -> Family:
    """The family that runs a call on the target; that of the options where the device is not known or refused."""
    on_tcgen05 = options.instruction == "tcgen05"
    target = known_device(target, options)
    capability = None if target is None else target.capability
    if capability is None or capability not in (tcgen05.CAPABILITIES if on_tcgen05 else CARDS):
        capability = tcgen05.CAPABILITIES[0] if on_tcgen05 else CAPABILITY
    if capability == CAPABILITY and options.instruction is None:
        return HOPPER
    return Tcgen05(CARDS[capability]) if on_tcgen05 else Mma(CARDS[capability])
