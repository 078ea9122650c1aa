"""`reads_of`: two mods have one key exactly if all that they can read is the same; `Memo`."""

import builtins
import functools
import gc
import threading
import types
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flexjax
from flexjax import masks, mods
from flexjax.trace.memo import Memo
from flexjax.trace.reads import reads_of
from tests.arrays import array

WIDTH = 3
PAIR = (2, 0.5)
TABLE = array(np.arange(8.0, dtype=np.float32))
NUMBERS, NAMED, HELD = [3], {"width": 3}, types.SimpleNamespace(width=3)


def near(q_idx: jax.Array, kv_idx: jax.Array, width: int) -> jax.Array:
    return q_idx - kv_idx < width


def window(width: object) -> Callable:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & near(q_idx, kv_idx, width)


def with_default(width: object) -> Callable:
    def mask_mod(b, h, q_idx, kv_idx, *, width=width):
        return q_idx - kv_idx < width

    return mask_mod


def calling(function: object) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: function(score)  # type: ignore[operator]


def rebound(score, b, h, q_idx, kv_idx):
    total = jnp.float32(0)
    for part in [score, TABLE[kv_idx], *PAIR]:
        total += jnp.where(part > 0, part, 0).astype(jnp.float32)
    return lax.max(total, abs(score))


# factories, each with two arguments that differ for the mod
APART: dict[str, tuple[Callable, object, object]] = {
    "int": (window, 3, 4),
    "type": (window, 1, 1.0),
    "bool": (window, 1, True),
    "sign_of_zero": (window, 0.0, -0.0),
    "default": (with_default, 3, 4),
    "tuple": (window, (3,), (4,)),
    "function": (calling, jnp.tanh, jnp.exp),
    "user_function": (calling, lambda x: x, lambda x: x + 1),
    "in_a_partial": (lambda n: calling(functools.partial(lambda n, x: x * n, n)), 2, 3),
    "in_a_combination": (lambda n: flexjax.and_masks(masks.causal, window(n)), 3, 4),
    "ready_made": (masks.sliding_window, 3, 4),
    "array": (window, array(np.int32(3)), array(np.int32(3))),
    "types_of_arrays": (masks.document, array(np.zeros(8, np.int32)), array(np.zeros((1, 8), np.int32))),
}
ALIKE: dict[str, Callable[[], Callable]] = {
    "window": lambda: window(3),
    "default": lambda: with_default(np.float32(0.5)),
    "array": lambda: window(TABLE),
    "loop": lambda: rebound,
    "ready_made": lambda: flexjax.and_masks(masks.causal, masks.document(array(np.arange(8, dtype=np.int32)))),
    "alibi": lambda: mods.alibi(4),
    "causal": lambda: masks.causal,
}


@pytest.mark.parametrize("name", APART)
def test_what_differs_has_another_key(name: str) -> None:
    make, *given = APART[name]
    one, other = (reads_of(make(x)) for x in given)
    assert one is not None
    assert other is not None
    assert one.key != other.key


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_made_anew_has_the_same_key(name: str) -> None:
    one, other = (reads_of(ALIKE[name]()) for _ in range(2))
    assert one is not None
    assert other is not None
    assert one.key == other.key
    assert hash(one.key) == hash(other.key)


def counting() -> Callable:
    calls = 0

    def mask_mod(b, h, q_idx, kv_idx):
        nonlocal calls
        calls += 1
        return q_idx >= calls

    return mask_mod


class OfObject:
    def __init__(self) -> None:
        self.width = 3

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.width

    def method(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.width


def importing(b, h, q_idx, kv_idx):
    from tests.trace import test_reads

    return q_idx - kv_idx < test_reads.WIDTH


def assigning(b, h, q_idx, kv_idx):
    global WIDTH
    WIDTH = 3
    return q_idx - kv_idx < WIDTH


def with_attribute(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < with_attribute.width


with_attribute.width = 3  # type: ignore[attr-defined]

UNKNOWN: dict[str, Callable] = {
    "list": lambda b, h, q_idx, kv_idx: q_idx - kv_idx < NUMBERS[0],
    "dict": lambda b, h, q_idx, kv_idx: q_idx - kv_idx < NAMED["width"],
    "attribute": lambda b, h, q_idx, kv_idx: q_idx - kv_idx < HELD.width,
    "closed_over_list": (lambda seen: lambda b, h, q_idx, kv_idx: seen.append(q_idx) or q_idx >= kv_idx)([]),
    "callable_object": OfObject(),
    "method": OfObject().method,
    "nonlocal": counting(),
    "import": importing,
    "global_assignment": assigning,
    "attribute_of_the_function": with_attribute,
    "numpy": lambda b, h, q_idx, kv_idx: q_idx >= np.random.default_rng().integers(8),
    "numpy_array": (lambda given: lambda b, h, q_idx, kv_idx: given[q_idx])(np.ones(8, bool)),
    "print": lambda b, h, q_idx, kv_idx: print("traced") or q_idx >= kv_idx,
    "callback": lambda b, h, q_idx, kv_idx: jax.debug.print("{}", q_idx) or q_idx >= kv_idx,
    "warning": lambda b, h, q_idx, kv_idx: q_idx.astype("float64") >= kv_idx,
    "jitted": (lambda inner: lambda b, h, q_idx, kv_idx: inner(q_idx))(jax.jit(lambda q_idx: q_idx >= NUMBERS[0])),
    "hidden": lambda b, h, q_idx, kv_idx: q_idx >= near.__globals__["WIDTH"],
    "builtin_function": len,  # type: ignore[dict-item]
    "name_of_64_bits": lambda b, h, q_idx, kv_idx: q_idx.astype("f8") >= kv_idx,
    "type_of_64_bits": window("<f8"),
    "formatted": lambda b, h, q_idx, kv_idx: q_idx >= len(f"{TABLE}"),
    "format": lambda b, h, q_idx, kv_idx: q_idx >= int("{0.__globals__[WIDTH]}".format(near)),  # noqa: UP030, UP032
    "print_options": lambda b, h, q_idx, kv_idx: q_idx >= jnp.get_printoptions()["precision"],
    "identity": (lambda a, b: lambda *at: at[2] >= (3 if a is b else 4))(1.5, 1.5),
    "unit_of_time": window(np.timedelta64(1, "s")),
    "subclass_of_a_number": window(type("Gain", (np.float32,), {})(2)),
    "long_text": window(b"x" * 10_000),
    "shared_tuples": window(functools.reduce(lambda t, _: (t, t), range(40), ())),
    "deep": functools.reduce(lambda f, _: calling(f), range(5000), jnp.tanh),
    "missing_globals": types.FunctionType(
        (lambda b, h, q_idx, kv_idx: q_idx >= max(kv_idx, 1)).__code__, type("Names", (dict,), {})()
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_change_has_no_key(name: str) -> None:
    assert reads_of(UNKNOWN[name]) is None


def test_another_global_or_helper_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = lambda b, h, q_idx, kv_idx: near(q_idx, kv_idx, WIDTH)
    before = reads_of(mod)
    monkeypatch.setitem(globals(), "WIDTH", 4)
    widened = reads_of(mod)
    monkeypatch.setitem(globals(), "near", lambda q_idx, kv_idx, width: q_idx > kv_idx)
    replaced = reads_of(mod)
    assert before is not None
    assert widened is not None
    assert replaced is not None
    assert len({before.key, widened.key, replaced.key}) == 3
    monkeypatch.setitem(globals(), "near", NUMBERS)
    assert reads_of(mod) is None


def test_a_shadowed_builtin_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reads_of(rebound)
    monkeypatch.setitem(globals(), "abs", lambda x: x)
    after = reads_of(rebound)
    assert before is not None
    assert after is not None
    assert before.key != after.key


def test_a_replaced_builtin_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = lambda b, h, q_idx, kv_idx: q_idx >= sum((1, 2))
    assert reads_of(mod) is not None
    monkeypatch.setattr(builtins, "sum", lambda x: 7)
    assert reads_of(mod) is None


def test_none_is_looked_for() -> None:
    assert (
        reads_of((lambda x: lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) if x is None else q_idx >= 0)(None))
        is not None
    )


def test_settings_are_read() -> None:
    before = reads_of(masks.causal)
    with jax.enable_x64(True):
        after = reads_of(masks.causal)
    assert before is not None
    assert after is not None
    assert before.key != after.key


def test_tracers_and_deleted_arrays_have_no_key() -> None:
    found = []
    jax.jit(lambda x: found.append(reads_of(window(x))) or x)(jnp.int32(3))
    gone = jnp.arange(3)
    gone.delete()
    assert found == [None]
    assert reads_of(window(gone)) is None
    assert reads_of(masks.document(TABLE.astype(jnp.int32))) is not None


def test_named_axes_are_read_anew() -> None:
    found = []
    jax.vmap(lambda x: found.append(reads_of(window(3))) or x, axis_name="i")(jnp.arange(2))
    assert found == [None]


def test_functions_may_contain_themselves() -> None:
    def countdown(n, x):
        return x if n == 0 else countdown(n - 1, x)

    one, other = (reads_of(lambda b, h, q_idx, kv_idx: countdown(3, q_idx) >= kv_idx) for _ in range(2))
    assert one is not None
    assert other is not None


# ------------------------------------------------------------------ Memo


def test_a_memo_is_bounded() -> None:
    memo: Memo[str] = Memo(3)
    for n in range(5):
        memo.put(n, str(n))
    assert [memo.get(n) for n in range(5)] == [None, None, "2", "3", "4"]
    memo.get(2)
    memo.put(5, "5")
    assert memo.get(2) == "2"
    assert len(memo) == 3


def test_a_memo_holds_no_array_and_knows_its_arrays() -> None:
    memo: Memo[str] = Memo(3)
    mine, other = jnp.arange(3), jnp.arange(3)
    memo.put("key", "result", (mine,))
    assert memo.get("key", (mine,)) == "result"
    assert memo.get("key", (other,)) is None
    gone = weakref.ref(mine)
    del mine
    gc.collect()
    assert gone() is None


def test_threads_share_a_memo() -> None:
    memo: Memo[int] = Memo(8)
    wrong: list[int] = []

    def work(first: int) -> None:
        for n in range(first, first + 2000):
            memo.put(n % 16, n % 16)
            if (found := memo.get(n % 16)) not in (None, n % 16):
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(memo) == 8
