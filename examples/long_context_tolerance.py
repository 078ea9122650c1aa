"""A language model with ALiBi reads a long text, and skips the blocks that provably hold at most 2^-24 of each row.

python examples/long_context_tolerance.py              # a minute on two cores; needs matplotlib for the picture
python examples/long_context_tolerance.py 16384        # so many tokens

It is trained on short pieces of text; then the loss of a long piece and its gradient are taken with `tolerance=` and without: the same
loss, less time. Queries and keys are normalised, so no score is above the root of the head dim: which blocks that bound leaves is drawn
by head. A call visits no others, and may visit fewer by the norms of its keys. Steep slopes visit a few blocks, the flattest all.
"""

import math
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import small_training as small

import flexjax
from flexjax import masks, mods

HEADS, TOLERANCE = 8, 2.0**-24
ALIBI = mods.alibi(HEADS)


def attention(tolerance: float | None) -> small.Attend:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k = small.normalised(q), small.normalised(k)
        return flexjax.flex_attention(q, k, v, score_mod=ALIBI, mask_mod=masks.causal, tolerance=tolerance)

    return attend


def visited(length: int, head_dim: int) -> np.ndarray:
    """int [HEADS, query blocks, key blocks]: 0 hidden by the mask, 1 provably small, 2 visited by both passes."""
    causal = flexjax.create_block_mask(masks.causal, None, HEADS, length, length)
    bound = 1.001 * math.sqrt(head_dim)  # normalised rows are at most sqrt(head_dim) long, to rounding
    kept = flexjax.create_block_mask(
        masks.causal, None, HEADS, length, length, score_mod=ALIBI, score_bound=bound, tolerance=TOLERANCE
    )
    dense = (np.asarray(mask.to_dense())[0].astype(int) for mask in (causal, kept))
    return sum(np.broadcast_to(x, (HEADS, *x.shape[1:])) for x in dense)


def least_seconds(runs: dict[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Of each of `runs`, in turns."""
    least = dict.fromkeys(runs, math.inf)
    for _ in range(times):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            least[name] = min(least[name], time.perf_counter() - began)
    return least


def main(length: int = 4096, short: int = 256, steps: int = 100, width: int = 128, times: int = 3) -> dict[str, float]:
    tokens = small.text()
    loss = lambda params, rows, tolerance=None: jnp.mean(small.nats(params, rows, attention(tolerance)))
    batches = small.rows(tokens[length + 1 :], 4, short + 1)
    params, losses = small.train(small.language_model(jax.random.key(0), 2, width, HEADS), loss, batches, steps)

    unseen, both = jnp.asarray(tokens[None, : length + 1]), jax.jit(jax.value_and_grad(loss), static_argnums=2)
    (whole, slope), (ours, our_slope) = both(params, unseen, None), both(params, unseen, TOLERANCE)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(slope))
    off = max(float(jnp.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (slope, our_slope)), strict=True))
    print(
        f"{length} tokens: {whole:.6f} nats a byte, {ours:.6f} with tolerance=2^-24;"
        f" gradients differ by {off / largest:.1e} of the largest"
    )
    seconds = least_seconds(
        {"whole": lambda: both(params, unseen, None), "ours": lambda: both(params, unseen, TOLERANCE)}, times
    )
    blocks = visited(length, width // HEADS)
    share = np.sum(blocks == 2, (1, 2)) / np.sum(blocks > 0, (1, 2))
    print(
        f"loss and gradient in {seconds['whole']:.2f} s, {seconds['ours']:.2f} s with it;"
        f" at most {share.mean():.0%} of the causal blocks are visited, by head {', '.join(f'{x:.0%}' for x in share)}"
    )
    save_picture(blocks)
    return {
        "first": losses[0], "last": losses[-1], "loss": float(whole), "apart": abs(float(whole - ours)),
        "gradients": off / largest, "share": float(share.mean()), "faster": seconds["whole"] / seconds["ours"],
    }  # fmt: skip


def save_picture(blocks: np.ndarray) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    for head, axes in enumerate(figure.subplots(2, HEADS // 2).ravel()):
        axes.imshow(blocks[head], cmap="Blues", vmin=0, vmax=2, interpolation="none")
        axes.set(title=f"slope 1/{2 ** (head + 1)}", xticks=[], yticks=[])
    figure.supxlabel("block of keys")
    figure.supylabel("block of queries")
    small.save(figure, "long_context_tolerance")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
