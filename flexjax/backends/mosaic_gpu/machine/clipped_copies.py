"""Copies by TMA between swizzled tiles and an array whose number of rows 8 does not divide, which Pallas refuses.

WGMMA reads a tile in pieces of 8 rows and 128 bytes, and the pieces of 8 rows lie side by side (SwizzledTiles). A copy
of [rows, D] between such a tile and an array sees the array as [S / 8, D / 64, 8, 64], so that 8 must divide S: Pallas
raises an error otherwise. `clip_rows` replaces the copies of one kernel. The *whole rows* of the array are its first S
// 8 * 8. Row numbers are static, but for the first of a tile.

    one piece wide, at most MOST_ROWS   one copy, of the array as [D / 64, S, 64]: pieces are rows in order
    read, within the whole rows         one copy, of the whole rows
    read, reaching past them            its whole rows, then 8 rows of the array as [D / 64, S, 64], the order of one
                                        piece in memory, then zeros, which TMA reads past the end of the whole rows
      tiles at any multiple of 8 rows   rows / 8 copies of 8 rows each, of the array as [D / 64, S, 64]
    written                             one copy to the whole rows, and 8 rows as above for the rows after them

TMA reads zeros for rows past S and counts their bytes, so the barrier expects the bytes of the whole tile. TMA writes
no row past S; the copies of one tile are one group for `plgpu.wait_smem_to_gmem`. Nothing here is for the simulator.
"""

import typing

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import launch_context
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf

from flexjax.backends.mosaic_gpu.machine.kernel_parts import ptx
from flexjax.backends.mosaic_gpu.machine.simulator import device_op

PIECE_ROWS = 8  # rows of a piece of a swizzled tile
MOST_ROWS = 256  # the most rows of one copy by TMA


@device_op
def clip_rows(*, aligned: bool = False) -> None:
    """Lets all copies that are traced after this call in the kernel read and write arrays of any number of rows.

    A kernel calls it once, before its warpgroups part. Every tile must begin at a multiple of 8 rows, and with
    `aligned` every tile that is read at a multiple of its rows: it then takes at most three copies.
    """

    def replace(context: typing.Any) -> None:
        context.async_copy = _ClippedCopy(context.async_copy, aligned)

    plgpu.inline_mgpu(arg_types=(), return_type=None)(replace)()


class _ClippedCopy:
    """`LaunchContext.async_copy` for arrays of any number of rows."""

    def __init__(self, copy: typing.Callable[..., None], aligned: bool) -> None:
        self.copy = copy
        self.aligned = aligned

    def __call__(self, **given: typing.Any) -> None:
        """Emits the copies of one tile, by the table at the top of this file; other copies are emitted unchanged."""
        transforms = given.get("gmem_transform", ())
        if len(transforms) != 1 or not isinstance(transforms[0], mgpu.TileTransform):
            self.copy(**given)
            return
        (tiling,) = transforms
        stores = given.get("barrier") is None
        array, smem = ("dst_ref", "src_ref") if stores else ("src_ref", "dst_ref")
        shape = ir.MemRefType(given[array].type).shape
        starts, sizes, squeezed = mgpu_utils.parse_indices(given["gmem_slice"], shape, check_oob=False)
        axes = [axis for axis, one in enumerate(squeezed) if not one]
        if len(axes) != 2 or tiling.tiling[0] != PIECE_ROWS or shape[axes[0]] % PIECE_ROWS == 0:
            self.copy(**given)
            return
        assert stores or given["arrive"] is False
        row_axis, column_axis = axes
        rows, whole = sizes[row_axis], shape[row_axis] // PIECE_ROWS * PIECE_ROWS
        # The array as [S / 8, D / 64, 8, 64] without its last rows, and as [D / 64, S, 64].
        whole_rows = (mgpu.TileTransform(tiling.tiling, rounding=launch_context.Rounding.DOWN),)
        all_rows = mgpu.TileTransform(tiling.tiling[1:]), mgpu.TransposeTransform((1, 0, 2))
        if sizes[column_axis] == tiling.tiling[1] and rows <= MOST_ROWS:
            tile = mgpu_utils.memref_unsqueeze(mgpu_utils.memref_fold(given[smem], 0, 3), 0)
            self.copy(**{**given, smem: tile, "gmem_transform": all_rows})
            return
        i32 = ir.IntegerType.get_signless(32)
        number = lambda n: mgpu.c(n, ir.IndexType.get())
        as_value = lambda x: x if isinstance(x, ir.Value) else number(x)
        start = as_value(starts[row_axis])
        compare = lambda relation, n: arith.cmpi(relation, start, number(n))

        def part(view: tuple[typing.Any, ...], first: typing.Any, count: int, pieces: typing.Any) -> None:
            """One copy of `count` rows from `first` on to these pieces of 8 rows of the tile; does not end a group."""
            index = [s if one else mgpu.ds(s, size) for s, size, one in zip(starts, sizes, squeezed, strict=True)]
            index[row_axis] = mgpu.ds(as_value(first), count)
            changed = {"gmem_slice": tuple(index), "gmem_transform": view, "arrive": False}
            self.copy(**{**given, **changed, smem: mgpu.memref_slice(given[smem], pieces)})

        def each_piece() -> None:
            loop = scf.ForOp(number(0), number(rows // PIECE_ROWS), number(1))
            with ir.InsertionPoint(loop.body):
                first = arith.addi(start, arith.muli(loop.induction_variable, number(PIECE_ROWS)))
                part(all_rows, first, PIECE_ROWS, loop.induction_variable)
                scf.yield_([])

        def whole_then_last() -> None:
            """The copies of a tile that begins at a multiple of its rows and has the last rows of the array."""
            first, pieces = whole // rows * rows, rows // PIECE_ROWS
            last = (whole - first) // PIECE_ROWS  # the piece that has them
            if last:
                part(whole_rows, first, last * PIECE_ROWS, slice(0, last))
            part(all_rows, whole, PIECE_ROWS, last)
            if last + 1 < pieces:
                part(whole_rows, whole + PIECE_ROWS, (pieces - last - 1) * PIECE_ROWS, slice(last + 1, pieces))

        def last_piece() -> None:
            part(all_rows, whole, PIECE_ROWS, arith.divui(arith.subi(number(whole), start), number(PIECE_ROWS)))

        at_once = lambda: part(whole_rows, start, rows, slice(0, rows // PIECE_ROWS))
        relation = arith.CmpIPredicate
        if stores:
            if whole:
                at_once()
            reaches = compare(relation.sle, whole)
            if whole >= rows:
                reaches = arith.andi(reaches, compare(relation.sgt, whole - rows))
            _choose(reaches, last_piece)
            if given["arrive"]:
                nvvm.cp_async_bulk_commit_group()
        elif whole == 0 or (whole < rows and not self.aligned):
            each_piece()
        elif self.aligned:
            # If the compiler knew the number, it would write out a loop over tiles of which one takes this branch.
            last_tile = ptx("mov.b32 $0, $1;", mgpu.c(whole // rows * rows, i32), result=i32)
            same = arith.cmpi(relation.eq, start, arith.index_cast(ir.IndexType.get(), last_tile))
            _choose(same, whole_then_last, at_once)
        else:
            _choose(compare(relation.sle, whole - rows), at_once, each_piece)


def _choose(
    condition: ir.Value, then: typing.Callable[[], None], otherwise: typing.Callable[[], None] | None = None
) -> None:
    """Emits a branch on `condition`, an i1."""
    branch = scf.IfOp(condition, has_else=otherwise is not None)
    for region, emit in zip(branch.regions, (then, otherwise), strict=False):
        if emit is not None:
            with ir.InsertionPoint(region.blocks[0]):
                emit()
                scf.yield_([])
