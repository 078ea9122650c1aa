"""Which steps a jaxpr becomes: what is unrolled, inlined, recognised, and what is left whole."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from flexjax.ir.evaluate_scalars import as_mask_mod
from flexjax.ir.program import Op
from flexjax.trace.trace_mod import trace_mask_mod, trace_score_mod

SIZES = (2, 3, 9, 7)
TABLE = jnp.arange(9.0)
WORDS = jnp.arange(9, dtype=jnp.int8)


def steps(mod: object) -> list[str]:
    trace = trace_mask_mod if mod.__code__.co_argcount == 4 else trace_score_mod
    return [s.prim if isinstance(s, Op) else type(s).__name__.lower() for s in trace(mod, SIZES).program.steps]


@jax.jit
def remainder(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(x > 1000, 0, lax.rem(x, y))


PROGRAMS = {
    "remainder": (lambda b, h, q, k: (q - k) % 4 == 1, ["sub", "floormod", "eq"]),
    "floor division": (lambda b, h, q, k: q // 4 == k // 4, ["floordiv", "floordiv", "eq"]),
    "remainder of another width": (
        lambda b, h, q, k: WORDS[q] % (k + 1) == 0,
        ["load", "add", "convert_element_type", "floormod", "eq"],
    ),
    "vector remainder": (
        lambda b, h, q, k: jnp.all(jnp.stack([q, k]) % 2 == 0),
        ["floormod", "eq", "floormod", "eq", "and"],
    ),
    "fixed loop": (lambda s, b, h, q, k: lax.fori_loop(0, 3, lambda i, x: x * x, s), ["mul"] * 3),
    "while": (lambda s, b, h, q, k: lax.while_loop(lambda x: x > 2, lambda x: x / 2, s), ["call"]),
    "branch": (
        lambda s, b, h, q, k: lax.cond(q > k, lambda: s, lambda: -s),
        ["gt", "convert_element_type", "ge", "neg", "select_n"],
    ),
    "nested jit": (lambda s, b, h, q, k: jax.jit(lambda x: jax.jit(jnp.tanh)(x))(s), ["tanh"]),
    "checkpoint": (lambda s, b, h, q, k: jax.checkpoint(jnp.sin)(s), ["sin"]),
    "stopped": (lambda s, b, h, q, k: lax.stop_gradient(s), []),
    "barrier": (lambda s, b, h, q, k: lax.optimization_barrier((s, s))[1], []),
    "known to be in bounds": (lambda s, b, h, q, k: s + TABLE[q], ["load", "add"]),
    "constant index": (lambda s, b, h, q, k: s + TABLE[-1], ["load", "add"]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps(name: str) -> None:
    mod, wanted = PROGRAMS[name]
    assert sorted(steps(mod)) == sorted(wanted)


def test_dimensions_of_size_1_are_read_at_0() -> None:
    """jax.numpy leaves it to the primitive to repeat them if the operands have the same number of dimensions."""
    rows, weights = jnp.ones((9, 3, 2)), jnp.ones((3, 1))
    program = trace_score_mod(lambda s, b, h, q, k: s + (rows[q] * weights)[k % 3, 1], SIZES).program
    assert {tuple(map(str, load.index))[-1] for load in program.loads} == {"1:int32", "0:int32"}


def test_a_function_that_only_bears_the_name() -> None:
    """A jitted function called `remainder` is what it does, not what it is called."""
    assert "gt" in steps(lambda b, h, q, k: remainder(q * 200, k + 1) == 0)


def test_logarithms_are_steps_of_every_backend() -> None:
    """Some versions of jax have log2 as a primitive of its own; backends know log, mul and div."""
    assert set(steps(lambda s, b, h, q, k: jnp.log2(s) + jnp.log10(s))) <= {"log", "mul", "div", "add"}


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_small_arrays_of_literals_beside_captured_ones(shape: tuple[int, ...]) -> None:
    """What is known of both is computed outside, in the shape that it has."""
    flags = jnp.ones(shape, bool)
    traced = trace_mask_mod(lambda b, h, q, k: ((q.reshape(shape) >= 0) & flags).ravel()[0], SIZES)
    assert [s for s in traced.program.steps if isinstance(s, Op)] == []
    assert bool(traced.arrays[0].all())


@pytest.mark.parametrize(("dtype", "ones"), [("bool", True), ("int32", -1), ("uint8", 255)])
def test_bits_of_no_elements_are_all_set(dtype: str, ones: int) -> None:
    none = jnp.zeros((0,), dtype)
    mod = lambda b, h, q, k: lax.reduce_and(none & q.astype(dtype), axes=(0,)) == jnp.asarray(ones, dtype)
    traced = trace_mask_mod(mod, SIZES)
    assert bool(as_mask_mod(traced.program, traced.arrays)(0, 0, 0, 0)) == bool(mod(0, 0, jnp.int32(0), 0)) is True
