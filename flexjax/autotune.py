"""`autotune`: times a backend's tiles for one call and keeps the fastest.

    tuning = flexjax.autotune(query, key, value, mask_mod=masks.causal, seconds=60)
    print(tuning)                                                 # the table of times
    flexjax.flex_attention(query, key, value, mask_mod=masks.causal)                    # finds the fastest tiles in the file
    flexjax.flex_attention(..., kernel_options=tuning.options)                          # or is given them

Forward tiles are searched first, by the time of the forward pass; then backward tiles, by the time of both passes with the
fastest forward tile. The backend's own choice (for the backward pass of xla, that of the forward pass) is timed first and is replaced
only by a tile that takes less than 98% of its time, also when the two are timed again in alternation, because a device is slower while
it wakes up. plan/tuned.py reads and writes the files of measured tiles; `merge` joins them.

A candidate is a tile that the backend proposes for a pass: a dict of KernelOptions fields, such as {"block_q": 128}.

A Timing is the measurement of one candidate, a Trial a Timing with the compiled call, so that it can be timed again
(time_tiles.py). A Run (dispatch.py) is the backend that was chosen for the call, with its plan and target.

A Call (prepare.py) is a checked call of flex_attention: its plan (everything static about it), its operands (arrays) and the
traced score_mod.
"""

import dataclasses
import datetime
import math
import os
import pathlib
import typing
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from flexjax import dispatch, time_tiles
from flexjax.backends import target as targets
from flexjax.call_arguments import Arguments, check_keywords, describe_call, times_backward
from flexjax.dispatch import Run
from flexjax.errors import bad_argument, stacklevel_of_user
from flexjax.paged.cache import PagedCache
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.plan.tuned import merge as merge
from flexjax.prepare import Call, prepare
from flexjax.progress_bar import ProgressBar
from flexjax.time_tiles import Tile, Timing, Trial, shown
from flexjax.types import ArrayOrShape, AuxRequest, Implementations, KernelOptions


class Tuning(typing.NamedTuple):
    """What `autotune` found.

    options    the KernelOptions of the call with the fastest tiles
    timings    the measurement of every candidate that was tried, in order
    finished   whether all candidates were tried before the time was up
    backend    name of the backend that was timed
    kept       the file that the fastest tiles were written to, None if they were written to none
    """

    options: KernelOptions
    timings: tuple[Timing, ...]
    finished: bool
    backend: str
    kept: pathlib.Path | None

    def __str__(self) -> str:
        """A table: the backend with the fastest tiles, then a row for each candidate with the passes that were timed, its time, its tile
        and, for one that does not run, why. `*` marks the fastest candidates.

        A last line says if the time was up before every candidate was tried.
        """
        best = {which: {n: getattr(self.options, n) for n in names} for which, names in tuned.PASSES.items()}
        lines = [f"{self.backend}: best {shown({n: v for t in best.values() for n, v in t.items() if v})}"]
        for t in self.timings:
            took = f"{1e3 * t.seconds:10.3f} ms" if t.seconds is not None else f"{'-':>10}   "
            chosen = t.seconds is not None and all(best[t.which][n] == v for n, v in t.tile.items())
            what = "forward" if t.which == "forward" else "both passes"
            lines.append(
                f"{'*' if chosen else ' '} {what:<12} {took}  {shown(t.tile)}{'  ' + t.skipped if t.skipped else ''}"
            )
        if not self.finished:
            lines.append("  the time was up before every candidate was tried")
        return "\n".join(lines)


def autotune(
    query: ArrayOrShape,
    key: ArrayOrShape,
    value: ArrayOrShape,
    *,
    backward: bool | None = None,
    seconds: float = 60.0,
    return_aux: AuxRequest | None = None,
    implementation: Implementations | None = None,
    cache: bool | str | os.PathLike[str] = True,
    progress: bool | None = None,
    **arguments: typing.Unpack[Arguments[ArrayOrShape]],
) -> Tuning:
    """Times the tiles of `flex_attention(query, key, value, ...)` with the same arguments, and keeps the fastest.

    query, key, value, return_aux, implementation, **arguments
                 as for flex_attention: score_mod, mask_mod, block_mask, scale, sinks, layout, kernel_options, dropout_rate,
                 dropout_key, broadcast_dropout, query_extra, key_extra, query_seq_lengths, key_value_seq_lengths,
                 origin, precision, query_scales, key_scales, value_scales. An array may be a jax.ShapeDtypeStruct: random
                 numbers take its place, and full lengths take the place of lengths. The first backend that accepts the call is
                 the one that is timed
    backward     whether tiles of the backward pass are searched too; None: unless the inputs are float8, which have no gradients
    seconds      time after which no further candidate begins; the first candidate is always timed
    cache        True: write the fastest tiles to the user's file, where flex_attention finds them; a path: to that file;
                 False: to no file
    progress     whether to draw a progress bar on stderr; None: only if stderr is a terminal

    Returns a Tuning: `options` to pass as kernel_options, `timings`, and a table as its str(). Tiles that `kernel_options` fixes
    are not searched. Programs that are compiled already keep their tiles; programs that are lowered later use the new ones.

    Raises what flex_attention would raise, TypeError for a keyword that flex_attention does not have, ValueError for tracers, for
    simulated kernels and, with `backward`, for a score_mod without a derivative, NotImplementedError for `context=`, for a cache in
    pages and for the reference implementation, RuntimeError if no candidate runs.

    Example: flexjax.autotune(q, k, v, mask_mod=flexjax.masks.causal, seconds=30)
    """
    if isinstance(key, PagedCache):
        raise NotImplementedError(
            "autotune has no tiles to choose for paged_attention: its tiles do not depend on the batch, so that the bits of a request "
            "do not either. Time paged_attention with kernel_options inside the jitted call instead."
        )
    check_keywords("autotune", typing.cast(dict, arguments))
    _check(seconds, cache, progress)
    filled: typing.Any = {name: _concrete(name, x) for name, x in arguments.items()}
    q, k, v = (_concrete(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    try:
        call = prepare(q, k, v, return_aux=return_aux, **filled)
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
        with_backward = times_backward(backward, call.plan.float8)
        return _search(call, timed, with_backward, time_tiles.clock() + seconds, cache, progress)
    except Exception as error:
        error.add_note(describe_call("autotune", q, k, v, return_aux, filled))
        raise


# ------------------------------------------------------------------- arguments


def _check(seconds: object, cache: object, progress: object) -> None:
    """Raises ValueError unless three keywords of autotune, which flex_attention does not have, fit: `seconds` is a positive, finite
    number, `cache` a bool or a path, and `progress` a bool or None.
    """
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise bad_argument("seconds", repr(seconds), "a positive, finite number", "For example 60.")
    if not isinstance(cache, bool | str | os.PathLike):
        raise bad_argument("cache", repr(cache), "True, False or a path", "True is the user's file.")
    if progress is not None and not isinstance(progress, bool):
        raise bad_argument("progress", repr(progress), "True, False or None", "None draws a bar on a terminal.")


def _concrete(name: str, x: object) -> typing.Any:
    """The value x of the argument `name`; if it is a jax.ShapeDtypeStruct, an array of that shape and dtype in its place.

    The array has random numbers if it is floating, a fixed key if it is a PRNG key, numbers above every length if it has lengths,
    and zeros otherwise. Raises ValueError for a tracer.
    """
    if isinstance(x, core.Tracer):
        raise bad_argument(
            name, "traced", "an array or a jax.ShapeDtypeStruct", "Call autotune outside of jit, and pass shapes."
        )
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if jnp.issubdtype(x.dtype, jnp.floating):
        rng = np.random.default_rng(zlib.crc32(name.encode()))  # other numbers for each argument
        return jnp.asarray(rng.standard_normal(tuple(x.shape), np.float32), x.dtype)
    if name.endswith("_seq_lengths"):
        return jnp.full(x.shape, jnp.iinfo(x.dtype).max, x.dtype)
    return jnp.zeros(x.shape, x.dtype)


# ------------------------------------------------------------------- the search


def _search(
    call: Call, timed: Run, backward: bool, until: float, cache: bool | str | os.PathLike[str], progress: bool | None
) -> Tuning:
    """Times the candidates of each pass, forward first, and keeps the fastest: what `autotune` does after its checks.

    call       the call whose tiles are searched
    timed      the choice of the backend whose candidates are timed
    backward   whether the backward pass is searched too, with the fastest forward tile. If `timed` refuses the gradients, the
               candidates are those of the backend that computes them
    until      the time of `time_tiles.clock` at which no further candidate begins; the forward search leaves the backward search
               60% of it
    cache      where the fastest tiles are written: True: the user's file; a path: that file; False: nowhere
    progress   whether to draw a progress bar; None: if stderr is a terminal

    Raises RuntimeError, with the reason of each candidate, if none runs, and ValueError if `backward` and score_mod has no derivative.
    """
    plan, options = call.plan, call.plan.options
    forwards = _tiles(timed, plan, "forward")
    wanted, movable = time_tiles.gradients_of(call.operands)
    backwards: list[Tile] = []
    if backward:
        derivative = call.problem(None).needed_derivative()
        asked = plan, (timed.backend.name,), timed.target
        backwards = _tiles(dispatch.choose_backward(*asked, wanted, derivative), plan, "backward")
    bar = ProgressBar(len(forwards) + len(backwards), progress)
    timings: list[Timing] = []
    found: dict[str, Timing] = {}
    for which, tiles in (("forward", forwards), ("backward", backwards)):
        # the forward search leaves the backward search 60% of the time
        limit = until - (0.6 * (until - time_tiles.clock()) if which == "forward" and backwards else 0.0)
        ran: list[Trial] = []  # the backend's own choice, which is first, and the fastest of the others
        for tile in tiles:
            if timings and time_tiles.clock() >= limit:
                break
            changed = dataclasses.replace(plan, options=dataclasses.replace(options, **tile))
            best = found[which].seconds if which in found else None
            bar.show(len(timings), max(0.0, until - time_tiles.clock()), best, shown(tile))
            trial = time_tiles.time_tile(call, changed, timed, which, tile, movable, limit)
            timings.append(trial.timing)
            if trial.timing.seconds is not None:
                ran = [*ran[:1], min([*ran[1:], trial], key=time_tiles.seconds_of)]
                found[which] = min(ran, key=time_tiles.seconds_of).timing
        if ran:
            own, fastest = time_tiles.time_again(ran[0], ran[-1])
            timings[timings.index(ran[0].timing)] = own
            if ran[1:]:
                timings[timings.index(ran[1].timing)] = fastest
            found[which] = fastest if time_tiles.is_better(fastest, own) else own
            options = dataclasses.replace(options, **found[which].tile)
    bar.close()
    if not found:
        reasons = " ".join(f"{shown(t.tile)}: {t.skipped}" for t in timings)
        raise RuntimeError(f"No candidate of {timed.backend.name} runs. {reasons}")
    finished = len(timings) == len(forwards) + len(backwards)
    kept = _keep(plan, timed, found, timings, {"forward": forwards, "backward": backwards}, cache)
    return Tuning(options, tuple(timings), finished, timed.backend.name, kept)


def _tiles(timed: Run, plan: KernelPlan, which: str) -> list[Tile]:
    """The different candidates for the pass `which` ("forward" or "backward"), in the order of the backend, whose own choice is first (for
    the backward pass of xla, that of the forward pass): each without the options that the plan's own options fix. A candidate may be
    {}, which has nothing to choose; no candidates if the backend has no tiles.

    timed   the choice of the backend that is asked, with the target
    plan    of the call
    """
    open_options = [n for n in tuned.PASSES[which] if getattr(plan.options, n) is None]
    every = timed.backend.tile_candidates(timed.plan_for(plan), timed.target)
    found = [{n: c[n] for n in open_options if n in c} for c in every]
    return list({tuple(t.items()): t for t in found}.values())


def _keep(
    plan: KernelPlan,
    timed: Run,
    found: dict[str, Timing],
    timings: list[Timing],
    candidates: dict[str, list[Tile]],
    cache: bool | str | os.PathLike[str],
) -> pathlib.Path | None:
    """Writes the fastest tiles to the file that `cache` says, for each pass of whose tile the options of the call fix nothing.

    plan        of the call, without the tiles that were found
    found       the fastest candidate of each pass; an empty tile is not written
    timed       the choice of the backend, whose name and device are part of the key in the file
    timings     all measurements, and `candidates` what was to be tried, by pass, to note whether the search was
                finished
    cache       True: the user's file; a path: that file; False: none

    Returns the file, None if nothing was written; warns where it cannot be written.
    """
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
    try:
        tuned.write(path, {tuned.digest(plan, name, device, of): entry})
    except OSError as error:  # a home that cannot be written to is no reason to lose the search
        said = (
            f"autotune keeps no tiles: {error}. Pass `options` of its result as kernel_options, or cache= another path."
        )
        warnings.warn(said, stacklevel=stacklevel_of_user())
        return None
    return path
