"""Evaluation on arrays [b, h, q, kv], of size 1 along axes that a value does not depend on.

A `Tile` (evaluate.py) whose values are such arrays implements `diagonal` by `diagonal_value` and `call` by `map_call`.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from flexjax.ir.program import Atom, B, Call, H, Val
from flexjax.ir.ranges import modular

Array = jax.Array


def diagonal_value(
    val: Val, differences: Array, position: Callable[[int], Array], uniform: Mapping[int, Array]
) -> Array:
    """An integer value from its linear form in b, h and q - kv, whose q and kv coefficients are opposite.

    differences   q - kv at the wanted positions
    position      the indices along b or h, by the id of that input (program.B or program.H)
    uniform       the values of the form's uniform terms, by id
    """
    linear = val.linear
    assert linear is not None
    terms = [(linear.q, differences)]
    terms += [(c, position(axis)) for c, axis in ((linear.b, B), (linear.h, H)) if c]
    terms += [(c, uniform[ident]) for ident, c in linear.uniform]
    # The sum fits the dtype of the value, so partial sums that wrap around modulo 2^bits come back.
    total = jnp.asarray(modular(linear.const, val.dtype))
    for coefficient, term in terms:
        total = total + term.astype(val.dtype) * modular(coefficient, val.dtype)
    return total


def map_call(call: Call, captures: Sequence[Array], read: Callable[[Atom], Array]) -> list[Array]:
    """Evaluates a Call at every position at which its operands differ, by jax.vmap; one array for each of `call.outs`.

    `read` gives an operand, of rank 4 or a scalar. Results have the shape to which the operands broadcast.
    """
    atoms = [a for arg in call.arguments if not isinstance(arg, int) for a in arg[1]]
    values = [jnp.broadcast_to(jnp.asarray(read(a)), _rank4(read(a))) for a in atoms]
    shape = jnp.broadcast_shapes((1, 1, 1, 1), *(v.shape for v in values))
    columns = iter(jnp.broadcast_to(v, shape).reshape(-1) for v in values)
    operands, axes = [], []
    for arg in call.arguments:
        if isinstance(arg, int):
            operands.append(captures[arg])
            axes.append(None)
        else:
            inner, members = arg
            stacked = jnp.stack([next(columns) for _ in members], -1)
            operands.append(stacked.reshape(-1, *inner))
            axes.append(0)
    results = jax.vmap(call.bind, in_axes=axes, out_axes=0)(*operands) if 0 in axes else call.bind(*operands)
    flat = [r.reshape(*shape, -1) if 0 in axes else r.reshape(1, 1, 1, 1, -1) for r in results]
    return [r[..., i] for r in flat for i in range(r.shape[-1])]


def _rank4(value: Array) -> tuple[int, ...]:
    return value.shape if value.ndim == 4 else (1, 1, 1, 1)
