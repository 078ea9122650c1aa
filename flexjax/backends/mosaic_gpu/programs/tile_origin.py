"""Where the tiles of a kernel lie: batch entry and head, and the positions of rows and columns in the whole problem."""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref
from flexjax.backends.mosaic_gpu.programs.tile_values import Value
from flexjax.ir.origin import OriginLayout
from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class TileOrigin:
    """Where the rows of query and key lie in the whole problem (ir/origin.py), inside a kernel."""

    layout: OriginLayout  # how many runs of which length queries and keys have
    query: Ref  # [batch entries or 1, runs] int32 in global memory: the positions at which runs begin
    key: Ref  # likewise

    @classmethod
    def of(cls, plan: KernelPlan, refs: Sequence[Ref]) -> "TileOrigin | None":
        """The origin of the plan with its two tables, `refs` (of queries, of keys)."""
        return None if plan.origin is None else cls(plan.origin, *refs)

    def offset(self, axis: str, batch: jax.typing.ArrayLike, start: jax.typing.ArrayLike | None) -> Value:
        """Positions minus row numbers in the tile from `start` on (None: in any tile of one run), an int32."""
        table, run = (self.query, self.layout.query_run) if axis == "q" else (self.key, self.layout.key_run)
        entry = batch if self.layout.rows > 1 else 0
        if start is None:
            return table[entry, 0]
        # a tile that lies past the end counts on from the last run
        number = jnp.minimum(lax.div(jnp.asarray(start, jnp.int32), np.int32(run)), np.int32(table.shape[1] - 1))
        return table[entry, number] - number * np.int32(run)

    def runs(self, axis: str) -> int:
        return self.layout.query_runs if axis == "q" else self.layout.key_runs


class Place(typing.NamedTuple):
    """Where tiles lie."""

    batch: jax.typing.ArrayLike
    head: jax.typing.ArrayLike  # number of the query head; in decode kernels of the key head
    origin: TileOrigin | None = None
