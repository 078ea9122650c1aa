"""Factors that make attention sharper or flatter: fixed, learned, or growing with the number of keys."""

import math

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import head_value
from flexjax.mod_tools.factory_arguments import integer, positive_number_or_vector
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@without_frames
def temperature(value: ArrayLike) -> ScoreMod:
    """score / value[h]

    value:  positive number, or floating `[]` or `[N]`: below 1 sharpens, above 1 flattens. Differentiable.
    A call of other sizes raises ValueError.
    Source: Ali et al., "XCiT", arXiv:2106.09681; Liu et al., "Swin V2", arXiv:2111.09883.
    """
    per_head = positive_number_or_vector("temperature", "value", value, "Pass 1.0 to change nothing.")

    @named("temperature", *of_array("value", per_head, "N"))
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return score / head_value(per_head, h, score)

    return score_mod


@without_frames
def log_n_scaling(train_length: int) -> ScoreMod:
    """score * max(1, log(q_idx + 1) / log(train_length))

    train_length:  int of at least 2: sequence length of the training; longer causal sequences stay as sharp.
    Source: Chiang and Cholak, arXiv:2202.12172; Bai et al., "Qwen", arXiv:2309.16609. Raises ValueError for other ints.
    """
    length = integer("log_n_scaling", "train_length", train_length, 2, "Pass the sequence length of training.")
    unit = math.log(length)

    @named(f"log_n_scaling_{length}")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        seen = (q_idx + 1).astype(score.dtype)
        return score * jnp.maximum(jnp.log(seen) / unit, 1)

    return score_mod


@without_frames
def scalable_softmax(factor: ArrayLike) -> ScoreMod:
    """score * factor[h] * log(q_idx + 1)

    factor:  positive number, or floating `[]` or `[N]`. Differentiable. A call of other sizes raises ValueError.
    Source: Nakanishi, "Scalable-Softmax Is Superior for Attention", arXiv:2501.19399.
    """
    advice = "The paper learns one per head."
    per_head = positive_number_or_vector("scalable_softmax", "factor", factor, advice)

    @named("scalable_softmax", *of_array("factor", per_head, "N"))
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        seen = (q_idx + 1).astype(score.dtype)
        return score * (head_value(per_head, h, score) * jnp.log(seen))

    return score_mod
