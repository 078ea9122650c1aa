"""BlockMask as an object: dense forms, selection, lists made by hand, pictures, transformations, and its messages."""

import functools
import logging
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import BlockMask, and_masks, create_block_mask, masks
from flexjax.backends.reference.definition import reference_attention
from flexjax.block_mask import transpose
from tests.arrays import array
from tests.block_mask.test_classify import classes_of
from tests.cases.random_masks import classes, dense
from tests.cases.small import to_mask
from tests.marks import some_slow

SIZES = (2, 3, 70, 90)
LENGTHS = array([40, 90])
WINDOWS = array([5, 30, 70])


def mixed(b, h, q, k):
    return (k < LENGTHS[b]) & (k <= q + 20) & (q - k < WINDOWS[h])


@pytest.fixture(scope="module")
def block_mask() -> BlockMask:
    return create_block_mask(mixed, *SIZES, block_size=(16, 32))


def test_dense_forms(block_mask: BlockMask) -> None:
    on = dense_mixed()
    assert block_mask.shape == SIZES
    assert block_mask.blocks == (5, 3)
    np.testing.assert_array_equal(to_mask(block_mask), on)
    np.testing.assert_array_equal(block_mask.to_dense(), classes(on, (16, 32)) > 0)
    assert block_mask.to_dense().dtype == jnp.int32
    assert block_mask.sparsity() == pytest.approx(100 * (1 - (classes(on, (16, 32)) > 0).mean()))
    places = jnp.arange(5)
    got = jax.vmap(block_mask.mask_mod, (None, None, 0, 0))(1, 2, places, 2 * places)
    np.testing.assert_array_equal(got, on[1, 2, np.arange(5), 2 * np.arange(5)])


LIST_NAMES = ("kv", "full_kv", "q", "full_q")


def widths(mask: BlockMask) -> list[int]:
    return [getattr(mask, f"{name}_indices").shape[-1] for name in LIST_NAMES]


def test_lists_without_captured_arrays_are_as_narrow_as_the_widest_row() -> None:
    mask = create_block_mask(masks.sliding_window(40), None, None, 400, 400, block_size=8)
    assert widths(mask) == [int(getattr(mask, f"{name}_num_blocks").max()) for name in LIST_NAMES]


def test_lists_of_captured_arrays_have_rounded_widths() -> None:
    """Never wider than a row has blocks, and of O(blocks visited) in all."""
    make = lambda n, size: create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < n), None, None, 400, 300, block_size=size
    )
    assert widths(make(jnp.asarray(20), 8)) == [16, 16, 16, 16]
    assert widths(make(jnp.asarray(200), 8)) == [32, 32, 32, 32]
    assert widths(make(jnp.asarray(20), (32, 64))) == [5, 5, 13, 13]


EMPTY = [(lengths, exact) for lengths in ((0, 0), (0, 40), (40, 0), (1, 1)) for exact in (None, True, False)]


@pytest.mark.parametrize(("lengths", "exact"), some_slow(EMPTY, [EMPTY[0], EMPTY[-1]]))
def test_lengths_of_nothing(lengths: tuple[int, int], exact: bool | None) -> None:
    make = lambda n: create_block_mask(lambda b, h, q, k: k < n[b], 2, None, *lengths, block_size=16, exact=exact)
    n = array([0, 1])
    for mask in (make(n), jax.jit(make)(n)):
        assert mask.shape == (2, 1, *lengths)
        assert mask.to_dense().shape == (2, 1, *mask.blocks)
        assert mask.to_mask().shape == mask.shape
        assert 0.0 <= mask.sparsity() <= 100.0
        assert mask.to_string()


# ------------------------------------------------------------------ selection

SELECTIONS = [
    0,
    -1,
    slice(0, 1),
    (slice(None), [2, 0]),
    (1, slice(None, None, 2)),
    (..., 3),
    (0, ..., slice(1, 4)),
    (..., slice(2, None)),
    (slice(None), slice(None), [3, 1, 4]),
    (slice(None), slice(None), array([0, 0, 2])),
    (np.int64(1), -2, -1),
    ([1, 1, 0], 0, slice(3, 1)),
    (..., slice(None, None, -1))[:0],
]


FEW = {1, 3, 6, 9}
"""Places in SELECTIONS: a number, lists, an ellipsis beside others, an array."""


@functools.cache
def dense_mixed() -> np.ndarray:
    return dense(mixed, SIZES)


@pytest.mark.parametrize(
    "index",
    [pytest.param(x, id=str(x), marks=[] if n in FEW else [pytest.mark.slow]) for n, x in enumerate(SELECTIONS)],
)
def test_selection_is_that_of_the_dense_mask(block_mask: BlockMask, index: object) -> None:
    taken = block_mask[index]
    on = dense_mixed()
    parts = index if isinstance(index, tuple) else (index,)
    if any(p is Ellipsis for p in parts):
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts = (*parts[:at], *(slice(None),) * (4 - len(parts)), *parts[at + 1 :])
    parts = (*parts, *(slice(None),) * (3 - len(parts)))
    b, h, blocks = (np.atleast_1d(np.arange(n)[p]) for n, p in zip((2, 3, 5), parts, strict=True))
    rows = [r for block in blocks for r in range(block * 16, min(block * 16 + 16, 70))]
    want = on[np.ix_(b, h, rows)]
    assert taken.shape == want.shape
    np.testing.assert_array_equal(to_mask(taken), want)
    np.testing.assert_array_equal(classes_of(taken), classes(want, (16, 32)))
    if want.size:
        np.testing.assert_array_equal(dense(taken.mask_mod, want.shape), want)


def test_selection_of_a_selection(block_mask: BlockMask) -> None:
    taken = block_mask[1:, [2, 1], 1:][0, 1, [2]]
    np.testing.assert_array_equal(to_mask(taken), dense_mixed()[1:2, 1:2, 48:64])


def test_one_entry_repeated_keeps_what_it_was() -> None:
    """A mask made for one batch entry that reads b: its copies are all that entry."""
    mask = create_block_mask(lambda b, h, q, k: k < LENGTHS[b], 1, None, 64, 64, block_size=32)
    np.testing.assert_array_equal(to_mask(mask[[0, 0]]), np.repeat(dense(mask.mask_mod, (1, 1, 64, 64)), 2, 0))


def test_selection_under_jit() -> None:
    @jax.jit
    def rows(lengths: jax.Array) -> jax.Array:
        mask = create_block_mask(lambda b, h, q, k: (k < lengths[b]) & (q >= k), 2, None, 64, 64, block_size=16)
        return mask[:, :, 1:3].to_mask()

    want = dense(lambda b, h, q, k: (k < LENGTHS[b]) & (q >= k), (2, 1, 64, 64))[:, :, 16:48]
    np.testing.assert_array_equal(rows(LENGTHS), want)


def test_a_block_mask_equals_itself() -> None:
    one, other = (create_block_mask(masks.causal, None, None, 64, 64) for _ in range(2))
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def test_a_stack_is_not_taken_for_one_block_mask() -> None:
    make = lambda n: create_block_mask(masks.causal_offset(n), None, None, 40, 40, block_size=8)
    stack = jax.vmap(make)(array([0, 8]))
    assert repr(stack).startswith("BlockMask(stack=(2,), shape=(1, 1, 40, 40), ")
    assert "stack=(2,)" in stack._repr_html_()
    message = re.escape(
        "`block_mask` is a stack of (2,) block masks; expected one block mask. Map over the stack with vmap or scan, or take one "
        "of it: jax.tree.map(lambda x: x[0], block_mask)."
    )
    uses = (BlockMask.to_string, BlockMask.plot, BlockMask.to_dense, BlockMask.to_mask, lambda m: m[0])
    for use in uses:
        with pytest.raises(ValueError, match=f"^{message}$"):
            use(stack)
    np.testing.assert_array_equal(to_mask(jax.tree.map(lambda x: x[1], stack)), to_mask(make(8)))


def test_sparsity_under_jit() -> None:
    message = "`block_mask` is traced; expected concrete lists. Count its blocks outside jit."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.jit(lambda n: create_block_mask(masks.causal_offset(n), None, None, 64, 64).sparsity())(0)


# ------------------------------------------------------------------ lists made by hand


def test_from_kv_blocks_without_a_mask() -> None:
    mask = BlockMask.from_kv_blocks(array([[[1, 2]]]), array([[[[2, 0], [1, 0]]]]), block_size=4)
    assert mask.shape == (1, 1, 8, 12)
    want = np.kron([[0, 0, 1], [1, 1, 0]], np.ones((4, 4))) > 0
    np.testing.assert_array_equal(np.asarray(to_mask(mask))[0, 0], want)
    np.testing.assert_array_equal(dense(mask.mask_mod, (1, 1, 8, 12))[0, 0], want)
    np.testing.assert_array_equal(mask.q_num_blocks, [[[1, 1, 1]]])


def test_from_kv_blocks_with_a_mask_and_full_blocks() -> None:
    mask = BlockMask.from_kv_blocks(
        array([[[1, 1]]]),
        array([[[[0], [1]]]]),
        array([[[0, 1]]]),
        array([[[[0], [0]]]]),
        block_size=(4, 5),
        mask_mod=masks.causal,
        q_len=7,
        kv_len=9,
    )
    want = dense(masks.causal, (1, 1, 7, 9)) & (np.kron([[1, 0], [0, 1]], np.ones((4, 5))) > 0)[:7, :9]
    want[..., 4:, :5] = True
    np.testing.assert_array_equal(to_mask(mask), want)
    np.testing.assert_array_equal(dense(mask.mask_mod, (1, 1, 7, 9)), want)


@pytest.mark.parametrize("traced", [False, True])
def test_numbers_need_no_order(traced: bool) -> None:
    """They are sorted, because kernels read a row up to a length, or its last block: entries past the count do not count."""
    num, index = array([[[3, 2]]]), array([[[[2, 0, 1, 0], [3, 1, 0, 2]]]])
    make = lambda n, i: BlockMask.from_kv_blocks(n * 0, i, n, i, block_size=16, q_len=32, kv_len=64)
    mask = (jax.jit(make) if traced else make)(num, index)
    known: list[bool] = []
    zeros, sizes = num * 0, dict(block_size=16, q_len=32, kv_len=64)
    here = lambda: BlockMask.from_kv_blocks(zeros, index, num, index, **sizes)
    jax.jit(lambda: known.append(isinstance(here().full_kv_indices, jax.core.Tracer)))()
    assert known == [False]
    for row, count, want in zip(np.asarray(mask.full_kv_indices)[0, 0], (3, 2), ([0, 1, 2], [1, 3]), strict=True):
        assert row[:count].tolist() == want
    q, k, v = (jax.random.normal(jax.random.key(n), (1, length, 1, 8)) for n, length in enumerate((32, 64, 64)))
    seen = flexjax.flex_attention(q, k, v, block_mask=mask, key_value_seq_lengths=array([20]), implementation="xla")
    shown = np.kron([[1, 1, 1, 0], [0, 1, 0, 1]], np.ones((16, 16), bool)) & (np.arange(64) < 20)
    np.testing.assert_allclose(seen, reference_attention(q, k, v, mask=array(shown[None, None]))[0], atol=2e-6)


def test_what_lists_leave_is_restricted_further() -> None:
    """As the message says that asks for one mask: by and_masks with the block mask's own function."""
    blocks = np.random.default_rng(0).random((2, 1, 4, 3)) < 0.5
    lists = jax.jit(transpose.lists_of)(blocks)
    listed = BlockMask.from_kv_blocks(*lists, block_size=(8, 16), kv_len=45)
    both = create_block_mask(and_masks(listed.mask_mod, masks.causal), 2, None, 32, 45, block_size=16)
    want = np.asarray(to_mask(listed)) & dense(masks.causal, (1, 1, 32, 45))
    np.testing.assert_array_equal(to_mask(both), want)
    later = listed[1, 0, 2:]
    np.testing.assert_array_equal(dense(later.mask_mod, later.shape), np.asarray(to_mask(listed))[1:, :, 16:])


def test_lists_shared_by_heads_keep_a_mask_that_tells_them_apart() -> None:
    """One list may serve many heads; the mask still sees which."""
    ones = jnp.ones((1, 1, 1), jnp.int32)
    mask = BlockMask.from_kv_blocks(ones, ones[..., None] * 0, block_size=8, mask_mod=lambda b, h, q, k: k <= h)
    assert [int(sum(mask.mask_mod(0, h, 0, k) for k in range(8))) for h in range(3)] == [1, 2, 3]


def test_traced_lists_of_static_width() -> None:
    @jax.jit
    def top(scores: jax.Array) -> BlockMask:
        _, index = jax.lax.top_k(scores, 2)
        return BlockMask.from_kv_blocks(
            jnp.full(scores.shape[:3], 2), index, block_size=4, mask_mod=masks.causal, kv_len=16
        )

    scores = array(np.random.default_rng(0).permutation(16).reshape(1, 1, 4, 4))
    chosen = np.asarray(scores)[0, 0] >= np.sort(np.asarray(scores)[0, 0], -1)[:, -2:-1]
    want = np.kron(chosen, np.ones((4, 4))) * dense(masks.causal, (1, 1, 16, 16))[0, 0]
    np.testing.assert_array_equal(np.asarray(to_mask(top(scores)))[0, 0], want > 0)


def test_traced_numbers_that_are_no_blocks_are_dropped() -> None:
    """The same on every path: what is visited, the mask entry by entry, and what attention computes."""
    num, full_num = array([[[2, 4, -3]]]), array([[[1, 9, 2]]])
    index = array([[[[5, 0, 1], [-1, 2, 3], [0, 1, 2]]]])
    full_index = array([[[[-(2**31), 1], [1, 7], [2, 0]]]])
    blocks = np.array([[1, 0, 0], [0, 1, 1], [1, 0, 1]])
    full = np.array([[0, 0, 0], [0, 1, 0], [1, 0, 1]])
    kron = lambda x: np.kron(x, np.ones((4, 4), bool))
    causal = np.tril(np.ones((12, 12), bool))
    query = jax.random.normal(jax.random.key(0), (1, 12, 1, 8))

    @jax.jit
    def seen(*lists: jax.Array) -> tuple[jax.Array, ...]:
        mask = BlockMask.from_kv_blocks(*lists, block_size=4, mask_mod=masks.causal, kv_len=12)
        run = lambda q: flexjax.flex_attention(q, q, q, block_mask=mask, implementation="xla")
        out, pull = jax.vjp(run, query)
        return mask.to_dense(), mask.to_mask(), out, *pull(out)

    dense, entries, *got = seen(num, index, full_num, full_index)
    np.testing.assert_array_equal(dense[0, 0], blocks)
    np.testing.assert_array_equal(entries[0, 0], kron(full) | (kron(blocks - full) & causal))
    run = lambda q: reference_attention(q, q, q, mask=entries)[0]

    @jax.jit
    def dense_results(q: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(run, q)
        return out, *pull(out)

    for a, b in zip(got, dense_results(query), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


NUM, INDEX = np.array([[[1, 1]]]), np.array([[[[0], [1]]]])
BAD_LISTS = {
    "half of the full pair": (
        (NUM, INDEX, NUM),
        {},
        "`full_kv_indices` is None; expected both of full_kv_num_blocks and full_kv_indices, or neither. "
        "Pass the other one too.",
    ),
    "rank": (
        (NUM[0], INDEX),
        {},
        "`kv_num_blocks` is int64[1, 2]; expected int32 [B, H, q_blocks]. Pass the lists as documented.",
    ),
    "dtype": (
        (NUM, INDEX * 1.0),
        {},
        "`kv_indices` is float64[1, 1, 2, 1]; expected int32 [B, H, q_blocks, width]. Pass the lists as documented.",
    ),
    "rows": (
        (NUM, INDEX[:, :, :1]),
        {},
        "`kv_indices` is of shape (1, 1, 1, 1); expected (1, 1, 2, width). Make them agree.",
    ),
    "full rows": (
        (NUM, INDEX, NUM[:, :, :1], INDEX[:, :, :1]),
        {},
        "`full_kv_num_blocks` is of shape (1, 1, 1); expected (1, 1, 2), that of kv_num_blocks. Make them agree.",
    ),
    "queries": (
        (NUM, INDEX),
        {"q_len": 8},
        "`q_len` is 8; expected a length of 2 blocks of 8 queries, the third dim of kv_num_blocks. "
        "Pass the number of queries that the lists were made for.",
    ),
    "columns": (
        (NUM, INDEX),
        {"kv_len": 8},
        "`kv_indices` is between 0 and 1; expected block numbers of 0 to 0. Check kv_len and the block size.",
    ),
    "counts": (
        (NUM * 2, INDEX),
        {},
        "`kv_num_blocks` is between 2 and 2; expected counts of 0 to 1, the width of kv_indices. "
        "Widen the index array or lower the counts.",
    ),
    "negative": (
        (NUM, INDEX - 1),
        {"kv_len": 16},
        "`kv_indices` is between -1 and 0; expected block numbers of 0 to 1. Check kv_len and the block size.",
    ),
    "more than int32 holds": (
        (NUM, INDEX + 2**32),
        {"kv_len": 16},
        "`kv_indices` is between 2147483647 and 2147483647; expected block numbers of 0 to 1. Check kv_len and the block size.",
    ),
    "twice": (
        (NUM, INDEX, NUM, INDEX),
        {},
        "`kv_indices` is listing a block twice; expected each block at most once in a row, in one of the two lists. "
        "Remove it.",
    ),
}


@pytest.mark.parametrize("what", BAD_LISTS)
def test_bad_lists(what: str) -> None:
    lists, more, message = BAD_LISTS[what]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        BlockMask.from_kv_blocks(*lists, block_size=8, **more)


def test_traced_lists_need_kv_len() -> None:
    message = "`kv_len` is None; expected the number of keys, since the lists are traced. Pass kv_len=key.shape[1]."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.jit(lambda n, i: BlockMask.from_kv_blocks(n, i, block_size=8))(NUM, INDEX)


BAD_CALLS = {
    "block_size=0": "`block_size` is 0; expected a positive int, or two: (queries, keys). 128 suits every backend.",
    "block_size=(1, 2, 3)": "`block_size` is (1, 2, 3); expected a positive int, or two: (queries, keys). "
    "128 suits every backend.",
    "block_size=True": "`block_size` is True; expected a positive int, or two: (queries, keys). 128 suits every backend.",
    "block_size=16.0": "`block_size` is 16.0; expected a positive int, or two: (queries, keys). 128 suits every backend.",
    "q_len=-1": "`q_len` is -1; expected a length in tokens, an int of at least 0. Pass a static int.",
    "kv_len=2.5": "`kv_len` is 2.5; expected a length in tokens, an int of at least 0. Pass a static int.",
    "batch=0": "`batch` is 0; expected a positive int, or None for one mask shared by all. Pass a static int.",
    "exact='yes'": "`exact` is 'yes'; expected True, False or None. None evaluates entries where that is little work.",
    "exact=1": "`exact` is 1; expected True, False or None. None evaluates entries where that is little work.",
    "batch=None": "`batch` is None but `mask_mod` depends on `b`; expected the number of batch entries. "
    "Pass batch=... so that each gets its own blocks.",
    "heads=None": "`heads` is None but `mask_mod` depends on `h`; expected the number of heads. "
    "Pass heads=... so that each gets its own blocks.",
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls(call: str) -> None:
    arguments = {"batch": 2, "heads": 3, "q_len": 8, "kv_len": 8, **eval(f"dict({call})")}
    with pytest.raises(ValueError, match=f"^{re.escape(BAD_CALLS[call])}$"):
        create_block_mask(mixed, **arguments)


def test_a_mask_in_the_place_of_a_length() -> None:
    expected = (
        "`mask_mod` is an int; expected a function mask_mod(b, h, q_idx, kv_idx). Ready-made ones are in flexjax.masks."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        create_block_mask(2, 3, 8, 8, mixed)  # type: ignore[arg-type]


BAD_SELECTIONS = {
    (0, 0, 0, 0): "`index` is 4 indices; expected at most 3: batch, head, query block. Keys are not sliced.",
    2: "`index` is 2; expected batch numbers of -2 to 1. Select what is there.",
    "b": "`index` is 'b'; expected an int, a slice or a 1-D array of batch numbers. Select with those.",
    True: "`index` is True; expected an int, a slice or a 1-D array of batch numbers. Select with those.",
    (0, 0, (4, 0)): "`index` is query blocks with the incomplete last block before others; expected that block last. "
    "Reorder them.",
}


@pytest.mark.parametrize("index", BAD_SELECTIONS, ids=str)
def test_bad_selections(block_mask: BlockMask, index: object) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(BAD_SELECTIONS[index])}$"):
        block_mask[index]


def test_traced_selections_are_refused(block_mask: BlockMask) -> None:
    message = (
        "`index` is a traced batch number; expected numbers known while tracing, since they decide the shape of the "
        "lists. For a query position that moves, capture it in the mask_mod (causal_offset does) and make a mask of one row."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.jit(lambda i: block_mask[i].to_dense())(1)


# ------------------------------------------------------------------ pictures


def test_the_picture() -> None:
    mask = create_block_mask(and_masks(masks.causal, masks.sliding_window(40)), None, None, 80, 80, block_size=16)
    assert mask.to_string() == (f"{mask!r}\nb=0 h=0\n┌─────┐\n│░    │\n│█░   │\n│░█░  │\n│░░█░ │\n│ ░░█░│\n└─────┘")
    assert repr(mask) == "BlockMask(shape=(1, 1, 80, 80), block_size=(16, 16), sparsity=44.0%)"
    assert mask.to_string(width=2).splitlines()[2:] == ["┌──┐", "│░ │", "│░░│", "└──┘"]


def test_notebook_and_repr(block_mask: BlockMask) -> None:
    html = block_mask._repr_html_()
    assert html.count("<tr>") == 5
    assert html.count("<td") == 15
    assert html.startswith("<code>BlockMask(shape=(2, 3, 70, 90), block_size=(16, 32), sparsity=")
    seen = []
    jax.jit(lambda m: (seen.extend([repr(m), m._repr_html_()]), m.to_dense())[1])(block_mask)
    leaves = jax.tree.map(lambda x: 0, block_mask)
    assert repr(leaves).startswith("BlockMask(kv_num_blocks=0, kv_indices=0, ")
    assert leaves._repr_html_() == f"<pre>{leaves!r}</pre>"
    assert seen[0] == "BlockMask(shape=(2, 3, 70, 90), block_size=(16, 32), traced)"
    assert seen[1] == f"<code>{seen[0]}</code>"


def test_plot(block_mask: BlockMask) -> None:
    from matplotlib import pyplot as plt

    axes = block_mask.plot(1, 2)
    assert axes.get_xlabel() == "key block of 32"
    np.testing.assert_array_equal(axes.images[0].get_array(), classes(dense(mixed, SIZES), (16, 32))[1, 2])
    assert axes.get_title().endswith("% skipped, b=1 h=2")
    axes.figure.canvas.draw()
    ticks = [t for axis in (axes.xaxis, axes.yaxis) for t in axis.get_major_locator()()]
    assert all(t == int(t) for t in ticks)
    plt.close(axes.figure)


@pytest.mark.parametrize(
    ("batch", "head", "message"),
    [
        (2, 0, "`batch` is 2; expected one of the 2 batch entries of the block mask, counted from 0."),
        (0, -1, "`head` is -1; expected one of the 3 heads of the block mask, counted from 0."),
    ],
)
def test_plot_refuses_numbers_out_of_range(block_mask: BlockMask, batch: int, head: int, message: str) -> None:
    message += " Pass 0 where the block mask has one for all."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        block_mask.plot(batch, head)


# ------------------------------------------------------------------ transformations


def test_pytree(block_mask: BlockMask) -> None:
    again = jax.jit(lambda m: m)(block_mask)
    assert isinstance(again, BlockMask)
    assert (again.program, again.block_size, again.shape) == (
        block_mask.program,
        block_mask.block_size,
        block_mask.shape,
    )
    jax.tree.map(np.testing.assert_array_equal, again, block_mask)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(block_mask)]
    assert paths[0] == ".kv_num_blocks"


def test_vmap_over_captured_arrays() -> None:
    make = lambda n: create_block_mask(lambda b, h, q, k: k < n, None, None, 64, 64, block_size=16)
    stacked = jax.vmap(make)(array([3, 40]))
    assert stacked.kv_num_blocks.shape == (2, 1, 1, 4)
    got = jax.vmap(lambda m: m.to_mask())(stacked)
    np.testing.assert_array_equal(got[:, 0, 0, 0].sum(-1), [3, 40])


@pytest.mark.parametrize("jitted", [False, True])
def test_few_programs_are_compiled(jitted: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A program for each operation on a number that is known took most of the time of a first call."""
    length = 1001 + jitted
    ids = array(np.arange(length) // 100)
    made = lambda: create_block_mask(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), None, None, length, length)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        (jax.jit(lambda: made().kv_num_blocks) if jitted else made)()
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert 0 < len(compiled) <= 2 + jitted, compiled


@pytest.mark.parametrize(
    ("length", "make"),
    [
        (1003, lambda ids: lambda b, h, q, kv: q >= kv),
        (1004, lambda ids: lambda b, h, q, kv: ids[q] == ids[kv]),
        (1005, masks.document),
    ],
)
def test_numpy_arrays_are_copied_without_a_program(
    length: int, make: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """jnp.asarray compiles one for each shape, `jit(stage)`."""
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        create_block_mask(make(np.arange(length) // 100), None, None, length, length)
    compiled = [r.getMessage().split(" with ")[0] for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert compiled == ["Compiling jit(classify)"]


def test_new_values_do_not_retrace() -> None:
    traces = []

    @jax.jit
    def visited(mask: BlockMask) -> jax.Array:
        traces.append(1)
        return mask.to_dense().sum()

    for seed in (0, 1):
        ids = array(np.sort(np.random.default_rng(seed).permutation(64) // 16))
        visited(create_block_mask(masks.document(ids), None, None, 64, 64, block_size=16))
    assert len(traces) == 1


def test_a_forward_pass_makes_no_transposed_lists() -> None:
    """Making the lists of a mask takes a scatter each: two in a forward pass, those of the key blocks alone."""
    q = jnp.zeros((1, 64, 2, 8))

    def attend(ids: jax.Array, q: jax.Array) -> jax.Array:
        mask_mod = and_masks(masks.causal, masks.document(ids))
        return flexjax.flex_attention(q, q, q, mask_mod=mask_mod, implementation="xla")

    ids = jnp.zeros((1, 64), jnp.int32)
    text = jax.jit(attend).lower(ids, q).as_text()
    assert text.count('"stablehlo.scatter"(') == 2
    leaves = jax.tree.leaves(create_block_mask(masks.document(ids), 1, None, 64, 64))
    assert len(leaves) == 4 + 1, "four lists and the captured array"


@pytest.mark.parametrize("known", [True, False])
def test_transposed_lists_of_a_stack(known: bool) -> None:
    make = lambda n: create_block_mask(masks.causal_offset(n), None, None, 40, 72, block_size=8)
    offsets = array([0, 8, 16])
    stack = jax.tree.map(lambda *x: jnp.stack(x), *map(make, offsets)) if known else jax.vmap(make)(offsets)
    for place, offset in enumerate(offsets):
        one, whole = make(offset), [getattr(stack, f"{name}_num_blocks")[place] for name in ("q", "full_q")]
        for num, name in zip(whole, ("q", "full_q"), strict=True):
            np.testing.assert_array_equal(num, getattr(one, f"{name}_num_blocks"))
            live = np.arange(getattr(one, f"{name}_indices").shape[-1]) < np.asarray(num)[..., None]
            wide = np.asarray(getattr(stack, f"{name}_indices")[place])[..., : live.shape[-1]]
            np.testing.assert_array_equal(wide[live], np.asarray(getattr(one, f"{name}_indices"))[live])


def test_the_door_names_it() -> None:
    assert flexjax.BlockMask is BlockMask
