"""What the producer and the consumers of the decode kernel share: operands, results, and all that is known before the kernel is
traced."""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu.decode_items import DecodeItems, Work
from flexjax.backends.mosaic_gpu.decode_tiles import ROWS, DecodeTile
from flexjax.backends.mosaic_gpu.online_softmax import OnlineSoftmax
from flexjax.backends.mosaic_gpu.shared_memory import Part
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan


class DecodeInputs(typing.NamedTuple, typing.Generic[Part]):
    """Operands in global memory, head dims padded.

    query         [B, M, R, D], R packed rows: `tile.stored_rows`, in the simulator ROWS; those past `used_rows` are zeros
    key, value    [B, S, M, D or E] or [B, M, S, D or E] by the layout of the plan, S as in the call, in
                  the simulator padded; in pages [P, page, M, D or E]
    work          what the work items are read from
    score, mask   captured arrays of the two programs, then the tables of an origin
    pages         [B, pages of a batch entry] int32; None where keys are contiguous
    scales        (of keys, of values), float32 [M] or [B, pages of a batch entry, M], of a quantised cache, whose keys and values are the
                  bytes of their numbers as int8; None for another cache
    """

    query: Part
    key: Part
    value: Part
    work: Work[Part]
    score: tuple[Part, ...]
    mask: tuple[Part, ...]
    pages: Part | None
    scales: tuple[Part, Part] | None


class DecodeOutputs(typing.NamedTuple, typing.Generic[Part]):
    """Partial results of the chunks, float32; those of chunks without a work item are undefined. R is `tile.used_rows`, E padded.

    out     [B, M, chunks, R, E], sums of P V relative to the reference of their row
    stats   [B, M, chunks, 2, R], references (-inf where nothing is visible) and sums of exponentials relative to them
    """

    out: Part
    stats: Part


@dataclasses.dataclass(frozen=True)
class DecodeSetup:
    """The static part of a decode kernel.

    plan           of the call; without its block mask where the visible keys of each batch entry are an interval (decode_intervals.py)
    tile           the kernel's configuration
    score, mask    programs of packed rows (ir/fold_heads.py); None for those that the plan lacks
    lengths        whether batch entries have lengths of their own, or intervals of visible keys
    page           keys of a page of the cache; 0: contiguous
    stored_pages   number of pages of the cache
    reference      static softmax reference (static_reference.py); None: the running maximum
    large_scores   scores may be too large to scale before the maximum is subtracted
    """

    plan: KernelPlan
    tile: DecodeTile
    score: Program | None
    mask: Program | None
    lengths: bool
    page: int
    stored_pages: int
    reference: float | None
    large_scores: bool

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs in the simulator."""
        return self.plan.options.interpret

    @property
    def items(self) -> DecodeItems:
        """The work items: which chunks of keys CTAs sum."""
        return DecodeItems(self.plan, self.tile, self.lengths)

    @property
    def softmax(self) -> OnlineSoftmax:
        """The online softmax of a consumer's tile, [ROWS, block_kv]; without polynomials, and its references need not be integers. The
        merge of the chunks uses it too, for the unit of references.
        """
        return OnlineSoftmax(
            shape=(ROWS, self.tile.block_kv),
            lazy_rescale=self.tile.lazy_rescale,
            reference=self.reference,
            polynomials=0,
            interpret=self.interpret,
            large_scores=self.large_scores,
            program=self.score,
        )
