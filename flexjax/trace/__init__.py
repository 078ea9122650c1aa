"""Traces user code: a score_mod or mask_mod goes in, a program of scalar operations (ir/) and the captured arrays come out.

The room owns everything that knows jaxprs and user functions. It imports ir/, mod_tools/ and errors.py; it knows nothing of blocks, plans
and backends.

    trace_mod.py      the entry: calls the user's function on scalar tracers, refuses bad functions in a sentence
    lift_numpy.py     copies the function so that numpy arrays that it captured can be indexed by tracers
    lower_jaxpr.py    interprets the jaxpr once and builds the program
    equations.py      facts about one equation, and how to run it
    values.py         the values during that interpretation: JAX values, arrays of atoms, lazy arrays
    translation.py    what a lowering rule is given: protocols of the translation and of an equation
    primitives.py     which primitives of jax a mod may use, by how each is treated
    lower_call.py     the step for an equation that no rule covers: a Call, which runs it whole
    lower_rules.py    rules of primitives that are not elementwise: shapes, reductions, branches, short loops
    lower_special.py  rules of primitives that become several operations an element: bitcasts, cumlogsumexp
    lazy_rules.py     rules of primitives that rearrange elements of lazy arrays
    indexing.py       rules of dynamic_slice and gather
    closed_over.py    arrays that a function with its own derivative rule closes over
    derivative.py     the program of a score_mod's derivatives
"""
