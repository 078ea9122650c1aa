"""Gradients of the arrays that a score mod captured, on Hopper.

The gradient of `load_j` is the sum of

    g = dsp * d mod / d load_j,    dsp = p * (dP - delta)

over all places of the attention matrix that read the same element. A CTA walks a list of tiles whose places correspond one to one, adds g
tile by tile in registers, and writes one tile of sums:

    kind        tiles of one list                      what XLA sums in the result
    scalar      a share of the tiles of a head         over queries and keys
    row         one row of tiles                       over keys
    column      one column of tiles                    over queries
    diagonal    tiles with the same (q0 - kv0)         along the diagonals of the tile: 2 n - 1 sums
    tile        the batches and heads that share it    nothing

What is left, numbers for each (b, h) and query, key, difference or pair, goes to the places that the load's index names
(capture_scatter.py). A gather by query and key whose places may repeat, such as a table of 2-D relative positions, would leave a number for
each pair and head: there the kernel adds g to its places itself, in fixed point (fixed_point.py), and what the index makes the same on
tiles of one diagonal is added in registers before (shift_invariance.py).

The order of every sum is fixed, and follows from the problem alone. Memory follows the lists of the block mask (capture_lists.py) and
the captured array, never queries times keys unless the array has that size itself.
"""

import math
import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.bounds import bounds
from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu.backward_sm90_common import Captures, Tokens, captures_of
from flexjax.backends.mosaic_gpu.capture_kernel import CaptureKernel, Sink
from flexjax.backends.mosaic_gpu.capture_lists import (
    LARGEST_NUMBER,
    TileLists,
    most_codes,
    most_visits,
    shape_for,
    tile_lists,
)
from flexjax.backends.mosaic_gpu.capture_scatter import (
    LARGEST_ARRAY,
    add_at,
    axes,
    diagonal_sums,
    distinct,
    join_windows,
)
from flexjax.backends.mosaic_gpu.capture_tiles import ROWS, warpgroups_for
from flexjax.backends.mosaic_gpu.pair_bias import DenseBiasPlan, axis_aligned_dims, gradient_loads, padded_captures
from flexjax.backends.mosaic_gpu.shift_invariance import invariant
from flexjax.ir import program as ir
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import KernelPlan, Operands

LISTS_AT_ONCE = 4096
"""Tiles of sums that are there at once, 256 MiB of them: more lists are taken in turns."""


def capture_gradients(
    plan: KernelPlan,
    operands: Operands,
    tokens: Tokens[jax.Array],
    wanted: tuple[bool, ...],
    derivative: ir.Program,
    bias: DenseBiasPlan,
) -> tuple[jax.Array | None, ...]:
    """The gradient of each wanted captured array, None for the others."""
    totals: list[jax.Array | None] = [
        jnp.zeros(a.shape, jnp.float32) if want else None
        for a, want in zip(operands.score_captures, wanted, strict=True)
    ]
    captures = padded_captures(plan, bias, captures_of(operands))
    for load_number, load in enumerate(gradient_loads(derivative)):
        total, slope = totals[load.capture], derivative.results[2 + load_number]
        if total is None or (isinstance(slope, ir.Lit) and slope.value == 0):
            continue
        if _repeats(load):
            found = _scattered(plan, operands, tokens, captures, derivative, load_number, bias)
            totals[load.capture] = total + found.reshape(total.shape)
        else:
            sums = _load_sums(plan, operands, tokens, captures, derivative, load_number, bias)
            totals[load.capture] = add_at(plan, operands, derivative, load, sums, total)
    return tuple(None if t is None else t.astype(a.dtype) for t, a in zip(totals, operands.score_captures, strict=True))


def refuses(plan: KernelPlan, derivative: ir.Program, wanted: tuple[bool, ...]) -> str | None:
    """Why a captured array's gradient cannot be had here, or None."""
    tile = warpgroups_for(plan) * ROWS
    for load in gradient_loads(derivative):
        if not wanted[load.capture]:
            continue
        if any("score" in ir.axes_of(a) for a in load.index):
            return f"captured array {load.capture} is read at a place that depends on the score."
        size = math.prod(derivative.captures[load.capture].shape)
        if not distinct(load) and size > LARGEST_ARRAY:
            return (
                f"captured array {load.capture} is gathered at places that may repeat, and has {size} elements; its gradient takes up to "
                f"{LARGEST_ARRAY}."
            )
        if most_visits(plan, tile) >= LARGEST_NUMBER or most_codes(plan, tile) >= LARGEST_NUMBER:
            return (
                f"the gradient of captured array {load.capture} adds up more tiles of {tile} x {tile} than int32 can number: "
                f"{plan.batch} x {plan.q_heads} heads of {plan.q_len} queries and {plan.kv_len} keys."
            )
    return None


def _repeats(load: ir.Load) -> bool:
    """Whether the kernel adds to places of the array: a number for each pair, at places that may repeat."""
    tile = ir.classify_load(load).kind == ir.TILE
    return tile and axis_aligned_dims(load) is None and not distinct(load)


def _shared(load: ir.Load) -> tuple[bool, bool]:
    """Whether batch entries and heads share the elements that the load reads."""
    return "b" not in axes(load), "h" not in axes(load)


# ------------------------------------------------------------------- sums of places that correspond


def _load_sums(
    plan: KernelPlan,
    operands: Operands,
    tokens: Tokens[jax.Array],
    captures: Captures[jax.Array],
    derivative: ir.Program,
    load_number: int,
    bias: DenseBiasPlan,
) -> jax.Array:
    """[b, h, ...] float32 (or what `_sum_type` says): b and h are 1 where the load does not depend on them; then T, S, T + S - 1, (T, S) or nothing."""
    load = gradient_loads(derivative)[load_number]
    kind, shared, tile = ir.classify_load(load).kind, _shared(load), warpgroups_for(plan) * ROWS
    shape = shape_for(plan, kind, tile, shared)
    lists = tile_lists(plan, operands.lists, shape)
    if kind == ir.TILE:
        kernel = CaptureKernel(
            plan, derivative, load_number, shape, bias, Sink.MATRIX, _sum_type(derivative, load_number)
        )
        return kernel.run(tokens, lists, captures)[:, :, : plan.q_len, : plan.kv_len]
    kernel = CaptureKernel(plan, derivative, load_number, shape, bias, Sink.SUMS)
    sums = _summed(kernel, tokens, lists, captures)
    sums = sums.reshape(shape.batch, shape.heads, shape.keys, *sums.shape[1:])
    if kind == ir.SCALAR:
        out = sums.sum(2)
    elif kind == ir.DIAGONAL:
        out = join_windows(sums)
        skip = (shape.columns * tile - 1) - (plan.kv_len - 1)
        # a kernel of its own: drawn into the scatter that follows, the sums would be made one by one
        out = lax.optimization_barrier(out[..., skip : skip + plan.q_len + plan.kv_len - 1])
    else:
        length = plan.q_len if kind == ir.ROW else plan.kv_len
        out = sums.reshape(shape.batch, shape.heads, -1)[..., :length]
    left = tuple(n for n in (0, 1) if shared[n])
    return out.sum(left, keepdims=True) if left else out


def _summed(
    kernel: CaptureKernel, tokens: Tokens[jax.Array], lists: TileLists[jax.Array], captures: Captures[jax.Array]
) -> jax.Array:
    """[lists, ...]: the tile of sums of each list, summed along what the kind of load does not tell apart."""

    def reduced(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        head, begin, count = part
        sums = kernel.run(tokens, lists._replace(head=head, begin=begin, count=count), captures)
        if kernel.shape.kind == ir.DIAGONAL:
            return diagonal_sums(sums)
        return sums.sum({ir.SCALAR: (1, 2), ir.ROW: 2, ir.COLUMN: 1}[kernel.shape.kind])

    count = lists.count.shape[0]
    turns = -(-count // LISTS_AT_ONCE)
    each = -(-count // turns)
    parts = (lists.head, lists.begin, lists.count)
    if turns == 1:
        return reduced(parts)
    split = tuple(jnp.pad(x, (0, turns * each - count)).reshape(turns, each) for x in parts)
    sums = lax.map(reduced, split)
    return sums.reshape(turns * each, *sums.shape[2:])[:count]


def _sum_type(derivative: ir.Program, load_number: int) -> typing.Any:
    """dtype of sums that are numbers for each query and key: that of the array where they are all of its gradient."""
    loads = gradient_loads(derivative)
    alone = sum(other.capture == loads[load_number].capture for other in loads) == 1
    direct = alone and axis_aligned_dims(loads[load_number]) is not None
    return derivative.captures[loads[load_number].capture].dtype if direct else jnp.float32


# ------------------------------------------------------------------- sums at places that repeat


def _scattered(
    plan: KernelPlan,
    operands: Operands,
    tokens: Tokens[jax.Array],
    captures: Captures[jax.Array],
    derivative: ir.Program,
    load_number: int,
    bias: DenseBiasPlan,
) -> jax.Array:
    """The gradient of the array, flat, in float32."""
    load, tile = gradient_loads(derivative)[load_number], warpgroups_for(plan) * ROWS
    period = _period(plan, derivative, load, tile)
    kind = ir.DIAGONAL if period else ir.SCALAR
    shape = shape_for(plan, kind, tile, _shared(load), max(period, 1))
    lists = tile_lists(plan, operands.lists, shape)
    total = _largest_total(plan, tokens, derivative, load_number)
    if total is None:
        everything = shape_for(plan, ir.SCALAR, tile, (True, True))
        kernel = CaptureKernel(plan, derivative, load_number, everything, bias, Sink.MAGNITUDES)
        total = _summed(kernel, tokens, tile_lists(plan, operands.lists, everything), captures).sum()
    kernel = CaptureKernel(plan, derivative, load_number, shape, bias, Sink.SCATTER)
    return kernel.run(tokens, lists, captures, total)


def _period(plan: KernelPlan, derivative: ir.Program, load: ir.Load, tile: int) -> int:
    """How many tiles along a diagonal the places that are read repeat; 0 where sums of such tiles would save too little."""
    rows, columns = -(-plan.q_len // tile), -(-plan.kv_len // tile)
    most = rows * columns // (2 * (rows + columns - 1))
    return next((n for n in range(1, most + 1) if invariant(derivative, load.index, n * tile)), 0)


LARGEST_SLOPE = 4096.0
"""Bounds of the mod's derivative above this are not used: the unit of the fixed-point sums follows the bound, and far above the true
derivative it would round small gradients to 0. |g| is added up by a run of the kernel then. With 2^61 units in the bound, 2^12 leaves
49 bits below the true total."""


def _largest_total(
    plan: KernelPlan, tokens: Tokens[jax.Array], derivative: ir.Program, load_number: int
) -> jax.Array | None:
    """What all |g| add up to at most, None where nothing bounds the derivative of the mod well.

    p of a query adds up to 1 (of scores that are far out, each may be 1), and |dP| is at most |dO| |V|.
    """
    (low, high), *_ = bounds(with_results(derivative, (derivative.results[2 + load_number],)))
    slope = max(abs(low), abs(high))
    keep = 1.0
    if plan.dropout is not None:
        ((low, high),) = bounds(plan.dropout)
        keep = max(abs(low), abs(high))
    if not slope * keep <= LARGEST_SLOPE:
        return None
    length = lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))
    time = 1 if plan.layout == "BTNH" else 2
    d_out = length(tokens.d_out).sum(time)
    value = jnp.repeat(length(tokens.value).max(time), plan.group, axis=-1)
    total = keep * jnp.sum(d_out * value) + jnp.sum(jnp.abs(tokens.stats[:, :, 1]))
    return total * (slope * (plan.kv_len if may_be_large(plan.score) else 1))
