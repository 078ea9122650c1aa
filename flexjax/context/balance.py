"""Which device owns which blocks of a sequence, so that all have equal work and receive few key blocks from each other.

Every device owns the same number of blocks, so that its arrays have one shape. Three ways to share them out:

    contiguous   the r-th part for device r: little traffic under windows and documents, unequal work under causality
    zigzag       the r-th run from the front and the r-th from the back for device r, which balances a causal mask
    auto         starts from these two and exchanges equal runs of blocks between devices: first for even loads, then
                 (drawn with fixed random numbers) for less traffic

The cost is the heaviest over the mean load, plus the traffic: what a device receives as a share of all other devices'
blocks, half what it needs and half what the rounds send (rounds.py). The search works on at most some hundreds of
chunks of blocks, so that its time does not grow with the square of the length.
"""

import typing
from collections.abc import Iterator

import numpy as np

from flexjax.integers import cdiv, round_up

EVEN = 1.02  # heaviest over mean load from which on the search looks no further
CHUNKS = 256  # chunks that a sequence is cut into at least, where it has that many blocks
CANDIDATES = 40  # exchanges that are compared in each step towards even loads
STEPS, SAMPLED = 32, 96  # steps towards less traffic, and exchanges that are drawn in each
RUNS = (1, 2, 4, 8, 16, 32)  # lengths, in chunks, of the runs that are exchanged


def blocks_per_device(blocks: int, devices: int, balance: str) -> tuple[int, int]:
    """(blocks of each device, blocks of a chunk); the first is rounded up to a multiple of the second."""
    each = max(1, cdiv(blocks, devices))
    if balance != "auto":
        return each, 1
    # each device has at least max(8, CHUNKS // devices) chunks, or chunks of one block
    chunk = 1
    while 2 * chunk * max(8, CHUNKS // devices) <= each:
        chunk *= 2
    return round_up(each, chunk), chunk


def contiguous(each: int, devices: int) -> np.ndarray:
    """int32 [devices, each]: the blocks of each device; device r has the r-th run of `each` blocks."""
    return np.arange(devices * each, dtype=np.int32).reshape(devices, each)


def zigzag(each: int, devices: int) -> np.ndarray:
    """int32 [devices, each], ascending: device r has the r-th run from the front and the r-th from the back."""
    front = (each + 1) // 2  # one block more than `back` if `each` is odd
    back = each - front
    first = np.arange(devices * front, dtype=np.int32).reshape(devices, front)
    last = devices * front + np.arange(devices * back, dtype=np.int32).reshape(devices, back)
    return np.concatenate([first, last[::-1]], 1)


def balanced(
    needed: np.ndarray, work: np.ndarray, each: int, chunk: int, devices: int, key_owner: np.ndarray | None
) -> np.ndarray:
    """int32 [devices, each]: the blocks of each device for balance "auto", ascending.

    needed      bool [query blocks, key blocks]: which blocks are visited
    work        [query blocks]: visited blocks of each row of blocks
    each        blocks of a device, a multiple of `chunk`
    key_owner   [key blocks]: the device of each key block; None: each device owns the keys of its own queries
    """
    chunks = devices * each // chunk
    of_rows = any_of_rows(needed, np.arange(devices * each).reshape(chunks, chunk))
    weight = _padded(work, 0, devices * each).reshape(chunks, chunk).sum(1)
    if key_owner is None:
        columns = _padded(of_rows, 1, devices * each)
        search = Search(np.asarray(columns.reshape(chunks, chunks, chunk).any(2)), weight, devices, None)
    else:
        few = max(1, len(key_owner) // (2 * CHUNKS))  # neighbouring key blocks of one device as one
        joined, owner = _joined(of_rows, key_owner, few)
        search = Search(joined, weight, devices, owner)
    states = []
    for start in (contiguous(chunks // devices, devices), zigzag(chunks // devices, devices)):
        owner = np.empty(chunks, int)
        owner[start.ravel()] = np.repeat(np.arange(devices), chunks // devices)
        states.append(State(search, owner))
    if min(state.loads.max() for state in states) > EVEN * search.mean:
        states.append(search.reduce_traffic(min(map(search.improved, states), key=lambda state: state.cost)))
    best = min(states, key=lambda state: state.cost)  # the first of equals: contiguous
    of_device = np.argsort(best.owner, kind="stable").reshape(devices, -1)
    return (of_device[:, :, None] * chunk + np.arange(chunk)).reshape(devices, each).astype(np.int32)


def any_of_rows(needed: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """bool [groups, columns]: whether `needed`, bool [rows, columns], is True for any row of each group.

    groups   int [groups, n]: the numbers of the rows of each group; numbers past the last row stand for rows of False
    """
    rows, columns = needed.shape
    words = _padded(needed, 1, round_up(columns, 8)).view(np.uint64)  # eight columns at once
    found = np.zeros((len(groups), words.shape[1]), np.uint64)
    for group, of_group in zip(found, groups, strict=True):
        inside = of_group[of_group < rows]
        if len(inside):
            run = inside[-1] - inside[0] + 1 == len(inside)
            part = words[inside[0] : inside[-1] + 1] if run and (np.diff(inside) == 1).all() else words[inside]
            np.bitwise_or.reduce(part, 0, out=group)
    return found.view(bool)[:, :columns]


def _padded(x: np.ndarray, axis: int, length: int) -> np.ndarray:
    """x with zeros after its end along the axis, so that the axis has `length` entries."""
    width = [(0, length - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return np.pad(x, width) if x.shape[axis] < length else x


def _joined(needed: np.ndarray, owner: np.ndarray, few: int) -> tuple[np.ndarray, np.ndarray]:
    """(needed, owner) with up to `few` neighbouring key blocks of one device joined into a column."""
    starts = np.flatnonzero((np.arange(len(owner)) % few == 0) | (np.diff(owner, prepend=-1) != 0))
    return np.logical_or.reduceat(needed, starts, 1), owner[starts]


class Search:
    """The search for a better ownership by exchanges of runs of chunks between devices, which changes a State.

    An exchange is int [3]: first chunk of a run of one device, that of a run of the other, length of both in chunks.
    """

    def __init__(self, needed: np.ndarray, work: np.ndarray, devices: int, key_owner: np.ndarray | None):
        """needed: bool [query chunks, key columns]; work: visited blocks [query chunks]; key_owner: [key columns]."""
        # None: columns are the chunks, owned as the rows are
        self.needed, self.devices, self.key_owner = needed, devices, key_owner
        self.mean = max(float(work.sum()) / devices, 1e-30)  # load of a device
        self.work = np.asarray(work, float)
        self.sums, self.work_sums = _sums_before(needed, 0, np.int32), _sums_before(self.work, 0, float)
        self.others = needed.shape[1] * (1 - 1 / devices)  # key columns of the other devices of a device

    def improved(self, state: "State") -> "State":
        """The cheapest of `state` and those after exchanges that even out the loads by more than the traffic grows."""
        best, cost = state.owner, state.cost
        state = State(self, state.owner.copy())
        for _ in range(4 * self.devices):
            if state.loads.max() <= EVEN * self.mean or not self._make_best_exchange(state):
                break
            if state.cost < cost:
                best, cost = state.owner.copy(), state.cost
        return State(self, best)

    def _make_best_exchange(self, state: "State") -> bool:
        """Makes the best exchange of the device with most work and one with least; False if none helps."""
        high = int(state.loads.argmax())
        best: tuple[float, Effects, int] | None = None
        for low in np.argsort(state.loads, kind="stable")[: 3 if self.devices <= 8 else 1]:
            runs = self._runs(state, high, int(low))
            if low == high or not len(runs):
                continue
            effects = state.effects(high, int(low), runs)
            # the gain in load over the mean load, less the growth of the traffic
            value = effects.gain / self.mean - (effects.traffic - state.traffic)
            at = int(value.argmax())
            if value[at] > (1e-6 if best is None else best[0]):
                best = float(value[at]), effects, at
        if best is not None:
            state.exchange(*best[1:])
        return best is not None

    def reduce_traffic(self, state: "State") -> "State":
        """Exchanges runs for less traffic, with loads up to EVEN times the mean or the heaviest; returns `state`."""
        draw = np.random.default_rng(0)
        limit = max(EVEN * self.mean, float(state.loads.max()))
        for _ in range(STEPS):
            one, other = map(int, draw.choice(self.devices, 2, replace=False))
            runs = self._even_runs(state, one, other, limit, draw)
            if not len(runs):
                continue
            effects = state.effects(one, other, runs)
            at = int(effects.traffic.argmin())
            if effects.traffic[at] < state.traffic - 1e-6:
                state.exchange(effects, at)
        return state

    def _even_runs(self, state: "State", one: int, other: int, limit: float, draw: np.random.Generator) -> np.ndarray:
        """int [n, 3]: random exchanges, SAMPLED // len(RUNS) of a length, that leave neither load above `limit`."""
        found = [np.zeros((0, 3), int)]
        for runs, moved in state.exchanges(one, other, overlapping=True):
            even = np.flatnonzero((state.loads[other] + moved <= limit) & (state.loads[one] - moved <= limit))
            found.append(runs[draw.choice(even, min(len(even), SAMPLED // len(RUNS)), replace=False)])
        return np.concatenate(found)

    def _runs(self, state: "State", high: int, low: int) -> np.ndarray:
        """int [n, 3]: the exchanges, at most CANDIDATES, that make two loads most nearly equal, the best first."""
        gap = state.loads[high] - state.loads[low]
        found, off = [np.zeros((0, 3), int)], [np.zeros(0)]
        for runs, moved in state.exchanges(high, low, overlapping=False):
            # the load of `high`, the larger one, gets smaller, and that of `low` stays below what `high` had
            miss = np.where((moved > 0) & (moved < gap), np.abs(moved - gap / 2), np.inf)
            few = min(CANDIDATES // len(RUNS) + 1, miss.size)
            nearest = np.argpartition(miss, few - 1)[:few]
            nearest = nearest[np.isfinite(miss[nearest])]
            found.append(runs[nearest])
            off.append(miss[nearest])
        return np.concatenate(found)[np.argsort(np.concatenate(off), kind="stable")[:CANDIDATES]]


def _sums_before(x: np.ndarray, axis: int, dtype: type) -> np.ndarray:
    """The sums over the entries before each along the axis, and last that of all: one entry more than x has."""
    before = np.zeros([n + (i == axis) for i, n in enumerate(x.shape)], dtype)
    np.cumsum(x, axis, out=before[(slice(None),) * axis + (slice(1, None),)])
    return before


class Effects(typing.NamedTuple):
    """What n exchanges of runs between two devices change, each alone; the first dim of arrays is n."""

    pair: tuple[int, int]
    runs: np.ndarray  # int [n, 3]
    gain: np.ndarray  # [n]: the larger load of the pair before less that after, if it is that of the first
    traffic: np.ndarray  # [n]: after
    change: np.ndarray  # int32 [n, key columns]: what the first loses of `State.counts`, and the second gains
    received: np.ndarray  # [n, 2, devices]: what each of the pair receives from each device
    sent: np.ndarray  # [n, 2, devices]: what each of the pair sends to each device


class State:
    """An ownership, `owner` int [chunks] (the device of each query chunk), and what follows from it.

    `sent[d, i]` is how many key columns of device i the device d places after it needs; at d = 0, of its own. An
    exchange changes two rows and two columns of receivers and senders, so its effects cost O(devices + columns) each.
    """

    def __init__(self, search: Search, owner: np.ndarray):
        """Keeps `owner`, does not copy it."""
        devices = search.devices
        self.search, self.owner = search, owner
        self.loads = np.bincount(owner, search.work, devices)  # [devices]: work of each
        order = np.argsort(owner, kind="stable")
        starts = np.searchsorted(owner[order], np.arange(devices))
        # int32 [devices, key columns]: chunks of the device that read it
        self.counts = np.add.reduceat(search.needed[order], starts, 0, dtype=np.int32)
        keys = owner if search.key_owner is None else search.key_owner
        # key columns by their owners, and where those of each device begin and end
        self.columns = np.argsort(keys, kind="stable")
        self.bounds = np.searchsorted(keys[self.columns], np.arange(devices + 1))
        needs = self.counts > 0
        # int32 [key columns + 1, devices]: how many of the columns before each a device needs
        self.needs_before = np.ascontiguousarray(_sums_before(needs, 1, np.int32).T)
        self.at = np.arange(devices)
        self.sent = np.empty((devices, devices), np.float32)
        self.sent[(self.at[:, None] - self.at) % devices, self.at] = self._by_owner(needs)
        self._set_traffic(float(self._traffic(self.sent[1:].max(1).sum(), self.sent[1:].sum())))

    def _by_owner(self, needs: np.ndarray) -> np.ndarray:
        """[..., devices]: how many of the key columns of each device `needs`, bool [..., key columns], names."""
        before = _sums_before(needs[..., self.columns], needs.ndim - 1, np.int32)
        return before[..., self.bounds[1:]] - before[..., self.bounds[:-1]]

    def _traffic(self, widest: typing.Any, total: typing.Any) -> typing.Any:
        """The share of the others' key columns that a device receives; `widest`: the most of each distance, summed."""
        return (widest + total / self.search.devices) / (2 * max(self.search.others, 1e-30))

    def _set_traffic(self, traffic: float) -> None:
        self.traffic = traffic
        self.cost = float(max(self.loads.max() / self.search.mean, EVEN)) + traffic

    def exchanges(self, one: int, other: int, overlapping: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each length of RUNS that both have: (their exchanges, int [n, 3], the work that each takes off `one`)."""
        sums = self.search.work_sums
        before = [_sums_before(self.owner == device, 0, int) for device in (one, other)]
        for length in RUNS:
            step = max(1, length // 2) if overlapping else length
            starts = np.arange(0, len(self.owner) - length + 1, step)
            mine, theirs = (starts[x[starts + length] - x[starts] == length] for x in before)
            if not len(mine) or not len(theirs):
                return
            work = [sums[starts + length] - sums[starts] for starts in (mine, theirs)]
            runs = np.stack(np.broadcast_arrays(mine[:, None], theirs, length), -1)
            yield runs.reshape(-1, 3), (work[0][:, None] - work[1]).ravel()

    def effects(self, one: int, other: int, runs: np.ndarray) -> Effects:
        """The Effects of the exchanges `runs`, int [n, 3]."""
        search, at, devices = self.search, self.at, self.search.devices
        a, b, length = runs.T
        between = lambda sums: sums[a + length] - sums[a] - sums[b + length] + sums[b]
        moved, change = between(search.work_sums), between(search.sums)
        gain = np.minimum(moved, self.loads[one] - self.loads[other] - moved)
        needs = np.stack([self.counts[one] - change > 0, self.counts[other] + change > 0], 1)
        received = self._by_owner(needs).astype(np.float32)
        pair = np.array([one, other])
        sent = np.repeat(self.sent[(at - pair[:, None]) % devices, pair[:, None]][None], len(runs), 0)
        if search.key_owner is None:
            # the columns of the runs change hands, for every receiver
            gained = between(self.needs_before).astype(np.float32)
            offset, last = np.arange(int(length.max())), needs.shape[2] - 1
            inside = (offset < length[:, None])[:, None]
            at_run = lambda first: np.minimum(first[:, None] + offset, last)[:, None]
            of_run = lambda first: np.count_nonzero(np.take_along_axis(needs, at_run(first), 2) & inside, 2)
            gained[:, pair] = of_run(a) - of_run(b)
            sent[:, 0] -= gained
            sent[:, 1] += gained
            received[:, :, one] -= gained[:, pair]
            received[:, :, other] += gained[:, pair]
        sent[:, :, pair] = received[:, :, pair].swapaxes(1, 2)
        # the widest message of each distance among those that do not change, then with the new ones
        kept = self.sent.copy()
        kept[(pair[:, None] - at) % devices, at] = 0
        kept[:, pair] = 0
        widest = np.repeat(kept.max(1)[None], len(runs), 0)
        for i, device in enumerate((one, other)):
            np.maximum(widest, received[:, i, (device - at) % devices], out=widest)
            np.maximum(widest, sent[:, i, (device + at) % devices], out=widest)
        from_others = self.needs_before[-1] - self.sent[0]
        total = from_others.sum() - from_others[pair].sum()
        total = total + received.sum((1, 2)) - received[:, [0, 1], pair].sum(1)
        return Effects((one, other), runs, gain, self._traffic(widest[:, 1:].sum(1), total), change, received, sent)

    def exchange(self, effects: Effects, which: int) -> None:
        """Makes one of the exchanges whose effects these are."""
        (one, other), (first, second, length) = effects.pair, effects.runs[which]
        pair, devices = np.array(effects.pair), self.search.devices
        self.owner[first : first + length], self.owner[second : second + length] = other, one
        self.loads = np.bincount(self.owner, self.search.work, devices)
        self.counts[one] -= effects.change[which]
        self.counts[other] += effects.change[which]
        self.needs_before[:, pair] = _sums_before(self.counts[pair] > 0, 1, np.int32).T
        if self.search.key_owner is None:
            for device in effects.pair:
                self.columns[self.bounds[device] : self.bounds[device + 1]] = np.flatnonzero(self.owner == device)
        self.sent[(pair[:, None] - self.at) % devices, self.at] = effects.received[which]
        self.sent[(self.at - pair[:, None]) % devices, pair[:, None]] = effects.sent[which]
        self._set_traffic(float(effects.traffic[which]))
