"""What the consumers of all decode kernels share: programs at the packed rows of a work item, and what is hidden in a key tile.

A kernel multiplies (by WGMMA: decode_sm90_consumer.py; by mma.sync: decode_sm80_consumer.py) and decides when; `ItemConsumer` has what
happens to the scores between the products of a step.
"""

import dataclasses
import math
import typing

import jax.numpy as jnp
import numpy as np

from flexjax.backends.mosaic_gpu import registers
from flexjax.backends.mosaic_gpu.decode_items import DecodeItem
from flexjax.backends.mosaic_gpu.decode_scales import scales_of_tile
from flexjax.backends.mosaic_gpu.decode_setup import DecodeInputs, DecodeOutputs, DecodeSetup
from flexjax.backends.mosaic_gpu.decode_tiles import ROWS
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32
from flexjax.backends.mosaic_gpu.tile_origin import Place
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.backends.mosaic_gpu.tile_values import Scaled
from flexjax.ir.program import Program

f32 = np.float32


class Programs(typing.NamedTuple):
    """The programs of score_mod and mask_mod at the rows of one work item; None for those that the plan lacks."""

    score: TileProgram | None
    mask: TileProgram | None

    def at_columns(self, start: Scalar) -> "Programs":
        """The programs with the column vectors over the keys of the tile computed here (`TileProgram.pin`), for the tile whose first key is
        `start`; None stays None.
        """
        return Programs(*(None if p is None else p.at_columns(start).pin() for p in self))


@dataclasses.dataclass(frozen=True)
class ItemConsumer:
    """A warpgroup that computes work items.

    setup             what is known before the kernel is traced
    inputs, outputs   Refs to operands and results in global memory
    """

    setup: DecodeSetup
    inputs: DecodeInputs[Ref]
    outputs: DecodeOutputs[Ref]

    def at_rows(self, program: Program | None, refs: tuple[Ref, ...], item: DecodeItem) -> TileProgram | None:
        """A program of score_mod or mask_mod with its scalars and row vectors computed for the packed rows of a work item, on tiles [ROWS,
        block_kv]; None if `program` is None.

        program   for packed rows (ir/fold_heads.py): its h is the key head, its q the packed row
        refs      its captured arrays, with the tables of an origin after them
        item      whose batch entry and key head are read
        """
        if program is None:
            return None
        setup = self.setup
        return TileProgram(
            program,
            refs,
            (ROWS, setup.tile.block_kv),
            Place(item.b, item.kv_head),
            overhangs=setup.items.tiles_may_overhang,
            used_rows=setup.tile.used_rows,
            interpret=setup.interpret,
        ).at_rows(i32(0))

    def scales(self, item: DecodeItem, start: Scalar) -> tuple[list[Scalar], list[Scalar]]:
        """(scales of keys, scales of values) of a key tile of a quantised cache: two lists of float32 scalars, one for each of the tile's
        parts or one for the whole tile. Scores are multiplied by the first, weights by the second. Both are empty if the cache is not
        quantised.

        item    whose batch entry and key head are read
        start   first key of the tile
        """
        if self.inputs.scales is None:
            return [], []
        key, value = (scales_of_tile(self.setup, scale, item, start) for scale in self.inputs.scales)
        return key, value

    def masked(self, scores: Scaled, mask: TileProgram | None, number: Scalar, start: Scalar, end: Scalar) -> Scaled:
        """The scores with -inf where mask_mod hides them, at keys from `end` on, and, in a last tile that begins earlier
        (`DecodeItems.start`), at keys that belong to the tile before it. Of `scores` the field `tile` changes alone.

        scores   of the tile, after score_mod
        mask     at the rows and columns of the tile; None without a mask_mod
        number   of the key tile
        start    number of the first key in its slot
        end      `DecodeItem.end` of the work item
        """
        items, keys = self.setup.items, self.setup.tile.block_kv
        s = scores.tile
        if mask is not None:
            s = jnp.where(mask.tile()[0], s, f32(-math.inf))
        if items.has_limits:
            column = registers.column_iota(keys)
            inside = column < end - start
            if items.stored_keys % keys and items.stored_keys > keys:
                inside = inside & (column >= number * keys - start)
            s = jnp.where(registers.broadcast_vector(inside, "column", s.shape), s, f32(-math.inf))
        return scores._replace(tile=s)
