"""`time_tile`: compiles a call with one tile and times it; `time_again`: times two tiles in alternation.

The time of a call is that on the host's clock until its results are ready. The seconds of a tile are the median of its calls. Calls
are timed for half a second, but at least CALLS[0] and at most CALLS[1] of them; none begins after five seconds, so that a slow tile
leaves time for the others.

A candidate is a tile that the backend proposes for a pass. A Timing is the measurement of one candidate, a Trial a Timing with the
compiled call. A Run (dispatch.py) is the backend that was chosen for the call, with its plan and target.
"""

import dataclasses
import logging
import math
import statistics
import time
import typing
from collections.abc import Callable

import jax

from flexjax.autodiff import attention
from flexjax.dispatch import Run
from flexjax.plan.kernel_plan import FIRST_CAPTURE, KernelPlan, Operands, Wanted
from flexjax.prepare import Call

Array = jax.Array
Tile = dict[str, int]

LOG = logging.getLogger("flexjax.autotune")
MARGIN = 0.98  # a tile replaces the backend's own choice if its time is below this share of the time of that choice
CALLS = (3, 200)  # the least and the largest number of timed calls of a candidate
SHORT = 0.5  # seconds after which no further call of a candidate is timed, once CALLS[0] calls are
LONG = 5.0  # seconds after which no further call of a candidate is timed in any case
ROUNDS = 10  # of timing two candidates in alternation

clock = time.perf_counter


class Timing(typing.NamedTuple):
    """The measurement of one candidate.

    which    "forward" (a tile of the forward pass; that pass was timed) or "backward" (a tile of the backward pass; both were)
    tile     the candidate
    seconds  median time of a call; None if the candidate does not run, and `skipped` says why
    calls    number of timed calls
    """

    which: str
    tile: Tile
    seconds: float | None
    calls: int
    skipped: str = ""


class Trial(typing.NamedTuple):
    """A candidate's measurement, and a function that runs the compiled call and waits for it; None if it does not run."""

    timing: Timing
    run: Callable[[], object] | None


def shown(tile: Tile) -> str:
    """A tile as text, for example "block_q=128 block_kv=64"; "nothing to choose" for an empty one."""
    return " ".join(f"{n}={v}" for n, v in tile.items()) or "nothing to choose"


def seconds_of(trial: Trial) -> float:
    """The seconds of a trial, infinite if its candidate does not run."""
    return math.inf if trial.timing.seconds is None else trial.timing.seconds


def is_better(timing: Timing, own: Timing) -> bool:
    """Whether the seconds of a candidate's measurement `timing` are below MARGIN times those of the backend's `own` choice, so that the
    candidate replaces that choice. False if either of them does not run.
    """
    return timing.seconds is not None and own.seconds is not None and timing.seconds < MARGIN * own.seconds


def time_again(own: Trial, fastest: Trial) -> tuple[Timing, Timing]:
    """The measurements (own, fastest) of the backend's own choice and of the fastest candidate.

    Both are timed again, in alternation, if the first measurements would replace the backend's own choice; the first
    measurements stay if that raises an error, which is logged.
    """
    first = own.timing, fastest.timing
    if not (is_better(fastest.timing, own.timing) and own.run and fastest.run):
        return first
    try:
        times = _in_alternation(own.run, fastest.run)
    except Exception as error:  # the memory of the device may not hold the results of both
        LOG.warning("autotune does not time its choice again: %s", _reason(error))
        return first
    again = [t._replace(seconds=statistics.median(x), calls=len(x)) for t, x in zip(first, times, strict=True)]
    return again[0], again[1]


def _in_alternation(*runs: Callable[[], object]) -> list[list[float]]:
    """For each function the seconds of its calls, timed in alternation: at most ROUNDS rounds, in each of which each function is called
    at least once, at most CALLS[1] / ROUNDS times, and for SHORT / ROUNDS seconds.

    After one round, timing ends when SHORT seconds for each function are over.
    """
    times: list[list[float]] = [[] for _ in runs]
    until = clock() + SHORT * len(runs)
    for _ in range(ROUNDS):
        for taken, run in zip(times, runs, strict=True):
            taken += _calls(run, (1, CALLS[1] // ROUNDS), SHORT / ROUNDS, until)
        if clock() >= until:
            break
    return times


def _calls(run: Callable[[], object], counts: tuple[int, int], short: float, limit: float) -> list[float]:
    """Calls `run`, which waits for its results, again and again, and returns the seconds of each call; there are at least one and at most
    counts[1].

    No further call begins when `clock` shows `limit` or later, when counts[0] calls and `short` seconds are over, or after LONG seconds.
    """
    times: list[float] = []
    began = clock()
    while len(times) < counts[1]:
        start = clock()
        enough = len(times) >= counts[0] and start - began >= short
        if times and (enough or start >= limit or start - began >= LONG):
            break
        run()
        times.append(clock() - start)
    return times


def gradients_of(operands: Operands) -> tuple[Wanted, tuple[int, ...]]:
    """Which gradients the timed backward pass computes: those of query, key, value, extra features and sinks that are present, but not of
    captured arrays.

    Returns (the flags as Wanted, the indices of these operands in Operands, ascending).
    """
    present = [x is not None for x in operands[:FIRST_CAPTURE]]
    places = tuple(n for n, there in enumerate(present) if there)
    return Wanted.of([*present, *[False] * len(operands.score_captures)]), places


def _step(
    call: Call, plan: KernelPlan, timed: Run, which: str, movable: tuple[int, ...]
) -> Callable[[Operands], object]:
    """The function of the operands that is timed for the plan of a candidate: the forward pass, which returns out, or both passes, which
    return (out, gradients).

    plan      that of the call with the candidate's tile among its options
    timed     the choice of the backend; xla computes the gradients that this backend refuses
    which     "forward" or "backward" (both passes)
    movable   indices in Operands of the arrays that get gradients
    """
    # xla computes the gradients that the timed backend refuses
    problem = dataclasses.replace(call, plan=plan).problem((timed.backend.name, "xla"))
    if which == "forward":
        return lambda operands: attention(problem, operands).out

    def both(operands: Operands) -> object:
        """The output array of the call, and the gradients of the movable operands; the output itself is the cotangent."""

        def out_of(moving: list[Array]) -> Array:
            """The output array as a function of the movable operands alone."""
            names = [Operands._fields[place] for place in movable]
            return attention(problem, operands._replace(**dict(zip(names, moving, strict=True)))).out

        out, pull = jax.vjp(out_of, [operands[place] for place in movable])
        return out, pull(out)

    return both


def time_tile(
    call: Call, plan: KernelPlan, timed: Run, which: str, tile: Tile, movable: tuple[int, ...], limit: float
) -> Trial:
    """Compiles and times one candidate; one that is refused or raises an error is left out, with a line in the log. Returns its Trial;
    that of a candidate that is left out has no seconds and no function, and says why.

    call      the call, of which the operands and the traced score_mod are read
    plan      that of the call with the candidate's tile among its options
    timed     the choice of the backend whose tile it is
    which     "forward": the forward pass is timed; "backward": both passes are
    tile      the candidate, for the Timing and the log
    movable   indices in Operands of the arrays that get gradients
    limit     the time of `clock` after which no further call begins; one call is timed in any case, after a first untimed one
    """

    def skip(reason: str) -> Trial:
        """Logs that the candidate does not run, for this reason, and returns its trial, without seconds."""
        LOG.warning("autotune leaves out %s: %s", shown(tile), reason)
        return Trial(Timing(which, tile, None, 0, reason), None)

    refusal = timed.backend.refuses(timed.plan_for(plan), timed.target)
    if refusal is not None:
        return skip(refusal)
    try:
        compiled = jax.jit(_step(call, plan, timed, which, movable)).lower(call.operands).compile()
        run = lambda: jax.block_until_ready(compiled(call.operands))
        run()
        times = _calls(run, CALLS, SHORT, limit)
    except Exception as error:  # a compiler raises what it likes for a kernel that does not fit the device
        return skip(_reason(error))
    return Trial(Timing(which, tile, statistics.median(times), len(times)), run)


def _reason(error: Exception) -> str:
    """The error's type and the first line of its message, at most 200 characters of it."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"
