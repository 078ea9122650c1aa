"""Abstract evaluation of a mask program over blocks of the attention matrix.

Batch entries and heads are enumerated; queries and keys come in blocks. Each integer or float is an interval per block, each
bool a `Truth`: can it be true, can it be false, and is it known to be true (false) somewhere. The analysis is sound: a block is
called full or empty only where every entry is on or off. It is exact where the witnesses say so: `sure_true` and `sure_false`
mark blocks that certainly hold both.

Two static facts about an interval carry the exactness. `attained`: both ends are values of some entry of the block.
`contiguous`: so is every integer between them. NaN ends mean "anything" (comparisons are written so that they then decide
nothing); an integer that may have wrapped around gets the whole range of its type.

Reference: Moore, Interval Analysis (1966); the idea of deciding attention blocks by it is flexjax's own.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from flexjax.trace import mod_ir
from flexjax.trace.mod_ir import Axes, Lit, Load, Op, Program, Val, axes_of

Array = jax.Array


class Interval(typing.NamedTuple):
    """low <= value <= high in each block; arrays broadcast to [batch, heads, q blocks, kv blocks]."""

    low: Array
    high: Array
    attained: bool = False
    contiguous: bool = False


class Truth(typing.NamedTuple):
    """What is known of a bool in each block."""

    can_true: Array
    can_false: Array
    sure_true: Array
    sure_false: Array


Abstract = Interval | Truth


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """The blocks looked at: `b` [B], `h` [H] single positions, first and last position of each query and key block
    (of at most block_q and block_kv tokens)."""

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
        shape = [1, 1, 1, 1]
        shape[axis - mod_ir.B] = -1
        return Interval(first.reshape(shape), last.reshape(shape), True, True)


def block_grid(
    batch: int, heads: int, q_blocks: Array, kv_blocks: Array, sizes: tuple[int, int, int, int]
) -> BlockGrid:
    """Grid of the given block numbers; sizes: q_len, kv_len, block_q, block_kv. The last block ends where the matrix does."""
    q_len, kv_len, block_q, block_kv = sizes
    edges = lambda blocks, size, length: (blocks * size, jnp.minimum(blocks * size + size, length) - 1)
    i32 = lambda n: jnp.arange(n, dtype=jnp.int32)
    return BlockGrid(
        i32(batch),
        i32(heads),
        *edges(q_blocks, block_q, q_len),
        *edges(kv_blocks, block_kv, kv_len),
        block_q,
        block_kv,
    )


def decide(program: Program, captures: Sequence[Array], grid: BlockGrid) -> Truth:
    """The mask's truth in each block of the grid."""
    env: dict[int, Abstract] = {v.id: grid.of(v.id) for v in program.inputs[1:]}

    def read(atom: mod_ir.Atom) -> Abstract:
        return _of_literal(atom) if isinstance(atom, Lit) else env[atom.id]

    for step in program.steps:
        if isinstance(step, Op):
            env[step.out.id] = _operation(step, [read(a) for a in step.inputs], env)
        elif isinstance(step, Load):
            env[step.out.id] = _load(step, [read(a) for a in step.index], captures[step.capture], grid)
        else:
            env.update({v.id: unknown(v.dtype) for v in step.outs})
    return as_truth(read(program.results[0]))


# ------------------------------------------------------------------- values about which nothing is known


def unknown(dtype: str) -> Abstract:
    if dtype == "bool":
        yes, no = jnp.ones((1, 1, 1, 1), bool), jnp.zeros((1, 1, 1, 1), bool)
        return Truth(yes, yes, no, no)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        info = jnp.iinfo(jnp.dtype(dtype))
        ends = (jnp.full((1, 1, 1, 1), e, jnp.dtype(dtype)) for e in (info.min, info.max))
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


# ------------------------------------------------------------------- operations


def _operation(op: Op, args: list[Abstract], env: Mapping[int, Abstract]) -> Abstract:
    if op.out.linear is not None:
        exact = _linear(op.out, env)
        if exact is not None:
            return exact
    apart = independent([axes_of(a) for a in op.inputs])
    if op.prim in COMPARISONS and all(isinstance(a, Interval) for a in args):
        return COMPARISONS[op.prim](*args, apart)
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
    return _unless_wrapped(
        op, args, found._replace(attained=found.attained and apart, contiguous=found.contiguous and apart)
    )


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


def _linear(val: Val, env: Mapping[int, Abstract]) -> Interval | None:
    """The exact interval of b*b + h*h + q*q + kv*kv + const + uniform terms."""
    linear = val.linear
    terms = [(c, env[i]) for i, c in zip((1, 2, 3, 4), (linear.b, linear.h, linear.q, linear.kv), strict=True) if c]
    for ident, coefficient in linear.uniform:
        terms.append((coefficient, env[ident]))
    if any(isinstance(t, Truth) for _, t in terms) or not all(t.attained for _, t in terms):
        return None
    low = high = jnp.full((1, 1, 1, 1), linear.const, jnp.dtype(val.dtype))
    for coefficient, term in terms:
        ends = (term.low.astype(low.dtype) * coefficient, term.high.astype(low.dtype) * coefficient)
        low, high = low + jnp.minimum(*ends), high + jnp.maximum(*ends)
    found = Interval(low, high, True, abs(linear.q) <= 1 and abs(linear.kv) <= 1)
    return found if val.low is not None else _widen_if_large(found, [abs(c) * _size(t) for c, t in terms])


def _size(term: Interval) -> Array:
    return jnp.maximum(jnp.abs(term.low.astype(jnp.float32)), jnp.abs(term.high.astype(jnp.float32)))


def _widen_if_large(found: Interval, sizes: Sequence[Array]) -> Interval:
    """The whole range of the type in blocks where a sum of these magnitudes may leave it."""
    info = jnp.iinfo(found.low.dtype)
    large = sum(sizes, jnp.zeros((1, 1, 1, 1), jnp.float32)) >= float(info.max) * 0.999
    return Interval(jnp.where(large, info.min, found.low), jnp.where(large, info.max, found.high))


def _unless_wrapped(op: Op, args: list[Abstract], found: Interval) -> Interval:
    if op.prim not in ("add", "sub", "mul", "neg", "abs", "integer_pow", "square") or op.out.low is not None:
        return found
    if not jnp.issubdtype(jnp.dtype(op.out.dtype), jnp.integer):
        return found
    sizes = [_size(a) for a in args if isinstance(a, Interval)]
    if op.prim == "mul":
        sizes = [sizes[0] * sizes[1]]
    if op.prim in ("integer_pow", "square"):
        return typing.cast(Interval, unknown(op.out.dtype))
    return _widen_if_large(found, sizes)


def _corners(f: Callable[[Array, Array], Array], x: Interval, y: Interval) -> tuple[Array, Array]:
    values = [f(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    low, high = values[0], values[0]
    for v in values[1:]:
        low, high = jnp.minimum(low, v), jnp.maximum(high, v)
    return low, high


def _add(op: Op, args: list[Interval]) -> Interval:
    x, y = args
    return Interval(x.low + y.low, x.high + y.high, x.attained and y.attained, x.contiguous and y.contiguous)


def _sub(op: Op, args: list[Interval]) -> Interval:
    x, y = args
    return Interval(x.low - y.high, x.high - y.low, x.attained and y.attained, x.contiguous and y.contiguous)


def _mul(op: Op, args: list[Interval]) -> Interval:
    x, y = args
    return Interval(*_corners(jnp.multiply, x, y), x.attained and y.attained)


def _neg(op: Op, args: list[Interval]) -> Interval:
    return Interval(-args[0].high, -args[0].low, args[0].attained, args[0].contiguous)


def _abs(op: Op, args: list[Interval]) -> Interval:
    (x,) = args
    a, b = jnp.abs(x.low), jnp.abs(x.high)
    crosses = (x.low <= 0) & (x.high >= 0)
    low = jnp.where(crosses, jnp.zeros_like(a), jnp.minimum(a, b))
    return Interval(low, jnp.maximum(a, b), x.contiguous, x.contiguous)


def _extremum(pick: Callable[[Array, Array], Array]) -> Callable:
    def rule(op: Op, args: list[Interval]) -> Interval:
        x, y = args
        return Interval(
            pick(x.low, y.low), pick(x.high, y.high), x.attained and y.attained, x.contiguous and y.contiguous
        )

    return rule


def _monotone(f: Callable[[Array], Array], keeps_contiguous: bool = False) -> Callable:
    def rule(op: Op, args: list[Interval]) -> Interval:
        (x,) = args
        return Interval(f(x.low), f(x.high), x.attained, x.contiguous and keeps_contiguous)

    return rule


def _floordiv(op: Op, args: list[Interval]) -> Interval | None:
    x, y = args
    positive = y.low > 0
    safe = y._replace(low=jnp.maximum(y.low, 1), high=jnp.maximum(y.high, 1))
    low, high = _corners(jnp.floor_divide, x, safe)
    info = jnp.iinfo(low.dtype)
    single = isinstance(op.inputs[1], Lit)
    return Interval(
        jnp.where(positive, low, info.min),
        jnp.where(positive, high, info.max),
        x.attained and y.attained and single,
        x.contiguous and single,
    )


def _floormod(op: Op, args: list[Interval]) -> Interval:
    x, y = args
    modulus = jnp.maximum(y.low, 1)
    same = (y.low == y.high) & (y.low > 0) & (jnp.floor_divide(x.low, modulus) == jnp.floor_divide(x.high, modulus))
    positive = y.low > 0
    info = jnp.iinfo(x.low.dtype)
    low = jnp.where(same, jnp.mod(x.low, modulus), jnp.where(positive, 0, info.min))
    high = jnp.where(same, jnp.mod(x.high, modulus), jnp.where(positive, y.high - 1, info.max))
    # Over more than one period of consecutive integers every rest occurs.
    if x.contiguous and isinstance(op.inputs[1], Lit):
        whole = same | (x.high - x.low >= modulus - 1)
        wraps = Interval(low, high, False, False)
        return wraps._replace(attained=False) if not _always(whole) else Interval(low, high, True, True)
    return Interval(low, high)


def _always(condition: Array) -> bool:
    """True only where it is known while tracing; the flags are static."""
    return not isinstance(condition, jax.core.Tracer) and bool(jnp.all(condition))


def _div(op: Op, args: list[Interval]) -> Interval | None:
    x, y = args
    if jnp.issubdtype(x.low.dtype, jnp.integer):
        return None
    crosses = ~((y.low > 0) | (y.high < 0))
    low, high = _corners(jnp.divide, x, y)
    return Interval(jnp.where(crosses, jnp.nan, low), jnp.where(crosses, jnp.nan, high))


def _integer_pow(op: Op, args: list[Interval]) -> Interval | None:
    (x,) = args
    y = dict(op.params)["y"]
    if y < 0:
        return None
    a, b = x.low**y, x.high**y
    if y % 2:
        return Interval(a, b, x.attained)
    low = jnp.where((x.low <= 0) & (x.high >= 0), jnp.zeros_like(a), jnp.minimum(a, b))
    return Interval(low, jnp.maximum(a, b))


def _convert(op: Op, args: list[Abstract]) -> Interval | None:
    (x,) = args
    dtype = jnp.dtype(op.out.dtype)
    if isinstance(x, Truth):
        kept = _wide(op.out.dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
        return Interval((~x.can_false).astype(kept), x.can_true.astype(kept))
    old = x.low.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        wide = _wide(op.out.dtype)
        return Interval(x.low.astype(dtype).astype(wide), x.high.astype(dtype).astype(wide), x.attained)
    if jnp.issubdtype(old, jnp.floating):
        info = jnp.iinfo(dtype)
        inside = (x.low > float(info.min)) & (x.high < float(info.max) * 0.999)
        low = jnp.where(inside, jnp.where(inside, x.low, 0).astype(dtype), info.min)
        return Interval(low, jnp.where(inside, jnp.where(inside, x.high, 0).astype(dtype), info.max))
    info = jnp.iinfo(dtype)
    fits = (x.low >= max(info.min, jnp.iinfo(old).min)) & (x.high <= min(info.max, jnp.iinfo(old).max))
    low, high = (jnp.where(fits, e.astype(dtype), i) for e, i in ((x.low, info.min), (x.high, info.max)))
    return Interval(low, high, x.attained and range_known(op.inputs[0]))


def range_known(atom: mod_ir.Atom) -> bool:
    return isinstance(atom, Lit) or atom.low is not None


def _select(op: Op, args: list[Abstract]) -> Interval | None:
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
    "convert_element_type": _convert,
    "select_n": _select,
    **{
        name: _monotone(getattr(jnp, name))
        for name in (
            "exp",
            "exp2",
            "log",
            "sqrt",
            "tanh",
            "floor",
            "ceil",
            "log1p",
            "expm1",
            "cbrt",
            "arctan",
            "sinh",
        )
    },
}


# ------------------------------------------------------------------- comparisons and logic


def _witnessed(can_true: Array, can_false: Array, x: Interval, y: Interval, apart: bool) -> Truth:
    """Both ends of both sides occur independently: what can happen does."""
    if not (apart and x.attained and y.attained):
        no = jnp.zeros((1, 1, 1, 1), bool)
        return Truth(can_true, can_false, no, no)
    known = ~(_is_nan(x.low) | _is_nan(y.low))
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
    if not (apart and x.attained and y.attained):
        return found
    touch = (x.low == y.low) | (x.high == y.high) | (x.low == y.high) | (x.high == y.low)
    if x.contiguous and y.contiguous:
        meet = can_true
    else:
        inside = lambda p, i: (p >= i.low) & (p <= i.high)
        meet = touch
        if x.contiguous:
            meet = meet | inside(y.low, x) | inside(y.high, x)
        if y.contiguous:
            meet = meet | inside(x.low, y) | inside(x.high, y)
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


def _logic(op: Op, args: list[Abstract], apart: bool) -> Abstract:
    if op.prim == "convert_element_type":
        (x,) = args
        return x if isinstance(x, Truth) else negate(_eq(x, typing.cast(Interval, _of_literal(Lit(0, "int32"))), True))
    if not all(isinstance(a, Truth) for a in args):
        return unknown("bool")
    if op.prim == "not":
        return negate(args[0])
    if op.prim == "and":
        return both(*args, apart)
    if op.prim == "or":
        return either(*args, apart)
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


def _load(load: Load, index: list[Abstract], array: Array, grid: BlockGrid) -> Abstract:
    """Smallest and largest element that the block can read."""
    dtype = load.out.dtype
    if jnp.issubdtype(jnp.dtype(dtype), jnp.unsignedinteger) and jnp.dtype(dtype).itemsize > 2:
        return unknown(dtype)
    if any(isinstance(i, Truth) for i in index) or array.size == 0:
        return unknown(dtype)
    moving = [d for d, a in enumerate(load.index) if axes_of(a) - mod_ir.UNIFORM]
    if len(moving) > 1 or (
        moving
        and array.shape[moving[0]] > RANGE_TABLE_LIMIT
        and _longest(load.index[moving[0]], grid, array.size) > 1 << 16
    ):
        return _extremes_of_rows(load, index, array, moving)
    if not moving:
        places = [i.low for i in index]
        value = array.at[tuple(places)].get(mode="clip") if places else array.reshape(1, 1, 1, 1)
        return _of_ends(value, value, True, dtype)
    (dim,) = moving
    rows = jnp.moveaxis(array, dim, -1)
    where = [i.low for d, i in enumerate(index) if d != dim]
    span = index[dim]
    longest = _longest(load.index[dim], grid, rows.shape[-1])
    ends = [_range_extreme(rows, where, span, f, longest) for f in (jnp.minimum, jnp.maximum)]
    return _of_ends(*ends, span.contiguous and independent([axes_of(a) for a in load.index]), dtype)


RANGE_TABLE_LIMIT = 1 << 22
"""Longest dimension for which tables of range minima are made (log2 of it as many copies)."""
TILE_TABLE_LIMIT = 1 << 26
"""Largest array, and largest intermediate, for which extremes of rectangles are computed."""


def _range_extreme(
    rows: Array, where: Sequence[Array], span: Interval, f: Callable[[Array, Array], Array], longest: int
) -> Array:
    """f over rows[where, low..high], at most `longest` elements, by doubling: level k holds the extreme of 2^k neighbours."""
    n = rows.shape[-1]
    low, high = jnp.clip(span.low, 0, n - 1), jnp.clip(span.high, 0, n - 1)
    length = jnp.maximum(high - low, 0) + 1
    level = rows
    result = None
    width = 1
    while True:
        first = level.at[(*where, low)].get(mode="clip")
        last = level.at[(*where, jnp.maximum(high - width + 1, 0))].get(mode="clip")
        here = f(first, last)
        result = here if result is None else jnp.where(length >= width, here, result)
        if width * 2 > longest:
            return result
        shifted = jnp.concatenate(
            [level[..., width:], jnp.broadcast_to(level[..., -1:], (*level.shape[:-1], width))], -1
        )
        level, width = f(level, shifted), width * 2


def _extremes_of_rows(load: Load, index: list[Interval], array: Array, moving: list[int]) -> Abstract:
    """Several moving dimensions: block extremes where the load is a plain tile, else those of all that it may reach."""
    wide = array.astype(jnp.int8) if array.dtype == jnp.bool_ else array
    fixed = [d for d in range(array.ndim) if d not in moving]
    rows = wide.transpose(*fixed, *moving)
    where = [index[d].low for d in fixed]
    spans = [index[d] for d in moving]
    starts = max(s.low.size for s in spans)
    if len(moving) == 2 and array.size <= TILE_TABLE_LIMIT and starts * max(array.shape) <= TILE_TABLE_LIMIT:
        ends = [_rectangle_extreme(rows, where, spans, f) for f in (jnp.minimum, jnp.maximum)]
        exact = all(s.contiguous for s in spans) and independent([axes_of(a) for a in load.index])
        return _of_ends(*ends, exact, load.out.dtype)
    axes = tuple(range(len(fixed), array.ndim))
    ends = [
        r.at[tuple(where)].get(mode="clip") if where else r.reshape(1, 1, 1, 1)
        for r in (rows.min(axes), rows.max(axes))
    ]
    return _of_ends(*ends, False, load.out.dtype)


def _rectangle_extreme(
    rows: Array, where: Sequence[Array], spans: Sequence[Interval], f: Callable[[Array, Array], Array]
) -> Array:
    """f over a rectangle of the last two dims: along one, kept at each span of it, then along the other.

    The spans of a dimension depend on blocks of queries or keys alone, so the first step makes [..., spans, n] numbers.
    """
    first, second = spans
    one = _spans_along(rows, first, f, axis=-2)
    flat = jnp.arange(one.shape[-2]).reshape(jnp.broadcast_shapes(first.low.shape, first.high.shape))
    return _range_extreme(one, [*where, flat], second, f, one.shape[-1])


def _spans_along(rows: Array, span: Interval, f: Callable[[Array, Array], Array], axis: int) -> Array:
    n = rows.shape[axis]
    shape = jnp.broadcast_shapes(span.low.shape, span.high.shape)
    low = jnp.clip(jnp.broadcast_to(span.low, shape).ravel(), 0, n - 1)
    high = jnp.clip(jnp.broadcast_to(span.high, shape).ravel(), 0, n - 1)
    length = jnp.maximum(high - low, 0) + 1
    moved = jnp.moveaxis(rows, axis, 0)
    level, width, result = moved, 1, None
    column = (slice(None), *(None,) * (moved.ndim - 1))
    while True:
        here = f(level[low], level[jnp.maximum(high - width + 1, 0)])
        result = here if result is None else jnp.where((length >= width)[column], here, result)
        if width * 2 > n:
            return jnp.moveaxis(result, 0, axis)
        shifted = jnp.concatenate([level[width:], jnp.broadcast_to(level[-1:], (width, *level.shape[1:]))], 0)
        level, width = f(level, shifted), width * 2


def _of_ends(low: Array, high: Array, exact: bool, dtype: str) -> Abstract:
    if dtype == "bool":
        no = jnp.zeros((1, 1, 1, 1), bool)
        can_true, can_false = high != 0, low == 0
        return Truth(can_true, can_false, can_true if exact else no, can_false if exact else no)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        low, high = low.astype(_wide(dtype)), high.astype(_wide(dtype))
    return Interval(low, high, exact, False)
