"""The backward kernels on mma.sync in the simulator, against dense jax.vjp in float32: every feature on a small problem."""

import typing

import jax
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu.backward import mma_tiles as backward_mma_tiles
from flexjax.backends.mosaic_gpu.backward.mma_tiles import MmaBackwardTiles, Size, scratch
from flexjax.backends.mosaic_gpu.families import choose_kernel, mma_backward
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
from flexjax.backends.mosaic_gpu.machine.shared_memory import scratch_bytes
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan
from tests.cases.hopper_backward import BACKWARD, BY_PLACES, CAPTURED, PAIR_BIAS
from tests.cases.on_hopper import BackwardProblem, assert_gradients_close, backward_problem, causal, normal, with_extra
from tests.marks import some_slow

CARDS_BY_COPYING = ("8.9", "12.0")
REFUSED = "columns of two CTAs"
"""In the names of problems with head dims above 256, which these kernels do not take."""
SMALL: dict[str, dict[str, typing.Any]] = {
    "grouped heads of odd sizes": {
        "mask": causal, "q_len": 70, "kv_len": 150, "heads": 2, "kv_heads": 1, "dim": 24, "value_dim": 40, "sinks": True,
        "d_lse": True, "block": (128, 128),
    },
    "lists of each head": {
        "mask": lambda b, h, q, k: (q >= k) & ((h == 1) | (k < 64)), "mask_heads": 2, "q_len": 192, "kv_len": 128, "heads": 2,
        "kv_heads": 1, "dim": 16, "block": (64, 64),
    },
    "head without visits": {
        "mask": lambda b, h, q, k: (q >= k) & (h != 1), "mask_heads": 3, "q_len": 128, "kv_len": 128, "heads": 3,
        "kv_heads": 1, "dim": 16, "block": (64, 64),
    },
    "wide heads of two sizes": {"dim": 256, "value_dim": 144, "q_len": 96, "kv_len": 80, "heads": 1, "mask": causal},
    "slope of wide heads": {
        "dim": 200, "value_dim": 192, "q_len": 80, "kv_len": 96, "heads": 1, "captured": (normal(1),),
        "score": lambda c, s, b, h, q, k: s + 0.02 * c[0][h] * (k - q),
    },
    "pair bias of wide heads": {
        "dim": 160, "q_len": 136, "kv_len": 200, "heads": 1, "mask": causal, "block": (64, 64), "captured": (normal(1, 136, 200),),
        "score": lambda c, s, b, h, q, k: s + c[0][h, q, k],
    },
    "table by a difference, of two batch entries": {
        "dim": 16, "q_len": 96, "kv_len": 80, "batch": 2, "heads": 1, "mask": causal, "captured": (normal(200),),
        "score": lambda c, s, b, h, q, k: s + c[0][q - k + 90],
    },
    "blocks that reach a tile past the padding": {
        "dim": 16, "q_len": 200, "kv_len": 200, "heads": 1, "mask": causal, "block": (320, 320), "captured": (normal(1, 200, 200),),
        "score": lambda c, s, b, h, q, k: s + c[0][h, q, k],
    },
}  # fmt: skip


def gradients(made: BackwardProblem, card: str = "8.0") -> Gradients:
    kernels = lambda plan, given: mma_backward.backward(plan, given, CARDS[card])
    call = jax.jit(lambda *arrays: with_extra(kernels, made.plan, BackwardInputs(*arrays, *made.given[4:])))
    return call(*made.given[:4])


def check(case: dict[str, typing.Any], card: str = "8.0") -> None:
    made = backward_problem(**case)
    # Sums of numbers of both signs: what the rounding of the forward pass's output leaves in delta does not cancel in them.
    assert_gradients_close(gradients(made, card), made.expected, tolerance=3e-2 if "captured" in case else 8e-3)


QUICK = (("8.9", "grouped heads of odd sizes"), ("12.0", "lists of each head"))


@pytest.mark.parametrize(
    ("card", "name"), some_slow([(card, name) for card in CARDS_BY_COPYING for name in SMALL], QUICK)
)
def test_small(card: str, name: str) -> None:
    check(SMALL[name], card)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in BACKWARD if n != "tiles of 64 x 64" and REFUSED not in n])
def test_matches_dense(name: str) -> None:
    check(BACKWARD[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in (*CAPTURED, *BY_PLACES, *PAIR_BIAS) if REFUSED not in n])
def test_gradients_of_captures(name: str) -> None:
    rows = {**CAPTURED, **BY_PLACES, **{n: case for n, (case, *_) in PAIR_BIAS.items()}}
    check(rows[name])


SIZES = sorted(
    {
        size
        for sizes in (backward_mma_tiles.DQ_SIZES, backward_mma_tiles.DKV_SIZES)
        for row in sizes.values()
        for size in row
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SIZES)))
def test_every_size(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = MmaBackwardTiles(("cp.async", "tma")[number % 2], *SIZES[number])
    monkeypatch.setattr(choose_kernel, "mma_backward_kernels", lambda plan, card: (tiles, tiles))
    dim = 64 if tiles.split_columns else 16  # a half of the columns is 16 at least
    check({"mask": causal, "q_len": 200, "kv_len": 150, "heads": 2, "kv_heads": 1, "dim": dim})


@pytest.mark.slow
@pytest.mark.parametrize("copying", ["cp.async", "tma"])
def test_split_columns_with_a_kernel_for_each_gradient(
    copying: typing.Literal["cp.async", "tma"], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles, case = (
        MmaBackwardTiles(copying, 128, 2, 64, 1, True),
        {**SMALL["wide heads of two sizes"], "q_len": 200, "heads": 2},
    )
    monkeypatch.setattr(choose_kernel, "mma_backward_kernels", lambda plan, card: (tiles, tiles))
    check(case)


SPLIT = {
    ("8.0", 192): (Size(128, 2, 64, 1, True), Size(64, 2, 64, 1, True)), ("8.0", 256): (Size(64, 2, 64, 1, True), Size(64, 2, 64, 1, True)),
    ("8.9", 192): (Size(64, 2, 32, 1, True), Size(64, 2, 32, 1, True)), ("8.9", 256): (Size(64, 1, 16, 2), Size(64, 1, 16, 2)),
    ("9.0", 192): (Size(128, 2, 64, 1, True), Size(64, 2, 64, 1, True)), ("9.0", 256): (Size(128, 2, 64, 1, True), Size(64, 2, 64, 1, True)),
}  # fmt: skip


@pytest.mark.parametrize(("capability", "dim"), SPLIT)
def test_warpgroups_split_the_columns_of_wide_heads(capability: str, dim: int) -> None:
    plan, card = KernelPlan(1, 2, 2, 1024, 1024, dim, dim, "bfloat16", "BTNH", 1.0), CARDS[capability]
    dq, dkv = choose_kernel.mma_backward_kernels(plan, card)
    assert (dq, dkv) == tuple(MmaBackwardTiles(card.copying, *size) for size in SPLIT[capability, dim])
    assert dkv.joint(plan) == dkv.split_columns
    for tiles, gradients in ((dq, 1), (dkv, 2 if dkv.joint(plan) else 1)):
        assert scratch_bytes(scratch(plan, tiles, gradients)) <= card.cta_memory


@pytest.mark.parametrize("dims", [(160, 8), (16, 256)], ids=str)
def test_columns_of_a_narrow_gradient_are_not_split(dims: tuple[int, int]) -> None:
    plan = KernelPlan(1, 2, 2, 1024, 1024, *dims, "bfloat16", "BTNH", 1.0)
    for card in CARDS.values():
        for found in (backward_mma_tiles.dq_candidates, backward_mma_tiles.dkv_candidates):
            assert found(plan, card)
            assert not any(tiles.split_columns for tiles in found(plan, card))


def test_a_joint_kernel_has_shared_memory_for_the_weights_of_both_gradients() -> None:
    plan, tiles = (
        KernelPlan(1, 1, 1, 64, 64, 256, 256, "bfloat16", "BTNH", 1.0),
        MmaBackwardTiles("tma", 64, 2, 64, 1, True),
    )
    alone, joint = (scratch_bytes(scratch(plan, tiles, n)) for n in (1, 2))
    assert joint - alone == 64 * 64 * 2


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 160, 256])
def test_sizes_fit_every_card(card: str, dim: int) -> None:
    plan = KernelPlan(1, 2, 2, 1024, 1024, dim, dim, "bfloat16", "BTNH", 1.0)
    for found in (backward_mma_tiles.dq_candidates, backward_mma_tiles.dkv_candidates):
        assert found(plan, CARDS[card])
