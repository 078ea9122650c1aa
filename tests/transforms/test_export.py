"""jax.export: serialize, deserialize, call; the gradient too; and ahead-of-time compilation."""

import jax
import numpy as np
import pytest

from tests.transforms.problems import PROBLEMS, assert_same_to_rounding


@pytest.mark.parametrize("name", ["reads", "documents"])
def test_round_trip(name: str) -> None:
    problem = PROBLEMS[name]
    arrays = problem.arrays()
    exported = jax.export.export(jax.jit(problem.run))(arrays)
    assert_same_to_rounding(exported.call(arrays), problem.run(arrays))
    pytest.importorskip("flatbuffers", reason="jax needs flatbuffers to serialize")
    loaded = jax.export.deserialize(bytearray(exported.serialize(vjp_order=1)))
    assert_same_to_rounding(loaded.call(arrays), problem.run(arrays))
    if name == "reads":
        got = jax.grad(lambda a: sum(x.sum() for x in loaded.call(a)))(arrays)
        want = jax.grad(lambda a: sum(x.sum() for x in problem.run(a)))(arrays)
        for array, value in want.items():
            np.testing.assert_allclose(got[array], value, rtol=1e-5, atol=1e-5)


def test_lower_and_compile_from_shapes() -> None:
    problem = PROBLEMS["causal"]
    arrays = problem.arrays()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    compiled = jax.jit(problem.run).lower(shapes).compile()
    assert_same_to_rounding(compiled(arrays), problem.run(arrays))
