"""Tiles of the GPU kernels: what runs by itself, what the options ask for, and the sentences where that cannot be had.

Nothing here compiles or runs a kernel.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import pytest

import flexjax
from flexjax import KernelOptions
from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice
from flexjax.backends.mosaic_gpu.backward import hopper_tiles as backward_hopper_tiles
from flexjax.backends.mosaic_gpu.backward.hopper_dkv_tiles import SplitDkvTiles, dkv_tiles, split_dkv_scratch
from flexjax.backends.mosaic_gpu.backward.hopper_dq_tiles import dq_tiles
from flexjax.backends.mosaic_gpu.backward.hopper_fused_tiles import fused_tiles
from flexjax.backends.mosaic_gpu.backward.kernels import FusedKernel, TwoKernels
from flexjax.backends.mosaic_gpu.captures.tiles import fits_one_slot
from flexjax.backends.mosaic_gpu.decode import hopper_tiles as decode_hopper_tiles
from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.backends.mosaic_gpu.forward import hopper_tiles as forward_hopper_tiles
from flexjax.backends.mosaic_gpu.machine.shared_memory import fits
from flexjax.backends.target import Target
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan, Wanted

HOPPER = Target("cuda", "NVIDIA H200", "9.0", 132)
JAX = (0, 11, 2)


def plan(
    dim: int = 128, block: tuple[int, int] | None = None, group: int = 1, listed: int = 32, **options: typing.Any
) -> KernelPlan:
    """Attention over 8192 tokens; `block` and `listed`: the blocks of a mask and how many a row lists."""
    blocks = None if block is None else BlockLayout(1, 1, *block, 1, listed, 1, listed)
    return KernelPlan(
        *(2, 16, 16 // group, 8192, 8192, dim, dim, "bfloat16", "BTNH", dim**-0.5),
        blocks=blocks,
        options=KernelOptions(**options),
    )


def backward_of(made: KernelPlan) -> str:
    """The kernels of the backward pass with their tiles, queries x keys."""
    chosen = choose_kernel.backward_kernels(made)
    if isinstance(chosen, FusedKernel):
        return f"one {chosen.tiles.queries}x{backward_hopper_tiles.FUSED_KEYS}"
    dq, dkv = chosen
    text = f"dq {dq.rows * dq.groups}x{dq.keys} slots {dq.key_slots},{dq.value_slots}"
    if isinstance(dkv, SplitDkvTiles):
        return text + f" dkv {backward_hopper_tiles.SPLIT_QUERIES}x{backward_hopper_tiles.SPLIT_KEYS}"
    return text + f" dkv {dkv.queries}x{dkv.rows * dkv.groups} slots {dkv.query_slots},{dkv.out_slots}"


BLOCKS = (128, 128)
# fmt: off
CHOSEN: dict[str, tuple[dict[str, typing.Any], str]] = {
    "full 128": ({}, "one 64x128"),
    "full 128, grouped": ({"group": 4}, "one 64x128"),
    "full 64": ({"dim": 64}, "one 128x128"),
    "full 64, grouped": ({"dim": 64, "group": 4}, "one 128x128"),
    "full 64, any order": ({"dim": 64, "group": 4, "deterministic": False}, "one 128x128"),
    "full 64, few queries": ({"dim": 64, "block_q_bwd": 64}, "one 64x128"),
    "full 64, few queries, any order": ({"dim": 64, "block_q_bwd": 64, "deterministic": False}, "one 64x128"),
    "a mask of which nothing is known, 64": ({"dim": 64, "block": BLOCKS}, "one 128x128"),
    "blocks of 64, any order": ({"dim": 64, "block": (64, 128), "deterministic": False}, "one 64x128"),
    "causal 128": ({"block": BLOCKS}, "one 64x128"),
    "causal 128, any order": ({"block": BLOCKS, "deterministic": False}, "one 64x128"),
    "causal 256": ({"dim": 256, "block": BLOCKS}, "dq 128x64 slots 2,1 dkv 64x64"),
    "causal 512": ({"dim": 512, "block": BLOCKS}, "dq 128x64 slots 1,1 dkv 64x64"),
    "any order 512": ({"dim": 512, "deterministic": False}, "dq 128x64 slots 1,1 dkv 64x64"),
    "blocks of 64": ({"block": (64, 64)}, "dq 64x64 slots 2,2 dkv 64x64 slots 2,2"),
    "blocks of 192 x 64": ({"block": (192, 64)}, "dq 64x64 slots 2,2 dkv 64x64 slots 2,2"),
    "few queries": ({"block": BLOCKS, "block_q_bwd": 64}, "one 64x128"),
    "few keys": ({"block": BLOCKS, "block_kv_bwd": 64}, "dq 128x64 slots 2,2 dkv 64x64 slots 2,2"),
    "few of both": (
        {"dim": 64, "block": BLOCKS, "block_q_bwd": 64, "block_kv_bwd": 64}, "dq 64x64 slots 2,2 dkv 64x64 slots 2,2",
    ),
    "few queries at 64": (
        {"dim": 64, "block": BLOCKS, "block_q_bwd": 64}, "one 64x128",
    ),
    "few queries at 256": ({"dim": 256, "block_q_bwd": 64, "block_kv_bwd": 64}, "dq 64x64 slots 2,2 dkv 64x64"),
    "the tile of one kernel": ({"block_q_bwd": 64, "block_kv_bwd": 128}, "one 64x128"),
    "another tile than that of one kernel": ({"block_q_bwd": 128}, "dq 128x128 slots 2,2 dkv 64x128 slots 2,2"),
    "fewer keys than one kernel takes": ({"block_kv_bwd": 64}, "dq 128x64 slots 2,2 dkv 64x64 slots 2,2"),
}

REFUSED: dict[str, tuple[dict[str, typing.Any], str]] = {
    "queries": (
        {"block_q_bwd": 32}, "The GPU kernels of the backward pass take block_q_bwd 64 or 128, not 32.",
    ),
    "keys": (
        {"block_kv_bwd": 256}, "The GPU kernels of the backward pass take block_kv_bwd 64 or 128, not 256.",
    ),
    "keys above 128": (
        {"dim": 256, "block_kv_bwd": 128},
        "The GPU kernels of the backward pass take block_kv_bwd 64 for head dims above 128, not 128.",
    ),
    "queries that do not divide": (
        {"block": (192, 128), "block_q_bwd": 128},
        "The GPU kernels of the backward pass take block_q_bwd 64, dividing the mask's blocks of 192, not 128.",
    ),
    "keys that do not divide": (
        {"block": (128, 64), "block_kv_bwd": 128},
        "The GPU kernels of the backward pass take block_kv_bwd 64, dividing the mask's blocks of 64, not 128.",
    ),
    "tile of the forward pass": (
        {"block_q": 96, "num_stages": 3},
        "No tile fits head dims 128 and 128 with block_q=96, num_stages=3: the GPU kernels take block_q 64, 128 or 192, "
        "block_kv 64 or 128, num_stages 2 to 4, dividing the mask's blocks.",
    ),
    "too many stages": (
        {"dim": 256, "num_stages": 4},
        "No tile fits head dims 256 and 256 with num_stages=4: the GPU kernels take block_q 64, 128 or 192, block_kv 64 "
        "or 128, num_stages 2 to 4, dividing the mask's blocks.",
    ),
}
# fmt: on


# fmt: off
FORWARD: dict[str, tuple[KernelPlan, str]] = {
    "full 128": (plan(), "128x128 slots 3,2,1 overlap"),
    "full 128, 1024 tokens": (dataclasses.replace(plan(), q_len=1024, kv_len=1024), "128x128 slots 2,2,2 overlap"),
    "full 128, few queries": (dataclasses.replace(plan(), q_len=128), "128x128 slots 3,2,1 overlap"),
    "some blocks 128": (plan(block=BLOCKS), "128x128 slots 2,2,2 overlap ping-pong"),
    "full 256": (plan(dim=256), "128x64 slots 2,2,1 overlap"),
    "some blocks 256": (plan(dim=256, block=BLOCKS), "128x64 slots 2,2,1 overlap"),
    "some blocks 512": (plan(dim=512, block=BLOCKS), "128x64 slots 2,2,1 overlap"),
    "576 with values of 512": (dataclasses.replace(plan(dim=576), value_dim=512), "128x64 slots 2,1,1 overlap"),
    "full 64": (plan(dim=64), "192x128 slots 2,2,2 overlap"),
    "some blocks 64": (plan(dim=64, block=BLOCKS), "128x128 slots 2,2,2 ping-pong"),
    "blocks of 192 at 64": (plan(dim=64, block=(192, 128)), "192x128 slots 2,2,2 overlap"),
    "2048 of 64 heads at 64: tiles of 192 leave the device idle": (
        dataclasses.replace(plan(dim=64), batch=8, q_heads=8, kv_heads=8, q_len=2048, kv_len=2048),
        "128x128 slots 2,2,2 ping-pong",
    ),
    "queries of 64 asked for at 64": (plan(dim=64, block_q=64), "64x128 slots 2,2,2"),
    "a short sequence": (dataclasses.replace(plan(dim=64), q_len=64), "64x128 slots 2,2,2"),
}
# fmt: on


def traced(
    dim: int = 64,
    tokens: int = 8192,
    keys: int | None = None,
    batch: int = 2,
    kv_heads: int = 16,
    value_dim: int | None = None,
    **arguments: typing.Any,
) -> KernelPlan:
    array = lambda t, n, d: jax.ShapeDtypeStruct((batch, t, n, d), jnp.bfloat16)
    keys = keys or tokens
    given = array(tokens, 16, dim), array(keys, kv_heads, dim), array(keys, kv_heads, value_dim or dim)
    found: list[KernelPlan] = []
    filled: typing.Any = arguments
    jax.eval_shape(lambda *x: found.append(prepare(Arguments(*x, **filled)).plan), *given)
    return found[0]


SLOPES, TABLE, TABLES = jnp.ones(16), jnp.ones(16384, jnp.bfloat16), jnp.ones((16, 16384))
DOCUMENTS = flexjax.masks.document(jnp.zeros(8192, jnp.int32))
ONE, TWO = "one 128x128", "dq 128x128 slots 2,2 dkv 128x128 slots 2,2"
# fmt: off
IN_A_FIXED_ORDER: dict[str, tuple[dict[str, typing.Any], str]] = {
    "causal": ({"mask_mod": flexjax.masks.causal}, ONE),
    "causal, short": ({"mask_mod": flexjax.masks.causal, "tokens": 1024}, ONE),
    "full, short": ({"tokens": 1024}, ONE),
    "full, short, many": ({"tokens": 1024, "batch": 16}, ONE),
    "few queries, many keys": ({"tokens": 512, "keys": 32768}, ONE),
    "fewer queries than keys": ({"tokens": 8192, "keys": 16384}, ONE),
    "more queries than keys": ({"tokens": 16384, "keys": 8192}, ONE),
    "causal at the end of many keys": (
        {"tokens": 1024, "keys": 65536, "mask_mod": flexjax.masks.causal_offset(64512)}, ONE,
    ),
    "causal, grouped heads": ({"mask_mod": flexjax.masks.causal, "kv_heads": 4}, ONE),
    "full, very long": ({"tokens": 1 << 19}, ONE),
    "head dim 40, values of 16": ({"dim": 40, "value_dim": 16}, ONE),
    "values of 128": ({"value_dim": 128}, "one 64x128"),
    "window": ({"mask_mod": flexjax.masks.sliding_window(1024)}, ONE),
    "documents": ({"mask_mod": flexjax.and_masks(flexjax.masks.causal, DOCUMENTS)}, ONE),
    "slopes": ({"mask_mod": flexjax.masks.causal, "score_mod": lambda s, b, h, q, k: s + SLOPES[h] * (k - q)}, ONE),
    "soft cap": (
        {"mask_mod": flexjax.masks.causal, "score_mod": flexjax.mods.softcap(30.0)},
        "one 64x128",
    ),
    "relative table": ({"score_mod": lambda s, b, h, q, k: s + TABLE[q - k + 8192].astype(jnp.float32)}, ONE),
    "relative table of each head": ({"score_mod": lambda s, b, h, q, k: s + TABLES[h, q - k + 8192]}, ONE),
    "bias of each query": ({"score_mod": lambda s, b, h, q, k: s + TABLES[h, q]}, ONE),
    "two biases of each query": ({"score_mod": lambda s, b, h, q, k: s + TABLES[h, q] + TABLES[h, q + 8192]}, "one 64x128"),
    "bias of each query under documents": (
        {"mask_mod": flexjax.masks.document(jnp.zeros(8192, jnp.int32)), "score_mod": lambda s, b, h, q, k: s + TABLES[h, q]},
        "one 64x128",
    ),
    "table, few queries, many keys": (
        {"tokens": 512, "keys": 4096, "score_mod": lambda s, b, h, q, k: s + TABLE[q - k + 4096].astype(jnp.float32)},
        ONE,
    ),
    "causal at 128": ({"dim": 128, "mask_mod": flexjax.masks.causal}, "one 64x128"),
    "causal at 128, grouped heads": ({"dim": 128, "mask_mod": flexjax.masks.causal, "kv_heads": 4}, "one 64x128"),
    "causal at 128, grouped heads, short": (
        {"dim": 128, "mask_mod": flexjax.masks.causal, "kv_heads": 4, "tokens": 1024, "batch": 32}, "dq 128x128 slots 2,2 dkv 64x128 slots 2,2"
    ),
    "full, few queries at 128": (
        {"dim": 128, "tokens": 512, "keys": 32768}, "one 64x128",
    ),
    "two tables": (
        {"score_mod": lambda s, b, h, q, k: s + TABLES[h, q - k + 8192] + TABLE[k - q + 8192].astype(jnp.float32)},
        "one 64x128",
    ),
    "table of gains": ({"score_mod": lambda s, b, h, q, k: s * TABLES[h, q - k + 8192]}, "one 64x128"),
    "slopes at 128": (
        {"dim": 128, "mask_mod": flexjax.masks.causal, "score_mod": lambda s, b, h, q, k: s + SLOPES[h] * (k - q)},
        "one 64x128",
    ),
}
# fmt: on


@pytest.mark.parametrize("name", IN_A_FIXED_ORDER)
def test_one_kernel_or_two_in_a_fixed_order(name: str) -> None:
    arguments, chosen = IN_A_FIXED_ORDER[name]
    assert backward_of(traced(**arguments)) == chosen


@pytest.mark.parametrize(
    ("arguments", "in_order"),
    [
        ({}, True),
        ({"dim": 128}, True),
        ({"mask_mod": flexjax.masks.sliding_window(100)}, True),
        ({"mask_mod": flexjax.masks.causal}, False),
        ({"mask_mod": flexjax.masks.causal, "dim": 128}, False),
        ({"mask_mod": flexjax.masks.causal, "tokens": 1024}, True),
        ({"mask_mod": flexjax.masks.causal, "kv_heads": 4}, True),
    ],
)
def test_where_any_order_will_do(arguments: dict[str, typing.Any], in_order: bool) -> None:
    for deterministic in (False, True):
        made = traced(**arguments, kernel_options=KernelOptions(deterministic=deterministic))
        fused = fused_tiles(made)
        assert fused is not None
        assert hopper_fused_choice.adds_in_order(made, fused) is (deterministic or in_order)


def test_tiles_of_masks_that_divide() -> None:
    """The quotients of half the elements fit the registers; literal divisors need none."""
    by_head = lambda b, h, q, k: (q - k) % (h + 1) == 0
    by_literal = lambda b, h, q, k: (q - k) % 3 == 0
    for mask_mod, step in ((by_head, 64), (by_literal, 128)):
        made = traced(mask_mod=mask_mod)
        fused = fused_tiles(made)
        assert forward_hopper_tiles.forward_tile(made).block_kv == step
        assert dq_tiles(made).keys == step
        assert dkv_tiles(made).queries == step
        assert fused is not None
        assert fused.queries == step


@pytest.mark.parametrize("name", FORWARD)
def test_tiles_of_the_forward_pass(name: str) -> None:
    made, chosen = FORWARD[name]
    tile = forward_hopper_tiles.forward_tile(made)
    assert tile.dynamic_scheduler == (tile.ctas == 1)
    assert not tile.persistent
    text = f"{tile.block_q}x{tile.block_kv} slots {tile.stages},{tile.value_stages},{tile.query_slots}"
    assert text + " overlap" * tile.overlap + " ping-pong" * tile.ping_pong == chosen


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        ({"mask_mod": flexjax.masks.causal}, (3, 2, 1)),
        ({"mask_mod": flexjax.masks.causal, "tokens": 4096, "kv_heads": 4}, (3, 2, 1)),
        ({"mask_mod": flexjax.masks.causal, "tokens": 2048}, (2, 2, 2)),
        ({"tokens": 2048}, (3, 2, 1)),
        ({"mask_mod": flexjax.masks.sliding_window(100)}, (2, 2, 2)),
        ({"mask_mod": DOCUMENTS}, (2, 2, 2)),
        ({"mask_mod": flexjax.masks.causal, "tokens": 512, "keys": 8192}, (2, 2, 2)),
        ({"mask_mod": flexjax.masks.causal, "kernel_options": KernelOptions(num_stages=2)}, (2, 2, 2)),
        ({"mask_mod": flexjax.masks.causal, "dim": 64}, (2, 2, 2)),
        ({"score_mod": lambda s, b, h, q, k: s + 0.1 * (k - q)}, (2, 2, 2)),
    ],
)
def test_long_rows_have_a_third_slot_of_keys(arguments: dict[str, typing.Any], slots: tuple[int, int, int]) -> None:
    tile = forward_hopper_tiles.forward_tile(traced(**{"dim": 128, **arguments}))
    assert (tile.stages, tile.value_stages, tile.query_slots) == slots


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("score_mod", "reverse"),
    [
        (None, False),
        (lambda s, b, h, q, k: s + 0.1 * (k - q), True),
        (lambda s, b, h, q, k: 30 * jnp.tanh(s / 30), False),
    ],
)
def test_keys_in_reverse(dim: int, score_mod: typing.Any, reverse: bool) -> None:
    """Beside a lag of the reference, so that the output is not rescaled once the largest scores were seen."""
    tile = forward_hopper_tiles.forward_tile(traced(dim=dim, mask_mod=DOCUMENTS, score_mod=score_mod))
    assert tile.reverse_kv == reverse
    assert tile.lazy_rescale == (reverse or dim == 128)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the tile scheduler needs jax 0.11")
@pytest.mark.parametrize(
    ("mask_mod", "tokens", "dim", "heads"),
    [
        (flexjax.masks.sliding_window(100), 16384, 128, 4),
        (flexjax.masks.causal, 16384, 128, 2),
        (flexjax.masks.sliding_window(100), 8192, 128, 4),
        (flexjax.masks.sliding_window(100), 8192, 64, 8),
        (flexjax.masks.causal, 65536, 128, 1),
        (flexjax.masks.sliding_window(100), 32768, 128, 2),
        (flexjax.masks.sliding_window(100), 65536, 128, 1),
    ],
)
def test_heads_side_by_side(mask_mod: typing.Any, tokens: int, dim: int, heads: int) -> None:
    from flexjax.backends.mosaic_gpu.forward import tile_scheduler

    made = traced(mask_mod=mask_mod, tokens=tokens, dim=dim)
    assert tile_scheduler.TileScheduler(made, forward_hopper_tiles.forward_tile(made)).heads_at_once == heads
    static = dataclasses.replace(forward_hopper_tiles.forward_tile(made), dynamic_scheduler=False)
    if heads == 4 and tokens > 8192:  # without the dynamic scheduler L2_SHARE alone counts
        assert tile_scheduler.TileScheduler(made, static).heads_at_once < heads


@pytest.mark.parametrize("name", CHOSEN)
def test_tiles_of_the_backward_pass(name: str) -> None:
    options, chosen = CHOSEN[name]
    made = plan(**options)
    assert support.refuses(made, HOPPER, JAX) is None
    assert backward_of(made) == chosen


DESCRIBED: dict[str, tuple[KernelPlan, str]] = {
    "full 128": (plan(), "forward 128 x 128, backward fused 64 x 128, dQ added in a fixed order"),
    "any order": (
        traced(dim=128, mask_mod=flexjax.masks.causal, kernel_options=KernelOptions(deterministic=False)),
        "forward 128 x 128, backward fused 64 x 128, dQ added in any order",
    ),
    "query heads that CTAs divide": (
        traced(dim=128, kv_heads=1),
        "forward 128 x 128, backward fused 64 x 128, dQ added in a fixed order, 8 CTAs for each key tile",
    ),
    "blocks of 64": (plan(block=(64, 64)), "forward 64 x 64, backward dQ 64 x 64, dK/dV 64 x 64"),
    "full 256": (plan(dim=256), "forward 128 x 64, backward dQ 128 x 64, split dK/dV 64 x 64"),
    "full 264": (
        plan(dim=264),
        "forward 128 x 64, backward dQ 128 x 64, split dK/dV 64 x 64, columns shared by clusters of two CTAs",
    ),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_kernels_in_words(name: str) -> None:
    made, text = DESCRIBED[name]
    assert support.BACKEND.tile_sizes(made, HOPPER) == text


@pytest.mark.parametrize("name", REFUSED)
def test_refused_tiles(name: str) -> None:
    options, sentence = REFUSED[name]
    assert support.refuses(plan(**options), HOPPER, JAX) == sentence


WIDE: dict[str, tuple[dict[str, typing.Any], str | None]] = {
    "512": ({"head_dim": 512, "value_dim": 512}, None),
    "576 and 512": ({"head_dim": 576, "value_dim": 512}, None),
    "extra features": ({"head_dim": 512, "extra_dim": 64, "extra_heads": 1, "value_dim": 512}, None),
    "queries and keys": (
        {"head_dim": 584, "value_dim": 512}, "The head dim of query and key is 584; the GPU kernels take at most 576.",
    ),
    "values": ({"head_dim": 512, "value_dim": 520}, "The head dim of value is 520; the GPU kernels take at most 512."),
    "float32": (
        {"dtype": "float32"}, "The head dim of query and key is 264; the GPU kernels take at most 256 of float32.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE)
def test_refused_head_dims(name: str) -> None:
    """Every multiple of 8 up to 576 and 512 has tiles, with every mask and score_mod; the first beyond is refused."""
    fields, sentence = WIDE[name]
    assert support.refuses(dataclasses.replace(plan(dim=264), **fields), HOPPER, JAX) == sentence


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12")
def test_refused_head_dims_of_the_backward_pass() -> None:
    wanted = Wanted(True, True, True, False, False, False, ())
    for dim, extra, sentence in (
        (512, 0, None),
        (520, 0, "The head dim of query and key is 520; the GPU kernels of the backward pass take at most 512."),
        (512, 64, "The head dim of query and key is 576; the GPU kernels of the backward pass take at most 512."),
    ):
        made = dataclasses.replace(
            plan(dim=264), head_dim=dim, extra_dim=extra, extra_heads=int(extra > 0), value_dim=512
        )
        assert support.BACKEND.refuses_backward(made, HOPPER, wanted, None) == sentence


def test_only_the_kernels_of_hopper_split_columns() -> None:
    """Neither the decode kernel nor the kernels of other cards do."""
    wide = plan(dim=512)
    few = dataclasses.replace(wide, q_len=1, kv_len=8192)
    assert decode_hopper_tiles.decode_refuses(few) == "It takes head dims up to 256, not 512 and 512."
    assert choose_kernel.decode_kernel(few) is None
    assert support.refuses(few, HOPPER, JAX) is None
    ampere = Target("cuda", "NVIDIA A100", "8.0", 108)
    refused = "The GPU kernels on mma.sync take head dims up to 256, not 512 and 512."
    assert support.refuses(plan(dim=512, instruction="mma"), ampere, JAX) == refused


def test_every_head_dim_has_tiles() -> None:
    for dim in range(8, 577, 8):
        for value_dim in (8, 64, 256, 264, 320, 512):
            made = dataclasses.replace(plan(dim=dim, block=BLOCKS), value_dim=value_dim)
            assert support.refuses(made, HOPPER, JAX) is None, (dim, value_dim)
            tiles = choose_kernel.backward_kernels(made)
            if max(dim, value_dim) > 256:
                assert isinstance(tiles, TwoKernels)
                assert isinstance(tiles.dkv, SplitDkvTiles)
                assert fits(split_dkv_scratch(made, tiles.dkv)), (dim, value_dim)
                assert fits_one_slot(made), (dim, value_dim)


@pytest.mark.parametrize(
    "options", [{}, {"dim": 64}, {"dim": 256}, {"dim": 512}, {"block": BLOCKS}, {"block": (64, 192)}], ids=str
)
def test_candidates(options: dict[str, typing.Any]) -> None:
    """What runs by itself first, both passes; every one is accepted and is what runs when it is asked for."""
    made = plan(**options)
    found = support.BACKEND.tile_candidates(made, HOPPER)
    assert len(found) == len({tuple(c.items()) for c in found}) >= 2
    for n, candidate in enumerate(found):
        asked = dataclasses.replace(made, options=dataclasses.replace(made.options, **candidate))
        assert support.refuses(asked, HOPPER, JAX) is None
        tile = forward_hopper_tiles.forward_tile(asked)
        assert (tile.block_q, tile.block_kv, tile.stages) == tuple(list(candidate.values())[:3])
        assert f"{candidate['block_q_bwd']}x" in backward_of(asked)
        assert f"x{candidate['block_kv_bwd']}" in backward_of(asked)
        if n == 0:
            assert tile == forward_hopper_tiles.forward_tile(made)
            assert backward_of(asked) == backward_of(made)


@pytest.mark.parametrize("dim", [160, 256])
def test_the_first_backward_candidate_of_wide_float32_heads_is_the_default(dim: int) -> None:
    made = dataclasses.replace(plan(dim), dtype="float32")
    block_q, block_kv = choose_kernel.backward_candidates(made)[0]
    asked = dataclasses.replace(made.options, block_q_bwd=block_q, block_kv_bwd=block_kv)
    assert backward_of(dataclasses.replace(made, options=asked)) == backward_of(made)


def test_the_door_says_it() -> None:
    if jax.__version_info__ < (0, 11):
        pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12")
    x = jnp.ones((1, 64, 1, 32), jnp.bfloat16)
    with pytest.raises(NotImplementedError) as caught:
        flexjax.flex_attention(
            x, x, x, implementation="mosaic_gpu", kernel_options=KernelOptions(interpret=True, block_q_bwd=48)
        )
    assert str(caught.value) == (
        "No implementation accepts this call: mosaic_gpu: "
        "The GPU kernels of the backward pass take block_q_bwd 64 or 128, not 48."
    )
