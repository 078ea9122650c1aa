"""Evaluates programs on a tile of the attention matrix, as rank-4 arrays.

Over a tile each value of a program is an array [nb, nh, bq, blocks * bk] (region.py) with 1 in place of every axis on
which it does not depend. A value of q - kv is a window for each key block, [nb, nh, blocks, bq + bk - 1]
(diagonals.py).
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.xla.diagonals import along_diagonals
from flexjax.backends.xla.region import Region
from flexjax.backends.xla.tile_slices import SlicePlan, slice_plan
from flexjax.ir.evaluate import apply_op, literal_array, loop_of_arrays
from flexjax.ir.evaluate_rank4 import diagonal_value, map_call
from flexjax.ir.operations import COTANGENT
from flexjax.ir.program import INPUT_NAMES, Atom, Axes, Call, Lit, Load, Op, Val

Array = jax.Array


class XlaTile:
    """A tile on which ir/evaluate.py evaluates a program (see its `Tile`).

    region     where the tile lies in the attention matrix
    captures   the captured arrays, in the order of the program's captures, padded as pad_captures does
    score      the raw scores of the tile, for a score program; None for a mask or dropout program
    guard      bool, broadcastable to the tile: which entries are visible. At the others floating operands become 1, so
               that the derivative of the evaluation has no NaN from them. None: operands as they are
    cotangent  of the new scores of the tile, for a derivative program that takes it (`Program.takes_cotangent`)
    runs       of the program along the keys (`patterns.run_lengths`), if key blocks begin at multiples of their size
    indices    for each load that was evaluated, by id of its result: the values of its index in each dimension
    """

    def __init__(
        self,
        region: Region,
        captures: Sequence[Array],
        score: Array | None = None,
        guard: Array | None = None,
        cotangent: Array | None = None,
        runs: Mapping[int, int] | None = None,
    ):
        """The arguments are as the class docstring says; no load is evaluated yet."""
        self.region = region
        self.captures = captures  # padded as pad_captures does
        self.score = score  # raw scores, for a score program
        self.guard = guard
        self.cotangent = cotangent
        self.runs = runs
        self.indices: dict[int, list[Array]] = {}

    def input(self, val: Val) -> Array:
        if INPUT_NAMES[val.id] == "score":
            assert self.score is not None, "a mask program reads no score"
            return self.score
        return self.region.index(val.id)

    def literal(self, lit: Lit) -> Array:
        return literal_array(lit)

    def spread(self, value: Array, have: Axes, want: Axes) -> Array:
        """A window of q - kv becomes a tile; all others broadcast as they are."""
        if "delta" in have and "delta" not in want:
            return along_diagonals(value, self.region.bq, self.region.bk)
        return value

    def diagonal(self, val: Val, uniform: Mapping[int, Array]) -> Array:
        """The window of `val`, linear in q - kv, for each key block; `uniform` has its terms of b and h, by id."""
        return diagonal_value(val, self.region.differences(), self.region.index, uniform)

    def apply(self, op: Op, args: Sequence[Array]) -> Array:
        """The result of an elementwise operation on operands that broadcast.

        With `guard`, an operation whose result depends on both q and kv gets 1 in place of its floating operands at
        hidden entries; other operations get their operands as they are.
        """
        if op.prim == COTANGENT:
            assert self.cotangent is not None, "only a backward pass has cotangents"
            return self.cotangent.astype(op.out.dtype)
        if self.guard is not None and {"q", "kv"} <= op.out.axes:
            args = [_guarded(a, self.guard) for a in args]
        return apply_op(op, jnp.broadcast_arrays(*args) if len(args) > 1 else args)

    def load(self, load: Load, index: Sequence[Array]) -> Array:
        """Keeps the index values, which `read` and the gradients of captured arrays need."""
        self.indices[load.out.id] = list(index)
        return self.read(load, self.captures[load.capture])

    def read(self, load: Load, array: Array) -> Array:
        """What the load reads over the tile from `array`: its captured array, or a tangent of that array, padded alike.

        A load without a `slice_plan` is a gather at `indices`, so the program has to be evaluated on this tile first.
        """
        plan = slice_plan(load)
        if plan is not None:
            return self._read_slices(plan, array)
        index = self.indices[load.out.id]
        if not index:
            return array.reshape(1, 1, 1, 1)
        width = self.region.bk
        if self.runs and self.runs[load.out.id] and self.runs[load.out.id] % width == 0:
            index = [
                i[..., ::width] if i.ndim and i.shape[-1] > 1 else i for i in index
            ]  # one element for each key block
            return jnp.repeat(_gathered(array, index), width, -1)
        return _gathered(array, index)

    def _read_slices(self, plan: SlicePlan, array: Array) -> Array:
        """One slice of `array`, padded to whole blocks (pad_captures), for each key block."""
        return (
            jnp.concatenate(
                [lax.dynamic_slice(array, *plan.window(self.region, j)) for j in range(self.region.blocks)], plan.kv_dim
            )
            .transpose(plan.order)
            .reshape(plan.shape(self.region))
        )

    def loop(self, step: Op, size: int, body: Callable[[Array], Array]) -> Array:
        """A reduction over a loop index, which the body gets in the shape [1, 1, 1, 1]."""
        return loop_of_arrays(step, size, body, (1, 1, 1, 1))

    def call(self, call: Call, read: Callable[[Atom], Array]) -> Sequence[Array]:
        """A whole jaxpr equation at every position: an array of rank 4 for each scalar result."""
        return map_call(call, self.captures, read)


def _guarded(value: Array, guard: Array) -> Array:
    """A float value with 1 where `guard` is False; other values as they are."""
    return jnp.where(guard, value, jnp.ones_like(value)) if jnp.issubdtype(value.dtype, jnp.floating) else value


def _gathered(array: Array, index: Sequence[Array]) -> Array:
    """The elements at indices of rank 4, which broadcast."""
    shape = jnp.broadcast_shapes((1, 1, 1, 1), *(x.shape for x in index))
    return array.at[tuple(jnp.broadcast_to(i, shape) for i in index)].get(mode="clip")
