"""The kernels on their own: split lists, small tiles, the TPU simulator with its race detector, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from flexjax.backends.mosaic_tpu import tables, vmem
from flexjax.backends.mosaic_tpu.support import MosaicTpuBackend
from flexjax.types import KernelOptions
from tests import oracle
from tests.backends.mosaic_tpu import plans
from tests.cases import CASES
from tests.compare import assert_close

BACKEND = MosaicTpuBackend()


def check(name: str, options: KernelOptions, backward: bool = True) -> None:
    case = CASES[name]
    problem = plans.problem_of(case, "float32", options)
    assert BACKEND.refuses(problem.plan) is None
    got = plans.run(BACKEND, problem, case, backward)
    want = oracle.expected(case, plans.dropout_keep(case))
    for key, array in got.items():
        assert_close(key, np.asarray(array), want[key], dtype="float32", loosen=case.loosen)


@pytest.mark.parametrize("name", ["window", "packed", "by_batch_and_head", "holes", "indirect_pair"])
def test_lists_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch):
    """Lists that do not fit SMEM run in several launches that write one output."""
    monkeypatch.setattr(tables, "TABLE_BYTES", 64)
    check(name, KernelOptions(interpret=True, block_q=128, block_kv=128, block_q_bwd=128, block_kv_bwd=128))


@pytest.mark.parametrize("name", ["length_300", "window", "distance_bias", "long_query", "gqa3", "prefix"])
@pytest.mark.parametrize("tile", [(128, 128), (256, 128), (128, 256)])
def test_several_tiles(name: str, tile: tuple[int, int]):
    q, kv = tile
    check(name, KernelOptions(interpret=True, block_q=q, block_kv=kv, block_q_bwd=q, block_kv_bwd=kv))


@pytest.mark.parametrize("name", ["length_300", "column_bias", "mqa"])
def test_dq_alone(name: str, monkeypatch: pytest.MonkeyPatch):
    """Where the sums of dq do not fit, it has its own kernel."""
    monkeypatch.setattr(vmem, "fuses", lambda *_: False)
    check(name, KernelOptions(interpret=True, block_q_bwd=128, block_kv_bwd=128))


@pytest.mark.parametrize("name", ["window", "mqa", "relative_bias"])
def test_simulator_finds_no_race(name: str):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    tiles = dict(block_q=128, block_kv=128, block_q_bwd=128, block_kv_bwd=128)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        check(name, KernelOptions(**tiles))
        jax.effects_barrier()
    races = getattr(interpret_pallas_call, "races", None)
    assert races is None or not races.races_found


def test_inside_shard_map():
    """Heads over two devices; the mods see the heads of their shard."""
    case = CASES["mqa"]
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((2, 4, 40, 16)), jnp.float32) for _ in range(3)]
    plan = plans.problem_of(case, "float32").plan
    fields = dict(batch=2, q_heads=2, kv_heads=2, q_len=40, kv_len=40, head_dim=16, value_dim=16, layout="BNTH")
    plan = plans.dataclasses.replace(plan, score=None, mask=None, max_scores=False, **fields)
    one = plans.dataclasses.replace(plan, q_heads=4, kv_heads=4)

    def attend(plan, q, k, v):
        return BACKEND.forward(plan, plans.Operands(q, k, v, None, None, None, (), (), (), None)).out

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = PartitionSpec(None, "x")
    sharded = jax.shard_map(
        functools.partial(attend, plan), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )
    np.testing.assert_allclose(jax.jit(sharded)(*arrays), attend(one, *arrays), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chip", sorted(vmem.CHIPS))
@pytest.mark.parametrize("dim", [64, 256])
def test_every_candidate_fits(chip: str, dim: int):
    plan = plans.problem_of(CASES["plain"], "bfloat16").plan
    plan = plans.dataclasses.replace(plan, q_len=4096, kv_len=4096, head_dim=dim, value_dim=dim)
    facts = vmem.CHIPS[chip]
    candidates = BACKEND.tile_candidates(plan, chip)
    assert candidates
    assert len({tuple(c.items()) for c in candidates}) == len(candidates)
    assert all(vmem.forward_bytes(plan, t) <= facts.budget for t in vmem.forward_candidates(plan, facts))
