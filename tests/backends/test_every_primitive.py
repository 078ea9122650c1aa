"""Every operation on every backend: it gives the oracle's numbers, or the backend refuses it in a sentence that names it.

An operation has a row in tests/primitives.py. All rows that a backend accepts run in one call, a head each: head i of the
score_mod (or mask_mod) computes row i, so that one compilation serves them all and a wrong head names its row. The GPU kernels
are lowered and not run.

The second half of this file checks that the tables which give operations a meaning agree: each operation is in each table, or
in the set of those that the table leaves out on purpose. A new operation fails these tests until somebody has decided.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flexjax
from flexjax.analysis import bounds, interval_rules, interval_truth
from flexjax.backends.mosaic_gpu.programs import tile_ops as gpu_tile_ops
from flexjax.backends.mosaic_tpu import tile_ops as tpu_tile_ops
from flexjax.backends.target import Target
from flexjax.ir import evaluate, literals, operations, ranges
from flexjax.ir.operations import OPERATIONS
from flexjax.ir.program import Op
from flexjax.passes import dispatch
from flexjax.plan.kernel_plan import KernelPlan, Wanted
from flexjax.trace.primitives import ELEMENTWISE, REWRITTEN
from flexjax.trace.trace_mod import TracedMod, trace_mask_mod, trace_score_mod
from tests.arrays import array
from tests.cases.small import quick_jit, to_mask
from tests.marks import some_slow
from tests.primitives import NO_DERIVATIVE, OWN_ROWS, ROWS

EVERY_ROW = ROWS | OWN_ROWS
T, S, D, BLOCK = 16, 32, 8, 8
RNG = np.random.default_rng(11)
QUERY = RNG.uniform(0.5, 0.9, (T, D)).astype(np.float32)
KEY = RNG.uniform(0.4, 0.9, (S, D)).astype(np.float32)
VALUE = RNG.normal(size=(S, D)).astype(np.float32)
WEIGHTS = array(RNG.normal(size=(T, 1, D)), jnp.float32)
NUMBERS = array(RNG.uniform(0.15, 0.85, T), jnp.float32)
NUMBERS_OF_KEYS = array(RNG.uniform(0.15, 0.85, S), jnp.float32)
WORDS = array(RNG.integers(-(2**31), 2**31, T), jnp.int32)
WORDS_OF_KEYS = array(RNG.integers(-(2**31), 2**31, S), jnp.int32)
SCORES = QUERY @ KEY.T / D

KINDS = ("score_mod", "mask_mod")
TARGETS = {"mosaic_gpu": Target("cuda", "NVIDIA H200", "9.0"), "mosaic_tpu": Target("tpu", "TPU v6 lite"), "xla": None}
needs_new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12"
)
EVERY_BACKEND = [pytest.param("mosaic_gpu", marks=needs_new_jax), "mosaic_tpu", "xla", "reference"]


# ------------------------------------------------------------------- mods of which each head computes a row


@functools.cache
def values_of_rows(kind: str) -> dict[str, np.ndarray]:
    """What jax computes for each row at every (query, key): float32 [T, S]. One program: rows alone take four times as long."""
    x = SCORES if kind == "score_mod" else np.broadcast_to(NUMBERS_OF_KEYS, (T, S))
    y = np.broadcast_to(np.asarray(NUMBERS)[:, None], (T, S))
    n = np.asarray(WORDS)[:, None] ^ np.asarray(WORDS_OF_KEYS)
    every = lambda *numbers: {name: row(*numbers) for name, row in EVERY_ROW.items()}
    return {
        name: np.asarray(found, np.float32) for name, found in quick_jit(jax.vmap(jax.vmap(every)))(x, y, n).items()
    }


def values_of(name: str, kind: str) -> np.ndarray:
    return values_of_rows(kind)[name]


def factor_of(name: str) -> float:
    """A factor that brings the row's values to -4..4."""
    return float(4 / np.abs(values_of(name, "score_mod")).max())


def threshold_of(name: str) -> float:
    """A number in the widest gap between the middle half of the row's values in a mask: no rounding reaches it."""
    found = np.unique(values_of(name, "mask_mod").astype(np.float64))
    if len(found) == 1:
        return float(found[0]) - 1
    first = (len(found) - 1) // 4
    gap = first + int(np.argmax(np.diff(found)[first : max(first + 1, 3 * len(found) // 4)]))
    return float(found[gap : gap + 2].mean())


def of_head(h: Any, choices: Sequence[Any]) -> Any:
    found = choices[0]
    for i, choice in enumerate(choices[1:], 1):
        found = jnp.where(h == i, choice, found)
    return found


def score_mod(names: Sequence[str], numbers: jax.Array = NUMBERS) -> Callable:
    """The score_mod whose head i computes row names[i]."""
    rows = [(EVERY_ROW[name], factor_of(name)) for name in names]

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        n = WORDS[q] ^ WORDS_OF_KEYS[k]
        return of_head(h, [row(s, numbers[q], n) * factor for row, factor in rows])

    return mod


def mask_mod(names: Sequence[str]) -> Callable:
    """The mask_mod whose head i compares row names[i] with a threshold."""
    rows = [(EVERY_ROW[name], threshold_of(name)) for name in names]

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        n = WORDS[q] ^ WORDS_OF_KEYS[k]
        return of_head(h, [row(NUMBERS_OF_KEYS[k], NUMBERS[q], n) > threshold for row, threshold in rows])

    return mod


@functools.cache
def traced_of(name: str, kind: str) -> TracedMod:
    """The row alone in a mod of one head."""
    if kind == "score_mod":
        return trace_score_mod(score_mod([name]), (1, 1, T, S))
    return trace_mask_mod(mask_mod([name]), (1, 1, T, S))


# ------------------------------------------------------------------- refusals


def refusal(backend: str, name: str, kind: str) -> str | None:
    """The sentence with which a backend refuses the row in the forward pass, None where it runs the row."""
    return dispatch.backend(backend).refuses(plan_of(backend, name, kind), TARGETS.get(backend))


def refusal_of_gradient(backend: str, name: str) -> str | None:
    """The sentence with which jax or a backend refuses to differentiate the row as a score_mod."""
    traced = traced_of(name, "score_mod")
    if traced.derivative is None:
        return traced.why_not
    captures = tuple(capture.dtype == "float32" for capture in traced.program.captures)
    wanted = Wanted(True, True, True, False, False, False, captures)
    target = TARGETS.get(backend) or Target("cpu")
    plan = plan_of(backend, name, "score_mod")
    return dispatch.backend(backend).refuses_backward(plan, target, wanted, traced.derivative)


def plan_of(backend: str, name: str, kind: str) -> KernelPlan:
    program = traced_of(name, kind).program
    score, mask = (program, None) if kind == "score_mod" else (None, program)
    dtype = "bfloat16" if backend == "mosaic_gpu" else "float32"
    return KernelPlan(1, 1, 1, T, S, D, D, dtype, "BTNH", 1 / D, score, mask)


def accepted(backend: str, kind: str) -> list[str]:
    return [name for name in EVERY_ROW if refusal(backend, name, kind) is None]


def differentiable(backend: str) -> list[str]:
    return [name for name in accepted(backend, "score_mod") if refusal_of_gradient(backend, name) is None]


def names_what_it_refuses(why: str, name: str, kind: str) -> bool:
    """Whether the sentence names the operation, or the type of number that it computes and kernels do not have."""
    program = traced_of(name, kind).program
    complex_types = {out.dtype for step in program.steps for out in step.outs if out.dtype.startswith("complex")}
    return f"`{name}`" in why or any(dtype in why for dtype in complex_types)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_a_refusal_is_a_sentence_that_names_the_operation(backend: str) -> None:
    for name in EVERY_ROW:
        for kind in KINDS:
            why = refusal(backend, name, kind)
            if why is not None:
                assert why.endswith("."), f"{name}: {why}"
                assert kind in why, f"{name}: {why}"
                assert names_what_it_refuses(why, name, kind), f"{name}: {why}"
        why = refusal(backend, name, "score_mod") or refusal_of_gradient(backend, name)
        assert (name in NO_DERIVATIVE) <= (why is not None)
        assert why is None or why.endswith("."), f"{name}: {why}"


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_xla_and_the_reference_refuse_nothing(backend: str) -> None:
    assert accepted(backend, "score_mod") == accepted(backend, "mask_mod") == list(EVERY_ROW)
    assert set(differentiable(backend)) == set(EVERY_ROW) - NO_DERIVATIVE


# ------------------------------------------------------------------- numbers


def attend(backend: str, count: int, **mods: Any) -> jax.Array:
    """Attention of `count` equal heads: float32 [T, count, D]."""
    query, key, value = (jnp.broadcast_to(x[None, :, None], (1, len(x), count, D)) for x in (QUERY, KEY, VALUE))
    options = flexjax.KernelOptions(interpret=backend == "mosaic_tpu")
    run = functools.partial(flexjax.flex_attention, scale=1 / D, implementation=backend, kernel_options=options, **mods)
    return jax.jit(run)(query, key, value)[0]


def softmax_times_value(scores: np.ndarray) -> np.ndarray:
    """float64 [T, S] to [T, D]; a row of nothing but -inf gives 0."""
    top = scores.max(1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return weights @ VALUE.astype(np.float64) / np.maximum(weights.sum(1, keepdims=True), 1e-30)


def assert_heads(got: jax.Array, wanted: Sequence[np.ndarray], names: Sequence[str], tolerance: float = 2e-5) -> None:
    """Compares head by head; the message lists the rows that are wrong."""
    found = np.asarray(got)
    errors = {name: float(np.abs(found[:, i] - wanted[i]).max()) for i, name in enumerate(names)}
    wrong = {name: error for name, error in errors.items() if not error <= ROUNDS_GRADIENTS.get(name, tolerance)}
    assert not wrong, wrong


ROUNDS_GRADIENTS = {"reduce_precision": 0.01, "convert_element_type": 0.01}
"""Rows through bfloat16: jax rounds the cotangent to it, the kernels the derivative alone."""


# the gradients below are compared with those of the reference
# tests/trace/test_primitives.py evaluates each row as xla does
@pytest.mark.parametrize("backend", some_slow(["mosaic_tpu", "xla", "reference"], ["mosaic_tpu"]))
def test_a_score_mod_gives_the_oracles_numbers(backend: str) -> None:
    names = accepted(backend, "score_mod")
    out = attend(backend, len(names), score_mod=score_mod(names))
    wanted = [softmax_times_value(values_of(name, "score_mod").astype(np.float64) * factor_of(name)) for name in names]
    assert_heads(out, wanted, names)


@functools.cache
def block_mask_of(names: tuple[str, ...]) -> tuple[flexjax.BlockMask, list[np.ndarray]]:
    """The mask of every row, its blocks decided by interval analysis alone, and the same from jax: bool [T, S] a row."""
    made = flexjax.create_block_mask(mask_mod(names), 1, len(names), T, S, block_size=BLOCK, exact=False)
    return made, [values_of(name, "mask_mod").astype(np.float64) > threshold_of(name) for name in names]


def test_a_block_mask_calls_no_block_full_or_empty_that_is_not() -> None:
    names = tuple(EVERY_ROW)
    made, masks = block_mask_of(names)
    found = np.asarray(to_mask(made))[0]
    assert [name for i, name in enumerate(names) if not np.array_equal(found[i], masks[i])] == []


# a backend evaluates a mask as it does a score
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mosaic_tpu", "xla", "reference"])
def test_a_mask_mod_gives_the_oracles_numbers(backend: str) -> None:
    names = tuple(accepted(backend, "mask_mod"))
    made, masks = block_mask_of(names)
    out = attend(backend, len(names), block_mask=made)
    wanted = [softmax_times_value(np.where(mask, SCORES.astype(np.float64), -np.inf)) for mask in masks]
    assert_heads(out, wanted, names)


@functools.cache
def gradient_of(backend: str, names: tuple[str, ...]) -> np.ndarray:
    """The gradient by a captured number that each head and query has for itself: float32 [T, heads]."""
    rows = [(EVERY_ROW[name], factor_of(name)) for name in names]

    def loss(numbers: jax.Array) -> jax.Array:
        def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            n = WORDS[q] ^ WORDS_OF_KEYS[k]
            return of_head(h, [row(s, numbers[q, h], n) * factor for row, factor in rows])

        return jnp.sum(attend(backend, len(names), score_mod=mod) * WEIGHTS)

    return np.asarray(jax.jit(jax.grad(loss))(jnp.repeat(NUMBERS[:, None], len(names), 1)))


# tests/trace/test_primitives.py always evaluates each row's derivative as xla does, on a tile
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mosaic_tpu", "xla"])
def test_gradients_are_those_of_the_reference(backend: str) -> None:
    names, every = tuple(differentiable(backend)), tuple(differentiable("reference"))
    wanted = gradient_of("reference", every)[:, [every.index(name) for name in names]]
    size = np.maximum(np.abs(wanted).max(0), 1)
    assert_heads(gradient_of(backend, names) / size, (wanted / size).T, names, 1e-4)


# ------------------------------------------------------------------- lowering for a GPU


def lower_for_hopper(names: Sequence[str], kind: str) -> None:
    """Lowers attention with a mod of these rows; the gradient too for a score_mod."""
    shape = lambda length: jax.ShapeDtypeStruct((1, length, len(names), 64), jnp.bfloat16)
    made = {"score_mod": score_mod, "mask_mod": mask_mod}[kind](names)

    def run(query: jax.Array, key: jax.Array) -> jax.Array:
        return flexjax.flex_attention(query, key, key, implementation="mosaic_gpu", **{kind: made})

    def gradient(query: jax.Array, key: jax.Array) -> jax.Array:
        return jax.grad(lambda q: run(q, key).astype(jnp.float32).sum())(query)

    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        function = gradient if kind == "score_mod" else run
        jax.jit(function).trace(shape(T), shape(S)).lower(lowering_platforms=("cuda",))


@needs_new_jax
@pytest.mark.parametrize("kind", KINDS)
def test_the_gpu_kernels_lower_what_they_accept(kind: str) -> None:
    names = differentiable("mosaic_gpu") if kind == "score_mod" else accepted("mosaic_gpu", kind)
    try:
        lower_for_hopper(names, kind)
    except Exception as together:
        for name in names:
            try:
                lower_for_hopper([name], kind)
            except Exception as error:
                raise AssertionError(f"{name} is accepted and does not lower") from error
        raise AssertionError("each row lowers alone, and not all together") from together


# ------------------------------------------------------------------- the tables

FUNCTIONS_OF_FLOATS = (
    operations.EXPONENTIALS | operations.TRIGONOMETRY | operations.HYPERBOLIC | operations.SPECIAL_FUNCTIONS
)
BITS_OF_NUMBERS = operations.BITS - {"and", "not", "or", "xor"}
NO_KERNEL_HAS = (
    operations.COMPLEX_NUMBERS | (operations.SPECIAL_FUNCTIONS - {"erf", "erf_inv", "erfc"}) | {"mulhi", "nextafter"}
)
LEFT_TO_DEVICES = operations.HASHES | operations.TOTAL_ORDER


def has_integer_range(name: str) -> bool:
    """Whether ir/ranges.py knows the range of the operation on some small positive integers."""
    return any(ranges.integer_range(name, [(1, 2)] * count) is not None for count in (1, 2))


TABLES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "ir/evaluate.py: the meaning, as jax.lax has it": (
        frozenset(n for n in OPERATIONS if n in evaluate.SPECIAL or hasattr(lax, evaluate.RENAMED.get(n, n))),
        frozenset(),
    ),
    "ir/literals.py: PYTHON_RULES, what is folded when all operands are literal integers or bools": (
        frozenset(literals.PYTHON_RULES),
        FUNCTIONS_OF_FLOATS
        | BITS_OF_NUMBERS
        | operations.COMPLEX_NUMBERS
        | operations.ROUNDINGS
        | operations.CONVERSIONS
        | operations.CHOICES
        | LEFT_TO_DEVICES
        | {"integer_pow", "square"},
    ),
    "ir/ranges.py: integer_range, over the whole attention matrix": (
        frozenset(filter(has_integer_range, OPERATIONS)),
        FUNCTIONS_OF_FLOATS
        | operations.BITS
        | operations.COMPARISONS
        | operations.COMPLEX_NUMBERS
        | operations.ROUNDINGS
        | LEFT_TO_DEVICES
        | {"bitcast_convert_type", "div", "integer_pow", "is_finite", "reduce_precision", "square"},
    ),
    "analysis/interval_rules.py and interval_truth.py: block by block": (
        frozenset(interval_rules.RULES) | frozenset(interval_truth.COMPARISONS) | frozenset(interval_truth.LOGIC),
        operations.SPECIAL_FUNCTIONS - {"erf", "erfc"}
        | BITS_OF_NUMBERS - {"shift_right_arithmetic", "shift_right_logical"}
        | operations.COMPLEX_NUMBERS
        | operations.HASHES
        | {"bitcast_convert_type", "is_finite", "nextafter"},
    ),
    "analysis/bounds.py: of float32 results, whatever the score is": (
        frozenset(bounds.RULES) | frozenset(bounds.WITHIN),
        operations.BITS
        | operations.COMPARISONS
        | operations.COMPLEX_NUMBERS
        | operations.ROUNDINGS
        | LEFT_TO_DEVICES
        | operations.EXPONENTIALS - {"log", "log1p", "logistic", "sqrt"}
        | operations.SPECIAL_FUNCTIONS - {"erf", "erfc"}
        | operations.HYPERBOLIC - {"tanh"}
        | {"acos", "asin", "atan2", "tan", "bitcast_convert_type", "reduce_precision", "floordiv", "floormod", "rem"}
        | {"integer_pow", "is_finite", "sign", "square"},
    ),
    "backends/mosaic_gpu/programs/tile_ops.py: SUPPORTED": (gpu_tile_ops.SUPPORTED, NO_KERNEL_HAS),
    "backends/mosaic_tpu/tile_ops.py: PLAIN and RULES": (
        tpu_tile_ops.PLAIN | frozenset(tpu_tile_ops.RULES),
        NO_KERNEL_HAS | {"reduce_precision"},
    ),
    "tests/primitives.py: ROWS and OWN_ROWS": (frozenset(EVERY_ROW), frozenset()),
}
"""Each table of operations, and those that it leaves out on purpose: their results are then unknown, not folded, or refused."""


@pytest.mark.parametrize("table", TABLES)
def test_each_operation_is_in_each_table_or_left_out_on_purpose(table: str) -> None:
    there, left_out = TABLES[table]
    assert OPERATIONS - there - left_out == set(), f"decide on these in {table}, or leave them out here"
    assert there & left_out == set(), "these are in the table and said to be left out"
    assert there - OPERATIONS <= REWRITTEN, "no program has these"


def test_every_elementwise_primitive_is_an_operation_or_rewritten() -> None:
    assert ELEMENTWISE <= OPERATIONS | REWRITTEN
    assert operations.COMMUTATIVE <= OPERATIONS
    for name in EVERY_ROW:
        found = {step.prim for step in traced_of(name, "score_mod").program.steps if isinstance(step, Op)}
        assert found <= OPERATIONS, f"{name} makes {found - OPERATIONS}"
        assert name in found | REWRITTEN, f"the row of {name} makes {found}"
