"""How kernels are lowered: by shortcuts, one thread at a time, compiled ahead."""
