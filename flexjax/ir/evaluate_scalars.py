"""Programs on scalars: a traced mod as the function that it was."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from flexjax.ir.evaluate import apply_op, literal_array
from flexjax.ir.program import INPUT_NAMES, KV, Atom, B, Lit, Load, Op, Program

Array = jax.Array


def call_program(
    program: Program, captures: Sequence[Array], indices: Sequence[Array], score: Array | None = None
) -> Array:
    """The first result at (b, h, q, kv). A load outside its array reads the nearest element."""
    env: dict[int, Array] = dict(zip(range(B, KV + 1), (jnp.asarray(i, jnp.int32) for i in indices), strict=True))
    if score is not None:
        env[INPUT_NAMES.index("score")] = score

    def read(atom: Atom) -> Array:
        return literal_array(atom) if isinstance(atom, Lit) else env[atom.id]

    for step in program.steps:
        if isinstance(step, Op):
            env[step.out.id] = apply_op(step, [read(a) for a in step.inputs])
        elif isinstance(step, Load):
            env[step.out.id] = jnp.asarray(captures[step.capture]).at[tuple(map(read, step.index))].get(mode="clip")
        else:
            operands = [
                captures[a] if isinstance(a, int) else jnp.stack([read(x) for x in a[1]]).reshape(a[0])
                for a in step.arguments
            ]
            for (_, vals), out in zip(step.results, step.bind(*operands), strict=True):
                env.update({v.id: out.ravel()[i] for i, v in enumerate(vals)})
    return read(program.results[0])


def as_mask_mod(program: Program, captures: Sequence[Array]) -> Callable[[Array, Array, Array, Array], Array]:
    """The program as a mask_mod(b, h, q_idx, kv_idx)."""

    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return call_program(program, captures, (b, h, q_idx, kv_idx))

    return mask_mod
