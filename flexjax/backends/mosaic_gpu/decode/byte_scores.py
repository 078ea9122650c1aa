"""Scores of a key tile of bytes, whose rows are keys: what the decode kernels do between the products of bytes.py.

Programs of score_mod and mask_mod, scales of pages, and what is hidden, on S^T [block_kv, columns]: keys are rows,
packed queries columns. The kernels are hopper_byte_consumer.py on Hopper and mma_byte_consumer.py on mma.sync.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.mosaic_gpu.decode.consumer import ItemConsumer
from flexjax.backends.mosaic_gpu.decode.items import DecodeItem
from flexjax.backends.mosaic_gpu.forward.rows import Programs
from flexjax.backends.mosaic_gpu.machine import memory, registers
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32
from flexjax.backends.mosaic_gpu.programs.tile_origin import Place
from flexjax.backends.mosaic_gpu.programs.tile_programs import TileProgram
from flexjax.backends.tile_math import LOG2E
from flexjax.ir.program import Program

f32 = np.float32


class ByteScores(ItemConsumer):
    """The scores of a consumer whose key and value slots hold swizzled bytes (`DecodeTile.transposed`)."""

    def at_item(self, program: Program | None, refs: tuple[Ref, ...], item: DecodeItem) -> TileProgram | None:
        """The TileProgram of a mod for packed rows (ir/fold_heads.py), with only the scalars of the item computed."""
        if program is None:
            return None
        setup, tile = self.setup, self.setup.tile
        overhangs = setup.items.tiles_may_overhang or tile.columns != tile.used_rows
        return TileProgram(
            program,
            refs,
            (tile.block_kv, tile.columns),
            Place(item.b, item.kv_head),
            row_axis="kv",
            overhangs=overhangs,
        )

    def scaled(self, tile: jax.Array, scale: jax.Array | Scalar) -> jax.Array:
        """`tile`, [block_kv, columns], times the scale of each key, [block_kv], or one scalar for all keys."""
        return tile * (registers.broadcast_vector(scale, "row", tile.shape) if scale.ndim else scale)

    def row_scales(self, item: DecodeItem, start: Scalar) -> tuple[jax.Array, jax.Array]:
        """(scales of the keys, scales of the values) of a key tile of a quantised cache.

        They are row vectors [block_kv] float32 where each page has scales, scalars where all pages share them.
        """
        assert self.inputs.scales is not None
        setup, keys = self.setup, self.setup.tile.block_kv

        def found(scale: Ref) -> jax.Array:
            if len(scale.shape) == 1:
                return scale[item.kv_head]
            token = registers.row_iota(keys) + start
            # a key past the last page of the table, which `final_scores` hides, gets the scale of that page
            page = jnp.minimum(lax.div(token, jnp.full_like(token, setup.page)), np.int32(scale.shape[1] - 1))
            at = (item.b, page, item.kv_head)
            return memory.gather(scale, at, (False, True, False), "row", (keys,))

        key, value = map(found, self.inputs.scales)
        return key, value

    def final_scores(
        self, s: jax.Array, programs: Programs, item: DecodeItem, number: Scalar, start: Scalar
    ) -> jax.Array:
        """The scores after score_mod, [block_kv, columns] float32, as a warp's softmax takes them.

        `s` is K Q^T with the scales of keys, without that of the plan; `start`: first key in the slot of tile `number`.
        """
        setup, keys = self.setup, self.setup.tile.block_kv
        score, mask = (None if p is None else p.at_rows(start).at_columns(i32(0)) for p in programs[:2])
        if score is None:
            s = s * f32(setup.plan.scale * LOG2E)
        else:
            s = score.tile(s, setup.plan.scale)[0]
            # times log2(e), unless the softmax takes whole scores
            s = s if setup.softmax.takes_whole_scores else s * f32(LOG2E)
        if mask is not None:
            s = jnp.where(mask.tile()[0], s, f32(-math.inf))
        if setup.items.has_limits:
            row = registers.row_iota(keys)
            inside = row < item.end - start
            # a last tile that begins earlier than its number says (`DecodeItems.start`) has keys of the tile before it
            if setup.items.stored_keys % keys and setup.items.stored_keys > keys:
                inside = inside & (row >= number * keys - start)
            s = jnp.where(registers.broadcast_vector(inside, "row", s.shape), s, f32(-math.inf))
        return s
