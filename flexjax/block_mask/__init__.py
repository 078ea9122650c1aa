"""Block masks: which blocks of the attention matrix a kernel visits, and in which of them it must apply the mask.

The room owns BlockMask and everything that makes, selects, transposes or draws one. It imports trace/, analysis/, ir/ and
errors.py; it knows nothing of plans and backends.

    block_mask.py  BlockMask, the class of the user, and create_block_mask
    parts.py       the fields of a block mask
    build.py       block masks from a mask_mod, from lists and from classes
    classify.py    the class of every block: empty, partial or full
    transpose.py   between classes and lists, and from lists of key blocks to lists of query blocks
    slice.py       block_mask[b, h, q_blocks]
    picture.py     text, HTML and matplotlib pictures
"""
