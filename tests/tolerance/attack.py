"""Random attacks on the proof of `tolerance=`, of at least 64 key blocks a row: programs of one to four steps, masks,
grouped heads, sinks, tolerances from 1e-12 to 1e-2, and queries and keys of eleven kinds and of pairs at the bound.

A `Scene` is what is compiled once; `attack` draws arrays for it and says what its rows lost.
"""

import contextlib
import dataclasses
import functools
import typing
from typing import Any

import jax
import numpy as np

from tests.tolerance.proof import KINDS, MASKS, SCORES, WEIGHTS, Case, Choice, D, arrays_of, away, params_of, score_of

ADDS = frozenset(SCORES) - {"cap", "temperature", "where", "-inf", "relu"}
"""Steps that add to the score, for which a pair at the bound can be made."""
OF_PAIRS = {"pair", "array"}
"""Steps and masks that read an array of pairs."""
SIZES = ((512, 8), (520, 8), (1024, 16), (2048, 32), (4096, 64), (8192, 128))
"""Tokens and their blocks, the last two in one scene of sixteen each."""
ALL_ROWS = 520
"""Up to this many rows, all are compared; of more, 128."""


@dataclasses.dataclass(frozen=True)
class Scene:
    steps: tuple[str, ...]
    mask: str
    # queries, keys, tokens of a block
    sizes: tuple[int, int, int]
    # query and key heads
    heads: tuple[int, int]
    tolerance: float
    has_sinks: bool
    dtype: str
    # a name of WEIGHTS, of which the tolerance is absolute; None: softmax
    weights: str | None = None

    @property
    def x64(self) -> contextlib.AbstractContextManager:
        return jax.enable_x64(self.dtype == "float64")


class Found(typing.NamedTuple):
    kind: str
    # the largest loss of a row over the tolerance
    worst: float
    broken: bool
    # visible entries left
    dropped: bool
    share: float


def scene_of(r: np.random.Generator, large: bool = True, weighted: bool = False) -> Scene:
    """A scene drawn at random; `large`: also of 2048 tokens and more; `weighted`: of weights."""
    weights = np.array([4, 3, 3, 2, 1, 1] if large else [3, 1, 0, 0, 0, 0], float)
    length, block = SIZES[r.choice(len(SIZES), p=weights / weights.sum())]
    names = [n for n in SCORES if length <= 2048 or n not in OF_PAIRS]
    masks = [n for n in MASKS if length <= 2048 or n not in OF_PAIRS]
    if r.random() < 0.4:  # one or two steps under a mask that shows a witness
        steps = r.choice(sorted(ADDS & set(names)), int(r.integers(1, 3)), replace=False)
        mask = str(r.choice(["causal", "before", "full", "prefix"]))
    else:
        steps = r.choice(names, int(r.integers(1, 5)), replace=False)
        mask = str(r.choice(masks))
    more = 56 if r.random() < 0.3 and length <= 2048 else 0
    heads = ((2, 1), (2, 2), (4, 2), (3, 1))[r.integers(0, 4)]
    tolerance, sinks = 10.0 ** r.uniform(-12, -2), bool(r.random() < 0.3)
    dtype = str(r.choice(["float32", "float64"]))
    scene = Scene(tuple(map(str, steps)), mask, (length, length + more, block), heads, tolerance, sinks, dtype)
    if not weighted:
        return scene
    return dataclasses.replace(scene, has_sinks=False, weights=str(r.choice(sorted(WEIGHTS))))


class Attack:
    """Draws cases of a scene."""

    def __init__(self, scene: Scene, r: np.random.Generator) -> None:
        self.scene, self.r = scene, r

    def case(self, q: np.ndarray, k: np.ndarray, params: Any) -> Case:
        scene, to = self.scene, functools.partial(np.asarray, dtype=self.scene.dtype)
        floats = lambda x: to(x) if x.dtype == np.float32 else x
        sinks = np.float32(self.r.standard_normal(scene.heads[0]) * 5) if scene.has_sinks else None
        params = jax.tree.map(floats, params)
        return Case(
            score_of(scene.steps), MASKS[scene.mask], to(q), to(k), params, None if sinks is None else to(sinks),
            None if scene.weights is None else WEIGHTS[scene.weights],
        )  # fmt: skip

    @functools.cached_property
    def choice(self) -> Choice:
        q_len, kv_len, block = self.scene.sizes
        r = np.random.default_rng(0)
        case = self.case(*arrays_of(r, q_len, kv_len, "normal", self.scene.heads), self.params())
        return Choice(case, self.scene.tolerance, block, dtype=self.scene.dtype)

    def params(self) -> dict[str, np.ndarray]:
        of_pairs = not OF_PAIRS.isdisjoint((*self.scene.steps, self.scene.mask))
        return params_of(self.r, *self.scene.sizes[:2], self.scene.heads[0], of_pairs)

    def rows(self, first: int | None) -> np.ndarray:
        """Rows to compare: all, or 128 of them, with those of the tile of `first`."""
        q_len, _, block = self.scene.sizes
        if q_len <= ALL_ROWS:
            return np.arange(q_len)
        first = int(self.r.integers(0, q_len // block)) * block if first is None else first
        some = self.r.choice(q_len, 128, replace=False)
        some[:block] = np.arange(first, first + block)[:128]
        return some

    def draw(self) -> Found:
        """One case. Call it under the scene's x64."""
        params, first = self.params(), None
        kind = str(self.r.choice(KINDS))
        q, k = arrays_of(self.r, *self.scene.sizes[:2], kind, self.scene.heads)
        if self.scene.weights is not None and self.r.random() < 0.5:
            kind, (q, k) = "parallel", self.parallel()
        elif self.scene.weights is None and set(self.scene.steps) <= ADDS and self.r.random() < 0.6:
            tight = self.tight(self.case(q, k, params))
            if tight is not None:
                kind, (q, k, first) = "tight", tight
        found = self.choice(self.case(q, k, params), self.rows(first))
        tolerance = self.scene.tolerance
        return Found(kind, float(found.lost.max() / tolerance), found.breaks(tolerance), found.dropped, found.share)

    def parallel(self) -> tuple[np.ndarray, np.ndarray]:
        """Queries and keys along one vector, so that scores are as large as norms let them be, of both signs."""
        r, (q_len, kv_len, _), (heads, of_keys) = self.r, self.scene.sizes, self.scene.heads
        u = r.standard_normal(D) * 10.0 ** r.uniform(-3, 1)
        signs = lambda *shape: r.choice([-1, 1], (1, *shape, 1)) if r.random() < 0.5 else np.ones((1, *shape, 1))
        return np.float32(signs(heads, q_len) * u), np.float32(signs(of_keys, kv_len) * u)

    def tight(self, case: Case) -> tuple[np.ndarray, np.ndarray, int] | None:
        """(q, k, first row of a tile) whose blocks hold as much of that row as the bound just lets them lose.

        The row looks along u, the rest of its tile nowhere; keys lie along u, as far as the bound of their block lets
        them, or against it, the row's own at 0.
        """
        r, (q_len, kv_len, block) = self.r, self.scene.sizes
        first = int(r.integers(q_len // block // 2, q_len // block)) * block
        bias, on = self.choice.entries(case, np.arange(first, first + block), 0.0)
        own = min(first, kv_len - 1)
        if not on[0, 0, own] or not np.isfinite(bias[0]).all():
            return None
        at = np.arange(first, first + block)
        # what the other rows of the tile have at their own keys, where all scores are 0
        witness = min(bias[0, i, min(row, kv_len - 1)] for i, row in enumerate(at))
        blocks = np.arange(0, kv_len, block)
        top = np.maximum.reduceat(bias[0].max(0), blocks)
        holds = np.minimum(block, kv_len - blocks)
        far = r.random(len(blocks)) < r.choice([1.0, 0.5, 0.05])
        # at the edge, all blocks together or each alone; sometimes far above it, where a weaker bound would let it go
        factor = r.uniform(0.85, 1.02) / r.choice([1, max(1, far.sum())]) * 10 ** r.choice([0, 0, r.uniform(0, 6)])
        score = np.log(self.scene.tolerance * factor / holds) + witness - top
        far &= (score > 0) & (blocks // block != own // block)
        if not far.any():
            return None
        q, k = (np.array(x) for x in (case.q, case.k))
        u = r.standard_normal(D)
        u /= np.linalg.norm(u)
        q[0, 0, first : first + block], q[0, 0, first] = 0, u
        score, far = (np.repeat(x, block)[:kv_len, None] for x in (score, far))
        k[0, 0] = np.where(far, score * D**0.5 * u, away(kv_len, u))
        k[0, 0, own] = 0
        return q, k, first
