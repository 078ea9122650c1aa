"""Which device owns which blocks of a sequence, so that all have equal work and receive few key blocks from each other.

Every device owns the same number of blocks, so that its arrays have one shape. Three ways to share them out:

    contiguous   the r-th part for device r: little traffic under windows and documents, but twice the mean work on the
                 last device under a causal mask
    zigzag       the r-th run from the front and the r-th from the back for device r, which balances a causal mask
    auto         starts from these two and exchanges equal runs of blocks between devices: first for even loads, then
                 (drawn with fixed random numbers) for less traffic

The cost is the heaviest over the mean load, plus the traffic: what a device receives as a share of all other devices'
blocks, half what it needs and half what the rounds send (rounds.py). The search works on at most some hundreds of
chunks of blocks, so that its time does not grow with the square of the length.
"""

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
        states.append(search.with_less_traffic(min(map(search.improved, states), key=lambda state: state.cost)))
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
    """The search for a better ownership by exchanges of runs of chunks between devices; it changes no State.

    An exchange is int [3]: first chunk of a run of one device, that of a run of the other, length of both in chunks.
    """

    def __init__(self, needed: np.ndarray, work: np.ndarray, devices: int, key_owner: np.ndarray | None):
        """needed: bool [query chunks, key columns]; work: visited blocks [query chunks]; key_owner: [key columns]."""
        # None: columns are the chunks, owned as the rows are
        self.needed, self.devices, self.key_owner = needed, devices, key_owner
        self.mean = max(float(work.sum()) / devices, 1e-30)  # load of a device
        count = lambda x, axis: np.concatenate([np.zeros_like(x[:1]), np.cumsum(x, axis, dtype=x.dtype)])
        self.sums = count(needed.astype(np.int32), 0)  # over the chunks before each
        self.work_sums = count(np.asarray(work, float), 0)
        self.work = np.asarray(work, float)
        self.others = needed.shape[1] * (1 - 1 / devices)  # key columns of the other devices of a device
        at = np.arange(devices)
        # for each distance 1, 2, ... all pairs of devices at that distance, int [devices - 1, devices]
        self.senders, self.receivers = np.tile(at, (devices - 1, 1)), (at + at[1:, None]) % devices

    def improved(self, state: "State") -> "State":
        """The cheapest of `state` and those after exchanges that even out the loads by more than the traffic grows."""
        best = state
        for _ in range(4 * self.devices):
            if state.loads.max() <= EVEN * self.mean:
                break
            better = self._best_exchange(state)
            if better is None:
                break
            state = better
            best = min(best, state, key=lambda x: x.cost)
        return best

    def traffic(self, sent: np.ndarray) -> np.ndarray:
        """[...]: what a device receives, as a share of the key columns of all others; sent: [..., receiver, sender]."""
        if self.devices == 1:
            return np.zeros(sent.shape[:-2])
        by_distance = sent[..., self.receivers, self.senders]
        return (by_distance.max(-1) + by_distance.mean(-1)).sum(-1) / (2 * self.others)

    def _best_exchange(self, state: "State") -> "State | None":
        """The state after the best exchange of the device with most work and one with least; None if none helps."""
        high = int(state.loads.argmax())
        best: tuple[float, State] | None = None
        for low in np.argsort(state.loads, kind="stable")[: 3 if self.devices <= 8 else 1]:
            runs = self._runs(state, high, int(low))
            if low == high or not len(runs):
                continue
            gain, traffic = self._effects(state, high, int(low), runs)
            # the gain in load over the mean load, less the growth of the traffic
            value = gain / self.mean - (traffic - state.traffic)
            at = int(value.argmax())
            if value[at] > (1e-6 if best is None else best[0]):
                best = float(value[at]), self._exchanged(state, high, int(low), runs[at])
        return None if best is None else best[1]

    def with_less_traffic(self, state: "State") -> "State":
        """`state`, or one of less traffic with loads up to EVEN times the mean or the heaviest of `state`."""
        draw = np.random.default_rng(0)
        limit = max(EVEN * self.mean, float(state.loads.max()))
        for _ in range(STEPS):
            one, other = draw.choice(self.devices, 2, replace=False)
            runs = self._even_runs(state, int(one), int(other), limit, draw)
            if not len(runs):
                continue
            _, traffic = self._effects(state, int(one), int(other), runs)
            at = int(traffic.argmin())
            if traffic[at] < state.traffic - 1e-6:
                state = self._exchanged(state, int(one), int(other), runs[at])
        return state

    def _exchanged(self, state: "State", one: int, other: int, run: np.ndarray) -> "State":
        """The state after the devices `one` and `other` exchange the runs of chunks `run`."""
        first, second, length = run
        owner, counts = state.owner.copy(), state.counts.copy()
        owner[first : first + length], owner[second : second + length] = other, one
        change = self.sums[first + length] - self.sums[first] - self.sums[second + length] + self.sums[second]
        counts[one] -= change
        counts[other] += change
        return State(self, owner, counts)

    def _even_runs(self, state: "State", one: int, other: int, limit: float, draw: np.random.Generator) -> np.ndarray:
        """int [n, 3]: random exchanges, SAMPLED // len(RUNS) of a length, that leave neither load above `limit`."""
        found = [np.zeros((0, 3), int)]
        for length in RUNS:
            starts = np.arange(0, len(state.owner) - length + 1, max(1, length // 2))
            mine, theirs = (starts[state.owns_run(device, starts, length)] for device in (one, other))
            if not len(mine) or not len(theirs):
                break
            work = lambda at, n=length: self.work_sums[at + n] - self.work_sums[at]
            moved = work(mine)[:, None] - work(theirs)
            even = np.flatnonzero((state.loads[other] + moved <= limit) & (state.loads[one] - moved <= limit))
            a, b = np.unravel_index(draw.choice(even, min(len(even), SAMPLED // len(RUNS)), replace=False), moved.shape)
            found.append(np.stack([mine[a], theirs[b], np.full(len(a), length)], 1))
        return np.concatenate(found)

    def _runs(self, state: "State", high: int, low: int) -> np.ndarray:
        """int [n, 3]: the exchanges, at most CANDIDATES, that make two loads most nearly equal, the best first."""
        gap, chunks = state.loads[high] - state.loads[low], len(state.owner)
        found = [np.zeros((0, 3), int)]
        off = [np.zeros(0)]
        for length in RUNS:
            starts = np.arange(0, chunks - length + 1, length)
            mine, theirs = (starts[state.owns_run(device, starts, length)] for device in (high, low))
            if not len(mine) or not len(theirs):
                break
            work = lambda at, n=length: self.work_sums[at + n] - self.work_sums[at]
            moved = work(mine)[:, None] - work(theirs)
            # the load of `high`, the larger one, gets smaller, and that of `low` stays below what `high` had
            miss = np.where((moved > 0) & (moved < gap), np.abs(moved - gap / 2), np.inf).ravel()
            few = min(CANDIDATES // len(RUNS) + 1, miss.size)
            nearest = np.argpartition(miss, few - 1)[:few]
            nearest = nearest[np.isfinite(miss[nearest])]
            a, b = np.unravel_index(nearest, moved.shape)
            found.append(np.stack([mine[a], theirs[b], np.full(len(a), length)], 1))
            off.append(miss[nearest])
        runs = np.concatenate(found)
        return runs[np.argsort(np.concatenate(off), kind="stable")[:CANDIDATES]]

    def _effects(self, state: "State", one: int, other: int, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(gain, traffic), [n] each, of exchanges `runs`, int [n, 3]."""
        a, b, length = runs.T
        between = lambda sums, at: sums[at + length] - sums[at]
        moved = between(self.work_sums, a) - between(self.work_sums, b)
        # The larger of the two loads before less the larger one after, if `one` has the larger load before.
        gain = np.minimum(moved, state.loads[one] - state.loads[other] - moved)
        change = between(self.sums, a) - between(self.sums, b)  # [n, columns]
        new = {one: state.counts[one] - change > 0, other: state.counts[other] + change > 0}
        sent = np.repeat(state.sent[None], len(runs), 0)
        for device, need in new.items():
            sent[:, device] = need.astype(np.float32) @ state.owns
        if self.key_owner is None:
            # the columns of the runs change hands, for every receiver
            ends = np.concatenate(
                [np.zeros_like(state.needs[:, :1], np.float32), np.cumsum(state.needs, 1, dtype=np.float32)], 1
            )
            gained = ends[:, a + length] - ends[:, a] - ends[:, b + length] + ends[:, b]
            gained = gained.T.copy()
            for device, need in new.items():
                ends = np.concatenate([np.zeros((len(runs), 1), np.float32), np.cumsum(need, 1, dtype=np.float32)], 1)
                rows = np.arange(len(runs))
                gained[:, device] = ends[rows, a + length] - ends[rows, a] - ends[rows, b + length] + ends[rows, b]
            sent[:, :, one] -= gained
            sent[:, :, other] += gained
        return gain, self.traffic(sent)


class State:
    """An ownership, `owner` int [chunks] (the device of each query chunk), and what follows from it."""

    def __init__(self, search: Search, owner: np.ndarray, counts: np.ndarray | None = None):
        """Keeps `owner`, does not copy it; `counts`, the field, if the caller knows it already."""
        devices = search.devices
        self.owner = owner
        self.loads = np.bincount(owner, search.work, devices)  # [devices]: work of each
        if counts is None:
            order = np.argsort(owner, kind="stable")
            starts = np.searchsorted(owner[order], np.arange(devices))
            counts = np.add.reduceat(search.needed[order], starts, 0, dtype=np.int32)
        self.counts = counts  # int32 [devices, key columns]: chunks of the device that read it
        self.needs = self.counts > 0
        keys = owner if search.key_owner is None else search.key_owner
        self.owns = (keys[:, None] == np.arange(devices)).astype(np.float32)  # [key columns, devices]: 1 for the owner
        # [receiver, sender]: columns that travel; diagonal: own ones
        self.sent = self.needs.astype(np.float32) @ self.owns
        self.traffic = float(search.traffic(self.sent))
        self.cost = float(max(self.loads.max() / search.mean, EVEN)) + self.traffic

    def owns_run(self, device: int, starts: np.ndarray, length: int) -> np.ndarray:
        """bool [n]: whether the device owns all `length` chunks from each of the chunks `starts`, int [n], on."""
        count = np.concatenate([[0], np.cumsum(self.owner == device)])
        return count[starts + length] - count[starts] == length
