"""The block lists of the stages of a split sequence that is known, against the dense mask."""

from collections.abc import Callable

import numpy as np
import pytest

from flexjax import context_layout
from flexjax.context import lists
from flexjax.context.blocks import trace_mask

SIZE = 4
MASKS: dict[str, Callable] = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 9),
    "remainders": lambda b, h, i, j: (i * 7 + j * 3) % 11 == 0,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("method", ["all_to_all", "all_gather", "ring", "neighbours"])
def test_lists_name_the_blocks_of_the_dense_mask(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For three and for six devices, with as many classifications."""
    calls: list[int] = []
    classify = lists.classify_on_host
    monkeypatch.setattr(lists, "classify_on_host", lambda *given: (calls.append(1), classify(*given))[1])
    counts = []
    for devices, length in ((3, 72), (6, 88)):
        traced = trace_mask(MASKS[name], (length, length), 1, 1)
        layout = context_layout(MASKS[name], length, devices=devices, block_size=SIZE)
        calls.clear()
        made = lists.known_lists(traced, layout, method, layout.rounds)
        counts.append(len(calls))
        assert made is not None
        classes = _classes(MASKS[name], length, layout.query_blocks.size)
        for queries, keys, stage in _stages(layout, method, made):
            for device in range(len(queries)):
                for step in range(len(keys)):
                    rows, columns = queries[device], keys[step, device]
                    want = np.where((rows[:, None] < 0) | (columns < 0), 0, classes[rows[:, None], columns])
                    pairs = zip((1, 2), (stage.lists[:2], stage.lists[2:]), strict=True)
                    found = np.zeros_like(want)
                    for kind, (num, index) in pairs:
                        for row in range(0 if num is None or index is None else len(rows)):
                            listed = index[step, device, 0, 0, row, : num[step, device, 0, 0, row]]
                            assert (np.diff(listed) > 0).all()
                            found[row, listed] = kind
                    np.testing.assert_array_equal(found, want)
    assert counts[0] == counts[1] <= 4


def _classes(mask: Callable, length: int, blocks: int) -> np.ndarray:
    """int [blocks, blocks]: 0 empty, 1 partial, 2 full, where what lies past the end does not count."""
    at = np.arange(blocks * SIZE)
    inside = (at < length)[:, None] & (at < length)
    on = np.asarray(mask(0, 0, at[:, None], at))
    tiles = lambda x: x.reshape(blocks, SIZE, blocks, SIZE)
    some, all_ = tiles(on & inside).any((1, 3)), tiles(on | ~inside).all((1, 3))
    return np.where(tiles(inside).any((1, 3)), np.where(all_, 2, np.where(some, 1, 0)), 0)


def _stages(
    layout: object, method: str, made: lists.KnownLists
) -> list[tuple[np.ndarray, np.ndarray, lists.StageLists]]:
    """(query blocks [devices, rows], key blocks [steps, devices, columns], lists) of each stage."""
    queries, keys = np.asarray(layout.query_blocks), np.asarray(layout.key_blocks)  # type: ignore[attr-defined]
    n, everything = len(queries), np.arange(keys.size)
    if method == "all_to_all":
        return [(everything[None], everything[None, None], made.stages[0])]
    if method == "all_gather":
        return [(queries, np.broadcast_to(everything, (1, n, keys.size)), made.stages[0])]
    if method == "ring":
        ring = np.stack([keys[(np.arange(n) - step) % n] for step in range(n)])
        return [(queries, ring, made.stages[0])]
    rounds = layout.rounds  # type: ignore[attr-defined]
    received = np.concatenate([np.asarray(x) for x in rounds.received], 1)
    if made.visitors is None:
        return [(queries, keys[None], made.stages[0]), (queries, received[None], made.stages[1])]
    visitors, own = np.asarray(made.visitors.query_blocks), np.asarray(made.visitors.key_blocks)
    others = np.where(np.isin(queries, visitors), -1, queries)
    both = np.concatenate([received, own], 1)
    return [(others, keys[None], made.stages[0]), (visitors, both[None], made.stages[1])]
