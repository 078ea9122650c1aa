"""The errors and warnings of flexjax, and the form of their messages.

ValueError           the caller passed something wrong: the argument, what it got, what was expected, what to do
ModError             a ValueError about a score_mod, mask_mod or similar function
ArgumentNameError    a TypeError and a ValueError: a keyword that a function does not have
NotImplementedError  no backend that was asked can run this call, or flexjax has no such function
FallbackWarning      a call runs, but slower than it could
"""

import contextlib
import difflib
import functools
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

import jax
import numpy as np

from flexjax.mod_tools.numpy_arrays import shown, unwrapped

P = ParamSpec("P")
T = TypeVar("T")

INSIDE = (
    *(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, jax.__file__)),
    *(inspect.getfile(module) for module in (contextlib, functools)),
)
"""Beginnings of the paths of files that a user did not write: flexjax, JAX, and what their decorators call."""


class FallbackWarning(UserWarning):
    """A call runs slower than it could; the message says which pass or arrays, why and what to do.

    On a GPU or TPU a pass runs outside of the kernels. On any platform the devices of a mesh gather arrays that are
    split over tokens or the head dim, or each device computes the whole call.
    """


def stacklevel_of_user() -> int:
    """The `stacklevel` for warnings.warn with which the warning names the innermost line of the user."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        level, frame = level + 1, frame.f_back
    return level


def kind_of(value: object) -> str:
    """What a value is, for a message: "an int", "a list", "float32[3]"; "None" for None."""
    if isinstance(value, jax.Array | np.ndarray):
        return shown(value)
    return "None" if value is None else with_article(type(value).__name__)


def not_bool(name: str, dtype: np.dtype) -> str:
    """The message about a mask mod `name` whose result has another dtype."""
    todo = "Compare explicitly, for example `value != 0`; of a Python bool write `not x`, because `~x` is -1 or -2."
    if np.issubdtype(dtype, np.floating) or dtype.name == "bfloat16":
        todo = (
            "Where it is an additive mask, 0 or -inf, `value == 0` shows what it shows; or add it to the score in "
            "score_mod."
        )
    return (
        f"{name} returned {with_article(dtype.name)}; expected a bool scalar, True where the query may look at the "
        f"key. {todo}"
    )


def with_article(word: str) -> str:
    return f"an {word}" if word.lower().startswith(("a", "e", "i", "o", "nd")) else f"a {word}"


def bad_argument(name: str, got: object, expected: str, todo: str) -> ValueError:
    """The ValueError "`NAME` is GOT; expected EXPECTED. TODO", with `todo` in whole sentences; the caller raises it."""
    return ValueError(f"`{name}` is {got}; expected {expected}. {todo}")


_OF_JAX = "JAX has removed its internal frames"
"""A piece of the note that JAX adds to errors whose traceback it filters."""


_STACK_OF_JAX = "JaxStackTraceBeforeTransformation"


class ModError(ValueError):
    """A user's function that cannot be traced or differentiated, or that returns the wrong type or shape. In a notebook
    it is printed as in a script.
    """

    def add_note(self, note: str, /) -> None:
        """Leaves out the note by which JAX says, at each jax.jit around the call, that frames are hidden."""
        if _OF_JAX not in note or shows_all_frames():
            super().add_note(note)

    @property
    def __cause__(self) -> BaseException | None:
        return BaseException.__cause__.__get__(self)  # type: ignore[attr-defined]

    @__cause__.setter
    def __cause__(self, cause: BaseException | None) -> None:
        """Takes no more than the user's frames from the cause that JAX sets where it transforms a jitted call."""
        if type(cause).__name__ != _STACK_OF_JAX or shows_all_frames():
            BaseException.__cause__.__set__(self, cause)  # type: ignore[attr-defined]
        elif cause is not None and not self._placed:  # the first is the innermost
            self._placed, self.__traceback__ = True, users_part(cause.__traceback__) or self.__traceback__

    _placed = False

    @property
    def _render_traceback_(self) -> Callable[..., list[str]]:
        """IPython prints what this returns in place of its own lines, of which each call has five of source."""
        if shows_all_frames():
            raise AttributeError("_render_traceback_")
        return lambda *_: notebook_lines(self)


def add_note_once(error: BaseException, note: str) -> None:
    """Adds a note to the error unless the error has that note."""
    # an error of lowering passes two places that add the note: the lowering rule and flex_attention
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


# ------------------------------------------------------------------- tracebacks

OF_MODS = tuple(os.path.join(os.path.dirname(os.path.abspath(__file__)), name) + os.sep for name in ("masks", "mods"))
"""Ready-made mods are what a user would write, so a traceback shows their lines."""

MEANT = (ValueError, NotImplementedError, FloatingPointError, jax.errors.UnexpectedTracerError)
"""What flexjax raises on purpose, and what jax says of a tracer that a user kept; any other error that begins in
flexjax is a bug, whose traceback is needed whole.
"""


def shows_all_frames() -> bool:
    """Whether tracebacks stay as they are: jax_traceback_filtering (JAX_TRACEBACK_FILTERING outside) is "off"."""
    return jax.config.jax_traceback_filtering == "off"  # type: ignore[attr-defined]


def is_users(frame: types.FrameType) -> bool:
    return is_users_file(frame.f_code.co_filename)


def is_users_file(path: str) -> bool:
    return not path.startswith(INSIDE) or path.startswith(OF_MODS)


def links(link: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while link is not None:
        yield link
        link = link.tb_next


def users_part(whole: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of flexjax and JAX; None if there are no others."""
    kept = None
    for link in reversed(list(links(whole))):
        if is_users(link.tb_frame):
            kept = types.TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def hide_frames(error: BaseException) -> None:
    """Takes the frames of flexjax and JAX out of the traceback of an error that leaves flexjax, or marks them with
    `__tracebackhide__` where jax_traceback_filtering is "tracebackhide". The caller raises it again by a bare `raise`.
    """
    rest = users_part(error.__traceback__)
    if shows_all_frames() or (rest is None and not isinstance(error, MEANT) and not _of_signature(error)):
        return
    if jax.config.jax_traceback_filtering == "tracebackhide":  # type: ignore[attr-defined]
        for link in links(error.__traceback__):
            if not is_users(link.tb_frame):
                link.tb_frame.f_locals["__tracebackhide__"] = True
        return
    error.__traceback__ = rest
    if notes := getattr(error, "__notes__", None):
        notes[:] = [note for note in notes if _OF_JAX not in note]


def _of_signature(error: BaseException) -> bool:
    """Whether Python raised the error where a wrapper called the function itself: arguments are missing or too many."""
    *_, last = links(error.__traceback__)
    return isinstance(error, TypeError) and last.tb_frame.f_code.co_name in ("called", "wrapped")


def shown_file(path: str) -> str:
    """The name of a file for a message: "file.py", or "Cell In[3]" in a notebook."""
    return _cell(path) or os.path.basename(path)


def _cell(path: str) -> str:
    """ "Cell In[3]" for the file of a cell of a notebook; empty for others."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return "" if shell is None else " ".join(shell.compile.format_code_name(path) or ())


def notebook_lines(error: BaseException) -> list[str]:
    """The lines of Python's own traceback, with the user's frames alone and the names of cells."""
    shell = os.path.dirname(os.path.abspath(sys.modules["IPython"].__file__ or "")) if "IPython" in sys.modules else ""
    whole = traceback.TracebackException.from_exception(error)
    whole.stack[:] = [
        traceback.FrameSummary(_cell(f.filename) or f.filename, f.lineno, f.name, line=f.line, lookup_line=False)
        for f in whole.stack
        if is_users_file(f.filename) and not (shell and f.filename.startswith(shell + os.sep))
    ]
    return "".join(whole.format()).splitlines()


def of_call(rule: Callable[P, T]) -> Callable[P, T]:
    """Decorates a rule of a primitive, whose errors get the call of `problem` as a note and lose flexjax's frames."""

    @functools.wraps(rule)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            return rule(*args, **kwargs)
        except Exception as error:
            add_note_once(error, kwargs["problem"].call)  # type: ignore[attr-defined]
            hide_frames(error)
            raise

    return called


# ------------------------------------------------------------------- public functions


class ArgumentNameError(TypeError, ValueError):
    """A keyword that a function does not have: a TypeError as in Python, and a ValueError."""


_LSE = "return_aux=flexjax.AuxRequest(lse=True)"
_MASK = (
    "mask_mod=lambda b, h, q_idx, kv_idx: mask[b, h, q_idx, kv_idx] for bools, "
    "score_mod=flexjax.mods.pair_bias(mask) for numbers that are added"
)
_DROPOUT = "dropout=flexjax.Dropout(rate, jax.random.key(seed))"
_OFFSETS = "mask_mod=flexjax.masks.document(offsets=...)"

INSTEAD = {
    "enable_gqa": "nothing: query heads share key heads wherever these divide them",
    **dict.fromkeys(("return_lse", "return_softmax_lse", "return_residual", "return_attn_probs"), _LSE),
    **dict.fromkeys(("attn_mask", "attention_mask", "mask"), _MASK),
    **dict.fromkeys(("bias", "attn_bias", "ab"), "score_mod=flexjax.mods.pair_bias(bias)"),
    **dict.fromkeys(("is_causal", "causal"), "mask_mod=flexjax.masks.causal"),
    **dict.fromkeys(
        ("dropout_p", "dropout_prob", "dropout_rate", "dropout_key", "dropout_rng", "dropout_seed"), _DROPOUT
    ),
    "broadcast_dropout": "dropout=flexjax.Dropout(rate, key, broadcast=True)",
    **dict.fromkeys(("mask_fn", "mask_function", "mask_func"), "mask_mod="),
    **dict.fromkeys(("score_fn", "bias_fn", "score_function", "logits_fn"), "score_mod="),
    **dict.fromkeys(("s_aux", "softmax_aux", "sink", "attention_sink", "attention_sinks", "softmax_offset"), "sinks="),
    **dict.fromkeys(("block_q", "block_kv", "block_k", "deterministic"), "kernel_options=flexjax.KernelOptions(...)"),
    **{f"{name}_scales": f"{name}=flexjax.Quantized(values, scales)" for name in ("query", "key", "value")},
    **dict.fromkeys(("softmax_scale", "sm_scale"), "scale="),
    **dict.fromkeys(("window_size", "local_window_size"), "mask_mod=flexjax.masks.two_sided_window(left, right)"),
    **dict.fromkeys(("window", "sliding_window"), "mask_mod=flexjax.masks.sliding_window(window)"),
    **dict.fromkeys(
        ("softcap", "logits_soft_cap", "soft_cap", "logit_cap", "attn_logits_soft_cap", "logit_softcap"),
        "score_mod=flexjax.mods.softcap(cap)",
    ),
    **dict.fromkeys(("lengths", "seq_lens", "kv_lens", "kv_lengths"), "key_value_seq_lengths="),
    **dict.fromkeys(("positions", "q_positions", "q_offset"), "origin=flexjax.Origin(query=...)"),
    **dict.fromkeys(("segment_ids", "q_segment_ids"), "mask_mod=flexjax.masks.document(segment_ids)"),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), _OFFSETS),
    "alibi_slopes": "score_mod=flexjax.mods.distance_penalty(slopes) and mask_mod=flexjax.masks.causal",
    "B": "batch=",
    "H": "heads=",
    "Q_LEN": "q_len=",
    "KV_LEN": "kv_len=",
    "BLOCK_SIZE": "block_size=",
    "device": "nothing: a function runs where its arrays are",
}
"""What to write for keywords that other libraries have (torch, jax.nn, flash-attn, jax's own TPU kernels), or flexjax
had.
"""


def unknown_keywords(function: str, unknown: Iterable[str], of: str, has: Iterable[str]) -> ArgumentNameError:
    """The error for keywords that `function` does not have, which takes those of `of`; the caller raises it.

    has   the keywords that it has
    """
    names = sorted(unknown)
    known: dict[str, list[str]] = {}
    for name in names:
        if name in INSTEAD:
            known.setdefault(INSTEAD[name], []).append(f"`{name}`")
        elif near := difflib.get_close_matches(name, has, 1, 0.7):
            known.setdefault(f"{near[0]}=", []).append(f"`{name}`")
    advice = "".join(f" In place of {' and '.join(old)} write {new}." for new, old in known.items())
    places = ("flexjax", "flexjax.paged", "flexjax.nn", "flexjax.visualize")
    place = next((p for p in places if inspect.isfunction(getattr(sys.modules.get(p), function, None))), places[0])
    takes = f"it takes those of {of}" if of != function else f"help({place}.{function}) lists those that it takes"
    return ArgumentNameError(f"{function}() got unexpected arguments {', '.join(names)}; {takes}.{advice}")


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function of arrays, which may have `__jax_array__`; unknown keywords raise ArgumentNameError."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    by_place = [n for n, p in parameters.items() if p.kind == p.POSITIONAL_OR_KEYWORD]
    by_name = [n for n, p in parameters.items() if p.kind == p.KEYWORD_ONLY]

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            if not takes_all and (unknown := kwargs.keys() - parameters.keys()):
                raise unknown_keywords(function.__name__, unknown, function.__name__, parameters)
            if by_name and len(args) > len(by_place):
                raise ArgumentNameError(
                    f"{function.__name__}() got {len(args)} arguments by position; expected at most {len(by_place)}, "
                    f"{', '.join(by_place)}. Write the names of the others, for example {by_name[0]}=."
                )
            named = {name: unwrapped(x) for name, x in kwargs.items()}
            return function(*map(unwrapped, args), **named)  # type: ignore[arg-type]
        except Exception as error:
            hide_frames(error)
            raise

    return called
