"""What is known about a program's results before it runs, from the program alone or block by block.

The room owns interval analysis and the recognition of simple programs. It imports ir/; it knows nothing of block masks, plans
and backends, which ask it.

    intervals.py        the truth of a mask in every block, by interval arithmetic
    block_grid.py       the blocks for which that is computed
    interval_values.py  an interval or a truth value per block, and the facts that make an answer exact
    interval_rules.py   intervals of results from those of operands
    interval_truth.py   truth of comparisons and of logic
    interval_loads.py   the smallest and largest element that a block can read of a captured array
    interval_floats.py  rounding to floating types narrower than float32
    bounds.py           the range of a program's results over the whole attention matrix, whatever the score is
    large_scores.py     whether scores may be too large to scale before the maximum is subtracted
    patterns.py         pattern matches on programs: "adds to the score", "causal-like"
"""
