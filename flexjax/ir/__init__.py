"""Programs: the intermediate representation of a traced mod, and everything that can be done to it without user code.

The room owns what a program is, how one is built, rewritten, checked and evaluated. It imports no other room, so that every
other room can read programs.

    program.py           what a program is: atoms, operations, loads, calls, axes, load classes
    operations.py        the names that an operation may have
    builder.py           makes programs: shares equal values, folds what is known, tracks axes, linear forms and ranges
    fold_operands.py     operations that equal one of their operands, and linear forms of results
    literals.py          literals, and operations whose operands are all literals
    ranges.py            ranges of integers over the whole attention matrix
    simplify.py          selects between products become products with a select
    rewrite.py           programs with other names, captures or results
    replay.py            a program built again from its own steps, with other inputs
    fold_vmap.py         the program of a call under vmap: the mapped axis joins the batch
    split_axes.py        the program of one share of the batch and heads, for meshes
    verify.py            the rules that a legal program keeps
    evaluate.py          programs on tiles of the attention matrix, for every backend
    evaluate_scalars.py  programs at one position, as the user's function was
"""
