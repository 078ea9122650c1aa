"""flexjax.profile: the work that it counts, the table that it prints, what it refuses."""

import re

import jax
import jax.numpy as jnp
import pytest

import flexjax
from flexjax import masks

Q = jax.random.normal(jax.random.key(0), (2, 256, 4, 16))
K = Q[:, :, :2]


def test_operations_are_those_of_visited_blocks():
    made = flexjax.profile(Q, K, K, mask_mod=masks.causal, seconds=0.0)
    entries = 3 * 128**2  # three of the four blocks
    assert made.work.forward_flops == 2 * 2 * 4 * entries * (16 + 16)
    assert made.work.bytes == 4 * (2 * Q.size + 2 * K.size)
    assert [p.flops / made.work.forward_flops for p in made.passes] == [1.0, 3.5]
    assert all(p.seconds > 0 and p.calls >= 3 for p in made.passes)
    for p in made.passes:
        assert p.predicted >= p.flops / made.peak_flops


def test_the_table():
    text = str(flexjax.profile(Q, K, K, backward=False, seconds=0.0, implementation="xla"))
    assert text.startswith("xla on cpu; first call ")
    assert re.search(r"^forward +[\d.]+ ms +[\d.]+ ms +[\d.e-]+ +[\d.]+%$", text, re.M)
    assert "both passes" not in text


def test_the_table_is_shown_and_says_when_the_machine_was_busy():
    made = flexjax.profile(Q, K, K, backward=False, seconds=0.0, implementation="xla")
    below = made._replace(passes=tuple(p._replace(predicted=p.seconds / 2) for p in made.passes))
    assert repr(below) == str(below)
    assert below._repr_html_() == f"<pre>{below}</pre>"
    assert str(below).endswith("50.0%")
    above = made._replace(passes=tuple(p._replace(predicted=p.seconds * 1.5) for p in made.passes))
    assert str(above).splitlines()[-2].endswith("150.0%")
    assert str(above).splitlines()[-1] == (
        "above 100%: the machine was busy while its roofline was measured; profile again"
    )


@pytest.mark.slow
def test_aux_outputs_and_one_query_are_profiled():
    made = flexjax.profile(Q[:, :1], K, K, return_aux=flexjax.AuxRequest(lse=True), seconds=0.0)
    assert made.work.total == 1


def test_refusals():
    with pytest.raises(
        ValueError, match=r"^`query` is traced; expected concrete arrays\. Call flexjax\.profile outside of jit\."
    ):
        jax.jit(lambda q: flexjax.profile(q, q, q))(Q)
    with pytest.raises(
        TypeError, match=r"^profile\(\) got unexpected arguments tile; it takes those of flex_attention\.$"
    ):
        flexjax.profile(Q, K, K, tile=3)
    with pytest.raises(NotImplementedError) as caught:
        flexjax.profile(Q, K, K, context=flexjax.ContextParallel("sp"))  # type: ignore[call-arg]
    assert str(caught.value) == (
        "profile times one device. A call with context= is computed in stages, whose plans `flexjax.explain(..., context=...)` names. "
        "Time flex_attention with kernel_options inside the jitted call instead."
    )
    with pytest.raises(
        ValueError, match=r"^`seconds` is nan; expected a finite number of 0 or more\. 2 is the default\."
    ):
        flexjax.profile(Q, K, K, seconds=float("nan"))
    mesh = jax.make_mesh((2,), ("x",))
    split = jax.device_put(jnp.concatenate([Q, Q]), jax.sharding.NamedSharding(mesh, jax.P("x")))
    with pytest.raises(
        NotImplementedError, match=r"^profile compares a call with the roofline of one device, and query"
    ):
        flexjax.profile(split, split, split)
    with pytest.raises(ValueError, match=r"^`value` is of shape"):
        flexjax.profile(Q, jnp.ones((2, 256, 3, 16)), K)
