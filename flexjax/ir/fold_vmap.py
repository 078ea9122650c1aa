"""The program of a call under vmap: the mapped axis is folded into the batch.

A vmap over `copies` calls, each of batch size `batch`, is one call of batch size copies * batch. Entry b of that call
is entry b % batch of copy b // batch, so the mod gets b % batch as its b. A captured array that vmap maps has a new
first dimension, and loads of it get b // batch as their first index.
"""

from collections.abc import Sequence

from flexjax.ir.builder import Builder, literal
from flexjax.ir.program import SCORE, ArrayType, Atom, B, Load, Program
from flexjax.ir.replay import replay


def fold_batch(program: Program, copies: int, batch: int, mapped: Sequence[bool]) -> Program:
    """The program of the call whose batch holds all copies; `mapped`: for each captured array, whether vmap maps it."""
    builder = Builder((copies * batch, *program.sizes[1:]), program.inputs[SCORE].dtype)
    builder.captures = [
        ArrayType((copies, *c.shape), c.dtype) if m else c for c, m in zip(program.captures, mapped, strict=True)
    ]
    inputs: dict[int, Atom] = {v.id: v for v in builder.inputs}
    entry = inputs[B]
    inputs[B] = builder.op("floormod", (entry, literal(batch, "int32")), "int32")
    copy = builder.op("floordiv", (entry, literal(batch, "int32")), "int32")

    def load_index(load: Load, index: list[Atom]) -> list[Atom]:
        return [copy, *index] if mapped[load.capture] else index

    found = replay(program, builder, inputs, load_index)
    return builder.finish([found.new(r) for r in program.results], [found.loads[n] for n in program.gradients])
