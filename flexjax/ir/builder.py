"""Builds programs step by step: equal operations become one value, and operations with known results are folded.

To fold an operation is to give its result without a new step: a literal, or an atom that exists already. The builder tracks
three facts about each value: its axes (what it depends on), its linear form (the affine function of b, h, q and kv that it is,
if it is one; linear.py), and for integers its range over the whole attention matrix. By its range, the index of `x[q - kv
+ c]` is known to be in bounds; the select for negative indices and the clamp then fold away, and the load is recognised as a
diagonal window.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from flexjax.ir import simplify
from flexjax.ir.fold_rules import fold_extremum, fold_logic, fold_select, linear_result
from flexjax.ir.literals import evaluate_literals, literal
from flexjax.ir.operations import COMMUTATIVE, COMPARISONS, STOP_GRADIENT
from flexjax.ir.program import (
    FIRST_FREE_ID,
    KV,
    SCORE,
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


def mixed_axes(parts: Sequence[Axes]) -> Axes:
    """The axes of a value that is computed from values of the axes `parts`: their union, in normal form.

    A mix of delta with q, kv or score depends on q and kv. A value that depends on the score depends on b, h, q and kv.
    """
    union = frozenset().union(*parts)
    if "delta" in union and union & {"q", "kv", "score"}:
        union = (union - {"delta"}) | {"q", "kv"}
    if "score" in union:
        union |= {"b", "h", "q", "kv"}
    return union


def linear_axes(linear: Linear, by_id: Callable[[int], Axes]) -> Axes:
    """The axes that an affine function depends on, with delta in place of q and kv if their coefficients are opposite.

    linear   the affine function
    by_id    gives the axes of the values that its uniform terms name
    """
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
        """Starts a program without steps.

        sizes         (batch, heads, q_len, kv_len); the ranges of b, h, q and kv follow from them: 0..size - 1, and
                      0..0 for size 0
        score_dtype   dtype name of the input `score`
        """
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
        """Makes a Val with the next free id; the caller appends the step that computes it.

        dtype, axes, linear   fields of the Val
        bounds                inclusive range of an integer, None where unknown
        """
        low, high = bounds if bounds is not None else (None, None)
        val = Val(self._next, dtype, axes, linear, low, high)
        self._axes[val.id] = axes
        self._vals[val.id] = val
        self._next += 1
        return val

    def capture(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Appends a captured array of that shape and dtype to the program; returns its number."""
        self.captures.append(ArrayType(tuple(shape), jnp.dtype(dtype).name))
        return len(self.captures) - 1

    def op(self, prim: str, inputs: Sequence[Atom], dtype: DTypeLike, **params: object) -> Atom:
        """The atom that the operation `prim` makes of the operands: folded, found among earlier steps, or the result of
        a new step.

        prim     a name of operations.py, or one that `_fold` replaces: "clamp" and "stop_gradient"
        inputs   the operands, in order; those of a commutative operation are sorted
        dtype    the dtype of the result
        params   static parameters of the primitive; those that are None are dropped

        A result that may wrap around has no linear form, and no range unless its type has at most 16 bits. Where q and
        kv cancel out of the linear form, the value is computed from that form instead.
        """
        inputs = tuple(inputs)
        name = jnp.dtype(dtype).name
        folded = self._fold(prim, inputs, name)
        if folded is not None:
            return folded
        if prim in COMMUTATIVE:
            inputs = tuple(sorted(inputs, key=lambda a: (isinstance(a, Lit), str(a))))
        frozen = tuple(sorted((k, v) for k, v in params.items() if v is not None))
        key = (prim, inputs, name, str(frozen))
        if key not in self._known:
            axes = mixed_axes([axes_of(a) for a in inputs])
            linear = linear_result(prim, inputs, name)
            bounds = range_result(prim, inputs, name)
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
        """Appends the operation `prim`, which leaves its operand as it is (stop_gradient), as a step; returns its result, a new
        value without a linear form or range.

        Such a step matters to differentiation alone, so it is neither folded nor shared with an equal one.
        """
        val = self.fresh(atom.dtype, axes_of(atom))
        self.steps.append(Op(prim, (atom,), val))
        return val

    def _of_linear(self, linear: Linear, dtype: str) -> Atom:
        """Computes the value of a linear form in `dtype`, by products and sums of the inputs and values that its terms name."""
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
        """The atom captures[capture][index]: the result of a new load, or of an equal earlier one.

        capture   number of the captured array
        index     one int32 atom for each dimension; it must be in bounds (see `clamped`)
        """
        key = ("load", capture, tuple(index))
        if key not in self._known:
            dtype = self.captures[capture].dtype
            bounds = whole_range_if_narrow(dtype) if is_integer(dtype) else None
            val = self.fresh(dtype, mixed_axes([axes_of(a) for a in index]), None, bounds)
            self.steps.append(Load(capture, tuple(index), val))
            self._known[key] = val
        return self._known[key]

    def load_step(self, atom: Atom) -> Load:
        """The Load of this program whose result is `atom`, an atom that `load` returned; for passes that keep a program's gradients.
        StopIteration for any other atom.
        """
        return next(s for s in self.steps if isinstance(s, Load) and s.out == atom)

    def clamped(self, index: Atom, limit: int) -> Atom:
        """The integer atom `index` limited to 0..limit and converted to int32; the atom itself if it is int32 and its range lies within."""
        low = self.op("max", (index, literal(0, index.dtype)), index.dtype)
        if limit > jnp.iinfo(jnp.dtype(index.dtype)).max:
            return self.convert(low, "int32")  # the type ends before the array does
        both = self.op("min", (low, literal(limit, index.dtype)), index.dtype)
        return self.convert(both, "int32")

    def plus_start(self, value: Atom, shape: tuple[int, ...], index: Sequence[Atom], most: int) -> Atom:
        """`value` (int32) plus a number that the program reads from a new captured array: where a part begins in the whole.

        shape, index   of the captured int32 array, and where the number is in it
        most           the number is clamped to 0 .. most, so that the range of the sum is known and loads keep their load class
        """
        start = self.clamped(self.load(self.capture(shape, "int32"), index), most)
        return self.op("add", (value, start), "int32")

    def convert(self, atom: Atom, dtype: DTypeLike) -> Atom:
        """The atom converted to `dtype`; the atom itself if it has that dtype."""
        return self.op("convert_element_type", (atom,), dtype, new_dtype=jnp.dtype(dtype).name)

    def select(self, predicate: Atom, on_true: Atom, on_false: Atom) -> Atom:
        """The atom that is `on_true` where the bool atom `predicate` is True, else `on_false`; both have one dtype."""
        return self.op("select_n", (predicate, on_false, on_true), on_true.dtype)

    def finish(self, results: Sequence[Atom], gradients: Sequence[Load] = ()) -> Program:
        """Ends the program: returns it with these results, without the steps that no result needs, and with values renumbered
        in order. Captured arrays stay, whether a step reads them or not.

        gradients   loads by which results[2:] are the derivatives; kept even where no result depends on them, because a custom
                    derivative rule may have a derivative by a load that the value does not read
        """
        live = uses(tuple(self.steps), (*results, *(load.out for load in gradients)))
        kept = [s for s in self.steps if any(o.id in live for o in s.outs)]
        return _renumber(self.inputs, kept, tuple(results), tuple(self.captures), gradients)

    # ------------------------------------------------------------------ folding

    def _fold(self, prim: str, inputs: tuple[Atom, ...], dtype: str) -> Atom | None:
        """The result of an operation where it needs no new step of that name: a literal, an operand, or an atom that other
        operations make, whose steps are appended. None where the operation has to become a step.

        prim, inputs   the operation and its operands
        dtype          dtype name of the result
        """
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
            return fold_select(inputs) or self._select_of_products(inputs, dtype)
        if prim in ("and", "or") and dtype == "bool":
            return fold_logic(prim, inputs)
        if prim in ("max", "min"):
            return fold_extremum(prim, inputs)
        if prim in ("add", "sub", "mul", "div", "floordiv", "floormod", "rem"):
            return self._fold_arithmetic(prim, inputs, dtype)
        if prim == "clamp":
            low, x, high = inputs
            return self.op("min", (self.op("max", (x, low), dtype), high), dtype)
        if prim == STOP_GRADIENT:
            return inputs[0]
        if prim in ("real", "imag") and (made := self._definition(inputs[0])) is not None and made.prim == "complex":
            return made.inputs[prim == "imag"]
        if prim == "abs" and (bounds := range_of(inputs[0])) and bounds[0] >= 0:
            return inputs[0]
        return None

    def _definition(self, atom: Atom) -> Op | None:
        """The Op that computes an atom and that `op` made; None for inputs, literals, loads, calls and results of `unfolded`."""
        return self._ops.get(atom.id) if isinstance(atom, Val) else None

    def _select_of_products(self, inputs: tuple[Atom, ...], dtype: str) -> Atom | None:
        """Replaces select(p, score * c, score * d) with literals c and d by score * select(p, c, d); see simplify.py.

        inputs   the operands of the select_n
        dtype    dtype name of the result; only floating results are replaced

        Returns the atom of the product, None for any other select.
        """
        choice = simplify.choice_of_products(inputs, self._definition) if jnp.issubdtype(dtype, jnp.floating) else None
        if choice is None:
            return None
        factor = self.select(choice.predicate, literal(choice.on_true, dtype), literal(choice.on_false, dtype))
        return self.op("mul", (choice.score, factor), dtype)

    def _fold_arithmetic(self, prim: str, inputs: tuple[Atom, ...], dtype: str) -> Atom | None:
        """The result of a sum, product, division or remainder (`prim`) of two operands by an identity such as x * 1 = x; None
        where none applies.

        Float identities are used only where they keep the bits (x * 1, x / 1) or, for `simplify.regrouped`, change one
        rounding. For integers also x + 0 and x - 0; `rem` by a literal 0, which is x, `div`, which is -1 (all bits set), and
        `floormod`, which is 0; and a floormod that the ranges show to be x. `div` and `rem` of integers that the ranges show
        not to be negative, by positive ones, are made as floordiv and floormod.
        """
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


def _renumber(
    inputs: tuple[Val, ...],
    steps: Sequence[Step],
    results: tuple[Atom, ...],
    captures: tuple[ArrayType, ...],
    gradients: Sequence[Load],
) -> Program:
    """Makes a Program in which values are numbered in order of appearance, so that equal programs have equal texts.

    inputs      the five inputs, which keep their ids
    steps       the steps, in order; every value that steps, results and gradients name is an input or the result of one of them
    results     the atoms that the program computes
    captures    the types of the captured arrays, which keep their numbers
    gradients   for a derivative program the loads, among `steps`, by which results[2:] are the derivatives; `Program.gradients` has their
                positions. Empty for other programs

    Ids in linear forms are replaced too. A value whose linear form names a value that is in no step loses its linear form.
    """
    fresh = {v.id: v.id for v in inputs}
    for step in steps:
        for out in step.outs:
            fresh[out.id] = FIRST_FREE_ID + len(fresh) - len(inputs)
    wanted = {load.out.id for load in gradients}
    positions = {s.out.id: i for i, s in enumerate(steps) if isinstance(s, Load) and s.out.id in wanted}
    new_steps, new_results = rename_steps(steps, results, fresh)
    order = tuple(positions[load.out.id] for load in gradients)
    return Program(tuple(inputs), new_steps, new_results, captures, order)
