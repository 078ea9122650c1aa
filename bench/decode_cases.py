"""The cases of the decode suite, as rows of data: few queries of each request over a long cache.

The queries of a request are its last tokens: query t of T lies at position length - T + t. Masks and score mods see these positions.
The mod of a case is its mask mod or its score mod, by name; the files of the peers have them in jax and in torch.
"""

import dataclasses
import typing
from typing import ClassVar

import numpy as np

from bench.inputs import PERIOD

WINDOW, SOFT_CAP, HIDDEN_DOCUMENT = 1024, 20.0, 3
"""Parameters of the mods "window", "soft cap" and "documents"."""
MASKS, SCORE_MODS = ("documents", "window", "causal", "tree"), ("ALiBi", "soft cap", "relative table")
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The largest number that a quantised cache stores, by dtype."""
OWN_PEER, CUDNN, CUDNN_PAGES, TOKAMAX, TORCH = "flexjax", "jax.nn", "jax paged", "tokamax", "torch"
PEERS = (CUDNN, CUDNN_PAGES, TOKAMAX, TORCH, OWN_PEER)


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One call.

    name                   for tables
    batch, keys            requests, and keys of each; with `mean`, the keys of the buffer
    mod                    mask mod or score mod, in MASKS or SCORE_MODS; None without one
    q_len                  queries of each request
    q_heads, kv_heads, dim query heads, key heads, head dim of keys and values
    copies                 copies of the query and the cache; a step reads each of them once, so that none stays in the L2 cache
    mean, longest          mean of lognormal lengths, one of which is `longest`; 0: full lengths
    page                   keys of a page; 0: the cache is contiguous
    stored                 dtype name of the cache; queries are bfloat16
    ragged                 the queries of all requests lie one after the other (cu_q_lens)
    shared                 keys at the beginning that all requests share, in the same pages
    """

    passes: ClassVar[tuple[str, ...]] = ("decode",)
    dtype: ClassVar[str] = "bfloat16"

    name: str
    batch: int
    keys: int
    mod: str | None = None
    q_len: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    copies: int = 1
    mean: int = 0
    longest: int = 0
    page: int = 0
    stored: str = "bfloat16"
    ragged: bool = False
    shared: int = 0

    def lengths(self) -> np.ndarray:
        """Keys of each request, int32 [batch]: `keys` for all without `mean`, else drawn with a fixed seed from q_len to `longest`, with
        `longest` itself for request batch // 2.
        """
        if not self.mean:
            return np.full(self.batch, self.keys, np.int32)
        found = np.random.default_rng(0).lognormal(0.0, 1.0, self.batch)
        found = np.clip(found / found.mean() * self.mean, self.q_len, self.longest).astype(np.int32)
        found[self.batch // 2] = self.longest
        return found

    def counts(self, which: str) -> dict[str, float]:
        """{"bytes": n}: how many bytes of keys and values a call has to read from one of the caches. A shared prefix counts once; under
        the mod "window" only keys that a query sees count, under other mods all keys.

        which   not used, because the decode suite has one pass
        """
        tokens = self.lengths().astype(float)
        if self.mod == "window":
            tokens = np.minimum(tokens, WINDOW + self.q_len - 1)
        number = tokens.sum() - (self.batch - 1) * self.shared
        width = 2 if self.stored == "bfloat16" else 1
        return dict(bytes=number * self.kv_heads * 2 * self.dim * width)

    def skipped(self, peer: str) -> str | None:
        """Why a peer is not timed on this case, as a phrase for the tables; None if it is.

        peer   a name of PEERS, or the reference, which is never left out

        CUDNN_PAGES takes only caches in pages of bfloat16 without mod, ragged queries and shared pages; the other peers but flexjax take
        no pages, and CUDNN no soft cap.
        """
        if peer == CUDNN_PAGES:
            if not self.page:
                return "takes no contiguous cache"
            if self.stored != "bfloat16" or self.mod or self.ragged or self.shared:
                return "takes no quantised cache, no mask, no ragged queries and no shared pages"
        elif peer in (CUDNN, TOKAMAX, TORCH) and self.page:
            return "takes no pages"
        if peer == CUDNN and self.mod == "soft cap":
            return "has no argument for a soft cap"
        return None

    def entries(self) -> list[int]:
        """The numbers of the requests whose results are compared: the first and the last, one number if there is one request."""
        return sorted({0, self.batch - 1})

    def first_query(self) -> int:
        """The position of the first query in a request that has `keys` keys, as all have without `mean`: keys - q_len."""
        return self.keys - self.q_len

    def ancestors(self) -> np.ndarray:
        """Which of the queries each query sees under the mod "tree", itself and its ancestors: bool [q_len, q_len]. Query n is a child of
        query (n - 1) // 2.
        """
        seen = np.eye(self.q_len, dtype=bool)
        for n in range(1, self.q_len):
            seen[n] |= seen[(n - 1) // 2]
        return seen

    def arrays(self) -> dict[str, np.ndarray]:
        """The numpy arrays, by name, from which every peer makes the arrays of its call.

        query, key, value   bfloat16, flat: at most PERIOD normal numbers, which the arrays of the call repeat
        lengths             int32 [batch]: keys of each request
        ancestors           bool [q_len, q_len], see `ancestors`
        slopes, table, ids  what the mods "ALiBi", "relative table" and "documents" read, where the case has them: float32 [q_heads],
                            float32 [q_heads, 2 * keys], int32 [batch, keys]
        pages               int32 [batch, keys // page], only for a cache in pages
        """
        import ml_dtypes  # jax brings it

        rng = np.random.default_rng(0)
        sizes = dict(query=self.query_shape(), key=self.cache_shape(), value=self.cache_shape())
        found: dict[str, np.ndarray] = {
            name: rng.standard_normal(min(PERIOD, int(np.prod(shape))), np.float32).astype(ml_dtypes.bfloat16)
            for name, shape in sizes.items()
        }
        found |= dict(lengths=self.lengths(), ancestors=self.ancestors())
        if self.mod == "ALiBi":
            found["slopes"] = np.exp2(-np.linspace(1, 16, self.q_heads)).astype(np.float32)
        if self.mod == "relative table":
            found["table"] = rng.standard_normal((self.q_heads, 2 * self.keys), np.float32)
        if self.mod == "documents":
            found["ids"] = np.sort(rng.integers(0, 8, (self.batch, self.keys), np.int32))
        if self.page:
            found["pages"] = self._pages(rng)
        return found

    def _pages(self, rng: np.random.Generator) -> np.ndarray:
        """The page numbers of each request in the order of its tokens, int32 [batch, keys // page]; which page of the pool holds what is
        drawn by `rng`. The first shared // page columns are the same for all requests.
        """
        columns, common = self.keys // self.page, self.shared // self.page
        own = np.arange(self.batch * (columns - common)).reshape(self.batch, -1) + common
        order = rng.permutation(self.number_of_pages()).astype(np.int32)
        return order[np.concatenate([np.broadcast_to(np.arange(common), (self.batch, common)), own], 1)]

    def number_of_pages(self) -> int:
        """P, how many pages the pool of a cache in pages has: those of all requests, with shared pages counted once."""
        return (self.batch * (self.keys - self.shared) + self.shared) // self.page

    def query_shape(self) -> tuple[int, ...]:
        """The shape of the queries of all copies: [copies, batch, q_len, q_heads, dim]."""
        return self.copies, self.batch, self.q_len, self.q_heads, self.dim

    def cache_shape(self) -> tuple[int, ...]:
        """The shape of the keys, and of the values: [copies, batch, keys, kv_heads, dim], or [P, page, kv_heads, dim] in pages."""
        if self.page:
            return self.number_of_pages(), self.page, self.kv_heads, self.dim
        return self.copies, self.batch, self.keys, self.kv_heads, self.dim

    def scale(self) -> float:
        """The factor from the stored numbers of a quantised cache to real ones, by which 5.5 (about the largest of PERIOD normal
        numbers) is stored as the largest number of the dtype. Raises KeyError for a cache that is not quantised.
        """
        return 5.5 / LARGEST[self.stored]


class Floor(typing.NamedTuple):
    """What a case has to reach on one H200: at least `rate` TB/s over its bytes, at most `ms` milliseconds, or at most `times` the time of
    another case of the same run. 0: not asked.
    """

    rate: float = 0.0
    ms: float = 0.0
    times: float = 0.0
    of: str = ""

    def milliseconds(self, bytes_read: float, times: typing.Mapping[str, float]) -> float | None:
        """The most milliseconds that the case may take; None if nothing is asked, or if the other case has no time.

        bytes_read   of the case, see `DecodeCase.counts`
        times        milliseconds of each case that has a time, by name
        """
        if self.rate:
            return bytes_read / self.rate / 1e9
        return self.ms or (self.times * times[self.of] if self.of in times else None)


_PLAIN = "B16 S32k"
FLOORS: dict[str, Floor] = {
    _PLAIN: Floor(rate=3.9),
    "B1 S128k": Floor(rate=3.4),
    "B64 S4k": Floor(rate=3.7),
    "B1 S8k, 16 caches": Floor(ms=0.025),
    **{f"{_PLAIN}, {mod}": Floor(times=1 / 0.85, of=_PLAIN) for mod in (*SCORE_MODS, "documents")},
    f"{_PLAIN}, window": Floor(ms=0.06),
    **{f"{_PLAIN}, group of {n}": Floor(times=1 / 0.9, of=_PLAIN) for n in (1, 3, 6, 7, 8)},
    **{
        f"{_PLAIN}, {what}": Floor(times=1.25, of=_PLAIN)
        for what in ("4 queries", "8 queries", "16 queries", "tree of 16")
    },
    "ragged B64 in 32k": Floor(rate=3.2),
    "ragged B64 in 128k": Floor(times=1.05, of="ragged B64 in 32k"),
    **{f"{_PLAIN}, pages of {n}": Floor(times=1 / 0.88, of=_PLAIN) for n in (128, 64)},
    f"{_PLAIN}, pages of 16": Floor(times=1 / 0.7, of=_PLAIN),
    **{f"{_PLAIN}, pages of 64, {stored}": Floor(times=1 / 1.4, of=f"{_PLAIN}, pages of 64") for stored in LARGEST},
    "B64, shared prefix of 32k": Floor(ms=0.25),
    "prefill 4 x 512 on 32k, pages of 64": Floor(times=1 / 0.85, of="prefill 4 x 512 on 32k"),
}
"""By name of the case. A mixed batch has a floor too, 60 requests that decode and a chunk of 2048 queries in at most 1.1 times the time of
their two calls; no case of this suite is made of two calls, so tools/device/time_mixed.py measures it."""


class _Long(typing.TypedDict):
    """The two sizes that most cases of the decode suite share."""

    batch: int
    keys: int


_LONG: _Long = {"batch": 16, "keys": 32768}

DECODE_SUITES: dict[str, tuple[DecodeCase, ...]] = {
    "decode": (
        DecodeCase("B16 S32k", **_LONG),
        DecodeCase("B1 S128k", 1, 131072),
        DecodeCase("B64 S4k", 64, 4096),
        DecodeCase("B1 S8k, 16 caches", 1, 8192, copies=16),
        *(DecodeCase(f"B16 S32k, {name}", **_LONG, mod=name) for name in (*SCORE_MODS, "documents", "window")),
        *(DecodeCase(f"B16 S32k, group of {n}", **_LONG, q_heads=8 * n) for n in (1, 3, 6, 7, 8)),
        *(DecodeCase(f"B16 S32k, {n} queries", **_LONG, q_len=n, mod="causal") for n in (4, 8, 16)),
        DecodeCase("B16 S32k, tree of 16", **_LONG, q_len=16, mod="tree"),
        *(DecodeCase(f"ragged B64 in {s // 1024}k", 64, s, mean=4096, longest=32768) for s in (32768, 131072)),
        *(DecodeCase(f"B16 S32k, pages of {n}", **_LONG, page=n) for n in (128, 64, 16)),
        *(DecodeCase(f"B16 S32k, pages of 64, {name}", **_LONG, page=64, stored=name) for name in LARGEST),
        DecodeCase("B64, shared prefix of 32k", 64, 32768 + 512, page=64, shared=32768),
        DecodeCase("B16 S32k, head dim 64", **_LONG, dim=64),
        DecodeCase("B16 S16k, head dim 256", 16, 16384, dim=256),
        DecodeCase("prefill 4 x 512 on 32k", 4, 32768, q_len=512, mod="causal"),
        DecodeCase("prefill 4 x 512 on 32k, pages of 64", 4, 32768, q_len=512, mod="causal", page=64, ragged=True),
    ),
    # the decode suite in a few seconds, on any device, for tests
    "decode-tiny": (
        DecodeCase("ragged", 2, 64, q_heads=4, kv_heads=2, dim=16, mean=24, longest=60),
        DecodeCase("tree in pages", 2, 64, q_len=4, q_heads=4, kv_heads=2, dim=16, mod="tree", page=8),
        DecodeCase("int8, shared", 3, 64, q_heads=2, kv_heads=2, dim=16, page=8, stored="int8", shared=48),
    ),
}
