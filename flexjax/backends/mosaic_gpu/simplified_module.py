"""Simplifies the module of a lowered kernel before XLA gets it, so that Mosaic compiles it in less time.

The first pass that Mosaic runs on a module is MLIR's `canonicalize`, which visits operations in the order of the program ("top down"). Whenever
it changes an operation whose result a loop reads, it looks at the whole loop again, for equal and for unused values that the loop
carries. A loop with two accumulators carries 130 values, and the time grows with their square: 0.8 s for the fused backward kernel. From the
last operation to the first ("bottom up") the same pass takes 0.03 s. Mosaic's own pass then finds nothing to do, and the machine code is the
same.

A kernel's module travels as bytecode in a form that outlives versions of Mosaic ("serialized", with a version number). It is read back from
that form, simplified, and written in the same version. All of this uses parts of jax that are not public; compile_ahead.py leaves a
module as it is where they have changed, and where it cannot be read back, as those that jax.export writes in an older version.
"""

import io
import typing

if typing.TYPE_CHECKING:
    from jax.extend.mlir import ir

PASSES = "canonicalize{top-down=false},cse"
"""MLIR's passes: simplify operations, and keep one of equal operations."""
VERSION = "stable_mosaic_gpu.version"
"""The attribute of a serialized module with the version of its form."""


def simplified(module: bytes, context: "ir.Context") -> bytes:
    """The serialized module of a kernel, simplified.

    module    bytecode of the module
    context   in which the kernel was lowered. It allows unregistered dialects, those of a serialized module, only while this runs

    Returns bytecode of the same version. Raises whatever jax raises where it lacks one of the passes or the version.
    """
    from jax.experimental.mosaic.gpu import dialect  # pyright: ignore[reportPrivateImportUsage]
    from jax.extend.mlir import ir
    from jaxlib.mlir import passmanager

    dialect.register_dialect(context)
    allowed = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
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
    finally:
        context.allow_unregistered_dialects = allowed


def bytecode(module: "ir.Module") -> bytes:
    """A module as bytecode, in the version of MLIR's format that every jaxlib reads."""
    written = io.BytesIO()
    module.operation.write_bytecode(written, desired_version=0)
    return written.getvalue()
