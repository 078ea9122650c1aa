"""Simplifies the module of a lowered kernel before XLA gets it, so that Mosaic compiles it in less time.

The first pass that Mosaic runs on a module is MLIR's `canonicalize`, from operations to their operands ("top down"). Whenever an operand of a
loop is simplified, it looks at the whole loop again, for equal and for unused values that the loop carries. A loop with two accumulators
carries 130 values a thread, so the time grows with their square: 0.8 s for the fused backward kernel. Bottom up the same pass takes 0.03 s
and leaves operations that Mosaic's own pass finds nothing to do in. The machine code is the same.

A kernel's module travels as bytecode in a form that outlives versions of Mosaic ("serialized", with a version number). It is read back from
that form, simplified, and written in the same version. All of this uses parts of jax that are not public; compile_ahead.py leaves a
module as it is where they have changed.
"""

import io
import typing

from jax.interpreters import mlir

if typing.TYPE_CHECKING:
    from jax.extend.mlir import ir

PASSES = "canonicalize{top-down=false},cse"
"""MLIR's passes: simplify operations, and keep one of equal operations."""
VERSION = "stable_mosaic_gpu.version"
"""The attribute of a serialized module with the version of its form."""


def simplified(module: bytes) -> bytes:
    """The serialized module of a kernel, simplified.

    module   bytecode of the module

    Returns bytecode of the same version. Raises whatever jax raises where it lacks one of the passes or the version.
    """
    from jax.experimental.mosaic.gpu import dialect  # pyright: ignore[reportPrivateImportUsage]
    from jax.extend.mlir import ir
    from jaxlib.mlir import passmanager

    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    context.allow_unregistered_dialects = True  # those of a serialized module
    with context, ir.Location.unknown(context):
        parsed = ir.Module.parse(module, context=context)
        version = ir.IntegerAttr(parsed.operation.attributes[VERSION]).value
        for passes in (
            "mosaic_gpu-serde{serialize=false}",
            PASSES,
            f"mosaic_gpu-serde{{serialize=true target-version={version}}}",
        ):
            passmanager.PassManager.parse(f"builtin.module({passes})", context).run(parsed.operation)
        return bytecode(parsed)


def bytecode(module: "ir.Module") -> bytes:
    """A module as bytecode, in the version of MLIR's format that every jaxlib reads."""
    written = io.BytesIO()
    module.operation.write_bytecode(written, desired_version=0)
    return written.getvalue()
