r"""Head dims above 256: a cluster of two CTAs shares every tile, and each CTA has half of the columns of all operands.

    CTA 0   Q[:, :D/2] K[:, :D/2]^T  \\            P  -> out[:, :E/2] += P V[:, :E/2]
                                       + = S
    CTA 1   Q[:, D/2:] K[:, D/2:]^T  /            P  -> out[:, E/2:] += P V[:, E/2:]

An accumulator of 64 x 512 float32 takes all registers of two warpgroups; one half of it is what a warpgroup has at head
dim 256. So the kernels stay those for head dims up to 256, with half tiles. Tiles that are contracted over a head dim
(S, and dP in the backward pass) are partial sums, which both CTAs send to each other and add (partial_sums.py). a + b =
b + a, so both have the same bits. Nothing here imports Mosaic.
"""

import typing

from flexjax.backends.mosaic_gpu.machine.shared_memory import ClusterBarriers, ClusterTiles, Description, Part
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan

COLUMNS = "columns"  # name of the axis of a cluster over its CTAs, for `lax.axis_index`
WIDEST_CTA = 256  # the largest head dim of a CTA that has all columns
CTAS = 2  # CTAs of a cluster that shares columns


def ctas_of(plan: KernelPlan) -> int:
    return CTAS if max(plan.head_dim + plan.extra_dim, plan.value_dim) > WIDEST_CTA else 1


def columns_of(dim: int, ctas: int) -> int:
    """Columns of a CTA, before they are rounded up to what the kernels take."""
    return cdiv(dim, ctas)


class Exchange(typing.NamedTuple, typing.Generic[Part]):
    """What the warpgroups of a CTA need to exchange partial sums with those of the same number in the other CTA."""

    tiles: Part  # one for each exchanging warpgroup, which its partner writes
    arrived: Part  # [groups, 4] int32, two mbarriers for each tile (partial_sums.py); simulator: both CTAs have written
    read: Part | None  # in the simulator alone: both CTAs have read


def exchange_scratch(ctas: int, groups: int, shape: tuple[int, int]) -> Exchange[Description] | None:
    """The shared memory in which `groups` warpgroups of each CTA exchange partial sums of `shape`; None for one CTA."""
    if ctas == 1:
        return None
    return Exchange[Description](
        ClusterTiles(groups, shape), ClusterBarriers(groups), ClusterBarriers(groups, in_simulator=True)
    )
