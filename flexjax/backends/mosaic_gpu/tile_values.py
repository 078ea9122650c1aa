"""Values of a program on a tile: at their own rank, and float tiles whose last operations are deferred.

A sum or product with a tile is often cheaper in the FMA that scales the score than as an operation of its own. So a float tile
keeps a constant factor, a factor that repeats along the columns, and an affine term beside the elements that are computed
(`TileValue`), and the consumer of the scores receives these parts as they are (`Scaled`). tile_programs.py decides what is deferred.
"""

import dataclasses
import typing

import jax

from flexjax.ir import program as ir

SCALAR, ROW, COLUMN, TILE = "scalar", "row", "column", "tile"
"""The kinds of a value: the same for the tile, one number for each row, one for each column, one for each element."""
NARROW = "narrow"
"""The kind of a tile that repeats after PERIOD columns (thread_tiles.py): [rows, PERIOD]."""
Value = typing.Any
"""A jax array or numpy scalar in a kernel. Both have the same operators, which no type of theirs says."""
MAX_DIFFERENCE = 1 << 29
"""Differences of integers up to this size are int32, also where a tile extends past the end of the attention matrix."""


def safe_to_defer(factor: float) -> bool:
    """Whether a multiplication by this number may be deferred: neither the number nor its product with another such number
    becomes 0 or infinite in float32."""
    return 1e-30 < abs(factor) < 1e30


def difference_fits(atom: ir.Atom) -> bool:
    """Whether the atom is an int32 so small that its difference with another such atom does not overflow."""
    if isinstance(atom, ir.Lit):
        return atom.dtype == "int32" and abs(atom.value) <= MAX_DIFFERENCE
    if atom.dtype != "int32" or atom.low is None or atom.high is None:
        return False
    return max(abs(atom.low), abs(atom.high)) <= MAX_DIFFERENCE


@dataclasses.dataclass(frozen=True)
class TileValue:
    """A value at its own rank; for a float tile, with deferred operations. c is the number of a column, counted from the tile's first.

    no field set      value
    factor, by        value * factor * by; `by` is a narrow tile of positive numbers
    row, at, along    value * factor + row[:, None] + at + along * c; `along` may be None
    step, at          value[:, None] + at + step * c, where `value` is a row vector: an affine tile

    `at`, `along` and `step` are numbers or scalars. `row`, and `value` of an affine tile, do not change from tile to tile of a row.

    exact   the tile as the mod computes it. Deferred terms are as accurate as float32 where they are added to a score, but other
            operations take `exact`: otherwise a distance that is 0 could become a small number. Without a reader it is not computed.
    """

    kind: str
    value: Value
    factor: float = 1.0
    by: Value = None
    row: Value = None
    at: Value = None
    along: Value = None
    step: Value = None
    exact: Value = None


class Scaled(typing.NamedTuple):
    """A tile of scores in parts: tile * factor * by + row[:, None] + at + along * c at column c, counted from the tile's first.

    tile     [rows, columns] float32
    factor   positive
    by       narrow tile of positive numbers; None: 1
    row      row vector that does not change from tile to tile of a row; None: 0, and `at` is None too
    at       scalar
    along    scalar; None: 0
    others   results of the program after the first, as whole tiles
    """

    tile: jax.Array
    factor: float
    by: jax.Array | None = None
    row: jax.Array | None = None
    at: jax.Array | None = None
    along: jax.Array | None = None
    others: tuple[jax.Array, ...] = ()


def deferred_sum(a: TileValue, b: TileValue, sign: int) -> TileValue | None:
    """a + sign * b without adding tiles, where one of both is affine; None where the sum must be computed."""
    if a.step is not None and b.step is not None:
        return TileValue(TILE, a.value + sign * b.value, at=a.at + sign * b.at, step=a.step + sign * b.step)
    if a.step is not None and b.kind == SCALAR:
        return dataclasses.replace(a, at=a.at + sign * b.value)
    if a.step is not None and b.kind == ROW:
        return dataclasses.replace(a, value=a.value + sign * b.value)
    if b.step is not None and a.kind == SCALAR:
        return TileValue(TILE, sign * b.value, at=a.value + sign * b.at, step=sign * b.step)
    if b.step is not None and a.kind == ROW:
        return TileValue(TILE, a.value + sign * b.value, at=sign * b.at, step=sign * b.step)
    if a.step is not None and b.kind == TILE and sign == 1:
        a, b = b, a
    if b.step is not None and a.kind == TILE and a.step is None:
        return dataclasses.replace(a, row=sign * b.value, at=sign * b.at, along=sign * b.step)
    return None
