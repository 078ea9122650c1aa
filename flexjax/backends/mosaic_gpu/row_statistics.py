"""Row statistics of the backward pass, lse and delta = rowsum(dO * O) - d_lse of every query, with a kernel for the
rowsum.

XLA could compute the rowsum, but XLA fuses the sum with the operations around it, and the order of the additions
follows the fusion: the last bits of the same call inside lax.scan then differ from those alone. A kernel has one order.
The kernel reads O and dO once and is bound by memory bandwidth.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu import backward_sm90_common as common
from flexjax.backends.mosaic_gpu import memory
from flexjax.plan.kernel_plan import KernelPlan, Results

ROWS = 64
COLUMNS = 64
UNIT = 256
"""Row statistics are padded to a multiple of this many queries."""


def row_statistics(plan: KernelPlan, results: Results, d_out: jax.Array, d_lse: jax.Array | None) -> jax.Array:
    """[B, N, 2, T'] float32: lse2 and delta; T' is the number of queries rounded up to UNIT.

    lse2 = lse * log2(e), and +inf for dead rows and past the end. Where scores may be too large to scale
    (`may_be_large`), lse takes the place of lse2.
    """
    pad = lambda x: common.pad(x, plan.layout, plan.options.interpret)
    delta = row_dots(plan, pad(results.out), pad(d_out))
    lse = results.lse.astype(jnp.float32)
    d_lse = None if d_lse is None else d_lse.astype(jnp.float32)
    if plan.layout == "BTNH":
        lse, d_lse = jnp.swapaxes(lse, 1, 2), None if d_lse is None else jnp.swapaxes(d_lse, 1, 2)
    widths = ((0, 0), (0, 0), (0, delta.shape[2] - plan.q_len))
    if d_lse is not None:
        delta = delta - jnp.pad(d_lse, widths)
    lse = jnp.pad(lse, widths, constant_values=-jnp.inf)
    dead = jnp.isneginf(lse)
    delta = jnp.where(dead, 0.0, delta)
    lse2 = jnp.where(dead, jnp.inf, lse if may_be_large(plan.score) else lse * common.LOG2E)
    return jnp.stack([lse2, delta], axis=2)


def row_dots(plan: KernelPlan, out: jax.Array, d_out: jax.Array) -> jax.Array:
    """rowsum(dO * O), [B, N, T'] float32: T' is the number of queries rounded up to UNIT; 0 past the end.

    out, d_out   [B, T, N, E] or [B, N, T, E], padded by `common.pad`
    """
    length = -(-plan.q_len // UNIT) * UNIT
    tiles, dim = length // ROWS, out.shape[-1]
    rows_of = functools.partial(common.rows_of, layout=plan.layout)
    columns = [(start, min(COLUMNS, dim - start)) for start in range(0, dim, COLUMNS)]

    def kernel(
        out_ref: typing.Any,
        d_out_ref: typing.Any,
        dots_ref: typing.Any,
        out_smem: typing.Any,
        d_out_smem: typing.Any,
        arrived: typing.Any,
    ) -> None:
        i32 = jnp.int32
        program = lax.axis_index("program")
        head, start = lax.div(program, i32(tiles)), lax.rem(program, i32(tiles)) * ROWS
        b, h = lax.div(head, i32(plan.q_heads)), lax.rem(head, i32(plan.q_heads))
        for ref, smem in ((out_ref, out_smem), (d_out_ref, d_out_smem)):
            plgpu.copy_gmem_to_smem(rows_of(ref, b=b, h=h, start=start, size=ROWS), smem, arrived)
        plgpu.barrier_wait(arrived)
        total = None
        for first, width in columns:
            part = [
                plgpu.load(smem.at[:, pl.ds(first, width)], layout=common.WGMMA, optimized=False).astype(jnp.float32)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11
                for smem in (out_smem, d_out_smem)
            ]
            dots = jnp.sum(part[0] * part[1], axis=1)
            total = dots if total is None else total + dots
        dots_ref.at[b, h, pl.ds(start, ROWS)][...] = total

    shape = (ROWS, dim)
    scratch = (
        common.tile_smem(shape, out.dtype),
        common.tile_smem(shape, out.dtype),
        plgpu.Barrier(num_arrivals=2),
    )
    run = pl.kernel(
        lambda *refs: pl.run_scoped(functools.partial(kernel, *refs), *scratch),
        out_type=memory.output((plan.batch, plan.q_heads, length), jnp.float32, out),
        mesh=plgpu.Mesh(grid=(plan.batch * plan.q_heads * tiles,), grid_names=("program",)),
        compiler_params=common.compiler_params(),
        interpret=plgpu.InterpretGPUParams() if plan.options.interpret else False,  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
        name="flexjax_row_dots",
    )
    return typing.cast(jax.Array, run(out, d_out))  # pyright: ignore[reportCallIssue]  # takes what the kernel takes, with a mesh too
