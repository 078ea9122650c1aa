"""Programs: the intermediate representation of a traced mod, and everything that can be done to it without user code.

The room owns what a program is, how one is built, rewritten, checked and evaluated. Beside the files types.py and errors.py
it imports nothing of the package, so that every other room can read programs.

    program.py           what a program is: atoms, operations, loads, calls, axes, load classes
    linear.py            linear forms: integers that are affine in b, h, q and kv
    operations.py        the names that an operation may have
    builder.py           makes programs: shares equal values, folds what is known, tracks axes, linear forms and ranges
    fold_rules.py        operations that equal one of their operands, and linear forms of results
    literals.py          literals, and operations whose operands are all literals
    ranges.py            ranges of integers over the whole attention matrix
    simplify.py          selects between products become products with a select
    rewrite.py           programs with other names, captures or results
    replay.py            a program built again from its own steps, with other inputs
    cheaper_comparisons.py  comparisons of a mask with less to compute for each entry (q, kv)
    single_precision.py  programs of a score_mod in float32 where the user's function computes in float64
    fold_vmap.py         the program of a call under vmap: the mapped axis joins the batch
    fold_heads.py        the program of a call whose query heads of one key head are packed into rows
    split_axes.py        the program of one share of the batch and heads, for meshes
    origin.py            where the arrays of a call lie in the whole problem, and programs with those batch and head indices
    verify.py            the rules that a legal program keeps
    evaluate.py          programs on tiles of the attention matrix, for every backend
    evaluate_rank4.py    evaluation on arrays [b, h, q, kv], shared by tiles of backends
    evaluate_scalars.py  programs at one position, as the user's function was
"""
