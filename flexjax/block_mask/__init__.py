"""Block masks: which blocks of the attention matrix a kernel visits, and in which of them it must apply the mask.

The room owns BlockMask and everything that makes, selects, transposes or draws one. It knows no plans or backends.
"""
