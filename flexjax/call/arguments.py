"""The arguments of a call: their names, types and defaults, and the call as text."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable

import jax
import numpy as np

from flexjax.block_mask.block_mask import BlockMask
from flexjax.errors import bad_argument, unknown_keywords
from flexjax.ir.origin import OriginTable
from flexjax.types import (
    ArrayArgument,
    ArrayOrShape,
    AuxRequest,
    Dropout,
    KernelOptions,
    Layout,
    MaskMod,
    Origin,
    Precision,
    Quantized,
    ScoreMod,
    Weights,
)

A = typing.TypeVar("A", bound=ArrayOrShape)
F = typing.TypeVar("F", bound=Callable)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Arguments:
    """The arguments of a call, as the docstring of flex_attention explains them; nothing is checked yet.

    Not here: `implementation` is no part of a plan, and a call with `context` has several plans.
    """

    query: ArrayOrShape | Quantized = dataclasses.field(kw_only=False)
    key: ArrayOrShape | Quantized = dataclasses.field(kw_only=False)
    value: ArrayOrShape | Quantized = dataclasses.field(kw_only=False)
    score_mod: ScoreMod | None = None
    weights: ScoreMod | Weights | None = None
    mask_mod: MaskMod | None = None
    block_mask: BlockMask | None = None
    scale: float | ArrayOrShape | None = None
    sinks: ArrayOrShape | None = None
    layout: Layout = "BTNH"
    kernel_options: KernelOptions | None = None
    dropout: Dropout | None = None
    query_extra: ArrayOrShape | None = None
    key_extra: ArrayOrShape | None = None
    query_seq_lengths: int | ArrayOrShape | None = None
    key_value_seq_lengths: int | ArrayOrShape | None = None
    origin: Origin | OriginTable | None = None
    precision: Precision = None
    tolerance: float | None = None
    score_bound: float | ArrayOrShape | None = None
    return_aux: AuxRequest | None = None

    def given(self) -> dict[str, typing.Any]:
        """The arguments that do not have their default, by name."""
        named = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        is_default = lambda x, default: x is None or (isinstance(x, str | int | float) and x == default)
        return {name: x for name, (x, default) in named.items() if not is_default(x, default)}


class MaskAndScore(typing.TypedDict, typing.Generic[A], total=False):
    """For type checkers: the keywords that decide the probabilities of float inputs, of arrays of type A."""

    score_mod: ScoreMod | None
    weights: ScoreMod | Weights | None
    mask_mod: MaskMod | None
    block_mask: BlockMask | None
    scale: float | A | None
    sinks: A | None
    layout: Layout
    origin: Origin | OriginTable | None


class Keywords(MaskAndScore[A], total=False):
    """For type checkers, which read the types of `**keywords` from a TypedDict alone: the keywords of Arguments but
    return_aux, which decides the type of the result.
    """

    kernel_options: KernelOptions | None
    dropout: Dropout | None
    query_extra: A | None
    key_extra: A | None
    query_seq_lengths: int | A | None
    key_value_seq_lengths: int | A | None
    precision: Precision
    tolerance: float | None
    score_bound: float | A | None


def with_signature(arguments: type, keywords: type) -> Callable[[F], F]:
    """Decorates a function whose `**keywords` are those of a TypedDict: inspect.signature and help() name each, with
    the default that the dataclass `arguments` has, before the function's own keywords.
    """

    def named(function: F) -> F:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        hints = keywords.__annotations__
        of_arrays = lambda hint: hint[ArrayArgument] if getattr(hint, "__parameters__", ()) else hint
        rest = [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=of_arrays(hints[f.name])
            )
            for f in dataclasses.fields(arguments)
            if f.name in hints
        ]
        positional = [p for p in own if p.kind != inspect.Parameter.KEYWORD_ONLY]
        function.__signature__ = signature.replace(parameters=[*positional, *rest, *own[len(positional) :]])
        return function

    return named


def arrays_of(argument: object) -> list[typing.Any]:
    """The arrays of a Dropout or a Quantized; else the argument itself."""
    return jax.tree.leaves(argument) if isinstance(argument, Dropout | Quantized) else [argument]


def times_backward(backward: object, float8: bool) -> bool:
    """Whether to time the backward pass too; None times it where there are gradients. Raises ValueError."""
    if backward is not None and not isinstance(backward, bool):
        raise bad_argument(
            "backward", repr(backward), "True, False or None", "None times it where there are gradients."
        )
    if backward and float8:
        raise bad_argument("backward", "True", "False or None for float8 inputs", "They have no gradients.")
    return not float8 if backward is None else backward


def check_keywords(function: str, given: dict[str, typing.Any]) -> None:
    """Raises TypeError unless all keywords `given` to `function` are Keywords; NotImplementedError for a `context`."""
    if given.get("context") is not None:
        raise NotImplementedError(
            f"{function} times one device. A call with context= is computed in stages, whose plans "
            "`flexjax.explain(..., context=...)` names. Time flex_attention with kernel_options inside the jitted "
            "call instead."
        )
    # the default of flex_attention: one device
    given.pop("context", None)
    refuse_unknown_keywords(function, given, Keywords.__annotations__)


def refuse_unknown_keywords(
    function: str, given: Iterable[str], known: Iterable[str], of: str = "flex_attention"
) -> None:
    """Raises ArgumentNameError if a keyword `given` to `function` is not among the `known` ones of `of`."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise unknown_keywords(function, unknown, of, known)


def describe_call(function: str, arguments: Arguments) -> str:
    """The user's call in a line, for notes of errors: "in flex_attention(query=float32[1, 8, 2, 64], ...)"."""
    main = {name: getattr(arguments, name) for name in ("query", "key", "value")}  # shown also where they are None
    return text_of_call(function, main | arguments.given())


def text_of_call(function: str, arguments: dict[str, object]) -> str:
    """A call with these keywords in a line, "in function(name=value, ...)"; arrays as dtype and shape, mods by name."""
    return f"in {function}({', '.join(f'{name}={_describe(x)}' for name, x in arguments.items())})"


_text_of_dtype = functools.lru_cache(maxsize=64)(str)  # numpy makes it anew each time


def _describe(x: object) -> str:
    if isinstance(x, BlockMask):
        b, h, q_len, kv_len = x.shape
        return f"BlockMask({b}, {h}, {q_len}, {kv_len})"
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype is not None and shape is not None:
        return f"{_text_of_dtype(dtype) if isinstance(dtype, np.dtype) else dtype}{list(shape)}"
    if callable(x):
        return getattr(x, "__name__", type(x).__name__)
    text = repr(x)
    return text if len(text) <= 80 else f"{type(x).__name__}"
