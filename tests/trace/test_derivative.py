"""The derivative program against jax.grad of the function itself, at random positions: by the score and by every element read."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import Tracer

from flexjax import mods
from flexjax.ir.evaluate_scalars import call_program
from flexjax.ir.program import Lit, Load, Program
from flexjax.ir.rewrite import with_results
from flexjax.trace.trace_mod import TracedMod, trace_score_mod
from tests.arrays import array
from tests.cases import odd_mods
from tests.cases.small import quick_jit

SIZES = (2, 3, 9, 7)
rng = np.random.default_rng(5)
NORMAL = lambda *shape: array(rng.standard_normal(shape), jnp.float32)
POSITIVE = lambda *shape: array(rng.uniform(0.3, 1.5, shape), jnp.float32)


@jax.custom_jvp
def through(x):
    """A step whose derivative is that of the identity."""
    return jnp.sign(x)


through.defjvp(lambda p, t: (through(*p), t[0]))


@jax.custom_vjp
def reversed_gradient(x, y):
    return x * 2


reversed_gradient.defvjp(lambda x, y: (reversed_gradient(x, y), y), lambda y, g: (-g, g * y))


@jax.custom_jvp
def with_coefficients(x):
    return jnp.polyval(jnp.array([0.5, 1.0, 2.0]), x)


with_coefficients.defjvp(lambda p, t: (with_coefficients(*p), t[0] * jnp.polyval(jnp.array([3.0, 1.0]), p[0])))

# name: (factory of a mod from float arrays, the arrays)
MODS = {
    "row": (lambda r: lambda s, b, h, q, k: s * r[q] + jnp.sin(r[q]), (NORMAL(9),)),
    "one array read twice": (lambda r: lambda s, b, h, q, k: s + r[q] * r[k], (NORMAL(9),)),
    "tile and difference": (
        lambda t, d: lambda s, b, h, q, k: s * t[q, k] + d[q - k + 6] ** 2,
        (NORMAL(9, 7), NORMAL(16)),
    ),
    "derived array": (lambda t: lambda s, b, h, q, k: s * jnp.exp(t)[h], (NORMAL(3),)),
    "scalar": (lambda g: lambda s, b, h, q, k: s * g + g**3, (NORMAL(),)),
    "index by a table": (
        lambda t: lambda s, b, h, q, k: s + t[jnp.array([2, 0, 1, 1, 2, 0, 0, 1, 2])[q]],
        (NORMAL(3),),
    ),
    "one weight for a row": (lambda r, w: lambda s, b, h, q, k: s + (r[q] * w)[k % 3], (NORMAL(9, 3), NORMAL(1))),
    "softmax of a row": (lambda r: lambda s, b, h, q, k: s * jax.nn.softmax(r[q])[k % 3], (NORMAL(9, 3),)),
    "fractions of a row": (lambda r: lambda s, b, h, q, k: s + jnp.frexp(r[q])[0].sum() * r[k, 0], (POSITIVE(9, 3),)),
    "exponents of a row": (lambda r: lambda s, b, h, q, k: s * r[k, 0] * jnp.frexp(r[q])[1].sum(), (POSITIVE(9, 3),)),
    "loop": (lambda r: lambda s, b, h, q, k: lax.fori_loop(0, 4, lambda i, x: x * r[q], s), (NORMAL(9),)),
    "branch": (lambda r: lambda s, b, h, q, k: lax.cond(q > k, lambda: s * r[q], lambda: s + r[k] ** 2), (NORMAL(9),)),
    "branch undefined elsewhere": (
        lambda r: (
            lambda s, b, h, q, k: (
                lax.cond(r[q] > 0, lambda: s * jnp.sqrt(r[q]), lambda: s)
                + lax.cond(r[q] > 0, lambda x: x, lambda x: x * jnp.sqrt(-r[q]), s)
            )
        ),
        (NORMAL(9),),
    ),
    "branches of the score": (
        lambda r: (
            lambda s, b, h, q, k: (
                lax.switch(
                    jnp.sign(r[q]).astype(int) + 1,
                    [lambda x: jnp.log(-r[q]) * x, lambda x: x, lambda x: jnp.log(r[q]) * x],
                    s,
                )
                + lax.cond(s > 0, lambda x: lax.cond(q > 0, jnp.sqrt, jnp.log, x), lambda x: jnp.sqrt(-x), s)
            )
        ),
        (NORMAL(9),),
    ),
    "branches of a complex score": (
        lambda r: (
            lambda s, b, h, q, k: lax.cond(
                s > 0, lambda z: jnp.sqrt(lax.real(z)), lambda z: lax.real(z) * r[q], lax.complex(s, jnp.zeros_like(s))
            )
        ),
        (NORMAL(9),),
    ),
    "custom jvp": (lambda r: lambda s, b, h, q, k: through(s * r[q]) * s, (NORMAL(9),)),
    "custom vjp": (lambda r: lambda s, b, h, q, k: reversed_gradient(s, r[q]), (NORMAL(9),)),
    "custom rule with constants": (lambda r: lambda s, b, h, q, k: with_coefficients(s + r[k]), (NORMAL(7),)),
    "relu": (lambda r: lambda s, b, h, q, k: jax.nn.relu(s - r[q]) + jax.nn.softplus(s), (NORMAL(9),)),
    "gelu and silu": (lambda r: lambda s, b, h, q, k: jax.nn.gelu(s) + jax.nn.silu(r[k] * s), (NORMAL(7),)),
    "logsumexp": (
        lambda r: lambda s, b, h, q, k: jax.nn.logsumexp(jnp.stack([s, r[q], 0.5 * s])),
        (NORMAL(9),),
    ),
    "stopped score": (lambda r: lambda s, b, h, q, k: s * lax.stop_gradient(s * r[q]) + r[q], (NORMAL(9),)),
    "shut off": (lambda r: lambda s, b, h, q, k: jnp.where((q + k) % 2 == 0, s * r[q], -jnp.inf), (NORMAL(9),)),
    "gradient of a gradient": (lambda r: lambda s, b, h, q, k: jax.grad(lambda x: jnp.sin(x) * r[q])(s), (NORMAL(9),)),
    "bfloat16 table": (lambda r: lambda s, b, h, q, k: s * r.astype(jnp.bfloat16)[q], (NORMAL(9),)),
    "softcap": (lambda: mods.softcap(2.0), ()),
    "softcap_approx": (lambda: mods.softcap_approx(2.0), ()),
    "alibi": (lambda: mods.alibi(3), ()),
    "temperature": (mods.temperature, (POSITIVE(3),)),
    "relative table": (mods.relative_table, (NORMAL(3, 17),)),
    "pair bias": (mods.pair_bias, (NORMAL(2, 3, 9, 7),)),
    "head gate": (mods.head_gate, (NORMAL(2, 3),)),
    "t5": (lambda t: mods.t5_bias(t, bidirectional=True, max_distance=6), (NORMAL(3, 8),)),
}


def result(program: Program, which: int) -> Program:
    return with_results(program, [program.results[which]])


def element(traced: TracedMod, load: Load, captures: Sequence[jax.Array], place: tuple, score: jax.Array) -> list:
    """Where the load reads."""
    found = lambda atom: call_program(with_results(traced.derivative, [atom]), captures, place, score)
    return [jnp.int32(atom.value) if isinstance(atom, Lit) else found(atom) for atom in load.index]


@pytest.mark.parametrize("name", MODS)
def test_derivatives_are_those_of_jax(name: str) -> None:
    make, arrays = MODS[name]
    traced = trace_score_mod(make(*arrays), SIZES)
    program = traced.derivative
    assert traced.why_not == ""
    loads = [program.steps[step] for step in program.gradients]

    @quick_jit
    def both(captures: Sequence[jax.Array], given: tuple, score: jax.Array, place: tuple) -> Any:
        got = [call_program(result(program, i), captures, place, score) for i in range(len(program.results))]
        value = call_program(traced.program, captures, place, score)
        read = [element(traced, load, captures, place, score) for load in loads]
        wanted = jax.value_and_grad(lambda s, given: make(*given)(s, *place), (0, 1))(score, given)
        return got, value, read, wanted

    def captured(given: tuple) -> list:
        return [a for a in trace_score_mod(make(*given), SIZES).arrays if jnp.issubdtype(a.dtype, jnp.floating)]

    for place in ((0, 0, 0, 0), (1, 2, 8, 6), (1, 1, 4, 2)):
        score = np.float32(rng.standard_normal())
        got, value, read, wanted = both(traced.arrays, arrays, score, tuple(map(np.int32, place)))
        want, (wanted_score, wanted_arrays) = wanted
        np.testing.assert_allclose(got[0], want, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(value, want, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], wanted_score, rtol=2e-5, atol=1e-6)
        # gradients by captured element, taken back through what was computed outside
        sums = [np.zeros(a.shape, np.float32) for a in traced.arrays]
        for load, index, gradient in zip(loads, read, got[2:], strict=True):
            sums[load.capture][tuple(map(int, index))] += float(gradient)
        cotangents = [
            g.astype(a.dtype) for g, a in zip(sums, traced.arrays, strict=True) if jnp.issubdtype(a.dtype, jnp.floating)
        ]
        if arrays:
            (got_arrays,) = jax.vjp(captured, arrays)[1](cotangents)
            for a, b in zip(got_arrays, wanted_arrays, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-2 if name.startswith("bfloat16") else 2e-5, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in odd_mods.SCORES if n not in ("reads_numpy", "clamps")])
def test_odd_mods_by_the_score(name: str) -> None:
    mod = odd_mods.SCORES[name][0]
    traced = trace_score_mod(mod, odd_mods.SIZES)
    score, place = np.float32(0.3), (1, 2, 11, 6)
    by_program = lambda captures, *at: call_program(result(traced.derivative, 1), captures, at[1:], at[0])
    both = quick_jit(lambda captures, *at: (by_program(captures, *at), jax.grad(mod)(*at)))
    np.testing.assert_allclose(*both(traced.arrays, score, *map(np.int32, place)), rtol=2e-5, atol=1e-6)


def test_traces_share_a_derivative() -> None:
    """What a derivative rule makes of literals alone (here zeros to add to) belongs to no trace, because the next one gets it too."""

    def arrays(rows: jax.Array) -> tuple[jax.Array, ...]:
        captured, *made = trace_score_mod(lambda s, b, h, q, k: s + jnp.sort(rows[k])[0], SIZES).arrays
        assert not any(isinstance(x, Tracer) for x in made)
        return captured, *made

    jax.eval_shape(arrays, NORMAL(7, 3))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scores_keep_their_dtype(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        traced = trace_score_mod(lambda s, b, h, q, k: s.astype(jnp.float16) * q, SIZES, dtype)
        assert {r.dtype for r in traced.derivative.results} == {dtype}
        assert traced.program.results[0].dtype == dtype


def test_no_derivative_through_a_while_loop() -> None:
    traced = trace_score_mod(lambda s, b, h, q, k: lax.while_loop(lambda x: x > 1.0, lambda x: x * 0.5, s), SIZES)
    assert traced.derivative is None
    assert traced.why_not.startswith("`score_mod` cannot be differentiated: Reverse-mode differentiation does not work")
    assert float(call_program(traced.program, traced.arrays, (0, 0, 0, 0), jnp.float32(5.0))) == 0.625


def test_no_derivative_of_a_large_array_handed_whole_to_a_primitive() -> None:
    matrix = NORMAL(9, 9) + 9 * jnp.eye(9)
    mod = lambda s, b, h, q, k: jax.scipy.linalg.solve_triangular(matrix, s * jnp.ones(9))[0]
    traced = trace_score_mod(mod, SIZES)
    assert traced.derivative is None
    assert traced.why_not == (
        "`score_mod` hands a whole captured array of more than 64 elements to `triangular_solve` at each position, which has "
        "no derivative here; compute `triangular_solve` of the array outside the mod and index the result, or hand it fewer "
        "elements."
    )


TABLE = NORMAL(400)


@jax.custom_jvp
def reads_inside(x, table, i):
    return x * table[i]


reads_inside.defjvp(lambda p, t: (reads_inside(*p), t[0] * p[1][p[2]]))


def test_no_derivative_of_a_rule_on_a_whole_array() -> None:
    traced = trace_score_mod(lambda s, b, h, q, k: reads_inside(s, TABLE, q), SIZES)
    assert traced.derivative is None
    assert traced.why_not == (
        "`score_mod` hands a whole captured array to a function with a derivative rule of its own, which cannot be "
        "differentiated here; hand it the element, `function(score, array[q_idx])`."
    )
    got = call_program(traced.program, traced.arrays, (0, 0, 4, 0), jnp.float32(2.0))
    np.testing.assert_allclose(got, 2 * TABLE[4])


def test_no_derivative_of_an_integer_array_read_in_a_loop() -> None:
    words = jnp.arange(100)
    steps = lambda q: lax.while_loop(lambda c: c < q, lambda c: c + words[c % 100] + 1, 0)
    traced = trace_score_mod(lambda s, b, h, q, k: s + steps(q), SIZES)
    assert traced.derivative is None
    assert traced.why_not == (
        "`score_mod` reads a whole array inside a loop that could not be unrolled, which has no derivative here; "
        "index the array outside the loop, use a loop of fixed length of at most 64, or pass implementation='reference', which is dense."
    )


def test_no_derivative_of_an_array_read_in_a_loop() -> None:
    long = lambda s, b, h, q, k: lax.fori_loop(0, 200, lambda i, x: x + TABLE[(i + q) % 40], s)
    traced = trace_score_mod(long, SIZES)
    assert traced.derivative is None
    assert traced.why_not == (
        "`score_mod` reads a whole floating array inside a loop that could not be unrolled, which has no derivative here; "
        "index the array outside the loop, use a loop of fixed length of at most 64, or pass implementation='reference', which is dense."
    )
    np.testing.assert_allclose(
        call_program(traced.program, traced.arrays, (0, 0, 4, 0), jnp.float32(2.0)), 2 + 5 * TABLE[:40].sum(), rtol=1e-5
    )
