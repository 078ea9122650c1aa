"""Derivative rules of score mods on all backends, against dense attention that JAX maps and differentiates."""

import collections
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import flexjax
from flexjax.passes import dispatch
from tests.cases.random_rules import LINEAR, RULES, mod_of, rules_of_reads, shapes_of, specs
from tests.marks import some_slow
from tests.transforms.test_platforms import V6E, program

SIZES = (2, 2, 9, 11)
DIM = 8
SEEN: collections.Counter[str] = collections.Counter()


@pytest.fixture(scope="module", autouse=True)
def _counts() -> Iterator[None]:
    yield
    print("\nderivative rules:", dict(SEEN))


def arrays_of(dtype: str, sizes: tuple[int, int, int, int] = SIZES) -> tuple[dict[str, jax.Array], ...]:
    """(the operands of a call, what a mod captures, the cotangent of its output)."""
    rng = np.random.default_rng(2)
    batch, heads, q_len, kv_len = sizes
    made = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    qkv = {"query": made(batch, q_len, heads, DIM)}
    qkv |= {name: made(batch, kv_len, heads, DIM) for name in ("key", "value")}
    return qkv, {n: made(*s) for n, s in shapes_of(*sizes).items()}, {"out": made(batch, q_len, heads, DIM)}


def dense(mod: Callable, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention by its definition."""
    scores = jnp.einsum("btnd,bsnd->bnts", query, key, precision="highest") / np.sqrt(query.shape[-1])
    for place in (4, 3, 2, 1):  # the innermost map is over keys
        axes = [0] + [0 if i == place else None for i in (1, 2, 3, 4)]
        mod = jax.vmap(mod, axes)
    weights = jax.nn.softmax(mod(scores, *map(jnp.arange, scores.shape)), -1)
    return jnp.einsum("bnts,bsne->btne", weights, value, precision="highest")


def loss_of(spec: tuple, cotangent: jax.Array, call: Callable) -> Callable:
    """The loss as a function of (operands, captured arrays)."""

    def loss(qkv: dict[str, jax.Array], captured: dict[str, jax.Array]) -> jax.Array:
        return (call(mod_of(spec, captured), **qkv) * cotangent).sum()

    return loss


def flex(**options: Any) -> Callable:
    return lambda mod, query, key, value: flexjax.flex_attention(query, key, value, score_mod=mod, **options)


def assert_close(got: Any, want: Any, tolerance: float, what: object) -> None:
    largest = max(float(np.abs(np.asarray(y)).max()) for y in (*jax.tree.leaves(want), 1e-3))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(x), np.asarray(y), rtol=0, atol=tolerance * largest, err_msg=f"{path} of {what}"
        )


RULE_OF_SUMS = (
    "`score_mod` reads a captured array through a derivative rule that is not linear in the cotangent, of an argument that is not another "
    "at each entry of the attention matrix: jax would apply the rule to a sum over entries, which is known only when the backward pass "
    "ends. Apply the function to the whole array outside the mod, where the rule gets the gradient of the array, or hand it the score too."
)


def refusal_of(run: Callable[[], object]) -> str:
    """The message of a ValueError of `run`, "" without one."""
    try:
        run()
    except ValueError as error:
        return str(error)
    return ""


def check_gradients(spec: tuple, dtype: str, tolerance: float, **options: Any) -> None:
    qkv, captured, cotangent = arrays_of(dtype)
    ours, theirs = (loss_of(spec, cotangent["out"], call) for call in (flex(**options), dense))
    want = jax.jit(jax.grad(theirs, (0, 1)))(qkv, captured)
    wanted = (0, 1)
    if rules_of_reads(spec):  # refused, unless the rule's argument is another at each entry
        why = refusal_of(lambda: jax.eval_shape(jax.grad(ours, 1), qkv, captured))
        assert why in ("", RULE_OF_SUMS)
        wanted = 0 if why else wanted
        want = want[0] if why else want
        SEEN["refused by a captured array"] += bool(why)
    got = jax.jit(jax.grad(ours, wanted))(qkv, captured)
    assert_close(got, want, tolerance, spec)
    SEEN["gradients"] += 1


EXAMPLES = {"ci": 60, "long": 200}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 12)


@hypothesis.settings(max_examples=EXAMPLES)
@given(specs(RULES))
def test_gradients_on_xla(spec: tuple) -> None:
    with jax.enable_x64(True):
        check_gradients(spec, "float64", 1e-9, implementation="xla")


@hypothesis.settings(max_examples=EXAMPLES)
@given(specs(LINEAR))
def test_tangents(spec: tuple) -> None:
    """Forward mode is the transpose of the gradient, which JAX has for these rules; it has no tangent of a custom_vjp function."""
    with jax.enable_x64(True):
        qkv, captured, cotangent = arrays_of("float64")
        moved = jax.tree.map(jnp.cos, (qkv, captured))
        out = lambda qkv, captured: flex()(mod_of(spec, captured), **qkv)
        tangent = jax.jit(lambda given, moved: jax.jvp(out, given, moved)[1])((qkv, captured), moved)
        gradients = jax.jit(jax.grad(loss_of(spec, cotangent["out"], dense), (0, 1)))(qkv, captured)
        want = sum(jax.tree.leaves(jax.tree.map(lambda g, t: (g * t).sum(), gradients, moved)))
        np.testing.assert_allclose((tangent * cotangent["out"]).sum(), want, rtol=1e-9, atol=1e-9, err_msg=str(spec))
    SEEN["tangents"] += 1


def second(spec: tuple, call: Callable, at: tuple, cotangent: jax.Array) -> Any:
    """The gradient of a function of the gradient."""
    first = jax.grad(loss_of(spec, cotangent, call), (0, 1))
    return jax.grad(lambda at: sum((jnp.sin(3 * x) ** 2).sum() for x in jax.tree.leaves(first(*at))))(at)


def check_second_derivatives(spec: tuple) -> None:
    with jax.enable_x64(True):
        qkv, captured, cotangent = arrays_of("float64")
        got, want = (
            jax.jit(lambda at, call=call: second(spec, call, at, cotangent["out"]))((qkv, captured))
            for call in (flex(), dense)
        )
    assert_close(got, want, 1e-8, spec)
    SEEN["second derivatives"] += 1


TWICE = {
    "stopped factor": ("times", ("rule", "stop", ("score",)), ("rule", "by the value", ("score",))),
    "reversed": ("rule", "reverse", ("score",)),
    "a rule that calls its function": ("rule", "calls itself", ("score",)),
    "clipped": ("plus", ("rule", "clip", ("score",)), ("times", ("read", "column"), ("score",))),
    "relu of a branch": ("cond", "first keys", "relu", "stop", ("plus", ("score",), ("read", "row"))),
    "in a loop": ("loop", "reverse", ("times", ("score",), ("read", "pair"))),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name: str) -> None:
    check_second_derivatives(TWICE[name])


@pytest.mark.slow
@hypothesis.settings(max_examples=EXAMPLES)
@given(specs(RULES))
def test_random_second_derivatives(spec: tuple) -> None:
    hypothesis.assume(not rules_of_reads(spec))
    check_second_derivatives(spec)


@hypothesis.settings(max_examples=EXAMPLES)
@given(specs(RULES))
def test_gradients_on_the_traced_reference(spec: tuple) -> None:
    """A sequence of names runs the dense reference from the traced programs."""
    with jax.enable_x64(True):
        check_gradients(spec, "float64", 1e-9, implementation=("reference",))


# ------------------------------------------------------------------- kernels

ON_KERNELS = {
    "detached keys": ("where", "first keys", ("rule", "stop", ("score",)), ("score",)),
    "reversed": ("rule", "reverse, by a body that simplifies", ("score",)),
    "reads that are stopped": (
        "plus",
        ("cond", "late queries", "stop", "half", ("score",)),
        ("times", ("rule", "reverse", ("read", "head")), ("score",)),
    ),
}
SIMULATED = {
    "mosaic_tpu": flexjax.KernelOptions(interpret=True),
    "mosaic_gpu": flexjax.KernelOptions(interpret=True),
}


def check_kernels(spec: tuple, name: str) -> None:
    """Gradients of query, key, value and a number of each head, without jit, because GPU kernels are simulated outside of it."""
    sizes = (1, 2, 64, 128)
    qkv, captured, cotangent = arrays_of("float32", sizes)
    qkv, cotangent = jax.tree.map(lambda x: jnp.tile(x, 8), (qkv, cotangent))  # head dim 64
    options = dict(implementation=name, kernel_options=SIMULATED[name])
    ours, theirs = (loss_of(spec, cotangent["out"], call) for call in (flex(**options), dense))
    at = (qkv, {"head": captured["head"]})
    fixed = {n: x for n, x in captured.items() if n != "head"}
    with_fixed = lambda loss: lambda qkv, moving: loss(qkv, fixed | moving)
    got, want = jax.grad(with_fixed(ours), (0, 1))(*at), jax.jit(jax.grad(with_fixed(theirs), (0, 1)))(*at)
    assert_close(got, want, 2e-3, spec)
    SEEN[f"gradients on {name}"] += 1


def test_rules_without_tangents() -> None:
    qkv, captured, _ = arrays_of("float32")
    mod = mod_of(("rule", "clip", ("score",)), captured)
    message = (
        "`score_mod` has a derivative rule that is not linear in the cotangent, so it has no tangent (jvp, linearize, jacfwd). Use "
        "reverse mode, or write a linear rule with jax.custom_jvp."
    )
    for run in (lambda f: f(), lambda f: jax.jit(f)()):
        why = refusal_of(
            lambda run=run: run(
                lambda: jax.jvp(lambda q: flex()(mod, **qkv | {"query": q}), [qkv["query"]], [qkv["query"]])
            )
        )
        assert why == message


@pytest.mark.parametrize("name", some_slow(ON_KERNELS, ["detached keys"]))
def test_gradients_on_tpu_kernels(name: str) -> None:
    check_kernels(ON_KERNELS[name], "mosaic_tpu")


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need a newer jax")
@pytest.mark.parametrize("name", some_slow(ON_KERNELS, ["detached keys"]))
def test_gradients_on_gpu_kernels(name: str) -> None:
    check_kernels(ON_KERNELS[name], "mosaic_gpu")


@pytest.mark.slow
@pytest.mark.parametrize("kernels", SIMULATED)
@hypothesis.settings(max_examples=EXAMPLES)
@given(specs(LINEAR))
def test_random_gradients_on_kernels(kernels: str, spec: tuple) -> None:
    hypothesis.assume("loop" not in str(spec))  # kernels refuse loops
    if kernels == "mosaic_gpu" and jax.__version_info__ < (0, 11):
        pytest.skip("the GPU kernels need a newer jax")
    check_kernels(spec, kernels)


@jax.custom_vjp
def with_gradient_of(score: jax.Array, read: jax.Array) -> jax.Array:
    """The score, from a rule that has a gradient of what the value does not read."""
    return score


with_gradient_of.defvjp(lambda s, x: (s, (s, x)), lambda kept, g: (g * kept[1], g * kept[0]))


def test_a_read_of_the_rule_alone() -> None:
    """A call that is split by residues, or is not because the derivative reads by position and the value does not."""
    qkv, captured, cotangent = arrays_of("float32", (1, 2, 512, 512))
    row = {"row": captured["row"]}
    mask = lambda b, h, q, k: (q - k) % 4 == 0
    mod = lambda row: lambda s, b, h, q, k: with_gradient_of(s, row[h, q])
    visible = lambda row: lambda s, *at: jnp.where(mask(*at), mod(row)(s, *at), -jnp.inf)
    ours = lambda qkv, row: (flex(mask_mod=mask)(mod(row["row"]), **qkv) * cotangent["out"]).sum()
    theirs = lambda qkv, row: (dense(visible(row["row"]), **qkv) * cotangent["out"]).sum()
    got, want = (jax.jit(jax.grad(f, (0, 1)))(qkv, row) for f in (ours, theirs))
    assert_close(got, want, 1e-4, "a read of the rule alone")


def test_kernels_refuse_rules_that_are_not_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_warned", set())
    mod = mod_of(("rule", "clip", ("score",)), {})
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    with pytest.warns(flexjax.FallbackWarning) as said:
        program(jax.grad(lambda q: flexjax.flex_attention(q, q, q, score_mod=mod).astype(jnp.float32).sum()), V6E, x)
    assert len(said) == 1
    assert (
        "The backward pass of a call runs on xla, not on the kernels of mosaic_tpu, for TPU v6 lite. The TPU kernels multiply the cotangent "
        "of the score by derivatives, and score_mod has a derivative rule that is not linear in the cotangent. A rule that scales the "
        "cotangent by a number that does not depend on it keeps the kernels."
    ) in str(said[0].message)


@jax.custom_jvp
def doubled(x):
    """A rule that gives its value without the function itself: what JAX differentiates next is that value."""
    return x * 1.0


doubled.defjvp(lambda p, t: (p[0], 2 * t[0]))


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


sine.defjvp(lambda p, t: (jnp.sin(p[0]), p[0] * t[0]))

SECOND = {
    "hessian": lambda f, x: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(lambda x: jnp.sum(f(x) ** 2))(x))))(x),
    "gradient of a tangent": lambda f, x: jax.grad(lambda x: jnp.sum(jax.jvp(f, (x,), (jnp.cos(x),))[1] ** 2))(x),
}


@pytest.mark.parametrize("of", SECOND)
@pytest.mark.parametrize("rule", [doubled, sine], ids=["doubled", "sine"])
def test_second_derivatives_of_a_rule_that_does_not_call_its_function(rule: Callable, of: str) -> None:
    qkv, _, _ = arrays_of("float32")
    q, k, v = qkv["query"], qkv["key"], qkv["value"]
    mod = lambda score, b, h, q_idx, kv_idx: rule(score)
    got = SECOND[of](lambda q: flexjax.flex_attention(q, k, v, score_mod=mod), q)
    assert_close(got, SECOND[of](lambda q: dense(mod, q, k, v), q), 1e-3, of)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_rule_that_rounds_to_eight_bits(dtype: str) -> None:
    rounded = jax.custom_vjp(lambda x: x)
    rounded.defvjp(lambda x: (x, None), lambda _, g: (g.astype(dtype).astype(jnp.float32),))
    qkv, _, out = arrays_of("float32")
    q, k, v = qkv["query"], qkv["key"], qkv["value"]
    mod = lambda score, b, h, q_idx, kv_idx: rounded(score)
    grad = lambda call: jax.grad(lambda q: jnp.sum(call(q) * out["out"]))(q)
    got = grad(lambda q: flexjax.flex_attention(q, k, v, score_mod=mod))
    # an entry at the edge of two numbers of 8 bits may round to either
    assert_close(got, grad(lambda q: dense(mod, q, k, v)), 2e-2, dtype)
