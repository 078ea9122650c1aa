"""Compiling many calls in child processes: a compiler that ends its process, or never ends, costs one call and not the others.

A child prints `begin NAME`, what it likes, and a line that begins with ok, refused or FAIL, for one of its arguments after the other.
"""

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

KINDS = ("ok", "refused", "FAIL")


def sweep(
    names: Sequence[str],
    command: Callable[[Sequence[str]], list[str]],
    environment: Mapping[str, str],
    seconds: float = 600,
    label: str = "",
) -> Iterator[tuple[str, list[str]]]:
    """(outcome, what the child printed on the way) of each name, in order; `seconds` is the longest that one may take."""
    left = list(names)
    while left:
        with (
            tempfile.TemporaryFile("w+") as complaints,
            subprocess.Popen(
                command(left),
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                env={**os.environ, **environment},
            ) as process,
        ):
            assert process.stdout is not None
            watch = threading.Timer(seconds, process.kill)
            watch.start()
            said: list[str] = []
            for line in process.stdout:
                if line.startswith(KINDS):
                    left.pop(0)
                    yield line.rstrip("\n"), said
                elif line.startswith("begin"):
                    watch.cancel()
                    watch = threading.Timer(seconds, process.kill)
                    watch.start()
                    said = []
                else:
                    said.append(line.rstrip("\n"))
            code = process.wait()
            watch.cancel()
            if left:
                complaints.seek(0)
                last = " | ".join(line.strip() for line in complaints.readlines()[-8:])
                yield f"FAIL {left.pop(0)} {label} its process ended with {code}: {last}", said
