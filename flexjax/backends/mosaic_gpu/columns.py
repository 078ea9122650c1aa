"""Head dims above 256: a cluster of two CTAs shares every tile, and each CTA has one half of the columns of all operands.

    CTA 0   Q[:, :D/2] K[:, :D/2]^T  \\            P  -> out[:, :E/2] += P V[:, :E/2]
                                       + = S
    CTA 1   Q[:, D/2:] K[:, D/2:]^T  /            P  -> out[:, E/2:] += P V[:, E/2:]

An accumulator of 64 x 512 float32 takes all registers of two warpgroups; one half of it is what a warpgroup has at head dim 256. So
the kernels stay those for head dims up to 256, with half tiles. What the CTAs have to tell each other are tiles that are contracted
over a head dim (S, and dP in the backward pass): each CTA has a partial sum. Both send theirs to the other and add (partial_sums.py),
and a + b = b + a, so both have the same bits. After that both compute the same P and dS, and products with these have columns of their
own again.

Nothing here imports Mosaic, because tiles are also chosen where there is no GPU and an older jax.
"""

import typing

from flexjax.backends.mosaic_gpu.shared_memory import ClusterBarriers, ClusterTiles, Description, Part
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan

COLUMNS = "columns"
"""Name of the axis of a cluster over its CTAs, for `lax.axis_index`."""
WIDEST_CTA = 256
"""The largest head dim of a CTA that has all columns."""
CTAS = 2
"""CTAs of a cluster that shares columns."""


def ctas_of(plan: KernelPlan) -> int:
    """How many CTAs share the columns of a tile: CTAS where the head dim of queries and keys, extra features included, or that of
    values is above WIDEST_CTA, else 1.
    """
    return CTAS if max(plan.head_dim + plan.extra_dim, plan.value_dim) > WIDEST_CTA else 1


def columns_of(dim: int, ctas: int) -> int:
    """Columns of a CTA, before they are rounded up to what the kernels take: the head dim `dim` divided by `ctas`, the
    number of CTAs that share them, rounded up.
    """
    return cdiv(dim, ctas)


class Exchange(typing.NamedTuple, typing.Generic[Part]):
    """What the warpgroups of a CTA that exchange partial sums need. The partner of a warpgroup is the one with the same
    number in the other CTA.

    tiles     one tile for each exchanging warpgroup, which its partner writes
    arrived   on the device [groups, 4] int32, two mbarriers for each tile (partial_sums.py); in the simulator barriers
              of the cluster: both CTAs have written
    read      barriers of the cluster, in the simulator alone: both CTAs have read
    """

    tiles: Part
    arrived: Part
    read: Part | None


def exchange_scratch(ctas: int, groups: int, shape: tuple[int, int], interpret: bool) -> Exchange[Description] | None:
    """The shared memory in which the warpgroups of `ctas` CTAs exchange partial sums; None for one CTA, which exchanges
    nothing.

    groups      number of exchanging warpgroups of a CTA
    shape       (rows, columns) of their tiles
    interpret   whether the kernel runs in the simulator, which needs the barriers `read`
    """
    if ctas == 1:
        return None
    barriers = ClusterBarriers(groups)
    return Exchange[Description](ClusterTiles(groups, shape), barriers, barriers if interpret else None)
