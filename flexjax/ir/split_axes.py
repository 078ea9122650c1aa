"""The programs of mods for one device's share of the batch and heads; the mods still see the indices of the whole call."""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence

from flexjax.ir.builder import Builder
from flexjax.ir.program import SCORE, Atom, B, H, Load, Program, Step, Val
from flexjax.ir.replay import replay

AXIS_OF_INPUT = {B: "b", H: "h"}
Dims = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Share:
    """The size of one share: one of `batch_shares` equal parts of `batch` entries, and one of `head_shares` equal parts
    of `heads` query heads.
    """

    batch: int
    batch_shares: int
    heads: int
    head_shares: int

    @functools.cached_property
    def wholes(self) -> dict[str, int]:
        return {"b": self.batch, "h": self.heads}

    @functools.cached_property
    def entries(self) -> dict[str, int]:
        """The number of batch entries ("b") and of query heads ("h") in a share."""
        return {"b": self.batch // self.batch_shares, "h": self.heads // self.head_shares}

    def cuts(self, axis: str) -> bool:
        """Whether a share has fewer entries along the axis ("b" or "h") than the whole."""
        return self.entries[axis] < self.wholes[axis]


class SharePrograms(typing.NamedTuple):
    """The programs of a share.

    Their captures are those of the original programs, with the share's entries only in split dimensions. For each of
    `starts` ("b", "h") another capture follows: an int32 scalar, the index where the share begins.
    """

    programs: tuple[Program, ...]
    starts: tuple[str, ...]


def split_dims(programs: Sequence[Program], sizes: Mapping[str, int]) -> tuple[Dims, ...]:
    """For each dimension of each capture: "b" or "h" if a share needs only its own entries of that dimension, else
    None.

    A dimension is split if it has one entry for each of the sizes["b"] batch entries or sizes["h"] heads, and all loads
    of all `programs` index the dimension with plain b or h. The programs have the same captures.
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
    """ "b" or "h" where the atom is that input itself."""
    return AXIS_OF_INPUT.get(atom.id) if isinstance(atom, Val) else None


def share_of_program(programs: Sequence[Program], share: Share) -> SharePrograms:
    """The programs for a share. The programs have the same captures."""
    dims = split_dims(programs, share.wholes)
    starts = tuple(
        axis for axis in ("b", "h") if share.cuts(axis) and any(_reads_index(p, axis, dims) for p in programs)
    )
    return SharePrograms(tuple(_program_of_share(p, share, dims, starts) for p in programs), starts)


def _reads_index(program: Program, axis: str, dims: Sequence[Dims]) -> bool:
    """Whether the program uses the axis anywhere but as the index of a split dimension."""
    read = [atom for step in program.steps for atom in _whole_indices(step, dims)]
    return axis in map(_plain_axis, (*read, *program.results))


def _whole_indices(step: Step, dims: Sequence[Dims]) -> list[Atom]:
    """The operands of the step, without the indices of split dimensions."""
    if not isinstance(step, Load):
        return list(step.inputs)
    return [atom for atom, dim in zip(step.index, dims[step.capture], strict=True) if dim is None]


def _program_of_share(program: Program, share: Share, dims: Sequence[Dims], starts: Sequence[str]) -> Program:
    """The program for a share, whose captures are followed by the `starts` of the share along "b" or "h".

    dims   for each capture the split of its dimensions, as split_dims returns it
    """
    q_len, kv_len = ((v.high or 0) + 1 for v in program.inputs[3:])
    builder = Builder((share.entries["b"], share.entries["h"], q_len, kv_len), program.inputs[SCORE].dtype)
    for capture, of_dims in zip(program.captures, dims, strict=True):
        shape = (size if dim is None else share.entries[dim] for size, dim in zip(capture.shape, of_dims, strict=True))
        builder.capture(tuple(shape), capture.dtype)
    inputs: dict[int, Atom] = {v.id: v for v in builder.inputs}
    for axis in starts:
        ident = B if axis == "b" else H
        # clamped, so that the builder knows the range of b and h and loads keep their load class
        start = builder.clamped(
            builder.load(builder.capture((), "int32"), ()), share.wholes[axis] - share.entries[axis]
        )
        inputs[ident] = builder.op("add", (inputs[ident], start), "int32")

    def load_index(load: Load, index: list[Atom]) -> list[Atom]:
        """In a split dimension the share has its own entries only, so the index of the share stays."""
        pairs = zip(load.index, index, dims[load.capture], strict=True)
        return [new if dim is None else old for old, new, dim in pairs]

    found = replay(program, builder, inputs, load_index)
    return builder.finish([found.new(r) for r in program.results], [found.loads[n] for n in program.gradients])
