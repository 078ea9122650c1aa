"""What kernels are made of: registers, shared memory, copies, products."""
