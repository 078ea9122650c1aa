"""Checks of the arguments of flex_attention that are no mods, with a ValueError for each mistake.

Shape letters are those of plan/kernel_plan.py.
"""

import contextlib
import dataclasses
import math
import numbers
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.block_mask.block_mask import BlockMask
from flexjax.call.arguments import Arguments
from flexjax.errors import bad_argument, kind_of, stacklevel_of_user
from flexjax.mod_tools.signatures import SCORE_ARGUMENTS
from flexjax.plan.kernel_plan import FLOAT8, Lengths
from flexjax.trace.trace_mod import check_callable
from flexjax.types import AuxRequest, KernelOptions, ScoreMod, Weights, values_of

Array = jax.Array

DTYPES = ("float64", "float32", "bfloat16", "float16", FLOAT8)
LAYOUTS = ("BTNH", "BNTH")


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """The sizes of a call, named as in KernelPlan; extra_dim and extra_heads are 0 without extra features."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    extra_dim: int = 0
    extra_heads: int = 0

    @property
    def of_indices(self) -> tuple[int, int, int, int]:
        """(batch, query heads, query length, key length), above the indices b, h, q_idx and kv_idx."""
        return self.batch, self.q_heads, self.q_len, self.kv_len


@dataclasses.dataclass(frozen=True)
class CheckedArrays:
    """The checked arrays of a call, as jax arrays in the call's layout, and their sizes, as in KernelPlan.

    Key, value and key_extra have the batch of query. For keys in pages (paged/rows.py) key and value are the pools, and
    kv_len counts the keys of a row of the table.
    """

    query: Array
    key: Array
    value: Array
    sinks: Array | None
    query_extra: Array | None
    key_extra: Array | None
    sizes: CallSizes
    dtype: str


NO_OPTIONS = KernelOptions()


def check_options(return_aux: object, options: object) -> KernelOptions:
    """The argument kernel_options, or its default. Raises ValueError for it and for a `return_aux` of another type."""
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise bad_argument(
            "return_aux", repr(return_aux), "None or flexjax.AuxRequest(...)", "For example AuxRequest(lse=True)."
        )
    if options is None:
        return NO_OPTIONS
    if not isinstance(options, KernelOptions):
        raise bad_argument(
            "kernel_options",
            repr(options),
            "None or flexjax.KernelOptions(...)",
            f"Its fields are {', '.join(f.name for f in dataclasses.fields(KernelOptions))}.",
        )
    return options


def check_weights(weights: object, sinks: object, aux: AuxRequest | None, dtype: str) -> Weights | None:
    """The argument weights as a Weights, None for a softmax. Raises ValueError for what has no meaning beside it."""
    if weights is None:
        if aux is not None and aux.total:
            raise bad_argument(
                "return_aux.total", "True without weights", "False", "The denominator of a softmax is exp(lse)."
            )
        return None
    given = weights if isinstance(weights, Weights) else None
    if given is None:
        check_callable("weights", weights, SCORE_ARGUMENTS)
        given = Weights(typing.cast(ScoreMod, weights))
    else:
        check_callable("weights.function", given.function, SCORE_ARGUMENTS)
        if given.divisor is not None:
            check_callable("weights.divisor", given.divisor, ("total",))
    if sinks is not None:
        raise bad_argument(
            "sinks", "given beside weights", "None", "Only a softmax has a denominator to which a sink adds."
        )
    for name in ("lse", "max_scores"):
        if aux is not None and getattr(aux, name):
            raise bad_argument(
                f"return_aux.{name}", "True beside weights", "False", "It belongs to softmax; total sums the weights."
            )
    if dtype == FLOAT8:
        raise bad_argument("weights", f"given for {FLOAT8} inputs", "None", "Cast query, key and value to bfloat16.")
    return given


def check_inputs(arguments: Arguments) -> CheckedArrays:
    """Checks the arrays and the layout of a call as the user gave them. Raises ValueError.

    For BTNH: query [B, T, N, D], key [B or 1, S, M, D], value [B or 1, S, M, E], sinks [N].
    """
    layout = arguments.layout
    if layout not in LAYOUTS:
        raise bad_argument("layout", repr(layout), "'BTNH' or 'BNTH'", "BTNH is [batch, tokens, heads, dim].")
    q, k, v = (check_array(name, values_of(getattr(arguments, name))) for name in ("query", "key", "value"))
    dtype = q.dtype.name
    for name, x in (("query", q), ("key", k), ("value", v)):
        found = dtype if x.dtype == q.dtype else x.dtype.name  # numpy makes a name anew each time
        if found not in DTYPES:
            raise bad_argument(
                name,
                f"{found}{list(x.shape)}",
                f"one of {', '.join(DTYPES)}",
                "Cast it, for example x.astype(jnp.float32).",
            )
        if found != dtype:
            raise bad_argument(name, f"of dtype {found}", f"{dtype}, that of query", "Cast them to one dtype.")
        if x.ndim != 4:
            raise bad_argument(
                name,
                f"of shape {x.shape}",
                f"4 dims, {_letters(name, layout)}",
                "Add a batch axis with x[None] or use jax.vmap."
                if x.ndim < 4
                else "Map over its first axes with jax.vmap.",
            )
    tokens, heads = (1, 2) if layout == "BTNH" else (2, 1)
    _check_batch("key", k, q)
    _check_batch("value", v, q)
    _check_key_value(q, k, v, layout)
    _warn_of_swapped_axes(q, layout)
    batch = q.shape[0]
    spread = lambda x: x if x.shape[0] == batch else jnp.broadcast_to(x, (batch, *x.shape[1:]))
    qx, kx = _check_extra(arguments.query_extra, arguments.key_extra, q, k, tokens, heads)
    sizes = CallSizes(
        batch, q.shape[heads], k.shape[heads], q.shape[tokens], k.shape[tokens], q.shape[3], v.shape[3],
        extra_dim=0 if qx is None else qx.shape[3], extra_heads=0 if kx is None else kx.shape[heads],
    )  # fmt: skip
    return CheckedArrays(
        query=q,
        key=spread(k),
        value=spread(v),
        sinks=check_sinks(arguments.sinks, sizes.q_heads, sizes.q_len, layout),
        query_extra=qx,
        key_extra=None if kx is None else spread(kx),
        sizes=sizes,
        dtype=dtype,
    )


MOST_HEADS = 128
"""More heads than this are rare: an array of more heads than tokens may be in the other layout."""


def _warn_of_swapped_axes(query: Array, layout: str) -> None:
    """Warns if query in layout "BTNH" may be [B, N, T, D]."""
    if layout == "BTNH" and 1 < query.shape[1] < query.shape[2] and query.shape[2] > MOST_HEADS:
        warnings.warn(
            f'`query` has shape {query.shape}, which layout "BTNH" reads as {query.shape[1]} tokens and '
            f"{query.shape[2]} heads. If it is [batch, heads, tokens, dim], as in torch, swap dims 1 and 2 or pass "
            'layout="BNTH" to flex_attention.',
            UserWarning,
            stacklevel=stacklevel_of_user(),
        )


def check_array(name: str, x: object) -> Array:
    """The argument `name` as a jax array. Raises ValueError for anything but a jax or numpy array of static shape."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise bad_argument(name, kind_of(x), "an array", "Pass a jax.Array or a numpy array.")
    _check_static(name, x.shape)
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _check_static(name: str, shape: tuple[int, ...], what: str = "") -> None:
    """Raises ValueError for symbolic sizes, as exports have them; `what` says which array has them."""
    symbolic = [str(n) for n in shape if not isinstance(n, int)]
    if symbolic:
        raise bad_argument(
            name,
            f"of shape ({', '.join(map(str, shape))}){what} with the symbolic size {symbolic[0]}",
            "sizes that are numbers, for which kernels are planned",
            "Export once for each size that you need, and pad the arrays to the nearest one.",
        )


def _letters(name: str, layout: str) -> str:
    """The expected shape of `name`: "[B, T, N, D]" of query in BTNH."""
    dims = {"query": "TND", "key": "SMD", "value": "SME"}[name]
    order = dims if layout == "BTNH" else dims[1] + dims[0] + dims[2]
    return "[B, " + ", ".join(order) + "]"


def _check_batch(name: str, x: Array, query: Array) -> None:
    if x.shape[0] not in (1, query.shape[0]):
        raise bad_argument(
            name, f"of shape {x.shape}", f"a batch of {query.shape[0]} like query's, or 1", "Repeat or slice it."
        )


def _check_key_value(q: Array, k: Array, v: Array, layout: str) -> None:
    """Raises ValueError unless head dims, key lengths and numbers of heads of query, key and value fit together."""
    mixed = f" Both are read in layout {layout}; is one of them in the other?"
    if k.shape[3] != q.shape[3]:
        raise bad_argument(
            "key",
            f"of shape {k.shape}",
            f"a last dim of {q.shape[3]}, query's head dim",
            "Project both to one head dim.",
        )
    if v.shape[1:3] != k.shape[1:3]:
        raise bad_argument(
            "value", f"of shape {v.shape}", f"the tokens and heads of key, {k.shape[1:3]}", "Make them agree." + mixed
        )
    dim = 2 if layout == "BTNH" else 1
    n, m = q.shape[dim], k.shape[dim]
    # dot_product_attention and the adapters, which have no layout=, raise this too
    counts = (
        f"In layout {layout} dim {dim} counts heads; if yours is the other, swap dims 1 and 2 or pass layout= to "
        "flex_attention."
    )
    if n == 0:
        raise bad_argument("query", f"of shape {q.shape} without heads", "at least one head", counts)
    if m == 0 or n % m:
        raise bad_argument(
            "key", f"of shape {k.shape} with {m} heads", f"a number of heads that divides query's {n}", counts
        )


def other_layout(layout: str) -> str:
    other = "BNTH" if layout == "BTNH" else "BTNH"
    return f"if the arrays are in layout {other}, pass layout='{other}'."


def check_scale(scale: object) -> float:
    """The argument scale, a finite real number of Python or numpy, as a float. Raises ValueError for others."""
    real = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if isinstance(scale, np.generic | np.ndarray) and scale.shape == ():
        real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
    value = math.nan
    if real:
        with contextlib.suppress(OverflowError):  # an int that no float holds
            value = float(scale)  # type: ignore[arg-type]
    if not math.isfinite(value):
        raise bad_argument("scale", repr(scale), "a finite float", "None means 1 / sqrt(head dim).")
    return value


def check_sinks(sinks: object, heads: int, tokens: int, layout: str) -> Array | None:
    """The argument sinks as an array [N]; None without sinks. Raises ValueError for another shape or dtype."""
    if sinks is None:
        return None
    s = check_array("sinks", sinks)
    if s.shape != (heads,) or not jnp.issubdtype(s.dtype, jnp.floating):
        advice = "Cast it, for example sinks.astype(jnp.float32)." if s.shape == (heads,) else "Reshape it."
        # sinks of T elements: the call is probably in the other layout
        if s.shape == (tokens,) and tokens != heads:
            advice = f"Query's other middle dim has {tokens}: {other_layout(layout)}"
        raise bad_argument(
            "sinks", f"{s.dtype.name}{list(s.shape)}", f"float32[{heads}], a logit for each query head", advice
        )
    return s


def _check_extra(
    query_extra: object, key_extra: object, q: Array, k: Array, tokens: int, heads: int
) -> tuple[Array | None, Array | None]:
    """query_extra [B, T, N, R] and key_extra [B or 1, S, K, R] as arrays, or (None, None). Raises ValueError."""
    if query_extra is None and key_extra is None:
        return None, None
    if query_extra is None or key_extra is None:
        missing, given = ("key_extra", "query_extra") if key_extra is None else ("query_extra", "key_extra")
        raise bad_argument(missing, "None", f"an array, since {given} is given", "Pass both or neither.")
    qx, kx = check_array("query_extra", query_extra), check_array("key_extra", key_extra)
    for name, x, like in (("query_extra", qx, q), ("key_extra", kx, k)):
        fits = x.ndim == 4 and x.dtype == q.dtype and x.shape[tokens] == like.shape[tokens]
        fits = fits and x.shape[0] in ((like.shape[0],) if name == "query_extra" else (1, q.shape[0]))
        fits = fits and (x.shape[heads] == q.shape[heads] if name == "query_extra" else True)
        if not fits:
            same = "batch, tokens and heads" if name == "query_extra" else "batch (or 1) and tokens"
            raise bad_argument(
                name,
                f"{x.dtype.name}{list(x.shape)}",
                f"{q.dtype.name} of 4 dims with the {same} of {name[:-6]}, {like.shape}",
                "Make them agree.",
            )
    if qx.shape[3] != kx.shape[3]:
        raise bad_argument(
            "key_extra", f"of shape {kx.shape}", f"a last dim of {qx.shape[3]}, that of query_extra", "Make them agree."
        )
    if kx.shape[heads] == 0 or q.shape[heads] % kx.shape[heads]:
        raise bad_argument(
            "key_extra",
            f"of shape {kx.shape} with {kx.shape[heads]} heads",
            f"a number of heads that divides query's {q.shape[heads]}",
            "One head serves all.",
        )
    return qx, kx


def both_masks() -> ValueError:
    return ValueError(
        "`mask_mod` and `block_mask` are both given; expected one of them. A block mask contains its mask_mod: to "
        "restrict it further, build one of and_masks(block_mask.mask_mod, mask_mod)."
    )


def check_block_mask(mask: object, sizes: CallSizes, layout: str) -> None:
    """Raises ValueError unless `mask` is one BlockMask for the lengths, batch and heads of a call of these sizes."""
    if not isinstance(mask, BlockMask):
        raise bad_argument(
            "block_mask", kind_of(mask), "a flexjax.BlockMask", "A plain mask function goes to mask_mod=."
        )
    if len(mask.list_dims) != 3:
        raise bad_argument(
            "block_mask",
            f"a stack of block masks, kv_num_blocks {list(mask.list_dims)}",
            "one, kv_num_blocks [B, H, q_blocks]",
            "Call flex_attention under jax.vmap, with the block mask among the mapped arguments.",
        )
    for field, width in zip(("kv_indices", "full_kv_indices"), mask.list_widths, strict=True):
        _check_static("block_mask", (*mask.list_dims, width), f" in {field}")
    batch, heads, q_len, kv_len = mask.shape
    if (q_len, kv_len) != (sizes.q_len, sizes.kv_len):
        advice = "Build it for these lengths with create_block_mask, or slice it."
        if (q_len, kv_len) == (sizes.q_heads, sizes.kv_heads):
            advice = f"These are the heads of query and key: {other_layout(layout)}"
        raise bad_argument(
            "block_mask", f"made for q_len={q_len}, kv_len={kv_len}", f"q_len={sizes.q_len}, kv_len={sizes.kv_len}",
            advice,
        )  # fmt: skip
    for name, axis, got, want in (("batch", "b", batch, sizes.batch), ("heads", "h", heads, sizes.q_heads)):
        if got not in (1, want):
            raise bad_argument(
                "block_mask",
                f"made for {name}={got}",
                f"{name}={want}" + " or 1" * (want != 1),
                f"Build it with {name}={want}, or None to share it.",
            )
        # 1 serves every batch entry or head only if the mask program does not read b or h
        if got == 1 and want > 1 and mask.program is not None and mask.program.reads(axis):
            raise bad_argument(
                "block_mask", f"made for {name}=1 by a mask_mod that depends on `{axis}`", f"{name}={want}",
                f"Build it with {name}={want}.",
            )  # fmt: skip


def check_lengths(query: object, key: object, inputs: CheckedArrays) -> Lengths | None:
    return clipped_lengths(query, key, inputs.sizes.batch, inputs.sizes.q_len, inputs.sizes.kv_len)


def clipped_lengths(query: object, key: object, batch: int, q_len: int, kv_len: int) -> Lengths | None:
    """Both lengths as int32 [B], clipped to 0 .. q_len and 0 .. kv_len; None: all exist. Raises ValueError."""
    if query is None and key is None:
        return None

    def checked(name: str, given: object, most: int) -> Array | None:
        if given is None:
            return None
        is_int = isinstance(given, int) and not isinstance(given, bool)
        array: typing.Any = (
            np.asarray(min(max(int(given), 0), most), np.int32)  # type: ignore[call-overload]
            if is_int
            else given
        )
        is_array = isinstance(array, np.ndarray | np.generic | Array)
        fits = is_array and jnp.issubdtype(array.dtype, jnp.integer) and array.shape in ((), (batch,))
        if not fits:
            raise bad_argument(
                name,
                f"{array.dtype.name}{list(array.shape)}" if is_array else repr(given),
                f"an int, or int32[{batch}], one for each batch entry",
                "Pass it through jnp.asarray."
                if isinstance(array, list | tuple)
                else "Reshape or cast it, for example with lengths.astype(jnp.int32).",
            )
        # clipped before the cast of 64-bit numbers, which would wrap around; `most` may not fit 8 and 16 bits
        array = array.astype(np.int32) if array.dtype.itemsize < 4 else array
        clip = jnp.clip if isinstance(array, Array) else np.clip
        return jnp.broadcast_to(jnp.asarray(clip(array, 0, most), jnp.int32), (batch,))

    return Lengths(checked("query_seq_lengths", query, q_len), checked("key_value_seq_lengths", key, kv_len))
