"""Native sparse attention (Yuan et al., arXiv:2502.11089): each query attends to blocks of keys that it chose.

python examples/train_chosen_blocks.py        # ten minutes on two cores; needs matplotlib for the picture

Three branches are added with gates. One attends to the mean key and value of each past block; its weights, summed over the heads of a key
head, choose. One attends to the `keep` chosen blocks, the query's own and the first among them. One attends to a window. A kernel visits
the union of what a tile of queries chose: the script prints how many times the blocks of one query that is, on the trained model.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import small_training as small

import flexjax
from flexjax import masks, mods

HEADS, KEY_HEADS = 8, 2
GROUP = HEADS // KEY_HEADS
ALIBI = mods.alibi(HEADS)


def compressed(q: jax.Array, k: jax.Array, v: jax.Array, block: int, keep: int) -> tuple[jax.Array, jax.Array]:
    """(attention to the means of past blocks [B, T, N, D], the blocks chosen by its weights [B, M, T, keep])."""
    B, T, M, D = k.shape
    mean_k, mean_v = (jnp.repeat(x.reshape(B, T // block, block, M, D).mean(2), GROUP, axis=2) for x in (k, v))
    own, number = jnp.arange(T)[:, None] // block, jnp.arange(T // block)
    scores = jnp.einsum("btnd,bknd->bntk", q, mean_k) / D**0.5
    weights = jax.nn.softmax(jnp.where(number < own, scores, -1e9), axis=-1) * (number < own)
    worth = jax.lax.stop_gradient(weights).reshape(B, M, GROUP, T, -1).sum(2)
    worth = jnp.where((number == own) | (number == 0), jnp.inf, jnp.where(number < own, worth, -1))
    best, chosen = jax.lax.top_k(worth, keep)
    return jnp.einsum("bntk,bknd->btnd", weights, mean_v), jnp.where(best < 0, -1, chosen)


def selected(q: jax.Array, k: jax.Array, v: jax.Array, chosen: jax.Array, block: int) -> jax.Array:
    """Attention to chosen blocks of keys of `block` tokens."""
    block_mask = flexjax.BlockMask.from_chosen_blocks(chosen, block, heads=HEADS, mask_mod=masks.causal)
    return flexjax.flex_attention(q, k, v, score_mod=ALIBI, block_mask=block_mask)


def selected_dense(q: jax.Array, k: jax.Array, v: jax.Array, chosen: jax.Array, block: int) -> jax.Array:
    """`selected` with the whole mask in memory."""
    T = q.shape[1]
    blocks = jnp.any(chosen[..., None] == jnp.arange(T // block), axis=-2)
    on = jnp.repeat(jnp.repeat(blocks, block, axis=-1), GROUP, axis=1) & jnp.tri(T, dtype=bool)
    k, v = (jnp.repeat(x, GROUP, axis=2) for x in (k, v))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / q.shape[-1] ** 0.5
    head, row, column = (jnp.arange(n) for n in (HEADS, T, T))
    scores = ALIBI(scores, 0, head[:, None, None], row[:, None], column)
    return jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(jnp.where(on, scores, -jnp.inf), axis=-1), v)


def attention(
    block: int, keep: int, branch: Callable[..., jax.Array], found: list[jax.Array] | None = None
) -> small.Attend:
    """The three branches. The first features of a query gate them; what was chosen is appended to `found`."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = k[:, :, :KEY_HEADS], v[:, :, :KEY_HEADS]
        means, chosen = compressed(q, k, v, block, keep)
        if found is not None:
            found.append(chosen)
        window = flexjax.flex_attention(q, k, v, score_mod=ALIBI, mask_mod=masks.sliding_window(block))
        parts = (means, branch(q, k, v, chosen, block), window)
        gates = jnp.split(jax.nn.sigmoid(q[..., :3]), 3, axis=-1)
        return sum(gate * part for gate, part in zip(gates, parts, strict=True))

    return attend


def union_factor(chosen: np.ndarray, queries: int, blocks: int) -> float:
    """Blocks that tiles of so many queries visit for each query, over the blocks of a query; chosen is [..., T, n]."""
    on = np.any(chosen[..., None] == np.arange(blocks), axis=-2)
    tiles = on.reshape(*on.shape[:-2], -1, queries, blocks).any(-2)
    return float(tiles.sum(-1).mean() / on.sum(-1).mean())


def main(
    length: int = 2048, block: int = 32, keep: int = 8, steps: int = 160, width: int = 128, batch: int = 2
) -> dict[str, float]:
    tokens = small.text()
    cut = len(tokens) // 10
    unseen = jnp.asarray(next(small.rows(tokens[:cut], batch, length + 1, seed=1)))
    attend = attention(block, keep, selected)
    params = small.language_model(jax.random.key(0), 2, width, HEADS)
    untrained = params
    loss = lambda params, rows: jnp.mean(small.nats(params, rows, attend))
    params, losses = small.train(params, loss, small.rows(tokens[cut:], batch, length + 1), steps)

    def choices(params: small.Params) -> np.ndarray:
        """[layers, B, M, T, keep] of the unseen text."""
        found: list[jax.Array] = []
        small.nats(params, unseen, attention(block, keep, selected, found))
        return jnp.stack(found)

    def score(branch: Callable[..., jax.Array]) -> tuple[float, small.Params]:
        mean = lambda params: jnp.mean(small.nats(params, unseen, attention(block, keep, branch)))
        value, slope = jax.jit(jax.value_and_grad(mean))(params)
        return float(value), slope

    (ours, slope), (dense, dense_slope) = score(selected), score(selected_dense)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(dense_slope))
    off = max(float(jnp.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (slope, dense_slope)), strict=True))
    print(
        f"{ours:.4f} nats a byte on unseen text, {dense:.4f} by a dense mask; gradients differ by {off / largest:.1e}"
    )
    blocks, results = length // block, {"first": losses[0], "last": losses[-1], "unseen": ours}
    trained, random = (np.asarray(jax.jit(choices)(p)) for p in (params, untrained))
    for queries in (8, 16, 32, 64, 128):
        if length % queries == 0:
            results[f"union of {queries}"] = union_factor(trained, queries, blocks)
            print(
                f"tiles of {queries:3} queries visit {results[f'union of {queries}']:.2f} times the blocks of a query"
                f" ({union_factor(random, queries, blocks):.2f} before training)"
            )
    save_picture(trained[-1, 0, 0], blocks)
    return results | {"apart": abs(ours - dense) + off / largest}


def save_picture(chosen: np.ndarray, blocks: int) -> None:
    """Which blocks [T, n] each query chose."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(
        np.any(chosen[..., None] == np.arange(blocks), axis=1), aspect="auto", cmap="Blues", interpolation="none"
    )
    axes.set(xlabel="block of keys", ylabel="query")
    small.save(figure, "train_chosen_blocks")


if __name__ == "__main__":
    main()
