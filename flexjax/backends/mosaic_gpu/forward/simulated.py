"""What runs in the simulator in place of the operations of this room, by the same names (machine/simulator.py)."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.forward import hopper_barriers, hopper_consumer
from flexjax.backends.mosaic_gpu.forward.hopper_float8 import GROUP
from flexjax.backends.mosaic_gpu.forward.pages import past_end
from flexjax.backends.mosaic_gpu.forward.setup import AnyTile, ForwardSetup
from flexjax.backends.mosaic_gpu.machine.float_parts import pairs_of
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import FLOAT8, KernelPlan


def padded_lengths(setup: ForwardSetup[AnyTile], unit: int) -> tuple[int, int]:
    """Whole tiles, because the simulator does not fill in zeros past the end of an array."""
    plan, tile = setup.plan, setup.tile
    keys = tile.block_kv if plan.blocks is None else plan.blocks.block_kv
    more = tile.block_kv if plan.documents else 0  # a tile may begin at the last key
    return setup.scheduler.q_tiles * tile.block_q, round_up(plan.kv_len + more, keys)


def contiguous_len(plan: KernelPlan) -> int:
    """One more page of zeros, which is read past the end."""
    return past_end(plan) + plan.page


def new_counter(programs: int) -> jax.Array | None:
    return None


def _named_barrier(operation: str, number: Scalar | int, threads: int) -> None:
    """Nothing: consumers need not alternate, and slots have barriers of their own."""


class SlotBarriers(hopper_barriers.SlotBarriers):
    """Slots are handed back by barriers in memory."""

    def release(self, ring: str, free: Ref | None, slot: Scalar | int) -> None:
        assert free is not None
        plgpu.commit_smem()  # the simulator's products read the slot as ordinary memory
        plgpu.barrier_arrive(free.at[slot])

    def acquire(self, ring: str, free: Ref | None, slot: Scalar | int) -> None:
        assert free is not None
        plgpu.barrier_wait(free.at[slot])


def next_number(counter: Ref | None, mailbox: Ref, number: Scalar, programs: int) -> Scalar:
    """There is no counter: a CTA takes every item that is `programs` after its last."""
    return number + i32(programs)


class QueryTile(hopper_consumer.QueryTile):
    """Products are done where they are issued."""

    def _staggered_step(self, n: Scalar, carry: tuple, phase: hopper_consumer.Phase) -> tuple:
        setup, (start, outs, weights, state) = self.setup, carry
        step_tile = self.step_tile(start, phase)
        start = self.next_start(n, phase)
        self._await_keys(n, prefetch=False)
        s = self._scores_alone(n)
        setup.slots.release("key", self.scratch.key_free, self._key_slot(n))
        s = self.partial_sums.total(s, n)
        p, rescale, state = self._softmax_with_staged(s, n, step_tile, phase, state)
        (out,) = self._add_values(outs, weights, n - 1)
        return start, (setup.softmax.rescale(out, rescale),), self._weights(p), state

    def _added(self, out: jax.Array, weights: tuple[jax.Array, ...], values: tuple[Ref, ...]) -> jax.Array:
        for a, b in pairs_of(self.setup.tile.parts):
            out = out + jnp.dot(weights[a].astype(jnp.float32), values[b][...].astype(jnp.float32))
        return out


def write_ones(target: Ref) -> None:
    target[...] = jnp.ones(target.shape, jnp.dtype(FLOAT8))


def weights(p: jax.Array) -> jax.Array:
    rows, keys = p.shape
    groups = p.reshape(rows, keys // GROUP, 2, 4, 2)
    return groups.transpose(0, 1, 3, 2, 4).reshape(rows, keys).astype(jnp.float8_e4m3fn)
