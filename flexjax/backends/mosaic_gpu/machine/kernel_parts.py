"""The frame that all GPU kernels share: how a kernel is written, launched, and given its operands.

A kernel is a function of three named tuples,

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: Scratch[Ref]) -> None

The caller of `launch` gives `Inputs` of arrays, `Outputs` of shapes, and `Scratch` of descriptions (shared_memory.py).
An operand that a kernel can do without is None. `launch` replaces all of them by Refs and runs the kernel, on the
device or in the simulator. A kernel is traced once and runs in every CTA; its warpgroups branch by number.

Below that: Mosaic's operations that lack types or need a jax that pyright does not read (`load`, `inline_mgpu`,
`ptx`, accumulators), and operands in the form in which the kernels take them (`pad`, `rows_of`).
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.ref
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from flexjax.backends.mosaic_gpu.machine.allocation import allocated
from flexjax.backends.mosaic_gpu.machine.columns import COLUMNS
from flexjax.backends.mosaic_gpu.machine.shared_memory import ClusterTiles
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.plan.kernel_plan import KernelPlan

if typing.TYPE_CHECKING:

    class Ref(jax.ref.AbstractRef):
        """An array in global or shared memory, an accumulator or a barrier in a kernel, typed for pyright."""

        shape: tuple[int, ...]
        dtype: np.dtype
        at: "RefIndexer"
        T: "Ref"

        def __getitem__(self, index: object) -> jax.Array:
            """Reads the elements at `index` into registers."""
            ...

        def __setitem__(self, index: object, value: object) -> None:
            """Writes `value` to the elements at `index`."""
            ...

        def transpose(self, permutation: tuple[int, ...]) -> "Ref":
            """The same memory with its dimensions in another order; nothing is moved."""
            ...

    class RefIndexer(typing.Protocol):
        """`ref.at`: selects a part without reading it."""

        def __getitem__(self, index: object) -> Ref:
            """A Ref to the elements at `index`, which are not read."""
            ...
else:
    Ref = jax.ref.AbstractRef

Scalar = jax.Array  # an int32 or bool of shape [] inside a kernel, the same in all threads of a warpgroup

SCALAR_LAYOUT = plgpu.Layout.WG_SPLAT(())
SCALAR_INT = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR_LAYOUT)
"""Argument and result of `inline_mgpu`: one int32 for the whole warpgroup."""


# ------------------------------------------------------------------- the launch


def launch(
    kernel: Callable[..., None],
    inputs: tuple,
    outputs: tuple,
    scratch: tuple,
    *,
    name: str,
    programs: int,
    warpgroups: int,
    ctas: int = 1,
) -> typing.Any:
    """Runs `kernel(inputs, outputs, scratch)` in every CTA and returns its results in the structure of `outputs`.

    inputs       arrays; `jax.new_ref` arrays where the kernel also writes them
    outputs      see `output`; what the kernel does not write is undefined
    programs     number of clusters; a kernel reads the number of its cluster by `lax.axis_index("program")`
    warpgroups   of a CTA; a kernel reads the number of its warpgroup by `lax.axis_index("wg")`, if there are several
    ctas         of a cluster, 1 or 2; with 2, a kernel reads the number of its CTA by `lax.axis_index(COLUMNS)`
    """
    shapes, structure = jax.tree.flatten(outputs)
    memory = jax.tree.map(allocated, scratch)
    of_cluster = [part for part in jax.tree.leaves(scratch) if isinstance(part, ClusterTiles)]
    in_global = [part for part in of_cluster if allocated(part) is None]
    buffers = [jax.ShapeDtypeStruct((programs, ctas, part.groups, *part.shape), jnp.float32) for part in in_global]
    thread_name = "wg" if warpgroups > 1 else None

    def on_refs(inputs: tuple, *results: Ref) -> None:
        found, shared = results[: len(shapes)], iter(results[len(shapes) :])

        def run(memory: tuple) -> None:
            put = lambda part, ref: next(shared) if part in in_global else ref
            kernel(inputs, jax.tree.unflatten(structure, found), jax.tree.map(put, scratch, memory))

        pl.run_scoped(run, memory, collective_axes=() if thread_name is None else thread_name)

    run = pl.kernel(
        on_refs,
        out_type=[*shapes, *buffers],
        mesh=plgpu.Mesh(
            grid=(programs,),
            grid_names=("program",),
            cluster=(ctas,) if ctas > 1 else (),
            cluster_names=(COLUMNS,) if ctas > 1 else (),
            num_threads=warpgroups if warpgroups > 1 else None,
            thread_name=thread_name,
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # rows of a tile lie within a warp, so no sum crosses warps
        ),
        interpret=interpreter(),
        name=name,
    )
    results = typing.cast(Callable[[tuple], list[jax.Array]], run)(inputs)
    return jax.tree.unflatten(structure, results[: len(shapes)])


def overlaid(both: Ref) -> tuple[Ref, Ref]:
    """The Refs (first, second) of OverlaidTensorTiles, as the pair that pyright does not see."""
    first, second = typing.cast(tuple[Ref, Ref], both)
    return first, second


@device_op
def interpreter() -> object:
    """What Pallas's argument `interpret` says."""
    return False


# ------------------------------------------------------------------- Mosaic's operations with types


@device_op
def load(ref: Ref, layout: object, *, optimized: bool = True) -> jax.Array:
    """`ref` in registers; without `optimized` Mosaic may read global memory, and layouts without fast instructions."""
    # The index has a default from jax 0.11; layouts have no public type.
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue, reportArgumentType]


def accumulator(shape: tuple[int, int]) -> typing.Any:
    """The description, for `pl.run_scoped`, of a float32 WGMMA accumulator that is zero at the start."""
    # It is public, but re-exported under its own name.
    return plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def accumulator_from(value: jax.Array) -> typing.Any:
    """The description, for `pl.run_state`, of a WGMMA accumulator that starts from `value`."""
    return plgpu.ACC.init(value)  # pyright: ignore[reportPrivateImportUsage]  # as above


@device_op
def add_wgmma(total: jax.Array, weights: jax.Array, values: Ref) -> jax.Array:
    """total + weights values by one WGMMA, `weights` in registers, `values` in shared memory; waits for the product."""
    # The operands are of class Ref.
    add = pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))  # pyright: ignore[reportArgumentType]
    return typing.cast(jax.Array, add(accumulator_from(total)))


@typing.overload
def inline_mgpu(
    *arguments: object, returns: plgpu.ShapeDtypeStruct
) -> Callable[[Callable[..., object]], Callable[..., jax.Array]]: ...
@typing.overload
def inline_mgpu(
    *arguments: object, returns: tuple[plgpu.ShapeDtypeStruct, ...]
) -> Callable[[Callable[..., object]], Callable[..., tuple[jax.Array, ...]]]: ...
@typing.overload
def inline_mgpu(*arguments: object) -> Callable[[Callable[..., object]], Callable[..., None]]: ...
def inline_mgpu(
    *arguments: object, returns: plgpu.ShapeDtypeStruct | tuple[plgpu.ShapeDtypeStruct, ...] | None = None
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Decorates a function of MLIR values, which runs in every thread, into one of arrays and Refs.

    arguments   for each argument a register layout (a thread's FragmentedArray) or `plgpu.RefType()` (a memref)
    returns     shape, dtype and layout of the FragmentedArray that the function returns, or a tuple of them
    """

    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        inlined = plgpu.inline_mgpu(arg_types=arguments, return_type=returns)
        return typing.cast(Callable, inlined(lambda _, *values: function(*values)))

    return decorate


def ptx(instructions: str, *operands: ir.Value, result: ir.Type | None = None) -> ir.Value:
    """Emits PTX inside `inline_mgpu`: `$0` is the result if there is one, operands follow."""
    return mgpu_utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
        instructions, *operands, result_types=result, has_side_effects=True
    )


@device_op
def fence_shared() -> None:
    """Makes the thread's writes to shared memory visible to TMA and WGMMA, after an mbarrier at which all arrive."""

    @inline_mgpu()
    def fence() -> None:
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    fence()


@device_op
def arrive_read(free: Ref) -> None:
    """Arrives at `free`, the barrier of a slot that this warpgroup has read for the last time; does not wait."""
    plgpu.barrier_arrive(free)


def scalar_of(value: mgpu.FragmentedArray) -> ir.Value:
    return value.registers.flat[0]


def splat_int(value: ir.Value) -> mgpu.FragmentedArray:
    """`value`, an i32 that all threads agree on, in the form in which a function returns a SCALAR_INT."""
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def i32(value: jax.typing.ArrayLike) -> jax.Array:
    """`value` as int32 of shape []: indices of a kernel are int32, whatever jax's default is."""
    return jnp.asarray(value, jnp.int32)


@device_op
def not_hoisted(index: Scalar) -> Scalar:
    """`index`, in a form that hides from the compiler that the value does not change in a loop."""

    # Otherwise the addresses of all slices of a tile in shared memory are computed before the loop and kept in
    # registers, two for each slice of 16 columns, which spills at large head dims.
    @inline_mgpu(SCALAR_LAYOUT, returns=SCALAR_INT)
    def opaque(value: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        moved = ptx("mov.b32 $0, $1;", scalar_of(value), result=ir.IntegerType.get_signless(32))
        return splat_int(moved)

    return opaque(index)


# ------------------------------------------------------------------- operands as the kernels take them


def output(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, like: jax.Array) -> jax.ShapeDtypeStruct:
    """A result of a kernel, for `launch`; inside shard_map it varies over the mesh axes of the operand `like`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def slot_of(number: Scalar, slots: int) -> Scalar:
    """The slot of a ring that holds tile `number`, counted from 0."""
    return number & jnp.int32(slots - 1) if slots & (slots - 1) == 0 else lax.rem(number, jnp.int32(slots))


def rows_of(ref: Ref, layout: str, b: Scalar, h: Scalar, start: Scalar, size: int, columns: int | None = None) -> Ref:
    """Rows start .. start + size of head (b, h), unread; `columns`: those of this CTA of a cluster."""
    rows = pl.ds(start, size)
    if columns is None or columns == ref.shape[-1]:
        return ref.at[b, rows, h] if layout == "BTNH" else ref.at[b, h, rows]
    own = pl.ds(lax.axis_index(COLUMNS) * columns, columns)
    return ref.at[b, rows, h, own] if layout == "BTNH" else ref.at[b, h, rows, own]


def slot_parts(ring: Ref, slot: Scalar | int, parts: int, rows: object = slice(None)) -> tuple[Ref, ...]:
    """Refs to the tiles of a slot of `ring`, [slots * parts, rows, D], one for each part (float_parts.py)."""
    if parts == 1:
        return (ring.at[slot] if rows == slice(None) else ring.at[slot, rows],)
    return tuple(slot_parts(ring, slot * parts + n, 1, rows)[0] for n in range(parts))


def copy_parts(
    plan: KernelPlan, source: Ref, b: Scalar, h: Scalar, start: Scalar, targets: tuple[Ref, ...], arrived: Ref
) -> None:
    """Starts the TMA copies of one tile of an operand in parts to shared memory; each arrives once at `arrived`."""
    for n, target in enumerate(targets):
        rows = rows_of(source, plan.layout, b + n * plan.batch if n else b, h, start, *target.shape)
        plgpu.copy_gmem_to_smem(rows, target, arrived)


def write_parts(plan: KernelPlan, sources: tuple[Ref, ...], target: Ref, b: Scalar, h: Scalar, start: Scalar) -> None:
    """Starts the TMA copies of a gradient's tile in parts to global memory, after `plgpu.commit_smem`."""
    for n, source in enumerate(sources):
        rows = rows_of(target, plan.layout, b + n * plan.batch if n else b, h, start, *source.shape)
        plgpu.copy_smem_to_gmem(source, rows)


def pad(x: jax.Array, layout: str, length: int, dim: int) -> jax.Array:
    """x with zeros appended up to `length` tokens and `dim` features; it must not be longer."""
    time = 1 if layout == "BTNH" else 2
    widths = [(0, 0)] * 4
    widths[time], widths[3] = (0, length - x.shape[time]), (0, dim - x.shape[3])
    return jnp.pad(x, widths) if any(w != (0, 0) for w in widths) else x


# On the device TMA fills with zeros past the end of an array.


@device_op
def whole_tiles(x: jax.Array, lengths: tuple[int, int]) -> jax.Array:
    """`x` [..., T, S] with zeros up to at least the two lengths where a kernel reads them from memory."""
    return x


@device_op
def pool(pages: jax.Array) -> jax.Array:
    """A pool of pages, with one more of zeros where a kernel reads it for page numbers that are not in the pool."""
    return pages
