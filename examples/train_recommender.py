"""A recommender like HSTU (Zhai et al., arXiv:2402.17152) on generated histories, beside one that cannot see time.

python examples/train_recommender.py          # a minute on two cores; needs matplotlib for the picture

A row is a user's favourite kind of item, the items that the user chose, in order of time, and candidates, of which each sees itself and
what comes before all of them. A candidate is liked where items of its kind were chosen lately. Gaps between choices are seconds to
hours, so a place in the row says little about an age. Weights are SiLU of score plus a learned bias for each bucket of time.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import small_training as small

import flexjax
from flexjax import weights

HEADS, KINDS, BUCKETS = 2, 4, 20
FADES = 3600.0  # seconds after which a choice counts 1 / e of what it did


def histories(batch: int, events: int, candidates: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Rows of 1 + events + candidates: kind of item, seconds; and whether each candidate is liked."""
    rng = np.random.default_rng(seed)
    while True:
        gaps = 10 ** rng.uniform(0, 4, (batch, events))
        age = np.cumsum(gaps[:, ::-1], axis=1)[:, ::-1]  # when candidates are shown
        kind = rng.integers(0, KINDS, (batch, 1 + events + candidates))
        shown = kind[:, 1 + events :]
        interest = np.einsum("be,bec->bc", np.exp(-age / FADES), kind[:, 1 : 1 + events, None] == shown[:, None])
        interest += 0.5 * (shown == kind[:, :1])
        likes = rng.random(shown.shape) < 1 / (1 + np.exp(4 - 4 * interest))
        seconds = np.concatenate([-age[:, :1], -age, np.zeros_like(shown)], axis=1).astype(np.float32)
        yield {"kind": kind.astype(np.int32), "seconds": seconds, "liked": likes.astype(np.int32)}


def recommender(key: jax.Array, layers: int, width: int) -> small.Params:
    model = small.language_model(key, layers, width, HEADS)
    rows = 0.3 * jax.random.normal(jax.random.key(1), (KINDS + 3, width))  # kinds; favourite, chosen, candidate
    return {
        "layers": model["layers"],
        "rows": rows,
        "table": jnp.zeros((layers, HEADS, BUCKETS)),
        "end": jnp.zeros(width),
    }


def bucket(distance: jax.Array) -> jax.Array:
    return jnp.clip(jnp.log2(1 + jnp.abs(distance)), 0, BUCKETS - 1).astype(jnp.int32)


def logits(params: small.Params, batch: dict[str, jax.Array], events: int, sees_time: bool) -> jax.Array:
    """Of each candidate being liked, [B, candidates]."""
    kind, start = batch["kind"], 1 + events
    place = jnp.arange(kind.shape[1])
    seconds = batch["seconds"] if sees_time else jnp.broadcast_to(place.astype(jnp.float32), kind.shape)
    role = jnp.where(place == 0, 0, jnp.where(place < start, 1, 2))

    def visible(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((kv_idx < start) | (q_idx == kv_idx))

    x = params["rows"][kind] + params["rows"][KINDS + role]
    for p, table in zip(params["layers"], params["table"], strict=True):

        def by_age(score, b, h, q_idx, kv_idx, table=table):
            return score + table[h, bucket(seconds[b, q_idx] - seconds[b, kv_idx])]

        attend = lambda q, k, v, by_age=by_age: flexjax.flex_attention(
            q, k, v, score_mod=by_age, mask_mod=visible, weights=weights.silu(8.0)
        )
        x = small.block(p, x, HEADS, attend)
    return small.normalised(x[:, start:]) @ params["end"]


def auc(score: np.ndarray, label: np.ndarray) -> float:
    """Share of pairs of a liked and a disliked candidate that are in order."""
    ranks = np.argsort(np.argsort(score.ravel())) + 1
    on = label.ravel() == 1
    return float((ranks[on].sum() - on.sum() * (on.sum() + 1) / 2) / (on.sum() * (~on).sum()))


def main(
    events: int = 31, candidates: int = 16, steps: int = 600, width: int = 32, batch: int = 32, layers: int = 1
) -> dict[str, float]:
    unseen = next(histories(256, events, candidates, seed=1))
    results = {}
    for name, sees_time in {"place": False, "time": True}.items():

        def loss(params: small.Params, rows: dict[str, jax.Array], sees_time: bool = sees_time) -> jax.Array:
            score, label = logits(params, rows, events, sees_time), rows["liked"]
            return jnp.mean(jax.nn.softplus(score) - label * score)

        params = recommender(jax.random.key(0), layers, width)
        params, losses = small.train(params, loss, histories(batch, events, candidates, seed=0), steps)
        score = jax.jit(logits, static_argnums=(2, 3))(params, unseen, events, sees_time)
        results[name] = auc(np.asarray(score), unseen["liked"])
        results |= {"first": losses[0], "last": float(np.mean(losses[-20:]))}
        print(f"a bias by {name}: AUC {results[name]:.3f} on unseen users, loss {results['last']:.3f}")
    table = np.asarray(params["table"])
    curves = {f"layer {i}, head {h}": table[i, h] for i in range(layers) for h in range(HEADS)}
    small.save(small.curves(curves, "age, log2 of seconds", "learned bias"), "train_recommender")
    return results | {"learned": float(np.abs(table).max())}


if __name__ == "__main__":
    main()
