"""The kernels on their own: split lists, small tiles, the TPU simulator with its race detector, meshes."""

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import flexjax
from flexjax import masks
from flexjax.backends.mosaic_tpu import list_shape, visit_order, vmem
from flexjax.backends.mosaic_tpu.support import MosaicTpuBackend
from flexjax.backends.target import Target
from flexjax.rewrites import join_heads, pack_heads
from flexjax.types import KernelOptions
from tests import oracle
from tests.arrays import array
from tests.backends.mosaic_tpu import plans
from tests.cases import CASES, on_mesh
from tests.cases.parts import assert_a_part_is_not_rounded_to_16_bits
from tests.cases.small import quick_jit
from tests.compare import assert_close
from tests.marks import some_slow

BACKEND = MosaicTpuBackend()
ROOT = pathlib.Path(__file__).resolve().parents[3]


def check(name: str, options: KernelOptions, backward: bool = True) -> None:
    case = CASES[name]
    problem = plans.problem_of(case, "float32", options)
    assert BACKEND.refuses(problem.plan, plans.CPU) is None
    got = plans.run(BACKEND, problem, case, backward)
    want = oracle.expected(case, plans.dropout_keep(case))
    for key, x in got.items():
        assert_close(key, np.asarray(x), want[key], dtype="float32", loosen=case.loosen)


@pytest.mark.parametrize(
    "name",
    some_slow(("window", "packed", "by_batch_and_head", "holes", "indirect_pair"), ("by_batch_and_head",)),
)
def test_lists_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch):
    """Lists that do not fit SMEM run in several launches that write one output."""
    monkeypatch.setattr(list_shape, "TABLE_BYTES", 64)
    check(name, KernelOptions(interpret=True, block_q=128, block_kv=128, block_q_bwd=128, block_kv_bwd=128))


# each case with one of the tiles; the product, and all but the window, with --slow
ONCE = (
    ("length_300", 128, 128), ("window", 256, 128), ("distance_bias", 128, 256), ("long_query", 128, 128),
    ("gqa3", 256, 128), ("prefix", 128, 256),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "q", "kv"),
    some_slow(
        [(name, *tile) for name, *_ in ONCE for tile in ((128, 128), (256, 128), (128, 256))],
        [row for row in ONCE if row[0] == "window"],
    ),
)
def test_several_tiles(name: str, q: int, kv: int):
    check(name, KernelOptions(interpret=True, block_q=q, block_kv=kv, block_q_bwd=q, block_kv_bwd=kv))


def test_a_part_is_not_rounded_to_16_bits():
    assert_a_part_is_not_rounded_to_16_bits(BACKEND, plans.CPU, "bfloat16")


@pytest.mark.parametrize("name", some_slow(["length_300", "column_bias", "mqa"], ["column_bias"]))
def test_dq_alone(name: str, monkeypatch: pytest.MonkeyPatch):
    """Where the sums of dq do not fit, it has its own kernel."""
    monkeypatch.setattr(vmem, "dq_sums_fit", lambda *_: False)
    check(name, KernelOptions(interpret=True, block_q_bwd=128, block_kv_bwd=128))


@pytest.fixture
def found_races(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[bool]]:
    """Whether each kernel that the simulator ran had a race. jax keeps that of the last kernel alone."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    made = []
    make = interpret_pallas_call.RaceDetectionState

    def remembered(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(interpret_pallas_call, "RaceDetectionState", remembered)

    def found() -> list[bool]:
        jax.effects_barrier()
        return [state.races_found for state in made]

    return found


SMALL_TILES = KernelOptions(block_q=128, block_kv=128, block_q_bwd=128, block_kv_bwd=128)


RACING = (
    "window", "one_array_read_twice", "mqa", "column_bias", "relative_bias", "by_batch_and_head", "pair_bias", "sinks",
    "bucket_bias",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RACING)
def test_simulator_finds_no_race(name: str, found_races: Callable[[], list[bool]]):
    """On two cores, which share the parallel dimensions of the grid."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)):
        check(name, SMALL_TILES)
        races = found_races()
    assert len(races) >= 2, "forward and backward kernels were not simulated"
    assert not any(races)


def test_simulator_finds_a_race(found_races: Callable[[], list[bool]], monkeypatch: pytest.MonkeyPatch):
    """Visits of one row on two cores at a time write the same block, and the simulator says so."""
    monkeypatch.setattr(
        visit_order.DenseOrder, "semantics", lambda order: ("parallel",) * (5 if order.key_major else 4)
    )
    case = dataclasses.replace(CASES["plain"], name="race", shape=(1, 1, 1, 128, 256, 16, 16))
    problem = plans.problem_of(case, "float32", SMALL_TILES)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)):
        plans.run(BACKEND, problem, case, backward=False)
        assert any(found_races())


@pytest.mark.slow
@pytest.mark.parametrize("ways", ["checked", "unchecked explicit"])
def test_inside_shard_map(ways: str):
    """Over a mesh of four devices: batch by heads, a learned array split with the heads, with and without check_vma, and by explicit axes."""
    flags = re.sub("device_count=[0-9]+", "device_count=4", os.environ["XLA_FLAGS"])  # see conftest.py
    child = subprocess.run(
        [sys.executable, "-m", "tests.cases.on_mesh", *ways.split()],
        cwd=ROOT, env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    lines = [line.split() for line in child.stdout.splitlines()]
    assert len(lines) == len(ways.split()) * len(on_mesh.NAMES)
    for how, name, error, devices in lines:
        assert float(error) < 5e-6, (how, name, error)
        assert how in ways.split()
        assert devices == "4"


@pytest.mark.parametrize("chip", sorted(vmem.CHIPS))
@pytest.mark.parametrize("dim", [64, 256])
def test_every_candidate_fits(chip: str, dim: int):
    plan = plans.problem_of(CASES["plain"], "bfloat16").plan
    plan = plans.dataclasses.replace(plan, q_len=4096, kv_len=4096, head_dim=dim, value_dim=dim)
    facts = vmem.CHIPS[chip]
    kind = next(k for k, name in vmem.CHIP_OF_KIND.items() if name == chip)
    candidates = BACKEND.tile_candidates(plan, Target("tpu", kind))
    assert candidates
    first = candidates[0]
    text = (
        f"forward {first['block_q']} x {first['block_kv']}, backward {first['block_q_bwd']} x {first['block_kv_bwd']}"
    )
    assert BACKEND.tile_sizes(plan, Target("tpu", kind)) == text
    assert len({tuple(c.items()) for c in candidates}) == len(candidates)
    assert all(vmem.forward_bytes(plan, t) <= facts.budget for t in vmem.forward_candidates(plan, facts))


def test_candidates_without_a_backward_tile(monkeypatch: pytest.MonkeyPatch):
    """The tiles of the forward pass can be measured where no backward tile fits; without a forward tile there is none to measure."""
    plan = plans.problem_of(CASES["plain"], "bfloat16").plan
    monkeypatch.setattr(vmem, "backward_candidates", lambda *_: [])
    found = BACKEND.tile_candidates(plan, Target("tpu", "TPU v5e"))
    assert found
    assert all(set(sizes) == {"block_q", "block_kv"} for sizes in found)
    monkeypatch.setattr(vmem, "forward_candidates", lambda *_: [])
    assert BACKEND.tile_candidates(plan, Target("tpu", "TPU v5e")) == []


@pytest.mark.slow
@pytest.mark.parametrize("block", [(20, 36), "lists"], ids=str)
def test_mask_blocks_that_no_tile_holds(block: typing.Any) -> None:
    """They become blocks of 128; what a user's lists leave off stays off."""
    rng = np.random.default_rng(0)
    q, k, v = (array(rng.standard_normal((1, 300, n, 16)), jnp.float32) for n in (2, 1, 1))
    if block == "lists":
        kinds = rng.integers(0, 3, (1, 2, 25, 25))
        index = [np.argsort(kinds != kind, -1, kind="stable") for kind in (1, 2)]
        partial, full = ((kinds == kind).sum(-1) for kind in (1, 2))
        options: typing.Any = {"block_size": 12, "mask_mod": masks.causal, "q_len": 300, "kv_len": 300}
        mask = flexjax.BlockMask.from_kv_blocks(partial, index[0], full, index[1], **options)
    else:
        mask = flexjax.create_block_mask(masks.sliding_window(70), None, None, 300, 300, block_size=block)

    def slopes(name: str) -> list[jax.Array]:
        options = KernelOptions(interpret=name == "mosaic_tpu")
        attend = functools.partial(flexjax.flex_attention, block_mask=mask, implementation=name, kernel_options=options)
        return jax.jit(jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)

    for got, want in zip(slopes("mosaic_tpu"), slopes("reference"), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("heads", "module"), [((6, 2), pack_heads), pytest.param((16, 8), join_heads, marks=pytest.mark.slow)]
)
def test_heads_of_short_calls_share_a_tile(
    heads: tuple[int, int], module: typing.Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rewrite = [], module.rewrite
    monkeypatch.setattr(module, "rewrite", lambda plan: made.append(rewrite(plan)) or made[-1])
    rng = np.random.default_rng(11)
    normal = lambda *shape: array(rng.standard_normal(shape), jnp.float32)
    q, k, v = normal(2, 3, heads[0], 16), normal(2, 300, heads[1], 16), normal(2, 300, heads[1], 16)
    slope = normal(heads[0])
    attend = lambda **options: flexjax.flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + slope[h] * (j - i) / 100, mask_mod=masks.causal,
        origin=flexjax.Origin(query="end"), key_value_seq_lengths=array([201, 300]),
        return_aux=flexjax.AuxRequest(lse=True), **options,
    )  # fmt: skip
    got = attend(implementation="mosaic_tpu", kernel_options=KernelOptions(interpret=True))
    want = quick_jit(lambda: attend(implementation="reference"))()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert [step is not None for step in made] == [True]
