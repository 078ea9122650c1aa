"""Untimed choices: all off by default, and right in the simulator where they are on."""

import collections
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, masks
from flexjax.backends.target import Target
from flexjax.call_arguments import DEFAULTS
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.prepare import prepare
from tests.arrays import array
from tests.cases.on_hopper import backward_problem, causal
from tests.marks import some_slow

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu import choose_kernel, dq_order, forward_barriers, forward_tiles, untimed
from flexjax.backends.mosaic_gpu.forward_tiles import ForwardTile
from flexjax.backends.mosaic_gpu.support import BACKEND, _kernel_plan
from tests.backends.mosaic_gpu.test_backward_interpret import ENOUGH_THREADS, check_one_kernel

CPU = Target("cpu")


def call(
    q_len: int, kv_len: int, heads: int = 2, mask_mod: typing.Any = masks.causal, **options: typing.Any
) -> typing.Any:
    """A call under a mask, at head dim 64, with one key head."""
    rng = np.random.default_rng(0)
    shapes = (1, q_len, heads, 64), (1, kv_len, 1, 64), (1, kv_len, 1, 64)
    arrays = [array(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    given: typing.Any = DEFAULTS | {"mask_mod": mask_mod, "kernel_options": KernelOptions(interpret=True, **options)}
    return prepare(*arrays, **given), arrays


def benched(tokens: int = 8192, heads: int = 32, **options: typing.Any) -> KernelPlan:
    """Causal attention of the benchmarks at head dim 64, as the kernels see it."""
    x = jax.ShapeDtypeStruct((2, tokens, heads, 64), jnp.bfloat16)
    given: typing.Any = DEFAULTS | {"mask_mod": masks.causal, "kernel_options": KernelOptions(**options)}
    plans: list[KernelPlan] = []
    jax.eval_shape(lambda x: plans.append(prepare(x, x, x, **given).plan), x)
    return plans[0]


def chosen(plan: KernelPlan) -> tuple[object, object]:
    """The tile of the forward kernel, and the kernels of the backward pass."""
    return choose_kernel.forward_kernel(_kernel_plan(plan)), choose_kernel.backward_kernels(_kernel_plan(plan, True))


def test_all_are_off_and_end_with_their_context() -> None:
    plan = benched()
    before = chosen(plan)
    assert untimed.choices() == untimed.Untimed()
    assert not any(vars(untimed.choices()).values())
    with untimed.using(forward_three=True, backward_upward=True):
        with untimed.using(backward_upward=False):
            assert untimed.choices() == untimed.Untimed(forward_three=True)
        assert chosen(plan) != before
    assert chosen(plan) == before


def test_three_groups_visit_blocks_of_their_own() -> None:
    with untimed.using(forward_three=True, forward_turns=True, forward_query_slots=True):
        tile = choose_kernel.forward_kernel(made := _kernel_plan(benched()))
        assert (tile.groups, tile.overlap, tile.ping_pong, tile.query_slots) == (3, True, True, 2)
        assert tile.fits
        assert made.blocks is not None
        assert (made.blocks.block_q, made.blocks.block_kv) == untimed.THREE_GROUPS_BLOCK
        backward = _kernel_plan(benched(), backward=True)
        assert backward.blocks is not None
        assert backward.blocks.block_q == 128
        few, asked = benched(1024, 4), benched(block_q=128)  # too few tiles of 192 queries; another tile is asked for
        assert choose_kernel.forward_kernel(_kernel_plan(few)).groups == 2
        assert choose_kernel.forward_kernel(_kernel_plan(asked)).groups == 2


@pytest.mark.parametrize(
    ("q_len", "kv_len"), some_slow([(640, 640), (500, 640), (192, 128)], [(500, 640)]), ids=lambda n: str(n)
)
def test_three_groups_under_a_mask(q_len: int, kv_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_tiles, "THREE_GROUPS_SPEED", 100.0)  # also for calls that do not fill the GPU
    with untimed.using(forward_three=True, forward_query_slots=True, forward_free_ends=True):
        made, arrays = call(q_len, kv_len)
        assert choose_kernel.forward_kernel(_kernel_plan(made.plan)).groups == 3
        found = jax.jit(lambda operands: BACKEND.forward(made.plan, operands, CPU))(made.operands)
    want = flexjax.flex_attention(*arrays, mask_mod=masks.causal, implementation="reference")
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found.out, want)), atol=0.02, rtol=0.02)


# ------------------------------------------------------------------- turns of three warpgroups


def turns_of(groups: int, turns: int) -> list[tuple[int, int]]:
    """Runs the named barriers of the ping-pong beside `overlap`: (warpgroup, number of its turn) in the order in which turns begin.

    turns   of each warpgroup
    """
    tile = ForwardTile(groups, 64, 128, 2, 2, 64, 64, ping_pong=True, overlap=True)
    ping_pong, ops = forward_barriers.PingPong(tile, False), collections.defaultdict(list)
    with pytest.MonkeyPatch.context() as patched:
        for group in range(groups):
            note = lambda what, number, threads, group=group: ops[group].append((what, int(number), threads))
            patched.setattr(forward_barriers, "_named_barrier", note)
            patched.setattr(forward_barriers, "when", lambda condition: lambda run: run() if condition else None)
            ping_pong.begin(typing.cast(typing.Any, group))
            for _ in range(turns):
                ping_pong.wait(group)
                ops[group].append(("turn", 0, 0))
                ping_pong.signal(group)
    arrived: collections.Counter[int] = collections.Counter()
    log: list[tuple[int, int]] = []
    at, taken = [0] * groups, [0] * groups

    def moves(group: int) -> Iterator[bool]:
        """True for each operation that the warpgroup can make now."""
        while at[group] < len(ops[group]):
            what, number, threads = ops[group][at[group]]
            if what == "sync" and not arrived[number]:
                return
            assert threads in (0, 2 * forward_barriers.WARPGROUP)
            arrived[number] += {"arrive": 1, "sync": -1, "turn": 0}[what]
            assert arrived[number] <= 1, "a barrier is arrived at twice"
            if what == "turn":
                log.append((group, taken[group]))
                taken[group] += 1
            at[group] += 1
            yield True

    while any(list(moves(group)) for group in reversed(range(groups))):
        pass
    assert at == [len(ops[group]) for group in range(groups)], "a warpgroup waits for ever"
    return log


@pytest.mark.parametrize("groups", [2, 3])
def test_warpgroups_take_turns_one_after_another(groups: int) -> None:
    assert turns_of(groups, 5) == [(group, n) for n in range(5) for group in range(groups)]


# ------------------------------------------------------------------- the fused kernel


def test_an_upward_order_is_for_square_tiles_and_many_of_them() -> None:
    with untimed.using(backward_upward=True):
        fused = choose_kernel.backward_kernels(_kernel_plan(benched(), True))
        assert isinstance(fused, choose_kernel.FusedKernel)
        assert fused.tiles.queries == 128
        upward = dq_order.order_for(benched(), 64, 64)
        assert (upward.downward, upward.waits, upward.sums) == (False, False, 1)
        assert dq_order.order_for(
            benched(), 128, 64
        ).downward  # tiles of 64 queries: a hand-off is shorter than two steps
        assert dq_order.order_for(benched(heads=2), 64, 64).downward  # the longest CTAs would end last
    assert dq_order.order_for(benched(), 64, 64).downward


@pytest.mark.parametrize(
    ("choice", "deterministic", "mask"),
    some_slow(
        [
            ("backward_upward", True, causal),
            ("backward_dq_first", True, causal),
            ("backward_dq_first", True, None),
            ("backward_heads", False, causal),
        ],
        [],
    ),
)
@ENOUGH_THREADS
def test_fused_kernel(choice: str, deterministic: bool, mask: typing.Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dq_order, "MOST_UPWARD_DELAY", 100.0)
    monkeypatch.setattr(dq_order, "HEADS", 2)
    monkeypatch.setattr(dq_order, "L2_BYTES", 1)
    case: dict[str, typing.Any] = dict(heads=3, kv_heads=3, q_len=384, kv_len=384, mask=mask)
    with untimed.using(**{choice: True}):
        check_one_kernel(monkeypatch, deterministic, 128, **case)
        options = KernelOptions(deterministic=deterministic, block_q_bwd=128)
        plan = backward_problem(**case, dim=64, options=options).plan
        fused = choose_kernel.backward_kernels(plan)
        assert isinstance(fused, choose_kernel.FusedKernel)
        order = dq_order.order_for(plan, 3, 3)
    assert fused.tiles.dq_first == (choice == "backward_dq_first")
    assert (fused.tiles.heads == 2) == (choice == "backward_heads")
    assert order.waits == (choice != "backward_upward")
