"""Parts of a larger problem: a call with an origin gives what the whole call gives there, with all gradients."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import Origin, attention, masks, mods
from flexjax.ir import program as ir
from flexjax.ir.origin import OriginTable, table_of_runs
from tests import compare, oracle
from tests.cases import CASES, Case
from tests.marks import some_slow

EVERYDAY = ("packed", "by_batch_and_head", "relative_bias")
NAMES = (*EVERYDAY, "length_300", "natten", "distance_bias", "clipped_relative_bias", "full_pair_bias", "negative_index",
         "index_out_of_range", "poison_log", "modular_table", "coordinates", "scrambled_documents")  # fmt: skip
COMPILED = "/jax/core/compile/backend_compile_duration"


# ------------------------------------------------------------------- conformance cases, part by part


def in_parts(case: Case, implementation: str) -> dict[str, Any]:
    """The results of the case and its gradients, from calls on a batch entry, half of the heads and half of the queries each.

    One call is traced, and lax.map runs it on all parts, so that the numbers of its origin are traced.
    """
    B, N, M, T, S, _, _ = case.shape
    inputs, captured = case.inputs(), case.captured()
    w, u = inputs.pop("w"), inputs.pop("u")
    groups = 2 if M % 2 == 0 else 1
    rows = -(-T // 2)
    starts = (0, T - rows)
    parts = list(itertools.product(range(B), range(groups), starts))
    heads = N // groups

    def attend(inputs: dict, learned: dict, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        b, group, q0 = part
        score_mod, mask_mod = case.mods({**captured, **learned})
        cut = lambda x, at, size: jax.lax.dynamic_slice(x, at, (1, *size, *x.shape[3:]))
        q = cut(inputs["q"], (b, group * heads, q0, 0), (heads, rows))
        k, v = (cut(inputs[n], (b, group * (M // groups), 0, 0), (M // groups, S)) for n in ("k", "v"))
        out, aux = flexjax.flex_attention(
            q, k, v, score_mod=score_mod, mask_mod=mask_mod, scale=case.scale, layout="BNTH",
            origin=Origin(batch=b, head=group * heads, query=q0, whole=(B, N, T, S)),
            return_aux=flexjax.AuxRequest(lse=True), implementation=implementation,
        )  # fmt: skip
        return out[0], aux.lse[0]

    def loss(inputs: dict, learned: dict) -> Any:
        outs, lses = jax.lax.map(lambda part: attend(inputs, learned, part), jnp.asarray(parts, jnp.int32))
        out, lse = jnp.zeros((B, N, T, outs.shape[-1])), jnp.zeros((B, N, T))
        for (b, group, q0), o, ls in zip(parts, outs, lses, strict=True):
            own = slice(group * heads, (group + 1) * heads)
            out, lse = out.at[b, own, q0 : q0 + rows].set(o), lse.at[b, own, q0 : q0 + rows].set(ls)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        return (out * w).sum() + (finite * u).sum(), {"out": out, "lse": lse}

    learned = {name: captured[name] for name in case.wanted()}
    (d_inputs, d_learned), results = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(inputs, learned)
    return {**results, **{f"d:{name}": g for name, g in {**d_inputs, **d_learned}.items()}}


@pytest.mark.parametrize("name", some_slow(NAMES, EVERYDAY))
def test_the_parts_of_a_case_are_the_whole(name: str) -> None:
    case = CASES[name]
    got, want = in_parts(case, "xla"), oracle.expected(case)
    for key, value in got.items():
        compare.assert_close(key, np.asarray(value), np.asarray(want[key]), dtype="float32")


# ------------------------------------------------------------------- runs

B, T, S, N, M, D, BLOCK = 2, 64, 96, 2, 1, 8, 16


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


IDS = jnp.asarray(np.sort(np.random.default_rng(3).integers(0, 5, (B, S)), -1), jnp.int32)


def score_of(table: jax.Array, row: jax.Array, column: jax.Array, pair: jax.Array) -> Callable:
    """A load of each class."""

    def score_mod(s: jax.Array, b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        return s * (1 + row[b, i]) + table[h, i - j + S - 1] + column[j] + pair[h, i, j]

    return score_mod


def mask(b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    return (IDS[b, i] == IDS[b, j]) & (i + 20 >= j)


def arrays() -> tuple[jax.Array, ...]:
    shapes = ((B, T, N, D), (B, S, M, D), (B, S, M, D), (N, T + S), (B, T), (S,), (N, T, S))
    return tuple(normal(*shape, seed=n) for n, shape in enumerate(shapes))


def loss(out: jax.Array) -> jax.Array:
    return (jnp.sin(out) + out**2).sum()


def gradients(function: Callable) -> Callable:
    return jax.jit(jax.value_and_grad(function, tuple(range(7)), has_aux=True))


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


def permuted(query_order: np.ndarray, key_order: np.ndarray, implementation: str, known: bool, blocks: bool) -> Any:
    """Values and gradients of the problem, with blocks of its queries and keys in these orders (one for each batch entry)."""
    rows, columns = ((o[..., None] * BLOCK + np.arange(BLOCK)).reshape(*o.shape[:-1], -1) for o in (query_order, key_order))
    rows, columns = (np.broadcast_to(x, (B, x.shape[-1])) for x in (rows, columns))
    entries = np.arange(B)[:, None]

    def attend(*a: jax.Array) -> Any:
        q, k, v, *captured = a
        starts = [jnp.asarray(o.reshape(-1, o.shape[-1]) * BLOCK, jnp.int32) for o in (query_order, key_order)]
        whole: Any = {"whole": (B, N, T, S)} if known else {}
        origin = table_of_runs(*starts, query_run=BLOCK, key_run=BLOCK, **whole)
        chosen: Any = {"mask_mod": mask, "origin": origin}
        if blocks:
            made = flexjax.create_block_mask(mask, B, None, T, S, block_size=BLOCK, origin=origin)
            chosen = {"block_mask": made}
        out = flexjax.flex_attention(
            q[entries, rows], k[entries, columns], v[entries, columns], score_mod=score_of(*captured),
            dropout_rate=0.25, dropout_key=jax.random.key(1), implementation=implementation, **chosen,
        )  # fmt: skip
        out = jnp.zeros_like(out).at[entries, rows].set(out)
        return loss(out), out

    return gradients(attend)(*arrays())


def whole(*a: jax.Array) -> Any:
    q, k, v, *captured = a
    out = flexjax.flex_attention(
        q, k, v, score_mod=score_of(*captured), mask_mod=mask, dropout_rate=0.25, dropout_key=jax.random.key(1),
        implementation="reference",
    )  # fmt: skip
    return loss(out), out


ORDERS = {
    "shared": (np.array([2, 0, 3, 1]), np.array([5, 1, 0, 4, 2, 3])),
    "by entry": (np.array([[2, 0, 3, 1], [3, 2, 1, 0]]), np.array([[0, 1, 2, 3, 4, 5], [5, 1, 0, 4, 2, 3]])),
}


@pytest.mark.parametrize(
    ("order", "implementation", "known"),
    some_slow(
        list(itertools.product(ORDERS, ("xla", "reference"), (True, False))),
        [("shared", "xla", False), ("by entry", "xla", True)],
    ),
)
def test_runs_in_any_order(order: str, implementation: str, known: bool) -> None:
    """Every gradient, dropout's mask and the block lists; a difference q - kv occurs in several runs."""
    assert_same(permuted(*ORDERS[order], implementation, known, blocks=True), gradients(whole)(*arrays()))
