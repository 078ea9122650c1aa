"""Kernels that several Python threads lower at once."""

import collections
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.lowering import lowering
from flexjax.backends.mosaic_gpu.machine import atomic_counter
from flexjax.backends.target import Target

ATOMICS, ROUNDS, THREADS = 20, 4, 3


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take over from each other all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def lower() -> None:
    def kernel(counter: Any, word: Any) -> None:
        for _ in range(ATOMICS):
            atomic_counter.take_start(counter, word)

    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        run: Any = pl.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((1,), jnp.int32),
            mesh=plgpu.Mesh(grid=(2,), grid_names=("p",)),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        )
        jax.jit(lambda x: run(x)).trace(jax.ShapeDtypeStruct((1,), jnp.int32)).lower(lowering_platforms=("cuda",))


def test_one_thread_of_a_warpgroup_draws_however_many_threads_lower(
    hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mosaic's `single_thread` has all 128 threads draw in two of five cases here."""
    around: collections.Counter[str] = collections.Counter()
    add = atomic_counter._fetch_add

    def watched(counter: Any) -> Any:
        around[ir.InsertionPoint.current.block.owner.name] += 1
        return add(counter)

    monkeypatch.setattr(atomic_counter, "_fetch_add", watched)
    lower()  # imports and caches of the first time
    threads = [threading.Thread(target=lambda: [lower() for _ in range(ROUNDS)]) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert around == {"scf.if": ATOMICS * (1 + ROUNDS * THREADS)}


def test_passes_are_lowered_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rest of Mosaic's globals this process has one user."""
    module: Any = None
    monkeypatch.setattr(lowering, "_faster", lambda module, target: lowering.contextlib.nullcontext())
    inside: list[bool] = []

    def other() -> None:
        taken = lowering.LOWERING_LOCK.acquire(blocking=False)
        inside.append(taken)
        if taken:
            lowering.LOWERING_LOCK.release()

    def beside() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with support.BACKEND.lowering(module, Target("cuda")):
        beside()
    beside()
    assert inside == [False, True]
