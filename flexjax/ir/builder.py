"""Builds programs step by step: equal operations become one value, and operations with known results are folded.

The builder tracks three facts about each value: its axes (what it depends on), its linear form (the affine function of b, h, q
and kv that it is, if it is one), and for integers its range over the whole attention matrix. By its range, the index of
`x[q - kv + c]` is known to be in bounds; the select for negative indices and the clamp then fold away, and the load is
recognised as a diagonal window.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from flexjax.ir import simplify
from flexjax.ir.literals import evaluate_literals, literal
from flexjax.ir.operations import COMMUTATIVE, COMPARISONS
from flexjax.ir.program import (
    FIRST_FREE_ID,
    KV,
    SCORE,
    UNIFORM,
    ArrayType,
    Atom,
    Axes,
    B,
    H,
    Linear,
    Lit,
    Load,
    Op,
    Program,
    Q,
    Step,
    Val,
    axes_of,
    uses,
)
from flexjax.ir.program import (
    range_of_val as range_of,
)
from flexjax.ir.ranges import (
    Range,
    compare_ranges,
    fits,
    is_integer,
    modular,
    range_result,
    represents_coefficients,
    whole_range_if_narrow,
)
from flexjax.ir.rewrite import rename_steps


def linear_of(atom: Atom) -> Linear | None:
    """The linear form of an integer atom; a value of b and h alone is a uniform term. None where there is no form."""
    if isinstance(atom, Lit):
        return Linear(const=int(atom.value)) if is_integer(atom.dtype) else None
    if atom.linear is not None:
        return atom.linear
    if is_integer(atom.dtype) and not atom.axes - UNIFORM:
        return Linear(uniform=((atom.id, 1),))
    return None


def mixed_axes(parts: Sequence[Axes]) -> Axes:
    """The axes of a value that is computed from values of these axes.

    A mix of delta with q, kv or score depends on q and kv; the score depends on every index.
    """
    union = frozenset().union(*parts)
    if "delta" in union and union & {"q", "kv", "score"}:
        union = (union - {"delta"}) | {"q", "kv"}
    if "score" in union:
        union |= {"b", "h", "q", "kv"}
    return union


def linear_axes(linear: Linear, by_id: Callable[[int], Axes]) -> Axes:
    """The axes that an affine function depends on; `by_id` gives the axes of its uniform terms."""
    found = {name for name, c in (("b", linear.b), ("h", linear.h)) if c}
    for ident, _ in linear.uniform:
        found |= by_id(ident)
    if linear.q and linear.q == -linear.kv:
        found |= {"delta"}
    else:
        found |= {name for name, c in (("q", linear.q), ("kv", linear.kv)) if c}
    return frozenset(found)


class Builder:
    """Makes one program; equal operations on equal inputs become one value.

    inputs     the five input Vals
    steps      the steps so far
    captures   the type of each captured array so far
    """

    def __init__(self, sizes: tuple[int, int, int, int], score_dtype: str):
        """sizes: batch, heads, q_len, kv_len. The ranges of b, h, q, kv follow from them."""
        self.inputs = (
            Val(SCORE, score_dtype, mixed_axes([frozenset({"score"})])),
            *(
                Val(ident, "int32", frozenset({name}), dataclasses.replace(Linear(), **{name: 1}), 0, max(size - 1, 0))
                for ident, name, size in zip((B, H, Q, KV), ("b", "h", "q", "kv"), sizes, strict=True)
            ),
        )
        self.steps: list[Step] = []
        self.captures: list[ArrayType] = []
        self._known: dict[object, Atom] = {}
        self._ops: dict[int, Op] = {}
        self._axes: dict[int, Axes] = {v.id: v.axes for v in self.inputs}
        self._vals: dict[int, Val] = {v.id: v for v in self.inputs}
        self._next = FIRST_FREE_ID

    # ------------------------------------------------------------------ making values

    def fresh(self, dtype: str, axes: Axes, linear: Linear | None = None, bounds: Range = None) -> Val:
        """A new Val with the next free id."""
        low, high = bounds if bounds is not None else (None, None)
        val = Val(self._next, dtype, axes, linear, low, high)
        self._axes[val.id] = axes
        self._vals[val.id] = val
        self._next += 1
        return val

    def capture(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The number of a new captured array of that type."""
        self.captures.append(ArrayType(tuple(shape), jnp.dtype(dtype).name))
        return len(self.captures) - 1

    def op(self, prim: str, inputs: Sequence[Atom], dtype: DTypeLike, **params: object) -> Atom:
        """The result of an operation of operations.py, folded where the operands determine it.

        params   static parameters of the primitive; those that are None are dropped
        """
        inputs = tuple(inputs)
        name = jnp.dtype(dtype).name
        folded = self._fold(prim, inputs, name, params)
        if folded is not None:
            return folded
        if prim in COMMUTATIVE:
            inputs = tuple(sorted(inputs, key=lambda a: (isinstance(a, Lit), str(a))))
        frozen = tuple(sorted((k, v) for k, v in params.items() if v is not None))
        key = (prim, inputs, name, str(frozen))
        if key not in self._known:
            axes = mixed_axes([axes_of(a) for a in inputs])
            linear = _linear_result(prim, inputs, name)
            bounds = range_result(prim, inputs, name, params)
            if bounds is None or not fits(bounds, name):
                # a value that may wrap around is neither bounded nor affine
                bounds = None if not is_integer(name) else whole_range_if_narrow(name)
                linear = None
            if linear is not None and represents_coefficients(linear, name):
                less = linear_axes(linear, self._axes.__getitem__)
                if not axes <= less and "delta" not in less - axes:
                    # q and kv cancelled out, as in (q - kv) + kv: the value is made again without them
                    self._known[key] = self._of_linear(linear, name)
                    return self._known[key]
                axes = less
            else:
                linear = None
            val = self.fresh(name, axes, linear, bounds)
            self._ops[val.id] = Op(prim, inputs, val, frozen)
            self.steps.append(self._ops[val.id])
            self._known[key] = val
        return self._known[key]

    def unfolded(self, prim: str, atom: Atom) -> Atom:
        """The result of an operation that leaves its operand as it is and matters to differentiation alone, as a step."""
        val = self.fresh(atom.dtype, axes_of(atom))
        self.steps.append(Op(prim, (atom,), val))
        return val

    def _of_linear(self, linear: Linear, dtype: str) -> Atom:
        """The value of a linear form, computed from the inputs and values that its terms name."""
        inputs = ((B, linear.b), (H, linear.h), (Q, linear.q), (KV, linear.kv))
        total: Atom = literal(linear.const, dtype)
        for ident, coefficient in (*((i, c) for i, c in inputs if c), *linear.uniform):
            term = self.convert(self._vals[ident], dtype)
            if abs(coefficient) != 1:
                term = self.op("mul", (term, literal(abs(coefficient), dtype)), dtype)
            prim, operands = ("sub", (total, term)) if coefficient < 0 else ("add", (term, total))
            total = self.op(prim, operands, dtype)
        return total

    def load(self, capture: int, index: Sequence[Atom]) -> Atom:
        """captures[capture][index]; the index must be in bounds (see `clamped`)."""
        key = ("load", capture, tuple(index))
        if key not in self._known:
            dtype = self.captures[capture].dtype
            bounds = whole_range_if_narrow(dtype) if is_integer(dtype) else None
            val = self.fresh(dtype, mixed_axes([axes_of(a) for a in index]), None, bounds)
            self.steps.append(Load(capture, tuple(index), val))
            self._known[key] = val
        return self._known[key]

    def load_step(self, atom: Atom) -> Load:
        """The Load whose result is `atom`."""
        return next(s for s in self.steps if isinstance(s, Load) and s.out == atom)

    def clamped(self, index: Atom, limit: int) -> Atom:
        """The index limited to 0..limit, as int32; no operation where its range lies within."""
        low = self.op("max", (index, literal(0, index.dtype)), index.dtype)
        if limit > jnp.iinfo(jnp.dtype(index.dtype)).max:
            return self.convert(low, "int32")  # the type ends before the array does
        both = self.op("min", (low, literal(limit, index.dtype)), index.dtype)
        return self.convert(both, "int32")

    def convert(self, atom: Atom, dtype: DTypeLike) -> Atom:
        return self.op("convert_element_type", (atom,), dtype, new_dtype=jnp.dtype(dtype).name)

    def select(self, predicate: Atom, on_true: Atom, on_false: Atom) -> Atom:
        return self.op("select_n", (predicate, on_false, on_true), on_true.dtype)

    def finish(self, results: Sequence[Atom], gradients: Sequence[Load] = ()) -> Program:
        """The program of these results, without dead steps and with values renumbered in order.

        gradients   loads by which results[2:] are the derivatives; kept even where no result depends on them, because a
                    custom derivative rule may have a derivative by a load that the value does not read
        """
        live = uses(tuple(self.steps), (*results, *(load.out for load in gradients)))
        kept = [s for s in self.steps if any(o.id in live for o in s.outs)]
        return _renumber(self.inputs, kept, tuple(results), tuple(self.captures), gradients)

    # ------------------------------------------------------------------ folding

    def _fold(self, prim: str, inputs: tuple[Atom, ...], dtype: str, params: dict[str, object]) -> Atom | None:
        """The result of an operation where it needs no new step of that name, None where it does."""
        if prim == "convert_element_type" and inputs[0].dtype == dtype:
            return inputs[0]
        if all(isinstance(a, Lit) for a in inputs):
            known = evaluate_literals(prim, inputs, dtype)
            if known is not None:
                return known
        if prim in COMPARISONS:
            truth = compare_ranges(prim, range_of(inputs[0]), range_of(inputs[1]))
            return None if truth is None else literal(truth, "bool")
        if prim == "select_n":
            return _fold_select(inputs) or self._select_of_products(inputs, dtype)
        if prim in ("and", "or") and dtype == "bool":
            return _fold_logic(prim, inputs)
        if prim in ("max", "min"):
            return _fold_extremum(prim, inputs)
        if prim in ("add", "sub", "mul", "div", "floordiv", "floormod", "rem"):
            return self._fold_arithmetic(prim, inputs, dtype)
        if prim == "clamp":
            low, x, high = inputs
            return self.op("min", (self.op("max", (x, low), dtype), high), dtype)
        if prim in ("copy", "copy_p", "stop_gradient", "optimization_barrier", "reduce_precision_noop"):
            return inputs[0]
        if prim in ("real", "imag") and (made := self._definition(inputs[0])) is not None and made.prim == "complex":
            return made.inputs[prim == "imag"]
        if prim == "abs" and (bounds := range_of(inputs[0])) and bounds[0] >= 0:
            return inputs[0]
        return None

    def _definition(self, atom: Atom) -> Op | None:
        """The Op that computes the atom, None for inputs, literals, loads and calls."""
        return self._ops.get(atom.id) if isinstance(atom, Val) else None

    def _select_of_products(self, inputs: tuple[Atom, ...], dtype: str) -> Atom | None:
        """select(p, score * c, score * d) as score * select(p, c, d), None for any other select."""
        choice = simplify.choice_of_products(inputs, self._definition) if jnp.issubdtype(dtype, jnp.floating) else None
        if choice is None:
            return None
        factor = self.select(choice.predicate, literal(choice.on_true, dtype), literal(choice.on_false, dtype))
        return self.op("mul", (choice.score, factor), dtype)

    def _fold_arithmetic(self, prim: str, inputs: tuple[Atom, ...], dtype: str) -> Atom | None:
        """The result of a sum, product or division by identities such as x * 1 = x, None where none applies."""
        a, b = inputs
        if prim == "mul":
            for x, y in ((a, b), (b, a)):
                if isinstance(y, Lit) and y.value == 1:
                    return x
            parts = simplify.regrouped(inputs, self._definition) if dtype in ("float32", "float64") else None
            if parts is not None:
                return self.op("mul", (parts[0], self.op("mul", parts[1:], dtype)), dtype)
        if prim in ("div", "floordiv") and isinstance(b, Lit) and b.value == 1:
            return a
        if not is_integer(dtype):
            return None
        if prim == "add":
            for x, y in ((a, b), (b, a)):
                if isinstance(y, Lit) and y.value == 0:
                    return x
        if prim == "sub" and isinstance(b, Lit) and b.value == 0:
            return a
        if isinstance(b, Lit) and b.value == 0:
            if prim == "rem":
                return a
            if prim in ("div", "floormod"):
                return literal(modular(-1 if prim == "div" else 0, dtype), dtype)
        ra, rb = range_of(a), range_of(b)
        if prim in ("div", "rem") and ra and rb and ra[0] >= 0 and rb[0] > 0:
            return self.op("floordiv" if prim == "div" else "floormod", (a, b), dtype)
        if prim == "floormod" and ra and rb and rb[0] > 0 and ra[0] >= 0 and ra[1] < rb[0]:
            return a
        return None


def _fold_select(inputs: tuple[Atom, ...]) -> Atom | None:
    """The case of a select with a literal predicate or with equal cases."""
    predicate, *cases = inputs
    if isinstance(predicate, Lit):
        return cases[int(predicate.value)]
    return cases[0] if all(c == cases[0] for c in cases) else None


def _fold_logic(prim: str, inputs: tuple[Atom, ...]) -> Atom | None:
    """The result of `and` or `or` with a literal or with equal operands."""
    a, b = inputs
    for x, y in ((a, b), (b, a)):
        if isinstance(y, Lit):
            absorbing = bool(y.value) == (prim == "or")
            return y if absorbing else x
    return a if a == b else None


def _fold_extremum(prim: str, inputs: tuple[Atom, ...]) -> Atom | None:
    """The operand of `max` or `min` that is the result over the whole attention matrix, by the ranges."""
    a, b = inputs
    ra, rb = range_of(a), range_of(b)
    if ra is None or rb is None:
        return a if a == b else None
    if prim == "max":
        return a if ra[0] >= rb[1] else b if rb[0] >= ra[1] else None
    return a if ra[1] <= rb[0] else b if rb[1] <= ra[0] else None


def _linear_result(prim: str, inputs: tuple[Atom, ...], dtype: str) -> Linear | None:
    """The linear form of an integer result, in exact arithmetic, None where it has none."""
    if not is_integer(dtype) or any(not is_integer(a.dtype) for a in inputs):
        return None
    forms = [f for f in map(linear_of, inputs) if f is not None]
    if len(forms) < len(inputs):
        return None
    if prim == "add":
        return forms[0] + forms[1]
    if prim == "sub":
        return forms[0] + forms[1].times(-1)
    if prim == "neg":
        return forms[0].times(-1)
    if prim == "convert_element_type":
        return forms[0]
    if prim == "mul":
        for x, y in (inputs, inputs[::-1]):
            if isinstance(y, Lit):
                form = linear_of(x)
                return None if form is None else form.times(int(y.value))
    return None


def _renumber(
    inputs: tuple[Val, ...],
    steps: Sequence[Step],
    results: tuple[Atom, ...],
    captures: tuple[ArrayType, ...],
    gradients: Sequence[Load],
) -> Program:
    """The same program with ids in order of appearance, so that equal programs print alike."""
    fresh = {v.id: v.id for v in inputs}
    for step in steps:
        for out in step.outs:
            fresh[out.id] = FIRST_FREE_ID + len(fresh) - len(inputs)
    wanted = {load.out.id for load in gradients}
    positions = {s.out.id: i for i, s in enumerate(steps) if isinstance(s, Load) and s.out.id in wanted}
    new_steps, new_results = rename_steps(steps, results, fresh)
    order = tuple(positions[load.out.id] for load in gradients)
    return Program(tuple(inputs), new_steps, new_results, captures, order)
