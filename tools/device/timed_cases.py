"""What scripts that time a table of cases on a GPU share: programs timed alternately, and a line for each case until the time is up.

Not a script: `from tools.device import timed_cases`, with the root of the checkout in PYTHONPATH.
"""

import faulthandler
import statistics
import time
import typing
from collections.abc import Callable, Iterable

import jax

WATCHED = 75
"""Seconds after which a case of a watched table ends the process, because a kernel that hangs must not keep the device."""
ROUNDS, BACK_TO_BACK = 7, 4
"""Of a timing: rounds, of which the median counts, and calls of a program in each."""


class Named(typing.Protocol):
    """A case."""

    @property
    def name(self) -> str:
        """How the table calls it."""
        ...


AnyCase = typing.TypeVar("AnyCase", bound=Named)


def median_seconds(calls: list[Callable[[], object]]) -> list[float]:
    """Median wall-clock seconds of each call over ROUNDS rounds. In a round every call is timed once, as the mean of
    BACK_TO_BACK calls.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready([call() for _ in range(BACK_TO_BACK)])
            found.append((time.perf_counter() - start) / BACK_TO_BACK)
    return [statistics.median(found) for found in times]


def lines_of(
    cases: Iterable[AnyCase],
    measure: Callable[[AnyCase], list[str]],
    seconds: float,
    *,
    needed: Callable[[AnyCase], bool] = lambda case: False,
    watched: bool = False,
) -> tuple[list[str], bool]:
    """(the lines of `measure` for each case, a line where it raised or the time was up; whether it raised for one). The last line of
    each case is also printed when it is there.

    seconds   no case begins after so many
    needed    whether no other case follows a case that raised
    watched   whether a case ends the process after WATCHED seconds
    """
    start, lines, failed = time.perf_counter(), [], False
    for case in cases:
        if time.perf_counter() - start > seconds:
            lines.append(f"{case.name}: not begun, the time was up")
            continue
        if watched:
            faulthandler.dump_traceback_later(WATCHED, exit=True)
        stop = False
        try:
            lines += measure(case)
        except Exception as failure:
            failed, stop = True, needed(case)
            lines.append(f"{case.name}: failed: {type(failure).__name__}: {str(failure)[:600]}")
        print(f"{time.perf_counter() - start:6.1f} s  {lines[-1]}", flush=True)
        if stop:
            break
    return lines, failed
