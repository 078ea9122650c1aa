"""Each ready-made score mod against its definition in numpy, and its gradients against finite differences."""

import functools
import inspect
import math
import re
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flexjax
from flexjax import mods
from flexjax.mod_tools.signatures import ScoreMod
from tests.cases.small import quick_jit
from tests.primitives import primitives_of

BATCH, HEADS, QUERIES, KEYS = 2, 3, 9, 7
HELPERS = {"alibi_slopes", "t5_buckets", "tanh_approx"}
FUNCTIONS = [n for n, v in vars(mods).items() if not isinstance(v, types.ModuleType) and not n.startswith("_")]
NAMES = [n for n in FUNCTIONS if n not in HELPERS]

rng = np.random.default_rng(0)
SCORES = (3 * rng.standard_normal((BATCH, HEADS, QUERIES, KEYS))).astype(np.float32)


def drawn(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    return rng.uniform(0.2, 1.5, shape).astype(np.float32)


def everywhere(mod: ScoreMod, scores: np.ndarray | jax.Array = SCORES) -> jax.Array:
    """The modified scores `[B, N, T, S]`."""
    function = mod
    for axis in range(3, -1, -1):
        function = jax.vmap(function, (0, *(0 if place == axis else None for place in range(4))))
    return function(jnp.asarray(scores), *(jnp.arange(n, dtype=jnp.int32) for n in scores.shape))


def by_loop(one: Callable[[float, int, int, int, int], float]) -> np.ndarray:
    wanted = np.empty_like(SCORES, dtype=np.float64)
    for place in np.ndindex(SCORES.shape):
        wanted[place] = one(float(SCORES[place]), *place)
    return wanted


class Case:
    """`factory(*arrays)` is the mod; `one` is its definition; gradients flow to every array."""

    def __init__(
        self,
        factory: Callable[..., ScoreMod],
        arrays: tuple[np.ndarray, ...],
        one: Callable[[float, int, int, int, int], float],
        error: float = 1e-5,
    ) -> None:
        self.factory, self.arrays, self.one, self.error = factory, arrays, one, error

    @property
    def mod(self) -> ScoreMod:
        return self.factory(*self.arrays)


# ----------------------------------------------------------------- definitions, one entry at a time


def t5_bucket(relative: int, num_buckets: int, bidirectional: bool, max_distance: int) -> int:
    """The definition, in floating point."""
    bucket, distance = 0, -relative
    if bidirectional:
        num_buckets //= 2
        bucket, distance = (num_buckets if relative > 0 else 0), abs(relative)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + max(distance, 0)
    ratio = math.log(distance / exact) / math.log(max_distance / exact)
    return bucket + min(exact + int(ratio * (num_buckets - exact) + 1e-9), num_buckets - 1)


SLOPES_OF_3 = [1 / 16, 1 / 256, 1 / 4]  # those of two heads, then the first of four
PER_HEAD, LOGITS, LOGITS_B = positive(HEADS), drawn(HEADS), drawn(BATCH, HEADS)
HEIGHT, RATE = positive(HEADS), positive(HEADS)
TABLE, TABLE_H = drawn(2 * 9 - 1), drawn(HEADS, 2 * 11 - 1)
PAIR, PAIR_H, PAIR_BH = drawn(QUERIES, KEYS), drawn(HEADS, QUERIES, KEYS), drawn(BATCH, HEADS, QUERIES, KEYS)
PAIR_B = drawn(BATCH, 1, QUERIES, KEYS)
BUCKETS_8, BUCKETS_5 = drawn(HEADS, 8), drawn(HEADS, 5)
K_1, K_B, K_BM, K_B1 = (
    positive(KEYS),
    positive(BATCH, KEYS),
    positive(BATCH, 2, KEYS),
    positive(BATCH, 1, KEYS),
)
Q_1, Q_BN = positive(QUERIES), positive(BATCH, HEADS, QUERIES)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


CASES: dict[str, list[Case]] = {
    "identity": [Case(lambda: mods.identity, (), lambda s, b, h, q, k: s)],
    "alibi": [
        Case(lambda: mods.alibi(3), (), lambda s, b, h, q, k: s - SLOPES_OF_3[h] * max(q - k, k - q)),
        Case(lambda: mods.alibi(4), (), lambda s, b, h, q, k: s - 0.25 ** (h + 1) * max(q - k, k - q)),
    ],
    "distance_penalty": [
        Case(mods.distance_penalty, (PER_HEAD,), lambda s, b, h, q, k: s - PER_HEAD[h] * abs(k - q)),
        Case(mods.distance_penalty, (PER_HEAD[0],), lambda s, b, h, q, k: s - PER_HEAD[0] * abs(k - q)),
        Case(mods.distance_penalty, (PER_HEAD[1:2],), lambda s, b, h, q, k: s - PER_HEAD[1] * abs(k - q)),
        Case(lambda: mods.distance_penalty(0.5), (), lambda s, b, h, q, k: s - abs(k - q) / 2),
    ],
    "log_distance_penalty": [
        Case(
            mods.log_distance_penalty,
            (HEIGHT, RATE),
            lambda s, b, h, q, k: s - HEIGHT[h] * math.log(1 + RATE[h] * abs(q - k)),
        ),
        Case(
            lambda: mods.log_distance_penalty(2, 0.5),
            (),
            lambda s, b, h, q, k: s - 2 * math.log(1 + abs(q - k) / 2),
        ),
    ],
    "softcap": [
        Case(lambda: mods.softcap(2.5), (), lambda s, b, h, q, k: 2.5 * math.tanh(s / 2.5)),
        Case(mods.softcap, (PER_HEAD,), lambda s, b, h, q, k: PER_HEAD[h] * math.tanh(s / PER_HEAD[h])),
    ],
    "softcap_approx": [
        Case(lambda: mods.softcap_approx(2.5), (), lambda s, b, h, q, k: 2.5 * math.tanh(s / 2.5), 2.5e-4)
    ],
    "t5_bias": [
        Case(
            lambda table: mods.t5_bias(table, bidirectional=True, max_distance=6),
            (BUCKETS_8,),
            lambda s, b, h, q, k: s + BUCKETS_8[h, t5_bucket(k - q, 8, True, 6)],
        ),
        Case(
            lambda table: mods.t5_bias(table, bidirectional=False, max_distance=5),
            (BUCKETS_5,),
            lambda s, b, h, q, k: s + BUCKETS_5[h, t5_bucket(k - q, 5, False, 5)],
        ),
    ],
    "relative_table": [
        Case(mods.relative_table, (TABLE,), lambda s, b, h, q, k: s + TABLE[8 + q - k]),
        Case(mods.relative_table, (TABLE_H,), lambda s, b, h, q, k: s + TABLE_H[h, 10 + q - k]),
        Case(mods.relative_table, (TABLE_H[1:2],), lambda s, b, h, q, k: s + TABLE_H[1, 10 + q - k]),
    ],
    "pair_bias": [
        Case(mods.pair_bias, (PAIR,), lambda s, b, h, q, k: s + PAIR[q, k]),
        Case(mods.pair_bias, (PAIR_H,), lambda s, b, h, q, k: s + PAIR_H[h, q, k]),
        Case(mods.pair_bias, (PAIR_BH,), lambda s, b, h, q, k: s + PAIR_BH[b, h, q, k]),
        Case(mods.pair_bias, (PAIR_B,), lambda s, b, h, q, k: s + PAIR_B[b, 0, q, k]),
    ],
    "head_gate": [
        Case(mods.head_gate, (LOGITS,), lambda s, b, h, q, k: s * sigmoid(LOGITS[h])),
        Case(mods.head_gate, (LOGITS_B,), lambda s, b, h, q, k: s * sigmoid(LOGITS_B[b, h])),
    ],
    "temperature": [
        Case(mods.temperature, (PER_HEAD,), lambda s, b, h, q, k: s / PER_HEAD[h]),
        Case(lambda: mods.temperature(4), (), lambda s, b, h, q, k: s / 4),
    ],
    "log_n_scaling": [
        Case(
            lambda: mods.log_n_scaling(4),
            (),
            lambda s, b, h, q, k: s if q < 4 else s * math.log(q + 1) / math.log(4),
        )
    ],
    "scalable_softmax": [
        Case(mods.scalable_softmax, (PER_HEAD,), lambda s, b, h, q, k: PER_HEAD[h] * math.log(1 + q) * s),
        Case(lambda: mods.scalable_softmax(0.5), (), lambda s, b, h, q, k: 0.5 * math.log(1 + q) * s),
    ],
    "key_scales": [
        Case(mods.key_scales, (K_1,), lambda s, b, h, q, k: s * K_1[k]),
        Case(mods.key_scales, (K_B,), lambda s, b, h, q, k: s * K_B[b, k]),
        Case(mods.key_scales, (K_B1,), lambda s, b, h, q, k: s * K_B1[b, 0, k]),
        Case(
            lambda scales: mods.key_scales(scales, group=2),
            (K_BM,),
            lambda s, b, h, q, k: s * K_BM[b, [0, 0, 1][h], k],
        ),
    ],
    "query_scales": [
        Case(mods.query_scales, (Q_1,), lambda s, b, h, q, k: s * Q_1[q]),
        Case(mods.query_scales, (Q_BN,), lambda s, b, h, q, k: s * Q_BN[b, h, q]),
    ],
    "checkerboard": [
        Case(lambda: mods.checkerboard(), (), lambda s, b, h, q, k: s if (q + k) % 2 == 0 else s / 2),
        Case(lambda: mods.checkerboard(1, -1), (), lambda s, b, h, q, k: s if (q + k) % 2 == 0 else -s),
    ],
}

ALL_CASES = [pytest.param(case, id=f"{name}-{i}") for name in NAMES for i, case in enumerate(CASES.get(name, []))]


def test_every_exported_mod_has_a_case() -> None:
    assert sorted(CASES) == sorted(NAMES)
    assert set(FUNCTIONS) >= HELPERS


@pytest.mark.parametrize("case", ALL_CASES)
def test_scores_follow_the_definition(case: Case) -> None:
    got = quick_jit(functools.partial(everywhere, case.mod))(SCORES)
    np.testing.assert_allclose(got, by_loop(case.one), rtol=case.error, atol=case.error)


@pytest.mark.parametrize("case", [p for p in ALL_CASES if "approx" not in str(p.id)])  # that rule is below
def test_gradients_match_finite_differences(case: Case) -> None:
    """Along a random direction through the scores and every captured array."""
    weights = drawn(*SCORES.shape)
    start = (SCORES, *case.arrays)
    direction = tuple(drawn(*array.shape) for array in start)

    @jax.jit
    @jax.value_and_grad
    def loss(step: jax.Array) -> jax.Array:
        scores, *arrays = (jnp.asarray(a) + step * d for a, d in zip(start, direction, strict=True))
        return jnp.sum(everywhere(case.factory(*arrays), scores) * weights)

    step = 1e-2
    (below, _), (_, slope), (above, _) = (loss(jnp.float32(at)) for at in (-step, 0, step))
    np.testing.assert_allclose(slope, (above - below) / (2 * step), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", [p for p in ALL_CASES if p.values[0].arrays])
def test_every_captured_array_gets_a_gradient(case: Case) -> None:
    @jax.jit
    def gradients(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return jax.grad(lambda given: jnp.sum(everywhere(case.factory(*given)) ** 2))(arrays)

    for array, gradient in zip(case.arrays, gradients(tuple(map(jnp.asarray, case.arrays))), strict=True):
        assert gradient.shape == array.shape
        assert np.any(np.asarray(gradient) != 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", ALL_CASES)
def test_a_mod_keeps_the_dtype_of_the_score(case: Case, dtype: jnp.dtype) -> None:
    """Scalar in, scalar of the same dtype out, also under strict promotion; no control flow; a good name."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    with jax.numpy_dtype_promotion("strict"):
        mod = case.factory(*(jnp.asarray(array, jnp.float16) for array in case.arrays))
        jaxpr, result = jax.make_jaxpr(mod, return_shape=True)(
            jax.ShapeDtypeStruct((), dtype), index, index, index, index
        )
    assert (result.shape, result.dtype) == ((), dtype)
    assert not primitives_of(jaxpr.jaxpr) & {"while", "cond", "scan"}
    assert re.fullmatch(r"[a-z0-9_.-]+", mod.__name__)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "tanh_approx"])
def test_docstrings_name_every_argument(name: str) -> None:
    function = getattr(mods, name)
    text = inspect.getdoc(function) or ""
    assert re.match(r"(score|cap\[h\] \*|cap \*|slopes\[|bucket = )", text)
    for argument in inspect.signature(function).parameters:
        assert name == "identity" or re.search(rf"^(\w+, )?{argument}(, \w+)?:", text, re.M), argument


@pytest.mark.parametrize("name", [n for n in NAMES if n != "identity"])
def test_docstrings_say_that_sizes_are_checked(name: str) -> None:
    function = getattr(mods, name)
    sized = "num_heads" in inspect.signature(function).parameters or "ndarray" in str(inspect.signature(function))
    text = " ".join((inspect.getdoc(function) or "").split())
    assert bool(re.search(r"A call of (other sizes|another number of heads) raises ValueError\.", text)) == sized


SMALL = drawn(2, 5), drawn(HEADS, QUERIES - 2, KEYS - 1)
TOO_SMALL = {
    "alibi": (mods.alibi(2), mods.distance_penalty(mods.alibi_slopes(2)[[0, 1, 1]])),
    "distance_penalty": (mods.distance_penalty(SMALL[0][0, :2]), mods.distance_penalty(SMALL[0][0, [0, 1, 1]])),
    # distances from -6 to 8 in a table of those from -2 to 2
    "relative_table": (mods.relative_table(SMALL[0]), mods.relative_table(
        np.pad(SMALL[0], ((0, 1), (0, 0)), mode="edge")[:, [0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4]])),
    "pair_bias": (mods.pair_bias(SMALL[1]), mods.pair_bias(np.pad(SMALL[1], ((0, 0), (0, 2), (0, 1)), mode="edge"))),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_SMALL)
def test_as_plain_functions_mods_read_the_last_element_past_the_end(name: str) -> None:
    small, padded = TOO_SMALL[name]
    np.testing.assert_array_equal(everywhere(small), everywhere(padded))


# ----------------------------------------------------------------- ALiBi


def test_alibi_slopes_are_those_of_the_paper() -> None:
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    np.testing.assert_array_equal(mods.alibi_slopes(8), np.float32(eight))
    sixteen = [2 ** (-i / 2) for i in range(1, 17)]
    np.testing.assert_allclose(mods.alibi_slopes(16), sixteen, rtol=1e-6)
    np.testing.assert_array_equal(mods.alibi_slopes(1), np.float32([1 / 256]))


def test_alibi_slopes_of_other_numbers_of_heads() -> None:
    """Those of the power of two below, then the first, third, .. of the power of two above."""
    np.testing.assert_allclose(
        mods.alibi_slopes(12),
        [*(2.0**-i for i in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
        rtol=1e-6,
    )
    np.testing.assert_array_equal(mods.alibi_slopes(3), np.float32(SLOPES_OF_3))
    assert [len(mods.alibi_slopes(n)) for n in range(1, 40)] == list(range(1, 40))


def test_alibi_takes_more_off_the_farther_a_key_is() -> None:
    row = np.asarray(everywhere(mods.alibi(2), np.zeros((1, 2, 6, 6), np.float32)))
    np.testing.assert_array_equal(row[0, 0, 4], np.float32([-4, -3, -2, -1, 0, -1]) / 16)
    np.testing.assert_array_equal(row[0, 1, 0], np.float32([0, -1, -2, -3, -4, -5]) / 256)


# ----------------------------------------------------------------- softcap

POINTS = np.float32([-1e30, -40, -7, -5, -4.97, -4.9, -2, -0.3, -1e-3, 0, 1e-4, 0.1, 1, 3, 4.9, 4.98, 6, 1e30])


def test_tanh_approx_is_near_tanh() -> None:
    x = np.linspace(-8, 8, 20001).astype(np.float32)
    got = np.asarray(jax.vmap(mods.tanh_approx)(x), np.float64)
    wanted = np.tanh(x.astype(np.float64))
    assert np.max(np.abs(got - wanted)) < 1e-4
    assert np.max(np.abs(got - wanted)[x != 0] / np.abs(wanted)[x != 0]) < 1e-4
    assert np.max(np.abs(got)) <= 1
    np.testing.assert_array_equal(got, -got[::-1])
    assert np.min(np.diff(got)) > -2e-7  # monotonic up to rounding


@pytest.mark.parametrize("factory", [mods.softcap, mods.softcap_approx])
@pytest.mark.parametrize("cap", [1, 20.0, 50])
def test_softcap_stays_inside_the_cap(factory: Callable[[float], ScoreMod], cap: float) -> None:
    got = np.asarray(jax.vmap(factory(cap), (0, None, None, None, None))(jnp.asarray(POINTS), 0, 0, 0, 0))
    np.testing.assert_allclose(got, cap * np.tanh(POINTS / cap), rtol=2e-4, atol=0)
    assert np.max(np.abs(got)) <= cap


@pytest.mark.parametrize(("factory", "error"), [(mods.softcap, 1e-5), (mods.softcap_approx, 3e-4)])
def test_softcap_derivative(factory: Callable[[float], ScoreMod], error: float) -> None:
    """Against central differences of tanh in float64, forward, backward, and nothing but numbers far out."""
    cap, step = 5.0, 1e-4
    mod = factory(cap)

    def one(x: jax.Array) -> jax.Array:
        return mod(x, *(jnp.int32(0),) * 4)

    wide = POINTS.astype(np.float64)
    measured = (cap * np.tanh((wide + step) / cap) - cap * np.tanh((wide - step) / cap)) / (2 * step)
    forward = jax.vmap(lambda x: jax.jvp(one, (x,), (jnp.ones_like(x),))[1])(jnp.asarray(POINTS))
    backward = jax.vmap(jax.grad(one))(jnp.asarray(POINTS))
    np.testing.assert_allclose(forward, measured, atol=error)
    np.testing.assert_allclose(backward, measured, atol=error)
    assert np.min(np.asarray(backward)) >= 0


def test_approximate_softcap_uses_its_own_rule() -> None:
    """`1 - tanh_approx(x) ** 2` exactly, second order included, not the derivative of the fraction."""
    x = jnp.float32(1.25)
    value = mods.tanh_approx(x)
    assert jax.grad(mods.tanh_approx)(x) == 1 - value * value
    np.testing.assert_allclose(jax.grad(jax.grad(mods.tanh_approx))(x), -2 * value * (1 - value**2), rtol=1e-6)


# ----------------------------------------------------------------- T5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 100), (64, 1000), (8, 5)])
def test_t5_buckets_are_the_definition(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    relative = np.arange(-1500, 1501)
    got = mods.t5_buckets(relative, num_buckets=num_buckets, bidirectional=bidirectional, max_distance=max_distance)
    wanted = [t5_bucket(int(r), num_buckets, bidirectional, max_distance) for r in relative]
    np.testing.assert_array_equal(got, wanted)


def test_t5_buckets_by_hand() -> None:
    """The decoder's: distances 0 to 15 alone, then 16..18, 19..20, 21..23, .. together, 31 from 113 on."""
    past = mods.t5_buckets(-np.arange(200), num_buckets=32, bidirectional=False)
    np.testing.assert_array_equal(past[:24], [*range(16), 16, 16, 16, 17, 17, 18, 18, 18])
    assert np.flatnonzero(past == 31)[0] == 113
    assert np.all(mods.t5_buckets(np.arange(50), num_buckets=32, bidirectional=False) == 0)
    both = mods.t5_buckets(np.array([-128, -8, -1, 0, 1, 8, 128]), num_buckets=32, bidirectional=True)
    np.testing.assert_array_equal(both, [15, 8, 1, 0, 17, 24, 31])


def test_t5_buckets_of_narrow_integers() -> None:
    least = mods.t5_buckets(np.array([-128, 1], np.int8), num_buckets=32, bidirectional=True)
    np.testing.assert_array_equal(least, [15, 17])
    later = mods.t5_buckets(np.array([0, 1, 5], np.uint8), num_buckets=32, bidirectional=False)
    np.testing.assert_array_equal(later, [0, 0, 0])


@given(st.integers(2, 24), st.integers(1, 40), st.booleans())
def test_t5_buckets_never_fall_with_distance(pairs: int, more: int, bidirectional: bool) -> None:
    num_buckets = 2 * pairs
    max_distance = (pairs if not bidirectional else pairs // 2) + more
    past = mods.t5_buckets(
        -np.arange(2 * max_distance),
        num_buckets=num_buckets,
        bidirectional=bidirectional,
        max_distance=max_distance,
    )
    assert np.all(np.diff(past) >= 0)
    assert past[-1] == past[max_distance] == (num_buckets // 2 if bidirectional else num_buckets) - 1


# ----------------------------------------------------------------- others


def test_quantised_keys_and_queries_come_back() -> None:
    """int8 queries and keys with a scale a token: the product of the scaled numbers."""
    query, key = rng.integers(-127, 128, (4, 8)), rng.integers(-127, 128, (5, 8))
    of_query, of_key = positive(4), positive(5)
    products = (query @ key.T).astype(np.float32)[None, None]
    scaled = everywhere(mods.key_scales(of_key), everywhere(mods.query_scales(of_query), products))
    wanted = (query * of_query[:, None]) @ (key * of_key[:, None]).T
    np.testing.assert_allclose(scaled[0, 0], wanted, rtol=1e-4, atol=1e-2)


def test_names_tell_the_parameters() -> None:
    assert mods.alibi(8).__name__ == "alibi_8"
    assert mods.softcap(50).__name__ == "softcap_50"
    assert mods.softcap_approx(2.5).__name__ == "softcap_approx_2.5"
    assert mods.log_n_scaling(4096).__name__ == "log_n_scaling_4096"


ERRORS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: mods.alibi(0),
        "`alibi`: `num_heads` is 0; expected an int of at least 1. Pass the number of query heads.",
    ),
    (
        lambda: mods.alibi_slopes(2.0),  # pyright: ignore[reportArgumentType]
        "`alibi_slopes`: `num_heads` is 2.0; expected an int of at least 1. Pass the number of query heads.",
    ),
    (
        lambda: mods.distance_penalty(-1),
        "`distance_penalty`: `slopes` is -1; expected a finite number above 0. "
        "Pass how much a step of distance takes off, for all heads or for each.",
    ),
    (
        lambda: mods.distance_penalty(np.zeros((2, 2), np.float32)),
        "`distance_penalty`: `slopes` has shape (2, 2); expected [] or [N], not empty. "
        "Pass how much a step of distance takes off, for all heads or for each.",
    ),
    (
        lambda: mods.log_distance_penalty(1, math.inf),
        "`log_distance_penalty`: `rate` is inf; expected a finite number above 0. Pass the factor of the distance.",
    ),
    (
        lambda: mods.softcap(0),
        "`softcap`: `cap` is 0; expected a finite number above 0. Gemma 2 uses 50.",
    ),
    (
        lambda: mods.softcap_approx(math.nan),
        "`softcap_approx`: `cap` is nan; expected a finite number above 0. Gemma 2 uses 50.",
    ),
    (
        lambda: mods.t5_bias(np.zeros(4, np.float32), bidirectional=True),
        "`t5_bias`: `table` has shape (4,); expected [N, num_buckets], not empty. "
        "Pass a learned bias for each query head and bucket.",
    ),
    (
        lambda: mods.t5_bias(np.zeros((2, 7), np.float32), bidirectional=True),
        "`t5_buckets`: `num_buckets` is 7; expected an even int when `bidirectional` is True. "
        "Half of the buckets are for later keys.",
    ),
    (
        lambda: mods.t5_buckets(np.arange(3), num_buckets=32, bidirectional=False, max_distance=16),
        "`t5_buckets`: `max_distance` is 16; expected an int of at least 17. Nearer keys have their own bucket.",
    ),
    (
        lambda: mods.t5_bias(np.zeros((2, 8), np.float32), bidirectional="no"),  # pyright: ignore[reportArgumentType]
        "`t5_buckets`: `bidirectional` is 'no'; expected True or False. True is for encoders, False for decoders.",
    ),
    (
        lambda: mods.head_gate([[1.0], [1.0, 2.0]]),  # pyright: ignore[reportArgumentType]
        "`head_gate`: `gate` is a list, which is no array of numbers; expected floating numbers [N] or [B, N]. Rows of unequal length "
        "are padded first. Pass one logit per query head.",
    ),
    (
        lambda: mods.softcap_approx(10**400),
        f"`softcap_approx`: `cap` is {10**400}; expected a finite number above 0. Gemma 2 uses 50.",
    ),
    (
        lambda: mods.t5_buckets(np.zeros(3), num_buckets=32, bidirectional=False),
        "`t5_buckets`: `relative` has dtype float64; expected integers. Pass key positions minus query positions.",
    ),
    (
        lambda: mods.relative_table(np.zeros((2, 8), np.float32)),
        "`relative_table`: `table` has shape (2, 8); expected an odd last size, 2T-1. "
        "Pass a bias for each distance -(T - 1) .. T - 1.",
    ),
    (
        lambda: mods.pair_bias(np.zeros((3, 3), np.int32)),
        "`pair_bias`: `bias` has dtype int32; expected floating. "
        "Pass one number for each query and key, with axes for heads and batch in front if they differ.",
    ),
    (
        lambda: mods.head_gate(np.float32(1)),
        "`head_gate`: `gate` has shape (); expected [N] or [B, N], not empty. Pass one logit per query head.",
    ),
    (
        lambda: mods.temperature(0.0),
        "`temperature`: `value` is 0.0; expected a finite number above 0. Pass 1.0 to change nothing.",
    ),
    (
        lambda: mods.log_n_scaling(1),
        "`log_n_scaling`: `train_length` is 1; expected an int of at least 2. Pass the sequence length of training.",
    ),
    (
        lambda: mods.scalable_softmax(False),
        "`scalable_softmax`: `factor` is False; expected a finite number above 0. The paper learns one per head.",
    ),
    (
        lambda: mods.key_scales(np.zeros((1, 1, 1, 1), np.float32)),
        "`key_scales`: `scales` has shape (1, 1, 1, 1); expected [S] or [B, S] or [B, M, S], not empty. "
        "Pass the factor of each key.",
    ),
    (
        lambda: mods.key_scales(np.ones(3, np.float32), group=0),
        "`key_scales`: `group` is 0; expected an int of at least 1. Pass the number of query heads per key head.",
    ),
    (
        lambda: mods.query_scales(np.ones(3, np.int32)),
        "`query_scales`: `scales` has dtype int32; expected floating. Pass the factor of each query.",
    ),
    (
        lambda: mods.checkerboard(1.0, "x"),  # pyright: ignore[reportArgumentType]
        "`checkerboard`: `odd` is 'x'; expected a finite number. It is the factor at odd distances.",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors_say_everything(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        call()


def test_an_array_of_one_element_is_not_traced_again(monkeypatch) -> None:
    """Outside of jit a mod that is made anew in each call is traced once, also for one batch entry or one head."""
    from flexjax.trace import trace_mod

    traced, trace = [], trace_mod._trace
    monkeypatch.setattr(trace_mod, "_trace", lambda name, *rest: traced.append(name) or trace(name, *rest))
    x = jnp.ones((1, 8, 1, 8))
    for length in (3, 4, 5):
        out = flexjax.flex_attention(
            x, x, x, score_mod=mods.alibi(1), mask_mod=flexjax.masks.padding(jnp.asarray([length]))
        )
        assert jnp.allclose(out, 1.0)
    assert len(traced) <= 2
