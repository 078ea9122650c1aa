"""Block lists whose numbers are known while a call is traced.

Inside a kernel's lowering the block lists have no values, and what a kernel derives from them (transposed lists,
orders, tickets) would be computed by small XLA kernels in every step. `KnownLists` is a copy on the host that the plan
carries, from which a backend computes it once.

A plan is a key of caches, so lists are compared by their numbers. Inside jit that costs nothing; outside of it lists
may change from call to call, and `KernelPlan.for_any_lists` leaves them out.
"""

import hashlib

import numpy as np

MOST_BLOCKS = 1 << 18
"""Lists of more blocks are not kept, because what is derived from them would be megabytes of constants."""


class KnownLists:
    """The four arrays of BlockLists as numpy arrays, not to be written to; None for a list of width 0.

    `fixed`: the lists follow from the mask program and the lengths alone, so all calls of an equal plan have them.
    """

    __slots__ = ("_digest", "arrays", "fixed")

    def __init__(self, arrays: tuple[np.ndarray | None, ...], fixed: bool) -> None:
        """`arrays` are kept and not copied."""
        self.arrays = arrays
        self.fixed = fixed
        text = hashlib.sha256()
        for x in arrays:
            text.update(repr(None if x is None else x.shape).encode())
            text.update(b"" if x is None else np.ascontiguousarray(x).tobytes())
        self._digest = text.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KnownLists) and (self._digest, self.fixed) == (other._digest, other.fixed)

    def __hash__(self) -> int:
        return hash((self._digest, self.fixed))

    def __repr__(self) -> str:
        return f"KnownLists({self._digest.hex()[:8]}, fixed={self.fixed})"

    def __deepcopy__(self, memo: object) -> "KnownLists":
        return self  # dataclasses.astuple copies what it finds
