"""Splits a traced program between XLA and a kernel: decides for each value who computes it.

The kernel computes what needs the score, and arithmetic of positions of few operations. XLA computes all other values
once, before the kernel starts (hoisted.py), and the kernel gets them as operands (hoisted_operands.py). The form of
such an operand follows from the axes on which the value depends:

    axis class   depends on                 hoisted as
    uniform      b, h                       a scalar in SMEM
    q            q (b, h)                   a row of the tile
    kv           kv (b, h)                  a column of the tile
    delta        q - kv (b, h)              a window of the diagonals, which the kernel spreads (diagonals.py)
    tile         q and kv, not the score    a block: of the captured array itself where the read is a plain slice,
                                            otherwise of an array that XLA evaluates
    score        the score                  never: the kernel computes it, or the program is refused

A read of a small table (at most SMALL_TABLE elements) at an index that only the kernel knows is a gather in the kernel.
Costs are vector operations for each vector of elements.
"""

import dataclasses
import functools
import math
import typing

import jax.numpy as jnp

from flexjax.backends.mosaic_tpu import tile_ops
from flexjax.ir import program as ir
from flexjax.ir.operations import LOOPS, REDUCTIONS
from flexjax.ir.origin import OriginLayout
from flexjax.ir.program import Atom, Axes, Call, Lit, Load, Op, Program, Step, Val
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.trace.primitives import CONTROL_FLOW

SMALL_TABLE = 1024  # elements of the largest captured array from which a kernel gathers
# Vector operations on q - kv above which a hoisted window of the diagonals is cheaper than computing in the kernel.
DELTA_COST = 6
DENSE_LIMIT = 4 << 30  # bytes of the largest array that XLA evaluates for each (q, kv)

UNIFORM, ROW, COLUMN, DELTA, TILE, SCORE = "uniform", "q", "kv", "delta", "tile", "score"


class Unsupported(Exception):
    """Why a program cannot run on this backend, as a clause that follows 'because'."""


def axis_class(axes: Axes) -> str:
    if "score" in axes:
        return SCORE
    moving = ir.positions_of(axes) - ir.UNIFORM
    if not moving:
        return UNIFORM
    if len(moving) == 1:
        (name,) = moving
        return {"q": ROW, "kv": COLUMN, "delta": DELTA}[name]
    return TILE


@dataclasses.dataclass(frozen=True)
class HoistedValue:
    """A value of a program that the kernel gets as an operand."""

    val: Val
    axis_class: str
    direct_load: Load | None = None  # the load whose captured array is itself the operand, block by block
    by_entry: bool = False  # whether the value differs between batch entries because their positions do

    @property
    def dtype(self) -> str:
        """Of the operand; blocks of a captured array keep theirs."""
        if self.direct_load is not None:
            return self.val.dtype
        return "float32" if self.val.dtype in ("float32", "bfloat16") else "int32"

    def leading_sizes(self, batch: int, heads: int) -> tuple[int, int]:
        """The sizes (along b, along h) of the operand."""
        return (batch if self.by_entry or "b" in self.val.axes else 1, heads if "h" in self.val.axes else 1)


@dataclasses.dataclass(frozen=True)
class SplitProgram:
    """A program after the split.

    program   the whole program
    hoisted   the values that the kernel gets as operands
    steps     the steps that the kernel runs, in order
    results   the results of the program, with 0 in place of those that depend on loop indices
    gathers   the loads among `steps`, each a gather from a small table
    """

    program: Program
    hoisted: tuple[HoistedValue, ...]
    steps: tuple[Step, ...]
    results: tuple[Atom, ...]
    gathers: tuple[Load, ...]  # the loads among `steps`, each a gather from a small table

    def hoisted_of(self, *classes: str) -> tuple[HoistedValue, ...]:
        return tuple(v for v in self.hoisted if v.axis_class in classes)


@functools.lru_cache(maxsize=512)
def split(
    program: Program, batch: int, heads: int, q_len: int, kv_len: int, origin: OriginLayout | None = None
) -> SplitProgram:
    """Decides for each value of a program whether XLA or the kernel computes it.

    A value is hoisted if blocks of a captured array are the value itself, if that is cheaper (`cheaper_hoisted`), or if
    the kernel cannot compute it. Values that only hoisted ones need are not in the split. Raises Unsupported if neither
    can compute a value, if an array would exceed DENSE_LIMIT, or if a value of q - kv is hoisted where the origin has
    several runs.
    """
    made_by = {o.id: s for s in program.steps for o in s.outs}
    costs = _costs(program)
    hoisted: dict[int, HoistedValue] = {}
    in_kernel: set[int] = set()
    # derivatives by elements of vectors are not computed: _capture_refusal of support.py refuses them where wanted
    results = tuple(Lit(0.0, r.dtype) if ir.loops_of(ir.axes_of(r)) else r for r in program.results)
    pending = [a for a in results if isinstance(a, Val)]
    while pending:
        val = pending.pop()
        if val.id < ir.FIRST_FREE_ID or val.id in hoisted or val.id in in_kernel:
            continue
        step = made_by[val.id]
        # with an origin, blocks of the captured array need not begin where tiles do
        direct = step if isinstance(step, Load) and not origin and _is_direct(program, step, q_len, kv_len) else None
        if direct is None and not costs[val.id].cheaper_hoisted(val) and _runs_in_kernel(program, step, val):
            in_kernel.add(val.id)
            pending += [a for a in step.inputs if isinstance(a, Val)]
            continue
        kind = axis_class(val.axes)
        value = HoistedValue(val, kind, direct, origin is not None and origin.differs_by_entry(val.axes))
        if kind == DELTA and origin is not None and not origin.single:
            raise Unsupported(
                "it needs a value computed outside the kernel for each q - kv, and the origin has several runs of "
                "queries or keys"
            )
        _check_hoisted(value, batch, heads, q_len * kv_len)
        hoisted[val.id] = value

    steps = tuple(s for s in program.steps if any(o.id in in_kernel for o in s.outs))
    loads = tuple(s for s in steps if isinstance(s, Load))
    return SplitProgram(program, tuple(hoisted.values()), steps, results, loads)


def split_for(program: Program, plan: KernelPlan) -> SplitProgram:
    """`split` for the sizes and the origin of a plan; raises Unsupported in the same cases."""
    return split(program, plan.batch, plan.q_heads, plan.q_len, plan.kv_len, plan.origin)


class _Cost(typing.NamedTuple):
    """What it takes to compute a value from the values of other axis classes, by the steps of its own class."""

    no_kernel_form: bool  # whether one of these steps has no form in a kernel
    operations: int  # vector operations of all these steps

    def cheaper_hoisted(self, val: Val) -> bool:
        """Whether to hoist `val`, which has this cost, even if the kernel could compute it."""
        kind = axis_class(val.axes)
        if kind == DELTA:
            return self.no_kernel_form or self.operations > DELTA_COST
        return kind == UNIFORM or (kind in (ROW, COLUMN) and self.no_kernel_form)


def _costs(program: Program) -> dict[int, _Cost]:
    """The cost of every value, by id: its own step and its operands of the same axis class."""
    costs: dict[int, _Cost] = {}
    for step in program.steps:
        for out in step.outs:
            kind = axis_class(out.axes)
            same = [
                costs[a.id] for a in step.inputs if isinstance(a, Val) and a.id in costs and axis_class(a.axes) == kind
            ]
            no_form = not _has_kernel_form(step) or bool(ir.loops_of(out.axes))
            if kind in (ROW, COLUMN, DELTA):
                no_form = no_form or any(c.no_kernel_form for c in same)
            own = tile_ops.cost(step) if isinstance(step, Op) and step.prim not in LOOPS else 1
            costs[out.id] = _Cost(no_form, own + sum(c.operations for c in same))
    return costs


def _has_kernel_form(step: Step) -> bool:
    """Whether tile_ops.py can run the step in a kernel; False for loads."""
    if isinstance(step, Call):
        return tile_ops.unary_call(step)
    return isinstance(step, Op) and step.prim not in LOOPS and tile_ops.refusal(step) is None


def _runs_in_kernel(program: Program, step: Step, val: Val) -> bool:
    """Whether the kernel can compute `val`; raises Unsupported if it cannot and the value depends on the score."""
    kind = axis_class(val.axes)
    if isinstance(step, Load):
        capture = program.captures[step.capture]
        small = 0 < table_size(program, step) <= SMALL_TABLE
        if small and val.dtype in ("float32", "int32", "bfloat16", "bool") and kind in (TILE, SCORE):
            return True
        reason = (
            f"it reads a captured array of {capture} at an index computed from the score; a TPU kernel gathers "
            f"only from tables of up to {SMALL_TABLE} elements"
        )
    elif isinstance(step, Op) and step.prim in REDUCTIONS:
        reason = "it reads a vector in a loop over a value of the score, for which a TPU kernel has no form"
    elif isinstance(step, Call):
        if tile_ops.unary_call(step):
            return True
        why = "could not be unrolled" if step.name in CONTROL_FLOW else "has no form in a TPU kernel"
        reason = f"it runs `{step.name}` on the score, which {why}"
    else:
        reason = tile_ops.refusal(step)
        if reason is None:
            return True
    if kind == SCORE:
        raise Unsupported(reason)
    return False


def _check_hoisted(value: HoistedValue, batch: int, heads: int, entries: int) -> None:
    """Raises Unsupported if a kernel cannot read the dtype, or XLA would evaluate an array above DENSE_LIMIT."""
    val = value.val
    if value.axis_class == TILE and value.direct_load is None:
        size = math.prod(value.leading_sizes(batch, heads)) * entries * 4
        if size > DENSE_LIMIT:
            raise Unsupported(
                f"it needs a value computed outside the kernel for each (q, kv): {size / 2**30:.1f} GiB, more than "
                f"{DENSE_LIMIT >> 30} GiB"
            )
    if val.dtype not in tile_ops.KERNEL_DTYPES:
        raise Unsupported(f"it uses a value of type {val.dtype} for each {value.axis_class} position")


def table_size(program: Program, load: Load) -> int:
    return math.prod(program.captures[load.capture].shape)


def _is_direct(program: Program, load: Load, q_len: int, kv_len: int) -> bool:
    """Whether the load reads `capture[..., q, kv]`, by plain q and kv, with other indices of b and h alone.

    Blocks of the captured array itself are then the operand.
    """
    kind = ir.classify_load(load)
    capture = program.captures[load.capture]
    if kind.kind != ir.TILE or kind.dims[-2:] != ("q", "kv") or capture.dtype not in ("float32", "bfloat16", "int32"):
        return False
    if any(d != "uniform" for d in kind.dims[:-2]) or capture.shape[-2] < q_len or capture.shape[-1] < kv_len:
        return False
    for atom in load.index[-2:]:
        linear = atom.linear if isinstance(atom, Val) else None
        if linear is None or linear.const or linear.uniform or linear.b or linear.h:
            return False
    return True


# ------------------------------------------------------------------- finite programs

# Operations whose results are finite for finite operands (sums of two moderate numbers included).
FINITE_OPS = frozenset(
    {
        "add", "sub", "neg", "abs", "max", "min", "tanh", "logistic", "select_n", "convert_element_type", "eq",
        "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "floor", "ceil", "round", "sign", "erf", "floordiv",
        "floormod",
    }
)  # fmt: skip


def stays_finite(program: Program) -> bool:
    """Whether every result of a program is surely finite wherever the score is, by the operations alone.

    Elements of captured arrays and products of two values that depend on the score do not count as finite.
    """
    finite: set[int] = set(range(ir.FIRST_FREE_ID))

    def is_finite(atom: Atom) -> bool:
        return math.isfinite(float(typing.cast(float, atom.value))) if isinstance(atom, Lit) else atom.id in finite

    def keeps_finite(step: Step) -> bool:
        if isinstance(step, Call):
            return step.name in tile_ops.CALLS
        if isinstance(step, Load):
            return False
        if axis_class(step.out.axes) == UNIFORM or not jnp.issubdtype(jnp.dtype(step.out.dtype), jnp.floating):
            return True
        if step.prim == "mul":
            return not all("score" in ir.axes_of(a) for a in step.inputs)
        by_number = step.prim == "div" and isinstance(step.inputs[1], Lit) and step.inputs[1].value != 0
        return step.prim in FINITE_OPS or by_number

    for step in program.steps:
        if keeps_finite(step) and all(map(is_finite, step.inputs)):
            finite |= {o.id for o in step.outs}
    return all(map(is_finite, program.results))
