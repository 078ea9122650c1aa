"""Factors that make attention sharper or flatter: fixed, learned, or growing with the number of keys."""

import math

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import head_value
from flexjax.mod_tools.factory_arguments import integer, positive_number_or_vector
from flexjax.mod_tools.signatures import ScoreMod, named


def temperature(value: ArrayLike) -> ScoreMod:
    """score / value[h]

    value:  positive number, or floating `[]` or `[N]`, one per query head.  Differentiable.  Below 1
            sharpens, above 1 flattens.

    Sizes are not checked against those of the call: an index past the end of `value` reads the last element.

    Source: a learned one per head is in Ali et al., "XCiT", arXiv:2106.09681, and in Liu et al.,
    "Swin Transformer V2", arXiv:2111.09883, section 3.2.

    Raises ValueError if a number is not positive, or an array is not floating or has more than one axis.
    """
    per_head = positive_number_or_vector("temperature", "value", value, "Pass 1.0 to change nothing.")

    @named("temperature")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score divided by the temperature of the head."""
        return score / head_value(per_head, h, score)

    return score_mod


def log_n_scaling(train_length: int) -> ScoreMod:
    """score * max(1, log(q_idx + 1) / log(train_length))

    train_length:  int of at least 2: sequence length of the training; nothing changes for the queries in it.

    Keeps attention as sharp on sequences longer than those trained on: `q_idx + 1` is the number of keys that
    a causal query sees.

    Source: Chiang and Cholak, "Overcoming a Theoretical Limitation of Self-Attention", arXiv:2202.12172;
    Bai et al., "Qwen Technical Report", arXiv:2309.16609 ("LogN-Scaling").

    Raises ValueError if `train_length` is less than 2 or not an int.
    """
    length = integer("log_n_scaling", "train_length", train_length, 2, "Pass the sequence length of training.")
    unit = math.log(length)

    @named(f"log_n_scaling_{length}")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score times the factor of the query's position, at least 1."""
        seen = (q_idx + 1).astype(score.dtype)
        return score * jnp.maximum(jnp.log(seen) / unit, 1)

    return score_mod


def scalable_softmax(factor: ArrayLike) -> ScoreMod:
    """score * factor[h] * log(q_idx + 1)

    factor:  positive number, or floating `[]` or `[N]`, one per query head.  Differentiable.

    The softmax then has base `n ** factor` for a causal query that sees `n = q_idx + 1` keys, so it does not
    fade as `n` grows.

    Sizes are not checked against those of the call: an index past the end of `factor` reads the last element.

    Source: Nakanishi, "Scalable-Softmax Is Superior for Attention", arXiv:2501.19399.

    Raises ValueError if a number is not positive, or an array is not floating or has more than one axis.
    """
    advice = "The paper learns one per head."
    per_head = positive_number_or_vector("scalable_softmax", "factor", factor, advice)

    @named("scalable_softmax")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score times the factor of the head and the logarithm of the number of keys that a causal query sees."""
        seen = (q_idx + 1).astype(score.dtype)
        return score * (head_value(per_head, h, score) * jnp.log(seen))

    return score_mod
