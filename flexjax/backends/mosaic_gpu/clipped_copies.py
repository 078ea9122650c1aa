"""Copies by TMA of swizzled tiles from an array whose number of rows 8 does not divide, which Pallas refuses.

WGMMA reads a tile in pieces of 8 rows and 128 bytes, and the pieces of 8 rows lie side by side (SwizzledTiles). A copy of [rows, D] into
such a tile sees the array as [S / 8, D / 64, 8, 64], so that 8 must divide S: Pallas raises an error otherwise, and an array of another
length would have to be copied to a longer one before the kernel. `clip_rows` replaces the copies of one kernel:

    the tile ends in the first S / 8 * 8 rows   one copy, of the array without its last S % 8 rows
    it reaches past them                        rows / 8 copies, of 8 rows each, of the array as [D / 64, S, 64]: the order in memory
                                                is that of one piece of 8 rows, and rows are not divided

TMA writes zeros for rows past S and counts their bytes, so either way the barrier expects the bytes of the whole tile. Only the last
tile of a head reaches past the last full eight rows, so that few tiles have eight to sixteen copies.

Nothing here is for the simulator, which has arrays of whole tiles. Stores are not replaced.
"""

import typing

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import launch_context
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from flexjax.backends.mosaic_gpu import decode_tiles

PIECE_ROWS = 8
"""Rows of a piece of a swizzled tile."""


def clip_rows(interpret: bool) -> None:
    """Lets all copies to shared memory that are traced after this call in the same kernel read arrays of any number of rows, where
    decode_tiles.CLIPS_ROWS says so. A kernel calls it once, before its warpgroups part. Nothing in the simulator.

    It changes the launch context of this one kernel, through which Pallas emits its copies while the kernel is lowered; no instruction is
    emitted here.
    """
    if interpret or not decode_tiles.CLIPS_ROWS:
        return

    def replace(context: typing.Any) -> None:
        """Puts `_ClippedCopy` in the place of the context's own copy."""
        context.async_copy = _ClippedCopy(context.async_copy)

    plgpu.inline_mgpu(arg_types=(), return_type=None)(replace)()


class _ClippedCopy:
    """`LaunchContext.async_copy` for arrays of any number of rows.

    copy   the method of the launch context
    """

    def __init__(self, copy: typing.Callable[..., None]) -> None:
        self.copy = copy

    def __call__(self, **given: typing.Any) -> None:
        """Emits the copies of one tile, by the table at the top of this file; whatever is no copy of rows in swizzled pieces from such an
        array is emitted unchanged.

        given   the arguments of the method; a copy to shared memory comes from Pallas, which has already told the barrier how many bytes
                to expect (`arrive` is False)
        """
        transforms = given.get("gmem_transform", ())
        if given.get("barrier") is None or len(transforms) != 1 or not isinstance(transforms[0], mgpu.TileTransform):
            self.copy(**given)
            return
        (tiling,) = transforms
        shape = ir.MemRefType(given["src_ref"].type).shape
        starts, sizes, squeezed = mgpu_utils.parse_indices(given["gmem_slice"], shape, check_oob=False)
        axes = [axis for axis, one in enumerate(squeezed) if not one]
        if len(axes) != 2 or tiling.tiling[0] != PIECE_ROWS or shape[axes[0]] % PIECE_ROWS == 0:
            self.copy(**given)
            return
        assert given["arrive"] is False
        axis = axes[0]
        rows, whole = sizes[axis], shape[axis] // PIECE_ROWS * PIECE_ROWS
        number = lambda n: mgpu.c(n, ir.IndexType.get())
        start: typing.Any = (
            starts[axis] if isinstance(starts[axis], ir.Value) else number(typing.cast(int, starts[axis]))
        )

        def at_once() -> None:
            """One copy of the array without its last rows."""
            without = mgpu.TileTransform(tiling.tiling, rounding=launch_context.Rounding.DOWN)
            self.copy(**{**given, "gmem_transform": (without,)})

        def by_pieces() -> None:
            """A copy for each 8 rows of the tile, in a loop."""
            columns = mgpu.TileTransform(tiling.tiling[1:]), mgpu.TransposeTransform((1, 0, 2))
            loop = scf.ForOp(number(0), number(rows // PIECE_ROWS), number(1))
            with ir.InsertionPoint(loop.body):
                first = arith.addi(start, arith.muli(loop.induction_variable, number(PIECE_ROWS)))
                index = [s if one else mgpu.ds(s, size) for s, size, one in zip(starts, sizes, squeezed, strict=True)]
                index[axis] = mgpu.ds(first, PIECE_ROWS)
                piece = mgpu.memref_slice(given["dst_ref"], loop.induction_variable)
                self.copy(**{**given, "dst_ref": piece, "gmem_slice": tuple(index), "gmem_transform": columns})
                scf.yield_([])

        if whole < rows:
            by_pieces()
            return
        inside = arith.cmpi(arith.CmpIPredicate.sle, start, number(whole - rows))
        branch = scf.IfOp(inside, has_else=True)
        for region, emit in zip(branch.regions, (at_once, by_pieces), strict=True):
            with ir.InsertionPoint(region.blocks[0]):
                emit()
                scf.yield_([])
