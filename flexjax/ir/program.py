"""What a program is: the form of a traced mod that every backend reads.

A `score_mod` or `mask_mod` becomes a `Program`: a flat list of steps on *scalars*, in order. The program describes the captured arrays by
shape and dtype only; the arrays themselves are operands of a call. It is immutable and hashable: two closures with the same operations
and other captured values are the same program, so nothing is compiled twice.

    atom     an operand of a step: `Lit` (a literal) or `Val` (an input of the program or the result of a step)
    step     `Op` (elementwise primitive), `Load` (one element of a captured array), `Call` (anything else: control flow
             that could not be unrolled; only backends that can map a whole jaxpr take it)
    result   an atom; a mask has one (bool), a score program one, or one plus its derivatives (see derivative.py)
    index    b, h, q, kv: the numbers of the batch entry, the query head, the query and the key, int32 inputs of a program

Every `Val` knows the *axes* it depends on, a subset of AXES: a value of b and h alone (a *uniform* value) is worth computing once a
program, one of q once a row, one of kv once a column. `delta` stands for "depends on q and kv only through q - kv": such a value is a
vector of tile_q + tile_kv - 1 numbers laid out along diagonals. A value that has `q` or `kv` does not have `delta`.

An integer value that is known to be the affine function b*B + h*H + q*Q + kv*K + const (+ multiples of uniform values) keeps that
function as its *linear form* (linear.py), which tells a load of a contiguous vector or tile from a gather.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Sequence

from flexjax.ir.linear import Linear as Linear

AXES = ("b", "h", "q", "kv", "delta", "score")
Axes = frozenset[str]
UNIFORM: Axes = frozenset({"b", "h"})


@dataclasses.dataclass(frozen=True)
class Lit:
    """A literal scalar of a program.

    value   a Python bool, int, float or complex, as the dtype says
    dtype   a numpy dtype name ("bfloat16" included)
    """

    value: typing.Any
    dtype: str

    def __str__(self) -> str:
        """The value and the dtype as text, such as "1.5:float32"."""
        return f"{self.value!r}:{self.dtype}"

    def __eq__(self, other: object) -> bool:
        """Whether both are literals of the same dtype and text: NaN equals NaN, and -0.0 differs from 0.0."""
        return isinstance(other, Lit) and str(self) == str(other)

    def __hash__(self) -> int:
        """The hash of the text."""
        return hash(str(self))


@dataclasses.dataclass(frozen=True)
class Val:
    """A scalar that is an input of the program or the result of a step.

    id          number of the value, unique within its program; the inputs have the ids SCORE, B, H, Q, KV (0 to 4)
    dtype       a numpy dtype name
    axes        the axes of AXES that the value depends on
    linear      the linear form of an integer value, None where the value is not known to be affine in the indices
    low, high   inclusive bounds of an integer over the whole attention matrix, None where unknown
    """

    id: int
    dtype: str
    axes: Axes
    linear: Linear | None = None
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        """The value as program text has it, such as "%7"."""
        return f"%{self.id}"


Atom = Lit | Val


@dataclasses.dataclass(frozen=True)
class Op:
    """A step that applies an elementwise primitive of jax.lax to scalars; its result is one scalar.

    prim     name of the primitive, or `floordiv` or `floormod`, Python's integer division and remainder; see operations.py
    inputs   the operands, in order
    out      the result
    params   (name, value) of each static parameter of the primitive, sorted by name
    """

    prim: str
    inputs: tuple[Atom, ...]
    out: Val
    params: tuple[tuple[str, typing.Any], ...] = ()

    @property
    def outs(self) -> tuple[Val, ...]:
        """The results of the step as a tuple, as every step has it: here the one result."""
        return (self.out,)


@dataclasses.dataclass(frozen=True)
class Load:
    """A step that reads one element of a captured array: `captures[capture][index]`.

    capture   number of the captured array in the program's `captures`
    index     one int32 atom for each dimension of the array, in bounds
    out       the element

    In bounds means: for every (b, h, q, kv) inside the attention matrix. In the part of a tile that hangs over the end of the
    matrix the backend must keep the address legal itself.
    """

    capture: int
    index: tuple[Atom, ...]
    out: Val

    @property
    def inputs(self) -> tuple[Atom, ...]:
        """The operands of the step, as every step has them: here the indices."""
        return self.index

    @property
    def outs(self) -> tuple[Val, ...]:
        """The results of the step as a tuple, as every step has it: here the one element."""
        return (self.out,)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A step that runs one whole jaxpr equation on scalars and small arrays of scalars, for example a while loop.

    name, text   the name of the primitive, and its parameters as text for `Program.key`
    arguments    per operand: the number of a captured array that is passed whole, or (shape, atoms in row-major order)
    results      per result: (shape, vals in row-major order)
    bind         runs the equation: takes one array for each of `arguments`, of that shape, and returns the list of result
                 arrays
    inner        the body of a function with its own derivative rule, None for all else and after such functions are inlined
    """

    name: str
    text: str
    arguments: tuple[int | tuple[tuple[int, ...], tuple[Atom, ...]], ...]
    results: tuple[tuple[tuple[int, ...], tuple[Val, ...]], ...]
    bind: Callable[..., list]
    inner: "CallBody | None" = None

    @property
    def inputs(self) -> tuple[Atom, ...]:
        """The operands that are atoms, over all arguments in order; captured arrays that are passed whole are left out."""
        return tuple(a for argument in self.arguments if not isinstance(argument, int) for a in argument[1])

    @property
    def outs(self) -> tuple[Val, ...]:
        """The Vals of all results, in order."""
        return tuple(v for _, vals in self.results for v in vals)


class CallBody(typing.Protocol):
    """A jaxpr with the values of its constants; only trace/ runs it."""

    @property
    def jaxpr(self) -> typing.Any:
        """The jaxpr (jax.extend.core.Jaxpr or its like in trace/closed_over.py)."""
        ...

    @property
    def consts(self) -> Sequence[typing.Any]:
        """The values of the jaxpr's constants, in the order of its constvars."""
        ...


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
        """The type as text, such as "float32[2,16]"."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced mod without its arrays.

    inputs      the five input Vals: score (float), b, h, q, kv (int32)
    steps       the steps in order; each uses only inputs and earlier results
    results     the atoms that the program computes: one, or for a derivative program the new score and its derivatives
    captures    type of each captured array that the program reads
    gradients   for a derivative program: positions in `steps` of the Loads by which results[2:] are the derivatives; empty
                otherwise
    """

    inputs: tuple[Val, ...]
    steps: tuple[Step, ...]
    results: tuple[Atom, ...]
    captures: tuple[ArrayType, ...]
    gradients: tuple[int, ...] = ()

    @functools.cached_property
    def key(self) -> str:
        """The program as text (program_text); programs are equal, and share compiled kernels, exactly if their texts are."""
        return program_text(self)

    def __eq__(self, other: object) -> bool:
        """Whether both are programs with the same text."""
        return isinstance(other, Program) and self.key == other.key

    def __hash__(self) -> int:
        """The hash of the text."""
        return hash(self.key)

    @functools.cached_property
    def axes(self) -> Axes:
        """The axes that any of the results depends on."""
        return frozenset().union(*(axes_of(r) for r in self.results))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes (batch, heads, q_len, kv_len) that b, h, q and kv are below; 1 where a range is not known or the size is 0."""
        batch, heads, q_len, kv_len = ((v.high or 0) + 1 for v in self.inputs[1:])
        return batch, heads, q_len, kv_len

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads among the steps, in order."""
        return tuple(s for s in self.steps if isinstance(s, Load))

    @property
    def calls(self) -> tuple[Call, ...]:
        """The Calls among the steps, in order."""
        return tuple(s for s in self.steps if isinstance(s, Call))

    def reads(self, axis: str) -> bool:
        """Whether any step or result depends on the axis, a name of AXES.

        A value of q - kv depends on "q" and "kv" too, and a value that depends on the score on "b", "h", "q" and "kv". An input
        that no step uses and that is no result does not count.
        """
        wanted = {axis, "delta"} if axis in ("q", "kv") else {axis}
        found: set[str] = set(self.axes)
        for step in self.steps:
            for out in step.outs:
                found |= out.axes
        return bool(found & wanted)

    def __str__(self) -> str:
        """The program as text, as `key`."""
        return self.key


def axes_of(atom: Atom) -> Axes:
    """The axes that an atom depends on; none for a literal."""
    return frozenset() if isinstance(atom, Lit) else atom.axes


def range_of_val(atom: Atom) -> tuple[int, int] | None:
    """The range (lowest, highest), inclusive, of an integer atom over the attention matrix; None where unknown, and for other atoms."""
    if isinstance(atom, Lit):
        return (atom.value, atom.value) if isinstance(atom.value, int) and not isinstance(atom.value, bool) else None
    return None if atom.low is None or atom.high is None else (atom.low, atom.high)


def _param_text(params: tuple[tuple[str, object], ...]) -> str:
    """The static parameters of an Op as text: "[name=value name=value]" without those that are None; "" if no other is left."""
    kept = [f"{k}={v}" for k, v in params if v is not None]
    return "[" + " ".join(kept) + "]" if kept else ""


def _step_text(step: Step) -> str:
    """A step as one line of program text, without indentation (`program_text` has an example): its results with dtypes, the operation
    with its static parameters, and its operands. The line must differ between steps that compute different things, because programs are
    equal, and share compiled kernels, exactly if their texts are (`Program.key`).
    """
    outs = ", ".join(f"{o}:{o.dtype}" for o in step.outs)
    if isinstance(step, Op):
        return f"{outs} = {step.prim}{_param_text(step.params)} {' '.join(map(str, step.inputs))}"
    if isinstance(step, Load):
        return f"{outs} = load c{step.capture}[{', '.join(map(str, step.index))}]"
    parts = [f"c{a}" if isinstance(a, int) else f"({' '.join(map(str, a[1]))}):{a[0]}" for a in step.arguments]
    return f"{outs} = call {step.name} {' '.join(parts)} {{{step.text}}}"


def program_text(program: Program) -> str:
    """The program as text: inputs and captured arrays, a line for each step, the results, and the `gradients` if it has any. An example:

    (score=%0:float32, b=%1:int32, h=%2:int32, q=%3:int32, kv=%4:int32) in (0..1, 0..3, 0..255, 0..255) with (c0:float32[4])
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

    kind         "scalar": one element for each (b, h); "row": one for each query; "column": one for each key; "diagonal":
                 one for each q - kv; "tile": one for each (q, kv)
    contiguous   whether neighbouring positions of the tile read neighbouring elements, each tile axis along one dimension
                 of the array: the load is then a slice (a window for a diagonal), otherwise a gather
    dims         per dimension of the array what its index is: "uniform" (of b and h alone), "q", "kv", "delta"
                 (q - kv + ...), "-delta" (kv - q + ...) or "other"
    """

    kind: str
    contiguous: bool
    dims: tuple[str, ...]

    def __str__(self) -> str:
        """The load class as text, such as "row slice" or "tile gather"; for a scalar "scalar"."""
        shape = "slice" if self.contiguous and self.kind != SCALAR else "gather" if self.kind != SCALAR else ""
        return f"{self.kind} {shape}".strip()


def _dim_kind(atom: Atom) -> str:
    """What an index of a load is, in the words of LoadClass.dims: "uniform", "q", "kv", "delta", "-delta" or "other".

    Terms of b and h and constants do not count; any other coefficients of q and kv than 0, 1 and these pairs give "other".
    """
    if not axes_of(atom) - UNIFORM:
        return "uniform"
    linear = atom.linear if isinstance(atom, Val) else None
    if linear is None:
        return "other"
    names = {(1, 0): "q", (0, 1): "kv", (1, -1): "delta", (-1, 1): "-delta"}
    return names.get((linear.q, linear.kv), "other")


def classify_load(load: Load) -> LoadClass:
    """Derives the load class of a load from the axes and the linear forms of its index atoms.

    It is contiguous if the dims that are not "uniform" are: none for a scalar, "q" for a row, "kv" for a column,
    "delta" or "-delta" for a diagonal, "q" and "kv" for a tile.
    """
    dims = tuple(_dim_kind(a) for a in load.index)
    axes: Axes = frozenset().union(*(axes_of(a) for a in load.index)) - UNIFORM
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
    """The ids of all values that the results depend on, directly or through steps: results of steps and inputs of the program,
    the results themselves included. The rest is dead.

    steps     the steps of a program, in order
    results   the atoms to compute
    """
    live = {a.id for a in results if isinstance(a, Val)}
    for step in reversed(steps):
        if any(o.id in live for o in step.outs):
            live |= {a.id for a in step.inputs if isinstance(a, Val)}
    return live


def walk_atoms(program: Program) -> Iterator[Atom]:
    """Yields every operand of every step in order, then the results; an atom that is used twice comes twice."""
    for step in program.steps:
        yield from step.inputs
    yield from program.results
