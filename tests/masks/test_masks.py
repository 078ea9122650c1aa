"""Each ready-made mask against the set of keys that each query should see, said in another way."""

import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flexjax
from flexjax import masks
from flexjax.combine import and_masks
from flexjax.mod_tools.signatures import MaskMod
from tests.primitives import primitives_of

Sizes = list[tuple[int, int]]
SIZES: Sizes = [(1, 1), (7, 7), (16, 16), (33, 33), (13, 29), (29, 13)]
NAMES = [n for n, v in vars(masks).items() if isinstance(v, types.FunctionType) and not n.startswith("_")]


def dense(mask: MaskMod, q_len: int, kv_len: int, b: int = 0, h: int = 0) -> np.ndarray:
    """bool `[q_len, kv_len]`, cut out of a grid of one of few sizes, so that little has to be compiled."""
    side = 40 if max(q_len, kv_len) <= 40 else 96
    over_kv = jax.vmap(mask, (None, None, None, 0))
    over_both = jax.vmap(over_kv, (None, None, 0, None))
    index = jnp.arange(side, dtype=jnp.int32)
    return np.asarray(over_both(jnp.int32(b), jnp.int32(h), index, index))[:q_len, :kv_len]


def rows(keys: Callable[[int, int], Iterable[int]], q_len: int, kv_len: int) -> np.ndarray:
    """bool `[q_len, kv_len]` from the keys of each query; keys that do not exist are left out."""
    table = np.zeros((q_len, kv_len), bool)
    for q in range(q_len):
        for key in keys(q, kv_len):
            if 0 <= key < kv_len:
                table[q, key] = True
    return table


class Case:
    """A mask, the keys that query `q` sees in it, and the lengths, batch entry and head to look at."""

    def __init__(
        self,
        mask: MaskMod,
        keys: Callable[[int, int], Iterable[int]],
        sizes: Sizes | None = None,
        b: int = 0,
        h: int = 0,
    ) -> None:
        self.mask, self.keys, self.sizes, self.b, self.h = mask, keys, sizes or SIZES, b, h


# ----------------------------------------------------------------- what the keys are


def past(q: int) -> list[int]:
    return list(range(q + 1))


RUNS = np.array([0, 0, 0, 2, 2, 2, 2, *[-1] * 4])  # documents of 3, 0 and 4 tokens, then tokens of none
KV_RUNS = np.where(RUNS < 0, -2, RUNS)


def run_of(ids: np.ndarray, q: int) -> range:
    """The tokens around q that have its id, without a gap."""
    first = last = q
    while first and ids[first - 1] == ids[q]:
        first -= 1
    while last + 1 < len(ids) and ids[last + 1] == ids[q]:
        last += 1
    return range(first, last + 1)


def prefixes_of(ids: np.ndarray) -> Callable[[int, int], Iterable[int]]:
    """The tokens of q's document that are not later than q, and its first two."""
    return lambda q, s: [k for n, k in enumerate(run_of(ids, q)) if n < 2 or k <= q]


def chunk_of(q: int, chunk: int) -> range:
    start = 0
    while start + chunk <= q:
        start += chunk
    return range(start, start + chunk)


def same_group(q_ids: np.ndarray, kv_ids: np.ndarray) -> Callable[[int, int], list[int]]:
    members: dict[int, list[int]] = {}
    for key, group in enumerate(kv_ids.tolist()):
        members.setdefault(group, []).append(key)
    return lambda q, kv_len: members.get(int(q_ids[q]), [])


def everyone_if_global(chosen: set[int]) -> Callable[[int, int], Iterable[int]]:
    return lambda q, kv_len: range(kv_len) if q in chosen else chosen


def summaries(stride: int, summary: int) -> Callable[[int, int], list[int]]:
    """The keys of each query under `strided_fixed`: a function (query, kv_len) -> list of keys."""

    def keys(q: int, kv_len: int) -> list[int]:
        ends = [k for start in range(0, q + 1, stride) for k in range(start + stride - summary, start + stride)]
        return [k for k in [*ends, *chunk_of(q, stride)] if k <= q]

    return keys


def ancestors(parents: list[int], context: int) -> Callable[[int, int], list[int]]:
    """The keys of each node of a tree: a function (query, kv_len) -> list of keys."""

    def keys(q: int, kv_len: int) -> list[int]:
        found, node = list(range(context)), q
        while node >= 0:
            found.append(context + node)
            node = parents[node]
        return found

    return keys


def diffusion(length: int, block: int) -> Callable[[int, int], list[int]]:
    """The keys of each query of block diffusion training: a function (query, kv_len) -> list of keys."""
    noisy = [list(range(s, min(s + block, length))) for s in range(0, length, block)]
    clean = [[k + length for k in group] for group in noisy]

    def keys(q: int, kv_len: int) -> list[int]:
        for i in range(len(noisy)):
            if q in noisy[i]:
                return [*noisy[i], *itertools.chain(*clean[:i])]
            if q in clean[i]:
                return [*itertools.chain(*clean[: i + 1])]
        raise AssertionError(q)

    return keys


def best_window(place: int, size: int, kernel: int) -> range:
    """Of all windows of `kernel` points that fit on the line, the one whose middle is nearest to `place`."""
    start = min(range(size - kernel + 1), key=lambda s: abs(s + kernel // 2 - place))
    return range(start, start + kernel)


def neighbours(order: np.ndarray, canvas: tuple[int, int], kernel: tuple[int, int]) -> Callable[[int, int], list[int]]:
    """`order[i]` is the row-major number of the point that token `i` is."""
    token = {int(point): i for i, point in enumerate(order)}

    def keys(q: int, kv_len: int) -> list[int]:
        y, x = divmod(int(order[q]), canvas[1])
        near_y, near_x = best_window(y, canvas[0], kernel[0]), best_window(x, canvas[1], kernel[1])
        return [token[j * canvas[1] + i] for j in near_y for i in near_x]

    return keys


def tile_order(canvas: tuple[int, ...], tile: tuple[int, ...]) -> np.ndarray:
    """Row-major numbers of the points of a canvas, tile by tile."""
    split = [n for c, t in zip(canvas, tile, strict=True) for n in (c // t, t)]
    axes = [*range(0, len(split), 2), *range(1, len(split), 2)]
    return np.arange(np.prod(canvas)).reshape(split).transpose(axes).ravel()


def morton_order(side: int) -> np.ndarray:
    """The points of a canvas of side x side in the order of the Morton curve, by sorting interleaved bits."""
    bits = side.bit_length()

    def code(point: int) -> str:
        y, x = (format(c, f"0{bits}b") for c in divmod(point, side))
        return "".join(a + b for a, b in zip(y, x, strict=True))

    return np.array(sorted(range(side * side), key=code))


def tile_neighbours(
    canvas: tuple[int, ...], kernel: tuple[int, ...], tile: tuple[int, ...], text: int
) -> Callable[[int, int], list[int]]:
    """The keys of each query under sliding tile attention: a function (query, kv_len) -> list of keys."""
    order, points = tile_order(canvas, tile), int(np.prod(canvas))

    def tile_of(token: int) -> tuple[int, ...]:
        place = np.unravel_index(int(order[token]), canvas)
        return tuple(int(p) // t for p, t in zip(place, tile, strict=True))

    def keys(q: int, kv_len: int) -> list[int]:
        texts = list(range(points, points + text))
        if q >= points:
            return [*range(points), *texts] if q in texts else []
        near = [best_window(p, c // t, k // t) for p, c, t, k in zip(tile_of(q), canvas, tile, kernel, strict=True)]
        seen = [k for k in range(points) if all(p in w for p, w in zip(tile_of(k), near, strict=True))]
        return seen + texts

    return keys


def media_so_far(is_media: list[int], tokens: int, latest: bool) -> Callable[[int, int], list[int]]:
    """The keys of each text token under `interleaved_media`: a function (query, kv_len) -> list of keys."""

    def keys(q: int, kv_len: int) -> list[int]:
        met = [i for i, place in enumerate(p for p, here in enumerate(is_media) if here) if place <= q]
        return [m * tokens + t for m in (met[-1:] if latest else met) for t in range(tokens)]

    return keys


def media_spans(spans: list[list[int]], tokens: int) -> Callable[[int, int], list[int]]:
    return lambda q, _: [
        m * tokens + t for m, (first, end) in enumerate(spans) if q in range(first, end) for t in range(tokens)
    ]


# ----------------------------------------------------------------- the table of cases

IDS = np.array([0, 0, 3, 3, 3, 1, 7, 7, 0, 2, 2, 2, 2])
IDS_BY_BATCH = np.stack([IDS, IDS[::-1], np.zeros_like(IDS)])
KV_IDS = np.array([7, 0, 0, 0, 1, 1, 5, 5, 2, 3, 3, 2, 2, 4, 4, 0, 7])
PARENTS = [-1, 0, 0, 1, 1, 2, 2, 5, -1, 8, 4, 8, 10]
OTHER_PARENTS = [-1, 0, 1, 2, 3, 0, 5, 5, 5, 1, 9, 9, 0]
SPANS = [[0, 7], [1, 7], [7, 12], [4, 4]]
MEDIA = [0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0]
SOME = [False, True] + [False] * 9 + [True, False]
Y6X8, Y8X8 = np.arange(48), np.arange(64)

CASES: dict[str, list[Case]] = {
    "full": [Case(masks.full, lambda q, s: range(s))],
    "causal": [Case(masks.causal, lambda q, s: past(q))],
    "causal_offset": [
        Case(masks.causal_offset(5), lambda q, s: past(q + 5)),
        Case(masks.causal_offset(-2), lambda q, s: past(q - 2)),
        Case(masks.causal_offset(np.int32(0)), lambda q, s: past(q)),
        Case(masks.causal_offset(jnp.asarray(4)), lambda q, s: past(q + 4)),
        Case(masks.causal_offset(np.array([1, 9])), lambda q, s: past(q + 9), b=1),
        Case(masks.causal_offset(np.array([3])), lambda q, s: past(q + 3), b=1),
    ],
    "sliding_window": [
        Case(masks.sliding_window(1), lambda q, s: [q]),
        Case(masks.sliding_window(5), lambda q, s: past(q)[-5:]),
        Case(masks.sliding_window(100), lambda q, s: past(q)),
        Case(masks.sliding_window(jnp.asarray(2)), lambda q, s: past(q)[-2:]),
        Case(masks.sliding_window(np.array([1, 4, 8])), lambda q, s: past(q)[-8:], h=2),
    ],
    "two_sided_window": [
        Case(masks.two_sided_window(0, 0), lambda q, s: [q]),
        Case(masks.two_sided_window(3, 1), lambda q, s: [q - 3, q - 2, q - 1, q, q + 1]),
        Case(masks.two_sided_window(0, 6), lambda q, s: range(q, q + 7)),
    ],
    "dilated_window": [
        Case(masks.dilated_window(4, 3), lambda q, s: [q, q - 3, q - 6, q - 9]),
        Case(masks.dilated_window(3, 1), lambda q, s: past(q)[-3:]),
        Case(masks.dilated_window(1, 4), lambda q, s: [q]),
    ],
    "dilated_two_sided_window": [
        Case(masks.dilated_two_sided_window(2, 1, 3), lambda q, s: [q - 6, q - 3, q, q + 3]),
        Case(masks.dilated_two_sided_window(0, 2, 5), lambda q, s: [q, q + 5, q + 10]),
    ],
    "chunked": [
        Case(masks.chunked(5), lambda q, s: [k for k in chunk_of(q, 5) if k <= q]),
        Case(masks.chunked(1), lambda q, s: [q]),
    ],
    "block_diagonal": [
        Case(masks.block_diagonal(5), lambda q, s: chunk_of(q, 5)),
        Case(masks.block_diagonal(40), lambda q, s: range(s)),
    ],
    "block_causal": [
        Case(masks.block_causal(6), lambda q, s: range(chunk_of(q, 6).stop)),
        Case(masks.block_causal(1), lambda q, s: past(q)),
    ],
    "prefix_lm": [
        Case(masks.prefix_lm(4), lambda q, s: range(max(4, q + 1))),
        Case(masks.prefix_lm(0), lambda q, s: past(q)),
        Case(masks.prefix_lm(np.array([2, 0, 11])), lambda q, s: range(max(11, q + 1)), b=2),
    ],
    "document": [
        Case(masks.document(IDS), same_group(IDS, IDS), [(13, 13), (5, 13), (13, 1)]),
        Case(masks.document(IDS_BY_BATCH), same_group(IDS[::-1], IDS[::-1]), [(13, 13)], b=1),
        Case(masks.document(IDS_BY_BATCH[:1]), same_group(IDS, IDS), [(13, 13)], b=2),
        Case(masks.document(IDS, KV_IDS), same_group(IDS, KV_IDS), [(13, 17)]),
        Case(masks.document(IDS_BY_BATCH, KV_IDS), same_group(IDS[::-1], KV_IDS), [(13, 17)], b=1),
        Case(masks.document(np.full(4, -1), np.full(9, -2)), lambda q, s: [], [(4, 9)]),
        Case(masks.document(lengths=np.array([3, 0, 4])), same_group(RUNS, KV_RUNS), [(11, 11), (5, 11)]),
        Case(masks.document(offsets=np.array([0, 3, 3, 7])), same_group(RUNS, KV_RUNS), [(11, 11)]),
        Case(masks.document(offsets=np.array([[1, 9], [0, 3]])), lambda q, s: [k for k in range(1, 9) if 1 <= q < 9]),
        Case(masks.document(lengths=np.array([[1, 9], [3, 4]])), same_group(RUNS, KV_RUNS), [(11, 11)], b=1),
    ],
    "per_document": [
        Case(masks.per_document(masks.causal, IDS), lambda q, s: [k for k in run_of(IDS, q) if k <= q], [(13, 13)]),
        Case(masks.per_document(masks.prefix_lm(2), IDS_BY_BATCH), prefixes_of(IDS[::-1]), [(13, 13), (7, 13)], b=1),
        Case(masks.per_document(masks.block_diagonal(2), np.zeros(9, int)), lambda q, s: chunk_of(q, 2), [(9, 9)]),
    ],
    "batched": [
        Case(masks.batched([masks.causal, masks.full]), lambda q, s: past(q)),
        Case(masks.batched([masks.causal, masks.full, masks.chunked(5)]), lambda q, s: range(s), b=1),
        Case(masks.batched([masks.full, masks.causal]), lambda q, s: past(q), b=7),
    ],
    "shared_prefix": [
        Case(masks.shared_prefix(3, masks.causal), lambda q, s: past(q)),
        Case(masks.shared_prefix(3, masks.sliding_window(2)), lambda q, s: [*range(3 if q >= 3 else 0), q - 1, q]),
        Case(masks.shared_prefix(np.array([0, 5]), masks.full), lambda q, s: range(s), b=1),
    ],
    "noop_mask": [Case(masks.noop_mask, lambda q, s: range(s))],
    "padding": [
        Case(masks.padding(np.array([5, 0, 14])), lambda q, s: [*range(s)][:5]),
        Case(masks.padding(np.array([5, 0, 14])), lambda q, s: [], b=1),
        Case(masks.padding(np.array([5, 0, 14])), lambda q, s: [*range(s)][:14], b=2),
        Case(masks.padding(3), lambda q, s: [0, 1, 2], b=2),
    ],
    "query_padding": [
        Case(masks.query_padding(np.array([5, 0])), lambda q, s: range(s) if q in range(5) else []),
        Case(masks.query_padding(np.array([5, 0])), lambda q, s: [], b=1),
    ],
    "left_padding": [
        Case(masks.left_padding(np.array([0, 6])), lambda q, s: range(s)),
        Case(masks.left_padding(np.array([0, 6])), lambda q, s: [*range(s)][6:], b=1),
    ],
    "global_tokens": [
        Case(masks.global_tokens(3), everyone_if_global({0, 1, 2})),
        Case(masks.global_tokens(0), lambda q, s: []),
        Case(masks.global_tokens(np.array(SOME)), everyone_if_global({1, 11}), [(13, 13)]),
        Case(masks.global_tokens(np.array([SOME, SOME[::-1]])), everyone_if_global({1, 11}), [(13, 13)], b=1),
    ],
    "local_global": [
        Case(
            masks.local_global(2, 1),
            lambda q, s: range(s) if q == 0 else [0, q - 2, q - 1, q, q + 1, q + 2],
        ),
        Case(
            masks.local_global(1, np.array(SOME)),
            lambda q, s: range(s) if q in (1, 11) else [1, 11, q - 1, q, q + 1],
            [(13, 13)],
        ),
    ],
    "streaming": [
        Case(masks.streaming(2, 4), lambda q, s: past(q)[:2] + past(q)[-4:]),
        Case(masks.streaming(0, 3), lambda q, s: past(q)[-3:]),
    ],
    "strided": [
        Case(masks.strided(4), lambda q, s: [*past(q)[-4:], *range(q, -1, -4)]),
        Case(masks.strided(1), lambda q, s: past(q)),
    ],
    "strided_fixed": [
        Case(masks.strided_fixed(5), summaries(5, 1)),
        Case(masks.strided_fixed(6, 2), summaries(6, 2)),
        Case(masks.strided_fixed(3, 3), lambda q, s: past(q)),
    ],
    "big_bird": [
        Case(
            masks.big_bird(33, 5, random_blocks=0, global_blocks=0),
            lambda q, s: nearby_blocks(q, 5, 1),
            [(33, 33)],
        ),
        Case(masks.big_bird(9, 1, random_blocks=9), lambda q, s: range(s), [(9, 9)]),
    ],
    "tree": [
        Case(masks.tree(np.array(PARENTS)), ancestors(PARENTS, 0), [(13, 13)]),
        Case(masks.tree(np.array(PARENTS), 6), ancestors(PARENTS, 6), [(13, 19), (13, 30), (4, 19)]),
        Case(masks.tree(np.array([PARENTS, OTHER_PARENTS])), ancestors(OTHER_PARENTS, 0), [(13, 13)], b=1),
        Case(masks.tree(np.array(PARENTS), np.array([3, 5])), ancestors(PARENTS, 5), [(13, 20)], b=1),
        Case(masks.tree(np.arange(-1, 15)), lambda q, s: past(q), [(16, 16)]),
    ],
    "block_diffusion": [
        Case(masks.block_diffusion(8, 4), diffusion(8, 4), [(16, 16)]),
        Case(masks.block_diffusion(11, 3), diffusion(11, 3), [(22, 22)]),
        Case(masks.block_diffusion(5, 1), diffusion(5, 1), [(10, 10)]),
    ],
    "natten_2d": [
        Case(masks.natten_2d((6, 8), (3, 5)), neighbours(Y6X8, (6, 8), (3, 5)), [(48, 48)]),
        Case(masks.natten_2d((6, 8), (4, 2)), neighbours(Y6X8, (6, 8), (4, 2)), [(48, 48)]),
        Case(masks.natten_2d((6, 8), (6, 8)), lambda q, s: range(s), [(48, 48)]),
    ],
    "natten_2d_tiled": [
        Case(
            masks.natten_2d_tiled((6, 8), (3, 5), tile),
            neighbours(tile_order((6, 8), tile), (6, 8), (3, 5)),
            [(48, 48)],
        )
        for tile in ((2, 4), (3, 2), (1, 1), (6, 8))
    ],
    "natten_2d_morton": [
        Case(masks.natten_2d_morton((8, 8), (3, 5)), neighbours(morton_order(8), (8, 8), (3, 5)), [(64, 64)]),
        Case(masks.natten_2d_morton((1, 1), (1, 1)), lambda q, s: [0], [(1, 1)]),
    ],
    "sliding_tile_2d": [
        Case(masks.sliding_tile_2d(c, k, t, x), tile_neighbours(c, k, t, x), [(n, n)])
        for c, k, t, x, n in (
            ((6, 8), (6, 4), (2, 2), 0, 48),
            ((6, 8), (4, 4), (2, 4), 3, 54),
            ((4, 5), (3, 3), (1, 1), 1, 21),
        )
    ],
    "sliding_tile_3d": [
        Case(masks.sliding_tile_3d(c, k, t, x), tile_neighbours(c, k, t, x), [(n, n)])
        for c, k, t, x, n in (
            ((2, 4, 6), (2, 2, 6), (1, 2, 2), 0, 48),
            ((3, 4, 4), (1, 2, 4), (1, 2, 2), 2, 52),
        )
    ],
    "interleaved_media": [
        Case(masks.interleaved_media(np.array(MEDIA, bool), 3), media_so_far(MEDIA, 3, True), [(11, 12)]),
        Case(
            masks.interleaved_media(np.array(MEDIA, bool), 3, only_latest=False),
            media_so_far(MEDIA, 3, False),
            [(11, 12)],
        ),
        Case(
            masks.interleaved_media(np.array([MEDIA, MEDIA[::-1]], bool), 2),
            media_so_far(MEDIA[::-1], 2, True),
            [(11, 8)],
            b=1,
        ),
    ],
    "media_intervals": [
        Case(masks.media_intervals(np.array(SPANS), 3), media_spans(SPANS, 3), [(12, 12)]),
        Case(
            masks.media_intervals(np.array([SPANS, SPANS[::-1]]), 1),
            media_spans(SPANS[::-1], 1),
            [(12, 4)],
            b=1,
        ),
    ],
}


def nearby_blocks(q: int, block: int, reach: int) -> range:
    own = chunk_of(q, block)
    return range(own.start - reach * block, own.stop + reach * block)


ALL_CASES = [pytest.param(case, id=f"{name}-{i}") for name in NAMES for i, case in enumerate(CASES.get(name, []))]


def test_every_exported_mask_has_a_case() -> None:
    assert sorted(CASES) == sorted(NAMES)


@pytest.mark.parametrize("case", ALL_CASES)
def test_each_query_sees_the_right_keys(case: Case) -> None:
    for q_len, kv_len in case.sizes:
        got = dense(case.mask, q_len, kv_len, case.b, case.h)
        np.testing.assert_array_equal(got, rows(case.keys, q_len, kv_len), f"{q_len} x {kv_len}")


@pytest.mark.parametrize("case", ALL_CASES)
def test_a_mask_is_a_plain_scalar_function(case: Case) -> None:
    """bool scalar, also under strict promotion; no control flow; a name that is one word."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    with jax.numpy_dtype_promotion("strict"):
        jaxpr, result = jax.make_jaxpr(case.mask, return_shape=True)(index, index, index, index)
    assert (result.shape, result.dtype) == ((), jnp.bool_)
    assert not primitives_of(jaxpr.jaxpr) & {"while", "cond", "scan"}
    assert re.fullmatch(r"[a-z0-9_-]+", case.mask.__name__)


# ----------------------------------------------------------------- documentation


@pytest.mark.parametrize("name", NAMES)
def test_pictures_in_docstrings_are_true(name: str) -> None:
    text = inspect.getdoc(getattr(masks, name)) or ""
    pictures = re.findall(r"Picture of `([^`]+)`, (\d+) x (\d+):\n\n((?:    [#. ]+\n?)+)", text)
    assert pictures, "no picture"
    for call, q_len, kv_len, picture in pictures:
        assert call.startswith(name)
        mask = eval(call, {**vars(masks), "np": np, "and_masks": and_masks})
        drawn = [["#" if seen else "." for seen in row] for row in dense(mask, int(q_len), int(kv_len))]
        assert [line.split() for line in picture.splitlines()] == drawn


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_begin_with_the_formula_and_name_every_argument(name: str) -> None:
    function = getattr(masks, name)
    text = inspect.getdoc(function) or ""
    assert text.startswith("mask = ")
    for argument in inspect.signature(function).parameters:
        assert argument in ("b", "h", "q_idx", "kv_idx") or re.search(rf"^{argument}:", text, re.M), argument
    assert ("Raises ValueError" in text) == (name not in ("full", "noop_mask", "causal"))
    if "ndarray" in str(inspect.signature(function)):
        assert "A call of other sizes raises ValueError." in " ".join(text.split())


def test_as_plain_functions_masks_read_the_last_element_past_the_end() -> None:
    ids = np.array([0, 0, 1, 1, 2])
    longer = np.pad(ids, (0, 3), mode="edge")
    np.testing.assert_array_equal(dense(masks.document(ids), 8, 8), dense(masks.document(longer), 8, 8))
    widths = np.array([1, 2])
    np.testing.assert_array_equal(
        dense(masks.sliding_window(widths), 8, 8, h=5), dense(masks.sliding_window(widths), 8, 8, h=1)
    )


# ----------------------------------------------------------------- properties


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
def test_windows_have_their_exact_width(length: int, width: int, dilation: int) -> None:
    q = np.arange(length)
    np.testing.assert_array_equal(dense(masks.sliding_window(width), length, length).sum(1), np.minimum(q + 1, width))
    np.testing.assert_array_equal(
        dense(masks.dilated_window(width, dilation), length, length).sum(1),
        np.minimum(-(-(q + 1) // dilation), width),
    )
    left, right = width - 1, dilation
    np.testing.assert_array_equal(
        dense(masks.two_sided_window(left, right), length, length).sum(1),
        np.minimum(q, left) + 1 + np.minimum(length - 1 - q, right),
    )


@given(st.data())
def test_trees_of_any_shape(data: st.DataObject) -> None:
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(12)]
    context = data.draw(st.integers(0, 4))
    got = dense(masks.tree(np.array(parents), context), 12, 18)
    np.testing.assert_array_equal(got, rows(ancestors(parents, context), 12, 18))


@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_documents_of_any_order(q_ids: list[int], kv_ids: list[int]) -> None:
    got = dense(masks.document(np.array(q_ids), np.array(kv_ids)), len(q_ids), len(kv_ids))
    wanted = rows(same_group(np.array(q_ids), np.array(kv_ids)), len(q_ids), len(kv_ids))
    np.testing.assert_array_equal(got, wanted)


@given(st.data())
def test_neighbourhoods_never_shrink(data: st.DataObject) -> None:
    canvas = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    kernel = (data.draw(st.integers(1, canvas[0])), data.draw(st.integers(1, canvas[1])))
    points = canvas[0] * canvas[1]
    got = dense(masks.natten_2d(canvas, kernel), points, points)
    assert set(got.sum(1)) == {kernel[0] * kernel[1]}
    assert got.diagonal().all()
    np.testing.assert_array_equal(got, rows(neighbours(np.arange(points), canvas, kernel), points, points))


# ----------------------------------------------------------------- what single masks promise


@pytest.mark.parametrize(
    ("length", "block", "window", "first", "drawn"), [(60, 4, 3, 2, 3), (37, 5, 1, 0, 2), (40, 4, 5, 1, 9)]
)
def test_big_bird_draws_whole_blocks_outside_window_and_global(
    length: int, block: int, window: int, first: int, drawn: int
) -> None:
    def mask(seed: int) -> np.ndarray:
        given = masks.big_bird(length, block, window_blocks=window, global_blocks=first, random_blocks=drawn, seed=seed)
        return dense(given, length, length)

    got, blocks = mask(1), -(-length // block)
    np.testing.assert_array_equal(got, mask(1))
    assert (got != mask(2)).any() or drawn >= blocks - window - first
    by_block = got[::block, ::block]
    np.testing.assert_array_equal(got, by_block.repeat(block, 0).repeat(block, 1)[:length, :length])
    for i in range(blocks):
        fixed = {j for j in range(blocks) if j < first or i < first or j in range(i - window // 2, i + window // 2 + 1)}
        seen = set(np.flatnonzero(by_block[i]).tolist())
        assert fixed <= seen
        assert len(seen - fixed) == min(drawn, blocks - len(fixed))


def test_big_bird_draws_are_spread() -> None:
    """Over many seeds every block outside the window is drawn about equally often."""
    seen = sum(
        dense(masks.big_bird(12, 1, global_blocks=1, random_blocks=2, seed=seed), 12, 12)[6] for seed in range(120)
    )
    outside = [j for j in range(1, 12) if abs(j - 6) > 1]
    assert all(10 < seen[j] < 60 for j in outside)  # 30 expected


@pytest.mark.parametrize("side", [2, 8])
def test_orders_hold_the_same_neighbourhoods(side: int) -> None:
    """Tiled and Morton order are renamings of the tokens of `natten_2d`, and nothing else."""
    canvas, kernel, points = (side, side), (1 + side // 4, 2), side * side
    plain = dense(masks.natten_2d(canvas, kernel), points, points)
    tiled, morton = tile_order(canvas, (2, 1)), morton_order(side)
    got = dense(masks.natten_2d_tiled(canvas, kernel, (2, 1)), points, points)
    np.testing.assert_array_equal(got, plain[np.ix_(tiled, tiled)])
    got = dense(masks.natten_2d_morton(canvas, kernel), points, points)
    np.testing.assert_array_equal(got, plain[np.ix_(morton, morton)])


def test_sliding_tiles_are_all_or_nothing() -> None:
    got = dense(masks.sliding_tile_3d((4, 4, 6), (2, 4, 2), (2, 2, 2)), 96, 96)
    tiles = got.reshape(12, 8, 12, 8).sum((1, 3))
    assert set(tiles.ravel().tolist()) == {0, 64}
    assert set(got.sum(1).tolist()) == {2 * 4 * 2}


def test_special_cases_agree() -> None:
    def same(a: MaskMod, b: MaskMod) -> None:
        np.testing.assert_array_equal(dense(a, 19, 23), dense(b, 19, 23))

    same(masks.two_sided_window(4, 0), masks.sliding_window(5))
    same(masks.block_causal(1), masks.causal)
    same(masks.prefix_lm(0), masks.causal)
    same(masks.causal_offset(0), masks.causal)
    same(masks.dilated_window(4, 1), masks.sliding_window(4))
    same(masks.streaming(0, 6), masks.sliding_window(6))
    same(masks.local_global(3, 0), masks.two_sided_window(3, 3))


TRACED: dict[str, tuple[Callable[..., MaskMod], np.ndarray]] = {
    "causal_offset": (masks.causal_offset, np.array([1, 4])),
    "sliding_window": (masks.sliding_window, np.array([2, 5])),
    "prefix_lm": (masks.prefix_lm, np.array(3)),
    "document": (masks.document, IDS_BY_BATCH),
    "document lengths": (lambda n: masks.document(lengths=n), np.array([[2, 3], [4, 0]])),
    "document offsets": (lambda at: masks.document(offsets=at), np.array([1, 1, 6, 9])),
    "per_document": (lambda ids: masks.per_document(masks.prefix_lm(2), ids), IDS_BY_BATCH),
    "shared_prefix": (lambda length: masks.shared_prefix(length, masks.causal), np.array([2, 5])),
    "padding": (masks.padding, np.array([2, 9])),
    "query_padding": (masks.query_padding, np.array([2, 9])),
    "left_padding": (masks.left_padding, np.array([2, 9])),
    "global_tokens": (masks.global_tokens, np.array(SOME)),
    "local_global": (lambda tokens: masks.local_global(1, tokens), np.array(SOME)),
    "tree": (masks.tree, np.array(PARENTS)),
    "interleaved_media": (lambda places: masks.interleaved_media(places, 3), np.array([*MEDIA, 0, 0], bool)),
    "media_intervals": (lambda spans: masks.media_intervals(spans, 4), np.array(SPANS)),
}


@pytest.mark.parametrize("name", TRACED)
def test_arrays_may_be_traced(name: str) -> None:
    factory, array = TRACED[name]
    index = jnp.arange(13, dtype=jnp.int32)

    @jax.jit
    def evaluate(array: jax.Array) -> jax.Array:
        mask = factory(array)
        one = jnp.int32(1)
        return jax.vmap(lambda q: jax.vmap(lambda kv: mask(one, one, q, kv))(index))(index)

    np.testing.assert_array_equal(np.asarray(evaluate(array)), dense(factory(array), 13, 13, 1, 1))


# ----------------------------------------------------------------- errors

ERRORS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: masks.sliding_window(0),
        "`sliding_window`: `window` is 0; expected an int of at least 1. "
        "A query sees `window` keys, itself included; pass one int, or one per head.",
    ),
    (
        lambda: masks.chunked(2**31),
        "`chunked`: `chunk` is 2147483648; expected an int of at most 2147483647. It counts the tokens of a chunk.",
    ),
    (
        lambda: masks.causal_offset(-(2**31)),
        "`causal_offset`: `offset` is -2147483648; expected an int of at least -2147483647. "
        "Pass one int, or one per batch entry.",
    ),
    (
        lambda: masks.causal_offset(True),
        "`causal_offset`: `offset` is True; expected an int. Pass one int, or one per batch entry.",
    ),
    (
        lambda: masks.sliding_window(np.asarray([8, 3_000_000_000], np.uint32)),
        "`sliding_window`: `window` has numbers from 8 to 3000000000; expected numbers that int32 holds, as positions are. "
        "A query sees `window` keys, itself included; pass one int, or one per head.",
    ),
    (
        lambda: masks.document(offsets=np.asarray([0, 2**32 + 4])),
        "`document`: `offsets` has numbers from 0 to 4294967300; expected numbers that int32 holds, as positions are. "
        "Pass where each document starts, and where the last one ends.",
    ),
    (
        lambda: masks.sliding_window(True),
        "`sliding_window`: `window` is True; expected an int of at least 1. "
        "A query sees `window` keys, itself included; pass one int, or one per head.",
    ),
    (
        lambda: masks.sliding_window(2.5),
        "`sliding_window`: `window` has dtype float32; expected integers. "
        "A query sees `window` keys, itself included; pass one int, or one per head.",
    ),
    (
        lambda: masks.two_sided_window(-1, 0),
        "`two_sided_window`: `left` is -1; expected an int of at least 0. It counts the keys before the query's own.",
    ),
    (
        lambda: masks.two_sided_window(1, 1.0),  # pyright: ignore[reportArgumentType]
        "`two_sided_window`: `right` is 1.0; expected an int of at least 0. It counts the keys after the query's own.",
    ),
    (
        lambda: masks.dilated_window(2, 0),
        "`dilated_window`: `dilation` is 0; expected an int of at least 1. Pass 1 for a window without gaps.",
    ),
    (
        lambda: masks.causal_offset(np.zeros((2, 2), int)),
        "`causal_offset`: `offset` has shape (2, 2); expected [] or [B], not empty. "
        "Pass one int, or one per batch entry.",
    ),
    (
        lambda: masks.prefix_lm(-1),
        "`prefix_lm`: `prefix` is -1; expected an int of at least 0. Pass one length, or one per batch entry.",
    ),
    (
        lambda: masks.document(),
        "`document` got no description of the documents; expected exactly one of `segment_ids`, `lengths` and `offsets`. "
        "They say the same thing in three ways.",
    ),
    (
        lambda: masks.document(offsets=np.array([[0, 3, 7], [0, 7, 3]])),
        "`document`: `offsets` fall from 7 to 3; expected each at least the one before, because documents start there in "
        "order. Sort them; fill a short row with its last offset.",
    ),
    (
        lambda: masks.document(lengths=[4, -2, 3]),
        "`document`: `lengths` has -2; expected numbers of tokens, 0 or more.",
    ),
    (
        lambda: masks.document(np.zeros(3, int), offsets=np.array([0, 3])),
        "`document` got `segment_ids` and `offsets`; expected exactly one of `segment_ids`, `lengths` and `offsets`. "
        "They say the same thing in three ways.",
    ),
    (
        lambda: masks.document(lengths=[[3, 4], [7]]),
        "`document`: `lengths` is a list, which is no array of numbers; expected integers [n] or [B, n]. Rows of unequal length are padded first. "
        "Pass the number of tokens of each document.",
    ),
    (
        lambda: masks.document("0011"),
        "`document`: `segment_ids` is a str, which is no array of numbers; expected integers [T] or [B, T]. Rows of unequal length are "
        "padded first. Pass the document number of each token.",
    ),
    (
        lambda: masks.document(np.array([0, -1], np.int32), np.array([0, 2**32 - 1], np.uint32)),
        "`document`: `kv_segment_ids` has numbers up to 4294967295 beside `segment_ids` of int32; expected numbers that int32 holds, as "
        "4294967295 and -1 are the same 32 bits. Number both anew, as np.unique does with return_inverse=True, or give both one type.",
    ),
    (
        lambda: masks.global_tokens(None),  # pyright: ignore[reportArgumentType]
        "`global_tokens`: `tokens` is None; expected bools [T] or [B, T]. Rows of unequal length are padded first. Pass how many tokens "
        "at the start are global, or a bool for each token.",
    ),
    (
        lambda: masks.document(kv_segment_ids=np.zeros(3, int), lengths=np.array([3])),
        "`document` got `kv_segment_ids` beside `lengths`; expected it beside `segment_ids`. Number the keys with "
        "`segment_ids` too.",
    ),
    (
        lambda: masks.per_document(np.zeros(3, int), masks.causal),
        "`per_document`: `mask_mod` is array([0, 0, 0]); expected a function of (b, h, q_idx, kv_idx). Pass the mask of one "
        "document first, then the ids.",
    ),
    (
        lambda: masks.batched([]),
        "`batched`: `mask_mods` is []; expected one function of (b, h, q_idx, kv_idx) for each batch entry. Pass a list of "
        "masks.",
    ),
    (
        lambda: masks.batched(None),  # pyright: ignore[reportArgumentType]
        "`batched`: `mask_mods` is None; expected one function of (b, h, q_idx, kv_idx) for each batch entry. Pass a list of masks.",
    ),
    (
        lambda: masks.shared_prefix(masks.causal, 3),
        "`shared_prefix`: `mask_mod` is 3; expected a function of (b, h, q_idx, kv_idx). Pass the length first, then the mask of "
        "the other entries.",
    ),
    (
        lambda: masks.document(np.zeros(3)),
        "`document`: `segment_ids` has dtype float32; expected integers. Pass the document number of each token.",
    ),
    (
        lambda: masks.document(np.zeros((1, 2, 3), int)),
        "`document`: `segment_ids` has shape (1, 2, 3); expected [T] or [B, T], not empty. "
        "Pass the document number of each token.",
    ),
    (
        lambda: masks.document(np.zeros(3, int), np.zeros((), int)),
        "`document`: `kv_segment_ids` has shape (); expected [S] or [B, S], not empty. "
        "Pass the document number of each token.",
    ),
    (
        lambda: masks.padding(np.array([2.0])),
        "`padding`: `lengths` has dtype float32; expected integers. Pass the number of real keys per batch entry.",
    ),
    (
        lambda: masks.padding(np.zeros(0, int)),
        "`padding`: `lengths` has shape (0,); expected [] or [B], not empty. "
        "Pass the number of real keys per batch entry.",
    ),
    (
        lambda: masks.global_tokens(-3),
        "`global_tokens`: `tokens` is -3; expected an int of at least 0. "
        "Pass how many tokens at the start are global, or a bool for each token.",
    ),
    (
        lambda: masks.global_tokens(np.array([0, 1])),
        "`global_tokens`: `tokens` has dtype int32; expected bool. "
        "Pass how many tokens at the start are global, or a bool for each token.",
    ),
    (
        lambda: masks.strided_fixed(4, 5),
        "`strided_fixed`: `summary` is 5; expected at most `stride`, which is 4. A block has no more tokens than that.",
    ),
    (
        lambda: masks.big_bird(64, 8, window_blocks=2),
        "`big_bird`: `window_blocks` is 2; expected an odd int. The window has the query's block in its middle.",
    ),
    (
        lambda: masks.tree(np.array([-1, 0, 2])),
        "`tree`: `parents[2]` is 2; expected -1 or an earlier node. "
        "Number the nodes so that each comes after its parent.",
    ),
    (
        lambda: masks.tree(np.array([[-1, 0], [-1, -2]])),
        "`tree`: `parents[1, 1]` is -2; expected -1 or an earlier node. "
        "Number the nodes so that each comes after its parent.",
    ),
    (
        lambda: masks.natten_2d((4,), (3, 3)),  # pyright: ignore[reportArgumentType]
        "`natten_2d`: `canvas` is (4,); expected (height, width), ints of at least 1. Pass a pair such as (32, 32).",
    ),
    (
        lambda: masks.natten_2d((4, 4), (5, 3)),
        "`natten_2d`: `kernel` is (5, 3); expected no more than `canvas`, which is (4, 4). "
        "Use the canvas itself for attention to everything.",
    ),
    (
        lambda: masks.natten_2d_tiled((4, 6), (3, 3), (2, 4)),
        "`natten_2d_tiled`: `tile` is (2, 4); expected a divisor of `canvas`, which is (4, 6). "
        "Pad the canvas or choose another tile.",
    ),
    (
        lambda: masks.natten_2d_morton((6, 6), (3, 3)),
        "`natten_2d_morton`: `canvas` is (6, 6); expected a square whose side is a power of two. "
        "Pad the canvas, or use `natten_2d_tiled`.",
    ),
    (
        lambda: masks.sliding_tile_2d((4, 4), (3, 2), (2, 2)),
        "`sliding_tile_2d`: `kernel` is (3, 2); expected a multiple of `tile`, which is (2, 2). "
        "Pad the canvas or choose another tile.",
    ),
    (
        lambda: masks.sliding_tile_3d((4, 4, 4), (2, 2, 8), (2, 2, 2)),
        "`sliding_tile_3d`: `kernel` is (2, 2, 8); expected no more than `canvas`, which is (4, 4, 4). "
        "Use the canvas itself for attention to everything.",
    ),
    (
        lambda: masks.interleaved_media(np.array([0, 1]), 2),
        "`interleaved_media`: `is_media` has dtype int32; expected bool. Pass True where the text has a medium.",
    ),
    (
        lambda: masks.media_intervals(np.zeros((2, 3), int), 2),
        "`media_intervals`: `intervals` has shape (2, 3); expected [M, 2] or [B, M, 2]. "
        "Pass the first text token and one past the last for each medium.",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors_say_everything(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        call()


@pytest.mark.parametrize(
    "mask",
    [
        masks.two_sided_window, masks.dilated_two_sided_window, masks.chunked, masks.block_diagonal,
        masks.block_causal, masks.streaming, masks.strided, masks.block_diffusion,
    ],
)  # fmt: skip
def test_every_number_is_checked(mask: Callable[..., MaskMod]) -> None:
    names = list(inspect.signature(mask).parameters)
    for name in names:
        arguments: dict[str, object] = dict.fromkeys(names, 2) | {name: -1}
        with pytest.raises(ValueError, match=f"^`{mask.__name__}`: `{name}` is -1; expected an int of at least "):
            mask(**arguments)


def test_names_tell_the_parameters() -> None:
    assert masks.sliding_window(256).__name__ == "sliding_window_256"
    assert masks.causal_offset(-3).__name__ == "causal_offset_-3"
    assert masks.natten_2d((32, 16), (7, 5)).__name__ == "natten_2d_32x16_7x5"
    assert masks.sliding_tile_3d((4, 4, 4), (2, 2, 4), (2, 2, 2)).__name__ == "sliding_tile_3d_4x4x4_2x2x4_2x2x2"
    assert masks.document(IDS).__name__ == "document"


def test_traced_offsets_of_many_documents_are_refused() -> None:
    message = (
        "`document` got traced offsets or lengths of 300 documents; expected at most 256. Pass `segment_ids`, for example "
        "jnp.repeat(jnp.arange(n), lengths, total_repeat_length=T)."
    )
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        jax.eval_shape(lambda n: masks.document(lengths=n) and n, jnp.ones(300, int))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_lengths_of_documents_are_summed_in_int32(dtype: str) -> None:
    mask = masks.document(lengths=np.asarray([100, 100, 56], dtype))
    same = np.arange(256)[:, None] // 100 == np.arange(256) // 100
    np.testing.assert_array_equal(np.asarray(mask(0, 0, *np.ogrid[:256, :256])), same)


def test_numbers_beyond_int32_are_refused_under_x64_too() -> None:
    with jax.enable_x64(True), pytest.raises(ValueError, match="expected numbers that int32 holds, as positions are"):
        masks.sliding_window(np.asarray([2**33 + 3]))


FAR = 2**31 - 1


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (masks.causal_offset(FAR), True),
        (masks.causal_offset(-FAR), False),
        (masks.causal_offset(np.array([FAR])), True),
        (masks.causal_offset(np.array([200], np.uint8)), True),
        (masks.causal_offset([FAR]), True),  # pyright: ignore[reportArgumentType]
        (masks.causal_offset(np.array([-FAR - 1])), False),
        (masks.dilated_window(2**30, 4), None),
        (masks.dilated_two_sided_window(2**30, 2**30, 4), None),
    ],
)
def test_products_and_sums_of_positions_do_not_wrap(mask: MaskMod, seen: bool | None) -> None:
    """None: every 4th key, up to the query's own if the window is one-sided."""
    q, k = np.ogrid[:9, :9]
    by_fours = ((q - k) % 4 == 0) & ((q >= k) | ("two_sided" in mask.__name__))
    wanted = by_fours if seen is None else np.full((9, 9), seen)
    np.testing.assert_array_equal(np.broadcast_to(mask(0, 0, q, k), (9, 9)), wanted)
    blocks = flexjax.create_block_mask(mask, None, None, 9, 9, block_size=8)
    np.testing.assert_array_equal(np.asarray(blocks.to_mask())[0, 0], wanted)


def test_a_scalar_of_jax_counts_global_tokens() -> None:
    wanted = masks.global_tokens(2)(0, 0, *np.ogrid[:5, :5])
    np.testing.assert_array_equal(masks.global_tokens(jnp.int32(2))(0, 0, *np.ogrid[:5, :5]), wanted)


def test_traced_sizes_are_refused() -> None:
    static = "It is compiled into the program: name it in static_argnames of jax.jit."
    for make, text in (
        (
            masks.chunked,
            "`chunked`: `chunk` is a traced int32[]; expected an int of at least 1. It counts the tokens of a ",
        ),
        (
            lambda n: masks.natten_2d((n, 8), (3, 3)),
            "`natten_2d`: `canvas` is (a traced int32[], 8); expected (height, width), ints of at least 1. Pass a pair such ",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(text)) as caught:
            jax.jit(lambda n, make=make: make(n)(0, 0, 0, 0))(8)
        assert str(caught.value).endswith(static)


def test_a_list_of_traced_numbers_is_an_array() -> None:
    given = jax.jit(lambda n: masks.document(lengths=[n, 3])(0, 0, *np.ogrid[:7, :7]))(4)
    np.testing.assert_array_equal(np.asarray(given), (np.arange(7)[:, None] < 4) == (np.arange(7) < 4))


@pytest.mark.parametrize("traced", [False, True])
def test_documents_by_lengths_skip_blocks_as_documents_by_ids_do(traced: bool) -> None:
    lengths = np.array([100, 28, 64, 190, 2])
    of_lengths = lambda n: flexjax.create_block_mask(masks.document(lengths=n), None, None, 384, 384, block_size=32)
    ids = np.repeat(np.arange(5), lengths)
    wanted = flexjax.create_block_mask(masks.document(ids), None, None, 384, 384, block_size=32, exact=False)
    got = (jax.jit(of_lengths) if traced else of_lengths)(jnp.asarray(lengths))
    np.testing.assert_array_equal(got.to_dense(), wanted.to_dense())
    assert got.sparsity() == wanted.sparsity()
