"""Traced programs evaluated on one tile of a kernel, in both orientations, against the mod itself; in the simulator."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.machine import memory, simulator
from flexjax.backends.mosaic_gpu.programs import support as programs_support
from flexjax.backends.mosaic_gpu.programs import tile_programs
from flexjax.trace import trace_mod
from tests.arrays import array

SIZES = B, H, Q, KV = 2, 4, 128, 256
SHAPE = (64, 64)
BATCH, HEAD, Q_START = 1, 2, 64
RNG = np.random.default_rng(0)
ROW = array(RNG.normal(size=Q), jnp.float32)
COLUMN = array(RNG.normal(size=KV), jnp.bfloat16)
TABLE = array(RNG.normal(size=(H, Q + KV)), jnp.float32)
PAIR = array(RNG.normal(size=(B, H, Q, KV)), jnp.float16)
SEGMENTS = array(np.arange(KV) // 37, jnp.int32)
SLOPES = array(RNG.normal(size=H), jnp.float32)
FLAGS = array(RNG.normal(size=(Q, KV)) > 0)
SMALL = array(RNG.integers(-100, 100, KV), jnp.int8)
LIMITS = array(RNG.integers(0, KV, Q), jnp.int32)
FAR = array(RNG.choice([-(2**31), 2**31 - 1, 150], Q), jnp.int32)
GAIN = jnp.float32(1.5)
ENDS = array(RNG.choice([-(2**31), -7, 0, 5], Q), jnp.int32)
DIVISORS = array(RNG.choice([-3, -1, 0, 4], KV), jnp.int32)
WORDS = array(RNG.integers(-(2**31), 2**31, (B, Q, 4)), jnp.int32)


def _hash(s: typing.Any, b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    mixed = q.astype(jnp.uint32) * jnp.uint32(2654435761) ^ k.astype(jnp.uint32)
    return s + (mixed >> jnp.uint32(9)).astype(jnp.float32) * 1e-6


def _divisions(s: typing.Any, b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    """Every division of every type by divisors of which some are 0, and of the least integer by -1, weighed apart."""
    found = []
    for dtype in (jnp.int32, jnp.uint32, jnp.int8, jnp.uint8):
        x, y = ENDS[q].astype(dtype), DIVISORS[k].astype(dtype)
        for result in (x // y, x % y, jax.lax.div(x, y), jax.lax.rem(x, y), x // DIVISORS[h].astype(dtype)):
            found.append(result.astype(jnp.int32) % 1021)
    found += [(q - k) % (h - 2), (q - k) // (h - 2), jnp.int32(-(2**31)) // DIVISORS[k] % 1021]
    return s + sum((n + 1) * x.astype(jnp.float32) for n, x in enumerate(found)) * 1e-3


MODS: dict[str, typing.Callable] = {
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "alibi, then more": lambda s, b, h, q, k: jnp.tanh(s - 0.5 * (q - k)) * 3.0,
    "soft cap": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30),
    "row": lambda s, b, h, q, k: s + ROW[q] * GAIN,
    "column": lambda s, b, h, q, k: s + COLUMN[k],
    "relative": lambda s, b, h, q, k: s + TABLE[h, q - k + KV],
    "relative, clipped": lambda s, b, h, q, k: s + TABLE[h, jnp.clip(q - k + 17, 0, 40)],
    "pair": lambda s, b, h, q, k: s + PAIR[b, h, q, k],
    "segments": lambda s, b, h, q, k: jnp.where(SEGMENTS[q] == SEGMENTS[k], s, -jnp.inf),
    "flags": lambda s, b, h, q, k: jnp.where(FLAGS[q, k], s, -1e9),
    "int8": lambda s, b, h, q, k: s + SMALL[k] * SMALL[q],
    "logarithms and powers": lambda s, b, h, q, k: (
        jnp.log1p(s * s) + jnp.expm1(s) + jnp.power(jnp.abs(s) + 0.1, 1.7) + s**3 + jnp.cbrt(s)
    ),
    "rounding": lambda s, b, h, q, k: jnp.floor(s) + jnp.ceil(s * 3) + jnp.round(s * 7) + jnp.sign(s) + jnp.fmod(s * 5, 1.3),
    "activations": lambda s, b, h, q, k: jax.nn.gelu(s) + jax.nn.softplus(s) + jax.nn.silu(s) + jax.nn.relu(s),
    "factors and addends of an exponential": lambda s, b, h, q, k: (
        jax.nn.sigmoid(1.5 * s - SLOPES[h] - 3) + jnp.exp(-(2 - s / 3) - ROW[q]) + jnp.exp2(2 - 0.5 * s) + jax.nn.silu(GAIN - 2 * s)
        + jnp.exp(SLOPES[h] * (0.1 * s)) + jax.nn.sigmoid(0.3 * (s + 1) * SLOPES[h] + COLUMN[k])
    ),
    "decay": lambda s, b, h, q, k: s * jnp.exp(-0.01 * jnp.maximum(q - k, 0).astype(jnp.float32)) + jnp.minimum(5, 2 * q - k).astype(jnp.float32),
    "powers of multiples": lambda s, b, h, q, k: (
        jnp.square(jax.nn.relu(0.1 * s)) + (0.2 * s) ** 3 + jax.nn.relu(-s) ** 4 + jnp.maximum(0.1 * s, 0.1) + (1e-6 * s) ** 2
    ),
    "angles": lambda s, b, h, q, k: s + jnp.cos(q * 0.1) * jnp.sin(k * 0.3) + jnp.arctan2(s, jnp.float32(2.0)),
    "integers": lambda s, b, h, q, k: (
        s + (q // 7) * (k % 5) + ((q - k) // 4) - ((q - k) % 3) + (k ^ q) + (q << 2) + (q - k) // jnp.maximum(k - 100, 1)
    ),
    "divisors that may be 0": _divisions,
    "booleans": lambda s, b, h, q, k: jnp.where(((q >= k) & ~(k < 30)) | ((q % 2 == 0) != (k % 3 == 0)), s, 0.0),
    "comparisons": lambda s, b, h, q, k: jnp.where(
        (2 * k >= 3 * q - 7) & (k + q != 190) & (k - q < 40 + b) & ((q + 1 <= k) | (2 * k - q < 5)), s, 0.0
    ),
    "comparisons with loaded numbers": lambda s, b, h, q, k: jnp.where(
        (k < LIMITS[q]) & (LIMITS[h + 3] - k != 5) & (FAR[q] > k) & (k - q >= FAR[h]), s, 0.0
    ),
    "checkerboard": lambda s, b, h, q, k: jnp.where((k - q) % 2 == 1, 2.0 * jnp.where((k - q) % 2 == 0, s * 0.5, s), s),
    "positive factors of a head": lambda s, b, h, q, k: (
        jnp.tanh(s * jnp.maximum(SLOPES[h], 0.1) * jnp.maximum(GAIN, 1e-3)) + s * jnp.maximum(SLOPES[0], 0.2) * jnp.where(k % 2 == 0, 0.3, 0.7)
    ),
    "chosen factors": lambda s, b, h, q, k: jnp.where(q > k, 3.0 * s, s) * GAIN * jnp.where(k % 2 == 0, -0.3, 0.7),
    "periods": lambda s, b, h, q, k: s + (3 * q - 5 * k + 7) % 8 + (q + k) % 64 * 0.1 + (k - 2 * q) % 32 - (q - k) % 4096,
    "bits of blocks of a tile": lambda s, b, h, q, k: jnp.where((WORDS[b, q, k // 64] >> k // 64) & 1 == 1, s, -1.0),
    "bits of smaller blocks": lambda s, b, h, q, k: jnp.where((WORDS[b, q, k // 512] >> k // 16) & 1 == 1, s, -1.0),
    "blocks of both": lambda s, b, h, q, k: s * (q // 64 + k // 128) + TABLE[h, q // 64] * (WORDS[b, k // 64, 1] % 8),
    "blocks from elsewhere": lambda s, b, h, q, k: s + (k + 32) // 64 + ROW[(k - 64) // 64] + (q + k) // 64,
    "hash": _hash,
    "distance": lambda s, b, h, q, k: s - jnp.abs(q - k).astype(jnp.float32) * 0.1,
    "finite": lambda s, b, h, q, k: jnp.where(jnp.isfinite(jnp.log(s)), s, 0.0),
}  # fmt: skip


PAIRS: list[tuple[typing.Callable, bool, bool]] = [
    # a mod that reads an array [.., 128], whether tiles of queries x keys read it in pairs, and those of keys x queries
    (lambda a, s, b, h, q, k: s + a[h, q, k], True, False),
    (lambda a, s, b, h, q, k: s + a[b, k, q], False, True),
    (lambda a, s, b, h, q, k: s + a[h, q, k + 2], True, False),
    (lambda a, s, b, h, q, k: s + a[h, q, k + 1], False, False),
    (lambda a, s, b, h, q, k: s + a[h, q, k + h], False, False),
    (lambda a, s, b, h, q, k: s + a[h, k, k + 0 * q], False, False),
    (lambda a, s, b, h, q, k: s + a[h, 0, q - k + 64], False, False),
    (lambda a, s, b, h, q, k: s + a[h, q, 2 * k], False, False),
]


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_which_loads_read_two_neighbours_at_once(number: int) -> None:
    mod, rows, columns = PAIRS[number]
    array = jnp.zeros((4, 64, 128))
    (load,) = trace_mod.trace_score_mod(lambda *x: mod(array, *x), (4, 4, 64, 64)).program.loads
    assert tile_programs.reads_pairs(load, "q", 128) == rows
    assert tile_programs.reads_pairs(load, "kv", 128) == columns
    assert not tile_programs.reads_pairs(load, "q", 127)


def on_tile(
    mod: typing.Callable,
    score: jax.Array,
    transposed: bool,
    edge: bool,
    aligned: bool = True,
    slack: float | None = None,
) -> np.ndarray:
    traced = trace_mod.trace_score_mod(mod, SIZES)
    assert programs_support.unsupported(traced.program) is None

    def body(score_ref: typing.Any, *refs: typing.Any) -> None:
        *captures, out = refs
        program = tile_programs.TileProgram(
            traced.program, captures, SHAPE, tile_programs.Place(BATCH, HEAD), row_axis="kv" if transposed else "q",
            overhangs=edge, aligned=aligned,
        )  # fmt: skip
        with simulator.running(True):
            program = program.at_rows(Q_START).at_columns(64 if transposed else 128)
            (out[...],) = program.tile(score_ref[...], 1.0, slack)

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32), grid=(1,), grid_names=("program",), num_threads=1,
        thread_name="wg", interpret=plgpu.InterpretGPUParams(),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )  # fmt: skip
    return np.asarray(kernel(score, *map(memory.kernel_operand, traced.arrays)))


@pytest.mark.parametrize("edge", [False, True], ids=["inside", "edge"])
@pytest.mark.parametrize("transposed", [False, True], ids=["q rows", "kv rows"])
@pytest.mark.parametrize("name", MODS)
def test_matches_the_mod(name: str, transposed: bool, edge: bool) -> None:
    score = array(RNG.normal(size=SHAPE), jnp.float32)
    first = jnp.arange(64, 128, dtype=jnp.int32)
    second = jnp.arange(128, 192, dtype=jnp.int32) if not transposed else first
    at = lambda s, q, k: MODS[name](s, jnp.int32(BATCH), jnp.int32(HEAD), q, k)
    over = jax.vmap(jax.vmap(at, (0, None, 0)), (0, 0, None))
    want = over(score.T, second, first).T if transposed else over(score, first, second)
    got = on_tile(MODS[name], score, transposed, edge)
    np.testing.assert_allclose(
        got, want, rtol=3e-6, atol=3e-6 * float(jnp.max(jnp.where(jnp.isfinite(want), abs(want), 1)))
    )


WEIGHTS: dict[str, typing.Callable] = {
    **{name: MODS[name] for name in ("factors and addends of an exponential", "decay", "powers of multiples")},
    "sigmoid": lambda s, b, h, q, k: jax.nn.sigmoid(s - 2),
    "small sigmoid": lambda s, b, h, q, k: jax.nn.sigmoid(s - 9),
    "silu": lambda s, b, h, q, k: jax.nn.silu(0.5 * s),
}  # fmt: skip


@pytest.mark.parametrize("slack", [0.0, 2.0**-12], ids=["exact", "coarse"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_match_the_mod(name: str, slack: float) -> None:
    score = array(RNG.normal(size=SHAPE), jnp.float32)
    if name in ("sigmoid", "silu"):
        score = score.at[3, :6].set(jnp.asarray([-100.0, 100.0, 40.0, -40.0, 3.4e38, -3.4e38]))
    if name == "sigmoid":
        score = score.at[5, 7].set(-jnp.inf).at[6, 8].set(jnp.inf).at[7, 9].set(jnp.nan)
    at = lambda s, q, k: WEIGHTS[name](s, jnp.int32(BATCH), jnp.int32(HEAD), q, k)
    over = jax.vmap(jax.vmap(at, (0, None, 0)), (0, 0, None))
    want = over(score, jnp.arange(64, 128, dtype=jnp.int32), jnp.arange(128, 192, dtype=jnp.int32))
    got = on_tile(WEIGHTS[name], score, False, False, slack=slack)
    rtol = max(3e-6, slack)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-30 if name[0] == "s" else rtol * float(jnp.max(abs(want))))


def test_a_quotient_is_one_number_of_a_tile_that_lies_in_a_block() -> None:
    def kinds(mod: typing.Callable, shape: tuple[int, int], row_axis: str = "q") -> dict[str, str]:
        """The narrowed steps by what they compute."""
        program = trace_mod.trace_mask_mod(mod, SIZES).program
        place = tile_programs.Place(BATCH, HEAD)
        made = tile_programs.TileProgram(program, [], shape, place, row_axis=row_axis, aligned=True)
        return {getattr(s, "prim", "load"): made.narrowed.get(s.outs[0].id, "") for s in program.steps}

    bit = lambda b, h, q, k: (WORDS[b, q, k // 2048] >> k // 64) & 1 == 1
    row = {"floordiv": "scalar", "load": "row", "shift_right_arithmetic": "row", "and": "row", "eq": "row"}
    assert kinds(bit, (64, 64)) == row
    assert kinds(bit, (64, 32)) == row
    assert kinds(bit, (64, 128))["load"] == "row"
    assert kinds(bit, (64, 128))["shift_right_arithmetic"] == ""
    assert kinds(bit, (64, 128), "kv") == {name: kind.replace("row", "column") for name, kind in row.items()}
    assert set(kinds(lambda b, h, q, k: (k + 16) // 64 == q // 64, (32, 32)).values()) == {"", "scalar", "column"}


NO_FORM = {
    "nextafter": lambda s, b, h, q, k: jnp.nextafter(s, jnp.float32(0)),
    "top_k": lambda s, b, h, q, k: jax.lax.top_k(jnp.stack([s, 0.5 * s]), 1)[0][0],
    "sort": lambda s, b, h, q, k: s + jnp.searchsorted(KNOTS, q - k, method="sort"),
    "random_gamma": lambda s, b, h, q, k: s + jax.random.gamma(jax.random.key(q), 2.0),
}


@pytest.mark.parametrize("name", NO_FORM)
def test_names_the_primitive_that_it_has_no_form_for(name: str) -> None:
    reason = programs_support.unsupported(trace_mod.trace_score_mod(NO_FORM[name], SIZES).program)
    assert reason == f"uses the primitive `{name}`, which has no form on a tile"


def test_tiles_at_any_place_narrow_nothing() -> None:
    score = array(RNG.normal(size=SHAPE), jnp.float32)
    mod = MODS["bits of blocks of a tile"]
    got = [on_tile(mod, score, False, False, aligned) for aligned in (False, True)]
    np.testing.assert_array_equal(*got)


def test_names_a_loop_that_is_not_unrolled() -> None:
    loop = lambda q: jax.lax.while_loop(lambda c: c < q, lambda c: c * 2 + 1, jnp.int32(1))
    reason = programs_support.unsupported(trace_mod.trace_score_mod(lambda s, b, h, q, k: loop(q) + s, SIZES).program)
    assert reason == "contains control flow that could not be unrolled (`while`)"


KNOTS = jnp.asarray([-9, -1, 0, 3, 8], jnp.int32)
BUCKETS = jnp.asarray([0.5, -0.25, 1.0, 2.0, -1.5, 0.125], jnp.float32)
FLOATS = jnp.asarray([-9.0, -1.0, 0.0, 3.0, 8.0], jnp.float32)
SEARCHES = {
    "scan": lambda s, b, h, q, k: s + BUCKETS[jnp.searchsorted(KNOTS, q - k)],
    "scan_unrolled": lambda s, b, h, q, k: s + BUCKETS[jnp.searchsorted(FLOATS, s, method="scan_unrolled")],
    "compare_all": lambda s, b, h, q, k: s + BUCKETS[jnp.searchsorted(FLOATS, s, side="right", method="compare_all")],
    "digitize": lambda s, b, h, q, k: s + BUCKETS[jnp.digitize((q - k).astype(jnp.float32), FLOATS)],
    "interp": lambda s, b, h, q, k: jnp.interp(s, FLOATS, BUCKETS[:5]),
    "piecewise": lambda s, b, h, q, k: jnp.piecewise(s, [s < -1, s > 1], [lambda s: -s, lambda s: s * s, 0.5]),
    "select": lambda s, b, h, q, k: jnp.select([s < -1, s > 1], [s * 2, s * 3], s),
    "normal": lambda s, b, h, q, k: s + jax.random.normal(jax.random.fold_in(jax.random.key(2), q - k)),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_accepts_searches_and_draws_with_their_derivatives(name: str) -> None:
    made = trace_mod.trace_score_mod(SEARCHES[name], SIZES)
    assert made.derivative is not None
    assert programs_support.unsupported(made.program) is None
    assert programs_support.unsupported(made.derivative) is None


def test_names_an_array_whose_elements_int32_cannot_number() -> None:
    table = jnp.zeros((4, 4))
    program = trace_mod.trace_score_mod(lambda s, b, h, q, k: s + table[q, k], SIZES).program
    (array,) = program.captures
    program = dataclasses.replace(program, captures=(dataclasses.replace(array, shape=(1 << 16, 1 << 15)),))
    reason = programs_support.unsupported(program)
    assert reason == "reads one captured array at indices that range over 2^31 or more elements"
