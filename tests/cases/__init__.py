"""The tables of the tests, all in this folder: here is where a case is added.

    a call that any backend might get wrong     a row in calls.py; its mods, by name, in mods.py
    a call to compile and not to run            a row in edges.py: head dims, lengths, groups, options at their ends
    a mod or mask that is hard to trace         a function in odd_mods.py
    a mask for hypothesis to combine            a row in random_masks.py
    scores too large to scale                   a number in large_scores.py
    a call to transform (vmap, jvp, export)     a row of the table in small.py
    a call on a mesh                            on_mesh.py
    a forward kernel of Hopper in simulation    a row in hopper_forward.py
    a backward kernel of Hopper in simulation   a row in hopper_backward.py, which has a table for each kind of captured array

Rows of calls.py reach every backend, dtype and layout, the kernels compiled ahead of time, and the GPU checks of tools/device
without more: the test files go over the table. A row marked `slow` is left to the slow run. `case.py` says what a row is.

`on_hopper.py` makes plans and operands of the rows of Hopper kernels, `tests/backends/mosaic_tpu/plans.py` of the rows of
calls.py; both read block lists off a dense mask (`dense_masks.py`).
"""

from tests.cases.calls import CASES
from tests.cases.case import Block, Capture, Case, documents, integers, normal, rounded, values

__all__ = ["CASES", "Block", "Capture", "Case", "documents", "integers", "normal", "rounded", "values"]
