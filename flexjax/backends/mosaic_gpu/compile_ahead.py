"""Machine code of kernels: compiled side by side, and once for all programs of a process.

XLA has Mosaic compile the kernels of a program one after another, about a second each, once everything is lowered. What
Mosaic compiled it keeps, by a hash of the kernel's module; but jax writes the count of the modules it made into each of them
(a file name, for dumps), so no kernel is ever found again. Here, as soon as a pass is lowered,

- the file name is taken out of its kernels, so that equal kernels have equal hashes;
- each of its kernels begins to compile in a thread, as the one operation of a program that is never run, while the rest of the
  caller's program is lowered. XLA, which wants LLVM with other options than Mosaic, waits for the threads before it begins,
  and finds the kernels made.

A thread that fails says nothing: XLA compiles the same kernel in the user's own thread, and fails there.

All of this only saves time, and it reaches into what jax does not promise. Where a jax has it otherwise, a call goes on without
it, with a line in the log of this module: whatever it touches is imported and read within `looked_after`.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import logging
import os
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from flexjax.backends import target as targets
from flexjax.backends.target import Target

if typing.TYPE_CHECKING:
    from jax.extend.mlir import ir
    from jax.interpreters import mlir
    from jax.sharding import SingleDeviceSharding

LOG = logging.getLogger(__name__)

TARGET = "mosaic_gpu_v2"
"""What XLA calls a kernel of Mosaic GPU."""

CONFIG, MODULE, HASH = "mhlo.backend_config", "module", "kernel_hash"
FILE_NAME = "mosaic_gpu.dump_basename"

MOST_THREADS = 8


@contextlib.contextmanager
def lowering(module: "mlir.ModuleContext", target: Target) -> Iterator[None]:
    """Looks after the kernels that are lowered within."""
    before = quietly(operations)
    yield
    if before is not None:
        quietly(looked_after, before, module, target)


def quietly(function: typing.Callable, *arguments: typing.Any) -> typing.Any:
    """The function's result, None where it cannot be had."""
    try:
        return function(*arguments)
    except Exception as error:  # what a jax that has something otherwise raises is anything
        LOG.info("kernels are not compiled ahead: %s: %s", type(error).__name__, error)
        return None


def operations() -> "list[ir.OpView]":
    """Of the block that is being lowered into."""
    from jax.extend.mlir import ir

    return list(ir.InsertionPoint.current.block.operations)  # pyright: ignore[reportAttributeAccessIssue]


def looked_after(before: "list[ir.OpView]", module: "mlir.ModuleContext", target: Target) -> None:
    """Does both with the kernels that came after `before`."""
    from jax.extend.mlir import ir

    gpu = own_gpu(target)
    for operation in operations()[len(before) :]:
        if operation.operation.name != "stablehlo.custom_call" or CONFIG not in operation.attributes:
            continue
        if ir.StringAttr(operation.attributes["call_target_name"]).value != TARGET:
            continue
        config = without_file_name(ir.DictAttr(operation.attributes[CONFIG]), module.context)
        operation.attributes[CONFIG] = config
        if gpu is not None:
            begin(kernel_of(config), gpu)


def own_gpu(target: Target) -> "SingleDeviceSharding | None":
    """On a GPU of this process that is the target, if it has one."""
    if target.platform != "cuda" or targets.of_platform("cuda") != target:
        return None
    return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cuda")[0])


def without_file_name(config: "ir.DictAttr", context: "ir.Context") -> "ir.DictAttr":
    """The configuration of a kernel whose module does not say where to dump it."""
    from jax.extend.mlir import ir

    parsed = parse(ir.StringAttr(config[MODULE]).value_bytes, context)
    if FILE_NAME not in parsed.operation.attributes:
        return config
    del parsed.operation.attributes[FILE_NAME]
    written = io.BytesIO()
    parsed.operation.write_bytecode(written, desired_version=0)
    entries = {entry.name: entry.attr for entry in config}
    entries[MODULE] = ir.StringAttr.get(written.getvalue(), context=context)
    entries[HASH] = ir.StringAttr.get(hashlib.sha256(written.getvalue()).digest(), context=context)
    return ir.DictAttr.get(entries, context=context)


def parse(module: bytes, context: "ir.Context") -> "ir.Module":
    """A module in the form in which jax hands it over, whose dialect has a name for that alone."""
    from jax.extend.mlir import ir

    allowed = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        return ir.Module.parse(module, context=context)
    finally:
        context.allow_unregistered_dialects = allowed


class Kernel(typing.NamedTuple):
    """What XLA needs to compile a kernel."""

    kernel_hash: bytes
    module: bytes


def kernel_of(config: "ir.DictAttr") -> Kernel:
    from jax.extend.mlir import ir

    return Kernel(ir.StringAttr(config[HASH]).value_bytes, ir.StringAttr(config[MODULE]).value_bytes)


@functools.cache
def threads() -> concurrent.futures.ThreadPoolExecutor | None:
    """As many as there are cores beside that of the caller; none on one core."""
    spare = min(MOST_THREADS, (os.cpu_count() or 1) - 1)
    return concurrent.futures.ThreadPoolExecutor(spare, "flexjax_compile") if spare > 0 else None


begun: set[bytes] = set()
"""Hashes of the kernels that `begin` has seen."""


def begin(kernel: Kernel, gpu: "SingleDeviceSharding") -> None:
    """Has a kernel compiled in a thread, once a process."""
    pool = threads()
    if pool is not None and kernel.kernel_hash not in begun:
        begun.add(kernel.kernel_hash)
        pool.submit(compile_alone, kernel, gpu)


def compile_alone(kernel: Kernel, gpu: "SingleDeviceSharding") -> None:
    """Compiles a program that calls the kernel; its operands do not matter to that."""
    one = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=gpu)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((1,), jnp.int32))
    jax.jit(lambda x: call(x, **kernel._asdict(), use_custom_barrier=False)).lower(one).compile()
