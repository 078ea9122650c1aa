"""Which captured arrays with an element for each (query, key), such as a pair bias `bias[h, q, kv]`, the backward kernels stage in shared
memory, and of which the dQ kernel writes the gradient.

Such an array is as large as the scores, so the backward kernels treat it in two ways (`DenseBiasPlan`):

Staged reads. The array that the forward pass stages (staging.py) is copied tile by tile by TMA into shared memory, in a ring beside the
tiles of Q and K. Kernels whose score tile is transposed read the staged tile transposed.

Direct gradients. Where no two positions of the attention matrix read the same element, the gradient of an element is

    g = dsp * d mod / d load,    dsp = p * (dP - delta)

at the one position that reads it. The dQ kernel visits every position once, so it writes g itself: each tile goes to shared memory and
from there by TMA to the gradient array, and tiles that the block mask skips are written as zeros. No sum and no recomputation is needed,
and the result does not depend on any order. The gradient of an array that all batch entries share is a sum over the batch; the dQ kernel
writes it too where the dQ accumulators of all batch entries fit the registers of one warpgroup, because one CTA then takes all batch
entries of a query tile. capture_gradients.py computes all other gradients.

On Hopper both apply to head dims up to 128. The dQ kernels on mma.sync and tcgen05 stage nothing, and write direct gradients at every
head dim, from registers, of arrays with an element for each batch entry (`direct_gradients`). pair_bias_tiles.py has the parts that run
inside the kernels for Hopper.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu import backward_common as common
from flexjax.backends.mosaic_gpu import staging
from flexjax.backends.mosaic_gpu.backward_common import Captures
from flexjax.backends.mosaic_gpu.backward_dq_tiles import dq_fits
from flexjax.backends.mosaic_gpu.backward_tiles import LARGEST_UNSPLIT_DIM, DenseBiasTypes, padded_dims
from flexjax.backends.mosaic_gpu.clipped_copies import PIECE_ROWS
from flexjax.backends.mosaic_gpu.float_parts import parts_of
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar
from flexjax.integers import round_up
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

AXES = ("b", "h", "q", "kv")
Dims = tuple[tuple[str, int], ...]
"""For each dimension of an array: the axis whose position indexes it ("" for a constant index), and the index at position 0."""


# ------------------------------------------------------------------- how loads index their arrays


def _axis_and_start(atom: ir.Atom) -> tuple[str, int] | None:
    """(axis, index at position 0) if the index `atom` is that axis plus a constant, ("", constant) if it is constant,
    else None.

    This is the entry of `Dims` for one dimension. An axis times 2, or an axis plus a number that is not constant, gives
    None.
    """
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
    """How a load indexes each dimension of its array, as `Dims`, if every index is a constant or an axis of its own
    plus a constant; None for other loads.
    """
    found = [_axis_and_start(atom) for atom in load.index]
    named = [dim[0] for dim in found if dim is not None and dim[0]]
    dims = tuple(dim for dim in found if dim is not None)
    return dims if len(dims) == len(found) and len(set(named)) == len(named) else None


def embedded(values: jax.Array, dims: Dims, shape: tuple[int, ...]) -> jax.Array:
    """An array of `shape` that holds each value at the element that its position reads, and zeros elsewhere, in the
    dtype of `values`.

    values   [b, h, q, kv], with length 1 for each axis that `dims` lacks
    dims     of the load, from `axis_aligned_dims`
    shape    of the captured array
    """
    order = [AXES.index(axis) for axis, _ in dims if axis]
    lengths = [values.shape[AXES.index(axis)] if axis else 1 for axis, _ in dims]
    rest = [n for n in range(4) if n not in order]
    values = values.transpose(*rest, *order).reshape(lengths)
    widths = [(first, n - first - length) for (_, first), n, length in zip(dims, shape, lengths, strict=True)]
    return jnp.pad(values, widths) if any(w != (0, 0) for w in widths) else values


def gradient_loads(derivative: ir.Program) -> tuple[ir.Load, ...]:
    """The loads of captured arrays with a gradient, in the order of the derivatives: d score / d load n is result 2 +
    n of the derivative program.
    """
    return tuple(typing.cast(ir.Load, derivative.steps[n]) for n in derivative.gradients)


# ------------------------------------------------------------------- gradients that the dQ kernel writes


@dataclasses.dataclass(frozen=True)
class DirectGradient:
    """A captured array whose gradient the dQ kernel writes.

    load_number    of the array's one load among `gradient_loads`
    capture        number of the array among the score program's captures
    dims           how the load indexes the array
    dtype, shape   of the array
    """

    load_number: int
    capture: int
    dims: Dims
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return jnp.dtype(self.dtype).itemsize

    def has(self, axis: str) -> bool:
        """Whether some dimension of the array is indexed by this axis, one of AXES."""
        return any(axis == name for name, _ in self.dims)

    def output_shape(self, plan: KernelPlan) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the array that the dQ kernel writes: [b, h, T', S'], where b or h is 1 if the captured
        array lacks that axis, in the dtype of the captured array.

        T' and S' are T and S rounded up to what TMA copies (8 queries, PIECE[1] bytes of keys), or to whole tiles for
        the simulator, which refuses copies that cross the end.
        """
        if plan.options.interpret:
            return self.whole_tiles(plan), self.dtype
        keys = round_up(plan.kv_len, staging.PIECE[1] // self.item_bytes)
        return (*self._leading(plan), common.padded_len(plan, "q", PIECE_ROWS), keys), self.dtype

    def whole_tiles(self, plan: KernelPlan) -> tuple[int, ...]:
        """`output_shape` with T' and S' rounded up to whole tiles and blocks of the mask (`whole_len`): what a kernel writes that
        does not copy by TMA, which leaves out what lies past an end.
        """
        return (*self._leading(plan), common.whole_len(plan, "q"), common.whole_len(plan, "kv"))

    def _leading(self, plan: KernelPlan) -> tuple[int, int]:
        """The first two dimensions of `output_shape`: batch entries and query heads, 1 for an axis that the array lacks."""
        return plan.batch if self.has("b") else 1, plan.q_heads if self.has("h") else 1

    def tile(self, ref: Ref, b: Scalar, h: Scalar, q0: Scalar, kv0: Scalar, shape: tuple[int, int]) -> Ref:
        """A Ref to a tile [queries, keys] of this gradient in global memory, which the caller writes; this method reads and writes nothing.

        ref       the kernel's output for this gradient, [b, h, T', S'] as `output_shape` or `whole_tiles` says, in this order of axes
                  whichever order the captured array has (`gradient` restores that)
        b, h      batch entry and query head; an axis that the captured array lacks has length 1 in `ref`, and 0 is taken in its place
        q0, kv0   first query and first key of the tile, as rows of the call
        shape     (queries, keys) of the tile

        The kernel for Hopper writes the tile by TMA. The tile may reach past the end of the output (`output_shape`), where TMA writes
        nothing. The kernels on mma.sync and tcgen05 store the tile from registers; it lies within their output (`whole_tiles`).
        """
        at = (b if self.has("b") else 0, h if self.has("h") else 0)
        return ref.at[(*at, pl.ds(q0, shape[0]), pl.ds(kv0, shape[1]))]

    def gradient(self, plan: KernelPlan, values: jax.Array) -> jax.Array:
        """The gradient in the shape and dtype of the captured array, from `values`, what the kernel wrote: [b, h, T', S'], of
        `output_shape` or `whole_tiles`; 0 at elements that no position reads.
        """
        return embedded(values[:, :, : plan.q_len, : plan.kv_len], self.dims, self.shape)


def _direct_gradient(plan: KernelPlan, derivative: ir.Program, load_number: int) -> DirectGradient | None:
    """How the dQ kernel can write the gradient of load number `load_number`; None if it cannot.

    Nothing here depends on the batch: whether one CTA can sum the gradient over batch entries is checked by
    `_batch_entries`, and whether the kernel's shared memory fits by `dense_bias_plan`.

    load_number   number of the load among `gradient_loads(derivative)`

    The gradient can be written if all of these hold:

        the call has no origin
        each index of the load is a constant or an axis plus a constant, and no two indices have the same axis
        (`axis_aligned_dims`); q and kv are among the axes and, if the call has several query heads, h
        no other load with a gradient reads the array
        the array is bfloat16, float16 or float32
        the derivative of the score by the load is not the constant 0
    """
    loads = gradient_loads(derivative)
    load, slope = loads[load_number], derivative.results[2 + load_number]
    dims, array = axis_aligned_dims(load), derivative.captures[load.capture]
    if plan.origin is not None:  # TMA writes whole pieces, and the positions of a tile may be any
        return None
    if dims is None or array.dtype not in staging.ITEM_SIZES or sum(o.capture == load.capture for o in loads) > 1:
        return None
    if isinstance(slope, ir.Lit) and slope.value == 0:
        return None
    needed = {"q", "kv"} | ({"h"} if plan.q_heads > 1 else set())
    if not needed <= {axis for axis, _ in dims}:
        return None
    return DirectGradient(load_number, load.capture, dims, array.dtype, array.shape)


def direct_gradients(
    plan: KernelPlan, derivative: ir.Program | None, wanted: tuple[bool, ...]
) -> tuple[DirectGradient, ...]:
    """The direct gradients of a dQ kernel on mma.sync or tcgen05, whose CTAs take one batch entry and which needs no shared memory for
    them: those of the wanted arrays that `_direct_gradient` allows and that have an element for each batch entry, which a batch of 1
    always has; () without a score_mod.

    plan         with extra features joined to the head dim
    derivative   score_mod with its derivatives, None for the identity
    wanted       for each captured array of the score program: whether its gradient is asked for
    """
    if derivative is None:
        return ()
    loads = enumerate(gradient_loads(derivative))
    found = (_direct_gradient(plan, derivative, n) for n, load in loads if wanted[load.capture])
    return tuple(one for one in found if one is not None and (one.has("b") or plan.batch == 1))


# ------------------------------------------------------------------- the plan


@dataclasses.dataclass(frozen=True)
class DenseBiasPlan:
    """What the backward kernels for Hopper do, in one call, with captured arrays that have an element for each (query, key).

    staged             the load whose array is staged through shared memory (None: no array is)
    staged_type        dtype of that array
    direct_gradients   what the dQ kernel writes
    batch_entries      how many batch entries one CTA of the dQ kernel takes; more than 1 if it sums direct gradients over them
    """

    staged: ir.Load | None = None
    staged_type: str = "bfloat16"
    direct_gradients: tuple[DirectGradient, ...] = ()
    batch_entries: int = 1

    @property
    def types(self) -> DenseBiasTypes:
        """The part of this plan that the shared memory of a kernel depends on: the dtype of the staged array, None
        where none is staged; the dtype of each direct gradient; and the batch entries of a CTA.
        """
        staged = None if self.staged is None else self.staged_type
        return DenseBiasTypes(staged, tuple(one.dtype for one in self.direct_gradients), self.batch_entries)


def _batch_entries(plan: KernelPlan, bias: DenseBiasPlan, gradient: DirectGradient) -> int:
    """How many batch entries a CTA of the dQ kernel must take to write `gradient` beside the direct gradients of
    `bias`; 0 if it cannot, also because these need another number.

    It is 1 for an array with an element for each batch entry, otherwise the whole batch. Entries can share a CTA if
    they have the same block lists and the same staged tile, and if their dQ accumulators fit: batch times the larger
    padded head dim, times the parts of float32, is at most LARGEST_UNSPLIT_DIM.
    """
    entries = 1 if gradient.has("b") else plan.batch
    if bias.direct_gradients and entries != bias.batch_entries:
        return 0
    if entries == 1:
        return 1
    same_lists = plan.blocks is None or plan.blocks.batch == 1
    dim = max(padded_dims(plan)) * parts_of(plan)
    same_tile = bias.staged is None or not any("b" in ir.axes_of(a) for a in bias.staged.index)
    return entries if same_lists and same_tile and entries * dim <= LARGEST_UNSPLIT_DIM else 0


def dense_bias_plan(plan: KernelPlan, derivative: ir.Program | None, wanted: tuple[bool, ...]) -> DenseBiasPlan:
    """Decides what the backward kernels for Hopper do, in one call, with dense biases: which array is staged, and which gradients are
    direct, as many as fit the dQ kernel's shared memory.

    plan         with extra features joined to the head dim
    derivative   score_mod with its derivatives, None for the identity
    wanted       for each captured array of the score program: whether its gradient is asked for

    The result is empty without a score_mod, with an origin, and above padded head dim LARGEST_UNSPLIT_DIM, because the dQ kernel would
    spill 200 to 490 bytes a thread there. An array is staged also if no gradient is wanted. Loads are taken in order. A load whose
    gradient does not fit, or that needs another number of batch entries than the loads before it, is left to capture_gradients.py.
    """
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
    """The captured arrays with the staged array padded with zeros to whole tiles for the simulator, which does not
    zero-fill past an end.

    bias       says which array is staged
    captures   as kernels take them

    Unchanged on the device, where TMA fills with zeros, and where no array is staged.
    """
    if bias.staged is None or not plan.options.interpret:
        return captures
    arrays = list(captures.score)
    array = arrays[bias.staged.capture]
    least = (common.whole_len(plan, "q"), common.whole_len(plan, "kv"))
    widths = [(0, max(0, n - have)) for n, have in zip(least, array.shape[-2:], strict=True)]
    arrays[bias.staged.capture] = jnp.pad(array, [(0, 0)] * (array.ndim - 2) + widths)
    return captures._replace(score=tuple(arrays))
