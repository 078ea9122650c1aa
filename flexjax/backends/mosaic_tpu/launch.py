"""One kernel launch from its parts: order of visits, feeds, inputs, outputs, scratch.

The prefetched arrays are, in this order: the order's own (rows, packed, bits), the two scalar tables of the feeds, and
what the kernel adds (sinks). Where the lists were cut into chunks the launch sits in a loop and the outputs are passed
through it in place.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends.mosaic_tpu.feeds import Feeds, Operand
from flexjax.backends.mosaic_tpu.tables import DenseOrder, ListedOrder


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of a kernel; `zeroed` where blocks that no visit writes must read 0."""

    shape: tuple[int, ...]
    dtype: str
    spec: pl.BlockSpec
    zeroed: bool = False


@dataclasses.dataclass(frozen=True)
class Refs:
    """What a kernel body gets."""

    tables: tuple[jax.Ref, ...]
    scalars: tuple[jax.Ref, ...]
    extra: tuple[jax.Ref, ...]
    inputs: tuple[jax.Ref, ...]
    feeds: tuple[jax.Ref, ...]
    outputs: tuple[jax.Ref, ...]
    scratch: tuple[jax.Ref, ...]


def prefetch_count(order: DenseOrder | ListedOrder, extra: int) -> int:
    return order.prefetch + 2 + extra


def launch(
    name: str,
    body: Callable[[Refs], None],
    order: DenseOrder | ListedOrder,
    feeds: Feeds,
    extra: Sequence[jax.Array],
    inputs: Sequence[Operand],
    outputs: Sequence[Output],
    scratch: Sequence[object],
    vmem_limit: int,
    interpret: bool,
) -> list[jax.Array]:
    """Runs the kernel over all visits and returns its outputs."""
    count = prefetch_count(order, len(extra))
    operands = [*inputs, *feeds.operands]
    chunked = order.chunks > 1
    passed = [n for n, o in enumerate(outputs) if chunked or o.zeroed]

    def kernel(*refs: jax.Ref) -> None:
        cuts = (
            order.prefetch,
            2,
            len(extra),
            len(inputs),
            len(feeds.operands),
            len(passed),
            len(outputs),
            len(scratch),
        )
        parts, at = [], 0
        for size in cuts:
            parts.append(tuple(refs[at : at + size]))
            at += size
        tables, scalars, added, given, fed, _, out, local = parts
        body(Refs(tables, scalars, added, given, fed, out, local))

    def _held(output: Output) -> pl.BlockSpec:
        # Where the simulator pads an output to whole blocks it must pad what it aliases alike.
        return output.spec if interpret else pl.BlockSpec(memory_space=pl.ANY)

    def run(chunk: jax.Array | int, before: Sequence[jax.Array]) -> list[jax.Array]:
        tables, visits = order.tables(chunk)
        grid = order.grid(visits)
        call = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=count,
                grid=grid,
                in_specs=[o.spec for o in operands] + [_held(outputs[n]) for n in passed],
                out_specs=[o.spec for o in outputs],
                scratch_shapes=typing.cast(list[typing.Any], list(scratch)),
            ),
            out_shape=[jax.ShapeDtypeStruct(o.shape, o.dtype, manual_axis_type=varying) for o in outputs],
            input_output_aliases={count + len(operands) + n: place for n, place in enumerate(passed)},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=typing.cast(typing.Any, order.semantics()), vmem_limit_bytes=vmem_limit
            ),
            name=name,
            interpret=interpret,
        )
        given = (*tables, *feeds.tables, *extra, *[o.array for o in operands], *[before[n] for n in passed])
        return list(call(*(_as_varying(x, varying) for x in given)))

    varying = _varying([*order.arrays, *feeds.tables, *extra, *[o.array for o in operands]])
    start = [_as_varying(jnp.zeros(o.shape, o.dtype), varying) for o in outputs] if passed else []
    if not chunked:
        return run(0, start)
    return list(lax.fori_loop(0, order.chunks, lambda chunk, held: run(chunk, held), start))


def _varying(arrays: Sequence[jax.Array]) -> jax.sharding.ManualAxisType:
    """The axes of a surrounding shard_map along which any of the arrays differs from shard to shard: so do all outputs."""
    axes = (jax.typeof(x).manual_axis_type.varying for x in arrays)
    return jax.sharding.ManualAxisType(varying=frozenset().union(*axes))


def _as_varying(array: jax.Array, varying: jax.sharding.ManualAxisType) -> jax.Array:
    missing = varying.varying - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array
