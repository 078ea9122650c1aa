"""That the simulator sees what it is to watch for in the other tests of this folder."""

import typing

import jax
import jax.numpy as jnp
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.mark.parametrize("waits", [True, False])
def test_a_planted_race_is_found(waits: bool, races: list) -> None:
    """One warpgroup writes shared memory, another reads it, with and without a barrier between them."""

    def kernel(x_ref: typing.Any, out_ref: typing.Any, shared: typing.Any, written: typing.Any) -> None:
        group = jax.lax.axis_index("wg")

        @pl.when(group == 0)
        def _() -> None:
            shared[...] = x_ref[...]
            plgpu.barrier_arrive(written)

        @pl.when(group == 1)
        def _() -> None:
            if waits:
                plgpu.barrier_wait(written)
            out_ref[...] = shared[...]
            if not waits:  # the simulator wants every barrier observed
                plgpu.barrier_wait(written)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
        num_threads=2,
        thread_name="wg",
        interpret=plgpu.InterpretGPUParams(),  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
    )
    jax.block_until_ready(run(jnp.ones(128, jnp.float32)))
    assert any(state.races_found for state in races) != waits
    races.clear()
