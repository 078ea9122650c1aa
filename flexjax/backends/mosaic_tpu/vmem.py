"""What a tile costs in VMEM on each chip, and the tiles that a plan gets.

The compiler lets a kernel use `vmem_limit` bytes if asked. The model counts, per tile: input and output blocks twice
(they are double buffered), scratch once, and the score-sized float32 temporaries that are alive together. It is meant to be
a little high; tests compile the defaults for every chip.
"""

import dataclasses
import math

from flexjax.backends.mosaic_tpu import tile_programs
from flexjax.backends.mosaic_tpu.tile_programs import LANES
from flexjax.backends.target import Target
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Chip:
    """Memory of one core that a kernel may ask for, and how much of that tiles are planned into."""

    name: str
    vmem_limit: int

    @property
    def budget(self) -> int:
        return int(self.vmem_limit * 0.75)


CHIPS = {
    "v4": Chip("v4", 16 * MIB),
    "v5e": Chip("v5e", 100 * MIB),
    "v5p": Chip("v5p", 56 * MIB),
    "v6e": Chip("v6e", 100 * MIB),
    "tpu7x": Chip("tpu7x", 56 * MIB),
}
UNKNOWN = Chip("unknown", 56 * MIB)
"""Where nothing is known (the simulator): what every chip but v4 has."""

CHIP_OF_KIND = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7": "tpu7x",
    "TPU7x": "tpu7x",
}
"""The names in CHIPS of jax's device kinds."""


def chip_of(target: Target | None) -> Chip:
    """The chip that is lowered for; without a target, the one that takes the most."""
    if target is None:
        return max(CHIPS.values(), key=lambda chip: chip.vmem_limit)
    return CHIPS.get(CHIP_OF_KIND.get(target.kind or "", ""), UNKNOWN)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile of queries and keys, and the number of keys (forward, dq) or queries (dkv) worked on at a time."""

    q: int
    kv: int
    part: int


class NoTile(Exception):
    """No tile suits; the message is a clause."""


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def fit(wanted: int, length: int, block: int | None, quantum: int) -> int:
    """A tile near `wanted`: a multiple of `quantum` (or the whole length), commensurable with the mask's blocks."""
    whole = length if block is None or length <= block else _up(length, block)
    if whole <= max(wanted, quantum):
        return _single(length, block, quantum)
    if block is None:
        return max(quantum, wanted // quantum * quantum)
    step = math.lcm(block, quantum)
    if step <= max(wanted, quantum):
        return max(step, wanted // step * step)
    for size in range(wanted // quantum * quantum, 0, -quantum):
        if block % size == 0:
            return size
    if step <= 2048:
        return step
    raise NoTile(f"blocks of {block} have no common tile with {quantum} lanes")


def _single(length: int, block: int | None, quantum: int) -> int:
    """One tile for the whole length: rounded up to the quantum, and to whole blocks where the mask has several."""
    if block is None or length <= block:
        return _up(length, quantum) if length > quantum else length
    return _up(length, math.lcm(block, quantum))


def _sizes(plan: KernelPlan, wanted_q: int, wanted_kv: int) -> tuple[int, int]:
    blocks = plan.blocks
    q = fit(wanted_q, plan.q_len, blocks.block_q if blocks else None, LANES)
    kv = fit(wanted_kv, plan.kv_len, blocks.block_kv if blocks else None, LANES)
    if blocks and kv > 32 * blocks.block_kv:  # the bit sets hold 32 blocks of keys
        kv = 32 * blocks.block_kv
        if kv % LANES:
            raise NoTile(f"blocks of {blocks.block_kv} keys are too small for the bit sets of a tile")
    return q, kv


def feed_bytes(program: Program | None, plan: KernelPlan, q: int, kv: int) -> int:
    """VMEM of one copy of a program's operands for a tile."""
    if program is None:
        return 0
    parts = tile_programs.split(program, plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
    total = 0
    for feed in parts.feeds:
        if feed.place == tile_programs.TILE:
            total += q * kv * 4
        elif feed.place == tile_programs.DELTA:
            total += 8 * (q + kv + LANES) * 4
        elif feed.place != tile_programs.UNIFORM:
            total += 8 * max(q, kv) * 4
    return total + sum(8 * _up(tile_programs.table_size(program, load), LANES) * 4 for load in parts.gathers)


def temporaries(plan: KernelPlan, score: Program | None) -> int:
    """Score-sized float32 arrays alive together in a part of a tile."""
    count = 4
    for program in (score, plan.mask, plan.dropout):
        if program is not None:
            parts = tile_programs.split(program, plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
            count += 2 + min(6, len(parts.steps) // 4) + len(parts.of_place(tile_programs.DELTA))
    return count


def forward_bytes(plan: KernelPlan, tiles: Tiles) -> int:
    item = 4 if plan.dtype == "float32" else 2
    dim, value_dim = _up(plan.head_dim + plan.extra_dim, LANES), _up(plan.value_dim, LANES)
    blocks = tiles.q * dim + tiles.kv * (dim + value_dim) + tiles.q * value_dim
    fed = sum(feed_bytes(p, plan, tiles.q, tiles.kv) for p in (plan.score, plan.mask, plan.dropout))
    scratch = tiles.q * (2 * LANES + value_dim) * 4
    work = tiles.q * min(tiles.part, tiles.kv) * 4 * temporaries(plan, plan.score) + 2 * tiles.q * value_dim * 4
    return 2 * (blocks * item + fed + 3 * 8 * tiles.q * 4) + scratch + work


def backward_bytes(plan: KernelPlan, tiles: Tiles, score: Program | None) -> int:
    """The larger of the dq and the dkv kernel."""
    item = 4 if plan.dtype == "float32" else 2
    dim, value_dim = _up(plan.head_dim + plan.extra_dim, LANES), _up(plan.value_dim, LANES)
    blocks = (tiles.q + tiles.kv) * (dim + value_dim) + max(tiles.q * dim, tiles.kv * (dim + value_dim))
    fed = sum(feed_bytes(p, plan, tiles.q, tiles.kv) for p in (score, plan.mask, plan.dropout))
    scratch = max(tiles.q * dim, tiles.kv * (dim + value_dim)) * 4
    part = max(tiles.q * min(tiles.part, tiles.kv), tiles.kv * min(tiles.part, tiles.q))
    gradients = len(score.gradients) if score is not None else 0
    grads_out = gradients * (tiles.q * tiles.kv + 8 * (tiles.q + tiles.kv + LANES)) * 4
    work = part * 4 * (temporaries(plan, score) + 3) + max(tiles.q, tiles.kv) * (dim + value_dim) * 4
    return 2 * (blocks * item + fed + grads_out + 2 * 8 * tiles.q * 4) + scratch + work


def fuses(plan: KernelPlan, tiles: Tiles, score: Program | None, chip: Chip) -> bool:
    """Whether the sums of dq of a whole key head fit beside the dk/dv kernel."""
    item = 4 if plan.dtype == "float32" else 2
    heads = max(plan.kv_heads, plan.extra_heads) if plan.extra_dim else plan.kv_heads
    rows = plan.q_heads // heads * _up(plan.q_len, tiles.q)
    sums = rows * _up(plan.head_dim + plan.extra_dim, LANES) * (4 + 2 * item)
    return backward_bytes(plan, tiles, score) + sums <= chip.budget


Choice = tuple[int, int, int]
"""Queries, keys, part."""

FORWARD_CHOICES = (
    (1024, 1024, 512),
    (512, 1024, 512),
    (512, 512, 512),
    (256, 512, 512),
    (256, 256, 256),
    (128, 128, 128),
)
BACKWARD_CHOICES = (
    (1024, 1024, 512),
    (512, 1024, 512),
    (512, 512, 512),
    (512, 512, 256),
    (256, 512, 256),
    (256, 256, 256),
    (128, 256, 128),
    (128, 128, 128),
)
DENSE_FORWARD, WIDE_DENSE_FORWARD, DENSE_BACKWARD = (512, 4096, 1024), (2048, 2048, 2048), (1024, 2048, 512)
"""Where every tile is visited and nothing is added: a larger one, for fewer grid steps; the second for WIDE_PARTS."""
WIDE_PARTS = frozenset({"v6e", "tpu7x"})
"""Chips whose matrix unit outruns the vector unit: the state of a row is touched once a tile, not once a part."""


def _first(plan: KernelPlan) -> int:
    """float32 products are six passes, unrolled: large tiles of them take the compiler minutes."""
    return 1 if plan.dtype == "float32" else 0


def _choices(plan: KernelPlan, dense: Choice, others: tuple[Choice, ...]) -> tuple[Choice, ...]:
    plain = plan.mask is None and plan.blocks is None and plan.score is None and plan.dropout is None
    return (dense, *others) if plain and plan.dtype == "bfloat16" else others


def forward_candidates(plan: KernelPlan, chip: Chip) -> list[Tiles]:
    """Tiles that fit, best first."""
    found: list[Tiles] = []
    options = plan.options
    dense = WIDE_DENSE_FORWARD if chip.name in WIDE_PARTS else DENSE_FORWARD
    for q, kv, part in _choices(plan, dense, FORWARD_CHOICES[_first(plan) :]):
        if chip.name in WIDE_PARTS and part == 512 and kv <= 1024:
            part = kv
        sizes = _sizes(plan, options.block_q or q, options.block_kv or kv)
        tiles = Tiles(*sizes, min(part, sizes[1]))
        if forward_bytes(plan, tiles) <= chip.budget and tiles not in found:
            found.append(tiles)
    return found


def backward_candidates(plan: KernelPlan, chip: Chip, score: Program | None) -> list[Tiles]:
    found: list[Tiles] = []
    options = plan.options
    for q, kv, part in _choices(plan, DENSE_BACKWARD, BACKWARD_CHOICES[2 * _first(plan) :]):
        sizes = _sizes(plan, options.block_q_bwd or q, options.block_kv_bwd or kv)
        tiles = Tiles(*sizes, min(part, *sizes))
        if backward_bytes(plan, tiles, score) <= chip.budget and tiles not in found:
            found.append(tiles)
    return found


def forward_tiles(plan: KernelPlan, chip: Chip) -> Tiles:
    found = forward_candidates(plan, chip)
    if not found:
        raise NoTile(f"no tile of it fits the {chip.vmem_limit // MIB} MiB of VMEM of {chip.name}")
    return found[0]


def backward_tiles(plan: KernelPlan, chip: Chip, score: Program | None) -> Tiles:
    found = backward_candidates(plan, chip, score)
    if not found:
        raise NoTile(f"no tile of its backward pass fits the {chip.vmem_limit // MIB} MiB of VMEM of {chip.name}")
    return found[0]
