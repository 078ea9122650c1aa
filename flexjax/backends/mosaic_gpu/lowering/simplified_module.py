"""Simplifies the module of a lowered kernel before jax serializes it, so that jax and Mosaic take less time.

Mosaic's first pass is MLIR's `canonicalize` from the first operation to the last ("top down"). Whenever it changes an
operation whose result a loop reads, it looks at all values that the loop carries again, so its time grows with their
square. From the last operation to the first ("bottom up") the same pass takes a fraction of the time. Mosaic's own pass
then finds nothing to do, and the machine code is the same. jax's work on the module afterwards takes half the time,
because half of a kernel's operations are repeated constants and addresses.
"""

import typing

if typing.TYPE_CHECKING:
    from jax.extend.mlir import ir

PASSES = "canonicalize{top-down=false},cse"  # MLIR's passes: simplify operations, and keep one of equal operations


def simplify(module: "ir.Module") -> None:
    """Simplifies a kernel's module in place; where jax lacks a pass, it raises and the module is as before."""
    from jaxlib.mlir import passmanager

    passes = passmanager.PassManager.parse(f"builtin.module({PASSES})", module.context)
    # jax has verified the module and verifies it again once it is serialized.
    passes.enable_verifier(False)
    passes.run(module.operation)
