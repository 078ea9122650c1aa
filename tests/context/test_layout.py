"""`context_layout`: who owns which tokens of a split sequence. Everything is compared with counts over the dense mask."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flexjax
from flexjax import context_layout, masks
from tests.arrays import array

MASKS: dict[str, Callable] = {
    "causal": masks.causal,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 11),
    "prefix": lambda b, h, i, j: (i >= j) | (j < 13),
    "by head and batch": lambda b, h, i, j: ((h == b) & (i >= j)) | ((h != b) & (i - j == 3)),
    "nothing": lambda b, h, i, j: (i >= j) & (i > 30) & (j > 1000),
}
BATCH, HEADS = 2, 3
LONG = settings().max_examples > 100


def blocks_of(mask: Callable, q_len: int, kv_len: int, size: tuple[int, int]) -> np.ndarray:
    """bool [B, N, query blocks, key blocks], from the dense mask."""
    counts = (BATCH, HEADS, -(-q_len // size[0]), -(-kv_len // size[1]))
    on = np.zeros((BATCH, HEADS, counts[2] * size[0], counts[3] * size[1]), bool)
    at = np.meshgrid(*map(np.arange, (BATCH, HEADS, q_len, kv_len)), indexing="ij", sparse=True)
    on[:, :, :q_len, :kv_len] = np.broadcast_to(mask(*at), (BATCH, HEADS, q_len, kv_len))
    return on.reshape(BATCH, HEADS, counts[2], size[0], counts[3], size[1]).any((3, 5))


def check(layout: flexjax.ContextLayout, visited: np.ndarray) -> None:
    """Loads, received blocks and the exchange of a layout, against the visited blocks of its mask."""
    needed, work = visited.any((0, 1)), visited.mean((0, 1)).sum(1)
    query_blocks, key_blocks = np.asarray(layout.query_blocks), np.asarray(layout.key_blocks)
    for blocks, n in ((query_blocks, len(needed)), (key_blocks, needed.shape[1])):
        assert sorted(blocks.ravel()) == list(range(blocks.size))
        assert blocks.size >= n
    assert layout.rounds is not None
    for device in range(layout.devices):
        own = [i for i in query_blocks[device] if i < len(needed)]
        wants = set(np.flatnonzero(needed[own].any(0))) if own else set()
        has = set(key_blocks[device])
        assert layout.loads[device] == pytest.approx(work[own].sum())
        assert layout.blocks_received[device] == len(wants - has)
        for shift, send, received in zip(layout.rounds.shifts, layout.rounds.send, layout.rounds.received, strict=True):
            sender = (device - shift) % layout.devices
            count = int((np.asarray(received)[device] >= 0).sum())
            sent = key_blocks[sender][np.asarray(send)[sender, :count]]
            assert list(sent) == list(np.asarray(received)[device, :count])
            has |= set(sent)
        assert wants <= has


@settings(max_examples=1000 if LONG else 8)
@given(
    name=st.sampled_from(sorted(MASKS)), devices=st.integers(1, 6), size=st.integers(1, 9), q_len=st.integers(1, 70),
    kv_len=st.none() | st.integers(1, 70), balance=st.sampled_from(["auto", "contiguous", "zigzag"]),
)  # fmt: skip
def test_layouts(name: str, devices: int, size: int, q_len: int, kv_len: int | None, balance: Any) -> None:
    mask = MASKS[name]
    layout = context_layout(
        mask, q_len, kv_len, devices=devices, batch=BATCH, heads=HEADS, block_size=size, balance=balance
    )
    keys = kv_len or q_len
    assert layout.block_size == (min(size, -(-q_len // devices)), min(size, -(-keys // devices)))
    check(layout, blocks_of(mask, q_len, keys, layout.block_size))
    for side, length in (("query", q_len), ("key", keys)):
        x = np.arange(2 * length).reshape(2, length)
        permuted = layout.shard(x, side=side)  # type: ignore[arg-type]
        positions = np.asarray(layout.positions if side == "query" else layout.key_positions)
        assert permuted.shape == (2, len(positions))
        np.testing.assert_array_equal(permuted, np.where(positions < 0, 0, x[:, np.maximum(positions, 0)]))
        np.testing.assert_array_equal(layout.unshard(permuted, side=side), x)  # type: ignore[arg-type]
        moved = array(x.T)
        np.testing.assert_array_equal(layout.unshard(layout.shard(moved, 0, side), -2, side), moved)  # type: ignore[arg-type]


def documents(seed: int, length: int) -> Callable:
    """Causal documents of lengths between some and half of the sequence."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(8.5, 1.2, 4000).astype(int) + 16, length // 2)
    ends = np.cumsum(lengths)
    ids = np.searchsorted(ends[ends < length], np.arange(length), side="right")
    return flexjax.and_masks(masks.causal, masks.document(ids))


@pytest.mark.parametrize(
    ("mask", "heaviest", "received"),
    [
        (masks.causal, 1.001, 0.751),
        (lambda b, h, i, j: (i >= j) & (i - j < 4096), 1.02, 0.032),
        (documents(0, 131072), 1.02, 0.12),
        (lambda b, h, i, j: (i >= j) | (j < 32768), 1.03, 0.85),
    ],
    ids=["causal", "window", "documents", "prefix"],
)
def test_work_is_even_and_little_is_received(mask: Callable, heaviest: float, received: float) -> None:
    """131072 tokens on four devices: heaviest over mean load, and blocks received as a share of all others'."""
    layout = context_layout(mask, 131072, devices=4)
    loads, blocks = np.asarray(layout.loads), np.asarray(layout.blocks_received)
    assert loads.max() / loads.mean() <= heaviest
    assert blocks.mean() / (1024 * 3 / 4) <= received


def test_a_window_on_many_devices_asks_its_neighbour() -> None:
    layout = context_layout(lambda b, h, i, j: (i >= j) & (i - j < 4096), 131072, devices=64, block_size=512)
    assert max(layout.blocks_received) == 8
    assert layout.rounds is not None
    assert layout.rounds.width == 8


@pytest.mark.slow
def test_packed_batches_have_few_shapes() -> None:
    shapes = set()
    for seed in range(40):
        layout = context_layout(documents(seed, 32768), 32768, devices=4, block_size=256)
        shapes.add((jax.tree.structure(layout), tuple(x.shape for x in jax.tree.leaves(layout))))
    assert len(shapes) <= 4


@pytest.mark.skipif(
    jax.device_count() < 2, reason="tests/conftest.py makes two devices of a CPU only; this platform has one"
)
def test_tokens_that_explicit_mesh_axes_split() -> None:
    layout = context_layout(None, 13, devices=2, block_size=4)
    x = np.random.default_rng(0).standard_normal((2, 13, 3)).astype(np.float32)
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        permuted = jax.device_put(layout.shard(x), NamedSharding(mesh, PartitionSpec(None, "sp")))
        back = jax.jit(lambda x: layout.unshard(x))(permuted)
        assert jax.typeof(back).sharding.spec == PartitionSpec(None, None, None)
        np.testing.assert_array_equal(back, x)
        np.testing.assert_array_equal(layout.shard(layout.unshard(permuted)), permuted)


def test_a_layout_is_a_value_and_an_argument_of_jit() -> None:
    ids = [np.sort(np.random.default_rng(seed).integers(0, 5, 60)) for seed in (0, 0, 1)]
    same, equal, other = (context_layout(masks.document(x), 60, devices=3, block_size=4) for x in ids)
    assert same == equal
    assert hash(same) == hash(equal)
    assert same != other
    x = jnp.arange(60.0)[None]
    back = jax.jit(lambda layout, x: layout.unshard(layout.shard(x)))
    for layout in (same, other):
        np.testing.assert_array_equal(back(layout, x), x)
    positions = jax.jit(lambda layout: (layout.positions, layout.key_positions))(other)
    for got, want in zip(positions, (other.positions, other.key_positions), strict=True):
        np.testing.assert_array_equal(got, want)
    static = jax.jit(lambda layout, x: layout.shard(x), static_argnums=0)
    np.testing.assert_array_equal(static(same, x), same.shard(x))


def test_pictures() -> None:
    layout = context_layout(masks.causal, 40, devices=2, block_size=4, balance="zigzag")
    assert repr(layout) == "ContextLayout(q_len=40, devices=2, block_size=(4, 4), balance='zigzag')"
    assert str(layout) == (
        "ContextLayout(q_len=40, devices=2, block_size=(4, 4), balance='zigzag')\n"
        " queries 0001111100\n"
        "       0 ████████████████████     work 0.91   receives 5 key blocks\n"
        "       1 ████████████████████████ work 1.09   receives 3 key blocks\n"
        "heaviest over mean work 1.091, received 0.800 of an all-gather"
    )
    across = context_layout(masks.full, 8, 16, devices=2, block_size=4)
    assert str(across) == (
        "ContextLayout(q_len=8, kv_len=16, devices=2, block_size=(4, 4), balance='auto')\n"
        " queries 01\n"
        "    keys 0011\n"
        "       0 ████████████████████████ work 1.00   receives 2 key blocks\n"
        "       1 ████████████████████████ work 1.00   receives 2 key blocks\n"
        "heaviest over mean work 1.000, received 1.000 of an all-gather"
    )


BAD: dict[str, tuple[tuple, dict[str, Any], str]] = {
    "q_len": ((masks.causal, 0), {}, "`q_len` is 0; expected a positive int. Pass a static int."),
    "kv_len": ((masks.causal, 8, 2.0), {}, "`kv_len` is 2.0; expected a positive int. Pass a static int."),
    "devices": ((masks.causal, 8), {"devices": True}, "`devices` is True; expected a positive int. Pass a static int."),
    "block_size": (
        (masks.causal, 8), {"block_size": (4, 0)},
        "`block_size` is (4, 0); expected a positive int or a pair of them. 128 is the default.",
    ),
    "balance": (
        (masks.causal, 8), {"balance": "even"},
        "`balance` is 'even'; expected 'auto', 'contiguous' or 'zigzag'. 'auto' looks at the mask.",
    ),
    "mask_mod": ((3, 8), {}, "`mask_mod` is 3; expected a function (b, h, q_idx, kv_idx) -> bool, or None. See MaskMod."),
    "batch": (
        (masks.causal, 8), {"batch": 0}, "`batch` is 0; expected a positive int or None. None where mask_mod does not read it.",
    ),
    "heads": (
        (lambda b, h, i, j: i > h, 8), {},
        "`heads` is None but `mask_mod` depends on `h`; expected the number of query heads. The layout counts the blocks of each.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    arguments, keywords, text = BAD[name]
    with pytest.raises(ValueError, match="expected") as error:
        context_layout(*arguments, **({"devices": 2} | keywords))
    assert str(error.value) == text


def test_arrays_that_do_not_fit() -> None:
    layout = context_layout(masks.causal, 12, 20, devices=2, block_size=4)
    for act, shape, text in (
        (layout.shard, (2, 20), "`x.shape[1]` is 20; expected 12, the layout's q_len. Pass the axis of the tokens, and side='key' for an array over the other side."),
        (layout.unshard, (2, 12), "`x.shape[1]` is 12; expected 16, the layout's padded('query'). Pass the axis of the tokens, and side='key' for an array over the other side."),
        (layout.shard, (12,), "`axis` is 1; expected an axis of x, which has 1. Name the axis of the tokens."),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected") as error:
            act(np.zeros(shape))
        assert str(error.value) == text
    with pytest.raises(ValueError, match="side") as error:
        layout.shard(np.zeros((2, 12)), side="value")  # type: ignore[arg-type]
    assert str(error.value) == "`side` is 'value'; expected 'query' or 'key'. Keys and values are on the side 'key'."


def test_traced_masks() -> None:
    @jax.jit
    def make(ids: jax.Array) -> jax.Array:
        mask = masks.document(ids)
        with pytest.raises(ValueError, match="traced") as error:
            context_layout(mask, 12, devices=2, block_size=4)
        assert str(error.value) == (
            "`mask_mod` captures traced arrays, but balance='auto' counts the blocks that it visits; expected known arrays. Make the "
            "layout outside of jit and pass it as an argument, or pass balance='contiguous' or 'zigzag'."
        )
        layout = context_layout(mask, 12, devices=2, block_size=4, balance="zigzag")
        for name in ("loads", "blocks_received"):
            with pytest.raises(ValueError, match="unknown") as error:
                getattr(layout, name)
            assert str(error.value) == (
                f"`{name}` of this layout is unknown, because its mask_mod captures traced arrays; expected known arrays. Make the "
                "layout outside of jit."
            )
        assert str(layout).endswith("\n  the work is unknown, because mask_mod captures traced arrays")
        return layout.shard(ids, 0)

    np.testing.assert_array_equal(make(jnp.arange(12)), [0, 1, 2, 3, 0, 0, 0, 0, 4, 5, 6, 7, 8, 9, 10, 11])


@pytest.mark.slow
def test_blocks_of_large_masks() -> None:
    """The classification in squares of blocks gives what that of all blocks gives."""
    from flexjax.context import blocks as context_blocks

    for mask, keys in (*((mask, 650) for mask in MASKS.values()), (documents(3, 700), 700)):
        traced = context_blocks.trace_mask(mask, (700, keys), BATCH, HEADS)
        heads = tuple(n if traced.program.reads(axis) else 1 for axis, n in (("b", BATCH), ("h", HEADS)))
        found = []
        for limit in (1 << 16, 1):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(context_blocks, "COARSE_FROM", limit)
                found.append(context_blocks.visited_blocks(traced, heads, (700, keys, 4, 4)))  # type: ignore[arg-type]
        for a, b in itertools.pairwise(found):
            np.testing.assert_array_equal(a.needed, b.needed)
            np.testing.assert_allclose(a.work, b.work)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_hundred_packed_batches_need_three_programs(devices: int) -> None:
    """A program is compiled for each structure of the layouts: which distances, and how wide the messages are."""
    rng = np.random.default_rng(0)
    tokens, structures = 8192, set()
    for _ in range(100):
        lengths = np.minimum(rng.lognormal(np.log(tokens / 22), 1.2, 4000).astype(int) + 16, tokens // 2)
        ends = np.cumsum(lengths)
        ids = np.searchsorted(ends[ends < tokens], np.arange(tokens), side="right").astype(np.int32)
        mask_mod = flexjax.and_masks(masks.causal, masks.document(ids))
        layout = flexjax.context_layout(mask_mod, tokens, devices=devices, block_size=64)
        leaves, structure = jax.tree.flatten(layout)
        structures.add((structure, tuple(x.shape for x in leaves)))
    assert len(structures) <= 3
