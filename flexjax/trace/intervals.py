"""Abstract evaluation of a mask program over blocks of the attention matrix.

Batch entries and heads are enumerated; queries and keys come in blocks. Each integer or float is an interval per block, each
bool a `Truth`: can it be true, can it be false, and is it known to be true (false) somewhere. The analysis is sound: a block is
called full or empty only where every entry is on or off. It is exact where the witnesses say so: `sure_true` and `sure_false`
mark blocks that certainly hold both.

Two facts about an interval carry the exactness, each known while tracing or per block (`Flag`). `attained`: both ends are
values of some entry of the block. `contiguous`: so is every integer between them. NaN ends, always both, mean "anything"
(comparisons are written so that they then decide nothing); an integer that may have wrapped around gets the whole range of
its type. A value of b and h alone is computed as it is, by the operation itself.

Rounding: additions, products and quotients round the same way wherever they are computed, except that a compiler may keep
more digits than the type has: of a product that is added to something, and of types narrower than float32. Functions such as
exp differ by a few units in the last place. Both widen the interval, which then no longer claims that its ends occur.

Reference: Moore, Interval Analysis (1966); the idea of deciding attention blocks by it is flexjax's own.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.trace import mod_ir
from flexjax.trace.builder import is_integer
from flexjax.trace.mod_ir import Axes, Lit, Load, Op, Program, Val, axes_of
from flexjax.trace.on_tiles import apply_op

Array = jax.Array


Flag = bool | Array
"""A fact known while tracing (a bool) or block by block."""


class Interval(typing.NamedTuple):
    """low <= value <= high in each block; arrays broadcast to [batch, heads, q blocks, kv blocks]."""

    low: Array
    high: Array
    attained: Flag = False
    contiguous: Flag = False


class Truth(typing.NamedTuple):
    """What is known of a bool in each block."""

    can_true: Array
    can_false: Array
    sure_true: Array
    sure_false: Array


Abstract = Interval | Truth


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """The blocks looked at: single positions `b` and `h`, first and last position of each query and key block (of at most
    block_q and block_kv tokens). Arrays of four dims that broadcast to one number a block; no dim but the first has both b or h
    and queries or keys."""

    b: Array
    h: Array
    q_first: Array
    q_last: Array
    kv_first: Array
    kv_last: Array
    block_q: int
    block_kv: int

    def of(self, axis: int) -> Interval:
        first = {mod_ir.B: self.b, mod_ir.H: self.h, mod_ir.Q: self.q_first, mod_ir.KV: self.kv_first}[axis]
        last = {mod_ir.B: self.b, mod_ir.H: self.h, mod_ir.Q: self.q_last, mod_ir.KV: self.kv_last}[axis]
        return Interval(first, last, True, True)


def block_grid(
    batch: int, heads: int, q_blocks: Array, kv_blocks: Array, sizes: tuple[int, int, int, int]
) -> BlockGrid:
    """All pairs of the given block numbers, [batch, heads, q blocks, kv blocks]; sizes: q_len, kv_len, block_q, block_kv.

    The last block ends where the matrix does.
    """
    i32 = lambda n: jnp.arange(n, dtype=jnp.int32)
    along = lambda x, axis: jnp.reshape(x, tuple(-1 if i == axis else 1 for i in range(4)))
    return _grid((along(i32(batch), 0), along(i32(heads), 1), along(q_blocks, 2), along(kv_blocks, 3)), sizes)


def block_tiles(places: Array, side: int, sizes: tuple[int, int, int, int]) -> BlockGrid:
    """side x side blocks at each of `places` [n, 4] (b, h, q, kv in units of `side` blocks): [n, 1, side, side].

    Blocks past the last one are the last one.
    """
    b, h, q, kv = (places[:, i].reshape(-1, 1, 1, 1) for i in range(4))
    within = jnp.arange(side, dtype=jnp.int32)
    last = [max(0, -(-length // block) - 1) for length, block in zip(sizes[:2], sizes[2:], strict=True)]
    q_blocks = jnp.minimum(q * side + within[:, None], last[0])
    kv_blocks = jnp.minimum(kv * side + within, last[1])
    return _grid((b, h, q_blocks, kv_blocks), sizes)


def _grid(blocks: tuple[Array, Array, Array, Array], sizes: tuple[int, int, int, int]) -> BlockGrid:
    b, h, q_blocks, kv_blocks = blocks
    q_len, kv_len, block_q, block_kv = sizes
    edges = lambda blocks, size, length: (blocks * size, jnp.minimum(blocks * size, length - size) + (size - 1))
    return BlockGrid(b, h, *edges(q_blocks, block_q, q_len), *edges(kv_blocks, block_kv, kv_len), block_q, block_kv)


def decide(program: Program, captures: Sequence[Array], grid: BlockGrid) -> Truth:
    """The mask's truth in each block of the grid."""
    env: dict[int, typing.Any] = {v.id: grid.of(v.id) for v in program.inputs[1:]}
    # What b and h alone decide, as the program's own arithmetic has it: one value in every block.
    points: dict[int, Array] = {i: typing.cast(Interval, env[i]).low for i in (mod_ir.B, mod_ir.H)}
    products: set[int] = set()

    def read(atom: mod_ir.Atom) -> Abstract:
        return _of_literal(atom) if isinstance(atom, Lit) else env[atom.id]

    def point(atom: mod_ir.Atom) -> Array | None:
        return _point_literal(atom) if isinstance(atom, Lit) else points.get(atom.id)

    for step in program.steps:
        known = None if isinstance(step, mod_ir.Call) else [point(a) for a in step.inputs]
        if isinstance(step, mod_ir.Call):
            env.update({v.id: unknown(v.dtype) for v in step.outs})
        elif known is not None and all(v is not None for v in known) and _is_reproducible(step):
            value = _evaluate_point(step, typing.cast(list[Array], known), captures)
            points[step.out.id], env[step.out.id] = value, _of_point(value, step.out.dtype)
        elif isinstance(step, Load):
            env[step.out.id] = _load(step, [read(a) for a in step.index], captures[step.capture], grid, points)
        else:
            env[step.out.id] = _operation(step, [read(a) for a in step.inputs], env, products)
            if step.prim in ("mul", "square", "integer_pow"):
                products.add(step.out.id)
    return as_truth(read(program.results[0]))


# ------------------------------------------------------------------- values of b and h alone


def _point_literal(lit: Lit) -> Array:
    return jnp.full((1, 1, 1, 1), lit.value, jnp.dtype(lit.dtype))


def _is_reproducible(step: Op | Load) -> bool:
    """Whether the result has the same bits wherever it is computed."""
    dtype = jnp.dtype(step.out.dtype)
    if isinstance(step, Load) or not jnp.issubdtype(dtype, jnp.floating):
        return not jnp.issubdtype(dtype, jnp.complexfloating)
    return dtype.itemsize >= 4 and step.prim in EXACT_FLOATS


EXACT_FLOATS = frozenset({"max", "min", "neg", "abs", "select_n", "convert_element_type", "floor", "ceil", "sign"})


def _evaluate_point(step: Op | Load, args: list[Array], captures: Sequence[Array]) -> Array:
    if isinstance(step, Op):
        return apply_op(step, jnp.broadcast_arrays(*args))
    array = jnp.asarray(captures[step.capture])
    return array.at[tuple(args)].get(mode="clip") if args else array.reshape(1, 1, 1, 1)


def _of_point(value: Array, dtype: str) -> Abstract:
    if dtype == "bool":
        return Truth(value, ~value, value, ~value)
    floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    ends = value.astype(_wide(dtype)) if floating else value
    return Interval(ends, ends, True, not floating)


# ------------------------------------------------------------------- values about which nothing is known


def unknown(dtype: str) -> Abstract:
    if dtype == "bool":
        yes, no = jnp.ones((1, 1, 1, 1), bool), jnp.zeros((1, 1, 1, 1), bool)
        return Truth(yes, yes, no, no)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        info = jnp.iinfo(jnp.dtype(dtype))
        ends = (jnp.full((1, 1, 1, 1), np.array(e, jnp.dtype(dtype))) for e in (info.min, info.max))
        return Interval(*ends)
    nan = jnp.full((1, 1, 1, 1), jnp.nan, _wide(dtype))
    return Interval(nan, nan)


def _wide(dtype: str) -> jnp.dtype:
    """Endpoints of narrow floats are kept in float32: comparisons of the same numbers, fewer surprises."""
    return jnp.dtype("float32") if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def _of_literal(lit: Lit) -> Abstract:
    if lit.dtype == "bool":
        yes, no = jnp.full((1, 1, 1, 1), bool(lit.value)), jnp.full((1, 1, 1, 1), not lit.value)
        return Truth(yes, no, yes, no)
    floating = jnp.issubdtype(jnp.dtype(lit.dtype), jnp.floating)
    value = jnp.full((1, 1, 1, 1), lit.value, _wide(lit.dtype) if floating else jnp.dtype(lit.dtype))
    return Interval(value, value, True, not floating)


def as_truth(value: Abstract) -> Truth:
    assert isinstance(value, Truth), "a mask program ends in a bool"
    return value


# ------------------------------------------------------------------- flags


def _and(a: Flag, b: Flag) -> Flag:
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def _or(a: Flag, b: Flag) -> Flag:
    if isinstance(a, bool):
        return True if a else b
    if isinstance(b, bool):
        return True if b else a
    return a | b


# ------------------------------------------------------------------- operations


def _operation(op: Op, args: list[typing.Any], env: Mapping[int, typing.Any], products: set[int]) -> Abstract:
    if op.out.linear is not None:
        exact = _linear(op.out, env)
        if exact is not None:
            return exact
    apart = independent([axes_of(a) for a in op.inputs])
    if op.prim in COMPARISONS and all(isinstance(a, Interval) for a in args):
        return COMPARISONS[op.prim](args[0], args[1], apart)
    if op.out.dtype == "bool":
        return _logic(op, args, apart)
    rule = RULES.get(op.prim)
    if rule is None or (
        op.prim != "select_n" and any(isinstance(a, Truth) for a in args) and op.prim != "convert_element_type"
    ):
        return unknown(op.out.dtype)
    found = rule(op, args)
    if found is None:
        return unknown(op.out.dtype)
    if not apart and op.prim in DEPENDENT_ENDS:
        found = found._replace(attained=False, contiguous=False)
    if not is_integer(op.out.dtype):
        return _rounded(op, args, found, products)
    return _unless_wrapped(op, args, found)


DEPENDENT_ENDS = frozenset({"add", "sub", "mul", "max", "min", "floordiv", "floormod"})
"""Operations of several operands, whose ends occur only where the operands move independently."""
INEXACT = frozenset(
    {"exp", "exp2", "log", "sqrt", "tanh", "log1p", "expm1", "cbrt", "atan", "sinh", "asinh", "logistic", "erf"}
)
"""Functions that implementations round in their own ways."""


def _rounded(op: Op, args: list[typing.Any], found: Interval, products: set[int]) -> Interval:
    """The interval with room for other roundings, and NaN at both ends where a NaN can occur."""
    low, high, attained, _ = found
    if op.prim in INEXACT:
        eps = jnp.finfo(jnp.dtype(op.out.dtype)).eps.astype(low.dtype)
        slack = [8 * eps * jnp.abs(e) + jnp.finfo(low.dtype).tiny for e in (low, high)]
        low, high, attained = low - slack[0], high + slack[1], False
    if op.prim in ("add", "sub") and any(isinstance(a, Val) and a.id in products for a in op.inputs):
        slack = 2 * jnp.finfo(low.dtype).eps * sum(_size(a).astype(low.dtype) for a in args if isinstance(a, Interval))
        slack = jnp.where(jnp.isfinite(slack), slack, 0)
        low, high, attained = low - slack, high + slack, False
    narrow = jnp.finfo(jnp.dtype(op.out.dtype))
    if narrow.bits < 32 and op.prim not in ("max", "min", "neg", "abs", "floor", "ceil", "sign", "select_n"):
        short = lambda e: lax.reduce_precision(e, narrow.nexp, narrow.nmant)
        low, high, attained = jnp.minimum(low, short(low)), jnp.maximum(high, short(high)), False
    nan = jnp.isnan(low) | jnp.isnan(high) | _makes_nan(op.prim, args)
    return Interval(jnp.where(nan, jnp.nan, low), jnp.where(nan, jnp.nan, high), attained)


def _makes_nan(prim: str, args: list[typing.Any]) -> Array:
    """Blocks in which the operation may make a NaN out of numbers: inf - inf, 0 * inf, inf / inf."""
    no = jnp.zeros((1, 1, 1, 1), bool)
    if prim not in ("add", "sub", "mul", "div") or not all(isinstance(a, Interval) for a in args):
        return no
    x, y = typing.cast(list[Interval], args)
    if prim in ("add", "sub"):
        up, down = (y.high == jnp.inf, y.low == -jnp.inf) if prim == "add" else (y.low == -jnp.inf, y.high == jnp.inf)
        return ((x.low == -jnp.inf) & up) | ((x.high == jnp.inf) & down)
    endless = lambda i: jnp.isinf(i.low) | jnp.isinf(i.high)
    if prim == "div":
        return endless(x) & endless(y)
    holds_zero = lambda i: (i.low <= 0) & (i.high >= 0)
    return (holds_zero(x) & endless(y)) | (endless(x) & holds_zero(y))


def _expanded(axes: Axes) -> Axes:
    return axes - {"delta", "b", "h"} | ({"q", "kv"} if "delta" in axes else frozenset())


def independent(parts: Sequence[Axes]) -> bool:
    """Whether the operands share neither queries nor keys, so that each takes its values whatever the others do."""
    seen: set[str] = set()
    for axes in map(_expanded, parts):
        if seen & axes:
            return False
        seen |= axes
    return True


def _linear(val: Val, env: Mapping[int, typing.Any]) -> Interval | None:
    """The exact interval of b*b + h*h + q*q + kv*kv + const + uniform terms."""
    linear = val.linear
    assert linear is not None
    terms = [(c, env[i]) for i, c in zip((1, 2, 3, 4), (linear.b, linear.h, linear.q, linear.kv), strict=True) if c]
    for ident, coefficient in linear.uniform:
        terms.append((coefficient, env[ident]))
    if val.low is None or any(isinstance(t, Truth) or t.attained is not True for _, t in terms):
        return None
    # The whole fits the type, so partial sums may wrap around and come back.
    dtype = jnp.dtype(val.dtype)
    number = lambda c: np.array(c & ((1 << 8 * dtype.itemsize) - 1)).astype(dtype)
    low = high = jnp.full((1, 1, 1, 1), number(linear.const))
    for coefficient, term in terms:
        ends = (term.low, term.high) if coefficient >= 0 else (term.high, term.low)
        low, high = (e + t.astype(dtype) * number(coefficient) for e, t in zip((low, high), ends, strict=True))
    return Interval(low, high, True, abs(linear.q) <= 1 and abs(linear.kv) <= 1)


def _size(term: Interval) -> Array:
    return jnp.maximum(jnp.abs(term.low.astype(jnp.float32)), jnp.abs(term.high.astype(jnp.float32)))


def _widened(found: Interval, wraps: Array) -> Interval:
    """The whole range of the type in blocks where the value may have left it."""
    whole = typing.cast(Interval, unknown(found.low.dtype.name))
    stays = ~wraps
    return Interval(
        jnp.where(wraps, whole.low, found.low),
        jnp.where(wraps, whole.high, found.high),
        _and(found.attained, stays),
        _and(found.contiguous, stays),
    )


def _unless_wrapped(op: Op, args: list[typing.Any], found: Interval) -> Interval:
    """The interval, or all of the type where integer arithmetic may leave it."""
    dtype = jnp.dtype(op.out.dtype)
    if op.prim not in ("add", "sub", "mul", "neg", "abs", "integer_pow", "square"):
        return found
    if op.out.low is not None and dtype.itemsize >= 4:
        return found  # the builder has shown that it fits; types of 16 bits have a range anyway
    operands = [a for a in args if isinstance(a, Interval)]
    sizes = [_size(a) for a in operands]
    size = sum(sizes, jnp.zeros((1, 1, 1, 1), jnp.float32))
    if op.prim == "mul":
        size = sizes[0] * sizes[1]
    if op.prim in ("integer_pow", "square"):
        size = sizes[0] ** (abs(typing.cast(int, dict(op.params).get("y", 2))))
    wraps = size >= float(jnp.iinfo(dtype).max) * 0.999
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        if op.prim == "neg":
            wraps = wraps | (operands[0].high > 0)
        if op.prim == "sub":
            wraps = wraps | (operands[0].low < operands[1].high)
    return _widened(found, wraps)


def _corners(f: Callable[[Array, Array], Array], x: Interval, y: Interval) -> tuple[Array, Array]:
    values = [f(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    low, high = values[0], values[0]
    for v in values[1:]:
        low, high = jnp.minimum(low, v), jnp.maximum(high, v)
    return low, high


def _add(op: Op, args: list[Interval]) -> Interval:
    x, y = args
    return Interval(x.low + y.low, x.high + y.high, _and(x.attained, y.attained), _and(x.contiguous, y.contiguous))


def _sub(op: Op, args: list[Interval]) -> Interval:
    x, y = args
    return Interval(x.low - y.high, x.high - y.low, _and(x.attained, y.attained), _and(x.contiguous, y.contiguous))


def _mul(op: Op, args: list[Interval]) -> Interval:
    x, y = args
    if op.inputs[0] == op.inputs[1]:
        return _square(op, [x])
    return Interval(*_corners(jnp.multiply, x, y), _and(x.attained, y.attained))


def _square(op: Op, args: list[Interval]) -> Interval:
    return _power(args[0], 2)


def _power(x: Interval, y: int) -> Interval:
    a, b = lax.integer_pow(x.low, y), lax.integer_pow(x.high, y)
    if y % 2:
        return Interval(a, b, x.attained)
    low = jnp.where((x.low <= 0) & (x.high >= 0), jnp.zeros_like(a), jnp.minimum(a, b))
    return Interval(low, jnp.maximum(a, b))


def _neg(op: Op, args: list[Interval]) -> Interval:
    return Interval(-args[0].high, -args[0].low, args[0].attained, args[0].contiguous)


def _abs(op: Op, args: list[Interval]) -> Interval:
    (x,) = args
    a, b = jnp.abs(x.low), jnp.abs(x.high)
    crosses = (x.low <= 0) & (x.high >= 0)
    low = jnp.where(crosses, jnp.zeros_like(a), jnp.minimum(a, b))
    return Interval(low, jnp.maximum(a, b), _or(x.contiguous, _and(x.attained, ~crosses)), x.contiguous)


def _extremum(pick: Callable[[Array, Array], Array]) -> Callable:
    def rule(op: Op, args: list[Interval]) -> Interval:
        x, y = args
        return Interval(
            pick(x.low, y.low), pick(x.high, y.high), _and(x.attained, y.attained), _and(x.contiguous, y.contiguous)
        )

    return rule


def _monotone(f: Callable[[Array], Array], keeps_contiguous: bool = False) -> Callable:
    def rule(op: Op, args: list[Interval]) -> Interval:
        (x,) = args
        return Interval(f(x.low), f(x.high), x.attained, _and(x.contiguous, keeps_contiguous))

    return rule


def _floordiv(op: Op, args: list[Interval]) -> Interval | None:
    x, y = args
    if isinstance(op.inputs[1], Lit) and op.inputs[1].value < 0:  # x // -d is (-x) // d
        if jnp.iinfo(x.low.dtype).min == op.inputs[1].value:
            return None
        safe = x.low > jnp.iinfo(x.low.dtype).min
        x, y = Interval(-x.high, -x.low, x.attained, x.contiguous), Interval(-y.high, -y.low, True, True)
        low, high = jnp.floor_divide(x.low, y.low), jnp.floor_divide(x.high, y.low)
        return _widened(Interval(low, high, x.attained, x.contiguous), ~safe)
    low, high = _corners(jnp.floor_divide, x, Interval(jnp.maximum(y.low, 1), jnp.maximum(y.high, 1)))
    single = isinstance(op.inputs[1], Lit) or y.low == y.high
    return _widened(Interval(low, high, _and(x.attained, single), _and(x.contiguous, single)), ~(y.low > 0))


def _floormod(op: Op, args: list[Interval]) -> Interval:
    x, y = args
    if isinstance(op.inputs[1], Lit) and -(2**30) < op.inputs[1].value < 0:  # x % -d is -((-x) % d)
        turned = Interval(-x.high, -x.low, x.attained, x.contiguous)
        found = _rest(turned, Interval(-y.high, -y.low))
        info = jnp.iinfo(x.low.dtype)
        return _widened(Interval(-found.high, -found.low, *found[2:]), x.low <= info.min)
    return _rest(x, y)


def _rest(x: Interval, y: Interval) -> Interval:
    """x % y where y is positive."""
    modulus = jnp.maximum(y.low, 1)
    same = (y.low == y.high) & (jnp.floor_divide(x.low, modulus) == jnp.floor_divide(x.high, modulus))
    low = jnp.where(same, jnp.mod(x.low, modulus), 0)
    high = jnp.where(same, jnp.mod(x.high, modulus), y.high - 1)
    # Within one period the ends are those of x; over a whole period of consecutive integers every rest occurs.
    width = x.high - x.low
    whole = (y.low == y.high) & ((width < 0) | (width >= modulus - 1))  # width < 0: more than the type can say
    exact = _and(x.contiguous, same | whole)
    return _widened(Interval(low, high, _or(exact, _and(x.attained, same)), exact), ~(y.low > 0))


def _div(op: Op, args: list[Interval]) -> Interval | None:
    x, y = args
    if jnp.issubdtype(x.low.dtype, jnp.integer):
        return None
    crosses = ~((y.low > 0) | (y.high < 0))
    low, high = _corners(jnp.divide, x, y)
    return Interval(jnp.where(crosses, jnp.nan, low), jnp.where(crosses, jnp.nan, high))


def _integer_pow(op: Op, args: list[Interval]) -> Interval | None:
    y = typing.cast(int, dict(op.params)["y"])
    return None if y < 0 else _power(args[0], y)


def _convert(op: Op, args: list[typing.Any]) -> Interval | None:
    (x,) = args
    dtype = jnp.dtype(op.out.dtype)
    if isinstance(x, Truth):
        kept = _wide(op.out.dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
        seen = x.sure_true & x.sure_false | (~x.can_true) | (~x.can_false)
        return Interval((~x.can_false).astype(kept), x.can_true.astype(kept), seen, seen)
    old = x.low.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        wide = _wide(op.out.dtype)
        return Interval(x.low.astype(wide), x.high.astype(wide), x.attained)
    if jnp.issubdtype(old, jnp.floating):
        info = jnp.iinfo(dtype)
        inside = (x.low > float(info.min)) & (x.high < float(info.max) * 0.999)
        whole = typing.cast(Interval, unknown(op.out.dtype))
        ends = (jnp.where(inside, e, 0).astype(dtype) for e in (x.low, x.high))
        return Interval(*(jnp.where(inside, e, w) for e, w in zip(ends, (whole.low, whole.high), strict=True)))
    if range_known(op.out) and range_known(op.inputs[0]) and dtype.itemsize >= 4:
        return Interval(x.low.astype(dtype), x.high.astype(dtype), x.attained, x.contiguous)
    return _widened(Interval(x.low.astype(dtype), x.high.astype(dtype), x.attained, x.contiguous), ~_fits(x, dtype))


def _fits(x: Interval, dtype: jnp.dtype) -> Array:
    """Blocks whose integers are all of that type."""
    old, new = jnp.iinfo(x.low.dtype), jnp.iinfo(dtype)
    fits = jnp.ones((1, 1, 1, 1), bool)
    if new.min > old.min:
        fits = fits & (x.low >= np.array(new.min, x.low.dtype))
    if new.max < old.max:
        fits = fits & (x.high <= np.array(new.max, x.low.dtype))
    return fits


def range_known(atom: mod_ir.Atom) -> bool:
    return isinstance(atom, Lit) or atom.low is not None


def _select(op: Op, args: list[typing.Any]) -> Interval | None:
    predicate, *cases = args
    if not all(isinstance(c, Interval) for c in cases):
        return None
    if isinstance(predicate, Truth) and len(cases) == 2:
        off, on = cases
        only_on, only_off = ~predicate.can_false, ~predicate.can_true
        both_low, both_high = jnp.minimum(off.low, on.low), jnp.maximum(off.high, on.high)
        low = jnp.where(only_on, on.low, jnp.where(only_off, off.low, both_low))
        return Interval(low, jnp.where(only_on, on.high, jnp.where(only_off, off.high, both_high)))
    low, high = cases[0].low, cases[0].high
    for case in cases[1:]:
        low, high = jnp.minimum(low, case.low), jnp.maximum(high, case.high)
    return Interval(low, high)


def _sign(op: Op, args: list[Interval]) -> Interval:
    return Interval(jnp.sign(args[0].low), jnp.sign(args[0].high), args[0].attained)


RULES: dict[str, Callable[..., Interval | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "max": _extremum(jnp.maximum),
    "min": _extremum(jnp.minimum),
    "floordiv": _floordiv,
    "floormod": _floormod,
    "div": _div,
    "integer_pow": _integer_pow,
    "square": _square,
    "convert_element_type": _convert,
    "select_n": _select,
    **{name: _monotone(getattr(lax, name)) for name in (*INEXACT, "floor", "ceil")},
}


# ------------------------------------------------------------------- comparisons and logic


def _witnessed(can_true: Array, can_false: Array, x: Interval, y: Interval, apart: bool) -> Truth:
    """Where both ends of both sides occur independently, what can happen does."""
    seen = _and(_and(x.attained, y.attained), apart)
    if seen is False:
        no = jnp.zeros((1, 1, 1, 1), bool)
        return Truth(can_true, can_false, no, no)
    known = ~(_is_nan(x.low) | _is_nan(y.low)) & seen
    return Truth(can_true, can_false, can_true & known, can_false & known)


def _is_nan(value: Array) -> Array:
    return jnp.isnan(value) if jnp.issubdtype(value.dtype, jnp.floating) else jnp.zeros(value.shape, bool)


def _lt(x: Interval, y: Interval, apart: bool) -> Truth:
    return _witnessed(~(x.low >= y.high), ~(x.high < y.low), x, y, apart)


def _le(x: Interval, y: Interval, apart: bool) -> Truth:
    return _witnessed(~(x.low > y.high), ~(x.high <= y.low), x, y, apart)


def _eq(x: Interval, y: Interval, apart: bool) -> Truth:
    can_true = ~((x.high < y.low) | (y.high < x.low))
    can_false = ~((x.low == x.high) & (y.low == y.high) & (x.low == y.low))
    found = _witnessed(can_true, can_false, x, y, apart)
    if not apart or x.attained is False or y.attained is False:
        return found
    inside = lambda p, i: (p >= i.low) & (p <= i.high)
    meet = (x.low == y.low) | (x.high == y.high) | (x.low == y.high) | (x.high == y.low)
    meet = meet | _and(x.contiguous, inside(y.low, x) | inside(y.high, x))
    meet = meet | _and(y.contiguous, inside(x.low, y) | inside(x.high, y))
    meet = meet | _and(_and(x.contiguous, y.contiguous), can_true)
    return found._replace(sure_true=found.sure_true & meet)


def negate(t: Truth) -> Truth:
    return Truth(t.can_false, t.can_true, t.sure_false, t.sure_true)


COMPARISONS: dict[str, Callable[[Interval, Interval, bool], Truth]] = {
    "lt": _lt,
    "le": _le,
    "gt": lambda x, y, apart: _lt(y, x, apart),
    "ge": lambda x, y, apart: _le(y, x, apart),
    "eq": _eq,
    "ne": lambda x, y, apart: negate(_eq(x, y, apart)),
}


def both(a: Truth, b: Truth, apart: bool) -> Truth:
    """a and b."""
    together = (a.sure_true & ~b.can_false) | (b.sure_true & ~a.can_false)
    if apart:
        together = together | (a.sure_true & b.sure_true)
    return Truth(a.can_true & b.can_true, a.can_false | b.can_false, together, a.sure_false | b.sure_false)


def either(a: Truth, b: Truth, apart: bool) -> Truth:
    """a or b."""
    return negate(both(negate(a), negate(b), apart))


def _logic(op: Op, args: list[typing.Any], apart: bool) -> Abstract:
    if op.prim == "convert_element_type":
        (x,) = args
        if isinstance(x, Truth):
            return x
        zero = jnp.zeros((1, 1, 1, 1), x.low.dtype)
        return negate(_eq(x, Interval(zero, zero, True, True), True))
    if not all(isinstance(a, Truth) for a in args):
        return unknown("bool")
    if op.prim == "not":
        return negate(args[0])
    if op.prim == "and":
        return both(args[0], args[1], apart)
    if op.prim == "or":
        return either(args[0], args[1], apart)
    if op.prim in ("xor", "ne", "eq"):
        x, y = args
        differ = either(both(x, negate(y), apart), both(negate(x), y, apart), False)
        return differ if op.prim != "eq" else negate(differ)
    if op.prim == "select_n" and len(args) == 3:
        p, off, on = args
        return either(both(p, on, False), both(negate(p), off, False), False)
    return unknown("bool")


# ------------------------------------------------------------------- loads


def _longest(atom: mod_ir.Atom, grid: BlockGrid, limit: int) -> int:
    """Most neighbours that one block can reach along a dimension of that index."""
    linear = atom.linear if isinstance(atom, Val) else None
    if linear is None:
        return limit
    return min(limit, abs(linear.q) * (grid.block_q - 1) + abs(linear.kv) * (grid.block_kv - 1) + 1)


def _load(load: Load, index: list[Abstract], array: Array, grid: BlockGrid, points: Mapping[int, Array]) -> Abstract:
    """Smallest and largest element that the block can read."""
    dtype = load.out.dtype
    if any(isinstance(i, Truth) for i in index) or array.size == 0 or jnp.issubdtype(array.dtype, jnp.complexfloating):
        return unknown(dtype)
    spans = typing.cast(list[Interval], index)
    # An index is at rest where it is one known number in every block; all others may move.
    moving = [d for d, a in enumerate(load.index) if isinstance(a, Val) and a.id not in points]
    if len(moving) > 1 or (
        array.shape[moving[0]] > RANGE_TABLE_LIMIT
        and _longest(load.index[moving[0]], grid, array.shape[moving[0]]) > 1 << 16
    ):
        return _extremes_of_rows(load, spans, array, moving)
    (dim,) = moving
    rows = jnp.moveaxis(array, dim, -1)
    where = [i.low for d, i in enumerate(spans) if d != dim]
    span = spans[dim]
    longest = _longest(load.index[dim], grid, rows.shape[-1])
    ends = _range_extremes((rows, rows), where, span, longest)
    return _of_ends(*ends, span.contiguous, dtype)


RANGE_TABLE_LIMIT = 1 << 22
"""Longest dimension for which tables of range minima are made (log2 of it as many copies)."""
TILE_TABLE_LIMIT = 1 << 26
"""Largest array, and largest intermediate, for which extremes of rectangles are computed."""


def _range_extremes(
    rows: tuple[Array, Array], where: Sequence[Array], span: Interval, longest: int
) -> tuple[Array, Array]:
    """(least of rows[0][where, low..high], greatest of rows[1][where, low..high]), of at most `longest` elements."""
    n = rows[0].shape[-1]
    low, high = jnp.clip(span.low, 0, n - 1), jnp.clip(span.high, 0, n - 1)
    pick = lambda level, place: level.at[(*where, place)].get(mode="clip")
    return _doubling(rows, low, high, pick, -1, longest)


def _doubling(
    rows: tuple[Array, Array],
    low: Array,
    high: Array,
    pick: Callable[[Array, Array], Array],
    axis: int,
    longest: int,
) -> tuple[Array, Array]:
    """(least, greatest) between low and high along an axis: round k holds the extremes of 2^k neighbours.

    pick(level, places) reads a level. A loop, so that what has to be compiled does not grow with `longest`.
    """
    found = tuple(pick(level, low) for level in rows)
    if longest <= 1:
        return found  # type: ignore[return-value]
    n = rows[0].shape[axis]
    length = jnp.maximum(high - low, 0) + 1
    rounds = longest.bit_length() - 1
    extremes = (jnp.minimum, jnp.maximum)

    def neighbours(level: Array, width: Array) -> Array:
        """The element `width` further, or the last."""
        edge = lax.slice_in_dim(level, n - 1, n, axis=axis)
        margin = [1 << (rounds - 1) if d == axis % level.ndim else m for d, m in enumerate(level.shape)]
        longer = jnp.concatenate([level, jnp.broadcast_to(edge, margin)], axis)
        return lax.dynamic_slice_in_dim(longer, width, n, axis)

    def double(k: Array, state: tuple) -> tuple:
        levels, best = state
        width = jnp.left_shift(jnp.int32(1), k)
        levels = tuple(f(x, neighbours(x, width)) for f, x in zip(extremes, levels, strict=True))
        last = jnp.maximum(high - 2 * width + 1, 0)
        here = (f(pick(x, low), pick(x, last)) for f, x in zip(extremes, levels, strict=True))
        reached = length >= 2 * width
        shaped = lambda new: reached.reshape(reached.shape + (1,) * (new.ndim - reached.ndim))
        return levels, tuple(jnp.where(shaped(new), new, old) for new, old in zip(here, best, strict=True))

    # the first round as it is: the state of the loop has the shapes that it keeps
    state = double(jnp.int32(0), (rows, found))
    return lax.fori_loop(jnp.int32(1), jnp.int32(rounds), double, state)[1]


def _extremes_of_rows(load: Load, index: list[Interval], array: Array, moving: list[int]) -> Abstract:
    """Several moving dimensions: block extremes where the load is a plain tile, else those of all that it may reach."""
    wide = array.astype(jnp.int8) if array.dtype == jnp.bool_ else array
    fixed = [d for d in range(array.ndim) if d not in moving]
    rows = wide.transpose(*fixed, *moving)
    where = [index[d].low for d in fixed]
    spans = [index[d] for d in moving]
    starts = max(s.low.size for s in spans)
    if len(moving) == 2 and array.size <= TILE_TABLE_LIMIT and starts * max(array.shape) <= TILE_TABLE_LIMIT:
        ends = _rectangle_extremes(rows, where, spans)
        exact = _and(*(s.contiguous for s in spans))
        exact = _and(exact, independent([axes_of(a) for a in load.index]))
        return _of_ends(*ends, exact, load.out.dtype)
    axes = tuple(range(len(fixed), array.ndim))
    ends = [
        r.at[tuple(where)].get(mode="clip") if where else r.reshape(1, 1, 1, 1)
        for r in (rows.min(axes), rows.max(axes))
    ]
    return _of_ends(ends[0], ends[1], False, load.out.dtype)


def _rectangle_extremes(rows: Array, where: Sequence[Array], spans: Sequence[Interval]) -> tuple[Array, Array]:
    """Extremes of a rectangle of the last two dims: along one, kept at each span of it, then along the other.

    The spans of a dimension depend on blocks of queries or keys alone, so the first step makes [..., spans, n] numbers.
    """
    first, second = spans
    shape = jnp.broadcast_shapes(first.low.shape, first.high.shape)
    n = rows.shape[-2]
    low, high = (jnp.clip(jnp.broadcast_to(e, shape).ravel(), 0, n - 1) for e in (first.low, first.high))
    moved = jnp.moveaxis(rows, -2, 0)
    along = _doubling((moved, moved), low, high, lambda level, place: level[place], 0, n)
    one = tuple(jnp.moveaxis(x, 0, -2) for x in along)
    flat = jnp.arange(one[0].shape[-2]).reshape(shape)
    return _range_extremes(one, [*where, flat], second, one[0].shape[-1])  # type: ignore[arg-type]


def _of_ends(low: Array, high: Array, exact: Flag, dtype: str) -> Abstract:
    if dtype == "bool":
        can_true, can_false = high != 0, low == 0
        seen = jnp.zeros((1, 1, 1, 1), bool) if exact is False else exact
        return Truth(can_true, can_false, can_true & seen, can_false & seen)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        low, high = low.astype(_wide(dtype)), high.astype(_wide(dtype))
        nan = jnp.isnan(low) | jnp.isnan(high)
        low, high = jnp.where(nan, jnp.nan, low), jnp.where(nan, jnp.nan, high)
    return Interval(low, high, exact, False)
