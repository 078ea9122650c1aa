"""What every peer (implementation) uses: the same arrays, the same sample rows, and a lock on the GPU."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

import numpy as np

from bench.suites import MODS, Workload

SAMPLE_ROWS = 16
PERIOD = 4_194_301
"""Large random arrays repeat that many normal numbers. It is prime, so that no two rows are equal."""
REFERENCE = "reference"
"""The name under which the float32 reference runs, beside the names of the peers."""


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """A context in which no other process of this run times anything on the device: holds an exclusive lock on the file "lock" in
    `folder`, and waits for it first.
    """
    with open(os.path.join(folder, "lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sample_rows(length: int) -> np.ndarray:
    """The positions of the queries (and keys) whose results are compared, ascending ints: all of up to SAMPLE_ROWS tokens; of more,
    SAMPLE_ROWS that are spread evenly over `length` tokens, the first and the last included.
    """
    return np.linspace(0, length - 1, min(SAMPLE_ROWS, length)).astype(int)


def random_arrays(problem: Workload) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Makes the random arrays of a workload as numpy arrays in the dtypes that they have on the device.

    Returns ({"q", "k", "v", "d_out": array [B, T, heads, D]}, the array that the score mod reads or None); d_out is the
    cotangent of the output. Large arrays repeat PERIOD normal numbers, because generating hundreds of millions of them takes longer
    than everything else.
    """
    import ml_dtypes  # jax brings it

    def fill(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Normal numbers of that seed, in that shape and dtype (a name); the first PERIOD of them are repeated in larger arrays."""
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        size = min(int(np.prod(shape)), PERIOD)
        return np.resize(np.random.default_rng((seed, 0)).standard_normal(size, np.float32).astype(kind), shape)

    heads = dict(q=problem.heads, k=problem.kv_heads, v=problem.kv_heads, d_out=problem.heads)
    arrays = {
        name: fill(i, (problem.batch, problem.length, n, problem.dim), problem.dtype)
        for i, (name, n) in enumerate(heads.items())
    }
    mod = MODS[problem.mod] if problem.mod else None
    if mod is None or mod.shape is None:
        return arrays, None
    return arrays, mod.values(problem) if mod.values else fill(4, mod.shape(problem), mod.stored)
