"""Matrix products, lane reductions and fills as the kernels use them, in the forms that Mosaic compiles well.

A tile's rows lie along the sublanes and its columns along the lanes of vector registers, 128 lanes each.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends import tile_math
from flexjax.integers import cdiv

LANES = 128  # of a vector register
F32 = jnp.float32

Contraction = tuple[tuple[tuple[int], tuple[int]], tuple[tuple[()], tuple[()]]]
NT: Contraction = (((1,), (1,)), ((), ()))  # a . b^T
NN: Contraction = (((1,), (0,)), ((), ()))  # a . b
TN: Contraction = (((0,), (0,)), ((), ()))  # a^T . b


def dot(a: jax.Array, b: jax.Array, contraction: Contraction) -> jax.Array:
    """The product of two matrices in float32; float32 operands are not rounded to bfloat16."""
    if contraction == NT and b.shape[0] == 1 and b.dtype != F32:
        # Mosaic makes a product with one row a product of vectors, and gets its types wrong below float32.
        return dot(a, jnp.broadcast_to(b, (8, b.shape[1])), NT)[:, :1]
    precision = lax.Precision.HIGHEST if a.dtype == F32 else None
    return lax.dot_general(a, b, contraction, preferred_element_type=F32, precision=precision)


def lane_sums(values: jax.Array) -> jax.Array:
    """Partial sums of each row of (rows, columns), as (rows, 128): lane l has the columns l, l + 128, l + 256, ..."""
    rows, cols = values.shape
    total = None
    for start in range(0, cols, LANES):
        piece = values[:, start : start + LANES]
        if piece.shape[1] < LANES:
            piece = jnp.concatenate([piece, jnp.zeros((rows, LANES - piece.shape[1]), values.dtype)], axis=1)
        total = piece if total is None else total + piece
    assert total is not None
    return total


def repeat_lanes(state: jax.Array, cols: int) -> jax.Array:
    """(rows, 128), whose lanes are equal within each row, widened or cut to (rows, cols)."""
    if cols <= LANES:
        return state[:, :cols]
    return jnp.tile(state, (1, cdiv(cols, LANES)))[:, :cols]


def fill(ref: jax.Ref, value: float) -> None:
    ref[...] = jnp.full(ref.shape, value, ref.dtype)


def zero_rows_past_end(values: jax.Array, start: jax.Array, length: int | np.int32 | jax.Array) -> jax.Array:
    """A block (rows, columns), whose first row has number `start`, with 0 in the rows from number `length` on."""
    # A block may hold anything past the end of its array, NaN included.
    row = start + lax.broadcasted_iota(jnp.int32, (values.shape[0], 1), 0)
    end = np.int32(length) if isinstance(length, int) else length
    return jnp.where(row < end, values, jnp.zeros((), values.dtype))


def round_to(x: jax.Array, dtype: str, interpret: bool) -> jax.Array:
    """Float32 values rounded to a float `dtype` of 16 bits, still float32."""
    # Mosaic keeps the two casts; in the interpreter XLA may drop such a pair.
    return tile_math.round_to(x, dtype) if interpret else x.astype(dtype).astype(F32)
