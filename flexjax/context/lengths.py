"""Lengths of a call with `context=`: which rows of its permuted arrays exist, and the mask that hides the others.

    row r of query, batch entry b, exists   where layout.positions[r] < query_seq_lengths[b]
    row r of key, batch entry b, exists     where layout.key_positions[r] < key_value_seq_lengths[b]

Lengths count tokens in the order of the sequence. A device's blocks lie anywhere in it, so the kernels get no lengths:
the mask hides what does not exist. The slots hold 0 before keys travel, because 0 * NaN is NaN.
"""

import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flexjax.call.arguments import Arguments
from flexjax.call.checks import clipped_lengths
from flexjax.context.layout import ContextLayout, Side
from flexjax.ir.origin import OriginTable
from flexjax.plan.kernel_plan import Lengths, Results
from flexjax.types import MaskMod

Array = jax.Array

OVER_QUERIES = ("query", "query_extra")  # the other arguments that lengths cut are over keys


class ExistingRows(typing.NamedTuple):
    """The rows of a call that exist."""

    lengths: Lengths  # of queries and of keys, int32 [B] each; None on a side where all tokens exist
    layout: ContextLayout
    axes: tuple[str, ...]  # of the sequence if the arrays are those of one device; () for global arrays
    dim: int  # of the tokens in query, key, value and the results, 1 or 2

    @classmethod
    def of(
        cls, arguments: Arguments, batch: int, layout: ContextLayout, axes: tuple[str, ...], dim: int
    ) -> "ExistingRows | None":
        """The existing rows of a call with these arguments; None without lengths."""
        lengths = arguments.query_seq_lengths, arguments.key_value_seq_lengths
        found = clipped_lengths(*lengths, batch, layout.q_len, layout.kv_len)
        return None if found is None else cls(found, layout, axes, dim)

    def cut(self, arrays: Mapping[str, Array | None]) -> dict[str, Array | None]:
        """The arguments `arrays`, by name, with 0 in the rows that do not exist; None stays None."""
        found = dict(arrays)
        for name, x in arrays.items():
            side: Side = "query" if name in OVER_QUERIES else "key"
            rows = self.layout.padded(side) // (self.layout.devices if self.axes else 1)
            # later checks raise for another rank or length
            if x is not None and x.ndim == 4 and x.shape[self.dim] == rows:
                found[name] = self._where(x, side, 0.0)
        return found

    def results(self, found: Results, lse_without_keys: float) -> Results:
        """The results with those of no keys in rows of queries that do not exist, padding included."""
        low, top = float("-inf"), found.max_scores
        return Results(
            self._where(found.out, "query", 0.0),
            self._where(found.lse, "query", lse_without_keys),
            None if top is None else self._where(top, "query", low),
            expectations=None if found.expectations is None else self._where(found.expectations, "query", 0.0),
        )

    def mask_mod(self, origin: OriginTable) -> MaskMod:
        """The mask mod that is True where both the query and the key exist, at positions in the whole sequence."""
        queries, keys = self.lengths
        # the call's first batch entry is number origin.batch of the whole problem
        entry: Callable[[Array], Array] = lambda b: b if origin.batch is None else b - origin.batch

        def exists(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
            on = jnp.asarray(True)
            on = on if queries is None else on & (q_idx < queries[entry(b)])
            return on if keys is None else on & (kv_idx < keys[entry(b)])

        return exists

    def _where(self, x: Array, side: Side, other: float) -> Array:
        """x, [B, .., tokens along `dim`, ..], with `other` in rows that do not exist. A batch of 1 becomes B."""
        ends = self.lengths.query if side == "query" else self.lengths.key
        if ends is None:
            return x
        positions = self.layout.positions if side == "query" else self.layout.key_positions
        rows = jnp.asarray(positions, jnp.int32)
        if self.axes:
            rows = lax.dynamic_slice_in_dim(rows, lax.axis_index(self.axes) * x.shape[self.dim], x.shape[self.dim])
        across = [1] * x.ndim
        across[self.dim] = rows.shape[0]
        where = jax.typeof(x).sharding
        explicit = AxisType.Explicit in where.mesh.axis_types
        if explicit:  # jax does not combine arrays that are split otherwise
            ends = typing.cast(Array, jax.sharding.reshard(ends, NamedSharding(where.mesh, PartitionSpec(None))))
        rows = rows.reshape(across)
        on = (rows >= 0) & (rows < ends.reshape(-1, *[1] * (x.ndim - 1)))
        if explicit:
            parts = [part if dim in (0, self.dim) else None for dim, part in enumerate(where.spec)]
            on = jax.sharding.reshard(on, NamedSharding(where.mesh, PartitionSpec(*parts)))
        return jnp.where(on, x, jnp.asarray(other, x.dtype))
