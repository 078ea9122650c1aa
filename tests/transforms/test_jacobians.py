"""jacfwd and jacrev agree, for every array of a problem."""

import jax
import numpy as np
import pytest

from tests.cases.small import PROBLEMS, launches, quick_jit

# the problem, the array, and one query of one head as the output
# fmt: off
SLOW = pytest.mark.slow
ROWS = [("causal", "query"), pytest.param("blocks", "key", marks=SLOW), pytest.param("reads", "row", marks=SLOW), pytest.param("reads", "diagonal", marks=SLOW),
        pytest.param("reads", "gate", marks=SLOW), ("sinks", "sinks"), pytest.param("bnth", "sinks", marks=SLOW)]
# fmt: on


@pytest.mark.parametrize(("name", "moving"), ROWS)
def test_jacfwd_is_jacrev(name: str, moving: str) -> None:
    problem = PROBLEMS[name]
    arrays = problem.arrays()
    one = lambda x: problem.run(arrays | {moving: x})[0][1, 4, 3]
    forward, reverse = quick_jit(jax.jacfwd(one))(arrays[moving]), quick_jit(jax.jacrev(one))(arrays[moving])
    assert forward.shape == (*one(arrays[moving]).shape, *arrays[moving].shape)
    np.testing.assert_allclose(forward, reverse, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("moving", ["query", "gate", "sinks"])
def test_jacfwd_is_one_launch(moving: str) -> None:
    problem = PROBLEMS["sinks" if moving == "sinks" else "reads"]
    arrays = problem.arrays()
    jaxpr = jax.make_jaxpr(jax.jacfwd(lambda x: problem.run(arrays | {moving: x})[0]))(arrays[moving])
    # the tangent of sinks alone needs no launch
    want = ["flexjax_forward", "flexjax_tangent"] if moving != "sinks" else ["flexjax_forward"]
    assert launches(jaxpr.jaxpr) == want
