"""Programs that read 16-bit arrays as float32."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax.ir import verify
from flexjax.ir.evaluate_scalars import call_program
from flexjax.ir.program import Program
from flexjax.ir.rewrite import with_results
from flexjax.ir.widened_loads import widenable, widened
from flexjax.trace.trace_mod import trace_score_mod
from tests.arrays import array

SIZES = (1, 2, 8, 8)
TABLE = array(np.random.default_rng(0).normal(size=(2, 16)), jnp.float32).astype(jnp.bfloat16)
MODS: dict[str, typing.Any] = {
    "sum": lambda s, b, h, q, k: s + TABLE[h, q - k + 8],
    "product": lambda s, b, h, q, k: jnp.tanh(s * TABLE[h, q - k + 8]) + TABLE[h, k] * s,
    "twice converted": lambda s, b, h, q, k: s + TABLE[h, q].astype(jnp.float32) * TABLE[h, q].astype(jnp.float32),
    "nothing else": lambda s, b, h, q, k: TABLE[h, k].astype(jnp.float32),
}
NARROW: dict[str, typing.Any] = {
    "square in bfloat16": lambda s, b, h, q, k: s + TABLE[h, q] * TABLE[h, q],
    "to float16 and on": lambda s, b, h, q, k: s + TABLE[h, q].astype(jnp.float16),
    "a comparison": lambda s, b, h, q, k: jnp.where(TABLE[h, q] > 0, s, 0.0),
}


def programs_of(mod: typing.Any) -> tuple[list[Program], tuple[jax.Array, ...]]:
    traced = trace_score_mod(mod, SIZES)
    assert traced.derivative is not None
    return [traced.program, traced.derivative], traced.arrays


@pytest.mark.parametrize("name", MODS)
def test_values_and_derivatives_stay(name: str) -> None:
    programs, arrays = programs_of(MODS[name])
    assert widenable(programs) == {0}
    position = [jnp.int32(n) for n in (0, 1, 5, 3)]
    for program in programs:
        wide = widened(program, {0})
        verify.check(wide)
        assert [load.out.dtype for load in wide.loads] == ["float32"] * len(program.loads)
        assert len(wide.steps) < len(program.steps)
        assert all(wide.steps[n] in wide.loads for n in wide.gradients)
        assert len(wide.gradients) == len(program.gradients)
        floats = tuple(x.astype(jnp.float32) for x in arrays)
        for x, y in zip(wide.results, program.results, strict=True):
            want = call_program(with_results(program, [y]), arrays, position, jnp.float32(0.7))
            got = call_program(with_results(wide, [x]), floats, position, jnp.float32(0.7))
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("name", NARROW)
def test_arithmetic_of_16_bits_stays(name: str) -> None:
    programs, _ = programs_of(NARROW[name])
    assert not widenable(programs)
    assert widened(programs[0], widenable(programs)) is programs[0]


def test_other_arrays_of_the_program_stay() -> None:
    programs, _ = programs_of(lambda s, b, h, q, k: s + TABLE[h, q] * TABLE[h, k] + TABLE.reshape(-1)[q + k])
    assert [c.shape for c in programs[0].captures] == [(2, 16), (32,)]
    assert widenable(programs) == {1}
    assert [c.dtype for c in widened(programs[0], {1}).captures] == ["bfloat16", "float32"]
