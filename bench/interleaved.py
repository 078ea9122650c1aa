"""Interleaved wall-clock times of compiled steps: each round measures every step, so that a slow phase of the machine slows all."""

import statistics
import time
import typing
from collections.abc import Sequence

import jax

ROUNDS, SECONDS = 5, 0.1
"""Number of measurements of each step, and the least duration of a measurement in seconds."""

Step = tuple[typing.Any, tuple[typing.Any, ...]]
"""A compiled function and the arguments that it is called with."""


def milliseconds(steps: Sequence[Step]) -> list[float]:
    """The median milliseconds of one call of each step, over ROUNDS rounds after two calls that are not timed.

    Each round measures every step once: pairs of back-to-back calls, for at least SECONDS.
    """
    times: list[list[float]] = [[] for _ in steps]
    for step, arrays in steps:
        jax.block_until_ready([step(*arrays) for _ in range(2)])
    for _ in range(ROUNDS):
        for (step, arrays), taken in zip(steps, times, strict=True):
            count, begin = 0, time.perf_counter()
            while count == 0 or time.perf_counter() - begin < SECONDS:
                jax.block_until_ready([step(*arrays) for _ in range(2)])
                count += 2
            taken.append(1e3 * (time.perf_counter() - begin) / count)
    return [statistics.median(t) for t in times]
