"""Products of two CTAs (cta_group::2) in Pallas's simulator, which has none: what it lacks, added for the tests of one kernel.

Inside `simulated(monkeypatch)` a pair of CTAs shares instructions in the simulator as on a device:

    tcgen05.mma              each CTA's rows of the left operand times the right operand, whose columns both CTAs bring
    tcgen05.commit           arrives at the barrier of each CTA
    partitioned copies       bring a CTA's half of a tile and arrive in the first CTA
    barriers of a pair       get the arrivals of both CTAs in the first one

It replaces functions of the simulator (jax 0.11.2 and 0.12.0.1) and says nothing about layouts in memory. Races are looked for as elsewhere.
"""

import dataclasses
import time
import typing

import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward import tcgen05 as backward_tcgen05
from flexjax.backends.mosaic_gpu.backward import tcgen05_tiles as backward_tcgen05_tiles
from flexjax.backends.mosaic_gpu.backward.tcgen05_tiles import PAIR
from flexjax.backends.mosaic_gpu.machine import simulator
from flexjax.backends.mosaic_gpu.machine.columns import COLUMNS
from flexjax.backends.mosaic_gpu.machine.shared_memory import Barriers


def in_cta(key: typing.Any, cta: int) -> typing.Any:
    """The key of the same allocation in another CTA of the pair: all CTAs allocate in the same order."""
    return dataclasses.replace(key, block_id=cta)


def _multiply(task: typing.Any, before: typing.Any, thread: int) -> typing.Any:
    """A product of both CTAs, instead of that of one; returns its clock if races are looked for.

    before, thread   clock of the product before in the tensor cores, and their number among the threads of clocks
    """
    memory = gpu_callbacks._get_shared_memory()
    at = shared_memory.GPULoggingInfo(task.mesh_location, task.thread, task.source_info)
    read = lambda key, access: memory.get_buffer_content(key, access, None, logging_info=at)[0]
    both = lambda key: [in_cta(key, cta) for cta in range(PAIR)]
    right = np.concatenate([read(key, task.b_access) for key in both(task.b_key)], axis=1)
    for left, target in zip(both(task.a_key), both(task.acc_key), strict=True):
        found = np.matmul(read(left, task.a_access), right, dtype=np.float32)
        if task.accumulate:
            found = read(target, task.acc_access) + found
        memory.store_buffer_content(target, task.acc_access, found, task.thread, increment_clock=False, logging_info=at)
    if not memory.detect_races:
        return None
    clock, races, where = memory.get_clock(task.thread), gpu_callbacks.get_races(), dict(source_info=task.source_info)
    if before is not None:
        clock.update(before)
    clock.inc(thread)
    in_smem = task.a_key.memory_space_id == shared_memory.IDX_BY_GPU_MEMORY_SPACE[plgpu.SMEM]
    for left, visited, target in zip(both(task.a_key), both(task.b_key), both(task.acc_key), strict=True):
        left_clock = clock.async_smem_clock if in_smem else clock.generic_clock
        races.check_read(task.thread, left_clock, left, task.a_access, **where)
        races.check_read(task.thread, clock.async_smem_clock, visited, task.b_access, **where)
        races.check_write(task.thread, clock.generic_clock, target, task.acc_access, **where)
    return clock.copy()


def simulated(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Lets pairs share instructions in the simulator until the end of the test; counts products and copies of pairs as they run."""
    counts = dict(products=0, copies=0)
    alone, commit, copy = (
        gpu_callbacks.TcGen05Mma.__call__,
        gpu_callbacks.tcgen05_commit_arrive,
        plgpu.copy_gmem_to_smem,
    )
    begin_copy, barrier_of = gpu_callbacks.copy_gmem_to_smem, plgpu.ClusterBarrier
    scratch_of = backward_tcgen05_tiles.scratch

    def multiply(task: typing.Any, clock: typing.Any, thread: int) -> typing.Any:
        if task.collective_axis is None:
            return alone(task, clock, thread)
        counts["products"] += 1
        return _multiply(task, clock, thread)

    def commit_to(barrier_key_as_array: typing.Any, collective_axis: str | None, **given: typing.Any) -> typing.Any:
        key = gpu_callbacks.HostAllocationKey.from_array(barrier_key_as_array)
        for cta in range(PAIR) if collective_axis else (key.block_id,):
            token = commit(barrier_key_as_array=in_cta(key, cta).as_np_array, collective_axis=None, **given)
        return token

    def copy_half(source: typing.Any, target: typing.Any, barrier: typing.Any, **how: typing.Any) -> None:
        split = how.pop("leader_tracked", None)
        if split is None:
            return copy(source, target, barrier, **how)
        counts["copies"] += 1
        half = pl.ds(lax.axis_index(COLUMNS) * target.shape[split.axis], target.shape[split.axis])
        return copy(source.at[half] if split.axis == 0 else source.at[:, half], target, barrier)

    def copied(barrier_allocation_key_as_array: typing.Any, **given: typing.Any) -> typing.Any:
        key = gpu_callbacks.HostAllocationKey.from_array(barrier_allocation_key_as_array)
        memory = gpu_callbacks._get_shared_memory()
        if memory.get_barrier(key).num_arrivals == ARRIVALS:
            key = in_cta(key, 0)
            while key not in memory.mem:
                time.sleep(0.001)  # the first CTA has not begun
        return begin_copy(barrier_allocation_key_as_array=key.as_np_array, **given)

    def arrive_first(barrier: typing.Any, thread: typing.Any, **given: typing.Any) -> None:
        barrier.barriers[0].arrive(thread, given.get("clock"), given.get("logging_info"))

    def scratch(plan: typing.Any, tiles: typing.Any, both: bool) -> typing.Any:
        with simulator.running(not tiles.pairs):
            found = scratch_of(plan, tiles, both)
        return found._replace(full=Barriers(tiles.slots, arrivals=ARRIVALS)) if tiles.pairs else found

    monkeypatch.setattr(gpu_callbacks.TcGen05Mma, "__call__", multiply)
    monkeypatch.setattr(gpu_callbacks, "tcgen05_commit_arrive", commit_to)
    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", copied)
    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", copy_half)
    monkeypatch.setattr(shared_memory.ClusterBarrier, "arrive", arrive_first)
    monkeypatch.setattr(
        plgpu, "ClusterBarrier", lambda leader_tracked, orders_tensor_core, **fields: barrier_of(**fields)
    )
    monkeypatch.setattr(backward_tcgen05, "scratch", scratch)
    return counts


ARRIVALS = 2 * PAIR * (backward_tcgen05_tiles.HALVES + 1)
"""Of copies of both CTAs at the barrier of a slot; on a device the first CTA arrives for both. No other barrier has as many."""
