"""What a row of the tables is: one call of attention as data.

A row has shapes, the names of its mods (`tests/cases/mods.py`), and what the mods capture and how that is drawn. Every number
drawn is a bfloat16 value, so that one float64 result serves all dtypes.
"""

import dataclasses
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.cases.mods import EXPECTATIONS, MASK_MODS, SCORE_MODS, WEIGHTS, Mod


@dataclasses.dataclass(frozen=True)
class Capture:
    """How one captured array is drawn.

    kind   normal, integers (below `high`), flags (bool), documents (sorted ids), values (given)
    poison first index along the last axis from which on the array is NaN
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    high: int = 0
    values: tuple[int | float, ...] = ()
    poison: int | None = None

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        if self.kind == "normal":
            x = rounded(rng.standard_normal(self.shape))
        elif self.kind == "integers":
            x = rng.integers(0, self.high, self.shape)
        elif self.kind == "flags":
            x = rng.integers(0, 2, self.shape)
        elif self.kind == "documents":
            x = np.sort(rng.integers(0, self.high, self.shape), axis=-1)
        else:
            x = np.array(self.values)
        x = np.asarray(x, jnp.dtype(self.dtype))
        if self.poison is not None:
            x[..., self.poison :] = np.nan
        return x


@dataclasses.dataclass(frozen=True)
class Block:
    """The block mask to build and pass instead of the mask; `batch`, `heads`: whether it varies there."""

    size: int | tuple[int, int] = 128
    batch: bool = False
    heads: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem.

    shape     (B, N, M, T, S, D, E): batch, query heads, kv heads, lengths, dims of q and k, of v
    score     name of the score mod, mask: name of the mask mod
    weights   name of the weights in place of a softmax: the lse of results is their total, and there are no max_scores
    captures  (name, Capture) pairs; float ones want a gradient unless `frozen`
    dtypes    dtypes of q, k, v in the default run; the slow run adds the others
    block     None: pass `mask_mod`; else build and pass a block mask
    traced    integer captures are jit arguments, and the block mask is built inside the jit
    gain      factor on q; large ones make large logits
    lengths   (of queries, of keys): for each batch entry how many exist; the slots of the others are NaN. None: all exist
    w, u      whether the loss weighs out / lse
    sinks     whether there are learned sinks
    dropout   dropout rate
    extra     (M', R): heads and width of the extra features; such rows name their scale
    loosen    factor on the float32 tolerance, with the reason in a comment at the row
    slow      left to the slow run
    tolerance blocks that provably hold less are skipped; the oracle skips none
    """

    name: str
    shape: tuple[int, int, int, int, int, int, int] = (1, 2, 2, 37, 37, 16, 16)
    _: dataclasses.KW_ONLY
    score: str | None = None
    mask: str | None = None
    weights: str | None = None
    expectations: tuple[str, ...] = ()
    captures: tuple[tuple[str, Capture], ...] = ()
    frozen: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)
    layout: str = "BTNH"
    scale: float | None = None
    block: Block | None = None
    traced: bool = False
    gain: float = 1.0
    w: bool = True
    u: bool = True
    sinks: bool = False
    dropout: float = 0.0
    extra: tuple[int, int] | None = None
    loosen: float = 1.0
    slow: bool = False
    lengths: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    tolerance: float | None = None

    def inputs(self) -> dict[str, np.ndarray]:
        """q, k, v, loss weights w, u as [B, heads, length, ...] float32; sinks and extras where asked."""
        B, N, M, T, S, D, E = self.shape
        rng = self._rng("inputs")
        shapes = dict(q=(B, N, T, D), k=(B, M, S, D), v=(B, M, S, E), w=(B, N, T, E), u=(B, N, T))
        if self.sinks:
            shapes["sinks"] = (N,)
        if self.extra:
            heads, width = self.extra
            shapes |= dict(query_extra=(B, N, T, width), key_extra=(B, heads, S, width))
        drawn = {name: rounded(rng.standard_normal(shape)) for name, shape in shapes.items()}
        drawn["q"] = rounded(drawn["q"] * self.gain)
        return drawn | dict(w=drawn["w"] * self.w, u=drawn["u"] * self.u)

    def poisoned(self) -> dict[str, np.ndarray]:
        """`inputs` with NaN in the slots that do not exist, but for the loss weights, which are 0 there."""
        given = self.inputs()
        for ends, names in zip(self.lengths, (("q", "query_extra", "w", "u"), ("k", "v", "key_extra")), strict=True):
            for b, end in enumerate(ends or ()):
                for name in names:
                    if name in given:
                        given[name][b, :, end:] = 0.0 if name in ("w", "u") else np.nan
        return given

    def captured(self) -> dict[str, np.ndarray]:
        rng = self._rng("captures")
        return {name: capture.draw(rng) for name, capture in self.captures}

    def wanted(self) -> tuple[str, ...]:
        """Names of the captured arrays that want a gradient."""
        floating = [n for n, c in self.captures if jnp.issubdtype(jnp.dtype(c.dtype), jnp.floating)]
        return tuple(n for n in floating if n not in self.frozen)

    def mods(self, captured: dict[str, Any]) -> tuple[Mod | None, Mod | None]:
        """(score_mod, mask_mod) over the given values, which may be tracers."""
        return (
            SCORE_MODS[self.score](captured) if self.score else None,
            MASK_MODS[self.mask](captured) if self.mask else None,
        )

    def weighting(self, captured: dict[str, Any]) -> Mod | None:
        return WEIGHTS[self.weights](captured) if self.weights else None

    def functions(self, captured: dict[str, Any]) -> dict[str, Mod]:
        return {name: EXPECTATIONS[name](captured) for name in self.expectations}

    def _rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{self.name}/{purpose}".encode()))


def rounded(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 values, as float32."""
    return np.asarray(np.asarray(x, jnp.bfloat16), np.float32)


def normal(*shape: int, **fields: Any) -> Capture:
    return Capture("normal", shape, **fields)


def integers(high: int, *shape: int, dtype: str = "int32") -> Capture:
    return Capture("integers", shape, dtype, high=high)


def documents(number: int, *shape: int) -> Capture:
    return Capture("documents", shape, "int32", high=number)


def values(*given: int | float, dtype: str = "int32") -> Capture:
    return Capture("values", values=given, dtype=dtype)
