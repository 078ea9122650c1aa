"""What the producer and the consumers of the decode kernel share: operands, results, and what is static."""

import dataclasses
import functools
import typing

from flexjax.backends.mosaic_gpu.decode.hopper_tiles import ROWS, DecodeTile
from flexjax.backends.mosaic_gpu.decode.items import DecodeItems, Work
from flexjax.backends.mosaic_gpu.forward.online_softmax import Softmax, softmax_of
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan


class DecodeInputs(typing.NamedTuple, typing.Generic[Part]):
    """Operands in global memory, head dims padded."""

    query: Part  # [B, M, `tile.stored_rows`, D]; those past `used_rows` are zeros
    key: Part  # [B, S, M, D] or [B, M, S, D]; in pages [P, page, M, D]; of a quantised cache int8
    value: Part
    work: Work[Part]  # what the work items are read from
    score: tuple[Part, ...]  # captured arrays, then the tables of an origin
    mask: tuple[Part, ...]
    pages: Part | None  # [B, pages of a batch entry] int32
    # (of keys, of values), float32 [M] or [B, pages of a batch entry, M], of a quantised cache
    scales: tuple[Part, Part] | None


class DecodeOutputs(typing.NamedTuple, typing.Generic[Part]):
    """Partial results of the chunks, float32; those of chunks without a work item are undefined."""

    out: Part  # [B, M, chunks, `used_rows`, E], sums of P V relative to the references
    stats: Part  # [B, M, chunks, `tile.statistics`, `used_rows`], references and sums of exponentials, of expectations


@dataclasses.dataclass(frozen=True)
class DecodeSetup:
    """The static part of a decode kernel."""

    plan: KernelPlan  # without its block mask where the visible keys of each batch entry are an interval (intervals.py)
    tile: DecodeTile
    score: Program | None  # of packed rows (ir/fold_heads.py), as mask
    mask: Program | None
    lengths: bool  # whether batch entries have lengths of their own, or intervals of visible keys
    page: int  # keys of a page of the cache; 0: contiguous
    stored_pages: int  # number of pages of the cache

    @property
    def items(self) -> DecodeItems:
        return DecodeItems(self.plan, self.tile, self.lengths)

    @functools.cached_property
    def softmax(self) -> Softmax:
        """The softmax of a consumer's tile, [ROWS, block_kv], and of the merge of the chunks."""
        shape = (ROWS, self.tile.block_kv)
        return softmax_of(self.plan, shape, lazy_rescale=self.tile.lazy_rescale, score=self.score)
