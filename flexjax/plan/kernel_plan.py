"""The plan: everything static about one attention call. Backends see a plan and its operands (arrays), nothing else.

A program is a traced mod: a list of operations on scalars, without the arrays that the mod captures (ir/program.py).

Shape letters, the same in every file: B batch, N query heads, M key/value heads (M divides N), T query length, S key
length, D head dim of query and key, E head dim of value, R dim of the extra features.
"""

import dataclasses
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
    """Static shape of a block mask: array dims, block size, list widths.

    batch, heads       leading dims of the block lists: 1 (one list for all), or the batch size and the query heads of the call
    block_q, block_kv  size of a block in queries and in keys
    partial, full      the widths (size of the last dim) of the lists of partial and of full key blocks of each query block;
                       0 where there is no such list
    partial_t, full_t  the widths of the transposed lists (query blocks of each key block): upper bounds of the number of
                       query blocks in whose list one key block is. The lists themselves are no operands; a backward pass
                       that needs them computes them from those of the query blocks
    from_user_lists    the user gave the lists (`BlockMask.from_kv_blocks`), so the mask program alone does not say which
                       entries are visible
    known              the lists in `Operands.lists`, if they are known while the call is traced, have one batch entry and head, and
                       are not too many (known_lists.py). A change of any other field of the layout makes it wrong: use `changed`
    """

    batch: int
    heads: int
    block_q: int
    block_kv: int
    partial: int
    full: int
    partial_t: int
    full_t: int
    from_user_lists: bool = False
    known: KnownLists | None = None

    def changed(self, **fields: int | bool) -> "BlockLayout":
        """This layout with other values of some fields, for other lists: `known` is None."""
        return dataclasses.replace(self, known=None, **fields)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class Residues:
    """How a call splits into calls of the tokens of one residue (residues.py), for a mask that is False where query and key have different
    residues.

    modulus   the residue of token t is t % modulus
    blocks    of the mask among the tokens of one residue, the same for all residues, batch entries and heads; its lists are known
    """

    modulus: int
    blocks: BlockLayout


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """Everything static about one attention call: sizes, dtype, programs, block layout, options. Frozen and hashable.

    batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim   B, N, M, T, S, D, E of the file docstring
    dtype        of query, key, value and out, as text; with `float8` of out, and of what the operands are converted to where they are not
                 multiplied as they are
    float8       query, key and value are float8_e4m3fn, and the plan's dtype is "bfloat16". Such a plan has a forward pass only; the
                 scales of its operands are part of the programs (float8_scales.py)
    scale        multiplies query . key (+ query_extra . key_extra) before the score program
    score        score_mod's program, None for the identity
    mask         mask_mod's program, None where every entry of the blocks in the lists is visible
    dropout      program of the factor of each probability: 0 or 1 / (1 - rate), or with `float8` the scale of the value that it
                 multiplies; None without. The softmax denominator and lse are those without the factor
    blocks       None: every block is visited and `mask` (if any) applies to all of them. Otherwise the blocks in
                 `Operands.lists` are visited, and `mask` applies to those of the partial list only
    has_sinks    whether the call has sinks
    layout       of query, key, value, out ("BTNH" or "BNTH") and so of lse, max_scores ("BTN" or "BNT")
    extra_dim    R, 0 without extra features; key_extra has `extra_heads` heads
    max_scores   whether the forward pass also returns the largest score of each row
    options      the user's KernelOptions
    origin       where the arrays lie in the whole problem (ir/origin.py); None: at 0. The programs' q and kv are positions there,
                 all other numbers of queries and keys count from 0 in the arrays
    partial      the call is a part of a sum (parallel/context_stages.py): out and gradients are in the score dtype, so that sums
                 of several parts round once
    differentiable  asks the xla backend for loops that jax can differentiate in reverse mode, for second derivatives
    lengths      whether the call gives lengths of (queries, keys) for each batch entry (`Operands.lengths`). Queries and keys from
                 a length on do not exist: whatever their slots hold, out is 0 and lse is -inf there, and gradients are 0
    exact_captures  inputs have 16 bits and gradients of captured arrays are wanted: the forward pass also returns
                 `Results.rounding`, and both passes round the softmax weights alike (`rounds_weights_alike`)
    page         tokens of a page, if keys and values are in pages (see Operands); 0: they are contiguous. Such a plan has key
                 lengths
    precision    of products of float32, a name of precision.py; "default" for inputs of 16 bits
    residues     how the call may be split by residues of its tokens, where that visits far fewer blocks; None: not at all
    cache_dtype  dtype of keys and values in pages, "int8" or "float8_e4m3fn", if they are quantised; None: `dtype`
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: str
    layout: str
    scale: float
    score: ir.Program | None = None
    mask: ir.Program | None = None
    dropout: ir.Program | None = None
    blocks: BlockLayout | None = None
    has_sinks: bool = False
    extra_dim: int = 0
    extra_heads: int = 0
    max_scores: bool = False
    options: KernelOptions = dataclasses.field(default_factory=KernelOptions)
    differentiable: bool = False
    origin: OriginLayout | None = None
    partial: bool = False
    lengths: tuple[bool, bool] = (False, False)
    exact_captures: bool = False
    page: int = 0
    cache_dtype: str | None = None
    precision: str = "default"
    residues: Residues | None = None
    float8: bool = False

    @property
    def input_dtype(self) -> str:
        """The dtype of query, key and value: FLOAT8 with `float8`, else `dtype`."""
        return FLOAT8 if self.float8 else self.dtype

    @property
    def returns_rounding(self) -> bool:
        """Whether the forward pass returns `Results.rounding`: for `exact_captures`, but not for a partial plan, whose out is not
        rounded.
        """
        return self.exact_captures and not self.partial

    @property
    def writes_rounding(self) -> bool:
        """Whether a kernel whose out has 16 bits also writes the rounding error of out: for `returns_rounding`, and for a partial plan,
        where out + rounding stands for the float32 out that is merged with others.
        """
        return self.exact_captures or (self.partial and jnp.dtype(self.dtype).itemsize == 2)

    @property
    def rounds_weights_alike(self) -> bool:
        """Whether both passes round the weights that multiply the values to the same numbers.

        A forward pass that multiplies values by bfloat16 weights 2^(s - n) takes an integer n as the reference of each row, because
        rounding to bfloat16 and scaling by a power of two commute; so the backward pass, which has another reference, can
        round its own weights to the same numbers. delta = rowsum(dO * O) is then, up to float32, the sum of rounded weight
        times dP along the row, and the cotangents of a row add up to 0 as they should:

            ds'_j = rounded weight_j * dP_j - p_j * delta

        Not where max_scores is a result, which must be the largest score itself, and not for float16, whose small weights lose
        bits below the smallest normal number.
        """
        return self.exact_captures and self.dtype == "bfloat16" and not self.max_scores

    @property
    def out_dtype(self) -> str:
        """The dtype of out: that of the scores where parts of the output are still to be merged (`partial`), else `dtype`."""
        return self.score_dtype if self.partial else self.dtype

    @property
    def factor_is_uniform(self) -> bool:
        """Whether the factor of each probability (`dropout`) is the same for a whole head, so that out may be multiplied by it; False
        without one.
        """
        return self.dropout is not None and not ir.axes_of(self.dropout.results[0]) - ir.UNIFORM

    @property
    def group(self) -> int:
        """Query heads of one key head: query head n reads key head n // group."""
        return self.q_heads // self.kv_heads

    def covered(self, queries: int, keys: int) -> tuple[int, int]:
        """The size, in (queries, keys), of the rectangle that a kernel with tiles of `queries` x `keys` visits together.

        Along each axis that is the larger of the tile and the mask block (of the tile alone without a block mask). Where the query or key
        length is no multiple of it, some tiles of the last mask block may lie wholly past the end.
        """
        blocks = (1, 1) if self.blocks is None else (self.blocks.block_q, self.blocks.block_kv)
        return max(queries, blocks[0]), max(keys, blocks[1])

    def for_any_lists(self) -> "KernelPlan":
        """The plan without known lists that may differ in the next call, which `KnownLists.fixed` says; the plan itself if it has none of
        these. A call outside of jit runs this plan, so that new lists compile nothing.
        """
        if self.blocks is None or self.blocks.known is None or self.blocks.known.fixed:
            return self
        return dataclasses.replace(self, blocks=dataclasses.replace(self.blocks, known=None))

    def on_host(self, operands: "Operands") -> "Operands":
        """The operands with the known lists, numpy arrays, in place of the block lists; themselves if no lists are known."""
        if self.blocks is None or self.blocks.known is None or operands.lists is None:
            return operands
        return operands._replace(lists=BlockLists(*self.blocks.known.arrays))  # pyright: ignore[reportArgumentType]

    @property
    def score_dtype(self) -> str:
        """The dtype of scores, lse and sums: "float64" for float64 inputs, "float32" for all others."""
        return "float64" if self.dtype == "float64" else "float32"


class BlockLists(typing.NamedTuple):
    """The partial and the full key blocks of each query block: int32 arrays, None where the BlockLayout says width 0.

    partial_num, full_num       [batch, heads, q_blocks]: how many key blocks the list of each query block has
    partial_index, full_index   [batch, heads, q_blocks, width]: their block numbers, ascending; entries past the number are
                                arbitrary valid block numbers

    batch, heads and width are those of the BlockLayout.
    """

    partial_num: jax.Array | None
    partial_index: jax.Array | None
    full_num: jax.Array | None
    full_index: jax.Array | None


class Lengths(typing.NamedTuple):
    """How many queries (`query`) and keys (`key`) of each batch entry exist: int32 [B], in 0 .. T and 0 .. S. They count from 0
    in the arrays of the call, whatever its origin is. None: all exist.
    """

    query: jax.Array | None
    key: jax.Array | None


class Scales(typing.NamedTuple):
    """What stored keys and values of a quantised cache are multiplied by: float32 [M], or [P, M] by page."""

    key: jax.Array
    value: jax.Array


FLOAT8 = "float8_e4m3fn"
"""The dtype of 8 bits that query, key and value may have."""
QUERY, KEY, VALUE, QUERY_EXTRA, KEY_EXTRA, SINKS, FIRST_CAPTURE = range(7)
"""Places of the movable operands: in Operands.movable, and in Gradients and Wanted as flat tuples. The first six are the first
fields of Operands; from FIRST_CAPTURE on come the arrays that score_mod captures."""


class Operands(typing.NamedTuple):
    """Arrays of one call, in the plan's layout. One that the call does not have is None, or an empty tuple.

    query, key, value                 [B,T,N,D], [B,S,M,D] and [B,S,M,E] (or BNTH)
    query_extra, key_extra            extra features, [B,T,N,R] and [B,S,extra_heads,R]
    sinks                             [N] of a floating dtype; where heads are joined (join_heads.py) those of rows, [1, T]
    score_, mask_, dropout_captures   the captured arrays of the three programs, in the order of `Program.captures`
    lists                             the block lists; None without a block mask
    origin                            the positions at which runs of queries and keys begin
    lengths                           how many queries and keys exist
    pages, scales                     of keys and values in pages

    With plan.page keys and values are in pages: key [P, page, M, D], value [P, page, M, E] for either layout, pages int32
    [B, n] with S = n * page. Key s of batch entry b is `key[pages[b, s // page], s % page]`; a number outside 0 .. P - 1 is a
    page of zeros, and past the key length it is not looked at. With plan.cache_dtype both are multiplied by scales, float32 [M]
    or [P, M].
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_extra: jax.Array | None
    key_extra: jax.Array | None
    sinks: jax.Array | None
    score_captures: tuple[jax.Array, ...]
    mask_captures: tuple[jax.Array, ...]
    dropout_captures: tuple[jax.Array, ...]
    lists: BlockLists | None
    origin: Starts | None = None
    lengths: Lengths | None = None
    pages: jax.Array | None = None
    scales: Scales | None = None

    @property
    def movable(self) -> tuple[jax.Array | None, ...]:
        """The operands that may have a tangent, in the order of Gradients and Wanted: query, key, value, query_extra, key_extra, sinks,
        then each captured array of score_mod. None for one that the call does not have.
        """
        return (*typing.cast(tuple[jax.Array | None, ...], self[:FIRST_CAPTURE]), *self.score_captures)


class Results(typing.NamedTuple):
    """The results of the forward pass: out [B,T,N,E] in the dtype of query; lse and max_scores [B,T,N] in the score dtype.

    out of a plan that is `partial` is in the score dtype. The axes are in the order of the plan's layout ([B,N,T,E] and [B,N,T]
    for BNTH).

    lse is the natural logarithm of the softmax denominator, -inf in a row whose entries are all masked. max_scores is the largest
    score after score_mod, -inf in such a row, and None unless the plan asks for it. In a row with a NaN score out and lse are NaN; a
    backend may return any max_scores there, which autodiff.py replaces by NaN.

    rounding is the rounding error of out, the output in float32 minus out, in the shape and dtype of out. It is None unless the plan
    has `exact_captures`, or is partial and its backend rounds out. out + rounding is the output in float32 up to a relative error of
    2^-16. The backward pass forms delta = rowsum(dO * (out + rounding)): an error of delta is the same for all entries of a row, and
    the gradient of a captured array sums it where the rest of the row cancels.
    """

    out: jax.Array
    lse: jax.Array
    max_scores: jax.Array | None
    rounding: jax.Array | None = None

    @property
    def float32_out(self) -> jax.Array:
        """The output in float32 (float64 for float64 inputs): out + rounding, or out alone where there is no rounding."""
        out = self.out.astype(jnp.promote_types(self.out.dtype, jnp.float32))
        return out if self.rounding is None else out + self.rounding.astype(out.dtype)


class Gradients(typing.NamedTuple):
    """The results of the backward pass: the gradient of each movable operand, in the shape and dtype of that operand (of a partial plan
    at least in the score dtype); None for gradients that were not wanted.
    """

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    query_extra: jax.Array | None
    key_extra: jax.Array | None
    sinks: jax.Array | None
    score_captures: tuple[jax.Array | None, ...]

    @classmethod
    def of(cls, flat: Sequence[jax.Array | None]) -> "Gradients":
        """The gradients from one for each movable operand, in the order of Operands.movable; the inverse of `flat`."""
        return cls._make((*flat[:FIRST_CAPTURE], tuple(flat[FIRST_CAPTURE:])))

    @property
    def flat(self) -> tuple[jax.Array | None, ...]:
        """The gradients in the order of Operands.movable, those of captured arrays one by one; None for those that are None."""
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
        """The flags from one for each movable operand, in the order of Operands.movable; the inverse of `flat`."""
        return cls._make((*flat[:FIRST_CAPTURE], tuple(flat[FIRST_CAPTURE:])))

    @property
    def flat(self) -> tuple[bool, ...]:
        """The flags in the order of Operands.movable, those of captured arrays one by one."""
        return (*typing.cast(tuple[bool, ...], self[:FIRST_CAPTURE]), *self.score_captures)
