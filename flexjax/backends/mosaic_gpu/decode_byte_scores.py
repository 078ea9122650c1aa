"""Scores of a key tile of bytes, whose rows are keys: what the decode kernels do between the products of decode_bytes.py.

Programs of score_mod and mask_mod, scales of pages, and what is hidden, on S^T [block_kv, columns]: keys are rows, packed queries columns.
The kernels are decode_sm90_byte_consumer.py on Hopper and decode_sm80_byte_consumer.py on mma.sync.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.mosaic_gpu import memory, registers
from flexjax.backends.mosaic_gpu.decode_consumer import ItemConsumer, Programs
from flexjax.backends.mosaic_gpu.decode_items import DecodeItem
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32
from flexjax.backends.mosaic_gpu.tile_origin import Place
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.backends.tile_math import LOG2E
from flexjax.ir.program import Program

f32 = np.float32


class ByteScores(ItemConsumer):
    """The scores of a consumer whose key and value slots hold swizzled bytes (`DecodeTile.transposed`)."""

    def at_item(self, program: Program | None, refs: tuple[Ref, ...], item: DecodeItem) -> TileProgram | None:
        """The TileProgram that evaluates a mod on the [block_kv, columns] tiles of an item, with only its scalars computed, those of the
        batch entry and the key head; None for None. `final_scores` computes vectors and tiles, tile by tile.

        program   score_mod or mask_mod for packed rows (ir/fold_heads.py): its h is the key head, its q the packed row
        refs      its captured arrays, with the tables of an origin after them
        item      whose batch entry and key head the program gets
        """
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
            interpret=setup.interpret,
        )

    def scaled(self, tile: jax.Array, scale: jax.Array | Scalar) -> jax.Array:
        """`tile`, [block_kv, columns], with each of its rows, which are keys, multiplied by the scale of that key: scores by the scales of
        keys, weights by those of values.

        scale   row vector [block_kv], or one scalar for all keys, of `row_scales`
        """
        return tile * (registers.broadcast_vector(scale, "row", tile.shape) if scale.ndim else scale)

    def row_scales(self, item: DecodeItem, start: Scalar) -> tuple[jax.Array, jax.Array]:
        """(scales of the keys, scales of the values) of a key tile of a quantised cache: row vectors [block_kv] float32 where each page has
        scales, scalars where all pages share them.

        item    the work item, whose batch entry and key head are read
        start   first key of the tile

        A key past the last page of the table, which `final_scores` hides, gets the scale of that page.
        """
        assert self.inputs.scales is not None
        setup, keys = self.setup, self.setup.tile.block_kv

        def found(scale: Ref) -> jax.Array:
            """The scales of the tile from those of keys or of values, `scale`: [M], or [B, pages of a batch entry, M], in global memory."""
            if len(scale.shape) == 1:
                return scale[item.kv_head]
            token = registers.row_iota(keys) + start
            page = jnp.minimum(lax.div(token, jnp.full_like(token, setup.page)), np.int32(scale.shape[1] - 1))
            at = (item.b, page, item.kv_head)
            return memory.gather(scale, at, (False, True, False), "row", (keys,), setup.interpret)

        key, value = map(found, self.inputs.scales)
        return key, value

    def final_scores(
        self, s: jax.Array, programs: Programs, item: DecodeItem, number: Scalar, start: Scalar
    ) -> jax.Array:
        """The scores after score_mod, [block_kv, columns] float32, as the softmax of a warp takes them: times log2(e), unless
        `large_scores`. They are -inf where mask_mod hides them, at keys from `item.end` on, and, in a last tile that begins earlier
        than its number says (`DecodeItems.start`), at keys that belong to the tile before it.

        s          K Q^T with the scales of keys, without the plan's scale, [block_kv, columns] float32
        programs   score_mod and mask_mod from `at_item`; their vectors are computed here
        item       the work item
        number     of the key tile
        start      first key in its slot
        """
        setup, keys = self.setup, self.setup.tile.block_kv
        score, mask = (None if p is None else p.at_rows(start).at_columns(i32(0)) for p in programs)
        if score is None:
            s = s * f32(setup.plan.scale * LOG2E)
        else:
            s = score.tile(s, setup.plan.scale)[0]
            s = s if setup.large_scores else s * f32(LOG2E)
        if mask is not None:
            s = jnp.where(mask.tile()[0], s, f32(-math.inf))
        if setup.items.has_limits:
            row = registers.row_iota(keys)
            inside = row < item.end - start
            if setup.items.stored_keys % keys and setup.items.stored_keys > keys:
                inside = inside & (row >= number * keys - start)
            s = jnp.where(registers.broadcast_vector(inside, "row", s.shape), s, f32(-math.inf))
        return s
