"""Parts of a larger problem on the simulated TPU kernels."""

import re

import pytest

from tests.cases.placed import PLACED, assert_as_reference
from tests.marks import some_slow


@pytest.mark.parametrize("name", some_slow([n for n in PLACED if n != "runs_relative"], ["runs"]))
def test_a_part_is_as_the_reference_computes_it(name: str) -> None:
    assert_as_reference(name, "mosaic_tpu", "float32", 1e-5)


def test_runs_beside_a_table_of_differences_are_refused() -> None:
    message = (
        "mosaic_tpu cannot run this score_mod: it needs a value computed outside the kernel for each q - kv, and the origin has "
        "several runs of queries or keys."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        assert_as_reference("runs_relative", "mosaic_tpu", "float32", 1e-5)
