"""How key blocks travel between the devices of a split sequence, and their gradients back: XLA's collectives alone.

Everything over keys is packed into one array [B, blocks, tokens of a block, features], so that a round is one
collective; "ring" and "all_to_all" send whole arrays.

Gradients of keys travel in the score dtype and are added in a fixed order: own ones, then those of each round; those of
gathered keys in the order of the devices. `blocks` is int32 [devices, each] in all methods: the numbers, in the
sequence, of each device's blocks, padding included.
"""

import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.context.context_parallel import ContextCall, Tables
from flexjax.context.stages import Keys, token_axis

Array = jax.Array


class Part(typing.NamedTuple):
    """One of several equal parts of a shard, of `blocks` key blocks."""

    number: Array  # int32
    blocks: int


class Exchange(typing.NamedTuple):
    """The collectives of a call on one device."""

    call: ContextCall
    tables: Tables
    me: Array | int  # number of the device along the axes of the sequence

    @property
    def own_keys(self) -> Array:
        """int32 [blocks of each]: the numbers, in the sequence, of the device's key blocks, padding included."""
        return self.tables.key_blocks[self.me]

    @property
    def own_queries(self) -> Array:
        """int32 [blocks of each]: the numbers, in the sequence, of the device's query blocks, padding included."""
        return self.tables.query_blocks[self.me]

    def pack(self, arrays: Sequence[Array], slots: Array | None = None) -> Array:
        """Arrays over keys, or their blocks `slots`, as [B, blocks, tokens of a block, features of all arrays]."""
        axis, size = token_axis(self.call.plan), self.call.block_size[1]
        parts = []
        for x in arrays:
            blocks = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
            taken = blocks if slots is None else jnp.take(blocks, slots, axis=axis)
            first = jnp.moveaxis(taken, (axis, axis + 1), (1, 2))
            parts.append(first.reshape(*first.shape[:3], -1))
        return jnp.concatenate(parts, -1)

    def unpack(self, packed: Array, like: Sequence[Array]) -> list[Array]:
        """The inverse of `pack`, with the heads and dims of the arrays `like`."""
        axis, found, at = token_axis(self.call.plan), [], 0
        for x in like:
            heads, dim = x.shape[3 - axis], x.shape[3]
            part = packed[..., at : at + heads * dim]
            at += heads * dim
            part = part.reshape(packed.shape[0], packed.shape[1] * packed.shape[2], heads, dim)
            found.append(part if axis == 1 else jnp.swapaxes(part, 1, 2))
        return found

    def keys(self, packed: Array, like: Keys, numbers: Array) -> Keys:
        """The Keys of stage (0, 0) in `packed`: key, value and perhaps key_extra, with heads and dims of `like`."""
        arrays = self.unpack(packed, like.arrays)
        return Keys(arrays[0], arrays[1], arrays[2] if like.key_extra is not None else None, numbers)

    # ------------------------------------------------------------------ neighbours

    def shifted(self, x: Array, shift: int) -> Array:
        """x of the device `shift` places before this one on the ring (after it, if negative). A collective."""
        names, sizes = zip(*self.call.mesh, strict=True)
        n, order = self.call.devices, [names.index(name) for name in self.call.axes]
        # ppermute numbers devices in the order of the mesh, whatever order of axes it is given
        numbers = np.arange(n).reshape(sizes).transpose(order).ravel()
        return lax.ppermute(x, names, [(int(numbers[i]), int(numbers[(i + shift) % n])) for i in range(n)])

    def receive(self, own: Keys) -> Keys:
        """The key blocks that other devices send, as the Keys of stage (1, 0); number -1 in padding. A collective."""
        packed, numbers = [], []
        for shift, send, received in zip(self.call.shifts, self.tables.send, self.tables.received, strict=True):
            packed.append(self.shifted(self.pack(own.arrays, send[self.me]), shift))
            numbers.append(received[self.me])
        return self.keys(jnp.concatenate(packed, 1), own, jnp.concatenate(numbers))._replace(stage=(1, 0))

    def give_back(self, gradients: Sequence[Array]) -> list[list[Array]]:
        """Sends gradients of received key blocks, in the order of `receive` and the score dtype, to their owners.

        A collective. Returns for each round a list like `gradients`, of the own key blocks in `tables.send`; the caller
        adds them. Past the end of a message they are 0, because no query of the receiver sees the padding.
        """
        packed, at, found = self.pack(gradients), 0, []
        for shift, send in zip(self.call.shifts, self.tables.send, strict=True):
            width = send.shape[1]
            found.append(self.unpack(self.shifted(packed[:, at : at + width], -shift), gradients))
            at += width
        return found

    # ------------------------------------------------------------------ ring

    def from_previous(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays of the device before this one on the ring. A collective."""
        return [self.shifted(x, 1) for x in arrays]  # not packed: copies of whole shards take memory

    def visiting(self, arrays: Sequence[Array], step: Array | int, part: "Part | None" = None) -> Keys:
        """Key, value and perhaps key_extra on this device after `step` steps of the ring, as Keys with numbers."""
        numbers = self.tables.key_blocks[(self.me - step) % self.call.devices]
        if part is not None:
            numbers = lax.dynamic_slice_in_dim(numbers, part.number * part.blocks, part.blocks)
        return Keys(arrays[0], arrays[1], arrays[2] if len(arrays) == 3 else None, numbers, (0, step))

    def part_of(self, x: Array, part: "Part") -> Array:
        """The key blocks of `part` of x, an array over this device's keys."""
        size = part.blocks * self.call.block_size[1]
        return lax.dynamic_slice_in_dim(x, part.number * size, size, token_axis(self.call.plan))

    def with_part(self, x: Array, part: "Part", new: Array) -> Array:
        size = part.blocks * self.call.block_size[1]
        return lax.dynamic_update_slice_in_dim(x, new, part.number * size, token_axis(self.call.plan))

    # ------------------------------------------------------------------ all_gather

    def gather(self, own: Keys) -> Keys:
        """All key blocks of all devices, in the order of the sequence, as the Keys of stage (0, 0). A collective."""
        everything = self.in_order(self.all_gather(self.pack(own.arrays)), self.tables.key_blocks)
        return self.keys(everything, own, jnp.arange(everything.shape[1], dtype=jnp.int32))

    def all_gather(self, packed: Array) -> Array:
        """The packed blocks of all devices, device by device along axis 1. A collective."""
        return lax.all_gather(packed, self.call.axes, axis=1, tiled=True) if self.call.axes else packed

    def in_order(self, packed: Array, blocks: Array) -> Array:
        """Blocks that lie device by device along axis 1, in the order of the sequence, padding last."""
        flat = blocks.reshape(-1)
        places = jnp.zeros_like(flat).at[flat].set(jnp.arange(flat.shape[0], dtype=flat.dtype))
        return jnp.take(packed, places, axis=1)

    def by_device(self, packed: Array, blocks: Array) -> Array:
        """The inverse of `in_order`."""
        return jnp.take(packed, blocks.reshape(-1), axis=1)

    def scatter_sums(self, gradients: Sequence[Array]) -> list[Array]:
        """The gradients of this device's keys, from those of all keys, summed over devices. A collective."""
        n = self.call.devices
        packed = self.by_device(self.pack(gradients), self.tables.key_blocks)
        # XLA chooses the order of additions inside psum_scatter, so all_to_all sends and the sum is here
        if self.call.axes:
            packed = lax.all_to_all(packed, self.call.axes, split_axis=1, concat_axis=1, tiled=True)
        parts = packed.reshape(packed.shape[0], n, -1, *packed.shape[2:])
        total = parts[:, 0]
        for i in range(1, n):
            total = total + parts[:, i]
        return self.unpack(total, gradients)

    # ------------------------------------------------------------------ all_to_all

    def to_heads(self, x: Array, blocks: Array, size: int) -> Array:
        """Trades heads for tokens: device i gets all tokens, in order, of the i-th part of the heads. A collective.

        x   of all heads: an array over tokens, or a row statistic [B, tokens, heads] ([B, heads, tokens] for BNTH)
        """
        axis = token_axis(self.call.plan)
        if self.call.axes:
            x = lax.all_to_all(x, self.call.axes, split_axis=3 - axis, concat_axis=axis, tiled=True)
        return self._reordered(x, blocks, size, self.in_order)

    def to_tokens(self, x: Array, blocks: Array, size: int) -> Array:
        """Trades tokens for heads, the inverse of `to_heads`. A collective."""
        axis = token_axis(self.call.plan)
        x = self._reordered(x, blocks, size, self.by_device)
        return (
            lax.all_to_all(x, self.call.axes, split_axis=axis, concat_axis=3 - axis, tiled=True)
            if self.call.axes
            else x
        )

    def _reordered(self, x: Array, blocks: Array, size: int, order: typing.Callable[[Array, Array], Array]) -> Array:
        """x with its blocks of `size` tokens reordered by `in_order` or `by_device`."""
        axis = token_axis(self.call.plan)
        split = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
        first = jnp.moveaxis(split, axis, 1)
        return jnp.moveaxis(order(first, blocks), 1, axis).reshape(x.shape)


def exchange_on(call: ContextCall, tables: Tables) -> Exchange:
    me = lax.axis_index(call.axes).astype(jnp.int32) if call.axes else 0
    return Exchange(call, tables, me)
