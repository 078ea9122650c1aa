"""Which pages a request has: a table of page numbers, lengths and reference counts, and how pages are handed out and returned.

R requests, n pages at most for each, P pages in the pool. A request *holds* the page numbers 0 .. P - 1 in its row of the table;
every other number is a hole. `uses` counts how many entries of the table hold a page:

    uses[p] = 0         page p is free
    uses[p] = c > 0     c entries of the table hold it
    uses[p] = -1 - r    p is reserved as the copy that request r makes when it writes to a page that it shares

**Copy on write.** `fork` shares pages: both requests hold the same numbers, and the counts grow. Only the last page of a request is
written again, if it is not full. So there are three parts:

- `allocate` reserves what the next `append` can need: a page for each hole after the tokens that are stored, and, if the page that
  is written next is partly filled and shared, one more for its copy. It reserves all of that or nothing, request by request.
- `append` (cache.py) copies the shared page to the reserved one if others still hold it then, writes there, and counts the old page
  down. If nobody else holds it any more, append writes in place and returns the reserved page. Requests that share a page and
  append together all copy it, and the original becomes free.
- `release` and `fork` return a page that was reserved and not used.

A request may also give back tokens: lower its entry of `lengths`. Its pages stay reserved for it, and `allocate` replaces those
after the end that it shares.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.errors import bad_argument, kind_of

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class PageTable:
    """The pages of R requests; a pytree, made by `flexjax.paged.table` or by the code of an allocator of your own.

    pages    int32 [R, n]: the token at position s of request r is in page pages[r, s // page], at place s % page. Numbers after the
             last token may be anything for attention; `allocate` and `append` take those in 0 .. P - 1 for pages that are reserved.
             A number outside 0 .. P - 1 before the last token is a page without tokens, whose keys and values read as 0: mask_mod has
             to hide them
    lengths  int32 [R]: tokens stored
    uses     int32 [P]: how many entries of `pages` hold a page, 0 if it is free; -1 - r if it is reserved for the copy that request
             r may have to make. Attention and `gather` do not read it
    page     tokens of a page, a static number. `allocate`, `fork` and `release` need it; None: attention, `append` and `gather` take that
             of the cache
    """

    pages: Array
    lengths: Array
    uses: Array
    page: int | None = None


jax.tree_util.register_dataclass(PageTable, data_fields=["pages", "lengths", "uses"], meta_fields=["page"])


def table(R: int, n: int, P: int, page: int) -> PageTable:
    """The table of R requests without tokens, of at most n pages each, over a pool of P free pages of `page` tokens.

    `page` is required although the cache has it too: `allocate`, `fork` and `release` see the table alone, and need it to count pages from
    tokens. Raises ValueError for numbers that are no positive ints, and for a page that is no multiple of 8.
    """
    for name, number in (("R", R), ("n", n), ("P", P)):
        check_positive(name, number)
    check_page("page", page)
    return PageTable(jnp.full((R, n), -1, jnp.int32), jnp.zeros(R, jnp.int32), jnp.zeros(P, jnp.int32), page)


def allocate(table: PageTable, new_lengths: Array | np.ndarray) -> tuple[PageTable, Array]:
    """Reserves the pages with which each request can grow to new_lengths tokens: (table, granted bool [R]).

    new_lengths   int32 [R]: totals, not differences. A request that does not grow needs nothing and is granted

    A growing request needs a page for each entry of its row, between its stored tokens and the total, that is a hole or shares its
    page, and one page more for the copy of its last page if that is partly filled and shared and no page is reserved for the
    copy yet. It gets all pages that it needs or none. Requests are served in the order of their rows; one that does not fit is left
    as it is, and later ones may still fit. A total that needs more than n entries (`table.pages` is [R, n]) is never granted.
    `lengths` stays: `append` moves it. Raises ValueError for arguments of other types or shapes.
    """
    check_table(table, None)
    return _allocated(table, check_int32("new_lengths", new_lengths, table.lengths.shape))


@functools.partial(jax.jit, inline=True)  # eagerly, its loop would be compiled in each call
def _allocated(table: PageTable, totals: Array) -> tuple[PageTable, Array]:
    """What `allocate` returns, for checked arguments; `totals` is its new_lengths."""
    page = table.page
    assert page is not None
    columns = table.pages.shape[1]
    counts, spares = _decode_uses(table)
    pool = counts.shape[0]
    held = _held(table, pool)
    stored = -(-table.lengths // page)
    wanted = jnp.where(totals > table.lengths, -(-totals // page), 0)
    at = jnp.arange(columns, dtype=jnp.int32)
    shared = held & (counts[jnp.where(held, table.pages, 0)] > 1)
    growing = (at >= stored[:, None]) & (at < wanted[:, None]) & (~held | shared)
    copying = (totals > table.lengths) & _last_is_shared(table, shared, page) & (spares < 0)
    cost = growing.sum(1, dtype=jnp.int32) + copying
    granted = _first_fit(jnp.where(wanted > columns, pool + 1, cost), pool - jnp.sum(table.uses != 0, dtype=jnp.int32))

    # each request's pages, then its copy, are numbered through; the k-th of them gets the k-th free page
    takes = jnp.concatenate([growing, copying[:, None]], 1) & granted[:, None]
    rank = jnp.cumsum(takes.reshape(-1), dtype=jnp.int32).reshape(takes.shape) - 1
    (free,) = jnp.nonzero(table.uses == 0, size=pool, fill_value=pool)
    given = jnp.where(takes, free.astype(jnp.int32)[jnp.clip(rank, 0, pool - 1)], pool)
    pages = jnp.where(takes[:, :-1], given[:, :-1], table.pages)
    counts = _count(counts, table.pages, takes[:, :-1] & held, -1)
    counts = counts.at[given[:, :-1]].add(1, mode="drop")
    spares = jnp.where(takes[:, -1], given[:, -1], spares)
    return dataclasses.replace(table, pages=pages, uses=_encode_uses(counts, spares)), granted


def fork(table: PageTable, source: Array | np.ndarray) -> PageTable:
    """Lets requests share the tokens of others: row r gets the pages and the length of row source[r].

    source   int32 [R]: rows as they are before the call; -1, every other number that is no row, and r itself leave request r as it is

    What request r held before is released. Pages that a source has reserved beyond its tokens stay its own. No token is
    copied; a partly filled last page is copied when one of its requests appends to it, for which `allocate` reserves a page. So
    allocate after a fork, also for the source. Raises ValueError for arguments of other types or shapes.
    """
    page = check_table(table, None)
    source = check_int32("source", source, table.lengths.shape)
    rows, columns = table.pages.shape
    me = jnp.arange(rows, dtype=jnp.int32)
    moves = (source >= 0) & (source < rows) & (source != me)
    of = jnp.where(moves, source, me)
    lengths = table.lengths[of]
    stored = jnp.arange(columns, dtype=jnp.int32) < -(-lengths // page)[:, None]
    taken = jnp.where(stored, table.pages[of], -1)
    pages = jnp.where(moves[:, None], taken, table.pages)
    counts, spares = _decode_uses(table)
    pool = counts.shape[0]
    counts = _count(counts, table.pages, _held(table, pool) & moves[:, None], -1)
    new = dataclasses.replace(table, pages=pages, lengths=lengths)
    counts = _count(counts, pages, _held(new, pool) & moves[:, None], 1)
    return dataclasses.replace(new, uses=_encode_uses(counts, jnp.where(moves, -1, spares)))


def release(table: PageTable, requests: Array | np.ndarray) -> PageTable:
    """Takes the pages of finished requests back: their rows are empty then, and pages that no other request holds are free.

    requests   bool [R]: which requests end

    Raises ValueError for arguments of other types or shapes.
    """
    check_table(table, None)
    ends = _check_array("requests", requests, table.lengths.shape, jnp.bool_, "bool")
    counts, spares = _decode_uses(table)
    counts = _count(counts, table.pages, _held(table, counts.shape[0]) & ends[:, None], -1)
    return dataclasses.replace(
        table,
        pages=jnp.where(ends[:, None], -1, table.pages),
        lengths=jnp.where(ends, 0, table.lengths),
        uses=_encode_uses(counts, jnp.where(ends, -1, spares)),
    )


def _first_fit(cost: Array, free: Array) -> Array:
    """Which requests get their pages, bool [R], if they are served in order of rows and those that do not fit are skipped.

    cost   int32 [R]: how many pages each request needs; a request that needs none is always granted
    free   int32 scalar: how many pages are free

    Each round of the loop skips the first request that does not fit, so there are at most as many rounds as requests that are refused.
    """

    def too_many(granted: Array) -> Array:
        """Those of the `granted` requests that need pages and do not fit when the granted requests before them are served; all bool [R]."""
        return granted & (jnp.cumsum(jnp.where(granted, cost, 0), dtype=jnp.int32) > free) & (cost > 0)

    def skip_first(granted: Array) -> Array:
        """`granted` without the first request that does not fit."""
        late = too_many(granted)
        return granted & ~(late & (jnp.cumsum(late, dtype=jnp.int32) == 1))

    return lax.while_loop(lambda granted: jnp.any(too_many(granted)), skip_first, cost <= free)


# ------------------------------------------------------------------- counting


def _decode_uses(table: PageTable) -> tuple[Array, Array]:
    """Decodes `table.uses` (see the top of this file): (counts, spares).

    counts   int32 [P]: how many entries of the table hold each page; 0 also for a reserved page
    spares   int32 [R]: the page that is reserved for the copy of each request, -1 for none
    """
    rows, pool = table.pages.shape[0], table.uses.shape[0]
    owner = jnp.where(table.uses < 0, -1 - table.uses, rows)
    spares = jnp.full(rows, -1, jnp.int32).at[owner].set(jnp.arange(pool, dtype=jnp.int32), mode="drop")
    return jnp.maximum(table.uses, 0), spares


def _encode_uses(counts: Array, spares: Array) -> Array:
    """`PageTable.uses` from `counts` and `spares`, as `_decode_uses` returns them. Counts below 0, of tables that did not count, become
    0; a page among the spares is marked as reserved, whatever its count was.
    """
    rows, pool = spares.shape[0], counts.shape[0]
    mark = -1 - jnp.arange(rows, dtype=jnp.int32)
    return jnp.maximum(counts, 0).at[jnp.where(spares < 0, pool, spares)].set(mark, mode="drop")


def _held(table: PageTable, pool: int) -> Array:
    """bool [R, n]: which entries of the table are pages, not holes, for a pool of `pool` pages."""
    return (table.pages >= 0) & (table.pages < pool)


def _count(counts: Array, pages: Array, where: Array, step: int) -> Array:
    """`counts` (int32 [P]) with `step` added for each entry of `pages` at which `where` is True; several entries of one page add up."""
    return counts.at[jnp.where(where, pages, counts.shape[0])].add(step, mode="drop")


def _last_is_shared(table: PageTable, shared: Array, page: int) -> Array:
    """bool [R]: whether the page that each request writes next is partly filled and shared.

    shared   bool [R, n]: which entries of the table are pages that several entries hold
    page     tokens of a page
    """
    columns = table.pages.shape[1]
    last = jnp.clip(table.lengths // page, 0, columns - 1)
    return (table.lengths % page != 0) & jnp.take_along_axis(shared, last[:, None], 1)[:, 0]


@dataclasses.dataclass(frozen=True)
class Growth:
    """What an append does to the table.

    table    the table after the append
    starts   int32 [R]: position of the first new token of each request
    writes   int32 [R]: how many tokens are written: all that were given, or 0 if their pages are not reserved
    copied   int32 [R, 2]: the page to copy and the page to copy it to; of the first `copies` rows
    copies   int32 scalar: how many pages are copied
    """

    table: PageTable
    starts: Array
    writes: Array
    copied: Array
    copies: Array


def grow(table: PageTable, counts: Array, page: int) -> Growth:
    """What an append of `counts` (int32 [R]) tokens to each request does to the table, and which pages it has to copy first. `append`
    makes the copies and writes the tokens.

    page   tokens of a page

    A request whose pages are not all reserved stays as it is, and so does one without new tokens. Every other request gives back a page
    that was reserved for a copy that it does not make.
    """
    columns = table.pages.shape[1]
    uses, spares = _decode_uses(table)
    pool = uses.shape[0]
    held = _held(table, pool)
    shared = held & (uses[jnp.where(held, table.pages, 0)] > 1)
    starts, ends = table.lengths, table.lengths + counts
    at = jnp.arange(columns, dtype=jnp.int32)
    copying = _last_is_shared(table, shared, page) & (counts > 0)
    written = (at >= (starts // page)[:, None]) & (at < -(-ends // page)[:, None]) & (counts > 0)[:, None]
    first = at == (starts // page)[:, None]
    fit = ~written | (held & (~shared | (first & copying[:, None])))
    fits = jnp.all(fit, 1) & (ends <= columns * page) & (~copying | (spares >= 0)) & (counts > 0)
    copying &= fits
    old = jnp.take_along_axis(table.pages, jnp.clip(starts // page, 0, columns - 1)[:, None], 1)[:, 0]
    pages = jnp.where(first & copying[:, None], spares[:, None], table.pages)
    uses = _count(uses, old, copying, -1)
    uses = _count(uses, spares, copying, 1)
    order = jnp.argsort(~copying, stable=True)
    new = PageTable(pages, jnp.where(fits, ends, starts), _encode_uses(uses, jnp.where(fits, -1, spares)), table.page)
    copied = jnp.stack([old, spares], 1)[order]
    return Growth(new, starts, jnp.where(fits, counts, 0), copied, jnp.sum(copying, dtype=jnp.int32))


# ------------------------------------------------------------------- checks


def check_table(table: object, page: int | None) -> int:
    """Checks a table and returns the tokens of a page: those that the table says, else `page`.

    page   tokens of a page of the cache, which a table that says another number does not fit; None: the table has to say it

    Raises ValueError unless `table` is a PageTable of int32 arrays of the documented ranks with a length for each row of pages. The
    numbers in the arrays are not checked.
    """
    if not isinstance(table, PageTable):
        raise bad_argument("table", kind_of(table), "a flexjax.paged.PageTable", "Make it with flexjax.paged.table.")
    pages, lengths, uses = (getattr(table, name) for name in ("pages", "lengths", "uses"))
    for name, array, rank, letters in (
        ("pages", pages, 2, "[R, n]"),
        ("lengths", lengths, 1, "[R]"),
        ("uses", uses, 1, "[P]"),
    ):
        if not isinstance(array, Array | np.ndarray) or array.dtype != jnp.int32 or array.ndim != rank:
            raise bad_argument(f"table.{name}", described(array), f"int32 {letters}", "Cast or reshape it.")
    if pages.shape[0] != lengths.shape[0]:
        raise bad_argument(
            "table.lengths",
            f"of shape {lengths.shape}",
            f"({pages.shape[0]},), a length for each row of pages",
            "Make them agree.",
        )
    if table.page is None:
        if page is None:
            raise bad_argument(
                "table.page",
                "None",
                "the tokens of a page",
                "Make the table with flexjax.paged.table, or pass page= to PageTable.",
            )
        return page
    check_page("table.page", table.page)
    if page is not None and table.page != page:
        raise bad_argument(
            "table.page", str(table.page), f"{page}, the tokens of a page of the cache", "Make them agree."
        )
    return table.page


def check_page(name: str, page: object) -> None:
    """Raises ValueError, for the argument `name`, unless `page`, the number of tokens of a page, is a Python int and a positive multiple
    of 8. Bools, floats, numpy integers and arrays are refused too, because the number is static.
    """
    if not isinstance(page, int) or isinstance(page, bool) or page < 8 or page % 8:
        raise bad_argument(name, repr(page), "a positive multiple of 8", "Kernels copy 8 tokens at a time.")


def check_positive(name: str, number: object) -> None:
    """Raises ValueError, for the argument `name`, unless `number` is a positive int."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise bad_argument(
            name, repr(number), "a positive int", "Sizes are static: they are compiled into the program."
        )


def check_int32(name: str, given: object, shape: tuple[int, ...]) -> Array:
    """The argument `name`, whose value is `given`, as an int32 array; numbers of other integer types that int32 does not hold become its
    largest or smallest. Raises ValueError for another shape and for anything but an array of integers.
    """
    if isinstance(given, np.ndarray) and jnp.issubdtype(given.dtype, jnp.integer):
        given = _clipped(given, np)  # before jax cuts off what 32 bits do not hold
    return _clipped(_check_array(name, given, shape, jnp.integer, "int32"), jnp).astype(jnp.int32)


def _clipped(x: typing.Any, numpy: typing.Any) -> typing.Any:
    """An integer array with all numbers in the range of int32; `numpy`, np or jnp, is what clips it."""
    has, holds = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    return numpy.clip(x, max(int(has.min), int(holds.min)), min(int(has.max), int(holds.max)))


def _check_array(name: str, given: object, shape: tuple[int, ...], kind: type, dtype: str) -> Array:
    """The argument `name` as a jax array. Raises ValueError unless it is an array of that shape, with a dtype of `kind`.

    dtype   the name of the dtype for the message
    """
    if not isinstance(given, Array | np.ndarray) or given.shape != shape or not jnp.issubdtype(given.dtype, kind):
        advice = "Pass it through jnp.asarray." if isinstance(given, list | tuple) else "Cast or reshape it."
        raise bad_argument(name, described(given), f"{dtype}{list(shape)}", advice)
    return jnp.asarray(given)


def described(given: object) -> str:
    """An argument for a message: dtype and shape of an array, else the name of its type."""
    if isinstance(given, Array | np.ndarray):
        return f"{given.dtype.name}{list(given.shape)}"
    return kind_of(given)
