"""Which pages a request has: page numbers, lengths and reference counts, and how pages are handed out and returned.

A request *holds* the page numbers 0 .. P - 1 in its row of the table; every other number is a hole.

    uses[p] = 0         page p is free
    uses[p] = c > 0     c entries of the table hold it
    uses[p] = -1 - r    p is reserved as the copy that request r makes when it writes to a page that it shares

Copy on write: `allocate` reserves a page for each hole after the stored tokens, and one for a copy of a shared last
page. `append` copies the shared page if others still hold it, and returns the reserved one otherwise. A request may
give back tokens: lower its entry of `lengths`.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.errors import bad_argument, kind_of, public
from flexjax.mod_tools.numpy_arrays import shown, unwrapped
from flexjax.mod_tools.settings import own

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class PageTable:
    """The pages of R requests; a pytree, made by `flexjax.paged.table` or by the code of an allocator of your own.

    pages    int32 [R, n]: the token at position s of request r is at place s % page of page pages[r, s // page]
    lengths  int32 [R]: tokens stored
    uses     int32 [P]: how many entries of `pages` hold a page; -1 - r if it is reserved for the copy of request r.
             Attention and `gather` do not read it
    page     tokens of a page, static. `allocate`, `fork` and `release` need it

    Entries after the last token that are in 0 .. P - 1 count as reserved pages. A number outside of 0 .. P - 1 before
    the last token reads as keys and values of 0, which mask_mod has to hide.
    """

    pages: Array
    lengths: Array
    uses: Array
    page: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, unwrapped(getattr(self, field.name)))


jax.tree_util.register_dataclass(PageTable, data_fields=["pages", "lengths", "uses"], meta_fields=["page"])


@public
@own
def table(R: int, n: int, P: int, page: int) -> PageTable:
    """The table of R requests without tokens, of at most n pages each, over a pool of P free pages of `page` tokens.

    Raises ValueError for numbers that are no positive ints, and for a page that is no multiple of 8.
    """
    for name, number in (("R", R), ("n", n), ("P", P)):
        check_positive(name, number)
    check_page("page", page)
    return PageTable(jnp.full((R, n), -1, jnp.int32), jnp.zeros(R, jnp.int32), jnp.zeros(P, jnp.int32), page)


@public
@own
def allocate(table: PageTable, new_lengths: Array | np.ndarray) -> tuple[PageTable, Array]:
    """Reserves the pages with which each request can grow to new_lengths tokens: (table, granted bool [R]).

    new_lengths   int32 [R]: totals, not differences. A request that does not grow is granted

    A request gets all pages that it needs, one for the copy of a shared, partly filled last page included, or none.
    Requests are served in the order of their rows; one that does not fit is skipped. A total that needs more than n
    pages is never granted. `append` moves `lengths`.
    """
    check_table(table, None)
    return _allocated(table, check_int32("new_lengths", new_lengths, table.lengths.shape))


@functools.partial(jax.jit, inline=True)  # eagerly, its loop would be compiled in each call
def _allocated(table: PageTable, totals: Array) -> tuple[PageTable, Array]:
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


@public
@own
def fork(table: PageTable, source: Array | np.ndarray) -> PageTable:
    """Lets requests share the tokens of others: row r gets the pages and the length of row source[r].

    source   int32 [R], of the rows before the call; r itself and numbers that are no row leave request r as it is

    What request r held is released. No token is copied; a partly filled last page is copied when one of its requests
    appends to it. Call `allocate` after a fork, also for the source: it reserves the page of the copy.
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


@public
@own
def release(table: PageTable, requests: Array | np.ndarray) -> PageTable:
    """Empties the rows of finished requests; pages that no other request holds are free then.

    requests   bool [R]: which requests end
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
    """bool [R]: which requests get their `cost` of pages, in the order of rows; what does not fit is skipped."""

    def too_many(granted: Array) -> Array:
        return granted & (jnp.cumsum(jnp.where(granted, cost, 0), dtype=jnp.int32) > free) & (cost > 0)

    def skip_first(granted: Array) -> Array:
        late = too_many(granted)
        return granted & ~(late & (jnp.cumsum(late, dtype=jnp.int32) == 1))

    # each round skips one request, so there are at most as many rounds as requests that are refused
    return lax.while_loop(lambda granted: jnp.any(too_many(granted)), skip_first, cost <= free)


# ------------------------------------------------------------------- counting


def _decode_uses(table: PageTable) -> tuple[Array, Array]:
    """(counts, spares) from `table.uses`: entries that hold a page, int32 [P]; the page a request reserves or -1."""
    rows, pool = table.pages.shape[0], table.uses.shape[0]
    owner = jnp.where(table.uses < 0, -1 - table.uses, rows)
    spares = jnp.full(rows, -1, jnp.int32).at[owner].set(jnp.arange(pool, dtype=jnp.int32), mode="drop")
    return jnp.maximum(table.uses, 0), spares


def _encode_uses(counts: Array, spares: Array) -> Array:
    """`PageTable.uses` from `counts` and `spares`, as `_decode_uses` returns them."""
    rows, pool = spares.shape[0], counts.shape[0]
    mark = -1 - jnp.arange(rows, dtype=jnp.int32)
    # tables that did not count have counts below 0
    return jnp.maximum(counts, 0).at[jnp.where(spares < 0, pool, spares)].set(mark, mode="drop")


def _held(table: PageTable, pool: int) -> Array:
    """bool [R, n]: which entries of the table are pages, not holes."""
    return (table.pages >= 0) & (table.pages < pool)


def _count(counts: Array, pages: Array, where: Array, step: int) -> Array:
    return counts.at[jnp.where(where, pages, counts.shape[0])].add(step, mode="drop")


def _last_is_shared(table: PageTable, shared: Array, page: int) -> Array:
    """bool [R]: whether the page that each request writes next is partly filled and shared (`shared` bool [R, n])."""
    columns = table.pages.shape[1]
    last = jnp.clip(table.lengths // page, 0, columns - 1)
    return (table.lengths % page != 0) & jnp.take_along_axis(shared, last[:, None], 1)[:, 0]


@dataclasses.dataclass(frozen=True)
class Growth:
    """What an append does to the table, which is given as it is after the append.

    starts, writes  int32 [R]: position of the first new token, and how many are written (0 without reserved pages)
    copied          int32 [R, 2]: the page to copy and the page to copy it to, in the first `copies` rows
    """

    table: PageTable
    starts: Array
    writes: Array
    copied: Array
    copies: Array


def grow(table: PageTable, counts: Array, page: int) -> Growth:
    """What an append of `counts` (int32 [R]) tokens does to the table, and which pages `append` has to copy first."""
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
    # a request whose pages are not all reserved stays as it is
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
    """The tokens of a page: those that the table says, else `page`. Raises ValueError."""
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
    if not isinstance(page, int) or isinstance(page, bool) or page < 8 or page % 8:
        raise bad_argument(name, shown(page), "a positive multiple of 8", "Kernels copy 8 tokens at a time.")


def check_positive(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise bad_argument(
            name, shown(number), "a positive int", "Sizes are static: they are compiled into the program."
        )


def check_int32(name: str, given: object, shape: tuple[int, ...]) -> Array:
    """The argument `name` as an int32 array, other integers clipped. Raises ValueError for another shape or dtype."""
    if isinstance(given, np.ndarray) and jnp.issubdtype(given.dtype, jnp.integer):
        given = _clipped(given, np)  # before jax cuts off what 32 bits do not hold
    return _clipped(_check_array(name, given, shape, jnp.integer, "int32"), jnp).astype(jnp.int32)


def _clipped(x: typing.Any, numpy: typing.Any) -> typing.Any:
    has, holds = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    return numpy.clip(x, max(int(has.min), int(holds.min)), min(int(has.max), int(holds.max)))


def _check_array(name: str, given: object, shape: tuple[int, ...], kind: type, dtype: str) -> Array:
    """The argument `name` as a jax array. Raises ValueError unless it is one of that shape, with a dtype of `kind`."""
    if not isinstance(given, Array | np.ndarray) or given.shape != shape or not jnp.issubdtype(given.dtype, kind):
        advice = "Pass it through jnp.asarray." if isinstance(given, list | tuple) else "Cast or reshape it."
        raise bad_argument(name, described(given), f"{dtype}{list(shape)}", advice)
    return jnp.asarray(given)


def described(given: object) -> str:
    if isinstance(given, Array | np.ndarray):
        return f"{given.dtype.name}{list(given.shape)}"
    return kind_of(given)
