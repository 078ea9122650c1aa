"""`autotune`: times a backend's tiles for one call and keeps the fastest.

    tuning = flexjax.autotune(query, key, value, mask_mod=masks.causal, seconds=60)
    print(tuning)                                                 # the table of times
    flexjax.flex_attention(query, key, value, mask_mod=masks.causal)      # finds the fastest tiles in the file
    flexjax.flex_attention(..., kernel_options=tuning.options)            # or is given them

Forward tiles are searched first, by the time of the forward pass; then backward tiles, by the time of both passes with
the fastest forward tile. The backend's own choice is timed first and is replaced only by a tile that takes less than
98% of its time, also when the two are timed again in alternation, because a device is slower while it wakes up.

A candidate is a tile that the backend proposes for a pass: a dict of KernelOptions fields, such as {"block_q": 128}.
"""

import dataclasses
import datetime
import functools
import html
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

from flexjax.backends import target as targets
from flexjax.call.arguments import Arguments, Keywords, check_keywords, describe_call, times_backward
from flexjax.call.prepare import PreparedCall, prepare
from flexjax.errors import bad_argument, public, stacklevel_of_user
from flexjax.mod_tools.settings import own
from flexjax.paged.cache import PagedCache
from flexjax.passes import dispatch
from flexjax.passes.dispatch import Run
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.plan.tuned import merge as merge
from flexjax.tune import time_tiles
from flexjax.tune.progress_bar import ProgressBar
from flexjax.tune.time_tiles import Tile, Timing, Trial, shown
from flexjax.types import ArrayOrShape, AuxRequest, Dropout, Implementations, KernelOptions, Quantized


class Tuning(typing.NamedTuple):
    """What `autotune` found."""

    options: KernelOptions  # of the call with the fastest tiles
    timings: tuple[Timing, ...]  # of every candidate that was tried, in order
    finished: bool  # all candidates were tried before the time was up
    backend: str  # name of the one that was timed
    kept: pathlib.Path | None  # the file that the fastest tiles were written to

    def __str__(self) -> str:
        """A table: the backend with the fastest tiles, then a row for each candidate; `*` marks the fastest ones."""
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

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@public
@own
def autotune(
    query: ArrayOrShape | Quantized,
    key: ArrayOrShape | Quantized,
    value: ArrayOrShape | Quantized,
    *,
    backward: bool | None = None,
    seconds: float = 60.0,
    return_aux: AuxRequest | None = None,
    implementation: Implementations | None = None,
    cache: bool | str | os.PathLike[str] = True,
    progress: bool | None = None,
    **arguments: typing.Unpack[Keywords[ArrayOrShape]],
) -> Tuning:
    """Times the tiles of `flex_attention(query, key, value, ...)` with the same arguments, and keeps the fastest.

    query, key, value, return_aux, implementation, **arguments
                 as for flex_attention. An array may be a jax.ShapeDtypeStruct: random numbers take its place, and full
                 lengths take the place of lengths. The first backend that accepts the call is the one that is timed
    backward     whether to search tiles of the backward pass too; None: unless inputs are float8
    seconds      time after which no further candidate begins; the first candidate is always timed
    cache        True: write the fastest tiles to the user's file, where flex_attention finds them (on a CPU to none:
                 pass `options` of the result); a path: to that file; False: to no file. Ctrl-C keeps what was measured
    progress     whether to draw a progress bar on stderr; None: only if stderr is a terminal or a notebook's

    Returns a Tuning: `options` to pass as kernel_options, `timings`, and a table as its str(). Tiles that
    `kernel_options` fixes are not searched. Programs that are compiled already keep their tiles; programs that are
    lowered later use the new ones.

    Raises what flex_attention would raise, TypeError for a keyword that flex_attention does not have, ValueError for
    tracers, for simulated kernels and, with `backward`, for a score_mod without a derivative, NotImplementedError for
    `context=`, for a cache in pages and for the reference implementation, RuntimeError if no candidate runs.

    Example: flexjax.autotune(q, k, v, mask_mod=flexjax.masks.causal, seconds=30)
    """
    if isinstance(key, PagedCache):
        raise NotImplementedError(
            "autotune has no tiles to choose for paged_attention: its tiles do not depend on the batch, so that the "
            "bits of a request do not either. Time paged_attention with kernel_options inside the jitted call "
            "instead."
        )
    check_keywords("autotune", typing.cast(dict, arguments))
    _check(seconds, cache, progress)
    given = Arguments(query, key, value, return_aux=return_aux, **arguments)
    given = dataclasses.replace(given, **{name: _concrete(name, x) for name, x in given.given().items()})
    try:
        call = prepare(given)
        if call.plan.options.interpret:
            raise bad_argument(
                "kernel_options.interpret",
                "True",
                "False",
                "The time of a simulated kernel says nothing about the kernel.",
            )
        if call.plan.options.invariant:
            raise NotImplementedError(
                "autotune has no tiles to choose beside kernel_options.invariant, which fixes them."
            )
        timed = dispatch.choose(call.plan, dispatch.candidates(implementation), targets.default())
        if timed.backend.name == dispatch.REFERENCE:
            raise NotImplementedError("The reference implementation has no tiles to choose.")
        with_backward = times_backward(backward, call.plan.float8)
        return _search(call, timed, with_backward, time_tiles.clock() + seconds, cache, progress)
    except Exception as error:
        error.add_note(describe_call("autotune", given))
        raise


# ------------------------------------------------------------------- arguments


def _check(seconds: object, cache: object, progress: object) -> None:
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise bad_argument("seconds", repr(seconds), "a positive, finite number", "For example 60.")
    if not isinstance(cache, bool | str | os.PathLike):
        raise bad_argument("cache", repr(cache), "True, False or a path", "True is the user's file.")
    if progress is not None and not isinstance(progress, bool):
        raise bad_argument("progress", repr(progress), "True, False or None", "None draws a bar on a terminal.")


def _concrete(name: str, x: object) -> typing.Any:
    """The value x of the argument `name`; arrays in place of jax.ShapeDtypeStructs.

    The array has random numbers if it is floating, a fixed key if it is a PRNG key, numbers above every length if it
    has lengths, and zeros otherwise.
    """
    if isinstance(x, core.Tracer):
        raise bad_argument(
            name, "traced", "an array or a jax.ShapeDtypeStruct", "Call autotune outside of jit, and pass shapes."
        )
    if isinstance(x, Dropout | Quantized):
        return jax.tree.map(functools.partial(_concrete, name), x)
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
    call: PreparedCall,
    timed: Run,
    backward: bool,
    until: float,
    cache: bool | str | os.PathLike[str],
    progress: bool | None,
) -> Tuning:
    """Times the candidates of each pass, forward first, and keeps the fastest: what `autotune` does after its checks.

    `until` is a time of `time_tiles.clock`; the forward search leaves the backward search 60% of it. If `timed` refuses
    the gradients, backward candidates are those of the backend that computes them.
    """
    plan, options = call.plan, call.plan.options
    forwards = _tiles(timed, plan, "forward")
    wanted, movable = time_tiles.gradients_of(call.operands)
    backwards: list[Tile] = []
    if backward:
        derivative = call.problem(None).needed_derivative()
        asked = plan, (timed.backend.name,), timed.target
        backwards = _tiles(dispatch.choose_backward(*asked, wanted, derivative), plan, "backward")
    timings: list[Timing] = []
    found: dict[str, Timing] = {}
    searched: set[str] = set()  # the passes whose candidates were all tried
    bar = ProgressBar(len(forwards) + len(backwards), progress)
    try:
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
            if sum(t.which == which for t in timings) == len(tiles):
                searched.add(which)
    except KeyboardInterrupt:
        _keep(plan, timed, found, searched, cache)
        raise
    finally:
        bar.close()
    if not found:
        reasons = " ".join(f"{shown(t.tile)}: {t.skipped}" for t in timings)
        raise RuntimeError(f"No candidate of {timed.backend.name} runs. {reasons}")
    kept = _keep(plan, timed, found, searched, cache)
    return Tuning(options, tuple(timings), len(searched) == 2, timed.backend.name, kept)


def _tiles(timed: Run, plan: KernelPlan, which: str) -> list[Tile]:
    """The different candidates for a pass, the backend's own choice first, without the options that the plan fixes.

    A candidate may be {}, which has nothing to choose; no candidates if the backend has no tiles.
    """
    open_options = [n for n in tuned.PASSES[which] if getattr(plan.options, n) is None]
    rewritten = dataclasses.replace(timed.plan, options=plan.options)
    every = timed.backend.tile_candidates(rewritten, timed.target)
    found = [{n: c[n] for n in open_options if n in c} for c in every]
    return list({tuple(t.items()): t for t in found}.values())


def _keep(
    plan: KernelPlan, timed: Run, found: dict[str, Timing], searched: set[str], cache: bool | str | os.PathLike[str]
) -> pathlib.Path | None:
    """Writes the fastest tiles of each pass of whose tile the call fixes nothing to the file that `cache` says.

    `searched` are the passes whose candidates were all tried. Returns the file, None if nothing was written.
    """
    name, device, of = timed.backend.name, timed.target.name, tuned.versions()
    if cache is False or (cache is True and device in tuned.WITHOUT_TILES):
        return None
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entry: dict[str, typing.Any] = dict(device=device, backend=name, jax=of[0], flexjax=of[1], plan=tuned.summary(plan))
    for which, best in found.items():
        if any(getattr(plan.options, n) is not None for n in tuned.PASSES[which]) or not best.tile:
            continue
        entry[which] = dict(tile=best.tile, seconds=best.seconds, measured=now, finished=which in searched)
    if not any(which in entry for which in tuned.PASSES):
        return None
    path = tuned.cache_file() if cache is True else pathlib.Path(cache)
    try:
        if path is not None:
            tuned.write(path, {tuned.digest(plan, name, device, of): entry})
            return path
        if os.environ.get("FLEXJAX_CACHE_DIR") == "":  # the user wants no file
            return None
        why: object = "this user has no home directory"
    except (OSError, ValueError) as error:  # no reason to lose the search
        why = error
    said = f"autotune keeps no tiles: {why}. Pass `options` of its result as kernel_options, or cache= another path."
    warnings.warn(said, stacklevel=stacklevel_of_user())
    return None
