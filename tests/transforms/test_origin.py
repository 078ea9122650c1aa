"""Parts of a larger problem: a call with an origin gives what the whole call gives there, with all gradients."""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import Implementation, Origin, masks, mods
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.ir import program as ir
from flexjax.ir.origin import table_of_runs
from tests import compare, oracle
from tests.arrays import array
from tests.cases import CASES, Case
from tests.cases.small import by_definition, quick_jit, to_mask
from tests.marks import some_slow

EVERYDAY = ("packed",)
NAMES = (*EVERYDAY, "by_batch_and_head", "relative_bias", "length_300", "natten", "distance_bias", "clipped_relative_bias", "full_pair_bias", "negative_index",
         "index_out_of_range", "poison_log", "modular_table", "coordinates", "scrambled_documents")  # fmt: skip
COMPILED = "/jax/core/compile/backend_compile_duration"


# ------------------------------------------------------------------- conformance cases, part by part


def in_parts(case: Case, implementation: Implementation) -> dict[str, Any]:
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
        assert aux.lse is not None
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
    return array(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


IDS = array(np.sort(np.random.default_rng(3).integers(0, 5, (B, S)), -1), jnp.int32)


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
    return quick_jit(jax.value_and_grad(function, tuple(range(7)), has_aux=True))


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


def permuted(
    query_order: np.ndarray, key_order: np.ndarray, implementation: Implementation, known: bool, blocks: bool
) -> Any:
    """Values and gradients of the problem, with blocks of its queries and keys in these orders (one for each batch entry)."""
    rows, columns = (
        (o[..., None] * BLOCK + np.arange(BLOCK)).reshape(*o.shape[:-1], -1) for o in (query_order, key_order)
    )
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
            dropout=flexjax.Dropout(0.25, jax.random.key(1)), implementation=implementation, **chosen,
        )  # fmt: skip
        out = jnp.zeros_like(out).at[entries, rows].set(out)
        return loss(out), out

    return gradients(attend)(*arrays())


def whole(*a: jax.Array) -> Any:
    q, k, v, *captured = a
    out = flexjax.flex_attention(
        q, k, v, score_mod=score_of(*captured), mask_mod=mask, dropout=flexjax.Dropout(0.25, jax.random.key(1)),
        implementation="reference",
    )  # fmt: skip
    return loss(out), out


ORDERS = {
    "shared": (np.array([2, 0, 3, 1]), np.array([5, 1, 0, 4, 2, 3])),
    "by entry": (np.array([[2, 0, 3, 1], [3, 2, 1, 0]]), np.array([[0, 1, 2, 3, 4, 5], [5, 1, 0, 4, 2, 3]])),
}


# context/test_context.py has calls whose sequence lies in runs, and tests/backends/mosaic_tpu/test_origin.py one of the kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "implementation", "known"), list(itertools.product(ORDERS, ("xla", "reference"), (True, False)))
)
def test_runs_in_any_order(order: str, implementation: Implementation, known: bool) -> None:
    """Every gradient, dropout's mask and the block lists; a difference q - kv occurs in several runs."""
    assert_same(permuted(*ORDERS[order], implementation, known, blocks=True), gradients(whole)(*arrays()))


# ------------------------------------------------------------------- one run


def part_of(q0: Any, k0: Any, length: int, *a: jax.Array, h0: Any = 0, b0: Any = 0, **options: Any) -> jax.Array:
    """The output of the problem's queries from q0 on and keys from k0 on."""
    q, k, v, *captured = a
    cut = lambda x, start, n: jax.lax.dynamic_slice_in_dim(x, start, n, 1)
    return flexjax.flex_attention(
        cut(q, q0, length), cut(k, k0, S - 32), cut(v, k0, S - 32), score_mod=score_of(*captured), mask_mod=mask,
        origin=Origin(batch=b0, head=h0, query=q0, key=k0), implementation="xla", **options,
    )  # fmt: skip


def without_origin(q0: int, k0: int, length: int, *a: jax.Array) -> jax.Array:
    """The same by mods that add the numbers themselves."""
    q, k, v, *captured = a
    inner = score_of(*captured)
    return flexjax.flex_attention(
        q[:, q0 : q0 + length], k[:, k0 : k0 + S - 32], v[:, k0 : k0 + S - 32],
        score_mod=lambda s, b, h, i, j: inner(s, b, h, i + q0, j + k0),
        mask_mod=lambda b, h, i, j: mask(b, h, i + q0, j + k0), implementation="reference",
    )  # fmt: skip


@pytest.mark.slow
def test_vmap_over_origins() -> None:
    """Positions then differ between the batch entries of the folded call; gradients of what all copies share are sums."""
    starts = (3, 32)

    def total(function: Callable, *a: jax.Array) -> Any:
        out = function(*a)
        return loss(out), out

    mapped = lambda *a: jax.vmap(lambda q0: part_of(q0, jnp.int32(7), 32, *a))(jnp.asarray(starts))
    one_by_one = lambda *a: jnp.stack([without_origin(q0, 7, 32, *a) for q0 in starts])
    got, want = (gradients(lambda *a, f=f: total(f, *a))(*arrays()) for f in (mapped, one_by_one))
    assert_same(got, want)


def test_forward_mode() -> None:
    x, table = normal(1, 16, 1, D), normal(64)

    def attend(x: jax.Array, table: jax.Array, at: int, origin: Origin | None) -> jax.Array:
        score_mod = lambda s, b, h, i, j: s + table[i - j + at + 15]
        return flexjax.flex_attention(x, x, x, score_mod=score_mod, origin=origin, implementation="xla")

    tangents = jnp.cos(x), jnp.cos(table)
    got = jax.jvp(lambda x, t: attend(x, t, 0, Origin(query=jnp.int32(9))), (x, table), tangents)
    assert_same(got, jax.jvp(lambda x, t: attend(x, t, 9, None), (x, table), tangents))


@pytest.mark.skipif(
    jax.device_count() < 2, reason="tests/conftest.py makes two devices of a CPU only; this platform has one"
)
@pytest.mark.parametrize("kind", some_slow([AxisType.Auto, AxisType.Explicit], [AxisType.Explicit]))
def test_heads_and_queries_in_shard_map(kind: AxisType) -> None:
    """Heads split over one axis; every device computes the second half of the queries of its heads. ALiBi's slopes and the table
    are whole, and their gradients are summed once."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    q, k, v = (normal(1, 32, 4, D, seed=n) for n in range(3))
    table = normal(4, 63, seed=3)
    alibi = mods.alibi(4)

    def score_mod(table: jax.Array) -> Callable:
        return lambda s, b, h, i, j: alibi(s, b, h, i, j) + table[h, i - j + 31]

    def local(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
        me = jax.lax.axis_index("x")
        return flexjax.flex_attention(
            q[:, 16:], k, v, score_mod=score_mod(table), mask_mod=masks.causal,
            origin=Origin(head=me * 2, query=16, whole=(1, 4, 32, 32)),
        )  # fmt: skip

    heads = P(None, None, "x")

    def of(run: Callable) -> Any:
        return jax.jit(jax.value_and_grad(lambda *a: loss(run(*a)), (0, 1, 2, 3)))

    split = jax.shard_map(local, mesh=mesh, in_specs=(heads, heads, heads, P()), out_specs=heads)
    whole = lambda q, k, v, t: flexjax.flex_attention(q, k, v, score_mod=score_mod(t), mask_mod=masks.causal)[:, 16:]
    placed = [
        jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in ((q, heads), (k, heads), (v, heads), (table, P()))
    ]
    assert_same(of(split)(*placed), of(whole)(q, k, v, table))


# ------------------------------------------------------------------- what is compiled


def test_new_numbers_neither_trace_nor_compile() -> None:
    compiled: list[str] = []
    listen = lambda event, duration_secs, **_: compiled.append(event) if event == COMPILED else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    traced = 0

    @jax.jit
    def step(x: jax.Array, q0: jax.Array, k0: jax.Array, head: jax.Array) -> jax.Array:
        nonlocal traced
        traced += 1
        origin = Origin(query=q0, key=k0, head=head)
        made = flexjax.create_block_mask(masks.causal, None, None, 16, 16, block_size=8, origin=origin)
        return flexjax.flex_attention(x, x, x, score_mod=mods.alibi(8), block_mask=made)

    x = normal(1, 16, 2, D)
    try:
        eager = lambda n: flexjax.flex_attention(x, x, x, mask_mod=masks.causal, origin=Origin(query=n, key=2 * n))
        for run in (lambda n: step(x, jnp.int32(n), jnp.int32(n), jnp.int32(2)), eager):
            jax.block_until_ready(run(5))
            jax.block_until_ready(run(8))
            before = len(compiled)
            results = [run(n) for n in (6, 300, 11)]
            assert len(compiled) == before
            assert not np.array_equal(results[0], results[1]) or run is not eager
        assert traced == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def load_classes(origin: Any, lengths: tuple[int, int]) -> list[str]:
    captured = arrays()[3:]
    x, y = normal(B, lengths[0], N, D), normal(B, lengths[1], M, D)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last batch entry and head lie past the captured arrays
        call = prepare(Arguments(x, y, y, score_mod=score_of(*captured), origin=origin))
    assert call.plan.score is not None
    found = [str(ir.classify_load(load)) for load in call.plan.score.loads]
    return [f for f in found if f != ir.SCALAR]  # a scalar: where batch entries or heads begin


def test_load_classes_survive() -> None:
    """With the lengths of the whole problem the load classes are those of the whole call; without, the same kinds as gathers."""
    at = (jnp.int32(3), jnp.int32(5))
    known = Origin(1, 1, *at, whole=(B + 1, N + 1, T, S))
    assert load_classes(None, (T, S)) == ["row slice", "diagonal slice", "column slice", "tile slice"]
    assert load_classes(known, (16, 24)) == ["row slice", "diagonal slice", "column slice", "tile slice"]
    assert load_classes(Origin(1, 1, *at), (16, 24)) == [
        "row gather",
        "diagonal gather",
        "column gather",
        "tile gather",
    ]
    runs = table_of_runs(array([[3, 40]]), array([[5, 9]]), query_run=8, key_run=12, whole=(B, N, T, S))
    assert load_classes(runs, (16, 24)) == ["row slice", "diagonal slice", "column slice", "tile slice"]


def test_positions_past_the_integers_of_float32() -> None:
    """Position 2^24 + 1 is no float32. A mask by parity and a score that counts positions see every one."""
    base = (1 << 24) + 1
    q, k, v = (normal(1, 16, 1, D, seed=n) for n in range(3))
    mask_mod = lambda b, h, i, j: ((i + j) % 2 == 0) & (i >= j)
    score_mod = lambda s, b, h, i, j: s - 0.25 * (i - j).astype(jnp.float32) + 0.5 * (i % 3).astype(jnp.float32)
    local = lambda s, b, h, i, j: score_mod(s, b, h, i + base, j + base - 4)
    for implementation in ("xla", "reference"):
        origin = Origin(query=base, key=base - 4)
        attend = functools.partial(flexjax.flex_attention, score_mod=score_mod, mask_mod=mask_mod, origin=origin)
        got = quick_jit(functools.partial(attend, implementation=implementation))(q, k, v)
        want = by_definition(
            q, k, v, score_mod=local, mask_mod=lambda b, h, i, j: mask_mod(b, h, i + base, j + base - 4)
        )
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------- block masks


def test_a_block_mask_skips_what_its_part_hides() -> None:
    """The lists count blocks of the call; the mask_mod reads positions, and the block mask as a function counts from 0."""
    whole = flexjax.create_block_mask(masks.causal, None, None, 64, 64, block_size=16)
    part = flexjax.create_block_mask(masks.causal, None, None, 16, 64, block_size=16, origin=Origin(query=32))
    assert part.kv_num_blocks.tolist() == [[[1]]]
    assert part.full_kv_num_blocks.tolist() == [[[2]]]
    np.testing.assert_array_equal(to_mask(part), np.asarray(to_mask(whole))[:, :, 32:48])
    assert bool(part.mask_mod(*map(jnp.int32, (0, 0, 3, 35))))
    assert not bool(part.mask_mod(*map(jnp.int32, (0, 0, 3, 36))))
    traced = jax.jit(
        lambda n: flexjax.create_block_mask(masks.causal, None, None, 16, 64, block_size=16, origin=Origin(query=n))
    )
    assert traced(32).full_kv_num_blocks.tolist() == [[[2]]]
    assert traced(16).full_kv_num_blocks.tolist() == [[[1]]]


def test_the_origin_of_a_block_mask_is_that_of_the_call() -> None:
    q, k, v = normal(1, 16, 2, D), normal(1, 64, 2, D, seed=1), normal(1, 64, 2, D, seed=2)
    made = flexjax.create_block_mask(masks.causal, None, None, 16, 64, block_size=16, origin=Origin(query=32))
    alone = flexjax.flex_attention(q, k, v, score_mod=mods.alibi(2), block_mask=made)
    given = flexjax.flex_attention(q, k, v, score_mod=mods.alibi(2), mask_mod=masks.causal, origin=Origin(query=32))
    np.testing.assert_allclose(alone, given, rtol=1e-6, atol=1e-6)
    weights = quick_jit(lambda q, k: flexjax.attention_weights(q, k, score_mod=mods.alibi(2), block_mask=made))(q, k)
    np.testing.assert_allclose(np.einsum("bhqk,bkhd->bqhd", weights, v), given, rtol=1e-5, atol=1e-5)
    text = flexjax.explain(q, k, v, mask_mod=lambda b, h, i, j: i >= j + h, origin=Origin(head=1, query=32))
    assert text.splitlines()[0].endswith("origin of queries in 1 run of 16 and keys in 1 run of 64")
    assert isinstance(jax.tree.leaves(made)[-1], jax.Array)


# ------------------------------------------------------------------- bad input


def causal_part(**fields: Any) -> jax.Array:
    x = normal(2, 16, 2, D)
    return flexjax.flex_attention(x, x, x, mask_mod=masks.causal, origin=Origin(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"query": 1.5},
            "`origin.query` is 1.5; expected an int or an int32 scalar, or int32[2], one for each batch entry. "
            "Cast it, for example with jnp.int32().",
        ),
        (
            {"key": np.zeros(3, np.int32)},
            "`origin.key` is int32[3]; expected an int or an int32 scalar, or int32[2], one for each batch entry. "
            "Cast it, for example with jnp.int32().",
        ),
        (
            {"head": True},
            "`origin.head` is True; expected an int or an int32 scalar. Cast it, for example with jnp.int32().",
        ),
        (
            {"query": -1},
            "`origin.query` is -1; expected 0 to 536870896. The arrays of the call must lie in the whole problem.",
        ),
        (
            {"query": 20, "whole": (2, 2, 32, 16)},
            "`origin.query` is 20; expected 0 to 16. The arrays of the call must lie in the whole problem.",
        ),
        (
            {"key": 1, "whole": (2, 2, 32, 8)},
            "`origin.whole` is 8 for the length of key; expected at least 16, the length in this call. "
            "Pass the lengths of the whole problem.",
        ),
        (
            {"whole": (2, 2, 16, 8)},
            "`origin.whole` is 8 for the length of key; expected at least 16, the length in this call. "
            "Pass the lengths of the whole problem.",
        ),
        (
            {"key": 1, "whole": 32},
            "`origin.whole` is 32; expected (batch, heads, q_len, kv_len) of the whole problem, positive ints up to 2^29 or None. "
            "None where a number is not known.",
        ),
    ],
)
def test_bad_numbers(fields: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is compared
        causal_part(**fields)
    assert str(caught.value) == message


def test_bad_pairs() -> None:
    x = normal(1, 16, 2, D)
    plain = flexjax.create_block_mask(masks.causal, None, None, 16, 16)
    placed = flexjax.create_block_mask(masks.causal, None, None, 16, 16, origin=Origin(query=4))
    for made, origin, message in (
        (plain, Origin(query=4), "`block_mask` is made without an origin beside `origin`; expected one made with the same origin. "
         "Pass origin= to create_block_mask too."),
        (placed, Origin(query=5), "`origin` is another than that of block_mask; expected the same, or None. "
         "None takes that of the block mask."),
        (None, 5, "`origin` is an int; expected a flexjax.Origin. Pass flexjax.Origin(query=...), for example."),
    ):  # fmt: skip
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            flexjax.flex_attention(x, x, x, block_mask=made, origin=origin)  # pyright: ignore[reportArgumentType]
        assert str(caught.value) == message
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        placed[0]
    assert str(caught.value) == (
        "`block_mask` is made with an origin; expected one without to select from. "
        "Make the part with create_block_mask and an origin of its own."
    )
