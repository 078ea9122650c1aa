"""The backward kernel on tcgen05 in the simulator, against dense jax.vjp in float32: every feature on a small problem."""

import dataclasses
import typing

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.base import BackwardInputs
from flexjax.backends.mosaic_gpu import backward_sm80, backward_sm100_tiles
from flexjax.backends.mosaic_gpu.sm80_cards import CARDS
from flexjax.plan.kernel_plan import Gradients
from flexjax.types import KernelOptions
from tests.cases.hopper_backward import BACKWARD, CAPTURED, PAIR_BIAS
from tests.cases.on_hopper import BackwardProblem, assert_gradients_close, backward_problem, causal
from tests.marks import some_slow


def gradients(made: BackwardProblem) -> Gradients:
    plan = dataclasses.replace(made.plan, options=dataclasses.replace(made.plan.options, instruction="tcgen05"))
    assert backward_sm100_tiles.backward_tiles(plan) is not None
    call = jax.jit(
        lambda *arrays: backward_sm80.backward(plan, BackwardInputs(*arrays, *made.given[4:]), CARDS["10.0"])
    )
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
