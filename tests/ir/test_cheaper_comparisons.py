"""Comparisons that are rewritten say the same at every entry, and leave less to compute for each entry."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import masks
from flexjax.ir.cheaper_comparisons import with_cheaper_comparisons
from flexjax.ir.evaluate_scalars import as_mask_mod
from flexjax.ir.program import UNIFORM, Op, Program
from flexjax.trace.trace_mod import trace_mask_mod
from tests.cases.small import quick_jit

T, S = 60, 57
FIRST = jnp.asarray(np.random.default_rng(2).integers(-20, 60, T), jnp.int32)

# fmt: off
MASKS: dict[str, Callable[..., Any]] = {
    "natten": masks.natten_2d((6, 10), (3, 4)),
    "natten_tiled": masks.natten_2d_tiled((6, 10), (3, 4), (3, 2)),
    "block_causal": masks.block_causal(7),
    "each_comparison": lambda b, h, q, k: ((k // 7 < q // 5) | (k // 4 <= q - 30) | (q % 7 > k // 3)) & ((q + 3) // 8 >= k - 20),
    "of_differences": lambda b, h, q, k: ((q - k) // 3 < 4) & ((q - k) // 5 >= -2),
    "rows_minus_columns": lambda b, h, q, k: (q % 11 - k % 7 <= q // 9 - 2) | (k % 7 - q % 11 > 3),
    "captured": lambda b, h, q, k: (k // 2 >= FIRST[q]) & (k % 9 - FIRST[q] % 5 < h + 2),
    "negative": lambda b, h, q, k: ((k - 40) // 3 < -q // 2) & ((k - 50) // 6 >= -8),
    "beyond_int32": lambda b, h, q, k: (k // 1_000_000 <= q * 30_000_000) & (k // 9 < q * 2_147_483 + 5),
}
# fmt: on


@pytest.mark.parametrize("columns", ["q", "kv"])
@pytest.mark.parametrize("name", MASKS)
def test_the_program_says_the_same(name: str, columns: str) -> None:
    traced = trace_mask_mod(MASKS[name], (2, 2, T, S))
    made = with_cheaper_comparisons(traced.program, columns)

    def dense(program: Program) -> Any:
        entry: Any = as_mask_mod(program, tuple(traced.arrays))
        every = jax.vmap(jax.vmap(jax.vmap(entry, (None, None, None, 0)), (None, None, 0, None)), (None, 0, None, None))
        return every(0, jnp.arange(2), jnp.arange(T), jnp.arange(S))

    got, want = quick_jit(lambda: (dense(made), dense(traced.program)))()
    assert np.array_equal(got, want)
    assert 0 < np.mean(want) < 1


def of_entries(program: Program) -> list[str]:
    """The operations whose results depend on q and on kv, without conjunctions."""
    steps = [s for s in program.steps if isinstance(s, Op) and s.out.axes - UNIFORM not in (set(), {"q"}, {"kv"})]
    return [s.prim for s in steps if s.prim != "and"]


def test_a_neighbourhood_is_four_comparisons() -> None:
    program = trace_mask_mod(masks.natten_2d((64, 64), (13, 13)), (1, 1, 4096, 4096)).program
    assert sorted(of_entries(program)) == ["ge", "ge", "lt", "lt", "sub", "sub"]
    made = with_cheaper_comparisons(program, "kv")
    assert sorted(of_entries(made)) == ["ge", "ge", "lt", "lt"]
    assert "= ge %4 " in str(made), str(made)  # rows of the canvas: the key itself is compared
    assert "= lt %4 " in str(made), str(made)
    ands = {s.out.id: s for s in made.steps if isinstance(s, Op) and s.prim == "and"}
    for step in ands.values():  # a chain
        assert sum(getattr(a, "id", None) in ands for a in step.inputs) <= 1


def test_differences_of_positions_stay() -> None:
    program = trace_mask_mod(masks.sliding_window(9), (1, 1, T, S)).program
    assert with_cheaper_comparisons(program, "kv") == program


def test_the_quotient_of_the_columns_goes() -> None:
    program = trace_mask_mod(masks.block_causal(16), (1, 1, T, S)).program
    assert "lt %4 " in str(with_cheaper_comparisons(program, "kv"))
    assert "ge %3 " in str(with_cheaper_comparisons(program, "q"))
