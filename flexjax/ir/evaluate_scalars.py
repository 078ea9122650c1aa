"""Programs on scalars: a traced mod evaluated at one position (b, h, q, kv), as the user's function was.

`call_program` runs loops one round after the other. `evaluate_scalars`, of which JAX makes derivatives, has a whole
array for each value that depends on loop indices: its dims are these indices, in the order of `in_loop_order`.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.ir.evaluate import apply_op, evaluate, literal_array, loop_of_arrays
from flexjax.ir.evaluate_rank4 import diagonal_value
from flexjax.ir.operations import COTANGENT, LOOP_AT, LOOP_INDEX, REDUCTIONS
from flexjax.ir.program import (
    INPUT_NAMES,
    KV,
    Atom,
    Axes,
    B,
    Call,
    Lit,
    Load,
    Op,
    Program,
    Q,
    Val,
    axes_of,
    in_loop_order,
    is_vector,
    loop_axis,
    loop_indices,
    loop_size,
    loops_of,
    vector_axes,
)

Array = jax.Array


def call_program(
    program: Program,
    captures: Sequence[Array],
    indices: Sequence[Array],
    score: Array | None = None,
    cotangent: Array | None = None,
) -> Array:
    """The first result of a program at one position.

    captures    the captured arrays; an index outside of an array is clipped
    indices     the int32 scalars b, h, q, kv
    cotangent   of the new score, for a derivative program that takes it
    """
    known: dict[int, Array] = dict(zip(range(B, KV + 1), (jnp.asarray(i, jnp.int32) for i in indices), strict=True))
    if score is not None:
        known[INPUT_NAMES.index("score")] = score
    return evaluate(program, ScalarTile(known, captures, cotangent))[0]


class ScalarTile:
    """One position as a Tile (evaluate.py); `known` has the inputs by id."""

    def __init__(self, known: Mapping[int, Array], captures: Sequence[Array], cotangent: Array | None = None):
        self.known, self.captures, self.cotangent = known, captures, cotangent

    def input(self, val: Val) -> Array:
        return self.known[val.id]

    def literal(self, lit: Lit) -> Array:
        return literal_array(lit)

    def spread(self, value: Array, have: Axes, want: Axes) -> Array:
        return value

    def diagonal(self, val: Val, uniform: Mapping[int, Array]) -> Array:
        return diagonal_value(val, self.known[Q] - self.known[KV], self.known.__getitem__, uniform)

    def apply(self, op: Op, args: Sequence[Array]) -> Array:
        if op.prim == COTANGENT:
            assert self.cotangent is not None
            return self.cotangent.astype(op.out.dtype)
        return apply_op(op, args)

    def load(self, load: Load, index: Sequence[Array]) -> Array:
        return jnp.asarray(self.captures[load.capture]).at[tuple(index)].get(mode="clip")

    def loop(self, step: Op, size: int, body: Callable[[Array], Array]) -> Array:
        return loop_of_arrays(step, size, body, ())

    def call(self, call: Call, read: Callable[[Atom], Array]) -> list[Array]:
        return _call(call, lambda atom, loops: read(atom), self.captures.__getitem__)


def evaluate_scalars(
    program: Program,
    known: Mapping[int, Array],
    load: Callable[[Load, list[Array]], Array],
    whole: Callable[[int], Array],
    result: int = 0,
) -> Array:
    """A result of a program at one position, by jax.lax, as a function that JAX can differentiate.

    known   values by id: the inputs, and any others that the caller has; a step whose results are known is skipped
    load    gives the element that a load reads, from the values of its index
    whole   gives a captured array by its number, for a Call that takes it whole
    result  the number of the result
    """
    env, indices = dict(known), loop_indices(program)

    def read(atom: Atom, loops: Axes = frozenset()) -> Array:
        """The value of an operand, with the dims of the loop indices `loops`, which contain its own."""
        value = literal_array(atom) if isinstance(atom, Lit) else env[atom.id]
        return _with_dims(value, loops_of(axes_of(atom)), loops)

    for step in program.steps:
        if all(out.id in env for out in step.outs):
            continue
        loops = loops_of(step.outs[0].axes)
        if isinstance(step, Op) and step.prim == LOOP_INDEX:
            env[step.out.id] = jnp.arange(loop_size(*loops), dtype=jnp.int32)
        elif isinstance(step, Op) and step.prim in REDUCTIONS:
            operand = step.inputs[0]
            (axis,) = axes_of(step.inputs[1])
            place = in_loop_order(axes_of(operand)).index(axis)
            env[step.out.id] = WHOLE[step.prim](read(operand, loops_of(axes_of(operand))), place)
        elif isinstance(step, Op) and step.prim == LOOP_AT:
            env[step.out.id] = _element_of_vector(step, read, indices)
        elif isinstance(step, Op):
            env[step.out.id] = apply_op(step, [read(a, loops) for a in step.inputs])
        elif isinstance(step, Load):
            env[step.out.id] = load(step, [read(a, loops) for a in step.index])
        else:
            values = _call(step, read, whole)
            env.update(zip((v.id for v in step.outs), values, strict=True))
    return read(program.results[result])


def _call(call: Call, read: Callable[[Atom, Axes], Array], whole: Callable[[int], Array]) -> list[Array]:
    """The values of a Call's results; `read` and `whole` give atoms and captured arrays."""
    operands = []
    for argument in call.arguments:
        if isinstance(argument, int):
            operands.append(whole(argument))
            continue
        shape, atoms = argument
        if is_vector(shape, atoms):
            order, axes = _orders(shape)
            value = read(atoms[0], frozenset(axes))
            operands.append(value.transpose([order.index(axis) for axis in axes]).reshape(shape))
        else:
            operands.append(_array_of(shape, [read(atom, frozenset()) for atom in atoms]))
    found = []
    for (shape, vals), out in zip(call.results, call.bind(*operands), strict=True):
        if is_vector(shape, vals):
            order, axes = _orders(shape)
            found.append(out.reshape(tuple(map(loop_size, axes))).transpose([axes.index(axis) for axis in order]))
        else:
            found += list(out.ravel())
    return found


def _orders(shape: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """The loop indices of a vector of that shape: in the order of `in_loop_order`, and in that of its dims."""
    axes = [loop_axis(*pair) for pair in vector_axes(shape)]
    return in_loop_order(frozenset(axes)), axes


def _with_dims(value: Array, have: Axes, want: Axes) -> Array:
    """An array whose dims are the loop indices `have`, broadcast to those of `want`."""
    if have == want:
        return value
    order = in_loop_order(want)
    places = tuple(order.index(axis) for axis in in_loop_order(have))
    return lax.broadcast_in_dim(value, tuple(map(loop_size, order)), places)


def _element_of_vector(step: Op, read: Callable[[Atom, Axes], Array], indices: Mapping[str, Val]) -> Array:
    """The result of `loop_at`, elements of an array at other indices; `indices`: the program's loop indices by axis."""
    vector, *pairs = step.inputs
    value, order = read(vector, loops_of(axes_of(vector))), in_loop_order(axes_of(vector))
    moved = {next(iter(axes_of(k))): i for k, i in zip(pairs[::2], pairs[1::2], strict=True)}
    axis_of = {val: axis for axis, val in indices.items()}
    names = [axis_of.get(moved[axis]) if axis in moved else axis for axis in order]  # type: ignore[arg-type]
    if None not in names and len(set(names)) == len(names) == len(loops_of(step.out.axes)):
        return value.transpose([names.index(axis) for axis in in_loop_order(step.out.axes)])
    final = in_loop_order(step.out.axes)
    shape = (*map(loop_size, final), *map(loop_size, order))
    old = tuple(range(len(final), len(shape)))
    # a sum of which one term is not 0, because the derivative of a gather is a scatter
    full = lax.broadcast_in_dim(value, shape, old)
    for dim, axis in zip(old, order, strict=True):
        count = lambda d: lax.broadcasted_iota(jnp.int32, shape, d)
        wanted = count(final.index(axis)) if axis not in moved else None
        if wanted is None:
            wanted = lax.broadcast_in_dim(read(moved[axis], loops_of(step.out.axes)), shape, tuple(range(len(final))))
        full = jnp.where(count(dim) == wanted, full, jnp.zeros_like(full))
    return full.sum(old, dtype=value.dtype)


def _product(x: Array, axis: int) -> Array:
    """The product along an axis, differentiable in as many steps for all sizes."""

    @jax.custom_jvp
    def product(x: Array) -> Array:
        return jnp.prod(x, 0)

    @product.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        (x,), (t,) = primals, tangents
        same = jnp.eye(x.shape[0], dtype=bool).reshape(*x.shape[:1] * 2, *(1,) * (x.ndim - 1))
        return jnp.prod(x, 0), (t * jnp.prod(jnp.where(same, jnp.ones_like(x), x[None]), 1)).sum(0)

    return product(jnp.moveaxis(x, axis, 0))


# of whole arrays along an axis
WHOLE: dict[str, Callable[[Array, int], Array]] = {
    "loop_add": lambda x, axis: x.sum(axis, dtype=x.dtype),
    "loop_mul": _product,
    "loop_max": lambda x, axis: x.max(axis),
    "loop_min": lambda x, axis: x.min(axis),
    "loop_and": lambda x, axis: lax.reduce_and(x, (axis,)),
    "loop_or": lambda x, axis: lax.reduce_or(x, (axis,)),
    "loop_xor": lambda x, axis: lax.reduce_xor(x, (axis,)),
}


def _array_of(shape: tuple[int, ...], scalars: Sequence[Array]) -> Array:
    return jnp.stack(scalars).reshape(shape) if shape else scalars[0]


def as_mask_mod(program: Program, captures: Sequence[Array]) -> Callable[[Array, Array, Array, Array], Array]:
    """A mask program as a function of the int32 scalars (b, h, q_idx, kv_idx); bad indices are clipped."""

    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return call_program(program, captures, (b, h, q_idx, kv_idx))

    return mask_mod
