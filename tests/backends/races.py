"""A fixture with which every simulated GPU kernel of a folder runs with race detection; a test fails where a race was found. The conftest.py
of a folder imports it.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import pytest


@pytest.fixture(autouse=True)
def races(monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    """What was watched, one entry a simulated kernel. jax itself keeps that of the last kernel alone."""
    watched: list = []
    if jax.__version_info__ < (0, 11):
        yield watched
        return
    from jax._src import source_info_util
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
    from jax.experimental.pallas import mosaic_gpu as plgpu

    registers = shared_memory.get_memory_space_idx(plgpu.MemorySpace.REGS)
    global_memory = shared_memory.get_memory_space_idx(plgpu.MemorySpace.GMEM)

    def is_watched(key: Any, source_info: Any) -> bool:
        """Not accumulators, which are one warpgroup's own: the simulator gives those of the next program the same name. Nor the
        additions of CTAs to dQ in memory: they are atomic or come in the order of tickets, neither of which it knows.
        """
        if key.memory_space_id == registers:
            return False
        adds_to_dq = "add_dq_tile" in source_info_util.summarize(source_info) if source_info is not None else False
        return not (adds_to_dq and key.memory_space_id == global_memory)

    class Watch(gpu_callbacks.GPURaceDetectionState):
        """Looks for races of what `is_watched`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            watched.append(self)

        def check_read(self, thread: Any, clock: Any, key: Any, where: Any, source_info: Any = None) -> None:
            if is_watched(key, source_info):
                super().check_read(thread, clock, key, where, source_info)

        def check_write(self, thread: Any, clock: Any, key: Any, where: Any, source_info: Any = None) -> None:
            if is_watched(key, source_info):
                super().check_write(thread, clock, key, where, source_info)

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", Watch)
    detecting = functools.partial(plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", detecting)
    yield watched
    assert not any(state.races_found for state in watched)
