"""Keys and values in pages for the forward kernels: what a kernel gets beside the two pools, and how it copies a tile.

A key tile is copied in parts, each from one page. With TMA all parts arrive at the barrier of one slot; with cp.async they are one group
of copies. The page table gives the page of each part:

    the part begins past the last key      zeros: its page need not exist
    its page number is not in the pool     zeros
    values, in the page of the last key    from a copy of that page with zeros past the last key
    otherwise                              from the pool

The copy of the last page is needed because weights of 0 times NaN are NaN, and what a page holds past the last key may be NaN. It is one
page for each batch entry. Scores of such keys are hidden by a select, so keys need no copy. cp.async itself writes zeros past the last
key, so there is no such copy with it.

Contiguous keys with lengths are read in the same way where `choose_kernel.views_as_pages` says so. There is no table:
a part comes from the array itself, which may have any number of keys and either layout, and a part past the last key from past the end of
the array.

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
from flexjax.backends.mosaic_gpu.sm80_cards import Copying
from flexjax.backends.mosaic_gpu.sm80_copies import Copies
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import KernelPlan, Operands


class KeyPages(typing.NamedTuple, typing.Generic[Part]):
    """What the forward kernel reads beside pools of keys [P, page, M, D] and values [P, page, M, E], or beside contiguous keys and values in
    the plan's layout.

    number   int32 [B, n]: the pages of each batch entry; None for contiguous keys
    end      int32 [B]: how many keys each batch entry has
    values   [B, page, M, E]: the values of the page of the last key of each batch entry, 0 past it; None for a kernel that copies by
             cp.async
    """

    number: Part | None
    end: Part
    values: Part | None


def key_pages(plan: KernelPlan, operands: Operands, copying: Copying = "tma") -> KeyPages[jax.Array]:
    """The arrays of KeyPages, made by XLA before the kernel, of a call with key lengths, with keys in pages or contiguous ones that
    are read as pages; AssertionError without lengths. `values` are 0 for a batch entry without keys, or whose last page is not in the pool.

    copying   how the kernel's tiles come to shared memory
    """
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
    """`KeyPages.values` of contiguous values: those of keys `plan.page * column` on, [B, page, M, E], 0 past the last key.

    value    [B, S, M, E] or [B, M, S, E] by the plan's layout
    column   int32 [B], the number of the page that has the last key
    end      int32 [B], how many keys each batch entry has
    """
    key = column[:, None] * plan.page + jnp.arange(plan.page, dtype=jnp.int32)
    there = jnp.minimum(key, plan.kv_len - 1)
    axis = 0 if plan.layout == "BTNH" else 1
    found = jax.vmap(lambda x, rows: jnp.take(x, rows, axis, mode="clip"))(value, there)
    found = found if plan.layout == "BTNH" else jnp.swapaxes(found, 1, 2)
    return jnp.where((key < end[:, None])[:, :, None, None], found, jnp.zeros((), value.dtype))


def pools_for(
    plan: KernelPlan,
    operands: Operands,
    pages: KeyPages[jax.Array],
    dims: tuple[int, int],
    interpret: bool,
) -> tuple[jax.Array, jax.Array, KeyPages[jax.Array]]:
    """The pool of keys, the pool of values (of contiguous keys the arrays themselves) and `pages` as a kernel reads them: head dims padded
    with zeros; in the simulator, which does not fill in zeros past the end of an array, the pools have one more page of zeros.

    plan        of the call
    operands    of the call, whose keys and values are the pools
    dims        head dims of keys and of values in the kernel
    interpret   whether the kernel runs in the simulator
    """
    more = ((0, 1 if interpret else 0), (0, 0), (0, 0), (0, 0))
    pools = zip((operands.key, operands.value), dims, strict=True)
    if pages.number is None:
        length = _past_end(plan) + plan.page if interpret else plan.kv_len
        key, value = (pad(x, plan.layout, length, dim) for x, dim in pools)
    else:
        key, value = (jnp.pad(pad(pool, "BTNH", pool.shape[1], dim), more) for pool, dim in pools)
    if pages.values is not None:
        pages = pages._replace(values=pad(pages.values, "BTNH", pages.values.shape[1], dims[1]))
    return key, value, pages


def _past_end(plan: KernelPlan) -> int:
    """The first page boundary past the last of the contiguous keys: copies from there on give zeros."""
    return round_up(plan.kv_len, plan.page)


class PagedTile(typing.NamedTuple):
    """Where a key tile lies.

    plan         of the call: its page, and of contiguous keys the layout and the number
    page_rows    keys of a part, which divide a page and a tile
    stored       how many pages the pool has; not read for contiguous keys
    b, h         batch entry and key head
    start        first key of the tile
    """

    plan: KernelPlan
    page_rows: int
    stored: int
    b: Scalar
    h: Scalar
    start: Scalar

    def copy(self, pages: KeyPages[Ref], source: Ref, last_page: Ref | None, target: Ref, full: Ref) -> None:
        """Starts the copies of the tile by TMA into a free slot, one for each part, and does not wait for them. The top of this file says
        which part comes from where.

        pages       the arrays of KeyPages, of which page numbers and lengths are read
        source      the pool of keys or of values, in global memory, as `pools_for` made it
        last_page   `KeyPages.values` for values; None for keys
        target      [keys of a tile, D or E], the slot
        full        barrier of the slot, at which each copy arrives
        """
        last = lax.div(pages.end[self.b] - i32(1), i32(self.plan.page))
        for n in range(target.shape[0] // self.page_rows):
            place = self._place(pages, n)
            # Where nothing exists, rows past the end of the array are read, for which TMA gives zeros.
            copied = self._rows(source, pages, place, i32(self.stored), i32(_past_end(self.plan)))
            part = target.at[pl.ds(n * self.page_rows, self.page_rows)]
            if last_page is None:
                plgpu.copy_gmem_to_smem(copied, part, full)
                continue
            in_last = rows_of(last_page, "BTNH", self.b, self.h, place.row, self.page_rows)
            when(place.column == last)(lambda part=part, rows=in_last: plgpu.copy_gmem_to_smem(rows, part, full))
            when(place.column != last)(lambda part=part, rows=copied: plgpu.copy_gmem_to_smem(rows, part, full))

    def copy_by_threads(self, pages: KeyPages[Ref], source: Ref, target: Ref, copies: Copies) -> None:
        """Starts the copies of the tile by cp.async into a free slot, and does not wait for them: they belong to the group that the caller
        ends. Keys past the last one, and those of pages that are not in the pool, become zeros and are not read.

        pages    the arrays of KeyPages, of which page numbers and lengths are read
        source   the pool of keys or of values, in global memory, as `pools_for` made it
        target   [keys of a tile, D or E], the slot
        copies   of a CTA of one warpgroup, the one that calls: it copies the whole tile
        """
        for n in range(target.shape[0] // self.page_rows):
            place = self._place(pages, n)
            exist = lax.select(place.read, pages.end[self.b] - place.key, i32(0))
            rows = self._rows(source, pages, place, i32(0), i32(0))
            copies.start(rows, target.at[pl.ds(n * self.page_rows, self.page_rows)], None, exist)

    def _rows(self, source: Ref, pages: KeyPages[Ref], place: "_Place", page: Scalar, key: Scalar) -> Ref:
        """The rows of a part in the array `source`, without reading them; where the part is not to be read those of the page number
        `page`, or of contiguous keys those from `key` on.
        """
        if pages.number is None:
            first = lax.select(place.read, place.key, key)
            return rows_of(source, self.plan.layout, self.b, self.h, first, self.page_rows)
        number = lax.select(place.read, place.number, page)
        return rows_of(source, "BTNH", number, self.h, place.row, self.page_rows)

    def _place(self, pages: KeyPages[Ref], n: int) -> "_Place":
        """Where part number n of the tile lies."""
        key = self.start + i32(n * self.page_rows)
        column, row = lax.div(key, i32(self.plan.page)), lax.rem(key, i32(self.plan.page))
        if pages.number is None:
            return _Place(key, column, row, column, key < pages.end[self.b])
        number = pages.number[self.b, lax.min(column, i32(pages.number.shape[1] - 1))]
        read = (key < pages.end[self.b]) & (number >= 0) & (number < self.stored)
        return _Place(key, column, row, number, read)


class _Place(typing.NamedTuple):
    """Where a part of a key tile lies, int32 scalars and one bool scalar.

    key      number of its first key in the batch entry
    column   of the page table
    row      of its first key in the page
    number   of the page, what the page table has; not used for contiguous keys
    read     whether the first key exists and the page is in the pool
    """

    key: Scalar
    column: Scalar
    row: Scalar
    number: Scalar
    read: Scalar
