"""Every case of the table compiles to Hopper machine code, forward and backward, and spills no register.

Here each case in one dtype; the whole product:  python -m tests.backends.mosaic_gpu.aot
"""

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from tests.backends.mosaic_gpu import aot, compile_hopper
from tests.cases import CASES

PARTS = 12
"""Pieces of a minute or two, so that `--minutes` can stop between them."""


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.skipif(compile_hopper.missing() is not None, reason=str(compile_hopper.missing()))
@pytest.mark.parametrize("part", range(PARTS))
def test_sample_compiles(part: int) -> None:
    entries = aot.sampled()[part::PARTS]
    lines = [line for line, _ in aot.sweep(entries)]
    print("\n".join(lines))
    failed = [line for line in lines if line.startswith("FAIL")]
    assert not failed, "\n".join(failed)
    refused = {line.split()[1] for line in lines if line.startswith("refused")}
    empty = {entry for entry in entries if entry in aot.TABLE and 0 in CASES[aot.TABLE[entry][0]].shape}
    assert refused == empty, "only what has an empty array is refused"
    assert len(lines) == len(entries)


def test_every_case_is_in_the_sample() -> None:
    chosen = aot.sampled()
    assert [aot.TABLE[entry][0] for entry in chosen if entry in aot.TABLE] == list(CASES)
    assert {aot.TABLE[entry][1] for entry in chosen if entry in aot.TABLE} == set(aot.DTYPES)
    assert set(aot.ON_MESH) <= set(chosen)


BOTH = {"flexjax_forward": 0, "flexjax_backward_dq": 0}


@pytest.mark.parametrize(
    ("spilled", "verdict"),
    [
        ({"flexjax_forward": 0, "flexjax_backward_dq": 0}, "ok a-b 1s"),
        ({"flexjax_forward": 4, "flexjax_backward_dq": 0}, "FAIL a-b 1s flexjax_forward spills 4"),
        ({**BOTH, "flexjax_capture_gradient": 0}, "ok a-b 1s"),
        ({"flexjax_backward_dq": 0}, "FAIL a-b 1s no flexjax_forward kernel"),
        ({"flexjax_forward": 0}, "FAIL a-b 1s no flexjax_backward kernel"),
    ],
)
def test_what_spills_is_judged(spilled: dict[str, int], verdict: str) -> None:
    assert aot.judged("ok a-b 1s", spilled) == verdict


@pytest.mark.parametrize(
    ("count", "verdict"),
    [(8, "ok narrow-bfloat16 1s"), (12, "FAIL narrow-bfloat16 1s flexjax_backward_fused spills 12")],
)
def test_what_a_case_may_spill(count: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "MAY_SPILL", {"narrow": {"flexjax_backward_fused": 8}})
    found = aot.judged("ok narrow-bfloat16 1s", {"flexjax_forward": 0, "flexjax_backward_fused": count})
    assert found == verdict


def test_spills_are_read_from_the_assembler() -> None:
    text = (
        "ptxas info    : Function properties for flexjax_forward_mosaic_gpu_kernel\n"
        "    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 168 registers\n"
        "ptxas info    : Function properties for flexjax_backward_dq_mosaic_gpu_kernel\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    )
    assert aot.SPILLS.findall(text) == [("flexjax_forward", "12"), ("flexjax_backward_dq", "0")]
