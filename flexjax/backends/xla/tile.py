"""Evaluates programs on a tile of the attention matrix, as rank-4 arrays.

A value is [nb, nh, bq, blocks * bk] (see region.py) with 1 in place of every axis on which it does not depend. A value of
q - kv is a window for each key block, [nb, nh, blocks, bq + bk - 1] (see diagonals.py).
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.xla.diagonals import along_diagonals
from flexjax.backends.xla.region import Region
from flexjax.backends.xla.tile_slices import SlicePlan, slice_plan
from flexjax.ir.evaluate import apply_op, literal_array
from flexjax.ir.evaluate_rank4 import diagonal_value, map_call
from flexjax.ir.program import INPUT_NAMES, Atom, Axes, Call, Lit, Load, Op, Val

Array = jax.Array


class XlaTile:
    """A region on which ir/evaluate.py evaluates a program (see its `Tile`).

    captures   arrays in the order of the program's captures
    score      the raw scores of the region, for a score program
    guard      bool: which entries count. Elsewhere operations get 1 in place of their operands, so that the derivative of the
               evaluation has no NaN from masked entries. None: operands as they are
    indices    index values of each load that was evaluated, by id of its result
    """

    def __init__(
        self, region: Region, captures: Sequence[Array], score: Array | None = None, guard: Array | None = None
    ):
        self.region = region
        self.captures = captures
        self.score = score
        self.guard = guard
        self.indices: dict[int, list[Array]] = {}

    def input(self, val: Val) -> Array:
        if INPUT_NAMES[val.id] == "score":
            assert self.score is not None, "a mask program reads no score"
            return self.score
        return self.region.index(val.id)

    def literal(self, lit: Lit) -> Array:
        return literal_array(lit)

    def spread(self, value: Array, have: Axes, want: Axes) -> Array:
        if "delta" in have and "delta" not in want:
            return along_diagonals(value, self.region.bq, self.region.bk)
        return value

    def diagonal(self, val: Val, uniform: Mapping[int, Array]) -> Array:
        return diagonal_value(val, self.region.differences(), self.region.index, uniform)

    def apply(self, op: Op, args: Sequence[Array]) -> Array:
        if self.guard is not None and {"q", "kv"} <= op.out.axes:
            args = [_guarded(a, self.guard) for a in args]
        return apply_op(op, jnp.broadcast_arrays(*args) if len(args) > 1 else args)

    def load(self, load: Load, index: Sequence[Array]) -> Array:
        self.indices[load.out.id] = list(index)
        return self.read(load, self.captures[load.capture])

    def read(self, load: Load, array: Array) -> Array:
        """What the load reads from `array` (its captured array or a tangent of it). The program must be evaluated before."""
        plan = slice_plan(load)
        if plan is not None:
            return self._read_slices(plan, array)
        index = self.indices[load.out.id]
        if not index:
            return array.reshape(1, 1, 1, 1)
        index = [jnp.broadcast_to(i, jnp.broadcast_shapes((1, 1, 1, 1), *(x.shape for x in index))) for i in index]
        return array.at[tuple(index)].get(mode="clip")

    def _read_slices(self, plan: SlicePlan, array: Array) -> Array:
        """A tile load as slices, one for each key block; `array` must be padded to whole blocks (pad_captures)."""
        return (
            jnp.concatenate(
                [lax.dynamic_slice(array, *plan.window(self.region, j)) for j in range(self.region.blocks)],
                plan.kv_dim,
            )
            .transpose(plan.order)
            .reshape(plan.shape(self.region))
        )

    def call(self, call: Call, read: Callable[[Atom], Array]) -> Sequence[Array]:
        return map_call(call, self.captures, read)


def _guarded(value: Array, guard: Array) -> Array:
    """A float value with 1 where `guard` is False; other values as they are."""
    return jnp.where(guard, value, jnp.ones_like(value)) if jnp.issubdtype(value.dtype, jnp.floating) else value
