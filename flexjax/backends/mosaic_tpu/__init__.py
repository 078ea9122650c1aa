"""Pallas kernels for TPUs: see NOTES.md."""
