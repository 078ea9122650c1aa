"""The forward kernel on tcgen05 in the simulator, against dense numpy: every feature on a small problem, one and two query tiles."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu.forward import tcgen05 as forward_tcgen05
from flexjax.backends.mosaic_gpu.forward import tcgen05_tiles as forward_tcgen05_tiles
from flexjax.plan.kernel_plan import Results
from tests.cases.hopper_forward import FORWARD
from tests.cases.on_hopper import ForwardProblem, assert_results_close, forward_problem, run_forward
from tests.marks import some_slow


def run(made: ForwardProblem, **fields: typing.Any) -> Results:
    """The results of a problem with the first tile whose fields are these."""
    found = forward_tcgen05_tiles.forward_candidates(made.plan)
    programs = fields.pop("programs", 1)
    tile = next(t for t in found if all(getattr(t, name) == value for name, value in fields.items()))
    tile = dataclasses.replace(tile, programs=programs)
    return run_forward(forward_tcgen05.forward, made.plan, made.operands, tile)


QUICK = ("documents", "odd lengths and dims")
FITTING = tuple(
    name
    for name, row in FORWARD.items()
    if not name.startswith("columns of two CTAs") and min(row.get("block") or (128,)) >= 128
)


@pytest.mark.parametrize("name", some_slow(FITTING, QUICK))
def test_matches_dense(name: str) -> None:
    made = forward_problem(**FORWARD[name])
    assert_results_close(made, run(made))


PAIRS = [
    ("causal, two batches, grouped heads", {"block_kv": 64}),
    ("slope", {"stages": 1}),
    ("steep slope, odd", {}),
    ("dead rows", {"stages": 2, "block_kv": 64}),
    ("BNTH, float16, sinks, largest scores", {}),
    ("bounded, dropout, odd", {"stages": 1}),
]


@pytest.mark.parametrize(
    ("name", "fields"),
    some_slow([(n, tuple(f.items())) for n, f in PAIRS], [("dead rows", tuple(PAIRS[3][1].items()))]),
)
def test_two_query_tiles(name: str, fields: tuple, races: list) -> None:
    """Mask blocks of 256 queries, rings of several lengths; conftest.py looks for races."""
    row = FORWARD[name]
    made = forward_problem(**(row | ({"block": (256, 128)} if "mask" in row else {})))
    assert_results_close(made, run(made, groups=2, **dict(fields)))
    assert len(races) == 1


def test_rare_rescaling_of_single_warps() -> None:
    """Scores that grow with the keys for some rows: `out` is rescaled in later steps."""
    made = forward_problem(
        score=lambda s, b, h, q, k: s + jnp.where(q % 64 < 16, 0.5, 0.0) * k, q_len=256, kv_len=384, block=None
    )
    assert_results_close(made, run(made))


@pytest.mark.parametrize("programs", some_slow((1, 2, 3), (2,)))
def test_a_cta_computes_several_work_items(programs: int, races: list) -> None:
    """A persistent grid, whose rings and barriers go on from item to item."""
    made = forward_problem(heads=3, kv_heads=3, q_len=400, kv_len=260, batch=2, dim=16, dtype="bfloat16")
    assert_results_close(made, run(made, persistent=True, programs=programs))
    assert len(races) == 1
