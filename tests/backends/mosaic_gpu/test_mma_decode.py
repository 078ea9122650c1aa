"""The decode kernel on mma.sync: which calls it runs, its results in the simulator, and bits that depend on nothing else."""

import dataclasses
import functools
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu.decode import mma as decode_mma
from flexjax.backends.mosaic_gpu.decode import mma_tiles as decode_mma_tiles
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results
from tests.backends.mosaic_gpu import test_pages
from tests.backends.mosaic_gpu.test_decode import (
    SIMULATED,
    SLOW,
    assert_bits_of_a_request,
    assert_ragged_close,
    problem,
    ragged,
)
from tests.backends.mosaic_gpu.test_pages import QUANTISED, check_quantised
from tests.cases.on_hopper import assert_results_close, run_forward
from tests.marks import some_slow


def run(
    plan: KernelPlan, operands: Operands, card: str = "8.0", programs: int = 3, chunk: int = 128, **fields: typing.Any
) -> Results:
    """The results of a plan with the tile of a card, on so many CTAs and in chunks of so many keys."""
    assert decode_mma_tiles.mma_decode_refuses(plan, CARDS[card]) is None
    tile = decode_mma_tiles.mma_decode_tile(plan, CARDS[card])
    tile = dataclasses.replace(tile, programs=programs, chunk=chunk, **fields)
    return run_forward(decode_mma.forward, plan, operands, tile)


MATCHED = list(itertools.product([*SIMULATED, *SLOW], ["8.0", "8.9", "12.0"]))


@pytest.mark.parametrize(("name", "card"), some_slow(MATCHED, [("relative table", "8.0")]))
def test_matches_dense(name: str, card: str, races: list) -> None:
    made = problem({**SIMULATED, **SLOW}[name])
    assert_results_close(made, run(made.plan, made.operands, card))
    assert len(races) == 1


@pytest.mark.slow
@pytest.mark.parametrize("card", ["8.0", "8.9", "12.0"])
def test_bits_depend_on_the_request_alone(card: str) -> None:
    """A batch entry alone, and among others, in a longer buffer, in pages."""
    assert_bits_of_a_request(functools.partial(run, card=card))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(
    ("card", "page"), [*(("8.0", n) for n in (0, 8, 24, 80)), *(("12.0", n) for n in (0, 48, 120))]
)
def test_lengths_and_pages_match_dense(card: str, page: int, stages: int) -> None:
    plan, operands = ragged([2, 1, 0], 240, page)
    assert_ragged_close(run(plan, operands, card, stages=stages), plan, [2, 1, 0])


@pytest.mark.slow
@pytest.mark.parametrize("row", QUANTISED)
@pytest.mark.parametrize("card", ["8.0", "12.0"])
def test_quantised_caches(card: str, row: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes straight from registers, or widened in shared memory, with NaN scales of free pages."""
    monkeypatch.setattr(test_pages, "INSTRUCTION", "mma")
    monkeypatch.setitem(CARDS, "9.0", dataclasses.replace(CARDS[card], capability="9.0"))
    check_quantised(*row, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", [8, 48])
def test_bits_of_a_quantised_request(page: int) -> None:
    """A batch entry alone, and among others in a longer buffer."""
    fields: dict[str, typing.Any] = dict(page=page, stored="int8", dim=128)
    found = [
        np.asarray(run(*ragged(*given, **fields)).out.astype(jnp.float32))[-1]
        for given in (([2], 240), ([0, 1, 2], 480))
    ]
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()
    assert (found[0][0] != 0).any()
