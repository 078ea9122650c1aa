"""The decode kernels: few queries over long caches, at the speed of memory."""
