"""Runs one kernel: assembles the pallas_call from an order of visits, hoisted operands, inputs, outputs and scratch.

Inputs, outputs and scratch are named tuples of the kernel's own; the kernel body gets references in the same tuples.
The scalar-prefetch arrays are, in this order: those of the order (rows, packed, bits), the two scalar tables of the
hoisted operands, and what the kernel adds (sinks, page numbers, lengths). Where the visit lists are cut into chunks,
the pallas_call runs in a loop that passes the outputs through in place.
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
from flexjax.backends.mosaic_tpu.visit_order import TileVisit, VisitOrder, when_on

I = typing.TypeVar("I")
O = typing.TypeVar("O")
S = typing.TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Output:
    """An output array of a kernel."""

    shape: tuple[int, ...]
    dtype: str
    spec: pl.BlockSpec
    zeroed: bool = False  # whether blocks that no visit writes must be 0 in the result


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One kernel and its arrays."""

    name: str  # in profiles
    order: VisitOrder  # which tile each grid step visits
    hoisted: HoistedOperands
    inputs: object  # pytree of Operand
    outputs: object  # pytree of Output
    scratch: object  # pytree of scratch shapes: pltpu.VMEM, pltpu.SMEM, semaphores
    vmem_limit: int  # bytes
    interpret: bool  # whether to run in the simulator
    prefetched: tuple[jax.Array, ...] = ()  # what the kernel adds to the scalar prefetch


@dataclasses.dataclass(frozen=True)
class KernelRefs(typing.Generic[I, O, S]):
    """The references that a kernel body gets: inputs, outputs and scratch in the tuples of the KernelCall."""

    tables: tuple[jax.Ref, ...]  # scalar-prefetch arrays of the order
    scalars: tuple[jax.Ref, ...]  # the two tables of hoisted scalars
    prefetched: tuple[jax.Ref, ...]  # scalar-prefetch arrays that the kernel added
    hoisted: tuple[jax.Ref, ...]  # hoisted operands in VMEM
    inputs: I
    outputs: O
    scratch: S


class KernelStep(typing.NamedTuple):
    """A strip of the tile of one visit: what the kernel works on at a time."""

    refs: KernelRefs
    visit: TileVisit
    strip: Strip  # which columns of the tile
    checked: bool  # whether some entries of the strip may be hidden or past the end


def each_strip(
    refs: KernelRefs,
    visit: TileVisit,
    kinds: frozenset[int],
    tile: tuple[int, int, int],
    add: Callable[[KernelStep], None],
) -> None:
    """In a kernel: `add` for each strip of the visited `tile`, (rows, columns, those of a strip); none if idle."""
    rows, columns, width = tile

    def every_strip(checked: bool) -> None:
        for col0 in range(0, columns, width):
            add(KernelStep(refs, visit, Strip(rows, col0, min(width, columns - col0)), checked))

    when_on(visit, kinds, every_strip)


def prefetch_count_after_order(added: int) -> int:
    """The two tables of hoisted scalars, and the `added` arrays of the kernel."""
    return 2 + added


def launch(call: KernelCall, body: Callable[[KernelRefs], None]) -> object:
    """Runs a kernel over all visits, one launch for each chunk; returns the arrays of `call.outputs`.

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
        """The block spec of the input that is aliased to an output, so that the output keeps what was in it before."""
        # The simulator pads an output to whole blocks, and must pad the array that it aliases alike.
        return output.spec if call.interpret else pl.BlockSpec(memory_space=pl.ANY)

    def run(chunk: jax.Array | int, before: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs, a flat list, after one launch, which writes into those of `before` in place."""
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
    """The mesh axes of a surrounding shard_map along which any of the arrays varies, as the type of all outputs."""
    axes = (jax.typeof(x).manual_axis_type.varying for x in arrays)
    return jax.sharding.ManualAxisType(varying=frozenset().union(*axes))


def _as_varying(array: jax.Array, varying: jax.sharding.ManualAxisType) -> jax.Array:
    """Cast to vary along all mesh axes of `varying`."""
    missing = varying.varying - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array
