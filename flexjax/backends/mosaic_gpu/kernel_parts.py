"""The frame that all GPU kernels share: how a kernel is written, launched, and given its operands.

A kernel is a function of three named tuples,

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: Scratch[Ref]) -> None

The caller of `launch` gives `Inputs` of arrays, `Outputs` of shapes, and `Scratch` of descriptions (shared_memory.py).
An operand that a kernel can do without is None. `launch` replaces all of them by Refs and runs the kernel, on the
device or in the simulator (`interpret`). A kernel is traced once and runs in every CTA; its warpgroups take different
branches by their number.

Below that: Mosaic's operations that lack types or need a jax that pyright does not read (`load`, `inline_mgpu`,
`ptx`, accumulators), and operands in the form in which the kernels take them (`pad`, `join_extra`, `rows_of`).
"""

import dataclasses
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

from flexjax.backends.mosaic_gpu.allocation import allocated
from flexjax.backends.mosaic_gpu.columns import COLUMNS
from flexjax.backends.mosaic_gpu.shared_memory import (
    ClusterTiles,
)
from flexjax.plan.kernel_plan import KernelPlan, Operands

if typing.TYPE_CHECKING:

    class Ref(jax.ref.AbstractRef):
        """An array in global or shared memory, an accumulator or a barrier inside a kernel, or a part of one.

        jax declares what can be done with it in a way that pyright does not see; this class says it again.
        """

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

Scalar = jax.Array
"""An int32 or bool of shape [] inside a kernel, the same in all threads of a warpgroup."""

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
    interpret: bool,
    ctas: int = 1,
) -> typing.Any:
    """Runs `kernel(inputs, outputs, scratch)` in every CTA and returns its results in the structure of `outputs`.

    kernel       gets Refs in the three structures; traced once, runs in every warpgroup
    inputs       named tuple of arrays; of `jax.new_ref` arrays where the kernel also writes them
    outputs      named tuple of jax.ShapeDtypeStruct, see `output`; what the kernel does not write is undefined
    scratch      named tuple of descriptions (shared_memory.py)
    name         of the kernel in profiles
    programs     number of clusters; a kernel reads the number of its cluster by `lax.axis_index("program")`
    warpgroups   of a CTA; a kernel reads the number of its warpgroup by `lax.axis_index("wg")`, but the only one has no
                 number
    interpret    run in the simulator instead of on the device
    ctas         of a cluster, 1 or 2; with 2, a kernel reads the number of its CTA by `lax.axis_index(COLUMNS)`

    Fields that are None stay None. Kernels compile with approximate math, and Mosaic adds no barriers.
    """
    shapes, structure = jax.tree.flatten(outputs)
    in_global = [part for part in jax.tree.leaves(scratch) if interpret and isinstance(part, ClusterTiles)]
    buffers = [jax.ShapeDtypeStruct((programs, ctas, part.groups, *part.shape), jnp.float32) for part in in_global]
    memory = jax.tree.map(lambda part: None if part in in_global else allocated(part, interpret), scratch)
    thread_name = "wg" if warpgroups > 1 else None

    def on_refs(inputs: tuple, *results: Ref) -> None:
        """The function that `pl.kernel` calls on Refs: allocates the CTA's shared memory and calls the kernel.

        inputs    Refs in the structure of `inputs` of `launch`
        results   Refs to the leaves of `outputs`, then to the tiles of a cluster that the simulator has in global memory
        """
        found, shared = results[: len(shapes)], iter(results[len(shapes) :])

        def run(memory: tuple) -> None:
            """Calls the kernel on its shared memory.

            memory   Refs in the structure of `scratch`; the tiles of a cluster are taken from `results` in the simulator
            """
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
        interpret=simulator() if interpret else False,
        name=name,
    )
    results = typing.cast(Callable[[tuple], list[jax.Array]], run)(inputs)
    return jax.tree.unflatten(structure, results[: len(shapes)])


def overlaid(both: Ref) -> tuple[Ref, Ref]:
    """`both`, the Refs (first, second) of OverlaidTensorTiles, as the pair that pyright does not see."""
    first, second = typing.cast(tuple[Ref, Ref], both)
    return first, second


def simulator() -> object:
    """The parameters that make Pallas run a kernel on the CPU; they exist from jax 0.11 on."""
    return plgpu.InterpretGPUParams()  # pyright: ignore[reportAttributeAccessIssue]


# ------------------------------------------------------------------- Mosaic's operations with types


def load(ref: Ref, layout: object, *, optimized: bool = True) -> jax.Array:
    """The array that `ref` refers to, read into registers in `layout`.

    layout      a `plgpu.Layout`, or one reduced over an axis
    optimized   False: Mosaic may also read global memory, and layouts that it has no fast instructions for
    """
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue, reportArgumentType]  # the index has a default from jax 0.11; layouts have no public type


def accumulator(shape: tuple[int, int]) -> typing.Any:
    """The description, for `pl.run_scoped`, of a float32 WGMMA accumulator of `shape` that is zero at the start."""
    return plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]  # public, but re-exported under its own name


def accumulator_from(value: jax.Array) -> typing.Any:
    """The description, for `pl.run_state`, of a WGMMA accumulator that starts from `value`, float32 in the layout of
    an accumulator.
    """
    return plgpu.ACC.init(value)  # pyright: ignore[reportPrivateImportUsage]  # as above


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
    """Decorates a function of MLIR values into one of arrays and Refs, which a kernel may call.

    The decorated function is traced once and runs in every thread of the warpgroup; a FragmentedArray is the
    registers that one thread holds of an array.

    arguments   for each argument a register layout (the function gets a FragmentedArray) or `plgpu.RefType()` (it
                gets a memref)
    returns     shape, dtype and layout of the FragmentedArray that the function returns, or a tuple of them; None: it
                returns nothing
    """

    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        """The function of arrays and Refs that a kernel calls; it runs `function`, which takes MLIR values."""
        inlined = plgpu.inline_mgpu(arg_types=arguments, return_type=returns)
        return typing.cast(Callable, inlined(lambda _, *values: function(*values)))

    return decorate


def ptx(instructions: str, *operands: ir.Value, result: ir.Type | None = None) -> ir.Value:
    """Emits PTX with side effects, inside `inline_mgpu`; returns its result.

    instructions   PTX; `$0` is the result if there is one, operands follow as `$1`, ... (from `$0` without a result)
    operands       MLIR values
    result         the MLIR type of the result. None: there is none, and the returned value means nothing
    """
    return mgpu_utils.inline_ptx(instructions, *operands, result_types=result, has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on


def fence_shared(interpret: bool) -> None:
    """Makes what the calling thread wrote to shared memory visible to TMA and WGMMA, for a reader that waits at an mbarrier at which every
    thread of the warpgroup arrives after this. Unlike `plgpu.commit_smem` it does not wait for the other threads; in the simulator it is
    `plgpu.commit_smem`.
    """
    if interpret:
        plgpu.commit_smem()
        return

    @inline_mgpu()
    def fence() -> None:
        """The fence between the threads' writes and the asynchronous proxy."""
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    fence()


def scalar_of(value: mgpu.FragmentedArray) -> ir.Value:
    """The MLIR value of a scalar argument, one that `inline_mgpu` was given as SCALAR_LAYOUT."""
    return value.registers.flat[0]


def splat_int(value: ir.Value) -> mgpu.FragmentedArray:
    """`value`, an i32 that is the same in all threads of a warpgroup (or of a warp, where the kernel uses it by warps), in the form in
    which a function returns a SCALAR_INT.
    """
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def i32(value: jax.typing.ArrayLike) -> jax.Array:
    """`value` as int32 of shape []: indices of a kernel are int32, whatever jax's default is."""
    return jnp.asarray(value, jnp.int32)


def not_hoisted(index: Scalar, interpret: bool) -> Scalar:
    """`index`, in a form that hides from the compiler that the value does not change in a loop; in the simulator
    `index` as it is.

    Without it, the compiler computes the addresses of all slices of a tile in shared memory before the loop and keeps
    them in registers, two for each slice of 16 columns, which spills at large head dims.
    """
    if interpret:
        return index

    @inline_mgpu(SCALAR_LAYOUT, returns=SCALAR_INT)
    def opaque(value: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """The same i32, copied by a PTX `mov`, which hides from the compiler that the value is that of `index`."""
        moved = ptx("mov.b32 $0, $1;", scalar_of(value), result=ir.IntegerType.get_signless(32))
        return splat_int(moved)

    return opaque(index)


# ------------------------------------------------------------------- operands as the kernels take them


def output(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, like: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a result of a kernel, for `launch`. Inside shard_map it varies over the mesh axes that
    the operand `like` varies over.
    """
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def slot_of(number: Scalar, slots: int) -> Scalar:
    """The slot of a ring that holds tile `number`, counted from 0: number modulo `slots`, the number of slots."""
    return number & jnp.int32(slots - 1) if slots & (slots - 1) == 0 else lax.rem(number, jnp.int32(slots))


def rows_of(ref: Ref, layout: str, b: Scalar, h: Scalar, start: Scalar, size: int, columns: int | None = None) -> Ref:
    """The rows start .. start + size of head (b, h) of an array, [size, D], without reading them.

    ref       [B, T, N, D] (`layout` "BTNH") or [B, N, T, D]
    columns   of the result, where the CTAs of a cluster share the columns: those of this CTA. None: all
    """
    rows = pl.ds(start, size)
    if columns is None or columns == ref.shape[-1]:
        return ref.at[b, rows, h] if layout == "BTNH" else ref.at[b, h, rows]
    own = pl.ds(lax.axis_index(COLUMNS) * columns, columns)
    return ref.at[b, rows, h, own] if layout == "BTNH" else ref.at[b, h, rows, own]


def slot_parts(ring: Ref, slot: Scalar | int, parts: int, rows: object = slice(None)) -> tuple[Ref, ...]:
    """Refs to the tiles of one slot in shared memory, [rows, D], one for each part of the operand (float_parts.py).
    Nothing is read.

    ring   [slots * parts, rows, D]
    slot   number of the slot
    rows   a slice: which rows of the slot; all of them by default
    """
    if parts == 1:
        return (ring.at[slot] if rows == slice(None) else ring.at[slot, rows],)
    return tuple(slot_parts(ring, slot * parts + n, 1, rows)[0] for n in range(parts))


def copy_parts(
    plan: KernelPlan, source: Ref, b: Scalar, h: Scalar, start: Scalar, targets: tuple[Ref, ...], arrived: Ref
) -> None:
    """Starts the copies by TMA of one tile of an operand from global to shared memory, one for each part, and does not
    wait. Each copy arrives once at the barrier `arrived`.

    source    [parts * B, T, N, D] or [parts * B, N, T, D] in global memory
    b, h      batch entry and head
    start     the first row of the tile
    targets   the tile of each part in shared memory, with all columns or those of this CTA
    arrived   a barrier that expects one arrival for each part
    """
    for n, target in enumerate(targets):
        rows = rows_of(source, plan.layout, b + n * plan.batch if n else b, h, start, *target.shape)
        plgpu.copy_gmem_to_smem(rows, target, arrived)


def write_parts(plan: KernelPlan, sources: tuple[Ref, ...], target: Ref, b: Scalar, h: Scalar, start: Scalar) -> None:
    """Starts the copies by TMA of one tile of a gradient in parts from shared to global memory, and does not wait for
    them. The caller commits its writes to shared memory (`plgpu.commit_smem`) before.

    sources   the tile of each part in shared memory
    target    [parts * B, T, N, D] or [parts * B, N, T, D] in global memory
    b, h      batch entry and head
    start     the first row of the tile
    """
    for n, source in enumerate(sources):
        rows = rows_of(target, plan.layout, b + n * plan.batch if n else b, h, start, *source.shape)
        plgpu.copy_smem_to_gmem(source, rows)


def pad(x: jax.Array, layout: str, length: int, dim: int) -> jax.Array:
    """x with zeros appended up to T = `length` tokens and D = `dim` features; x itself if it has these sizes. It must
    not be longer.

    x   [B, T, N, D] (`layout` "BTNH") or [B, N, T, D]
    """
    time = 1 if layout == "BTNH" else 2
    widths = [(0, 0)] * 4
    widths[time], widths[3] = (0, length - x.shape[time]), (0, dim - x.shape[3])
    return jnp.pad(x, widths) if any(w != (0, 0) for w in widths) else x


def join_extra(plan: KernelPlan, operands: Operands) -> tuple[KernelPlan, Operands]:
    """Plan and operands with the extra features of queries and keys, in the dtype of these, appended to the head dim.

    Q K^T of the longer rows is q . k + q_extra . k_extra, which is what the plan asks for. Extra features of a key
    head that serves several adjacent key heads are repeated. The new plan and operands have no extra features. Without
    extra features both come back as they are.
    """
    if not plan.extra_dim or operands.query_extra is None or operands.key_extra is None:
        return plan, operands
    heads = 2 if plan.layout == "BTNH" else 1
    repeated = jnp.repeat(operands.key_extra, plan.kv_heads // plan.extra_heads, axis=heads)
    query = jnp.concatenate([operands.query, operands.query_extra.astype(plan.input_dtype)], axis=-1)
    key = jnp.concatenate([operands.key, repeated.astype(plan.input_dtype)], axis=-1)
    joined = dataclasses.replace(plan, head_dim=plan.head_dim + plan.extra_dim, extra_dim=0, extra_heads=0)
    return joined, operands._replace(query=query, key=key, query_extra=None, key_extra=None)
