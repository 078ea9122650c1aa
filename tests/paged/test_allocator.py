"""Pages are handed out, shared, copied and returned as a model in plain Python does it."""

import collections
import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import paged
from tests.arrays import array
from tests.cases.small import quick_jit

R, N, P, PAGE = 5, 4, 13, 8  # P < R * N: the pool runs out
EMPTY = -1

allocate, fork, release = (quick_jit(f) for f in (paged.allocate, paged.fork, paged.release))
gather = quick_jit(paged.gather)


@quick_jit
def append(cache: paged.PagedCache, table: paged.PageTable, first: jax.Array, counts: jax.Array):
    """Appends counts[r] tokens first[r], first[r] + 1, ... to each request."""
    new = (first[:, None] + jnp.arange(N * PAGE + 1)).astype(jnp.float32)[:, :, None, None]
    return paged.append(cache, table, new, -new, query_seq_lengths=counts)


class Model:
    """The pool, as a dict from pages to how many entries hold each, and for each request its tokens, pages and reserved copy."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(R)]
        self.pages: list[list[object]] = [[] for _ in range(R)]
        self.copy: list[object | None] = [None] * R
        self.uses: collections.Counter = collections.Counter()

    @property
    def free(self) -> int:
        return P - sum(1 for c in self.uses.values() if c) - sum(c is not None for c in self.copy)

    def writes_to_shared(self, r: int) -> bool:
        at, rest = divmod(len(self.tokens[r]), PAGE)
        return rest != 0 and self.uses[self.pages[r][at]] > 1

    def new(self, r: int) -> object:
        page = object()
        self.uses[page] += 1
        return page

    def allocate(self, totals: list[int]) -> list[bool]:
        granted = []
        shared = [{p for p in self.pages[r] if self.uses[p] > 1} for r in range(R)]
        copies = [self.writes_to_shared(r) for r in range(R)]
        free = self.free
        drops = []
        for r, total in enumerate(totals):
            have = len(self.tokens[r])
            if total <= have:
                granted.append(True)
                continue
            keep, want = -(-have // PAGE), -(-total // PAGE)
            pages = self.pages[r] + [None] * (want - len(self.pages[r]))
            missing = [i for i in range(keep, want) if pages[i] is None or pages[i] in shared[r]]
            copying = copies[r] and self.copy[r] is None
            fits = want <= N and len(missing) + copying <= free
            granted.append(fits)
            if fits:
                free -= len(missing) + copying
                for i in missing:
                    drops += [] if pages[i] is None else [pages[i]]
                    pages[i] = self.new(r)
                self.pages[r] = pages
                self.copy[r] = object() if copying else self.copy[r]
        for page in drops:
            self.uses[page] -= 1
        return granted

    def append(self, first: list[int], counts: list[int]) -> None:
        shared = {p for p, c in self.uses.items() if c > 1}
        for r, count in enumerate(counts):
            have, pages = len(self.tokens[r]), self.pages[r]
            at, end = have // PAGE, -(-(have + count) // PAGE)
            copying = have % PAGE != 0 and pages[at] in shared
            later = pages[at + copying : end]
            reserved = end <= len(pages) and not any(p in shared for p in later)
            if not count or not reserved or (copying and self.copy[r] is None):
                continue
            self.tokens[r] = self.tokens[r] + [first[r] + i for i in range(count)]
            if copying:
                self.uses[pages[at]] -= 1
                pages[at] = self.copy[r]
                self.uses[self.copy[r]] += 1
            self.copy[r] = None

    def fork(self, source: list[int]) -> None:
        before = [(self.tokens[r], self.pages[r][: -(-len(self.tokens[r]) // PAGE)]) for r in range(R)]
        moved = {r: before[s] for r, s in enumerate(source) if 0 <= s < R and s != r}
        for r, (tokens, pages) in moved.items():
            self.uses.update(pages)
            self.drop(r)
            self.tokens[r], self.pages[r] = tokens, list(pages)

    def drop(self, r: int) -> None:
        self.uses.subtract(self.pages[r])
        self.tokens[r], self.pages[r], self.copy[r] = [], [], None

    def cut(self, r: int, length: int) -> None:
        self.tokens[r] = self.tokens[r][:length]


def check(model: Model, cache: paged.PagedCache, table: paged.PageTable) -> None:
    """The table says what the model says, up to the names of pages, and the pages have the tokens."""
    pages, lengths, uses = (np.asarray(x) for x in (table.pages, table.lengths, table.uses))
    assert lengths.tolist() == [len(t) for t in model.tokens]
    names: dict[object, int] = {}
    for r in range(R):
        assert (pages[r] != EMPTY).sum() == len(model.pages[r])
        for got, want in zip(pages[r].tolist(), model.pages[r], strict=False):
            assert 0 <= got < P
            assert names.setdefault(want, got) == got
    assert len(set(names.values())) == len(names), "one page is two"
    assert {p: c for p, c in enumerate(uses.tolist()) if c > 0} == {names[k]: c for k, c in model.uses.items() if c}
    assert sorted(-1 - c for c in uses.tolist() if c < 0) == [r for r in range(R) if model.copy[r] is not None]
    assert (uses == 0).sum() == model.free
    key, value = (np.asarray(x)[:, :, 0, 0] for x in gather(cache, table))
    for r, tokens in enumerate(model.tokens):
        assert key[r, : len(tokens)].tolist() == tokens
        assert value[r, : len(tokens)].tolist() == [-t for t in tokens]


def walk(steps: int, seed: int) -> collections.Counter:
    """Random calls; returns how often what happened."""
    rng = random.Random(seed)
    cache, table, model = paged.empty(P, PAGE, 1, 1, dtype=jnp.float32), paged.table(R, N, P, PAGE), Model()
    seen: collections.Counter = collections.Counter()
    ints = lambda x: np.asarray(x, np.int32)
    for _ in range(steps):
        kind = rng.choice(("allocate",) * 4 + ("append",) * 4 + ("fork", "release", "cut"))
        if kind == "allocate":
            totals = [len(t) + rng.choice((0, 1, 1, 2, 7, 9, 20, -3)) for t in model.tokens]
            table, granted = allocate(table, ints(totals))
            want = model.allocate(totals)
            assert np.asarray(granted).tolist() == want
            seen["refused"] += want.count(False)
        elif kind == "append":
            counts = [rng.choice((0, 1, 1, 1, 2, 7, 9)) for _ in range(R)]
            first = [rng.randrange(1 << 20) for _ in range(R)]
            before = [(len(t), c is not None) for t, c in zip(model.tokens, model.copy, strict=True)]
            cache, table = append(cache, table, ints(first), ints(counts))
            pages = [list(p) for p in model.pages]
            model.append(first, counts)
            seen["copied"] += sum(a != b for a, b in zip(pages, model.pages, strict=True))
            seen["not reserved"] += sum(
                n == len(t) and c > 0 for (n, _), t, c in zip(before, model.tokens, counts, strict=True)
            )
        elif kind == "fork":
            source = [rng.choice((-1, -1, rng.randrange(R), R + 3)) for _ in range(R)]
            table = fork(table, ints(source))
            model.fork(source)
            seen["forked"] += sum(0 <= s < R and s != r for r, s in enumerate(source))
        elif kind == "release":
            ends = [rng.random() < 0.3 for _ in range(R)]
            table = release(table, np.asarray(ends))
            for r in (r for r in range(R) if ends[r]):
                model.drop(r)
        else:  # tokens taken back, as after refused speculation
            r = rng.randrange(R)
            model.cut(r, rng.randrange(len(model.tokens[r]) + 1))
            table = dataclasses.replace(table, lengths=table.lengths.at[r].set(len(model.tokens[r])))
        check(model, cache, table)
    return seen


def test_a_random_walk_of_a_few_hundred_steps() -> None:
    seen = walk(300, 0)
    assert all(seen[what] >= 5 for what in ("refused", "copied", "forked", "not reserved")), seen


@pytest.mark.slow
def test_a_random_walk_of_ten_thousand_steps() -> None:
    walk(10_000, 1)


def test_a_refused_request_stays_as_it_is_and_later_ones_fit() -> None:
    table, granted = allocate(paged.table(R, N, P, PAGE), np.asarray([32, 32, 8, 33, 17], np.int32))
    assert granted.tolist() == [True, True, True, False, True]
    table, granted = allocate(table, np.asarray([1, 1, 24, 8, 1], np.int32))  # one page is free
    assert granted.tolist() == [True, True, False, True, True]
    assert (table.pages != EMPTY).sum(1).tolist() == [4, 4, 1, 1, 3]
    assert table.lengths.tolist() == [0] * R


def test_tables_of_other_allocators_that_count_nothing() -> None:
    """uses all 0: append writes, release returns, and no count goes below 0."""
    pages = array([[3, 1], [2, -7]], jnp.int32)
    table = paged.PageTable(pages, array([5, 0], jnp.int32), jnp.zeros(4, jnp.int32), page=PAGE)
    cache = paged.empty(4, PAGE, 1, 1, dtype=jnp.float32)
    new = jnp.ones((2, 9, 1, 1))
    cache, table = quick_jit(paged.append)(cache, table, new, new, query_seq_lengths=array([9, 9]))
    assert table.lengths.tolist() == [14, 0]  # request 1 has one page alone
    assert np.asarray(cache.key)[:, :, 0, 0].sum(1).tolist() == [0, 6, 0, 3]
    table = release(table, np.asarray([True, True]))
    assert table.uses.tolist() == [0] * 4


@pytest.mark.parametrize("dtype", [np.uint64, np.int64])
def test_numbers_of_64_bits_do_not_wrap_around(dtype: type) -> None:
    """A length of 2^32 + 3 tokens is not 3, and row 2^32 is not row 0."""
    table = paged.table(2, 3, 6, 8)
    _, granted = paged.allocate(table, np.array([2**32 + 3, 2**31 + 8], dtype))
    assert not granted.any()
    table, granted = paged.allocate(table, np.array([9, 0], dtype))
    assert granted.all()
    table = dataclasses.replace(table, lengths=jnp.array([9, 0], jnp.int32))
    np.testing.assert_array_equal(paged.fork(table, np.array([0, 2**32], dtype)).lengths, [9, 0])
