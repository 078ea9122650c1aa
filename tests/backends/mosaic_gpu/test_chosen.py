"""Chosen key blocks on the simulated WGMMA and mma.sync kernels."""

import typing

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax import KernelOptions
from tests.backends.chosen import check
from tests.marks import some_slow

ROWS: dict[str, tuple[typing.Any, int, int]] = {  # instruction, tokens of a block, length
    "wgmma, blocks of 64": (None, 64, 200),
    "wgmma, blocks of 16": (None, 16, 192),
    "mma, blocks of 32": ("mma", 32, 192),
    "mma, blocks of 64": ("mma", 64, 200),
}


@pytest.mark.parametrize("name", some_slow(ROWS, ["wgmma, blocks of 64", "mma, blocks of 32"]))
def test_both_passes(name: str) -> None:
    instruction, block, length = ROWS[name]
    check("mosaic_gpu", KernelOptions(interpret=True, instruction=instruction), block, length)
