"""Prepares lowered kernels for Mosaic's compiler: compiles them in threads while jax still lowers the program, lets Mosaic's cache find
equal kernels again, and hands over modules that compile in less time.

XLA has Mosaic compile the kernels of a program one after another, about a second each, after the whole program is
lowered. Mosaic caches machine code by a hash of the kernel's module. jax writes a file name for dumps with a running
number into each module, so equal kernels have different hashes and the cache never hits. Therefore, as soon as a
forward or backward pass is lowered,

- `lowering` removes the file name from its kernels, and equal kernels have equal hashes;
- it simplifies them (simplified_module.py);
- each kernel starts to compile in a thread, as the only operation of a program that is never run, while the rest of
  the caller's program is lowered. XLA, which needs LLVM with other options than Mosaic, waits for the threads and
  then finds the machine code in the cache.

An error in such a thread is not reported, because XLA compiles the same kernel again and reports it to the user.

A kernel in a lowered program is a custom call, an MLIR operation whose backend configuration holds the kernel's
module as bytecode, and its hash. All of this only saves time, and it uses parts of jax that are not public. Where a
version of jax has changed them, calls work without it, and this module logs why: everything that may be missing is
imported and used below `attempt`.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import logging
import os
import typing
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from flexjax.backends import target as targets
from flexjax.backends.mosaic_gpu import simplified_module
from flexjax.backends.target import Target

if typing.TYPE_CHECKING:
    from jax.extend.mlir import ir
    from jax.interpreters import mlir
    from jax.sharding import SingleDeviceSharding

LOG = logging.getLogger(__name__)

Result = typing.TypeVar("Result")

TARGET = "mosaic_gpu_v2"
"""Name of the custom call that runs a Mosaic GPU kernel."""

CONFIG, MODULE, HASH = "mhlo.backend_config", "module", "kernel_hash"
"""The attribute of that call with the kernel, and the kernel's bytecode and hash in it."""
FILE_NAME = "mosaic_gpu.dump_basename"
"""The attribute of a kernel's module with the file name for dumps."""

MOST_THREADS = 8
"""The most threads in which kernels compile."""


@contextlib.contextmanager
def lowering(module: "mlir.ModuleContext", target: Target) -> Iterator[None]:
    """A context: the kernels that are lowered inside get hashes that equal kernels share and simplified modules, and compile ahead if
    the target is a GPU of this process.

    module   what the pass is lowered into
    target   the device that the pass is lowered for

    Both happen when the context ends; compiling is not waited for. Nothing happens where the body raises, and a failure
    of this module is logged only (`attempt`).
    """
    before = attempt(operations_so_far)
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


def operations_so_far() -> "list[ir.OpView]":
    """The operations that the MLIR block into which jax is lowering contains at this time, in order."""
    from jax.extend.mlir import ir

    return list(ir.InsertionPoint.current.block.operations)  # pyright: ignore[reportAttributeAccessIssue]


def compile_new_kernels(before: "list[ir.OpView]", module: "mlir.ModuleContext", target: Target) -> None:
    """Removes the file names from the Mosaic GPU kernels that were lowered since, simplifies these kernels, and starts to compile them;
    other operations stay as they are. A kernel that cannot be simplified stays as it is, with a line in the log.

    before   the block's operations before the pass was lowered (`operations_so_far`)
    module   what the pass is lowered into
    target   the device that the pass is lowered for; kernels are compiled only if it is a GPU of this process
    """
    from jax.extend.mlir import ir

    gpu = gpu_of_this_process(target)
    for operation in operations_so_far()[len(before) :]:
        if operation.operation.name != "stablehlo.custom_call" or CONFIG not in operation.attributes:
            continue
        if ir.StringAttr(operation.attributes["call_target_name"]).value != TARGET:
            continue
        config = without_file_name(ir.DictAttr(operation.attributes[CONFIG]), module.context)
        config = attempt(with_simplified_module, config, module.context) or config
        operation.attributes[CONFIG] = config
        if gpu is not None:
            start_compiling(kernel_of(config), gpu)


def gpu_of_this_process(target: Target) -> "SingleDeviceSharding | None":
    """A sharding that places an array on the first CUDA GPU of this process; None unless `target` equals the Target of that GPU in all
    its fields, as where a program is compiled for another machine.
    """
    if target.platform != "cuda" or targets.of_platform("cuda") != target:
        return None
    try:
        return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cuda")[0])
    except RuntimeError:  # no GPU in this process, and a target of which only the platform is known, as in jax.export
        return None


def without_file_name(config: "ir.DictAttr", context: "ir.Context") -> "ir.DictAttr":
    """A kernel's backend configuration with the file name for dumps removed from its module, and the hash made anew;
    the same configuration, with its hash, if the module has no such name.

    config    the attribute CONFIG of the kernel's custom call
    context   in which new attributes are made
    """
    from jax.extend.mlir import ir

    parsed = parse_module(ir.StringAttr(config[MODULE]).value_bytes, context)
    if FILE_NAME not in parsed.operation.attributes:
        return config
    del parsed.operation.attributes[FILE_NAME]
    return with_module(config, simplified_module.bytecode(parsed), context)


def with_simplified_module(config: "ir.DictAttr", context: "ir.Context") -> "ir.DictAttr":
    """A kernel's backend configuration with its module simplified (simplified_module.py), and the hash made anew.

    config    the attribute CONFIG of the kernel's custom call
    context   in which the kernel was lowered and new attributes are made
    """
    from jax.extend.mlir import ir

    return with_module(
        config, simplified_module.simplified(ir.StringAttr(config[MODULE]).value_bytes, context), context
    )


def with_module(config: "ir.DictAttr", module: bytes, context: "ir.Context") -> "ir.DictAttr":
    """A kernel's backend configuration with another module and the hash of that module.

    config    the attribute CONFIG of the kernel's custom call
    module    bytecode
    context   in which new attributes are made
    """
    from jax.extend.mlir import ir

    entries = {entry.name: entry.attr for entry in config}
    entries[MODULE] = ir.StringAttr.get(module, context=context)
    entries[HASH] = ir.StringAttr.get(hashlib.sha256(module).digest(), context=context)
    return ir.DictAttr.get(entries, context=context)


def parse_module(module: bytes, context: "ir.Context") -> "ir.Module":
    """The MLIR module of a kernel, from its bytecode.

    The module's dialect, `stable_mosaic_gpu`, is not registered in the context, so unregistered dialects are allowed
    while this parses; afterwards the context is as it was, also where parsing raises.
    """
    from jax.extend.mlir import ir

    allowed = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        return ir.Module.parse(module, context=context)
    finally:
        context.allow_unregistered_dialects = allowed


class KernelCall(typing.NamedTuple):
    """The attributes of the custom call that XLA needs to compile a kernel: hash and bytecode of its module."""

    kernel_hash: bytes
    module: bytes


def kernel_of(config: "ir.DictAttr") -> KernelCall:
    """Hash and module of the kernel, from `config`, the backend configuration of its custom call (the attribute
    CONFIG).
    """
    from jax.extend.mlir import ir

    return KernelCall(ir.StringAttr(config[HASH]).value_bytes, ir.StringAttr(config[MODULE]).value_bytes)


@functools.cache
def compile_threads() -> concurrent.futures.ThreadPoolExecutor | None:
    """The pool of threads in which kernels compile, made by the first call and shared by the process: one thread for
    each core but the caller's, at most MOST_THREADS; None on one core.
    """
    spare = min(MOST_THREADS, (os.cpu_count() or 1) - 1)
    return concurrent.futures.ThreadPoolExecutor(spare, "flexjax_compile") if spare > 0 else None


started_hashes: set[bytes] = set()
"""Hashes of the kernels that `start_compiling` has seen."""


def start_compiling(kernel: KernelCall, gpu: "SingleDeviceSharding") -> None:
    """Starts to compile a kernel in a thread, unless this process has started a kernel of the same hash before or has
    one core. It does not wait, and errors of the thread are lost.

    gpu   the device to compile for
    """
    pool = compile_threads()
    if pool is not None and kernel.kernel_hash not in started_hashes:
        started_hashes.add(kernel.kernel_hash)
        pool.submit(compile_alone, kernel, gpu)


def compile_alone(kernel: KernelCall, gpu: "SingleDeviceSharding") -> None:
    """Compiles a program whose only operation calls the kernel and drops the result, so that Mosaic's cache has the kernel's machine
    code. The program is never run. A thread of the pool calls this function, which returns when XLA has compiled; an exception
    stays in the thread's future, which nobody reads.

    kernel   hash and bytecode of the kernel's module
    gpu      the device to compile for

    The operands are of any shape, because machine code does not depend on them.
    """
    one = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=gpu)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((1,), jnp.int32))
    jax.jit(lambda x: call(x, **kernel._asdict(), use_custom_barrier=False)).lower(one).compile()
