"""Trains a small language model on Python's own standard library, documents packed into fixed rows.

    python examples/train_packed_lm.py                 # about two minutes on two CPU cores
    python examples/train_packed_lm.py --steps 2000 --width 256

Bytes are the tokens; byte 0, which no source file contains, starts every document.  Files are packed into
rows of a fixed length: a file that does not fit is cut, and its rest goes on in the next row as a document
of its own.  One file in twenty is kept for the end, to measure the loss on unseen text.  Inside the jitted
step the block mask `causal & document` is computed again from the segment ids of the batch, so the tokens of
a document see that document alone.  Each head of each layer learns a bias by distance, whose gradient comes
through the array that `score_mod` captures.
"""

import argparse
import functools
import math
import pathlib
import sys
import sysconfig
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import masks

VOCABULARY = 256
START = 0
PADDING = -1  # segment id of padding, which belongs to no document
BIAS_UNIT = 10.0  # a useful bias is some nats, weights are some hundredths: this unit makes its learning rate larger
Params = dict[str, Any]


class Batch(NamedTuple):
    """tokens, segments: int32 [B, T]; segments numbers the documents of a row from 0."""

    tokens: np.ndarray
    segments: np.ndarray


# --------------------------------------------------------------------------------------------- corpus


def source_files(limit: int | None = None) -> list[bytes]:
    """The standard library's own sources, installed packages left out, in a fixed order."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    files = (path.read_bytes() for path in paths[:: max(1, len(paths) // limit) if limit else 1])
    return [text for text in files if text and START not in text]


def pack(files: list[bytes], length: int) -> Batch:
    """All files in rows of `length` [R, T]: a row is filled to its end, what does not fit goes on in the next.

    Every piece begins with START and has a segment id of its own in its row; the end of the last row is padding.
    """
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    used = length
    for file in files:
        text, done = np.frombuffer(file, np.uint8), 0
        while done < len(text):
            if length - used < 2:  # no room for START and a byte
                rows.append((np.full(length, START, np.int32), np.full(length, PADDING, np.int32)))
                used = segment = 0
            piece = text[done : done + length - used - 1]
            tokens, segments = rows[-1]
            tokens[used + 1 : used + 1 + len(piece)] = piece
            segments[used : used + 1 + len(piece)] = segment
            used, segment, done = used + 1 + len(piece), segment + 1, done + len(piece)
    return Batch(np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]))


def batches(packed: Batch, batch: int, seed: int) -> Iterator[Batch]:
    """Yields batches of rows for ever; every pass over the rows has a new random order."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(packed.tokens))
        for chosen in order[: len(order) // batch * batch].reshape(-1, batch):
            yield Batch(packed.tokens[chosen], packed.segments[chosen])


def unigram_entropy(files: list[bytes]) -> float:
    """Entropy of the bytes in nats: the loss of a model that knows only how frequent each byte is."""
    counts = np.bincount(np.frombuffer(b"".join(files), np.uint8), minlength=VOCABULARY)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


# ---------------------------------------------------------------------------------------------- model


def init(key: jax.Array, layers: int, width: int, heads: int, reach: int) -> Params:
    """Parameters of a pre-norm transformer; layers are stacked along axis 0.

    distance  float32 [layers, heads, reach]: the learned bias by distance, in units of BIAS_UNIT; the last entry
              is for all larger distances.  It begins as ALiBi, with slopes that fall by a factor of four from head to head.
    """
    keys = iter(jax.random.split(key, 5))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

    nearness = -jnp.exp2(-2.0 * jnp.arange(heads))[:, None] * jnp.arange(reach) / BIAS_UNIT
    return dict(
        embedding=jax.random.normal(next(keys), (VOCABULARY, width)) * 0.02,
        layers=dict(
            qkv=matrix(layers, width, 3 * width),
            out=matrix(layers, width, width) / math.sqrt(2 * layers),
            up=matrix(layers, width, 4 * width),
            down=matrix(layers, 4 * width, width) / math.sqrt(2 * layers),
            norms=jnp.ones((layers, 2, width)),
            distance=jnp.broadcast_to(nearness, (layers, heads, reach)),
        ),
        norm=jnp.ones(width),
    )


def normalised(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def logits(params: Params, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    """float32 [B, T, VOCABULARY] for the token after each."""
    B, T = tokens.shape
    mask_mod = flexjax.and_masks(masks.causal, masks.document(segments))
    block_mask = flexjax.create_block_mask(mask_mod, B, None, T, T)

    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        heads, reach = p["distance"].shape
        bias = BIAS_UNIT * p["distance"]

        def by_distance(score, b, h, q, kv):
            return score + bias[h, jnp.clip(q - kv, 0, reach - 1)]

        q, k, v = jnp.split((normalised(x, p["norms"][0]) @ p["qkv"]).reshape(B, T, 3 * heads, -1), 3, axis=2)
        attended = flexjax.flex_attention(q, k, v, score_mod=by_distance, block_mask=block_mask)
        x = x + attended.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(normalised(x, p["norms"][1]) @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    return normalised(x, params["norm"]) @ params["embedding"].T


def loss(params: Params, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    """Mean nats a byte, over the tokens whose successor is of the same document."""
    scores = jax.nn.log_softmax(logits(params, tokens, segments)[:, :-1])
    nats = -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != PADDING)
    return jnp.sum(nats * counts) / jnp.maximum(jnp.sum(counts), 1)


# ------------------------------------------------------------------------------------------- training


class Adam(NamedTuple):
    """First and second moments, and how many steps were taken."""

    mean: Params
    square: Params
    count: jax.Array


def start(params: Params) -> Adam:
    return Adam(jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.int32(0))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(
    params: Params, adam: Adam, tokens: jax.Array, segments: jax.Array, rate: jax.Array
) -> tuple[Params, Adam, jax.Array]:
    """One Adam step with the gradient clipped to norm 1."""
    value, gradient = jax.value_and_grad(loss)(params, tokens, segments)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradient)
    count = adam.count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, adam.mean, gradient)
    square = jax.tree.map(lambda s, g: 0.98 * s + 0.02 * g * g, adam.square, gradient)
    corrected_rate = rate * jnp.sqrt(1 - 0.98**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, s: p - corrected_rate * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
    return params, Adam(mean, square, count), value


class Progress:
    """A progress bar on stderr with loss, tokens a second and time left; a line every ten seconds if stderr is no terminal."""

    def __init__(self, steps: int, seconds: float):
        self.steps, self.seconds, self.began, self.last_shown = steps, seconds, time.monotonic(), 0.0

    def share(self, step: int) -> float:
        """The share of the run that is done, 0 to 1: the larger of the shares of its steps and of its seconds."""
        return min(1.0, max(step / self.steps, self.elapsed() / self.seconds))

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def show(self, step: int, value: float, tokens: int) -> None:
        terminal, now = sys.stderr.isatty(), self.elapsed()
        share = self.share(step)
        if now - self.last_shown < (0.2 if terminal else 10.0) and share < 1:
            return
        self.last_shown = now
        filled = int(30 * share)
        left = now / max(share, 1e-9) * (1 - share)
        text = f"[{'#' * filled}{'.' * (30 - filled)}] step {step}  loss {value:.3f}  "
        text += f"{tokens / now:,.0f} tokens/s  {left:.0f} s left"
        print(f"\r{text:100}" if terminal else text, end="" if terminal and share < 1 else "\n", file=sys.stderr)


def train(args: argparse.Namespace, packed: Batch) -> tuple[Params, list[float], float]:
    """Parameters, the loss of every step, and tokens a second."""
    params = init(jax.random.key(args.seed), args.layers, args.width, args.heads, args.reach)
    adam, progress, losses = start(params), Progress(args.steps, args.seconds), []
    for step, batch in enumerate(batches(packed, args.batch, args.seed), 1):
        cosine = 0.5 + 0.5 * math.cos(math.pi * progress.share(step - 1))
        rate = args.rate * min(1.0, step / 30) * (0.05 + 0.95 * cosine)
        params, adam, value = train_step(params, adam, *map(jnp.asarray, batch), jnp.float32(rate))
        losses.append(float(value))
        progress.show(step, losses[-1], step * args.batch * args.length)
        if progress.share(step) >= 1:
            break
    return params, losses, len(losses) * args.batch * args.length / progress.elapsed()


# ------------------------------------------------------------------------------------- after training


def leak(params: Params, batch: Batch) -> tuple[float, int]:
    """(largest difference between a document's logits packed and alone, number of documents compared), at most 12 documents."""
    run = jax.jit(logits)
    packed = np.asarray(run(params, *map(jnp.asarray, batch)))
    worst, compared = 0.0, 0
    for row, (tokens, segments) in enumerate(zip(*batch, strict=True)):
        for document in range(segments.max() + 1):
            positions = np.flatnonzero(segments == document)
            alone = Batch(np.zeros_like(batch.tokens), np.full_like(batch.segments, PADDING))
            alone.tokens[0, : len(positions)] = tokens[positions]
            alone.segments[0, : len(positions)] = 0
            got = np.asarray(run(params, *map(jnp.asarray, alone)))[0, : len(positions)]
            worst, compared = max(worst, float(np.abs(got - packed[row, positions]).max())), compared + 1
            if compared == 12:
                return worst, compared
    return worst, compared


def most_packed(packed: Batch, batch: int) -> Batch:
    """The rows with the most documents."""
    best = np.argsort(-packed.segments.max(axis=1), kind="stable")[:batch]
    return Batch(packed.tokens[best], packed.segments[best])


def held_out_loss(params: Params, packed: Batch, batch: int, number: int) -> float:
    """Nats a byte, over the first `number` batches of rows that were not trained on."""
    run = jax.jit(loss)
    some = zip(range(number), batches(packed, batch, seed=0), strict=False)
    return float(np.mean([run(params, *map(jnp.asarray, rows)) for _, rows in some]))


def sample(params: Params, prompt: str, length: int, key: jax.Array, temperature: float = 0.6) -> str:
    """`prompt` continued to `length` bytes, each sampled from the model at this temperature."""
    text = jnp.asarray([START, *prompt.encode()], jnp.int32)
    tokens = jnp.zeros((1, length), jnp.int32).at[0, : len(text)].set(text)
    segments = jnp.zeros((1, length), jnp.int32)

    @jax.jit
    def grow(tokens: jax.Array) -> jax.Array:
        def one(i: int, tokens: jax.Array) -> jax.Array:
            scores = logits(params, tokens, segments)[0, i - 1] / temperature
            return tokens.at[0, i].set(jax.random.categorical(jax.random.fold_in(key, i), scores))

        return jax.lax.fori_loop(len(text), length, one, tokens)

    return bytes(np.asarray(grow(tokens))[0, 1:].astype(np.uint8)).decode("utf-8", "replace")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A byte-level language model of packed documents.")
    parser.add_argument("--steps", type=int, default=100_000, help="stop after so many steps")
    parser.add_argument("--seconds", type=float, default=110.0, help="or after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=2, help="rows a step")
    parser.add_argument("--length", type=int, default=512, help="tokens a row")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--reach", type=int, default=128, help="distances with a bias of their own")
    parser.add_argument("--rate", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument("--sample", type=int, default=240, help="bytes of the sample at the end")
    parser.add_argument("--files", type=int, help="use only about so many files")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    files = source_files(args.files)
    np.random.default_rng(args.seed).shuffle(files)
    sizes, entropy = sorted(map(len, files)), unigram_entropy(files)
    print(f"{len(files)} files of {sizes[0]} to {sizes[-1]:,} bytes; unigram entropy {entropy:.3f} nats a byte")
    cut = max(1, len(files) // 20)
    held_out, packed = pack(files[:cut], args.length), pack(files[cut:], args.length)
    print(
        f"packed into {len(packed.tokens):,} rows of {args.length} tokens, up to {packed.segments.max() + 1} documents each"
    )
    params, losses, speed = train(args, packed)
    last, unseen = float(np.mean(losses[-10:])), held_out_loss(params, held_out, args.batch, 16)
    print(
        f"{len(losses)} steps, {speed:,.0f} tokens/s; loss {losses[0]:.3f} -> {last:.3f}, on unseen files {unseen:.3f}"
    )
    difference, compared = leak(params, most_packed(packed, args.batch))
    print(f"leak check: the logits of {compared} documents alone and packed differ by at most {difference:.1e}")
    text = sample(params, "def ", args.sample, jax.random.key(args.seed + 1))
    print(f"sample:\n{text}")
    return dict(
        losses=losses, final=last, held_out=unseen, entropy=entropy, leak=difference, compared=compared, sample=text,
        params=params,
    )  # fmt: skip


if __name__ == "__main__":
    main()
