"""Pallas Mosaic GPU kernels for Hopper. Kernels are imported when first run: older jax lacks what they import."""

from flexjax.backends.mosaic_gpu.support import BACKEND as BACKEND
