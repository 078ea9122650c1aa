"""`Memo`: results that are kept by what they were made from, for calls outside of jit.

It holds no array of a user: a result is kept without its arrays, and arrays that belong to its key are held weakly.
"""

import collections
import threading
import typing
import weakref
from collections.abc import Hashable, Sequence

import jax

T = typing.TypeVar("T")


class Memo(typing.Generic[T]):
    """The last `size` results, by key. Threads may share it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[Hashable, tuple[tuple[weakref.ref, ...], T]] = collections.OrderedDict()

    def get(self, key: Hashable, same: Sequence[jax.Array] = ()) -> T | None:
        """The result that was put for the key and for these array objects, whose ids are in the key."""
        with self._lock:
            held, result = self._kept.get(key, ((), None))
            if result is None or any(ref() is not x for ref, x in zip(held, same, strict=True)):
                return None  # an id belongs to another array once the first is gone
            self._kept.move_to_end(key)
            return result

    def put(self, key: Hashable, result: T, same: Sequence[jax.Array] = ()) -> None:
        held = tuple(map(weakref.ref, same))
        with self._lock:
            self._kept[key] = held, result
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)
