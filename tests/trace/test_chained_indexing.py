"""`x[b][q_idx]` is the load `x[b, q_idx]`: what it means, its class, its gradient, and that it costs nothing more."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from flexjax.ir.evaluate_scalars import call_program
from flexjax.ir.program import Program, classify_load
from flexjax.trace.trace_mod import trace_mask_mod, trace_score_mod
from tests.arrays import array

SIZES = (2, 3, 9, 7)
LONG = settings().max_examples > 100

# name: (chained, the same in one index, load classes); x has shape [2, 3, S, S]
FORMS: dict[str, tuple[Callable, Callable, list[str]]] = {
    "x[b][h][q][k]": (
        lambda x: lambda b, h, q, k: x[b][h][q][k],
        lambda x: lambda b, h, q, k: x[b, h, q, k],
        ["tile slice"],
    ),
    "x[b, h][q]": (
        lambda x: lambda b, h, q, k: x[b, h][q][0],
        lambda x: lambda b, h, q, k: x[b, h, q, 0],
        ["row slice"],
    ),
    "x[:, h][b, k]": (
        lambda x: lambda b, h, q, k: x[:, h][b, k, -1],
        lambda x: lambda b, h, q, k: x[b, h, k, -1],
        ["column slice"],
    ),
    "x[h][q - k + c]": (
        lambda x: lambda b, h, q, k: x[0, :, :, 0][h][q - k + x.shape[3] // 2],
        lambda x: lambda b, h, q, k: x[0, :, :, 0][h, q - k + x.shape[3] // 2],
        ["diagonal slice"],
    ),
    "transposed, turned and cut": (
        lambda x: lambda b, h, q, k: x[b].T[:, ::-1][k][1:-1][q // 2, h],
        lambda x: lambda b, h, q, k: x[b, h, x.shape[2] - 1 - (q // 2 + 1), k],
        ["tile gather"],
    ),
    "a function of a row": (
        lambda x: lambda b, h, q, k: jnp.where(x[b, h, 0] > 0, jnp.exp(x[b, h, 0]), 2.0)[k],
        lambda x: lambda b, h, q, k: jnp.where(x[b, h, 0, k] > 0, jnp.exp(x[b, h, 0, k]), 2.0),
        ["column slice"],
    ),
    "a branch": (
        lambda x: lambda b, h, q, k: lax.cond(h > 1, lambda: x[b, h, 0], lambda: -x[b, h, 0])[k],
        lambda x: lambda b, h, q, k: lax.cond(h > 1, lambda: x[b, h, 0, k], lambda: -x[b, h, 0, k]),
        ["column slice"],
    ),
}


def traced_steps(mod: Callable, size: int) -> tuple[Program, int]:
    """The program of a score mod that adds this, and how many steps its derivative has."""
    traced = trace_score_mod(lambda s, *at: s + mod(*at), (2, 3, size // 2, size // 2))
    assert traced.derivative is not None
    return traced.program, len(traced.derivative.steps)


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_costs_what_one_index_does(form: str) -> None:
    chained, direct, classes = FORMS[form]
    shorter, longer = jnp.zeros((2, 3, 40, 40)), jnp.zeros((2, 3, 400, 400))
    program, steps = traced_steps(chained(shorter), 40)
    assert [str(classify_load(load)) for load in program.loads] == classes
    assert len(program.steps) <= len(traced_steps(direct(shorter), 40)[0].steps)
    again, steps_again = traced_steps(chained(longer), 400)
    assert (len(again.steps), steps_again) == (len(program.steps), steps)


@pytest.mark.parametrize("size", [2048, 131072])
def test_long_rows_are_not_written_out(size: int) -> None:
    docs = jnp.zeros((2, size), jnp.int32)
    chained = trace_mask_mod(lambda b, h, q, k: docs[b][q] == docs[b][k], (2, 1, size, size)).program
    assert chained == trace_mask_mod(lambda b, h, q, k: docs[b, q] == docs[b, k], (2, 1, size, size)).program
    assert [str(classify_load(load)) for load in chained.loads] == ["row slice", "column slice"]


# ------------------------------------------------------------------ any chain means what jax says

SCALARS = ("b", "h", "q", "k", "q - k", "k - q", "q + 2", "h - 2", "b * q", "-1", "1", "table[k]")
"""Inside the array, past its end, and counted from it."""
SLICES = (slice(None), slice(None, None, -1), slice(1, None), slice(None, -1, 2))


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple]]:
    """The shape of an array and what is done to it until one element is left."""
    shape = tuple(draw(st.lists(st.integers(2, 5), min_size=2, max_size=4)))
    left, levels = len(shape), []
    while left:
        kind = draw(
            st.sampled_from(["index", "index", "index", "reverse dims", "flat", "take", "map", "one more", "join"])
        )
        if kind == "index":
            level = [draw(st.sampled_from(SCALARS if draw(st.booleans()) else SLICES)) for _ in range(left)]
            left -= sum(isinstance(i, str) for i in level)
            levels.append(("index", level))
        elif kind in ("flat", "take"):
            mode = draw(st.sampled_from(["clip", "fill", "wrap"]))
            levels.append((kind, draw(st.sampled_from(SCALARS)), mode))
            left = 0 if kind == "flat" else left - 1
        else:
            levels.append((kind,))
        if len(levels) > 5:
            levels.append(("flat", "q + 2", "clip"))
            break
    return shape, levels


def follow(x: jax.Array, levels: list[tuple], names: dict[str, jax.Array], outside: float | None = None) -> jax.Array:
    """The element at the end of the chain; `outside` is what an index out of range reads, clamped if None."""
    of = lambda i: eval(i, {}, names) if isinstance(i, str) else i
    for kind, *how in levels:
        if kind == "index":
            index = tuple(map(of, how[0]))
            x = x[index] if outside is None else x.at[index].get(mode="fill", fill_value=outside)
        elif kind == "flat":
            x = jnp.take(x.reshape(-1), of(how[0]), mode=how[1])
        elif kind == "take":
            x = jnp.take(x, of(how[0]), axis=-1, mode=how[1])
        elif kind == "reverse dims":
            x = x.T
        elif kind == "map":
            x = jnp.tanh(x) * names["s"]
        elif kind == "one more":
            x = jnp.squeeze(x[None, ..., None], (0, -1))
        else:
            x = jnp.concatenate([x, -x], 0)
    return x


@settings(max_examples=1000 if LONG else 10)
@given(chains())
def test_any_chain_of_indices(chain: tuple[tuple[int, ...], list[tuple]]) -> None:
    shape, levels = chain
    rng = np.random.default_rng(len(levels))
    x = array(rng.standard_normal(shape), jnp.float32)
    table = array(rng.integers(-3, 6, SIZES[3]))
    at = [array(rng.integers(0, n, 24), jnp.int32) for n in SIZES]
    score, weight = (array(rng.standard_normal(24), jnp.float32) for _ in range(2))
    steps = []

    def mod(x: jax.Array, outside: float | None = None) -> Callable:
        names = ("s", "b", "h", "q", "k")
        return lambda *at: at[0] + follow(x, levels, {**dict(zip(names, at, strict=True)), "table": table}, outside)

    def by_program(x: jax.Array) -> jax.Array:
        traced = trace_score_mod(mod(x), SIZES)
        steps.append(len(traced.program.steps))
        return jax.vmap(lambda s, *i: call_program(traced.program, traced.arrays, i, s))(score, *at)

    @jax.jit
    def both(x: jax.Array) -> list:
        # jax promises itself that indices are in range, and its gradient of one that is not depends on how it is written
        clear = ~jnp.isnan(jax.vmap(mod(x, math.nan))(score, *at))
        found = []
        for values in (by_program, lambda x: jax.vmap(mod(x))(score, *at)):
            out, pull = jax.vjp(values, x)
            found.append((out, *pull(jnp.where(clear, weight, 0.0))))
        return found

    got, want = both(x)
    assert max(steps) < 120
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)
