"""The plan: everything static about one attention call. Backends see a plan and its operands (arrays), nothing else.

A program is a traced mod: a list of operations on scalars, without the arrays that the mod captures (ir/program.py).

Shape letters, the same in every file: B batch, N query heads, M key/value heads (M divides N), T query length, S key
length, D head dim of query and key, E head dim of value, R dim of the extra features.
"""

import dataclasses
import functools
import operator
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flexjax.ir import program as ir
from flexjax.ir.origin import OriginLayout, Starts
from flexjax.plan.known_lists import KnownLists
from flexjax.types import KernelOptions


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """Static shape of a block mask: array dims, block size, list widths."""

    # leading dims of the block lists: 1 (one list for all), or the batch size and the query heads of the call
    batch: int
    heads: int
    # in queries and in keys
    block_q: int
    block_kv: int
    # widths of the lists of partial and of full key blocks of each query block; 0 where there is no such list
    partial: int
    full: int
    # upper bounds of the number of query blocks in whose list one key block is; a backward pass computes those lists
    partial_t: int
    full_t: int
    from_user_lists: bool = False  # so the mask program alone does not say which entries are visible
    # the lists, if they are known while the call is traced; wrong for other fields, so use `changed`
    known: KnownLists | None = None
    # `tolerance` left blocks out that the program shows: to visit them is never wrong, and not what was asked for
    thinned: bool = False

    def __repr__(self) -> str:
        """Without fields that have their default: see `plan_text`."""
        given = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"BlockLayout({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    def changed(self, **fields: int | bool) -> "BlockLayout":
        """This layout with other values of some fields, for other lists: `known` is None."""
        return dataclasses.replace(self, known=None, **fields)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class Residues:
    """How a call becomes one call with a head for each head and residue of a token (rewrites/residues.py)."""

    modulus: int  # the residue of token t is t % modulus
    blocks: BlockLayout  # of the mask among the tokens of one residue, the same for all; its lists are known


@dataclasses.dataclass(frozen=True, eq=False)
class KernelPlan:
    """Everything static about one attention call: sizes, dtype, programs, block layout, options. Hashable."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    # of query, key, value and out; with `float8` of out, and of operands that are not multiplied as they are
    dtype: str
    layout: str  # "BTNH" or "BNTH"; of lse and max_scores "BTN" or "BNT"
    scale: float  # multiplies query . key (+ query_extra . key_extra) before the score program
    score: ir.Program | None = None  # None for the identity
    mask: ir.Program | None = None  # None where every entry of the blocks in the lists is visible
    # the factor of each probability: 0 or 1 / (1 - rate), or with `float8` the scale of the value; lse is without it
    dropout: ir.Program | None = None
    # None: every block is visited, and `mask` applies to all of them; otherwise it applies to the partial list only
    blocks: BlockLayout | None = None
    has_sinks: bool = False
    # R, 0 without extra features; key_extra has `extra_heads` heads
    extra_dim: int = 0
    extra_heads: int = 0
    max_scores: bool = False  # whether the forward pass also returns the largest score of each row
    options: KernelOptions = dataclasses.field(default_factory=KernelOptions)
    # asks the xla backend for loops that jax can differentiate in reverse mode, for second derivatives
    differentiable: bool = False
    # where the arrays lie in the whole problem; the programs' q and kv are positions there, all other numbers count
    # from 0
    origin: OriginLayout | None = None
    partial: bool = False  # the call is a part of a sum (context/stages.py): out and gradients are in the score dtype
    # whether there are lengths of (queries, keys); past one out is 0, lse is -inf and gradients are 0
    lengths: tuple[bool, bool] = (False, False)
    # inputs have 16 bits and captured arrays have gradients: the forward pass also returns `Results.rounding`
    exact_captures: bool = False
    page: int = 0  # tokens of a page, if keys and values are in pages; 0: they are contiguous
    stored_pages: int = 0  # P, the pages of the pools
    # "int8" or "float8_e4m3fn", if keys and values in pages are quantised; None: `dtype`
    cache_dtype: str | None = None
    precision: str = "default"  # of products of float32, a name of precision.py
    # how the call may be split by residues of its tokens, where that visits far fewer blocks
    residues: Residues | None = None
    # query, key and value are float8_e4m3fn and `dtype` is "bfloat16"; forward pass only, scales are in the programs
    float8: bool = False
    # no softmax: the result of `score` is the weight of a value, 0 at hidden entries, and lse is the sum of a row
    weighted: bool = False
    total: bool = False  # whether the sum is a result; else lse is not read
    # how many functions after the new score the results of `score` are; their expectations are a result
    expectations: int = 0
    # entries have functions, or their derivatives, beside the score: smaller tiles of mma.sync keep them in registers
    crowded: bool = False
    # the call was rewritten for kernels of large tiles of queries, so that no decode kernel runs it
    for_tiles: bool = False
    # keys of an invariant call may be numbered from elsewhere than the first of the array, by origin.key
    keys_begin_elsewhere: bool = False
    # how many documents an invariant call has, in each of which keys are numbered from its first; 0: none are told
    documents: int = 0

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """What plans are compared by: the fields, floats as text, because 0.0 == -0.0 and NaN != NaN."""
        return tuple([repr(x) if isinstance(x, float) else x for x in _fields_of(self)])

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.key == typing.cast(KernelPlan, other).key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def input_dtype(self) -> str:
        return FLOAT8 if self.float8 else self.dtype

    @property
    def returns_rounding(self) -> bool:
        """Whether the forward pass returns `Results.rounding`; out of a partial plan is not rounded."""
        return self.exact_captures and not self.partial

    @property
    def writes_rounding(self) -> bool:
        """Whether a kernel whose out has 16 bits also writes its rounding error; a partial plan merges their sum."""
        return self.exact_captures or (self.partial and jnp.dtype(self.dtype).itemsize == 2)

    @property
    def rounds_weights_alike(self) -> bool:
        """Whether both passes round the weights that multiply the values to the same numbers.

        A forward pass that multiplies values by bfloat16 weights 2^(s - n) takes an integer n as the reference of each
        row, because rounding to bfloat16 and scaling by a power of two commute; so the backward pass, which has another
        reference, rounds its own weights to the same numbers. delta = rowsum(dO * O) is then, up to float32, the sum of
        rounded weight times dP along the row, and the cotangents of a row add up to 0 as they should:

            ds'_j = rounded weight_j * dP_j - p_j * delta
        """
        # max_scores must be the largest score itself; small weights in float16 are subnormal and lose bits
        return self.exact_captures and self.dtype == "bfloat16" and not self.max_scores

    @property
    def whole_references(self) -> bool:
        """Whether softmax references are whole powers of two in the forward pass."""
        return self.rounds_weights_alike or self.options.invariant

    @property
    def lse_without_keys(self) -> float:
        """`Results.lse` of a row without visible keys and without a sink: of no exponentials, or of no weights."""
        return 0.0 if self.weighted else float("-inf")

    @property
    def out_dtype(self) -> str:
        """The dtype of out: that of the scores where parts of the output are still to be merged, else `dtype`."""
        return self.score_dtype if self.partial else self.dtype

    @property
    def factor_is_uniform(self) -> bool:
        """Whether the dropout factor is the same for a whole head, so that out may be multiplied by it."""
        return self.dropout is not None and not ir.axes_of(self.dropout.results[0]) - ir.UNIFORM

    @property
    def group(self) -> int:
        """Query heads of one key head: query head n reads key head n // group."""
        return self.q_heads // self.kv_heads

    def covered(self, queries: int, keys: int) -> tuple[int, int]:
        """(queries, keys) that a kernel with such tiles visits together: the larger of the tile and the mask block."""
        blocks = (1, 1) if self.blocks is None else (self.blocks.block_q, self.blocks.block_kv)
        return max(queries, blocks[0]), max(keys, blocks[1])

    def for_any_lists(self) -> "KernelPlan":
        """The plan without known lists that may differ in the next call, so that new lists compile nothing."""
        if self.blocks is None or self.blocks.known is None or self.blocks.known.fixed:
            return self
        return dataclasses.replace(self, blocks=dataclasses.replace(self.blocks, known=None))

    def on_host(self, operands: "Operands") -> "Operands":
        """The operands with the known lists, numpy arrays, in place of the block lists."""
        if self.blocks is None or self.blocks.known is None or operands.lists is None:
            return operands
        return operands._replace(lists=BlockLists(*self.blocks.known.arrays))  # pyright: ignore[reportArgumentType]

    @property
    def score_dtype(self) -> str:
        """Is "float64" for float64 inputs, "float32" for all others."""
        return "float64" if self.dtype == "float64" else "float32"


_fields_of = operator.attrgetter(*(f.name for f in dataclasses.fields(KernelPlan)))


class BlockLists(typing.NamedTuple):
    """The partial and the full key blocks of each query block: int32 arrays, None for lists of width 0."""

    # [batch, heads, q_blocks] and [.., width]; numbers ascend, those past the count are arbitrary valid block numbers
    partial_num: jax.Array | None
    partial_index: jax.Array | None
    full_num: jax.Array | None
    full_index: jax.Array | None


class BlockBits(typing.NamedTuple):
    """The same blocks as bits, uint32 [batch, heads, q_blocks, words], which a pass expands (passes/dispatch.py)."""

    partial: jax.Array
    full: jax.Array


class Lengths(typing.NamedTuple):
    """How many queries and keys of each batch entry exist: int32 [B]; they count from 0 whatever the origin is."""

    query: jax.Array | None
    key: jax.Array | None


class Scales(typing.NamedTuple):
    """What stored keys and values of a quantised cache are multiplied by: float32 [M], or [P, M] by page."""

    key: jax.Array
    value: jax.Array


FLOAT8 = "float8_e4m3fn"  # the dtype of 8 bits that query, key and value may have
QUERY, KEY, VALUE, QUERY_EXTRA, KEY_EXTRA, SINKS, FIRST_CAPTURE = range(7)
"""Places of the movable operands in Operands.movable; from FIRST_CAPTURE on come the arrays that score_mod captures."""


class Operands(typing.NamedTuple):
    """Arrays of one call, in the plan's layout. One that the call does not have is None, or an empty tuple.

    With plan.page keys and values are in pages: key [P, page, M, D], value [P, page, M, E] for either layout, pages
    int32 [B, n] with S = n * page. Key s of batch entry b is `key[pages[b, s // page], s % page]`; a number outside 0
    .. P - 1 is a page of zeros, and past the key length it is not looked at.
    """

    # [B, T, N, D], [B, S, M, D], [B, S, M, E], or BNTH
    query: jax.Array
    key: jax.Array
    value: jax.Array
    # [B, T, N, R] and [B, S, extra_heads, R]
    query_extra: jax.Array | None
    key_extra: jax.Array | None
    sinks: jax.Array | None  # [N]; where heads are joined (rewrites/join_heads.py) those of rows, [1, T]
    # in the order of `Program.captures`
    score_captures: tuple[jax.Array, ...]
    mask_captures: tuple[jax.Array, ...]
    dropout_captures: tuple[jax.Array, ...]
    lists: BlockLists | None  # backends see no others, but outside of a pass these may be BlockBits
    origin: Starts | None = None
    lengths: Lengths | None = None
    pages: jax.Array | None = None
    scales: Scales | None = None
    # offsets of an invariant call, int32 [B, n + 1]: the mask has them too, but tiles begin there
    documents: jax.Array | None = None

    @property
    def movable(self) -> tuple[jax.Array | None, ...]:
        """The operands that may have a tangent, in the order of Gradients and Wanted; None for missing ones."""
        return (*typing.cast(tuple[jax.Array | None, ...], self[:FIRST_CAPTURE]), *self.score_captures)


class Results(typing.NamedTuple):
    """The results of the forward pass, axes in the order of the plan's layout.

    In a row with a NaN score out and lse are NaN; a backend may return any max_scores there, which passes/autodiff.py
    replaces by NaN. The backward pass forms delta = rowsum(dO * (out + rounding)): an error of delta is the same for
    all entries of a row, and the gradient of a captured array sums it where the rest of the row cancels.
    """

    out: jax.Array  # [B, T, N, E] in the dtype of query, or of scores if the plan is `partial`
    # [B, T, N]; log of the softmax denominator, -inf where all entries are masked; of a weighted plan the total
    lse: jax.Array
    # [B, T, N]; after score_mod, -inf where all entries are masked; None unless the plan asks for it
    max_scores: jax.Array | None
    # float32 output minus out; None unless the plan has `exact_captures`, or is partial and its backend rounds out
    rounding: jax.Array | None = None
    expectations: jax.Array | None = None  # [B, T, N, plan.expectations], 0 where all entries are masked; None without

    @classmethod
    def of(cls, plan: KernelPlan, flat: Sequence[jax.Array]) -> "Results":
        """The results that a forward pass of the plan returns, from their flat list, which leaves out what is None."""
        out, lse, *rest = flat
        asked = plan.max_scores, plan.returns_rounding, plan.expectations > 0
        return cls(out, lse, *(rest.pop(0) if want else None for want in asked))

    @property
    def float32_out(self) -> jax.Array:
        """The output in float32 (float64 for float64 inputs): out + rounding."""
        out = self.out.astype(jnp.promote_types(self.out.dtype, jnp.float32))
        return out if self.rounding is None else out + self.rounding.astype(out.dtype)


class Gradients(typing.NamedTuple):
    """The gradient of each movable operand, in its shape and dtype (of a partial plan at least in the score dtype)."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    query_extra: jax.Array | None
    key_extra: jax.Array | None
    sinks: jax.Array | None
    score_captures: tuple[jax.Array | None, ...]

    @classmethod
    def of(cls, flat: Sequence[jax.Array | None]) -> "Gradients":
        """The inverse of `flat`."""
        return cls._make((*flat[:FIRST_CAPTURE], tuple(flat[FIRST_CAPTURE:])))

    @property
    def flat(self) -> tuple[jax.Array | None, ...]:
        """The gradients in the order of Operands.movable."""
        return (*typing.cast(tuple[jax.Array | None, ...], self[:FIRST_CAPTURE]), *self.score_captures)


class Wanted(typing.NamedTuple):
    """For each movable operand, whether the backward pass has to compute its gradient (static)."""

    query: bool
    key: bool
    value: bool
    query_extra: bool
    key_extra: bool
    sinks: bool
    score_captures: tuple[bool, ...]

    @classmethod
    def of(cls, flat: Sequence[bool]) -> "Wanted":
        """The inverse of `flat`."""
        return cls._make((*flat[:FIRST_CAPTURE], tuple(flat[FIRST_CAPTURE:])))

    @property
    def flat(self) -> tuple[bool, ...]:
        """The flags in the order of Operands.movable."""
        return (*typing.cast(tuple[bool, ...], self[:FIRST_CAPTURE]), *self.score_captures)


class BackwardInputs(typing.NamedTuple):
    """What a backward pass gets beside the plan."""

    operands: Operands
    results: Results  # max_scores may be None
    d_out: jax.Array
    d_lse: jax.Array | None  # None for zero
    wanted: Wanted
    # (score, d score / d raw score, d score / d each load of floats), or cotangents if it `takes_cotangent`; None for
    # the identity
    derivative: ir.Program | None


class TangentInputs(typing.NamedTuple):
    """What forward mode gets beside the plan."""

    operands: Operands
    results: Results
    tangents: Gradients  # of the operands; None counts as 0
    derivative: ir.Program | None  # as of BackwardInputs, never one that `takes_cotangent`
