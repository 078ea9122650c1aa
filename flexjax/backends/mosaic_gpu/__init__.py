"""Pallas Mosaic GPU kernels for Hopper. Kernels are imported when first run: older jax lacks what they import.

No kernel of this folder waits for a CTA that may not have started: dq_order.py says why that would hang a GPU, and how the one
kernel whose CTAs wait for each other keeps to it.
"""

from flexjax.backends.mosaic_gpu.support import BACKEND as BACKEND
