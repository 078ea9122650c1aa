"""Random score mods with random derivative rules for hypothesis, as nested tuples: on the score, on reads, and on values between.

A node is its name, its parameter (a rule, a condition, an array) and its operands. `mod_of` makes the score_mod.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

Rule = Callable[[jax.Array], jax.Array]


def by_vjp(back: Callable, body: Rule = lambda x: x) -> Rule:
    """`body` with the rule back(x, cotangent)."""

    @jax.custom_vjp
    def rule(x):
        return body(x)

    rule.defvjp(lambda x: (body(x), x), lambda x, g: (back(x, g),))
    return rule


@jax.custom_jvp
def halved(x):
    return x


halved.defjvp(lambda p, t: (halved(*p), 0.5 * t[0]))


@jax.custom_vjp
def calls_itself(x):
    return jnp.sin(x)


calls_itself.defvjp(lambda x: (calls_itself(x), x), lambda x, g: (-g * jnp.cos(x),))

LINEAR: dict[str, Rule] = {
    "stop": jax.lax.stop_gradient,
    "reverse": by_vjp(lambda x, g: -g),
    "reverse, by a body that simplifies": by_vjp(lambda x, g: -g, lambda x: x * 1.0),
    "half": halved,
    "calls itself": calls_itself,
    "by the value": by_vjp(lambda x, g: g * jnp.cos(x), lambda x: 2 * x),
    "nothing below 0": by_vjp(lambda x, g: jnp.where(x > 0, g, 0.0)),
    "relu": jax.nn.relu,
}
NOT_LINEAR: dict[str, Rule] = {
    "clip": by_vjp(lambda x, g: jnp.clip(g * jnp.cos(x), -0.02, 0.02)),
    "sign": by_vjp(lambda x, g: 0.01 * jnp.sign(g), jnp.sin),
    "round": by_vjp(lambda x, g: jnp.round(64 * g) / 64),
    "bfloat16": by_vjp(lambda x, g: g.astype(jnp.bfloat16).astype(g.dtype)),
}
RULES = LINEAR | NOT_LINEAR
CONDITIONS: dict[str, Callable] = {
    "first keys": lambda s, b, h, q, k: k < 4,
    "late queries": lambda s, b, h, q, k: q >= 5,
    "past": lambda s, b, h, q, k: q >= k,
    "head": lambda s, b, h, q, k: h == 1,
    "entry": lambda s, b, h, q, k: b == 0,
    "score": lambda s, b, h, q, k: s > 0,
    "always": lambda s, b, h, q, k: True,
}
READS: dict[str, Callable] = {
    "head": lambda x, b, h, q, k: x[h],
    "row": lambda x, b, h, q, k: x[h, q],
    "column": lambda x, b, h, q, k: x[b, k],
    "difference": lambda x, b, h, q, k: x[jnp.clip(q - k + 8, 0, 15)],
    "pair": lambda x, b, h, q, k: x[b, h, q, k],
}


def shapes_of(batch: int, heads: int, q_len: int, kv_len: int) -> dict[str, tuple[int, ...]]:
    """Of the arrays that READS reads."""
    return {
        "head": (heads,),
        "row": (heads, q_len),
        "column": (batch, kv_len),
        "difference": (16,),
        "pair": (batch, heads, q_len, kv_len),
    }


def specs(rules: Mapping[str, Rule]) -> st.SearchStrategy[tuple]:
    names, conditions = st.sampled_from(sorted(rules)), st.sampled_from(sorted(CONDITIONS))
    leaf = st.one_of(
        st.just(("score",)), st.just(("score",)), st.sampled_from(sorted(READS)).map(lambda n: ("read", n))
    )

    def larger(inner: st.SearchStrategy[tuple]) -> st.SearchStrategy[tuple]:
        return st.one_of(
            st.tuples(st.just("rule"), names, inner),
            st.tuples(st.just("rule"), names, inner),
            st.tuples(st.just("plus"), inner, inner),
            st.tuples(st.just("times"), inner, inner),
            st.tuples(st.just("where"), conditions, inner, inner),
            st.tuples(st.just("cond"), conditions, names, names, inner),
            st.tuples(st.just("switch"), names, names, names, inner),
            st.tuples(st.just("loop"), names, inner),
        )

    return st.recursive(leaf, larger, max_leaves=4)


def mod_of(spec: tuple, arrays: Mapping[str, jax.Array]) -> Callable:
    def score_mod(s, b, h, q, k):
        at = (b, h, q, k)

        def value(node: Any) -> jax.Array:
            match node:
                case ("score",):
                    return s
                case ("read", name):
                    return READS[name](arrays[name], *at)
                case ("rule", name, x):
                    return RULES[name](value(x))
                case ("plus", x, y):
                    return value(x) + value(y)
                case ("times", x, y):
                    return value(x) * value(y)
                case ("where", name, x, y):
                    return jnp.where(CONDITIONS[name](s, *at), value(x), value(y))
                case ("cond", name, one, other, x):
                    return jax.lax.cond(CONDITIONS[name](s, *at), RULES[one], RULES[other], value(x))
                case ("switch", one, two, three, x):
                    return jax.lax.switch((q + k) % 3, [RULES[one], RULES[two], RULES[three]], value(x))
                case ("loop", name, x):  # as long as loops that stay whole
                    return jax.lax.fori_loop(0, 70, lambda i, x: jnp.where(i == 3, RULES[name](x), x), value(x))
            raise AssertionError(node)

        return value(spec)

    return score_mod


def has_score(spec: Any) -> bool:
    if not isinstance(spec, tuple):
        return False
    return spec == ("score",) or any(map(has_score, spec)) or "score" in spec[1:2]


def rules_of_reads(spec: Any) -> bool:
    """Whether a rule that is not linear is applied to a value without the score."""
    if not isinstance(spec, tuple) or spec[0] in ("score", "read"):
        return False
    named = spec[0] in ("rule", "cond", "switch", "loop") and any(
        part in NOT_LINEAR for part in spec[1:-1] if isinstance(part, str)
    )
    return (named and not has_score(spec[-1])) or any(map(rules_of_reads, spec))
