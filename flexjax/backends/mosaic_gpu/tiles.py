"""Tile sizes of the Hopper kernels: the shared-memory model, what fits, and which is chosen."""

import dataclasses

from flexjax.analysis.patterns import divides_tiles
from flexjax.backends.mosaic_gpu import staging
from flexjax.backends.mosaic_gpu.bounded_scores import fixed_reference
from flexjax.plan.kernel_plan import KernelPlan

SHARED_MEMORY = 227 * 1024
BARRIERS = 1024  # and alignment
REFERENCE_SMS = 132
"""The number of SMs that the choices assume on every GPU: that of an H100 or H200."""
"""SMs that heuristics count with, those of an H100 SXM or H200: a kernel and its tile follow from the plan alone, so that every GPU
gives the same bits."""
NAMED_BARRIERS = 16


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """One configuration of the forward kernel.

    groups             computing warpgroups, `rows` queries each
    block_kv           keys of a tile
    stages, value_stages  slots of the key and of the value ring
    query_slots        2: the queries of the next tile are copied while this one is at work
    turns              the computing warpgroups alternate in issuing products
    overlap            softmax of a step runs during P V of the step before
    slack              rescale the output only once a maximum has grown by a factor of 2^8
    persistent         a program takes tile after tile of queries: its share of all, the longest first
    queue              the same with the heads in turn and tiles handed out one by one (work_queue.py)
    staged_slots       tiles of a captured array that wait in shared memory (staging.py), of staged_bytes an element
    reverse            keys of tiles without a mask are walked from the last to the first
    early              the keys of a step are waited for during the products of the step before
    polynomials        how many of eight exponentials are multiplied out (exponential.py)
    head_dim, value_dim  as padded for the matrix instructions
    programs           CTAs of the grid where `persistent` or `queue`: as many as the GPU has SMs
    """

    groups: int
    rows: int
    block_kv: int
    stages: int
    value_stages: int
    head_dim: int
    value_dim: int
    query_slots: int = 1
    out_slots: int = 2
    turns: bool = True
    overlap: bool = True
    slack: bool = True
    persistent: bool = True
    queue: bool = False
    staged_slots: int = 0
    staged_bytes: int = 0
    polynomials: int = 0
    reverse: bool = False
    early: bool = False
    programs: int = REFERENCE_SMS

    @property
    def block_q(self) -> int:
        return self.groups * self.rows

    @property
    def out_columns(self) -> int:
        return 64 if self.value_dim % 64 == 0 else self.value_dim

    @property
    def compute_registers(self) -> int:
        return {2: 240, 3: 160}[self.groups]

    @property
    def copy_registers(self) -> int:
        return {2: 24, 3: 32}[self.groups]

    @property
    def shared_bytes(self) -> int:
        queries = self.query_slots * self.block_q * self.head_dim
        ring = self.block_kv * (self.stages * self.head_dim + self.value_stages * self.value_dim)
        out = self.block_q * self.out_slots * self.out_columns
        box = 64 * self.query_slots if self.queue else 0
        staged = self.staged_slots * self.block_q * self.block_kv * self.staged_bytes
        return 2 * (queries + ring + out) + staged + box + BARRIERS

    @property
    def first_named_barrier(self) -> int:
        """Lower ones belong to the compiler: one for the block, one a warpgroup."""
        return self.groups + 2

    @property
    def fits(self) -> bool:
        named = self.first_named_barrier + 3 + self.stages + self.value_stages + self.query_slots + self.staged_slots
        ahead = 1 + self.early  # steps whose keys are held at once
        return self.shared_bytes <= SHARED_MEMORY and named <= NAMED_BARRIERS and self.stages >= ahead


def padded_dim(dim: int) -> int:
    """Head dim as the matrix instructions take it, in elements of two bytes."""
    return max(16, -(-dim // 16) * 16)


# (key slots, value slots, query slots), the best first, by the larger head dim; from measurements, see NOTES.md.
RINGS = {
    64: ((2, 2, 2), (4, 4, 1), (3, 3, 2), (2, 2, 1)),
    128: ((2, 2, 2), (3, 2, 1), (3, 3, 1), (4, 4, 1), (2, 2, 1)),
    256: ((2, 2, 1), (3, 2, 1)),
}
GROUPS = (2, 1, 3)
"""Numbers of computing warpgroups, the best first; three come first where `_three_are_better`."""
THREE_GROUPS = 1.12
"""Speed of three groups against two at head dims up to 64, where both fill the device; from measurements, see NOTES.md."""


def _manner(plan: KernelPlan, size: int, groups: int) -> dict[str, bool]:
    """How to run, by the larger head dim and whether there is a block mask; from measurements, see NOTES.md."""
    manner = {"persistent": False, "queue": True}
    if size == 64:
        beside = groups == 3 and plan.mask is None and plan.dropout is None
        return {**manner, "overlap": beside, "slack": beside, "turns": groups == 2, "early": beside}
    fixed = fixed_reference(plan) is not None  # twice as many exponentials
    turns = groups == 2 and size != 256 and plan.blocks is not None and not fixed
    return {**manner, "turns": turns, "early": not fixed, "reverse": plan.score is not None and not fixed}


def _busy(plan: KernelPlan, rows: int) -> float:
    """The part of the time of REFERENCE_SMS that goes to queries, with tiles of so many: the rest are past the end, or idle."""
    tiles = -(-plan.q_len // rows)
    items = plan.batch * plan.q_heads * tiles
    rounds = -(-items // REFERENCE_SMS)
    return items / max(1, rounds * REFERENCE_SMS) * plan.q_len / max(1, rows * tiles)


def _three_are_better(plan: KernelPlan, size: int, staged_bytes: int) -> bool:
    """Not where anything is masked or dropped: a third group leaves too few registers for a second loop, and they spill."""
    if size != 64 or staged_bytes or plan.mask is not None or plan.dropout is not None or plan.kv_len % 128:
        return False
    return THREE_GROUPS * _busy(plan, 192) > _busy(plan, 128)


def _size(head_dim: int, value_dim: int) -> int:
    return next(n for n in RINGS if max(head_dim, value_dim) <= n)


def _staged(tile: ForwardTile, staged_bytes: int) -> list[ForwardTile]:
    """The tile with as many staged tiles as fit, then without; nothing where it does not fit."""
    slots = (2, 1, 0) if staged_bytes else (0,)
    more = [dataclasses.replace(tile, staged_slots=n, staged_bytes=staged_bytes) for n in slots]
    fit = [t for t in more if t.fits]
    return [t for t in fit if t is fit[0] or t.staged_slots == 0]


def forward_tile(plan: KernelPlan) -> ForwardTile:
    return forward_candidates(plan)[0]


def forward_candidates(plan: KernelPlan) -> tuple[ForwardTile, ...]:
    """Configurations that fit, the expected best first; empty where the block mask or the options allow none."""
    head_dim, value_dim = padded_dim(plan.head_dim + plan.extra_dim), padded_dim(plan.value_dim)
    block_q = plan.blocks.block_q if plan.blocks is not None else 1 << 30
    block_kv = plan.blocks.block_kv if plan.blocks is not None else 1 << 30
    size = _size(head_dim, value_dim)
    wide = size == 256
    divides = divides_tiles(plan.score) or divides_tiles(plan.mask)  # takes the registers of the second half
    staged_bytes = staging.item_size(plan)
    found: list[ForwardTile] = []
    order = (3, 2, 1) if _three_are_better(plan, size, staged_bytes) else GROUPS
    for groups in order:
        if plan.blocks is not None and block_q % (64 * groups):
            continue
        if plan.options.block_q is not None and plan.options.block_q != 64 * groups:
            continue
        for keys in (64, 128) if wide or divides else (128, 64):
            if plan.blocks is not None and block_kv % keys:
                continue
            if plan.options.block_kv is not None and plan.options.block_kv != keys:
                continue
            for stages, value_stages, slots in RINGS[size]:
                if plan.options.num_stages is not None and plan.options.num_stages != stages:
                    continue
                ring = (stages, value_stages, head_dim, value_dim, 1 if groups == 3 else slots)
                tile = dataclasses.replace(ForwardTile(groups, 64, keys, *ring), **_manner(plan, size, groups))
                found += _staged(tile, staged_bytes)
    # of as many queries: a tile of which an array is staged before any of which it is not
    found.sort(key=lambda t: (order.index(t.groups), staged_bytes > 0 and t.staged_slots == 0))
    if plan.q_len <= 64 and plan.options.block_q is None:
        found.sort(key=lambda t: t.groups != 1)
    return tuple(dict.fromkeys(found))
