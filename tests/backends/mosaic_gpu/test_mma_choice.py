"""Which cards run the kernels on mma.sync, with which tiles, and what is refused; nothing here compiles."""

import dataclasses
import itertools
import typing

import jax
import pytest

import flexjax
from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.decode import mma_tiles as decode_mma_tiles
from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.backends.mosaic_gpu.families.choose_family import family_of
from flexjax.backends.mosaic_gpu.families.hopper import HOPPER
from flexjax.backends.mosaic_gpu.families.mma import Mma
from flexjax.backends.mosaic_gpu.forward import mma_tiles as forward_mma_tiles
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
from flexjax.backends.target import Target
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan, Wanted
from flexjax.types import KernelOptions

JAX = (0, 11, 2)
A100 = Target("cuda", "NVIDIA A100-SXM4-80GB", "8.0", 108)
L40S = Target("cuda", "NVIDIA L40S", "8.9", 142)
H200 = Target("cuda", "NVIDIA H200", "9.0", 132)
RTX = Target("cuda", "NVIDIA GeForce RTX 5090", "12.0", 170)
B200 = Target("cuda", "NVIDIA B200", "10.0", 148)
KERNELS = "The GPU kernels are for compute capability 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 12.0, 12.1"

MMA = {"instruction": "mma"}


def plan(
    dim: int = 128, dtype: str = "bfloat16", block: int | None = None, q_len: int = 8192, **options: typing.Any
) -> KernelPlan:
    """Attention over 8192 keys."""
    return KernelPlan(
        *(2, 16, 16, q_len, 8192, dim, dim, dtype, "BTNH", dim**-0.5),
        blocks=None if block is None else BlockLayout(1, 1, block, block, 1, 32, 1, 32),
        options=KernelOptions(**options),
    )


@pytest.mark.parametrize(
    ("target", "options", "capability"),
    [
        (A100, MMA, "8.0"), (A100, {}, "8.0"), (RTX, {}, "12.0"), (B200, {}, "10.0"), (L40S, MMA, "8.9"), (RTX, MMA, "12.0"),
        (H200, {}, None), (None, {}, None), (H200, MMA, "9.0"), (None, MMA, "9.0"),
        (A100, {"interpret": True}, None), (A100, {"interpret": True, "instruction": "mma"}, "9.0"),
    ],
)  # fmt: skip
def test_the_card_of_a_target(target: Target | None, options: dict[str, typing.Any], capability: str | None) -> None:
    family = family_of(target, KernelOptions(**options))
    assert family == (HOPPER if capability is None else Mma(CARDS[capability]))
    assert support.refuses(plan(**options), target, JAX) is None


TILES = {
    # compute capability and head dim: way of copying, tile and stages of the forward pass, CTAs on an SM, backward tiles
    ("8.0", 64): ("cp.async", "128 x 64, 2 stages, two CTAs on an SM", "dQ 128 x 64, dK/dV 32 x 128"),
    ("8.0", 128): ("cp.async", "128 x 64, 1 stage, two CTAs on an SM", "dQ 128 x 32, dK/dV 64 x 128"),
    ("8.0", 256): ("cp.async", "128 x 64, 1 stage, one CTA on an SM", "dQ 64 x 64, dK/dV 64 x 64"),
    ("8.9", 64): ("cp.async", "128 x 64, 2 stages, two CTAs on an SM", "dQ 128 x 64, dK/dV 64 x 128"),
    ("8.9", 128): ("cp.async", "128 x 32, 1 stage, two CTAs on an SM", "dQ 128 x 32, dK/dV 32 x 128"),
    ("8.9", 256): ("cp.async", "128 x 32, 1 stage, one CTA on an SM", "dQ 64 x 16, dK/dV 16 x 64"),
    ("9.0", 128): ("tma", "128 x 64, 2 stages, two CTAs on an SM", "dQ 128 x 32, dK/dV 64 x 128"),
    ("9.0", 256): ("tma", "128 x 64, 2 stages, one CTA on an SM", "dQ 128 x 64, dK/dV 64 x 64"),
    ("10.0", 64): ("tma", "128 x 64, 2 stages, two CTAs on an SM", "dQ 128 x 64, dK/dV 32 x 128"),
    ("10.0", 128): ("tma", "128 x 64, 2 stages, two CTAs on an SM", "dQ 128 x 32, dK/dV 32 x 128"),
    ("10.0", 256): ("tma", "128 x 64, 2 stages, one CTA on an SM", "dQ 128 x 64, dK/dV 64 x 64"),
    ("10.3", 128): ("tma", "128 x 64, 2 stages, two CTAs on an SM", "dQ 128 x 32, dK/dV 32 x 128"),
    ("12.0", 128): ("tma", "128 x 32, 1 stage, two CTAs on an SM", "dQ 128 x 32, dK/dV 32 x 128"),
}


@pytest.mark.parametrize(("capability", "dim"), TILES)
def test_explain_names_the_card_and_the_tile(capability: str, dim: int) -> None:
    target = Target("cuda", "some GPU", capability, 100)
    made = plan(dim, instruction="mma")
    copying, forward, backward = TILES[capability, dim]
    assert support.BACKEND.tile_sizes(made, target) == (
        f"mma.sync with {copying} for compute capability {capability}: forward {forward}, backward {backward}"
    )


@pytest.mark.parametrize(("capability", "queries"), [("9.0", 64), ("10.0", 32), ("10.3", 32)])
def test_dkv_visits_fewer_queries_where_more_spill(capability: str, queries: int) -> None:
    for dim in (72, 96, 128):
        _, dkv = choose_kernel.mma_backward_kernels(plan(dim), CARDS[capability])
        assert dkv.visited == queries
        _, small = choose_kernel.mma_backward_kernels(plan(dim, block=64), CARDS[capability])
        assert (small.owned, small.visited) == (64, queries)


@pytest.mark.parametrize("capability", CARDS)
def test_a_tile_fits_every_card(capability: str) -> None:
    card = CARDS[capability]
    for dim, block in itertools.product((1, 64, 96, 128, 192, 256), (None, 64, 128)):
        found = forward_mma_tiles.forward_candidates(plan(dim, block=block), card)
        assert found
        for tile in found:
            assert tile.resident_ctas(card) >= 1
            assert block is None or (block % tile.block_q == 0 and block % tile.block_kv == 0)


@pytest.mark.parametrize("capability", CARDS)
def test_beside_expectations_the_small_tiles_come_first(capability: str) -> None:
    card, crowd = CARDS[capability], lambda made: dataclasses.replace(made, crowded=True)
    for dim in (16, 64, 96, 128):
        usual, small = (forward_mma_tiles.forward_candidates(x, card) for x in (plan(dim), crowd(plan(dim))))
        assert set(usual) == set(small), "no tile that an option may ask for goes"
        assert (small[0].rows, small[0].block_kv) == (64, 32)
        for kernel in choose_kernel.mma_backward_kernels(crowd(plan(dim)), card):
            assert (kernel.rows, kernel.visited) == (64, 32)


@pytest.mark.parametrize("target", [A100, RTX])
def test_options_choose_among_the_tiles(target: Target) -> None:
    found = support.BACKEND.tile_candidates(plan(64, **MMA), target)
    assert len(found) == len({tuple(x.items()) for x in found}) > 4
    for options in found:
        made = plan(64, **options, **MMA)
        assert support.refuses(made, target, JAX) is None
        card = CARDS[target.capability or ""]
        tile = forward_mma_tiles.forward_tile(made, card)
        dq, dkv = choose_kernel.mma_backward_kernels(made, card)
        sizes = (tile.block_q, tile.block_kv, tile.stages, dq.owned, dkv.owned)
        assert sizes == tuple(options[n] for n in ("block_q", "block_kv", "num_stages", "block_q_bwd", "block_kv_bwd"))


REFUSED: dict[str, tuple[Target, dict[str, typing.Any], str]] = {
    "V100": (Target("cuda", "Tesla V100", "7.0", 80), {}, f"{KERNELS}; Tesla V100 has 7.0."),
    "unknown": (Target("cuda", "some GPU"), {}, f"{KERNELS}; the compute capability of some GPU is not known."),
    "float32": (A100, {"dtype": "float32", **MMA}, "The GPU kernels on mma.sync take bfloat16 and float16 inputs, not float32."),
    "split": (
        A100, {"split": 256, "q_len": 4, "block_q": 64, **MMA},
        "The GPU kernels on mma.sync do not split the keys of this call (kernel_options.split=256): block_q, block_kv "
        "and num_stages are options of the forward kernel.",
    ),
    "tile": (
        L40S, {"block_q": 192, "num_stages": 2, **MMA},
        "No tile fits head dims 128 and 128 on compute capability 8.9 with block_q=192, num_stages=2: the GPU kernels on mma.sync "
        "take block_q 64 or 128, block_kv 32, 64 or 128, num_stages 1 to 3, dividing the mask's blocks.",
    ),
    "backward tile": (
        L40S, {"dim": 256, "block_kv_bwd": 128, **MMA},
        "The GPU kernels on mma.sync have no backward tile for block_kv_bwd=128 and head dims 256 and 256 on compute capability 8.9: "
        "they take 64 or 128, dividing the mask's blocks.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    target, options, sentence = REFUSED[name]
    assert support.refuses(plan(**options), target, JAX) == sentence


def test_a_split_does_not_apply_to_many_queries() -> None:
    """A model passes the same options to its prefill, on every card."""
    for target in (A100, B200, RTX, H200):
        for split in ("auto", 256):
            assert support.refuses(plan(split=split), target, JAX) is None


PAGES = "The GPU kernel for keys in pages does not run this call: "


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, None),
        ({"page": 12}, f"{PAGES}pages of 12 keys are no multiple of 8."),
        ({"cache_dtype": "int8"}, None),
        ({"cache_dtype": "int8", "head_dim": 64}, None),
        ({"cache_dtype": "int8", "q_heads": 16, "kv_heads": 1, "q_len": 2}, None),
        (
            {"cache_dtype": "int8", "head_dim": 96},
            f"{PAGES}it takes quantised caches of head dims that are multiples of 64, not 96 and 128.",
        ),
        ({"head_dim": 512}, f"{PAGES}it takes head dims up to 256, not 512 and 128."),
    ],
)
def test_keys_in_pages(fields: dict[str, typing.Any], sentence: str | None) -> None:
    made = dataclasses.replace(plan(q_len=1, **MMA), **{"page": 64, "lengths": (False, True), **fields})
    assert support.refuses(made, A100, JAX) == sentence


DECODE_TILES = {
    ("8.0", 64): "decode 4 x 128, 64 work items of 2048 keys, 2 stages, two CTAs on an SM",
    ("8.0", 128): "decode 4 x 64, 128 work items of 1024 keys, 2 stages, two CTAs on an SM",
    ("8.0", 256): "decode 4 x 64, 256 work items of 512 keys, 2 stages, one CTA on an SM",
    ("8.9", 128): "decode 4 x 32, 128 work items of 1024 keys, 2 stages, two CTAs on an SM",
    ("9.0", 128): "decode 4 x 64, 128 work items of 1024 keys, 3 stages, two CTAs on an SM",
    ("12.0", 256): "decode 4 x 32, 256 work items of 512 keys, 2 stages, one CTA on an SM",
}


@pytest.mark.parametrize(("capability", "dim"), DECODE_TILES)
def test_few_queries_run_the_decode_kernel(capability: str, dim: int) -> None:
    target = Target("cuda", "some GPU", capability, 100)
    made = dataclasses.replace(plan(dim, q_len=1, instruction="mma"), q_heads=32, kv_heads=8)
    text = support.BACKEND.tile_sizes(made, target)
    assert text.split(": forward ")[1].split(", backward")[0] == DECODE_TILES[capability, dim]
    assert all(set(x) == {"block_q_bwd", "block_kv_bwd"} for x in support.BACKEND.tile_candidates(made, target))


@pytest.mark.parametrize("capability", CARDS)
def test_a_decode_tile_follows_from_rows_head_dims_and_card(capability: str) -> None:
    """It fits, and neither batch nor length nor the number of key heads changes it."""
    card = CARDS[capability]
    for dim, rows, page in itertools.product((16, 72, 128, 192, 256), (1, 7, 64), (0, 16)):
        made = dataclasses.replace(plan(dim, q_len=1, **MMA), q_heads=2 * rows, kv_heads=2, page=page)
        assert decode_mma_tiles.mma_decode_refuses(made, card) is None
        tile = decode_mma_tiles.mma_decode_tile(made, card)
        assert tile.resident_ctas(card) >= 1
        assert tile.chunk % tile.block_kv == 0
        other = dataclasses.replace(made, batch=5, kv_len=100_000, q_heads=8 * rows, kv_heads=8)
        assert decode_mma_tiles.mma_decode_tile(other, card) == tile


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12")
@pytest.mark.parametrize("target", [A100, L40S, RTX, H200])
def test_the_backward_pass_runs_too(target: Target) -> None:
    made, wanted = plan(**MMA), Wanted(True, True, True, False, False, False, ())
    assert support.BACKEND.refuses_backward(made, target, wanted, None) is None


@pytest.mark.parametrize("name", ["xla", "mosaic_tpu", "reference"])
@pytest.mark.parametrize("instruction", ["mma", "tcgen05"])
def test_other_backends_refuse_the_instruction(name: str, instruction: typing.Any) -> None:
    q = jax.numpy.ones((1, 8, 1, 16), "bfloat16")
    with pytest.raises(NotImplementedError) as error:
        flexjax.flex_attention(q, q, q, implementation=name, kernel_options=KernelOptions(instruction=instruction))
    assert (
        f"{name}: kernel_options.instruction={instruction!r} is for the kernels of mosaic_gpu; {name} has no such choice."
        in str(error.value)
    )
