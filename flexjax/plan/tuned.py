"""Tiles that were measured: the user's file, the tables that come with the package, and the lookup in both.

A file is JSON: {"format": 1, "entries": {digest: entry}}. A digest stands for the device kind, the backend, the plan without
its tiles, and the versions of jax and flexjax; in the tables of the package, without the versions. An entry has

    device, backend, jax, flexjax, plan   what it is for, as text
    forward, backward                     for each pass that was measured: "tile", a dict of KernelOptions; "seconds", the
                                          median; "measured", the time in UTC; "finished", whether every candidate was tried

and in the tables of the package also "name" and "source". Two entries of one digest are joined pass by pass: a finished search
wins over one that was cut off, then the newer measurement, then the faster.

The user's file is `tuned.json` in FLEXJAX_CACHE_DIR, by default in `flexjax` of the user's cache directory; an empty
FLEXJAX_CACHE_DIR means none. It is read once a process. Tiles are a matter of speed: a file that cannot be read is left
alone, with a warning.
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
"""The options that are the tile of each pass."""

Entries = dict[str, dict[str, typing.Any]]


# ------------------------------------------------------------------- names of problems


def plan_text(plan: KernelPlan) -> str:
    """Everything of a plan but its tiles; the same in every process."""
    options = plan.options
    fields = [f.name for f in dataclasses.fields(plan) if f.name != "options"]
    lines = [f"{name}: {getattr(plan, name)}" for name in fields]
    lines.append(f"deterministic: {options.deterministic}, interpret: {options.interpret}")
    return re.sub(r"0x[0-9a-f]+", "0x", "\n".join(lines))


def summary(plan: KernelPlan) -> str:
    """A plan in a line, for people."""
    parts = [
        f"B={plan.batch} N={plan.q_heads} M={plan.kv_heads} T={plan.q_len} S={plan.kv_len} D={plan.head_dim}",
        f"E={plan.value_dim} {plan.dtype} {plan.layout}",
        "" if plan.score is None else "score_mod",
        "" if plan.mask is None else "mask_mod",
        "" if plan.blocks is None else f"blocks of {plan.blocks.block_q} x {plan.blocks.block_kv}",
        "" if plan.dropout is None else "dropout",
        "" if plan.options.deterministic else "any order",
    ]
    return " ".join(p for p in parts if p)


def versions() -> tuple[str, str]:
    """Of jax and of this package, whose door has the number (and is above this room, hence not imported)."""
    return jax.__version__, sys.modules[__name__.partition(".")[0]].__version__


def digest(plan: KernelPlan, backend: str, device: str, of: tuple[str, str] | None) -> str:
    """Name of a problem in a file. `of`: versions of jax and flexjax, None in the tables of the package."""
    text = "\n".join((device, backend, *(of or ()), plan_text(plan)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# ------------------------------------------------------------------- files


def cache_file() -> pathlib.Path | None:
    """The user's file, there or not; None where FLEXJAX_CACHE_DIR is empty."""
    chosen = os.environ.get("FLEXJAX_CACHE_DIR")
    if chosen is not None:
        return pathlib.Path(chosen) / "tuned.json" if chosen else None
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path("~/.cache").expanduser()
    return pathlib.Path(home) / "flexjax" / "tuned.json"


def read(path: str | os.PathLike[str]) -> Entries:
    """The entries of a file. Raises OSError, or ValueError in a sentence for what is no such file."""
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    try:
        return _checked(json.loads(text))
    except (json.JSONDecodeError, _Wrong) as why:
        raise ValueError(f"`{path}` is no file of measured tiles: {why}. Move it away or delete it.") from None


class _Wrong(Exception):
    """What is wrong with the contents of a file."""


def _checked(found: typing.Any) -> Entries:
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
    tile = made.get("tile") if isinstance(made, dict) else None
    if not isinstance(tile, dict) or not set(tile) <= set(PASSES[name]):
        raise _Wrong(f"the {name} tile of entry {key} is {tile!r}, not options among {', '.join(PASSES[name])}")
    for option, value in tile.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _Wrong(f"{option} of entry {key} is {value!r}, not a positive int")
    if not isinstance(made.get("seconds"), int | float) or not isinstance(made.get("measured"), str):
        raise _Wrong(f"the {name} tile of entry {key} lacks seconds or the time when it was measured")


def joined(first: Entries, second: Entries) -> Entries:
    """The entries of both; see the top of this file for those that both have."""
    out = {key: dict(entry) for key, entry in first.items()}
    for key, entry in second.items():
        mine = out.setdefault(key, {})
        for name, value in entry.items():
            if name not in PASSES or name not in mine or _rank(value) > _rank(mine[name]):
                mine[name] = value
    return out


def _rank(made: dict[str, typing.Any]) -> tuple[bool, str, float]:
    return bool(made.get("finished", True)), made["measured"], -made["seconds"]


def write(path: str | os.PathLike[str], entries: Entries) -> None:
    """Joins the entries to those of the file, which is made where it is not there, and forgets what was read before.

    Several processes may write at once: they take turns, and a reader sees the file before or after a change. A file that
    cannot be read is set aside under another name, with a warning.
    """
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _turn(target):
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
def _turn(target: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a file. Where the system has no such locks, the last of two writers wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def merge(into: str | os.PathLike[str], *others: str | os.PathLike[str]) -> int:
    """Joins the entries of other files to a file and returns how many it has then.

    For a problem that several have, each pass is taken from the search that was finished, then the newer, then the faster.
    Raises ValueError, before anything is written, where one of them is no such file.
    """
    found = [read(path) for path in others]
    if pathlib.Path(into).exists():
        read(into)
    write(into, functools.reduce(joined, found, {}))
    return len(read(into))


# ------------------------------------------------------------------- the lookup

_reads = 0


def forget() -> None:
    """Reads the user's file again at the next lookup."""
    global _reads
    _reads += 1


@functools.lru_cache(maxsize=4)
def _of_user(path: pathlib.Path | None, reads: int) -> Entries:
    if path is None or not path.exists():
        return {}
    try:
        return read(path)
    except (OSError, ValueError) as why:
        warnings.warn(f"Measured tiles are not used. {why}", stacklevel=2)
        return {}


@functools.cache
def shipped(device: str) -> Entries:
    """The entries of the package's tables for a device."""
    folder = importlib.resources.files("flexjax.plan") / "tuned"
    tables = [_checked(json.loads(f.read_text("utf-8"))) for f in folder.iterdir() if f.name.endswith(".json")]
    return {key: entry for key, entry in functools.reduce(joined, tables, {}).items() if entry["device"] == device}


class Found(typing.NamedTuple):
    """Options for the tile of each pass that was measured, and where each was found: "user", "package" or ""."""

    tiles: dict[str, int]
    forward: str
    backward: str


def find(plan: KernelPlan, backend: str, device: str | None) -> Found:
    """Measured tiles for the passes whose tile the options of the plan leave open; looked up once a plan.

    device      its kind; None where that is not known

    First the user's file, then the tables of the package. Nothing for a kernel in the simulator.
    """
    if plan.options.interpret or device is None:
        return Found({}, "", "")
    return _find(plan, backend, device, *state())


def state() -> tuple[pathlib.Path | None, int]:
    """Changes where a lookup may find something else: the user's file, and how often it was written."""
    return cache_file(), _reads


@functools.lru_cache(maxsize=4096)
def _find(plan: KernelPlan, backend: str, device: str, path: pathlib.Path | None, reads: int) -> Found:
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
