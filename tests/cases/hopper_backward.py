"""Rows of the backward kernels for Hopper in simulation: the arguments of `on_hopper.backward_problem`.

BACKWARD             no captured array
CAPTURED             captured arrays, with their gradients
BY_PLACES            captured arrays whose gradient is scattered over places that repeat
PAIR_BIAS            captured arrays with a number for each query and key, with what the kernels do with them
FUSED                for the fused kernel, which computes all gradients of queries, keys and values
FUSED_ONE_KEY_TILE   for the fused kernel, where one CTA adds to dQ, so that the simulator can look for races
"""

import typing

import jax.numpy as jnp

from flexjax.types import KernelOptions
from tests.cases.on_hopper import causal, normal

BACKWARD: dict[str, dict[str, typing.Any]] = {
    "full": {},
    "causal, grouped heads": {"mask": causal, "heads": 4, "kv_heads": 2},
    "mask without lists": {"mask": causal, "block": None, "heads": 1},
    "odd lengths and dims": {"mask": causal, "q_len": 140, "kv_len": 203, "dim": 40, "value_dim": 24, "heads": 1},
    "one query": {"q_len": 1, "kv_len": 70, "heads": 1},
    "wide head": {"dim": 160, "value_dim": 32, "heads": 1, "q_len": 128, "kv_len": 128},
    "columns of two CTAs": {"dim": 288, "value_dim": 272, "heads": 1, "q_len": 70, "kv_len": 140, "mask": causal},
    "columns of two CTAs, grouped heads, dropout, float16": {
        "dim": 264, "value_dim": 40, "heads": 4, "kv_heads": 2, "q_len": 130, "kv_len": 70, "layout": "BNTH", "dtype": "float16",
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
        "sinks": True, "d_lse": True,
    },
    "BNTH, float16, sinks, cotangent of lse": {
        "mask": causal, "layout": "BNTH", "dtype": "float16", "sinks": True, "d_lse": True, "heads": 1,
    },
    "soft cap": {"score": lambda c, s, b, h, q, k: 5.0 * jnp.tanh(s / 5.0), "q_len": 128, "kv_len": 128, "heads": 1},
    "checkerboard": {
        "score": lambda c, s, b, h, q, k: jnp.where((k - q) % 2 == 1, 2.0 * jnp.where((k + q) % 4 == 0, s * 0.5, s), s),
        "q_len": 128, "kv_len": 128, "heads": 1,
    },
    "checkerboard under a mask, then a slope": {
        "score": lambda c, s, b, h, q, k: jnp.where((k - q) % 2 == 1, 3.0 * s, s) - 0.1 * (q - k), "mask": causal,
        "q_len": 130, "kv_len": 200, "heads": 1,
    },
    "dropout": {
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
        "q_len": 128, "kv_len": 128, "heads": 1,
    },
    "dead rows": {"mask": lambda b, h, q, k: (q >= k) & (k > 100), "d_lse": True, "heads": 1},
    "nan where the mask is off": {
        "mask": causal, "score": lambda c, s, b, h, q, k: s + jnp.sqrt((q - k).astype(jnp.float32)), "heads": 1,
        "q_len": 128, "kv_len": 128,
    },
    "blocks of 64": {"mask": causal, "block": (64, 64), "q_len": 128, "kv_len": 128, "heads": 1},
    "mask of each head": {"mask": lambda b, h, q, k: (q >= k) & (k % (h + 2) != 0), "mask_heads": 2, "q_len": 128},
    "extra features": {"extra": 16, "q_len": 128, "kv_len": 128},
    "half a block of threads past the end": {
        "score": lambda c, s, b, h, q, k: s + jnp.sqrt(191.0 - k), "q_len": 64, "kv_len": 192, "heads": 1,
    },
    "full blocks of which half is past the end": {
        "score": lambda c, s, b, h, q, k: s + jnp.sqrt(191.0 - k), "mask": lambda b, h, q, k: q >= 0, "block": (64, 128),
        "q_len": 64, "kv_len": 192, "heads": 1,
    },
    "tiles of 64 x 64": {"mask": causal, "heads": 1, "options": KernelOptions(block_q_bwd=64, block_kv_bwd=64)},
}  # fmt: skip

CAPTURED: dict[str, dict[str, typing.Any]] = {
    "temperature of each head": {
        "score": lambda c, s, b, h, q, k: s * c[0][h], "captured": (1 + 0.2 * normal(2),), "q_len": 256, "kv_len": 128,
    },
    "positive factors of a head": {
        "score": lambda c, s, b, h, q, k: jnp.maximum(c[0][h], 0.3) * s * jnp.maximum(c[1][h], 0.5),
        "captured": (1 + 0.2 * normal(2), 1 + 0.2 * normal(2)), "q_len": 128, "kv_len": 192, "mask": causal,
    },
    "gain of each query, bias of each key": {
        "score": lambda c, s, b, h, q, k: s * c[0][h, q] + c[1][k],
        "captured": (normal(1, 128), normal(128)), "q_len": 128, "kv_len": 128, "heads": 1,
    },
    "relative table, odd": {
        "score": lambda c, s, b, h, q, k: s + c[0][h, q - k + 69],
        "captured": (normal(1, 199),), "q_len": 130, "kv_len": 70, "heads": 1,
    },
    "clipped table": {
        "score": lambda c, s, b, h, q, k: s + c[0][jnp.clip(q - k, -20, 20) + 20],
        "captured": (normal(41),), "mask": causal, "q_len": 128, "kv_len": 128, "heads": 1,
    },
    "pair bias": {
        "score": lambda c, s, b, h, q, k: s + c[0][q, k],
        "captured": (normal(128, 128),), "mask": causal, "q_len": 128, "kv_len": 128, "batch": 2, "heads": 1,
    },
    "bias of each query, half a block of keys past the end": {
        "score": lambda c, s, b, h, q, k: s + c[0][q] * s, "captured": (normal(128),), "q_len": 128, "kv_len": 192, "heads": 1,
    },
    "relative table, half a block of keys past the end": {
        "score": lambda c, s, b, h, q, k: s + c[0][q - k + 191], "captured": (normal(319),), "q_len": 128, "kv_len": 192,
        "heads": 1,
    },
    "bias of each key, half a block of queries past the end": {
        "score": lambda c, s, b, h, q, k: s + c[0][k] * jnp.sqrt(191.0 - q), "captured": (normal(128),), "q_len": 192,
        "kv_len": 128, "heads": 1,
    },
    "temperature and a gather, columns of two CTAs": {
        "score": lambda c, s, b, h, q, k: s * c[0][h] + c[1][(q * 7 + k * 3) % 50],
        "captured": (jnp.array([1.3]), normal(50)), "q_len": 100, "kv_len": 70, "heads": 1, "dim": 272, "mask": causal,
    },
    "two computed axes, a table of heads, read twice": {
        "score": lambda c, s, b, h, i, j: (
            s + c[1][(b + h) % 2, c[0][h].astype(jnp.int32), i, j] + c[1][0, c[0][h].astype(jnp.int32), j, i] * s
        ),
        "captured": (jnp.array([1.0, 0.0]), normal(2, 2, 64, 64)), "q_len": 64, "kv_len": 64, "batch": 2,
    },
    "gather": {
        "score": lambda c, s, b, h, q, k: s + c[0][(q * 7 + k * 3) % 50],
        "captured": (normal(50),), "q_len": 128, "kv_len": 128, "heads": 1,
    },
}  # fmt: skip

FUSED: dict[str, dict[str, typing.Any]] = {
    "full": {},
    "lists": {"mask": lambda b, h, q, k: q // 128 >= k // 128, "kv_heads": 1},
    "half a block of threads past the end": BACKWARD["half a block of threads past the end"],
    # from each tile of keys, blocks with and without a mask alternate; nobody reads the last tile of keys
    "runs": {
        "mask": lambda b, h, q, k: ((q // 128 % 2 == 0) | ((q + k) % 3 > 0)) & (k < 256), "kv_len": 384, "q_len": 512,
        "heads": 1,
    },
    "slopes": {
        "score": lambda c, s, b, h, q, k: s + c[0][h] * (k - q), "captured": (jnp.array([0.02, 0.1]),), "mask": causal,
    },
    "odd": {
        "mask": lambda b, h, q, k: (q >= k) & (k % (h + 2) != 0), "mask_heads": 2, "block": (256, 128), "q_len": 290,
        "kv_len": 131, "kv_heads": 1, "dim": 40, "extra": 16, "value_dim": 16, "layout": "BNTH", "dtype": "float16",
        "sinks": True, "d_lse": True,
    },
    "relative table": {
        "score": lambda c, s, b, h, q, k: s + c[0][h, q - k + 255], "captured": (normal(2, 511),), "mask": causal,
    },
}  # fmt: skip

FUSED_ONE_KEY_TILE: dict[str, dict[str, typing.Any]] = {
    "full": {"q_len": 192, "heads": 1},
    "grouped heads with lists of their own": {
        "mask": lambda b, h, q, k: ((q // 128 == 1) | ((q + k) % 3 > 0)) & ((h == 0) | (q >= 128)), "mask_heads": 2,
        "q_len": 384, "heads": 2, "kv_heads": 1,
    },
    "one visit": {"mask": lambda b, h, q, k: (q < 64) & (k <= q), "block": (64, 128), "heads": 1},
    "runs": {
        "mask": lambda b, h, q, k: (q // 64 % 2 == 0) | (k <= q % 64), "block": (64, 128), "q_len": 320, "heads": 1,
    },
    "nothing, of each head": {"mask": lambda b, h, q, k: (q < 0) & (h > 0), "mask_heads": 2},
}  # fmt: skip


def relative_2d(width: int, rows: int) -> typing.Callable[..., typing.Any]:
    """A table [heads, 2 * rows - 1, 2 * width - 1] of relative positions on a grid."""
    return lambda c, s, b, h, i, j: s + c[0][h, i // width - j // width + rows - 1, i % width - j % width + width - 1]


BY_PLACES: dict[str, dict[str, typing.Any]] = {
    "2-D table, odd, with dropout": {
        "score": relative_2d(11, 13), "captured": (normal(1, 25, 21),), "q_len": 143, "kv_len": 143, "heads": 1,
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
    },
    "2-D table, tiles of a diagonal": {
        "score": relative_2d(8, 32), "captured": (normal(1, 63, 15),), "mask": causal, "block": (64, 64), "heads": 1,
    },
    "2-D table that all share": {
        "score": lambda c, s, b, h, i, j: s + c[0][i // 8 - j // 8 + 15, i % 8 - j % 8 + 7],
        "captured": (normal(31, 15),), "q_len": 128, "kv_len": 128, "batch": 2,
    },
    "a bias of two heads each, odd lengths, dropout": {
        "score": lambda c, s, b, h, i, j: s + c[0][h // 2, i, j], "captured": (normal(2, 70, 100),), "q_len": 70, "kv_len": 100,
        "heads": 4, "kv_heads": 2, "block": (64, 64), "mask": causal,
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
    },
    "a bias of batch entries times heads, staged": {
        "score": lambda c, s, b, h, i, j: s + c[0][b * 2 + h, i, j].astype(jnp.float32),
        "captured": (normal(4, 64, 128).astype("float16"),), "q_len": 64, "kv_len": 100, "batch": 2, "dtype": "float16",
    },
    "gain, of which nothing bounds the derivative": {
        "score": lambda c, s, b, h, i, j: s * c[0][h, (i * 7 + j * 3) % 50], "captured": (normal(1, 50),),
        "q_len": 128, "kv_len": 128, "heads": 1,
    },
}  # fmt: skip

SMALL = {"q_len": 128, "kv_len": 128, "heads": 1}
by_head = lambda c, s, b, h, q, k: s + c[0][h, q, k].astype(jnp.float32)
rounded = lambda dtype, *shape: normal(*shape).astype(dtype)


class Expected(typing.NamedTuple):
    """What the kernels are to do with the array: whether it is staged, whether the dQ kernel writes its gradient."""

    staged: bool
    written: bool


# name: (the problem, what is expected)
PAIR_BIAS: dict[str, tuple[dict[str, typing.Any], Expected]] = {
    "bfloat16": (
        {"score": by_head, "captured": (rounded("bfloat16", 2, 128, 128),), **SMALL, "heads": 2}, Expected(True, True),
    ),
    "float16, head dim 64": (
        {"score": by_head, "captured": (rounded("float16", 1, 128, 128),), **SMALL, "dtype": "float16", "dim": 64},
        Expected(True, True),
    ),
    "float32": ({"score": by_head, "captured": (normal(1, 128, 128),), **SMALL}, Expected(True, True)),
    "grouped heads": (
        {"score": by_head, "captured": (rounded("bfloat16", 4, 64, 128),), **SMALL, "q_len": 64, "heads": 4, "kv_heads": 2},
        Expected(True, True),
    ),
    "empty blocks": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 256, 256),), "mask": causal, "heads": 1},
        Expected(True, True),
    ),
    "empty rows and heads of the mask": (
        {
            "score": by_head, "captured": (rounded("bfloat16", 2, 256, 128),), "q_len": 256, "kv_len": 128,
            "mask": lambda b, h, q, k: (h == 1) & (q < 100) & (k < 70), "mask_heads": 2, "block": (128, 64),
        },
        Expected(True, True),
    ),
    "odd lengths": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 140, 203),), "mask": causal, "heads": 1, "q_len": 140, "kv_len": 203},
        Expected(False, True),
    ),
    "array larger than the matrix": (
        {"score": by_head, "captured": (rounded("bfloat16", 3, 144, 256),), "heads": 2, "q_len": 140, "kv_len": 203},
        Expected(True, True),
    ),
    "each batch entry": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][b, h, q, k].astype(jnp.float32),
            "captured": (rounded("bfloat16", 2, 1, 64, 128),), **SMALL, "q_len": 64, "batch": 2,
        },
        Expected(True, True),
    ),
    "sum over the batch": (
        {"score": by_head, "captured": (rounded("bfloat16", 2, 64, 128),), **SMALL, "heads": 2, "q_len": 64, "batch": 2},
        Expected(True, True),
    ),
    "sum over three batch entries, odd": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 64, 128),), **SMALL, "q_len": 50, "kv_len": 101, "batch": 3},
        Expected(True, True),
    ),
    "sum over too much for one warpgroup": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 64, 128),), **SMALL, "q_len": 64, "batch": 2, "dim": 96},
        Expected(True, False),
    ),
    "sum over the batch under a mask of each head": (
        {
            "score": by_head, "captured": (rounded("bfloat16", 2, 128, 128),), "mask": lambda b, h, q, k: q + h >= k,
            "mask_heads": 2, "q_len": 128, "kv_len": 128, "batch": 2, "block": (64, 64),
        },
        Expected(True, True),
    ),
    "sum over the heads": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][0, q, k].astype(jnp.float32),
            "captured": (rounded("bfloat16", 1, 64, 128),), **SMALL, "heads": 2, "q_len": 64,
        },
        Expected(True, False),
    ),
    "sum over the batch under a mask, float32": (
        {
            "score": by_head, "captured": (normal(1, 72, 128),), "mask": causal, "block": (64, 64),
            "heads": 1, "q_len": 70, "kv_len": 100, "batch": 2,
        },
        Expected(True, True),
    ),
    "sum over the batch, head dim 160": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 64, 128),), **SMALL, "q_len": 64, "batch": 2, "dim": 160},
        Expected(False, False),
    ),
    "keys before queries": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][k, h, q].astype(jnp.float32),
            "captured": (rounded("bfloat16", 128, 2, 64),), **SMALL, "heads": 2, "q_len": 64,
        },
        Expected(False, True),
    ),
    "offset": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][q + 3, k + 1].astype(jnp.float32),
            "captured": (rounded("bfloat16", 72, 130),), **SMALL, "q_len": 64,
        },
        Expected(False, True),
    ),
    "gain under a soft cap": (
        {
            "score": lambda c, s, b, h, q, k: 4.0 * jnp.tanh(s * c[0][h, q, k].astype(jnp.float32) / 4.0),
            "captured": (rounded("bfloat16", 1, 128, 128),), **SMALL,
        },
        Expected(True, True),
    ),
    "two arrays": (
        {
            "score": lambda c, s, b, h, q, k: s * c[0][h, q, k].astype(jnp.float32) + c[1][q, k],
            "captured": (rounded("bfloat16", 1, 128, 128), normal(128, 128)), **SMALL,
        },
        Expected(True, True),
    ),
    "beside a relative table": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][h, q, k].astype(jnp.float32) + c[1][q - k + 127],
            "captured": (rounded("bfloat16", 1, 128, 128), normal(255)), **SMALL,
        },
        Expected(True, True),
    ),
    "read twice": (
        {
            "score": lambda c, s, b, h, q, k: s + c[0][q, k].astype(jnp.float32) * c[0][k, q].astype(jnp.float32),
            "captured": (rounded("bfloat16", 128, 128),), **SMALL,
        },
        Expected(True, False),
    ),
    "dropout": (
        {
            "score": by_head, "captured": (rounded("bfloat16", 1, 128, 128),), **SMALL,
            "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
        },
        Expected(True, True),
    ),
    "wide head": (
        {"score": by_head, "captured": (rounded("bfloat16", 1, 64, 128),), **SMALL, "q_len": 64, "dim": 160},
        Expected(False, False),
    ),
}  # fmt: skip
