"""What the training examples share: text, a small transformer, Adam, a progress line, a saved picture. Not an example itself.

The text is the standard library's own source, read as bytes, so nothing is downloaded.
"""

import math
import pathlib
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q, k, v [B, T, N, D] -> [B, T, N, D]
VOCABULARY = 128  # ASCII


def text(limit: int = 2_000_000) -> np.ndarray:
    """int32 [limit] at most: ASCII sources of the standard library, one after the other."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = [path.read_bytes() for path in sorted(root.glob("*.py"))]
    joined = np.frombuffer(b"\n".join(f for f in found if f.isascii()), np.uint8)
    return joined[:limit].astype(np.int32)


def rows(tokens: np.ndarray, batch: int, length: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Endless [batch, length] windows of the text at random places."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - length, batch)
        yield np.stack([tokens[s : s + length] for s in starts])


def language_model(key: jax.Array, layers: int, width: int, heads: int) -> Params:
    """Parameters of a pre-norm transformer over bytes."""
    keys = iter(jax.random.split(key, 1 + 4 * layers))
    matrix = lambda *shape: jax.random.normal(next(keys), shape) / math.sqrt(shape[0])
    return {
        "embedding": jax.random.normal(next(keys), (VOCABULARY, width)) * 0.02,
        "layers": [
            {
                "qkv": matrix(width, 3 * width),
                "out": matrix(width, width) / math.sqrt(2 * layers),
                "up": matrix(width, 4 * width),
                "down": matrix(4 * width, width) / math.sqrt(2 * layers),
            }
            for _ in range(layers)
        ],
        "heads": jnp.zeros(heads),  # carries the number of heads; has no gradient
    }


def normalised(x: jax.Array) -> jax.Array:
    """x over the root of its mean square along the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(p: Params, x: jax.Array, heads: int, attend: Attend) -> jax.Array:
    """One transformer layer on [B, T, width]."""
    q, k, v = jnp.split((normalised(x) @ p["qkv"]).reshape(*x.shape[:2], 3 * heads, -1), 3, axis=2)
    x = x + attend(q, k, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(normalised(x) @ p["up"]) @ p["down"]


def nats(params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
    """[B, T - 1]: minus the log probability of each token after the first."""
    x = params["embedding"][tokens[:, :-1]]
    for p in params["layers"]:
        x = block(p, x, len(params["heads"]), attend)
    scores = jax.nn.log_softmax(normalised(x) @ params["embedding"].T)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]


def train(
    params: Params, loss: Callable[..., jax.Array], batches: Iterator[Any], steps: int, rate: float = 3e-3
) -> tuple[Params, list[float]]:
    """Adam with warm-up and clipped gradients; prints a line of progress. `loss(params, batch)` is a scalar."""

    @jax.jit
    def step(params: Params, moments: tuple[Params, Params], n: jax.Array, batch: Any) -> tuple[Any, ...]:
        value, slope = jax.value_and_grad(loss)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(slope)))
        slope = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), slope)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], slope)
        square = jax.tree.map(lambda s, g: 0.98 * s + 0.02 * g * g, moments[1], slope)
        size = rate * jnp.minimum(1, n / 20) * jnp.sqrt(1 - 0.98**n) / (1 - 0.9**n)
        params = jax.tree.map(lambda p, m, s: p - size * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
        return params, (mean, square), value

    zeros = jax.tree.map(jnp.zeros_like, params)
    moments, losses, began = (zeros, zeros), [], time.monotonic()
    for n in range(1, steps + 1):
        params, moments, value = step(params, moments, jnp.float32(n), jax.tree.map(jnp.asarray, next(batches)))
        losses.append(float(value))
        progress(n, steps, losses[-1], began)
    return params, losses


def progress(step: int, steps: int, loss: float, began: float) -> None:
    """Rewrites one line on a terminal; elsewhere prints ten lines in all."""
    terminal = sys.stderr.isatty()
    if not terminal and step % max(1, steps // 10) and step != steps:
        return
    left = (time.monotonic() - began) / step * (steps - step)
    bar = "#" * (30 * step // steps)
    line = f"[{bar:.<30}] step {step}/{steps}  loss {loss:.3f}  {left:.0f} s left"
    print(f"\r{line}" if terminal else line, end="\n" if not terminal or step == steps else "", file=sys.stderr)


def save(figure: Any, name: str) -> pathlib.Path:
    """Saves a matplotlib figure in the directory for temporary files, and says where."""
    path = pathlib.Path(tempfile.gettempdir()) / f"{name}.png"
    figure.savefig(path, dpi=90)
    print(f"picture: {path}")
    return path


def curves(series: dict[str, Any], x: str, y: str) -> Any:
    """A figure with one line for each of `series`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, values in series.items():
        axes.plot(values, label=name)
    axes.set(xlabel=x, ylabel=y)
    axes.legend()
    return figure
