"""The suite of every backend, on the kernels interpreted on the CPU."""

import functools

import pytest

import flexjax
from tests.backends.conformance import Conformance
from tests.cases import Case


class TestMosaicTpu(Conformance):
    implementation = "mosaic_tpu"

    def refuses(self, case: Case, dtype: str) -> bool:
        return dtype not in ("float32", "bfloat16") or 0 in case.shape

    @pytest.fixture(autouse=True)
    def _interpreted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = flexjax.KernelOptions(interpret=True)
        attend = functools.partial(flexjax.flex_attention, kernel_options=options)
        monkeypatch.setattr(flexjax, "flex_attention", attend)
