"""The backward kernel on tcgen05 in the simulator, against dense jax.vjp in float32: every feature on a small problem."""

import dataclasses
import typing

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu.backward import tcgen05_tiles as backward_tcgen05_tiles
from flexjax.backends.mosaic_gpu.families import mma_backward
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
from flexjax.plan.kernel_plan import BackwardInputs, Gradients
from flexjax.types import KernelOptions
from tests.backends.mosaic_gpu import simulated_pairs
from tests.cases.hopper_backward import BACKWARD, CAPTURED, PAIR_BIAS
from tests.cases.on_hopper import BackwardProblem, assert_gradients_close, backward_problem, causal, with_extra
from tests.marks import some_slow


def gradients(made: BackwardProblem, pairs: bool = False) -> Gradients:
    options = dataclasses.replace(made.plan.options, instruction="tcgen05", cta_pairs=pairs)
    plan = dataclasses.replace(made.plan, options=options)
    tiles = backward_tcgen05_tiles.backward_tiles(plan)
    assert tiles is not None
    assert tiles.pairs == pairs
    kernels = lambda plan, given: mma_backward.backward(plan, given, CARDS["10.0"], tiles)
    call = jax.jit(lambda *arrays: with_extra(kernels, plan, BackwardInputs(*arrays, *made.given[4:])))
    return call(*made.given[:4])


def runs(case: dict[str, typing.Any]) -> bool:
    """Whether the kernel takes the dims and mask blocks of a case."""
    blocks = case.get("block") or (128, 128)
    dims = case.get("dim", 32) + case.get("extra", 0), case.get("value_dim") or 1
    options = case.get("options") or KernelOptions()
    taken = max(dims) <= 128 and all(n % 128 == 0 for n in blocks) and case.get("dtype") != "float32"
    return taken and {options.block_q_bwd, options.block_kv_bwd} <= {None, 128}


ROWS = {**BACKWARD, **CAPTURED, **{n: case for n, (case, *_) in PAIR_BIAS.items()}}
CASES = {
    "grouped heads of odd sizes": {
        "mask": causal, "q_len": 70, "kv_len": 300, "heads": 4, "kv_heads": 2, "dim": 24, "value_dim": 40, "sinks": True, "d_lse": True,
    },
    "head without visits": {
        "mask": lambda b, h, q, k: (q >= k) & (h != 1), "mask_heads": 3, "q_len": 128, "kv_len": 128, "heads": 3, "kv_heads": 1, "dim": 16,
    },
    "rings go round": {"q_len": 520, "kv_len": 640, "heads": 1, "dim": 16},
    **{name: case for name, case in ROWS.items() if runs(case)},
}  # fmt: skip
QUICK = "grouped heads of odd sizes"


@pytest.mark.parametrize("name", some_slow(tuple(CASES), (QUICK,)))
def test_matches_dense(name: str) -> None:
    case = CASES[name]
    made = backward_problem(**case)
    # Gradients of captures are those of the kernel on mma.sync: sums of numbers of both signs, in which what the rounding of the forward
    # pass's output leaves in delta does not cancel.
    assert_gradients_close(gradients(made), made.expected, tolerance=5e-2 if "captured" in case else 8e-3)


PAIRED = {
    "an odd number of key tiles, grouped heads": {
        "mask": causal, "block": (128, 256), "q_len": 300, "kv_len": 330, "heads": 2, "kv_heads": 1, "dim": 128, "sinks": True,
    },
    "rings go round": {"q_len": 520, "kv_len": 512, "heads": 1, "dim": 100, "value_dim": 128},
    "a number for each key": {
        "score": lambda c, s, b, h, q, k: s + c[0][h, k], "captured": (np.linspace(-1, 1, 660, dtype=np.float32).reshape(2, 330),),
        "q_len": 140, "kv_len": 330, "heads": 2, "dim": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(tuple(PAIRED), ()))
def test_pairs_of_ctas_own_neighbouring_key_tiles(name: str) -> None:
    """Which tokens the CTAs of a pair own, visit and write, in the simulator as it is: each CTA has products of its own."""
    made = backward_problem(**PAIRED[name])
    assert_gradients_close(gradients(made, pairs=True), made.expected, tolerance=8e-3)


@pytest.mark.parametrize("name", some_slow(tuple(PAIRED), ()))
def test_pairs_of_ctas_share_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The halves of operands and the barriers between CTAs, with the products of two CTAs that the simulator lacks added."""
    counts = simulated_pairs.simulated(monkeypatch)
    made = backward_problem(**PAIRED[name])
    assert_gradients_close(gradients(made, pairs=True), made.expected, tolerance=8e-3)
    assert counts["products"] > 0
    assert counts["copies"] > 0
