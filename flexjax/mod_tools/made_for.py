"""`made_for`: mods carry the sizes that they were made for, so that a call of other sizes is refused.

The sizes are an attribute of the function. `and_masks`, `or_masks`, `not_mask` and `chain_mods` join those of their
parts. A function that a user writes around a mod has none, so it may call the mod with other indices.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from jax import Array

AXES = {"batch": "batch entries", "heads": "query heads", "queries": "queries", "keys": "keys"}
"""The axes of a call, in the order b, h, q_idx, kv_idx, and what each counts."""

ANY = 2**31 - 1  # the upper end of a size that has none

F = TypeVar("F", bound=Callable[..., object])


class Size(NamedTuple):
    """How many batch entries, heads, queries or keys (`axis`) a call may have: least to most.

    source   what says so, such as "`lengths` int32[3]"
    by       the name of the mod; "" until `named` or `made_for` fills it in
    todo     what to do beside the general advice, a sentence
    """

    axis: str
    least: int
    most: int
    source: str
    by: str = ""
    todo: str = ""


class Reach(NamedTuple):
    """How many of AXES the indices of a call certainly count to; None: not known.

    exact   whether the whole problem has just as many, or may have more
    """

    counts: tuple[int | None, int | None, int | None, int | None]
    exact: tuple[bool, bool, bool, bool]


def exactly(batch: int | None, heads: int | None, queries: int | None, keys: int | None) -> Reach:
    return Reach((batch, heads, queries, keys), (True, True, True, True))


def of_array(name: str, array: object, letters: str, group: int = 1) -> tuple[Size, ...]:
    """The sizes of a captured array, along the axes that are read at b, h, q_idx or kv_idx; () for a number.

    letters   its last axes: B, N, T, S for batch entries, query heads, queries and keys; t for at most so many queries,
              where the array is read at the keys too; others are skipped. B or N of size 1 serve every index
    group     query heads for each element of N
    """
    if not isinstance(array, Array) or array.ndim == 0:
        return ()
    axes = dict(zip("BNTS", AXES, strict=True)) | {"t": "queries"}
    source = f"`{name}` {array.dtype.name}{list(array.shape)}"
    found = []
    for letter, n in zip(letters[-array.ndim :], array.shape, strict=True):
        if letter in axes and not (letter in "BN" and n == 1):
            count = n * group if letter == "N" else n
            found.append(Size(axes[letter], 1 if letter == "t" else count, count, source))
    return tuple(found)


def sizes_of(*mods: object) -> tuple[Size, ...]:
    carried = (getattr(mod, "made_for", ()) for mod in mods)
    return tuple(dict.fromkeys(s for c in carried if isinstance(c, tuple) for s in c if isinstance(s, Size)))


def carry(function: F, sizes: Sequence[Size]) -> F:
    """Gives `function` the sizes, and its name to those without one; returns it."""
    name = getattr(function, "__name__", type(function).__name__)
    function.made_for = tuple(s if s.by else s._replace(by=name) for s in sizes)  # type: ignore[attr-defined]
    return function


def made_for(
    *,
    batch: int | range | None = None,
    heads: int | range | None = None,
    queries: int | range | None = None,
    keys: int | range | None = None,
) -> Callable[[F], F]:
    """A decorator for the mods that your own factories return: a call of other sizes then raises ValueError.

    batch, heads, queries, keys   an int: exactly so many; a range, such as range(1, n + 1): one of these; None: any

    Sizes are those of the whole problem: a call with an `origin` may be smaller. A call of one query, as in decoding,
    fits every number of queries. `paged_attention` counts requests as batch entries, and compares no queries and keys.
    Raises ValueError for anything but ints and ranges of positive numbers.

        def by_head(slopes):
            @flexjax.made_for(heads=slopes.shape[0])
            def score_mod(score, b, h, q_idx, kv_idx):
                return score - slopes[h] * (q_idx - kv_idx)

            return score_mod
    """
    sizes = []
    for axis, given in (("batch", batch), ("heads", heads), ("queries", queries), ("keys", keys)):
        if given is None:
            continue
        numbers: object = given
        if isinstance(given, int) and not isinstance(given, bool):
            numbers = range(given, given + 1)
        if not isinstance(numbers, range) or numbers.step != 1 or len(numbers) == 0 or numbers[0] < 1:
            raise ValueError(
                f"`made_for`: `{axis}` is {given!r}; expected a positive int, a range of positive ints or None. Pass "
                "range(1, n + 1) for at most n."
            )
        sizes.append(Size(axis, numbers[0], numbers[-1], f"`{axis}`"))
    return lambda function: carry(function, (*sizes_of(function), *sizes))


def check_sizes(name: str, mod: object, reach: Reach) -> None:
    """Raises ValueError if `mod`, the argument `name` of a call, was made for other sizes than the call has."""
    for size in sizes_of(mod):
        place = list(AXES).index(size.axis)
        count, exact = reach.counts[place], reach.exact[place]
        if not count or (size.axis == "queries" and count == 1):  # nothing is read without tokens
            continue
        if count <= size.most and (count >= size.least or not exact):
            continue
        of = AXES[size.axis]
        amount = f"{size.least}" if size.least == size.most else f"at most {size.most}"
        amount = f"at least {size.least}" if size.most == ANY else amount
        expected = f"{count}, as this call has" if exact else f"at least {count}, which this call reaches"
        todo = (
            "Make it for the sizes of the call; if the call is a part of a larger problem, "
            "say by origin= where it lies."
        )
        raise ValueError(
            f"`{name}` is made for {amount} {of}, by {size.source} of `{size.by}`; expected {expected}. "
            + (size.todo + " " if size.todo else "")
            + todo
        )
