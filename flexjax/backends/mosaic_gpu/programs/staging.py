"""Which captured array of a score program TMA copies to shared memory, tile by tile, beside the keys and values.

A pair bias, `bias[h, q, kv]`, is as large as the scores. When each thread loads its own elements, one instruction of a
warp touches eight rows, and the L1 cache is busy for longer than the tensor cores are with the products. From shared
memory the same tile costs an eighth, and TMA copies it ahead.

At most one array of a program is staged: that of the first load at index [..., q, kv] whose leading indices are the
same for a whole head. backward/pair_bias.py decides what the backward pass stages.
"""

from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

PIECE = (8, 128)  # rows and bytes of a swizzled piece; the last two dimensions of the array must be whole pieces
MOST_DIMS = 5  # dimensions of an array that TMA can copy from
ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def staged_load(plan: KernelPlan, program: ir.Program | None) -> ir.Load | None:
    """The load whose array is staged: the first that can be and that the score depends on; None if none can."""
    # TMA copies whole swizzled pieces, and with an origin a tile may begin at any position.
    if program is None or plan.origin is not None:
        return None
    live = ir.uses(program.steps, program.results[:1])
    return next((load for load in program.loads if load.out.id in live and can_be_staged(program, load)), None)


def can_be_staged(program: ir.Program, load: ir.Load) -> bool:
    """Whether `load` reads element [..., q, kv] of a float array that TMA can copy tile by tile."""
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
    """Whether `atom` is exactly the query number (`axis` "q") or the key number ("kv"), with nothing added."""
    if not isinstance(atom, ir.Val) or atom.linear is None:
        return False
    line = atom.linear
    return (line.q, line.kv) == ((1, 0) if axis == "q" else (0, 1)) and not (
        line.const or line.b or line.h or line.uniform
    )
