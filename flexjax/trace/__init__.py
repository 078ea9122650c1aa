"""Traces user code: a score_mod or mask_mod goes in, a program of scalars (ir/) and captured arrays come out.

The room owns everything that knows jaxprs and user functions. It knows nothing of blocks, plans and backends.
trace_mod.py is the entry; lower_jaxpr.py interprets the jaxpr.
"""
