"""The forward kernel on mma.sync in the simulator, against dense numpy: every feature on a small problem, both ways of copying."""

import typing

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu.forward import mma as forward_mma
from flexjax.backends.mosaic_gpu.forward import mma_tiles as forward_mma_tiles
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
from flexjax.plan.kernel_plan import Results
from tests.cases.hopper_forward import FORWARD
from tests.cases.on_hopper import ForwardProblem, assert_results_close, forward_problem, run_forward
from tests.marks import some_slow


def run(made: ForwardProblem, card: str = "8.0", **fields: typing.Any) -> Results:
    """The results of a problem with the tile of a card, or the first whose fields are these."""
    found = forward_mma_tiles.forward_candidates(made.plan, CARDS[card])
    tile = next(t for t in found if all(getattr(t, name) == value for name, value in fields.items()))
    return run_forward(forward_mma.forward, made.plan, made.operands, tile)


QUICK = ("documents", "odd lengths and dims")
TAKEN = tuple(name for name in FORWARD if not name.startswith("columns of two CTAs"))
"""Problems with head dims up to 256."""


@pytest.mark.parametrize("name", some_slow(TAKEN, QUICK))
def test_matches_dense(name: str) -> None:
    made = forward_problem(**FORWARD[name])
    assert_results_close(made, run(made))


BOTH_WAYS = [
    ("12.0", "documents", {}),
    ("12.0", "odd lengths and dims", {"groups": 2}),
    ("8.0", "causal, two batches, grouped heads", {"groups": 2, "stages": 2}),
    ("8.0", "blocks of 256, odd", {"stages": 3, "block_kv": 32}),
    ("8.9", "wide head", {}),
    ("9.0", "dead rows", {"rows": 64, "groups": 1}),
]


@pytest.mark.parametrize(
    ("card", "name", "fields"),
    some_slow([(c, n, tuple(f.items())) for c, n, f in BOTH_WAYS], [("12.0", "documents", ())]),
)
def test_both_ways_of_copying(card: str, name: str, fields: tuple, races: list) -> None:
    """TMA and cp.async, one and two warpgroups, rings of several lengths; conftest.py looks for races."""
    made = forward_problem(**FORWARD[name])
    assert_results_close(made, run(made, card, **dict(fields)))
    assert len(races) == 1
