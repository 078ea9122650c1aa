"""How key blocks travel between the devices of a split sequence, and how their gradients come back: XLA's collectives alone.

Everything over keys is packed into one array [B, blocks, tokens of a block, features], so that a round is one collective; the methods
"ring" and "all_to_all" send whole arrays. Gradients of keys travel in the score dtype and are added in a fixed order: the own ones first,
then those of each round; those of gathered keys in the order of the devices. XLA chooses the order of additions inside a collective such
as psum_scatter, so gradients of gathered keys go through all_to_all and are added here.
"""

import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.parallel.context_parallel import ContextCall, Tables
from flexjax.parallel.context_stages import Keys, token_axis

Array = jax.Array


class Part(typing.NamedTuple):
    """One of several equal parts of a shard: its number, int32, and how many key blocks each part has."""

    number: Array
    blocks: int


class Exchange(typing.NamedTuple):
    """The collectives of a call on one device.

    call     the static part of the call
    tables   of the call
    me       int32: the number of the device along the axes of the sequence
    """

    call: ContextCall
    tables: Tables
    me: Array | int

    @property
    def own_keys(self) -> Array:
        """int32 [blocks of each]: the numbers, in the sequence, of the key blocks that the device owns, padding included."""
        return self.tables.key_blocks[self.me]

    @property
    def own_queries(self) -> Array:
        """int32 [blocks of each]: the numbers, in the sequence, of the query blocks that the device owns, padding included."""
        return self.tables.query_blocks[self.me]

    def pack(self, arrays: Sequence[Array], slots: Array | None = None) -> Array:
        """Arrays over keys as one array [B, blocks, tokens of a block, features], the features of all heads and arrays joined.

        slots   int32: which of this device's key blocks to pack; None: all
        """
        axis, size = token_axis(self.call.plan), self.call.block_size[1]
        parts = []
        for x in arrays:
            blocks = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
            taken = blocks if slots is None else jnp.take(blocks, slots, axis=axis)
            first = jnp.moveaxis(taken, (axis, axis + 1), (1, 2))
            parts.append(first.reshape(*first.shape[:3], -1))
        return jnp.concatenate(parts, -1)

    def unpack(self, packed: Array, like: Sequence[Array]) -> list[Array]:
        """The inverse of `pack`: the arrays in `packed`, in the plan's layout, with the heads and dims of those of `like`, and as many
        tokens as `packed` has.
        """
        axis, found, at = token_axis(self.call.plan), [], 0
        for x in like:
            heads, dim = x.shape[3 - axis], x.shape[3]
            part = packed[..., at : at + heads * dim]
            at += heads * dim
            part = part.reshape(packed.shape[0], packed.shape[1] * packed.shape[2], heads, dim)
            found.append(part if axis == 1 else jnp.swapaxes(part, 1, 2))
        return found

    def keys(self, packed: Array, like: Keys, numbers: Array) -> Keys:
        """The Keys in `packed`, with the heads and dims of `like`, and stage (0, 0).

        packed    as `pack` makes it, of key, value and, if `like` has it, key_extra
        numbers   int32: those of the blocks in the sequence
        """
        arrays = self.unpack(packed, like.arrays)
        return Keys(arrays[0], arrays[1], arrays[2] if like.key_extra is not None else None, numbers)

    # ------------------------------------------------------------------ neighbours

    def shifted(self, x: Array, shift: int) -> Array:
        """The array x of the device that is `shift` places before this one along the axes of the sequence, cyclically; a negative shift
        counts the other way. A collective, which all devices call with the same shift.

        The axes are given to ppermute in the order of the mesh, because it numbers devices in that order whatever it is given.
        """
        names, sizes = zip(*self.call.mesh, strict=True)
        n, order = self.call.devices, [names.index(name) for name in self.call.axes]
        # in the order of the mesh, by number along the axes
        numbers = np.arange(n).reshape(sizes).transpose(order).ravel()
        return lax.ppermute(x, names, [(int(numbers[i]), int(numbers[(i + shift) % n])) for i in range(n)])

    def receive(self, own: Keys) -> Keys:
        """The key blocks that other devices send to this one, the rounds one after the other, as the Keys of stage (1, 0); their numbers
        are -1 where a message is filled up. A collective of the method "neighbours", which must have a round.

        own   all key blocks of this device
        """
        packed, numbers = [], []
        for shift, send, received in zip(self.call.shifts, self.tables.send, self.tables.received, strict=True):
            packed.append(self.shifted(self.pack(own.arrays, send[self.me]), shift))
            numbers.append(received[self.me])
        return self.keys(jnp.concatenate(packed, 1), own, jnp.concatenate(numbers))._replace(stage=(1, 0))

    def give_back(self, gradients: Sequence[Array]) -> list[list[Array]]:
        """Sends the gradients of received key blocks to their owners; a collective, the inverse of `receive`. The caller adds what
        arrives.

        gradients   of all received key blocks in the order of `receive`, in the score dtype: a list of arrays over keys in the plan's
                    layout

        Returns for each round, in the order of `call.shifts`, a list of arrays like `gradients`: those of this device's own key blocks in
        the round's array of `tables.send`. Past the end of a message they are zeros, because no query of the receiver sees the padding.
        """
        packed, at, found = self.pack(gradients), 0, []
        for shift, send in zip(self.call.shifts, self.tables.send, strict=True):
            width = send.shape[1]
            found.append(self.unpack(self.shifted(packed[:, at : at + width], -shift), gradients))
            at += width
        return found

    # ------------------------------------------------------------------ ring

    def from_previous(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays of the device before this one along the axes of the sequence, cyclically; a collective. They are not packed, because
        copies of whole shards take memory.
        """
        return [self.shifted(x, 1) for x in arrays]

    def visiting(self, arrays: Sequence[Array], step: Array | int, part: "Part | None" = None) -> Keys:
        """The arrays that are on this device after `step` steps of the ring, as Keys with the numbers of their blocks; sends nothing.

        arrays   key, value and, if the call has it, key_extra, of the device that is `step` places before this one
        part     which part of each shard travels around the ring; None: whole shards
        """
        numbers = self.tables.key_blocks[(self.me - step) % self.call.devices]
        if part is not None:
            numbers = lax.dynamic_slice_in_dim(numbers, part.number * part.blocks, part.blocks)
        return Keys(arrays[0], arrays[1], arrays[2] if len(arrays) == 3 else None, numbers, (0, step))

    def part_of(self, x: Array, part: "Part") -> Array:
        """The key blocks of `part` of x, an array over this device's keys in the plan's layout."""
        size = part.blocks * self.call.block_size[1]
        return lax.dynamic_slice_in_dim(x, part.number * size, size, token_axis(self.call.plan))

    def with_part(self, x: Array, part: "Part", new: Array) -> Array:
        """x, an array over this device's keys, with the key blocks of `part` replaced by `new`."""
        size = part.blocks * self.call.block_size[1]
        return lax.dynamic_update_slice_in_dim(x, new, part.number * size, token_axis(self.call.plan))

    # ------------------------------------------------------------------ all_gather

    def gather(self, own: Keys) -> Keys:
        """All key blocks of all devices, in the order of the sequence, padding last, as the Keys of stage (0, 0); a collective.

        own   the key blocks of this device
        """
        everything = self.in_order(self.all_gather(self.pack(own.arrays)), self.tables.key_blocks)
        return self.keys(everything, own, jnp.arange(everything.shape[1], dtype=jnp.int32))

    def all_gather(self, packed: Array) -> Array:
        """The packed blocks of all devices, device by device along axis 1; a collective. `packed` itself for a call on one device."""
        return lax.all_gather(packed, self.call.axes, axis=1, tiled=True) if self.call.axes else packed

    def in_order(self, packed: Array, blocks: Array) -> Array:
        """Blocks that lie device by device, in the order of the sequence, padding last.

        packed   an array whose axis 1 counts the blocks of all devices
        blocks   int32 [devices, each]: the numbers of the blocks of each device
        """
        flat = blocks.reshape(-1)
        places = jnp.zeros_like(flat).at[flat].set(jnp.arange(flat.shape[0], dtype=flat.dtype))
        return jnp.take(packed, places, axis=1)

    def by_device(self, packed: Array, blocks: Array) -> Array:
        """The inverse of `in_order`: blocks that lie in the order of the sequence, device by device.

        packed   an array whose axis 1 counts the blocks of all devices
        blocks   int32 [devices, each]: the numbers of the blocks of each device
        """
        return jnp.take(packed, blocks.reshape(-1), axis=1)

    def scatter_sums(self, gradients: Sequence[Array]) -> list[Array]:
        """The gradients of this device's keys, summed over the devices in their order, in the dtype of `gradients`; a collective.

        gradients   of all keys in the order of the sequence, the terms that this device computed
        """
        n = self.call.devices
        packed = self.by_device(self.pack(gradients), self.tables.key_blocks)
        if self.call.axes:
            packed = lax.all_to_all(packed, self.call.axes, split_axis=1, concat_axis=1, tiled=True)
        parts = packed.reshape(packed.shape[0], n, -1, *packed.shape[2:])
        total = parts[:, 0]
        for i in range(1, n):
            total = total + parts[:, i]
        return self.unpack(total, gradients)

    # ------------------------------------------------------------------ all_to_all

    def to_heads(self, x: Array, blocks: Array, size: int) -> Array:
        """Trades heads for tokens: gives each device all tokens of its part of the heads. A collective, which all devices of the
        sequence's axes call together.

        x        this device's tokens of all heads: an array over tokens in the plan's layout, or a row statistic [B, tokens, heads]
                 ([B, heads, tokens] for BNTH)
        blocks   int32 [devices, each]: the numbers, in the sequence, of each device's blocks, padding included
        size     tokens of a block

        The result has the axes and dtype of x, with `devices` times as many tokens, in the order of the sequence, padding last, and a
        `devices`-th of the heads: device i has the i-th run of them. The number of heads must be a multiple of the number of devices.
        On a call without axes only the blocks are put in order.
        """
        axis = token_axis(self.call.plan)
        if self.call.axes:
            x = lax.all_to_all(x, self.call.axes, split_axis=3 - axis, concat_axis=axis, tiled=True)
        return self._reordered(x, blocks, size, self.in_order)

    def to_tokens(self, x: Array, blocks: Array, size: int) -> Array:
        """Trades tokens for heads, the inverse of `to_heads`: gives each device all heads of its own tokens. A collective, which all
        devices of the sequence's axes call together.

        x        all tokens, in the order of the sequence, padding last, of this device's part of the heads: an array over tokens in the
                 plan's layout, or a row statistic, as `to_heads` returns them
        blocks   int32 [devices, each]: the numbers, in the sequence, of each device's blocks, padding included, as for `to_heads`
        size     tokens of a block

        The result has the axes and dtype of x, with the tokens of this device's blocks, in their order, and `devices` times as many
        heads. On a call without axes only the blocks are put back in the device's order.
        """
        axis = token_axis(self.call.plan)
        x = self._reordered(x, blocks, size, self.by_device)
        return (
            lax.all_to_all(x, self.call.axes, split_axis=axis, concat_axis=3 - axis, tiled=True)
            if self.call.axes
            else x
        )

    def _reordered(self, x: Array, blocks: Array, size: int, order: typing.Callable[[Array, Array], Array]) -> Array:
        """x with its blocks of `size` tokens in another order, for `to_heads` and `to_tokens`; the shape stays.

        x        an array over tokens, or a row statistic, in the plan's layout
        blocks   int32 [devices, each]: the numbers of the blocks of each device
        order    `in_order` (device by device to the order of the sequence) or `by_device` (back)
        """
        axis = token_axis(self.call.plan)
        split = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
        first = jnp.moveaxis(split, axis, 1)
        return jnp.moveaxis(order(first, blocks), 1, axis).reshape(x.shape)


def exchange_on(call: ContextCall, tables: Tables) -> Exchange:
    """The exchange of the device that this code runs on; its number is 0 for a call without axes."""
    me = lax.axis_index(call.axes).astype(jnp.int32) if call.axes else 0
    return Exchange(call, tables, me)
