"""Sums of g by element in the shared memory of a CTA, in float32, for an array of which a head reads few elements at
computed places, such as a table of biases by a bucket of time.

The lists of a head (lists.py, class scalar) are worked through by CTAs of their own. A computing warpgroup has `copies`
copies of the sums, [rows, copies]: a copy for each thread, or for each run of 2, 4 or 8 lanes, which then take turns.
So no two threads add to a copy at once, the order of the additions is that of the visits and of a thread's elements,
and lanes meet no bank conflicts, because they add in columns next to each other. After the last visit the warpgroup
sums the copies and writes its sums, and XLA sums those of the lists of a head and adds them to the array.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir as mlir
from jaxlib.mlir.dialects import arith, llvm, scf

from flexjax.backends.mosaic_gpu.captures.scatter import axes, distinct, indices, sum_repeated
from flexjax.backends.mosaic_gpu.captures.tiles import ROWS
from flexjax.backends.mosaic_gpu.machine import thread_tiles
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, inline_mgpu, load
from flexjax.backends.mosaic_gpu.machine.registers import TILE, element, lowered, positions_of, zero_tile
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan, Operands

BATCH = 8
"""Elements of a thread that are read before the first of them is written, to hide the latency, where lanes take turns.
"""


def moving(load: ir.Load) -> tuple[int, ...]:
    """The dimensions of the array whose index depends on query or key; the others choose what a head reads."""
    return tuple(n for n, atom in enumerate(load.index) if ir.axes_of(atom) - ir.UNIFORM)


def elements_of_head(derivative: ir.Program, load: ir.Load) -> int | None:
    """How many elements of the array a head may read; None where `add_heads` cannot say which, because a Call does."""
    fixed = tuple(atom for atom in load.index if not ir.axes_of(atom) - ir.UNIFORM)
    needed = ir.uses(derivative.steps, fixed)
    for step in derivative.steps:
        if isinstance(step, ir.Call) and any(out.id in needed for out in step.outs):
            return None
    return math.prod(derivative.captures[load.capture].shape[n] for n in moving(load))


def add_heads(
    plan: KernelPlan, operands: Operands, derivative: ir.Program, load: ir.Load, sums: jax.Array, total: jax.Array
) -> jax.Array:
    """`total`, in the shape of the captured array, with the sums of each head, [b, h, elements of a head], added to the
    elements that it reads.
    """
    last = moving(load)
    order = (*(n for n in range(total.ndim) if n not in last), *last)
    of_head = dataclasses.replace(load, index=tuple(load.index[n] for n in order[: -len(last)]))
    own = axes(of_head)
    sums = sums.sum(tuple(n for n, axis in enumerate("bh") if axis not in own), keepdims=True)
    turned = total.transpose(order)
    heads = turned.reshape(*turned.shape[: -len(last)], -1)
    if not of_head.index:
        heads = heads + sums[0, 0]
    else:
        lengths = heads.shape[:-1]
        found = indices(plan, operands, derivative, of_head, 2)
        index = [jnp.broadcast_to(jnp.clip(i, 0, n - 1), sums.shape[:2]) for i, n in zip(found, lengths, strict=True)]
        if distinct(plan, of_head):
            heads = heads.at[tuple(index)].add(sums, mode="drop", unique_indices=True)
        else:
            size = sums.shape[-1]
            first = sum(i * np.int32(math.prod(lengths[n + 1 :])) for n, i in enumerate(index)) * np.int32(size)
            places = jnp.asarray(first)[..., None] + np.arange(size, dtype=np.int32)
            heads = heads + sum_repeated(places.ravel(), sums.ravel(), heads.size).reshape(heads.shape)
    return heads.reshape(turned.shape).transpose(np.argsort(order))


# ------------------------------------------------------------------- in a kernel


def clear(sums: Ref) -> None:
    """Zeroes the sums of a warpgroup, [rows, copies]."""
    rows, copies = sums.shape
    for row in range(0, rows, ROWS):
        sums.at[pl.ds(row, ROWS)][...] = zero_tile((ROWS, copies))
    meet()


def write(sums: Ref, out: Ref) -> None:
    """Writes the sums of all copies of a warpgroup, [rows, copies], to `out`, [rows] in global memory."""
    meet()
    for row in range(0, sums.shape[0], ROWS):
        here = pl.ds(row, ROWS)
        copies = load(sums.at[here], TILE, optimized=False)
        out.at[here][...] = thread_tiles.sum_lanes(thread_tiles.partial_row_sums(copies))


@device_op
def meet() -> None:
    """Waits for the other threads of the warpgroup, whose writes to shared memory are then seen."""

    @inline_mgpu()
    def barrier() -> None:
        mgpu.utils.warpgroup_barrier()

    barrier()


@device_op
def add_private(sums: Ref, index: jax.Array, value: jax.Array) -> None:
    """Adds value to sums[index] in the copy of each thread; several elements may have one index. No checks.

    sums    [rows, copies] float32 in shared memory, of this warpgroup
    index   [rows of a part, keys of a part] int32 in the layout of the WGMMA accumulator
    value   float32 in the same shape and layout
    """
    copies = sums.shape[1]
    turns = WARPGROUP // copies

    @inline_mgpu(plgpu.RefType(), TILE, TILE)
    def scatter(memory: mlir.Value, places: mgpu.FragmentedArray, values: mgpu.FragmentedArray) -> None:
        i32, f32 = mlir.IntegerType.get_signless(32), mlir.F32Type.get()
        number = lambda n: mgpu.c(n, i32)
        thread = arith.remui(mgpu.utils.thread_idx(), number(WARPGROUP))
        own = arith.divui(thread, number(turns))
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [own], f32)
        batch = 1 if turns == 1 else BATCH
        items = [(register, item) for register, item, _ in positions_of(lowered(TILE), values.shape).constants]
        found = [element(places.registers[register], item) for register, item in items]
        numbers = [element(values.registers[register], item) for register, item in items]
        pointers = [mgpu.utils.getelementptr(base, [arith.muli(at, number(copies))], f32) for at in found]
        batches = [slice(n, n + batch) for n in range(0, len(items), batch)]
        joined = [_joined(found[of], numbers[of]) for of in batches]

        def add_all() -> None:
            for of, more in zip(batches, joined, strict=True):
                before = [llvm.load(f32, pointer) for pointer in pointers[of]]
                for pointer, start, value in zip(pointers[of], before, more, strict=True):
                    llvm.store(arith.addf(start, value), pointer)

        if turns == 1:
            add_all()
            return
        loop = scf.ForOp(number(0), number(turns), number(1))
        with mlir.InsertionPoint(loop.body):
            turn = arith.remui(thread, number(turns))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, turn, loop.induction_variable)):
                add_all()
            mgpu.utils.warp_barrier()  # the next lane sees what this one wrote
            scf.yield_([])

    scatter(sums, index, value)


def _joined(places: list[mlir.Value], numbers: list[mlir.Value]) -> list[mlir.Value]:
    """The numbers, each with those before it that go to the same place: the last one there has the sum of all."""
    found: list[mlir.Value] = []
    for n, number in enumerate(numbers):
        before = mgpu.c(0.0, mlir.F32Type.get())
        for earlier in range(n):
            same = arith.cmpi(arith.CmpIPredicate.eq, places[earlier], places[n])
            before = arith.select(same, found[earlier], before)
        found.append(arith.addf(before, number) if n else number)
    return found
