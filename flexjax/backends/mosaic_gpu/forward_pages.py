"""Keys and values in pages for the forward kernel: what the kernel gets beside the two pools, and how its producer copies a tile.

A key tile is copied in parts, each from one page, and all parts arrive at the barrier of one slot. The page table gives the page of
each part:

    the part begins at or past the last key   zeros: its page need not exist
    its page number is not in the pool        zeros
    values, in the page of the last key       from a copy of that page with zeros past the last key
    otherwise                                 from the pool

The copy of the last page is needed because weights of 0 times NaN are NaN, and what a page holds past the last key may be NaN. It is one
page for each batch entry. Scores of such keys are hidden by a select, so keys need no copy.

Pools of float32 or 8 bits, and head dims whose columns two CTAs share, are not read in place: `choose_kernel.reads_pages`.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32, pad, rows_of
from flexjax.backends.mosaic_gpu.shared_memory import Part
from flexjax.plan.kernel_plan import KernelPlan, Operands


class KeyPages(typing.NamedTuple, typing.Generic[Part]):
    """What the forward kernel reads beside pools of keys [P, page, M, D] and values [P, page, M, E].

    number   int32 [B, n]: the pages of each batch entry
    end      int32 [B]: how many keys each batch entry has
    values   [B, page, M, E]: the values of the page of the last key of each batch entry, 0 past it
    """

    number: Part
    end: Part
    values: Part


def key_pages(plan: KernelPlan, operands: Operands) -> KeyPages[jax.Array]:
    """The arrays of KeyPages, made by XLA before the kernel, of a call with keys in pages and with key lengths; AssertionError without
    either. `values` are 0 for a batch entry without keys, or whose last page is not in the pool.
    """
    pages, lengths = operands.pages, operands.lengths
    assert pages is not None
    assert lengths is not None
    assert lengths.key is not None
    end, page = lengths.key, plan.page
    column = jnp.maximum(end - 1, 0) // page
    last = jnp.take_along_axis(pages, column[:, None], 1)[:, 0]
    inside = (last >= 0) & (last < operands.value.shape[0])
    exists = column[:, None] * page + jnp.arange(page, dtype=jnp.int32) < end[:, None]
    values = operands.value.at[jnp.where(inside, last, 0)].get(mode="promise_in_bounds")
    values = jnp.where((exists & inside[:, None])[:, :, None, None], values, jnp.zeros((), values.dtype))
    return KeyPages(pages, end, values)


def pool_operand(pool: jax.Array, dim: int, interpret: bool) -> jax.Array:
    """A pool as the kernel reads it: its head dim padded with zeros to `dim`; in the simulator, which does not fill in zeros past the
    end of an array, with one more page of zeros.
    """
    pool = pad(pool, "BTNH", pool.shape[1], dim)
    return jnp.pad(pool, ((0, 1), (0, 0), (0, 0), (0, 0))) if interpret else pool


class PagedTile(typing.NamedTuple):
    """Where a key tile lies.

    page         tokens of a page
    page_rows    keys of a part, which divide a page and a tile
    stored       how many pages the pool has
    b, h         batch entry and key head
    start        first key of the tile
    """

    page: int
    page_rows: int
    stored: int
    b: Scalar
    h: Scalar
    start: Scalar

    def copy(self, pages: KeyPages[Ref], source: Ref, last_page: Ref | None, target: Ref, full: Ref) -> None:
        """Starts the copies of the tile into a free slot, one for each part, and does not wait for them. The top of this file says which
        part comes from where.

        pages       the arrays of KeyPages, of which page numbers and lengths are read
        source      the pool of keys or of values, in global memory, as `pool_operand` made it
        last_page   `KeyPages.values` for values; None for keys
        target      [keys of a tile, D or E], the slot
        full        barrier of the slot, at which each copy arrives
        """
        b, h, end, columns = self.b, self.h, pages.end[self.b], pages.number.shape[1]
        last = lax.div(end - i32(1), i32(self.page))
        for n in range(target.shape[0] // self.page_rows):
            key = self.start + i32(n * self.page_rows)
            column, row = lax.div(key, i32(self.page)), lax.rem(key, i32(self.page))
            number = pages.number[b, lax.min(column, i32(columns - 1))]
            read = (key < end) & (number >= 0) & (number < self.stored)
            # A page past the end of the array is read for the others, where TMA gives zeros.
            number = lax.select(read, number, i32(self.stored))
            part = target.at[pl.ds(n * self.page_rows, self.page_rows)]
            copied = rows_of(source, "BTNH", number, h, row, self.page_rows)
            if last_page is None:
                plgpu.copy_gmem_to_smem(copied, part, full)
                continue
            in_last = rows_of(last_page, "BTNH", b, h, row, self.page_rows)
            when(column == last)(lambda part=part, rows=in_last: plgpu.copy_gmem_to_smem(rows, part, full))
            when(column != last)(lambda part=part, rows=copied: plgpu.copy_gmem_to_smem(rows, part, full))
