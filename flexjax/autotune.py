"""Times a backend's tiles for one call and keeps the best.

    tuning = flexjax.autotune(query, key, value, mask_mod=masks.causal, seconds=60)
    print(tuning)                                                 # the table of times
    flexjax.flex_attention(query, key, value, mask_mod=masks.causal)                    # finds the best tile by itself
    flexjax.flex_attention(..., kernel_options=tuning.options)                          # or is given it

The passes are searched one after the other: forward tiles by the time of the forward pass, then backward tiles by the time of
both passes with the best forward tile. What the backend does by itself is timed first and stays unless something else is
faster by 2%, also where the two are timed again in turns: a device is slower while it wakes up. Files of measured tiles are
plan/tuned.py's; `merge` joins them.
"""

import dataclasses
import datetime
import logging
import math
import os
import pathlib
import statistics
import sys
import time
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from flexjax import dispatch
from flexjax.attention import DEFAULTS, Arguments, Call, describe_call, prepare
from flexjax.autodiff import attention
from flexjax.backends import target as targets
from flexjax.dispatch import Run
from flexjax.errors import bad_argument
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import KernelPlan, Operands, Wanted
from flexjax.plan.tuned import merge as merge
from flexjax.types import KernelOptions

Array = jax.Array
Tile = dict[str, int]

LOG = logging.getLogger(__name__)
MARGIN = 0.98  # of the time of the backend's own tile: what another one must reach
CALLS = (3, 200)  # timed calls of a candidate
SHORT, LONG = 0.5, 5.0  # seconds after which no more of them, or not even three, begin
TURNS = 10  # in which two candidates are timed again

clock = time.perf_counter


class Timing(typing.NamedTuple):
    """One candidate. `seconds`: median time of a call, forward or both passes; None with the reason where it does not run."""

    which: str
    tile: Tile
    seconds: float | None
    calls: int
    skipped: str = ""


class Trial(typing.NamedTuple):
    """A candidate that was timed, and the compiled call, which runs to its end; None where it does not run."""

    timing: Timing
    run: Callable[[], object] | None


class Tuning(typing.NamedTuple):
    """What `autotune` found.

    options    the KernelOptions of the call with the best tiles
    timings    every candidate that was tried, in order
    finished   whether all were tried before the time was up
    backend    which one was timed
    kept       the file that the best tiles were written to, None if none
    """

    options: KernelOptions
    timings: tuple[Timing, ...]
    finished: bool
    backend: str
    kept: pathlib.Path | None

    def __str__(self) -> str:
        best = {which: {n: getattr(self.options, n) for n in names} for which, names in tuned.PASSES.items()}
        lines = [f"{self.backend}: best {_shown({n: v for t in best.values() for n, v in t.items() if v})}"]
        for t in self.timings:
            took = f"{1e3 * t.seconds:10.3f} ms" if t.seconds is not None else f"{'-':>10}   "
            chosen = t.seconds is not None and all(best[t.which][n] == v for n, v in t.tile.items())
            what = "forward" if t.which == "forward" else "both passes"
            lines.append(
                f"{'*' if chosen else ' '} {what:<12} {took}  {_shown(t.tile)}{'  ' + t.skipped if t.skipped else ''}"
            )
        if not self.finished:
            lines.append("  the time was up before every candidate was tried")
        return "\n".join(lines)


def _shown(tile: Tile) -> str:
    return " ".join(f"{n}={v}" for n, v in tile.items()) or "nothing to choose"


def autotune(
    query: Array,
    key: Array,
    value: Array,
    *,
    backward: bool = True,
    seconds: float = 60.0,
    implementation: str | Sequence[str] | None = None,
    cache: bool | str | os.PathLike[str] = True,
    progress: bool | None = None,
    **arguments: typing.Any,
) -> Tuning:
    """Times the tiles of `flex_attention(query, key, value, ...)` with the same arguments, and keeps the best.

    query, key, value, **arguments  as for flex_attention; arrays may be jax.ShapeDtypeStruct, which random ones stand in for
    backward     whether the tile of the backward pass is searched too
    seconds      no candidate is begun after so many; the first one is always timed
    implementation  as for flex_attention; the backend that would run is timed
    cache        True: the best tiles are written to the user's file, where flex_attention finds them; a path: to that file;
                 False: to none
    progress     whether a bar is drawn on stderr; None: if that is a terminal

    Returns a Tuning: `options`, to be passed as kernel_options, `timings`, and a table as its str(). Tiles that
    `kernel_options` names are kept as they are. Programs that are compiled already stay as they are; those that are lowered
    later run with the new tiles.

    Raises what flex_attention would raise, ValueError for tracers and for the simulator, RuntimeError where no candidate runs.
    """
    unknown = sorted(set(arguments) - set(DEFAULTS))
    if unknown:
        raise TypeError(f"autotune() got unexpected arguments {', '.join(unknown)}; it takes those of flex_attention.")
    _check(backward, seconds, cache, progress)
    main, filled = _concrete(query, key, value, {**DEFAULTS, **arguments})
    try:
        call = prepare(*main, **filled)
        if call.plan.options.interpret:
            raise bad_argument(
                "kernel_options.interpret",
                "True",
                "False",
                "The time of a simulated kernel says nothing about the kernel.",
            )
        timed = dispatch.choose(call.plan, dispatch.candidates(implementation), targets.default())
        if timed.backend.name == dispatch.REFERENCE:
            raise NotImplementedError("The reference implementation has no tiles to choose.")
        return _search(call, timed, backward, clock() + seconds, cache, progress)
    except Exception as error:
        error.add_note(describe_call("autotune", main[0], main[1], main[2], filled))
        raise


# ------------------------------------------------------------------- arguments


def _check(backward: object, seconds: typing.Any, cache: object, progress: object) -> None:
    if not isinstance(backward, bool):
        raise bad_argument("backward", repr(backward), "True or False", "Pass a Python bool.")
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not seconds > 0 or math.isinf(seconds):
        raise bad_argument("seconds", repr(seconds), "a positive, finite number", "For example 60.")
    if not isinstance(cache, bool | str | os.PathLike):
        raise bad_argument("cache", repr(cache), "True, False or a path", "True is the user's file.")
    if progress is not None and not isinstance(progress, bool):
        raise bad_argument("progress", repr(progress), "True, False or None", "None draws a bar on a terminal.")


def _concrete(query: typing.Any, key: typing.Any, value: typing.Any, arguments: dict) -> tuple[tuple, Arguments]:
    """The arguments with random arrays in the places of abstract ones."""
    rng = np.random.default_rng(0)

    def made(name: str, x: typing.Any) -> typing.Any:
        if isinstance(x, core.Tracer):
            raise bad_argument(
                name, "traced", "an array or a jax.ShapeDtypeStruct", "Call autotune outside of jit, and pass shapes."
            )
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(tuple(x.shape), np.float32), x.dtype)
        return jnp.zeros(x.shape, x.dtype)

    main = tuple(made(n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    return main, typing.cast(Arguments, {n: made(n, x) for n, x in arguments.items()})


# ------------------------------------------------------------------- the search


def _search(
    call: Call, timed: Run, backward: bool, until: float, cache: bool | str | os.PathLike[str], progress: bool | None
) -> Tuning:
    plan, options = call.plan, call.plan.options
    forwards = _tiles(timed, plan, "forward")
    wanted, movable = _movable(call.operands)
    backwards: list[Tile] = []
    if backward:
        derivative = call.problem(None).needed_derivative()
        asked = plan, (timed.backend.name,), timed.target
        backwards = _tiles(dispatch.choose_backward(*asked, wanted, derivative), plan, "backward")
    bar = _Bar(len(forwards) + len(backwards), until, progress)
    timings: list[Timing] = []
    found: dict[str, Timing] = {}
    for which, tiles in (("forward", forwards), ("backward", backwards)):
        # the forward search leaves the backward one a share of what time there is
        limit = until - (0.6 * (until - clock()) if which == "forward" and backwards else 0.0)
        ran: list[Trial] = []  # the first and the fastest
        for tile in tiles:
            if timings and clock() >= limit:
                break
            changed = dataclasses.replace(plan, options=dataclasses.replace(options, **tile))
            bar.show(len(timings), tile, found.get(which))
            trial = _time(call, changed, timed, which, tile, movable, limit)
            timings.append(trial.timing)
            if trial.timing.seconds is not None:
                ran = [*ran[:1], min([*ran[1:], trial], key=_seconds)]
                found[which] = min(ran, key=_seconds).timing
        if ran:
            own, fastest = _settled(ran[0], ran[-1])
            timings[timings.index(ran[0].timing)] = own
            if ran[1:]:
                timings[timings.index(ran[1].timing)] = fastest
            found[which] = fastest if _is_better(fastest, own) else own
            options = dataclasses.replace(options, **found[which].tile)
    bar.close()
    if not found:
        reasons = " ".join(f"{_shown(t.tile)}: {t.skipped}" for t in timings)
        raise RuntimeError(f"No candidate of {timed.backend.name} runs. {reasons}")
    finished = len(timings) == len(forwards) + len(backwards)
    kept = _keep(plan, timed, found, timings, {"forward": forwards, "backward": backwards}, cache)
    return Tuning(options, tuple(timings), finished, timed.backend.name, kept)


def _tiles(timed: Run, plan: KernelPlan, which: str) -> list[Tile]:
    """The backend's candidates for a pass, without those options that the call names itself."""
    open_options = [n for n in tuned.PASSES[which] if getattr(plan.options, n) is None]
    every = timed.backend.tile_candidates(plan, timed.target)
    found = [{n: c[n] for n in open_options if n in c} for c in every]
    return list({tuple(t.items()): t for t in found}.values())


def _seconds(trial: Trial) -> float:
    return math.inf if trial.timing.seconds is None else trial.timing.seconds


def _is_better(timing: Timing, own: Timing) -> bool:
    return timing.seconds is not None and own.seconds is not None and timing.seconds < MARGIN * own.seconds


def _settled(own: Trial, fastest: Trial) -> tuple[Timing, Timing]:
    """The times of both, in turns where the first ones would have the backend's own tile replaced."""
    first = own.timing, fastest.timing
    if not (_is_better(fastest.timing, own.timing) and own.run and fastest.run):
        return first
    try:
        times = _in_turns(own.run, fastest.run)
    except Exception as error:  # with both at once the device may be too small
        LOG.warning("autotune does not time its choice again: %s", _reason(error))
        return first
    again = [t._replace(seconds=statistics.median(x), calls=len(x)) for t, x in zip(first, times, strict=True)]
    return again[0], again[1]


def _in_turns(*runs: Callable[[], object]) -> list[list[float]]:
    """Seconds of calls of each, a share of them in each turn; as long as timing them alone may take, or one turn."""
    times: list[list[float]] = [[] for _ in runs]
    until = clock() + SHORT * len(runs)
    for _ in range(TURNS):
        for kept, run in zip(times, runs, strict=True):
            kept += _calls(run, (1, CALLS[1] // TURNS), SHORT / TURNS, until)
        if clock() >= until:
            break
    return times


def _calls(run: Callable[[], object], counts: tuple[int, int], short: float, limit: float) -> list[float]:
    """Seconds of (least, most) calls, until some seconds or the limit are over; of one at least."""
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


def _movable(operands: Operands) -> tuple[Wanted, tuple[int, ...]]:
    """Gradients that are timed: of everything but captured arrays."""
    present = [x is not None for x in operands[:6]]
    places = tuple(n for n, there in enumerate(present) if there)
    return Wanted._make((*present, (False,) * len(operands.score_captures))), places


def _step(
    call: Call, plan: KernelPlan, timed: Run, which: str, movable: tuple[int, ...]
) -> Callable[[Operands], object]:
    """The pass as a function of the operands."""
    problem = dataclasses.replace(call, plan=plan).problem((timed.backend.name, "xla"))  # for what the first refuses
    if which == "forward":
        return lambda operands: attention(problem, operands).out

    def both(operands: Operands) -> object:
        def out_of(moving: list[Array]) -> Array:
            names = [Operands._fields[place] for place in movable]
            changed: dict[str, typing.Any] = dict(zip(names, moving, strict=True))
            return attention(problem, operands._replace(**changed)).out

        out, pull = jax.vjp(out_of, [operands[place] for place in movable])
        return out, pull(out)

    return both


def _time(
    call: Call, plan: KernelPlan, timed: Run, which: str, tile: Tile, movable: tuple[int, ...], limit: float
) -> Trial:
    """Compiles a candidate, warms up, and times calls that are waited for, until some seconds or the limit are over."""

    def skip(reason: str) -> Trial:
        LOG.warning("autotune leaves out %s: %s", _shown(tile), reason)
        return Trial(Timing(which, tile, None, 0, reason), None)

    refusal = timed.backend.refuses(plan, timed.target)
    if refusal is not None:
        return skip(refusal)
    try:
        compiled = jax.jit(_step(call, plan, timed, which, movable)).lower(call.operands).compile()
        run = lambda: jax.block_until_ready(compiled(call.operands))
        run()
        times = _calls(run, CALLS, SHORT, limit)
    except Exception as error:  # a candidate that does not fit the device fails in the compiler's own ways
        return skip(_reason(error))
    return Trial(Timing(which, tile, statistics.median(times), len(times)), run)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def _keep(
    plan: KernelPlan,
    timed: Run,
    found: dict[str, Timing],
    timings: list[Timing],
    candidates: dict[str, list[Tile]],
    cache: bool | str | os.PathLike[str],
) -> pathlib.Path | None:
    """Writes the best tiles of the passes whose tile the call left open; returns the file."""
    path = (tuned.cache_file() if cache else None) if isinstance(cache, bool) else pathlib.Path(cache)
    if path is None:
        return None
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    name, device, of = timed.backend.name, timed.target.name, tuned.versions()
    entry: dict[str, typing.Any] = dict(device=device, backend=name, jax=of[0], flexjax=of[1], plan=tuned.summary(plan))
    for which, best in found.items():
        if any(getattr(plan.options, n) is not None for n in tuned.PASSES[which]) or not best.tile:
            continue
        tried = sum(t.which == which for t in timings)
        made = dict(tile=best.tile, seconds=best.seconds, measured=now, finished=tried == len(candidates[which]))
        entry[which] = made
    if not any(which in entry for which in tuned.PASSES):
        return None
    tuned.write(path, {tuned.digest(plan, name, device, of): entry})
    return path


class _Bar:
    """A line on stderr that shows how far the search is."""

    WIDTH = 24

    def __init__(self, total: int, until: float, wanted: bool | None) -> None:
        self.total, self.until = total, until
        self.on = sys.stderr.isatty() if wanted is None else wanted

    def show(self, done: int, tile: Tile, best: Timing | None) -> None:
        if not self.on:
            return
        full = self.WIDTH * done // max(1, self.total)
        text = f"[{'#' * full}{'.' * (self.WIDTH - full)}] {done}/{self.total}, {max(0.0, self.until - clock()):.0f} s left"
        if best is not None and best.seconds is not None:
            text += f", best {1e3 * best.seconds:.3f} ms"
        self._draw(f"{text}, now {_shown(tile)}")

    def close(self) -> None:
        if self.on:
            self._draw("")

    def _draw(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
