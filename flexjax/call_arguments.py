"""The keywords of `flex_attention` that other functions take too: their types, defaults and names, and a call of them as text."""

import typing
from collections.abc import Iterable

from flexjax.block_mask.block_mask import BlockMask
from flexjax.errors import bad_argument
from flexjax.ir.origin import OriginTable
from flexjax.types import (
    ArrayArgument,
    ArrayOrShape,
    AuxRequest,
    KernelOptions,
    Layout,
    MaskMod,
    Origin,
    Precision,
    ScoreMod,
)

A = typing.TypeVar("A", bound=ArrayOrShape)


class Arguments(typing.TypedDict, typing.Generic[A], total=False):
    """The keywords of `flex_attention` that say what is computed, as its docstring explains them. Arrays are of type A. A keyword that is
    missing has its default.

    Three keywords are not here: `return_aux` decides the type of the result, `implementation` is no part of a plan, and a call
    with `context` has several plans.
    """

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: BlockMask | None
    scale: float | A | None
    sinks: A | None
    layout: Layout
    kernel_options: KernelOptions | None
    dropout_rate: float
    dropout_key: A | None
    broadcast_dropout: bool
    query_extra: A | None
    key_extra: A | None
    query_seq_lengths: int | A | None
    key_value_seq_lengths: int | A | None
    origin: Origin | OriginTable | None
    precision: Precision
    query_scales: A | None
    key_scales: A | None
    value_scales: A | None


DEFAULTS: Arguments[ArrayArgument] = {"layout": "BTNH", "dropout_rate": 0.0, "broadcast_dropout": False}
"""The keywords of `Arguments` whose default is not None, with their defaults."""


def times_backward(backward: object, float8: bool) -> bool:
    """Whether a function that times the passes of a call times its backward pass too.

    backward   what the caller gave: a bool, or None for every backward pass that there is
    float8     whether the inputs are float8, which have no gradients

    Raises ValueError if `backward` is neither, or True for float8 inputs.
    """
    if backward is not None and not isinstance(backward, bool):
        raise bad_argument(
            "backward", repr(backward), "True, False or None", "None times it where there are gradients."
        )
    if backward and float8:
        raise bad_argument("backward", "True", "False or None for float8 inputs", "They have no gradients.")
    return not float8 if backward is None else backward


def check_keywords(function: str, given: dict[str, typing.Any]) -> None:
    """Raises TypeError unless every keyword `given` to a function is one of Arguments, and NotImplementedError for `context`.

    function   the name of the function that the user called, for the message

    A `context` of None is removed from `given`: it is the default of flex_attention, and means one device.
    """
    if given.get("context") is not None:
        raise NotImplementedError(
            f"{function} times one device. A call with context= is computed in stages, whose plans "
            "`flexjax.explain(..., context=...)` names. Time flex_attention with kernel_options inside the jitted call instead."
        )
    given.pop("context", None)
    refuse_unknown_keywords(function, given, Arguments.__annotations__)


def refuse_unknown_keywords(
    function: str, given: Iterable[str], known: Iterable[str], of: str = "flex_attention"
) -> None:
    """Raises TypeError if one of the keywords `given` to a function is not among `known`.

    function   the name of the function that the user called, for the message
    known      the keywords that it takes, which are those of the function `of`
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(f"{function}() got unexpected arguments {', '.join(unknown)}; it takes those of {of}.")


def describe_call(
    function: str,
    query: object,
    key: object,
    value: object,
    return_aux: AuxRequest | None,
    arguments: Arguments[A],
) -> str:
    """The user's call in a line, for the notes of errors: "in flex_attention(query=float32[1, 8, 2, 64], ..., mask_mod=causal)".

    function            the name of the function that the user called
    query, key, value   its arrays, which may be wrong
    return_aux          that argument; left out if it is None
    arguments           its other keywords; those with their default are left out. Arrays are shown as dtype and shape, mods by name
    """
    is_default = lambda name, x: x is None or (isinstance(x, str | int | float) and x == DEFAULTS.get(name))
    given = {name: x for name, x in arguments.items() if not is_default(name, x)}
    if return_aux is not None:
        given["return_aux"] = return_aux
    return text_of_call(function, {"query": query, "key": key, "value": value} | given)


def text_of_call(function: str, arguments: dict[str, object]) -> str:
    """A call of the function named `function` with these keywords in a line, "in function(name=value, ...)", for the notes of errors;
    values are shown as `_describe` says: arrays as dtype and shape, mods by name.

    arguments   the values by name, in the order of the text; None is shown too
    """
    return f"in {function}({', '.join(f'{name}={_describe(x)}' for name, x in arguments.items())})"


def _describe(x: object) -> str:
    """The value of an argument as short text: the sizes of a block mask, dtype and shape of an array, the name of a function (of its type
    without a name), else its repr, or the name of its type if the repr is longer than 80 characters.
    """
    if isinstance(x, BlockMask):
        b, h, q_len, kv_len = x.shape
        return f"BlockMask({b}, {h}, {q_len}, {kv_len})"
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype is not None and shape is not None:
        return f"{dtype}{list(shape)}"
    if callable(x):
        return getattr(x, "__name__", type(x).__name__)
    text = repr(x)
    return text if len(text) <= 80 else f"{type(x).__name__}"
