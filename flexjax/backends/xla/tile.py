"""Evaluates programs on a tile of the attention matrix, as rank-4 arrays.

A program is a traced mod: steps on scalars (ir/program.py). Over a tile each of its values is an array. It is [nb, nh, bq, blocks
* bk] (see region.py) with 1 in place of every axis on which it does not depend. A value of q - kv is a window for each key block,
[nb, nh, blocks, bq + bk - 1] (see diagonals.py).

A Region says which part of the attention matrix the tile covers, a SlicePlan how a load reads its array by slices.
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
    """A tile on which ir/evaluate.py evaluates a program (see its `Tile`). Values have the shapes that the file docstring says.

    region     where the tile lies in the attention matrix
    captures   the captured arrays, in the order of the program's captures, padded as pad_captures does
    score      the raw scores of the tile, for a score program; None for a mask or dropout program
    guard      bool, broadcastable to the tile: which entries are visible. At the other entries operations get 1 in place of
               their floating operands, so that the derivative of the evaluation has no NaN from them. None: operands as they are
    indices    for each load that was evaluated, by id of its result: the values of its index in each dimension
    """

    def __init__(
        self, region: Region, captures: Sequence[Array], score: Array | None = None, guard: Array | None = None
    ):
        """`region`, `captures`, `score` and `guard` are as the class docstring says; no load is evaluated yet."""
        self.region = region
        self.captures = captures
        self.score = score
        self.guard = guard
        self.indices: dict[int, list[Array]] = {}

    def input(self, val: Val) -> Array:
        """An input of the program over the tile: the raw scores, or the indices along b, h, q or kv."""
        if INPUT_NAMES[val.id] == "score":
            assert self.score is not None, "a mask program reads no score"
            return self.score
        return self.region.index(val.id)

    def literal(self, lit: Lit) -> Array:
        """A literal as an array of shape ()."""
        return literal_array(lit)

    def spread(self, value: Array, have: Axes, want: Axes) -> Array:
        """A value with axes `have`, for use with axes `want`: a window of q - kv becomes a tile; all others broadcast as they
        are.
        """
        if "delta" in have and "delta" not in want:
            return along_diagonals(value, self.region.bq, self.region.bk)
        return value

    def diagonal(self, val: Val, uniform: Mapping[int, Array]) -> Array:
        """The window of `val`, which is linear in q - kv, for each key block: [nb, nh, blocks, bq + bk - 1], 1 along b or h if
        `val` does not depend on it.

        uniform   the values of the terms of its linear form that depend on b and h, by id
        """
        return diagonal_value(val, self.region.differences(), self.region.index, uniform)

    def apply(self, op: Op, args: Sequence[Array]) -> Array:
        """The result of an elementwise operation on operands that broadcast.

        With `guard`, an operation whose result depends on both q and kv gets 1 in place of its floating operands at
        hidden entries; other operations get their operands as they are.
        """
        if self.guard is not None and {"q", "kv"} <= op.out.axes:
            args = [_guarded(a, self.guard) for a in args]
        return apply_op(op, jnp.broadcast_arrays(*args) if len(args) > 1 else args)

    def load(self, load: Load, index: Sequence[Array]) -> Array:
        """The elements that the load reads from its captured array, in the shape that `read` gives.

        index   the values of the load's index in each dimension; they are kept in `indices`, where `read` and the gradients of
                captured arrays find them
        """
        self.indices[load.out.id] = list(index)
        return self.read(load, self.captures[load.capture])

    def read(self, load: Load, array: Array) -> Array:
        """The elements that the load reads over the tile, taken from `array`: its captured array, or a tangent of that array,
        padded alike.

        A load that has a `slice_plan` is read as slices: [nb or 1, nh or 1, bq, blocks * bk]. Any other is a gather at `indices`,
        clipped to the array, so the program has to be evaluated on this tile first; its shape is that to which the index values
        broadcast, with at least 4 dims. A captured scalar comes as [1, 1, 1, 1].
        """
        plan = slice_plan(load)
        if plan is not None:
            return self._read_slices(plan, array)
        index = self.indices[load.out.id]
        if not index:
            return array.reshape(1, 1, 1, 1)
        index = [jnp.broadcast_to(i, jnp.broadcast_shapes((1, 1, 1, 1), *(x.shape for x in index))) for i in index]
        return array.at[tuple(index)].get(mode="clip")

    def _read_slices(self, plan: SlicePlan, array: Array) -> Array:
        """The elements of a load that the `plan` reads as one slice of `array` for each key block, in the shape `plan.shape`.

        `array` must be padded to whole blocks (pad_captures).
        """
        return (
            jnp.concatenate(
                [lax.dynamic_slice(array, *plan.window(self.region, j)) for j in range(self.region.blocks)],
                plan.kv_dim,
            )
            .transpose(plan.order)
            .reshape(plan.shape(self.region))
        )

    def call(self, call: Call, read: Callable[[Atom], Array]) -> Sequence[Array]:
        """The results of `call` (a whole jaxpr equation), evaluated at every position: an array of rank 4 for each scalar
        result.

        read   gives the value of an operand
        """
        return map_call(call, self.captures, read)


def _guarded(value: Array, guard: Array) -> Array:
    """A float value with 1 where `guard` is False; other values as they are."""
    return jnp.where(guard, value, jnp.ones_like(value)) if jnp.issubdtype(value.dtype, jnp.floating) else value
