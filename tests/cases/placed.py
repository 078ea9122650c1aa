"""Calls at an origin: parts of a problem of W tokens, for the kernels in simulation against the dense reference."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import Implementation, KernelOptions, Origin, masks, mods
from flexjax.ir.origin import table_of_runs
from tests.arrays import array
from tests.cases.case import rounded

W, D = 512, 16
IDS = array(np.sort(np.random.default_rng(3).integers(0, 6, (2, W)), -1), jnp.int32)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return array(rounded(np.random.default_rng((seed, *shape)).standard_normal(shape)))


@dataclasses.dataclass(frozen=True)
class Placed:
    """A part of a problem.

    sizes   batch, queries, keys, query heads, key heads
    origin  of the part
    score   from the captured arrays to a score mod
    """

    sizes: tuple[int, int, int, int, int]
    origin: Any
    mask: Callable[..., Any]
    score: Callable[..., Any] | None = None
    captures: tuple[jax.Array, ...] = ()
    dropout: float = 0.0


def documents(b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    return (IDS[b, i] == IDS[b, j]) & (i >= j)


def relative(table: jax.Array) -> Callable[..., jax.Array]:
    return lambda s, b, h, i, j: s + table[h, i - j + W - 1]


def every_load(table: jax.Array, row: jax.Array, column: jax.Array, pair: jax.Array) -> Callable[..., jax.Array]:
    return lambda s, b, h, i, j: s + row[b, i] + table[h, i - j + W - 1] + column[j] + pair[h, i, j]


TABLE, ROW, COLUMN, PAIR = normal(2, 2 * W - 1), normal(2, W), normal(W), normal(2, W, W)
AT, KNOWN = (jnp.int32(200), jnp.int32(130)), (2, 2, W, W)
BY_ENTRY = (array([200, 10]), array([130, 0]))
RUNS = table_of_runs(array([[384, 128]]), array([[256, 0]]), query_run=128, key_run=128, whole=KNOWN, aligned=128)

PLACED = {
    "causal": Placed((1, 128, 128, 2, 2), Origin(0, 0, *AT), masks.causal),
    "alibi": Placed((1, 100, 128, 2, 1), Origin(0, 2, *AT), masks.causal, lambda: mods.alibi(4)),
    "relative": Placed((1, 128, 100, 2, 2), Origin(0, 0, *AT, whole=KNOWN), masks.causal, relative, (TABLE,)),
    "relative_unknown": Placed((1, 64, 128, 2, 2), Origin(0, 0, *AT), masks.causal, relative, (TABLE,)),
    "documents": Placed((2, 64, 128, 1, 1), Origin(0, 0, *BY_ENTRY), documents, dropout=0.25),
    "every_load": Placed((2, 64, 128, 2, 1), Origin(0, 0, *BY_ENTRY, whole=KNOWN), documents, every_load,
                         (TABLE, ROW, COLUMN, PAIR)),
    "runs": Placed((1, 256, 256, 1, 1), RUNS, masks.causal, lambda r: lambda s, b, h, i, j: s + r[b, i], (ROW,)),
    "runs_relative": Placed((1, 256, 256, 1, 1), RUNS, masks.causal, relative, (TABLE,)),
}  # fmt: skip


def assert_as_reference(
    name: str, implementation: Implementation, dtype: str, error: float, interpret: bool = True
) -> None:
    """Results and gradients of the kernels, simulated with `interpret`, within `error` of the largest number of each."""
    placed = PLACED[name]
    batch, queries, keys, heads, key_heads = placed.sizes
    q, k, v = (
        normal(batch, queries, heads, D),
        normal(batch, keys, key_heads, D, seed=1),
        normal(batch, keys, key_heads, D, seed=2),
    )
    inputs = [x.astype(dtype) for x in (q, k, v)]

    def results(run: Implementation) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array, *captured: jax.Array) -> Any:
            out, aux = flexjax.flex_attention(
                q, k, v, score_mod=None if placed.score is None else placed.score(*captured), mask_mod=placed.mask,
                origin=placed.origin, implementation=run, return_aux=flexjax.AuxRequest(lse=True),
                kernel_options=KernelOptions(interpret=interpret and run != "reference"),
                dropout=flexjax.Dropout(placed.dropout, jax.random.key(0)),
            )  # fmt: skip
            assert aux.lse is not None
            wide = out.astype(jnp.float32)
            lse = jnp.where(jnp.isfinite(aux.lse), aux.lse, 0)
            return (jnp.sin(wide) + wide**2).sum() + lse.sum(), (wide, lse)

        count = 3 + len(placed.captures)
        step = jax.value_and_grad(loss, tuple(range(count)), has_aux=True)
        return (step if run == "mosaic_gpu" else jax.jit(step))(
            *inputs, *placed.captures
        )  # its simulator does not trace

    (_, got), got_gradients = results(implementation)
    (_, want), want_gradients = results("reference")
    for a, b in zip((*got, *got_gradients), (*want, *want_gradients), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= error * np.abs(b).max()
