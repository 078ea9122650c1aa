"""Block masks: which blocks of the attention matrix a kernel visits, and in which of them it must apply the mask.

The room owns BlockMask and everything that makes, selects, transposes or draws one. It imports trace/, analysis/, ir/,
partition.py and files of types and errors; it knows nothing of plans and backends.

    block_mask.py       BlockMask, the class of the user, and create_block_mask
    parts.py            the fields of a block mask
    build.py            block masks from a mask_mod and from the user's lists
    classify.py         the class of every block: empty, partial or full
    traced_lists.py     the lists of a mask whose captured arrays are traced, as a primitive
    transpose.py        between classes and lists, and from lists of key blocks to lists of query blocks
    host_or_program.py  operations on lists, by numpy where the lists are known, else in the caller's program
    slice.py            block_mask[b, h, q_blocks]
    picture.py          text, HTML and matplotlib pictures
"""
