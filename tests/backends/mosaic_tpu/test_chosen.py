"""Chosen key blocks on the TPU kernels, interpreted."""

import pytest

from flexjax import KernelOptions
from tests.backends.chosen import check
from tests.marks import some_slow


@pytest.mark.parametrize("block", some_slow((16, 64), (64,)))
def test_both_passes(block: int) -> None:
    check("mosaic_tpu", KernelOptions(interpret=True), block, 200)
