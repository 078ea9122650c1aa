"""Plans with the heads of a group packed into rows compute what the plan does."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, Origin, masks
from flexjax.backends.target import Target
from flexjax.backends.xla.support import XlaBackend
from flexjax.call_arguments import DEFAULTS
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.plan.pack_heads import pack_operands, packed_plan, unpack_results
from flexjax.prepare import prepare
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow

B, S, N, M, D = 2, 160, 6, 2, 8
RNG = np.random.default_rng(7)
LENGTHS = array([101, S])
IDS = array(np.sort(RNG.integers(0, 5, (B, S)), -1))


def normal(*shape: int) -> Any:
    return array(RNG.standard_normal(shape), jnp.float32)


SLOPE, TABLE, ROW, COLUMN = normal(N), normal(N, 2 * S), normal(B, S), normal(S)


def every_load(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * SLOPE[h] + TABLE[h, i - j + S] + ROW[b, i] + COLUMN[j] + 0.1 * h


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (IDS[b, i] == IDS[b, j]) & (i >= j)


def call(name: str, tokens: int, layout: str = "BTNH") -> tuple[KernelPlan, Operands]:
    arguments: dict[str, dict[str, Any]] = {
        "loads": {
            "score_mod": every_load,
            "mask_mod": documents,
            "origin": Origin(query=LENGTHS - tokens, whole=(B, N, S, S)),
        },
        "lengths": {
            "mask_mod": masks.causal,
            "origin": Origin(query="end"),
            "query_seq_lengths": jnp.asarray([tokens, tokens - 1]),
            "key_value_seq_lengths": LENGTHS,
        },
        "one start": {"mask_mod": masks.sliding_window(50), "origin": Origin(query=jnp.int32(150))},
        "by head": {"mask_mod": lambda b, h, i, j: j <= 20 * h + i},
        "sinks": {"sinks": normal(N)},
    }
    shapes = [(B, tokens, N, D), (B, S, M, D), (B, S, M, D)]
    arrays = [normal(*(shape if layout == "BTNH" else (shape[0], shape[2], shape[1], shape[3]))) for shape in shapes]
    aux = flexjax.AuxRequest(lse=True, max_scores=True)
    options: Any = DEFAULTS | arguments[name] | {"layout": layout, "return_aux": aux}
    problem = prepare(*arrays, **options)
    return dataclasses.replace(problem.plan, exact_captures=True), problem.operands  # with all four results


@pytest.mark.parametrize(
    ("name", "tokens", "layout"),
    some_slow(
        [("loads", 3, "BTNH"), ("loads", 1, "BNTH"), ("lengths", 2, "BTNH"), ("one start", 1, "BTNH")],
        [("loads", 3, "BTNH"), ("lengths", 2, "BTNH")],
    ),
)
def test_packed_rows_are_the_queries_of_their_heads(name: str, tokens: int, layout: str) -> None:
    plan, operands = call(name, tokens, layout)
    packed = packed_plan(plan)
    assert packed is not None
    assert (packed.q_heads, packed.group, packed.q_len) == (M, 1, tokens * N // M)
    backend, target = XlaBackend(), Target("cpu")
    want = quick_jit(lambda given: backend.forward(plan, given, target))(operands)
    in_rows = lambda given: backend.forward(packed, pack_operands(plan, given), target)
    got = quick_jit(lambda given: unpack_results(plan, in_rows(given)))(operands)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_plans_that_are_not_packed() -> None:
    plan, _ = call("one start", 1)
    assert packed_plan(dataclasses.replace(plan, q_heads=M)) is None, "groups of one"
    assert packed_plan(call("one start", 21)[0]) is not None
    assert packed_plan(call("one start", 22)[0]) is None, "more than 64 rows"
    assert packed_plan(call("by head", 1)[0]) is None, "lists that differ by head"
    assert packed_plan(call("sinks", 1)[0]) is None, "sinks"
    assert packed_plan(dataclasses.replace(plan, extra_dim=4, extra_heads=M)) is None, "extra features"
    sized = packed_plan(dataclasses.replace(plan, options=KernelOptions(block_q=8)))
    assert sized is not None
    assert sized.options.block_q == 24, "as many queries"
