"""Traced mods as `explain` shows them: short lines with the user's own names of arguments and captured arrays.

Steps that are used once are written into the line that uses them; each load has a line of its own, with its load class.
"""

import functools
import inspect
import itertools
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax import core

from flexjax.ir.program import AXES, Atom, Call, Lit, Load, Op, Program, Step, Val, classify_load

INPUTS = ("score", "b", "h", "q_idx", "kv_idx")
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^",
    "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!=",
}  # fmt: skip
WIDEST = 40  # characters of a step that is written into another one
DEEPEST = 8  # containers and functions around a captured array, as far as its name is looked for


def describe(program: Program, captures: Sequence[str], inputs: Sequence[str], most: int) -> str:
    """A program as text: its captured arrays, a line for each load and each step that is used again, its results.

    captures, inputs   the names of the captured arrays and of the five inputs
    most               lines for steps; where there are more, loads are kept first
    """
    texts: dict[int, str] = dict(enumerate(inputs))
    written = _Writer(program, texts, captures)
    lines = written.lines()
    kept = sorted(sorted(range(len(lines)), key=lambda n: (not lines[n].load, n))[:most])
    width = min(60, max((len(lines[n].text) for n in kept), default=0))
    named = [f"{n} {c}" for n, c in zip(captures, program.captures, strict=True) if not n[0].isdigit() and n[0] != "-"]
    out = ["captures " + (", ".join(named) or "nothing")]
    out += [f"  {lines[n].text:<{width}}  {lines[n].said}" for n in kept]
    if len(kept) < len(lines):
        out.append(f"  .. and {len(lines) - len(kept)} more lines")
    results = ", ".join(written.text_of(r) for r in program.results)
    axes = {a for r in program.results if isinstance(r, Val) for a in r.axes}
    return "\n".join([*out, f"  -> {results}  {_axes(axes)}"])


class _Line(typing.NamedTuple):
    text: str
    said: str  # its axes, its load class, and what is clamped
    load: bool


class _Writer:
    """Writes the steps of one program; `texts` has the text of each value, by its id."""

    def __init__(self, program: Program, texts: dict[int, str], captures: Sequence[str]) -> None:
        self.program, self.texts, self.captures = program, texts, captures
        self.made = {o.id: step for step in program.steps for o in step.outs}
        self.uses = Counter(a.id for a in self._read() if isinstance(a, Val))
        taken = {*texts.values(), *captures}
        letter = next(c for c in "xtuvw" if not any(f"{c}{n}" in taken for n in range(len(program.steps) + 1)))
        self.fresh = (f"{letter}{n}" for n in itertools.count())

    def _read(self) -> list[Atom]:
        """Every operand that a line shows, as often as it does: limits of indices are not shown."""
        ids = {a.id for a in self.program.results if isinstance(a, Val)}
        found: list[Atom] = list(self.program.results)
        for step in reversed(self.program.steps):
            if any(o.id in ids for o in step.outs):
                inputs = self._inputs(step)
                ids |= {a.id for a in inputs if isinstance(a, Val)}
                found += inputs
        return found

    def _inputs(self, step: Step) -> list[Atom]:
        if isinstance(step, Load):
            return [self._unclamped(a, n)[0] for a, n in zip(step.index, self._shape(step), strict=True)]
        return list(step.inputs)

    def _shape(self, load: Load) -> tuple[int, ...]:
        return self.program.captures[load.capture].shape

    def _unclamped(self, index: Atom, size: int) -> tuple[Atom, str]:
        """(the index without the limits 0 and size - 1, a note of what they change if that is known)."""
        inner = index
        for prim, limit in (("min", size - 1), ("max", 0)):
            step = self.made.get(inner.id) if isinstance(inner, Val) else None
            if isinstance(step, Op) and step.prim == prim:
                others = [a for a in step.inputs if not (isinstance(a, Lit) and a.value == limit)]
                inner = others[0] if len(others) == 1 else inner
        if not isinstance(inner, Val) or inner is index:
            return index, ""
        if inner.low is None or inner.high is None:
            return inner, ""
        if inner.low >= 0:
            return inner, f"axis {size}, index reaches {inner.high}: clamped"
        said = f"from {inner.low} to {inner.high}" if inner.high >= size else f"goes down to {inner.low}"
        return inner, f"axis {size}, index {said}: clamped"

    def lines(self) -> list[_Line]:
        out = []
        for step in self.program.steps:
            ids = [o.id for o in step.outs]
            if not any(self.uses[i] for i in ids):
                continue
            text = self._text(step)
            widest = 2 * WIDEST if step.outs[0] in self.program.results else WIDEST
            once = self.uses[ids[0]] == 1 and len(text) <= widest and isinstance(step, Op)
            if once or _is_short(text, step):
                self.texts[ids[0]] = text
                continue
            for i in ids:
                self.texts[i] = next(self.fresh)
            names = ", ".join(self.texts[i] for i in ids)
            said = [_axes(step.outs[0].axes)]
            if isinstance(step, Load):
                said.append(str(classify_load(step)))
                said += filter(
                    None, (self._unclamped(a, n)[1] for a, n in zip(step.index, self._shape(step), strict=True))
                )
            out.append(_Line(f"{names} = {text}", "  ".join(said), isinstance(step, Load)))
        return out

    def text_of(self, atom: Atom) -> str:
        if isinstance(atom, Val):
            return self.texts[atom.id]
        return _number(atom.value)

    def _text(self, step: Step) -> str:
        if isinstance(step, Load):
            if not step.index:
                return self.captures[step.capture]
            return f"load {self.captures[step.capture]}[{', '.join(map(self.text_of, self._inputs(step)))}]"
        if isinstance(step, Call):
            whole = [self.captures[a] for a in step.arguments if isinstance(a, int)]
            return f"{step.name}({', '.join([*whole, *map(self.text_of, step.inputs)])})"
        texts = [self.text_of(a) for a in step.inputs]
        if step.prim in INFIX and len(texts) == 2:
            left, right = (f"({t})" if (" " in t and not t.endswith(")")) or ") " in t else t for t in texts)
            return f"{left} {INFIX[step.prim]} {right}"
        if step.prim == "select_n" and len(texts) == 3:
            return f"where({texts[0]}, {texts[2]}, {texts[1]})"
        if step.prim == "convert_element_type":
            return f"{step.out.dtype}({texts[0]})"
        if step.prim in ("not", "neg") and len(texts) == 1:
            return f"{'~' if step.prim == 'not' else '-'}({texts[0]})"
        return f"{step.prim}({', '.join(texts)})"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _is_short(text: str, step: Step) -> bool:
    """Whether a step is as short as a name for it: a captured scalar, or such as `float32(h)`."""
    return (isinstance(step, Op) and len(text) <= 12) or (isinstance(step, Load) and not step.index)


def _axes(axes: typing.Collection[str]) -> str:
    return f"[{','.join(a for a in AXES if a in axes) or '-'}]"


# ------------------------------------------------------------------- names


def input_names(mod: Callable | None, with_score: bool) -> tuple[str, ...]:
    """The names of the five inputs: those of the mod's own arguments, if it names each of them."""
    wanted = INPUTS if with_score else INPUTS[1:]
    try:
        found = inspect.signature(mod).parameters.values() if mod is not None else ()
    except (TypeError, ValueError):
        found = ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [p.name for p in found if p.kind in positional][: len(wanted)]
    names = tuple(own) if len(own) == len(wanted) else wanted
    return names if with_score else (INPUTS[0], *names)


def capture_names(roots: Mapping[str, object], arrays: Sequence[jax.Array], taken: Sequence[str]) -> list[str]:
    """The names under which `roots`, mods and others by name, have the arrays; c0, c1, .. for those that are not found.

    An array is found by its identity, and a copy by its shape if no other array has it. Other scalars are numbers.
    """
    found = list(_arrays(roots))
    by_id = {id(x): name for name, x in reversed(found)}
    same = {id(a) for a in arrays} & set(by_id)
    names: list[str] = []
    for n, array in enumerate(arrays):
        name = by_id.get(id(array))
        if name is None:
            fits = {other for other, x in found if id(x) not in same and np.shape(x) == array.shape}
            name = fits.pop() if len(fits) == 1 else f"c{n}"
            if name == f"c{n}" and array.shape == () and not isinstance(array, core.Tracer):
                names.append(_number(array.item()))  # jax.numpy's own, such as the length of an axis
                continue
        while name in (*taken, *names):
            name += "_"
        names.append(name)
    return names


def _arrays(roots: Mapping[str, object]) -> Iterator[tuple[str, typing.Any]]:
    """(name, array) of the arrays that are reached from `roots`, nearest first, each once."""
    queue = list(roots.items())
    seen: set[int] = set()
    for _ in range(DEEPEST):
        following: list[tuple[str, object]] = []
        for name, x in queue:
            if id(x) in seen:
                continue
            seen.add(id(x))
            if isinstance(x, jax.Array | np.ndarray):
                yield name, x
            else:
                following += _inside(name, x)
        queue = following


def _inside(name: str, x: object) -> list[tuple[str, object]]:
    """What a function, partial, method, container or object holds, with names."""
    if x is None or isinstance(x, types.ModuleType | type | str | bytes | int | float | complex):
        return []
    if isinstance(x, types.FunctionType):
        code = x.__code__
        cells = zip(code.co_freevars, x.__closure__ or (), strict=True)
        out = [(n, c.cell_contents) for n, c in cells if _is_filled(c)]
        defaults = x.__defaults__ or ()
        out += zip(code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else (), defaults, strict=True)
        out += (x.__kwdefaults__ or {}).items()
        out += ((n, x.__globals__[n]) for n in code.co_names if n in x.__globals__)
        return out + [(name, w) for w in [getattr(x, "__wrapped__", None)] if w is not None]
    if isinstance(x, functools.partial):
        return [(name, x.func), *((_item(name, n), a) for n, a in enumerate(x.args)), *x.keywords.items()]
    if isinstance(x, types.MethodType):
        return [(name, x.__func__), (name, x.__self__)]
    if isinstance(x, Mapping):
        return [(k if isinstance(k, str) and k.isidentifier() else _item(name, k), v) for k, v in x.items()]
    if isinstance(x, tuple) and (fields := getattr(x, "_fields", None)):
        return list(zip(fields, x, strict=True))
    if isinstance(x, list | tuple):
        return [(_item(name, n), v) for n, v in enumerate(x)] if len(x) <= 1000 else []
    own = list(getattr(x, "__dict__", {}).items())
    return own + [(name, f) for f in [vars(type(x)).get("__call__")] if isinstance(f, types.FunctionType)]


def _item(name: str, key: object) -> str:
    return f"{name}[{key!r}]"


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that is not set yet
        return False
