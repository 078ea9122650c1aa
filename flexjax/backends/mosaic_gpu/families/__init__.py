"""Which kernels run a call: what each family of cards refuses, chooses and launches."""
