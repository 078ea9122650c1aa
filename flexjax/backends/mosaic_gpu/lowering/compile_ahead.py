"""Prepares lowered kernels for Mosaic's compiler, so that a program compiles in less time.

XLA has Mosaic compile the kernels of a program one after another, about a second each, after the whole program is
lowered. Mosaic caches machine code by a hash of the kernel's module, but jax writes a file name for dumps with a
running number into each module, so equal kernels have different hashes. Therefore, while a pass is lowered,

- each kernel loses the file name before jax serializes and hashes it, and is simplified (simplified_module.py);
- as soon as the pass is lowered, each kernel starts to compile in a thread, as the only operation of a program that is
  never run. XLA waits for the threads, because it needs LLVM with other options, and then finds the machine code in the
  cache. An error in a thread is not reported, because XLA compiles the same kernel again and reports it.

A kernel in a lowered program is a custom call whose backend configuration holds the kernel's module as bytecode, and
its hash. All of this only saves time, and it uses parts of jax that are not public. Where a version of jax has changed
them, calls work without it, and this module logs why (`attempt`).
"""

import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
import typing
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from flexjax.backends import target as targets
from flexjax.backends.mosaic_gpu.lowering import simplified_module
from flexjax.backends.target import Target

if typing.TYPE_CHECKING:
    from jax.extend.mlir import ir
    from jax.sharding import SingleDeviceSharding

LOG = logging.getLogger(__name__)

Result = typing.TypeVar("Result")

TARGET = "mosaic_gpu_v2"

CONFIG, MODULE, HASH = "mhlo.backend_config", "module", "kernel_hash"
"""The attribute of that call with the kernel, and the kernel's bytecode and hash in it."""
FILE_NAME = "mosaic_gpu.dump_basename"  # the attribute of a kernel's module with the file name for dumps

MOST_THREADS = 8  # the most threads in which kernels compile


@contextlib.contextmanager
def lowering(module: mlir.ModuleContext, target: Target) -> Iterator[None]:
    """A context: kernels lowered inside share hashes and are simplified, and afterwards compile in threads."""
    before = attempt(operations_so_far)
    with prepared_kernels():
        yield
    if before is not None:
        attempt(compile_new_kernels, before, module, target)


def attempt(function: Callable[..., Result], *arguments: object) -> Result | None:
    """function(*arguments); None, with a line in the log (INFO), where the call raises any Exception."""
    try:
        return function(*arguments)
    except Exception as error:  # a jax whose internals have changed may raise anything
        LOG.info("compiling kernels takes longer with this jax: %s: %s", type(error).__name__, error)
        return None


@contextlib.contextmanager
def prepared_kernels() -> Iterator[None]:
    """A context: jax calls `prepare` on the modules that this thread lowers before it serializes them."""
    core = attempt(serializing_module)
    if core is None:
        yield
        return
    serialize, thread = core._run_serde_pass, threading.get_ident()

    def prepare_and_serialize(module: "ir.Module", *arguments: object, **options: object) -> object:
        if threading.get_ident() == thread:
            attempt(prepare, module)
        return serialize(module, *arguments, **options)

    core._run_serde_pass = prepare_and_serialize
    try:
        yield
    finally:
        core._run_serde_pass = serialize


def serializing_module() -> typing.Any:
    """jax's module whose function `_run_serde_pass` serializes the modules of kernels; raises without one."""
    from jax.experimental.mosaic.gpu import core

    _ = core._run_serde_pass
    return core


def prepare(module: "ir.Module") -> None:
    """Removes the file name for dumps from the module of a kernel and simplifies the module, both in place."""
    if FILE_NAME in module.operation.attributes:
        del module.operation.attributes[FILE_NAME]
    simplified_module.simplify(module)


def operations_so_far() -> "list[ir.OpView]":
    """The operations so far in the MLIR block into which jax is lowering."""
    from jax.extend.mlir import ir

    return list(ir.InsertionPoint.current.block.operations)  # pyright: ignore[reportAttributeAccessIssue]


def compile_new_kernels(before: "list[ir.OpView]", module: mlir.ModuleContext, target: Target) -> None:
    """Starts to compile the Mosaic GPU kernels since `before`, if the target is a GPU of this process."""
    from jax.extend.mlir import ir

    gpu = gpu_of_this_process(target)
    if gpu is None:
        return
    for operation in with_called(operations_so_far()[len(before) :], module):
        if operation.operation.name != "stablehlo.custom_call" or CONFIG not in operation.attributes:
            continue
        if ir.StringAttr(operation.attributes["call_target_name"]).value == TARGET:
            start_compiling(kernel_of(ir.DictAttr(operation.attributes[CONFIG])), gpu)


def with_called(operations: "Iterable[ir.OpView]", module: mlir.ModuleContext) -> "Iterator[ir.OpView]":
    """The operations, and after each call those of the function that it calls."""
    from jax.extend.mlir import ir

    for operation in operations:
        yield operation
        if operation.operation.name == "func.call":
            symbols: typing.Any = module.symbol_table
            called = symbols[ir.FlatSymbolRefAttr(operation.attributes["callee"]).value]
            for block in called.regions[0].blocks:
                yield from with_called(block.operations, module)


def gpu_of_this_process(target: Target) -> "SingleDeviceSharding | None":
    """The first CUDA GPU of this process; None where it is not `target`, the machine that runs the program."""
    if target.platform != "cuda" or targets.of_platform("cuda") != target:
        return None
    try:
        return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cuda")[0])
    except RuntimeError:  # no GPU in this process, and a target of which only the platform is known, as in jax.export
        return None


class KernelCall(typing.NamedTuple):
    """What XLA needs of a kernel's custom call to compile it: hash and bytecode of its module."""

    kernel_hash: bytes
    module: bytes


def kernel_of(config: "ir.DictAttr") -> KernelCall:
    """Hash and module of the kernel, from the backend configuration of its custom call (the attribute CONFIG)."""
    from jax.extend.mlir import ir

    return KernelCall(ir.StringAttr(config[HASH]).value_bytes, ir.StringAttr(config[MODULE]).value_bytes)


@functools.cache
def compile_threads() -> concurrent.futures.ThreadPoolExecutor | None:
    """The pool of threads in which kernels compile, one for each core but the caller's; None on one core."""
    spare = min(MOST_THREADS, (os.cpu_count() or 1) - 1)
    return concurrent.futures.ThreadPoolExecutor(spare, "flexjax_compile") if spare > 0 else None


started_hashes: set[bytes] = set()


def start_compiling(kernel: KernelCall, gpu: "SingleDeviceSharding") -> None:
    """Starts to compile a kernel in a thread, unless a kernel of its hash was started before; does not wait."""
    pool = compile_threads()
    if pool is not None and kernel.kernel_hash not in started_hashes:
        started_hashes.add(kernel.kernel_hash)
        pool.submit(compile_alone, kernel, gpu)


def compile_alone(kernel: KernelCall, gpu: "SingleDeviceSharding") -> None:
    """Compiles a program whose only operation calls the kernel, which brings its machine code into Mosaic's cache."""
    # Machine code does not depend on the operands.
    one = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=gpu)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((1,), jnp.int32))
    jax.jit(lambda x: call(x, **kernel._asdict(), use_custom_barrier=False)).lower(one).compile()
