"""`time_tile`: compiles a call with one tile and times it; `time_again`: times two tiles in alternation.

The time of a call is that on the host's clock until its results are ready. The seconds of a tile are the median of its
calls. A slow tile leaves time for the others.
"""

import dataclasses
import logging
import math
import statistics
import time
import typing
from collections.abc import Callable

import jax

from flexjax.call.prepare import PreparedCall
from flexjax.passes.autodiff import attention
from flexjax.passes.dispatch import Run
from flexjax.plan.kernel_plan import FIRST_CAPTURE, KernelPlan, Operands, Wanted

Array = jax.Array
Tile = dict[str, int]

Result = typing.TypeVar("Result")
LOG = logging.getLogger("flexjax.autotune")
MARGIN = 0.98  # a tile replaces the backend's own choice if its time is below this share of the time of that choice
CALLS = (3, 200)  # the least and the largest number of timed calls of a candidate
SHORT = 0.5  # seconds after which no further call of a candidate is timed, once CALLS[0] calls are
LONG = 5.0  # seconds after which no further call of a candidate is timed in any case
ROUNDS = 10  # of timing two candidates in alternation

clock = time.perf_counter


class Timing(typing.NamedTuple):
    """The measurement of one candidate."""

    # "forward" (a tile of the forward pass; that pass was timed) or "backward" (a tile of the backward pass; both were)
    which: str
    tile: Tile
    seconds: float | None  # median of a call; None if the candidate does not run, and `skipped` says why
    calls: int  # number of timed calls
    skipped: str = ""


class Trial(typing.NamedTuple):
    """A candidate's measurement, and the compiled call, which waits for its results."""

    timing: Timing
    run: Callable[[], object] | None  # None if it does not run


def shown(tile: Tile) -> str:
    """For example "block_q=128 block_kv=64"."""
    return " ".join(f"{n}={v}" for n, v in tile.items()) or "nothing to choose"


def seconds_of(trial: Trial) -> float:
    return math.inf if trial.timing.seconds is None else trial.timing.seconds


def is_better(timing: Timing, own: Timing) -> bool:
    """Whether a candidate replaces the backend's `own` choice; False if either does not run."""
    return timing.seconds is not None and own.seconds is not None and timing.seconds < MARGIN * own.seconds


def time_again(own: Trial, fastest: Trial) -> tuple[Timing, Timing]:
    """The measurements (own, fastest) of the backend's own choice and of the fastest candidate.

    Both are timed again, in alternation, if the first measurements would replace the backend's own choice.
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
    """For each function the seconds of its calls, in at most ROUNDS rounds of alternation."""
    times: list[list[float]] = [[] for _ in runs]
    until = clock() + SHORT * len(runs)
    for _ in range(ROUNDS):
        for taken, run in zip(times, runs, strict=True):
            taken += _calls(run, (1, CALLS[1] // ROUNDS), SHORT / ROUNDS, until)
        if clock() >= until:
            break
    return times


def _calls(run: Callable[[], object], counts: tuple[int, int], short: float, limit: float) -> list[float]:
    """The seconds of each call of `run`, which waits for its results: at least one, at most counts[1].

    No further call begins from `clock` time `limit` on, after counts[0] calls and `short`, or LONG, seconds.
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
    """(Wanted, indices in Operands) of the timed gradients: all but those of captured arrays."""
    present = [x is not None for x in operands[:FIRST_CAPTURE]]
    places = tuple(n for n, there in enumerate(present) if there)
    return Wanted.of([*present, *[False] * len(operands.score_captures)]), places


def _step(
    call: PreparedCall, plan: KernelPlan, timed: Run, which: str, movable: tuple[int, ...]
) -> Callable[[Operands], object]:
    """The function that is timed: the forward pass, which returns out, or both, which return (out, gradients)."""
    # xla computes the gradients that the timed backend refuses
    problem = dataclasses.replace(call, plan=plan).problem((timed.backend.name, "xla"))
    if which == "forward":
        return lambda operands: attention(problem, operands).out

    def both(operands: Operands) -> object:
        def out_of(moving: list[Array]) -> Array:
            names = [Operands._fields[place] for place in movable]
            return attention(problem, operands._replace(**dict(zip(names, moving, strict=True)))).out

        # The output itself is the cotangent.
        out, pull = jax.vjp(out_of, [operands[place] for place in movable])
        return out, pull(out)

    return both


def time_tile(
    call: PreparedCall, plan: KernelPlan, timed: Run, which: str, tile: Tile, movable: tuple[int, ...], limit: float
) -> Trial:
    """Compiles and times one candidate; one that is refused or raises an error is left out, with a line in the log.

    plan      that of the call with the candidate's tile among its options
    timed     the choice of the backend whose tile it is
    movable   indices in Operands of the arrays that get gradients
    limit     the time of `clock` after which no further call begins; one call is timed in any case
    """

    def skip(reason: str) -> Trial:
        LOG.warning("autotune leaves out %s: %s", shown(tile), reason)
        return Trial(Timing(which, tile, None, 0, reason), None)

    rewritten = dataclasses.replace(timed.plan, options=plan.options)
    refusal = timed.backend.refuses(rewritten, timed.target)
    if refusal is not None:
        return skip(refusal)
    try:
        compile_now = lambda: jax.jit(_step(call, plan, timed, which, movable)).lower(call.operands).compile()
        compiled = _jitted(compile_now)
        run = lambda: _jitted(lambda: jax.block_until_ready(compiled(call.operands)))
        run()
        times = _calls(run, CALLS, SHORT, limit)
    except Exception as error:  # a compiler raises what it likes for a kernel that does not fit the device
        return skip(_reason(error))
    return Trial(Timing(which, tile, statistics.median(times), len(times)), run)


def _jitted(function: Callable[[], Result]) -> Result:
    """What the function returns; `jax.disable_jit` around the search does not reach what is timed."""
    with jax.disable_jit(False):
        return function()


def _reason(error: Exception) -> str:
    """The error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"
