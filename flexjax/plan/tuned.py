"""Measured tile sizes: the user's file, the tables that come with the package, and the lookup in both.

A file is JSON: {"format": 1, "entries": {digest: entry}}. A digest stands for the device kind, the backend, the plan without
its tiles, and the versions of jax and flexjax; in the tables of the package, without the versions. An entry has

    device, backend, jax, flexjax, plan   what it is for, as text
    forward, backward                     for each pass that was measured: "tile", a dict of KernelOptions; "seconds", the
                                          median; "measured", the time in UTC; "finished", whether every candidate was tried

and in the tables of the package also "name" and "source". In this file, "entries" are a dict from digest to entry, a "tile" is
a dict from names of KernelOptions (block_q, ...) to ints, and the "passes" are forward and backward. Two entries of one digest
are joined pass by pass: a finished search wins over one that was cut off, then the newer measurement, then the faster.

The user's file is `tuned.json` in FLEXJAX_CACHE_DIR, by default in `flexjax` of the user's cache directory; an empty
FLEXJAX_CACHE_DIR means none. It is read once a process. A file that cannot be read is ignored with a warning, because tiles
change the speed of a call and never its results.

A plan is everything static about one attention call (kernel_plan.py).
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.resources
import json
import os
import pathlib
import re
import sys
import tempfile
import typing
import warnings
from collections.abc import Iterator

import jax

from flexjax.plan.kernel_plan import KernelPlan

FORMAT = 1
PASSES: dict[str, tuple[str, ...]] = {
    "forward": ("block_q", "block_kv", "num_stages"),
    "backward": ("block_q_bwd", "block_kv_bwd"),
}
"""For each pass, the names of the KernelOptions that make up its tile."""

Entries = dict[str, dict[str, typing.Any]]


# ------------------------------------------------------------------- names of problems


def plan_text(plan: KernelPlan) -> str:
    """The fields of the plan as text, "name: value" each from a new line (programs take several), and of its options deterministic,
    interpret and, where they are set, instruction and cta_pairs. Fields that have their default are left out, so that a field which a
    later version adds changes no text; tile sizes and `split` never are there.

    Equal plans give the same text in every process (addresses in it are removed), so that a digest of it can be stored.
    """
    options = plan.options
    fields = [f.name for f in dataclasses.fields(plan) if f.name != "options" and getattr(plan, f.name) != f.default]
    lines = [f"{name}: {getattr(plan, name)}" for name in fields]
    lines.append(f"deterministic: {options.deterministic}, interpret: {options.interpret}")
    lines += [] if options.instruction is None else [f"instruction: {options.instruction}"]
    lines += ["cta_pairs: True"] if options.cta_pairs else []
    return re.sub(r"0x[0-9a-f]+", "0x", "\n".join(lines))


def summary(plan: KernelPlan) -> str:
    """The plan in one line, for the field "plan" of an entry, such as "B=1 N=8 M=8 T=4096 S=4096 D=128 E=128 bfloat16 BTNH score_mod
    mask_mod blocks of 128 x 128 dropout any order". The words from "score_mod" on are there if the plan has that; "any order" if the
    backward pass may add in any order.
    """
    parts = [
        f"B={plan.batch} N={plan.q_heads} M={plan.kv_heads} T={plan.q_len} S={plan.kv_len} D={plan.head_dim}",
        f"E={plan.value_dim} {plan.input_dtype} {plan.layout}",
        "" if plan.score is None else "score_mod",
        "" if plan.mask is None else "mask_mod",
        "" if plan.blocks is None else f"blocks of {plan.blocks.block_q} x {plan.blocks.block_kv}",
        "" if plan.dropout is None else "dropout",
        "" if plan.options.deterministic else "any order",
    ]
    return " ".join(p for p in parts if p)


def versions() -> tuple[str, str]:
    """(version of jax, version of flexjax). The latter is read from sys.modules, because plan/ may not import the package."""
    return jax.__version__, sys.modules[__name__.partition(".")[0]].__version__


def digest(plan: KernelPlan, backend: str, device: str, of: tuple[str, str] | None) -> str:
    """The key under which a file of measured tiles has the entry of a plan: 32 hexadecimal digits of a SHA-256. It is the same with
    exact_captures, which runs with the same tiles, and with other sizes among the options (tiles, `split`).

    backend, device   name of the backend, device kind as jax names it
    of                versions of jax and flexjax for which the tiles were measured; None in the tables of the package
    """
    plan = dataclasses.replace(plan, exact_captures=False)
    text = "\n".join((device, backend, *(of or ()), plan_text(plan)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# ------------------------------------------------------------------- files


def cache_file() -> pathlib.Path | None:
    """The path of the user's file, which need not exist; None where FLEXJAX_CACHE_DIR is empty.

    The user's cache directory is XDG_CACHE_HOME, or ~/.cache without it.
    """
    chosen = os.environ.get("FLEXJAX_CACHE_DIR")
    if chosen is not None:
        return pathlib.Path(chosen) / "tuned.json" if chosen else None
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path("~/.cache").expanduser()
    return pathlib.Path(home) / "flexjax" / "tuned.json"


def read(path: str | os.PathLike[str]) -> Entries:
    """The entries of the file of measured tiles at `path`. Raises OSError, or ValueError if the file has another form."""
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    try:
        return _checked(json.loads(text))
    except (json.JSONDecodeError, _Wrong) as why:
        raise ValueError(f"`{path}` is no file of measured tiles: {why}. Move it away or delete it.") from None


class _Wrong(Exception):
    """The contents of a file have not the form of measured tiles; the message says what is wrong."""


def _checked(found: object) -> Entries:
    """The entries of the parsed JSON file `found`, after a check of its form. Raises _Wrong for any other form."""
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("entries"), dict):
        raise _Wrong(f'expected {{"format": {FORMAT}, "entries": {{...}}}}')
    for key, entry in found["entries"].items():
        if not isinstance(entry, dict) or not any(name in entry for name in PASSES):
            raise _Wrong(f"entry {key} has no tiles")
        for name in PASSES:
            if name in entry:
                _check_pass(key, name, entry[name])
    return found["entries"]


def _check_pass(key: str, name: str, made: typing.Any) -> None:
    """Raises _Wrong unless `made` is a measurement of a pass: its tile has only options of that pass, each a positive int, and
    it has the seconds and the time of the measurement.

    key    the digest of the entry, for the message
    name   of the pass, "forward" or "backward"
    """
    tile = made.get("tile") if isinstance(made, dict) else None
    if not isinstance(tile, dict) or not set(tile) <= set(PASSES[name]):
        raise _Wrong(f"the {name} tile of entry {key} is {tile!r}, not options among {', '.join(PASSES[name])}")
    for option, value in tile.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _Wrong(f"{option} of entry {key} is {value!r}, not a positive int")
    if not isinstance(made.get("seconds"), int | float) or not isinstance(made.get("measured"), str):
        raise _Wrong(f"the {name} tile of entry {key} lacks seconds or the time when it was measured")


def joined(first: Entries, second: Entries) -> Entries:
    """The entries of `first` and `second`, as a new dict.

    Where both have an entry of one digest, each pass comes from the finished search, then the newer, then the faster (`_rank`),
    and from `first` if these are equal; every other field comes from `second`.
    """
    out = {key: dict(entry) for key, entry in first.items()}
    for key, entry in second.items():
        mine = out.setdefault(key, {})
        for name, value in entry.items():
            if name not in PASSES or name not in mine or _rank(value) > _rank(mine[name]):
                mine[name] = value
    return out


def _rank(made: dict[str, typing.Any]) -> tuple[bool, str, float]:
    """The key by which two measurements of one pass are compared; the greater wins: (whether the search finished, time of the
    measurement, minus the seconds).

    made   the measurement; without "finished" it counts as finished
    """
    return bool(made.get("finished", True)), made["measured"], -made["seconds"]


def write(path: str | os.PathLike[str], entries: Entries) -> None:
    """Joins the entries (see `joined`) to those of the file at `path`, which is created if missing, with its folder.

    Lookups of this process read the file again afterwards. A lock lets several processes write one after another, and the file is
    replaced at once, so that a reader sees it before or after a change. A file that is not one of measured tiles is renamed, with a
    warning that names both; OSError is passed on.
    """
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        before: Entries = {}
        if target.exists():
            try:
                before = read(target)
            except ValueError as why:
                aside = next(p for n in range(1 << 20) if not (p := target.with_name(f"{target.name}.{n}")).exists())
                os.replace(target, aside)
                warnings.warn(f"{why} It was set aside as `{aside}`.", stacklevel=2)
        whole = {"format": FORMAT, "entries": dict(sorted(joined(before, entries).items()))}
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(whole, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    forget()


@contextlib.contextmanager
def _locked(target: pathlib.Path) -> Iterator[None]:
    """A context that holds an exclusive lock on `.NAME.lock` beside the file `target`, so that one process at a time
    changes the file; waits until the lock is free.

    The folder must exist, and the lock file stays. On a system without `fcntl` nothing is locked, and the last of two
    writers wins.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def merge(into: str | os.PathLike[str], *others: str | os.PathLike[str]) -> int:
    """Joins the entries of the files `others` to the file `into`, which is created if missing, and returns how many entries
    `into` has then.

    Where several files have an entry of one digest, each pass comes from the finished search, then the newer, then the faster.
    Raises OSError or ValueError, before anything is written, for a file that cannot be read or is not one of measured tiles.
    """
    found = [read(path) for path in others]
    if pathlib.Path(into).exists():
        read(into)
    write(into, functools.reduce(joined, found, {}))
    return len(read(into))


# ------------------------------------------------------------------- the lookup

_reads = 0
"""How many times this process was told to read the user's file again; part of the keys of the caches below."""


def forget() -> None:
    """Makes the next lookup read the user's file again."""
    global _reads
    _reads += 1


@functools.lru_cache(maxsize=4)
def _of_user(path: pathlib.Path | None, reads: int) -> Entries:
    """The entries of the user's file; {} where it is missing, and {} with a warning where it cannot be read.

    path    of the file, None for no file
    reads   the value of `_reads`: another value reads the file again, because the result is cached by the arguments
    """
    if path is None or not path.exists():
        return {}
    try:
        return read(path)
    except (OSError, ValueError) as why:
        warnings.warn(f"Measured tiles are not used. {why}", stacklevel=2)
        return {}


@functools.cache
def shipped(device: str) -> Entries:
    """The entries of the package's tables (tuned/*.json) that were measured on a device of kind `device`."""
    folder = importlib.resources.files("flexjax.plan") / "tuned"
    tables = [_checked(json.loads(f.read_text("utf-8"))) for f in folder.iterdir() if f.name.endswith(".json")]
    return {key: entry for key, entry in functools.reduce(joined, tables, {}).items() if entry["device"] == device}


class Found(typing.NamedTuple):
    """The measured tiles of a plan.

    tiles              names and values of the KernelOptions of the passes for which a measured tile was found
    forward, backward  where the tile of the pass was found: "user", "package", or "" for nowhere
    """

    tiles: dict[str, int]
    forward: str
    backward: str


def find(plan: KernelPlan, backend: str, device: str | None) -> Found:
    """Measured tiles of the kernels of `backend` for the passes of which the plan's options set no tile; cached for each plan.

    backend   its name
    device    the device kind, None where it is not known, for which nothing is found

    The user's file is asked first, then the tables of the package, for each pass by itself. A kernel in the simulator has no
    measured tiles.
    """
    if plan.options.interpret or device is None:
        return Found({}, "", "")
    return _find(plan, backend, device, *state())


def state() -> tuple[pathlib.Path | None, int]:
    """A value to put into the key of a cache: (path of the user's file, how many times it was written or forgotten here). While
    the value stays the same, a lookup finds the same tiles.
    """
    return cache_file(), _reads


@functools.lru_cache(maxsize=4096)
def _find(plan: KernelPlan, backend: str, device: str, path: pathlib.Path | None, reads: int) -> Found:
    """What `find` returns for a device of known kind, cached by the arguments.

    backend, device   name of the backend, and device kind
    path, reads       the `state()` of the user's file; the cache looks again when it changes

    The user's file comes before the package's tables. A pass is looked up only if the plan's options leave all of its tile
    open.
    """
    places = (
        ("user", _of_user(path, reads), versions()),
        ("package", shipped(device), None),
    )
    tiles: dict[str, int] = {}
    where = dict.fromkeys(PASSES, "")
    for place, entries, of in places:
        entry = entries.get(digest(plan, backend, device, of), {}) if entries else {}
        for name, options in PASSES.items():
            left_open = all(getattr(plan.options, option) is None for option in options)
            if left_open and not where[name] and name in entry:
                tiles |= entry[name]["tile"]
                where[name] = place
    return Found(tiles, **where)
