"""The problems whose numbers the first-hour suite checks, as rows of data: one for each feature of the kernels.

A mask and a score function are written once, in operators that numpy and jax share, and once more by hand as derivatives, for the
oracle (dense_oracle.py). All numbers that are drawn are bfloat16 values, so that every dtype has the same exact results.
"""

import dataclasses
import typing
import zlib
from collections.abc import Callable

import numpy as np

from lab.dense_oracle import Dense, Modified, ScoreFunction

Array = typing.Any
"""A numpy array, or a jax array while the call is traced."""
Captured = dict[str, typing.Any]
"""Arrays that mods read, by name: numpy arrays, or jax arrays while the call is traced. "c" is the one that wants a gradient."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem.

    shape         (B, N, M, T, S, D, E): batch, query heads, key heads, queries, keys, head dims of keys and of values
    mask, score   names in MASKS and SCORES; None: no mask, no score function
    layout        "BTNH" or "BNTH"
    lse           whether lse is a result too, with a cotangent
    sinks         whether there are learned sinks
    lengths       (of queries, of keys) of each batch entry; None: all
    gain          factor on the queries; large ones make large scores
    dtypes        dtypes of q, k and v
    options       fields of KernelOptions
    """

    shape: tuple[int, int, int, int, int, int, int]
    mask: str | None = None
    score: str | None = None
    layout: typing.Literal["BTNH", "BNTH"] = "BTNH"
    lse: bool = False
    sinks: bool = False
    lengths: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    gain: float = 1.0
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    options: tuple[tuple[str, typing.Any], ...] = ()


# a mask: (captured, b, h, q, kv) -> bool, of scalars and of arrays that broadcast
MASKS: dict[str, Callable[..., Array]] = {
    "causal": lambda c, b, h, q, k: q >= k,
    "last queries": lambda c, b, h, q, k: q + c["shift"] >= k,
    "window": lambda c, b, h, q, k: (q >= k) & (q - k < 150),
    "head windows": lambda c, b, h, q, k: (q >= k) & (q - k < c["widths"][h]),
    "documents": lambda c, b, h, q, k: (q >= k) & (c["ids"][b, q] == c["ids"][b, k]),
    "prefix": lambda c, b, h, q, k: (q >= k) | (k < 77),
    "odd queries hidden": lambda c, b, h, q, k: (q % 2 == 0) & (q + 5 >= k),
    "strided": lambda c, b, h, q, k: (q - k) % 3 == 0,
}


@dataclasses.dataclass(frozen=True)
class Score:
    """A score function and its derivatives.

    apply    (tanh, captured, score, b, h, q, kv) -> score; `tanh` is numpy's or jax's
    shape    from (B, N, T, S) to the shape of the array "c" that it reads; None: it reads none
    slope    (captured, score, b, h, q, kv) -> d modified / d score
    place    (b, h, q, kv) -> the indices into "c" of each entry; with `factor`, what the read element is multiplied by
    factor   (score, b, h, q, kv) -> d modified / d c[place]
    """

    apply: Callable[..., Array]
    shape: Callable[[int, int, int, int], tuple[int, ...]] | None = None
    slope: Callable[..., Array] = lambda c, s, b, h, q, k: np.ones(())
    place: Callable[..., tuple[Array, ...]] | None = None
    factor: Callable[..., Array] = lambda s, b, h, q, k: np.ones(())


SCORES: dict[str, Score] = {
    "soft cap": Score(
        lambda tanh, c, s, b, h, q, k: 2.0 * tanh(s / 2.0),
        slope=lambda c, s, b, h, q, k: 1.0 - np.tanh(s / 2.0) ** 2,
    ),
    "ALiBi": Score(
        lambda tanh, c, s, b, h, q, k: s + 0.05 * c["c"][h] * (k - q),
        lambda B, N, T, S: (N,),
        place=lambda b, h, q, k: (h,),
        factor=lambda s, b, h, q, k: 0.05 * (k - q),
    ),
    "relative table": Score(
        lambda tanh, c, s, b, h, q, k: s + c["c"][h, q - k + c["c"].shape[-1] // 2],
        lambda B, N, T, S: (N, 2 * max(T, S)),
        place=lambda b, h, q, k: (h, q - k + np.maximum(q.max(), k.max()) + 1),
    ),
    "pair bias": Score(
        lambda tanh, c, s, b, h, q, k: s + c["c"][h, q, k],
        lambda B, N, T, S: (N, T, S),
        place=lambda b, h, q, k: (h, q, k),
    ),
    "key bias": Score(
        lambda tanh, c, s, b, h, q, k: s + c["c"][b, k],
        lambda B, N, T, S: (B, S),
        place=lambda b, h, q, k: (b, k),
    ),
    "query gain": Score(
        lambda tanh, c, s, b, h, q, k: s * (1.0 + 0.3 * c["c"][h, q]),
        lambda B, N, T, S: (N, T),
        slope=lambda c, s, b, h, q, k: 1.0 + 0.3 * c["c"][h, q],
        place=lambda b, h, q, k: (h, q),
        factor=lambda s, b, h, q, k: 0.3 * s,
    ),
    "gathered table": Score(
        lambda tanh, c, s, b, h, q, k: s + c["c"][q % 16, k % 8],
        lambda B, N, T, S: (16, 8),
        place=lambda b, h, q, k: (q % 16, k % 8),
    ),
    "checkerboard": Score(
        lambda tanh, c, s, b, h, q, k: s * (0.5 + 1.5 * ((q - k) % 2)),
        slope=lambda c, s, b, h, q, k: 0.5 + 1.5 * ((q - k) % 2),
    ),
}


CASES: dict[str, Case] = {
    "plain d64": Case((2, 4, 4, 256, 256, 64, 64)),
    "causal d128": Case((2, 4, 4, 384, 384, 128, 128), "causal", lse=True),
    "causal d64, grouped": Case((2, 6, 2, 320, 320, 64, 64), "causal"),
    "odd lengths": Case((1, 3, 3, 301, 517, 128, 128), "last queries"),
    "soft cap": Case((1, 4, 4, 256, 256, 128, 128), "causal", "soft cap"),
    "ALiBi, learned": Case((1, 4, 4, 300, 300, 64, 64), "causal", "ALiBi"),
    "relative table, learned": Case((2, 2, 2, 256, 256, 64, 64), "causal", "relative table"),
    "pair bias, learned": Case((2, 2, 2, 192, 320, 64, 64), None, "pair bias"),
    "window d128": Case((1, 2, 2, 640, 640, 128, 128), "window"),
    "documents": Case((2, 2, 2, 512, 512, 128, 128), "documents"),
    "sinks": Case((1, 4, 2, 256, 256, 64, 64), "window", sinks=True, lse=True),
    "lengths": Case((3, 2, 2, 256, 256, 128, 128), "causal", lengths=((256, 100, 0), (256, 100, 37)), lse=True),
    "d256": Case((1, 2, 2, 256, 256, 256, 256), "causal"),
    "any order": Case((1, 2, 2, 2048, 2048, 128, 128), "causal", options=(("deterministic", False),)),
    "one query": Case((2, 8, 2, 1, 2048, 128, 128), lengths=(None, (2048, 777)), lse=True),
    "float32": Case((1, 2, 2, 256, 256, 64, 64), "causal", dtypes=("float32",)),
    "head windows": Case((1, 4, 4, 384, 384, 64, 64), "head windows"),
    "prefix": Case((1, 2, 2, 320, 320, 128, 128), "prefix"),
    "hidden rows": Case((1, 2, 2, 200, 200, 64, 64), "odd queries hidden", lse=True),
    "key bias, learned": Case((2, 2, 2, 256, 256, 128, 128), None, "key bias"),
    "query gain, learned": Case((1, 2, 2, 256, 256, 64, 64), "prefix", "query gain"),
    "gathered table, learned": Case((1, 2, 2, 256, 256, 64, 64), "causal", "gathered table"),
    "checkerboard": Case((1, 2, 2, 256, 256, 64, 64), None, "checkerboard"),
    "strided": Case((1, 2, 2, 256, 256, 64, 64), "strided"),
    "values narrower": Case((1, 2, 2, 256, 256, 192, 128), "causal"),
    "d40, heads first": Case((2, 3, 1, 150, 150, 40, 40), "causal", layout="BNTH"),
    "large scores": Case((1, 2, 2, 256, 256, 64, 64), "causal", gain=30.0),
    "four queries": Case((2, 8, 1, 4, 1024, 64, 64), "last queries"),
    "d320": Case((1, 2, 2, 192, 192, 320, 320), "causal"),
    "2048 tokens": Case((1, 1, 1, 2048, 2048, 64, 64), "causal"),
}
SMALL = ("plain d64", "ALiBi, learned", "lengths")
"""The names that are checked where there is no GPU, at `small` sizes."""


def small(case: Case) -> Case:
    """The case for a CPU: the same batch, two query heads and one key head, at most 48 queries and keys, head dims 16, half of min(n, 48)
    for each length n, and one dtype, bfloat16 or, if it is a case of float32 alone, float32.
    """
    B, _, _, T, S, _, _ = case.shape
    ends = tuple(None if end is None else tuple(min(n, 48) // 2 for n in end) for end in case.lengths)
    return dataclasses.replace(
        case,
        shape=(B, 2, 1, min(T, 48), min(S, 48), 16, 16),
        lengths=typing.cast(typing.Any, ends),
        dtypes=("float32",) if case.dtypes == ("float32",) else ("bfloat16",),
    )


def drawn(name: str, case: Case) -> tuple[dict[str, np.ndarray], Captured]:
    """(arrays by name, captured arrays by name) of a case, numpy, the same in each call: the name is the seed. All normal numbers are
    bfloat16 values.

    case   that of `name`, or `small` of it

    The arrays are q, k, v, d_out [B, heads, tokens, dim], d_lse [B, N, T] (zeros unless the case has lse) and, if it has them, sinks [N],
    all float32. Captured are shift (S - T, for "last queries"), widths int32 [N], ids int32 [B, max(T, S)], and "c" if the score function
    reads an array.
    """
    import ml_dtypes  # jax brings it

    B, N, M, T, S, D, E = case.shape
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    normal = lambda *shape: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    arrays = dict(q=normal(B, N, T, D), k=normal(B, M, S, D), v=normal(B, M, S, E), d_out=normal(B, N, T, E))
    arrays["q"] = (arrays["q"] * case.gain).astype(ml_dtypes.bfloat16).astype(np.float32)
    arrays["d_lse"] = normal(B, N, T) if case.lse else np.zeros((B, N, T), np.float32)
    if case.sinks:
        arrays["sinks"] = normal(N)
    captured: Captured = dict(
        shift=np.int32(S - T),
        widths=rng.integers(1, S + 1, N).astype(np.int32),
        ids=np.sort(rng.integers(0, 5, (B, max(T, S))), axis=-1).astype(np.int32),
    )
    shape = SCORES[case.score].shape if case.score else None
    if shape is not None:
        captured["c"] = normal(*shape(B, N, T, S))
    return arrays, captured


def dense(name: str, case: Case) -> Dense:
    """The case as a problem of the oracle, in float64, with the arrays of `drawn`, whose seed is the name: mask and lengths as one bool
    array, and the score function with its derivatives. Arrays are [B, heads, tokens, dim] whatever the layout of the case is.

    case   that of `name`, or `small` of it
    """
    arrays, captured = drawn(name, case)
    B, N, _, T, S, _, _ = case.shape
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    read = {n: np.asarray(x, np.float64) if n == "c" else x for n, x in captured.items()}
    at = np.ix_(*(np.arange(n) for n in (B, N, T, S)))
    visible = np.ones((1, 1, 1, 1), bool) if case.mask is None else np.asarray(MASKS[case.mask](read, *at))
    rows = None
    for axis, end in zip((2, 3), case.lengths, strict=True):
        if end is None:
            continue
        exists = at[axis] < np.asarray(end)[:, None, None, None]
        visible = visible & exists
        rows = exists[..., 0] if axis == 2 else rows
    score = _score_function(case.score, read, at) if case.score else None
    return Dense(
        wide["q"], wide["k"], wide["v"], wide["d_out"], wide["d_lse"], visible, score, wide.get("sinks"), rows
    )  # fmt: skip


def _score_function(name: str, captured: Captured, at: tuple[np.ndarray, ...]) -> ScoreFunction:
    """The ScoreFunction of a row of SCORES at all entries: raw scores to modified ones with their derivatives.

    name       of the row
    captured   what it reads; "c" in float64
    at         b, h, q and kv, which broadcast to [B, N, T, S]
    """
    row = SCORES[name]

    def modified(scores: np.ndarray) -> Modified:
        """Applies the score function to all entries: the modified scores [B, N, T, S], their slope, and the pullback, a function from the
        cotangent of the modified scores to the gradient of the array "c". The pullback is None if the score function reads no array.

        scores   raw scores [B, N, T, S], scaled, before the score function
        """

        def pullback(d_modified: np.ndarray) -> np.ndarray:
            """The gradient of "c", in its shape: the sum of cotangent times factor over the entries that read each element.

            d_modified   the cotangent of the modified scores [B, N, T, S]; the caller sets it to 0 at hidden entries
            """
            assert row.place is not None
            gradient = np.zeros(captured["c"].shape)
            terms = d_modified * row.factor(scores, *at)
            np.add.at(gradient, np.broadcast_arrays(*row.place(*at), terms)[:-1], terms)
            return gradient

        slope = np.asarray(row.slope(captured, scores, *at))
        value = np.asarray(row.apply(np.tanh, captured, scores, *at))
        return Modified(value, slope, None if row.place is None else pullback)

    return modified
