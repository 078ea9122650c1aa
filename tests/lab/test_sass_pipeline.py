"""The simulator of the kernels on tcgen05, on a few lines of SASS whose clocks are known."""

import pytest

from lab import sass_pipeline
from lab.sass_clocks import UNITS
from lab.tcgen05_counts import Issue
from tests.lab.test_sass_clocks import body

WAIT = "-:-:-:Y:01 SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [R4+URZ], R5"
ARRIVE = "-:-:-:Y:01 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R51+URZ], RZ"
SOFTMAX = ["-:-:-:Y:01 MUFU.EX2 R1, R2"] * 8
HOP, CROSSING = sass_pipeline.HOP, sass_pipeline.CROSSING


def step(issue: Issue, *rows: str) -> float:
    return sass_pipeline.simulate(body(*rows), UNITS["B200"], issue).step


def test_long_products_are_the_bound():
    """Both query tiles' products, one after another: the softmax of one hides behind those of the other."""
    assert step(Issue(256), WAIT, *SOFTMAX, ARRIVE) == pytest.approx(4 * 1024, rel=0.01)
    assert step(Issue(256, pairs=True), WAIT, *SOFTMAX, ARRIVE) == pytest.approx(4 * 1024, rel=0.01)


def test_a_long_softmax_shows_the_chain_of_a_tile():
    """P V, S, a hop to the warp, its softmax and a hop back; hops of a pair take longer."""
    softmax = ["-:-:-:Y:04 FADD R1, R1, R2"] * 500
    chain = 2 * 64 + 2 * HOP + 2000
    assert step(Issue(16), WAIT, *softmax, ARRIVE) == pytest.approx(chain, rel=0.01)
    assert step(Issue(16, pairs=True), WAIT, *softmax, ARRIVE) == pytest.approx(chain + 2 * CROSSING, rel=0.01)


def test_shared_memory_bounds_dk_and_dv_where_one_cta_multiplies_alone():
    rows = (WAIT, *SOFTMAX, ARRIVE, WAIT, *SOFTMAX, ARRIVE)
    assert step(Issue(256, "dkv"), *rows) == pytest.approx(
        5120, rel=0.01
    )  # S and dP: 384 clocks each instead of 256 at d64
    assert step(Issue(256, "dkv", pairs=True), *rows) == pytest.approx(4608, rel=0.01)
    assert step(Issue(256, "dq", tmem=True), *rows[:3], WAIT, *SOFTMAX, ARRIVE) == pytest.approx(3072, rel=0.05)
