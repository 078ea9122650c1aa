"""Rows of the forward kernel for Hopper in simulation: the arguments of `on_hopper.forward_problem`."""

import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax import masks
from tests.arrays import array
from tests.cases.on_hopper import causal

RNG = np.random.default_rng(7)
TABLE = array(RNG.normal(size=(4, 640)), jnp.float32)
SLOPES = array([0.5, 0.03], jnp.float32)
PAIR = array(RNG.normal(size=(2, 256, 256)), jnp.bfloat16)
ODD = array(RNG.normal(size=(2, 200, 240)), jnp.bfloat16)
WIDE = array(RNG.normal(size=(2, 2, 256, 128)), jnp.float32)
SEGMENTS = array(np.sort(RNG.integers(0, 4, (2, 256)), axis=1), jnp.int32)
FLAGS = array(RNG.normal(size=(256, 256)) > 0)
FACTORS = array([0.7, 0.3], jnp.float32)


def _large_biases() -> np.ndarray:
    """[queries, keys], float32: rows of 16 kinds, beside one another in each tile."""
    rng, keys, lowest = np.random.default_rng(8), np.arange(256), float(np.finfo(np.float32).min)
    late, noise = keys >= 128, rng.normal(size=(256, 256))
    rows = np.zeros((256, 256))
    kinds: list[typing.Any] = [
        0.0, -1e10, np.where(late, 0.0, -1e10), np.where(late, -1e10, 0.0), lowest, np.where(late, 0.0, lowest),
        np.where(late, -np.inf, noise), -np.inf, 2.0**16 + noise, -(2.0**16) - noise, 1e6 * (1 + (keys == 5)), -1e6 + 4 * noise,
        np.where(keys < 9, 1.5e8, 1.5e8 - 16), keys * 6e5, -1.6e8 + keys * 6e5, np.where(late, 2.0**27 + 16, 2.0**27),
    ]  # fmt: skip
    for n, kind in enumerate(kinds):
        rows[n::16] = np.broadcast_to(kind, (256, 256))[n::16]
    return rows.astype(np.float32)


LARGE = array(_large_biases())

FORWARD: dict[str, dict[str, typing.Any]] = {
    "full": {},
    "causal, two batches, grouped heads": {"mask": causal, "batch": 2, "heads": 4, "kv_heads": 2},
    "neighbourhood on a canvas": {"mask": masks.natten_2d((14, 16), (5, 4)), "q_len": 224, "kv_len": 224},
    "mask without lists": {"mask": causal, "block": None},
    "odd lengths and dims": {"mask": causal, "q_len": 200, "kv_len": 237, "dim": 40, "value_dim": 24},
    "one query": {"q_len": 1, "kv_len": 130},
    "wide head": {"dim": 256, "value_dim": 64, "heads": 1, "kv_len": 128},
    "columns of two CTAs": {"dim": 288, "value_dim": 272, "heads": 1, "q_len": 70, "kv_len": 140, "mask": causal},
    "columns of two CTAs, values of one part each, float16, sinks, largest scores": {
        "dim": 264, "value_dim": 40, "q_len": 130, "kv_len": 200, "layout": "BNTH", "dtype": "float16", "sinks": True,
        "max_scores": True, "score": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    },
    "columns of two CTAs, wide values, pair bias, dropout": {
        "dim": 48, "value_dim": 320, "q_len": 128, "kv_len": 256, "score": lambda s, b, h, q, k: s + PAIR[h, q, k],
        "mask": lambda b, h, q, k: (q >= k) & (q != 3),
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
    },
    "BNTH, float16, sinks, largest scores": {
        "mask": causal, "layout": "BNTH", "dtype": "float16", "sinks": True, "max_scores": True,
    },
    "relative table": {"score": lambda s, b, h, q, k: s + TABLE[h, q - k + 300], "mask": causal},
    "relative table, odd": {"score": lambda s, b, h, q, k: s + TABLE[h, q - k + 300], "q_len": 130, "kv_len": 70},
    "pair bias": {"score": lambda s, b, h, q, k: s + PAIR[h, q, k]},
    "pair bias, odd": {
        "score": lambda s, b, h, q, k: s * 2 + PAIR[h, q, k], "q_len": 200, "kv_len": 237, "mask": causal,
    },
    "pair bias that is no whole pieces": {
        "score": lambda s, b, h, q, k: s + ODD[h, q, k], "q_len": 200, "kv_len": 237, "mask": causal,
    },
    "pair bias of each batch, float32": {
        "score": lambda s, b, h, q, k: s + WIDE[b, h // 2, q, k], "batch": 2, "heads": 4, "kv_heads": 2, "kv_len": 128,
    },
    "two pair biases, blocks of 64": {
        "score": lambda s, b, h, q, k: s + PAIR[h, q, k].astype(jnp.float32) * PAIR[1 - h, q, k], "block": (64, 64), "mask": causal,
    },
    "large scores beside moderate ones": {"score": lambda s, b, h, q, k: s + LARGE[q, k]},
    "large products, odd, float16": {
        "score": lambda s, b, h, q, k: (s + LARGE[q, k]) * FACTORS[h], "q_len": 200, "kv_len": 237, "dtype": "float16",
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
    },
    "large scores, sinks, largest scores": {
        "score": lambda s, b, h, q, k: s + LARGE[q, k], "mask": causal, "sinks": True, "max_scores": True,
    },
    "soft cap": {"score": lambda s, b, h, q, k: 5.0 * jnp.tanh(s / 5.0)},
    "soft cap that needs no maximum": {
        "score": lambda s, b, h, q, k: 50.0 * jnp.tanh(s / 2.0), "mask": lambda b, h, q, k: (q >= k) & (k > 100), "sinks": True,
    },
    "bounded away from 0": {"score": lambda s, b, h, q, k: 30.0 - 5.0 * jax.nn.sigmoid(s) - h, "mask": causal},
    "far from the sinks": {
        "score": lambda s, b, h, q, k: 120.0 + 5.0 * jnp.tanh(s), "mask": lambda b, h, q, k: (q >= k) & (k > 20), "sinks": True,
    },
    "bounded, dropout, odd": {
        "score": lambda s, b, h, q, k: 5.0 * jnp.tanh(s), "q_len": 130, "kv_len": 200,
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
    },
    "slope": {"score": lambda s, b, h, q, k: s + SLOPES[h] * (k - q), "mask": causal, "q_len": 384, "kv_len": 384},
    "steep slope, odd": {
        "score": lambda s, b, h, q, k: s - 300.0 * SLOPES[h] * (k - q), "mask": causal, "q_len": 300, "kv_len": 333,
    },
    "slope, sinks, largest scores": {
        "score": lambda s, b, h, q, k: s + SLOPES[h] * (k - q), "mask": causal, "sinks": True, "max_scores": True,
    },
    "slope of a negative scale": {"score": lambda s, b, h, q, k: s + SLOPES[h] * (k - q), "scale": -0.1},
    "slope, rows switched off": {
        "score": lambda s, b, h, q, k: s + (SLOPES[h] * (k - q) + jnp.where(q % 5 == 0, -jnp.inf, 1.0)), "mask": causal,
    },
    "slope, infinite rows of which nothing is on": {
        "score": lambda s, b, h, q, k: s + (SLOPES[h] * (k - q) + jnp.where(q < 128, jnp.where(q < 9, jnp.nan, jnp.inf), 0.0)),
        "mask": lambda b, h, q, k: (q >= k) & (q >= 128),
    },
    "slope, infinite rows that end in a tile": {
        "score": lambda s, b, h, q, k: s + (SLOPES[h] * (k - q) + jnp.where(q < 40, jnp.inf, 0.0)),
        "mask": lambda b, h, q, k: (q >= k) & (q >= 40), "q_len": 200, "kv_len": 237,
    },
    "root of a scaled distance": {
        "score": lambda s, b, h, q, k: s + jnp.sqrt((q - k).astype(jnp.float32) * 0.1) + jnp.sqrt((q - k) * SLOPES[h]),
        "mask": causal, "q_len": 384, "kv_len": 384,
    },
    "steps of a scaled distance": {
        "score": lambda s, b, h, q, k: jnp.where((q - k) * 0.1 <= 1.0, s + 4.0, s) + 5.0 * jnp.floor((q - k) * 0.1),
        "q_len": 200, "kv_len": 237,
    },
    "slope of bounded scores": {"score": lambda s, b, h, q, k: 3.0 * jnp.tanh(s) + 0.02 * (k - q), "mask": causal},
    "slope and two factors": {
        "score": lambda s, b, h, q, k: jnp.where((k - q) % 2 == 0, s * 0.5, s) + SLOPES[h] * (k - q), "mask": causal,
    },
    "soft cap, float16": {"score": lambda s, b, h, q, k: 50.0 * jnp.tanh(s / 2.0), "dtype": "float16"},
    "documents": {
        "mask": lambda b, h, q, k: (q >= k) & (SEGMENTS[b, q] == SEGMENTS[b, k]), "batch": 2, "mask_batch": 2,
    },
    "bool array": {"mask": lambda b, h, q, k: FLAGS[q, k]},
    "dead rows": {
        "mask": lambda b, h, q, k: (q >= k) & (k > 100),
        "score": lambda s, b, h, q, k: jnp.where(q % 5 == 0, -jnp.inf, s),
    },
    "nan where the mask is off": {
        "mask": causal, "score": lambda s, b, h, q, k: s + jnp.sqrt((q - k).astype(jnp.float32)),
    },
    "dropout": {
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
    },
    "blocks of 64": {"mask": causal, "block": (64, 64)},
    "blocks of 256, odd": {"mask": causal, "block": (256, 256), "q_len": 300, "kv_len": 290},
    "mask of each head": {"mask": lambda b, h, q, k: (q >= k) & (k % (h + 2) != 0), "mask_heads": 2},
    "negative scale": {"scale": -0.1},
    "checkerboard": {
        "score": lambda s, b, h, q, k: 2.0 * jnp.where((k - q) % 2 == 0, s * 0.5, s), "dtype": "float16", "max_scores": True,
    },
    "checkerboard, two factors, odd, under a mask": {
        "score": lambda s, b, h, q, k: jnp.where((k - q) % 2 == 1, 2.0 * jnp.where((k + q) % 4 == 0, s * 0.5, s), s),
        "mask": causal, "q_len": 200, "kv_len": 237,
    },
    "checkerboard, then more": {
        "score": lambda s, b, h, q, k: 0.5 * jnp.where((k - q) % 8 == 3, s * 3.0, s) - 0.1 * (q - k) + h, "mask": causal,
    },
    "checkerboard of a negative scale": {
        "score": lambda s, b, h, q, k: jnp.where((k - q) % 2 == 0, s * 0.5, s), "scale": -0.1,
    },
    "checkerboard of factors that vanish together": {
        "score": lambda s, b, h, q, k: s * 1e-25 * jnp.where((q + k) % 2 == 0, 1e-25, 1.0), "mask": causal,
    },
    "factors of both signs": {"score": lambda s, b, h, q, k: jnp.where((k - q) % 2 == 0, s * -0.5, s)},
    "factors that repeat after 16": {"score": lambda s, b, h, q, k: jnp.where((k - q) % 16 < 5, s * 0.5, s)},
    "capped checkerboard": {
        "score": lambda s, b, h, q, k: 3.0 * jnp.tanh(jnp.where((k - q) % 2 == 0, s * 0.5, s)) * jnp.where((k + q) % 2 == 0, 0.5, 1.0),
    },
}  # fmt: skip
