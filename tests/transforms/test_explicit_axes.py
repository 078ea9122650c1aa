"""Two devices: arrays whose types say how explicit mesh axes split them, and mods that compute with what varies over a mesh.

Each case is compared with one device: out, gradients of everything, and where they lie. What is communicated is read from the
compiled program.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import masks, mods
from flexjax.parallel import gathers
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow

pytestmark = [
    pytest.mark.skipif(
        jax.device_count() < 2, reason="tests/conftest.py makes two devices of a CPU only; this platform has one"
    ),
    pytest.mark.filterwarnings("ignore:Each device receives:flexjax.FallbackWarning"),
]

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
T, S, D = 6, 10, 4
FLOATS = 6
"""Arguments of `attend` that have a gradient: all but the last."""


@dataclasses.dataclass(frozen=True)
class Case:
    """heads: of queries and keys; specs: of query, key (and value), sinks, table, bias and ids."""

    specs: tuple[P, P, P, P, P, P]
    heads: tuple[int, int] = (4, 2)
    axes: tuple[tuple[str, int, AxisType], ...] = (("x", 2, EXPLICIT),)

    def mesh(self) -> jax.sharding.Mesh:
        names, sizes, kinds = zip(*self.axes, strict=True)
        return jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices()[:2])

    def arrays(self) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(0)
        n, m = self.heads
        shapes = ((2, T, n, D), (2, S, m, D), (2, S, m, D), (n,), (n, T + S), (2, S))
        ids = np.sort(rng.integers(0, 3, (2, S)), -1)
        return (*(array(rng.standard_normal(s), jnp.float32) for s in shapes), jnp.asarray(ids, jnp.int32))

    def placed(self, mesh: jax.sharding.Mesh) -> list[jax.Array]:
        query, key, *rest = self.specs
        specs = (query, key, key, *rest)
        return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(self.arrays(), specs, strict=True)]


BATCH, HEADS, TOKENS, WHOLE = P("x"), P(None, None, "x"), P(None, "x"), P()
CASES = {
    "batch": Case((BATCH, BATCH, WHOLE, WHOLE, P("x"), P("x")), heads=(6, 3)),
    "heads": Case((HEADS, HEADS, P("x"), P("x"), WHOLE, WHOLE)),
    "one key head": Case((HEADS, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE), heads=(4, 1)),
    "key heads that do not divide": Case((HEADS, WHOLE, WHOLE, P("x"), WHOLE, WHOLE), heads=(6, 3)),
    "tokens": Case((TOKENS, TOKENS, WHOLE, P(None, "x"), P(None, "x"), WHOLE), heads=(6, 3)),
    "head dim and keys of another split": Case((P(None, None, None, "x"), BATCH, P("x"), WHOLE, WHOLE, P("x"))),
    "beside an auto axis": Case((HEADS, HEADS, WHOLE, P("x"), WHOLE, WHOLE), axes=(("y", 1, AUTO), ("x", 2, EXPLICIT))),
    "two axes": Case(
        (P("y", None, "x"), P("y", None, "x"), WHOLE, P("x"), P("y"), P("y")),
        axes=(("y", 1, EXPLICIT), ("x", 2, EXPLICIT)),
    ),
}


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, table: jax.Array, bias: jax.Array, ids: jax.Array
) -> jax.Array:
    """Mods that take b and h as numbers, index with them, and read arrays in other ways too."""

    def score_mod(s: jax.Array, b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        s = s + table[h, i - j + S - 1] * jnp.cos(bias[b, j])
        return s + 0.1 * (h + 3 * b) * jnp.sin(s) + table.sum(1)[h] * bias[1 - b, i]

    mask_mod = lambda b, h, i, j: (ids[b, i] == ids[b, j]) | (h + b == j)
    return flexjax.flex_attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod, sinks=sinks)


def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = attend(*arrays)
    return (out * jnp.cos(jnp.arange(D))).sum() + (out**2).sum(), out


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def collectives(function: Callable, *arrays: jax.Array) -> dict[str, int]:
    """How many of each kind the compiled program has."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= .*? ({kinds})(?:-start)?\(", text)
    return {kind: found.count(kind) for kind in set(found)}


step = quick_jit(jax.grad(loss, argnums=tuple(range(FLOATS)), has_aux=True))


@functools.cache
def on_one_device(heads: tuple[int, int]) -> Any:
    return step(*Case((WHOLE,) * 6, heads).arrays())


@pytest.mark.parametrize("name", some_slow(CASES, ("batch",)))
def test_gradients_of_everything(name: str) -> None:
    """Each lies where its primal does, and the result where query does."""
    case = CASES[name]
    mesh = case.mesh()
    with jax.set_mesh(mesh):
        placed = case.placed(mesh)
        grads, out = step(*placed)
    close((grads, out), on_one_device(case.heads))
    tokens = P(*case.specs[0][:3]) if name.startswith("head dim") else case.specs[0]  # the head dim of out is another
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, tokens), out.ndim)
    for grad, primal in zip(grads, placed[:FLOATS], strict=True):
        assert grad.sharding.is_equivalent_to(primal.sharding, grad.ndim)


@pytest.mark.parametrize("way", some_slow(["on no mesh", "auto_axes", "auto_axes, beside an auto axis"], ["auto_axes"]))
def test_xla_splits_the_work_where_explicit_axes_surround_it(way: str) -> None:
    """Under jax.set_mesh, arrays that lie on no mesh, and functions of jax.sharding.auto_axes: the partitioner decides."""
    case = CASES["beside an auto axis" if "beside" in way else "batch"]
    mesh = case.mesh()
    with jax.set_mesh(mesh):
        given = case.arrays() if way == "on no mesh" else case.placed(mesh)
        split = jax.sharding.auto_axes(loss, out_sharding=(P(), case.specs[0]))
        attention = loss if way == "on no mesh" else split
        own = quick_jit(jax.grad(attention, argnums=tuple(range(FLOATS)), has_aux=True))
        close(own(*given), on_one_device(case.heads))


def _small(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
    mod = lambda s, b, h, i, j: s + table[h, i - j + S - 1] + 0.1 * (h + b) * s * s
    return flexjax.flex_attention(q, k, v, score_mod=mod)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heads", "tokens"])
def test_forward_mode_and_second_order(name: str) -> None:
    case = CASES[name]

    def both(*arrays: jax.Array) -> Any:
        value = lambda *a: (_small(*a) ** 2).sum()
        weighed = lambda *a: sum((g**2).sum() for g in jax.grad(value, argnums=(0, 3))(*a))
        return jax.jvp(value, arrays, tuple(map(jnp.cos, arrays))), jax.grad(weighed, argnums=(0, 1, 3))(*arrays)

    mesh = case.mesh()
    pick = lambda arrays: [arrays[i] for i in (0, 1, 2, 4)]
    with jax.set_mesh(mesh):
        got = quick_jit(both)(*pick(case.placed(mesh)))
    close(got, quick_jit(both)(*pick(case.arrays())), 2e-4)


@pytest.mark.slow
def test_eagerly_and_mapped() -> None:
    case = CASES["batch"]
    mesh = case.mesh()
    q, *rest = case.arrays()
    with jax.set_mesh(mesh):
        placed_q, *placed = case.placed(mesh)
        out = attend(placed_q, *placed)
        mapped = jax.vmap(lambda q: attend(q, *placed))(jnp.stack([placed_q, -placed_q]))
    right = quick_jit(attend)
    close(out, right(q, *rest))
    close(mapped, jnp.stack([right(q, *rest), right(-q, *rest)]))


def test_batch_and_heads_are_split_without_a_collective() -> None:
    """Forward and backward, with mods that read b and h: only what devices share is summed."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
        mod = lambda s, b, h, i, j: s + table[h, i - j + S - 1] + 0.1 * b * j
        return flexjax.flex_attention(q, k, v, score_mod=mod, mask_mod=masks.causal)

    slopes = lambda which: jax.grad(lambda *a: (run(*a) ** 2).sum(), argnums=which)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        for spec, of_table in ((BATCH, WHOLE), (HEADS, P("x"))):
            arrays = CASES["heads"].arrays()
            put = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
            q, k, v = (put(x, spec) for x in arrays[:3])
            table = put(arrays[4], of_table)
            assert collectives(run, q, k, v, table) == {}
            assert collectives(slopes((0, 1, 2)), q, k, v, table) == {}
            shared = {"all-reduce": 1} if spec == BATCH else {}
            assert collectives(slopes((0, 1, 2, 3)), q, k, v, table) == shared


def test_tokens_that_are_split_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of compiled programs sees what there is, and the bytes are said."""
    monkeypatch.setattr(gathers, "_said", set())
    case = CASES["tokens"]
    mesh = case.mesh()
    said = (
        "Each device receives 1.54 kB before the forward pass of a call: query 576 B (split over tokens), key 480 B (split over "
        "tokens), value 480 B (split over tokens). Attention keeps a split of the batch and of the heads, and gathers other "
        "splits. Split the batch or the heads instead, or name the axis that splits the tokens in context=flexjax.ContextParallel(axis). in flex_attention(query=float32[2, 6, 6, 4], key=float32[2, 10, 3, 4], "
        "value=float32[2, 10, 3, 4])"
    )
    with jax.set_mesh(mesh):
        q, k, v, *_ = case.placed(mesh)
        with pytest.warns(flexjax.FallbackWarning, match=f"^{re.escape(said)}$"):
            found = collectives(flexjax.flex_attention, q, k, v)
        with pytest.warns(flexjax.FallbackWarning, match="split over head dim"):  # the same call, split otherwise
            collectives(flexjax.flex_attention, *(jax.device_put(x, P(None, None, None, "x")) for x in (q, k, v)))
    assert found == {"all-gather": 3}


def test_dropout_and_extra_features() -> None:
    """Dropout sees the places of the whole call; extra features have heads of their own."""
    q, k, v, *_ = CASES["heads"].arrays()
    extra = jnp.sin(jnp.arange(2 * T * 4 * 3, dtype=jnp.float32)).reshape(2, T, 4, 3), jnp.cos(k[:, :, :1, :3])

    def run(q: jax.Array, k: jax.Array, v: jax.Array, qx: jax.Array, kx: jax.Array) -> jax.Array:
        swap = lambda x: jnp.swapaxes(x, 1, 2)
        return flexjax.flex_attention(
            *map(swap, (q, k, v)), layout="BNTH", query_extra=swap(qx), key_extra=swap(kx), dropout=flexjax.Dropout(0.4, jax.random.key(3)), mask_mod=masks.causal,
        )  # fmt: skip

    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, HEADS)) for x in (q, k, v, extra[0])]
        out = quick_jit(run)(*placed, extra[1])
    close(out, run(q, k, v, *extra))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x")), 4)


# ------------------------------------------------------------------- mods inside shard_map


def _slopes_from(first: jax.Array, table: jax.Array) -> dict[str, Callable]:
    alibi = mods.alibi(4)
    return {"score_mod": lambda s, b, h, i, j: alibi(s, b, h + first, i, j) + table[h]}


def _masked_from(first: jax.Array, table: jax.Array) -> dict[str, Callable]:
    return {
        "mask_mod": lambda b, h, i, j: i + first * 3 >= j + first * 2 - h,
        "score_mod": lambda s, b, h, i, j: s + jnp.exp(table * 0.5 + first)[h] * j,
    }


def _known_and_nested(first: jax.Array, table: jax.Array) -> dict[str, Callable]:
    """A known array, functions with a rule of their own, and a loop that depends on no index."""
    known = jnp.arange(1.0, 5.0)

    def score_mod(s: jax.Array, b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        steps = jax.lax.scan(lambda c, x: (c + x, c * x), first * 1.0, known)[1]
        bent = jax.nn.relu(s * known[h + first] + first)
        return bent + jnp.where(first > 0, jnp.cos(known), known)[h] + 0.1 * steps[h + first] * table[h]

    return {"score_mod": score_mod}


MADE = [(make, check) for make in (_slopes_from, _masked_from, _known_and_nested) for check in (True, False)]


@pytest.mark.parametrize(("make", "check"), some_slow(MADE, [MADE[0], MADE[-1]]))
def test_mods_that_compute_with_the_place_of_a_device(make: Callable, check: bool) -> None:
    """Against the same calls one after the other, on the parts of one device."""
    arrays = CASES["heads"].arrays()
    q, k, v, table = *arrays[:3], arrays[3]

    def part(first: jax.Array, *arrays: jax.Array) -> jax.Array:
        return flexjax.flex_attention(*arrays[:3], **make(first, arrays[3]))

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AUTO,), devices=jax.devices()[:2])
    specs = (HEADS, HEADS, HEADS, P("x"))
    split = jax.shard_map(
        lambda *a: part(2 * jax.lax.axis_index("x"), *a), mesh=mesh, in_specs=specs, out_specs=HEADS, check_vma=check
    )

    def parts(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
        cut = lambda x, n: jnp.split(x, 2, axis=n)
        ends = zip(cut(q, 2), cut(k, 2), cut(v, 2), cut(table, 0), strict=True)
        return jnp.concatenate([part(jnp.int32(2 * n), *a) for n, a in enumerate(ends)], 2)

    slopes = lambda run: quick_jit(
        jax.value_and_grad(lambda *a: (run(*a) * jnp.cos(jnp.arange(D))).sum(), argnums=(0, 1, 2, 3))
    )
    close(slopes(split)(q, k, v, table), slopes(parts)(q, k, v, table))
