"""The table of cases with the batch, the heads and the sequence split over eight devices, against one device.

The rows, and how they are split, are in split_cases.py, which runs in a child process. Asserted are values, gradients of inputs, sinks
and captured arrays, where they lie, and the collectives of the compiled program:

    batch, heads   only sums of the gradients of what devices share, once for each set of axes, over exactly the axes that split the
                   work and not the array
    sequence       also the collectives of the method
    all            none in a loop, but those of the ring
"""

import itertools
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
import pytest

from tests.context.test_context import KINDS, environment
from tests.parallel.split_cases import NAMES, Row, arrays_of, row_of

SECONDS = 300
"""Within which a row has to be compiled and run."""


class Child:
    """A process with eight devices that answers one row at a time, so that rows share its start and what one device computes.

    errors   a file for what it says of its failure
    """

    def __init__(self, errors: TextIO) -> None:
        self.errors = errors
        command = [sys.executable, "-m", "tests.parallel.split_cases"]
        self.process = subprocess.Popen(
            command, env=environment(8), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def ask(self, name: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        line = self.process.stdout.readline() if ready else ""
        self.errors.seek(0)
        assert line, f"no answer within {SECONDS} seconds: {self.errors.read()[-3000:]}"
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with tempfile.TemporaryFile("w+") as errors:
        found = Child(errors)
        yield found
        found.end()


def groups_of(row: Row, axes: tuple[str, ...]) -> list[list[int]]:
    """The numbers of the devices that a sum over these axes of the mesh adds up."""
    names, sizes = row.axes
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    last = [names.index(name) for name in axes]
    apart = [n for n in range(len(names)) if n not in last]
    rows = numbers.transpose(*apart, *last).reshape(-1, np.prod([sizes[n] for n in last], dtype=int))
    return sorted(sorted(map(int, group)) for group in rows)


def sums_of(row: Row) -> list[list[list[int]]]:
    """The groups of devices whose gradients are added up: over the axes that split the work and not the array, for each array."""
    work = [name for name, count in row.parts.items() if count > 1]
    shared = [[n for n in work if n not in row.spec_of(name, x)] for name, x in arrays_of(row)[0].items()]
    return [groups_of(row, axes) for axes in dict.fromkeys(map(tuple, shared)) if axes]


def refusal_of(row: Row) -> str | None:
    """The sentence that refuses a row, if one does."""
    queries, keys = row.case.shape[3:5]
    if row.method is None:
        return None
    for name, length in (("q_len", queries), ("kv_len", keys)):
        if length == 0:
            return f"ValueError: `{name}` is 0; expected a positive int. Pass a static int."
    return None


def assert_right(row: Row, outcome: dict[str, Any]) -> None:
    """`outcome`: what the child says of the row."""
    narrow = {f"d:{name}" for name, capture in row.case.captures if capture.dtype == "bfloat16"}
    bound = lambda name: 2.0**-7 if name in narrow else 1e-5 * row.case.loosen
    assert {name: off for name, off in outcome["each"].items() if off > bound(name)} == {}
    assert outcome["lies"] == [], "results that lie otherwise than their arrays"
    found = outcome["collectives"]
    checks_rounds = row.method is not None and (row.case.traced or any(row.case.lengths))
    kinds = set() if row.method is None else KINDS["auto" if checks_rounds else row.method]
    assert {kind for kind, *_ in found} <= kinds | {"all-reduce"}
    if row.method != "ring" and not checks_rounds:
        assert [one for one in found if one[3]] == [], "collectives in a loop"
    sums, expected = [groups for kind, groups, *_ in found if kind == "all-reduce"], sums_of(row)
    if not checks_rounds:  # whose devices also ask each other whether the rounds lack a block
        assert [groups for groups in sums if groups not in expected] == [], "a sum over other axes"
        assert [groups for groups, same in itertools.groupby(sorted(sums)) if len([*same]) > 1] == [], "summed twice"


# test_sharding.py and test_explicit_axes.py split such calls over two devices by default
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_split_call_is_that_of_one_device(name: str, child: Child) -> None:
    row = row_of(name)
    outcome, refusal = child.ask(name), refusal_of(row)
    assert outcome.get("refused") == refusal
    if refusal is None:
        assert_right(row, outcome)
