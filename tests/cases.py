"""One table of attention problems; the test files are transformations over it.

A row is data: shapes, names of mods (`tests/case_mods.py`), what is captured and how it is drawn.  Every
number drawn is a bfloat16 value, so one float64 result serves all dtypes.
"""

import dataclasses
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.case_mods import MASK_MODS, SCORE_MODS, Mod


@dataclasses.dataclass(frozen=True)
class Capture:
    """How one captured array is drawn.

    kind   normal, integers (below `high`), flags (bool), documents (sorted ids), values (given)
    poison first index along the last axis from which on the array is NaN
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    high: int = 0
    values: tuple[int | float, ...] = ()
    poison: int | None = None

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        if self.kind == "normal":
            x = rounded(rng.standard_normal(self.shape))
        elif self.kind == "integers":
            x = rng.integers(0, self.high, self.shape)
        elif self.kind == "flags":
            x = rng.integers(0, 2, self.shape)
        elif self.kind == "documents":
            x = np.sort(rng.integers(0, self.high, self.shape), axis=-1)
        else:
            x = np.array(self.values)
        x = np.asarray(x, jnp.dtype(self.dtype))
        if self.poison is not None:
            x[..., self.poison :] = np.nan
        return x


@dataclasses.dataclass(frozen=True)
class Block:
    """The block mask to build and pass instead of the mask; `batch`, `heads`: whether it varies there."""

    size: int | tuple[int, int] = 128
    batch: bool = False
    heads: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem.

    shape     (B, N, M, T, S, D, E): batch, query heads, kv heads, lengths, dims of q and k, of v
    score     name of the score mod, mask: name of the mask mod
    captures  (name, Capture) pairs; float ones want a gradient unless `frozen`
    dtypes    dtypes of q, k, v in the default run; the slow run adds the others
    block     None: pass `mask_mod`; else build and pass a block mask
    traced    integer captures are jit arguments, and the block mask is built inside the jit
    gain      factor on q; large ones make large logits
    w, u      whether the loss weighs out / lse
    sinks     whether there are learned sinks
    dropout   dropout rate
    extra     (M', R): heads and width of the extra features; such rows name their scale
    loosen    factor on the float32 tolerance, with the reason in a comment at the row
    slow      left to the slow run
    """

    name: str
    shape: tuple[int, int, int, int, int, int, int] = (1, 2, 2, 37, 37, 16, 16)
    score: str | None = None
    mask: str | None = None
    captures: tuple[tuple[str, Capture], ...] = ()
    frozen: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)
    layout: str = "BTNH"
    scale: float | None = None
    block: Block | None = None
    traced: bool = False
    gain: float = 1.0
    w: bool = True
    u: bool = True
    sinks: bool = False
    dropout: float = 0.0
    extra: tuple[int, int] | None = None
    loosen: float = 1.0
    slow: bool = False

    def inputs(self) -> dict[str, np.ndarray]:
        """q, k, v, loss weights w, u as [B, heads, length, ...] float32; sinks and extras where asked."""
        B, N, M, T, S, D, E = self.shape
        rng = self._rng("inputs")
        shapes = dict(q=(B, N, T, D), k=(B, M, S, D), v=(B, M, S, E), w=(B, N, T, E), u=(B, N, T))
        if self.sinks:
            shapes["sinks"] = (N,)
        if self.extra:
            heads, width = self.extra
            shapes |= dict(query_extra=(B, N, T, width), key_extra=(B, heads, S, width))
        drawn = {name: rounded(rng.standard_normal(shape)) for name, shape in shapes.items()}
        drawn["q"] = rounded(drawn["q"] * self.gain)
        return drawn | dict(w=drawn["w"] * self.w, u=drawn["u"] * self.u)

    def captured(self) -> dict[str, np.ndarray]:
        rng = self._rng("captures")
        return {name: capture.draw(rng) for name, capture in self.captures}

    def wanted(self) -> tuple[str, ...]:
        """Names of the captured arrays that want a gradient."""
        floating = [n for n, c in self.captures if jnp.issubdtype(jnp.dtype(c.dtype), jnp.floating)]
        return tuple(n for n in floating if n not in self.frozen)

    def mods(self, captured: dict[str, Any]) -> tuple[Mod | None, Mod | None]:
        """(score_mod, mask_mod) over the given values, which may be tracers."""
        return (
            SCORE_MODS[self.score](captured) if self.score else None,
            MASK_MODS[self.mask](captured) if self.mask else None,
        )

    def _rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{self.name}/{purpose}".encode()))


def rounded(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 values, as float32."""
    return np.asarray(np.asarray(x, jnp.bfloat16), np.float32)


def normal(*shape: int, **fields: Any) -> Capture:
    return Capture("normal", shape, **fields)


def integers(high: int, *shape: int, dtype: str = "int32") -> Capture:
    return Capture("integers", shape, dtype, high=high)


def documents(number: int, *shape: int) -> Capture:
    return Capture("documents", shape, "int32", high=number)


def values(*given: int | float, dtype: str = "int32") -> Capture:
    return Capture("values", values=given, dtype=dtype)


TWO = ("float32", "bfloat16")
ALL = ("float32", "bfloat16", "float16", "float64")

# fmt: off
_TABLE = (
    # plain, shapes and dtypes
    Case("plain", (2, 2, 2, 37, 37, 16, 16), dtypes=ALL),
    Case("plain_bnth", (2, 3, 3, 37, 41, 16, 16), layout="BNTH"),
    Case("one_by_one", (1, 2, 2, 1, 1, 16, 16), score="square"),
    Case("one_query", (2, 4, 2, 1, 300, 16, 16), mask="key_lengths", traced=True,
         captures=(("length", values(299, 130)),)),
    Case("one_key", (1, 2, 1, 7, 1, 8, 8), mask="causal"),
    Case("seven", (2, 2, 2, 7, 7, 8, 8), mask="causal", block=Block()),
    Case("no_keys", (1, 2, 2, 5, 0, 8, 8)),
    Case("no_queries", (1, 2, 2, 0, 5, 8, 8)),
    Case("no_keys_masked", (1, 2, 2, 5, 0, 8, 8), score="alibi", mask="causal", slow=True),
    Case("length_127", (1, 2, 2, 127, 127, 16, 16), mask="causal", slow=True),
    Case("length_129", (1, 2, 1, 129, 129, 16, 16), mask="causal", layout="BNTH"),
    Case("length_300", (1, 2, 2, 300, 300, 16, 16), score="alibi", mask="causal"),
    Case("short_query", (1, 2, 2, 127, 300, 16, 16), mask="causal", slow=True),
    Case("long_query", (1, 2, 2, 300, 129, 16, 16), mask="causal", block=Block(), layout="BNTH"),
    Case("mqa", (1, 6, 1, 37, 37, 16, 16), score="alibi", mask="causal"),
    Case("gqa3", (1, 6, 2, 129, 129, 16, 16), score="alibi", mask="causal", block=Block(64), slow=True),
    Case("gqa5_bnth", (2, 5, 1, 37, 61, 16, 16), layout="BNTH", slow=True),
    Case("wider_values", (1, 2, 2, 37, 37, 8, 40), mask="causal"),
    Case("narrower_values", (1, 4, 2, 127, 127, 64, 24), mask="causal", layout="BNTH", dtypes=TWO),
    Case("dim_1", (1, 2, 2, 37, 37, 1, 1), slow=True),
    Case("dim_17", (1, 2, 2, 37, 37, 17, 17), score="softcap", dtypes=("float32", "float16")),
    Case("dim_256", (1, 1, 1, 37, 37, 256, 256), mask="causal", slow=True),
    Case("scale_given", (1, 2, 2, 37, 129, 16, 16), scale=0.375, slow=True),
    Case("large_logits", (1, 2, 2, 127, 127, 16, 16), mask="causal", gain=64.0, scale=1.0,
         loosen=30),  # scores near 1000 carry float32 roundings of 6e-5 into the exponent
    # score mods without captures
    Case("identity", score="identity", slow=True),
    Case("softcap", (1, 2, 2, 129, 129, 16, 16), score="softcap", gain=4.0, dtypes=("float32", "float16")),
    Case("square", score="square", mask="causal"),
    Case("chain", score="chain", layout="BNTH"),
    Case("custom_rule", (1, 2, 2, 129, 129, 16, 16), score="custom_rule", mask="causal"),
    Case("nested_jit", score="nested_jit"),
    Case("score_minus_inf", (1, 2, 2, 127, 127, 16, 16), score="even_keys_only"),
    Case("rows_minus_inf", (1, 2, 2, 129, 129, 16, 16), score="rows_all_minus_inf", mask="causal",
         dtypes=TWO),
    # masks
    Case("window", (1, 2, 2, 300, 300, 16, 16), mask="window", block=Block(64), dtypes=TWO),
    Case("window_sizes", (1, 4, 4, 129, 129, 16, 16), mask="window_per_head", block=Block(32, heads=True),
         captures=(("window", values(1, 16, 100, 300)),)),
    Case("prefix", (2, 2, 1, 257, 257, 16, 16), mask="prefix", block=Block((128, 64)), slow=True),
    Case("documents", (1, 2, 2, 300, 300, 16, 16), mask="documents", traced=True, block=Block(64),
         captures=(("doc", documents(5, 300)),)),
    Case("packed", (3, 2, 1, 129, 129, 16, 16), mask="causal_documents", traced=True, score="distance_bias",
         block=Block(32, batch=True), captures=(("doc", documents(4, 3, 129)), ("bias", normal(129)))),
    Case("packed_bf16", (2, 2, 1, 257, 257, 32, 32), mask="causal_documents",
         block=Block((32, 64), batch=True),
         captures=(("doc", documents(4, 2, 257)),), dtypes=("bfloat16",), slow=True),
    Case("padded", (3, 2, 2, 65, 129, 16, 16), mask="key_lengths", block=Block(64, batch=True), layout="BNTH",
         captures=(("length", values(129, 1, 70)),)),
    Case("zero_lengths", (3, 2, 1, 37, 37, 16, 16), mask="both_lengths", traced=True,
         captures=(("length", values(30, 0, 7)),)),
    Case("chunked", (1, 2, 2, 257, 257, 16, 16), mask="chunked", block=Block(32), slow=True),
    Case("natten", (1, 2, 2, 256, 256, 16, 16), mask="natten", block=Block(64)),
    Case("holes", (1, 2, 2, 129, 257, 16, 16), mask="holes", block=Block((16, 64)), slow=True),
    Case("some_rows_off", (1, 2, 2, 129, 129, 16, 16), mask="some_rows_off", dtypes=TWO),
    Case("distant_past", (1, 2, 2, 300, 300, 8, 8), mask="distant_past", block=Block()),
    Case("nothing", (1, 2, 2, 37, 37, 8, 8), mask="nothing", score="alibi"),
    Case("nothing_blocks", (1, 2, 2, 37, 37, 8, 8), mask="nothing", block=Block(16), slow=True),
    Case("everything", (1, 2, 2, 129, 64, 8, 8), mask="everything", block=Block(64), slow=True),
    Case("flagged_keys", (1, 2, 2, 37, 129, 16, 16), mask="flagged_keys", traced=True,
         captures=(("flag", Capture("flags", (129,), "bool")),)),
    Case("by_batch_and_head", (2, 4, 2, 129, 129, 16, 16), mask="by_batch_and_head",
         block=Block(32, batch=True, heads=True)),
    Case("small_integers", (1, 2, 2, 129, 129, 16, 16), mask="small_integers", block=Block(64),
         captures=(("kind", integers(4, 129, dtype="int8")),)),
    Case("zero_divisors", (1, 4, 2, 37, 37, 16, 16), mask="dilation_by_head", captures=(("dilation", values(0, 1, 2, 3)),)),
    Case("scrambled_documents", (1, 2, 2, 129, 129, 16, 16), mask="scrambled_documents", block=Block(16),
         slow=True,
         captures=(("doc", documents(5, 129)), ("order", integers(129, 129)))),
    # captured arrays, by how they are read
    Case("scalar_gain", score="scalar_gain", captures=(("gain", normal()),)),
    Case("head_gate", (1, 4, 2, 129, 129, 16, 16), score="head_gate", captures=(("gate", normal(4)),), slow=True),
    Case("batch_head_scale", (2, 4, 1, 37, 129, 16, 16), score="batch_head_scale", mask="causal",
         layout="BNTH",
         captures=(("log_scale", normal(2, 4)),)),
    Case("frozen_slope", (1, 4, 1, 37, 37, 16, 16), score="head_slope", frozen=("slope",),
         captures=(("slope", normal(4)),), slow=True),
    Case("row_bias", (1, 2, 2, 129, 129, 16, 16), score="row_bias", captures=(("bias", normal(129)),)),
    Case("column_bias", (1, 2, 2, 37, 257, 16, 16), score="column_bias", mask="prefix",
         captures=(("bias", normal(2, 257)),)),
    Case("shifted_column_bias", (1, 2, 2, 37, 61, 16, 16), score="shifted_column_bias",
         captures=(("bias", normal(64)),)),
    Case("row_and_column", (3, 2, 2, 37, 61, 16, 16), score="row_and_column", layout="BNTH",
         captures=(("row", normal(37)), ("column", normal(61))), slow=True),
    Case("one_array_read_twice", (2, 2, 1, 129, 129, 16, 16), score="one_array_read_twice", mask="causal",
         captures=(("bias", normal(129)),)),
    Case("pair_bias", (2, 2, 2, 129, 129, 16, 16), score="pair_bias", captures=(("bias", normal(129, 129)),),
         dtypes=TWO),
    Case("head_pair_bias", (2, 4, 2, 37, 61, 16, 16), score="head_pair_bias", mask="causal",
         captures=(("bias", normal(4, 37, 61)),)),
    Case("full_pair_bias", (2, 2, 2, 37, 129, 16, 16), score="full_pair_bias", layout="BNTH",
         captures=(("bias", normal(2, 2, 37, 129)),)),
    Case("transposed_pair_bias", (1, 2, 2, 65, 129, 16, 16), score="transposed_pair_bias",
         captures=(("bias", normal(129, 65)),)),
    Case("pair_bias_and_transpose", (1, 2, 1, 65, 65, 16, 16), score="pair_bias_and_transpose", mask="causal",
         block=Block(32), captures=(("bias", normal(65, 65)),)),
    Case("transposed_view", (1, 4, 2, 37, 129, 16, 16), score="transposed_view", slow=True,
         captures=(("bias", normal(129, 4)),)),
    Case("fixed_plane", (2, 4, 2, 37, 37, 16, 16), score="fixed_plane",
         captures=(("bias", normal(2, 4, 3, 37)),)),
    Case("relative_bias", (2, 4, 2, 127, 127, 16, 16), score="relative_bias", mask="causal", block=Block(64),
         captures=(("bias", normal(4, 253)),), dtypes=TWO),
    Case("distance_bias", (1, 2, 2, 257, 257, 16, 16), score="distance_bias", mask="window", block=Block(64),
         captures=(("bias", normal(257)),)),
    Case("negative_index", (1, 2, 2, 37, 37, 16, 16), score="difference_bias",
         captures=(("bias", normal(80)),)),  # q - kv below zero counts from the end, as in jnp
    Case("index_out_of_range", (1, 2, 2, 37, 61, 16, 16), score="difference_bias",
         captures=(("bias", normal(20)),)),  # clamped to the ends, as in jnp
    Case("clipped_relative_bias", (1, 2, 2, 129, 129, 16, 16), score="clipped_relative_bias",
         captures=(("bias", normal(33)),)),
    Case("bucket_bias", (1, 4, 4, 65, 61, 16, 16), score="bucket_bias",
         captures=(("table", normal(16, 4)), ("bucket", integers(16, 131)))),
    Case("log_bucket_bias", (1, 2, 2, 129, 129, 16, 16), score="log_bucket_bias", mask="causal",
         captures=(("table", normal(6)),)),
    Case("indirect_row", (2, 2, 2, 129, 37, 16, 16), score="indirect_row", traced=True,
         captures=(("bias", normal(50)), ("where", integers(50, 129)))),
    Case("indirect_pair", (1, 2, 2, 129, 65, 16, 16), score="indirect_pair", mask="causal", block=Block(32),
         captures=(("bias", normal(9, 7)), ("row", integers(9, 129)), ("column", integers(7, 65))), slow=True),
    Case("modular_table", (2, 2, 2, 37, 129, 16, 16), score="modular_table", traced=True,
         captures=(("bias", normal(16, 8)),)),
    Case("integer_cost", (1, 2, 2, 129, 37, 16, 16), score="integer_cost",
         captures=(("cost", integers(9, 37)),)),
    Case("int8_cost", (1, 2, 2, 37, 37, 16, 16), score="integer_cost", slow=True,
         captures=(("cost", integers(9, 37, dtype="int8")),)),
    Case("boolean_penalty", (1, 2, 2, 37, 129, 16, 16), score="boolean_penalty",
         captures=(("flag", Capture("flags", (129,), "bool")),), slow=True),
    Case("bf16_bias", (1, 2, 2, 65, 65, 16, 16), score="pair_bias", dtypes=("bfloat16",),
         captures=(("bias", normal(65, 65, dtype="bfloat16")),)),
    Case("bf16_bias_f32_inputs", (1, 2, 2, 65, 65, 16, 16), score="distance_bias", mask="causal", slow=True,
         captures=(("bias", normal(65, dtype="bfloat16")),)),
    Case("coordinates", (1, 2, 2, 65, 65, 16, 16), score="coordinate_distance",
         captures=(("x", normal(65)), ("y", normal(65)), ("strength", normal(2)))),
    # NaN and infinity where the mask is off
    Case("poison_root", (2, 2, 1, 129, 65, 16, 16), score="root_of_distance", mask="causal", dtypes=TWO),
    Case("poison_log", (1, 2, 2, 129, 129, 16, 16), score="log_of_distance", mask="causal", block=Block(64)),
    Case("poison_bias", (2, 2, 2, 65, 129, 16, 16), score="batch_column_bias", mask="key_lengths",
         block=Block(64, batch=True), layout="BNTH",
         captures=(("bias", normal(2, 129, poison=100)), ("length", values(100, 50)))),
    Case("poison_bias_unblocked", (2, 2, 2, 37, 129, 16, 16), score="batch_column_bias", mask="key_lengths",
         traced=True, captures=(("bias", normal(2, 129, poison=100)), ("length", values(100, 50))), slow=True),
    Case("poison_everywhere", (1, 2, 2, 37, 37, 8, 8), score="column_bias", mask="nothing",
         captures=(("bias", normal(2, 37, poison=0)),)),
    # sinks, dropout, extra features, losses on lse
    Case("sinks", (2, 4, 2, 37, 129, 16, 16), mask="causal", sinks=True, dtypes=TWO),
    Case("sinks_masked_rows", (1, 2, 2, 65, 65, 16, 16), mask="some_rows_off", sinks=True, score="softcap"),
    Case("dropout", (2, 4, 2, 65, 129, 16, 16), mask="causal", dropout=0.3),
    Case("dropout_bias", (1, 2, 2, 129, 129, 16, 16), score="distance_bias", mask="window", block=Block(64),
         dropout=0.5, captures=(("bias", normal(129)),)),
    Case("extra", (2, 4, 2, 65, 65, 16, 16), mask="causal", extra=(1, 8), scale=0.2, dtypes=TWO),
    Case("extra_bnth", (1, 4, 2, 37, 129, 16, 24), score="softcap", extra=(2, 12), scale=0.2, layout="BNTH",
         slow=True),
    Case("extra_groups", (1, 12, 6, 37, 65, 16, 16), mask="causal", extra=(2, 8), scale=0.2),
    Case("lse_only", (1, 2, 2, 65, 129, 16, 16), score="column_bias", mask="prefix", w=False,
         captures=(("bias", normal(2, 129)),)),
    Case("lse_only_short", (2, 2, 2, 7, 129, 16, 16), w=False, layout="BNTH", slow=True),
    Case("out_only", (1, 2, 2, 65, 65, 16, 16), score="row_bias", mask="causal", u=False,
         captures=(("bias", normal(65)),), slow=True),
    Case("everything_at_once", (2, 4, 2, 129, 129, 16, 24), score="relative_bias", mask="causal_documents",
         block=Block(32, batch=True), traced=True, sinks=True, extra=(1, 8), scale=0.2, layout="BNTH",
         dropout=0.2,
         captures=(("bias", normal(4, 257)), ("doc", documents(3, 2, 129)))),
)
# fmt: on

CASES: dict[str, Case] = {case.name: case for case in _TABLE}
if len(CASES) != len(_TABLE):
    raise AssertionError("two cases have the same name")
