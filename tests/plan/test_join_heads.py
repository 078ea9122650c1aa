"""Plans with all heads joined into one compute what the plan does."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import Origin, masks
from flexjax.backends.target import Target
from flexjax.backends.xla.support import XlaBackend
from flexjax.call_arguments import DEFAULTS
from flexjax.plan.join_heads import join_operands, joined_plan, split_results
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.prepare import prepare
from tests.arrays import array
from tests.cases.small import quick_jit

B, S, N, M, D = 2, 300, 16, 8, 8
RNG = np.random.default_rng(7)
LENGTHS = array([201, S])


def normal(*shape: int) -> Any:
    return array(RNG.standard_normal(shape), jnp.float32)


SLOPE, TABLE, ROW, COLUMN = normal(N), normal(N, 2 * S), normal(B, S), normal(S)


def every_load(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * SLOPE[h] + TABLE[h, i - j + S] + ROW[b, i] + COLUMN[j] + 0.1 * h


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loads": {"score_mod": every_load, "mask_mod": masks.causal},
    "lengths": {"mask_mod": masks.causal, "origin": Origin(query="end"), "key_value_seq_lengths": LENGTHS},
}


def call(name: str, tokens: int) -> tuple[KernelPlan, Operands]:
    arguments = CALLS[name]
    if name == "loads":  # two full blocks of keys and a partial one for one batch entry
        arguments = arguments | {"origin": Origin(query=LENGTHS - tokens, whole=(B, N, S, S))}
    arrays = normal(B, tokens, N, D), normal(B, S, M, D), normal(B, S, M, D)
    options: Any = DEFAULTS | arguments | {"return_aux": flexjax.AuxRequest(lse=True, max_scores=True)}
    problem = prepare(*arrays, **options)
    return dataclasses.replace(problem.plan, exact_captures=True), problem.operands  # with all four results


@pytest.mark.parametrize(("name", "tokens"), [("plain", 1), ("loads", 3), ("lengths", 1)])
def test_rows_see_the_keys_of_their_own_head(name: str, tokens: int) -> None:
    plan, operands = call(name, tokens)
    joined = joined_plan(plan)
    assert joined is not None
    assert (joined.q_heads, joined.kv_heads, joined.q_len, joined.kv_len) == (1, 1, tokens * N, S * M)
    backend, target = XlaBackend(), Target("cpu")
    want = quick_jit(lambda given: backend.forward(plan, given, target))(operands)
    as_one = lambda given: backend.forward(joined, join_operands(plan, given), target)
    got = quick_jit(lambda given: split_results(plan, as_one(given)))(operands)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_plans_that_are_not_joined() -> None:
    plan, _ = call("plain", 1)
    refused = (
        {"layout": "BNTH"}, {"kv_heads": 4}, {"q_len": 5}, {"has_sinks": True}, {"extra_dim": 4, "extra_heads": M},
    )  # fmt: skip
    assert [joined_plan(dataclasses.replace(plan, **changes)) for changes in refused] == [None] * len(refused)
