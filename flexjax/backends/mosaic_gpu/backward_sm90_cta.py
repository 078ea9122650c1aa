"""What the CTAs of the backward kernels on Hopper share: how they compute tiles and their products."""

import dataclasses

from flexjax.backends.mosaic_gpu.backward_common import Products
from flexjax.backends.mosaic_gpu.backward_tile_math import TileMath
from flexjax.backends.mosaic_gpu.float_parts import parts_of


@dataclasses.dataclass(frozen=True)
class TileCta:
    """What the CTAs of the backward kernels share: how they compute tiles and their products.

    math   how a tile's P and dS are computed
    """

    math: TileMath

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs in the simulator."""
        return self.math.plan.options.interpret

    @property
    def parts(self) -> int:
        """Parts of an operand (float_parts.py)."""
        return parts_of(self.math.plan)

    @property
    def products(self) -> Products:
        """How products of tiles are computed: by WGMMA, or by dots in the simulator."""
        return Products(self.interpret, self.parts)
