"""Public types: what a user passes to `flex_attention` and gets back, apart from arrays and block masks."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax import core

from flexjax.errors import bad_argument
from flexjax.mod_tools.numpy_arrays import unwrapped
from flexjax.mod_tools.refusals import without_frames

ArrayArgument = jax.Array | np.ndarray
"""An array as users pass it."""

ArrayOrShape = ArrayArgument | jax.ShapeDtypeStruct
"""An array, or its shape and dtype, for functions that compute nothing with the caller's values."""

Layout = typing.Literal["BTNH", "BNTH"]
"""Order of the axes of query, key, value and out: batch, tokens, heads, head dim, or batch, heads, tokens, head dim."""

Implementation = typing.Literal["mosaic_gpu", "mosaic_tpu", "xla", "reference"]
"""A backend, or "reference", the dense implementation straight from the definition."""

Implementations = Implementation | Sequence[Implementation]
"""One backend, or several, which are asked in this order."""


Precision = (
    jax.lax.Precision
    | jax.lax.DotAlgorithmPreset
    | str
    | tuple[str, str]
    | tuple[jax.lax.Precision, jax.lax.Precision]
    | None
)
"""How exactly float32 is multiplied, as `jax.lax.dot_general` takes it: both operands have the same precision."""


class ScoreMod(typing.Protocol):
    """A score function: `score_mod(score, b, h, q_idx, kv_idx) -> score`, on scalars.

    score          scale * query . key, float32 (float64 for float64 inputs)
    b, h           int32: the batch entry and the query head
    q_idx, kv_idx  int32: the positions of the query and of the key

    Any callable that takes five positional arguments is one.
    """

    def __call__(
        self, score: jax.Array, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array, /
    ) -> jax.Array: ...


class MaskMod(typing.Protocol):
    """A mask function: `mask_mod(b, h, q_idx, kv_idx) -> bool`, on scalars; True where the query attends to the key.

    The arguments are those of ScoreMod. Any callable that takes four positional arguments is one.
    """

    def __call__(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array, /) -> jax.Array | bool: ...


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of values that are no softmax, the argument `weights` of flex_attention, with a divisor of each row.

    function   function(score, b, h, q_idx, kv_idx) -> weight, on scalars, as a score_mod
    divisor    divisor(total) -> number, of an array of the totals of rows, the sums of their weights: out is divided by
               it, and 0 where it is 0. Any differentiable function of jax; the total itself: `lambda total: total`.
               None: out is not divided

    Example: flex_attention(q, k, v, weights=flexjax.Weights(lambda s, b, h, q, k: jnp.exp(s), lambda total: total))
    """

    function: ScoreMod
    divisor: Callable[[jax.Array], jax.Array] | None = None

    def __post_init__(self) -> None:
        for name, expected in (("function", "a function"), ("divisor", "a function or None")):
            value = getattr(self, name)
            if not callable(value) and not (name == "divisor" and value is None):
                raise bad_argument(f"weights.{name}", repr(value), expected, "See flexjax.Weights.")


@dataclasses.dataclass(frozen=True)
class AuxRequest:
    """The extra results that `flex_attention(..., return_aux=)` returns beside the output.

    lse          natural logarithm of the sum of the exponentials of a row's scores and the sink of its head, [B, T, N]
                 ([B, N, T] for layout "BNTH"), differentiable; float32, float64 for float64 inputs
    max_scores   the largest score of each row, without the sink, same shape and dtype, without a gradient
    total        of a call with `weights`: the sum of the weights of a row, before dropout; as lse, which such a call
                 does not have
    expectations {name: f}: for each f(score, b, h, q_idx, kv_idx) -> number, on scalars, of the score after score_mod,
                 the sum over keys of p * f, or of the weight * f with `weights`; as lse. Dropout does not count, a sink
                 counts in p, and a row without visible keys gives 0. Where the score is -inf, f does not count. The GPU
                 kernels take at most four (docs/expectations.md)
    lost         of a call with `tolerance`: a proven bound of the probabilities that were left out of a row, of the sum
                 of |weight| with `weights`, float32 in the shape of lse, without a gradient; it costs nothing

    Example, the entropy of each row:

        asked = AuxRequest(lse=True, expectations={"score": lambda s, b, h, q, k: s})
        out, aux = flex_attention(q, k, v, return_aux=asked)
        entropy = aux.lse - aux.expectations["score"]
    """

    lse: bool = False
    max_scores: bool = False
    total: bool = False
    expectations: Mapping[str, ScoreMod] | None = dataclasses.field(default=None, hash=False)
    lost: bool = False

    def __post_init__(self) -> None:
        _check_flags("return_aux", self)
        given = self.expectations
        if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
            raise bad_argument(
                "return_aux.expectations", repr(given), "a dict from names to functions, or None", 'Pass {"name": f}.'
            )

    def __repr__(self) -> str:
        """What is asked for; of expectations the names."""
        asked = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        named = {name: list(x) if isinstance(x, Mapping) else x for name, x in asked.items() if x}
        return f"AuxRequest({', '.join(f'{name}={x}' for name, x in named.items())})"


class AuxOutput(typing.NamedTuple):
    """The extra results that an AuxRequest asked for; None in place of the others."""

    lse: jax.Array | None = None
    max_scores: jax.Array | None = None
    total: jax.Array | None = None
    expectations: dict[str, jax.Array] | None = None
    lost: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """How a call is computed; the values that it computes stay the same up to rounding. None: the backend chooses.

    block_q, block_kv  tile of the forward pass, in tokens; xla takes the nearest tile that its loops can have
    block_q_bwd, block_kv_bwd  tile of the backward pass
    num_stages     number of key tiles in shared memory in the forward pass (GPU)
    split          split-KV (flash-decoding) on a GPU: keys of a chunk. "auto": chunks of 0.5 or 1 MB of keys and
                   values. None: "auto" for keys in pages and for few queries; else keys are not split
                   (docs/performance.md)
    instruction    "mma": mma.sync, on compute capability 8.0 to 9.0, 10.0, 10.3 and 12.x. "tcgen05": on 10.0 and 10.3,
                   not run on a GPU yet. Other backends and GPUs refuse both. None: WGMMA on Hopper, mma.sync on the
                   others
    cta_pairs      True: two CTAs share each tcgen05 instruction of the dK/dV kernel at head dims from 97 to 128; not
                   run on a GPU yet
    deterministic  True: the same inputs give the same bits. False: the backward pass may add in any order
    invariant      True: out and lse of a token do not depend on what else is in the call: other tokens, batch, chunks,
                   pages, padding. The kernels for Hopper and xla on a CPU run it; others refuse (docs/same_bits.md)
    interpret      True: simulate the kernel of a GPU (outside of jax.jit only) or TPU on the CPU. The GPU simulator
                   needs PJRT_NPROC=32 in the environment on few cores, or it can deadlock

    A kernel backend refuses a tile that it cannot run, and the default dispatch goes on to the next backend. A backend
    without such an option ignores it, except `instruction` and `invariant`. New options compile a new program.

    Example: flex_attention(q, k, v, kernel_options=KernelOptions(block_q=128, block_kv=64))
    """

    block_q: int | None = None
    block_kv: int | None = None
    block_q_bwd: int | None = None
    block_kv_bwd: int | None = None
    num_stages: int | None = None
    split: int | typing.Literal["auto"] | None = None
    instruction: typing.Literal["mma", "tcgen05"] | None = dataclasses.field(default=None, metadata={"gpu": True})
    cta_pairs: bool = False
    deterministic: bool = True
    invariant: bool = False
    interpret: bool = False

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv", "block_q_bwd", "block_kv_bwd", "num_stages"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise bad_argument(
                    f"kernel_options.{name}", repr(value), "a positive int or None", "None lets the backend choose."
                )
        split = self.split
        if split not in (None, "auto") and (not isinstance(split, int) or isinstance(split, bool) or split < 1):
            raise bad_argument(
                "kernel_options.split",
                repr(split),
                '"auto", a positive int or None',
                '"auto" lets the backend choose the chunk.',
            )
        if self.instruction not in (None, "mma", "tcgen05"):
            raise bad_argument(
                "kernel_options.instruction",
                repr(self.instruction),
                '"mma", "tcgen05" or None',
                "None lets the backend choose.",
            )
        _check_flags("kernel_options", self)
        for name in ("block_q", "block_kv", "num_stages", "split"):
            if self.invariant and getattr(self, name) is not None:
                raise bad_argument(
                    f"kernel_options.{name}",
                    f"{getattr(self, name)!r} beside invariant=True",
                    "None",
                    "Its tiles and splits are a part of the bits.",
                )


@dataclasses.dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of attention probabilities: each is set to 0 with chance `rate`, and the others are divided by 1 - rate.
    A pytree whose array is the key.

    rate        a Python float in [0, 1); 0 means no dropout
    key         the jax random key that says which are dropped, typed or raw; the backward pass drops the same ones. It
                may be traced, and a new key compiles nothing
    broadcast   True: all batch entries and heads drop the same positions, which is flax's default

    Example: flex_attention(q, k, v, dropout=flexjax.Dropout(0.1, jax.random.key(0)))
    """

    rate: float
    key: ArrayOrShape | None
    broadcast: bool = False

    def __post_init__(self) -> None:
        """Takes the key out of an object that holds it. Raises ValueError for a rate that is no number in [0, 1) and a
        `broadcast` that is no bool; the key is checked where it is used.
        """
        rate, expected = self.rate, "a Python float in [0, 1)"
        if isinstance(rate, core.Tracer):
            raise bad_argument("dropout.rate", "traced", expected, "Make it a static argument of jit.")
        if not isinstance(rate, int | float | np.number) or not 0 <= rate < 1:
            raise bad_argument("dropout.rate", repr(rate), expected, "0.0 means no dropout.")
        _check_flags("dropout", self)
        object.__setattr__(self, "rate", float(rate))
        object.__setattr__(self, "key", unwrapped(self.key))

    def __repr__(self) -> str:
        """The fields, with the key as dtype and shape, because the text of an array waits for the device."""
        more = ", broadcast=True" if self.broadcast else ""
        return f"Dropout({self.rate}, {_array_text(self.key)}{more})"


jax.tree_util.register_dataclass(Dropout, data_fields=["key"], meta_fields=["rate", "broadcast"])


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """A float8 query, key or value that stands for itself times its scales; a pytree.

    values   float8_e4m3fn, in the shape of the argument
    scales   positive floats: [B, heads], or [B, n, heads] (layout "BNTH": [B, heads, n]) with one for each of n blocks
             of tokens of the same length. B may be 1. They may be traced, and new ones compile nothing

    In a `flexjax.paged.PagedCache` values are int8 or float8_e4m3fn pages, and scales [heads] or [pages, heads].
    """

    values: ArrayOrShape
    scales: ArrayOrShape

    def __post_init__(self) -> None:
        """Takes the arrays out of objects that hold them; they are checked where they are used."""
        object.__setattr__(self, "values", unwrapped(self.values))
        object.__setattr__(self, "scales", unwrapped(self.scales))

    def __repr__(self) -> str:
        return f"Quantized({_array_text(self.values)}, {_array_text(self.scales)})"


jax.tree_util.register_dataclass(Quantized, data_fields=["values", "scales"], meta_fields=[])

Operand = ArrayArgument | Quantized
"""A query, key or value as users pass it."""


def values_of(x: object) -> typing.Any:
    """The values of a Quantized; anything else as it is."""
    return x.values if isinstance(x, Quantized) else x


def _array_text(x: object) -> str:
    """An array, or what stands for one, as dtype and shape; anything else as its repr."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    return repr(x) if dtype is None or shape is None else f"{dtype}{list(shape)}"


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Where the arrays of a call lie in a larger attention, the whole problem: a shard, a chunk of a prefill, a decode.

    Mods, masks and dropout see b + batch, h + head, q_idx + query[b] and kv_idx + key[b], for indices that count from 0
    in the arrays of the call. Arrays that mods capture are those of the whole problem.

    batch, head   ints or int32 scalars
    query, key    ints, int32 scalars, or int32 [B]: one for each batch entry of the call
    query="end"   the last query that exists lies at the last key that exists, as in decoding with a cache: query[b] =
                  key[b] + max(key length - query length, 0)
    documents     int32 [n + 1] or [B, n + 1]: document i of a row has the tokens documents[i] .. documents[i + 1] - 1,
                  as in cu_seqlens. Tokens then attend within their document alone, and q_idx and kv_idx count from
                  where it begins; dropout counts in the row. Tokens outside of all documents see nothing. query and
                  key are 0 then, and there are as many queries as keys
    whole         (batch, heads, q_len, kv_len) of the whole problem, ints, or None where unknown. With the lengths, a
                  read
                  such as `table[h, q_idx - kv_idx + T - 1]` stays a slice; without, it is a gather, which is slower

    All but `whole` may be traced, and new numbers compile nothing. An Origin is a pytree. Indices must be 0 or more and
    below `whole`, or below 2^29. A known int out of range raises ValueError; numbers in jax arrays are not checked.

    Example, inside jax.shard_map over an axis "sp" that splits the queries and not the keys:

        me = jax.lax.axis_index("sp")
        flexjax.flex_attention(q, k, v, mask_mod=masks.causal, origin=flexjax.Origin(query=me * q.shape[1]))
    """

    batch: int | jax.Array = 0
    head: int | jax.Array = 0
    query: int | jax.Array | typing.Literal["end"] = 0
    key: int | jax.Array = 0
    whole: tuple[int | None, int | None, int | None, int | None] | None = None
    documents: ArrayArgument | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "head", "query", "key", "documents"):
            object.__setattr__(self, name, unwrapped(getattr(self, name)))

    def __repr__(self) -> str:
        # arrays as dtype and shape, because the text of an array waits for the device
        text = lambda x: f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array | np.ndarray) else repr(x)
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return f"Origin({', '.join(f'{n}={text(x)}' for n, x in fields if isinstance(x, jax.Array | np.ndarray) or x)})"


def _flatten_origin(origin: Origin) -> tuple[tuple, tuple]:
    """(children, static data) of the pytree; where query is "end" its child is None."""
    end = isinstance(origin.query, str)
    numbers = (origin.batch, origin.head, None if end else origin.query, origin.key, origin.documents)
    return numbers, (end and origin.query, origin.whole)


def _unflatten_origin(static: tuple, numbers: typing.Iterable[typing.Any]) -> Origin:
    """The inverse of `_flatten_origin`; `numbers` may be any objects that jax puts in place of the children."""
    batch, head, query, key, documents = numbers
    return Origin(batch, head, static[0] or query, key, static[1], documents)


jax.tree_util.register_pytree_node(Origin, _flatten_origin, _unflatten_origin)


def _refusing_unknown_names(init: Callable[..., None]) -> Callable[..., None]:
    """KernelOptions.__init__ with a ValueError that lists the options for an unknown keyword."""
    known = [f.name for f in dataclasses.fields(KernelOptions)]

    @functools.wraps(init)
    def checked(self: KernelOptions, *values: object, **options: object) -> None:
        for name in options:
            if name not in known:
                raise ValueError(f"`kernel_options` has no option `{name}`; expected one of {', '.join(known)}.")
        init(self, *values, **options)

    return checked


Weights.__init__ = without_frames(Weights.__init__)
AuxRequest.__init__ = without_frames(AuxRequest.__init__)
KernelOptions.__init__ = without_frames(_refusing_unknown_names(KernelOptions.__init__))
Dropout.__init__ = without_frames(Dropout.__init__)
# so that they may be arguments of a jitted function, such as jax.jit(flex_attention)
for _static in (Weights, AuxRequest, KernelOptions):
    jax.tree_util.register_static(_static)


def _check_flags(owner: str, options: typing.Any) -> None:
    """Raises ValueError unless the fields of the argument `owner` that have a bool as default are bools."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise bad_argument(f"{owner}.{field.name}", repr(value), "True or False", "Pass a Python bool.")
