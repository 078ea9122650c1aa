"""The mods that the table of cases names: captured arrays in, what a user would write out."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Captures = Mapping[str, Any]
Mod = Callable[..., jax.Array]

SCORE_MODS: dict[str, Callable[[Captures], Mod]] = {}
MASK_MODS: dict[str, Callable[[Captures], Mod]] = {}
WEIGHTS: dict[str, Callable[[Captures], Mod]] = {}
EXPECTATIONS: dict[str, Callable[[Captures], Mod]] = {}


def score(make: Callable[[Captures], Mod]) -> Callable[[Captures], Mod]:
    SCORE_MODS[make.__name__] = make
    return make


def mask(make: Callable[[Captures], Mod]) -> Callable[[Captures], Mod]:
    MASK_MODS[make.__name__] = make
    return make


def weights(make: Callable[[Captures], Mod]) -> Callable[[Captures], Mod]:
    WEIGHTS[make.__name__] = make
    return make


def expectation(make: Callable[[Captures], Mod]) -> Callable[[Captures], Mod]:
    EXPECTATIONS[make.__name__] = make
    return make


# ------------------------------------------------------------------ weights in place of softmax


@weights
def linear(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s


@weights
def sigmoid(c: Captures) -> Mod:
    return lambda s, b, h, q, k: jax.nn.sigmoid(s + c["logit"][h])


@weights
def silu(c: Captures) -> Mod:
    return lambda s, b, h, q, k: jax.nn.silu(s) / 16


@weights
def relu_squared(c: Captures) -> Mod:
    return lambda s, b, h, q, k: jnp.square(jax.nn.relu(s)) / 16


@weights
def decayed(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s * jnp.exp(-jnp.abs(c["rate"][h] * (q - k)))


@weights
def clipped_weight(c: Captures) -> Mod:
    return lambda s, b, h, q, k: clipped(s)


# ------------------------------------------------------------------ functions whose expectations are asked for


@expectation
def of_score(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s


@expectation
def distance(c: Captures) -> Mod:
    return lambda s, b, h, q, k: q - k


@expectation
def own_document(c: Captures) -> Mod:
    return lambda s, b, h, q, k: c["doc"][b, q] == c["doc"][b, k]


@expectation
def learned_gate(c: Captures) -> Mod:
    return lambda s, b, h, q, k: c["gain"][h] * jnp.tanh(s) + c["key_value"][k]


@expectation
def log_of_distance_before(c: Captures) -> Mod:
    return lambda s, b, h, q, k: jnp.log(1.0 + q - k)


# ------------------------------------------------------------------ scores without captured arrays


@score
def identity(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s


@score
def alibi(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + jnp.exp2(-2.0 * (h + 1)) * (k - q)


@score
def softcap(c: Captures) -> Mod:
    return lambda s, b, h, q, k: 3.0 * jnp.tanh(s / 3.0)


@score
def square(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s * s * 0.25


@score
def even_keys_only(c: Captures) -> Mod:
    return lambda s, b, h, q, k: jnp.where(k % 2 == 0, s, -jnp.inf)


@score
def rows_all_minus_inf(c: Captures) -> Mod:
    return lambda s, b, h, q, k: jnp.where(q % 3 == 1, -jnp.inf, s)


@score
def root_of_distance(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s * 4 / jnp.sqrt(q - k + 1.0)


@score
def log_of_distance(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s - jnp.log(q - k + 1.0)


@score
def chain(c: Captures) -> Mod:
    def mod(s, b, h, q, k):
        for step in (softcap(c), alibi(c), square(c)):
            s = step(s, b, h, q, k)
        return s

    return mod


@jax.custom_jvp
def clipped(x: jax.Array) -> jax.Array:
    """A clip whose rule lets a tenth of the gradient through outside: not the derivative of its value."""
    return jnp.clip(x, -1.0, 1.0)


@clipped.defjvp
def _clipped_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return clipped(x), dx * jnp.where(jnp.abs(x) < 1.0, 1.0, 0.1)


@score
def custom_rule(c: Captures) -> Mod:
    return lambda s, b, h, q, k: clipped(s)


@score
def nested_jit(c: Captures) -> Mod:
    inner = jax.jit(lambda s, h: jnp.where(h > 0, s * 1.5, s))
    return lambda s, b, h, q, k: inner(s, h)


# --------------------------------------------------------------------- scores with captured arrays


@score
def scalar_gain(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s * c["gain"] + c["gain"]


@score
def head_gate(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s * jax.nn.sigmoid(c["gate"][h])


@score
def batch_head_scale(c: Captures) -> Mod:
    factor = jnp.exp(c["log_scale"])  # computed outside the mod: the gradient goes through it
    return lambda s, b, h, q, k: s * factor[b, h]


@score
def head_slope(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s - c["slope"][h] * jnp.abs(q - k)


@score
def row_bias(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s * (1 + 0.5 * c["bias"][q]) + c["bias"][q]


@score
def column_bias(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][h, k]


@score
def batch_column_bias(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][b, k]


@score
def shifted_column_bias(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][k + 3]


@score
def row_and_column(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["row"][q] + c["column"][k]


@score
def one_array_read_twice(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][q] * c["bias"][k]


@score
def pair_bias(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][q, k]


@score
def head_pair_bias(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][h, q, k]


@score
def computed_head_bias(c: Captures) -> Mod:
    """Groups of heads share a plane, which a table chooses for each batch entry; two positions read each element."""
    return lambda s, b, h, q, k: s + c["bias"][h // 2, c["plane"][b], q, k] + c["bias"][(b + h) % 2, 0, k, q]


@score
def full_pair_bias(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][b, h, q, k]


@score
def transposed_pair_bias(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][k, q]


@score
def pair_bias_and_transpose(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][q, k] - 0.5 * c["bias"][k, q]


@score
def transposed_view(c: Captures) -> Mod:
    by_head = c["bias"].T
    return lambda s, b, h, q, k: s + by_head[h, k]


@score
def fixed_plane(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s * c["bias"][b, h, 1, q] + c["bias"][b, h, 0, k]


@score
def relative_bias(c: Captures) -> Mod:
    middle = c["bias"].shape[-1] // 2
    return lambda s, b, h, q, k: s + c["bias"][h, q - k + middle]


@score
def difference_bias(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][q - k]


@score
def distance_bias(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][jnp.abs(q - k)]


@score
def clipped_relative_bias(c: Captures) -> Mod:
    last = c["bias"].shape[0] - 1
    return lambda s, b, h, q, k: s + c["bias"][jnp.clip(q - k + last // 2, 0, last)]


@score
def bucket_bias(c: Captures) -> Mod:
    middle = c["bucket"].shape[0] // 2
    return lambda s, b, h, q, k: s + c["table"][c["bucket"][q - k + middle], h]


@score
def log_bucket_bias(c: Captures) -> Mod:
    def mod(s, b, h, q, k):
        distance = jnp.maximum(q - k, 0)
        bucket = jnp.log2(distance.astype(jnp.float32) + 1.0).astype(jnp.int32)
        return s + c["table"][jnp.minimum(bucket, c["table"].shape[0] - 1)]

    return mod


@score
def time_bucket_bias(c: Captures) -> Mod:
    def mod(s, b, h, q, k):
        ago = jnp.abs(c["times"][b, q] - c["times"][b, k])
        return s + c["table"][h // 2, jnp.minimum((ago * 8.0).astype(jnp.int32), c["table"].shape[1] - 1)]

    return mod


@score
def indirect_row(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s * (1 + 0.5 * c["bias"][c["where"][q]])


@score
def indirect_pair(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["bias"][c["row"][q], c["column"][k]]


@score
def modular_table(c: Captures) -> Mod:
    rows, columns = c["bias"].shape
    return lambda s, b, h, q, k: s + c["bias"][q % rows, k % columns]


@score
def integer_cost(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s - 0.25 * c["cost"][k]


@score
def boolean_penalty(c: Captures) -> Mod:
    return lambda s, b, h, q, k: jnp.where(c["flag"][k], s, s - 2.0)


@score
def noise(c: Captures) -> Mod:
    draw = lambda q, k: jax.random.normal(
        jax.random.fold_in(jax.random.wrap_key_data(c["key"]), q * 1000 + k), dtype="float32"
    )
    return lambda s, b, h, q, k: s + draw(q, k)


@score
def interpolated(c: Captures) -> Mod:
    knots = lambda: c["knots"].astype(jnp.float32)
    return lambda s, b, h, q, k: s + jnp.interp((q - k).astype(jnp.float32), knots(), c["at_knots"])


@score
def searched_bucket(c: Captures) -> Mod:
    return lambda s, b, h, q, k: s + c["table"][jnp.searchsorted(c["knots"], q - k, side="right")]


@score
def coordinate_distance(c: Captures) -> Mod:
    def mod(s, b, h, q, k):
        dx, dy = c["x"][q] - c["x"][k], c["y"][q] - c["y"][k]
        return s - c["strength"][h] * (dx * dx + dy * dy)

    return mod


# ---------------------------------------------------------------------------------------- masks


@mask
def causal(c: Captures) -> Mod:
    return lambda b, h, q, k: q >= k


@mask
def window(c: Captures) -> Mod:
    return lambda b, h, q, k: (q >= k) & (q - k < 20)


@mask
def window_per_head(c: Captures) -> Mod:
    return lambda b, h, q, k: (q >= k) & (q - k < c["window"][h])


@mask
def prefix(c: Captures) -> Mod:
    return lambda b, h, q, k: (k < 50) | (q >= k)


@mask
def documents(c: Captures) -> Mod:
    return lambda b, h, q, k: c["doc"][q] == c["doc"][k]


@mask
def dilation_by_head(c: Captures) -> Mod:
    """A dilation of 0: x % 0 is 0 in jax.numpy, and x // 0 is -2 or, for x = 0, -1."""
    steps = lambda d: lambda distance, h: (distance % d == 0) & (distance // h >= -2) & (distance % h == 0)
    return lambda b, h, q, k: steps(c["dilation"][h])(q - k, h) & (q >= k)


@mask
def causal_documents(c: Captures) -> Mod:
    return lambda b, h, q, k: (c["doc"][b, q] == c["doc"][b, k]) & (q >= k)


@mask
def key_lengths(c: Captures) -> Mod:
    return lambda b, h, q, k: k < c["length"][b]


@mask
def both_lengths(c: Captures) -> Mod:
    return lambda b, h, q, k: (k < c["length"][b]) & (q < c["length"][b])


@mask
def neighbours(c: Captures) -> Mod:
    return lambda b, h, q, k: jnp.any(c["neighbour"][b, q] == k) | (k == 0)


@mask
def chosen_blocks(c: Captures) -> Mod:
    """A bit for each block of 64 keys, of a word that a tile of them reads once a row."""
    return lambda b, h, q, k: (q >= k - 100) & ((c["word"][b, h // 2, q, k // 64] >> k // 64) & 1 == 1)


@mask
def chunked(c: Captures) -> Mod:
    return lambda b, h, q, k: (q // 48 == k // 48) & (q >= k)


@mask
def natten(c: Captures) -> Mod:
    def mod(b, h, q, k):
        x = jnp.clip(q % 16, 2, 13)
        y = jnp.clip(q // 16, 1, 14)
        return (jnp.abs(x - k % 16) <= 2) & (jnp.abs(y - k // 16) <= 1)

    return mod


@mask
def dilated(c: Captures) -> Mod:
    return lambda b, h, q, k: (q >= k) & (q - k < 120) & ((q - k) % 3 == 0)


@mask
def residues(c: Captures) -> Mod:
    return lambda b, h, q, k: q % 3 == k % 3


@mask
def holes(c: Captures) -> Mod:
    return lambda b, h, q, k: ((q >= k) | (k < 40)) & ~((k >= 10) & (k < 20) & (q > 64))


@mask
def some_rows_off(c: Captures) -> Mod:
    return lambda b, h, q, k: (q % 3 != 0) & (k <= q + 5)


@mask
def distant_past(c: Captures) -> Mod:
    return lambda b, h, q, k: k + 140 <= q


@mask
def nothing(c: Captures) -> Mod:
    return lambda b, h, q, k: q + k < 0


@mask
def everything(c: Captures) -> Mod:
    return lambda b, h, q, k: k >= 0


@mask
def flagged_keys(c: Captures) -> Mod:
    return lambda b, h, q, k: c["flag"][k]


@mask
def by_batch_and_head(c: Captures) -> Mod:
    return lambda b, h, q, k: (q // (16 * (h + 1)) == k // (16 * (h + 1))) | (k < 10 * b)


@mask
def small_integers(c: Captures) -> Mod:
    return lambda b, h, q, k: (c["kind"][q] + c["kind"][k]) % 2 == 0


@mask
def random_entries(c: Captures) -> Mod:
    draw = lambda q, k: jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(c["key"], q), k), jnp.float32(0.3))
    return lambda b, h, q, k: (draw(q, k) & (k < q + 20)) | (q == k)


@mask
def searched_documents(c: Captures) -> Mod:
    of = lambda i: jnp.searchsorted(c["starts"].astype(jnp.float32), i.astype(jnp.float32), side="right")
    return lambda b, h, q, k: of(q) == of(k)


@mask
def scrambled_documents(c: Captures) -> Mod:
    return lambda b, h, q, k: c["doc"][c["order"][q]] == c["doc"][c["order"][k]]
