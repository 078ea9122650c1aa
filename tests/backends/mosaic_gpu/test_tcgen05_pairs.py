"""Pairs of CTAs on tcgen05: which dK/dV kernels get them, and their machine code. Values: test_tcgen05_backward.py."""

import dataclasses
import typing

import jax
import pytest

from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.backward import tcgen05_tiles as backward_tcgen05_tiles
from flexjax.backends.mosaic_gpu.backward.tcgen05_tiles import Tcgen05Tiles
from flexjax.backends.mosaic_gpu.families import kernel_plans
from flexjax.backends.mosaic_gpu.families.choose_family import family_of
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
from flexjax.backends.mosaic_gpu.machine.shared_memory import TMEM_COLUMNS, scratch_bytes, tmem_columns
from flexjax.backends.target import Target
from flexjax.ir.origin import OriginLayout
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan
from flexjax.types import KernelOptions

B200 = Target("cuda", "NVIDIA B200", "10.0", 148)


def plan(dim: int = 128, block: int | None = None, user_lists: bool = False, **options: typing.Any) -> KernelPlan:
    """Attention over 8192 queries and keys that asks for pairs."""
    return KernelPlan(
        *(2, 16, 16, 8192, 8192, dim, dim, "bfloat16", "BTNH", dim**-0.5),
        blocks=None if block is None else BlockLayout(1, 1, block, block, 1, 32, 1, 32, from_user_lists=user_lists),
        options=KernelOptions(instruction="tcgen05", **{"cta_pairs": True, **options}),
    )


def tiles(made: KernelPlan) -> Tcgen05Tiles:
    found = backward_tcgen05_tiles.backward_tiles(
        kernel_plans.kernel_plan(made, family_of(None, made.options), backward=True)
    )
    assert found is not None
    return found


def test_pairs_are_for_wide_heads_and_mask_blocks_of_256_keys() -> None:
    for made, blocks, pairs in (
        (plan(), (0, 0), True),
        (plan(100), (0, 0), True),
        (plan(96), (0, 0), False),
        (plan(64), (0, 0), False),
        (plan(64, block=128), (128, 128), False),
        (plan(block=64), (128, 256), True),
        (plan(block=128), (128, 256), True),
        (plan(block=512), (512, 512), True),
        (plan(block=128, user_lists=True), (128, 128), False),
        (plan(block=256, user_lists=True), (256, 256), True),
        (dataclasses.replace(plan(block=128), origin=OriginLayout(1, 8192, 1, 384, 22)), (128, 128), False),
        (dataclasses.replace(plan(block=128), origin=OriginLayout(1, 8192, 1, 512, 16)), (128, 256), True),
        (plan(block=128, cta_pairs=False), (128, 128), False),
    ):
        assert kernel_plans.kernel_blocks(made, family_of(None, made.options), backward=True) == blocks
        assert tiles(made).pairs == pairs


def test_a_pair_takes_the_memory_of_two_ctas() -> None:
    """Halves of visited tiles, by rows and by columns, take as many bytes as whole tiles."""
    made = plan()
    alone, paired = (
        backward_tcgen05_tiles.scratch(made, dataclasses.replace(tiles(made), pairs=pairs), both=True)
        for pairs in (False, True)
    )
    assert scratch_bytes(alone) == scratch_bytes(paired) <= CARDS["10.0"].cta_memory
    assert tmem_columns(alone) == tmem_columns(paired) == TMEM_COLUMNS


def test_explain_says_that_ctas_form_pairs() -> None:
    size = "backward dQ and dK/dV 128 x 128 by tcgen05"
    pairs = ", dK/dV in pairs of CTAs"
    for made, end in ((plan(), pairs), (plan(block=64), pairs), (plan(64), ""), (plan(cta_pairs=False), "")):
        assert support.refuses(made, B200, (0, 11, 2)) is None
        assert support.BACKEND.tile_sizes(made, B200).endswith(size + end)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12")
@pytest.mark.parametrize("card", ["sm_100", "sm_103"])
def test_machine_code_multiplies_in_pairs(card: str) -> None:
    """UTCHMMA.2CTA, commits to both CTAs and copies that the first one learns of in dK/dV, and nowhere else; no spills."""
    from tests.backends.mosaic_gpu import aot_cards, compile_hopper

    missing = compile_hopper.missing_disassembler()
    if missing is not None:
        pytest.skip(missing)
    lines = list(aot_cards.sweep(card, [aot_cards.PAIRS + name for name in aot_cards.PAIRED[:2]]))
    print("\n".join(lines))
    assert [line.split()[0] for line in lines] == ["ok", "ok"], "\n".join(lines)
    for line in lines:
        (kernel,) = (text for text in line.splitlines() if f" {aot_cards.TCGEN05[2]}: " in text)
        assert ", 0 bytes spilled, " in kernel
        assert " 80 UTCHMMA.2CTA, " in kernel
