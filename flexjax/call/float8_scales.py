"""What float8 queries, keys and values are multiplied by: the scales of a Quantized (types.py).

    score = scale * (query . key) * query_scale * key_scale      before score_mod
    out   = sum over keys of p * value_scale * value

Scales become captured arrays of the score program and of the program of the factor of each probability
(KernelPlan.dropout). So they may be traced, and every backend has them.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp

from flexjax.call.arguments import Arguments
from flexjax.call.checks import CheckedArrays, check_array
from flexjax.errors import bad_argument
from flexjax.plan.kernel_plan import FLOAT8
from flexjax.trace.trace_mod import Sizes, TracedMod, trace_multiplier
from flexjax.types import Quantized, ScoreMod

Array = jax.Array

SMALLEST = 1e-12
"""The smallest scale of queries and keys. Positive scales let a kernel multiply where it scales a score to base 2."""
NAMES = ("query.scales", "key.scales", "value.scales")


@dataclasses.dataclass(frozen=True)
class ScaleTable:
    """The scales of one operand, float32 [B or 1, query heads, blocks], each of `block` tokens."""

    values: Array
    block: int

    def __call__(self, b: Array, h: Array, token: Array) -> Array:
        entry = b if self.values.shape[0] > 1 else 0
        block = token // self.block if self.values.shape[2] > 1 else 0
        return self.values[entry, h, block]


def _spread(x: Array, axis: int, times: int) -> Array:
    """Each element along an axis so many times. Unlike jnp.repeat it takes arrays that explicit mesh axes split."""
    if times == 1:
        return x
    shape = x.shape
    x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*shape[: axis + 1], times, *shape[axis + 1 :]))
    return x.reshape(*shape[:axis], shape[axis] * times, *shape[axis + 1 :])


@dataclasses.dataclass(frozen=True)
class ScaleTables:
    """The scale tables of a call's operands; None for one that is multiplied by 1."""

    query: ScaleTable | None
    key: ScaleTable | None
    value: ScaleTable | None

    def score_mod(self, score_mod: ScoreMod | None) -> ScoreMod | None:
        """`score_mod` of the score times the scales of query and key."""
        query, key = self.query, self.key
        if query is None and key is None:
            return score_mod

        def scaled(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
            for table, token in ((query, q_idx), (key, kv_idx)):
                score = score if table is None else score * jnp.maximum(table(b, h, token), SMALLEST)
            return score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)

        return scaled if score_mod is None else functools.wraps(score_mod)(scaled)

    def factor(self, sizes: Sizes) -> TracedMod | None:
        """The traced program of the scale of the value; None without such scales. `sizes` are above all indices."""
        value = self.value
        if value is None:
            return None
        return trace_multiplier("value.scales", lambda b, h, q_idx, kv_idx: value(b, h, kv_idx), sizes)


def dequantised(arrays: tuple[Array, Array, Array], given: Arguments) -> list[Array]:
    """float8 query, key and value times their checked scales, float32, for the dense implementation."""
    made = []
    for x, scales in zip(arrays, _scales(given), strict=True):
        x = x.astype(jnp.float32)
        if scales is not None:
            tokens = 1 if given.layout == "BTNH" else 2
            scales = jnp.asarray(scales, jnp.float32)
            if scales.ndim == 2:
                scales = jnp.expand_dims(scales, tokens)
            x = x * _spread(scales, tokens, x.shape[tokens] // scales.shape[tokens])[..., None]
        made.append(x)
    return made


def _scales(arguments: Arguments) -> tuple[typing.Any, ...]:
    """The scales of query, key and value, not checked yet; None for those that are no Quantized."""
    operands = arguments.query, arguments.key, arguments.value
    return tuple(x.scales if isinstance(x, Quantized) else None for x in operands)


def of_call(arguments: Arguments, inputs: CheckedArrays) -> ScaleTables:
    """The scale tables of a call. Raises ValueError, also beside extra features and an origin."""
    given = _scales(arguments)
    scales = check_scales(given, inputs, arguments.layout)
    named = [name for name, x in zip(NAMES, given, strict=True) if x is not None]
    # the products of extra features would be multiplied by the scales too
    if named and inputs.sizes.extra_dim:
        raise bad_argument(
            "query_extra",
            "given beside scales",
            "None",
            "Append the features to query and key before these become float8.",
        )
    block_mask = arguments.block_mask
    # the indices of an origin are not those of the arrays
    if named and (arguments.origin is not None or (block_mask is not None and block_mask.origin is not None)):
        raise bad_argument(
            named[0], "given beside an origin", "None",
            "Cast the arrays to bfloat16 and multiply them by their scales.",
        )  # fmt: skip
    return scales


def check_scales(given: tuple[object, ...], inputs: CheckedArrays, layout: str) -> ScaleTables:
    """The tables of the arguments NAMES: None, [B or 1, heads], or [B or 1, n, heads] (BNTH: [B or 1, heads, n]).

    n divides the tokens of the operand. Raises ValueError for operands that are not float8 and arrays that do not fit.
    """
    tables: list[ScaleTable | None] = []
    heads_of = (inputs.sizes.q_heads, inputs.sizes.kv_heads, inputs.sizes.kv_heads)
    tokens_of = (inputs.sizes.q_len, inputs.sizes.kv_len, inputs.sizes.kv_len)
    for name, x, heads, tokens in zip(NAMES, given, heads_of, tokens_of, strict=True):
        if x is None:
            tables.append(None)
            continue
        if inputs.dtype != FLOAT8:
            raise bad_argument(
                name, f"given with values of {inputs.dtype}", f"values of {FLOAT8}",
                "Multiply the array itself by its scales.",
            )  # fmt: skip
        array = check_array(name, x)
        by_block = array.ndim == 3
        found = jnp.swapaxes(array, 1, 2) if by_block and layout == "BTNH" else array if by_block else array[..., None]
        fits = array.ndim in (2, 3) and jnp.issubdtype(array.dtype, jnp.floating)
        fits = fits and found.shape[0] in (1, inputs.sizes.batch) and found.shape[1] == heads
        blocks = found.shape[2] if fits else 0
        if not fits or (blocks != 1 and (blocks == 0 or tokens % blocks)):
            shape = f"[{inputs.sizes.batch}, n, {heads}]" if layout == "BTNH" else f"[{inputs.sizes.batch}, {heads}, n]"
            raise bad_argument(
                name,
                f"{array.dtype.name}{list(array.shape)}",
                f"float32[{inputs.sizes.batch}, {heads}], a scale for each head, "
                f"or float32{shape}, one for each of n blocks",
                f"n divides the {tokens} tokens; the first dim may be 1.",
            )
        # of query heads, as a mesh splits them
        found = _spread(found.astype(jnp.float32), 1, inputs.sizes.q_heads // heads)
        tables.append(ScaleTable(found, tokens // max(blocks, 1)))
    return ScaleTables(*tables)
