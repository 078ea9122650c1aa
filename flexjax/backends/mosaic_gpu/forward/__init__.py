"""The forward kernels: scores, softmax and output of query tiles."""
