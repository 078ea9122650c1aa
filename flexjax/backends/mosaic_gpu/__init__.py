"""Pallas Mosaic GPU kernels: WGMMA for Hopper, mma.sync for compute capability 8.x, 10.x and 12.x, tcgen05 for 10.x.

Kernels are imported when first run, because older jax lacks what they import. No kernel of this folder waits for a CTA
that may not have started, because such a wait can hang the GPU. CTAs wait for each other in one kernel, the fused
backward kernel; machine/dq_order.py says why each awaited CTA has started.
"""

from flexjax.backends.mosaic_gpu.support import BACKEND as BACKEND
