"""Programs on tiles of the attention matrix: one walk over the steps for every backend, and the meaning of each operation.

`evaluate` visits the steps in order. A `Tile`, which the backend supplies, decides the form of a value (a rank-4 array, a
register tile, a vector in some layout). `apply_op` is the meaning of every operation in terms of jax.lax.
"""

import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.ir.program import Atom, Axes, Call, Lit, Load, Op, Program, Val, axes_of, range_of_val
from flexjax.ir.ranges import may_be

Array = jax.Array


class Tile(typing.Protocol):
    """A region of the attention matrix on which programs are evaluated; backends implement it.

    A backend chooses what a value is (an "Array" below may be a register tile). The axes of a value are those of program.AXES.
    """

    def input(self, val: Val) -> Array:
        """The value of one of the program's five inputs over the region."""
        ...

    def literal(self, lit: Lit) -> Array:
        """The value of a literal, without axes."""
        ...

    def spread(self, value: Array, have: Axes, want: Axes) -> Array:
        """A value that has the axes `have`, broadcast for use with the axes `want`, which contain them, or q and kv in place of delta.

        A diagonal window (axis "delta") becomes a tile if `want` has q and kv.
        """
        ...

    def diagonal(self, val: Val, uniform: Mapping[int, Array]) -> Array:
        """An integer value that depends on q and kv through q - kv alone, from its linear form (`val.linear`), which may have b and h
        too.

        uniform   the values of the form's uniform terms, by id
        """
        ...

    def apply(self, op: Op, args: Sequence[Array]) -> Array:
        """The result of an Op, from operands that were spread to the axes of the result; literals come as `literal` makes them."""
        ...

    def load(self, load: Load, index: Sequence[Array]) -> Array:
        """The elements that a Load reads, from index values that were spread to the axes of its result; literals come as `literal` makes
        them.
        """
        ...

    def call(self, call: Call, read: Callable[[Atom], Array]) -> Sequence[Array]:
        """The values of a Call's results in order.

        call   the step
        read   gives the value of an operand, spread to the axes of the first result; a literal as `literal` makes it
        """
        ...


def evaluate(program: Program, tile: Tile, want: Sequence[Axes] | None = None) -> list[Array]:
    """Evaluates a program over a tile: visits the steps in order and computes each by a method of the tile.

    program   the program
    tile      the region, which decides the form of values
    want      for each result the axes to which it is spread; by default the axes that the result itself has. A literal is never spread

    An Op whose result depends on q and kv through q - kv alone, while an operand depends on q or kv, is computed by `tile.diagonal`.
    Returns the values of the program's results, in order.
    """
    env: dict[int, Array] = {}
    spread: dict[tuple[int, Axes], Array] = {}

    def read(atom: Atom, axes: Axes) -> Array:
        """The value of an atom, spread to `axes`; each spread of a value is made once. A literal is made anew and not spread; an input is
        made when it is first read.
        """
        if isinstance(atom, Lit):
            return tile.literal(atom)
        key = (atom.id, axes)
        if key not in spread:
            if atom.id not in env:
                env[atom.id] = tile.input(atom)
            spread[key] = tile.spread(env[atom.id], atom.axes, axes)
        return spread[key]

    for step in program.steps:
        if isinstance(step, Op) and _starts_diagonal(step):
            assert step.out.linear is not None
            terms = step.out.linear.uniform
            env[step.out.id] = tile.diagonal(step.out, {i: env[i] for i, _ in terms})
        elif isinstance(step, Op):
            env[step.out.id] = tile.apply(step, [read(a, step.out.axes) for a in step.inputs])
        elif isinstance(step, Load):
            env[step.out.id] = tile.load(step, [read(a, step.out.axes) for a in step.index])
        else:
            values = tile.call(step, lambda a, step=step: read(a, step.outs[0].axes))
            env.update(zip((v.id for v in step.outs), values, strict=True))
    axes = [axes_of(r) for r in program.results] if want is None else list(want)
    return [read(r, a) for r, a in zip(program.results, axes, strict=True)]


def _starts_diagonal(op: Op) -> bool:
    """Whether an Op makes a function of q - kv from operands that depend on q or kv, as the subtraction q - kv itself does."""
    return "delta" in op.out.axes and any(axes_of(a) & {"q", "kv"} for a in op.inputs)


# ------------------------------------------------------------------- the meaning of each primitive


def literal_array(lit: Lit) -> Array:
    """The literal as a JAX array of shape () and of its dtype."""
    return jnp.asarray(lit.value, jnp.dtype(lit.dtype))


def apply_op(op: Op, args: Sequence[Array]) -> Array:
    """Computes an Op by jax.lax: its result on operands `args` that are arrays of one shape, or scalars."""
    rule = SPECIAL.get(op.prim)
    if rule is not None:
        return rule(op, *args)
    return getattr(lax, RENAMED.get(op.prim, op.prim))(*args)


RENAMED = {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "not": "bitwise_not",
    "regularized_incomplete_beta": "betainc",
}
"""Primitives whose functions in jax.lax have other names."""


def _non_negative(atom: Atom) -> bool:
    """Whether the range of an integer atom is known to lie at 0 or above."""
    bounds = range_of_val(atom)
    return bounds is not None and bounds[0] >= 0


def _division(op: Op, a: Array, b: Array) -> Array:
    """Computes a / b or the remainder: div, rem, floordiv and floormod of integers; lax.div and lax.rem of floats.

    op     the Op, whose operands' ranges show where signs and zeros need no treatment
    a, b   numerator and divisor, arrays of one dtype

    Division of integers by 0 gives what jax gives: -1 (all bits set) for div, the numerator for rem, 0 for floormod; for
    floordiv -2, or -1 where the numerator is 0 or the type unsigned. A divisor of 0 is replaced before it reaches XLA, whose
    constant folding would divide by 0 on the processor and end the process.
    """
    name, remainder = op.prim, op.prim in ("rem", "floormod")
    if not jnp.issubdtype(a.dtype, jnp.integer):
        return lax.rem(a, b) if remainder else lax.div(a, b)
    zero = b == 0 if may_be(op.inputs[1], 0) else None
    b = b if zero is None else lax.select(zero, jnp.ones_like(b), b)
    out = lax.rem(a, b) if remainder else lax.div(a, b)
    unsigned = jnp.issubdtype(a.dtype, jnp.unsignedinteger)
    if name.startswith("floor") and not unsigned and not all(map(_non_negative, op.inputs)):
        rest = out if remainder else lax.rem(a, b)
        short = (rest != 0) & ((rest < 0) != (b < 0))
        out = lax.select(short, out + b if remainder else out - jnp.ones_like(out), out)
    if zero is None or name == "floormod":
        return out
    ones = ~jnp.zeros_like(a)
    fewer = lax.select(a == 0, ones, ones + ones) if name == "floordiv" and not unsigned else ones
    return lax.select(zero, a if remainder else fewer, out)


def _convert(op: Op, x: Array) -> Array:
    """The operand x converted to the dtype of the Op's result; a complex operand that becomes a float loses its imaginary part."""
    dtype = jnp.dtype(op.out.dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and jnp.issubdtype(dtype, jnp.floating):
        x = lax.real(x)  # the primitive drops the imaginary part; lax.convert_element_type would warn
    return lax.convert_element_type(x, dtype)


def _param(op: Op, name: str) -> typing.Any:
    """The static parameter of that name of an Op."""
    return dict(op.params)[name]


SPECIAL: dict[str, Callable[..., Array]] = {
    "convert_element_type": _convert,
    "bitcast_convert_type": lambda op, x: lax.bitcast_convert_type(x, jnp.dtype(op.out.dtype)),
    "integer_pow": lambda op, x: lax.integer_pow(x, _param(op, "y")),
    "round": lambda op, x: lax.round(x, _param(op, "rounding_method")),
    "stop_gradient": lambda op, x: lax.stop_gradient(x),
    "reduce_precision": lambda op, x: lax.reduce_precision(x, _param(op, "exponent_bits"), _param(op, "mantissa_bits")),
    **dict.fromkeys(("div", "rem", "floordiv", "floormod"), _division),
}
"""Functions (op, *operands) -> result of the operations that are not a call of the jax.lax function of their name."""
