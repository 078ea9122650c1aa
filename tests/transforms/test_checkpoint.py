"""jax.checkpoint: the same gradients, and how often the forward pass runs under each policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as policies

import flexjax
from flexjax import masks
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


# ------------------------------------------------------------------- block lists

BATCH, TOKENS, DIM = 2, 256, 8
KEPT = policies.save_only_these_names("flexjax_out", "flexjax_lse", "flexjax_lists")


def step(layers: int, *, scanned: bool) -> jax.stages.Traced:
    """The gradient of layers under jax.checkpoint that attend to documents, whose ids are traced."""

    def loss(weights: jax.Array, x: jax.Array, ids: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            mask_mod = flexjax.and_masks(lambda b, h, q, kv: ids[b, q] == ids[b, kv], masks.causal)
            return x + flexjax.flex_attention(x @ weight, x, x, mask_mod=mask_mod), None

        layer = jax.checkpoint(layer, policy=KEPT, prevent_cse=not scanned)
        if scanned:
            return jax.lax.scan(layer, x, weights)[0].sum()
        for weight in weights:
            x, _ = layer(x, weight)
        return x.sum()

    arrays = ((layers, DIM, DIM), jnp.float32), ((BATCH, TOKENS, 1, DIM), jnp.float32), ((BATCH, TOKENS), jnp.int32)
    return jax.jit(jax.grad(loss)).trace(*[jax.ShapeDtypeStruct(*x) for x in arrays])


def test_what_keeps_the_lists_makes_them_once_a_step() -> None:
    """Scanned layers because jax takes what does not change out of the scan; others because XLA merges what is equal."""
    made = lambda traced: traced.lower().compile().as_text().count("lists_of_classes")
    scanned, one, four = step(4, scanned=True), step(1, scanned=False), step(4, scanned=False)
    lists_of = lambda traced: [name for name in launches(traced.jaxpr.jaxpr) if name.endswith("block_lists")]
    assert lists_of(scanned) == ["flexjax_block_lists"], "in no loop"
    assert len(lists_of(four)) == 4, "none in the backward pass"
    assert made(four) == made(one) == made(scanned) > 0
