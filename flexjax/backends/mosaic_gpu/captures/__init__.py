"""Gradients of the arrays that score_mod captured, as kernels of their own."""
