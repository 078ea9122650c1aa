"""What runs outside the kernels: a program over whole axes, as plain jax.

A value that does not need the score is computed here once, by XLA, wherever a kernel would find it awkward: anything of
b and h alone, reads of captured arrays along one axis or along the diagonals, and general gathers. Each value is an array
of rank 4, [b, h, q, kv], of size 1 along the axes it does not depend on. Any operation that jax has works here.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.ir import evaluate as on_arrays
from flexjax.ir import program as ir
from flexjax.ir.program import Atom, Call, Lit, Load, Op, Program


@dataclasses.dataclass(frozen=True)
class Grid:
    """Positions to evaluate at: four int32 arrays of rank 4 that broadcast together."""

    b: jax.Array
    h: jax.Array
    q: jax.Array
    kv: jax.Array


def axis(size: int, dim: int) -> jax.Array:
    """0 .. size - 1 along dimension `dim` of a rank 4 array."""
    shape = [1, 1, 1, 1]
    shape[dim] = size
    return jnp.arange(size, dtype=jnp.int32).reshape(shape)


def whole_grid(batch: int, heads: int, q_len: int, kv_len: int) -> Grid:
    return Grid(axis(batch, 0), axis(heads, 1), axis(q_len, 2), axis(kv_len, 3))


def diagonal_grid(batch: int, heads: int, q_len: int, kv_len: int) -> Grid:
    """One position on each diagonal, q - kv ascending from 1 - kv_len, along dimension 2."""
    delta = jnp.arange(1 - kv_len, q_len, dtype=jnp.int32).reshape(1, 1, -1, 1)
    return Grid(axis(batch, 0), axis(heads, 1), jnp.maximum(delta, 0), jnp.maximum(-delta, 0))


def constant(lit: Lit) -> np.ndarray:
    return np.asarray(lit.value, jnp.dtype(lit.dtype))


def evaluate(program: Program, captures: Sequence[jax.Array], grid: Grid, wanted: Sequence[Atom]) -> list[jax.Array]:
    """The wanted atoms (none may depend on the score) at the positions of the grid, each of rank 4."""
    live = ir.uses(program.steps, tuple(wanted))
    env = {ir.B: grid.b, ir.H: grid.h, ir.Q: grid.q, ir.KV: grid.kv}

    def read(atom: Atom) -> jax.Array:
        if isinstance(atom, Lit):
            return jnp.asarray(constant(atom)).reshape(1, 1, 1, 1)
        return env[atom.id]

    for step in program.steps:
        if not any(o.id in live for o in step.outs):
            continue
        if isinstance(step, Op):
            env[step.out.id] = apply_op(step, [read(a) for a in step.inputs])
        elif isinstance(step, Load):
            index = jnp.broadcast_arrays(*[read(a) for a in step.index]) if step.index else []
            found = captures[step.capture][tuple(index)] if index else captures[step.capture].reshape(1, 1, 1, 1)
            env[step.out.id] = found
        else:
            env.update(_call(step, captures, read))
    return [read(a) for a in wanted]


def _call(step: Call, captures: Sequence[jax.Array], read: Callable[[Atom], jax.Array]) -> dict[int, jax.Array]:
    """A whole equation, mapped over the positions."""
    moving = [read(a) for argument in step.arguments if not isinstance(argument, int) for a in argument[1]]
    shape = np.broadcast_shapes((1, 1, 1, 1), *[m.shape for m in moving])
    flat = [jnp.broadcast_to(m, shape).reshape(-1) for m in moving]

    def one(*scalars: jax.Array) -> list[jax.Array]:
        scalars_left = list(scalars)
        values = []
        for argument in step.arguments:
            if isinstance(argument, int):
                values.append(captures[argument])
            else:
                parts = [scalars_left.pop(0) for _ in argument[1]]
                values.append(jnp.stack(parts).reshape(argument[0]) if argument[0] else parts[0])
        return [jnp.ravel(r) for r in step.bind(*values)]

    results = jax.vmap(one)(*flat) if flat else [r[None] for r in one()]
    found = {}
    for (_, vals), result in zip(step.results, results, strict=True):
        for i, val in enumerate(vals):
            found[val.id] = result[:, i].reshape(shape)
    return found


def apply_op(op: Op, args: Sequence[jax.Array]) -> jax.Array:
    """An elementwise operation of a program on arrays of any shapes that broadcast."""
    return on_arrays.apply_op(op, jnp.broadcast_arrays(*args) if len(args) > 1 else list(args))
