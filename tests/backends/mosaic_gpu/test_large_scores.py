"""Scores that are far out (tests/cases/large_scores.py) in the simulator."""

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from tests.cases import large_scores


@pytest.mark.parametrize(
    ("dtype", "sinks", "gated"),
    [("bfloat16", False, False), ("float16", False, True), ("bfloat16", True, False)],
)
def test_large_scores(dtype: str, sinks: bool, gated: bool) -> None:
    large_scores.check("mosaic_gpu", dtype, sinks, gated, flexjax.KernelOptions(interpret=True))
