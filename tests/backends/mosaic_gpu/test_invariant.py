"""`KernelOptions(invariant=True)` on the kernels for Hopper: the order of visits, and the same bits in the simulator.

`tools/device/check_invariant.py` compares the bits of the same ways on a GPU.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import KernelOptions, Origin, masks
from flexjax.backends.mosaic_gpu.families import kernel_plans
from flexjax.backends.mosaic_gpu.families.hopper import HOPPER
from flexjax.backends.mosaic_gpu.forward.hopper_tiles import forward_tile
from flexjax.backends.mosaic_gpu.forward.launch import inputs_for
from flexjax.backends.mosaic_gpu.forward.setup import HopperSetup
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.plan.rewrite import last_plan
from tests.door.same_bits import WAYS, Problem, differences, full

SIMULATED = KernelOptions(invariant=True, interpret=True)
SMALL = Problem(
    T=140, N=2, M=1, D=64, E=64, dtype="bfloat16", score="alibi", options=SIMULATED, implementation="mosaic_gpu"
)
ELSEWHERE = ("mesh", "scan", "packed", "4 shards", "captured")
"""What names of ways have in them that the simulator, which runs outside of jit, the kernels or two heads do not run; captured gradients
take a backward pass, whose accumulators the simulator calls a race."""


def setup_of(
    mask_mod: typing.Any, score_mod: typing.Any, T: int, **keywords: typing.Any
) -> tuple[HopperSetup, typing.Any]:
    """(the setup of the forward kernel, its mask as the scheduler reads it) of a call of one head."""
    x = jnp.zeros((1, T, 1, 64), jnp.bfloat16)
    options = KernelOptions(invariant=True)
    call = prepare(Arguments(x, x, x, mask_mod=mask_mod, score_mod=score_mod, kernel_options=options, **keywords))
    steps, operands = kernel_plans.forward_steps(call.plan, HOPPER), call.operands
    for step in steps:
        operands = step.operands(operands)
    plan = last_plan(call.plan, steps)
    setup = HopperSetup(plan, forward_tile(plan))
    return setup, inputs_for(setup, operands).mask_rows


def visited(setup: HopperSetup, rows: typing.Any, number: int) -> list[tuple[int, bool]]:
    """(first key, whether the step is masked) of the steps of a work item, by the loops of the consumer."""
    scheduler = setup.scheduler
    item = scheduler.item(rows, jnp.int32(number))
    found: list[tuple[int, bool]] = []
    n = jnp.int32(0)
    while n < item.total:
        before = n
        for masked in (False, True):
            end = scheduler.run_end(rows, item, n, masked)
            found += [(int(scheduler.kv_start(rows, item, jnp.int32(i))), masked) for i in range(int(n), int(end))]
            n = end
        assert n > before
    return found


ALIBI = lambda s, b, h, q, kv: s - 0.1 * (q - kv)
ISLANDS = lambda b, h, q, kv: (kv // 128 % 3 == 1) | ((q >= kv) & (kv % 256 < 140))


@pytest.mark.parametrize("score_mod", [None, ALIBI])
@pytest.mark.parametrize("mask_mod", [None, masks.causal, masks.sliding_window(200), ISLANDS])
@pytest.mark.parametrize("traced", [False, True])
def test_key_tiles_are_visited_in_one_direction(mask_mod: typing.Any, score_mod: typing.Any, traced: bool) -> None:
    T = 900
    keywords = {"key_value_seq_lengths": jnp.full(1, T - 70, jnp.int32)} if traced else {}
    setup, rows = setup_of(mask_mod, score_mod, T, **keywords)
    most = T - 70 if traced else T
    for number in range(setup.scheduler.items):
        steps = visited(setup, rows, number)
        starts = [start for start, _ in steps]
        assert starts == sorted(set(starts), reverse=score_mod is not None)
        first = int(setup.scheduler.item(rows, jnp.int32(number)).q_tile) * setup.tile.block_q
        q, kv = np.arange(first, min(first + setup.tile.block_q, T))[:, None], np.arange(T)[None, :]
        shown = (kv < most) & (np.ones_like(q, bool) if mask_mod is None else np.asarray(mask_mod(0, 0, q, kv)))
        of = lambda start, shown=shown: shown[:, start : start + setup.tile.block_kv]
        assert {int(n) // 128 * 128 for n in np.flatnonzero(shown.any(0))} <= set(starts)
        assert all(masked or (of(start).all() and start + 128 <= T) for start, masked in steps)
        if mask_mod is not None:
            assert not all(masked for _, masked in steps) or not any(of(s).all() for s, _ in steps if s + 128 <= most)


@pytest.mark.parametrize("mask_mod", [None, masks.causal, masks.sliding_window(200)])
def test_key_tiles_begin_where_documents_do(mask_mod: typing.Any) -> None:
    offsets, T = [3, 8, 8, 301, 860], 900
    setup, rows = setup_of(mask_mod, None, T, origin=Origin(documents=jnp.array(offsets)))
    of = np.searchsorted(offsets, np.arange(T), side="right") - 1
    at = np.arange(T) - np.array([*offsets[:-1], 0])[of]
    q, kv = np.arange(T)[:, None], np.arange(T)[None, :]
    shown = (of[q] == of[kv]) & (of[q] >= 0) & (of[q] < len(offsets) - 1)
    shown &= True if mask_mod is None else np.asarray(mask_mod(0, 0, at[q], at[kv]))
    for number in range(setup.scheduler.items):
        steps = visited(setup, rows, number)
        item = setup.scheduler.item(rows, jnp.int32(number))
        first = int(item.q_tile) * setup.tile.block_q
        mine = shown[first : first + setup.tile.block_q]
        needed = {int(n) - int(at[n]) % 128 for n in np.flatnonzero(mine.any(0))}
        assert needed <= {start for start, _ in steps}
        assert [start for start, _ in steps] == sorted({start for start, _ in steps})
        assert all(masked or mine[:, start : start + 128].all() for start, masked in steps)
        for n, (start, _) in enumerate(steps):
            packed = int(setup.scheduler.packed_start(rows, item, jnp.int32(n)))
            assert divmod(packed, 256) == (start, min(128, offsets[of[start] + 1] - start))
    if mask_mod is None:
        assert any(not masked for n in range(setup.scheduler.items) for _, masked in visited(setup, rows, n))


def refusal(arrays: typing.Any, **keywords: typing.Any) -> str:
    with pytest.raises(NotImplementedError) as error:
        flexjax.explain(*arrays, implementation="mosaic_gpu", device="h200", **keywords)
    return str(error.value).partition("mosaic_gpu: ")[2]


def test_what_the_kernels_refuse() -> None:
    x = lambda *shape, dtype="bfloat16": (jax.ShapeDtypeStruct(shape, dtype),) * 3
    call = {"kernel_options": KernelOptions(invariant=True)}
    take = "With kernel_options.invariant the GPU kernels take"
    assert refusal(x(1, 64, 2, 64, dtype="float32"), **call) == f"{take} bfloat16 and float16, not float32."
    assert refusal(x(1, 64, 2, 320), **call) == f"{take} head dims up to 256, not 320."
    assert refusal(x(1, 2049, 2, 64), **call) == f"{take} at most 2048 keys, not 2049."
    assert refusal(x(1, 64, 2, 64), origin=Origin(key=jnp.int32(3)), **call) == f"{take} no origin.key."
    packed = {"origin": Origin(documents=jnp.array([0, 64])), "score_mod": ALIBI}
    assert refusal(x(1, 64, 2, 64), **packed, **call) == f"{take} no score_mod beside origin.documents."
    mma = {"kernel_options": KernelOptions(invariant=True, instruction="mma")}
    no_order = (
        "The GPU kernels on mma.sync have no canonical order (kernel_options.invariant) yet; those for Hopper do."
    )
    assert refusal(x(1, 64, 2, 64), **mma) == no_order


def test_every_call_of_some_head_dims_has_the_same_keys_in_a_tile() -> None:
    for T, S in ((1, 2048), (1, 40), (64, 64), (700, 700), (2048, 2048)):
        for dim, keys in ((64, 128), (128, 128), (256, 64)):
            q, k = (jax.ShapeDtypeStruct((1, n, 2, dim), jnp.float16) for n in (T, S))
            call = {"mask_mod": masks.causal, "origin": Origin(query=jnp.int32(S - T))}
            text = flexjax.explain(q, k, k, device="h200", kernel_options=KernelOptions(invariant=True), **call)
            assert f" x {keys}, backward" in text
            assert "bits: out and lse of a token follow its query and the keys that it sees" in text


LONGER = dataclasses.replace(SMALL, T=200)
PACKED = dataclasses.replace(SMALL, N=1, score="")
CASES = [
    *((way, SMALL) for way in WAYS if not any(word in way for word in ELSEWHERE)),
    ("chunks of 128", dataclasses.replace(LONGER, score="", dtype="float16")),
    ("chunks of 128", dataclasses.replace(LONGER, D=128, E=128, mask="window")),
    ("chunks of 128", dataclasses.replace(LONGER, D=256, E=256)),
    ("chunks of 128", dataclasses.replace(LONGER, score="softcap", sinks=True)),
    ("packed behind 5 tokens", PACKED),
    ("packed behind 301 tokens", dataclasses.replace(PACKED, T=200, mask="window", dtype="float16")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "problem"), CASES, ids=lambda x: x if isinstance(x, str) else f"{x.D}-{x.score}")
def test_a_way_gives_the_bits_of_the_full_pass(way: str, problem: Problem) -> None:
    assert differences(problem, way) == 0


@pytest.mark.slow
@pytest.mark.parametrize("score", ["alibi", "softcap", ""])
def test_max_scores_change_no_bits(score: str) -> None:
    p = dataclasses.replace(SMALL, score=score)
    _, out, _ = full(p)
    q, k, v = (x[None] for x in p.qkv)
    aux = flexjax.AuxRequest(lse=True, max_scores=True)
    attend = lambda **how: flexjax.flex_attention(
        q, k, v, score_mod=p.score_mod(), **p.keywords | {"return_aux": aux} | how
    )
    made, found = attend()
    assert np.array_equal(np.asarray(made[0]), out)
    _, want = attend(kernel_options=None, implementation="xla")
    np.testing.assert_allclose(found.max_scores, want.max_scores, atol=1e-5)


@pytest.mark.slow
def test_it_is_attention() -> None:
    p = dataclasses.replace(SMALL, sinks=True, mask="window")
    _, out, lse = full(p)
    _, want, want_lse = full(dataclasses.replace(p, options=None, implementation="xla"))
    np.testing.assert_allclose(out.astype(np.float32), want.astype(np.float32), atol=1.6e-2)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)
