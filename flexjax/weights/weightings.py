"""The ready-made weights, and the divisors of their rows, which can be pickled."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import head_value
from flexjax.mod_tools.factory_arguments import (
    finite_number,
    float_array,
    integer,
    positive_number,
    positive_number_or_vector,
)
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named
from flexjax.types import Weights


def total_itself(total: Array) -> Array:
    return total


@jax.jit  # whose eager backward pass transfers nothing; it cannot be pickled
def _at_least_one(total: Array) -> Array:
    return jnp.maximum(jnp.abs(total), 1)


def at_least_one(total: Array) -> Array:
    """max(abs(total), 1)"""
    return _at_least_one(total)


@named("linear")
def _linear(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    return score


linear = Weights(_linear, total_itself)
"""s,  out divided by the total

Linear attention in its quadratic form. Pass features of queries and keys that are not negative, such as
`1 + jax.nn.elu(x)`, and `scale=1`.
Source: Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236.
"""


@without_frames
def power(p: int) -> Weights:
    """s ** p,  out divided by the total

    Power attention.
    p:  even int of at least 2, so that no weight is negative.
    Source: Gelada et al., "Scaling Context Requires Rethinking Attention", arXiv:2507.04239.
    """
    advice = "Pass an even number, so that no weight is negative."
    exponent = integer("power", "p", p, 2, advice)
    if exponent % 2:
        raise ValueError(f"`power`: `p` is {p!r}; expected an even int. {advice}")

    @named(f"power_{exponent}")
    def weights(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return lax.integer_pow(score, exponent)

    return Weights(weights, total_itself)


@without_frames
def relu_squared(n: float) -> ScoreMod:
    """max(s, 0) ** 2 / n

    Sparse: a key with a negative score does not count.
    n:  finite number above 0: the number of keys.
    Source: Wortsman et al., "Replacing softmax with ReLU in Vision Transformers", arXiv:2309.08586, for the division;
    squared ReLU weights are those of Hua et al., "Transformer Quality in Linear Time", arXiv:2202.10447.
    """
    divisor = positive_number("relu_squared", "n", n, "Pass the number of keys.")

    @named("relu_squared")
    def weights(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return jnp.square(jax.nn.relu(score)) * (1 / divisor)

    return weights


@without_frames
def retention(decay: ArrayLike) -> Weights:
    """s * decay[h] ** max(q_idx - kv_idx, 0),  out divided by max(abs(total), 1)

    Retention: scores that decay with distance.
    decay:  number above 0, or floating `[]` or `[N]` of numbers above 0, differentiable; below 1, and
    `1 - 2 ** (-5 - h)` in the paper. Use it with a causal mask. A call of other sizes raises ValueError.
    Source: Sun et al., "Retentive Network", arXiv:2307.08621, and its normalisation of retention scores.
    """
    rates = positive_number_or_vector("retention", "decay", decay, "Pass 1 - 2 ** (-5 - h) for head h.")

    @named("retention", *of_array("decay", rates, "N"))
    def weights(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = jnp.maximum(q_idx - kv_idx, 0).astype(score.dtype)
        # a logarithm of each head, and one exponential an entry
        rate = jnp.log(jnp.asarray(head_value(rates, h, score), score.dtype))
        return score * jnp.exp(rate * distance)

    return Weights(weights, at_least_one)


@without_frames
def sigmoid(bias: ArrayLike) -> ScoreMod:
    """1 / (1 + exp(-(s + bias[h])))

    Each key counts by itself, whatever the others are.
    bias:  number, or floating `[]` or `[N]`, differentiable. -log(n) for n keys makes rows add up to about 1.
    A call of other sizes raises ValueError. Source: Ramapuram et al., "Theory, Analysis, and Best Practices for
    Sigmoid Self-Attention", arXiv:2409.04431.
    """
    advice = "Pass -math.log(n) for n keys."
    number = isinstance(bias, int | float)
    added = finite_number("sigmoid", "bias", bias, advice) if number else None
    logits = added if added is not None else float_array("sigmoid", "bias", bias, {0: "[]", 1: "[N]"}, advice)

    @named("sigmoid", *of_array("bias", logits, "N"))
    def weights(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return jax.nn.sigmoid(score + head_value(logits, h, score))

    return weights


@without_frames
def silu(n: float) -> ScoreMod:
    """s * sigmoid(s) / n

    The weights of HSTU, without normalisation.
    n:  finite number above 0: HSTU's largest number of tokens. For a number of each row, such as the length of its
    document, write the function: `jax.nn.silu(s) / length[b, q_idx]`.
    Source: Zhai et al., "Actions Speak Louder than Words", arXiv:2402.17152 (HSTU).
    """
    divisor = positive_number("silu", "n", n, "Pass the largest number of tokens.")

    @named("silu")
    def weights(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return jax.nn.silu(score) * (1 / divisor)

    return weights
