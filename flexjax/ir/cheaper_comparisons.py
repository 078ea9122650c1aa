"""Rewrites comparisons of a program so that kernels compute less for each entry (q, kv) of a tile.

A comparison costs an instruction for each entry, and so does an operation on an operand that depends on q and kv. Two
rewrites move such operations to the other side, where they are computed once for a query or a key; both are exact where
the new numbers fit their type:

    a - b < c         a < c + b            where a depends on one of q and kv alone, and b and c on the other
    a // n < c        a < c * n            for a literal n > 0; with le and gt, c + 1 takes the place of c
    a // n >= c       a >= c * n

In the second a is affine and changes along the columns of a tile, so that kernels compare it with a constant for each
column. Differences that are affine, such as q - kv, stay, because kernels compute them from their coefficients.
"""

import functools
from collections.abc import Sequence

from jax.typing import DTypeLike

from flexjax.ir.builder import Builder, literal
from flexjax.ir.program import SCORE, UNIFORM, Atom, Lit, Op, Program, Val, axes_of, range_of_val
from flexjax.ir.ranges import fits, integer_range
from flexjax.ir.replay import replay

# the comparison that gives the same with left and right exchanged
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


@functools.lru_cache(maxsize=512)
def with_cheaper_comparisons(program: Program, columns: str) -> Program:
    """The program with comparisons as at the top of this file; `columns` of a kernel's tiles are keys, "kv", or "q"."""
    builder = _Comparisons(program.sizes, program.inputs[SCORE].dtype)
    builder.columns = columns
    builder.captures = list(program.captures)
    found = replay(program, builder, {v.id: v for v in builder.inputs})
    results = [builder.chain(found.new(r)) for r in program.results]
    return builder.finish(results, [found.loads[n] for n in program.gradients])


class _Comparisons(Builder):
    """A Builder that rewrites comparisons when they are made."""

    columns: str

    def op(self, prim: str, inputs: Sequence[Atom], dtype: DTypeLike, **params: object) -> Atom:
        inputs = tuple(inputs)
        while prim in MIRRORED:
            moved = self._moved(prim, inputs) or self._moved(MIRRORED[prim], inputs[::-1])
            if moved is None:
                break
            prim, inputs = moved
        return super().op(prim, inputs, dtype, **params)

    def chain(self, atom: Atom) -> Atom:
        """The atom, with a conjunction as a chain of its conjuncts."""
        parts, rest = [], [atom]
        while rest:
            last = rest.pop()
            made = self._definition(last)
            if made is not None and made.prim == "and" and last.dtype == "bool":
                rest += made.inputs[::-1]
            else:
                parts.append(last)
        # a comparison and the conjunction with those before it are one instruction of a GPU; two conjunctions of a tile
        # side by side fill the predicate registers
        return functools.reduce(lambda a, b: self.op("and", (a, b), "bool"), parts)

    def _moved(self, prim: str, inputs: tuple[Atom, ...]) -> tuple[str, tuple[Atom, ...]] | None:
        """The comparison after one rewrite of its first operand; None where none applies."""
        first, other = inputs
        made = self._definition(first)
        if made is None or first.dtype != "int32":
            return None
        if made.prim == "sub" and isinstance(first, Val) and first.linear is None and range_of_val(first) is not None:
            a, b = made.inputs
            axes = [axes_of(x) - UNIFORM for x in (a, b, other)]
            if axes[0] in ({"q"}, {"kv"}) and axes[1] in ({"q"}, {"kv"}) and axes[1] != axes[0] and axes[2] <= axes[1]:
                total = self._fitting("add", other, b)
                return None if total is None else (prim, (a, total))
        if made.prim == "floordiv" and isinstance(made.inputs[1], Lit) and made.inputs[1].value > 0:
            return self._without_quotient(prim, made, other)
        return None

    def _without_quotient(self, prim: str, made: Op, other: Atom) -> tuple[str, tuple[Atom, ...]] | None:
        """The comparison of a // n, the result of `made`, with `other` as one of a; None where it does not apply."""
        a, n = made.inputs
        if not isinstance(a, Val) or a.linear is None or not axes_of(a) & {self.columns, "delta"}:
            return None
        limit: Atom | None = other
        if prim in ("le", "gt"):
            limit = self._fitting("add", other, literal(1, "int32"))
        limit = None if limit is None else self._fitting("mul", limit, n)
        return None if limit is None else ({"le": "lt", "gt": "ge"}.get(prim, prim), (a, limit))

    def _fitting(self, prim: str, a: Atom, b: Atom) -> Atom | None:
        """The sum or product of two int32 atoms; None if it may not fit int32, or a range is unknown."""
        ranges = [range_of_val(x) for x in (a, b)]
        known = [r for r in ranges if r is not None]
        bounds = integer_range(prim, known) if len(known) == 2 else None
        return self.op(prim, (a, b), "int32") if bounds is not None and fits(bounds, "int32") else None
