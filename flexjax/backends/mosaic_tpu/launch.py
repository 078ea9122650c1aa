"""Runs one kernel: assembles the pallas_call from an order of visits, hoisted operands, inputs, outputs and scratch.

Inputs, outputs and scratch are named tuples of the kernel's own; the launch passes references to the kernel body in the same
tuples. The scalar-prefetch arrays are, in this order: those of the order (rows, packed, bits), the two scalar tables of the
hoisted operands, and what the kernel adds (sinks, page numbers, lengths). Where the visit lists are cut into chunks, the
pallas_call runs in a loop that passes the outputs through in place.

A visit is a grid step that computes one tile. A strip is the part of a tile whose scores are computed at once. Hoisted operands
are values of the mods that XLA computes before the kernel starts (hoisted_operands.py). A reference is what a Pallas kernel body
gets for an array: it reads and writes the current block through it.

A KernelCall is everything about one kernel but its body, and KernelRefs are the references that the body gets.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends.mosaic_tpu.hoisted_operands import HoistedOperands, Operand
from flexjax.backends.mosaic_tpu.tile_programs import Strip
from flexjax.backends.mosaic_tpu.visit_order import TileVisit, VisitOrder

I = typing.TypeVar("I")
O = typing.TypeVar("O")
S = typing.TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Output:
    """An output array of a kernel.

    shape, dtype   of the whole array
    spec           its block spec
    zeroed         whether blocks that no visit writes must be 0 in the result
    """

    shape: tuple[int, ...]
    dtype: str
    spec: pl.BlockSpec
    zeroed: bool = False


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One kernel and its arrays.

    name         of the kernel in profiles
    order        which tile each grid step visits
    hoisted      the hoisted operands of the kernel's programs
    inputs       pytree of Operand
    outputs      pytree of Output
    scratch      pytree of scratch shapes: pltpu.VMEM, pltpu.SMEM, semaphores
    prefetched   arrays that the kernel adds to the scalar prefetch
    vmem_limit   bytes of VMEM that the compiler may use
    interpret    whether to run in the simulator
    """

    name: str
    order: VisitOrder
    hoisted: HoistedOperands
    inputs: object
    outputs: object
    scratch: object
    vmem_limit: int
    interpret: bool
    prefetched: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class KernelRefs(typing.Generic[I, O, S]):
    """The references that a kernel body gets.

    tables       scalar-prefetch arrays of the order
    scalars      the two tables of hoisted scalars
    prefetched   the scalar-prefetch arrays that the kernel added
    hoisted      hoisted operands in VMEM
    inputs, outputs, scratch   the tuples of the KernelCall, of references
    """

    tables: tuple[jax.Ref, ...]
    scalars: tuple[jax.Ref, ...]
    prefetched: tuple[jax.Ref, ...]
    hoisted: tuple[jax.Ref, ...]
    inputs: I
    outputs: O
    scratch: S


class KernelStep(typing.NamedTuple):
    """A strip of the tile of one visit: what the kernel works on at a time.

    refs      the references of the kernel body
    visit     which tile, and its kind
    strip     which columns of the tile
    checked   whether some entries of the strip may be hidden or past the end, so that they must be checked
    """

    refs: KernelRefs
    visit: TileVisit
    strip: Strip
    checked: bool


def prefetch_count_after_order(added: int) -> int:
    """How many scalar-prefetch arrays follow those of the order: the two tables of hoisted scalars and the `added` of the kernel."""
    return 2 + added


def launch(call: KernelCall, body: Callable[[KernelRefs], None]) -> object:
    """Runs a kernel over all visits, in one launch or one for each chunk; returns its output arrays in the pytree of
    `call.outputs`.

    body   the kernel body, called in each grid step

    Launches write into the same outputs, but none can read what an earlier one wrote. A block that no visit writes is 0
    where its Output is `zeroed` or there are several chunks, and undefined otherwise.
    """
    order, hoisted = call.order, call.hoisted
    inputs, input_tree = jax.tree.flatten(call.inputs)
    outputs, output_tree = jax.tree.flatten(call.outputs)
    scratch, scratch_tree = jax.tree.flatten(call.scratch)
    count = order.prefetched + prefetch_count_after_order(len(call.prefetched))
    operands: list[Operand] = [*inputs, *hoisted.operands]
    passed_through = [n for n, o in enumerate(outputs) if order.chunks > 1 or o.zeroed]

    def kernel(*refs: jax.Ref) -> None:
        """What pallas_call runs: sorts the flat references `refs` into KernelRefs and calls the body, which does not get the
        inputs that are aliased to outputs.
        """
        sizes = (order.prefetched, 2, len(call.prefetched), len(inputs), len(hoisted.operands), len(passed_through))
        parts, at = [], 0
        for size in (*sizes, len(outputs), len(scratch)):
            parts.append(tuple(refs[at : at + size]))
            at += size
        tables, scalars, added, given, hoisted_refs, _, out, local = parts
        body(
            KernelRefs(
                tables,
                scalars,
                added,
                hoisted_refs,
                jax.tree.unflatten(input_tree, given),
                jax.tree.unflatten(output_tree, out),
                jax.tree.unflatten(scratch_tree, local),
            )
        )

    def alias_spec(output: Output) -> pl.BlockSpec:
        """The block spec of the input that is aliased to an output, so that the output keeps what was in it before: on a TPU the
        whole array in place, in the simulator the blocks of the output.
        """
        # The simulator pads an output to whole blocks, and must pad the array that it aliases alike.
        return output.spec if call.interpret else pl.BlockSpec(memory_space=pl.ANY)

    def run(chunk: jax.Array | int, before: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs after one launch, a flat list in the order of `outputs`.

        chunk    which chunk of the visit lists the launch visits
        before   the outputs before it; the launch writes into those that are passed through (all if there are several chunks,
                 else those that are `zeroed`). [] if none is
        """
        tables, visits = order.prefetch_arrays(chunk)
        pallas_call = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=count,
                grid=order.grid(visits),
                in_specs=[o.spec for o in operands] + [alias_spec(outputs[n]) for n in passed_through],
                out_specs=[o.spec for o in outputs],
                scratch_shapes=scratch,
            ),
            out_shape=[jax.ShapeDtypeStruct(o.shape, o.dtype, manual_axis_type=varying) for o in outputs],
            input_output_aliases={count + len(operands) + n: place for n, place in enumerate(passed_through)},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=typing.cast(typing.Any, order.semantics()), vmem_limit_bytes=call.vmem_limit
            ),
            name=call.name,
            interpret=call.interpret,
        )
        given = (*tables, *hoisted.scalar_tables, *call.prefetched, *[o.array for o in operands])
        given = (*given, *[before[n] for n in passed_through])
        return list(pallas_call(*(_as_varying(x, varying) for x in given)))

    varying = _varying([*order.arrays, *hoisted.scalar_tables, *call.prefetched, *[o.array for o in operands]])
    start = [_as_varying(jnp.zeros(o.shape, o.dtype), varying) for o in outputs] if passed_through else []
    if order.chunks == 1:
        found = run(0, start)
    else:
        found = list(lax.fori_loop(0, order.chunks, lambda chunk, before: run(chunk, before), start))
    return jax.tree.unflatten(output_tree, found)


def _varying(arrays: Sequence[jax.Array]) -> jax.sharding.ManualAxisType:
    """The mesh axes of a surrounding shard_map along which any of the arrays varies (none outside of shard_map), as the type that all
    outputs get and to which all operands are cast (`_as_varying`).
    """
    axes = (jax.typeof(x).manual_axis_type.varying for x in arrays)
    return jax.sharding.ManualAxisType(varying=frozenset().union(*axes))


def _as_varying(array: jax.Array, varying: jax.sharding.ManualAxisType) -> jax.Array:
    """The array, cast to vary along all mesh axes of `varying` (of a surrounding shard_map)."""
    missing = varying.varying - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array
