"""Public types: what a user passes to `flex_attention` and gets back, apart from arrays and block masks."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import numpy as np

from flexjax.errors import bad_argument

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

    Returns the new score, a floating scalar. Any function, lambda, functools.partial or callable object that takes five
    positional arguments is one.
    """

    def __call__(
        self, score: jax.Array, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array, /
    ) -> jax.Array:
        """The new score of one entry of the attention matrix."""
        ...


class MaskMod(typing.Protocol):
    """A mask function: `mask_mod(b, h, q_idx, kv_idx) -> bool`, on scalars; True where the query attends to the key.

    b, h           int32: the batch entry and the query head
    q_idx, kv_idx  int32: the positions of the query and of the key

    Any function, lambda, functools.partial or callable object that takes four positional arguments is one.
    """

    def __call__(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array, /) -> jax.Array | bool:
        """Whether query q_idx attends to key kv_idx."""
        ...


@dataclasses.dataclass(frozen=True)
class AuxRequest:
    """The extra results that `flex_attention(..., return_aux=)` returns beside the output.

    lse          natural logarithm of the sum of the exponentials of a row's scores, and of the sink of its head, [B, T, N]
                 ([B, N, T] for layout "BNTH"), differentiable; float32, float64 for float64 inputs
    max_scores   the largest score of each row, without the sink, same shape and dtype, without a gradient; NaN where lse is NaN
    """

    lse: bool = False
    max_scores: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a field that is no bool."""
        _check_flags("return_aux", self, ("lse", "max_scores"))


class AuxOutput(typing.NamedTuple):
    """The extra results that an AuxRequest asked for, in the shapes and dtypes that AuxRequest says; None in place of the others."""

    lse: jax.Array | None = None
    max_scores: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """How a call is computed; the values that it computes stay the same up to rounding. None: the backend chooses.

    Options that were tuned for one backend are valid for all. xla takes the nearest tile that its loops can have. A kernel
    backend rejects a tile that it cannot run and says why; the default dispatch then goes on to the next backend, and a
    call whose `implementation` names only that backend raises NotImplementedError. A backend that has no such option
    ignores it, except `instruction`.

    block_q, block_kv          tile of the forward pass, in tokens. Under a block mask, a tile of xla is one mask block high and
                               as many whole mask blocks wide as fit into block_kv
    block_q_bwd, block_kv_bwd  tile of the backward pass, likewise
    num_stages                 number of key tiles in shared memory in the forward pass (GPU)
    split                      split-KV (flash-decoding) on a GPU: the keys of a chunk. Chunks run in parallel and are merged by their
                               maxima and sums, so that few requests with long caches fill the GPU. Only the decode kernels split. They
                               take inputs of 16 bits (pages may have 8), head dims up to 256 and at most 64 packed rows (queries times
                               query heads of a key head), without dropout, extra features, block_q, block_kv and num_stages. Other
                               calls ignore the option, except that on mma.sync a call of at most 64 packed rows that cannot be split
                               is refused.
                               "auto": chunks of 0.5 or 1 MB of keys and values, by head dims and rows. None: as "auto"
                               for keys in pages; for others as "auto" if there are more keys than queries, and key lengths or at least
                               eight keys for each row; otherwise keys are not split
    instruction                "mma": the GPU kernels that use mma.sync (Ampere's tensor core instruction), on compute capability
                               8.0 to 9.0, 10.0, 10.3 and 12.x. "tcgen05": on 10.0 and 10.3 the kernels that multiply by tcgen05, which no GPU has run yet,
                               and mma.sync beside them. Other backends and GPUs refuse both. None: WGMMA on Hopper, mma.sync on the others
    cta_pairs                  True: on tcgen05 two CTAs share each instruction of the dK/dV kernel where that is expected to be faster, at
                               head dims from 97 to 128; no GPU has run that yet. False: none do
    deterministic              True: the same inputs give the same bits. False: the backward pass may add in any order where
                               that is faster
    interpret                  True: simulate the kernel of a GPU or TPU on the CPU; that of a GPU outside of jax.jit only. The GPU
                               simulator needs more threads than XLA starts on few cores: without PJRT_NPROC=32 in the environment
                               it can deadlock

    Example: flex_attention(q, k, v, kernel_options=KernelOptions(block_q=128, block_kv=64)). New options compile a new program.
    flexjax.autotune times the tiles of a call and finds the fastest.
    """

    block_q: int | None = None
    block_kv: int | None = None
    block_q_bwd: int | None = None
    block_kv_bwd: int | None = None
    num_stages: int | None = None
    split: int | typing.Literal["auto"] | None = None
    instruction: typing.Literal["mma", "tcgen05"] | None = None
    cta_pairs: bool = False
    deterministic: bool = True
    interpret: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a size (block_q to num_stages) that is no positive int or None, for a `split` that is neither of these
        nor "auto", for another `instruction` than the class allows, and for a flag that is no bool.
        """
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
        _check_flags("kernel_options", self, ("cta_pairs", "deterministic", "interpret"))


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """What is added to b, h, q_idx and kv_idx before mods, masks and dropout see them: where the arrays of a call lie in a larger
    attention, the whole problem. For a shard, a chunk of a prefill, or a decode step.

    Mods, masks and dropout then see the indices of the whole problem: b + batch, h + head, q_idx + query[b], kv_idx + key[b], for
    b, h, q_idx and kv_idx that count from 0 in the arrays of the call. Arrays that mods capture are those of the whole problem.
    The key head of a query head and the lengths of the arrays stay those of the call.

    batch, head   ints or int32 scalars
    query, key    ints, int32 scalars, or int32 [B]: one for each batch entry of the call
    query="end"   q_idx counts so that the last query that exists lies at the last key that exists, as in decoding with a cache:
                  query[b] = key[b] + key length - query length, by the lengths of the call (key_value_seq_lengths,
                  query_seq_lengths), or by those of the arrays. At least key[b]: where there are more queries than keys, both
                  begin together
    whole         (batch, heads, q_len, kv_len) of the whole problem, ints, or None where unknown. With the lengths, reads such as
                  `table[h, q_idx - kv_idx + T - 1]` are known to lie inside their arrays and stay slices; without, they become
                  gathers, which are slower

    All numbers except `whole` are runtime values: they may be traced, and new ones neither trace nor compile anything, except that an
    int 0 for `batch` and `head` is left out of the program. An Origin is a pytree. Indices must be 0 or more and below
    `whole`, or below 2^29 where `whole` is None. A known int out of range raises ValueError; numbers in jax arrays are not checked.

    Example, inside jax.shard_map over an axis "sp" that splits the queries and not the keys:

        me = jax.lax.axis_index("sp")
        flexjax.flex_attention(q, k, v, mask_mod=masks.causal, origin=flexjax.Origin(query=me * q.shape[1]))
    """

    batch: int | jax.Array = 0
    head: int | jax.Array = 0
    query: int | jax.Array | typing.Literal["end"] = 0
    key: int | jax.Array = 0
    whole: tuple[int | None, int | None, int | None, int | None] | None = None

    def __repr__(self) -> str:
        """The fields that are not 0 or None, with arrays as dtype and shape, because the text of an array waits for the device."""
        text = lambda x: f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array | np.ndarray) else repr(x)
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return f"Origin({', '.join(f'{n}={text(x)}' for n, x in fields if isinstance(x, jax.Array | np.ndarray) or x)})"


def _flatten_origin(origin: Origin) -> tuple[tuple, tuple]:
    """For the pytree of an Origin: ((batch, head, query, key), (query is "end", whole)), its children and its static data. Where query is
    "end", the child is None and the first static item is the string "end", else False.
    """
    end = isinstance(origin.query, str)
    return (origin.batch, origin.head, None if end else origin.query, origin.key), (end and origin.query, origin.whole)


def _unflatten_origin(static: tuple, numbers: typing.Iterable[typing.Any]) -> Origin:
    """The inverse of `_flatten_origin`; `numbers` may be any objects that jax puts in place of the children."""
    batch, head, query, key = numbers
    return Origin(batch, head, static[0] or query, key, static[1])


jax.tree_util.register_pytree_node(Origin, _flatten_origin, _unflatten_origin)


def _refusing_unknown_names(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps KernelOptions.__init__ (`init`), so that an unknown keyword raises a ValueError that lists the options in place of a
    TypeError.
    """
    known = [f.name for f in dataclasses.fields(KernelOptions)]

    @functools.wraps(init)
    def checked(self: KernelOptions, *values: object, **options: object) -> None:
        """KernelOptions.__init__ with the same arguments, but an unknown keyword raises ValueError; a positional argument too many still
        raises TypeError.
        """
        for name in options:
            if name not in known:
                raise ValueError(f"`kernel_options` has no option `{name}`; expected one of {', '.join(known)}.")
        init(self, *values, **options)

    return checked


KernelOptions.__init__ = _refusing_unknown_names(KernelOptions.__init__)


def _check_flags(owner: str, options: object, names: tuple[str, ...]) -> None:
    """Raises ValueError unless the attributes `names` of `options` are Python bools.

    owner   the user's argument that `options` is, for the message
    """
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise bad_argument(f"{owner}.{name}", repr(value), "True or False", "Pass a Python bool.")
