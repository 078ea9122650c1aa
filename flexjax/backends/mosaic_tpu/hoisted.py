"""Evaluates hoisted values: the part of a program that XLA computes once, over whole axes, before a kernel starts.

A value that does not depend on the score is hoisted where the kernel has no cheap form for it: anything of b and h alone,
reads of captured arrays along one axis or along the diagonals, and general gathers. Every operation of JAX works here.
Each value is an array [b, h, q, kv] of size 1 along the axes that it does not depend on; a value of q - kv is an array
[b, h, diagonals, 1] (`diagonal_grid`). hoisted_operands.py passes these arrays to the kernel.

A program is a traced mod: steps on scalars (ir/program.py). An atom is an operand of a step: a literal or an earlier result.

A Grid says at which positions (b, h, q, kv) a program is evaluated.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from flexjax.ir import evaluate as ir_evaluate
from flexjax.ir import program as ir
from flexjax.ir.evaluate_rank4 import diagonal_value, map_call
from flexjax.ir.origin import Placed, key_positions, query_positions
from flexjax.ir.program import Atom, Axes, Call, Lit, Load, Op, Program, Val
from flexjax.ir.rewrite import with_results


@dataclasses.dataclass(frozen=True)
class Grid:
    """Positions at which values are evaluated: four int32 arrays of rank 4 that broadcast together."""

    b: jax.Array
    h: jax.Array
    q: jax.Array
    kv: jax.Array


def _positions(size: int, dim: int) -> jax.Array:
    """int32 0 .. size - 1 along dimension `dim` of a rank-4 array, whose other dimensions have size 1."""
    shape = [1, 1, 1, 1]
    shape[dim] = size
    return jnp.arange(size, dtype=jnp.int32).reshape(shape)


def whole_grid(batch: int, heads: int, q_len: int, kv_len: int, placed: Placed) -> Grid:
    """The grid of every position of the attention matrix: b, h, q and kv along dimensions 0 to 3.

    batch, heads, q_len, kv_len   of the call, or 1 where a value does not depend on the axis: then the first position stands
                                  for all
    placed                        where queries and keys lie in the whole problem; q and kv are positions there
    """
    return _placed(batch, heads, _positions(q_len, 2), _positions(kv_len, 3), placed)


def diagonal_grid(batch: int, heads: int, q_len: int, kv_len: int, placed: Placed) -> Grid:
    """The grid of one position on each diagonal of the attention matrix of each (b, h).

    batch, heads, q_len, kv_len   of the call
    placed                        where queries and keys lie in the whole problem; its origin has one run of queries and one of
                                  keys

    The diagonals lie along dimension 2, by ascending q - kv in rows of the call, from 1 - kv_len to q_len - 1; dimension 3 has
    size 1.
    """
    delta = jnp.arange(1 - kv_len, q_len, dtype=jnp.int32).reshape(1, 1, -1, 1)
    return _placed(batch, heads, jnp.maximum(delta, 0), jnp.maximum(-delta, 0), placed)


def _placed(batch: int, heads: int, q_rows: jax.Array, kv_rows: jax.Array, placed: Placed) -> Grid:
    """The grid of every batch entry and head at the positions of the given rows of query and key.

    batch, heads      how many there are
    q_rows, kv_rows   rows of query and of key, int32 arrays of rank 4
    placed            where queries and keys lie in the whole problem
    """
    b = _positions(batch, 0)
    return Grid(b, _positions(heads, 1), query_positions(*placed, b, q_rows), key_positions(*placed, b, kv_rows))


def evaluate(program: Program, captures: Sequence[jax.Array], grid: Grid, wanted: Sequence[Atom]) -> list[jax.Array]:
    """The values of the `wanted` atoms of a program at the positions of the grid, each an array of rank 4.

    captures   the captured arrays of the program

    None of the atoms may depend on the score.
    """
    return ir_evaluate.evaluate(with_results(program, wanted), GridTile(grid, captures))


class GridTile:
    """The positions of a grid as a region on which ir/evaluate.py evaluates a program: its protocol `Tile`.

    captures   the captured arrays of the program
    inputs     the values of b, h, q and kv, by the id of the input
    """

    def __init__(self, grid: Grid, captures: Sequence[jax.Array]):
        """The region of the positions of `grid`."""
        self.captures = captures
        self.inputs = {ir.B: grid.b, ir.H: grid.h, ir.Q: grid.q, ir.KV: grid.kv}

    def input(self, val: Val) -> jax.Array:
        """The indices of b, h, q or kv over the grid; the score has none."""
        return self.inputs[val.id]

    def literal(self, lit: Lit) -> jax.Array:
        """A literal as an array of shape [1, 1, 1, 1]."""
        return ir_evaluate.literal_array(lit).reshape(1, 1, 1, 1)

    def spread(self, value: jax.Array, have: Axes, want: Axes) -> jax.Array:
        """The value itself, because all values are of rank 4 and broadcast; the axes `have` and `want` are not read."""
        return value

    def diagonal(self, val: Val, uniform: Mapping[int, jax.Array]) -> jax.Array:
        """The value of `val`, which is linear in q - kv, at the positions of the grid.

        uniform   the values of those terms of its linear form that depend on b and h alone, by id
        """
        differences = self.inputs[ir.Q] - self.inputs[ir.KV]
        return diagonal_value(val, differences, self.inputs.__getitem__, uniform)

    def apply(self, op: Op, args: Sequence[jax.Array]) -> jax.Array:
        """The result of an elementwise operation on operands that broadcast."""
        return ir_evaluate.apply_op(op, jnp.broadcast_arrays(*args) if len(args) > 1 else args)

    def load(self, load: Load, index: Sequence[jax.Array]) -> jax.Array:
        """The elements of the load's captured array at the index values, one array for each of its dimensions; a captured
        scalar as [1, 1, 1, 1].
        """
        array = self.captures[load.capture]
        return array[tuple(jnp.broadcast_arrays(*index))] if index else array.reshape(1, 1, 1, 1)

    def call(self, call: Call, read: Callable[[Atom], jax.Array]) -> Sequence[jax.Array]:
        """The results of `call` (a whole jaxpr equation) at every position, an array of rank 4 for each scalar; `read` gives
        the value of an operand.
        """
        return map_call(call, self.captures, read)
