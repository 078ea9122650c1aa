"""The programs of mods for one device's share of the batch and heads; the mods still see the indices of the whole call.

    share            the batch entries and query heads that one device computes: equal, consecutive parts of the batch and heads
    split dimension  a dimension of a captured array that is indexed by plain b or plain h alone; a device then gets only the
                     elements of its share along it, and indexes them from 0
    start            the index of the share's first batch entry or head in the whole call

A program for a share takes b and h counted from 0 within the share. Wherever the mod uses b or h other than as the index of a
split dimension, the program adds the start, which it reads from an extra captured scalar.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence

from flexjax.ir.builder import Builder
from flexjax.ir.program import SCORE, Atom, B, H, Load, Program, Step, Val
from flexjax.ir.replay import replay

AXIS_OF_INPUT = {B: "b", H: "h"}
Dims = tuple[str | None, ...]
"""For each dimension of one captured array: "b" or "h" if it is a split dimension, None if every device gets all of it."""


@dataclasses.dataclass(frozen=True)
class Share:
    """The size of a share: the batch and the query heads of the whole call, and into how many equal parts each is divided.

    batch, heads              sizes of the whole call
    batch_shares, head_shares number of equal parts; each divides the size; 1 where the axis is not divided
    """

    batch: int
    batch_shares: int
    heads: int
    head_shares: int

    @functools.cached_property
    def wholes(self) -> dict[str, int]:
        """The number of batch entries ("b") and of query heads ("h") of the whole call."""
        return {"b": self.batch, "h": self.heads}

    @functools.cached_property
    def entries(self) -> dict[str, int]:
        """The number of batch entries ("b") and of query heads ("h") in a share."""
        return {"b": self.batch // self.batch_shares, "h": self.heads // self.head_shares}

    def cuts(self, axis: str) -> bool:
        """Whether a share has fewer entries along the axis ("b" or "h") than the whole."""
        return self.entries[axis] < self.wholes[axis]


class SharePrograms(typing.NamedTuple):
    """The programs of a share, which all have the same captured arrays.

    programs   one for each original program; the captured arrays are the original ones in their order, shortened to the share's
               elements along split dimensions, then one int32 scalar for each of `starts`, in that order
    starts     "b", "h", both or neither: the axes whose start the programs read from an extra captured scalar
    """

    programs: tuple[Program, ...]
    starts: tuple[str, ...]


def split_dims(programs: Sequence[Program], sizes: Mapping[str, int]) -> tuple[Dims, ...]:
    """Finds the split dimensions: for each captured array and each of its dimensions "b", "h", or None if it is not
    split.

    programs   programs that have the same captured arrays, such as a score program and its derivative; () gives ()
    sizes      the number of batch entries ("b") and of query heads ("h") of the whole call

    A dimension is split along b (h) if its length is sizes["b"] (sizes["h"]), every load of the array, in every
    program, indexes it with plain b (h), and no `Call` takes the array whole. An array that nothing loads is not split.
    Of several dimensions that qualify for one axis, only the first is split.
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
    """ "b" or "h" if the atom is that input of the program itself, None for any other atom."""
    return AXIS_OF_INPUT.get(atom.id) if isinstance(atom, Val) else None


def share_of_program(programs: Sequence[Program], share: Share) -> SharePrograms:
    """Rewrites programs of the whole call into programs for a share (see SharePrograms).

    programs   programs that have the same captured arrays, such as a score program and its derivative

    A start is added for an axis that the share divides and that some program uses other than as the index of a split
    dimension; all programs then have its scalar among their captured arrays.
    """
    dims = split_dims(programs, share.wholes)
    starts = tuple(
        axis for axis in ("b", "h") if share.cuts(axis) and any(_reads_index(p, axis, dims) for p in programs)
    )
    return SharePrograms(tuple(_program_of_share(p, share, dims, starts) for p in programs), starts)


def _reads_index(program: Program, axis: str, dims: Sequence[Dims]) -> bool:
    """Whether the program uses `axis` ("b" or "h") anywhere but as the index of a split dimension, so that it needs the start.

    dims   the split dimensions of each captured array, as split_dims returns them
    """
    read = [atom for step in program.steps for atom in _operands_needing_start(step, dims)]
    return axis in map(_plain_axis, (*read, *program.results))


def _operands_needing_start(step: Step, dims: Sequence[Dims]) -> list[Atom]:
    """The operands of the step in which b and h mean indices of the whole call: all but a load's indices of split dimensions.

    dims   the split dimensions of each captured array, as split_dims returns them
    """
    if not isinstance(step, Load):
        return list(step.inputs)
    return [atom for atom, dim in zip(step.index, dims[step.capture], strict=True) if dim is None]


def _program_of_share(program: Program, share: Share, dims: Sequence[Dims], starts: Sequence[str]) -> Program:
    """Rewrites one program of the whole call into the program for a share.

    dims     the split dimensions of each captured array, as split_dims returns them
    starts   the axes ("b", "h") for which an int32 scalar, the start, is appended to the captured arrays and added to the input

    Returns the new program. Its derivatives by loads (`gradients`) are those of the old one.
    """
    builder = Builder((share.entries["b"], share.entries["h"], *program.sizes[2:]), program.inputs[SCORE].dtype)
    for capture, of_dims in zip(program.captures, dims, strict=True):
        shape = (size if dim is None else share.entries[dim] for size, dim in zip(capture.shape, of_dims, strict=True))
        builder.capture(tuple(shape), capture.dtype)
    inputs: dict[int, Atom] = {v.id: v for v in builder.inputs}
    for axis in starts:
        ident = B if axis == "b" else H
        inputs[ident] = builder.plus_start(inputs[ident], (), (), share.wholes[axis] - share.entries[axis])

    def load_index(load: Load, index: list[Atom]) -> list[Atom]:
        """The index of a load in the new program: `index`, but plain b or h without the start in split dimensions.

        load    the load of the old program
        index   its index in atoms of the new program, where b and h have their starts added
        """
        pairs = zip(load.index, index, dims[load.capture], strict=True)
        return [new if dim is None else old for old, new, dim in pairs]

    found = replay(program, builder, inputs, load_index)
    return builder.finish([found.new(r) for r in program.results], [found.loads[n] for n in program.gradients])
