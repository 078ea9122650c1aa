"""The kernels of forward mode: tangents of out and lse, by the launch and the machine of the forward kernels."""
