"""Neighbourhood attention on an image: a small model learns to remove noise from a photograph.

python examples/vision_natten.py              # a minute on two cores; needs matplotlib and Pillow, which have the photograph

Every patch sees the 7 x 7 patches around it (Hassani et al., arXiv:2204.07143), with a learned bias for each relative place. The
patches are ordered along a Morton curve, so that neighbours in the image are near in the sequence and blocks of the mask are
skipped.
"""

import jax
import jax.numpy as jnp
import numpy as np
import small_training as small

import flexjax
from flexjax import masks

HEADS = 4


def photograph(side: int) -> np.ndarray:
    """float32 [side, side] in 0 .. 1: grey values of a photograph that ships with matplotlib."""
    from matplotlib import cbook
    from PIL import Image

    with cbook.get_sample_data("grace_hopper.jpg") as file:
        image = Image.open(file).convert("L")
        return np.asarray(image.crop((0, 0, 512, 512)).resize((side, side)), np.float32) / 255


def morton(n: int) -> np.ndarray:
    """int [n * n, 2]: row and column of each place along a Morton curve over n x n, n a power of two."""
    bits = np.arange(n * n)
    spread = lambda x: sum(((x >> (2 * i)) & 1) << i for i in range(16))
    return np.stack([spread(bits >> 1), spread(bits)], -1)


def main(side: int = 128, patch: int = 4, kernel: int = 7, steps: int = 150, width: int = 48) -> dict[str, float]:
    n = side // patch
    order = morton(n)
    clean = photograph(side).reshape(n, patch, n, patch).swapaxes(1, 2)[order[:, 0], order[:, 1]].reshape(1, n * n, -1)
    block_mask = flexjax.create_block_mask(masks.natten_2d_morton((n, n), (kernel, kernel)), None, None, n * n, n * n)
    row, column = jnp.asarray(order.T, jnp.int32)
    reach = kernel - 1  # an edge patch sees neighbours that far

    def denoised(params: small.Params, noisy: jax.Array) -> jax.Array:
        def relative(score, b, h, q, kv):
            return score + params["bias"][h, row[q] - row[kv] + reach, column[q] - column[kv] + reach]

        attend = lambda q, k, v: flexjax.flex_attention(q, k, v, score_mod=relative, block_mask=block_mask)
        x = noisy @ params["in"]
        for p in params["model"]["layers"]:
            x = small.block(p, x, HEADS, attend)
        return noisy + small.normalised(x) @ params["out"]

    def noise() -> object:
        rng = np.random.default_rng(0)
        while True:
            yield (clean + 0.2 * rng.standard_normal(clean.shape)).astype(np.float32)

    loss = lambda params, noisy: jnp.mean((denoised(params, noisy) - clean) ** 2)
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(keys[0], (patch**2, width)) / patch,
        "out": jnp.zeros((width, patch**2)),
        "bias": jnp.zeros((HEADS, 2 * reach + 1, 2 * reach + 1)),
        "model": small.language_model(keys[1], 2, width, HEADS),
    }
    params, losses = small.train(params, loss, noise(), steps)
    print(
        f"squared error {losses[0]:.4f} (the noise) -> {losses[-1]:.4f}; {block_mask.sparsity():.0f} % of the blocks are skipped"
    )

    from matplotlib.figure import Figure

    noisy = next(noise())
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    images = {"photograph": clean, "with noise": noisy, "denoised": np.asarray(jax.jit(denoised)(params, noisy))}
    for axes, (name, patches) in zip(figure.subplots(1, 3), images.items(), strict=True):
        grid = np.zeros((n, n, patch, patch), np.float32)
        grid[order[:, 0], order[:, 1]] = patches.reshape(-1, patch, patch)
        axes.imshow(grid.swapaxes(1, 2).reshape(side, side), cmap="gray", vmin=0, vmax=1)
        axes.set_title(name)
        axes.set_axis_off()
    small.save(figure, "vision_natten")
    return {"first": losses[0], "last": losses[-1], "sparsity": float(block_mask.sparsity())}


if __name__ == "__main__":
    main()
