"""Builds programs step by step: equal operations become one value, and operations with known results are folded.

To fold an operation is to give its result without a new step: a literal, or an atom that exists already. The builder
tracks three facts about each value: its axes, its linear form (linear.py), and for integers its range over the whole
attention matrix. By its range, the index of `x[q - kv + c]` is known to be in bounds. The select for negative indices
and the clamp then fold away, and the load is recognised as a diagonal window.
"""

import contextlib
import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from flexjax.ir import simplify
from flexjax.ir.fold_rules import fold_extremum, fold_logic, fold_select, linear_result
from flexjax.ir.literals import evaluate_literals, literal
from flexjax.ir.operations import COMMUTATIVE, COMPARISONS, LOOP_AT, LOOP_INDEX, REDUCTIONS, STOP_GRADIENT, TOTAL_ORDER
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
    loop_axis,
    loop_size,
    uses,
)
from flexjax.ir.program import range_of_val as range_of
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
    """The axes of a value that is computed from values of the axes `parts`: their union, in normal form."""
    union = frozenset().union(*parts)
    # a mix of delta with q, kv or score depends on q and kv
    if "delta" in union and union & {"q", "kv", "score"}:
        union = (union - {"delta"}) | {"q", "kv"}
    if "score" in union:
        union |= {"b", "h", "q", "kv"}
    return union


def linear_axes(linear: Linear, by_id: Callable[[int], Axes]) -> Axes:
    """The axes of an affine function, with delta for opposite coefficients of q and kv; `by_id`: of uniform terms."""
    found = {name for name, c in (("b", linear.b), ("h", linear.h)) if c}
    for ident, _ in linear.uniform:
        found |= by_id(ident)
    if linear.q and linear.q == -linear.kv:
        found |= {"delta"}
    else:
        found |= {name for name, c in (("q", linear.q), ("kv", linear.kv)) if c}
    return frozenset(found)


class Builder:
    """Makes one program; equal operations on equal inputs become one value."""

    def __init__(self, sizes: tuple[int, int, int, int], score_dtype: str):
        """Starts a program without steps for sizes (batch, heads, q_len, kv_len) and scores of a dtype."""
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
        self.open_loops: Axes = frozenset()  # axes of the loop indices of which values are being made

    # ------------------------------------------------------------------ making values

    def fresh(self, dtype: str, axes: Axes, linear: Linear | None = None, bounds: Range = None) -> Val:
        """Makes a Val with the next free id; the caller appends the step that computes it."""
        low, high = bounds if bounds is not None else (None, None)
        val = Val(self._next, dtype, axes, linear, low, high)
        self._axes[val.id] = axes
        self._vals[val.id] = val
        self._next += 1
        return val

    def capture(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Appends a captured array to the program; returns its number."""
        self.captures.append(ArrayType(tuple(shape), jnp.dtype(dtype).name))
        return len(self.captures) - 1

    def op(self, prim: str, inputs: Sequence[Atom], dtype: DTypeLike, **params: object) -> Atom:
        """The atom that the operation `prim` makes: folded, found among earlier steps, or the result of a new step.

        `prim` is a name of operations.py, "clamp" or "stop_gradient". `params` that are None are dropped.
        """
        inputs = tuple(inputs)
        name = jnp.dtype(dtype).name
        if prim == LOOP_INDEX:
            return self.loop_index(typing.cast(int, params["size"]), typing.cast(int, params["number"]))
        if prim in REDUCTIONS:
            return self.loop(prim, *inputs)
        if prim == LOOP_AT:
            return self.at(inputs[0], dict(zip(inputs[1::2], inputs[2::2], strict=True)))
        folded = self._fold(prim, inputs, name)
        if folded is not None:
            return folded
        if prim in COMMUTATIVE:
            inputs = tuple(sorted(inputs, key=lambda a: (1, str(a)) if isinstance(a, Lit) else (0, a.id)))
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

    # ------------------------------------------------------------------ loops

    def loop_index(self, size: int, number: int) -> Val:
        """The loop index number `number` among those of 0 .. size - 1; always the same value."""
        key = (LOOP_INDEX, size, number)
        if key not in self._known:
            val = self.fresh("int32", frozenset({loop_axis(size, number)}), None, (0, size - 1))
            self._known[key] = val
            self._ops[val.id] = Op(LOOP_INDEX, (), val, (("number", number), ("size", size)))
            self.steps.append(self._ops[val.id])
        return typing.cast(Val, self._known[key])

    def free_index(self, size: int, taken: Axes) -> Val:
        """The first loop index of 0 .. size - 1 whose axis is neither in `taken` nor open."""
        taken = taken | self.open_loops
        return self.loop_index(size, next(n for n in itertools.count() if loop_axis(size, n) not in taken))

    @contextlib.contextmanager
    def opened(self, indices: Sequence[Atom]) -> Iterator[None]:
        """A context in which values of these loop indices are made: loops inside it take other indices."""
        before, self.open_loops = self.open_loops, self.open_loops.union(*map(axes_of, indices))
        try:
            yield
        finally:
            self.open_loops = before

    def loop(self, prim: str, operand: Atom, index: Atom) -> Atom:
        """The reduction `prim` (of REDUCTIONS) of `operand` over all values of the loop index."""
        (axis,), dtype = axes_of(index), operand.dtype
        if axis not in axes_of(operand):
            return self._repeated(prim, operand, loop_size(axis))
        key = (prim, operand, index)
        if key not in self._known:
            bounds = range_of(operand)
            if bounds is not None and prim == "loop_add":
                bounds = (bounds[0] * loop_size(axis), bounds[1] * loop_size(axis))
            if bounds is None or prim not in ("loop_add", "loop_max", "loop_min") or not fits(bounds, dtype):
                bounds = whole_range_if_narrow(dtype) if is_integer(dtype) else None
            val = self.fresh(dtype, axes_of(operand) - {axis}, None, bounds)
            self._ops[val.id] = Op(prim, (operand, index), val)
            self.steps.append(self._ops[val.id])
            self._known[key] = val
        return self._known[key]

    def _repeated(self, prim: str, operand: Atom, size: int) -> Atom:
        """The reduction `prim` of `size` times the operand."""
        if prim == "loop_add":
            number = int(modular(size, operand.dtype)) if is_integer(operand.dtype) else size
            return self.op("mul", (operand, literal(number, operand.dtype)), operand.dtype)
        if prim == "loop_mul":
            return self.op("integer_pow", (operand,), operand.dtype, y=size)
        if prim == "loop_xor" and size % 2 == 0:
            return self.op("xor", (operand, operand), operand.dtype)
        return operand

    def at(self, atom: Atom, index: Mapping[Atom, Atom]) -> Atom:
        """The atom with other atoms in place of loop indices; NotImplementedError for one that a Call computes."""
        return self._at(atom, {k: new for k, new in index.items() if k != new}, {})

    def _at(self, atom: Atom, index: Mapping[Atom, Atom], made: dict[Atom, Atom]) -> Atom:
        """`at`; `made` remembers the new atoms of this index."""
        gone: Axes = frozenset().union(*map(axes_of, index))
        if isinstance(atom, Lit) or not axes_of(atom) & gone:
            return atom
        if atom in index:
            return index[atom]
        if atom in made:
            return made[atom]
        step = self._ops.get(atom.id) or next((s for s in self.steps if atom in s.outs), None)
        if isinstance(step, Load):
            new = self.load(step.capture, [self._at(a, index, made) for a in step.index])
        elif isinstance(step, Op) and step.prim in REDUCTIONS:
            operand, k = step.inputs
            inner = {i: atom for i, atom in index.items() if i != k}
            taken: Axes = frozenset().union(*map(axes_of, inner.values()))
            if axes_of(k) & taken:  # the loop would catch an index of its surroundings
                inner[k] = self.free_index(loop_size(*axes_of(k)), taken | axes_of(operand))
            new = self.loop(step.prim, self._at(operand, inner, {}), inner.get(k, k))
        elif isinstance(step, Op):
            new = self.op(step.prim, [self._at(a, index, made) for a in step.inputs], atom.dtype, **dict(step.params))
        else:
            raise NotImplementedError("an element of a vector that a Call computes is no step of its own")
        made[atom] = new
        return new

    def vector_at(self, atom: Atom, index: Mapping[Atom, Atom]) -> Atom:
        """As `at`, of a vector that a Call computes, as a step of the program that a derivative is made from."""
        index = {k: new for k, new in index.items() if k != new}
        if not index:
            return atom
        gone, new = (frozenset().union(*map(axes_of, atoms)) for atoms in (index, index.values()))
        val = self.fresh(atom.dtype, mixed_axes([axes_of(atom) - gone, new]))
        self.steps.append(Op(LOOP_AT, (atom, *(a for pair in index.items() for a in pair)), val))
        return val

    def unfolded(self, prim: str, atom: Atom) -> Atom:
        """Appends `prim`, which leaves its operand as it is (stop_gradient), as a step of its own, not shared."""
        val = self.fresh(atom.dtype, axes_of(atom))
        self.steps.append(Op(prim, (atom,), val))
        return val

    def _of_linear(self, linear: Linear, dtype: str) -> Atom:
        """Computes the value of a linear form by products and sums."""
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
        """The atom captures[capture][index]; `index` has one int32 atom for each dimension, in bounds (`clamped`)."""
        key = ("load", capture, tuple(index))
        if key not in self._known:
            dtype = self.captures[capture].dtype
            bounds = whole_range_if_narrow(dtype) if is_integer(dtype) else None
            val = self.fresh(dtype, mixed_axes([axes_of(a) for a in index]), None, bounds)
            self.steps.append(Load(capture, tuple(index), val))
            self._known[key] = val
        return self._known[key]

    def load_step(self, atom: Atom) -> Load:
        """The Load whose result is `atom`; StopIteration for an atom that `load` did not return."""
        return next(s for s in self.steps if isinstance(s, Load) and s.out == atom)

    def clamped(self, index: Atom, limit: int) -> Atom:
        """The integer atom limited to 0..limit and converted to int32."""
        low = self.op("max", (index, literal(0, index.dtype)), index.dtype)
        if limit > jnp.iinfo(jnp.dtype(index.dtype)).max:
            return self.convert(low, "int32")  # the type ends before the array does
        both = self.op("min", (low, literal(limit, index.dtype)), index.dtype)
        return self.convert(both, "int32")

    def plus_start(self, value: Atom, shape: tuple[int, ...], index: Sequence[Atom], most: int) -> Atom:
        """`value` (int32) plus an element of a new captured int32 array: where a part begins in the whole."""
        # clamped, so that the range of the sum is known and loads keep their load class
        start = self.clamped(self.load(self.capture(shape, "int32"), index), most)
        return self.op("add", (value, start), "int32")

    def convert(self, atom: Atom, dtype: DTypeLike) -> Atom:
        return self.op("convert_element_type", (atom,), dtype, new_dtype=jnp.dtype(dtype).name)

    def select(self, predicate: Atom, on_true: Atom, on_false: Atom) -> Atom:
        return self.op("select_n", (predicate, on_false, on_true), on_true.dtype)

    def finish(self, results: Sequence[Atom], gradients: Sequence[Load] = ()) -> Program:
        """Ends the program with these results; unused steps go, captured arrays stay, values are renumbered."""
        # a custom derivative rule may have a derivative by a load that no result reads
        live = uses(tuple(self.steps), (*results, *(load.out for load in gradients)))
        kept = [s for s in self.steps if any(o.id in live for o in s.outs)]
        return _renumber(self.inputs, kept, tuple(results), tuple(self.captures), gradients)

    # ------------------------------------------------------------------ folding

    def _fold(self, prim: str, inputs: tuple[Atom, ...], dtype: str) -> Atom | None:
        """The result of an operation that needs no new step of that name; None where it has to become a step."""
        if prim == "convert_element_type" and inputs[0].dtype == dtype:
            return inputs[0]
        if all(isinstance(a, Lit) for a in inputs):
            known = evaluate_literals(prim, inputs, dtype)
            if known is not None:
                return known
        if prim in TOTAL_ORDER and not jnp.issubdtype(jnp.dtype(inputs[0].dtype), jnp.floating):
            return self.op(prim.removesuffix("_to"), inputs, dtype)
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
        """The Op by which `op` made the atom; None for inputs, literals, loads, calls and results of `unfolded`."""
        return self._ops.get(atom.id) if isinstance(atom, Val) else None

    def _select_of_products(self, inputs: tuple[Atom, ...], dtype: str) -> Atom | None:
        """Replaces select(p, score * c, score * d) by score * select(p, c, d) for literals c and d (simplify.py)."""
        choice = simplify.choice_of_products(inputs, self._definition) if jnp.issubdtype(dtype, jnp.floating) else None
        if choice is None:
            return None
        factor = self.select(choice.predicate, literal(choice.on_true, dtype), literal(choice.on_false, dtype))
        return self.op("mul", (choice.score, factor), dtype)

    def _fold_arithmetic(self, prim: str, inputs: tuple[Atom, ...], dtype: str) -> Atom | None:
        """The result of a sum, product, division or remainder by an identity such as x * 1 = x, or None.

        Float identities are used only where they keep the bits (x * 1, x / 1) or, for `simplify.regrouped`, change one
        rounding.
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
                # what jax gives for a division by 0; -1 has all bits set
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

    A value whose linear form names a value that is in no step loses its linear form.
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
