"""Which calls run the kernels on tcgen05, with which tiles and mask blocks, and what is refused; nothing here compiles."""

import dataclasses
import typing

import jax
import pytest

from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.backward import tcgen05_tiles as backward_tcgen05_tiles
from flexjax.backends.mosaic_gpu.families import kernel_plans
from flexjax.backends.mosaic_gpu.families.choose_family import family_of
from flexjax.backends.mosaic_gpu.families.tcgen05 import Tcgen05
from flexjax.backends.mosaic_gpu.forward import tcgen05_tiles as forward_tcgen05_tiles
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
from flexjax.backends.mosaic_gpu.machine.shared_memory import TMEM_COLUMNS, scratch_bytes, tmem_columns
from flexjax.backends.target import Target
from flexjax.ir.origin import OriginLayout
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan, Wanted
from flexjax.types import KernelOptions

JAX = (0, 11, 2)
B200 = Target("cuda", "NVIDIA B200", "10.0", 148)
B300 = Target("cuda", "NVIDIA B300", "10.3", 148)
H200 = Target("cuda", "NVIDIA H200", "9.0", 132)
TCGEN05 = {"instruction": "tcgen05"}


def plan(
    dim: int = 128,
    dtype: str = "bfloat16",
    block: int | None = None,
    q_len: int = 8192,
    user_lists: bool = False,
    value_dim: int | None = None,
    **options: typing.Any,
) -> KernelPlan:
    """Attention over 8192 keys."""
    return KernelPlan(
        *(2, 16, 16, q_len, 8192, dim, value_dim or dim, dtype, "BTNH", dim**-0.5),
        blocks=None if block is None else BlockLayout(1, 1, block, block, 1, 32, 1, 32, from_user_lists=user_lists),
        options=KernelOptions(**TCGEN05, **options),
    )


TILES = {
    64: "forward 256 x 128, 3 stages", 128: "forward 256 x 128, 2 stages", 192: "forward 256 x 64, 2 stages",
    256: "forward 128 x 128, 1 stage",
}  # fmt: skip


@pytest.mark.parametrize("target", [B200, B300])
@pytest.mark.parametrize("dim", TILES)
def test_explain_names_the_card_and_the_tile(dim: int, target: Target) -> None:
    made = plan(dim)
    assert support.refuses(made, target, JAX) is None
    text = support.BACKEND.tile_sizes(made, target)
    backward = "dQ and dK/dV 128 x 128 by tcgen05" if dim <= 128 else "dQ 128 x 64, dK/dV 64 x 64"
    assert text == f"tcgen05 for compute capability {target.capability}: {TILES[dim]}, backward {backward}"


@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_tiles_fit_shared_and_tensor_memory(dim: int) -> None:
    for value_dim in (16, 64, 128, 256):
        found = forward_tcgen05_tiles.forward_candidates(plan(dim, value_dim=value_dim))
        assert found
        for tile in found:
            scratch = forward_tcgen05_tiles.forward_scratch(tile)
            assert scratch_bytes(scratch) <= CARDS["10.0"].cta_memory
            assert tmem_columns(scratch) <= TMEM_COLUMNS


def test_keys_and_queries_of_a_block() -> None:
    """The kernels on tcgen05 visit larger blocks than the mask may have; those on mma.sync visit those of the mask."""
    for made, blocks in (
        (plan(block=128), (256, 128)),
        (plan(block=64), (256, 64)),
        (plan(block=48), (256, 128)),
        (plan(block=512), (512, 512)),
        (plan(block=128, q_len=100), (128, 128)),
        (plan(block=128, user_lists=True), (128, 128)),
        (plan(block=128, block_q=128), (128, 128)),
        (dataclasses.replace(plan(block=128), origin=OriginLayout(1, 384, 22, 8192, 1)), (128, 128)),
    ):
        assert kernel_plans.kernel_blocks(made, family_of(None, made.options)) == blocks
        assert forward_tcgen05_tiles.forward_candidates(kernel_plans.kernel_plan(made, family_of(None, made.options)))
    for made, blocks in (
        (plan(block=128), (128, 128)), (plan(block=64), (128, 128)), (plan(block=256), (256, 256)), (plan(256, block=64), (64, 64)),
    ):  # fmt: skip
        assert kernel_plans.kernel_blocks(made, family_of(None, made.options), backward=True) == blocks
        assert (
            backward_tcgen05_tiles.backward_tiles(
                kernel_plans.kernel_plan(made, family_of(None, made.options), backward=True)
            )
            is None
        ) == (made.head_dim > 128)
    unasked = dataclasses.replace(plan(block=128), options=KernelOptions())
    assert kernel_plans.kernel_blocks(unasked, family_of(None, unasked.options)) == (128, 128)


@pytest.mark.parametrize("dim", [64, 256])
def test_options_choose_among_the_tiles(dim: int) -> None:
    found = support.BACKEND.tile_candidates(plan(dim), B200)
    assert len(found) > 3
    for options in found:
        made = plan(dim, **options)
        assert support.refuses(made, B200, JAX) is None
        tile = forward_tcgen05_tiles.forward_tile(made)
        assert (tile.block_q, tile.block_kv, tile.stages) == tuple(
            options[n] for n in ("block_q", "block_kv", "num_stages")
        )


def test_the_card_of_a_target() -> None:
    options = KernelOptions(**TCGEN05)
    for target, capability in ((B200, "10.0"), (B300, "10.3"), (None, "10.0")):
        assert family_of(target, options) == Tcgen05(CARDS[capability])
    assert family_of(H200, dataclasses.replace(options, interpret=True)) == Tcgen05(CARDS["10.0"])


REFUSED: dict[str, tuple[Target, dict[str, typing.Any], str]] = {
    "H200": (H200, {}, "The GPU kernels on tcgen05 are for compute capability 10.0, 10.3; NVIDIA H200 has 9.0."),
    "unknown": (
        Target("cuda", "some GPU"), {},
        "The GPU kernels on tcgen05 are for compute capability 10.0, 10.3; the compute capability of some GPU is not known.",
    ),
    "float32": (B200, {"dtype": "float32"}, "The GPU kernels on tcgen05 take bfloat16 and float16 inputs, not float32."),
    "wide": (B200, {"dim": 320}, "The GPU kernels on tcgen05 take head dims up to 256, not 320 and 320."),
    "tile": (
        B200, {"block_q": 64, "num_stages": 2},
        "No tile fits head dims 128 and 128 on compute capability 10.0 with block_q=64, num_stages=2: the GPU kernels on tcgen05 take "
        "block_q 128 or 256, block_kv 64 or 128, num_stages 1 to 3, dividing the mask's blocks.",
    ),
}  # fmt: skip


ORIGIN = OriginLayout(1, 8192, 1, 8192, 1)


@pytest.mark.parametrize(
    ("blocks", "options", "unit"), [((128, 64), {}, 128), ((64, 64), {}, 128), ((128, 128), {"block_q": 256}, 256)]
)
def test_user_lists_beside_an_origin_are_refused_where_a_pass_would_visit_other_blocks(
    blocks: tuple[int, int], options: dict[str, int], unit: int
) -> None:
    """Larger blocks look up the class of the old block by whole-problem positions, which the lists do not have."""
    made = dataclasses.replace(
        plan(**options), origin=ORIGIN, blocks=BlockLayout(1, 1, *blocks, 1, 64, 1, 64, from_user_lists=True)
    )
    assert support.refuses(made, B200, JAX) == (
        "The GPU kernels on tcgen05 take a block mask from user lists beside an origin in blocks of multiples of "
        f"{unit} tokens, not {blocks[0]} x {blocks[1]}."
    )
    assert support.refuses(dataclasses.replace(made, origin=None), B200, JAX) is None
    large = dataclasses.replace(made, blocks=BlockLayout(1, 1, 256, 256, 1, 64, 1, 64, from_user_lists=True))
    assert support.refuses(large, B200, JAX) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    target, options, sentence = REFUSED[name]
    assert support.refuses(plan(**options), target, JAX) == sentence


def test_few_queries_run_the_decode_kernel_on_mma_sync() -> None:
    made = plan(q_len=1)
    assert support.refuses(made, B200, JAX) is None
    assert support.BACKEND.tile_sizes(made, B200).startswith(
        "mma.sync with tma for compute capability 10.0: forward decode "
    )


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12")
@pytest.mark.parametrize("target", [B200, B300])
def test_the_backward_pass_runs_too(target: Target) -> None:
    made, wanted = plan(block=128), Wanted(True, True, True, False, False, False, ())
    assert support.BACKEND.refuses_backward(made, target, wanted, None) is None


@pytest.mark.parametrize("dim", [16, 40, 64, 96, 128])
def test_backward_tiles_fit_shared_and_tensor_memory(dim: int) -> None:
    tiles = backward_tcgen05_tiles.backward_tiles(plan(dim))
    assert tiles is not None
    scratch = backward_tcgen05_tiles.scratch(plan(dim), tiles, both=True)
    assert scratch_bytes(scratch) <= CARDS["10.0"].cta_memory
    assert tmem_columns(scratch) <= TMEM_COLUMNS


@pytest.mark.parametrize("options", [{"block_q_bwd": 64}, {"block_kv_bwd": 64}])
def test_other_backward_tiles_run_on_mma_sync(options: dict[str, int]) -> None:
    made = plan(64, **options)
    assert support.refuses(made, B200, JAX) is None
    assert backward_tcgen05_tiles.backward_tiles(made) is None
    assert "tcgen05" not in support.BACKEND.tile_sizes(made, B200).split("backward")[1]


BY_TCGEN05 = "backward dQ and dK/dV 128 x 128 by tcgen05"


@pytest.mark.parametrize(
    ("made", "text", "first"),
    [
        (plan(64, block=64), BY_TCGEN05, (128, 128)),
        (plan(128, block=192), BY_TCGEN05, (128, 128)),
        (plan(256, block=64), "backward dQ 64 x 64, dK/dV 64 x 64", (64, 64)),
        (plan(64, block=64, block_q_bwd=64), "backward dQ 64 x 64, dK/dV 32 x 128", (64, 128)),
    ],
)
def test_the_backward_pass_is_described_on_the_blocks_that_it_visits(
    made: KernelPlan, text: str, first: tuple[int, int]
) -> None:
    """They differ from those of the forward pass. The first candidate is what runs without options."""
    assert support.BACKEND.tile_sizes(made, B200).endswith(text)
    (queries, keys), *_ = ((c["block_q_bwd"], c["block_kv_bwd"]) for c in support.BACKEND.tile_candidates(made, B200))
    assert (queries, keys) == first


def test_backward_options_are_checked_on_the_blocks_of_the_backward_pass() -> None:
    for name in ("block_q_bwd", "block_kv_bwd"):
        reason = support.refuses(plan(256, block=64, **{name: 128}), B200, JAX)
        assert reason == (
            f"The GPU kernels on mma.sync have no backward tile for {name}=128 and head dims 256 and 256 on compute capability 10.0: "
            "they take 64 or 128, dividing the mask's blocks."
        )
        assert support.refuses(plan(128, block=64, **{name: 128}), B200, JAX) is None
