"""The search of context/balance.py: what an exchange changes is what its ownership says, and its memory is that of the
tables."""

import tracemalloc

import numpy as np
import pytest

from flexjax.context.balance import Search, State, balanced, blocks_per_device
from flexjax.context.rounds import needed_keys, rounds_of


@pytest.mark.parametrize("own_keys", [True, False])
def test_exchanges_change_what_the_new_ownership_says(own_keys: bool) -> None:
    rng = np.random.default_rng(0)
    devices, chunks = 7, 42
    needed = rng.random((chunks, chunks if own_keys else 30)) < 0.2
    # the last two devices own no key column
    search = Search(needed, needed.sum(1), devices, None if own_keys else np.repeat(np.arange(5), 6))
    state = State(search, np.repeat(np.arange(devices), chunks // devices))
    for _ in range(20):
        one, other = map(int, rng.choice(devices, 2, replace=False))
        runs = np.concatenate([runs for runs, _ in state.exchanges(one, other, overlapping=True)])
        effects = state.effects(one, other, runs)
        which = int(rng.integers(len(runs)))
        heavier = np.maximum(*state.loads[[one, other]]) if state.loads[one] >= state.loads[other] else None
        state.exchange(effects, which)
        again = State(search, state.owner)
        for name in ("loads", "counts", "sent", "columns", "bounds", "needs_before"):
            np.testing.assert_array_equal(getattr(state, name), getattr(again, name))
        assert state.traffic == pytest.approx(again.traffic)
        assert state.cost == pytest.approx(again.cost)
        if heavier is not None:
            assert effects.gain[which] == heavier - state.loads[[one, other]].max()


def test_the_memory_of_a_layout_grows_as_its_tables() -> None:
    """Four times the devices and blocks have sixteen times the pairs of blocks; the search took a cube."""

    def peak(devices: int) -> int:
        blocks = 8 * devices
        documents = np.sort(np.random.default_rng(0).integers(0, blocks // 8, blocks))
        needed = np.tri(blocks, dtype=bool) & (documents[:, None] == documents)
        each, chunk = blocks_per_device(blocks, devices, "auto")
        tracemalloc.start()
        owned = balanced(needed, needed.sum(1), each, chunk, devices, None)
        rounds_of(needed_keys(needed, owned, owned), owned, rounded=False)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small, large = peak(32), peak(128)
    assert large < 20 * small
    assert large < 24 * (8 * 128) ** 2
