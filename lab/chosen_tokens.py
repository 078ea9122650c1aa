"""Lists of single keys, as of a DSA indexer: what they cost as masks, measured on a CPU, and what copying their keys would bring.

    PYTHONPATH=. python -m lab.chosen_tokens [--tokens 4096] [--keep 256]

Each query keeps the keys with the largest products with an indexer's query, causal. Features drift from token to token (`--drift`), so that
neighbours agree more or less. The script prints how many blocks of 64 keys tiles of queries visit for them, and times: a mask of bits over
the causal blocks, the same on the blocks that hold a kept key, causal attention, and keys gathered for each query in jax.numpy.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import flexjax
from flexjax import BlockMask, masks

BLOCK, HEADS, KEY_HEADS, DIM = 64, 4, 1, 64


def indexer(tokens: int, keep: int, drift: float) -> np.ndarray:
    """int32 [tokens, keep]: the kept keys of each query, -1 where it has fewer."""
    rng = np.random.default_rng(0)
    steps = rng.standard_normal((2, tokens, 16))
    features = np.zeros_like(steps)
    for t in range(tokens):
        features[:, t] = np.sqrt(1 - drift**2) * features[:, max(0, t - 1)] + drift * steps[:, t]
    scores = np.where(np.tri(tokens, dtype=bool), features[0] @ features[1].T, -np.inf)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, :keep]
    return np.where(chosen <= np.arange(tokens)[:, None], chosen, -1).astype(np.int32)


def words_of(chosen: np.ndarray, keys: int) -> np.ndarray:
    """int32 [T, keys / 32], a bit for each query and key."""
    on = np.zeros((len(chosen), keys + 1), bool)
    on[np.arange(len(chosen))[:, None], chosen] = True
    return np.packbits(on[:, :keys], axis=-1, bitorder="little").view(np.int32)


def unions(chosen: np.ndarray, queries: int) -> tuple[float, float]:
    """(blocks of a query, blocks of a tile of so many queries), means."""
    blocks = len(chosen) // BLOCK
    on = np.zeros((len(chosen), blocks + 1), bool)
    on[np.arange(len(chosen))[:, None], np.where(chosen < 0, blocks, chosen // BLOCK)] = True
    on = on[:, :blocks]
    return float(on.sum(-1).mean()), float(on.reshape(-1, queries, blocks).any(1).sum(-1).mean())


def gathered(q: jax.Array, k: jax.Array, v: jax.Array, chosen: jax.Array) -> jax.Array:
    """Attention of each query to copies of its keys, 64 queries at a time."""

    def rows(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        query, index = part
        keys, values = k[0, index, 0], v[0, index, 0]
        scores = jnp.einsum("qhd,qkd->qhk", query, keys) / DIM**0.5
        p = jax.nn.softmax(jnp.where(index[:, None] >= 0, scores, -jnp.inf), axis=-1)
        return jnp.einsum("qhk,qkd->qhd", p, values)

    cut = lambda x: x.reshape(-1, 64, *x.shape[1:])
    return lax.map(rows, (cut(q[0]), cut(chosen))).reshape(q.shape)


def milliseconds(function: Callable[..., jax.Array], *x: jax.Array) -> float:
    run = jax.jit(function)
    run(*x).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run(*x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main(tokens: int, keep: int, drift: float) -> dict[str, float]:
    kept = indexer(tokens, keep, drift)
    print(f"{tokens} tokens, {keep} kept, drift {drift}")
    for queries in (8, 32, 128):
        own, tile = unions(kept, queries)
        print(f"  {own:.1f} blocks of {BLOCK} hold the keys of a query, {tile:.1f} those of {queries} queries")
    rng = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, tokens, n, DIM)), jnp.float32) for n in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    words, chosen = jnp.asarray(words_of(kept, tokens)), jnp.asarray(kept)
    bit = lambda b, h, i, j: (words[i, j // 32] >> j % 32) & 1 == 1
    in_blocks = jnp.where(chosen < 0, -1, chosen // BLOCK)[None, None]
    calls = {
        "mask of bits": lambda q, k, v: flexjax.flex_attention(q, k, v, mask_mod=flexjax.and_masks(masks.causal, bit)),
        "mask of bits on blocks": lambda q, k, v: flexjax.flex_attention(
            q, k, v, block_mask=BlockMask.from_chosen_blocks(in_blocks, BLOCK, mask_mod=bit)
        ),
        "causal": lambda q, k, v: flexjax.flex_attention(q, k, v, mask_mod=masks.causal),
        "gathered": lambda q, k, v: gathered(q, k, v, chosen),
    }
    want = calls["gathered"](q, k, v)
    for name in ("mask of bits", "mask of bits on blocks"):
        np.testing.assert_allclose(calls[name](q, k, v), want, atol=1e-5)
    found = {name: milliseconds(call, q, k, v) for name, call in calls.items()}
    for name, ms in found.items():
        print(f"  {name}: {ms:.0f} ms")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--keep", type=int, default=256)
    parser.add_argument("--drift", type=float, default=0.2)
    given = parser.parse_args()
    main(given.tokens, given.keep, given.drift)
