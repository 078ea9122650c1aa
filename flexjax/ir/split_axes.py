"""The programs of mods for one device's share of the batch and heads; the mods still see the indices of the whole call.

    share            the batch entries and query heads that one device computes: equal, consecutive parts
    split dimension  a dimension of a captured array that is indexed by plain b or plain h alone; a device then gets
                     only the
                     elements of its share along it, and indexes them from 0
    start            the index of the share's first batch entry or head in the whole call

A program for a share takes b and h counted from 0 within the share. Wherever the mod uses b or h other than as the
index of a split dimension, the program adds the start, which it reads from an extra captured scalar.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence

from flexjax.ir.builder import Builder
from flexjax.ir.program import SCORE, Atom, B, H, Load, Program, Step, Val
from flexjax.ir.replay import replay

AXIS_OF_INPUT = {B: "b", H: "h"}
# for each dimension of a captured array: "b" or "h" if it is split, None if every device gets all of it
Dims = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Share:
    """The sizes of the whole call, and into how many equal parts each is divided."""

    batch: int
    batch_shares: int
    heads: int
    head_shares: int

    @functools.cached_property
    def wholes(self) -> dict[str, int]:
        return {"b": self.batch, "h": self.heads}

    @functools.cached_property
    def entries(self) -> dict[str, int]:
        return {"b": self.batch // self.batch_shares, "h": self.heads // self.head_shares}

    def cuts(self, axis: str) -> bool:
        return self.entries[axis] < self.wholes[axis]


class SharePrograms(typing.NamedTuple):
    """The programs of a share, which all have the same captured arrays."""

    # the original captures, shortened along split dimensions, then one int32 scalar for each of `starts`
    programs: tuple[Program, ...]
    starts: tuple[str, ...]  # the axes, "b" or "h", whose start the programs read


def split_dims(programs: Sequence[Program], sizes: Mapping[str, int]) -> tuple[Dims, ...]:
    """The split dimensions of each captured array of the programs, which have the same ones.

    A dimension is split along b (h) if its length is sizes["b"] (sizes["h"]), every load of the array, in every
    program, indexes it with plain b (h), and no `Call` takes the array whole. Only the first for an axis is split.
    """
    if not programs:
        return ()
    found: list[list[str | None]] = []
    for number, capture in enumerate(programs[0].captures):
        loads = [load for p in programs for load in p.loads if load.capture == number]
        whole = any(number in call.arguments for p in programs for call in p.calls)
        dims: list[str | None] = []
        for dim, size in enumerate(capture.shape):
            axes = {_plain_axis(load.index[dim]) for load in loads}
            axis = axes.pop() if len(axes) == 1 and not whole else None
            split = axis in dims  # table[h, h]: a mesh axis can split only one dimension
            dims.append(axis if axis is not None and size == sizes[axis] and not split else None)
        found.append(dims)
    return tuple(map(tuple, found))


def _plain_axis(atom: Atom) -> str | None:
    """ "b" or "h" if the atom is that input of the program itself."""
    return AXIS_OF_INPUT.get(atom.id) if isinstance(atom, Val) else None


def share_of_program(programs: Sequence[Program], share: Share) -> SharePrograms:
    """The programs for a share of programs of the whole call, which have the same captured arrays."""
    dims = split_dims(programs, share.wholes)
    starts = tuple(
        axis for axis in ("b", "h") if share.cuts(axis) and any(_reads_index(p, axis, dims) for p in programs)
    )
    return SharePrograms(tuple(_program_of_share(p, share, dims, starts) for p in programs), starts)


def _reads_index(program: Program, axis: str, dims: Sequence[Dims]) -> bool:
    """Whether the program uses "b" or "h" (`axis`) anywhere but as the index of a split dimension."""
    read = [atom for step in program.steps for atom in _operands_needing_start(step, dims)]
    return axis in map(_plain_axis, (*read, *program.results))


def _operands_needing_start(step: Step, dims: Sequence[Dims]) -> list[Atom]:
    """The operands in which b and h are of the whole call: all but a load's indices of split dimensions."""
    if not isinstance(step, Load):
        return list(step.inputs)
    return [atom for atom, dim in zip(step.index, dims[step.capture], strict=True) if dim is None]


def _program_of_share(program: Program, share: Share, dims: Sequence[Dims], starts: Sequence[str]) -> Program:
    """The program for a share of one program; `starts` are the axes whose start is captured and added to the input."""
    builder = Builder((share.entries["b"], share.entries["h"], *program.sizes[2:]), program.inputs[SCORE].dtype)
    for capture, of_dims in zip(program.captures, dims, strict=True):
        shape = (size if dim is None else share.entries[dim] for size, dim in zip(capture.shape, of_dims, strict=True))
        builder.capture(tuple(shape), capture.dtype)
    inputs: dict[int, Atom] = {v.id: v for v in builder.inputs}
    for axis in starts:
        ident = B if axis == "b" else H
        inputs[ident] = builder.plus_start(inputs[ident], (), (), share.wholes[axis] - share.entries[axis])

    def load_index(load: Load, index: list[Atom]) -> list[Atom]:
        pairs = zip(load.index, index, dims[load.capture], strict=True)
        # plain b or h without the start in split dimensions
        return [new if dim is None else old for old, new, dim in pairs]

    found = replay(program, builder, inputs, load_index)
    return builder.finish([found.new(r) for r in program.results], [found.loads[n] for n in program.gradients])
