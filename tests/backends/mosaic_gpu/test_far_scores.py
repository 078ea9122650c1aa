"""Scores that are far out (tests/backends/far_scores.py) in the simulator."""

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11", allow_module_level=True)

import flexjax
from tests.backends import far_scores


@pytest.mark.parametrize(("dtype", "sinks"), [("bfloat16", False), ("float16", False), ("bfloat16", True)])
def test_far_scores(dtype: str, sinks: bool) -> None:
    far_scores.check("mosaic_gpu", dtype, sinks, flexjax.KernelOptions(interpret=True))
