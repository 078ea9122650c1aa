"""Reads and replaces a small file of the user, whatever stands in its place.

The folder is the user's, so a FIFO, a device, a link, a file without end or one that another process holds may be
there. Nothing here waits for them, follows a link to write, or changes what is no regular file: that is an OSError.
"""

import contextlib
import os
import pathlib
import stat
import tempfile
import time
from collections.abc import Iterator

LARGEST = 8 << 20  # bytes of the largest file that is read: ten thousand entries of measured tiles
PATIENCE = 10.0  # seconds that a writer waits for the lock of another one, which holds it for milliseconds

_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class TooLarge(ValueError):
    """The file has more than LARGEST bytes."""


def read_bytes(path: pathlib.Path) -> bytes:
    """The contents of the regular file at `path`. Raises OSError for anything else, and TooLarge."""
    _check_regular(os.stat(path), path)  # before it is opened, because opening a device may do something
    with open(os.open(path, os.O_RDONLY | _NO_WAIT), "rb", buffering=0) as file:
        _check_regular(os.fstat(file.fileno()), path)
        parts, left = [], LARGEST + 1
        while left and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
    if not left:
        raise TooLarge(f"it has more than {LARGEST >> 20} MB")
    return b"".join(parts)


def _check_regular(found: os.stat_result, path: pathlib.Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"`{path}` is not a regular file")


def replace(path: pathlib.Path, contents: bytes) -> None:
    """Puts a file with `contents` at `path` at once, so that a reader sees the file before or after."""
    if len(contents) > LARGEST:
        raise OSError(f"`{path}` would have more than {LARGEST >> 20} MB")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Renames the file at `path` to the first of PATH.0, PATH.1, ... that is free, and returns that."""
    aside = next(p for n in range(1 << 20) if not os.path.lexists(p := path.with_name(f"{path.name}.{n}")))
    os.replace(path, aside)
    return aside


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """A context that holds an exclusive lock on `.NAME.lock` beside `path`; OSError after PATIENCE seconds."""
    try:
        import fcntl
    # nothing is locked then, and the last of two writers wins
    except ImportError:
        yield
        return
    lock = path.with_name(f".{path.name}.lock")
    handle = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | _NO_WAIT, 0o644)
    try:
        _check_regular(os.fstat(handle), lock)
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TimeoutError(f"another process has held `{lock}` for {PATIENCE:.0f} s") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)  # which unlocks it
