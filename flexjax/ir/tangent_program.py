"""Forward mode of a score mod as a program: its derivative program, which reads the tangents of captured arrays too.

s',  ds'/ds,  sum_j ds'/dl_j tl_j        tl_j: what load j reads from the tangent of its array, at the same indices
"""

import typing
from collections.abc import Sequence

from flexjax.ir.builder import Builder
from flexjax.ir.literals import literal
from flexjax.ir.program import SCORE, Atom, Lit, Load, Program, axes_of, in_loop_order, loop_indices
from flexjax.ir.replay import replay


def tangent_program(derivative: Program, moving: Sequence[bool], by_score: bool) -> Program:
    """The program with the results (s', ds'/ds) and, where some load reads a moving array, the sum over the loads.

    moving     for each captured array, whether it has a tangent; the tangents follow the arrays of `derivative`
    by_score   whether the score itself has a tangent; without one, 1 stands for ds'/ds, which nobody reads
    """
    dtype = derivative.inputs[SCORE].dtype
    builder = Builder(derivative.sizes, dtype)
    builder.captures = list(derivative.captures)
    moved = [n for n, moves in enumerate(moving) if moves]
    tangents = {n: builder.capture(derivative.captures[n].shape, derivative.captures[n].dtype) for n in moved}
    found = replay(derivative, builder, {v.id: v for v in builder.inputs})
    indices = loop_indices(derivative)
    total: Atom | None = None
    for position, slope in zip(derivative.gradients, derivative.groups[0][2:], strict=True):
        load = typing.cast(Load, found.loads[position])
        if load.capture not in tangents or (isinstance(slope, Lit) and slope.value == 0):
            continue
        read = builder.convert(builder.load(tangents[load.capture], load.index), dtype)
        term = builder.op("mul", (found.new(slope), read), dtype)
        for axis in reversed(in_loop_order(axes_of(term))):
            term = builder.loop("loop_add", term, found.new(indices[axis]))
        total = term if total is None else builder.op("add", (total, term), dtype)
    slope = found.new(derivative.results[1]) if by_score else literal(1.0, dtype)
    return builder.finish([found.new(derivative.results[0]), slope, *([] if total is None else [total])])
