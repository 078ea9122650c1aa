"""Values of a program on a tile: each at its own rank, float tiles with deferred operations.

A sum or product with a tile is often cheaper in the FMA that scales the score than as an operation of its own. So a
float tile keeps beside its computed elements a constant factor, a factor that repeats along the columns, and affine
terms that are still to be applied (`TileValue`). The softmax receives the scores in these parts (`Scaled`) and applies
them itself. tile_programs.py decides what is deferred.

An *affine tile* is value[r] + offset + affine_slope * c at row r and column c of the tile. A *narrow* tile, [rows,
PERIOD], has the first PERIOD columns of a tile whose columns repeat after PERIOD (machine/thread_tiles.py).
"""

import dataclasses
import typing

import jax
import numpy as np

from flexjax.ir import program as ir

SCALAR, ROW, COLUMN, TILE = "scalar", "row", "column", "tile"
"""The kinds of a value: the same for the tile, one number for each row, one for each column, one for each element."""
NARROW = "narrow"  # the kind of a tile that repeats after PERIOD columns (machine/thread_tiles.py): [rows, PERIOD]
Value = typing.Any
"""A jax array or numpy scalar in a kernel. Both have the same operators, which no type of theirs says."""
MAX_DIFFERENCE = 1 << 29
"""Differences of integers up to this size are int32, also where a tile extends past the end of the attention matrix."""


def safe_to_defer(factor: float) -> bool:
    """Whether the multiplication of a tile by `factor` may be deferred."""
    return 1e-30 < abs(factor) < 1e30


def moderate(factor: float) -> bool:
    """Whether what is computed without the factor overflows no earlier than numbers that are large anyway."""
    return 1e-9 < abs(factor) < 1e9


def difference_fits(atom: ir.Atom) -> bool:
    """Whether the atom is an int32 of known magnitude at most MAX_DIFFERENCE, so that differences do not overflow."""
    if isinstance(atom, ir.Lit):
        return atom.dtype == "int32" and abs(atom.value) <= MAX_DIFFERENCE
    if atom.dtype != "int32" or atom.low is None or atom.high is None:
        return False
    return max(abs(atom.low), abs(atom.high)) <= MAX_DIFFERENCE


@dataclasses.dataclass(frozen=True)
class TileValue:
    """A value of a step at its own rank; for a float tile, with deferred parts (None: left out). At row r and column c
    it is

        value[r, c] * factor * narrow_factor[r, c % PERIOD] + row_term[r] + offset + column_slope * c
        value[r] + offset + affine_slope * c          for an affine tile, whose `value` is a row vector
    """

    kind: str
    value: Value  # scalar, [rows], [columns], [rows, PERIOD] or [rows, columns], by kind; [rows] for an affine tile
    factor: float = 1.0
    narrow_factor: Value = None  # [rows, PERIOD], positive
    row_term: Value = None  # [rows], the same for every tile of a row of tiles; set together with `offset`
    offset: Value = None  # a scalar, or [rows] of a program `alone`; it may change from tile to tile
    column_slope: Value = None  # a scalar
    affine_slope: Value = None  # a scalar, set for affine tiles alone
    # [rows, columns], the tile as the mod computes it, beside an affine term. A deferred term is as accurate as float32
    # once it is added to a score, but other operations take `exact`, because a distance that is 0 could otherwise
    # become a small number.
    exact: Value = None


@dataclasses.dataclass(frozen=True)
class Line:
    """tile * factor * scalar + addend, [rows, columns]."""

    tile: Value
    factor: float = 1.0
    scalar: Value = None  # None: 1
    addend: Value = None  # of `kind`; None: 0
    kind: str = SCALAR  # or ROW

    def times(self, number: float) -> "Line":
        addend = None if self.addend is None else self.addend * np.float32(number)
        return dataclasses.replace(self, factor=self.factor * number, addend=addend)

    def neg(self) -> "Line":
        return self.times(-1.0)

    def plus(self, kind: str, value: Value) -> "Line":
        """The line plus a value that is a scalar or a row vector, by its kind."""
        if self.addend is None:
            return dataclasses.replace(self, addend=value, kind=kind)
        # a scalar and a row vector have a sum of the rank of the latter
        return dataclasses.replace(self, addend=self.addend + value, kind=ROW if ROW in (kind, self.kind) else SCALAR)


class Scaled(typing.NamedTuple):
    """A tile of scores in parts: the score at row r and column c of the tile is

    tile[r, c] * factor * narrow_factor[r, c % PERIOD] + row_term[r] + offset + column_slope * c
    """

    tile: jax.Array  # [rows, columns] float32
    factor: float  # positive
    narrow_factor: jax.Array | None = None  # [rows, PERIOD], positive; None: 1
    row_term: jax.Array | None = None  # [rows], the same for every tile of a row of tiles; set together with `offset`
    offset: jax.Array | None = None  # float32 scalar or [rows], which may change from tile to tile
    column_slope: jax.Array | None = None  # float32 scalar; None: 0
    other_results: tuple[jax.Array, ...] = ()  # the program's results after the score, each as a whole tile


def deferred_sum(a: TileValue, b: TileValue, sign: int) -> TileValue | None:
    """a + sign * b with deferred affine terms but not `exact`, where a or b is an affine tile; else None."""
    if a.affine_slope is not None and b.affine_slope is not None:
        return TileValue(
            TILE,
            a.value + sign * b.value,
            offset=a.offset + sign * b.offset,
            affine_slope=a.affine_slope + sign * b.affine_slope,
        )
    if a.affine_slope is not None and b.kind == SCALAR:
        return dataclasses.replace(a, offset=a.offset + sign * b.value)
    if a.affine_slope is not None and b.kind == ROW:
        return dataclasses.replace(a, value=a.value + sign * b.value)
    if b.affine_slope is not None and a.kind == SCALAR:
        return TileValue(TILE, sign * b.value, offset=a.value + sign * b.offset, affine_slope=sign * b.affine_slope)
    if b.affine_slope is not None and a.kind == ROW:
        return TileValue(TILE, a.value + sign * b.value, offset=sign * b.offset, affine_slope=sign * b.affine_slope)
    if a.affine_slope is not None and b.kind == TILE and sign == 1:
        a, b = b, a
    if b.affine_slope is not None and a.kind == TILE and a.affine_slope is None:
        return dataclasses.replace(
            a, row_term=sign * b.value, offset=sign * b.offset, column_slope=sign * b.affine_slope
        )
    return None
