"""The plan: everything static about one attention call, in the form that backends read.

The room owns the plan, its operands, and what is derived from a plan before a backend is chosen. It imports block_mask/,
trace/, analysis/, ir/, types.py and errors.py; backends import it.

    kernel_plan.py      KernelPlan (static, hashable), Operands (arrays), Results and Gradients
    known_lists.py      block lists whose numbers are known while a call is traced
    problem.py          Problem: a plan with the derivative and the choice of backends, the parameter of the JAX primitives
    float8.py           a call on float8 as one in 16 bits, for kernels that do not multiply float8
    precision.py        the precision of products of float32, by its name in a plan
    lengths.py          which queries and keys exist
    lengths_as_mask.py  lengths as a block mask, for kernels that know no lengths
    mask_blocks.py      a plan and block lists with another block size, for kernels whose tiles do not fit the mask's blocks
    pages.py            keys and values in pages: the size of their key blocks, and the same tokens contiguous
    pack_heads.py       the query heads of a group as rows of a tile, for calls with few queries
    join_heads.py       all heads as one, for kernels that would have to move the heads of a cache to read them
    residues.py         a call whose mask tells residues of tokens apart, as one with more heads and fewer tokens
    tuned.py            measured tile sizes: the user's file, the tables in tuned/, and the lookup in both
"""
