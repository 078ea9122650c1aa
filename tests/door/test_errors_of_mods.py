"""What a user reads when a mod fails: the statement, what to write in its place, and a short traceback."""

import functools
import inspect
import math
import os
import pathlib
import pickle
import re
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks, mods, paged
from flexjax.errors import ModError, notebook_lines
from flexjax.trace.statement import METHODS
from tests.marks import some_slow

Array = jax.Array
Q = np.ones((1, 4, 1, 8), np.float32)
CALL = "in flex_attention(query=float32[1, 4, 1, 8], key=float32[1, 4, 1, 8], value=float32[1, 4, 1, 8], "
AT_RUN_TIME = "a value that is known only at run time"
TABLE = jnp.asarray([1, 2, 3])


@pytest.fixture(autouse=True)
def tracebacks_as_they_are_by_default() -> Iterator[None]:
    before = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


def raised(**mods: Any) -> ModError:
    with pytest.raises(ModError) as caught:
        flexjax.flex_attention(Q, Q, Q, **mods)
    return caught.value


# ------------------------------------------------------------------- what to write


def a_float(s, b, h, q, k):
    return s + float(q)


def an_int(s, b, h, q, k):
    return s + int(s)


def a_bool(s, b, h, q, k):
    return s * bool(q >= k)


def a_function_of_math(s, b, h, q, k):
    return s + math.exp(s)


def a_function_of_numpy(s, b, h, q, k):
    return s + np.maximum(q, k)


def largest(s, b, h, q, k):
    return s * max(q, k, 3)


def some(s, b, h, q, k):
    return s * any(q > i for i in range(3))


def in_an_array(s, b, h, q, k):
    return s * (q in TABLE)


def not_in_a_set(s, b, h, q, k):
    return s * (q not in {1, 2})


def to_float(s, b, h, q, k):
    return s + (q - k).float()


def to_a_dtype(s, b, h, q, k):
    return s + (q - k).to(jnp.float32)


def to_a_device(s, b, h, q, k):
    return s.to("cuda")


def filled(s, b, h, q, k):
    return s.masked_fill(q < k, -math.inf)


def distance(s, b, h, q, k):
    return s - np.abs(q)


def an_item(s, b, h, q, k):
    return s + (q - k).item()


def both(s, b, h, q, k):
    return s * (q >= k and k > 1)


def either_number(s, b, h, q, k):
    return s * (q % 2 or k)


def opposite(s, b, h, q, k):
    return s * (not q >= k)


def chained(s, b, h, q, k):
    return s * (0 <= q - k < 5)


def tighter(s, b, h, q, k):
    return s * (q >= k & q - k < 5 | h < 2)


def all_of_them(s, b, h, q, k):
    return s if 0 <= q < k and not q % 2 else -s


def branch(s, b, h, q, k):
    if q >= k and k > 1:
        return s
    return -s


def repeated(s, b, h, q, k):
    while s > 1:
        s = s / 2
    return s


def counted(s, b, h, q, k):
    for _ in range(q):
        s = s * 0.5
    return s


def a_list(s, b, h, q, k):
    return s + [1.0, 2.0][h]


class Held:
    """An object that a mod captures, whose arrays stay those of numpy."""

    table = np.zeros((1, 4), np.float32)
    rows = np.ones(4, np.float32)


def of_an_object(s, b, h, q, k):
    return s + Held.table[jnp.abs(h), jnp.abs(q)]


def row_of_an_object(s, b, h, q, k):
    return s + Held.rows[jnp.abs(q)]


def a_slice(s, b, h, q, k):
    return s + TABLE[:q].sum()


def a_slice_of_numpy(s, b, h, q, k):
    return s + Held.table[0, k : k + 2].sum()


def written_to(s, b, h, q, k):
    TABLE[q] = 1
    return s


def written_to_numpy(s, b, h, q, k):
    Held.table[0, q] += 1
    return s


SLICED = (
    f"by {AT_RUN_TIME}, so the length is not known; compute before the call what it needs of each slice, for example "
    "x = jnp.cumsum(t) for sums of t[:i], and read an element."
)
WRITTEN = "a mod returns one number and changes nothing: compute the array before the call."


WRITE = {
    a_float: f"calls float() on {AT_RUN_TIME}; write `jnp.float32(q)`.",
    an_int: f"calls int() on {AT_RUN_TIME}; write `jnp.int32(s)`.",
    a_bool: f"calls bool() on {AT_RUN_TIME}; write `jnp.bool(q >= k)`.",
    a_function_of_math: f"calls math.exp() on {AT_RUN_TIME}; write `jnp.exp(s)`.",
    a_function_of_numpy: f"calls np.maximum() on {AT_RUN_TIME}; write `jnp.maximum(q, k)`.",
    largest: f"calls max() on {AT_RUN_TIME}; write `jnp.maximum(q, jnp.maximum(k, 3))`.",
    some: f"calls any() on {AT_RUN_TIME}; write `jnp.any(jnp.stack([q > i for i in range(3)]))`.",
    in_an_array: f"uses `in` on {AT_RUN_TIME}; write `jnp.any(jnp.asarray(TABLE) == q)`.",
    not_in_a_set: f"uses `in` on {AT_RUN_TIME}; write `jnp.all(jnp.asarray([1, 2]) != q)`.",
    to_float: "uses .float of a scalar, which JAX scalars do not have; write `jnp.float32(q - k)`.",
    to_a_dtype: "uses .to of a scalar, which JAX scalars do not have; write `(q - k).astype(jnp.float32)`.",
    to_a_device: "uses .to of a scalar, which JAX scalars do not have; write `s`.",
    filled: "uses .masked_fill of a scalar, which JAX scalars do not have; write `jnp.where(q < k, -math.inf, s)`.",
    distance: f"calls np.abs() on {AT_RUN_TIME}; write `jnp.abs(q)`.",
    an_item: f"calls .item() on {AT_RUN_TIME}; write `(q - k)`.",
    both: f"uses `and` on {AT_RUN_TIME}; write `(q >= k) & (k > 1)`.",
    either_number: f"uses `or` on {AT_RUN_TIME}; write `jnp.logical_or(q % 2, k)`.",
    opposite: f"uses `not` on {AT_RUN_TIME}; write `~(q >= k)`.",
    chained: f"chains comparisons on {AT_RUN_TIME}; write `(0 <= q - k) & (q - k < 5)`.",
    tighter: f"chains comparisons, because `&` binds tighter than they do, on {AT_RUN_TIME}; write "
    "`(q >= k) & (q - k < 5) | (h < 2)`.",
    all_of_them: f"chains comparisons on {AT_RUN_TIME}; write "
    "`jnp.where(((0 <= q) & (q < k)) & jnp.logical_not(q % 2), s, -s)`.",
    branch: f"uses `and` on {AT_RUN_TIME}; write `jnp.where((q >= k) & (k > 1), value_if_true, value_if_false)`.",
    repeated: f"decides by `while` on {AT_RUN_TIME}; write `jax.lax.while_loop(condition, body, start)`.",
    counted: f"calls range() on {AT_RUN_TIME}; write `jax.lax.fori_loop(0, q, body, value)`.",
    a_list: f"indexes a list by {AT_RUN_TIME}; write `jnp.asarray([1.0, 2.0])[h]`.",
    of_an_object: f"indexes a numpy array or a list by {AT_RUN_TIME}; write `jnp.asarray(Held.table)[jnp.abs(h), jnp.abs(q)]`.",
    row_of_an_object: f"indexes a numpy array or a list by {AT_RUN_TIME}; write `jnp.asarray(Held.rows)[jnp.abs(q)]`.",
}


CALLS = [f"{{}}.{name}({dict(clamp='-1, 1', pow='2').get(name, '')})" for name in METHODS]
CALLS += [
    "{}.to(jnp.float32)",
    "{}.type(jnp.float32)",
    "{}.to('cuda')",
    "{}.masked_fill(k > 1, 0)",
    "{}.abs()",
    "bool({})",
]


@pytest.mark.parametrize("call", some_slow(CALLS, ("{}.item()", "{}.to(jnp.float32)", "bool({})")))
def test_what_to_write_of_a_difference(call: str, tmp_path: pathlib.Path) -> None:
    """Where the call stands, it is the number that it is of a name: operators bind as they did."""

    def number(of: str) -> Array:
        file = tmp_path / f"{len(of)}.py"
        file.write_text(f"def mod(s, b, h, q, k):\n    x = q - k\n    return s * {call.format(of)}")
        exec(compile(file.read_text(), str(file), "exec"), scope := {**globals()})
        (todo,) = re.findall("write `(.*)`", str(raised(score_mod=scope["mod"])))
        q, k = np.float32(1.25), np.float32(3.5)
        return eval(f"7 * {todo}", {**globals(), "q": q, "k": k, "x": q - k})

    assert number("(q - k)") == number("x")


def place(mod: Callable, offset: int = 1) -> str:
    """The last line of a message about the statement `offset` lines below the def."""
    lines, first = inspect.getsourcelines(mod)
    return f"in {mod.__name__}, test_errors_of_mods.py:{first + offset}: `{lines[offset].strip()}`"


@pytest.mark.parametrize("mod", WRITE, ids=lambda mod: mod.__name__)
def test_what_to_write(mod: Callable) -> None:
    assert str(raised(score_mod=mod)) == f"`score_mod` {WRITE[mod]}\n{place(mod)}"


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (a_slice, f"slices `TABLE` {SLICED}"),
        (a_slice_of_numpy, f"slices `Held.table` {SLICED}"),
        (written_to, f"writes to `TABLE`; {WRITTEN}"),
        (written_to_numpy, f"writes to `Held.table`; {WRITTEN}"),
    ],
)
def test_slices_and_writes(mod: Callable, text: str) -> None:
    assert str(raised(score_mod=mod)) == f"`score_mod` {text}\n{place(mod)}"


NOT_SCALARS = jnp.ones((2, 3))
SIZE = (
    "a size or an axis that is known only at run time; expected a Python int. Take the largest size, and leave out what is "
    "too much by jnp.where."
)
IN_TEXT = (
    "writes a value into a text that is known only at run time; leave it out, or see values by jax.debug.print with "
    "implementation='reference'."
)
OF_JAX = {
    "s + NOT_SCALARS[h, (q - k) / 2]": "indexes `NOT_SCALARS` by a number of type float32; expected integers. Write `//` for "
    "`/`, or jnp.int32(x) around a number x.",
    "s + NOT_SCALARS[h, q, k]": "indexes `NOT_SCALARS`, which has 2 dims, by 3 numbers; leave out the index for which it has "
    "no axis.",
    "s + s[h]": "indexes `s`, which has 0 dims, by 1 numbers; leave out the index for which it has no axis.",
    "s + jnp.arange(k)[0]": f"gives jnp.arange() {SIZE}",
    "s + jnp.zeros(k)[0]": f"gives jnp.zeros() {SIZE}",
    "s + jax.nn.one_hot(q, k)[0]": f"gives jax.nn.one_hot() {SIZE}",
    "s + NOT_SCALARS.reshape(q, -1)[0, 0]": f"gives NOT_SCALARS.reshape() {SIZE}",
    "s + NOT_SCALARS.sum(axis=h)[0]": f"gives NOT_SCALARS.sum() {SIZE}",
    "s + jnp.repeat(NOT_SCALARS, q)[0]": f"gives jnp.repeat() {SIZE}",
    "s + len(f'{q:d}')": IN_TEXT,
    "s + len('%d' % q)": IN_TEXT,
    "s + HELD_BY_KEY(q)": "looks a traced value up in a dict, a set or a cache; make an array of the values, values = "
    "jnp.asarray([...]), and read values[b].",
    "s + np.random.rand(q)": "uses a traced value as a Python integer or hands it to numpy (it indexes a list, calls range() or "
    "np.*); use jax.numpy inside the mod and index arrays made by jnp.asarray.",
}
HELD_BY_KEY = functools.lru_cache(lambda key: key)


@pytest.mark.parametrize("source", OF_JAX)
def test_what_jax_and_python_refuse(source: str, tmp_path: pathlib.Path) -> None:
    """At most twelve lines, without a frame of flexjax, jax or numpy, and with the user's statement."""
    file = tmp_path / "mod.py"
    file.write_text(text := f"mod = lambda s, b, h, q, k: {source}")
    exec(compile(text, str(file), "exec"), scope := {**globals()})
    error = raised(score_mod=scope["mod"])
    assert str(error) == f"`score_mod` {OF_JAX[source]}\nin <lambda>, mod.py:1: `{text}`"
    assert files_of(error) == {__file__, str(file)}
    assert len(lines_of(error)) <= 12


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        ([masks.causal], "`mask_mod` is a list; {}. Join functions by flexjax.and_masks(a, b)."),
        ("causal", "`mask_mod` is a str; {}. Ready-made ones are in flexjax.masks."),
        (jnp.ones((4, 4), bool), "`mask_mod` is bool[4, 4]; {}. Write a function that indexes the array."),
    ],
)
def test_what_is_no_function(mod: Any, text: str) -> None:
    assert str(raised(mask_mod=mod)) == text.format("expected a function mask_mod(b, h, q_idx, kv_idx)")


def test_a_generator_is_no_mod() -> None:
    def yields(s, b, h, q, k):
        yield s

    async def waits(s, b, h, q, k):
        return s

    for mod in (yields, waits):
        assert str(raised(score_mod=mod)) == (
            "`score_mod` is a generator or a coroutine; expected a function score_mod(score, b, h, q_idx, kv_idx). "
            "Return the number."
        )


def test_what_is_written_means_the_same() -> None:
    """The advice is an expression that traces, and that gives what Python gives for numbers."""
    for mod, text in WRITE.items():
        advice = re.findall(r"`([^`]*)`", text)[-1]
        if any(name in advice for name in ("value", "condition")):
            continue
        inner = lambda s, b, h, q, k, advice=advice: eval(advice, {**globals(), "s": s, "h": h, "q": q, "k": k})
        jax.make_jaxpr(inner)(0.5, 0, 0, 1, 1)
        if mod in (both, opposite, chained, not_in_a_set, in_an_array, some):
            for q, k in ((0, 0), (3, 2), (2, 3), (9, 1)):
                assert bool(mod(1, 0, 0, q, k)) == bool(inner(1.0, 0, 0, jnp.int32(q), jnp.int32(k))), advice


# ------------------------------------------------------------------- where it failed


def collective(s, b, h, q, k):
    return s + jax.lax.psum(s, "i")


def whole_array(s, b, h, q, k):
    return jnp.sort(jnp.full(3000, s))[0]


def an_index(s, b, h, q, k):
    return q - k


def test_errors_of_compiling_name_the_statement() -> None:
    for mod in (whole_array, an_index):
        assert str(raised(score_mod=mod)).endswith(f"\n{place(mod)}")
    with pytest.raises(ModError) as caught:
        jax.vmap(lambda q: flexjax.flex_attention(q, q, q, score_mod=collective), axis_name="i")(Q[None])
    assert str(caught.value).endswith(f"\n{place(collective)}")


def test_an_error_without_a_derivative_names_the_definition() -> None:
    def looped(s, b, h, q, k):
        return jax.lax.while_loop(lambda s: s > 1.0, lambda s: s * 0.5, s)

    with pytest.raises(ModError) as caught:
        jax.grad(lambda q: flexjax.flex_attention(q, q, q, score_mod=looped).sum())(Q)
    assert str(caught.value).endswith(f"\n{place(looped, 0)}")


def test_the_statement_of_a_function_that_a_mod_calls() -> None:
    def inner(x):
        return float(x)

    error = raised(score_mod=flexjax.chain_mods(lambda s, b, h, q, k: s + inner(q)))
    assert str(error) == f"`score_mod` calls float() on {AT_RUN_TIME}; write `jnp.float32(x)`.\n{place(inner)}"


def test_other_entry_points() -> None:
    def mask(b, h, q, k):
        return not q

    message = f"`mask_mod` uses `not` on {AT_RUN_TIME}; write `jnp.logical_not(q)`.\n{place(mask)}"
    for run in (
        lambda: flexjax.create_block_mask(mask, None, None, 8, 8),
        lambda: flexjax.explain(Q, Q, Q, mask_mod=mask),
    ):
        with pytest.raises(ModError) as caught:
            run()
        assert str(caught.value) == message


# ------------------------------------------------------------------- tracebacks


def lines_of(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()


def files_of(error: BaseException) -> set[str]:
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


def causal(b, h, q_idx, kv_idx):
    if q_idx >= kv_idx:  # noqa: SIM103
        return True
    return False


def test_a_traceback_is_the_call_and_the_statement() -> None:
    error = raised(mask_mod=causal)
    lines = lines_of(error)
    assert len(lines) <= 12
    assert files_of(error) == {__file__}
    assert lines[-3:] == [
        f"flexjax.errors.ModError: `mask_mod` decides by `if` on {AT_RUN_TIME}; write "
        "`jnp.where(q_idx >= kv_idx, value_if_true, value_if_false)`.",
        place(causal),
        f"{CALL}mask_mod=causal)",
    ]
    assert "    if q_idx >= kv_idx:  # noqa: SIM103" in lines


def taken(s, b, h, q, k):
    return s + np.take(Held.table, q)


def test_frames_of_numpy_inside_of_the_statement_are_hidden() -> None:
    error = raised(score_mod=taken)
    assert len(lines_of(error)) <= 12
    assert files_of(error) == {__file__}


def test_a_traceback_inside_jit() -> None:
    with pytest.raises(ModError) as caught:
        jax.jit(lambda q: flexjax.flex_attention(q, q, q, mask_mod=causal))(Q)
    assert len(lines_of(caught.value)) <= 13
    assert lines_of(caught.value)[-1] == f"{CALL}mask_mod=causal)"
    assert len(notebook_lines(caught.value)) <= 12


def loops(s, b, h, q, k):
    return jax.lax.while_loop(lambda x: x < 1, lambda x: x + 1, s)


def total(q):
    return flexjax.flex_attention(q, q, q, score_mod=loops).sum()


AROUND = {
    "grad": jax.grad(total),
    "grad of jit": jax.grad(jax.jit(total)),
    "jit of grad": jax.jit(jax.grad(total)),
    "jit of grad of jit of jit": jax.jit(jax.grad(jax.jit(jax.jit(total)))),
    "grad of checkpoint": jax.grad(jax.checkpoint(total)),
    "vmap of grad of jit": lambda q: jax.vmap(jax.grad(jax.jit(total)))(q[None]),
    "jvp of jit": lambda q: jax.jvp(jax.jit(total), (q,), (q,)),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_traceback_of_what_jax_transforms_ends_at_the_call(name: str) -> None:
    """Where a program is differentiated after it was traced, frames of flexjax and the call are no longer on the stack."""
    with pytest.raises(ModError) as caught:
        AROUND[name](jnp.asarray(Q))
    error = caught.value
    assert error.__cause__ is None
    assert not any(file.startswith(os.path.dirname(flexjax.__file__)) for file in files_of(error))
    assert [f.name for f in traceback.extract_tb(error.__traceback__)][-1] == "total"
    text = (
        "`score_mod` cannot be differentiated: Reverse-mode differentiation does not work for lax.while_loop or "
        "lax.fori_loop with dynamic start/stop values. Try using lax.scan, or using fori_loop with static start/stop. Stop "
        "the gradient before that operation with jax.lax.stop_gradient, or give the function a derivative rule with "
        "jax.custom_jvp."
    )
    assert str(error) == f"{text}\n{place(loops, 0)}"
    assert error.__notes__ == [f"{CALL}score_mod=loops)"]
    assert len(notebook_lines(error)) <= 12


def test_a_cause_that_is_not_of_jax_stays() -> None:
    def refuse() -> None:
        raise ModError("b") from KeyError("a")

    with pytest.raises(ModError, match=r"^b$") as caught:
        refuse()
    assert isinstance(caught.value.__cause__, KeyError)
    caught.value.__cause__ = TypeError("c")
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_traceback_in_a_notebook() -> None:
    """IPython prints what `_render_traceback_` returns, if an error has it."""
    error = raised(mask_mod=causal)
    assert error._render_traceback_() == notebook_lines(error)
    assert len(notebook_lines(error)) <= 12
    assert notebook_lines(error)[-1] == f"{CALL}mask_mod=causal)"


def test_mistakes_of_arguments_and_of_mods_show_the_users_lines_alone() -> None:
    with pytest.raises(ValueError, match="scale") as caught:
        flexjax.flex_attention(Q, Q, Q, scale="a")  # type: ignore[arg-type]
    assert files_of(caught.value) == {__file__}

    def undefined(s, b, h, q, k):
        return s + missing  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(NameError) as broken:
        flexjax.flex_attention(Q, Q, Q, score_mod=undefined)
    assert files_of(broken.value) == {__file__}
    assert broken.value.__notes__ == [
        f"In `score_mod`, which is called with scalars, one position at a time.\n{place(undefined)}",
        f"{CALL}score_mod=undefined)",
    ]


def test_all_frames() -> None:
    jax.config.update("jax_traceback_filtering", "off")
    error = raised(mask_mod=causal)
    assert any("trace_mod.py" in name for name in files_of(error))
    assert isinstance(error.__cause__, jax.errors.TracerBoolConversionError)
    assert not hasattr(error, "_render_traceback_")


def test_frames_are_marked() -> None:
    jax.config.update("jax_traceback_filtering", "tracebackhide")
    error = raised(mask_mod=causal)
    shown = [
        frame.f_code.co_name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if "__tracebackhide__" not in frame.f_locals
    ]
    assert shown == ["raised", "causal"]


def test_no_public_function_shows_frames_of_flexjax() -> None:
    """Neither for a mistake that it finds, nor for arguments that are missing, nor for a tracer that a user kept."""
    kept: list[Any] = []
    jax.jit(lambda x: kept.append(x))(jnp.ones(1))
    calls: list[Callable[[], Any]] = [
        lambda: paged.empty(8, 10, 1, 8, dtype="float32"),
        lambda: paged.table(1, 1, 1, 7),
        lambda: paged.empty(8, 8, 1, 8),  # type: ignore[call-arg]
        lambda: flexjax.create_block_mask(masks.causal, 4, 4),  # type: ignore[call-arg]
        lambda: flexjax.create_block_mask(masks.causal, None, None, 4, 4)[5],
        lambda: flexjax.context_layout(masks.causal, 0, devices=1),
        lambda: flexjax.explain(mask_mod=masks.causal),  # type: ignore[call-arg]
        lambda: flexjax.visualize.mask(mask_mod=masks.causal),  # type: ignore[call-arg]
        lambda: flexjax.flex_attention(Q, Q, Q, score_mod=lambda s, b, h, q, k: s + kept[0][h]),
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError, jax.errors.UnexpectedTracerError)) as caught:
            call()
        assert files_of(caught.value) == {__file__}, caught.value
    for module in (flexjax, paged):
        for name in set(module.__all__ if module is flexjax else dir(module)) - WITHOUT_ARRAYS:
            if isinstance(function := getattr(module, name), types.FunctionType):
                assert function.__code__.co_name == "called", name


WITHOUT_ARRAYS = {"made_for"}


def test_a_bug_of_flexjax_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexjax.call.prepare.check_options", None)
    with pytest.raises(TypeError) as caught:
        flexjax.flex_attention(Q, Q, Q)
    assert any(name.endswith("prepare.py") for name in files_of(caught.value))


# ------------------------------------------------------------------- callbacks


def test_callbacks_run_on_the_reference(capfd: pytest.CaptureFixture) -> None:
    seen: list[float] = []

    def score(s, b, h, q, k):
        jax.debug.callback(lambda x: seen.append(float(x)), 10 * q + k)
        return jax.pure_callback(lambda x: 2 * x, jax.ShapeDtypeStruct((), s.dtype), s, vmap_method="sequential")

    def mask(b, h, q, k):
        jax.debug.print("at {q}", q=q)
        return q >= k

    out = flexjax.flex_attention(Q, Q, Q, score_mod=score, mask_mod=mask, implementation="reference")
    jax.effects_barrier()
    assert out.shape == Q.shape
    assert {10 * q + k for q in range(4) for k in range(q + 1)} <= set(seen)
    assert "at 3" in capfd.readouterr().out


def test_callbacks_are_refused_elsewhere() -> None:
    def nested(s, b, h, q, k):
        return jax.lax.cond(
            q > k,
            lambda: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), s.dtype), s),
            lambda: s,
        )

    def broken_into(s, b, h, q, k):
        jax.debug.breakpoint()
        return s

    for mod, name, line in ((nested, "pure_callback", 3), (broken_into, "debug_callback", 1)):
        where = place(mod, line).replace("in nested", "in nested.<locals>.<lambda>").replace("nested.<locals>.", "")
        for implementation in (None, "xla", ("xla", "reference")):
            assert str(raised(score_mod=mod, implementation=implementation)) == (
                f"`score_mod` calls back into Python (`{name}`), which no kernel can do; pass implementation='reference' to "
                f"flex_attention, which calls the mod on a dense matrix of positions, or leave it out.\n{where}"
            )


def test_explain_answers_for_callbacks_as_the_call_does(capfd: pytest.CaptureFixture) -> None:
    """Also for one without operands, which is known where explain computes what is known, and must not run there."""

    def branch(s, b, h, q, k):
        return jax.lax.cond(q > k, lambda: (jax.debug.print("here"), s)[1], lambda: s)

    def always(b, h, q, k):
        jax.debug.print("here")
        return q >= k

    def operand(b, h, q, k):
        jax.debug.print("here {q}", q=q)
        return q >= k

    shape = jax.ShapeDtypeStruct(Q.shape, Q.dtype)
    for given in (Q, shape):
        for given_mods in ({"score_mod": branch}, {"mask_mod": always}, {"mask_mod": operand}):
            with pytest.raises(ModError) as caught:
                flexjax.explain(given, given, given, **given_mods)
            assert str(caught.value) == str(raised(**given_mods))
            assert "runs on: reference" in flexjax.explain(
                given, given, given, **given_mods, implementation="reference"
            )
    jax.effects_barrier()
    assert "here" not in capfd.readouterr().out


def a_refused_chain() -> object:
    return flexjax.chain_mods(masks.causal)  # type: ignore[arg-type]


REFUSED = (
    lambda: masks.sliding_window(0),
    lambda: masks.sliding_window(1, 2),  # type: ignore[call-arg]
    lambda: masks.block_causal(0),
    lambda: mods.alibi(0),
    lambda: mods.softcap(-1.0),
    lambda: flexjax.weights.power(3),
    lambda: flexjax.and_masks(),
    lambda: flexjax.and_masks(masks.sliding_window),
    lambda: flexjax.Dropout(1.5, None),
    lambda: flexjax.KernelOptions(block_q=0),
    lambda: flexjax.Weights(None),  # type: ignore[arg-type]
    lambda: masks.causal(),  # type: ignore[call-arg]
    a_refused_chain,
)


@pytest.mark.parametrize("call", REFUSED, ids=range(len(REFUSED)))
def test_a_refused_factory_shows_the_users_line(call: Callable[[], object]) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        call()
    assert files_of(refused.value) == {__file__}


def test_all_frames_of_a_refused_factory() -> None:
    jax.config.update("jax_traceback_filtering", "off")
    with pytest.raises(ValueError, match="num_heads") as refused:
        mods.alibi(0)
    assert any(name.endswith("factory_arguments.py") for name in files_of(refused.value))


@pytest.mark.parametrize("mod", [masks.causal, masks.full, masks.noop_mask, mods.identity])
def test_a_mod_that_is_no_factory_says_so(mod: Callable) -> None:
    with pytest.raises(TypeError) as caught:
        mod()
    assert str(caught.value) == (f"`{mod.__name__}` is a mod itself, no factory of mods: pass it without calling it.")
    assert pickle.loads(pickle.dumps(mod)) is mod


# ------------------------------------------------------------------- which argument


@pytest.mark.parametrize("score_mod", [None, mods.softcap(3.0)])
@pytest.mark.parametrize(
    ("argument", "name"), [("weights", "weights"), ("expectations", "return_aux.expectations['own']")]
)
def test_the_argument_at_fault_is_named(argument: str, name: str, score_mod: Any) -> None:
    """Where the functions of a call are one program: in warnings of reads, and where there is no derivative."""
    named = f"`score_mod` or `{name}`" if score_mod else f"`{name}`"

    def call(q: Array, mod: Callable) -> Array:
        given: dict[str, Any] = {"weights": mod}
        if argument == "expectations":
            given = {"return_aux": flexjax.AuxRequest(expectations={"own": mod})}
        return jax.tree.leaves(flexjax.flex_attention(q, q, q, score_mod=score_mod, **given))[-1].sum()

    long, short = jnp.ones((1, 4, 1, 8)), jnp.ones(3) + bool(score_mod)
    with pytest.warns(UserWarning, match=f"^{re.escape(named)} reads an array of shape"):
        jax.eval_shape(functools.partial(call, mod=lambda s, b, h, q, k: s * short[k]), long)
    endless = lambda s, b, h, q, k: jax.lax.while_loop(lambda x: x < 9.0, lambda x: x + 1.0, s)
    with pytest.raises(ModError, match=f"^{re.escape(named)} cannot be differentiated"):
        jax.eval_shape(jax.grad(functools.partial(call, mod=endless)), long)
