"""Serves a small language model with continuous batching over a cache in pages: python examples/serve_lm.py

A transformer over bytes with ALiBi is trained for a few seconds. Then requests with prompts of different lengths share a few slots: in
each step a slot either reads a chunk of its prompt or decodes one token, and a slot whose request is done takes the next
one. The step is compiled once. The pool has fewer pages than all slots could use, so that some requests wait for pages. The
greedy tokens are those of decoding without a cache.
"""

import collections
import dataclasses
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from small_training import Params, block, language_model, nats, normalised, rows, text, train

import flexjax
from flexjax import masks, mods, paged

Caches = list[paged.PagedCache]


@dataclasses.dataclass
class Request:
    """A prompt, and the tokens that the model has added so far, until there are `wanted`."""

    prompt: np.ndarray
    wanted: int
    read: int = 0
    added: list[int] = dataclasses.field(default_factory=list)


def attend_causally(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention with ALiBi, [B, T, N, D]: what the served model was trained with."""
    return flexjax.flex_attention(q, k, v, score_mod=mods.alibi(q.shape[2]), mask_mod=masks.causal)


def next_token(params: Params, x: jax.Array) -> jax.Array:
    """The most likely token after each position of x [..., width]."""
    return jnp.argmax(normalised(x) @ params["embedding"].T, axis=-1).astype(jnp.int32)


def step(
    params: Params,
    caches: Caches,
    table: paged.PageTable,
    tokens: jax.Array,
    counts: jax.Array,
    totals: jax.Array,
    ends: jax.Array,
) -> tuple[Caches, paged.PageTable, jax.Array, jax.Array]:
    """One step of all slots: the new caches and table, the next token of each slot, and which slots have their pages.

    tokens [R, T], of which counts [R] exist; totals [R]: tokens that each request will have in the end; ends [R]: which slots are left
    by their requests before the step
    """
    table, granted = paged.allocate(paged.release(table, ends), totals)
    counts, heads = jnp.where(granted, counts, 0), len(params["heads"])
    written: list[tuple[paged.PagedCache, paged.PageTable]] = []
    x = params["embedding"][tokens]
    for p, cache in zip(params["layers"], caches, strict=True):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: paged.PagedCache = cache) -> jax.Array:
            written.append(paged.append(cache, table, k, v, query_seq_lengths=counts))
            return flexjax.paged_attention(q, *written[-1], score_mod=mods.alibi(heads), query_seq_lengths=counts)

        x = block(p, x, heads, attend)
    last = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return [cache for cache, _ in written], written[-1][1], next_token(params, last), granted


def serve(params: Params, requests: list[Request], slots: int, chunk: int, page: int, pool: int) -> dict[str, float]:
    """Answers all requests. Returns tokens per second, how often `step` was traced, and the slots that waited, summed over steps."""
    traces, heads, width = [], len(params["heads"]), params["embedding"].shape[1]
    longest = max(len(r.prompt) + r.wanted for r in requests)
    caches = [paged.empty(pool, page, heads, width // heads, dtype=jnp.float32) for _ in params["layers"]]
    table = paged.table(slots, -(-longest // page), pool, page)

    @functools.partial(jax.jit, donate_argnums=(1,))
    def compiled(*arguments: Any) -> Any:
        traces.append(0)
        return step(*arguments)

    waiting, running, done = collections.deque(requests), [None] * slots, 0
    slot_of: list[Request | None] = list(running)
    ends, began, answered, waited = np.zeros(slots, bool), 0.0, 0, 0
    while done < len(requests):
        tokens, counts, totals = (
            np.zeros((slots, chunk), np.int32),
            np.zeros(slots, np.int32),
            np.zeros(slots, np.int32),
        )
        for s in range(slots):
            if slot_of[s] is None and waiting:
                slot_of[s] = waiting.popleft()
            request = slot_of[s]
            if request is not None:
                part = request.prompt[request.read :][:chunk] if not request.added else request.added[-1:]
                tokens[s, : len(part)], counts[s] = part, len(part)
                totals[s] = len(request.prompt) + request.wanted
        caches, table, found, granted = compiled(params, caches, table, tokens, counts, totals, ends)
        ends, found, granted = np.zeros(slots, bool), np.asarray(found), np.asarray(granted)
        began = began or time.monotonic()  # the first step compiles
        for s, request in enumerate(slot_of):
            if request is None or not granted[s]:
                waited += request is not None
                continue
            request.read = min(request.read + int(counts[s]), len(request.prompt))
            if request.read == len(request.prompt):
                request.added.append(int(found[s]))
                answered += 1
            if len(request.added) == request.wanted:
                slot_of[s], ends[s], done = None, True, done + 1
        rate = answered / max(time.monotonic() - began, 1e-9)
        line = f"answered {done}/{len(requests)} requests, {answered} tokens, {rate:.0f} tokens/s, {sum(granted & (counts > 0))} slots busy"
        if sys.stderr.isatty() or done == len(requests):
            print(f"\r{line}", end="\n" if done == len(requests) else "", file=sys.stderr)
    return {"tokens_per_second": rate, "traces": len(traces), "waited": waited}


def without_cache(params: Params, request: Request) -> list[int]:
    """The greedy tokens of a request, each by a pass over all tokens before it."""
    total = len(request.prompt) + request.wanted
    found = np.zeros((1, -(-total // 64) * 64), np.int32)  # causal: what comes later does not matter
    found[0, : len(request.prompt)] = request.prompt
    for n in range(len(request.prompt), total):
        found[0, n] = _next_of_whole(params, found)[0, n - 1]
    return found[0, len(request.prompt) : total].tolist()


@jax.jit
def _next_of_whole(params: Params, tokens: jax.Array) -> jax.Array:
    """The most likely token after each of `tokens` [B, T], by a pass without a cache."""
    x = params["embedding"][tokens]
    for p in params["layers"]:
        x = block(p, x, len(params["heads"]), attend_causally)
    return next_token(params, x)


def main(
    steps: int = 60,
    requests: int = 8,
    slots: int = 3,
    wanted: int = 24,
    width: int = 64,
    layers: int = 2,
    seed: int = 0,
) -> dict[str, Any]:
    data, heads, page, chunk = text(), 4, 16, 16
    batches = rows(data, batch=8, length=96)
    loss = lambda params, batch: jnp.mean(nats(params, batch, attend_causally))
    params, losses = train(language_model(jax.random.key(seed), layers, width, heads), loss, batches, steps)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(data) - 100, requests)
    asked = [Request(data[s : s + rng.integers(5, 60)], wanted) for s in starts]
    pool = 2 * -(-(60 + wanted) // page)  # two of the longest requests
    result = serve(params, asked, slots, chunk, page, pool)
    for request in asked[:2]:
        print(repr(bytes(request.prompt[-30:].tolist()).decode()), "->", repr(bytes(request.added).decode()))
    same = [request.added == without_cache(params, request) for request in asked]
    print(f"{sum(same)} of {len(same)} answers are those without a cache")
    return {"losses": losses, "same": same, **result}


if __name__ == "__main__":
    main()
