"""The workloads of the benchmark suites, as rows of data.

A workload is self-attention of one shape under one mask, with or without a score mod. A mask is one expression of (q, kv) that
numpy, JAX and torch can evaluate. A peer is an implementation that is timed. A pass is "forward", "backward" or
"forward+backward".
"""

import dataclasses
import math
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack

import numpy as np

if TYPE_CHECKING:  # torch_flex.py runs without jax
    import jax

    Value = np.ndarray | jax.Array

PASSES = ("forward", "forward+backward")
FA3 = "FlashAttention-3"
"""The name of the peer dew-flash-attn-cu13."""


class Allowed(Protocol):
    """A mask: (q, kv) -> bool, True where the query sees the key; for ints and for integer arrays that broadcast."""

    def __call__(self, q: "Value", kv: "Value", /) -> "Value":
        """Whether query q sees key kv."""
        ...


@dataclasses.dataclass(frozen=True)
class Workload:
    """Self-attention of one shape under one mask.

    name                          for tables
    mask, parameter               name in `MASKS`, and its parameter: window width, number of documents, length of the prefix, side of the
                                  neighbourhood, 0 where it has none
    length                        number of queries and of keys
    batch, heads, kv_heads, dim   batch size, query heads, key heads, head dim
    dtype                         dtype name of q, k, v and the output
    seed                          of the documents' lengths
    mod                           name of the score mod in `MODS`, None without one
    learns                        whether the gradient of the array that the mod reads is wanted too
    passes                        the passes that are measured
    skip                          (peer, reason) of each peer that is not timed on this workload
    seconds                       time budget of one measurement, without warm-up and compilation; only the cpu suites read it
    """

    name: str
    mask: str
    parameter: int
    length: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    dim: int = 64
    dtype: str = "float32"
    seed: int = 1
    mod: str | None = None
    learns: bool = False
    passes: tuple[str, ...] = PASSES
    skip: tuple[tuple[str, str], ...] = ()
    seconds: float = 10.0

    def arrays(self) -> dict[str, np.ndarray]:
        """Makes q, k, v and d_out, the cotangent of the output, for the cpu suites: normal numbers, float32 [B, T, heads, D] whatever
        `dtype` says, the same in each call.
        """
        rng = np.random.default_rng(0)
        heads = dict(q=self.heads, k=self.kv_heads, v=self.kv_heads, d_out=self.heads)
        return {
            name: rng.standard_normal((self.batch, self.length, n, self.dim), np.float32) for name, n in heads.items()
        }

    def allowed(self) -> "Allowed":
        """The workload's mask: (q, kv) -> bool, for ints and for integer arrays that broadcast."""
        return MASKS[self.mask](self)

    def visited(self) -> int:
        """Counts the pairs of a query and a key that the mask keeps, of `length * length`."""
        allowed, keys, step = self.allowed(), np.arange(self.length), max(1, 2**24 // self.length)
        rows = (np.arange(start, min(start + step, self.length)) for start in range(0, self.length, step))
        return sum(int(np.count_nonzero(allowed(r[:, None], keys[None, :]))) for r in rows)

    def flops(self, which: str) -> float:
        """The floating-point operations of a pass (`which`): 4 B N D for each pair that the mask keeps forward, 2.5 times that backward,
        3.5 times that for "forward+backward".
        """
        forward = 4.0 * self.batch * self.heads * self.dim * self.visited()
        return forward * {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}[which]

    def counts(self, which: str) -> dict[str, float]:
        """{"flops": n}: the floating-point operations of a pass (`which`), which a report divides by its time."""
        return dict(flops=self.flops(which))

    def skipped(self, peer: str) -> str | None:
        """Why a peer is not timed on this workload on a GPU, as a phrase for the tables; None if it is timed.

        peer   name of the implementation

        Four peers are left out where they have no argument for the mask or for the mod: "jax.nn" takes the masks full, causal and window
        and no mod; "tokamax" the same masks and the mod softcap; FA3 also documents and no mod; "torch flash" full and causal and no
        mod. Any peer may be left out by `skip`, whose reason counts where this rule gives none.
        """
        if peer == "jax.nn" and (self.mod or self.mask not in ("full", "causal", "window")):
            return "has no argument for this mask or mod; a dense mask costs it 8 to 14 times as much"
        if peer == "tokamax" and (self.mod not in (None, "softcap") or self.mask not in ("full", "causal", "window")):
            return "has no argument for this mask or mod"
        if peer == FA3 and (self.mod or self.mask not in ("full", "causal", "window", "documents")):
            return "has no argument for this mask or mod"
        if peer == "torch flash" and (self.mod or self.mask not in ("full", "causal")):
            return "has no argument for this mask or mod"
        return dict(self.skip).get(peer)


def document_ids(length: int, documents: int, seed: int = 1) -> np.ndarray:
    """The document of each token: int32 [length], ascending from 0; the lengths of documents are drawn, none is empty.

    documents   number of documents
    seed        of the lengths
    """
    cuts = np.random.default_rng(seed).choice(np.arange(1, length), documents - 1, replace=False)
    return np.searchsorted(np.sort(cuts), np.arange(length), side="right").astype(np.int32)


def _documents(problem: Workload) -> Allowed:
    """The mask of causal attention inside documents, with `problem.parameter` documents."""
    ids = document_ids(problem.length, problem.parameter, problem.seed)

    def allowed(q: "Value", kv: "Value") -> "Value":
        """Whether query and key are in the same document and the key is not later: a numpy array for numpy arrays, else a jax array."""
        if isinstance(q, np.ndarray):
            return (ids[q] == ids[kv]) & (q >= kv)
        import jax.numpy as jnp

        on_device = jnp.asarray(ids)
        return (on_device[q] == on_device[kv]) & (q >= kv)

    return allowed


def _canvas(problem: Workload) -> Allowed:
    """The mask of `natten_2d` on a square canvas of `problem.length` points, laid out row by row: a neighbourhood of `problem.parameter` by
    as many points.
    """
    side, size = math.isqrt(problem.length), problem.parameter

    def allowed(q: "Value", kv: "Value") -> "Value":
        """Whether the key's point is in the neighbourhood of the query's point, by `natten_2d` for jax arrays."""
        if not isinstance(q, np.ndarray):
            from flexjax import masks

            return masks.natten_2d((side, side), (size, size))(0, 0, q, kv)  # type: ignore[arg-type]
        return neighbours(q // side, kv // side, side, size) & neighbours(q % side, kv % side, side, size)

    return allowed


def neighbours(q: typing.Any, kv: typing.Any, side: int, size: int) -> typing.Any:
    """Whether the point kv of a line of `side` points is one of the `size` points around q, which stop moving at the ends of the line. For
    integers and arrays of numpy and torch.
    """
    first = q - size // 2
    return ((kv >= side - size) | (kv >= first)) & ((kv < size) | (kv < first + size))


MASKS: dict[str, Callable[[Workload], Allowed]] = {  # from the workload, whose `parameter` they read, to the mask
    "full": lambda p: lambda q, kv: (q >= 0) & (kv >= 0),
    "causal": lambda p: lambda q, kv: q >= kv,
    "window": lambda p: lambda q, kv: (q >= kv) & (q - kv < p.parameter),
    "documents": _documents,
    "prefix": lambda p: lambda q, kv: (q >= kv) | (kv < p.parameter),
    "dilated": lambda p: lambda q, kv: (q >= kv) & (q - kv < p.parameter) & ((q - kv) % 4 == 0),
    "canvas": _canvas,
}


@dataclasses.dataclass(frozen=True)
class Mod:
    """A score mod of the suites, which reads at most one array.

    apply    (array, score, h, q, kv) -> score, for scalars and for arrays that broadcast
    shape    from the workload to the shape of the array; None if the mod reads none
    stored   dtype name of the array on the device
    values   from the workload to the array; None: normal numbers
    """

    apply: Callable[..., "jax.Array"]
    shape: Callable[[Workload], tuple[int, ...]] | None = None
    stored: str = "float32"
    values: Callable[[Workload], np.ndarray] | None = None


def _softcap(_: object, s: "jax.Array", h: object, q: object, kv: object) -> "jax.Array":
    """30 tanh(score / 30); the arguments are those of `Mod.apply`, of which only the score is read."""
    import jax.numpy as jnp

    return 30.0 * jnp.tanh(s / 30.0)


def _checkerboard(_: object, s: "jax.Array", h: object, q: "jax.Array", kv: "jax.Array") -> "jax.Array":
    """The score halved at even distances between query and key and doubled at odd ones; the arguments are those of `Mod.apply`, of which
    the array and the head are not read.
    """
    import jax.numpy as jnp

    s = jnp.where((kv - q) % 2 == 0, s * 0.5, s)
    return jnp.where((kv - q) % 2 == 1, s * 2.0, s)


MODS: dict[str, Mod] = {
    "alibi": Mod(
        lambda slopes, s, h, q, kv: s + slopes[h] * (kv - q),
        lambda p: (p.heads,),
        values=lambda p: np.exp2(-8.0 * np.arange(1, p.heads + 1) / p.heads).astype(np.float32),
    ),
    "softcap": Mod(_softcap),
    "checkerboard": Mod(_checkerboard),
    "relative": Mod(  # one table [2 T] for all heads
        lambda table, s, h, q, kv: s + table[q - kv + table.shape[-1] // 2].astype(s.dtype),
        lambda p: (2 * p.length,),
        "bfloat16",
    ),
    "head_relative": Mod(  # a table [N, 2 T]
        lambda table, s, h, q, kv: s + table[h, q - kv + table.shape[-1] // 2].astype(s.dtype),
        lambda p: (p.heads, 2 * p.length),
    ),
    "pair": Mod(  # [N, T, T]
        lambda bias, s, h, q, kv: s + bias[h, q, kv].astype(s.dtype),
        lambda p: (p.heads, p.length, p.length),
        "bfloat16",
    ),
}


class _Other(TypedDict, total=False):
    """Fields of a workload that most rows of the gpu suite do not set."""

    batch: int
    dtype: str
    seed: int
    mod: str
    learns: bool


def _gpu(
    name: str, mask: str, parameter: int, length: int, heads: int, kv_heads: int, dim: int, **other: Unpack[_Other]
) -> Workload:
    """Makes a workload of the gpu suite, whose passes are "forward" and "backward"; all arguments are fields of Workload. `seconds` keeps
    its default, which no gpu suite reads.

    other   batch, dtype, seed, mod, learns; batch 2 and bfloat16 if not given
    """
    fields: _Other = {"batch": 2, "dtype": "bfloat16", **other}
    passes = ("forward", "backward")
    return Workload(name, mask, parameter, length, heads=heads, kv_heads=kv_heads, dim=dim, passes=passes, **fields)


def _sweep(length: int, heads: int, dim: int) -> Workload:
    """A workload of the suite gpu-sweep: causal attention with at most 16384 tokens where the length allows."""
    name = f"causal {length}, {heads} heads of {dim}"
    return _gpu(name, "causal", 0, length, heads, heads, dim, batch=max(1, 16384 // length))


_TOO_LARGE = (("dense", "scores of 17 GB"), ("jax.nn", "scores of 17 GB"))

SUITES: dict[str, tuple[Workload, ...]] = {
    "cpu": (
        Workload("causal 256", "causal", 0, 256, seconds=3),
        Workload("causal 512", "causal", 0, 512, seconds=3),
        Workload("causal 1024", "causal", 0, 1024, seconds=5),
        Workload("causal 8192", "causal", 0, 8192, seconds=30),
        Workload("window 256 of 8192", "window", 256, 8192, seconds=20),
        Workload("16 documents in 8192", "documents", 16, 8192, seconds=20),
        Workload("window 256 of 32768", "window", 256, 32768, skip=_TOO_LARGE, seconds=20),
    ),
    "gpu": (
        _gpu("full d128", "full", 0, 8192, 16, 16, 128),
        _gpu("causal d128", "causal", 0, 8192, 16, 16, 128),
        _gpu("causal d64", "causal", 0, 8192, 32, 32, 64),
        _gpu("full d64", "full", 0, 8192, 32, 32, 64),
        _gpu("causal grouped d128", "causal", 0, 8192, 32, 8, 128),
        _gpu("causal d256", "causal", 0, 8192, 8, 8, 256),
        _gpu("window 1025 d128", "window", 1025, 16384, 16, 16, 128),
        _gpu("12 documents d128", "documents", 12, 16384, 16, 16, 128, seed=0),
        *(
            _gpu(f"causal d128, {n} x {t}", "causal", 0, t, 16, 16, 128, batch=n)
            for n, t in ((64, 256), (32, 512), (16, 1024), (8, 2048))
        ),
        _gpu("causal d128, 1 x 32768", "causal", 0, 32768, 8, 8, 128, batch=1),
        _gpu("prefix 1024 d128", "prefix", 1024, 8192, 16, 16, 128),
        _gpu("every 4th of 2048 d128", "dilated", 2048, 16384, 16, 16, 128),
        _gpu("13 x 13 on 64 x 64 d128", "canvas", 13, 4096, 16, 16, 128, batch=8),
        _gpu("ALiBi causal d128", "causal", 0, 8192, 16, 16, 128, mod="alibi"),
        _gpu("soft cap causal d128", "causal", 0, 8192, 16, 16, 128, mod="softcap"),
        _gpu("relative bias causal d64", "causal", 0, 8192, 16, 16, 64, mod="relative"),
        _gpu("f16 causal 8192 d64", "causal", 0, 8192, 4, 4, 64, dtype="float16"),
        _gpu("f16 causal 4096 d64", "causal", 0, 4096, 4, 4, 64, dtype="float16"),
        _gpu("f16 checkerboard d64", "full", 0, 2048, 8, 8, 64, dtype="float16", batch=8, mod="checkerboard"),
        # gradients of the array that a mod reads, each after the same workload without the mod
        _gpu("plain causal d64", "causal", 0, 8192, 16, 16, 64),
        _gpu("learned table causal d64", "causal", 0, 8192, 16, 16, 64, mod="head_relative", learns=True),
        _gpu("plain 4096 d64", "full", 0, 4096, 16, 16, 64),
        _gpu("learned pair bias d64", "full", 0, 4096, 16, 16, 64, mod="pair", learns=True),
    ),
    # lengths and head counts that no table has, whose worst ratio tells more than their best
    "gpu-sweep": (
        *(_sweep(length, 16, 128) for length in range(1024, 20481, 1024)),
        *(_sweep(length, 32, 64) for length in range(1024, 20481, 1024)),
        *(_sweep(8192, heads, dim) for dim in (128, 64) for heads in (1, 2, 3, 4, 6, 8, 12, 24, 40, 64)),
        *(_sweep(length, 12, dim) for dim in (128, 64) for length in (1000, 3000, 5000, 9999)),
    ),
    # the gpu suite in a few seconds, on any device, for tests
    "gpu-tiny": (
        _gpu("causal 128", "causal", 0, 128, 4, 2, 64, batch=1),
        _gpu("learned pair 128", "prefix", 32, 128, 2, 2, 64, batch=1, mod="pair", learns=True),
    ),
    # the cpu suite in a few seconds, for tests
    "tiny": (
        Workload("causal 64", "causal", 0, 64, dim=16, seconds=0.2),
        Workload("3 documents in 96", "documents", 3, 96, dim=16, kv_heads=2, seconds=0.2, passes=("forward",)),
    ),
}
