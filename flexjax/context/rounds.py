"""Which key blocks travel between devices of a split sequence: the tables of "neighbours", made on the host.

The exchange has a round for each distance s between devices: device i sends to device (i + s) % devices, all at once.
Rounds in which nobody needs anything are left out. All messages of a round are as wide as the widest.

The tables are operands of the program, and only the distances and the widths are static. Where a mask captures arrays,
another batch has other widths. All rounds then get one width of WIDTHS, and the distances are rounded up too: the
devices that are up to 2, 8, 32, ... places away on either side.
"""

import dataclasses
import functools

import jax
import numpy as np

from flexjax.context.balance import any_of_rows
from flexjax.integers import cdiv

Array = jax.Array | np.ndarray


@functools.partial(jax.tree_util.register_dataclass, data_fields=("send", "received"), meta_fields=("shifts",))
@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """The exchange of the method "neighbours"."""

    shifts: tuple[int, ...]  # the distance of each round, ascending
    # for each round int32 [devices, width]: own key blocks that a device sends; past the end arbitrary
    send: tuple[Array, ...]
    # for each round int32 [devices, width]: key blocks of the sequence that a device receives, -1 past the end
    received: tuple[Array, ...]

    @property
    def width(self) -> int:
        """How many key blocks a device receives in all rounds together, padding of the messages included."""
        return sum(x.shape[1] for x in self.send)


def needed_keys(needed: np.ndarray, query_blocks: np.ndarray, key_blocks: np.ndarray) -> np.ndarray:
    """bool [devices, devices * key blocks of each]: which key blocks of the sequence a device's queries visit."""
    found = any_of_rows(needed, query_blocks)
    return np.pad(found, ((0, 0), (0, key_blocks.size - found.shape[1])))


def received_counts(keys: np.ndarray, key_blocks: np.ndarray) -> np.ndarray:
    """int64 [devices]: how many key blocks each device needs from others. keys: `needed_keys`."""
    own = np.take_along_axis(keys, key_blocks.astype(np.int64), 1)
    return np.count_nonzero(keys, 1) - np.count_nonzero(own, 1)


def rounds_of(keys: np.ndarray, key_blocks: np.ndarray, rounded: bool) -> Rounds:
    """The rounds in which every device gets the key blocks that it needs, perhaps none, from `needed_keys`.

    rounded   whether shifts and widths are rounded up, for masks whose captured arrays change
    """
    devices, each = key_blocks.shape
    # bool [sender, receiver, slot]: what travels
    sent = keys[:, key_blocks].transpose(1, 0, 2)
    widths = np.count_nonzero(sent, 2)
    at = np.arange(devices)
    of_shift = {s: int(widths[at, (at + s) % devices].max(initial=0)) for s in range(1, devices)}
    if rounded:
        of_shift = _rounded(of_shift, devices, each)
    shifts = tuple(s for s, width in of_shift.items() if width)
    # all that travels, by distance: where the messages of each round begin
    sender, receiver, slot = np.nonzero(sent)
    distance = (receiver - sender) % devices
    order = np.argsort(distance, kind="stable")
    begins = np.searchsorted(distance[order], np.arange(devices + 1))
    first = np.cumsum(widths) - widths.ravel()  # of each message among all
    place = np.arange(len(slot)) - first[sender * devices + receiver]
    send, received = [], []
    for s in shifts:
        one = order[begins[s] : begins[s + 1]]
        slots, blocks = np.zeros((devices, of_shift[s]), np.int32), np.full((devices, of_shift[s]), -1, np.int32)
        slots[sender[one], place[one]] = slot[one]
        blocks[receiver[one], place[one]] = key_blocks[sender[one], slot[one]]
        send.append(slots)
        received.append(blocks)
    return Rounds(shifts, tuple(send), tuple(received))


# A message of rounded width has all key blocks of a device over one of these numbers. Powers of two need more programs,
# because most batches are near a half of all blocks and each power below it catches a few.
WIDTHS = (8, 2, 1)


def _rounded(of_shift: dict[int, int], devices: int, each: int) -> dict[int, int]:
    """The widths by shift (1 to devices - 1), rounded up: one for all shifts within a rounded distance, else 0."""
    farthest = max((min(s, devices - s) for s, width in of_shift.items() if width), default=1)
    reach = 2
    while reach < farthest:
        reach *= 4
    widest = max(of_shift.values(), default=0)
    width = min(size for size in (cdiv(each, part) for part in WIDTHS) if size >= widest)
    return {s: width if min(s, devices - s) <= reach else 0 for s in of_shift}
