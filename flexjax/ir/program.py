"""What a program is: the form of a traced mod that every backend reads.

A `score_mod` or `mask_mod` becomes a `Program`: a flat list of steps on *scalars*, in order. The program describes the
captured arrays by shape and dtype only; the arrays themselves are operands of a call. It is immutable and hashable: two
closures with the same operations and other captured values are the same program, so nothing is compiled twice.

    atom     an operand of a step: `Lit` (a literal) or `Val` (an input of the program or the result of a step)
    step     `Op` (elementwise primitive), `Load` (one element of a captured array), `Call` (a whole jaxpr equation,
             such as control flow that could not be unrolled; only some backends run it)
    result   an atom; a mask has one (bool), a score program one, or one plus its derivatives (trace/derivative.py)

Every `Val` knows the *axes* it depends on, a subset of AXES: a value of b and h alone (a *uniform* value) is worth
computing once a program, one of q once a row, one of kv once a column. `delta` stands for "depends on q and kv only
through q - kv": such a value is a vector of tile_q + tile_kv - 1 numbers laid out along diagonals. A value that has `q`
or `kv` does not have `delta`.

A vector of a mod is one value that depends on a *loop index* k = 0 .. size - 1, an axis with a name of its own ("16:0":
size 16, number 0). `loop_index` makes k, and a reduction such as `loop_add(x, k)`, a *loop*, sums x over k. Results of
a derivative program, one for each load, may depend on loop indices.

An integer value that is known to be the affine function b*B + h*H + q*Q + kv*K + const (+ multiples of uniform values)
keeps that function as its *linear form* (linear.py), which tells a load of a contiguous vector or tile from a gather.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterator, Sequence

from flexjax.ir.linear import Linear as Linear
from flexjax.ir.operations import COTANGENT, LOOP_INDEX, REDUCTIONS

AXES = ("b", "h", "q", "kv", "delta", "score")
Axes = frozenset[str]
UNIFORM: Axes = frozenset({"b", "h"})
_POSITIONS: Axes = frozenset(AXES)


def loop_axis(size: int, number: int) -> str:
    """The name of the axis of the loop index number `number` among those of 0 .. size - 1."""
    return f"{size}:{number}"


def loops_of(axes: Axes) -> Axes:
    return axes - _POSITIONS


def positions_of(axes: Axes) -> Axes:
    return axes & _POSITIONS


def in_loop_order(axes: Axes) -> list[str]:
    """The loop indices among the axes, outer loops before inner ones: by number, then by size."""
    return sorted(loops_of(axes), key=lambda a: tuple(map(int, a.split(":")))[::-1])


def loop_size(axis: str) -> int:
    return int(axis.split(":")[0])


@dataclasses.dataclass(frozen=True)
class Lit:
    """A literal scalar of a program: a Python bool, int, float or complex; `dtype` is a numpy dtype name."""

    value: typing.Any
    dtype: str

    def __str__(self) -> str:
        return f"{self.value!r}:{self.dtype}"

    def __eq__(self, other: object) -> bool:
        """Whether dtype and text are the same: NaN equals NaN, and -0.0 differs from 0.0."""
        return isinstance(other, Lit) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


@dataclasses.dataclass(frozen=True)
class Val:
    """A scalar that is an input of the program or the result of a step."""

    id: int  # unique within the program; the inputs have the ids SCORE, B, H, Q, KV (0 to 4)
    dtype: str
    axes: Axes
    linear: Linear | None = None  # None where the value is not known to be affine in the indices
    # inclusive bounds of an integer over the whole attention matrix
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        return f"%{self.id}"


Atom = Lit | Val


@dataclasses.dataclass(frozen=True)
class Op:
    """A step that applies an elementwise primitive (operations.py) to scalars."""

    prim: str
    inputs: tuple[Atom, ...]
    out: Val
    params: tuple[tuple[str, typing.Any], ...] = ()  # static parameters of the primitive, sorted by name

    @property
    def outs(self) -> tuple[Val, ...]:
        return (self.out,)


@dataclasses.dataclass(frozen=True)
class Load:
    """A step that reads one element of a captured array: `captures[capture][index]`.

    The int32 index is in bounds for every (b, h, q, kv) inside the attention matrix. In the part of a tile past the end
    of the matrix the backend must keep the address legal itself.
    """

    capture: int
    index: tuple[Atom, ...]
    out: Val

    @property
    def inputs(self) -> tuple[Atom, ...]:
        return self.index

    @property
    def outs(self) -> tuple[Val, ...]:
        return (self.out,)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A step that runs one whole jaxpr equation on scalars and small arrays of scalars, for example a while loop."""

    name: str
    text: str  # the parameters of the primitive, for `Program.key`
    # the number of a captured array that is passed whole, or (shape, atoms in row-major order); the one atom of a
    # vector (`is_vector`) is its element at the loop indices of `vector_axes`
    arguments: tuple[int | tuple[tuple[int, ...], tuple[Atom, ...]], ...]
    results: tuple[tuple[tuple[int, ...], tuple[Val, ...]], ...]
    # runs the equation: takes one array for each of `arguments`, returns the list of result arrays
    bind: Callable[..., list]
    inner: "CallBody | None" = None  # the body of a function with its own derivative rule
    # whether the derivative rules in it are linear in the cotangent (trace/linearity.py); None: it has none
    linear: bool | None = None

    @property
    def inputs(self) -> tuple[Atom, ...]:
        """The operands that are atoms; captured arrays that are passed whole are left out."""
        return tuple(a for argument in self.arguments if not isinstance(argument, int) for a in argument[1])

    @property
    def outs(self) -> tuple[Val, ...]:
        return tuple(v for _, vals in self.results for v in vals)


def is_vector(shape: tuple[int, ...], atoms: Sequence[Atom]) -> bool:
    """Whether an operand or result of a Call of that shape is one value that depends on loop indices."""
    return len(atoms) == 1 and math.prod(shape) > 1


def vector_axes(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """For each dim of a vector of a Call, but not for dims of size 1, the (size, number) of its loop index."""
    return [(n, shape[:d].count(n)) for d, n in enumerate(shape) if n != 1]


class CallBody(typing.Protocol):
    """A jaxpr with the values of its constants; only trace/ runs it."""

    @property
    def jaxpr(self) -> typing.Any:
        """jax.extend.core.Jaxpr or its like in trace/closed_over.py."""
        ...

    @property
    def consts(self) -> Sequence[typing.Any]: ...


Step = Op | Load | Call

# Ids of the inputs, the same in every program.
SCORE, B, H, Q, KV = range(5)
INPUT_NAMES = ("score", "b", "h", "q", "kv")
FIRST_FREE_ID = 5


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """The shape of a captured array and its numpy dtype name."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced mod without its arrays."""

    inputs: tuple[Val, ...]  # score (float), b, h, q, kv (int32)
    steps: tuple[Step, ...]
    # one, or more with expectations; for a derivative program the new score and its derivatives, and so for each other
    results: tuple[Atom, ...]
    captures: tuple[ArrayType, ...]
    # of a derivative program: positions in `steps` of the Loads by which a group's results[2:] are the derivatives
    gradients: tuple[int, ...] = ()

    @functools.cached_property
    def key(self) -> str:
        """The program as text; programs are equal, and share compiled kernels, exactly if their texts are."""
        return program_text(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @functools.cached_property
    def axes(self) -> Axes:
        return frozenset().union(*(axes_of(r) for r in self.results))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(batch, heads, q_len, kv_len), which b, h, q and kv are below; 1 where unknown or 0."""
        batch, heads, q_len, kv_len = ((v.high or 0) + 1 for v in self.inputs[1:])
        return batch, heads, q_len, kv_len

    @property
    def loads(self) -> tuple[Load, ...]:
        return tuple(s for s in self.steps if isinstance(s, Load))

    @property
    def loops(self) -> tuple[Op, ...]:
        return tuple(s for s in self.steps if isinstance(s, Op) and s.prim in REDUCTIONS)

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(s for s in self.steps if isinstance(s, Call))

    @property
    def groups(self) -> list[tuple[Atom, ...]]:
        """The results of a derivative program as (value, derivative by the score, by each of its loads) of each value.

        A backward pass of a call with expectations has a second group (passes/expectations.py).
        """
        width = 2 + len(self.gradients)
        return [self.results[at : at + width] for at in range(0, len(self.results), width)]

    @functools.cached_property
    def takes_cotangent(self) -> bool:
        """Whether the results after the first are cotangents of the score and of the loads, and not derivatives."""
        return any(isinstance(s, Op) and s.prim == COTANGENT for s in self.steps)

    def reads(self, axis: str) -> bool:
        """Whether any step or result depends on the axis; an unused input that is no result does not count."""
        # a value of q - kv depends on both
        wanted = {axis, "delta"} if axis in ("q", "kv") else {axis}
        found: set[str] = set(self.axes)
        for step in self.steps:
            for out in step.outs:
                found |= out.axes
        return bool(found & wanted)

    def __str__(self) -> str:
        return self.key


def axes_of(atom: Atom) -> Axes:
    return frozenset() if isinstance(atom, Lit) else atom.axes


def range_of_val(atom: Atom) -> tuple[int, int] | None:
    """The range (lowest, highest), inclusive, of an integer atom over the attention matrix; None where unknown."""
    if isinstance(atom, Lit):
        return (atom.value, atom.value) if isinstance(atom.value, int) and not isinstance(atom.value, bool) else None
    return None if atom.low is None or atom.high is None else (atom.low, atom.high)


def _param_text(params: tuple[tuple[str, object], ...]) -> str:
    kept = [f"{k}={v}" for k, v in params if v is not None]
    return "[" + " ".join(kept) + "]" if kept else ""


def _step_text(step: Step) -> str:
    """A step as one line of program text, which must differ between steps that compute different things."""
    outs = ", ".join(f"{o}:{o.dtype}" for o in step.outs)
    if isinstance(step, Op):
        return f"{outs} = {step.prim}{_param_text(step.params)} {' '.join(map(str, step.inputs))}"
    if isinstance(step, Load):
        return f"{outs} = load c{step.capture}[{', '.join(map(str, step.index))}]"
    parts = [f"c{a}" if isinstance(a, int) else f"({' '.join(map(str, a[1]))}):{a[0]}" for a in step.arguments]
    return f"{outs} = call {step.name} {' '.join(parts)} {{{step.text}}}"


def program_text(program: Program) -> str:
    """The program as text, for example:

    (score=%0:float32, b=%1:int32, h=%2:int32, q=%3:int32, kv=%4:int32) in (0..1, 0..3, 0..255, 0..255) with
    (c0:float32[4])
      %5:float32 = load c0[%2]
      %6:float32 = add %0 %5
      -> %6, 1.0:float32, 1.0:float32
      gradients of steps 0
    """
    head = ", ".join(f"{n}=%{v.id}:{v.dtype}" for n, v in zip(INPUT_NAMES, program.inputs, strict=True))
    ranges = ", ".join(f"{v.low}..{v.high}" for v in program.inputs[1:])
    captured = ", ".join(f"c{i}:{c}" for i, c in enumerate(program.captures))
    lines = [f"({head}) in ({ranges}) with ({captured})"]
    lines += ["  " + _step_text(s) for s in program.steps]
    lines.append("  -> " + ", ".join(map(str, program.results)))
    if program.gradients:
        lines.append("  gradients of steps " + ", ".join(map(str, program.gradients)))
    return "\n".join(lines)


# ------------------------------------------------------------------- load classes

SCALAR, ROW, COLUMN, DIAGONAL, TILE = "scalar", "row", "column", "diagonal", "tile"


@dataclasses.dataclass(frozen=True)
class LoadClass:
    """How the elements that a load reads are laid out over a tile of the attention matrix.

    kind         "scalar": one element for each (b, h); "row": for each query; "column": for each key; "diagonal": for
                 each
                 q - kv; "tile": for each (q, kv)
    contiguous   neighbouring positions of the tile read neighbouring elements: the load is a slice, otherwise a gather
    dims         for each index: "uniform" (of b and h alone), "q", "kv", "delta" (q - kv + ...), "-delta" or "other"
    """

    kind: str
    contiguous: bool
    dims: tuple[str, ...]

    def __str__(self) -> str:
        shape = "slice" if self.contiguous and self.kind != SCALAR else "gather" if self.kind != SCALAR else ""
        return f"{self.kind} {shape}".strip()


def _dim_kind(atom: Atom) -> str:
    """What an index of a load is, in the words of LoadClass.dims; terms of b and h and constants do not count."""
    if not positions_of(axes_of(atom)) - UNIFORM:
        return "uniform"
    linear = atom.linear if isinstance(atom, Val) else None
    if linear is None:
        return "other"
    names = {(1, 0): "q", (0, 1): "kv", (1, -1): "delta", (-1, 1): "-delta"}
    return names.get((linear.q, linear.kv), "other")


def classify_load(load: Load) -> LoadClass:
    """Derives the load class of a load from the axes and the linear forms of its index atoms."""
    dims = tuple(_dim_kind(a) for a in load.index)
    axes: Axes = positions_of(frozenset().union(*(axes_of(a) for a in load.index))) - UNIFORM
    moving = [d for d in dims if d != "uniform"]
    if not axes:
        kind = SCALAR
    elif axes == {"q"}:
        kind = ROW
    elif axes == {"kv"}:
        kind = COLUMN
    elif axes == {"delta"}:
        kind = DIAGONAL
    else:
        kind = TILE
    plain = {SCALAR: [[]], ROW: [["q"]], COLUMN: [["kv"]], DIAGONAL: [["delta"], ["-delta"]], TILE: [["kv", "q"]]}
    return LoadClass(kind, sorted(moving) in plain[kind], dims)


def uses(steps: tuple[Step, ...], results: tuple[Atom, ...]) -> set[int]:
    """The ids of all values that the results depend on, the results included. The rest is dead."""
    live = {a.id for a in results if isinstance(a, Val)}
    for step in reversed(steps):
        if any(o.id in live for o in step.outs):
            live |= {a.id for a in step.inputs if isinstance(a, Val)}
    return live


def loop_indices(program: Program) -> dict[str, Val]:
    made = (s.out for s in program.steps if isinstance(s, Op) and s.prim == LOOP_INDEX)
    return {next(iter(val.axes)): val for val in made}


def walk_atoms(program: Program) -> Iterator[Atom]:
    """Yields every operand of every step in order, then the results; an atom that is used twice comes twice."""
    for step in program.steps:
        yield from step.inputs
    yield from program.results
