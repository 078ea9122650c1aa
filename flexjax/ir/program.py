"""What a program is: the form of a traced mod that every backend reads.

A `score_mod` or `mask_mod` becomes a `Program`: a flat list of operations on *scalars*, in order, with the captured
arrays hoisted to operands. It is immutable and hashable without its arrays: two closures with the same operations and
other captured values are the same program, so nothing is compiled twice.

    atoms       `Lit` (a literal) or `Val` (the result of an input or an operation)
    operations  `Op` (elementwise primitive), `Load` (one element of a captured array), `Call` (anything else: control flow
                that could not be unrolled; only backends that can map a whole jaxpr take it)
    results     atoms; a mask has one (bool), a score program one, or one plus its derivatives (see derivative.py)

Every `Val` knows the *axes* it depends on, a subset of AXES: what depends on b and h alone is worth computing once a
program, on q once a row, on kv once a column. `delta` stands for "depends on q and kv only through q - kv": such a value
is a vector of tile_q + tile_kv - 1 numbers laid out along diagonals. A value that has `q` or `kv` does not have `delta`.
`linear` is set where an integer value is known to be `b*B + h*H + q*Q + kv*K + const` (+ values of b and h alone), which
is what tells a contiguous vector or tile from a gather.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Sequence

AXES = ("b", "h", "q", "kv", "delta", "score")
Axes = frozenset[str]
UNIFORM: Axes = frozenset({"b", "h"})


@dataclasses.dataclass(frozen=True)
class Linear:
    """An affine function of the indices: self.b * b + self.h * h + self.q * q + self.kv * kv + const + uniform terms.

    uniform   (id, coefficient) of each further term; the Val of that id depends on b and h alone
    """

    b: int = 0
    h: int = 0
    q: int = 0
    kv: int = 0
    const: int = 0
    uniform: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: "Linear") -> "Linear":
        terms: dict[int, int] = dict(self.uniform)
        for ident, coefficient in other.uniform:
            terms[ident] = terms.get(ident, 0) + coefficient
        kept = tuple(sorted((i, c) for i, c in terms.items() if c))
        return Linear(
            self.b + other.b,
            self.h + other.h,
            self.q + other.q,
            self.kv + other.kv,
            self.const + other.const,
            kept,
        )

    def times(self, factor: int) -> "Linear":
        """The form with every coefficient multiplied by `factor`."""
        if factor == 0:
            return Linear()
        terms = tuple((i, c * factor) for i, c in self.uniform)
        return Linear(self.b * factor, self.h * factor, self.q * factor, self.kv * factor, self.const * factor, terms)


@dataclasses.dataclass(frozen=True)
class Lit:
    """A literal scalar; `dtype` is a numpy dtype name ("bfloat16" included)."""

    value: typing.Any  # bool, int, float or complex, as dtype says
    dtype: str

    def __str__(self) -> str:
        return f"{self.value!r}:{self.dtype}"

    # repr tells nan from nan and -0.0 from 0.0 the same way every time, == does not.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lit) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


@dataclasses.dataclass(frozen=True)
class Val:
    """A scalar that the program is given or computes.

    dtype       a numpy dtype name
    axes        what the value depends on
    linear      the affine function that an integer value is, None where it is not known to be one
    low, high   inclusive bounds of an integer over the whole attention matrix, None where unknown
    """

    id: int
    dtype: str
    axes: Axes
    linear: Linear | None = None
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        return f"%{self.id}"


Atom = Lit | Val


@dataclasses.dataclass(frozen=True)
class Op:
    """An elementwise primitive of jax.lax, by name, with its static parameters; scalar in, scalar out.

    Two names are not primitives: `floordiv` and `floormod`, the integer division of Python.
    """

    prim: str
    inputs: tuple[Atom, ...]
    out: Val
    params: tuple[tuple[str, typing.Any], ...] = ()

    @property
    def outs(self) -> tuple[Val, ...]:
        return (self.out,)


@dataclasses.dataclass(frozen=True)
class Load:
    """`captures[capture][index]`, one index atom for each dimension of the array, all in bounds.

    In bounds means: for every (b, h, q, kv) inside the attention matrix. In the part of a tile that hangs over the end
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
    """A whole jaxpr equation on scalars and small arrays of scalars, for example a while loop.

    name, text  the primitive, and its parameters as text for `Program.key`
    arguments   per operand: the number of a captured array that is passed whole, or (shape, atoms in row-major order)
    results     per result: (shape, vals in row-major order)
    bind        runs the equation on arrays of the operands' shapes and returns the list of results
    inner       the body of a function with its own derivative rule, None for all else and after such functions are inlined
    """

    name: str
    text: str
    arguments: tuple[int | tuple[tuple[int, ...], tuple[Atom, ...]], ...]
    results: tuple[tuple[tuple[int, ...], tuple[Val, ...]], ...]
    bind: Callable[..., list]
    inner: "CallBody | None" = None

    @property
    def inputs(self) -> tuple[Atom, ...]:
        return tuple(a for argument in self.arguments if not isinstance(argument, int) for a in argument[1])

    @property
    def outs(self) -> tuple[Val, ...]:
        return tuple(v for _, vals in self.results for v in vals)


class CallBody(typing.Protocol):
    """A jaxpr with the values of its constants; only trace/ runs it."""

    @property
    def jaxpr(self) -> typing.Any: ...
    @property
    def consts(self) -> Sequence[typing.Any]: ...


Step = Op | Load | Call

# Ids of the inputs, the same in every program.
SCORE, B, H, Q, KV = range(5)
INPUT_NAMES = ("score", "b", "h", "q", "kv")
FIRST_FREE_ID = 5


@dataclasses.dataclass(frozen=True)
class ArrayType:
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced mod without its arrays.

    inputs      the five input Vals: score (float), b, h, q, kv (int32)
    steps       operations in order; each uses only inputs and earlier results
    results     what it computes
    captures    type of each captured array it reads
    gradients   for a program of derivatives: positions in `steps` of the Loads by which results[2:] are the derivatives;
                empty otherwise
    """

    inputs: tuple[Val, ...]
    steps: tuple[Step, ...]
    results: tuple[Atom, ...]
    captures: tuple[ArrayType, ...]
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
    def loads(self) -> tuple[Load, ...]:
        return tuple(s for s in self.steps if isinstance(s, Load))

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(s for s in self.steps if isinstance(s, Call))

    def reads(self, axis: str) -> bool:
        """Whether any step or result depends on the axis ("q" and "kv" also through delta)."""
        wanted = {axis, "delta"} if axis in ("q", "kv") else {axis}
        found: set[str] = set(self.axes)
        for step in self.steps:
            for out in step.outs:
                found |= out.axes
        return bool(found & wanted)

    def __str__(self) -> str:
        return self.key


def axes_of(atom: Atom) -> Axes:
    """What the atom depends on; nothing for a literal."""
    return frozenset() if isinstance(atom, Lit) else atom.axes


def range_of_val(atom: Atom) -> tuple[int, int] | None:
    """Inclusive range of an integer atom over the whole attention matrix, None where unknown."""
    if isinstance(atom, Lit):
        return (atom.value, atom.value) if isinstance(atom.value, int) and not isinstance(atom.value, bool) else None
    return None if atom.low is None or atom.high is None else (atom.low, atom.high)


def _param_text(params: tuple[tuple[str, object], ...]) -> str:
    kept = [f"{k}={v}" for k, v in params if v is not None]
    return "[" + " ".join(kept) + "]" if kept else ""


def _step_text(step: Step) -> str:
    """A step as one line of text."""
    outs = ", ".join(f"{o}:{o.dtype}" for o in step.outs)
    if isinstance(step, Op):
        return f"{outs} = {step.prim}{_param_text(step.params)} {' '.join(map(str, step.inputs))}"
    if isinstance(step, Load):
        return f"{outs} = load c{step.capture}[{', '.join(map(str, step.index))}]"
    parts = [f"c{a}" if isinstance(a, int) else f"({' '.join(map(str, a[1]))}):{a[0]}" for a in step.arguments]
    return f"{outs} = call {step.name} {' '.join(parts)} {{{step.text}}}"


def program_text(program: Program) -> str:
    """The program as text, one step a line; see Program.key."""
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
        shape = "slice" if self.contiguous and self.kind != SCALAR else "gather" if self.kind != SCALAR else ""
        return f"{self.kind} {shape}".strip()


def _dim_kind(atom: Atom) -> str:
    """What an index is, as LoadClass.dims says it."""
    if not axes_of(atom) - UNIFORM:
        return "uniform"
    linear = atom.linear if isinstance(atom, Val) else None
    if linear is None:
        return "other"
    names = {(1, 0): "q", (0, 1): "kv", (1, -1): "delta", (-1, 1): "-delta"}
    return names.get((linear.q, linear.kv), "other")


def classify_load(load: Load) -> LoadClass:
    """The load class of a load, from the axes and the linear forms of its index."""
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
    plain = {
        SCALAR: [[]],
        ROW: [["q"]],
        COLUMN: [["kv"]],
        DIAGONAL: [["delta"], ["-delta"]],
        TILE: [["kv", "q"]],
    }
    return LoadClass(kind, sorted(moving) in plain[kind], dims)


def uses(steps: tuple[Step, ...], results: tuple[Atom, ...]) -> set[int]:
    """Ids of the values that the results depend on, the results included."""
    live = {a.id for a in results if isinstance(a, Val)}
    for step in reversed(steps):
        if any(o.id in live for o in step.outs):
            live |= {a.id for a in step.inputs if isinstance(a, Val)}
    return live


def walk_atoms(program: Program) -> Iterator[Atom]:
    """Every operand of every step, then the results."""
    for step in program.steps:
        yield from step.inputs
    yield from program.results
