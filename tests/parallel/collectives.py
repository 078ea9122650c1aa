"""Reads a compiled program: which collectives it has, over which devices, of how many bytes, and which of them are in loops."""

import re
import typing

import numpy as np

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
BYTES = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}

Groups = frozenset[frozenset[int]]


class Collective(typing.NamedTuple):
    """One collective of a program.

    kind      one of KINDS
    groups    the devices that take part together; empty for collective-permute, which has pairs of them
    size      bytes of its results
    in_loop   whether the body of a loop runs it, also through a function or a branch that the body calls
    """

    kind: str
    groups: Groups
    size: int
    in_loop: bool


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program (`compiled.as_text()`), in the order of the text."""
    found: list[tuple[str, Collective]] = []
    calls: dict[str, set[str]] = {}
    bodies: set[str] = set()
    computation = ""
    for line in text.splitlines():
        head = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        computation = head.group(1) if head else computation
        called = set(re.findall(r"(?:calls|to_apply|condition|(?:true|false)_computation)=%?([\w.\-]+)", line))
        for several in re.findall(r"branch_computations=\{([^}]*)\}", line):
            called |= {name.strip().lstrip("%") for name in several.split(",")}
        body = re.findall(r"body=%?([\w.\-]+)", line)
        bodies |= {*body}
        calls.setdefault(computation, set()).update(called, body)
        match = re.search(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(", line)
        if match:
            found.append((computation, Collective(match.group(2), _groups(line), _size(match.group(1)), False)))
    inside = _reached(bodies, calls)
    return [one._replace(in_loop=where in inside) for where, one in found]


def _reached(start: set[str], calls: dict[str, set[str]]) -> set[str]:
    """The computations that those of `start` call, and they themselves."""
    reached: set[str] = set()
    left = [*start]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += calls.get(name, ())
    return reached


def _size(shapes: str) -> int:
    """Bytes of shapes as a program writes them, such as "(f32[2,4]{1,0}, s32[])"."""
    sizes = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shapes)
    return sum(BYTES[dtype] * int(np.prod([int(n) for n in dims.split(",") if n])) for dtype, dims in sizes)


def _groups(line: str) -> Groups:
    """The replica groups of a collective: as {{0,1},{2,3}}, as [2,2]<=[4], which may be transposed, or as axes of a mesh."""
    plain = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", line)
    if plain:
        rows = re.findall(r"\{([\d, ]*)\}", plain.group(1))
        return frozenset(frozenset(int(n) for n in row.split(",")) for row in rows)
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh.group(1))}
        names, together = [*sizes], re.findall(r"'([^']+)'", mesh.group(2))
        return _over([*sizes.values()], [names.index(name) for name in together])
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota is None:
        return frozenset()
    shape, dims, turned = ([int(n) for n in part.split(",")] if part else [] for part in iota.groups())
    numbers = np.arange(np.prod(dims)).reshape(dims)
    return _rows(numbers.transpose(turned or range(len(dims))).reshape(shape))


def _over(sizes: list[int], together: list[int]) -> Groups:
    """The groups of the devices of a mesh of these sizes that differ only along some of its axes."""
    apart = [n for n in range(len(sizes)) if n not in together]
    numbers = np.arange(np.prod(sizes)).reshape(sizes).transpose(*apart, *together)
    return _rows(numbers.reshape(-1, int(np.prod([sizes[n] for n in together]))))


def _rows(numbers: np.ndarray) -> Groups:
    return frozenset(frozenset(map(int, row)) for row in numbers)
