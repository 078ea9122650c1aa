"""The backward kernels: dQ, dK and dV, and gradients of pair biases."""
