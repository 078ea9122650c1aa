"""Keys and values in pages for the forward kernels: what a kernel gets beside the two pools, and how it copies a tile.

A key tile is copied in parts, each from one page. With TMA all parts arrive at the barrier of one slot; with cp.async
they are one group of copies. The page table gives the page of each part:

    the part begins past the last key      zeros: its page need not exist
    its page number is not in the pool     zeros
    values, in the page of the last key    from a copy of that page with zeros past the last key
    otherwise                              from the pool

The copy of the last page is needed because weights of 0 times NaN are NaN, and a page may hold NaN past the last key.
Scores of such keys are hidden by a select, so keys need no copy. cp.async itself writes zeros past the last key.

Contiguous keys with lengths are read in the same way where `choose_kernel.views_as_pages` says so. There is no table: a
part comes from the array itself, and a part past the last key from past the end of the array.
`choose_kernel.reads_pages` says which pools are read in place.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32, pad, pool, rows_of
from flexjax.backends.mosaic_gpu.machine.mma_cards import Copying
from flexjax.backends.mosaic_gpu.machine.mma_copies import Copies
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import KernelPlan, Operands


class KeyPages(typing.NamedTuple, typing.Generic[Part]):
    """What the forward kernel reads beside pools [P, page, M, D or E], or beside contiguous keys and values."""

    number: Part | None  # int32 [B, n]: the pages of each batch entry; None for contiguous keys
    end: Part  # int32 [B]: how many keys each batch entry has
    values: Part | None  # [B, page, M, E]: values of the page of the last key, 0 past it; None with cp.async


def _key_pages(plan: KernelPlan, operands: Operands, copying: Copying) -> KeyPages[jax.Array]:
    """The arrays of KeyPages, made by XLA before the kernel, of a call with key lengths."""
    pages, lengths = operands.pages, operands.lengths
    assert lengths is not None
    assert lengths.key is not None
    end, page = lengths.key, plan.page
    if copying == "cp.async":
        return KeyPages(pages, end, None)
    column = jnp.maximum(end - 1, 0) // page
    if pages is None:
        return KeyPages(None, end, _last_keys(plan, operands.value, column, end))
    last = jnp.take_along_axis(pages, column[:, None], 1)[:, 0]
    inside = (last >= 0) & (last < operands.value.shape[0])
    exists = column[:, None] * page + jnp.arange(page, dtype=jnp.int32) < end[:, None]
    values = operands.value.at[jnp.where(inside, last, 0)].get(mode="promise_in_bounds")
    values = jnp.where((exists & inside[:, None])[:, :, None, None], values, jnp.zeros((), values.dtype))
    return KeyPages(pages, end, values)


def _last_keys(plan: KernelPlan, value: jax.Array, column: jax.Array, end: jax.Array) -> jax.Array:
    """`KeyPages.values` of contiguous values: those of keys `plan.page * column` on, 0 past the last key."""
    key = column[:, None] * plan.page + jnp.arange(plan.page, dtype=jnp.int32)
    there = jnp.minimum(key, plan.kv_len - 1)
    axis = 0 if plan.layout == "BTNH" else 1
    found = jax.vmap(lambda x, rows: jnp.take(x, rows, axis, mode="clip"))(value, there)
    found = found if plan.layout == "BTNH" else jnp.swapaxes(found, 1, 2)
    return jnp.where((key < end[:, None])[:, :, None, None], found, jnp.zeros((), value.dtype))


def pools_for(
    plan: KernelPlan, operands: Operands, dims: tuple[int, int], copying: Copying
) -> tuple[jax.Array, jax.Array, KeyPages[jax.Array]]:
    """(pool of keys, pool of values, what comes beside) as a kernel reads them, with head dims padded to `dims`."""
    pages = _key_pages(plan, operands, copying)
    pools = zip((operands.key, operands.value), dims, strict=True)
    if pages.number is None:
        key, value = (pad(x, plan.layout, contiguous_len(plan), dim) for x, dim in pools)
    else:
        key, value = (pool(pad(x, "BTNH", x.shape[1], dim)) for x, dim in pools)
    if pages.values is not None:
        pages = pages._replace(values=pad(pages.values, "BTNH", pages.values.shape[1], dims[1]))
    return key, value, pages


@device_op
def contiguous_len(plan: KernelPlan) -> int:
    """The length that contiguous keys and values are padded to."""
    return plan.kv_len


def past_end(plan: KernelPlan) -> int:
    """A key that begins no page of the contiguous keys."""
    return round_up(plan.kv_len, plan.page)


class PagedTile(typing.NamedTuple):
    """Where a key tile lies."""

    plan: KernelPlan
    page_rows: int  # keys of a part, which divide a page and a tile
    b: Scalar  # batch entry
    h: Scalar  # key head
    start: Scalar  # first key of the tile

    def copy(self, pages: KeyPages[Ref], source: Ref, last_page: Ref | None, target: Ref, full: Ref) -> None:
        """Starts the TMA copies of the tile into a free slot, one for each part; each arrives at `full`.

        last_page   `KeyPages.values` for values; None for keys
        """
        last = lax.div(pages.end[self.b] - i32(1), i32(self.plan.page))
        for n in range(target.shape[0] // self.page_rows):
            place = self._place(pages, n)
            # Where nothing exists, rows past the end of the array are read, for which TMA gives zeros.
            copied = self._rows(source, pages, place, i32(self.plan.stored_pages), i32(past_end(self.plan)))
            part = target.at[pl.ds(n * self.page_rows, self.page_rows)]
            if last_page is None:
                plgpu.copy_gmem_to_smem(copied, part, full)
                continue
            in_last = rows_of(last_page, "BTNH", self.b, self.h, place.row, self.page_rows)
            when(place.column == last)(lambda part=part, rows=in_last: plgpu.copy_gmem_to_smem(rows, part, full))
            when(place.column != last)(lambda part=part, rows=copied: plgpu.copy_gmem_to_smem(rows, part, full))

    def copy_by_threads(self, pages: KeyPages[Ref], source: Ref, target: Ref, copies: Copies) -> None:
        """Starts the copies of the tile by cp.async into a free slot, zeros for missing keys, in the caller's group."""
        for n in range(target.shape[0] // self.page_rows):
            place = self._place(pages, n)
            exist = lax.select(place.read, pages.end[self.b] - place.key, i32(0))
            rows = self._rows(source, pages, place, i32(0), i32(0))
            copies.start(rows, target.at[pl.ds(n * self.page_rows, self.page_rows)], None, exist)

    def _rows(self, source: Ref, pages: KeyPages[Ref], place: "_Place", page: Scalar, key: Scalar) -> Ref:
        """Where a part's rows lie; one that is not to be read lies in page `page`, or from key `key` on."""
        if pages.number is None:
            first = lax.select(place.read, place.key, key)
            return rows_of(source, self.plan.layout, self.b, self.h, first, self.page_rows)
        number = lax.select(place.read, place.number, page)
        return rows_of(source, "BTNH", number, self.h, place.row, self.page_rows)

    def _place(self, pages: KeyPages[Ref], n: int) -> "_Place":
        key = self.start + i32(n * self.page_rows)
        column, row = lax.div(key, i32(self.plan.page)), lax.rem(key, i32(self.plan.page))
        if pages.number is None:
            return _Place(key, column, row, column, key < pages.end[self.b])
        number = pages.number[self.b, lax.min(column, i32(pages.number.shape[1] - 1))]
        read = (key < pages.end[self.b]) & (number >= 0) & (number < self.plan.stored_pages)
        return _Place(key, column, row, number, read)


class _Place(typing.NamedTuple):
    """Where a part of a key tile lies, int32 scalars and one bool scalar."""

    key: Scalar  # number of its first key in the batch entry
    column: Scalar  # of the page table
    row: Scalar  # of its first key in the page
    number: Scalar  # of the page, from the page table; not used for contiguous keys
    read: Scalar  # whether the first key exists and the page is in the pool
