"""What a block mask that was made with `tolerance` holds for: one score_mod with its captured numbers, one scale."""

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from flexjax.ir.program import Program

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Claim:
    """Static: a block mask is another kind of pytree for another claim."""

    score: Program
    sizes: tuple[int, int, int, int]  # for which it was traced: batch, heads, q_len, kv_len
    digests: tuple[bytes, ...]  # of the captured arrays, in the order of the program
    scale: float | None  # None: that of the call, 1 / sqrt(head dim)
    tolerance: float
    weighted: bool = False  # `score` gives weights


def digests_of(arrays: Sequence[Array]) -> tuple[bytes, ...]:
    """What tells known arrays of other numbers apart."""
    return tuple(hashlib.sha256(np.ascontiguousarray(np.asarray(x)).tobytes()).digest() for x in arrays)
