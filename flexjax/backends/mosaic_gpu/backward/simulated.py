"""What runs in the simulator in place of the operations of this room, by the same names (machine/simulator.py)."""

import jax
import jax.numpy as jnp
from jax import ref
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward import common, hopper_fused
from flexjax.backends.mosaic_gpu.backward.kernels import FusedKernel
from flexjax.backends.mosaic_gpu.backward.tcgen05_tiles import Tcgen05Tiles
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar
from flexjax.plan.kernel_plan import KernelPlan


def padded_len(plan: KernelPlan, axis: str, unit: int) -> int:
    """Whole tiles: the simulator refuses copies that cross the end."""
    return common.whole_len(plan, axis)


def shares_products(tiles: Tcgen05Tiles) -> bool:
    """The simulator does not know cta_group::2: each CTA of a pair has whole tiles, and products of its own."""
    return False


def first_stores(chosen: FusedKernel) -> bool:
    return False


class Products(common.Products):
    """A product is done where it starts."""

    def start(self, acc: Ref, value: jax.Array) -> None:
        _store(acc, value)

    def _add_pair(self, acc: Ref, a: Ref | jax.Array, b: Ref, a_t: bool, b_t: bool) -> None:
        left = a if isinstance(a, jax.Array) else a[...]
        right = b[...]
        left, right = (left.T if a_t else left), (right.T if b_t else right)
        _store(acc, acc[...] + jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32)))

    def read(self, acc: Ref, in_flight: int = 0) -> jax.Array:
        return acc[...]

    def wait(self, in_flight: int) -> None:
        """Nothing is in flight."""


def _store(acc: Ref, value: jax.Array) -> None:
    # Pallas turns acc[...] = value into a store to an accumulator, which the simulator lacks
    ref.swap(acc, ..., value)  # pyright: ignore[reportArgumentType]  # a Ref, see `Ref`


class _Cta(hopper_fused._Cta):
    """Dq tiles are added at once, in any order, by the whole warpgroup."""

    def start_number(self, takes: bool) -> Scalar:
        return self.program

    def add_by_warps(self, own: hopper_fused.OwnKeys) -> None:
        self.add_tiles(own, None)

    def add_dq_tile(self, own: hopper_fused.OwnKeys, h: Scalar, q_tile: Scalar, slot: Scalar) -> None:
        _, target = self.dq_place(own, h, q_tile)
        plgpu.barrier_wait(self.scratch.dq_full.at[slot])
        target[...] = target[...] + self.scratch.dq[slot]
        plgpu.barrier_arrive(self.scratch.dq_free.at[slot])


def write_operand(tile: jax.Array, target: Ref) -> None:
    target[...] = tile


def zero_rows(tile: jax.Array, kept: Scalar) -> jax.Array:
    index = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
    return jnp.where(index < kept, tile, jnp.zeros((), tile.dtype))
