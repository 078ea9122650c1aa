"""A traced mod means what the function meant; captured arrays become operands; refusals say why, word for word."""

import collections
import functools
import re
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flexjax import and_masks, create_block_mask, masks, mods
from flexjax.errors import ModError
from flexjax.ir.evaluate_scalars import call_program
from flexjax.trace import lift_numpy
from flexjax.trace.trace_mod import TracedMod, trace_mask_mod, trace_multiplier, trace_score_mod
from tests.cases import odd_mods
from tests.cases.small import quick_jit
from tests.masks.test_masks import CASES as MASK_CASES
from tests.mods.test_mods import CASES as MOD_CASES

SIZES = (2, 3, 9, 7)


def positions(sizes: tuple[int, int, int, int], count: int = 64) -> tuple[np.ndarray, ...]:
    """Random entries of the matrix, the corners among them."""
    rng = np.random.default_rng(3)
    columns = [np.concatenate([[0, n - 1], rng.integers(0, n, count - 2)]) for n in sizes]
    return tuple(c.astype(np.int32) for c in columns)


def same_mask(mod: object, sizes: tuple[int, int, int, int]) -> None:
    traced = trace_mask_mod(mod, sizes)
    places = positions(sizes)
    both = quick_jit(jax.vmap(lambda *i: (call_program(traced.program, traced.arrays, i), mod(*i))))
    np.testing.assert_array_equal(*both(*places))


def same_score(mod: object, sizes: tuple[int, int, int, int]) -> None:
    """Asserts that the program of a score mod gives the mod's own results at random positions."""
    traced = trace_score_mod(mod, sizes)
    places = positions(sizes)
    scores = 2 * np.random.default_rng(4).standard_normal(64).astype(np.float32)
    both = quick_jit(jax.vmap(lambda s, *i: (call_program(traced.program, traced.arrays, i, s), mod(s, *i))))
    np.testing.assert_allclose(*both(scores, *places), rtol=2e-6, atol=2e-6)


def every(table: dict) -> list:
    """All cases; those after the first of a name are slow."""
    slow = lambda i: [pytest.mark.slow] if i else []
    return [
        pytest.param(case, id=f"{n}-{i}", marks=slow(i)) for n, cases in table.items() for i, case in enumerate(cases)
    ]


SHIPPED_MASKS, SHIPPED_MODS = every(MASK_CASES), every(MOD_CASES)


def test_the_tables_name_all_that_is_shipped() -> None:
    functions = lambda room: {n for n, v in vars(room).items() if callable(v) and not n.startswith("_")}
    assert set(MASK_CASES) == functions(masks)
    assert set(MOD_CASES) == functions(mods) - {"alibi_slopes", "t5_buckets", "tanh_approx"}
    assert len(odd_mods.SCORES) + len(odd_mods.MASKS) >= 40


@pytest.mark.parametrize("case", SHIPPED_MASKS)
def test_shipped_masks_mean_the_same(case: object) -> None:
    same_mask(case.mask, (case.b + 1, case.h + 1, *case.sizes[-1]))


@pytest.mark.parametrize("case", SHIPPED_MODS)
def test_shipped_mods_mean_the_same(case: object) -> None:
    same_score(case.mod, SIZES)


@pytest.mark.parametrize("name", odd_mods.MASKS)
def test_odd_masks_mean_the_same(name: str) -> None:
    mod = odd_mods.MASKS[name][0]
    same_mask(mod, odd_mods.SIZES)


@pytest.mark.parametrize("name", [n for n in odd_mods.SCORES if n != "reads_numpy"])
def test_odd_scores_mean_the_same(name: str) -> None:
    same_score(odd_mods.SCORES[name][0], odd_mods.SIZES)


# ------------------------------------------------------------------ what is captured

TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)
TABLES = {"a": TABLE}


def reads_global(s, b, h, q, k):
    inner = lambda i: TABLE[i, 1]
    return s + inner(h)


def helper(h):
    return TABLES["a"][h, 2]


def calls_helper(s, b, h, q, k):
    return s + helper(h)


def by_default(s, b, h, q, k, table=TABLE, *, more=TABLE):
    return s + table[h, 0] + more[h, 3]


def first_argument(table, s, b, h, q, k):
    return s + table[h, q % 4]


class Bias:
    def __init__(self, table: object):
        self.table = table

    def __call__(self, s, b, h, q, k):
        return s + self.table[h, 1]

    def method(self, s, b, h, q, k):
        return s - self.table[h, 1]


def closed_over(table: object):
    return lambda s, b, h, q, k: s + table[h, k % 4]


def decides_on_a_number(table: np.ndarray):
    def mod(s, b, h, q, k):
        for _ in range(int(table[0, 2])):
            s = s + table[h, 0]
        return s

    return mod


CAPTURING = {
    "closure": closed_over(jnp.asarray(TABLE)),
    "numpy closure": closed_over(TABLE),
    "numpy global": reads_global,
    "numpy global of a helper": calls_helper,
    "numpy default": by_default,
    "partial": functools.partial(first_argument, jnp.asarray(TABLE)),
    "numpy partial": functools.partial(first_argument, TABLE),
    "numpy keyword of a partial": functools.partial(lambda s, b, h, q, k, *, table: s + table[h, 0], table=TABLE),
    "object": Bias(jnp.asarray(TABLE)),
    "object with a numpy array": Bias(TABLE),
    "method": Bias(jnp.asarray(TABLE)).method,
    "method of an object with a numpy array": Bias(TABLE).method,
    "numpy in a list": closed_over([TABLE[i] for i in range(3)][1:] and TABLE),
    "numpy 0-d": (lambda gain: lambda s, b, h, q, k: s * gain)(np.array(2.5, np.float32)),
    "0-d": (lambda gain: lambda s, b, h, q, k: s * gain)(jnp.float32(2.5)),
    "numpy as a plain operand": (lambda t: lambda s, b, h, q, k: s + jnp.sum(t[0] * 2))(TABLE),
    "wrapped": functools.wraps(reads_global)(lambda *operands: closed_over(TABLE)(*operands)),
    "jit": jax.jit(closed_over(jnp.asarray(TABLE))),
}


@pytest.mark.parametrize("how", CAPTURING)
def test_captured_arrays_are_operands(how: str) -> None:
    traced = trace_score_mod(CAPTURING[how], SIZES)
    assert traced.arrays
    assert all(isinstance(a, jax.Array) for a in traced.arrays)
    assert [(a.shape, a.dtype.name) for a in traced.arrays] == [(c.shape, c.dtype) for c in traced.program.captures]


def test_numpy_means_what_numpy_would() -> None:
    for mod in (reads_global, calls_helper, by_default, Bias(TABLE), closed_over(TABLE)):
        traced = trace_score_mod(mod, SIZES)
        for h in range(3):
            want = mod(1.0, 0, h, 2, 3)
            got = call_program(traced.program, traced.arrays, (0, h, 2, 3), jnp.float32(1.0))
            assert float(got) == float(want)


def test_numpy_numbers_may_steer_python() -> None:
    """The array is a number where the function needs one, as long as nothing indexes it by position."""
    table = np.arange(4, dtype=np.float32)

    def mod(s, b, h, q, k):
        for i in range(int(table[3])):
            s = s + float(table[i])
        return s

    traced = trace_score_mod(mod, SIZES)
    assert float(call_program(traced.program, traced.arrays, (0, 0, 0, 0), jnp.float32(0))) == 3.0


def test_numpy_is_found_inside_composed_masks() -> None:
    ids = np.array([0, 0, 1, 1, 2, 2, 2, 3, 3])
    same = and_masks(lambda b, h, q, k: k <= q, lambda b, h, q, k: jnp.asarray(True))
    traced = trace_mask_mod(and_masks(same, lambda b, h, q, k: ids[q] == ids[k]), (1, 1, 9, 9))
    assert [a.shape for a in traced.arrays] == [(9,), (9,)] or [a.shape for a in traced.arrays] == [(9,)]


def test_functions_that_call_themselves() -> None:
    def countdown(n, x):
        return x if n == 0 else countdown(n - 1, x) + AT[n]

    AT = np.arange(5)
    traced = trace_mask_mod(lambda b, h, q, k: countdown(3, q) >= k, (1, 1, 9, 9))
    assert bool(call_program(traced.program, traced.arrays, (0, 0, 0, 6)))
    assert not bool(call_program(traced.program, traced.arrays, (0, 0, 0, 7)))


def test_many_layers_of_composition_are_traced_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is called once, and copied once where an array is below it, also if two layers share it."""
    calls, copies = collections.Counter(), collections.Counter()
    copied = lift_numpy.Lift._function

    def counted(lift: lift_numpy.Lift, function: types.FunctionType) -> types.FunctionType:
        copies[id(function)] += 1
        return copied(lift, function)

    def layer(number: int, below: Callable) -> Callable:
        def mask_mod(b, h, q, k):
            calls[number] += 1
            return below(b, h, q, k)

        return mask_mod

    monkeypatch.setattr(lift_numpy.Lift, "_function", counted)
    ids = np.array([0, 0, 1, 1, 2, 2, 2, 3, 3])
    mask = lambda b, h, q, k: ids[q] == ids[k]
    mask = and_masks(mask, mask)
    for number in range(40):
        mask = and_masks(layer(number, mask), masks.full)
    trace_mask_mod(mask, SIZES)
    assert calls == dict.fromkeys(range(40), 1)
    assert len(copies) == 82  # the mask, what joins it with itself, and for each number a layer and what joins it
    assert set(copies.values()) == {1}


def test_derived_arrays_are_made_outside() -> None:
    table = jnp.asarray(TABLE)
    traced = trace_score_mod(lambda s, b, h, q, k: s + table.T[k % 4, h] + jnp.exp(table).sum(1)[h], SIZES)
    assert [a.shape for a in traced.arrays] == [(4, 3), (3,)]
    np.testing.assert_allclose(traced.arrays[1], np.exp(TABLE).sum(1), rtol=1e-6)


TRANSFORMS = {
    "jit": (jax.jit, (3,)),
    "grad": (lambda f: jax.jit(jax.grad(f)), (3,)),
    "vmap": (jax.vmap, (2, 3)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_tracers_of_an_outer_transformation_are_operands(name: str) -> None:
    transform, shape = TRANSFORMS[name]
    seen = []

    def outer(table: jax.Array) -> jax.Array:
        traced = trace_score_mod(lambda s, b, h, q, k: s * jnp.tanh(table)[h], SIZES)
        seen.append(traced)
        return call_program(traced.program, traced.arrays, (0, 1, 2, 3), jnp.float32(2.0))

    table = jnp.arange(6.0)[: int(np.prod(shape))].reshape(shape)
    got = transform(outer)(table)
    assert seen[0].program.captures[0].shape == (3,)
    wanted = {"jit": 2 * np.tanh(1), "grad": [0, 2 / np.cosh(1) ** 2, 0], "vmap": 2 * np.tanh([1, 4])}
    np.testing.assert_allclose(got, wanted[name], rtol=1e-5)


# ------------------------------------------------------------------ a mod that reads what was assigned since it was traced

NUMBER = 2.0


def reads_a_global(s, b, h, q, k):
    return s * NUMBER


def test_a_mod_is_called_for_each_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX would return the jaxpr that it made of the same function object."""
    entries, box = {"n": 2.0}, types.SimpleNamespace(n=jnp.full(5, 2.0))
    mods_of = {
        "global": (reads_a_global, lambda: monkeypatch.setitem(globals(), "NUMBER", 3.0)),
        "entry": (lambda s, b, h, q, k: s * entries["n"], lambda: entries.update(n=3.0)),
        "attribute": (lambda s, b, h, q, k: s * box.n[k], lambda: setattr(box, "n", jnp.full(5, 3.0))),
    }
    for name, (mod, assign) in mods_of.items():
        for factor in (2.0, 3.0):
            if factor == 3.0:
                assign()
            traced = trace_score_mod(mod, SIZES)
            assert call_program(traced.program, traced.arrays, (0, 0, 0, 0), jnp.float32(5)) == 5 * factor, name


# ------------------------------------------------------------------ the key


def make(values: float, literal: float = 2.0):
    table = jnp.full(5, values)
    return lambda s, b, h, q, k: s * literal + table[h] + lax.while_loop(lambda x: x > 3, lambda x: x - 3, q)


def test_other_values_are_the_same_program() -> None:
    a, b = (trace_score_mod(make(v), SIZES).program for v in (1.0, 2.0))
    assert a == b
    assert hash(a) == hash(b)


@pytest.mark.parametrize("other", [make(1.0, 3.0), closed_over(jnp.ones((5, 5)))])
def test_another_program_is_another_key(other: object) -> None:
    assert trace_score_mod(make(1.0), SIZES).program != trace_score_mod(other, SIZES).program


def deep(first: float) -> Callable:
    """A score_mod whose array is read by a jitted function, inside a checkpoint, inside a loop of unknown length."""
    table = jnp.array([first, 2.0])
    added = jax.checkpoint(jax.jit(lambda x: x + table[0]))
    return lambda s, b, h, q, k: lax.while_loop(lambda c: c[0] < q, lambda c: (c[0] + 1, added(c[1])), (0, s))[1]


def test_arrays_deep_inside_a_loop_are_a_part_of_the_key() -> None:
    """Or belong to the program as captured arrays: two such mods are not taken for one another."""
    one, two = (trace_score_mod(deep(first), SIZES) for first in (1.0, -5.0))
    same = one.program == two.program and len(one.arrays) == len(two.arrays)
    assert not (same and all(np.array_equal(a, b) for a, b in zip(one.arrays, two.arrays, strict=True)))


def test_arrays_that_jax_writes_as_literals_are_a_part_of_the_key() -> None:
    """With the flag below it writes arrays so that a loop reads."""
    flag = "jax_use_simplified_jaxpr_constants"
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        test_arrays_deep_inside_a_loop_are_a_part_of_the_key()
        one, two = (np.full(3000, n, np.int32) for n in (1, 2))
        keys = []
        for table in map(jnp.asarray, (one, two)):
            steps = lambda q, table=table: lax.while_loop(lambda c: c < q, lambda c: c + table[c % 3000], 0)
            keys.append(trace_score_mod(lambda s, b, h, q, k, steps=steps: s + steps(q), SIZES))
        assert keys[0].program != keys[1].program or not np.array_equal(keys[0].arrays[0], keys[1].arrays[0])
    finally:
        jax.config.update(flag, before)


def test_other_sizes_are_another_key() -> None:
    assert trace_mask_mod(masks.causal, SIZES).program != trace_mask_mod(masks.causal, (2, 3, 9, 8)).program


# ------------------------------------------------------------------ refusals, word for word


def prints(s, b, h, q, k):
    jax.debug.print("{}", s)
    return s


def calls_back(s, b, h, q, k):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), s)


def branches_in_python(s, b, h, q, k):
    return s if q > k else -s


def indexes_a_list(s, b, h, q, k):
    return s * [1.0, 2.0, 3.0][h]


def masks_an_array(s, b, h, q, k):
    return jnp.ones(3)[jnp.arange(3) < q].sum()


def uses_numpy(s, b, h, q, k):
    return np.sin(s)


LARGE = jnp.ones(2000)
RUN_TIME = "on a value that is known only at run time; write"


REFUSED_SCORES = {
    "not a function": (
        3,
        "`score_mod` is an int; expected a function score_mod(score, b, h, q_idx, kv_idx). Ready-made ones are in flexjax.mods.",
    ),
    "too few": (
        lambda b, h, q, k: q,
        "`score_mod` has the signature (b, h, q, k); expected 5 positional arguments, "
        "score_mod(score, b, h, q_idx, kv_idx). If it is a mask_mod, pass it as mask_mod=.",
    ),
    "int": (
        lambda s, b, h, q, k: q,
        "`score_mod` returned an int32; expected a floating scalar, the new score. "
        "To switch positions off, return -inf or use `mask_mod`.",
    ),
    "vector": (
        lambda s, b, h, q, k: s * jnp.ones(3),
        "`score_mod` returned float32[3]; expected one scalar. Index every axis of what it reads, or reduce: it is called with "
        "scalars, one position at a time.",
    ),
    "nothing": (
        lambda s, b, h, q, k: None,
        "`score_mod` returned nothing; expected one scalar. Write `return` before it.",
    ),
    "two": (
        lambda s, b, h, q, k: (s, q),
        "`score_mod` returned float32[], int32[]; expected one scalar. Return one number.",
    ),
    "a function": (
        lambda s, b, h, q, k: mods.alibi(3),
        "`score_mod` cannot be compiled: it returns a value of type function; call it with the same arguments.",
    ),
    "callback": (
        calls_back,
        "`score_mod` calls back into Python (`pure_callback`), which no kernel can do; pass implementation='reference' to "
        "flex_attention, which calls the mod on a dense matrix of positions, or leave it out.",
    ),
    "prints": (
        prints,
        "`score_mod` calls back into Python (`debug_print`), which no kernel can do; pass implementation='reference' to "
        "flex_attention, which calls the mod on a dense matrix of positions, or leave it out.",
    ),
    "if": (
        branches_in_python,
        f"`score_mod` decides by `if` and `else` {RUN_TIME} `jnp.where(q > k, s, -s)`.",
    ),
    "boolean index": (
        masks_an_array,
        "`score_mod` chooses elements by a value that is known only at run time; write "
        "`jnp.where(jnp.arange(3) < q, jnp.ones(3), 0)`.",
    ),
    "list": (
        indexes_a_list,
        "`score_mod` indexes a list by a value that is known only at run time; write `jnp.asarray([1.0, 2.0, 3.0])[h]`.",
    ),
    "numpy": (uses_numpy, f"`score_mod` calls np.sin() {RUN_TIME} `jnp.sin(s)`."),
    "large capture": (
        lambda s, b, h, q, k: s + jnp.sort(LARGE * s)[0],
        "`score_mod` cannot be compiled: it uses a whole captured array of shape (2000,) at each position; index it with b, h, "
        "q_idx or kv_idx, or reduce it outside the mod.",
    ),
    "large array": (
        lambda s, b, h, q, k: jnp.sort(jnp.full(3000, s))[0],
        "`score_mod` cannot be compiled: it computes an array of shape (3000,) at each position; at most 1024 elements.",
    ),
}


def without_place(error: ModError) -> str:
    """The message without the user's statement, which tests/door/test_errors_of_mods.py tests."""
    return str(error).partition("\nin ")[0]


@pytest.mark.parametrize("why", REFUSED_SCORES)
def test_refused_score_mods(why: str) -> None:
    mod, message = REFUSED_SCORES[why]
    with pytest.raises(ModError) as caught:
        trace_score_mod(mod, SIZES)
    assert without_place(caught.value) == message


def test_the_error_of_a_mod_that_reaches_a_numpy_array() -> None:
    """It is that of the mod, not that of numpy, which cannot index by tracers."""
    bias = np.ones(9, np.float32)
    with pytest.raises(TypeError, match=r"^where requires ndarray or scalar arguments"):
        trace_score_mod(lambda s, b, h, q, k: jnp.where(q > k, s + bias[q], None), SIZES)


def test_side_effects_are_refused() -> None:
    counter = jax.new_ref(jnp.zeros((), jnp.int32))

    def counts(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
        counter[...] += 1
        return s

    message = r"^`score_mod` has side effects \(.*\); a mod must be a pure function\. To see its values, draw them with flexjax\.visualize, or call it on arrays\.\n"
    with pytest.raises(ModError, match=message):
        trace_score_mod(counts, SIZES)


REFUSED_MASKS = {
    "int": (
        lambda b, h, q, k: q - k,
        "`mask_mod` returned an int32; expected a bool scalar, True where the query may look at the key. "
        "Compare explicitly, for example `value != 0`; of a Python bool write `not x`, because `~x` is -1 or -2.",
    ),
    "too many": (
        lambda s, b, h, q, k: q > k,
        "`mask_mod` has the signature (s, b, h, q, k); expected 4 positional arguments, mask_mod(b, h, q_idx, kv_idx). "
        "If it is a score_mod, pass it as score_mod=.",
    ),
    "if": (lambda b, h, q, k: q > k and k > 3, f"`mask_mod` uses `and` {RUN_TIME} `(q > k) & (k > 3)`."),
    "a factory": (
        masks.sliding_window,
        "`mask_mod` has the signature (window); expected 4 positional arguments, mask_mod(b, h, q_idx, kv_idx). If it returns "
        "one, call it: mask_mod=sliding_window(...).",
    ),
    "a method of torch": (
        lambda b, h, q, k: (q - k).abs() < 3,
        "`mask_mod` uses .abs of a scalar, which JAX scalars do not have; write `jnp.abs(q - k)`.",
    ),
}


@pytest.mark.parametrize("why", REFUSED_MASKS)
def test_refused_mask_mods(why: str) -> None:
    mod, message = REFUSED_MASKS[why]
    with pytest.raises(ModError) as caught:
        trace_mask_mod(mod, SIZES)
    assert without_place(caught.value) == message


def test_collectives_are_refused() -> None:
    def inside(x: jax.Array) -> jax.Array:
        trace_score_mod(lambda s, b, h, q, k: s + lax.psum(s * x, "i"), SIZES)
        return x

    message = (
        "`score_mod` cannot be compiled: it uses the collective `psum`; a mod must be a function of its scalars and "
        "captured arrays."
    )
    with pytest.raises(ModError, match=f"^{re.escape(message)}"):
        jax.vmap(inside, axis_name="i")(jnp.ones(2))


def test_a_multiplier_has_no_rules_left() -> None:
    """Functions with derivative rules are inlined: a factor of probabilities has no derivative."""
    traced = trace_multiplier("factor", lambda b, h, q, k: jax.nn.relu(1.0 * q - k), SIZES)
    assert isinstance(traced, TracedMod)
    assert not traced.program.calls


@pytest.mark.parametrize("known", [False, True])
def test_a_reshape_in_another_order_of_dims(known: bool) -> None:
    """The parameter `dimensions` of `lax.reshape`, of values of positions and of a captured array."""

    def mask_mod(b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
        flags = jnp.asarray(TABLE % 3 == 0) if known else jnp.asarray(TABLE.astype(np.int32)) % (q + 2) == 0
        return jax.lax.reshape(flags, (2, 6), (1, 0))[q % 2, k % 6]

    made = create_block_mask(mask_mod, 1, 1, 4, 12, block_size=4).to_mask()
    for q, k in np.ndindex(4, 12):
        flags = TABLE % 3 == 0 if known else TABLE.astype(int) % (q + 2) == 0
        assert bool(made[0, 0, q, k]) == flags.T.reshape(2, 6)[q % 2, k % 6], (q, k)
