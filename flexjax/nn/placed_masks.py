"""The masks and the soft cap of an adapter, from what trainers and caches know of each token: documents and positions.

Every adapter says what it knows as a Placed and gets one mask_mod and one score_mod.
"""

import dataclasses
from collections.abc import Callable

import jax

from flexjax import mods
from flexjax.combine import and_masks, chain_mods, or_masks
from flexjax.errors import bad_argument
from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.factory_arguments import integer, integer_or_vector, positive_number_or_vector
from flexjax.types import MaskMod, ScoreMod

Array = jax.Array
Window = int | Array | tuple[int | Array | None, int | Array | None]
"""Positions that a query sees: the last n, its own included; or (left, right) beside its own, None for all."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Placed:
    """What is known of the tokens of a call; None stands for nothing, and for positions: their index.

    function        the public function, for errors
    heads           query heads, None where unknown
    ids, kv_ids     int [B, T], [B, S]: documents
    is_padding      of an id: whether it marks padding, which sees nothing and is not seen
    at, kv_at       int32 [B, T], [B, S]: positions
    first           int or int32 []: position of the first query, where `at` is None
    """

    function: str
    heads: int | None
    ids: Array | None = None
    kv_ids: Array | None = None
    is_padding: Callable[[Array], Array] | None = None
    at: Array | None = None
    kv_at: Array | None = None
    first: int | Array = 0

    def mask_mod(
        self,
        *masks: MaskMod | None,
        causal: bool = False,
        window: Window | None = None,
        chunk: int | None = None,
        or_mask: MaskMod | None = None,
    ) -> MaskMod | None:
        """All of the arguments and the documents joined by `&`, then `or_mask` by `|`; None where all is seen."""
        parts = [mask for mask in masks if mask is not None]
        ids, kv_ids, is_padding = self.ids, self.kv_ids, self.is_padding
        if ids is not None and kv_ids is not None:
            parts.append(lambda b, h, q, kv: ids[b, q] == kv_ids[b, kv])
            if is_padding is not None:
                parts.append(lambda b, h, q, kv: ~is_padding(ids[b, q]))
        if causal:
            parts.append(lambda b, h, q, kv: self._behind(b, q, kv) >= 0)
        if window is not None:
            left, right = self._sides(window)
            # of a single number: fewer than n behind and, without causal, fewer than n ahead
            strict = 0 if isinstance(window, tuple) else 1
            if left is not None:
                parts.append(lambda b, h, q, kv: self._behind(b, q, kv) <= value_at(left, h) - strict)
            if right is not None and not causal:
                parts.append(lambda b, h, q, kv: -self._behind(b, q, kv) <= value_at(right, h) - strict)
        if chunk is not None:
            size = integer(self.function, "chunk", chunk, 1, "It counts the positions of a chunk.")
            parts.append(lambda b, h, q, kv: self.query(b, q) // size == self.key(b, kv) // size)
        joined = and_masks(*parts) if parts else None
        if or_mask is None or joined is None:  # what is seen anyway stays seen
            return joined
        return or_masks(joined, or_mask)

    def score_mod(self, softcap: float | Array | None, score_mod: ScoreMod | None) -> ScoreMod | None:
        """`score_mod` after the soft cap, which the Python number 0 turns off."""
        if softcap is None or (isinstance(softcap, int | float) and not isinstance(softcap, bool) and softcap == 0):
            return score_mod
        cap = positive_number_or_vector(self.function, "softcap", softcap, "None or 0 means no cap.")
        self._check_heads("softcap", cap)
        capped = mods.softcap(cap)
        return capped if score_mod is None else chain_mods(capped, score_mod)

    def query(self, b: Array, q: Array) -> Array:
        return q + self.first if self.at is None else self.at[b, q]

    def key(self, b: Array, kv: Array) -> Array:
        return kv if self.kv_at is None else self.kv_at[b, kv]

    def _behind(self, b: Array, q: Array, kv: Array) -> Array:
        return self.query(b, q) - self.key(b, kv)

    def _sides(self, window: Window) -> tuple[int | Array | None, int | Array | None]:
        """(left, right) of a window, checked."""
        if not isinstance(window, tuple):
            advice = "1 sees the query's own position only."
            width = integer_or_vector(self.function, "window", window, "[N]", 1, advice)
            self._check_heads("window", width)
            return width, width
        if len(window) != 2:
            raise bad_argument(
                "window", repr(window), "a number or (left, right)", "None in a pair leaves a side open."
            )
        sides: list[int | Array | None] = []
        for i, side in enumerate(window):
            if side is not None:
                name = f"window[{i}]"
                side = integer_or_vector(self.function, name, side, "[N]", 0, "0 sees no neighbour on this side.")
                self._check_heads(name, side)
            sides.append(side)
        return sides[0], sides[1]

    def _check_heads(self, name: str, value: float | Array) -> None:
        if self.heads is None or isinstance(value, int | float):
            return
        if value.shape not in ((), (1,), (self.heads,)):
            raise bad_argument(
                name,
                f"{value.dtype}{list(value.shape)}",
                f"one number, or {self.heads}, one for each query head",
                "Reshape it.",
            )


def zero_is_padding(ids: Array) -> Array:
    return ids == 0


def negative_is_padding(ids: Array) -> Array:
    return ids < 0
