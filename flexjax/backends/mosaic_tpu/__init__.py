"""Pallas kernels for TPUs: see lab/notes/tpu.md."""
