"""Simplifies the module of a lowered kernel before jax serializes it, so that jax and Mosaic take less time.

The first pass that Mosaic runs on a module is MLIR's `canonicalize`, which visits operations in the order of the program ("top down"). Whenever
it changes an operation whose result a loop reads, it looks at the whole loop again, for equal and for unused values that the loop
carries. A loop with two accumulators carries 130 values, and the time grows with their square: 0.8 s for the fused backward kernel. From the
last operation to the first ("bottom up") the same pass takes 0.03 s. Mosaic's own pass then finds nothing to do, and the machine code is the
same.

Half of the operations of a kernel as jax lowers it are constants and addresses that are there more than once. What jax does with the module
afterwards, a copy, a translation to a form that outlives versions of Mosaic ("serialized") and its bytecode, takes half the time without
them.
"""

import typing

if typing.TYPE_CHECKING:
    from jax.extend.mlir import ir

PASSES = "canonicalize{top-down=false},cse"
"""MLIR's passes: simplify operations, and keep one of equal operations."""


def simplify(module: "ir.Module") -> None:
    """Simplifies a kernel's module in place, before it is serialized. Raises whatever jax raises where it lacks one of the passes; the
    module is as before then.

    jax has verified the module and verifies it again once it is serialized, so it is not verified between.
    """
    from jaxlib.mlir import passmanager

    passes = passmanager.PassManager.parse(f"builtin.module({PASSES})", module.context)
    passes.enable_verifier(False)
    passes.run(module.operation)
