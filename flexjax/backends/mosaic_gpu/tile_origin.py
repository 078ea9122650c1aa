"""Where the tiles of a kernel lie: batch entry and head, and the positions of their rows and columns in the whole problem."""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.mosaic_gpu.kernel_parts import Ref
from flexjax.backends.mosaic_gpu.tile_values import Value
from flexjax.ir.origin import OriginLayout
from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class TileOrigin:
    """Where the rows of query and key lie in the whole problem (ir/origin.py), inside a kernel.

    layout       how many runs of which length queries and keys have, known at compile time
    query, key   [batch entries or 1, runs] int32 in global memory: the positions at which runs begin
    """

    layout: OriginLayout
    query: Ref
    key: Ref

    @classmethod
    def of(cls, plan: KernelPlan, refs: Sequence[Ref]) -> "TileOrigin | None":
        """The origin of the plan with its two tables, `refs` (of queries, of keys); None for a plan without an origin."""
        return None if plan.origin is None else cls(plan.origin, *refs)

    def offset(self, axis: str, batch: jax.typing.ArrayLike, start: jax.typing.ArrayLike | None) -> Value:
        """What to add to the numbers of the rows of a tile to get positions, an int32 scalar. A tile belongs to the run
        of its first row, the last run if it lies past the end.

        axis    "q" or "kv"
        batch   number of the batch entry, not read where all entries have the same positions
        start   number of the first row of the tile; None where the axis has one run, for any tile
        """
        table, run = (self.query, self.layout.query_run) if axis == "q" else (self.key, self.layout.key_run)
        entry = batch if self.layout.rows > 1 else 0
        if start is None:
            return table[entry, 0]
        # a tile that lies past the end counts on from the last run
        number = jnp.minimum(lax.div(jnp.asarray(start, jnp.int32), np.int32(run)), np.int32(table.shape[1] - 1))
        return table[entry, number] - number * np.int32(run)

    def runs(self, axis: str) -> int:
        """The number of runs of queries (`axis` "q") or keys ("kv")."""
        return self.layout.query_runs if axis == "q" else self.layout.key_runs


class Place(typing.NamedTuple):
    """Where tiles lie.

    batch    number of the batch entry
    head     number of the query head; in decode kernels, whose rows are the packed query heads of one key head, of that key head
    origin   the origin of the call, None without one
    """

    batch: jax.typing.ArrayLike
    head: jax.typing.ArrayLike
    origin: TileOrigin | None = None
