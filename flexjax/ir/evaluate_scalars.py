"""Programs on scalars: a traced mod evaluated at one position (b, h, q, kv), as the user's function was."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from flexjax.ir.evaluate import apply_op, literal_array
from flexjax.ir.program import INPUT_NAMES, KV, Atom, B, Lit, Load, Op, Program

Array = jax.Array


def call_program(
    program: Program, captures: Sequence[Array], indices: Sequence[Array], score: Array | None = None
) -> Array:
    """Evaluates a program at one position; returns its first result, a scalar of the result's dtype.

    captures   the captured arrays, in the order of `program.captures`; an index outside of an array is clipped
    indices    the int32 scalars b, h, q, kv
    score      the scalar score of a score_mod, None for a mask_mod
    """
    known: dict[int, Array] = dict(zip(range(B, KV + 1), (jnp.asarray(i, jnp.int32) for i in indices), strict=True))
    if score is not None:
        known[INPUT_NAMES.index("score")] = score

    def load(step: Load, index: list[Array]) -> Array:
        """The element of a captured array at the scalars of its index, clipped to the array."""
        return jnp.asarray(captures[step.capture]).at[tuple(index)].get(mode="clip")

    return evaluate_scalars(program, known, load, captures.__getitem__)


def evaluate_scalars(
    program: Program,
    known: Mapping[int, Array],
    load: Callable[[Load, list[Array]], Array],
    whole: Callable[[int], Array],
) -> Array:
    """Evaluates a program on scalars; returns its first result, a scalar of the result's dtype.

    known   values by id: the inputs that the program reads, and any other values that the caller has; a step whose results are all known
            is skipped
    load    gives the element that a load reads, from the load and the scalars of its index
    whole   gives a captured array by its number, for a Call that takes the whole array

    The steps are computed by jax.lax, so the function can be traced and differentiated.
    """
    env = dict(known)

    def read(atom: Atom) -> Array:
        """The scalar that an operand is."""
        return literal_array(atom) if isinstance(atom, Lit) else env[atom.id]

    for step in program.steps:
        if all(out.id in env for out in step.outs):
            continue
        if isinstance(step, Op):
            env[step.out.id] = apply_op(step, [read(a) for a in step.inputs])
        elif isinstance(step, Load):
            env[step.out.id] = load(step, [read(a) for a in step.index])
        else:
            operands = [
                whole(a) if isinstance(a, int) else _array_of(a[0], [read(x) for x in a[1]]) for a in step.arguments
            ]
            for (_, vals), out in zip(step.results, step.bind(*operands), strict=True):
                env.update({v.id: out.ravel()[i] for i, v in enumerate(vals)})
    return read(program.results[0])


def _array_of(shape: tuple[int, ...], scalars: Sequence[Array]) -> Array:
    """The array of that shape whose elements, in row-major order, are the scalars."""
    return jnp.stack(scalars).reshape(shape) if shape else scalars[0]


def as_mask_mod(program: Program, captures: Sequence[Array]) -> Callable[[Array, Array, Array, Array], Array]:
    """Turns a mask program into a mask_mod: a function of the int32 scalars (b, h, q_idx, kv_idx) that returns a bool scalar.

    captures   the captured arrays, in the order of `program.captures`; an index outside of an array is clipped
    """

    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The program's first result at that position; all arguments are int32 scalars."""
        return call_program(program, captures, (b, h, q_idx, kv_idx))

    return mask_mod
