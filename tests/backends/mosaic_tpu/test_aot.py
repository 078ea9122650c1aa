"""Every call of the table compiles for four chips, forward and backward; here a sample that fits a step of CI.

The whole product:  python -m tests.backends.mosaic_tpu.aot all
"""

import importlib.util
import sys

import jax
import pytest

from tests.backends.mosaic_tpu import aot
from tests.bound_case import BoundCase
from tests.cases import CASES
from tests.cases.edges import random_case
from tests.marks import some_slow

needs_compiler = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler (libtpu) is not installed: pip install 'jax[tpu]'",
    ),
]


PARTS = 6
"""Pieces of a minute or two, so that `--minutes` can stop between them."""


KNOWN_FAULTS = {("chosen_blocks-bfloat16", chip): "Found no uses of XposeSequence" for chip in ("v5e", "v5p")}
"""Internal errors of the compiler in libtpu 0.0.48: there the backward pass of 129 queries; that of 128 compiles."""


def meets_known_fault(line: str) -> bool:
    _, entry, chip, *_ = line.split()
    return KNOWN_FAULTS.get((entry, chip), line + "?") in line


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("chip", [pytest.param(chip, marks=needs_compiler) for chip in aot.TOPOLOGIES])
def test_sample_compiles(chip: str, part: int):
    entries = aot.sampled(chip)[part::PARTS]
    lines = list(aot.sweep(chip, entries))
    print("\n".join(lines))
    failed = [line for line in lines if line.startswith("FAIL") and not meets_known_fault(line)]
    assert not failed, "\n".join(failed)
    refused = {line.split()[1] for line in lines if line.startswith("refused")}
    cases = {entry: aot.TABLE[entry][0] for entry in entries if entry in aot.TABLE}
    without_kernel = {entry for entry, case in cases.items() if 0 in case.shape}
    assert refused == without_kernel, "only what has an empty array is refused"
    assert len(lines) == len(entries)


def test_sample_has_every_case_on_two_chips():
    chosen = [entry for chip in aot.TOPOLOGIES for entry in aot.sampled(chip)]
    for name in CASES:
        for dtype in ("float32", "bfloat16"):
            assert chosen.count(f"{name}-{dtype}") == 2, name
    assert set(chosen) <= set(aot.entries())
    for entry in ("million_window", "million_documents"):
        assert chosen.count(entry) == len(aot.TOPOLOGIES)


@pytest.mark.parametrize("seed", some_slow(range(0, aot.RANDOM, 3), range(0, aot.RANDOM, 9)))
def test_random_calls_are_calls(seed: int):
    case, dtype = random_case(seed)
    problem = BoundCase(case, dtype, "reference")
    jax.eval_shape(jax.grad(problem.loss, argnums=(0, 1), has_aux=True), *problem.arrays())


def fake(chip: str, left):
    """A child that compiles names, ends on `crash` as a compiler does that aborts, and hangs on `hang`."""
    program = (
        "import os, sys, time\n"
        "for name in sys.argv[1:]:\n"
        "    print('begin', name, flush=True)\n"
        "    if name == 'crash': sys.stderr.write('check failed'); sys.stderr.flush(); os.abort()\n"
        "    if name == 'hang': time.sleep(600)\n"
        "    print('ok', name, flush=True)\n"
    )
    return [sys.executable, "-c", program, *left]


def test_a_crash_or_a_hang_is_one_failure():
    lines = list(aot.sweep("v5e", ["a", "crash", "b", "hang", "c"], fake, seconds=2))
    assert [line.split()[:2] for line in lines] == [
        ["ok", "a"], ["FAIL", "crash"], ["ok", "b"], ["FAIL", "hang"], ["ok", "c"],
    ]  # fmt: skip
    assert "check failed" in lines[1]
