"""Training steps over fsdp and tensor axes have no collective but sums of the gradients that devices share; read from compiled programs.

The steps are those of shared_sums.py, which runs in a child process with eight devices.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.context.test_context import environment
from tests.parallel.shared_sums import AROUND, CALLS, KINDS

OVER_FSDP, OVER_TENSOR = [[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]
SUMS = {
    "learned": [OVER_FSDP, OVER_TENSOR],
    "learned, computed in the score": [OVER_FSDP],
    "ids and learned": [OVER_FSDP, OVER_TENSOR],
    "segments": [OVER_FSDP],
}
"""By call: over which devices the gradients of what it captures are summed; none for the others."""
# each has what "ids" has, beside more
BY_DEFAULT = ("ids, computed in the mask|once", "block mask|once", "ids and learned|scan", "segments|remat")
NAMES = [f"{call}|{around}" for call in CALLS for around in AROUND]


def ask(*names: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.parallel.shared_sums", *names]
    done = subprocess.run(command, env=environment(8), capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


def assert_right(name: str, outcome: dict[str, Any]) -> None:
    for kind in KINDS:
        assert outcome[kind]["forward"] == [], kind
        found = sorted(groups for _, groups in outcome[kind]["gradients"])
        assert {what for what, _ in outcome[kind]["gradients"]} <= {"all-reduce"}, kind
        assert found == sorted(SUMS.get(name.split("|")[0], [])), kind
    assert outcome["apart"] < 1e-5


def test_steps_that_are_tried_by_default() -> None:
    """In one process, so that its start is paid once."""
    outcomes = ask(*BY_DEFAULT)
    assert list(outcomes) == list(BY_DEFAULT)
    for name, outcome in outcomes.items():
        assert_right(name, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_every_step(call: str) -> None:
    names = [name for name in NAMES if name.startswith(f"{call}|")]
    outcomes = ask(*names)
    assert list(outcomes) == names
    for name, outcome in outcomes.items():
        assert_right(name, outcome)
