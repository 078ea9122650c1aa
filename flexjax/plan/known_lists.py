"""Block lists whose numbers are known while a call is traced.

Block lists are operands of the primitives, so inside a kernel's lowering they have no values, and what a kernel derives from
them (transposed lists, orders, tickets) would be computed by small XLA kernels in every step. `KnownLists` is a copy of them on
the host that the plan carries (`BlockLayout.known`). A backend that takes the copy computes what it derives once.

A plan is a key of caches, so lists are compared by their numbers. A program that was compiled for one set of numbers does not
serve another. Inside jit that costs nothing, because such lists are constants of the user's program. Outside of jit, lists that
follow from captured arrays or from a user's lists may change from call to call; `KernelPlan.for_any_lists` leaves them out there.
"""

import hashlib

import numpy as np

MOST_BLOCKS = 1 << 18
"""Lists of attention matrices with more blocks than this are not kept: what is derived from them would be megabytes of constants,
and computing it takes little beside so large a call."""


class KnownLists:
    """The four arrays of BlockLists as numpy arrays; two are equal if their shapes, their numbers and `fixed` are.

    arrays   int32, None for a list of width 0; not to be written to
    fixed    the lists follow from the mask program and the lengths alone, so all calls of an equal plan have them
    """

    __slots__ = ("_digest", "arrays", "fixed")

    def __init__(self, arrays: tuple[np.ndarray | None, ...], fixed: bool) -> None:
        """`arrays` are kept and not copied; their shapes and numbers are hashed once, here."""
        self.arrays = arrays
        self.fixed = fixed
        text = hashlib.sha256()
        for x in arrays:
            text.update(repr(None if x is None else x.shape).encode())
            text.update(b"" if x is None else np.ascontiguousarray(x).tobytes())
        self._digest = text.digest()

    def __eq__(self, other: object) -> bool:
        """Whether the other is a KnownLists whose arrays have the same shapes and numbers, by their SHA-256, and the same `fixed`."""
        return isinstance(other, KnownLists) and (self._digest, self.fixed) == (other._digest, other.fixed)

    def __hash__(self) -> int:
        """The hash of what `__eq__` compares."""
        return hash((self._digest, self.fixed))

    def __repr__(self) -> str:
        """The first 8 hexadecimal digits of the SHA-256, and `fixed`, because the numbers are too many for a text."""
        return f"KnownLists({self._digest.hex()[:8]}, fixed={self.fixed})"

    def __deepcopy__(self, memo: object) -> "KnownLists":
        """The object itself, because its arrays are not written to."""
        return self  # dataclasses.astuple copies what it finds
