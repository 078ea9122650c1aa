"""jax.checkpoint: the same gradients, and how often the forward pass runs under each policy."""

import jax
import numpy as np
import pytest
from jax import checkpoint_policies as policies

from tests.cases.small import PROBLEMS, launches, quick_jit
from tests.marks import some_slow

NAMED = policies.save_only_these_names("flexjax_out", "flexjax_lse")

# policy -> how many forward passes a gradient takes
POLICIES = {
    "nothing": (policies.nothing_saveable, 2),
    "everything": (policies.everything_saveable, 1),
    "named": (NAMED, 1),
    "out_only": (policies.save_only_these_names("flexjax_out"), 2),
}
ROWS = [(name, policy) for name in ("reads", "sinks", "dropout") for policy in POLICIES]


@pytest.mark.parametrize(
    ("name", "policy"),
    some_slow(
        ROWS, [row for row in ROWS if row[1] != "named" or row[0] == "sinks"]
    ),  # "named" compiles, the others trace
)
def test_gradients_and_recomputation(name: str, policy: str) -> None:
    problem = PROBLEMS[name]
    arrays = problem.arrays()
    rule, forwards = POLICIES[policy]
    gradient = jax.value_and_grad(jax.checkpoint(problem.loss, policy=rule))
    names = launches(jax.make_jaxpr(gradient)(arrays).jaxpr)
    assert names.count("flexjax_forward") == forwards
    assert names.count("flexjax_backward") == 1
    if policy == "named":
        _, want = quick_jit(jax.value_and_grad(problem.loss))(arrays)
        _, got = quick_jit(gradient)(arrays)
        for array, value in want.items():
            np.testing.assert_allclose(got[array], value, rtol=1e-5, atol=1e-5)


def test_names_are_those_that_the_documentation_gives() -> None:
    problem = PROBLEMS["plain"]
    jaxpr = jax.make_jaxpr(jax.grad(problem.loss))(problem.arrays())
    names = {e.params["name"] for e in jaxpr.jaxpr.eqns if e.primitive.name == "name"}
    assert names == {"flexjax_out", "flexjax_lse"}
