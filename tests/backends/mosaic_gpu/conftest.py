"""Every simulated kernel of this folder runs with race detection; a test fails where one was found."""

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
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
    from jax.experimental.pallas import mosaic_gpu as plgpu

    registers = shared_memory.get_memory_space_idx(plgpu.MemorySpace.REGS)

    class Watch(gpu_callbacks.GPURaceDetectionState):
        """Accumulators are one warpgroup's own; the simulator gives those of the next program the same name."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            watched.append(self)

        def check_read(self, thread: Any, clock: Any, key: Any, *rest: Any, **named: Any) -> None:
            if key.memory_space_id != registers:
                super().check_read(thread, clock, key, *rest, **named)

        def check_write(self, thread: Any, clock: Any, key: Any, *rest: Any, **named: Any) -> None:
            if key.memory_space_id != registers:
                super().check_write(thread, clock, key, *rest, **named)

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", Watch)
    detecting = functools.partial(plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", detecting)
    yield watched
    assert not any(state.races_found for state in watched)
