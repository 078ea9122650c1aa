"""Evaluates hoisted values: the part of a program that XLA computes once, over whole axes, before a kernel starts.

A value that does not depend on the score is hoisted where the kernel has no cheap form for it: anything of b and h
alone, reads of captured arrays along one axis or along the diagonals, and general gathers. Every operation of JAX works
here. Each value is an array [b, h, q, kv] of size 1 along the axes that it does not depend on; a value of q - kv is an
array [b, h, diagonals, 1] (`diagonal_grid`). hoisted_operands.py passes these arrays to the kernel.
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
    """Every position of the attention matrix; a size of 1 where a value does not depend on the axis."""
    return _placed(batch, heads, _positions(q_len, 2), _positions(kv_len, 3), placed)


def diagonal_grid(batch: int, heads: int, q_len: int, kv_len: int, placed: Placed) -> Grid:
    """One position on each diagonal of each (b, h); the origin has one run of queries and one of keys.

    The diagonals lie along dimension 2, by ascending q - kv in rows of the call, from 1 - kv_len to q_len - 1;
    dimension 3 has size 1.
    """
    delta = jnp.arange(1 - kv_len, q_len, dtype=jnp.int32).reshape(1, 1, -1, 1)
    return _placed(batch, heads, jnp.maximum(delta, 0), jnp.maximum(-delta, 0), placed)


def _placed(batch: int, heads: int, q_rows: jax.Array, kv_rows: jax.Array, placed: Placed) -> Grid:
    """Every batch entry and head at the positions of the given rows, int32 of rank 4."""
    b = _positions(batch, 0)
    return Grid(b, _positions(heads, 1), query_positions(*placed, b, q_rows), key_positions(*placed, b, kv_rows))


def evaluate(program: Program, captures: Sequence[jax.Array], grid: Grid, wanted: Sequence[Atom]) -> list[jax.Array]:
    """The values of the `wanted` atoms at the positions of the grid, of rank 4; none may depend on the score."""
    return ir_evaluate.evaluate(with_results(program, wanted), GridTile(grid, captures))


class GridTile:
    """The positions of a grid, on which ir/evaluate.py evaluates a program: its protocol `Tile`."""

    def __init__(self, grid: Grid, captures: Sequence[jax.Array]):
        self.captures = captures
        self.inputs = {ir.B: grid.b, ir.H: grid.h, ir.Q: grid.q, ir.KV: grid.kv}  # by the id of the input

    def input(self, val: Val) -> jax.Array:
        """The indices of b, h, q or kv over the grid; the score has none."""
        return self.inputs[val.id]

    def literal(self, lit: Lit) -> jax.Array:
        return ir_evaluate.literal_array(lit).reshape(1, 1, 1, 1)

    def spread(self, value: jax.Array, have: Axes, want: Axes) -> jax.Array:
        """The value itself, because all values are of rank 4 and broadcast."""
        return value

    def diagonal(self, val: Val, uniform: Mapping[int, jax.Array]) -> jax.Array:
        """`val` is linear in q - kv; `uniform` has its terms that depend on b and h alone, by id."""
        differences = self.inputs[ir.Q] - self.inputs[ir.KV]
        return diagonal_value(val, differences, self.inputs.__getitem__, uniform)

    def apply(self, op: Op, args: Sequence[jax.Array]) -> jax.Array:
        """Elementwise, on operands that broadcast."""
        return ir_evaluate.apply_op(op, jnp.broadcast_arrays(*args) if len(args) > 1 else args)

    def load(self, load: Load, index: Sequence[jax.Array]) -> jax.Array:
        """One element for each position of the index; a captured scalar as [1, 1, 1, 1]."""
        array = self.captures[load.capture]
        return array[tuple(jnp.broadcast_arrays(*index))] if index else array.reshape(1, 1, 1, 1)

    def loop(self, step: Op, size: int, body: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """A reduction over a loop index, which the body gets in the shape [1, 1, 1, 1]."""
        return ir_evaluate.loop_of_arrays(step, size, body, (1, 1, 1, 1))

    def call(self, call: Call, read: Callable[[Atom], jax.Array]) -> Sequence[jax.Array]:
        """A whole jaxpr equation at every position: an array of rank 4 for each scalar result."""
        return map_call(call, self.captures, read)
