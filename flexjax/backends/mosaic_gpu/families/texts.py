"""What all families say of their kernels for `flexjax.explain` and `flexjax.autotune`."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from flexjax.backends.mosaic_gpu.decode import hopper_tiles as decode_hopper_tiles
from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.plan.kernel_plan import KernelPlan


def work_items_text(plan: KernelPlan, decode: decode_hopper_tiles.DecodeTile) -> str:
    """Packed rows x keys of a tile, and work items: "forward decode 4 x 64, 128 work items of 1024 keys"."""
    items = plan.batch * plan.kv_heads * decode_hopper_tiles.chunks(plan, decode)
    return f"forward decode {decode.used_rows} x {decode.block_kv}, {items} work items of {decode.chunk} keys"


def no_tangent_tile(plan: KernelPlan) -> str:
    return (
        f"No tile of the tangent kernel, which keeps tangents beside their operands, fits {plan.dtype} head dims "
        f"{plan.head_dim + plan.extra_dim} and {plan.value_dim}."
    )


def pages_before(plan: KernelPlan) -> str:
    """ "keys read in their pages, " or how else the forward kernel gets keys in pages; "" for other calls."""
    if not choose_kernel.many_in_pages(plan):
        return ""
    if choose_kernel.reads_pages(plan):
        return "keys read in their pages, "
    # The tile does not depend on how many pages there are.
    widened = choose_kernel.widens_pools(dataclasses.replace(plan, stored_pages=0))
    return f"keys gathered from their pages{', or pools widened' if widened else ''}, "


def page_reads(plan: KernelPlan) -> str:
    """How the forward kernel gets keys in pages, and the bytes that are copied before: a sentence."""
    if choose_kernel.reads_pages(plan):
        return "the forward kernel reads the pages in place"
    row = plan.kv_heads * (plan.head_dim + plan.value_dim) * jnp.dtype(plan.dtype).itemsize
    if choose_kernel.widens_pools(plan):
        made = plan.stored_pages * plan.page * row
        return f"the pools are widened to {plan.dtype} for the forward kernel, {made / 1e6:.4g} MB"
    copied = plan.batch * plan.kv_len * row
    return f"the keys and values of all pages of the table are gathered for the forward kernel, {copied / 1e6:.4g} MB"


def paired(forward: Sequence[tuple[int, int, int]], backward: Sequence[tuple[int, int]]) -> list[dict[str, int]]:
    """Fields of KernelOptions for each pair of n-th candidates of both passes; the shorter list repeats its last.

    forward    (block_q, block_kv, num_stages) of each; none for the decode kernel: bits may not depend on speed
    backward   (block_q_bwd, block_kv_bwd) of each
    """
    names = ("block_q", "block_kv", "num_stages", "block_q_bwd", "block_kv_bwd")
    if not forward:
        return [dict(zip(names[3:], pair, strict=True)) for pair in backward]
    count = max(len(forward), len(backward))
    at = lambda found, n: found[min(n, len(found) - 1)]
    return [dict(zip(names, (*at(forward, n), *at(backward, n)), strict=True)) for n in range(count)]
