"""Scores a policy's own samples with the bits that it sampled them with: python examples/same_bits.py

A tiny policy answers requests from a cache in pages, one token at a time. The training step scores all answers at once, packed into one row
of documents, and takes a policy gradient. With KernelOptions(invariant=True) both see the same log-probabilities: the difference is exactly 0.0,
and the importance weights of the answers are exactly 1.

Attention alone is not enough: jax promises no bits of a dense layer that do not follow the number of its rows. Here everything but attention
runs on ROWS tokens at a time, padded, between optimization barriers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexjax import KernelOptions, Origin, flex_attention, masks, mods, paged, paged_attention

ROWS = 16
HEADS, KEY_HEADS, DIM, TOKENS = 4, 2, 16, 64
PAGE = 16
Params = dict[str, Any]


def policy(key: jax.Array, layers: int) -> Params:
    width = HEADS * DIM
    sizes = {"q": (width, width), "kv": (width, 2 * KEY_HEADS * DIM), "out": (width, width), "up": (width, 4 * width)}
    sizes |= {"down": (4 * width, width)}
    keys = iter(jax.random.split(key, 1 + layers * len(sizes)))
    made = lambda shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[0])
    return {
        "embedding": 3 * made((TOKENS, width)),
        "layers": [{name: made(shape) for name, shape in sizes.items()} for _ in range(layers)],
    }


def by_rows(function: Callable[..., Any], params: Any, *x: jax.Array) -> Any:
    """function(params, *x) of tokens [n, ..], ROWS of them at a time: one shape for all numbers of tokens."""
    n = x[0].shape[0]
    parts = [jnp.pad(a, [(0, -n % ROWS)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, ROWS, *a.shape[1:]) for a in x]

    @jax.checkpoint  # so that a training step computes the same forward program, and keeps nothing of it
    def part(given: Any) -> Any:
        fenced, given = jax.lax.optimization_barrier((params, given))
        return jax.lax.optimization_barrier(function(fenced, *given))

    found = jax.lax.map(part, parts)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:n], found)


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def projected(p: Params, x: jax.Array) -> tuple[jax.Array, ...]:
    y = normalised(x)
    key, value = jnp.split((y @ p["kv"]).reshape(-1, 2 * KEY_HEADS, DIM), 2, axis=1)
    return (y @ p["q"]).reshape(-1, HEADS, DIM), key, value


def mixed(p: Params, x: jax.Array, attended: jax.Array) -> jax.Array:
    x = x + attended.reshape(-1, HEADS * DIM) @ p["out"]
    return x + jax.nn.silu(normalised(x) @ p["up"]) @ p["down"]


def log_probabilities(params: Params, tokens: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
    """Of each next token, [n, TOKENS], after tokens [n]; attend(layer, q, k, v) of [n, heads, DIM]."""
    x = by_rows(lambda p, t: p[t], params["embedding"], tokens)
    for number, p in enumerate(params["layers"]):
        x = by_rows(mixed, p, x, attend(number, *by_rows(projected, p, x)))
    return by_rows(lambda e, x: jax.nn.log_softmax(normalised(x) @ e.T), params["embedding"], x)


def sample(
    params: Params, key: jax.Array, prompts: np.ndarray, steps: int, options: KernelOptions
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [R, steps], their log-probabilities) that follow the first tokens `prompts` [R], from pages."""
    requests, layers = len(prompts), len(params["layers"])
    pages = -(-steps // PAGE)
    caches = [paged.empty(requests * pages, PAGE, KEY_HEADS, DIM, dtype=jnp.float32) for _ in range(layers)]
    table, _ = paged.allocate(paged.table(requests, pages, requests * pages, PAGE), jnp.full(requests, steps))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(caches: Any, table: Any, tokens: jax.Array, key: jax.Array) -> Any:
        written = list(caches)
        tables = [table] * layers

        def attend(number: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            written[number], tables[number] = paged.append(written[number], table, k[:, None], v[:, None])
            given = {"score_mod": mods.alibi(HEADS), "kernel_options": options}
            return paged_attention(q[:, None], written[number], tables[number], **given)[:, 0]

        chances = log_probabilities(params, tokens, attend)
        drawn = jax.random.categorical(key, chances)
        return written, tables[-1], drawn, jnp.take_along_axis(chances, drawn[:, None], 1)[:, 0]

    tokens, found = jnp.asarray(prompts), []
    for each in jax.random.split(key, steps):
        caches, table, tokens, chance = step(caches, table, tokens, each)
        found.append((np.asarray(tokens), np.asarray(chance)))
    drawn, chances = (np.stack(x, 1) for x in zip(*found, strict=True))
    return drawn, chances


@functools.partial(jax.jit, static_argnames="options")
def train(
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    offsets: jax.Array,
    rewards: jax.Array,
    options: KernelOptions,
) -> Any:
    """(new params, log-probabilities of `targets`) of packed documents, by a step of policy gradient."""

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        def attend(number: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            given = {"score_mod": mods.alibi(HEADS), "mask_mod": masks.causal, "kernel_options": options}
            return flex_attention(q[None], k[None], v[None], origin=Origin(documents=offsets), **given)[0]

        chances = jnp.take_along_axis(log_probabilities(params, tokens, attend), targets[:, None], 1)[:, 0]
        return -jnp.mean(rewards * chances), chances

    (_, chances), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), chances


def main(requests: int = 5, steps: int = 220, layers: int = 2, invariant: bool = True) -> dict[str, float]:
    """Returns the tokens, the largest difference of their log-probabilities, and how far the training step moved."""
    options = KernelOptions(invariant=invariant)
    params = policy(jax.random.key(0), layers)
    prompts = np.arange(requests, dtype=np.int32)
    drawn, chances = sample(params, jax.random.key(1), prompts, steps, options)
    # answers of different lengths, one after another in a row: each token follows the one before it
    lengths = steps - 7 * np.arange(requests)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    cut = lambda x: np.concatenate([row[:n] for row, n in zip(x, lengths, strict=True)])
    targets, sampled = cut(drawn), cut(chances)
    tokens = cut(np.concatenate([prompts[:, None], drawn[:, :-1]], 1))
    moved, scored = train(params, tokens, targets, offsets, (targets % 2).astype(np.float32), options)
    change = max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (params, moved)), strict=True))
    difference = float(np.abs(np.asarray(scored) - sampled).max())
    print(f"{len(targets)} tokens, largest difference of log-probabilities {difference}, invariant={invariant}")
    return {"tokens": len(targets), "difference": difference, "change": change}


if __name__ == "__main__":
    main()
    main(invariant=False)
