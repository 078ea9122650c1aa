"""Times of the kernels that a call launches, by CUPTI, as jax brings it."""

import collections
import contextlib
import statistics
import time
import typing
from collections.abc import Callable

import jax

BY_CUPTI = "cupti"
"""How times are measured where CUPTI works, in the tables."""
Operand = jax.Array | dict[str, jax.Array] | None


def _by_cupti(call: Callable[..., object], *operands: Operand, calls: int, aggregate: bool) -> typing.Any:
    """Runs a call once, then `calls` times under CUPTI.

    call, operands   a jitted or compiled function, and its arguments
    calls            at least 2

    Returns a list with an entry for each of the `calls` calls: its kernels in the order of their launches as (name, milliseconds), or
    with `aggregate` the sum of their milliseconds, a float. None if CUPTI saw no kernel. Raises what jax's profiler raises where CUPTI
    does not work, or if the calls launch different kernels.
    """
    from jax.experimental.mosaic.gpu import profiler

    measured: typing.Any = profiler.Cupti(finalize=False).measure(call, aggregate=aggregate, iterations=calls)(
        *operands
    )
    return measured[1]


def kernel_times(call: Callable[..., object], *operands: Operand, calls: int = 20) -> dict[str, float]:
    """The seconds of each kernel of a call by its name, summed over its launches in one call: the median over `calls` calls, after one
    that is not timed.

    call       a jitted or compiled function
    operands   its arguments
    calls      at least 2

    Raises what jax's profiler raises where CUPTI does not work.
    """
    runs = _by_cupti(call, *operands, calls=calls, aggregate=False)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for run in runs:
        sums: dict[str, float] = collections.defaultdict(float)
        for name, took in run:
            sums[name] += took
        for name, took in sums.items():
            times[name].append(took)
    return {name: 1e-3 * statistics.median(taken) for name, taken in times.items()}


TRIES = 3
"""How often CUPTI is asked for a call: it loses records where another process launches kernels."""


def device_time(call: Callable[..., object], *operands: Operand, calls: int = 20) -> tuple[float, str]:
    """Measures a call on the device; returns (seconds of a call, how they were measured: "cupti" or "launches back to back").

    call       a jitted or compiled function, or another that jax.jit takes
    operands   its arguments
    calls      number of calls that CUPTI measures, at least 2

    By CUPTI the seconds are the median over the calls of the sum of its kernels' times. Where that fails TRIES times they are those of
    back-to-back launches by the wall clock: the median of 7 rounds of 10. Calls before these warm up.
    """
    jax.block_until_ready(call(*operands))
    for _ in range(TRIES):
        with contextlib.suppress(Exception):  # the profiler has no errors of its own class
            return 1e-3 * statistics.median(_by_cupti(call, *operands, calls=calls, aggregate=True)), BY_CUPTI
    rounds = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(10):
            result = call(*operands)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - start) / 10)
    return statistics.median(rounds), "launches back to back"
