"""Programs as keys: equal text, equal program; literals told apart; the text itself; illegal programs refused."""

import dataclasses

import jax.numpy as jnp
import pytest

from flexjax.ir.program import Linear, Lit
from flexjax.ir.verify import IllegalProgram, check
from flexjax.trace.trace_mod import trace_mask_mod, trace_score_mod

SIZES = (2, 3, 9, 7)


def test_the_text_of_a_program() -> None:
    table = jnp.ones(3)
    traced = trace_score_mod(lambda s, b, h, q, k: s * table[h] - (q - k), SIZES)
    assert str(traced.program) == (
        "(score=%0:float32, b=%1:int32, h=%2:int32, q=%3:int32, kv=%4:int32) in (0..1, 0..2, 0..8, 0..6) "
        "with (c0:float32[3])\n"
        "  %5:float32 = load c0[%2]\n"
        "  %6:float32 = mul %0 %5\n"
        "  %7:int32 = sub %3 %4\n"
        "  %8:float32 = convert_element_type[new_dtype=float32] %7\n"
        "  %9:float32 = sub %6 %8\n"
        "  -> %9"
    )


def test_literals_are_told_apart() -> None:
    assert Lit(float("nan"), "float32") == Lit(float("nan"), "float32")
    assert Lit(0.0, "float32") != Lit(-0.0, "float32")
    assert Lit(1, "int32") != Lit(True, "bool")
    assert Lit(1, "int32") != Lit(1, "int8")


def test_linear_forms() -> None:
    x = Linear(q=2, const=3, uniform=((7, 1),))
    assert x + x.times(-1) == Linear()
    assert x.times(0) == Linear()


@pytest.mark.parametrize(("axis", "reads"), [("b", False), ("h", True), ("q", True), ("kv", True)])
def test_what_is_read(axis: str, reads: bool) -> None:
    program = trace_mask_mod(lambda b, h, q, k: q - k > h, SIZES).program
    assert program.reads(axis) == reads


def test_illegal_programs_are_refused() -> None:
    program = trace_mask_mod(lambda b, h, q, k: q * 2 > k, SIZES).program
    check(program)
    with pytest.raises(IllegalProgram, match="used before it is defined"):
        check(dataclasses.replace(program, steps=program.steps[1:]))
    with pytest.raises(IllegalProgram, match="defined twice"):
        check(dataclasses.replace(program, steps=(program.steps[0], *program.steps)))
