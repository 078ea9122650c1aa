"""What is measured.  A problem is a row of data; its mask is one expression, for numpy and JAX alike."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

PASSES = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Self-attention of one shape under one mask.

    mask      name in `MASKS`, and its parameter: window width, number of documents, 0 where it has none
    skip      peers that are left out here, with the reason
    seconds   time budget of one measurement, warm-up and compilation apart
    """

    name: str
    mask: str
    parameter: int
    length: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    dim: int = 64
    dtype: str = "float32"
    passes: tuple[str, ...] = PASSES
    skip: tuple[tuple[str, str], ...] = ()
    seconds: float = 10.0

    def arrays(self) -> dict[str, np.ndarray]:
        """q, k, v and the cotangent of the output, [B, T, N, D] float32, the same for every peer."""
        rng = np.random.default_rng(0)
        heads = dict(q=self.heads, k=self.kv_heads, v=self.kv_heads, d_out=self.heads)
        return {
            name: rng.standard_normal((self.batch, self.length, n, self.dim), np.float32) for name, n in heads.items()
        }

    def allowed(self) -> Callable[[Any, Any], Any]:
        """(q, kv) -> bool, for scalars and for arrays that broadcast."""
        return MASKS[self.mask](self)

    def visited(self) -> int:
        """Number of (query, key) pairs that the mask keeps, of `length * length`."""
        allowed, keys, step = self.allowed(), np.arange(self.length), max(1, 2**24 // self.length)
        rows = (np.arange(start, min(start + step, self.length)) for start in range(0, self.length, step))
        return sum(int(np.count_nonzero(allowed(r[:, None], keys[None, :]))) for r in rows)

    def flops(self, which: str) -> float:
        """Of the kept pairs alone: 4 B N D a pair forward, 2.5 times that for the backward pass."""
        forward = 4.0 * self.batch * self.heads * self.dim * self.visited()
        return forward if which == "forward" else 3.5 * forward


def document_ids(length: int, documents: int) -> np.ndarray:
    """int32 [length], sorted; document lengths are drawn, none is empty."""
    cuts = np.random.default_rng(1).choice(np.arange(1, length), documents - 1, replace=False)
    return np.searchsorted(np.sort(cuts), np.arange(length), side="right").astype(np.int32)


def _documents(problem: Problem) -> Callable[[Any, Any], Any]:
    ids = document_ids(problem.length, problem.parameter)

    def allowed(q: Any, kv: Any) -> Any:
        if isinstance(q, np.ndarray):
            return (ids[q] == ids[kv]) & (q >= kv)
        import jax.numpy as jnp

        on_device = jnp.asarray(ids)
        return (on_device[q] == on_device[kv]) & (q >= kv)

    return allowed


MASKS: dict[str, Callable[[Problem], Callable[[Any, Any], Any]]] = {
    "full": lambda p: lambda q, kv: (q >= 0) & (kv >= 0),
    "causal": lambda p: lambda q, kv: q >= kv,
    "window": lambda p: lambda q, kv: (q >= kv) & (q - kv < p.parameter),
    "documents": _documents,
}

_TOO_LARGE = (("dense", "scores of 17 GB"), ("jax.nn", "scores of 17 GB"))

SUITES: dict[str, tuple[Problem, ...]] = {
    "cpu": (
        Problem("causal 256", "causal", 0, 256, seconds=3),
        Problem("causal 512", "causal", 0, 512, seconds=3),
        Problem("causal 1024", "causal", 0, 1024, seconds=5),
        Problem("causal 8192", "causal", 0, 8192, seconds=30),
        Problem("window 256 of 8192", "window", 256, 8192, seconds=20),
        Problem("16 documents in 8192", "documents", 16, 8192, seconds=20),
        Problem("window 256 of 32768", "window", 256, 32768, skip=_TOO_LARGE, seconds=20),
    ),
    # a few seconds in all: for tests and for trying the harness
    "tiny": (
        Problem("causal 64", "causal", 0, 64, dim=16, seconds=0.2),
        Problem("3 documents in 96", "documents", 3, 96, dim=16, kv_heads=2, seconds=0.2, passes=("forward",)),
    ),
}
