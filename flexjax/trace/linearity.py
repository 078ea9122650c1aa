"""Whether a derivative rule is linear in the cotangent, read from its jaxpr.

The rule of a step (jax.custom_vjp, jax.custom_jvp, or a loop around such a function) is traced with the cotangents of
its results as inputs. It is linear if every path from them to the gradients is, and nothing else is added on the way. A
rule that no path shows to be linear counts as not linear, which costs speed and no exactness.

A cast of the cotangent to a dtype of fewer bits rounds it, and is not linear. Casts outside of such rules are not
looked at: jax calls them linear, and so does the compiler.
"""

import enum
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex_core

from flexjax.trace.equations import cast_over, inner_jaxpr, is_float0, nested_consts, varying_axes
from flexjax.trace.primitives import CASTS, CUSTOM, INLINED
from flexjax.trace.translation import Equation, Scope


class State(enum.IntEnum):
    """How a value depends on the cotangents."""

    ZERO = 0  # 0, whatever the cotangents are
    LINEAR = 1
    FREE = 2  # the same for all cotangents
    OTHER = 3


ZERO, LINEAR, FREE, OTHER = State

EACH = (
    frozenset(
        {
            "broadcast_in_dim",
            "conj",
            "copy",
            "copy_p",
            "cumsum",
            "expand_dims",
            "imag",
            "neg",
            "optimization_barrier",
            "real",
            "reduce_sum",
            "reduce_window_sum",
            "reshape",
            "reshard",
            "rev",
            "slice",
            "split",
            "squeeze",
            "stop_gradient",
            "transpose",
            "unstack",
        }
    )
    | CASTS
)
"""Primitives that are linear in their operands; those with several have as many results."""
SUMS = frozenset(
    {
        "add",
        "add_any",
        "complex",
        "concatenate",
        "dynamic_update_slice",
        "pad",
        "scatter-add",
        "scatter_add",
        "stack",
        "sub",
    }
)
"""Primitives that are linear in all their floating operands together."""
PRODUCTS = frozenset({"dot_general", "mul"})  # primitives that are linear in each of their two operands
FIRST = frozenset({"div", "dynamic_slice", "gather"})  # primitives that are linear in their first operand


def rule_of(
    eqn: Equation, bind: Callable[..., list[jax.Array]], operands: Sequence[jax.ShapeDtypeStruct]
) -> jex_core.ClosedJaxpr | None:
    """The derivative rule of an equation that `bind` runs: a jaxpr from operands and cotangents to gradients.

    The cotangents are those of the floating results, the gradients those of the floating operands. None where jax
    cannot differentiate the equation.
    """
    over = frozenset().union(*(varying_axes(v.aval) for v in eqn.invars))
    floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
    outs = [i for i, v in enumerate(eqn.outvars) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]

    def pulled(values: list[jax.Array], cotangents: list[jax.Array]) -> Sequence[jax.Array]:
        # inside shard_map: the transpose of a cast that is differentiated is a sum over devices
        values, cotangents = ([cast_over(x, over) for x in xs] for xs in (values, cotangents))

        def results(*moving: jax.Array) -> list[jax.Array]:
            given = dict(zip(floats, moving, strict=True))
            made = bind(*(given.get(i, x) for i, x in enumerate(values)))
            return [made[i] for i in outs]

        return jax.vjp(results, *(values[i] for i in floats))[1](cotangents)

    try:
        types = [jax.ShapeDtypeStruct(eqn.outvars[i].aval.shape, eqn.outvars[i].aval.dtype) for i in outs]
        return jax.make_jaxpr(pulled)(list(operands), types)
    except Exception:  # the derivative program meets the same error, and has a sentence for it
        return None


def has_rule(jaxpr: Scope) -> bool:
    """Whether the jaxpr, or one inside it, calls a function with a derivative rule of its own."""
    return any(e.primitive.name in CUSTOM or calls_rule(e) for e in cast(Sequence[Equation], jaxpr.eqns))


def calls_rule(eqn: Equation) -> bool:
    """Whether a jaxpr among the parameters calls a function with a derivative rule of its own."""
    parts = [p for param in eqn.params.values() for p in (param if isinstance(param, tuple | list) else (param,))]
    inner = [getattr(p, "jaxpr", p) for p in parts]
    return any(hasattr(p, "eqns") and has_rule(cast(Scope, p)) for p in inner)


def digest(rule: jex_core.ClosedJaxpr | None) -> str:
    """A text that differs between rules that compute different things; a jaxpr's text has only the name of a rule."""
    if rule is None:
        return ""
    made = hashlib.sha256(str(rule).encode())
    for const in nested_consts((rule,)):
        made.update(str(id(const)).encode() if isinstance(const, Tracer) else np.asarray(const).tobytes())
    return f" rule {made.hexdigest()[:16]}"


def is_linear(rule: jex_core.ClosedJaxpr, cotangents: int) -> bool:
    """Whether the rule is linear in its last `cotangents` inputs."""
    free = len(rule.jaxpr.invars) - cotangents
    states = _run(rule.jaxpr, rule.consts, [FREE] * free + [LINEAR] * cotangents)
    real = [s for s, v in zip(states, rule.jaxpr.outvars, strict=True) if not is_float0(v)]
    return all(s in (ZERO, LINEAR) for s in real)


def _run(jaxpr: Scope, consts: Sequence[Any], states: Sequence[State]) -> list[State]:
    """The states of the results of a jaxpr."""
    env: dict[object, State] = dict(zip(jaxpr.constvars, map(_of_value, consts), strict=True))
    env.update(zip(jaxpr.invars, states, strict=True))
    read = lambda v: _of_value(v.val) if isinstance(v, jex_core.Literal) else env[v]
    for eqn in cast(Sequence[Equation], jaxpr.eqns):
        env.update(zip(eqn.outvars, _results(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _of_value(value: Any) -> State:
    """ZERO for an array of zeros whose elements are known, FREE for any other."""
    if isinstance(value, Tracer) or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
        return FREE
    return FREE if np.any(np.asarray(value)) else ZERO


def _join(states: Sequence[State]) -> State:
    """The state of a sum of values, or of a choice between them."""
    found = set(states) - {ZERO}
    if len(found) > 1:
        return OTHER
    return found.pop() if found else ZERO


def _results(eqn: Equation, states: list[State]) -> list[State]:
    name, many = eqn.primitive.name, len(eqn.outvars)
    if OTHER in states:
        return [OTHER] * many
    if name in INLINED or name in CUSTOM:
        closed, consts = _body(eqn)
        return _run(closed, consts, states)
    if name == "cond":
        branches = [_run(b.jaxpr, b.consts, states[1:]) for b in eqn.params["branches"]]
        joined = [_join(s) for s in zip(*branches, strict=True)]
        return joined if states[0] != LINEAR else [OTHER] * many
    if name == "scan":
        return _scan(eqn, states)
    if name == "convert_element_type":
        return [OTHER if states[0] == LINEAR and _rounds(eqn) else states[0]]
    if name in EACH:
        return states if len(states) == many else [states[0]] * many
    if name in SUMS:
        real = [s for s, v in zip(states, eqn.invars, strict=True) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
        return [_join(real) if len(real) == len(states) or LINEAR not in set(states) - set(real) else OTHER]
    if name == "select_n":
        return [_join(states[1:]) if states[0] != LINEAR else OTHER]
    if name in PRODUCTS:
        return [ZERO if ZERO in states else OTHER if states == [LINEAR, LINEAR] else min(states)]
    if name in FIRST and LINEAR not in states[1:]:
        return [states[0]] * many
    return [OTHER if LINEAR in states else FREE] * many


def _body(eqn: Equation) -> tuple[Scope, Sequence[Any]]:
    if eqn.primitive.name in CUSTOM:
        closed = eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"]
        return closed.jaxpr, closed.consts
    return cast(tuple[Scope, Sequence[Any]], inner_jaxpr(eqn))


def _rounds(eqn: Equation) -> bool:
    """Whether a conversion is to a dtype that does not hold all numbers of the old one."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(new, jnp.inexact) or jnp.issubdtype(old, jnp.complexfloating) > jnp.issubdtype(
        new, jnp.complexfloating
    ):
        return True
    was, now = jnp.finfo(old), jnp.finfo(new)  # not jnp.promote_types, which raises for 8-bit floats
    return now.nmant < was.nmant or now.maxexp < was.maxexp or now.minexp > was.minexp


def _scan(eqn: Equation, states: list[State]) -> list[State]:
    closed, params = eqn.params["jaxpr"], eqn.params
    if "num_carry" in params:
        consts, carried = params["num_consts"], params["num_carry"]
    else:  # jax 0.11
        consts, carried, _ = (len(list(part)) for part in params["ft_in"].update(eqn.invars).unpack())
    # the carry is joined with what each step makes of it until nothing changes
    states = list(states)
    while True:
        outs = _run(closed.jaxpr, closed.consts, states)
        carry = slice(consts, consts + carried)
        joined = [_join(pair) for pair in zip(states[carry], outs[:carried], strict=True)]
        if joined == states[carry]:
            return outs
        states[carry] = joined
