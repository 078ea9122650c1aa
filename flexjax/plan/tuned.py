"""Measured tile sizes: the user's file, the tables that come with the package, and the lookup in both.

A file is JSON: {"format": 1, "entries": {digest: entry}}. A digest stands for the device kind, the backend, the plan
without its tiles, and the versions of jax and flexjax; in the tables of the package, without the versions. An entry has

    device, backend, jax, flexjax, plan   what it is for, as text
    forward, backward                     for each pass that was measured: "tile", a dict of KernelOptions; "seconds",
                                          the median; "measured", the time in UTC; "finished", whether every candidate
                                          was tried

and in the tables of the package also "name" and "source". Two entries of one digest are joined pass by pass: a finished
search wins over one that was cut off, then the newer measurement, then the faster.

The user's file is `tuned.json` in FLEXJAX_CACHE_DIR, by default in `flexjax` of the user's cache directory; an empty
FLEXJAX_CACHE_DIR means none. It is read once a process, and never on a CPU. A file that cannot be read is ignored with
a warning, because tiles change the speed of a call and never its results.
"""

import dataclasses
import functools
import hashlib
import importlib.resources
import json
import math
import os
import pathlib
import re
import sys
import typing
import warnings

import jax

from flexjax.errors import stacklevel_of_user
from flexjax.plan import user_file
from flexjax.plan.kernel_plan import KernelPlan

FORMAT = 1
PASSES: dict[str, tuple[str, ...]] = {
    "forward": ("block_q", "block_kv", "num_stages"),
    "backward": ("block_q_bwd", "block_kv_bwd"),
}
"""For each pass, the names of the KernelOptions that make up its tile."""

WITHOUT_TILES: frozenset[str] = frozenset({"cpu"})
"""Device kinds for which no tiles are kept in the user's file, so that a call there touches no file."""

Entries = dict[str, dict[str, typing.Any]]


# ------------------------------------------------------------------- names of problems


def plan_text(plan: KernelPlan) -> str:
    """The plan and its options without tiles and `split`, as text that is the same in every process, to be hashed: not
    a name of the program (`call_text`).
    """
    options = plan.options
    # fields that have their default are left out, so that a field which a later version adds changes no text
    fields = [f.name for f in dataclasses.fields(plan) if f.name != "options" and getattr(plan, f.name) != f.default]
    lines = [f"{name}: {getattr(plan, name)}" for name in fields]
    lines.append(f"deterministic: {options.deterministic}, interpret: {options.interpret}")
    told = {*(n for tile in PASSES.values() for n in tile), "split", "deterministic", "interpret"}
    others = [f for f in dataclasses.fields(options) if f.name not in told]
    lines += [f"{f.name}: {x}" for f in others if (x := getattr(options, f.name)) != f.default]
    return re.sub(r"0x[0-9a-f]+", "0x", "\n".join(lines))


def call_text(plan: KernelPlan, device: str | None) -> tuple[object, ...]:
    """What decides how the passes of a plan run on devices of this kind, the same in every process."""
    measured = {} if device is None or device in WITHOUT_TILES else _of_user(*state())
    of_file = hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()
    return versions(), plan_text(plan), repr(plan.options), of_file


def summary(plan: KernelPlan) -> str:
    """The plan in one line, for the field "plan" of an entry."""
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
    """(version of jax, version of flexjax)."""
    # from sys.modules, because plan/ may not import the package
    return jax.__version__, sys.modules[__name__.partition(".")[0]].__version__


def digest(plan: KernelPlan, backend: str, device: str, of: tuple[str, str] | None) -> str:
    """The key of a plan in a file: 32 hexadecimal digits; `of` are the versions, None in the tables of the package."""
    # exact_captures runs with the same tiles
    plan = dataclasses.replace(plan, exact_captures=False)
    text = "\n".join((device, backend, *(of or ()), plan_text(plan)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# ------------------------------------------------------------------- files


def cache_file() -> pathlib.Path | None:
    """The path of the user's file, which need not exist; None where FLEXJAX_CACHE_DIR is empty or there is no home."""
    return _cache_file(*map(os.environ.get, ("FLEXJAX_CACHE_DIR", "XDG_CACHE_HOME")), os.path.expanduser("~"))


@functools.lru_cache(maxsize=8)  # asked in each call outside of jit
def _cache_file(chosen: str | None, caches: str | None, home: str) -> pathlib.Path | None:
    if chosen is not None:
        return pathlib.Path(chosen) / "tuned.json" if chosen else None
    if not caches and home.startswith("~"):  # neither HOME nor an entry of the user
        return None
    return (pathlib.Path(caches) if caches else pathlib.Path(home) / ".cache") / "flexjax" / "tuned.json"


def read(path: str | os.PathLike[str]) -> Entries:
    """The entries of the file at `path`. Raises OSError, or ValueError if the file has another form."""
    try:
        return _checked(_parsed(user_file.read_bytes(pathlib.Path(path))))
    except (_Wrong, user_file.TooLarge) as why:
        raise ValueError(f"`{path}` is no file of measured tiles: {why}. Move it away or delete it.") from None


class _Wrong(Exception):
    """The contents of a file have not the form of measured tiles; the message says what is wrong."""


def _parsed(contents: bytes) -> object:
    def refuse(word: str) -> typing.NoReturn:
        raise _Wrong(f"{word} is no number of JSON")

    try:
        return json.loads(contents.decode("utf-8"), parse_constant=refuse)
    except RecursionError:
        raise _Wrong("it nests too deeply") from None
    except ValueError as why:  # no UTF-8, no JSON, or an int of more digits than Python reads
        raise _Wrong(str(why)) from None


def _checked(found: object) -> Entries:
    """The entries of the parsed JSON file, after a check of its form."""
    form = isinstance(found, dict) and isinstance(found.get("entries"), dict)
    if not isinstance(found, dict) or not form or not _is_int(found.get("format")) or found["format"] != FORMAT:
        raise _Wrong(f'expected {{"format": {FORMAT}, "entries": {{...}}}}')
    for key, entry in found["entries"].items():
        if not isinstance(entry, dict) or not any(name in entry for name in PASSES):
            raise _Wrong(f"entry {key} has no tiles")
        for name, value in entry.items():
            if name in PASSES:
                _check_pass(key, name, value)
            elif not isinstance(value, str):
                raise _Wrong(f"{name} of entry {key} is no text")
    return found["entries"]


def _is_int(value: object) -> typing.TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_pass(key: str, name: str, made: typing.Any) -> None:
    """Raises _Wrong unless `made` is a measurement of the pass `name`; `key` is for the message."""
    tile = made.get("tile") if isinstance(made, dict) else None
    if not isinstance(tile, dict) or not set(tile) <= set(PASSES[name]):
        raise _Wrong(f"the {name} tile of entry {key} is {tile!r}, not options among {', '.join(PASSES[name])}")
    for option, value in tile.items():
        if not _is_int(value) or not 1 <= value < 1 << 31:
            raise _Wrong(f"{option} of entry {key} is {value!r}, not a positive int")
    seconds = made.get("seconds")
    timed = (isinstance(seconds, float) or _is_int(seconds)) and 0 <= seconds < math.inf
    if not timed or not isinstance(made.get("measured"), str):
        raise _Wrong(f"the {name} tile of entry {key} lacks seconds or the time when it was measured")
    if not isinstance(made.get("finished", True), bool):
        raise _Wrong(f"`finished` of the {name} tile of entry {key} is {made['finished']!r}, not a bool")
    for field in made.keys() - {"tile", "seconds", "measured", "finished"}:
        if not isinstance(made[field], str):
            raise _Wrong(f"{field} of the {name} tile of entry {key} is no text")


def joined(first: Entries, second: Entries) -> Entries:
    """The entries of both, as a new dict; the better measurement (`_rank`) of a pass that both have."""
    out = {key: dict(entry) for key, entry in first.items()}
    for key, entry in second.items():
        mine = out.setdefault(key, {})
        for name, value in entry.items():
            if name not in PASSES or name not in mine or _rank(value) > _rank(mine[name]):
                mine[name] = value
    return out


def _rank(made: dict[str, typing.Any]) -> tuple[bool, str, float]:
    """(whether the search finished, time of the measurement, minus the seconds); the greater wins."""
    return bool(made.get("finished", True)), made["measured"], -made["seconds"]


def write(path: str | os.PathLike[str], entries: Entries) -> None:
    """Joins the entries to those of the file at `path`, which is created if missing, with its folder.

    The file is replaced at once, under a lock. A file that is not one of measured tiles is renamed, with a warning.
    """
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with user_file.locked(target):
        before: Entries = {}
        try:
            before = read(target)
        except FileNotFoundError:
            pass
        except ValueError as why:
            said = f"{why} It was set aside as `{user_file.set_aside(target)}`."
            warnings.warn(said, stacklevel=stacklevel_of_user())
        whole = {"format": FORMAT, "entries": dict(sorted(joined(before, entries).items()))}
        user_file.replace(target, (json.dumps(whole, indent=1) + "\n").encode())
    forget()


def merge(into: str | os.PathLike[str], *others: str | os.PathLike[str]) -> int:
    """Joins the entries of the files `others` to the file `into`, and returns how many entries `into` has then.

    Raises OSError or ValueError, before anything is written, for a file that is not one of measured tiles.
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
    """The entries of the user's file; {} where it is missing, and {} with a warning where it cannot be read."""
    # cached by the arguments: another value of `reads` reads the file again
    if path is None:
        return {}
    try:
        return read(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as why:
        warnings.warn(f"Measured tiles are not used. {why}", stacklevel=stacklevel_of_user())
        return {}


@functools.cache
def shipped(device: str) -> Entries:
    """The entries of the package's tables that were measured on a device of this kind."""
    folder = importlib.resources.files("flexjax.plan") / "tuned"
    tables = [_checked(_parsed(f.read_bytes())) for f in folder.iterdir() if f.name.endswith(".json")]
    return {key: entry for key, entry in functools.reduce(joined, tables, {}).items() if entry["device"] == device}


class Found(typing.NamedTuple):
    """The measured tiles of a plan."""

    tiles: dict[str, int]
    # where the tile of the pass was found: "user", "package", or "" for nowhere
    forward: str
    backward: str


def find(plan: KernelPlan, backend: str, device: str | None) -> Found:
    """Measured tiles for the passes of which the plan's options set none: of the user's file, then of the package."""
    if plan.options.interpret or device is None or device in WITHOUT_TILES:
        return Found({}, "", "")
    return _find(plan, backend, device, *state())


def state() -> tuple[pathlib.Path | None, int]:
    """A value for the key of a cache: while it stays the same, a lookup finds the same tiles."""
    return cache_file(), _reads


@functools.lru_cache(maxsize=4096)
def _find(plan: KernelPlan, backend: str, device: str, path: pathlib.Path | None, reads: int) -> Found:
    """`find` for a device of known kind; cached, and `path` and `reads` say when to look again."""
    places = (("user", _of_user(path, reads), versions()), ("package", shipped(device), None))
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
