"""A sparse mixture-of-experts language model over a mesh of devices, trained with an Adafactor-like optimiser.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/moe_on_a_mesh.py      # two minutes on two cores

The batch is split over the mesh axis "data". Attention runs on each device's rows: flexjax has nothing to communicate. Each token goes to the two
experts of the largest router scores (Shazeer et al., arXiv:1701.06538); tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies each group
with the weights of its expert, so that no capacity is wasted and none overflows. The optimiser keeps the squares of gradients as row and column
means (Shazeer and Stern, "Adafactor", arXiv:1804.04235).
"""

import math
import time

import jax
import jax.numpy as jnp
import small_training as small
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import masks, mods

HEADS = 4
CHOSEN = 2  # experts of each token


def experts(p: small.Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[n, width] -> what the chosen experts make of each token, [n, width], and the loss that balances the experts.

    p: router [width, X], up [X, width, 2 width], down [X, 2 width, width].
    """
    count = p["router"].shape[1]
    probabilities = jax.nn.softmax(x @ p["router"])
    weight, chosen = jax.lax.top_k(probabilities, CHOSEN)  # [n, CHOSEN]
    order = jnp.argsort(chosen.ravel(), stable=True)  # pairs of token and choice, sorted by expert
    sizes = jnp.bincount(chosen.ravel(), length=count)
    token = order // CHOSEN
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x[token], p["up"], sizes))
    made = jax.lax.ragged_dot(hidden, p["down"], sizes) * weight.ravel()[order][:, None]
    balance = count * jnp.sum(sizes / len(order) * probabilities.mean(0))  # 1 where the load is even
    return jnp.zeros_like(x).at[token].add(made), balance


def loss(params: small.Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mean nats a byte plus balance, mean nats a byte) of rows [B, T + 1]."""
    x = params["embedding"][tokens[:, :-1]]
    B, T, width = x.shape
    balance = 0.0
    for p in params["layers"]:
        qkv = (small.normalised(x) @ p["qkv"]).reshape(B, T, 3 * HEADS, -1)
        q, k, v = jnp.split(qkv, 3, axis=2)
        attended = flexjax.flex_attention(q, k, v, score_mod=mods.alibi(HEADS), mask_mod=masks.causal)
        x = x + attended.reshape(x.shape) @ p["out"]
        made, uneven = experts(p, small.normalised(x).reshape(B * T, width))
        x, balance = x + made.reshape(x.shape), balance + uneven
    scores = jax.nn.log_softmax(small.normalised(x) @ params["embedding"].T)
    nats = -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))
    return nats + 0.01 * balance / len(params["layers"]), nats


def model(key: jax.Array, layers: int, width: int, count: int) -> small.Params:
    """Random parameters of a transformer over bytes with `count` experts in each layer."""
    keys = iter(jax.random.split(key, 1 + 5 * layers))
    matrix = lambda *shape: jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])
    return {
        "embedding": 0.02 * jax.random.normal(next(keys), (small.VOCABULARY, width)),
        "layers": [
            {
                "qkv": matrix(width, 3 * width),
                "out": matrix(width, width) / math.sqrt(2 * layers),
                "router": 0.1 * matrix(width, count),
                "up": matrix(count, width, 2 * width),
                "down": matrix(count, 2 * width, width) / math.sqrt(2 * layers),
            }
            for _ in range(layers)
        ],
    }


def factored(p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zero means over the last and over the second to last axis of the squared gradient of p."""
    return jnp.zeros(p.shape[:-1]), jnp.zeros((*p.shape[:-2], p.shape[-1]))


def adafactor(
    p: jax.Array, slope: jax.Array, state: tuple[jax.Array, jax.Array], n: jax.Array, rate: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One step: the square of the gradient is estimated as row mean x column mean / mean."""
    decay = 1 - n**-0.8
    square = slope**2 + 1e-30
    row = decay * state[0] + (1 - decay) * square.mean(-1)
    column = decay * state[1] + (1 - decay) * square.mean(-2)
    estimate = row[..., :, None] * column[..., None, :] / row.mean(-1)[..., None, None]
    update = slope * jax.lax.rsqrt(estimate)
    update = update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(update**2)))
    size = rate * jnp.minimum(1.0, n / 20) * jnp.maximum(1e-3, jnp.sqrt(jnp.mean(p**2)))
    return p - size * update, (row, column)


def main(
    length: int = 256, steps: int = 120, width: int = 64, layers: int = 2, count: int = 8, rate: float = 0.03
) -> dict[str, float]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    batch = 2 * jax.device_count()
    params = model(jax.random.key(0), layers, width, count)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P(), P("data")), out_specs=(P(), P(), P()))
    def step(params: small.Params, state: object, n: jax.Array, tokens: jax.Array) -> tuple[object, object, jax.Array]:
        # the parameters are the same on every device, so their gradient is summed over "data" by jax
        mean_loss = lambda p: jax.tree.map(lambda x: jax.lax.pmean(x, "data"), loss(p, tokens))
        (_, nats), slope = jax.value_and_grad(mean_loss, has_aux=True)(params)
        leaves, tree = jax.tree.flatten(params)
        moved = [
            adafactor(p, g, s, n, rate)
            for p, g, s in zip(leaves, jax.tree.leaves(slope), tree.flatten_up_to(state), strict=True)
        ]
        return tree.unflatten([p for p, _ in moved]), tree.unflatten([s for _, s in moved]), nats

    state = jax.tree.map(factored, params)
    by_row = NamedSharding(mesh, P("data"))
    batches, losses, began = small.rows(small.text(), batch, length + 1), [], time.monotonic()
    for n in range(1, steps + 1):
        params, state, nats = step(params, state, jnp.float32(n), jax.device_put(next(batches), by_row))
        losses.append(float(nats))
        small.progress(n, steps, losses[-1], began)
    print(f"{jax.device_count()} devices, {count} experts: loss {losses[0]:.2f} -> {losses[-1]:.2f} nats a byte")
    small.save(small.curves({"loss": losses}, "step", "nats a byte"), "moe_on_a_mesh")
    return {"first": losses[0], "last": losses[-1], "devices": float(jax.device_count())}


if __name__ == "__main__":
    main()
