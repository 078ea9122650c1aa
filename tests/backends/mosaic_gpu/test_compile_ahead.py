"""What happens to kernels once they are lowered, on a machine without a GPU.

python -m tests.backends.mosaic_gpu.test_compile_ahead            compiles for Hopper, and prints what ptxas says where
                                                                  MOSAIC_GPU_DUMP_PTXAS asks for it
python -m tests.backends.mosaic_gpu.test_compile_ahead --lower    prints the hash of a lowered program
python -m tests.backends.mosaic_gpu.test_compile_ahead --as-lowered    compiles for Hopper without simplifying the kernels, and
                                                                  lowers them without shortcuts
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import re
import subprocess
import sys
import threading
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from jax.experimental.mosaic.gpu import core as mgpu_core
from jaxlib.mlir import ir, passmanager

import flexjax
from flexjax import masks
from flexjax.backends.mosaic_gpu.lowering import compile_ahead, simplified_module
from flexjax.backends.mosaic_gpu.lowering import shortcuts as lowering_shortcuts
from flexjax.backends.target import Target
from flexjax.passes.lowered import forget
from tests.backends.mosaic_gpu import compile_hopper

ROOT = pathlib.Path(__file__).parents[3]
QUERY = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
COMPILED = re.compile(r"Function properties for (\w+)_mosaic_gpu_kernel")


def attend(x: jax.Array) -> jax.Array:
    return flexjax.flex_attention(x, x, x, mask_mod=masks.causal, implementation="mosaic_gpu")


def gradient(x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: attend(x).astype(jnp.float32).sum())(x)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Hashes of the kernels that a machine with a GPU would compile in threads."""
    given: list[bytes] = []
    monkeypatch.setattr(compile_ahead, "gpu_of_this_process", lambda target: "a GPU")
    monkeypatch.setattr(compile_ahead, "start_compiling", lambda kernel, gpu: given.append(kernel.kernel_hash))
    return given


def program(function: Callable, platforms: tuple[str, ...] = ("cuda",)) -> str:
    """The text of a lowered program."""
    hopper = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=hopper)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(lambda x: function(x)).trace(QUERY).lower(lowering_platforms=platforms).as_text()


def lowered(function: Callable) -> list[str]:
    """Hashes of the kernels of a program."""
    return re.findall(r'kernel_hash = "([^"]*)"', program(function))


def test_equal_kernels_have_equal_hashes(begun: list[bytes]) -> None:
    """jax counts the modules of the process in each of them, so that their hashes never were."""
    first = lowered(gradient)
    assert len(set(first)) == 3
    assert lowered(gradient) == first
    assert set(lowered(attend)) < set(first)


def test_another_process_lowers_the_same_program() -> None:
    """jax's compilation cache on disk finds it by its text."""
    command = [sys.executable, "-m", "tests.backends.mosaic_gpu.test_compile_ahead", "--lower"]
    hashes = [
        subprocess.run(
            command,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            cwd=ROOT,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert re.fullmatch(r"[0-9a-f]{64}\n", hashes[0])
    assert hashes[0] == hashes[1]


def test_every_kernel_begins(begun: list[bytes]) -> None:
    lowered(attend)
    assert len(begun) == 1
    lowered(gradient)
    assert len(begun) == 4
    assert begun[0] == begun[1]
    assert len(set(begun)) == 3


def test_equal_layers_are_lowered_once(begun: list[bytes]) -> None:
    kernels = lowered(lambda x: attend(attend(attend(x))))
    assert len(begun) == len(kernels) == 1


def test_without_a_gpu_none_begins(begun: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "gpu_of_this_process", lambda target: None)
    assert len(lowered(gradient)) == 3
    assert begun == []


PIECES = (
    "operations_so_far", "gpu_of_this_process", "serializing_module", "prepare", "kernel_of", "start_compiling", "compile_threads",
)  # fmt: skip


@pytest.mark.parametrize("piece", [*PIECES, "jax.extend.mlir", "compile_ahead"])
def test_a_jax_that_has_a_piece_otherwise_compiles_all_the_same(
    piece: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def renamed(*_: object) -> None:
        raise AttributeError(f"no {piece}")

    monkeypatch.setattr(compile_ahead, "gpu_of_this_process", lambda target: "a GPU")
    monkeypatch.setattr(compile_ahead, "started_hashes", set())
    if piece in PIECES:
        monkeypatch.setattr(compile_ahead, piece, renamed)
    elif piece == "compile_ahead":
        import flexjax.backends.mosaic_gpu.lowering as room

        monkeypatch.delattr(room, piece)
        monkeypatch.setitem(sys.modules, f"{room.__name__}.{piece}", None)
    else:
        monkeypatch.setitem(sys.modules, piece, None)
    with caplog.at_level(logging.INFO, compile_ahead.__name__):
        assert len(lowered(attend)) == 1
    said = [record.getMessage() for record in caplog.records if record.name == compile_ahead.__name__]
    assert len(said) == (piece != "compile_ahead"), said
    assert all(text.startswith("compiling kernels takes longer with this jax: ") for text in said)


def test_a_kernel_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []

    class Pool:
        def submit(self, function: Callable, *arguments: object) -> None:
            submitted.append((function, arguments))

    monkeypatch.setattr(compile_ahead, "compile_threads", Pool)
    monkeypatch.setattr(compile_ahead, "started_hashes", set())
    one, other = compile_ahead.KernelCall(b"1", b"module"), compile_ahead.KernelCall(b"2", b"module")
    gpu = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for kernel in (one, other, one):
        compile_ahead.start_compiling(kernel, gpu)
    assert submitted == [(compile_ahead.compile_alone, (kernel, gpu)) for kernel in (one, other)]


def test_threads_leave_a_core_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, None), (None, None), (2, 1), (64, compile_ahead.MOST_THREADS)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        pool = compile_ahead.compile_threads.__wrapped__()
        assert (pool and pool._max_workers) == expected


def modules(monkeypatch: pytest.MonkeyPatch, simplify: bool) -> list[str]:
    """The modules of both passes' kernels when jax serializes them, as text."""
    found: list[str] = []
    real = mgpu_core._run_serde_pass

    def noted(module: typing.Any, *arguments: object, **options: object) -> object:
        found.append(str(module))
        return real(module, *arguments, **options)

    forget()
    with monkeypatch.context() as patch:
        patch.setattr(mgpu_core, "_run_serde_pass", noted)
        if not simplify:
            patch.setattr(simplified_module, "simplify", lambda module: None)
        assert len(set(lowered(gradient))) == len(found) == 3
        assert mgpu_core._run_serde_pass is noted
    return found


def passed_through(passes: str, text: str) -> str:
    """The module after MLIR's passes."""
    with mlir.make_ir_context() as context:
        mgpu_core.dialect.register_dialect(context)
        module = ir.Module.parse(text)
        passmanager.PassManager.parse(f"builtin.module({passes})").run(module.operation)
        return str(module)


def test_a_simplified_module_is_shorter_and_without_a_file_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in zip(modules(monkeypatch, False), modules(monkeypatch, True), strict=True):
        assert after.count("\n") < 0.75 * before.count("\n")
        assert compile_ahead.FILE_NAME not in before + after


def test_nothing_is_left_to_simplify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for Mosaic's first pass nor for its next."""
    for text in modules(monkeypatch, True):
        whole = passed_through("", text)
        assert [passed_through(passes, text) for passes in ("canonicalize", "cse")] == [whole, whole]


def test_modules_that_another_thread_lowers_stay_as_they_are() -> None:
    """A program of the user that has nothing to do with flexjax."""
    prepared: list[object] = []
    real = mgpu_core._run_serde_pass

    class Module:
        """What `prepare` and jax would fail on."""

    def serialize() -> None:
        with pytest.raises(AttributeError):
            mgpu_core._run_serde_pass(Module(), serialize=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_ahead, "prepare", prepared.append)
        with compile_ahead.prepared_kernels():
            assert mgpu_core._run_serde_pass is not real
            thread = threading.Thread(target=serialize)
            thread.start()
            thread.join()
            assert prepared == []
            serialize()
            assert len(prepared) == 1
        assert mgpu_core._run_serde_pass is real


def test_without_any_gpu_there_is_none_to_compile_for() -> None:
    """As in jax.export, whose target has no more than a platform."""
    assert compile_ahead.gpu_of_this_process(Target("cuda")) is None


@pytest.mark.skipif(compile_hopper.missing() is not None, reason=str(compile_hopper.missing()))
def test_kernels_have_the_same_machine_code_as_without_shortcuts_and_simplification(tmp_path: pathlib.Path) -> None:
    found = []
    for flags in ([], ["--as-lowered"]):
        place = tmp_path / str(len(flags))
        place.mkdir()
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": str(place), "XLA_FLAGS": ""}
        command = [sys.executable, "-m", "tests.backends.mosaic_gpu.test_compile_ahead", *flags]
        subprocess.run(command, env=environment, capture_output=True, timeout=600, cwd=ROOT, check=True)
        found.append({file.name: file.read_text() for file in place.glob("*.ptx")})
    assert len(found[0]) == 3
    assert found[0] == found[1]


@pytest.mark.skipif(compile_hopper.missing() is not None, reason=str(compile_hopper.missing()))
def test_what_a_thread_compiled_is_not_compiled_again() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.backends.mosaic_gpu.test_compile_ahead"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, together, again = (COMPILED.findall(part) for part in done.stdout.split("====")[1:])
    assert sorted(alone) == [
        "flexjax_backward_fused",
        "flexjax_forward",
        "flexjax_row_dots",
    ], done.stdout
    assert together == again == [], done.stdout


def compile_twice() -> None:
    """The kernels of a program alone, as the threads would; then the program; then the same from elsewhere."""
    kernels = []
    compile_ahead.gpu_of_this_process = lambda target: "a GPU"
    compile_ahead.start_compiling = lambda kernel, gpu: kernels.append(kernel)
    lowered(gradient)
    topology = compile_hopper.topology(1)
    gpu = jax.sharding.SingleDeviceSharding(topology.devices[0])
    print("==== alone", flush=True)
    for kernel in kernels:
        compile_ahead.compile_alone(kernel, gpu)
    print("==== together", flush=True)
    compile_hopper.compile_for_hopper(lambda x: gradient(x), QUERY)
    print("==== again", flush=True)
    compile_hopper.compile_for_hopper(lambda x: gradient(x), QUERY)


if __name__ == "__main__":
    if "--lower" in sys.argv:
        print(hashlib.sha256(program(gradient).encode()).hexdigest())
    else:
        if "--as-lowered" in sys.argv:
            simplified_module.simplify = lambda module: None
            lowering_shortcuts.shortcuts = contextlib.nullcontext
        compile_twice()
