"""The passes of attention as JAX primitives: their rules, their batching, and the backend that runs them."""
