"""What the consumers of all decode kernels share: programs at packed rows, and what is hidden in a key tile."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.mosaic_gpu.decode.hopper_tiles import ROWS
from flexjax.backends.mosaic_gpu.decode.items import DecodeItem
from flexjax.backends.mosaic_gpu.decode.scales import scales_of_tile
from flexjax.backends.mosaic_gpu.decode.setup import DecodeInputs, DecodeOutputs, DecodeSetup
from flexjax.backends.mosaic_gpu.forward.online_softmax import Rescale, State
from flexjax.backends.mosaic_gpu.forward.rows import Programs, program_at_rows
from flexjax.backends.mosaic_gpu.forward.tile_scores import scores_of
from flexjax.backends.mosaic_gpu.machine import registers, thread_tiles
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32
from flexjax.backends.mosaic_gpu.programs.tile_origin import Place
from flexjax.backends.mosaic_gpu.programs.tile_programs import TileProgram
from flexjax.backends.mosaic_gpu.programs.tile_values import Scaled
from flexjax.ir.program import Program

f32 = np.float32


@dataclasses.dataclass(frozen=True)
class ItemConsumer:
    """A warpgroup that computes work items."""

    setup: DecodeSetup
    inputs: DecodeInputs[Ref]
    outputs: DecodeOutputs[Ref]

    def at_rows(self, program: Program | None, refs: tuple[Ref, ...], item: DecodeItem) -> TileProgram | None:
        """A mod for packed rows (ir/fold_heads.py) at the rows of the item, on [ROWS, block_kv]."""
        tile, overhangs = self.setup.tile, self.setup.items.tiles_may_overhang
        shape, place = (ROWS, tile.block_kv), Place(item.b, item.kv_head)
        return program_at_rows(program, refs, shape, place, i32(0), overhangs=overhangs, used_rows=tile.used_rows)

    def scales(self, item: DecodeItem, start: Scalar) -> tuple[list[Scalar], list[Scalar]]:
        """(scales of keys, of values) of a key tile: scalars, one for each part or for all; [] if not quantised."""
        if self.inputs.scales is None:
            return [], []
        key, value = (scales_of_tile(self.setup, scale, item, start) for scale in self.inputs.scales)
        return key, value

    def softmax(
        self, s: jax.Array, programs: Programs, state: State, number: Scalar, start: Scalar, end: Scalar
    ) -> tuple[jax.Array, Rescale, State]:
        """`Softmax.step` of a key tile's products, with the sums of expectations; the last three as `masked` has."""
        softmax, before = self.setup.softmax, state
        plan, slack = self.setup.plan, 0.0 if self.setup.plan.weighted else None
        scores = scores_of(programs.score, s, plan.scale, softmax.takes_whole_scores, slack)
        p, rescale, state = softmax.step(self.masked(scores, programs.mask, number, start, end), before)
        if softmax.functions:
            masked = programs.mask is not None or self.setup.items.has_limits
            state = state._replace(sums=softmax.sums_after(p, scores.other_results, before, rescale, masked))
        return p, rescale, state

    def statistics(self, state: State, programs: Programs) -> tuple[jax.Array, ...]:
        """What DecodeOutputs has of the rows beside out, each [ROWS], after the last step."""
        softmax = self.setup.softmax
        return *softmax.finish(state, programs.row_term(softmax)), *map(thread_tiles.sum_lanes, state.sums)

    def masked(self, scores: Scaled, mask: TileProgram | None, number: Scalar, start: Scalar, end: Scalar) -> Scaled:
        """The scores after score_mod, hidden where mask_mod hides them, and at keys from `end` on.

        `start` is the first key in the slot of key tile `number`.
        """
        items, keys = self.setup.items, self.setup.tile.block_kv
        s = scores.tile
        if mask is not None:
            s = jnp.where(mask.tile()[0], s, f32(self.setup.softmax.hidden))
        if items.has_limits:
            column = registers.column_iota(keys)
            inside = column < end - start
            # a last tile that begins earlier (`DecodeItems.start`) has keys of the tile before it
            if items.stored_keys % keys and items.stored_keys > keys:
                inside = inside & (column >= number * keys - start)
            s = jnp.where(registers.broadcast_vector(inside, "column", s.shape), s, f32(self.setup.softmax.hidden))
        return scores._replace(tile=s)
