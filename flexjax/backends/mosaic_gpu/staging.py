"""Tiles of a captured array that the copy engine brings into shared memory, beside the keys and values.

A pair bias, `bias[h, q, kv]`, is as large as the scores. Read by the computing warpgroups themselves, each of its elements is
a load of two or four bytes, eight rows apart from its neighbours in the same instruction: 64 instructions a thread for a tile
of 64 x 128, which take the first-level cache longer than the matrix units take for the products. As tiles in shared memory
they cost an eighth of that, and the copies run ahead.

One array of the score program is staged: the first that is walked by query and key alone. What hangs over its end is zero.
"""

from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

PIECE = (8, 128)
"""Rows and bytes of the pieces that the copy engine lays out; the array must be whole pieces."""
MOST_DIMS = 5
"""Dimensions that the copy engine knows."""
ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def staged_load(program: ir.Program) -> ir.Load | None:
    """The load that goes through shared memory: of those that the score, the first result, needs."""
    live = ir.uses(program.steps, program.results[:1])
    return next((load for load in program.loads if load.out.id in live and _can_be_copied(program, load)), None)


def item_size(plan: KernelPlan) -> int:
    """Bytes of an element of the array that the plan's score program has staged; 0 where there is none."""
    load = None if plan.score is None else staged_load(plan.score)
    return 0 if load is None or plan.score is None else ITEM_SIZES[plan.score.captures[load.capture].dtype]


def _can_be_copied(program: ir.Program, load: ir.Load) -> bool:
    array = program.captures[load.capture]
    size = ITEM_SIZES.get(array.dtype)
    if size is None or not 2 <= len(array.shape) <= MOST_DIMS:
        return False
    if array.shape[-2] % PIECE[0] or array.shape[-1] * size % PIECE[1]:
        return False
    if any(ir.axes_of(a) - ir.UNIFORM for a in load.index[:-2]):
        return False
    return _is_position(load.index[-2], "q") and _is_position(load.index[-1], "kv")


def _is_position(atom: ir.Atom, axis: str) -> bool:
    """Whether the index is the query's (key's) own number."""
    if not isinstance(atom, ir.Val) or atom.linear is None:
        return False
    line = atom.linear
    return (line.q, line.kv) == ((1, 0) if axis == "q" else (0, 1)) and not (
        line.const or line.b or line.h or line.uniform
    )
