"""When three consumer warpgroups run under a mask, and what they compute."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, masks
from flexjax.backends.mosaic_gpu.forward import hopper_three_groups
from flexjax.backends.target import Target
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.passes.dispatch import Run
from tests.arrays import array
from tests.cases.on_hopper import benched
from tests.marks import some_slow

CPU = Target("cpu")


IDS = np.repeat(np.arange(8), 1024).astype(np.int32)
THREE = {
    "causal": benched,
    "asked for": lambda: benched(1024, 4, block_q=192),
    "prefix": lambda: benched(mask_mod=masks.prefix_lm(1024)),
    "a wide window": lambda: benched(16384, 16, masks.sliding_window(4096)),
    "causal, 2048 tokens": lambda: benched(2048, 128),
    "causal, 9999 tokens": lambda: benched(9999, 12),
}
TWO = {
    "few query tiles": lambda: benched(1024, 4),
    "a narrow window": lambda: benched(16384, 16, masks.sliding_window(256)),
    "captured documents": lambda: benched(mask_mod=masks.document(IDS)),
    "ALiBi": lambda: benched(score_mod=lambda s, b, h, q, k: s + 0.1 * (k - q)),
    "another tile": lambda: benched(block_q=128),
    "mma.sync": lambda: benched(instruction="mma"),
    "four stages": lambda: benched(num_stages=4),
}


@pytest.mark.parametrize("name", [*THREE, *TWO])
def test_masks_that_take_three_groups(name: str) -> None:
    plan = (THREE | TWO)[name]()
    assert (hopper_three_groups.mask_blocks(plan) == hopper_three_groups.BLOCK) == (name in THREE)


def test_a_mask_of_very_many_blocks_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_three_groups, "MOST_BLOCKS", 10)
    hopper_three_groups._visited.cache_clear()
    assert hopper_three_groups.mask_blocks(benched()) is None
    hopper_three_groups._visited.cache_clear()


gpu = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12"
)


@gpu
def test_the_forward_tile_and_the_blocks_of_each_pass() -> None:
    from flexjax.backends.mosaic_gpu.families import choose_kernel
    from flexjax.backends.mosaic_gpu.families.hopper import HOPPER
    from flexjax.backends.mosaic_gpu.families.kernel_plans import kernel_plan

    tile = choose_kernel.forward_kernel(made := kernel_plan(benched(), HOPPER))
    assert (tile.groups, tile.overlap, tile.ping_pong, tile.query_slots) == (3, True, False, 2)
    assert tile.fits
    assert made.blocks is not None
    assert (made.blocks.block_q, made.blocks.block_kv) == hopper_three_groups.BLOCK
    backward = kernel_plan(benched(), HOPPER, backward=True)
    assert backward.blocks is not None
    assert backward.blocks.block_q == 128


@gpu
@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
def test_other_cards_visit_the_blocks_of_the_mask(capability: str) -> None:
    """And have the tile of a call that names their instruction."""
    from flexjax.backends.mosaic_gpu.support import BACKEND

    card, plan = Target("cuda", "some GPU", capability, 100), benched()
    named = dataclasses.replace(plan, options=dataclasses.replace(plan.options, instruction="mma"))
    assert not any(step.why.startswith("block mask: blocks") for step in BACKEND.rewrites(plan, card))
    assert BACKEND.tile_sizes(plan, card) == BACKEND.tile_sizes(named, card)
    assert BACKEND.tile_candidates(plan, card) == BACKEND.tile_candidates(named, card)


@gpu
@pytest.mark.parametrize(("score_mod", "groups"), [(None, 3), (lambda s, b, h, q, k: s * 2.0, 2)])
def test_an_odd_number_of_keys_without_a_mask(score_mod: typing.Any, groups: int) -> None:
    from flexjax.backends.mosaic_gpu.families import choose_kernel

    x = jax.ShapeDtypeStruct((2, 8191, 32, 64), jnp.bfloat16)
    given: typing.Any = {"score_mod": score_mod}
    tiles: list[int] = []
    jax.eval_shape(
        lambda x: tiles.append(choose_kernel.forward_kernel(prepare(Arguments(x, x, x, **given)).plan).groups), x
    )
    assert tiles == [groups]


@gpu
@pytest.mark.parametrize(
    ("q_len", "kv_len", "mask_mod"),
    some_slow(
        [(637, 637, masks.causal), (500, 640, masks.causal), (192, 128, masks.causal), (200, 333, None)],
        [(500, 640, masks.causal)],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_three_groups(q_len: int, kv_len: int, mask_mod: typing.Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexjax.backends.mosaic_gpu.families import choose_kernel
    from flexjax.backends.mosaic_gpu.families.hopper import HOPPER
    from flexjax.backends.mosaic_gpu.families.kernel_plans import kernel_plan
    from flexjax.backends.mosaic_gpu.support import BACKEND

    for speed in ("SPEED", "SPEED_UNDER_MASK"):  # also for calls that do not fill the GPU
        monkeypatch.setattr(hopper_three_groups, speed, 100.0)
    rng = np.random.default_rng(0)
    shapes = (1, q_len, 2, 64), (1, kv_len, 1, 64), (1, kv_len, 1, 64)
    arrays = [array(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    given: typing.Any = {"mask_mod": mask_mod, "kernel_options": KernelOptions(interpret=True)}
    made = prepare(Arguments(*arrays, **given))
    assert choose_kernel.forward_kernel(kernel_plan(made.plan, HOPPER)).groups == 3
    found = jax.jit(lambda operands: Run(BACKEND, made.plan, CPU).forward(operands))(made.operands)
    want = flexjax.flex_attention(*arrays, mask_mod=mask_mod, implementation="reference")
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found.out, want)), atol=0.02, rtol=0.02)


@gpu
def test_tiles_of_both_numbers_of_groups_are_timed() -> None:
    """The first is what runs; no tile is offered that the kernel refuses."""
    from flexjax.backends.mosaic_gpu.families import choose_kernel
    from flexjax.backends.mosaic_gpu.families.hopper import HOPPER
    from flexjax.backends.mosaic_gpu.families.kernel_plans import kernel_plan
    from flexjax.backends.mosaic_gpu.support import BACKEND

    hopper = Target("cuda", "NVIDIA H200", "9.0", 132)
    plan = benched()
    found = BACKEND.tile_candidates(plan, hopper)
    sizes = [(c["block_q"], c["block_kv"]) for c in found]
    assert sizes[0] == hopper_three_groups.BLOCK
    assert (128, 128) in sizes
    for asked in found:
        forward = {name: asked[name] for name in ("block_q", "block_kv", "num_stages") if name in asked}
        made = benched(**forward)
        assert BACKEND.refuses(made, hopper) is None
        tile = choose_kernel.forward_kernel(kernel_plan(made, HOPPER))
        assert (tile.block_q, tile.block_kv) == (asked["block_q"], asked["block_kv"])
    assert found[0]["block_q_bwd"] == 128
