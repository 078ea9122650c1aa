"""Chooses the tiles of a plan: a model of the VMEM that a tile takes, and the tiles to try on each chip.

The compiler lets a kernel use up to `Chip.vmem_limit` bytes. The model counts, per tile: input and output blocks twice,
because they are double buffered; scratch once; and the score-sized float32 temporaries that are alive together. It is
meant to be a little high; tests compile the default tiles for every chip. Sizes of tiles are in tokens, sizes of memory
in bytes. `score` is everywhere the program that the kernel runs: score_mod's in the forward pass, that of its
derivatives in the backward pass; None without score_mod.
"""

import dataclasses
import math

from flexjax.backends.mosaic_tpu import split_program
from flexjax.backends.mosaic_tpu.vector_ops import LANES
from flexjax.backends.target import Target
from flexjax.integers import round_up
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Chip:
    """A generation of TPUs."""

    name: str  # as in CHIPS, or "unknown"
    vmem_limit: int  # bytes of VMEM that a kernel may ask for

    @property
    def budget(self) -> int:
        """Bytes of VMEM that a tile may take by the model, which is not exact."""
        return int(self.vmem_limit * 0.75)


CHIPS = {
    "v4": Chip("v4", 16 * MIB),
    "v5e": Chip("v5e", 100 * MIB),
    "v5p": Chip("v5p", 56 * MIB),
    "v6e": Chip("v6e", 100 * MIB),
    "tpu7x": Chip("tpu7x", 56 * MIB),
}
# For the simulator and unknown chips: the least VMEM that any chip but v4 has.
UNKNOWN = Chip("unknown", 56 * MIB)

# From jax's device kind to the name in CHIPS.
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


def chip_of(target: Target | None) -> Chip:
    """Without a target, the chip with the most VMEM, which refuses the least."""
    if target is None:
        return max(CHIPS.values(), key=lambda chip: chip.vmem_limit)
    return CHIPS.get(CHIP_OF_KIND.get(target.kind or "", ""), UNKNOWN)


@dataclasses.dataclass(frozen=True)
class VmemTiles:
    """The sizes of a tile. The scores of one strip of it are computed at a time."""

    q: int
    kv: int
    strip: int  # columns: keys in the forward and dq kernels, queries in the dk/dv kernel


class NoTile(Exception):
    """No tile fits a plan; the message is the clause that says why."""


def tile_size(wanted: int, length: int, block: int | None, quantum: int) -> int:
    """The size of a tile along one dimension: the whole length if that is short, else the largest legal size up to
    `wanted`, else a larger one.

    wanted    the size to stay near
    block     size of the mask's blocks, None without a block mask

    Legal is a multiple of `quantum` that is a multiple or a divisor of `block`. NoTile: none up to 2048 is.
    """
    whole = length if block is None or length <= block else round_up(length, block)
    if whole <= max(wanted, quantum):
        return _whole_length(length, block, quantum)
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


def _whole_length(length: int, block: int | None, quantum: int) -> int:
    """The length, rounded up to whole mask blocks if there are several, and to `quantum` if it is longer."""
    if block is None or length <= block:
        return round_up(length, quantum) if length > quantum else length
    return round_up(length, math.lcm(block, quantum))


def _tile_sizes(plan: KernelPlan, wanted_q: int, wanted_kv: int) -> tuple[int, int]:
    """(queries, keys) of a legal tile near the wanted sizes, with at most 32 mask blocks of keys; raises NoTile."""
    blocks, origin = plan.blocks, plan.origin
    if origin is not None and origin.query_runs > 1:
        wanted_q = _dividing(origin.query_run, wanted_q)
    if origin is not None and origin.key_runs > 1:
        wanted_kv = _dividing(origin.key_run, wanted_kv)
    q = tile_size(wanted_q, plan.q_len, blocks.block_q if blocks else None, LANES)
    kv = tile_size(wanted_kv, plan.kv_len, blocks.block_kv if blocks else None, LANES)
    if blocks and kv > 32 * blocks.block_kv:  # a word of the bit sets holds 32 blocks of keys
        kv = 32 * blocks.block_kv
        if kv % LANES:
            raise NoTile(f"blocks of {blocks.block_kv} keys are too small for the bit sets of a tile")
    if origin is not None and not origin.tile_fits(q, kv):
        raise NoTile(f"no tile divides the runs of the origin, {origin.query_run} queries and {origin.key_run} keys")
    return q, kv


def _dividing(run: int, wanted: int) -> int:
    """The largest multiple of 128 (LANES) that divides the run and is at most `wanted`; raises NoTile."""
    found = [n for n in range(LANES, max(wanted, LANES) + 1, LANES) if run % n == 0]
    if not found:
        raise NoTile(f"the origin has several runs of {run} tokens, which is no multiple of {LANES}")
    return found[-1]


def hoisted_bytes(program: Program | None, plan: KernelPlan, q: int, kv: int) -> int:
    """Bytes of VMEM of one copy of a program's hoisted operands for a tile of q queries x kv keys."""
    if program is None:
        return 0
    split = split_program.split_for(program, plan)
    total = 0
    for value in split.hoisted:
        # Rows and columns take 8 sublanes each, and scalars are in SMEM.
        if value.axis_class == split_program.TILE:
            total += q * kv * 4
        elif value.axis_class == split_program.DELTA:
            total += 8 * (q + kv + LANES) * 4
        elif value.axis_class != split_program.UNIFORM:
            total += 8 * max(q, kv) * 4
    return total + sum(8 * round_up(split_program.table_size(program, load), LANES) * 4 for load in split.gathers)


def temporaries(plan: KernelPlan, score: Program | None) -> int:
    """An estimate of how many float32 arrays of the size of a strip's scores are alive together in a kernel."""
    count = 4
    for program in (score, plan.mask, plan.dropout):
        if program is not None:
            split = split_program.split_for(program, plan)
            count += 2 + min(6, len(split.steps) // 4) + len(split.hoisted_of(split_program.DELTA))
    return count


def forward_bytes(plan: KernelPlan, tiles: VmemTiles) -> int:
    """Bytes of VMEM that the forward kernel takes with these tiles, by the model."""
    item = 4 if plan.dtype == "float32" else 2
    dim, value_dim = round_up(plan.head_dim + plan.extra_dim, LANES), round_up(plan.value_dim, LANES)
    blocks = tiles.q * dim + tiles.kv * (dim + value_dim) + tiles.q * value_dim * (1 + plan.writes_rounding)
    hoisted = sum(hoisted_bytes(p, plan, tiles.q, tiles.kv) for p in (plan.score, plan.mask, plan.dropout))
    scratch = tiles.q * ((2 + plan.expectations) * LANES + value_dim) * 4
    work = tiles.q * min(tiles.strip, tiles.kv) * 4 * temporaries(plan, plan.score) + 2 * tiles.q * value_dim * 4
    return 2 * (blocks * item + hoisted + (3 + plan.expectations) * 8 * tiles.q * 4) + scratch + work


def backward_bytes(plan: KernelPlan, tiles: VmemTiles, score: Program | None) -> int:
    """Bytes of VMEM of the larger of the dq kernel and the dk/dv kernel (without dq), by the model."""
    item = 4 if plan.dtype == "float32" else 2
    dim, value_dim = round_up(plan.head_dim + plan.extra_dim, LANES), round_up(plan.value_dim, LANES)
    blocks = (tiles.q + tiles.kv) * (dim + value_dim) + max(tiles.q * dim, tiles.kv * (dim + value_dim))
    hoisted = sum(hoisted_bytes(p, plan, tiles.q, tiles.kv) for p in (score, plan.mask, plan.dropout))
    scratch = max(tiles.q * dim, tiles.kv * (dim + value_dim)) * 4
    part = max(tiles.q * min(tiles.strip, tiles.kv), tiles.kv * min(tiles.strip, tiles.q))
    gradients = len(score.gradients) if score is not None else 0
    grads_out = gradients * (tiles.q * tiles.kv + 8 * (tiles.q + tiles.kv + LANES)) * 4
    work = part * 4 * (temporaries(plan, score) + 3) + max(tiles.q, tiles.kv) * (dim + value_dim) * 4
    return 2 * (blocks * item + hoisted + grads_out + 2 * 8 * tiles.q * 4) + scratch + work


def dq_sums_fit(plan: KernelPlan, tiles: VmemTiles, score: Program | None, chip: Chip) -> bool:
    """Whether the dk/dv kernel can also hold the sums of dq of all queries of the query heads of one key head."""
    item = 4 if plan.dtype == "float32" else 2
    heads = max(plan.kv_heads, plan.extra_heads) if plan.extra_dim else plan.kv_heads
    rows = plan.q_heads // heads * round_up(plan.q_len, tiles.q)
    sums = rows * round_up(plan.head_dim + plan.extra_dim, LANES) * (4 + 2 * item)
    return backward_bytes(plan, tiles, score) + sums <= chip.budget


TileChoice = tuple[int, int, int]  # queries, keys and strip columns of a tile to try

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
# First choices where every tile is visited and no program runs: larger, for fewer grid steps.
DENSE_FORWARD, WHOLE_TILE_DENSE_FORWARD, DENSE_BACKWARD = (512, 4096, 1024), (2048, 2048, 2048), (1024, 2048, 512)
# For tiles of at most FEW_ROWS rows in bfloat16, a strip of the forward kernel has up to FEW_ROWS_STRIP columns,
# because what is done once for each strip then costs more than the scores.
FEW_ROWS, FEW_ROWS_STRIP = 64, 4096
# Chips whose MXU is fast beside the vector unit. A strip is the whole tile there in the forward kernel, because the row
# maximum and row sum are then updated once a tile.
WHOLE_TILE_CHIPS = frozenset({"v6e", "tpu7x"})


def _choices(plan: KernelPlan, dense: TileChoice, others: tuple[TileChoice, ...], large: int) -> tuple[TileChoice, ...]:
    """The tiles to try, best first; `dense` comes before `others` for bfloat16 without programs and blocks."""
    # A float32 product is six unrolled passes, and large tiles take the compiler minutes.
    if plan.dtype == "float32":
        return others[large:]
    no_program = plan.mask is None and plan.blocks is None and plan.score is None and plan.dropout is None
    return (dense, *others) if no_program and plan.dtype == "bfloat16" else others


def forward_candidates(plan: KernelPlan, chip: Chip) -> list[VmemTiles]:
    """Tiles of the forward kernel that fit the chip's VMEM by the model, best first; [] if none does.

    Raises NoTile if no tile suits the plan's mask blocks or the runs of its origin.
    """
    found: list[VmemTiles] = []
    options = plan.options
    whole_tile = chip.name in WHOLE_TILE_CHIPS
    dense = WHOLE_TILE_DENSE_FORWARD if whole_tile else DENSE_FORWARD
    for q, kv, strip in _choices(plan, dense, FORWARD_CHOICES, large=1):
        if whole_tile and strip == 512 and kv <= 1024:
            strip = kv
        sizes = _tile_sizes(plan, options.block_q or q, options.block_kv or kv)
        few = sizes[0] <= FEW_ROWS and plan.dtype == "bfloat16" and strip < FEW_ROWS_STRIP
        for columns in (FEW_ROWS_STRIP, strip) if few else (strip,):
            tiles = VmemTiles(*sizes, min(columns, sizes[1]))
            if forward_bytes(plan, tiles) <= chip.budget and tiles not in found:
                found.append(tiles)
    return found


def backward_candidates(plan: KernelPlan, chip: Chip, score: Program | None) -> list[VmemTiles]:
    """Tiles for both backward kernels that fit the chip's VMEM by the model, best first; [] if none does. Raises as
    `forward_candidates`.

    Where the derivative program is not known yet, callers pass score_mod's own, so a tile may not fit later.
    """
    found: list[VmemTiles] = []
    options = plan.options
    for q, kv, strip in _choices(plan, DENSE_BACKWARD, BACKWARD_CHOICES, large=2):
        sizes = _tile_sizes(plan, options.block_q_bwd or q, options.block_kv_bwd or kv)
        tiles = VmemTiles(*sizes, min(strip, *sizes))
        if backward_bytes(plan, tiles, score) <= chip.budget and tiles not in found:
            found.append(tiles)
    return found


def forward_tiles(plan: KernelPlan, chip: Chip) -> VmemTiles:
    """The first of `forward_candidates`; raises NoTile if there is none."""
    found = forward_candidates(plan, chip)
    if not found:
        raise NoTile(f"no tile of it fits the {chip.vmem_limit // MIB} MiB of VMEM of {chip.name}")
    return found[0]


def backward_tiles(plan: KernelPlan, chip: Chip, score: Program | None) -> VmemTiles:
    """The first of `backward_candidates`; raises NoTile if there is none."""
    found = backward_candidates(plan, chip, score)
    if not found:
        raise NoTile(f"no tile of its backward pass fits the {chip.vmem_limit // MIB} MiB of VMEM of {chip.name}")
    return found[0]
