"""What happens while the passes of a call are lowered: each kernel is traced once, nothing is compiled on the way, and only what is
needed is imported.

python -m tests.backends.mosaic_gpu.test_lowering    prints the modules of the backend that a forward and a backward pass import
"""

import collections
import gc
import logging
import os
import pathlib
import subprocess
import sys
import typing
from collections.abc import Callable

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu.lowering import lowering
from flexjax.backends.mosaic_gpu.machine import kernel_parts
from tests.backends.mosaic_gpu.test_compile_ahead import attend, gradient, program

ROOT = pathlib.Path(__file__).parents[3]
PACKAGE = "flexjax.backends.mosaic_gpu."
NOT_NEEDED = (
    "decode.hopper",
    "decode.mma",
    "decode.consumer",
    "forward.mma",
    "forward.tcgen05",
    "backward.mma",
    "captures.",
)
"""Beginnings of the names of modules whose kernels do not run in a call on Hopper without gradients of captured arrays. Those that choose
tiles (NAME_tiles, NAME_support, lists) may be imported all the same."""


def test_a_kernel_is_traced_once_and_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    traced: collections.Counter[str] = collections.Counter()
    collector_on: list[bool] = []
    real: Callable = kernel_parts.pl.kernel

    def kernel(function: Callable, *arguments: object, name: str, **options: typing.Any) -> Callable:
        def counted(*refs: object) -> None:
            traced[name] += 1
            collector_on.append(gc.isenabled())
            function(*refs)

        return real(counted, *arguments, name=name, **options)

    monkeypatch.setattr(kernel_parts.pl, "kernel", kernel)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        program(lambda x: gradient(attend(attend(x))))
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")]
    assert not [line for line in compiled if "jit(classify)" not in line]
    assert traced == {"flexjax_forward": 1, "flexjax_row_dots": 1, "flexjax_backward_fused": 1}
    assert not any(collector_on)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    set_to = {True: gc.enable, False: gc.disable}
    try:
        set_to[enabled]()
        with lowering.collector_paused():
            assert not gc.isenabled()
            with lowering.collector_paused():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError), lowering.collector_paused():
            _ = 1 // 0
        assert gc.isenabled() == enabled
    finally:
        set_to[before]()


@pytest.mark.slow
def test_modules_of_other_kernels_are_not_imported() -> None:
    command = [sys.executable, "-m", "tests.backends.mosaic_gpu.test_lowering"]
    done = subprocess.run(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=True,
    )
    imported = done.stdout.split()
    assert {"forward.hopper", "backward.hopper_fused"} <= set(imported)
    kernels = [name for name in imported if not name.endswith(("tiles", "support", "lists"))]
    assert not [name for name in kernels if name.startswith(NOT_NEEDED)]


if __name__ == "__main__":
    program(gradient)
    print(*sorted(name.removeprefix(PACKAGE) for name in sys.modules if name.startswith(PACKAGE)))
