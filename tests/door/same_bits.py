"""Ways to compute the same tokens with `KernelOptions(invariant=True)`, for tests that compare their bits.

A problem is one sequence with causal attention of some mods. A way returns (out [T, N, E], lse [T, N]) of tokens `at`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flexjax import AuxRequest, KernelOptions, Origin, flex_attention, masks, paged, paged_attention
from tests.arrays import array

INVARIANT = KernelOptions(invariant=True)
AUX = AuxRequest(lse=True)
Found = tuple[np.ndarray, np.ndarray, np.ndarray]  # at, out, lse


@dataclasses.dataclass(frozen=True)
class Problem:
    """One sequence of T tokens, from a seed."""

    T: int
    N: int = 4
    M: int = 2
    D: int = 16
    E: int = 16
    dtype: str = "float32"
    score: str = "alibi softcap"
    mask: str = "causal"
    sinks: bool = False
    seed: int = 0
    options: KernelOptions | None = INVARIANT
    implementation: str | None = None

    @functools.cached_property
    def qkv(self) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(self.seed)
        sizes = ((self.N, self.D), (self.M, self.D), (self.M, self.E))
        return tuple(
            np.asarray(rng.standard_normal((self.T, *s), np.float32)).astype(jnp.dtype(self.dtype)) for s in sizes
        )

    def other(self, tokens: int) -> tuple[np.ndarray, ...]:
        """Other tokens, which are not the problem's."""
        return dataclasses.replace(self, T=tokens, seed=self.seed + 1).qkv

    @property
    def slopes(self) -> np.ndarray:
        return np.asarray(2.0 ** -np.arange(1, self.N + 1), np.float32)

    def score_mod(self, slopes: jax.Array | None = None) -> Any:
        slopes = jnp.asarray(self.slopes) if slopes is None else slopes

        def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            if "softcap" in self.score:
                s = 15.0 * jnp.tanh(s / 15.0)
            if "alibi" in self.score:
                s = s - slopes[h] * (q - kv)
            return s * jnp.exp(jnp.sin(0.37 * kv)) if "wave" in self.score else s

        return score_mod if self.score else None

    @property
    def mask_mod(self) -> Any:
        if self.mask == "window":
            return masks.sliding_window(100)
        if self.mask == "prefix":
            return masks.prefix_lm(150)
        return masks.causal

    @property
    def keywords(self) -> dict[str, Any]:
        sinks = array(np.linspace(-1, 1, self.N), np.float32) if self.sinks else None
        choice = {"kernel_options": self.options, "implementation": self.implementation}
        return {"mask_mod": self.mask_mod, "sinks": sinks, "return_aux": AUX, **choice}

    @property
    def simulated(self) -> bool:
        """Whether the kernels are simulated, which runs outside of jit alone, and shows the bits of `out` alone."""
        return self.options is not None and self.options.interpret

    def jit(self, function: Callable) -> Callable:
        return function if self.simulated else jax.jit(function)

    @property
    def cuts(self) -> bool:
        """Whether a token sees no later ones, so that the sequence may be cut anywhere."""
        return self.mask != "prefix"


def found(at: Any, result: Any) -> Found:
    out, aux = result
    return np.asarray(at), np.asarray(out[0]), np.asarray(aux.lse[0])


def full(p: Problem) -> Found:
    call = p.jit(lambda q, k, v: flex_attention(q, k, v, score_mod=p.score_mod(), **p.keywords))
    return found(range(p.T), call(*(x[None] for x in p.qkv)))


def in_chunks(p: Problem, size: int, starts: Any, call: Callable) -> Iterator[Found]:
    """Chunks of `size` tokens behind the keys before; the last one may be cut by the length of queries."""
    q = np.pad(p.qkv[0], ((0, size), (0, 0), (0, 0)), constant_values=np.nan)
    for start in starts:
        count = min(size, p.T - start)
        out, aux = call(q[None, start : start + size], np.int32(start + count), np.int32(count))
        yield np.arange(start, start + count), np.asarray(out[0, :count]), np.asarray(aux.lse[0, :count])


def chunks(p: Problem, size: int, buffer: int = 0) -> Iterator[Found]:
    """A chunked prefill, or decoding one by one; past the tokens the cache holds NaN."""
    k, v = (np.pad(x, ((0, buffer), (0, 0), (0, 0)), constant_values=np.nan)[None] for x in p.qkv[1:])

    @p.jit
    def call(q: jax.Array, keys: jax.Array, queries: jax.Array) -> Any:
        lengths = {"query_seq_lengths": queries[None], "key_value_seq_lengths": keys[None]}
        return flex_attention(q, k, v, score_mod=p.score_mod(), origin=Origin(query="end"), **lengths, **p.keywords)

    yield from in_chunks(p, size, starts_of(p, size), call)


def starts_of(p: Problem, size: int) -> list[int]:
    """Where chunks begin: all, or some if they are many."""
    starts = list(range(0, p.T, size))
    return starts if len(starts) < 12 else [*starts[:2], *starts[2 :: len(starts) // 9], starts[-1]]


def pages(p: Problem, page: int, size: int) -> Iterator[Found]:
    """The second of three requests, in pages in any order with NaN in all other slots."""
    rng = np.random.default_rng(p.seed)
    n = -(-p.T // page)
    pool = n + 5
    numbers = rng.permutation(pool)[: n + 2].astype(np.int32)
    own, others = numbers[:n], numbers[n:]

    def stored(x: np.ndarray) -> np.ndarray:
        whole = np.full((pool, page, *x.shape[1:]), np.nan, x.dtype)
        padded = np.pad(x, ((0, n * page - p.T), (0, 0), (0, 0)), constant_values=np.nan)
        whole[own] = padded.reshape(n, page, *x.shape[1:])
        whole[others] = 0.5
        return whole

    cache = paged.PagedCache(*(array(stored(x)) for x in p.qkv[1:]))
    table = np.full((3, n), -1, np.int32)
    table[1], table[0, 0], table[2, 0] = own, others[0], others[1]
    uses = paged.table(3, n, pool, page).uses
    rest = p.keywords

    @p.jit
    def call(q: jax.Array, keys: jax.Array, queries: jax.Array) -> Any:
        held = paged.PageTable(array(table), jnp.stack([page // 2, keys, page // 3]).astype(jnp.int32), uses)
        three = jnp.concatenate([0.3 * jnp.ones_like(q), q, jnp.ones_like(q)]).astype(q.dtype)
        counts = jnp.stack([jnp.int32(1), queries, jnp.int32(1)])
        out, aux = paged_attention(three, cache, held, score_mod=p.score_mod(), query_seq_lengths=counts, **rest)
        return out[1:2], aux._replace(lse=aux.lse[1:2])

    yield from in_chunks(p, size, starts_of(p, size), call)


def batch(p: Problem, how: str) -> Found:
    """The second of three entries, as a batch, by vmap or in a scan, with a learned array or without."""
    three = [np.stack([y, x, y]) for x, y in zip(p.qkv, p.other(p.T), strict=True)]
    one = lambda q, k, v: flex_attention(q[None], k[None], v[None], score_mod=p.score_mod(), **p.keywords)
    if how == "batch":
        call = lambda *x: flex_attention(*x, score_mod=p.score_mod(), **p.keywords)
        out, aux = p.jit(call)(*three)
        return found(range(p.T), (out[1:2], aux._replace(lse=aux.lse[1:2])))
    if how == "vmap":
        out, aux = p.jit(jax.vmap(one))(*three)
    else:
        out, aux = jax.jit(lambda *x: jax.lax.map(lambda qkv: one(*qkv), x))(*three)
    return found(range(p.T), (out[1], aux._replace(lse=aux.lse[1])))


def padded(p: Problem) -> Found:
    """In a longer buffer, whose later tokens are others; causal and window masks do not show them."""
    longer = [np.concatenate([x, y])[None] for x, y in zip(p.qkv, p.other(77), strict=True)]
    out, aux = p.jit(lambda *x: flex_attention(*x, score_mod=p.score_mod(), **p.keywords))(*longer)
    return found(range(p.T), (out[:, : p.T], aux._replace(lse=aux.lse[:, : p.T])))


def packed(p: Problem, before: int, after: int) -> Found:
    """As a document between two others, whose offsets are traced."""
    at = np.cumsum([0, before, p.T, after]).astype(np.int32)
    parts = zip(p.other(before), p.qkv, p.other(after), strict=True)
    whole = [np.concatenate(x)[None] for x in parts]

    @p.jit
    def call(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array) -> Any:
        return flex_attention(q, k, v, score_mod=p.score_mod(), origin=Origin(documents=documents), **p.keywords)

    out, aux = call(*whole, at)
    own = slice(before, before + p.T)
    return found(range(p.T), (out[:, own], aux._replace(lse=aux.lse[:, own])))


def learned(p: Problem) -> Found:
    """With gradients of all operands and of the slopes, whose array is traced, and with max_scores."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, slopes: jax.Array) -> Any:
        keywords = p.keywords | {"return_aux": AuxRequest(lse=True, max_scores=True)}
        out, aux = flex_attention(q, k, v, score_mod=p.score_mod(slopes), **keywords)
        return (out.astype(jnp.float32) ** 2).sum() + jnp.tanh(aux.lse).sum(), (out, aux)

    step = p.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (_, result), _ = step(*(x[None] for x in p.qkv), p.slopes)
    return found(range(p.T), result)


def head_shards(p: Problem, count: int) -> Iterator[Found]:
    """Each shard of the heads alone, as inside shard_map; key heads are repeated where they are fewer."""
    q, k, v = p.qkv
    if p.M % count:
        k, v = (np.repeat(x, count // p.M, 1) for x in (k, v))
    of = lambda x, i: x[None, :, i * x.shape[1] // count : (i + 1) * x.shape[1] // count]
    keywords = p.keywords
    sinks = keywords.pop("sinks")

    @p.jit
    def call(head: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> Any:
        origin = Origin(head=head)
        return flex_attention(q, k, v, score_mod=p.score_mod(), origin=origin, sinks=sinks, **keywords)

    n = p.N // count
    shards = [
        call(np.int32(i * n), of(q, i), of(k, i), of(v, i), None if sinks is None else sinks[i * n : (i + 1) * n])
        for i in range(count)
    ]
    out, lse = (
        np.concatenate([np.asarray(x) for x in xs], 2) for xs in zip(*((o, a.lse) for o, a in shards), strict=True)
    )
    yield np.arange(p.T), out[0], lse[0]


def meshed(p: Problem, kind: AxisType, axis: str) -> Found:
    """Batch or heads over the devices of a mesh."""
    devices = jax.devices() if axis == "b" else jax.devices()[: math.gcd(p.M, jax.device_count())]
    n = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("x",), axis_types=(kind,))
    spec = P("x") if axis == "b" else P(None, None, "x")
    fetched = lambda x: jax.tree.map(np.asarray, x)
    many = [np.stack([x, *[y] * (n - 1)]) for x, y in zip(p.qkv, p.other(p.T), strict=True)]
    given = [jax.device_put(x, NamedSharding(mesh, spec)) for x in many]
    call = jax.jit(lambda *x: flex_attention(*x, score_mod=p.score_mod(), **p.keywords))
    if kind == AxisType.Explicit:
        with jax.set_mesh(mesh):
            return found(range(p.T), fetched(call(*given)))
    return found(range(p.T), fetched(call(*given)))


WAYS: dict[str, Callable[[Problem], Any]] = {
    "chunks of 1": lambda p: chunks(p, 1),
    "chunks of 7": lambda p: chunks(p, 7),
    "chunks of 128": lambda p: chunks(p, 128),
    "chunks of 16, a longer buffer": lambda p: chunks(p, 16, 333),
    "pages of 16, one by one": lambda p: pages(p, 16, 1),
    "pages of 64, one by one": lambda p: pages(p, 64, 1),
    "pages of 64, chunks of 100": lambda p: pages(p, 64, 100),
    "a batch": lambda p: batch(p, "batch"),
    "vmap": lambda p: batch(p, "vmap"),
    "a scan": lambda p: batch(p, "scan"),
    "a padded buffer": padded,
    "packed behind 5 tokens": lambda p: packed(p, 5, 40),
    "packed behind 301 tokens": lambda p: packed(p, 301, 1),
    "captured gradients": learned,
    "2 shards of heads": lambda p: head_shards(p, 2),
    "4 shards of heads": lambda p: head_shards(p, 4),
    "batch over a mesh, auto": lambda p: meshed(p, AxisType.Auto, "b"),
    "batch over a mesh, explicit": lambda p: meshed(p, AxisType.Explicit, "b"),
    "heads over a mesh, auto": lambda p: meshed(p, AxisType.Auto, "h"),
    "heads over a mesh, explicit": lambda p: meshed(p, AxisType.Explicit, "h"),
}
CUT = ("chunks", "pages", "a padded buffer")
"""How the names of ways begin that cut the sequence, for which a token must see no later ones."""


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def differences(p: Problem, way: str, whole: Found | None = None) -> int:
    """How many numbers of out and lse the way gives other bits than the full forward pass."""
    _, out, lse = whole or full(p)
    made = WAYS[way](p)
    parts = [made] if isinstance(made, tuple) else list(made)
    count = 0
    for at, o, l in parts:
        assert o.size
        assert not np.isnan(o.astype(np.float32)).any()
        count += int((bits(o) != bits(out[at])).sum())
        count += 0 if p.simulated else int((bits(l) != bits(lse[at])).sum())
    return count


if __name__ == "__main__":  # in a process of its own, with 8 devices
    for way in (w for w in WAYS if "mesh" in w):
        print(way, len(jax.devices()), differences(Problem(T=200, M=4), way))
