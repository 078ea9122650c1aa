"""Calls that try to break the proof of `tolerance=`, and what a row really loses, in float64 and by numpy.

A `Case` has a program, a mask and arrays. `chosen` runs the choice of flexjax; `lost` evaluates the mods of the case
entry by entry and sums the probabilities of the entries in the blocks that left, which shares no code with it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexjax import weights as ready
from flexjax.block_mask.block_mask import create_block_mask
from flexjax.call.expectations import weighted
from flexjax.tolerance import keep
from flexjax.tolerance.norms import rounding_of
from flexjax.trace.trace_mod import trace_score_mod

BLOCK = 32


@dataclasses.dataclass
class Case:
    # of the parameters, a score_mod and a mask_mod
    score: Callable[[Any], Callable]
    mask: Callable[[Any], Callable]
    # [1, H, T, D] and [1, M, S, D], float32
    q: np.ndarray
    k: np.ndarray
    params: Any
    sinks: np.ndarray | None = None
    # of the parameters, what weighs values in place of a softmax
    weights: Callable[[Any], Callable] | None = None

    def mod(self, params: Any) -> Callable:
        """The function whose result is the new score, or a weight."""
        score = self.score(params)
        return score if self.weights is None else weighted(score, self.weights(params))


@dataclasses.dataclass(eq=False)
class Choice:
    """The choice for cases of one program, mask, shape and tolerance, compiled once, with what is patched while it is."""

    case: Case
    tolerance: float
    block: int = BLOCK
    bound: float | None = None
    # of queries, keys, parameters and all scores; float64 under jax.enable_x64
    dtype: str = "float32"

    @functools.cached_property
    def run(self) -> Callable:
        (_, heads, q_len, dim), kv_len = self.case.q.shape, self.case.k.shape[2]

        def choose(q: Any, k: Any, params: Any, sinks: Any) -> Any:
            score = trace_score_mod(self.case.mod(params), (1, heads, q_len, kv_len), self.dtype)
            mask = create_block_mask(
                self.case.mask(params), 1, heads, q_len, kv_len, block_size=self.block, exact=False
            )
            flags = mask.flags()
            spec = keep.Spec(
                score.program,
                mask.program,
                (1, heads),
                (q_len, kv_len, self.block, self.block),
                self.tolerance,
                dim**-0.5,
                rounding_of(self.dtype, "highest", dim),
                self.dtype,
                weighted=self.case.weights is not None,
            )
            given = keep.Given(
                score.arrays,
                mask.captures,
                flags,
                (q,),
                (k,),
                sinks=sinks,
                bound=None if self.bound is None else jnp.full((1, 1, 1, 1), self.bound),
            )
            if self.bound is not None:
                given = given._replace(query=(), key=())
            found = keep.kept(spec, given)
            return found.keep[0], found.lost[0], (flags[0] | flags[1])[0]

        return jax.jit(choose)

    @functools.cached_property
    def dense(self) -> Callable:
        def entries(s: Any, params: Any, rows: Any) -> Any:
            score = jax.vmap(self.case.mod(params), (0, None, None, None, 0))
            score = jax.vmap(jax.vmap(score, (0, None, None, 0, None)), (0, None, 0, None, None))
            mask = jax.vmap(jax.vmap(self.case.mask(params), (None, None, None, 0)), (None, None, 0, None))
            at = (jnp.int32(0), jnp.arange(s.shape[0], dtype=jnp.int32), rows, jnp.arange(s.shape[2], dtype=jnp.int32))
            return score(s, *at), jax.vmap(mask, (None, 0, None, None))(*at)

        return jax.jit(entries)

    def entries(self, case: Case, rows: np.ndarray, score: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(new scores, whether each is visible) of some rows, [H, rows, S], of the true products or of one score."""
        heads, dim, kv_len = case.q.shape[1], case.q.shape[3], case.k.shape[2]
        k = np.float64(case.k[0])
        q = np.float64(case.q[0, :, rows]).transpose(1, 0, 2).reshape(k.shape[0], -1, dim)
        s = (q @ k.transpose(0, 2, 1)).reshape(heads, len(rows), kv_len) * dim**-0.5
        s = s if score is None else np.full_like(s, score)
        s, on = (np.asarray(x) for x in self.dense(s.astype(self.dtype), case.params, np.int32(rows)))
        return np.float64(s), on

    def __call__(self, case: Case, rows: np.ndarray | None = None) -> "Outcome":
        """What the choice takes out of the given rows, of all by default."""
        rows = np.arange(case.q.shape[2]) if rows is None else rows
        kept, bound, visible = (np.asarray(x) for x in self.run(case.q, case.k, case.params, case.sinks))
        s, on = self.entries(case, rows)
        gone = ~np.repeat(kept[:, rows // self.block], self.block, 2)[:, :, : s.shape[2]]
        share = float(kept.sum() / max(1, visible.sum()))
        if case.weights is not None:
            taken = np.where(gone & on, np.abs(s), 0)
            nan, lost = bool(np.isnan(taken).any()), np.nan_to_num(taken).sum(-1)
            return Outcome(lost, bound[:, rows], nan, False, share, bool((gone & on).any()), kept)
        s = np.where(on, s, -np.inf)
        sink = np.full((s.shape[0], 1, 1), -np.inf) if case.sinks is None else np.float64(case.sinks)[:, None, None]
        top = np.maximum(s.max(-1, keepdims=True), sink)
        top = np.where(np.isfinite(top), top, 0)
        with np.errstate(all="ignore"):
            weights = np.exp(s - top)
            total = weights.sum(-1) + np.exp(sink - top)[..., 0]
            lost = np.where(total > 0, np.where(gone, weights, 0).sum(-1) / total, 0)
        hides_nan = bool(np.isnan(np.where(gone & on, s, 0)).any())
        dead = bool((np.isfinite(s).any(-1) & ~(np.isfinite(s) & ~gone).any(-1)).any()) and case.sinks is None
        return Outcome(np.nan_to_num(lost), bound[:, rows], hides_nan, dead, share, bool((gone & on).any()), kept)


@dataclasses.dataclass
class Outcome:
    # [H, rows]: what a row lost, of probabilities or of the sizes of weights, and the bound of it that flexjax gives
    lost: np.ndarray
    bound: np.ndarray
    # a NaN left
    hides_nan: bool
    # a row lost all its keys
    dead: bool
    share: float
    dropped: bool
    kept: np.ndarray

    def breaks(self, tolerance: float) -> bool:
        above = self.lost > np.minimum(tolerance, self.bound * (1 + 1e-5) + 1e-300)
        return bool(above.any()) or self.hides_nan or self.dead


# ------------------------------------------------------------------- programs and arrays

H, M, D = 2, 1, 16
SCORES: dict[str, Callable] = {
    "alibi": lambda s, p, h, i, j: s - p["slope"][h] * jnp.abs(i - j),
    "gates": lambda s, p, h, i, j: s + p["F"][h, i] - p["F"][h, j],
    "table": lambda s, p, h, i, j: s + p["table"][h, i - j + p["kb"].shape[0] - 1],
    "cap": lambda s, p, h, i, j: 20 * jnp.tanh(s / 20),
    "temperature": lambda s, p, h, i, j: s * p["t"][h],
    "where": lambda s, p, h, i, j: jnp.where((i - j) > 50, s - p["slope"][h] * 100, s),
    "-inf": lambda s, p, h, i, j: jnp.where((i - j) % 7 == 3, -jnp.inf, s),
    "log": lambda s, p, h, i, j: s - 20 * p["slope"][h] * jnp.log1p(jnp.abs(i - j).astype(jnp.float32)),
    "key bias": lambda s, p, h, i, j: s + p["kb"][j],
    "square": lambda s, p, h, i, j: s - 0.01 * p["slope"][h] * jnp.square((i - j).astype(jnp.float32)),
    "relu": lambda s, p, h, i, j: jnp.maximum(s, 0.1 * s),
    "pair": lambda s, p, h, i, j: s + p["pair"][i, j],
    "query bias": lambda s, p, h, i, j: s + 100 * p["kb"][i],
    "exp": lambda s, p, h, i, j: s - p["slope"][h] * jnp.exp(jnp.minimum(0.1 * jnp.abs(i - j), 8.0)),
    "wave": lambda s, p, h, i, j: s + jnp.sin(p["kb"][j]),
    "whole": lambda s, p, h, i, j: s - 3 * p["slope"][h] * (jnp.abs(i - j) // 16).astype(jnp.float32),
    "root": lambda s, p, h, i, j: s - 9 * p["slope"][h] * jnp.abs(i - j).astype(jnp.float32) ** 0.5,
    "inverse": lambda s, p, h, i, j: s + 30 * p["slope"][h] * jax.lax.rsqrt(1.0 + jnp.abs(i - j)),
    "shift": lambda s, p, h, i, j: s - p["slope"][h] * (jnp.abs(i - j) >> 3).astype(jnp.float32) * 8,
}
MASKS: dict[str, Callable] = {
    "causal": lambda p: lambda b, h, i, j: i >= j,
    "before": lambda p: lambda b, h, i, j: i > j,
    "window": lambda p: lambda b, h, i, j: (i >= j) & (i - j < 100),
    "documents": lambda p: lambda b, h, i, j: (i >= j) & (p["doc"][i] == p["doc"][j]),
    "full": lambda p: lambda b, h, i, j: i >= -1,
    "array": lambda p: lambda b, h, i, j: p["bool"][i, j],
    "prefix": lambda p: lambda b, h, i, j: (j < 40) | (i >= j),
    "rows": lambda p: lambda b, h, i, j: (i >= j) & (i % 5 != 2),
}


WEIGHTS: dict[str, Callable] = {
    "sigmoid": lambda p: ready.sigmoid(p["slope"] - 5.0),
    "silu": lambda p: ready.silu(100.0),
    "relu squared": lambda p: ready.relu_squared(100.0),
    "retention": lambda p: ready.retention(jnp.exp(-p["slope"])).function,
    "linear": lambda p: ready.linear.function,
    "power": lambda p: ready.power(4).function,
    "both signs": lambda p: lambda s, b, h, i, j: jnp.tanh(s - 1) * jnp.exp(-p["slope"][h] * jnp.abs(i - j)),
}


def score_of(names: tuple[str, ...]) -> Callable[[Any], Callable]:
    def of(p: Any) -> Callable:
        def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            for name in names:
                s = SCORES[name](s, p, h, i, j)
            return s

        return mod

    return of


def params_of(
    r: np.random.Generator, q_len: int, kv_len: int, heads: int = H, of_pairs: bool = True
) -> dict[str, np.ndarray]:
    """Slopes, gates, tables and masks of sizes over many decades; without `of_pairs` no pair has an entry of its own."""
    size, most = 10.0 ** r.uniform(-2, 1.2), max(q_len, kv_len)
    gates = -np.cumsum(np.abs(r.standard_normal((heads, most))) * 10.0 ** r.uniform(-3, 1), 1)
    gates = r.standard_normal(gates.shape) * 10 if r.random() < 0.2 else gates
    pairs = (q_len, kv_len) if of_pairs else (1, 1)
    some = np.abs(r.standard_normal(heads))
    return dict(
        slope=np.float32(np.abs(r.standard_normal(heads)) * size), F=np.float32(gates),
        table=np.float32(np.cumsum(r.standard_normal((heads, q_len + most)), 1) * size),
        t=np.float32(r.standard_normal(heads) * 3 if r.random() < 0.3 else some),
        kb=np.float32(r.standard_normal(most) * size), pair=np.float32(r.standard_normal(pairs) * size),
        doc=np.int32(np.sort(r.integers(0, 5, most))), bool=r.random(pairs) < r.choice([0.02, 0.3, 0.97]),
    )  # fmt: skip


KINDS = ("normal", "aligned", "growing", "huge", "mean", "small", "cluster", "zero", "nan", "against", "underflow")


def arrays_of(
    r: np.random.Generator, q_len: int, kv_len: int, kind: str, heads: tuple[int, int] = (H, M)
) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys of a kind: what an attacker of the bound would choose."""
    q, k = r.standard_normal((1, heads[0], q_len, D)), r.standard_normal((1, heads[1], kv_len, D))
    if kind == "aligned":
        k[0, 0, int(r.integers(0, 20))] = 10.0 ** r.uniform(0, 1.7) * q[0, 0, -int(r.integers(1, 20))]
    if kind == "growing":
        k *= np.exp(np.linspace(0, r.uniform(-4, 4), kv_len))[:, None]
        q *= np.exp(np.linspace(0, r.uniform(-3, 3), q_len))[:, None]
    if kind == "huge":
        k[0, 0, int(r.integers(0, kv_len))] *= 10.0 ** r.uniform(1, 4)
    if kind == "mean":
        k += r.standard_normal(D) * 10
    if kind == "small":
        q *= 1e-3
    if kind == "cluster":
        k = np.repeat(r.standard_normal((1, heads[1], 8, D)) * 3, -(-kv_len // 8), 2)[:, :, :kv_len]
    if kind == "zero":
        q[:, :, ::2] = 0
    if kind == "nan":
        k[0, 0, int(r.integers(0, kv_len))] = np.nan
    if kind == "against" and q_len == kv_len:
        q = np.repeat(-k, heads[0] // heads[1], 1) * r.uniform(0.1, 10)  # the row's own key is the worst of all
    if kind == "underflow":
        q, k = q * 1e-25, k * 1e25  # the squares of q are 0 in float32, its products with k are not
    return np.float32(q), np.float32(k)


def away(count: int, u: np.ndarray) -> np.ndarray:
    """Keys [count, D] of which no bound knows that a query along u, of length 1, has scores of -60: far from their mean."""
    across = np.zeros(D)
    across[:2] = 2.0**12 * np.float32([u[1], -u[0]])
    return -60 * D**0.5 * u + np.where(np.arange(count) % 2, 1, -1)[:, None] * across


def tight(
    length: int, block: int, far: int, slope: float, tolerance: float, factor: float, u: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The first query of the last tile looks along u, of length 1, and its near keys `away`, so that its total is that of its own key.

    The keys of the first `far` blocks lie along u, as long as ALiBi of that slope allows a block that holds `factor` of
    the tolerance.
    """
    u = np.ones(D) / 4.0 if u is None else u
    q, k = np.zeros((1, H, length, D)), np.zeros((1, M, length, D))
    row = length - block
    q[0, :, row] = u
    k[:] = away(length, u)
    k[0, 0, row] = 0
    for j in range(far):
        end = (j + 1) * block - 1
        s = np.log(tolerance * factor / block) + slope * (row - end)
        assert s >= 0
        k[0, 0, j * block : end + 1] = s * D**0.5 * u
    return np.float32(q), np.float32(k)
