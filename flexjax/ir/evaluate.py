"""Programs on tiles of the attention matrix: one walk over the steps for every backend; the operations.

`evaluate` visits the steps in order. A `Tile`, which the backend supplies, decides the form of a value (a rank-4 array,
a register tile, a vector in some layout). `apply_op` is the meaning of every operation in terms of jax.lax.
"""

import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend.random import threefry2x32_p

from flexjax.ir.operations import REDUCTIONS, TOTAL_ORDER
from flexjax.ir.program import (
    Atom,
    Axes,
    Call,
    Lit,
    Load,
    Op,
    Program,
    Step,
    Val,
    axes_of,
    loop_size,
    loops_of,
    positions_of,
    range_of_val,
    uses,
)
from flexjax.ir.ranges import may_be

Array = jax.Array


class Tile(typing.Protocol):
    """A region of the attention matrix on which programs are evaluated; an "Array" below may be a register tile.

    Operands come spread to the axes of the (first) result; literals come as `literal` makes them.
    """

    def input(self, val: Val) -> Array:
        """The value of one of the program's five inputs over the region."""
        ...

    def literal(self, lit: Lit) -> Array: ...

    def spread(self, value: Array, have: Axes, want: Axes) -> Array:
        """A value of the axes `have`, broadcast for `want`; a diagonal window (delta) becomes a tile for q and kv."""
        ...

    def diagonal(self, val: Val, uniform: Mapping[int, Array]) -> Array:
        """A value of q - kv, b and h from its linear form; `uniform`: values of the form's uniform terms, by id."""
        ...

    def apply(self, op: Op, args: Sequence[Array]) -> Array: ...

    def load(self, load: Load, index: Sequence[Array]) -> Array: ...

    def loop(self, step: Op, size: int, body: Callable[[Array], Array]) -> Array:
        """The reduction `step` over the loop index 0 .. size - 1; `body` gives the operand for one value."""
        ...

    def call(self, call: Call, read: Callable[[Atom], Array]) -> Sequence[Array]:
        """The values of a Call's results in order; `read` gives the value of an operand."""
        ...


def evaluate(program: Program, tile: Tile, want: Sequence[Axes] | None = None) -> list[Array]:
    """Evaluates a program over a tile; returns its results, spread to the axes `want` (default: their own)."""
    axes = [axes_of(r) for r in program.results] if want is None else list(want)
    values = Values.of(program, tile)
    return [values.read(r, a) for r, a in zip(program.results, axes, strict=True)]


class Values:
    """The values of a program's steps over a tile, for some values of the loop indices.

    A step that depends on a loop index is computed where the index has a value: in the loop, or after `bind`.
    """

    def __init__(self, program: Program, tile: Tile):
        self.program, self.tile = program, tile
        self._env: dict[int, Array] = {}
        self._spread: dict[tuple[int, Axes], Array] = {}
        self._bound: Axes = frozenset()

    @classmethod
    def of(cls, program: Program, tile: Tile) -> typing.Self:
        """The values of all steps that depend on no loop index."""
        values = cls(program, tile)
        values._run(program.steps)
        return values

    def read(self, atom: Atom, axes: Axes) -> Array:
        """The value of an atom, spread to `axes` once; a literal is not spread."""
        if isinstance(atom, Lit):
            return self.tile.literal(atom)
        key = (atom.id, axes)
        if key not in self._spread:
            if atom.id not in self._env:
                self._env[atom.id] = self.tile.input(atom)
            self._spread[key] = self.tile.spread(self._env[atom.id], positions_of(atom.axes), positions_of(axes))
        return self._spread[key]

    def bind(self, index: Val, value: Array, wanted: Sequence[Atom]) -> "Values":
        """The values for one value of a loop index, of steps that depend on it and that the `wanted` atoms need."""
        new = Values(self.program, self.tile)
        new._env, new._spread = dict(self._env), dict(self._spread)
        if index.axes <= self._bound:  # a loop inside one over the same index has values of its own
            old = {o.id for s in self.program.steps for o in s.outs if index.axes <= o.axes}
            new._env = {i: v for i, v in new._env.items() if i not in old}
            new._spread = {k: v for k, v in new._spread.items() if k[0] not in old}
        new._env[index.id] = value
        new._bound = self._bound | index.axes
        live = uses(self.program.steps, tuple(wanted))
        new._run([s for s in self.program.steps if s.outs[0].id in live and index.axes <= s.outs[0].axes])
        return new

    def _run(self, steps: Sequence[Step]) -> None:
        """Computes those of the steps of which every loop index has a value."""
        env = self._env
        for step in steps:
            out = step.outs[0]
            if loops_of(out.axes) - self._bound or out.id in env:
                continue
            if isinstance(step, Op) and step.prim in REDUCTIONS:
                env[out.id] = self._loop(step)
            elif isinstance(step, Op) and _starts_diagonal(step):
                assert out.linear is not None
                env[out.id] = self.tile.diagonal(out, {i: env[i] for i, _ in out.linear.uniform})
            elif isinstance(step, Op):
                env[out.id] = self.tile.apply(step, [self.read(a, out.axes) for a in step.inputs])
            elif isinstance(step, Load):
                env[out.id] = self.tile.load(step, [self.read(a, out.axes) for a in step.index])
            else:
                values = self.tile.call(step, lambda a, axes=out.axes: self.read(a, axes))
                env.update(zip((v.id for v in step.outs), values, strict=True))

    def _loop(self, step: Op) -> Array:
        operand, index = step.inputs
        assert isinstance(index, Val)
        body = lambda k: self.bind(index, k, [operand]).read(operand, step.out.axes)
        return self.tile.loop(step, loop_size(*index.axes), body)


def loop_of_arrays(step: Op, size: int, body: Callable[[Array], Array], shape: tuple[int, ...]) -> Array:
    """The reduction `step` by lax.fori_loop; `body` gets the int32 index in this `shape`, all of size 1."""
    prim = REDUCTIONS[step.prim]
    combine = lambda a, b: getattr(lax, RENAMED.get(prim, prim))(a, b)
    at = lambda k: body(jnp.reshape(jnp.asarray(k, jnp.int32), shape))
    (made,) = jax.make_jaxpr(at)(jax.ShapeDtypeStruct((), jnp.int32)).out_avals
    start = jnp.full(made.shape, unit_of(prim, made.dtype), made.dtype)
    axes = tuple(made.mat.varying)  # inside shard_map a loop must begin with the type that it returns
    start = lax.pcast(start, axes, to="varying") if axes else start
    return lax.fori_loop(0, size, lambda k, total: combine(total, at(k)), start)


def unit_of(prim: str, dtype: jnp.dtype) -> typing.Any:
    """The number with which a reduction changes nothing: 0 of a sum, the least number of a maximum."""
    if prim in ("max", "min") and not jnp.issubdtype(dtype, jnp.inexact):
        info = jnp.iinfo(dtype)
        return info.min if prim == "max" else info.max
    if prim in ("max", "min"):
        return -jnp.inf if prim == "max" else jnp.inf
    if prim == "and":
        return True if dtype == jnp.bool_ else (~np.zeros((), dtype)).item()
    return 1 if prim == "mul" else 0


def _starts_diagonal(op: Op) -> bool:
    """Whether an Op makes a function of q - kv from operands that depend on q or kv, as q - kv itself does."""
    return "delta" in op.out.axes and any(axes_of(a) & {"q", "kv"} for a in op.inputs)


# ------------------------------------------------------------------- the meaning of each primitive


def literal_array(lit: Lit) -> Array:
    return jnp.asarray(lit.value, jnp.dtype(lit.dtype))


def apply_op(op: Op, args: Sequence[Array]) -> Array:
    """Computes an Op by jax.lax on operands of one shape, or scalars."""
    rule = SPECIAL.get(op.prim)
    if rule is not None:
        return rule(op, *args)
    return getattr(lax, RENAMED.get(op.prim, op.prim))(*args)


# primitives whose functions in jax.lax have other names
RENAMED = {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "not": "bitwise_not",
    "regularized_incomplete_beta": "betainc",
}


def _non_negative(atom: Atom) -> bool:
    bounds = range_of_val(atom)
    return bounds is not None and bounds[0] >= 0


def _division(op: Op, a: Array, b: Array) -> Array:
    """div, rem, floordiv and floormod of integers; lax.div and lax.rem of floats.

    Integers divided by 0 give what jax gives: -1 (all bits set) for div, the numerator for rem, 0 for floormod; for
    floordiv -2, or -1 where the numerator is 0 or the type unsigned.
    """
    name, remainder = op.prim, op.prim in ("rem", "floormod")
    if not jnp.issubdtype(a.dtype, jnp.integer):
        return lax.rem(a, b) if remainder else lax.div(a, b)
    zero = b == 0 if may_be(op.inputs[1], 0) else None
    # XLA's constant folding would divide by 0 on the processor and end the process
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
    dtype = jnp.dtype(op.out.dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and jnp.issubdtype(dtype, jnp.floating):
        x = lax.real(x)  # the primitive drops the imaginary part; lax.convert_element_type would warn
    return lax.convert_element_type(x, dtype)


def _param(op: Op, name: str) -> typing.Any:
    return dict(op.params)[name]


def _threefry2x32(op: Op, *words: Array) -> Array:
    """One word of the hash of the four words. XLA computes a hash once for both of its words."""
    return threefry2x32_p.bind(*jnp.broadcast_arrays(*words))[_param(op, "word")]


def _total_order(primitive: jex_core.Primitive) -> Callable[..., Array]:
    """The meaning of a comparison in total order, which jax.lax has as a primitive alone."""
    return lambda op, x, y: primitive.bind(*jnp.broadcast_arrays(x, y))


# operations that are not a call of the jax.lax function of their name
SPECIAL: dict[str, Callable[..., Array]] = {
    "convert_element_type": _convert,
    "bitcast_convert_type": lambda op, x: lax.bitcast_convert_type(x, jnp.dtype(op.out.dtype)),
    "integer_pow": lambda op, x: lax.integer_pow(x, _param(op, "y")),
    "round": lambda op, x: lax.round(x, _param(op, "rounding_method")),
    "stop_gradient": lambda op, x: lax.stop_gradient(x),
    "reduce_precision": lambda op, x: lax.reduce_precision(x, _param(op, "exponent_bits"), _param(op, "mantissa_bits")),
    "threefry2x32": _threefry2x32,
    **{name: _total_order(getattr(lax, f"{name}_p")) for name in TOTAL_ORDER},
    **dict.fromkeys(("div", "rem", "floordiv", "floormod"), _division),
}
