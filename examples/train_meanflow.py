"""MeanFlow (Geng et al., arXiv:2505.13447): small pictures in one step of a network, from its derivative by time.

python examples/train_meanflow.py             # a minute on two cores; needs matplotlib for the picture

`u(z, r, t)` is the mean velocity between times r and t, from noise at 1 to a picture at 0. Its target holds its own derivative
along the path, so a step takes the gradient of a loss with `stop_gradient` of a `jax.jvp` through flex_attention. Patches see each
other with a learned bias for each relative place. How far the pictures of one step are from new ones is printed before and after.
"""

import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import small_training as small

import flexjax

HEADS, SIDE, PATCH = 2, 8, 2
PLACES = SIDE // PATCH


def pictures(batch: int, seed: int) -> Iterator[np.ndarray]:
    """[batch, SIDE, SIDE] in -1 .. 1: a bright disc on dark ground."""
    rng = np.random.default_rng(seed)
    row, column = np.mgrid[:SIDE, :SIDE] + 0.5
    while True:
        y, x, radius = rng.uniform([2.5, 2.5, 1.5], [SIDE - 2.5, SIDE - 2.5, 2.5], (batch, 3)).T[..., None, None]
        yield np.tanh(2 * (radius - np.hypot(row - y, column - x))).astype(np.float32)


def batches(batch: int, same: float) -> Iterator[dict[str, np.ndarray]]:
    """Pictures, noise and times r <= t; a share `same` has r = t, which is ordinary flow matching."""
    rng = np.random.default_rng(1)
    for picture in pictures(batch, seed=0):
        r, t = np.sort(1 / (1 + np.exp(0.4 - rng.standard_normal((2, batch)))), axis=0)
        r = np.where(rng.random(batch) < same, t, r)
        noise = rng.standard_normal(picture.shape)
        yield {name: np.float32(x) for name, x in dict(picture=picture, noise=noise, r=r, t=t).items()}


def network(key: jax.Array, layers: int, width: int) -> small.Params:
    keys = jax.random.split(key, 4)
    model = small.language_model(keys[0], layers, width, HEADS)
    return {
        "layers": model["layers"],
        "in": jax.random.normal(keys[1], (PATCH**2, width)) / PATCH,
        "places": 0.3 * jax.random.normal(keys[2], (PLACES**2, width)),
        "times": 0.3 * jax.random.normal(keys[3], (16, width)),
        "bias": jnp.zeros((layers, HEADS, 2 * PLACES - 1, 2 * PLACES - 1)),
        "out": jnp.zeros((width, PATCH**2)),
    }


def velocity(params: small.Params, z: jax.Array, r: jax.Array, t: jax.Array) -> jax.Array:
    """u(z, r, t) of pictures z [B, SIDE, SIDE] and times [B]."""
    B = len(z)
    patches = z.reshape(B, PLACES, PATCH, PLACES, PATCH).swapaxes(2, 3).reshape(B, PLACES**2, -1)
    angle = jnp.stack([t, t - r], -1)[..., None] * jnp.asarray([0.5, 1, 2, 4])
    waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).reshape(B, -1)
    x = patches @ params["in"] + params["places"] + (waves @ params["times"])[:, None]
    for p, bias in zip(params["layers"], params["bias"], strict=True):

        def relative(score, b, h, q, kv, bias=bias):
            return score + bias[h, q // PLACES - kv // PLACES + PLACES - 1, q % PLACES - kv % PLACES + PLACES - 1]

        x = small.block(p, x, HEADS, lambda q, k, v, mod=relative: flexjax.flex_attention(q, k, v, score_mod=mod))
    x = (small.normalised(x) @ params["out"]).reshape(B, PLACES, PLACES, PATCH, PATCH)
    return x.swapaxes(2, 3).reshape(z.shape)


def loss(params: small.Params, batch: dict[str, jax.Array]) -> jax.Array:
    r, t = batch["r"], batch["t"]
    z = batch["picture"] + t[:, None, None] * (batch["noise"] - batch["picture"])
    along = batch["noise"] - batch["picture"]
    u, slope = jax.jvp(lambda *at: velocity(params, *at), (z, r, t), (along, jnp.zeros_like(r), jnp.ones_like(t)))
    wrong = u - jax.lax.stop_gradient(along - (t - r)[:, None, None] * slope)
    size = jnp.mean(wrong**2, axis=(1, 2))
    return jnp.mean(size / jax.lax.stop_gradient(size + 0.01) ** 0.5)  # the paper's weights of a step, with p = 0.5


@jax.jit
def one_step(params: small.Params, noise: jax.Array) -> jax.Array:
    """Pictures from noise: the mean velocity between 0 and 1 is all that there is to go."""
    return noise - velocity(params, noise, jnp.zeros(len(noise)), jnp.ones(len(noise)))


def apart(some: np.ndarray, others: np.ndarray) -> float:
    """Energy distance of two sets of pictures: 0 if they have one distribution."""
    far = lambda a, b: np.linalg.norm(a[:, None] - b[None], axis=(2, 3)).mean()
    return float(2 * far(some, others) - far(some, some) - far(others, others))


def main(steps: int = 400, width: int = 48, batch: int = 64, layers: int = 2, samples: int = 256) -> dict[str, float]:
    new, more = next(pictures(samples, seed=2)), next(pictures(samples, seed=3))
    noise = jax.random.normal(jax.random.key(2), new.shape)
    params = network(jax.random.key(0), layers, width)
    before = apart(np.asarray(one_step(params, noise)), new)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flexjax.FallbackWarning)
        params, losses = small.train(params, loss, batches(batch, same=0.5), steps)
    made = np.asarray(one_step(params, noise))
    after = apart(made, new)
    print(
        f"energy distance of one-step pictures to new ones: {before:.3f} before, {after:.3f} after {steps} steps;"
        f" {apart(more, new):.3f} between two sets of new ones"
    )
    save_picture(made[:16], new[:16])
    return {"first": losses[0], "last": float(np.mean(losses[-20:])), "before": before, "after": after}


def save_picture(made: np.ndarray, new: np.ndarray) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    for axes, title, shown in zip(figure.subplots(1, 2), ("one step", "new pictures"), (made, new), strict=True):
        tiles = np.pad(shown, ((0, 0), (1, 1), (1, 1)), constant_values=1).reshape(4, 4, SIDE + 2, SIDE + 2)
        axes.imshow(tiles.swapaxes(1, 2).reshape(4 * (SIDE + 2), -1), cmap="gray", vmin=-1, vmax=1)
        axes.set(title=title)
        axes.axis("off")
    small.save(figure, "train_meanflow")


if __name__ == "__main__":
    main()
