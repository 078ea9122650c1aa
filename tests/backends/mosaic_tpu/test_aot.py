"""Every plan of the table compiles, forward and backward, for four chips. Slow: minutes a chip."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler (libtpu) is not installed: pip install 'jax[tpu]'",
    ),
]


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_every_plan_compiles(chip: str):
    child = subprocess.run(
        [sys.executable, "-m", "tests.backends.mosaic_tpu.aot", chip],
        cwd=ROOT, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    lines = [line.split() for line in child.stdout.splitlines() if line.startswith(("ok", "FAIL", "refused"))]
    failed = [" ".join(w) for w in lines if w[0] == "FAIL"]
    assert child.returncode == 0, child.stderr[-2000:]
    assert sum(w[0] == "ok" for w in lines) > 100
    assert not failed, "\n".join(failed)
