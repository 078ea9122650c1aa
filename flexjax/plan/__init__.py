"""The plan: everything static about one attention call, in the form that backends read.

The room owns the plan, its operands, and what is derived from a plan before a backend is chosen. It imports block_mask/,
trace/, ir/, types.py and errors.py; backends import it.

    kernel_plan.py  KernelPlan (static, hashable), Operands (arrays), Results and Gradients
    problem.py      Problem: a plan with the derivative and the choice of backends, the parameter of the JAX primitives
    mask_blocks.py  a plan and block lists with another block size, for kernels whose tiles do not fit the mask's blocks
    tuned.py        measured tile sizes: the user's file, the tables in tuned/, and the lookup in both
"""
