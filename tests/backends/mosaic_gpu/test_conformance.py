"""The suite of every backend, on the kernels in the simulator of GPUs."""

import functools
import typing

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from tests.backends.conformance import TableConformance, TransformationConformance
from tests.cases import Case, exact_captures


class Simulated:
    """Eager calls: the simulator orders its effects, which a surrounding jax.jit does not know of."""

    implementation = "mosaic_gpu"
    jitted = False
    options = flexjax.KernelOptions(interpret=True)

    def refuses(self, case: Case, dtype: str) -> bool:
        return dtype == "float32" or 0 in case.shape

    @pytest.fixture(autouse=True)
    def _interpreted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attend = functools.partial(flexjax.flex_attention, kernel_options=self.options)
        monkeypatch.setattr(flexjax, "flex_attention", attend)


class TestTable(Simulated, TableConformance):
    only_dtypes = ("bfloat16", "float16")
    deterministic = False  # a second simulation takes as long as the first; tools/device/check_device.py compares bits
    everyday = frozenset({"seven", "one_key", "no_keys", "shifted_column_bias", "sinks_masked_rows", "sigmoid_weights"})
    everyday_forward = frozenset({"no_keys"})


class TestMmaTable(TestTable):
    """The kernels on mma.sync."""

    options = flexjax.KernelOptions(interpret=True, instruction="mma")
    everyday = frozenset({"shifted_column_bias"})
    everyday_forward = frozenset()

    def refuses(self, case: Case, dtype: str) -> bool:
        return super().refuses(case, dtype) or case.name == "dim_320"


# own rows past the end have statistics of padding and products that are not finite; they are not written
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul:RuntimeWarning")
class TestTcgen05Table(TestMmaTable):
    """The kernels on tcgen05, and on mma.sync those of few queries, of backward passes above head dim 128 and of captured arrays."""

    options = flexjax.KernelOptions(interpret=True, instruction="tcgen05")
    everyday = frozenset()
    everyday_forward = frozenset({"shifted_column_bias"})


@pytest.mark.slow
@pytest.mark.parametrize("instruction", ["mma", "tcgen05"])
@pytest.mark.parametrize("mod", ["slope", "linear"])
def test_gradients_of_captures_are_exact(
    instruction: typing.Literal["mma", "tcgen05"], mod: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward tiles of these families have more rows than those of the backward pass."""
    attend = flexjax.flex_attention
    options = flexjax.KernelOptions(interpret=True, instruction=instruction)

    def simulated(*arrays: typing.Any, implementation: typing.Any, **words: typing.Any) -> typing.Any:
        if implementation == "mosaic_gpu":
            words["kernel_options"] = options
        return attend(*arrays, implementation=implementation, **words)

    monkeypatch.setattr(flexjax, "flex_attention", simulated)
    exact_captures.check("mosaic_gpu", mod, lambda function: function)


@pytest.mark.slow
class TestTransformations(Simulated, TransformationConformance):
    small_dtype = "bfloat16"
    export = False
