"""Whatever stands in place of the user's file, a lookup goes on without it and harms nothing, and a writer says what is in its way."""

import json
import os
import pathlib
import socket
import sys
import typing
from collections.abc import Callable

import jax
import pytest

import flexjax
from flexjax.passes import dispatch
from flexjax.plan import tuned, user_file
from tests.plan.test_tuned import HERE, TILE, cache, made, plan, qkv

__all__ = ["cache"]  # a fixture
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other kinds of files")

ENTRY = {"a": {"forward": made(TILE)}}


def text(**changes: typing.Any) -> Callable[[pathlib.Path], object]:
    """A file whose one measurement has other fields."""
    return contents(json.dumps({"format": 1, "entries": {"a": {"forward": made(TILE) | changes}}}))


def contents(what: str | bytes) -> Callable[[pathlib.Path], object]:
    return lambda path: path.write_bytes(what if isinstance(what, bytes) else what.encode())


def bound(path: pathlib.Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def huge(path: pathlib.Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # without a block on the disk


# fmt: off
SPECIAL: dict[str, Callable[[pathlib.Path], object]] = {
    "FIFO": os.mkfifo, "socket": bound, "directory": pathlib.Path.mkdir,
    "device without end": lambda p: p.symlink_to("/dev/zero"), "link to itself": lambda p: p.symlink_to(p),
}
WRONG: dict[str, Callable[[pathlib.Path], object]] = {
    "huge": huge, "deep": contents("[" * 200_000), "deep in an entry": text(note=json.loads("[" * 900 + "]" * 900)),
    "no UTF-8": contents(b'{"format": 1, "entries": {"\xff": {}}}'), "empty": contents(""), "null": contents("null"),
    "many digits": contents('{"format": ' + "1" * 5000 + "}"), "a bool as format": contents('{"format": true, "entries": {}}'),
    "NaN": text(seconds=float("nan")), "infinity": text(seconds=float("inf")), "a tile of lists": text(tile={"block_q": [1]}),
    "a list as tile": text(tile=[]), "a huge tile": text(tile={"block_q": 1 << 40}), "finished by text": text(finished="yes"),
    "a measurement that is a list": contents('{"format": 1, "entries": {"a": {"forward": []}}}'),
    "an entry that is a list": contents('{"format": 1, "entries": {"a": ["forward"]}}'),
}
# fmt: on


@pytest.mark.parametrize("kind", [*SPECIAL, *WRONG])
def test_what_is_no_file_of_tiles(cache: pathlib.Path, kind: str) -> None:
    {**SPECIAL, **WRONG}[kind](cache)
    kept = lambda found: (found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns)  # reading may move st_atime
    before = os.lstat(cache)
    with pytest.warns(UserWarning, match=r"^Measured tiles are not used\. .*tuned\.json") as warned:
        assert dispatch.with_measured_tiles(plan(), "xla", HERE) == plan()
    assert [w.filename for w in warned] == [__file__]  # the user's line
    assert kept(os.lstat(cache)) == kept(before)
    if kind in SPECIAL:  # a writer leaves it where it is
        with pytest.raises(OSError, match=r"tuned\.json"):
            tuned.write(cache, ENTRY)
        assert os.lstat(cache).st_ino == before.st_ino
    else:
        with pytest.warns(UserWarning, match=r"It was set aside as") as warned:
            tuned.write(cache, ENTRY)
        assert [w.filename for w in warned] == [__file__]
        assert os.lstat(f"{cache}.0").st_ino == before.st_ino
        assert tuned.read(cache) == ENTRY


def test_places_that_do_not_exist(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.with_measured_tiles(plan(), "xla", HERE) == plan()  # no file, no warning
    monkeypatch.setenv("FLEXJAX_CACHE_DIR", str(cache.parent / ("a" * 300)))
    with pytest.warns(UserWarning, match=r"^Measured tiles are not used\. .*File name too long"):
        assert dispatch.with_measured_tiles(plan(), "xla", HERE) == plan()
    for name in ("FLEXJAX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where a user has no home
    assert tuned.cache_file() is None
    assert dispatch.with_measured_tiles(plan(), "xla", HERE) == plan()
    sentence = r"^autotune keeps no tiles: this user has no home directory\. Pass `options` of its result"
    with pytest.warns(UserWarning, match=sentence) as warned:
        assert flexjax.autotune(*qkv(), seconds=0.01, backward=False).kept is None
    assert [w.filename for w in warned] == [__file__]


@pytest.mark.parametrize("kind", ["link", "FIFO", "directory"])
def test_the_lock_follows_nothing_and_truncates_nothing(cache: pathlib.Path, kind: str) -> None:
    lock, other = cache.with_name(".tuned.json.lock"), cache.with_name("mine")
    other.write_text("mine")
    {"link": lambda: lock.symlink_to(other), "FIFO": lambda: os.mkfifo(lock), "directory": lock.mkdir}[kind]()
    with pytest.raises(OSError, match=r"\.tuned\.json\.lock"):
        tuned.write(cache, ENTRY)
    assert other.read_text() == "mine"
    assert not cache.exists()


def test_a_lock_that_is_held_is_not_waited_for_without_end(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = cache.with_name(".tuned.json.lock")
    lock.write_text("mine")
    monkeypatch.setattr(user_file, "PATIENCE", 0.05)
    with user_file.locked(cache), pytest.raises(TimeoutError, match=r"has held `.*\.tuned\.json\.lock` for"):
        tuned.write(cache, ENTRY)
    tuned.write(cache, ENTRY)
    assert lock.read_text() == "mine"


def test_a_cpu_looks_for_no_file(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("FLEXJAX_CACHE_DIR", str(cache.parent))
    os.mkfifo(cache)

    def touched(*_: object) -> typing.NoReturn:
        raise AssertionError("a call looks for the file")

    for name in ("stat", "open", "lstat"):
        monkeypatch.setattr(user_file.os, name, touched)
    assert dispatch.with_measured_tiles(plan(tokens=33), "xla", HERE) == plan(tokens=33)
    monkeypatch.undo()
    monkeypatch.setenv("FLEXJAX_CACHE_DIR", str(cache.parent))
    assert jax.block_until_ready(flexjax.flex_attention(*qkv(31))).shape == (1, 31, 2, 8)
    assert flexjax.autotune(*qkv(31), seconds=0.01, backward=False).kept is None
