"""A traced program, split between XLA and a kernel, and its evaluation on one tile.

`split` decides, value by value, who computes what. Inside the kernel: the operations that need the score, and cheap
arithmetic of positions. Outside, once, by XLA (outside.py), fed to the kernel as an operand: everything else.

Longer than other files: what is fed and how the kernel reads it must agree, place by place.

    place      depends on                    fed as
    uniform    b, h                          a scalar in SMEM
    q          q (b, h)                      a row of the tile
    kv         kv (b, h)                     a column of the tile
    delta      q - kv (b, h)                 a window of the diagonals, spread over the tile by rolls (toeplitz)
    tile       q and kv, not the score       a block: of the captured array itself where that is a plain slice, otherwise
                                             of an array evaluated outside
    score      the score                     never: computed inside, or refused

A read of a small table (SMALL_TABLE elements) at an index that only the tile knows is a gather inside the kernel.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends.mosaic_tpu import outside, tile_ops
from flexjax.ir import program as ir
from flexjax.ir.program import Atom, Axes, Call, Lit, Load, Op, Program, Step, Val

LANES = 128
SMALL_TABLE = 1024
"""Largest captured array that a kernel gathers from by itself."""
DELTA_COST = 6
"""Vector operations on q - kv above which one window of the diagonals is cheaper."""
DENSE_LIMIT = 4 << 30
"""Largest array, in bytes, that is evaluated outside for each (q, kv)."""

UNIFORM, ROW, COLUMN, DELTA, TILE, SCORE = "uniform", "q", "kv", "delta", "tile", "score"


class Unsupported(Exception):
    """Why a program cannot run here, as a clause that follows 'because'."""


def place_of(axes: Axes) -> str:
    if "score" in axes:
        return SCORE
    moving = axes - ir.UNIFORM
    if not moving:
        return UNIFORM
    if len(moving) == 1:
        (name,) = moving
        return {"q": ROW, "kv": COLUMN, "delta": DELTA}[name]
    return TILE


@dataclasses.dataclass(frozen=True)
class Feed:
    """A value handed to the kernel: computed outside, or (`direct`) the captured array of that load, sliced in place."""

    val: Val
    place: str
    direct: Load | None = None

    @property
    def dtype(self) -> str:
        """Type it travels in: int32 for booleans and small integers, float32 for floats; direct blocks as they are."""
        if self.direct is not None:
            return self.val.dtype
        return "float32" if self.val.dtype in ("float32", "bfloat16") else "int32"

    def sizes(self, batch: int, heads: int) -> tuple[int, int]:
        return (batch if "b" in self.val.axes else 1, heads if "h" in self.val.axes else 1)


@dataclasses.dataclass(frozen=True)
class Split:
    """A program with its feeds, the steps left for the kernel in order, and the loads among them that gather."""

    program: Program
    feeds: tuple[Feed, ...]
    steps: tuple[Step, ...]
    results: tuple[Atom, ...]
    gathers: tuple[Load, ...]

    def of_place(self, *places: str) -> tuple[Feed, ...]:
        return tuple(f for f in self.feeds if f.place in places)


FINITE_OPS = frozenset(
    [
        "add",
        "sub",
        "neg",
        "abs",
        "max",
        "min",
        "tanh",
        "logistic",
        "select_n",
        "convert_element_type",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
        "not",
        "xor",
        "floor",
        "ceil",
        "round",
        "sign",
        "copy",
        "clamp",
        "erf",
        "floordiv",
        "floormod",
    ]
)


def stays_finite(program: Program) -> bool:
    """Whether every result is finite wherever the score is, by the operations it is made of."""
    good: set[int] = set(range(ir.FIRST_FREE_ID))

    def fine(atom: Atom) -> bool:
        return math.isfinite(float(typing.cast(float, atom.value))) if isinstance(atom, Lit) else atom.id in good

    def bounded(step: Step) -> bool:
        if isinstance(step, Call):
            return step.name in tile_ops.CALLS
        if isinstance(step, Load):
            return False
        if place_of(step.out.axes) == UNIFORM or not jnp.issubdtype(jnp.dtype(step.out.dtype), jnp.floating):
            return True
        if step.prim == "mul":
            return not all("score" in ir.axes_of(a) for a in step.inputs)
        by_number = step.prim == "div" and isinstance(step.inputs[1], Lit) and step.inputs[1].value != 0
        return step.prim in FINITE_OPS or by_number

    for step in program.steps:
        if bounded(step) and all(fine(a) for a in step.inputs):
            good |= {o.id for o in step.outs}
    return all(fine(a) for a in program.results)


def table_size(program: Program, load: Load) -> int:
    return math.prod(program.captures[load.capture].shape)


def is_direct(program: Program, load: Load, q_len: int, kv_len: int) -> bool:
    """Whether the load is `capture[uniform..., q, kv]`, so that blocks of the array itself can be fed."""
    kind = ir.classify_load(load)
    capture = program.captures[load.capture]
    if kind.kind != ir.TILE or kind.dims[-2:] != ("q", "kv") or capture.dtype not in ("float32", "bfloat16", "int32"):
        return False
    if any(d != "uniform" for d in kind.dims[:-2]) or capture.shape[-2] < q_len or capture.shape[-1] < kv_len:
        return False
    for atom in load.index[-2:]:
        linear = atom.linear if isinstance(atom, Val) else None
        if linear is None or linear.const or linear.uniform or linear.b or linear.h:
            return False
    return True


@functools.lru_cache(maxsize=512)
def split(program: Program, batch: int, heads: int, q_len: int, kv_len: int) -> Split:
    """Divides the work. Raises Unsupported with a reason where the kernel cannot do its part."""
    maker = {o.id: s for s in program.steps for o in s.outs}
    heavy: dict[int, bool] = {}
    cost: dict[int, int] = {}
    for step in program.steps:
        for out in step.outs:
            place = place_of(out.axes)
            same = [a.id for a in step.inputs if isinstance(a, Val) and a.id in maker and place_of(a.axes) == place]
            awkward = not _runs_inside(step)
            spreads = place in (ROW, COLUMN, DELTA)
            heavy[out.id] = awkward or (spreads and any(heavy[i] for i in same))
            cost[out.id] = (tile_ops.cost(step) if isinstance(step, Op) else 1) + sum(cost[i] for i in same)

    feeds: dict[int, Feed] = {}
    inside: set[int] = set()
    gathers: set[int] = set()

    def feed(val: Val, direct: Load | None = None) -> None:
        if val.dtype not in tile_ops.KERNEL_DTYPES:
            raise Unsupported(f"it uses a value of type {val.dtype} for each {place_of(val.axes)} position")
        feeds[val.id] = Feed(val, place_of(val.axes), direct)

    pending = [a for a in program.results if isinstance(a, Val)]
    while pending:
        val = pending.pop()
        if val.id < ir.FIRST_FREE_ID or val.id in feeds or val.id in inside:
            continue
        step, place = maker[val.id], place_of(val.axes)
        if place == UNIFORM or (place in (ROW, COLUMN) and heavy[val.id]):
            feed(val)
            continue
        if place == DELTA and (heavy[val.id] or cost[val.id] > DELTA_COST):
            feed(val)
            continue
        if isinstance(step, Load):
            if is_direct(program, step, q_len, kv_len):
                feed(val, step)
                continue
            capture = program.captures[step.capture]
            small = 0 < table_size(program, step) <= SMALL_TABLE and val.dtype in (
                "float32",
                "int32",
                "bfloat16",
                "bool",
            )
            if small and place in (TILE, SCORE):
                inside.add(val.id)
                gathers.add(val.id)
                pending += [a for a in step.index if isinstance(a, Val)]
                continue
            if place == SCORE:
                raise Unsupported(
                    f"it reads a captured array of {capture} at an index computed from the score; a TPU kernel gathers "
                    f"only from tables of up to {SMALL_TABLE} elements"
                )
        elif isinstance(step, Call):
            if tile_ops.unary_call(step):
                inside.add(val.id)
                pending += [a for a in step.inputs if isinstance(a, Val)]
                continue
            if place == SCORE:
                raise Unsupported(f"it runs `{step.name}` on the score, which could not be unrolled")
        else:
            reason = tile_ops.refusal(step)
            if reason is None:
                inside.add(val.id)
                pending += [a for a in step.inputs if isinstance(a, Val)]
                continue
            if place == SCORE:
                raise Unsupported(reason)
        wide = (batch if "b" in val.axes else 1) * (heads if "h" in val.axes else 1) * q_len * kv_len * 4
        if wide > DENSE_LIMIT:
            raise Unsupported(
                f"it needs a value computed outside the kernel for each (q, kv): {wide / 2**30:.1f} GiB, more than "
                f"{DENSE_LIMIT >> 30} GiB"
            )
        feed(val)

    steps = tuple(s for s in program.steps if any(o.id in inside for o in s.outs))
    loads = tuple(s for s in steps if isinstance(s, Load))
    return Split(program, tuple(feeds.values()), steps, program.results, loads)


def _runs_inside(step: Step) -> bool:
    if isinstance(step, Call):
        return tile_ops.unary_call(step)
    return isinstance(step, Op) and tile_ops.refusal(step) is None


# ------------------------------------------------------------------- evaluation inside a kernel


@dataclasses.dataclass
class View:
    """The part of a tile that is evaluated: where it starts, how large, and how to read what was fed.

    q_axis         0: queries on rows (sublanes), keys on columns (lanes); 1: the other way round
    q_start, kv_start   position of the part's first element in the matrix (traced scalars)
    b, h           batch and query head (traced scalars)
    rows, cols     size of the part
    read           gives the value of a feed on this part, in broadcastable shape
    table          gives the whole (1, n) table behind a gathering load
    """

    q_axis: int
    q_start: jax.Array
    kv_start: jax.Array
    b: jax.Array
    h: jax.Array
    rows: int
    cols: int
    read: Callable[[Feed], jax.Array]
    table: Callable[[Load], jax.Array]

    def positions(self, dim: int, start: jax.Array) -> jax.Array:
        shape = (self.rows, 1) if dim == 0 else (1, self.cols)
        return start + lax.broadcasted_iota(jnp.int32, shape, dim)

    def local(self, dim: int) -> jax.Array:
        """float32 0, 1, ... along a dimension of the part."""
        shape = (self.rows, 1) if dim == 0 else (1, self.cols)
        return lax.broadcasted_iota(jnp.int32, shape, dim).astype(jnp.float32)

    @functools.cached_property
    def q(self) -> jax.Array:
        return self.positions(self.q_axis, self.q_start)

    @functools.cached_property
    def kv(self) -> jax.Array:
        return self.positions(1 - self.q_axis, self.kv_start)


def run(parts: Split, view: View, score: jax.Array | None) -> list[jax.Array]:
    """Results of the program on the part, in shapes that broadcast to (rows, cols)."""
    env: dict[int, jax.Array] = {}
    for feed in parts.feeds:
        env[feed.val.id] = _restore(view.read(feed), feed.val.dtype)

    def read(atom: Atom) -> jax.Array:
        if isinstance(atom, Lit):
            return typing.cast(jax.Array, outside.constant(atom)[()])
        if atom.id in env:
            return env[atom.id]
        if atom.id == ir.SCORE:
            assert score is not None, "a mask reads the score"
            return score.astype(jnp.dtype(atom.dtype))
        return {ir.B: view.b, ir.H: view.h, ir.Q: view.q, ir.KV: view.kv}[atom.id]

    for step in parts.steps:
        if isinstance(step, Op):
            env[step.out.id] = tile_ops.apply(step, [read(a) for a in step.inputs])
        elif isinstance(step, Call):
            env[step.outs[0].id] = tile_ops.CALLS[step.name](read(step.inputs[0]))
        else:
            assert isinstance(step, Load)
            capture = parts.program.captures[step.capture]
            flat = _flat_index([read(a) for a in step.index], capture.shape, (view.rows, view.cols))
            env[step.out.id] = _restore(_gather(view.table(step), flat, math.prod(capture.shape)), step.out.dtype)
    return [jnp.asarray(read(a)) for a in parts.results]


def _restore(value: jax.Array, dtype: str) -> jax.Array:
    """From the type it travelled in to its own."""
    target = jnp.dtype(dtype)
    if value.dtype == target:
        return value
    return value != 0 if dtype == "bool" else value.astype(target)


def _flat_index(index: Sequence[jax.Array], shape: tuple[int, ...], tile: tuple[int, int]) -> jax.Array:
    flat: jax.Array | np.ndarray = np.zeros((), np.int32)
    for atom, size in zip(index, shape, strict=True):
        flat = flat * np.int32(size) + jnp.asarray(atom).astype(jnp.int32)
    return jnp.broadcast_to(flat, tile)


def _gather(table: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """table[0, index] on a whole tile: lane gathers from 128 entries at a time. `table` is (1, n), n a multiple of 128."""
    rows, cols = index.shape
    index = jnp.clip(index, 0, size - 1)
    chunks = -(-size // LANES)
    parts = []
    for start in range(0, cols, LANES):
        here = index[:, start : start + LANES]
        width = here.shape[1]
        if width < LANES:
            here = jnp.concatenate([here, jnp.zeros((rows, LANES - width), here.dtype)], axis=1)
        low = here & (LANES - 1)
        found = None
        for c in range(chunks):
            entries = jnp.broadcast_to(table[:, c * LANES : (c + 1) * LANES], (rows, LANES))
            picked = jnp.take_along_axis(entries, low, axis=1, mode="promise_in_bounds")
            found = picked if found is None else jnp.where((here >> 7) == c, picked, found)
        assert found is not None
        parts.append(found[:, :width])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


# ------------------------------------------------------------------- diagonals

SKEW = 8
"""Rows of a diagonal window: row r holds the diagonals shifted right by r, one vector register high."""


def skewed(diagonals: jax.Array) -> jax.Array:
    """[..., n] -> [..., 8, n]: out[..., r, x] = diagonals[..., x - r] (0 where that is before the start)."""
    rows = [
        jnp.pad(diagonals, [(0, 0)] * (diagonals.ndim - 1) + [(r, 0)])[..., : diagonals.shape[-1]] for r in range(SKEW)
    ]
    return jnp.stack(rows, axis=-2)


def toeplitz(window: jax.Array, rows: int, cols: int, first: int) -> jax.Array:
    """Spreads a skewed window over a tile: out[i, j] = window[i % 8, first + j - 8 * (i // 8)].

    One roll serves every row group of the same phase (mod 128 lanes); the rest are aligned slices.
    """
    rolled: dict[int, jax.Array] = {}
    groups = []
    for g in range(-(-rows // SKEW)):
        at = first - SKEW * g
        phase = at % LANES
        if phase not in rolled:
            width = window.shape[1]
            rolled[phase] = window if phase == 0 else pltpu.roll(window, np.int32(width - phase), 1)  # pyright: ignore[reportArgumentType]  # an int would be int64 with x64
        base = at - phase
        groups.append(rolled[phase][:, base : base + cols])
    out = groups[0] if len(groups) == 1 else jnp.concatenate(groups, axis=0)
    return out[:rows]


def toeplitz_sums(tile: jax.Array, width: int, first: int) -> jax.Array:
    """The transpose of `toeplitz`: [8, width] with tile[i, j] added at (i % 8, first + j - 8 * (i // 8))."""
    rows, cols = tile.shape
    if rows % SKEW:
        tile = jnp.concatenate([tile, jnp.zeros((SKEW - rows % SKEW, cols), tile.dtype)], axis=0)
    sums: dict[int, jax.Array] = {}
    for g in range(-(-rows // SKEW)):
        at = first - SKEW * g
        phase = at % LANES
        base = at - phase
        band = tile[g * SKEW : (g + 1) * SKEW]
        pieces = [jnp.zeros((SKEW, base), tile.dtype)] if base else []
        pieces.append(band)
        if width - base - cols:
            pieces.append(jnp.zeros((SKEW, width - base - cols), tile.dtype))
        band = jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else band
        sums[phase] = band if phase not in sums else sums[phase] + band
    total = None
    for phase, part in sums.items():
        part = part if phase == 0 else pltpu.roll(part, np.int32(phase), 1)  # pyright: ignore[reportArgumentType]  # an int would be int64 with x64
        total = part if total is None else total + part
    assert total is not None
    return total
