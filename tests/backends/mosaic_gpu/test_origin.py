"""Parts of a larger problem on the simulated GPU kernels."""

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from tests.cases.placed import PLACED, assert_as_reference
from tests.marks import some_slow


@pytest.mark.parametrize("name", some_slow(PLACED, ["documents"]))
def test_a_part_is_as_the_reference_computes_it(name: str) -> None:
    assert_as_reference(name, "mosaic_gpu", "bfloat16", 0.05)
