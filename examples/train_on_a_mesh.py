"""A language model on packed documents over a mesh of data x context x tensor, beside the same training on one device.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/train_on_a_mesh.py      # two minutes on two cores

The batch is split over the mesh axis "data", the heads and the hidden units over "tensor", and the tokens of each row over "context".
Nothing says so but where the arrays are, and one argument: `context=flexjax.ContextParallel("context", layout)`. Tokens are permuted by a
layout that gives every device the same work under a causal mask. The mask and the learned bias by distance see positions in the row, and
the segment ids stay in the order of the row, so the model is the same function as on one device: the losses agree to rounding.
"""

import math
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import small_training as small
import train_packed_lm as packed_lm
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import masks

HEADS, REACH = 4, 64
WEIGHTS = {
    "qkv": P(None, None, "tensor"),
    "out": P("tensor"),
    "up": P(None, "tensor"),
    "down": P("tensor"),
    "distance": P("tensor"),
}
"""How the weights of a layer are split."""


class Batch(typing.NamedTuple):
    """Rows of packed documents, int32 [B, T]. `segments` is in the order of the rows, the others may be permuted.

    tokens     bytes
    targets    the next byte
    counted    1 where the next byte is of the same document
    segments   number of the document in its row
    """

    tokens: jax.Array
    targets: jax.Array
    counted: jax.Array
    segments: jax.Array


def model(key: jax.Array, layers: int, width: int) -> small.Params:
    """Parameters; qkv [width, 3, HEADS, D] and out [HEADS, D, width] have an axis of heads, along which they are split."""
    keys = iter(jax.random.split(key, 1 + 4 * layers))
    matrix = lambda rows, *shape: jax.random.normal(next(keys), shape) / math.sqrt(rows)
    dim = width // HEADS
    nearness = -jnp.exp2(-2.0 * jnp.arange(HEADS))[:, None] * jnp.arange(REACH)
    return {
        "embedding": 0.02 * matrix(1, packed_lm.VOCABULARY, width),
        "layers": [
            {
                "qkv": matrix(width, width, 3, HEADS, dim),
                "out": matrix(width * 2 * layers, HEADS, dim, width),
                "up": matrix(width, width, 4 * width),
                "down": matrix(4 * width * 2 * layers, 4 * width, width),
                "distance": nearness,
            }
            for _ in range(layers)
        ],
    }


def loss(params: small.Params, batch: Batch, context: flexjax.ContextParallel | None) -> jax.Array:
    """Mean nats a byte, over the tokens whose successor is of the same document."""
    mask_mod = flexjax.and_masks(masks.causal, masks.document(batch.segments))
    x = params["embedding"][batch.tokens]
    for p in params["layers"]:

        def by_distance(score, b, h, q, kv, distance=p["distance"]):
            return score + distance[h, jnp.clip(q - kv, 0, REACH - 1)]

        q, k, v = jnp.moveaxis(jnp.einsum("btw,wcnd->btcnd", small.normalised(x), p["qkv"]), 2, 0)
        attended = flexjax.flex_attention(q, k, v, score_mod=by_distance, mask_mod=mask_mod, context=context)
        x = x + jnp.einsum("btnd,ndw->btw", attended, p["out"])
        x = x + jax.nn.gelu(small.normalised(x) @ p["up"]) @ p["down"]
    scores = jax.nn.log_softmax(small.normalised(x) @ params["embedding"].T)
    nats = -jnp.take_along_axis(scores, batch.targets[..., None], axis=-1)[..., 0]
    return jnp.sum(nats * batch.counted) / jnp.maximum(jnp.sum(batch.counted), 1)


def batches(length: int, batch: int, layout: flexjax.ContextLayout | None) -> Iterator[Batch]:
    """Endless batches; `layout` permutes tokens, targets and counts, None leaves them in order."""
    rows = packed_lm.pack(packed_lm.source_files(200), length + 1)
    permuted = (lambda x: x) if layout is None else lambda x: layout.shard(jnp.asarray(x), axis=1)
    for tokens, segments in packed_lm.batches(rows, batch, seed=0):
        counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != packed_lm.PADDING)
        yield Batch(
            *map(permuted, (tokens[:, :-1], tokens[:, 1:], counted.astype("int32"))), jnp.asarray(segments[:, :-1])
        )


def on_the_mesh(params: small.Params, length: int, batch: int, steps: int) -> tuple[jax.sharding.Mesh, list[float]]:
    """Trains over all devices; returns the mesh and the loss of every step."""
    devices = jax.device_count()
    tensor = 2 if devices % 2 == 0 else 1
    context = 2 if devices % (2 * tensor) == 0 else 1
    mesh = jax.make_mesh(
        (devices // (context * tensor), context, tensor),
        ("data", "context", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    layout = flexjax.context_layout(masks.causal, length, devices=context, block_size=32)
    print(layout)
    how = flexjax.ContextParallel("context", layout)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    split = {**params, "layers": [{n: place(w, WEIGHTS[n]) for n, w in p.items()} for p in params["layers"]]}
    split["embedding"] = place(params["embedding"], P())
    rows, whole = P("data", "context"), P("data")
    spread = (
        Batch(*(place(x, rows) for x in found[:3]), place(found.segments, whole))
        for found in batches(length, batch, layout)
    )
    with jax.set_mesh(mesh):
        return mesh, small.train(split, lambda p, found: loss(p, found, how), spread, steps)[1]


def main(length: int = 512, steps: int = 60, width: int = 64, layers: int = 2, batch: int = 4) -> dict[str, float]:
    params = model(jax.random.key(0), layers, width)
    mesh, losses = on_the_mesh(params, length, batch, steps)
    _, alone = small.train(params, lambda p, found: loss(p, found, None), batches(length, batch, None), steps)
    apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    print(f"mesh {dict(mesh.shape)}: loss {losses[0]:.3f} -> {losses[-1]:.3f}; at most {apart:.1e} from one device")
    small.save(small.curves({"mesh": losses, "one device": alone}, "step", "nats a byte"), "train_on_a_mesh")
    return {"first": losses[0], "last": losses[-1], "apart": apart, "devices": float(jax.device_count())}


if __name__ == "__main__":
    main()
