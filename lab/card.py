"""The GPU of this process by NVML: its name, driver and limits, and its clock and power while something runs.

NVML is the library behind nvidia-smi, which comes with the driver. Where it cannot be loaded, `Card.open` gives None and reports do without.
"""

import contextlib
import ctypes
import os
import statistics
import threading
import time
import typing
from collections.abc import Iterator

SM_CLOCK, TEMPERATURE = 1, 0
"""NVML's numbers: NVML_CLOCK_SM and NVML_TEMPERATURE_GPU."""
REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
}
"""NVML's bits of why a clock is lower than asked for."""
PERIOD = 0.01
"""Seconds between two samples of the clock."""


class Load(typing.NamedTuple):
    """What the card did while something ran.

    clock       median SM clock of the second half of the time, in MHz
    quartiles   the lower and the upper quartile of these clocks
    power       median power of that time, in watts; 0.0 where NVML gave none
    reasons     why the clock was lower than asked for in that time: values of REASONS
    """

    clock: float
    quartiles: tuple[float, float]
    power: float
    reasons: tuple[str, ...]


class Card:
    """One GPU, as NVML sees it."""

    def __init__(self, library: typing.Any, handle: ctypes.c_void_p):
        """Keeps the loaded library and the handle of the GPU."""
        self._nvml, self._handle = library, handle

    @classmethod
    def open(cls) -> "Card | None":
        """The first GPU that CUDA_VISIBLE_DEVICES names, by UUID or by number, which NVML counts in the order of the PCI bus; GPU 0 where
        the variable is not set or empty. None where NVML cannot be loaded or does not know the GPU.
        """
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        if library.nvmlInit_v2():
            return None
        first, handle = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0", ctypes.c_void_p()
        if first.isdigit():
            failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(first)), ctypes.byref(handle))
        else:
            failed = library.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
        return None if failed else cls(library, handle)

    def facts(self) -> dict[str, str]:
        """What NVML says of the card, text by name: "card" (its name), "driver" (its version), "highest SM clock" in MHz and "power
        limit" in W; what it does not say is left out.
        """
        name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
        found = {}
        if not self._nvml.nvmlDeviceGetName(self._handle, name, 96):
            found["card"] = name.value.decode()
        if not self._nvml.nvmlSystemGetDriverVersion(driver, 96):
            found["driver"] = driver.value.decode()
        highest, limit = (
            self._number("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
            self._number("nvmlDeviceGetEnforcedPowerLimit"),
        )
        if highest is not None:
            found["highest SM clock"] = f"{highest} MHz"
        if limit is not None:
            found["power limit"] = f"{limit / 1000:.0f} W"
        return found

    def _number(self, function: str, *arguments: int, kind: typing.Any = ctypes.c_uint) -> int | None:
        """The number that an NVML function writes to its last argument; None where the function fails or the library lacks it.

        function    its name
        arguments   those between the handle and the number
        kind        the C type of the number
        """
        value = kind()
        call = getattr(self._nvml, function, None)
        if call is None or call(self._handle, *(ctypes.c_uint(a) for a in arguments), ctypes.byref(value)):
            return None
        return int(value.value)

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[Load]]:
        """A context in which a thread samples clock and power every PERIOD seconds. It gives an empty list; at its end one Load is
        appended, of the second half of the samples, or none where NVML gave no clock.
        """
        samples: list[tuple[int | None, int | None, int | None]] = []
        done, found = threading.Event(), list[Load]()

        def sample() -> None:
            """Appends (SM clock in MHz, milliwatts, NVML's bits of why the clock is low, of which REASONS names some) to `samples`, None
            for what NVML does not say, until the context ends; it sleeps PERIOD seconds after each.
            """
            while not done.is_set():
                reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
                clock, power = self._number("nvmlDeviceGetClockInfo", SM_CLOCK), self._number("nvmlDeviceGetPowerUsage")
                samples.append((clock, power, reasons))
                time.sleep(PERIOD)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            done.set()
            thread.join()
            late = samples[len(samples) // 2 :]
            clocks = [c for c, _, _ in late if c]
            powers = [p for _, p, _ in late if p]
            if clocks:
                quarters = statistics.quantiles(clocks, n=4) if len(clocks) > 1 else [clocks[0]] * 3
                bits = {bit for _, _, r in late for bit in REASONS if r and r & bit}
                power = statistics.median(powers) / 1000 if powers else 0.0
                reasons = tuple(REASONS[bit] for bit in sorted(bits))
                found.append(Load(statistics.median(clocks), (quarters[0], quarters[2]), power, reasons))
