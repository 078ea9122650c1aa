"""Two devices: shard_map and jit over batch and heads, with automatic and explicit axes. conftest.py makes the devices."""

import contextlib
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import masks
from tests.arrays import array
from tests.cases.small import PROBLEMS, Arrays
from tests.marks import some_slow

pytestmark = pytest.mark.skipif(
    jax.device_count() < 2, reason="tests/conftest.py makes two devices of a CPU only; this platform has one"
)

SPECS = {"batch": P("x"), "heads": P(None, None, "x")}


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])


def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    return flexjax.flex_attention(q, k, v, sinks=sinks, mask_mod=masks.causal)


def inputs() -> tuple[jax.Array, ...]:
    a = PROBLEMS["sinks"].arrays()
    return a["query"], a["key"], a["value"], a["sinks"]


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def gradients(function: Any) -> Any:
    """Of a loss to every argument."""
    count = 4
    return jax.jit(jax.value_and_grad(lambda *a: (function(*a) ** 2).sum(), argnums=tuple(range(count))))


CHECKED = [(split, check) for split in SPECS for check in (True, False)]


@pytest.mark.parametrize(("split", "check"), some_slow(CHECKED, [("batch", True)]))
def test_shard_map(split: str, check: bool) -> None:
    """Sinks are shared by the batch and split with the heads; what is shared gets the sum of the gradients."""
    main = SPECS[split]
    sinks = P("x") if split == "heads" else P()
    run = jax.shard_map(
        attend, mesh=mesh(AxisType.Auto), in_specs=(main, main, main, sinks), out_specs=main, check_vma=check
    )
    close(jax.jit(run)(*inputs()), attend(*inputs()))
    close(gradients(run)(*inputs()), gradients(attend)(*inputs()))


def _biased(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
    mod = lambda s, b, h, i, j: s + table[h, i - j + 10]
    return flexjax.flex_attention(q, k, v, score_mod=mod, mask_mod=masks.causal)


@pytest.mark.parametrize(("split", "check"), some_slow(CHECKED, [("heads", False)]))
def test_shard_map_of_captured_arrays(split: str, check: bool) -> None:
    q, k, v, _ = inputs()
    table = jnp.cos(jnp.arange(4 * 20, dtype=jnp.float32)).reshape(4, 20)
    main = SPECS[split]
    specs = (main, main, main, P("x") if split == "heads" else P())
    run = jax.shard_map(_biased, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=main, check_vma=check)
    close(jax.jit(run)(q, k, v, table), _biased(q, k, v, table))
    close(gradients(run)(q, k, v, table), gradients(_biased)(q, k, v, table))


@pytest.mark.slow
def test_shard_map_of_block_masks() -> None:
    """Segment ids are split with the batch; each device builds its own block mask."""
    q, k, v, _ = inputs()
    ids = array(np.sort(np.random.default_rng(0).integers(0, 3, (2, 11)), -1), jnp.int32)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return flexjax.flex_attention(q, k, v, mask_mod=masks.document(ids[:, :9], ids))

    split = jax.shard_map(run, mesh=mesh(AxisType.Auto), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    close(jax.jit(split)(q, k, v, ids), run(q, k, v, ids))


@pytest.mark.parametrize("where", ["host", "device", "mesh"])
@pytest.mark.parametrize("context", [False, True])
def test_block_masks_made_inside_shard_map(where: str, context: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of arrays that are known: they are evaluated at once, whatever mesh is around.

    Nothing is jitted here: shard_map compiles each operation that no jit holds together, 560 of them once.
    """
    around = mesh(AxisType.Auto)
    ids = np.arange(256) // 70
    captured: Any = {"host": ids, "device": jnp.asarray(ids)}.get(where)
    if captured is None:
        captured = jax.device_put(ids, jax.sharding.NamedSharding(around, P()))

    def blocks(x: jax.Array) -> jax.Array:
        made = flexjax.create_block_mask(
            lambda b, h, q, kv: (q >= kv) & (captured[q] == captured[kv]), None, None, 256, 256
        )
        return x * made.kv_num_blocks.sum()

    run = jax.shard_map(blocks, mesh=around, in_specs=P("x"), out_specs=P("x"))
    with jax.set_mesh(around) if context else contextlib.nullcontext():
        x = jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(around, P("x")))
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            found = run(x)
    assert np.asarray(found).tolist() == [3.0, 3.0]
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert 0 < len(compiled) <= 16, compiled


KINDS = [(split, kind) for split in SPECS for kind in (AxisType.Explicit, AxisType.Auto)]


@pytest.mark.parametrize(("split", "kind"), some_slow(KINDS, KINDS[1:3]))
def test_arrays_that_are_split(split: str, kind: AxisType) -> None:
    """Under jit and eagerly; with explicit axes the result is split as query is."""
    q, k, v, sinks = inputs()
    with jax.set_mesh(mesh(kind)):
        where = jax.NamedSharding(jax.sharding.get_mesh(), SPECS[split])
        whole = jax.NamedSharding(jax.sharding.get_mesh(), P())
        placed = [*(jax.device_put(x, where) for x in (q, k, v)), jax.device_put(sinks, whole)]
        eager, out = attend(*placed), jax.jit(attend)(*placed)
        value, grads = gradients(attend)(*placed)
        if kind == AxisType.Explicit:
            for x in (eager, out, *grads[:3]):
                assert x.sharding.is_equivalent_to(where, 4)
    close((eager, out), (attend(q, k, v, sinks),) * 2)
    close((value, grads), gradients(attend)(q, k, v, sinks))


# test_explicit_axes.py splits such arrays with the batch, eagerly and under jit
@pytest.mark.slow
@pytest.mark.parametrize("split", SPECS)
def test_captured_arrays_that_are_split_explicitly(split: str) -> None:
    """The bias is split with the heads, the document ids with the batch; the block mask is built from them."""
    q, k, v, _ = inputs()
    table = jnp.cos(jnp.arange(4 * 20, dtype=jnp.float32)).reshape(4, 20)
    ids = array(np.sort(np.random.default_rng(0).integers(0, 3, (2, 11)), -1), jnp.int32)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, ids: jax.Array) -> jax.Array:
        score_mod = lambda s, b, h, i, j: s + table[h, i - j + 10]
        mask_mod = lambda b, h, i, j: ids[b, i] == ids[b, j]
        return flexjax.flex_attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)

    def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = run(*arrays)
        return (out**2).sum(), out

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    with jax.set_mesh(mesh(AxisType.Explicit)):
        put = lambda x, spec: jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))
        specs = dict(batch=(P(), P("x")), heads=(P("x"), P()))[split]
        placed = [*(put(x, SPECS[split]) for x in (q, k, v)), put(table, specs[0]), put(ids, specs[1])]
        got = step(*placed)
    close(got, step(q, k, v, table, ids))


@pytest.mark.parametrize(
    ("first", "custom"),
    [
        pytest.param(AxisType.Auto, False, id="auto-first-plain", marks=pytest.mark.slow),
        pytest.param(AxisType.Auto, True, id="auto-first-custom-rule", marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, False, id="explicit-first-plain"),
        pytest.param(AxisType.Explicit, True, id="explicit-first-custom-rule", marks=pytest.mark.slow),
    ],
)
def test_a_mod_that_is_traced_on_one_mesh_runs_on_another(first: AxisType, custom: bool) -> None:
    """Derivatives of mods are kept; what JAX writes of a mesh into a trace must not be kept with them."""
    q, k, v, _ = inputs()
    table = jnp.cos(jnp.arange(4 * 20, dtype=jnp.float32)).reshape(4, 20)
    shift = {AxisType.Auto: 8.0, AxisType.Explicit: 9.0}[first]  # a program of its own, which no other test has traced
    bend = jax.nn.relu if custom else lambda x: x

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
        mod = lambda s, b, h, i, j: bend(s + shift) + table[h, i - j + 10]
        return (flexjax.flex_attention(q, k, v, score_mod=mod) ** 2).sum()

    slopes = {}
    for kind in (first, AxisType.Explicit if first == AxisType.Auto else AxisType.Auto):
        with jax.set_mesh(mesh(kind)):
            where = jax.NamedSharding(jax.sharding.get_mesh(), P("x"))
            placed = [*(jax.device_put(x, where) for x in (q, k, v)), table]
            slopes[kind] = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*placed)
    close(slopes[AxisType.Auto], slopes[AxisType.Explicit])
    close(slopes[first], jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, table))


@pytest.mark.slow
def test_the_table_of_problems_on_split_arrays() -> None:
    problem = PROBLEMS["documents"]
    arrays: Arrays = problem.arrays()
    where = jax.NamedSharding(mesh(AxisType.Auto), P("x"))
    placed = {n: jax.device_put(x, where) for n, x in arrays.items()}
    close(jax.jit(jax.grad(problem.loss))(placed), jax.jit(jax.grad(problem.loss))(arrays))
