"""Which pair biases the backward kernels stage in shared memory, and of which the dQ kernel writes the gradient.

A captured array with an element for each (query, key), `bias[h, q, kv]` say, is as large as the scores, so the backward
kernels treat it in two ways (`DenseBiasPlan`):

Staged reads. The array that the forward pass stages (programs/staging.py) is copied tile by tile by TMA into shared
memory, in a ring beside the tiles of Q and K.

Direct gradients. Where no two positions of the attention matrix read the same element, the gradient of an element is

    g = dsp * d mod / d load,    dsp = p * (dP - delta)

at the one position that reads it. The dQ kernel visits every position once, so it writes g itself, and zeros to tiles
that the block mask skips. The gradient of an array that all batch entries share is a sum over the batch; the dQ kernel
writes it too where the dQ accumulators of all batch entries fit the registers of one warpgroup, because one CTA then
takes all batch entries of a query tile. captures/gradients.py computes all other gradients.

On Hopper both apply to head dims up to 128. The dQ kernels on mma.sync and tcgen05 stage nothing, and write direct
gradients at every head dim, from registers, of arrays with an element for each batch entry. pair_bias_tiles.py has the
parts that run inside the kernels for Hopper.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.backward import common
from flexjax.backends.mosaic_gpu.backward.common import Captures
from flexjax.backends.mosaic_gpu.backward.hopper_dq_tiles import dq_fits
from flexjax.backends.mosaic_gpu.backward.hopper_tiles import LARGEST_UNSPLIT_DIM, DenseBiasTypes, padded_dims
from flexjax.backends.mosaic_gpu.machine.clipped_copies import PIECE_ROWS
from flexjax.backends.mosaic_gpu.machine.float_parts import parts_of
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, whole_tiles
from flexjax.backends.mosaic_gpu.programs import staging
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

AXES = ("b", "h", "q", "kv")
Dims = tuple[tuple[str, int], ...]
"""For each dimension of an array: the axis that indexes it ("" for a constant), and the index at position 0."""


# ------------------------------------------------------------------- how loads index their arrays


def _axis_and_start(atom: ir.Atom) -> tuple[str, int] | None:
    """The entry of `Dims` for the index `atom` of one dimension, an axis plus a constant; None for any other index."""
    if isinstance(atom, ir.Lit):
        return "", int(atom.value)
    line = atom.linear
    if line is None or line.uniform:
        return None
    moving = [(axis, n) for axis, n in zip(AXES, (line.b, line.h, line.q, line.kv), strict=True) if n]
    if len(moving) > 1 or any(n != 1 for _, n in moving):
        return None
    return moving[0][0] if moving else "", line.const


def axis_aligned_dims(load: ir.Load) -> Dims | None:
    """How a load indexes its array, if every index is a constant or an axis of its own plus a constant; else None."""
    found = [_axis_and_start(atom) for atom in load.index]
    named = [dim[0] for dim in found if dim is not None and dim[0]]
    dims = tuple(dim for dim in found if dim is not None)
    return dims if len(dims) == len(found) and len(set(named)) == len(named) else None


def embedded(values: jax.Array, dims: Dims, shape: tuple[int, ...]) -> jax.Array:
    """An array of `shape`, zero but for `values`, [b, h, q, kv] with length 1 for each axis that `dims` lacks."""
    # each value goes to the element that its position reads
    order = [AXES.index(axis) for axis, _ in dims if axis]
    lengths = [values.shape[AXES.index(axis)] if axis else 1 for axis, _ in dims]
    rest = [n for n in range(4) if n not in order]
    values = values.transpose(*rest, *order).reshape(lengths)
    widths = [(first, n - first - length) for (_, first), n, length in zip(dims, shape, lengths, strict=True)]
    return jnp.pad(values, widths) if any(w != (0, 0) for w in widths) else values


def gradient_loads(derivative: ir.Program) -> tuple[ir.Load, ...]:
    """The loads of captured arrays with a gradient; d score / d load n is the derivative's result 2 + n."""
    return tuple(typing.cast(ir.Load, derivative.steps[n]) for n in derivative.gradients)


# ------------------------------------------------------------------- gradients that the dQ kernel writes


@dataclasses.dataclass(frozen=True)
class DirectGradient:
    """A captured array whose gradient the dQ kernel writes."""

    load_number: int  # of the array's one load among `gradient_loads`
    capture: int  # number of the array among the score program's captures
    dims: Dims
    dtype: str  # of the array, as shape
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def has(self, axis: str) -> bool:
        return any(axis == name for name, _ in self.dims)

    def output_shape(self, plan: KernelPlan) -> tuple[tuple[int, ...], str]:
        """[b, h, T', S'] and dtype of what the dQ kernel writes; b or h is 1 if the captured array lacks that axis."""
        # what TMA copies: 8 queries, PIECE[1] bytes of keys
        units = dict(q=PIECE_ROWS, kv=staging.PIECE[1] // self.item_bytes)
        return (*self._leading(plan), *(common.padded_len(plan, *unit) for unit in units.items())), self.dtype

    def whole_tiles(self, plan: KernelPlan) -> tuple[int, ...]:
        """`output_shape` in whole tiles and mask blocks, for a kernel that writes past the end."""
        return (*self._leading(plan), common.whole_len(plan, "q"), common.whole_len(plan, "kv"))

    def _leading(self, plan: KernelPlan) -> tuple[int, int]:
        return plan.batch if self.has("b") else 1, plan.q_heads if self.has("h") else 1

    def tile(self, ref: Ref, b: Scalar, h: Scalar, q0: Scalar, kv0: Scalar, shape: tuple[int, int]) -> Ref:
        """A Ref to the tile (queries, keys) from query q0 and key kv0 on in `ref`, [b, h, T', S']."""
        at = (b if self.has("b") else 0, h if self.has("h") else 0)
        return ref.at[(*at, pl.ds(q0, shape[0]), pl.ds(kv0, shape[1]))]

    def gradient(self, plan: KernelPlan, values: jax.Array) -> jax.Array:
        """The gradient in the shape and dtype of the captured array, from what the kernel wrote, [b, h, T', S']."""
        return embedded(values[:, :, : plan.q_len, : plan.kv_len], self.dims, self.shape)


def _direct_gradient(plan: KernelPlan, derivative: ir.Program, load_number: int) -> DirectGradient | None:
    """How the dQ kernel can write the gradient of load number `load_number`; None if it cannot."""
    loads = gradient_loads(derivative)
    load, slope = loads[load_number], derivative.results[2 + load_number]
    dims, array = axis_aligned_dims(load), derivative.captures[load.capture]
    if plan.origin is not None:  # TMA writes whole pieces, and the positions of a tile may be any
        return None
    # the array must have one load with a gradient, and an axis of its own for every position
    if dims is None or array.dtype not in staging.ITEM_SIZES or sum(o.capture == load.capture for o in loads) > 1:
        return None
    # a constant 0 has no gradient to write
    if isinstance(slope, ir.Lit) and slope.value == 0:
        return None
    needed = {"q", "kv"} | ({"h"} if plan.q_heads > 1 else set())
    if not needed <= {axis for axis, _ in dims}:
        return None
    return DirectGradient(load_number, load.capture, dims, array.dtype, array.shape)


def direct_gradients(
    plan: KernelPlan, derivative: ir.Program | None, wanted: tuple[bool, ...]
) -> tuple[DirectGradient, ...]:
    """The direct gradients of a dQ kernel on mma.sync or tcgen05, whose CTAs take one batch entry.

    `wanted` says for each captured array of the score program whether its gradient is asked for.
    """
    if derivative is None:
        return ()
    loads = enumerate(gradient_loads(derivative))
    found = (_direct_gradient(plan, derivative, n) for n, load in loads if wanted[load.capture])
    return tuple(one for one in found if one is not None and (one.has("b") or plan.batch == 1))


# ------------------------------------------------------------------- the plan


@dataclasses.dataclass(frozen=True)
class DenseBiasPlan:
    """What the backward kernels for Hopper do with captured arrays that have an element for each (query, key)."""

    staged: ir.Load | None = None  # the load whose array is staged through shared memory
    staged_type: str = "bfloat16"
    direct_gradients: tuple[DirectGradient, ...] = ()
    batch_entries: int = 1  # that a CTA of the dQ kernel takes; more than 1 if it sums direct gradients over them

    @property
    def types(self) -> DenseBiasTypes:
        """The part of this plan that the shared memory of a kernel depends on."""
        staged = None if self.staged is None else self.staged_type
        return DenseBiasTypes(staged, tuple(one.dtype for one in self.direct_gradients), self.batch_entries)


def _batch_entries(plan: KernelPlan, bias: DenseBiasPlan, gradient: DirectGradient) -> int:
    """How many batch entries a CTA must take to write `gradient` beside those of `bias`; 0 if it cannot."""
    entries = 1 if gradient.has("b") else plan.batch
    if bias.direct_gradients and entries != bias.batch_entries:
        return 0
    if entries == 1:
        return 1
    # entries share a CTA if lists and staged tiles are the same, and if their dQ accumulators fit
    same_lists = plan.blocks is None or plan.blocks.batch == 1
    dim = max(padded_dims(plan)) * parts_of(plan)
    same_tile = bias.staged is None or not any("b" in ir.axes_of(a) for a in bias.staged.index)
    return entries if same_lists and same_tile and entries * dim <= LARGEST_UNSPLIT_DIM else 0


def dense_bias_plan(plan: KernelPlan, derivative: ir.Program | None, wanted: tuple[bool, ...]) -> DenseBiasPlan:
    """Which array the backward kernels for Hopper stage, and which gradients are direct, as many as fit shared memory.

    `wanted` says for each captured array of the score program whether its gradient is asked for. A load that does not
    fit, or that needs another number of batch entries than those before it, is left to captures/gradients.py.
    """
    # the dQ kernel would spill 200 to 490 bytes a thread
    if derivative is None or max(padded_dims(plan)) > LARGEST_UNSPLIT_DIM:
        return DenseBiasPlan()
    load = staging.staged_load(plan, derivative)
    bias = DenseBiasPlan() if load is None else DenseBiasPlan(load, derivative.captures[load.capture].dtype)
    for load_number, source in enumerate(gradient_loads(derivative)):
        found = _direct_gradient(plan, derivative, load_number) if wanted[source.capture] else None
        entries = 0 if found is None else _batch_entries(plan, bias, found)
        if found is None or not entries:
            continue
        more = dataclasses.replace(bias, direct_gradients=(*bias.direct_gradients, found), batch_entries=entries)
        bias = more if dq_fits(plan, more.types) else bias
    return bias


def padded_captures(plan: KernelPlan, bias: DenseBiasPlan, captures: Captures[jax.Array]) -> Captures[jax.Array]:
    """The captured arrays, the staged one in whole tiles."""
    if bias.staged is None:
        return captures
    lengths = (common.whole_len(plan, "q"), common.whole_len(plan, "kv"))
    staged = bias.staged.capture
    whole = whole_tiles(captures.score[staged], lengths)
    return captures._replace(score=(*captures.score[:staged], whole, *captures.score[staged + 1 :]))
